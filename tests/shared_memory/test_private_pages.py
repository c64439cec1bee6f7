"""Readers who write to what they read, and others who do not see it."""

from __future__ import annotations

import mmap
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from ends import PAGE, SIZE, Link, filled

pytestmark = pytest.mark.usefixtures("nothing_is_mapped")


@pytest.fixture(params=["pagemap", "no pagemap"])
def pagemap(request: pytest.FixtureRequest) -> None:
    if request.param == "no pagemap":
        request.getfixturevalue("without_pagemap")


@pytest.mark.usefixtures("pagemap")
def test_a_reader_s_writes_are_hidden_from_other_readers() -> None:
    link = Link(readers=2)
    payload = link.encode(filled(7))
    [first] = link.send(payload)
    first[:] = 8
    [same, other] = link.send(payload)[0], link.send(payload, to=1)[0]
    assert first.tobytes() == bytes([8]) * SIZE
    assert same.tobytes() == other.tobytes() == bytes([7]) * SIZE
    del first, same, other
    link.settle()
    [again] = link.send(payload)
    assert again.tobytes() == bytes([7]) * SIZE


@pytest.mark.usefixtures("pagemap")
@pytest.mark.parametrize("where", [0, PAGE - 1, PAGE, SIZE - 1, slice(None), slice(5, None, PAGE)])
def test_a_reader_s_writes_do_not_hide_later_payloads(where: Any) -> None:
    link = Link(12 * PAGE)
    for turn in range(5):
        [got] = link.share(filled(turn))
        assert got.tobytes() == bytes([turn]) * SIZE
        got[where] = 99
        del got
        link.settle()


@pytest.mark.usefixtures("pagemap")
def test_rows_that_share_a_page_do_not_hide_each_other() -> None:
    link = Link(rows=8)
    payloads = []
    for turn in range(12):
        payloads.append(link.encode(filled(turn)))  # only now, behind what was written to
        [got] = link.send(payloads[-1])
        assert got.tobytes() == bytes([turn]) * SIZE
        got[:] = 99
        del got
        link.settle()
    got = link.send(*payloads)
    assert [set(each.tobytes()) for each in got] == [{turn} for turn in range(12)]


@pytest.mark.usefixtures("pagemap")
def test_rows_of_a_block_that_is_still_looked_at_are_copied() -> None:
    link = Link(rows=8)
    [first] = link.share(filled(1))
    first[:] = 99  # among it the page that the next one begins on
    payload = link.encode(filled(2))
    [second, third] = link.send(payload, link.encode(filled(3)))
    assert payload.wire[3] == payload.wire[1] + SIZE
    assert second.tobytes() == bytes([2]) * SIZE
    assert third.tobytes() == bytes([3]) * SIZE
    assert first.tobytes() == bytes([99]) * SIZE
    assert link.readers[0].view(second.ctypes.data, SIZE) is None
    second[:] = 98
    [again] = link.send(payload)
    assert again.tobytes() == bytes([2]) * SIZE
    del first
    link.settle()
    assert third.tobytes() == bytes([3]) * SIZE
    [fourth] = link.share(filled(4))
    assert fourth.tobytes() == bytes([4]) * SIZE


@pytest.mark.usefixtures("pagemap")
def test_rows_of_one_batch_may_be_written_to_while_others_are_read() -> None:
    link = Link(rows=4)
    got = link.share(*(filled(n) for n in range(4)))
    for number, row in enumerate(got):
        assert set(row.tobytes()) == {number}
        row[:] = 50 + number
    assert [set(row.tobytes()) for row in got] == [{50}, {51}, {52}, {53}]


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


@pytest.mark.usefixtures("without_pagemap")
def test_pages_are_always_dropped_without_a_pagemap(dropped: list[tuple[int, int]]) -> None:
    link = Link()
    link.share(filled(7))
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


def test_writes_to_a_result_stay_while_it_is_held() -> None:
    link = Link(private=False)
    [got] = link.share(filled(7))
    part = got[5:]
    got[:] = 8
    del got
    link.settle()
    link.share(filled(9))
    assert set(part.tobytes()) == {8}


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


@pytest.mark.usefixtures("without_mapping")
def test_a_reader_without_a_mapping_has_no_view() -> None:
    link = Link()
    [got] = link.share(filled(1))
    assert link.readers[0].view(got.ctypes.data, SIZE) is None


def test_a_window_for_results_tells_of_no_memory() -> None:
    link = Link(private=False)
    [got] = link.share(filled(1))
    assert link.readers[0].view(got.ctypes.data, SIZE) is None
