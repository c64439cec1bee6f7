"""Memory that is registered with CUDA: when, how much, and what is different then."""

from __future__ import annotations

import logging
import os
from typing import Any

import numpy as np
import pytest

import large_models
from service_streamer import Streamer
from service_streamer.workers.memory.arena import Arena
from service_streamer.workers.memory.payload import Parts, dump
from service_streamer.workers.memory.shared_memory import Memory
from service_streamer.workers.memory.window import Pinned, Window

MB = 1 << 20


class Runtime:
    """Does what CUDA's does, and refuses what that refuses."""

    def __init__(self, *errors: int) -> None:
        self.registered: dict[int, int] = {}
        self.calls: list[tuple[str, int]] = []
        self._errors = list(errors)

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802
        assert flags == 1
        assert not self.registered  # CUDA's refuses what overlaps
        self.calls.append(("register", size))
        error = self._errors.pop(0) if self._errors else 0
        if not error:
            self.registered[address] = size
        return error

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        self.calls.append(("unregister", self.registered.pop(address)))
        return 0


@pytest.fixture
def synchronized(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    torch = pytest.importorskip("torch")
    calls: list[str] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: calls.append("synchronize"))
    return calls


def test_it_grows_with_what_is_used(synchronized: list[str]) -> None:
    runtime = Runtime()
    pinned = Pinned(runtime, 4096, 1000 * MB)
    for stop in (1, 64 * MB, 64 * MB + 1, 100 * MB, 128 * MB, 700 * MB, 999 * MB):
        pinned.cover(stop)
        assert runtime.registered[4096] == pinned.size >= stop
    assert [size // MB for name, size in runtime.calls if name == "register"] == [
        64, 128, 704, 1000,
    ]  # fmt: skip
    assert synchronized == ["synchronize"] * 3


def test_where_it_cannot_be_registered_it_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    runtime = Runtime(2)
    pinned = Pinned(runtime, 4096, 1000 * MB)
    with caplog.at_level(logging.WARNING, "service_streamer"):
        pinned.cover(1)
        pinned.cover(900 * MB)
    assert runtime.calls == [("register", 64 * MB)]
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith("67 MB cannot be registered with CUDA (error 2): items are copied")


def test_a_window_registers_what_is_looked_at() -> None:
    memory, runtime = Memory(128 * MB), Runtime()
    arena, window = Arena(memory), Window(memory, private=True)
    window.pin(runtime)
    assert runtime.calls == []
    for turn in range(3):
        parts = dump(np.full(1 * MB, turn, "u1"))
        assert isinstance(parts, Parts)
        placed = arena.put(parts)
        assert placed is not None
        look = window.look(placed.wire)
        (array,) = [window.load(placed.wire, look)]
        assert (array == turn).all()
        assert window.view(array.ctypes.data, MB) is not None
        array[:] = 77  # it is no copy, and must not hide what comes next
        del array, look, placed
        assert len(window.ended()) == 1
    assert runtime.calls == [("register", 64 * MB)]


def test_without_a_device_it_changes_nothing() -> None:
    with Streamer(large_models.Pinning) as streamer:
        items = [np.full(50_000, float(i)) for i in range(5)]
        assert streamer.predict(items) == [50_000.0 * i for i in range(5)]
        assert not streamer.engine._transport._workers[0].pins  # type: ignore[attr-defined]


@pytest.mark.parametrize("is_kept", [True, False])
def test_what_is_registered_is_not_given_back(is_kept: bool) -> None:
    memory = Memory(64 * MB)
    arena = Arena(memory)
    arena.is_kept = is_kept
    for size in [32 * MB, *[MB] * 2000]:
        parts = dump(bytes(size))
        assert isinstance(parts, Parts)
        arena.put(parts)
    assert (os.fstat(memory.descriptor).st_blocks * 512 >= 32 * MB) is is_kept


@pytest.mark.skipif("not __import__('torch').cuda.is_available()", reason="needs a CUDA device")
def test_a_gpu_copies_from_it() -> None:
    with Streamer(large_models.PinnedOnGPU) as streamer:
        for _ in range(10):
            items: list[Any] = [np.full((3, 200, 200), i, "f4") for i in range(8)]
            for number, (is_pinned, total) in enumerate(streamer.predict(items)):
                assert is_pinned
                assert total == 120_000.0 * number
