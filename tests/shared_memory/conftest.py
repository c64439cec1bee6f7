"""What memory is shared here is gone after each test, and may lack what a machine may lack."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ends import Unmapped

from service_streamer.workers.shared_memory import (
    Memory,
)
from service_streamer.workers.window import Window


@pytest.fixture(autouse=True)
def nothing_is_mapped() -> Iterator[None]:
    yield
    if "memfd:service_streamer" in (maps := Path("/proc/self/maps")).read_text():
        gc.collect()
        assert "memfd:service_streamer" not in maps.read_text()


@pytest.fixture(params=["private", "shared"])
def private(request: pytest.FixtureRequest) -> bool:
    return bool(request.param == "private")


@pytest.fixture
def without_pagemap(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where /proc is not mounted."""
    original = os.open

    def fail(path: Any, *args: Any, **kwargs: Any) -> int:
        if path == "/proc/self/pagemap":
            raise FileNotFoundError(path)
        return original(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", fail)


@pytest.fixture
def without_mapping(monkeypatch: pytest.MonkeyPatch) -> None:
    """Readers get no mapping. Writers do."""
    original = Window.__init__

    def unmapped(window: Window, memory: Memory, *, private: bool = False) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(Memory, "mapped", Unmapped.mapped)
            original(window, memory, private=private)

    monkeypatch.setattr(Window, "__init__", unmapped)
