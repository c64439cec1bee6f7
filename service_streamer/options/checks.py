"""Checks of what callers pass with each call, and what devices and workers may be."""

from __future__ import annotations

import io
import operator
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from typing import Any, Literal

Device = int | str
Devices = Sequence[Device] | Literal["auto"] | None

#: A number of workers, or the least and the most.
Workers = int | tuple[int, int]

#: Seconds; some thirty years. What the operating system can wait for is not much more.
LONGEST_WAIT = 1e9

#: What any side can read and keep; both arbitrary.
_MOST_PRIORITY = 1_000_000_000
LONGEST_TENANT = 256

#: "package.module:Name".
IMPORT_STRING = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")

#: What can be iterated over, and is a single item nevertheless.
_SINGLE = (str, bytes, bytearray, memoryview, Mapping, io.IOBase, type)
#: What version 0.1.2 took for the items of such a batch.
_PARTS: dict[type, str] = {str: "characters", bytes: "byte values", dict: "keys"}


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


def worker_range(worker_num: Workers) -> tuple[int, int]:
    """The least and the most workers."""
    return worker_num if isinstance(worker_num, tuple) else (worker_num, worker_num)


def check_timeout(value: object) -> float | None:
    """A caller's patience in seconds, None for no end of it; what is not above 0 is over already.

    Unlike options it may be negative: callers compute what is left of their time.
    """
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"timeout must be a number of seconds, or None for no limit; not {value!r}")
    if not value <= LONGEST_WAIT:
        raise ValueError(
            f"timeout must be a number of seconds, at most {LONGEST_WAIT:.0e}, or None for no "
            f"limit; not {value!r}"
        )
    return max(0.0, value)


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
