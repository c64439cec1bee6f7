"""Memory to write to: when it is full, what is given back, and rows side by side."""

from __future__ import annotations

import logging
import os
from typing import Any

import pytest
from ends import MB, PAGE, SIZE, Link, decode, filled, is_shared, pages_of

from service_streamer.workers.memory.payload import LARGE
from service_streamer.workers.payload_channel import Encoder, SharedMemory

pytestmark = pytest.mark.usefixtures("nothing_is_mapped")


def pages(link: Link, count: int) -> Any:
    """What takes so many pages; it goes with the message if there is no room."""
    assert count * PAGE >= LARGE
    return link.encode(filled(1, count * PAGE))


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


def test_large_blocks_are_taken_in_sizes_that_are_few() -> None:
    for count, taken in ((9, 9), (16, 16), (17, 18), (18, 18), (31, 32), (33, 36), (147, 160)):
        link = Link()
        payload = pages(link, count)
        assert is_shared(payload)
        assert link.used == taken * PAGE


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


def test_full_memory_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    link = Link(MB)
    for _ in range(3):
        payload = link.encode(filled(5, 2 * MB))
        assert decode(payload).tobytes() == bytes([5]) * (2 * MB)
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert "shared_memory_limit" in record.getMessage()
    assert is_shared(link.encode(filled(5)))


def test_a_handler_that_raises_does_not_lose_the_item(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(record: logging.LogRecord) -> bool:
        raise RuntimeError

    logger = logging.getLogger("service_streamer.workers.payload_channel")
    logger.addFilter(fail)
    try:
        payload = Link(PAGE).encode(filled(5))
    finally:
        logger.removeFilter(fail)
    assert decode(payload)[0] == 5


def test_the_size_of_a_large_payload_is_lower_in_batches() -> None:
    encoder = Link().encoder

    def kinds() -> list[bool]:
        return [is_shared(encoder.encode(filled(1, size))) for size in (15_000, 17_000, 33_000)]

    assert kinds() == [False, False, True]
    encoder.batch = 4
    assert kinds() == [False, True, True]
    encoder.batch = 3
    assert kinds() == [False, False, True]
    encoder.batch = 64
    encoder.close()
    assert kinds() == [False, False, False]


def test_an_encoder_without_memory_sends_everything_with_the_message() -> None:
    link = Link()
    payload = link.encode(filled(1))
    link.encoder.close()
    assert is_shared(payload)
    for encoder in (Encoder(None, "things"), link.encoder):
        assert decode(encoder.encode([filled(5), bytes(SIZE)]))[0].tolist() == [5] * SIZE
    del payload
    assert link.used == 0


# -- which part is taken


def test_the_lowest_gap_that_is_wide_enough_is_taken() -> None:
    """The top is left free, to be given back to the machine."""
    link = Link(96 * PAGE)
    held = [pages(link, count) for count in (9, 10, 12, 10, 14, 10)]
    starts = [each.wire[1] for each in held]
    del held[4], held[2], held[0]
    assert [pages(link, count).wire[1] for count in (9, 11, 13)] == [starts[n] for n in (0, 2, 4)]
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


@pytest.mark.parametrize("is_kept", [True, False])
@pytest.mark.parametrize("is_in_use", [True, False])
def test_memory_is_not_given_back_while_it_is_in_use_or_registered(
    is_kept: bool, is_in_use: bool
) -> None:
    link = Link(8 * MB)
    link.arena.is_kept = is_kept
    burst = [link.encode(filled(1, 6 * MB)), link.encode(filled(2, MB))]
    del burst[0]
    if not is_in_use:
        burst.clear()
    for _ in range(3):
        pass_time(link)
    assert (pages_of(link.arena.memory) > 6 * MB) is (is_kept or is_in_use)


# -- rows


def starts(payloads: list[Any]) -> list[int]:
    return [placed.wire[3] for placed in payloads]


def test_things_of_one_size_lie_side_by_side() -> None:
    link = Link(rows=4)
    payloads = [link.encode(filled(n)) for n in range(4)]
    first = payloads[0].wire[1]
    assert {placed.wire[1] for placed in payloads} == {first}
    assert starts(payloads) == [first + n * SIZE for n in range(4)]
    got = link.send(*payloads)
    assert [each.tobytes() for each in got] == [bytes([n]) * SIZE for n in range(4)]
    start = got[0].ctypes.data
    assert [each.ctypes.data - start for each in got] == [n * SIZE for n in range(4)]
    view = link.readers[0].view(start, 4 * SIZE)
    assert view is not None
    assert view == b"".join(bytes([n]) * SIZE for n in range(4))


def test_when_a_block_is_full_the_next_one_is_begun() -> None:
    link = Link(rows=2)
    payloads = [link.encode(filled(n)) for n in range(20)]
    by_block: dict[int, list[Any]] = {}
    for placed in payloads:
        by_block.setdefault(placed.wire[1], []).append(placed)
    assert len(by_block) > 1
    for block, rows in by_block.items():
        assert starts(rows) == [block + n * SIZE for n in range(len(rows))]
        assert all(start + SIZE <= block + rows[0].wire[2] for start in starts(rows))
    assert [each[0] for each in link.send(*payloads)] == list(range(20))


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


def test_rows_of_several_sizes_are_open_at_once() -> None:
    link = Link(16 * MB, rows=4)
    sizes = [SIZE, SIZE + 1, SIZE + 2, SIZE + 3]
    payloads = [link.encode(filled(n, size)) for n in range(3) for size in sizes]
    for column in range(4):
        rows = payloads[column::4]
        assert starts(rows) == [rows[0].wire[1] + n * sizes[column] for n in range(3)]
    one = link.encode(filled(1, SIZE + 4))  # and the one that was not used for longest is closed
    again = [link.encode(filled(n, size)) for n, size in enumerate(sizes[::-1])]
    assert starts(again[:3]) == [payloads[n].wire[1] + 3 * sizes[n] for n in (3, 2, 1)]
    assert again[3].wire[1] != payloads[0].wire[1]
    got = [each[0] for each in link.send(*payloads, *again, one)]
    assert got == [*[0] * 4, *[1] * 4, *[2] * 4, 0, 1, 2, 3, 1]


def test_a_block_of_rows_is_free_when_all_of_them_are() -> None:
    link = Link(rows=2)
    payloads = [link.encode(filled(n)) for n in range(12)]
    assert len({placed.wire[1] for placed in payloads}) == 2
    one = payloads[0].wire[2]
    first = link.send(*payloads[:2])
    second = link.send(*payloads[2:6])
    others = link.send(*payloads[6:])
    payloads.clear()
    assert link.used == 2 * one
    del first[0], second
    assert link.used == 2 * one
    assert first[0][0] == 1
    del first
    del others
    assert link.used == one, "it is kept to be filled"
    link.share(filled(1, SIZE + 1))
    link.close_rows()
    assert link.used == 0


def test_as_many_rows_are_expected_as_batches_have() -> None:
    cases: list[tuple[list[int], int]] = [
        *(([], 0), ([5], 5), ([5, 7], 7), ([7, 5], 6), ([64, 1, 1], 62), ([1, 1], 1)),
        ([3, 1, 9, 9], 9),
    ]
    for counts, rows in cases:
        memory = SharedMemory(4 * MB)
        for count in counts:
            memory.expect_rows(count)
        assert memory.arena is not None
        assert memory.arena.rows == rows
        memory.close()
        memory.expect_rows(3)


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
