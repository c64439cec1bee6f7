"""Memory to write to: when it is full, what is given back, and rows side by side."""

from __future__ import annotations

import os
from typing import Any

import pytest
from ends import LARGE, MB, PAGE, SIZE, Link, filled, is_shared, pages_of

pytestmark = pytest.mark.usefixtures("nothing_is_mapped")


# -- when it is full


def test_a_payload_goes_with_the_message_if_there_is_no_room() -> None:
    link = Link(16 * PAGE)
    assert not is_shared(link.encode(filled(1, 17 * PAGE)))
    first = link.encode(filled(1, 9 * PAGE))
    assert not is_shared(link.encode(filled(1, 9 * PAGE)))
    assert link.used == 9 * PAGE
    del first
    assert is_shared(link.encode(filled(1, 16 * PAGE)))
    assert link.used == 0


def test_blocks_of_rows_are_given_up_when_the_room_is_needed() -> None:
    link = Link(8 * 64 * PAGE, rows=4)
    for size in (8 * PAGE, 9 * PAGE, 10 * PAGE, 11 * PAGE):
        link.encode(filled(1, size))
    assert link.used >= 4 * 32 * PAGE
    whole = link.encode(filled(1, 8 * 64 * PAGE))
    assert is_shared(whole)
    assert link.used == 8 * 64 * PAGE
    del whole
    assert link.used == 0


# -- which part is taken


def test_the_lowest_gap_that_is_wide_enough_is_taken() -> None:
    """The top is left free, to be given back to the machine."""
    link = Link(96 * PAGE)

    def pages(count: int) -> Any:
        return link.encode(filled(1, count * PAGE))

    held = [pages(count) for count in (9, 10, 12, 10, 14, 10)]
    starts = [each.wire[1] for each in held]
    del held[4], held[2], held[0]
    assert [pages(count).wire[1] for count in (9, 11, 13)] == [starts[n] for n in (0, 2, 4)]
    assert link.used == 30 * PAGE


# -- memory that is not needed any more


def pass_time(link: Link) -> None:
    """Put down so many small things that it is looked at what was needed meanwhile."""
    for _ in range(513):
        link.encode(filled(1, LARGE))


def test_after_a_burst_the_memory_is_given_back_to_the_machine(private: bool) -> None:
    link = Link(8 * MB, private=private)
    before = [link.encode(filled(n)) for n in range(3)]
    burst = link.share(*(filled(9, MB) for _ in range(6)))
    assert pages_of(link.arena.memory) > 6 * MB
    del burst
    link.settle()
    pass_time(link)
    assert pages_of(link.arena.memory) > 6 * MB, "the burst was since the last time"
    pass_time(link)
    assert pages_of(link.arena.memory) < MB
    assert [each[-1] for each in link.send(*before)] == [0, 1, 2]
    for turn in range(2):
        again = link.share(*(filled(turn + n, MB) for n in range(6)))
        assert [each[-1] for each in again] == [turn + n for n in range(6)]
        again[0][:] = 77
        del again
        link.settle()


@pytest.mark.parametrize("is_in_use", [True, False])
def test_memory_is_not_given_back_while_it_is_in_use(is_in_use: bool) -> None:
    link = Link(8 * MB)
    burst = [link.encode(filled(1, 6 * MB)), link.encode(filled(2, MB))]
    del burst[0]
    if not is_in_use:
        burst.clear()
    for _ in range(3):
        pass_time(link)
    assert (pages_of(link.arena.memory) > 6 * MB) is is_in_use


# -- rows


@pytest.mark.parametrize(
    ("rows", "item"),
    [
        (0, filled(1)), (1, filled(1)), (4, filled(1, 4 * MB // 12)), (4, [filled(1), filled(2)]),
        (4, bytes(SIZE)), (4, ["x" * 5000, filled(1)]),
    ],
    ids=["alone", "of one", "too large", "two buffers", "a large stream", "both"],
)  # fmt: skip
def test_what_is_no_row_has_pages_of_its_own(rows: int, item: Any) -> None:
    link = Link(4 * MB, rows=rows)
    payloads = [link.encode(item) for _ in range(3)]
    assert len({placed.wire[1] for placed in payloads}) == 3
    assert all(placed.wire[1] % PAGE == 0 for placed in payloads)


# -- interrupted


def test_a_finalizer_that_comes_in_between_gets_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs in the thread that holds the lock, in the midst of what that is at."""
    link = Link(MB)
    between: list[bool] = []
    allocate = os.posix_fallocate

    def interrupted(*args: int) -> None:
        between.append(is_shared(link.encode(filled(2))))
        allocate(*args)

    monkeypatch.setattr(os, "posix_fallocate", interrupted)
    placed = link.encode(filled(1))
    assert between == [False]
    assert link.used == placed.lease.size


def test_a_payload_goes_with_the_message_if_the_machine_has_no_pages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Writing there all the same would end the process."""
    link = Link(MB)
    first = link.encode(filled(1))

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", fail)
        assert not is_shared(link.encode(filled(2)))
        assert link.used == first.lease.size
        del first
        second = link.encode(filled(3))  # on the pages that are there
    third = link.encode(filled(4))
    assert link.used == second.lease.size + third.lease.size
