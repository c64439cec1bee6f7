"""Readers who write to what they read, and others who do not see it."""

from __future__ import annotations

import mmap
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from ends import SIZE, Link, filled

from service_streamer.workers.memory.arena import PAGE
from service_streamer.workers.memory.shared_memory import (
    Memory,
)
from service_streamer.workers.memory.window import Window

pytestmark = pytest.mark.usefixtures("nothing_is_mapped")

# -- readers that write


@pytest.fixture(params=["pagemap", "no pagemap"])
def pagemap(request: pytest.FixtureRequest) -> None:
    if request.param == "no pagemap":
        request.getfixturevalue("without_pagemap")


@pytest.mark.usefixtures("pagemap")
def test_what_a_reader_writes_is_seen_by_nobody_else() -> None:
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
def test_what_was_written_does_not_hide_what_comes_to_the_same_place(where: Any) -> None:
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
    assert payload.wire[3] == link.arena._open[SIZE].lease.block + SIZE
    assert second.tobytes() == bytes([2]) * SIZE
    assert third.tobytes() == bytes([3]) * SIZE
    assert first.tobytes() == bytes([99]) * SIZE
    assert link.windows[0].view(second.ctypes.data, SIZE) is None
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


class Spied:
    """A mapping of which it is counted how often pages are dropped."""

    def __init__(self, mapping: mmap.mmap) -> None:
        self.mapping = mapping
        self.dropped: list[tuple[int, int]] = []

    def madvise(self, advice: int, start: int, length: int) -> None:
        self.dropped.append((start, length))
        self.mapping.madvise(advice, start, length)


def spied(link: Link) -> Spied:
    pages: Any = link.windows[0]._pages
    pages._mapping = Spied(pages._mapping)
    spy: Spied = pages._mapping
    return spy


@pytest.mark.skipif(not Path("/proc/self/pagemap").exists(), reason="there is no /proc")
def test_pages_are_dropped_only_if_they_were_written_to() -> None:
    link = Link()
    spy = spied(link)
    for _ in range(3):
        [got] = link.share(filled(7))
        assert got.sum() == 7 * SIZE
        del got
        link.settle()
    assert spy.dropped == []
    [got] = link.share(filled(7))
    got[SIZE - 1] = 1
    del got
    link.settle()
    assert spy.dropped == [(0, 11 * PAGE)]


@pytest.mark.usefixtures("without_pagemap")
def test_without_pagemap_all_pages_are_dropped() -> None:
    link = Link()
    spy = spied(link)
    link.share(filled(7))
    link.settle()
    assert spy.dropped == [(0, 11 * PAGE)]


def test_pages_of_which_the_kernel_tells_too_little_are_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    link = Link()
    spy = spied(link)
    monkeypatch.setattr(os, "pread", lambda descriptor, length, offset: bytes(length - 8))
    link.share(filled(7))
    link.settle()
    assert len(spy.dropped) == 1


@pytest.mark.parametrize(
    ("flags", "is_copy"),
    [
        (0, False),  # not there
        (1 << 63 | 1 << 61, False),  # of the file
        (1 << 63 | 1 << 61 | 1 << 56 | 1 << 55, False),
        (1 << 63, True),  # of our own
        (1 << 63 | 1 << 56, True),
        (1 << 62, True),  # of our own, swapped out
        (1 << 62 | 1 << 61, True),
    ],
)
def test_what_the_kernel_says_about_a_page(
    flags: int, is_copy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages: Any = Window(Memory(4 * PAGE), private=True)._pages
    clean, told = (1 << 63 | 1 << 61), [0, 0, 0]
    for position in range(3):
        told[:] = [clean, clean, clean]
        told[position] = flags
        data = b"".join(each.to_bytes(8, sys.byteorder) for each in told)
        monkeypatch.setattr(os, "pread", lambda *_, data=data: data)
        assert pages._has_copies(0, 3 * PAGE) is is_copy


def test_what_is_written_to_a_result_is_not_undone_while_it_is_held() -> None:
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
    see = link.windows[0].view
    assert see(start, 3 * SIZE + 1) is None
    assert see(start - 1, 5) is None
    assert see(0, 1) is None
    middle = see(start + SIZE, SIZE)
    assert middle is not None
    assert set(middle) == {2}
    assert not middle.readonly
    del first, second, third
    link.arena._open.clear()
    assert link.used > 0, "what is told of holds it"
    assert see(start, SIZE) is not None
    del middle
    assert link.used == 0
    assert see(start, SIZE) is None


@pytest.mark.usefixtures("without_mapping")
def test_without_a_mapping_no_memory_is_told_of() -> None:
    link = Link()
    [got] = link.share(filled(1))
    assert link.windows[0].view(got.ctypes.data, SIZE) is None


def test_a_window_for_results_tells_of_no_memory() -> None:
    link = Link(private=False)
    [got] = link.share(filled(1))
    assert link.windows[0].view(got.ctypes.data, SIZE) is None
