"""What processes leave behind, and what they hold."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

__all__ = ["alive_with", "awaited", "growth", "holdings"]

#: Seconds for what is on its way out.
_GRACE, _LOOK = 10.0, 0.05


def alive_with(name: str, value: str) -> set[int]:
    """The processes with this variable in the environment that they were started with.

    Children have it too, unless they were given another: wherever they are in the tree.
    """
    wanted = f"{name}={value}".encode()
    found = set()
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            with contextlib.suppress(OSError):  # gone, or of another user
                if wanted in (folder / "environ").read_bytes().split(b"\0"):
                    found.add(int(folder.name))
    return found


def awaited(count: Callable[[], int]) -> int:
    """Zero as soon as the count is; what it is after a while if it never is."""
    until = time.monotonic() + _GRACE
    while (found := count()) and time.monotonic() < until:
        time.sleep(_LOOK)
    return found


def holdings(pids: Iterable[int]) -> dict[int, int]:
    """How many descriptors and threads each of these processes has; without those that are gone."""
    found = {}
    for pid in pids:
        with contextlib.suppress(OSError):
            found[pid] = sum(
                len([*Path(f"/proc/{pid}/{each}").iterdir()]) for each in ("fd", "task")
            )
    return found


def growth(held: Sequence[dict[int, int]]) -> int:
    """By how many descriptors and threads a process has grown that outlived most of the faults.

    What is opened at its first use may come late. What each fault leaves behind is more than that.
    """
    found = 0
    for pid, last in held[-1].items():
        seen = [each[pid] for each in held if pid in each]
        more = last - seen[0]
        if more >= max(5, len(seen) / 2):
            found += more
    return found
