"""Which parts of a range are given out, whatever is taken and given back meanwhile."""

from __future__ import annotations

import mmap
import random
from collections.abc import Iterable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from service_streamer.workers.memory import arena as arena_module
from service_streamer.workers.memory.arena import PAGE, Extents, rounded

#: After so many ``take`` there may be something to cut.
INTERVAL = arena_module._REVIEW_INTERVAL


def extents(size: int, *taken: int) -> Extents:
    """A range of which parts of such sizes are taken, one behind the other."""
    made = Extents(size)
    for part in taken:
        assert made.take(part) is not None
    return made


def free(of: Extents) -> list[tuple[int, int]]:
    """The parts that are free, found out by taking all that there is, and giving it back."""
    single = [start for start in iter(lambda: of.take(1), None) if start is not None]
    for start in single:
        of.give_back(start, 1)
    return joined(single)


def joined(points: Iterable[int]) -> list[tuple[int, int]]:
    parts: list[tuple[int, int]] = []
    for point in sorted(points):
        if parts and parts[-1][1] == point:
            parts[-1] = (parts[-1][0], point + 1)
        else:
            parts.append((point, point + 1))
    return parts


def pass_time(of: Extents, size: int = 1, takes: int = INTERVAL) -> None:
    """Take and give back as often as it takes until it is looked at what was needed."""
    for _ in range(takes):
        start = of.take(size)
        assert start is not None
        of.give_back(start, size)


# -- sizes


@pytest.mark.parametrize(
    ("pages", "size"),
    [
        (0, 1),
        (1, 1),
        (2, 2),
        (7, 7),
        (15, 15),
        (16, 16),
        (17, 18),
        (18, 18),
        (31, 32),
        (32, 32),
        (33, 36),
        (147, 160),
        (1000, 1024),
        (1 << 20, 1 << 20),
        ((1 << 20) + 1, (1 << 20) + (1 << 17)),
    ],
)
def test_room_is_taken_in_sizes_that_are_few(pages: int, size: int) -> None:
    assert rounded(pages * PAGE) == size * PAGE
    if pages:
        assert rounded(pages * PAGE - 1) == size * PAGE
        assert rounded((pages - 1) * PAGE + 1) == size * PAGE


def test_a_size_is_rounded_up_by_less_than_a_page_or_an_eighth() -> None:
    sizes = random.Random(0).sample(range(1, 1 << 30), 2000)
    for size in sizes:
        assert size <= rounded(size) < size * 9 / 8 + PAGE
        assert rounded(size) % PAGE == 0
        assert rounded(rounded(size)) == rounded(size)
    assert len({rounded(size) for size in sizes}) < 100


def test_no_two_parts_can_share_a_page_of_the_processor() -> None:
    """Or what a reader has written to one of them would hide what is written to the other."""
    assert PAGE % mmap.PAGESIZE == 0


# -- taking and giving back


def test_room_is_taken_from_the_bottom_up() -> None:
    parts = Extents(100)
    assert [parts.take(size) for size in (10, 20, 30)] == [0, 10, 30]
    assert parts.used == 60
    assert free(parts) == [(60, 100)]


@pytest.mark.parametrize(("size", "wanted"), [(0, 1), (1, 2), (100, 101)])
def test_there_is_no_room_for_more_than_there_is(size: int, wanted: int) -> None:
    parts = Extents(size)
    assert parts.take(wanted) is None
    assert parts.used == 0
    assert free(parts) == ([(0, size)] if size else [])


def test_all_of_it_can_be_taken_at_once_and_again() -> None:
    parts = Extents(100)
    for _ in range(3):
        assert parts.take(100) == 0
        assert parts.take(1) is None
        parts.give_back(0, 100)
        assert parts.used == 0


def test_the_lowest_gap_that_is_wide_enough_is_taken() -> None:
    parts = extents(100, 10, 10, 10, 20, 10, 20, 20)
    for start, size in [(10, 10), (30, 20), (60, 20)]:
        parts.give_back(start, size)
    assert parts.take(15) == 30
    assert parts.take(5) == 10
    assert parts.take(5) == 15  # which fills it
    assert parts.take(5) == 45
    assert parts.take(20) == 60
    assert parts.take(1) is None
    assert parts.used == 100


def test_what_is_free_in_parts_that_do_not_touch_is_no_room_for_all_of_it() -> None:
    parts = extents(30, 10, 10, 10)
    parts.give_back(0, 10)
    parts.give_back(20, 10)
    assert parts.take(11) is None
    parts.give_back(10, 10)
    assert parts.take(30) == 0


@pytest.mark.parametrize(
    ("order", "left"),
    [
        ([1], [(10, 20)]),  # between two that are taken
        ([1, 2], [(10, 30)]),  # right behind one that is free
        ([2, 1], [(10, 30)]),  # right before one
        ([1, 3, 2], [(10, 40)]),  # between two
        ([0, 4], [(0, 10), (40, 50)]),  # at the ends
        ([0, 4, 2], [(0, 10), (20, 30), (40, 50)]),
        ([4, 3, 2, 1, 0], [(0, 50)]),
        ([0, 1, 2, 3, 4], [(0, 50)]),
        ([0, 2, 4, 1, 3], [(0, 50)]),
    ],
)
def test_free_parts_that_touch_become_one(order: list[int], left: list[tuple[int, int]]) -> None:
    parts = extents(50, 10, 10, 10, 10, 10)
    for number in order:
        parts.give_back(10 * number, 10)
    assert parts._free == left
    assert parts.used == 50 - 10 * len(order)


# -- what has not been needed for long


def test_after_a_burst_it_is_told_where_to_cut() -> None:
    parts = extents(1000, 600)
    parts.give_back(0, 600)
    pass_time(parts, 50, INTERVAL - 1)  # the burst was the first
    assert parts.review() is None, "it was needed since the last time"
    pass_time(parts, 50, INTERVAL - 1)
    assert parts.review() is None, "it is too soon"
    pass_time(parts, 50, 1)
    assert parts.review() == 50
    assert parts.review() is None, "said once"
    pass_time(parts, 50)
    assert parts.review() is None, "there is nothing more to cut"


def test_what_is_taken_is_not_cut_off_however_long_ago_it_was() -> None:
    parts = extents(1000, 600, 10)
    parts.give_back(0, 600)
    for _ in range(3):
        pass_time(parts)
        assert parts.review() is None  # it would be worth nothing, with the one at the top
    parts.give_back(600, 10)
    pass_time(parts)
    assert parts.review() == 1


def test_it_is_cut_above_what_is_taken() -> None:
    parts = extents(1000, 100, 100, 700)
    parts.give_back(0, 100)
    parts.give_back(200, 700)
    pass_time(parts)
    assert parts.review() is None
    pass_time(parts)
    assert parts.review() == 200


def test_nothing_is_cut_of_a_range_that_is_full_to_the_top() -> None:
    parts = extents(INTERVAL, *[1] * INTERVAL)
    assert parts.review() is None
    for start in range(INTERVAL - 1):
        parts.give_back(start, 1)
    pass_time(parts)
    assert parts.review() is None


def test_what_was_cut_off_can_be_taken_again() -> None:
    parts = extents(1000, 1000)
    parts.give_back(0, 1000)
    pass_time(parts)
    parts.review()
    pass_time(parts)
    assert parts.review() == 1
    assert parts.take(1000) == 0
    parts.give_back(0, 1000)
    pass_time(parts)
    assert parts.review() is None
    pass_time(parts)
    assert parts.review() == 1


def test_a_range_of_nothing_can_be_reviewed() -> None:
    assert Extents(0).review() is None


# -- in any order


class AnyOrder(RuleBasedStateMachine):
    """Takes and gives back in any order, beside a model that knows the owner of each place."""

    SIZE = 96

    def __init__(self) -> None:
        super().__init__()
        self.parts = Extents(self.SIZE)
        self.taken: dict[int, int] = {}
        self.owners: list[int | None] = [None] * self.SIZE

    @rule(size=st.integers(1, 24), times=st.integers(1, 3))
    def take(self, size: int, times: int) -> None:
        for _ in range(times):
            start = self.parts.take(size)
            fitting = [
                at
                for at in range(self.SIZE - size + 1)
                if all(owner is None for owner in self.owners[at : at + size])
            ]
            assert start == (min(fitting) if fitting else None)
            if start is not None:
                self.owners[start : start + size] = [start] * size
                self.taken[start] = size

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        start = data.draw(st.sampled_from(sorted(self.taken)))
        size = self.taken.pop(start)
        self.parts.give_back(start, size)
        self.owners[start : start + size] = [None] * size

    @precondition(lambda self: None in self.owners)
    @rule()
    def review(self) -> None:
        pass_time(self.parts)
        cut = self.parts.review()
        if cut is not None:
            assert 0 < cut <= self.SIZE // 2
            assert all(owner is None for owner in self.owners[cut:])

    @invariant()
    def free_parts_are_whole(self) -> None:
        gaps = joined(at for at, owner in enumerate(self.owners) if owner is None)
        assert self.parts._free == gaps
        assert self.parts.used == sum(self.taken.values())

    def teardown(self) -> None:
        for start, size in self.taken.items():
            self.parts.give_back(start, size)
        assert self.parts._free == [(0, self.SIZE)]
        assert self.parts.used == 0


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
