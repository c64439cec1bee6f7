"""What users may set, checked in one place: bad values are refused at once, by name and range."""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

__all__ = [
    "BatchingOptions",
    "Device",
    "WorkerOptions",
    "check_batch",
    "check_seconds",
    "is_sequence",
]

Device = int | str
StartMethod = Literal["spawn", "fork", "forkserver"]

#: Seconds; some thirty years. What the operating system can wait for is not much more.
_LONGEST = 1e9

_START_METHODS = ("spawn", "fork", "forkserver")
#: What CUDA_VISIBLE_DEVICES takes: indices, GPU or MIG identifiers, several with commas between.
_DEVICE_NAME = re.compile(r"(cuda:)?\d+(,\d+)*|(GPU|MIG)-[\w/-]+(,(GPU|MIG)-[\w/-]+)*|cpu")


@dataclass(frozen=True, slots=True)
class BatchingOptions:
    """How calls are batched.

    Attributes:
        batch_size: the most items of one model invocation.
        max_latency: the longest that an item may wait for company while a worker is free, seconds.
    """

    batch_size: int
    max_latency: float

    def __post_init__(self) -> None:
        _check_count("batch_size", self.batch_size)
        check_seconds("max_latency", self.max_latency, zero=True)


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """How worker processes are placed and started.

    Attributes:
        worker_num: the number of worker processes.
        cuda_devices: worker i gets ``cuda_devices[i % len]``; None leaves the devices alone.
        model_init_args: positional arguments of ``init_model``.
        model_init_kwargs: keyword arguments of ``init_model``.
        mp_start_method: how processes are started; ``spawn`` is the one that is safe with threads.
        cpu_threads: numeric threads per worker; "auto" shares the cores out, None leaves it alone.
    """

    worker_num: int = 1
    cuda_devices: Sequence[Device] | None = None
    model_init_args: Sequence[Any] | None = None
    model_init_kwargs: Mapping[str, Any] | None = None
    mp_start_method: str = "spawn"
    cpu_threads: int | Literal["auto"] | None = "auto"

    def __post_init__(self) -> None:
        _check_count("worker_num", self.worker_num)
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
            _check_count("cpu_threads", self.cpu_threads, alternatives='"auto" or None')

    def device(self, slot: int) -> Device | None:
        """The device of worker ``slot``, or None when no devices were named."""
        return (
            None if self.cuda_devices is None else self.cuda_devices[slot % len(self.cuda_devices)]
        )


def check_seconds(
    name: str, value: object, *, zero: bool = False, none: bool = False
) -> float | None:
    """Refuse what is no finite number of seconds.

    Args:
        zero: whether 0 is in range.
        none: whether None ("no limit") is.
    """
    if value is None and none:
        return None
    allowed = "at least 0" if zero else "above 0"
    allowed += f" and at most {_LONGEST:.0e}" + (", or None for no limit" if none else "")
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number of seconds, {allowed}; not {value!r}")
    if not 0 <= value <= _LONGEST or (value == 0 and not zero):
        raise ValueError(f"{name} must be a number of seconds, {allowed}; not {value!r}")
    return float(value)


def check_batch(batch: object) -> Sequence[Any]:
    """Refuse what is no sequence of items; a lone string is the classic mistake."""
    if type(batch) is not list and not is_sequence(batch):
        raise TypeError(
            f"a batch must be a list of items, not {type(batch).__name__}; "
            "put a single item into a list: [item]"
        )
    return batch  # type: ignore[return-value]


def _check_count(name: str, value: object, *, alternatives: str = "") -> None:
    wanted = f"{name} must be a whole number of at least 1" + (
        f", {alternatives}" if alternatives else ""
    )
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"{wanted}; not {value!r}") from None
    if number < 1:
        raise ValueError(f"{wanted}; not {value!r}")


def _check_devices(devices: object) -> None:
    if devices is None:
        return
    if not is_sequence(devices):
        raise TypeError(f"cuda_devices must be a list or tuple of devices, not {devices!r}")
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
        and not isinstance(value, (str, bytes, bytearray, memoryview, Mapping, type))
    )
