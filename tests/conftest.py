"""Fixtures, and the guard that no test leaves a process, a thread or a descriptor behind."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import pytest

from service_streamer import Streamer, ThreadedStreamer
from service_streamer.testing import Gate

# Of the standard library's: one process and one pipe to it, for as long as this process lives.
resource_tracker.ensure_running()

AnyStreamer = Streamer | ThreadedStreamer


@pytest.fixture(params=["thread", "process"])
def kind(request: pytest.FixtureRequest) -> str:
    """Runs the test on both kinds of workers."""
    kind: str = request.param
    return kind


@pytest.fixture
def build(kind: str) -> Iterator[Callable[..., AnyStreamer]]:
    """Builds a streamer of the kind for a function, and closes it after the test."""
    built: list[AnyStreamer] = []

    def build(function: Any, *args: Any, **kwargs: Any) -> AnyStreamer:
        streamer = (ThreadedStreamer if kind == "thread" else Streamer)(function, *args, **kwargs)
        built.append(streamer)
        return streamer

    build.kind = kind  # type: ignore[attr-defined]
    yield build
    for streamer in built:
        streamer.close(drain=False)


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Gate]:
    gate = Gate(tmp_path / "gate")
    yield gate
    gate.close()


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    before = _leavings()
    yield
    after = _leavings()
    if before != after:
        gc.collect()  # an exception's frames may have held a streamer
        after = _leavings()
    assert after == before


def _leavings() -> dict[str, list[str]]:
    if os.close.__module__ != "posix":
        time.sleep(0.001)  # gevent's closes descriptors in the next turn of its loop
    return {
        "processes": sorted(_children()),
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "descriptors": sorted(_descriptors()),
    }


def _children() -> Iterator[str]:
    for task in Path("/proc/self/task").iterdir():
        try:
            pids = (task / "children").read_text().split()
        except FileNotFoundError:  # a thread that was joined, and is gone a moment later
            continue
        for pid in pids:
            command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
            if "resource_tracker" not in command:
                yield f"{pid} {command}"


def _descriptors() -> Iterator[str]:
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:  # the one that listed this directory
            continue
        if target.startswith(("pipe:", "anon_inode:", "socket:")):
            yield f"{name} {target.split(':')[0]}"
