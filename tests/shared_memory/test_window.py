"""What is read in shared memory, how long it is held, and pages that a reader has written to."""

from __future__ import annotations

import gc
import mmap
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ends import LARGE, PAGE, SIZE, Link, filled

pytestmark = pytest.mark.usefixtures("nothing_is_mapped")


@pytest.mark.parametrize("lengths", [(1, 1, 1), (64, 64), (65, 1), (0, 5, 0), (LARGE + 1, 3)])
def test_the_parts_of_an_item_are_aligned(lengths: tuple[int, ...], private: bool) -> None:
    large = np.arange(LARGE)
    sent = [large, *(filled(n, length) for n, length in enumerate(lengths)), large]
    [got] = Link(private=private).share(sent)
    for one, other in zip(sent, got, strict=True):
        assert one.tobytes() == other.tobytes()
    assert [each.ctypes.data % 64 for each in (got[0], got[-1])] == [0, 0]


def test_an_item_outlives_both_ends(private: bool) -> None:
    link = Link(private=private)
    [got] = link.share(filled(7))
    del link
    gc.collect()
    assert got.tobytes() == bytes([7]) * SIZE
    got[:] = 8
    assert got.tobytes() == bytes([8]) * SIZE


class Breaks:
    def __reduce__(self) -> Any:
        return int, ("no number",)


def test_an_item_that_cannot_be_loaded_holds_nothing() -> None:
    link = Link()
    payload = link.encode([filled(7), Breaks()])
    for _ in range(3):
        with pytest.raises(ValueError, match="no number"):
            link.send(payload)
    del payload
    assert link.used == 0


class Keeps:
    """Is dropped in a circle, and hands its view on to others then."""

    survivors: list[Any] = []  # noqa: RUF012

    def __init__(self, view: Any) -> None:
        self.view = view
        self.me = self

    def __del__(self) -> None:
        self.survivors.append(self.view)


@pytest.mark.parametrize("kind", ["array", "memoryview"])
def test_a_view_that_a_finalizer_saves_is_still_held(kind: str, private: bool) -> None:
    """The collector runs all finalizers of a circle: also that of what holds the view's memory."""
    link = Link(private=private)
    [got] = link.share(filled(7) if kind == "array" else memoryview(filled(7)))
    holder = Keeps(got)
    del got, holder
    gc.collect()
    is_held = link.used > 0
    link.share(filled(9))
    value = Keeps.survivors.pop()[0]
    assert (is_held, value) == (True, 7)


# -- pages that were written to


class Spied(mmap.mmap):
    """A mapping of which it is noted which pages are dropped."""

    dropped: list[tuple[int, int]] = []  # noqa: RUF012

    def madvise(self, *args: Any) -> None:
        self.dropped.append(args[1:])
        super().madvise(*args)


@pytest.fixture
def dropped(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    monkeypatch.setattr(mmap, "mmap", Spied)
    Spied.dropped = []
    return Spied.dropped


@pytest.mark.skipif(not Path("/proc/self/pagemap").exists(), reason="there is no /proc")
def test_pages_are_dropped_only_if_they_were_written_to(dropped: list[tuple[int, int]]) -> None:
    link = Link()
    for _ in range(3):
        [got] = link.share(filled(7))
        assert got.sum() == 7 * SIZE
        del got
        link.settle()
    assert dropped == []
    [got] = link.share(filled(7))
    got[SIZE - 1] = 1
    del got
    link.settle()
    assert dropped == [(0, 11 * PAGE)]


CLEAN = 1 << 63 | 1 << 61  # of the file


@pytest.mark.parametrize(
    ("flags", "is_copy"),
    [
        (0, False),  # not there
        (CLEAN, False),
        (CLEAN | 1 << 56 | 1 << 55, False),
        (1 << 63, True),  # of our own
        (1 << 63 | 1 << 56, True),
        (1 << 62, True),  # of our own, swapped out
        (1 << 62 | 1 << 61, True),
        (None, True),  # the kernel tells too little
    ],
)
@pytest.mark.parametrize("position", [0, 5, 10])
def test_pages_are_dropped_if_the_kernel_calls_one_of_them_a_copy(
    flags: int | None,
    is_copy: bool,
    position: int,
    dropped: list[tuple[int, int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def tell(_: int, length: int, __: int) -> bytes:
        told = [CLEAN] * (length // 8)
        if flags is None:
            del told[-1]
        else:
            told[position] = flags
        return b"".join(each.to_bytes(8, sys.byteorder) for each in told)

    link = Link()
    monkeypatch.setattr(os, "pread", tell)
    link.share(filled(7))
    link.settle()
    assert bool(dropped) is is_copy


def test_the_memory_at_an_address_is_told_only_while_it_is_looked_at() -> None:
    link = Link(rows=4)
    [first, second, third] = link.share(filled(1), filled(2), filled(3))
    start: int = first.ctypes.data
    see = link.readers[0].view
    assert see(start, 3 * SIZE + 1) is None
    assert see(start - 1, 5) is None
    assert see(0, 1) is None
    middle = see(start + SIZE, SIZE)
    assert middle is not None
    assert set(middle) == {2}
    assert not middle.readonly
    del first, second, third
    link.close_rows()
    assert link.used > 0, "what is told of holds it"
    assert see(start, SIZE) is not None
    del middle
    assert link.used == 0
    assert see(start, SIZE) is None


@pytest.mark.parametrize("lacks", ["a mapping", "readers that write"])
def test_a_window_tells_of_no_memory_without_a_mapping_of_its_own(
    lacks: str, request: pytest.FixtureRequest
) -> None:
    if lacks == "a mapping":
        request.getfixturevalue("without_mapping")
    link = Link(private=lacks == "a mapping")
    [got] = link.share(filled(1))
    assert link.readers[0].view(got.ctypes.data, SIZE) is None
