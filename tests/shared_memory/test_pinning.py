"""Memory that is registered with CUDA: when, how much, and what is different then."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
from ends import MB, Link, filled

import large_models
from service_streamer import Streamer


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


def pinned(size: int, *errors: int) -> tuple[Link, Runtime]:
    """A link whose reader registers its memory."""
    link, runtime = Link(size), Runtime(*errors)
    assert link.readers[0].window.pin(runtime)
    assert runtime.calls == []
    return link, runtime


def test_registered_memory_grows_with_the_used_part(synchronized: list[str]) -> None:
    link, runtime = pinned(160 * MB)
    held = []
    for size in (1, 60, 1, 4, 68):
        held += link.share(filled(1, size * MB))
        [registered] = runtime.registered.values()
        assert registered >= sum(map(len, held))
    sizes = [size // MB for name, size in runtime.calls if name == "register"]
    assert sizes == [64, 128, 160]
    assert synchronized == ["synchronize"] * 2
    held.clear()
    for turn in range(3):
        [array] = link.share(filled(turn, MB))
        assert (array == turn).all()
        assert link.readers[0].view(array.ctypes.data, MB) is not None
        array[:] = 77  # it is no copy, and must not hide what comes next
        del array
        assert link.used == 0


def test_memory_that_cannot_be_registered_is_reported_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    link, runtime = pinned(160 * MB, 2)
    with caplog.at_level(logging.WARNING, "service_streamer"):
        held = link.share(filled(1, MB))
        held += link.share(filled(1, 70 * MB))
    assert runtime.calls == [("register", 64 * MB)]
    (record,) = caplog.records
    assert "error 2" in record.getMessage()


def test_pin_memory_changes_nothing_without_a_device() -> None:
    with Streamer(large_models.Pinning) as streamer:
        items = [np.full(50_000, float(i)) for i in range(5)]
        assert streamer.predict(items) == [50_000.0 * i for i in range(5)]


@pytest.mark.skipif("not __import__('torch').cuda.is_available()", reason="needs a CUDA device")
def test_a_gpu_copies_from_it() -> None:
    with Streamer(large_models.PinnedOnGPU) as streamer:
        for _ in range(10):
            items: list[Any] = [np.full((3, 200, 200), i, "f4") for i in range(8)]
            for number, (is_pinned, total) in enumerate(streamer.predict(items)):
                assert is_pinned
                assert total == 120_000.0 * number
