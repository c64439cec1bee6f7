"""What a process has of children, threads and descriptors; some may be about to go."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path


def leavings() -> Counter[str]:
    if os.close.__module__ != "posix":
        time.sleep(0.001)  # gevent's closes descriptors in the next turn of its loop
    threads = [f"thread {thread.name}" for thread in threading.enumerate()]
    return Counter([*children(), *threads, *descriptors()])


def children() -> Iterator[str]:
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it was joined, and is gone a moment later
            for pid in (task / "children").read_text().split():
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
