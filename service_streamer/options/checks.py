"""What users may set, checked in one place: bad values are refused at once, by name and range."""

from __future__ import annotations

import io
import math
import operator
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from typing import Any, Literal

Device = int | str
Devices = Sequence[Device] | Literal["auto"] | None

#: A number of workers, or the least and the most.
Workers = int | tuple[int, int]

#: Seconds; some thirty years. What the operating system can wait for is not much more.
_LONGEST = 1e9

#: What any side can read and keep; both arbitrary.
_MOST_PRIORITY = 1_000_000_000
LONGEST_TENANT = 256
_POOL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")

#: "package.module:Name".
IMPORT_STRING = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")
#: What CUDA_VISIBLE_DEVICES takes: indices, GPU or MIG identifiers, several with commas between.
_DEVICE_NAME = re.compile(r"(cuda:)?\d+(,\d+)*|(GPU|MIG)-[\w/-]+(,(GPU|MIG)-[\w/-]+)*|cpu")


#: What can be iterated over, and is a single item nevertheless.
_SINGLE = (str, bytes, bytearray, memoryview, Mapping, io.IOBase, type)
#: What version 0.1.2 took for the items of such a batch.
_PARTS: dict[type, str] = {str: "characters", bytes: "byte values", dict: "keys"}


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


def check_count(name: str, value: object, *, alternatives: str = "", least: int | None = 1) -> None:
    """Refuse what is no whole number of at least ``least``; None sets no bound."""
    bound = "" if least is None else f" of at least {least}"
    wanted = f"{name} must be a whole number{bound}" + (f", {alternatives}" if alternatives else "")
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"{wanted}; not {value!r}") from None
    if least is not None and number < least:
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
    """The name of a tenant; calls without one share the empty name."""
    if not isinstance(value, str):
        raise TypeError(f"tenant must be a string, such as a customer's name; not {value!r}")
    if len(value) > LONGEST_TENANT:
        raise ValueError(
            f"tenant must have at most {LONGEST_TENANT} characters; not {len(value)}: {value!r:.40}"
        )
    return str.__str__(value)  # no enumeration of the application, which a pool cannot import


def check_pool_name(name: str, value: object) -> str:
    """The name of a shared pool, which is also that of its files."""
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a string; not {value!r}")
    if not _POOL_NAME.fullmatch(value):
        raise ValueError(
            f"{name} must have 1 to 64 letters, digits, '.', '_' and '-', and start with a letter "
            f"or digit; not {value!r}"
        )
    return value


def check_workers(name: str, value: object) -> Workers:
    """A number of workers, or the least and the most in a tuple."""
    wanted = (
        f"{name} must be a whole number of at least 1, or the least and the most workers, such as "
        f"(1, 16); not {value!r}"
    )
    several: Sequence[Any] = value if is_sequence(value) else (value, value)  # type: ignore[assignment]
    if len(several) != 2:
        raise ValueError(wanted)
    try:
        for each in several:
            check_count(name, each)
    except (TypeError, ValueError) as error:
        raise type(error)(wanted) from None
    least, most = map(int, several)
    if least > most:
        raise ValueError(wanted)
    return (least, most) if is_sequence(value) else least


def worker_range(worker_num: Workers) -> tuple[int, int]:
    """The least and the most workers."""
    return worker_num if isinstance(worker_num, tuple) else (worker_num, worker_num)


def check_positive(name: str, value: object, alternatives: str = "") -> None:
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


def check_devices(name: str, devices: object) -> None:
    if devices is None or (isinstance(devices, str) and devices == "auto"):
        return
    if not is_sequence(devices):
        raise TypeError(
            f'{name} must be a list or tuple of devices, "auto" or None; not {devices!r}'
        )
    names: Sequence[object] = devices  # type: ignore[assignment]
    if not len(names):
        raise ValueError(f"{name} is empty; name a device, or None to leave the choice alone")
    for device in names:
        wanted = 'a GPU number such as 0, a string such as "0" or "GPU-1a2b", or "cpu"'
        if isinstance(device, bool) or not isinstance(device, (int, str)):
            raise TypeError(f"an entry of {name} must be {wanted}; not {device!r}")
        if not _DEVICE_NAME.fullmatch(str(device)):
            raise ValueError(f"an entry of {name} must be {wanted}; not {device!r}")


def check_devices_per_worker(count: int, devices: Devices) -> None:
    """Refuse a number of devices for each worker that the named devices do not allow."""
    if count == 1 or devices == "auto":
        return
    if devices is None:
        raise ValueError(
            f'devices_per_worker={count} needs cuda_devices; name the devices, or give "auto"'
        )
    names = device_names(devices)
    if "cpu" in names:
        raise ValueError(f"devices_per_worker={count} is for GPUs, and the devices include the cpu")
    if len(names) % count:
        raise ValueError(
            f"devices_per_worker={count} must divide the number of devices, which is {len(names)}"
        )


def device_names(devices: Sequence[Device]) -> list[str]:
    """The devices one by one, as strings: an entry may name several, such as "0,1"."""
    return [name for entry in devices for name in str(entry).removeprefix("cuda:").split(",")]


def is_sequence(value: object) -> bool:
    """Lists, tuples, arrays, tensors: ordered, sized, indexed; no strings and no mappings."""
    return (
        hasattr(value, "__len__")
        and hasattr(value, "__getitem__")
        and not isinstance(value, _SINGLE)
    )
