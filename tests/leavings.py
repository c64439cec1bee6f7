"""What a process has of children, threads and descriptors; some may be about to go."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path


def children(pid: int) -> list[int]:
    """The processes that a process has started and that are there."""
    found: list[int] = []
    with contextlib.suppress(FileNotFoundError):  # the process has ended
        for thread in Path(f"/proc/{pid}/task").iterdir():  # of each its own
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
                found += map(int, (thread / "children").read_text().split())
    return found


def leavings() -> Counter[str]:
    if os.close.__module__ != "posix":
        time.sleep(0.001)  # gevent's closes descriptors in the next turn of its loop
    threads = [f"thread {thread.name}" for thread in threading.enumerate()]
    return Counter([*processes(), *threads, *descriptors()])


def processes() -> Iterator[str]:
    for pid in children(os.getpid()):
        with contextlib.suppress(OSError):
            command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")
            if b"resource_tracker" not in command:
                yield f"process {pid} {command.decode()}"


def descriptors() -> Iterator[str]:
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the one that listed this directory
            target = os.readlink(f"/proc/self/fd/{name}")
            if target.startswith(("pipe:", "anon_inode:", "socket:", "/memfd:")):
                yield f"descriptor {name} {target.partition(':')[0]}"
