"""What users may set, checked in one place: bad values are refused at once, by name and range."""

from __future__ import annotations

import io
import math
import operator
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from typing import Any, Literal

__all__ = [
    "LONGEST_TENANT",
    "BatchingOptions",
    "Device",
    "Devices",
    "FaultOptions",
    "SharingOptions",
    "WorkerOptions",
    "check_batch",
    "check_count",
    "check_overlap",
    "check_priority",
    "check_seconds",
    "check_tenant",
    "check_timeout",
    "is_sequence",
]

Device = int | str
Devices = Sequence[Device] | Literal["auto"] | None
StartMethod = Literal["spawn", "fork", "forkserver"]

#: Seconds; some thirty years. What the operating system can wait for is not much more.
_LONGEST = 1e9

#: What any side can read and keep; both arbitrary.
_MOST_PRIORITY = 1_000_000_000
LONGEST_TENANT = 256

_START_METHODS = ("spawn", "fork", "forkserver")
#: What CUDA_VISIBLE_DEVICES takes: indices, GPU or MIG identifiers, several with commas between.
_DEVICE_NAME = re.compile(r"(cuda:)?\d+(,\d+)*|(GPU|MIG)-[\w/-]+(,(GPU|MIG)-[\w/-]+)*|cpu")


#: What can be iterated over, and is a single item nevertheless.
_SINGLE = (str, bytes, bytearray, memoryview, Mapping, io.IOBase, type)
#: What version 0.1.2 took for the items of such a batch.
_PARTS: dict[type, str] = {str: "characters", bytes: "byte values", dict: "keys"}


@dataclass(frozen=True, slots=True)
class BatchingOptions:
    """How calls are batched.

    Attributes:
        batch_size: the most items of one model invocation.
        max_latency: the longest that an item may wait for company while a worker is free, seconds.
        max_pending: the most items that may wait for a worker; None sets no bound.
        max_batch_cost: the most that a batch may cost, its items times the longest of them; an item
            that is beyond it is computed alone. None sets no bound.
        tenant_weights: relative weight per tenant (default 1).
    """

    batch_size: int
    max_latency: float
    max_pending: int | None = None
    max_batch_cost: float | None = None
    tenant_weights: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_count("batch_size", self.batch_size)
        check_seconds("max_latency", self.max_latency, zero=True)
        if self.max_pending is not None:
            check_count("max_pending", self.max_pending, alternatives="or None for no bound")
        if self.max_batch_cost is not None:
            _check_positive("max_batch_cost", self.max_batch_cost, " or None for no bound")
        if not isinstance(self.tenant_weights, Mapping):
            raise TypeError(f"tenant_weights must be a dict, not {self.tenant_weights!r}")
        for tenant, weight in self.tenant_weights.items():
            check_tenant(tenant)
            _check_positive(f"the weight of tenant {tenant!r}", weight)


@dataclass(frozen=True, slots=True)
class FaultOptions:
    """What is done about faults.

    Attributes:
        retry: whether anything may be computed twice. False for models with side effects.
        max_attempts: worker crashes that an item may be involved in before it fails.
        isolate_errors: whether a batch on which the model raises is run again in smaller parts, so
            that only those calls fail whose own items it raises on.
        batch_timeout: how long a worker may compute one batch, seconds; "auto" learns it, and None
            sets no bound.
        start_timeout: how long a worker may take to load its model, seconds; likewise.
        max_restarts: how often in a row a worker is started again quickly that was lost while it
            started or had nothing to do. Then it is tried seldom, for ever.
        restart_window: how long a worker has to live for the row to end, seconds; it also ends when
            the worker has computed a batch.
    """

    retry: bool = True
    max_attempts: int = 3
    isolate_errors: bool = True
    batch_timeout: float | Literal["auto"] | None = "auto"
    start_timeout: float | Literal["auto"] | None = "auto"
    max_restarts: int = 10
    restart_window: float = 60.0

    def __post_init__(self) -> None:
        for name in ("retry", "isolate_errors"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be True or False, not {getattr(self, name)!r}")
        check_count("max_attempts", self.max_attempts)
        for name in ("batch_timeout", "start_timeout"):
            if getattr(self, name) != "auto":
                check_seconds(name, getattr(self, name), none=True, auto=True)
        check_count("max_restarts", self.max_restarts, least=0)
        check_seconds("restart_window", self.restart_window)


@dataclass(frozen=True, slots=True)
class SharingOptions:
    """Whether the same item is computed once for several callers.

    Attributes:
        deduplicate: whether those are answered together who ask for it while it is in flight.
        cache_size: for how many items the results are kept for later callers; 0 keeps none, and
            more includes ``deduplicate``.
        cache_ttl: how long they are kept, seconds; None for as long as there is room.
    """

    deduplicate: bool = False
    cache_size: int = 0
    cache_ttl: float | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.deduplicate, bool):
            raise TypeError(f"deduplicate must be True or False, not {self.deduplicate!r}")
        check_count("cache_size", self.cache_size, least=0)
        check_seconds("cache_ttl", self.cache_ttl, none=True)
        if self.cache_ttl is not None and not self.cache_size:
            raise ValueError("cache_ttl is of no use without a cache; set cache_size, too")

    @property
    def is_on(self) -> bool:
        return self.deduplicate or self.cache_size > 0


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """How worker processes are placed and started.

    Attributes:
        worker_num: the number of worker processes.
        cuda_devices: worker i gets ``cuda_devices[i % len]``; "auto" gives several workers all
            visible GPUs in turn, None leaves the devices alone.
        model_init_args: positional arguments of ``init_model``.
        model_init_kwargs: keyword arguments of ``init_model``.
        mp_start_method: how processes are started; ``spawn`` is the one that is safe with threads.
        cpu_threads: numeric threads per worker; "auto" shares the cores out, None leaves it alone.
        shared_memory_limit: the most memory for large items and results, bytes; None for a quarter
            of the machine's, 0 for none: then they go through pipes.
    """

    worker_num: int = 1
    cuda_devices: Devices = None
    model_init_args: Sequence[Any] | None = None
    model_init_kwargs: Mapping[str, Any] | None = None
    mp_start_method: str = "spawn"
    cpu_threads: int | Literal["auto"] | None = "auto"
    shared_memory_limit: int | None = None

    def __post_init__(self) -> None:
        check_count("worker_num", self.worker_num)
        _check_devices(self.cuda_devices)
        if self.model_init_args is not None and not is_sequence(self.model_init_args):
            raise TypeError(
                f"model_init_args must be a list or tuple, not {self.model_init_args!r}"
            )
        if self.model_init_kwargs is not None and not isinstance(self.model_init_kwargs, Mapping):
            raise TypeError(f"model_init_kwargs must be a dict, not {self.model_init_kwargs!r}")
        if self.mp_start_method not in _START_METHODS:
            raise ValueError(
                f"mp_start_method must be one of {', '.join(_START_METHODS)}, "
                f"not {self.mp_start_method!r}"
            )
        if self.cpu_threads is not None and self.cpu_threads != "auto":
            check_count("cpu_threads", self.cpu_threads, alternatives='"auto" or None')
        if self.shared_memory_limit is not None:
            check_count(
                "shared_memory_limit",
                self.shared_memory_limit,
                alternatives="in bytes, or None for a quarter of the machine's memory",
                least=0,
            )


def check_seconds(
    name: str, value: object, *, zero: bool = False, none: bool = False, auto: bool = False
) -> float | None:
    """Refuse what is no finite number of seconds.

    Args:
        zero: whether 0 is in range.
        none: whether None ("no limit") is.
        auto: whether "auto" would be, too, for the message.
    """
    if value is None and none:
        return None
    allowed = "at least 0" if zero else "above 0"
    allowed += f" and at most {_LONGEST:.0e}" + (", or None for no limit" if none else "")
    allowed += ', or "auto"' if auto else ""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number of seconds, {allowed}; not {value!r}")
    if not 0 <= value <= _LONGEST or (value == 0 and not zero):
        raise ValueError(f"{name} must be a number of seconds, {allowed}; not {value!r}")
    return float(value)


def check_batch(batch: object) -> Sequence[Any]:
    """The items in order, of a sequence or of anything else that yields them.

    Raises:
        TypeError: it is a single item: a string (the classic mistake), bytes, a dict, a number.
        Exception: what an iterator raises.
    """
    if type(batch) is list or is_sequence(batch):
        return batch  # type: ignore[return-value]
    # Something without a length, and no iterator, may be a record whose fields are iterated over.
    is_several = isinstance(batch, Iterator) or (
        isinstance(batch, Iterable) and isinstance(batch, Sized)
    )
    if is_several and not isinstance(batch, _SINGLE):
        return list(batch)  # type: ignore[call-overload, no-any-return]
    parts = _PARTS.get(type(batch))
    raise TypeError(
        f"a batch must be a list of items, not {type(batch).__name__}; "
        "put a single item into a list: [item]"
        + (f", or pass list(...) of it, whose items are its {parts}" if parts else "")
    )


def check_count(name: str, value: object, *, alternatives: str = "", least: int = 1) -> None:
    """Refuse what is no whole number of at least ``least``."""
    wanted = f"{name} must be a whole number of at least {least}" + (
        f", {alternatives}" if alternatives else ""
    )
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"{wanted}; not {value!r}") from None
    if number < least:
        raise ValueError(f"{wanted}; not {value!r}")


def check_overlap(value: object) -> bool | Literal["auto"]:
    """Whether a new worker starts before the old one ends."""
    if isinstance(value, bool):
        return value
    if value != "auto":
        raise ValueError(f'overlap must be True, False or "auto"; not {value!r}')
    return "auto"


def check_priority(value: object) -> int:
    """A whole number of any sign; the higher goes first."""
    try:
        if isinstance(value, bool):
            raise TypeError
        priority = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(
            f"priority must be a whole number, the higher the sooner; not {value!r}"
        ) from None
    if not -_MOST_PRIORITY <= priority <= _MOST_PRIORITY:
        raise ValueError(f"priority must be at most {_MOST_PRIORITY} from 0; not {value!r:.40}")
    return priority


def check_tenant(value: object) -> str:
    """The name of a tenant; the empty one is that of all who name none."""
    if not isinstance(value, str):
        raise TypeError(f"tenant must be a string, such as a customer's name; not {value!r}")
    if len(value) > LONGEST_TENANT:
        raise ValueError(
            f"tenant must have at most {LONGEST_TENANT} characters; not {len(value)}: {value!r:.40}"
        )
    return value


def _check_positive(name: str, value: object, alternatives: str = "") -> None:
    wanted = f"{name} must be a finite number above 0{alternatives}; not {value!r}"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(wanted)
    if not 0 < value < math.inf:
        raise ValueError(wanted)


def check_timeout(value: object) -> float | None:
    """A caller's patience in seconds, None for no end of it; what is not above 0 is over already.

    Unlike ``check_seconds`` for options: callers compute what is left of their time.
    """
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"timeout must be a number of seconds, or None for no limit; not {value!r}")
    if not value <= _LONGEST:
        raise ValueError(
            f"timeout must be a number of seconds, at most {_LONGEST:.0e}, or None for no limit; "
            f"not {value!r}"
        )
    return max(0.0, float(value))


def _check_devices(devices: object) -> None:
    if devices is None or (isinstance(devices, str) and devices == "auto"):
        return
    if not is_sequence(devices):
        raise TypeError(
            f'cuda_devices must be a list or tuple of devices, "auto" or None; not {devices!r}'
        )
    names: Sequence[object] = devices  # type: ignore[assignment]
    if not len(names):
        raise ValueError("cuda_devices is empty; name a device, or None to leave the choice alone")
    for device in names:
        wanted = 'a GPU number such as 0, a string such as "0" or "GPU-1a2b", or "cpu"'
        if isinstance(device, bool) or not isinstance(device, (int, str)):
            raise TypeError(f"an entry of cuda_devices must be {wanted}; not {device!r}")
        if not _DEVICE_NAME.fullmatch(str(device)):
            raise ValueError(f"an entry of cuda_devices must be {wanted}; not {device!r}")


def is_sequence(value: object) -> bool:
    """Lists, tuples, arrays, tensors: ordered, sized, indexed; no strings and no mappings."""
    return (
        hasattr(value, "__len__")
        and hasattr(value, "__getitem__")
        and not isinstance(value, _SINGLE)
    )
