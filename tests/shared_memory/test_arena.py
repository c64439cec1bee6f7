"""Memory to write to: when it is full, what is given back, and rows side by side."""

from __future__ import annotations

import logging
import os
from typing import Any

import pytest
from ends import MB, SIZE, Link, decode, filled, pages_of, put, used

from service_streamer.workers.memory import arena as arena_module
from service_streamer.workers.memory.arena import PAGE, Arena
from service_streamer.workers.memory.payload import LARGE, Parts, dump
from service_streamer.workers.memory.shared_memory import (
    Memory,
    Placed,
)
from service_streamer.workers.payload_channel import (
    Encoder,
    SharedMemory,
)

pytestmark = pytest.mark.usefixtures("nothing_is_mapped")

# -- when it is full


def test_what_does_not_fit_is_not_put_there() -> None:
    arena = Arena(Memory(16 * PAGE))
    assert arena.put(dump(filled(1, 17 * PAGE))) is None  # type: ignore[arg-type]
    first = put(arena, filled(1, 9 * PAGE))
    assert arena.put(dump(filled(1, 9 * PAGE))) is None  # type: ignore[arg-type]
    assert used(arena) == 9 * PAGE
    del first
    put(arena, filled(1, 16 * PAGE))
    assert used(arena) == 0


@pytest.mark.parametrize("size", [PAGE, PAGE + 1, 3 * PAGE - 1])
def test_only_whole_pages_of_the_memory_are_used(size: int) -> None:
    memory = Memory(size)
    arena = Arena(memory)
    placed = [arena.put(Parts([bytes(1)], [memoryview(bytes(100))])) for _ in range(4)]
    assert sum(each is not None for each in placed) == size // PAGE


def test_all_of_a_small_memory_is_used_again_and_again(private: bool) -> None:
    link = Link(3 * 12 * PAGE, private=private)
    for turn in range(30):
        got = link.share(*(filled(turn + n) for n in range(3)))
        assert type(link.encode(filled(0))) is bytes
        assert [each[-1] for each in got] == [turn, turn + 1, turn + 2]
        del got
        assert link.used == 0


def test_open_blocks_are_given_up_when_the_room_is_needed() -> None:
    arena = Arena(Memory(8 * 64 * PAGE))
    arena.rows = 4
    for size in (8 * PAGE, 9 * PAGE, 10 * PAGE, 11 * PAGE):
        put(arena, filled(1, size))
    assert used(arena) >= 4 * 32 * PAGE
    whole = put(arena, filled(1, 8 * 64 * PAGE))
    assert used(arena) == 8 * 64 * PAGE
    del whole
    assert used(arena) == 0


def test_what_cannot_be_copied_leaves_no_room_taken() -> None:
    arena = Arena(Memory(MB))
    wrong = memoryview(bytearray(64)).cast("I")
    with pytest.raises(ValueError, match="structure"):
        arena.put(Parts([b"."], [memoryview(bytes(100)), wrong]))
    assert used(arena) == 0


def test_it_is_said_once_that_it_is_full(caplog: pytest.LogCaptureFixture) -> None:
    arena = Arena(Memory(MB))
    encoder = Encoder(arena, "things")
    for _ in range(3):
        payload = encoder.encode(filled(5, 2 * MB))
        assert decode(payload).tobytes() == bytes([5]) * (2 * MB)
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert "things" in record.getMessage()
    assert "shared_memory_limit" in record.getMessage()
    assert type(encoder.encode(filled(5))) is Placed


def test_a_handler_that_raises_does_not_lose_the_item(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(record: logging.LogRecord) -> bool:
        raise RuntimeError

    logger = logging.getLogger("service_streamer.workers.payload_channel")
    logger.addFilter(fail)
    try:
        payload = Encoder(Arena(Memory(PAGE)), "things").encode(filled(5))
    finally:
        logger.removeFilter(fail)
    assert decode(payload)[0] == 5


def test_in_batches_less_is_large() -> None:
    encoder = Encoder(Arena(Memory(MB)), "things")

    def kinds() -> list[bool]:
        return [
            type(encoder.encode(filled(1, size))) is Placed for size in (15_000, 17_000, 33_000)
        ]

    assert kinds() == [False, False, True]
    encoder.batch = 4
    assert kinds() == [False, True, True]
    encoder.batch = 3
    assert kinds() == [False, False, True]
    encoder.batch = 64
    encoder.close()
    assert kinds() == [False, False, False]


def test_an_encoder_without_an_arena_sends_everything_with_the_message() -> None:
    encoder = Encoder(None, "things")
    arena = Arena(Memory(MB))
    closed = Encoder(arena, "things")
    payload = closed.encode(filled(1))
    closed.close()
    assert type(payload) is Placed
    for each in (encoder, closed):
        assert decode(each.encode([filled(5), bytes(SIZE)]))[0].tolist() == [5] * SIZE
    del payload
    assert used(arena) == 0


# -- memory that is not needed any more


def pass_time(arena: Arena) -> None:
    for _ in range(arena_module._REVIEW_INTERVAL + 1):
        put(arena, filled(1, LARGE))


def test_after_a_burst_the_memory_is_given_back_to_the_machine(private: bool) -> None:
    link = Link(8 * MB, private=private)
    before = [link.encode(filled(n)) for n in range(3)]
    burst = link.share(*(filled(9, MB) for _ in range(6)))
    assert pages_of(link.arena.memory) > 6 * MB
    del burst
    link.settle()
    for _ in range(2):
        pass_time(link.arena)
    assert pages_of(link.arena.memory) < MB
    assert [each[-1] for each in link.send(*before)] == [0, 1, 2]
    for turn in range(2):
        again = link.share(*(filled(turn + n, MB) for n in range(6)))
        assert [each[-1] for each in again] == [turn + n for n in range(6)]
        again[0][:] = 77
        del again
        link.settle()


# -- rows


def starts(payloads: list[Placed]) -> list[int]:
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
    view = link.windows[0].view(start, 4 * SIZE)
    assert view is not None
    assert view == b"".join(bytes([n]) * SIZE for n in range(4))


@pytest.mark.parametrize("rows", [0, 1])
def test_single_things_have_pages_of_their_own(rows: int) -> None:
    link = Link(rows=rows)
    payloads = [link.encode(filled(n)) for n in range(4)]
    assert len({placed.wire[1] for placed in payloads}) == 4
    assert all(start % PAGE == 0 for start in starts(payloads))


@pytest.mark.parametrize(
    "item",
    [[filled(1), filled(2)], bytes(SIZE), ["x" * 5000, filled(1)]],
    ids=["two buffers", "a large stream", "a buffer and a large stream"],
)
def test_what_is_more_than_one_buffer_is_no_row(item: Any) -> None:
    link = Link(rows=4)
    payloads = [link.encode(item) for _ in range(2)]
    assert payloads[0].wire[1] != payloads[1].wire[1]


def test_when_a_block_is_full_the_next_one_is_begun() -> None:
    link = Link(rows=2)
    payloads = [link.encode(filled(n)) for n in range(20)]
    by_block: dict[int, list[Placed]] = {}
    for placed in payloads:
        by_block.setdefault(placed.wire[1], []).append(placed)
    assert len(by_block) > 1
    for block, rows in by_block.items():
        assert starts(rows) == [block + n * SIZE for n in range(len(rows))]
        assert all(start + SIZE <= block + rows[0].wire[2] for start in starts(rows))
    assert [each[0] for each in link.send(*payloads)] == list(range(20))


def test_rows_of_several_sizes_are_open_at_once() -> None:
    link = Link(16 * MB, rows=4)
    sizes = [SIZE, SIZE + 1, SIZE + 2, SIZE + 3]
    payloads = [link.encode(filled(n, size)) for n in range(3) for size in sizes]
    for column in range(4):
        rows = payloads[column::4]
        assert starts(rows) == [rows[0].wire[1] + n * sizes[column] for n in range(3)]
    one = link.encode(filled(1, SIZE + 4))  # and the one that was not used for longest is closed
    again = [link.encode(filled(n, size)) for n, size in enumerate(sizes[::-1])]
    assert starts(again[:3]) == [
        rows[0].wire[1] + 3 * size
        for rows, size in zip(
            (payloads[3::4], payloads[2::4], payloads[1::4]), sizes[:0:-1], strict=True
        )
    ]
    assert again[3].wire[1] != payloads[0].wire[1]
    assert [each[0] for each in link.send(*payloads, *again, one)] == [0] * 4 + [1] * 4 + [
        2
    ] * 4 + [0, 1, 2, 3, 1]


def test_a_row_that_is_too_large_for_a_block_of_several_has_its_own() -> None:
    link = Link(4 * MB, rows=4)
    payloads = [link.encode(filled(n, 4 * MB // 12)) for n in range(3)]
    assert len({placed.wire[1] for placed in payloads}) == 3


def test_a_block_of_rows_is_free_when_all_of_them_are() -> None:
    link = Link(rows=2)
    payloads = [link.encode(filled(n)) for n in range(12)]
    assert len({placed.wire[1] for placed in payloads}) == 2
    one = arena_module.rounded(8 * SIZE)
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
    link.arena._open.clear()
    assert link.used == 0


@pytest.mark.parametrize(
    ("counts", "rows"),
    [([], 0), ([5], 5), ([5, 7], 7), ([7, 5], 6), ([64, 1, 1], 62), ([1, 1], 1), ([3, 1, 9, 9], 9)],
)
def test_as_many_rows_are_expected_as_batches_have(counts: list[int], rows: int) -> None:
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
    arena = Arena(Memory(MB))
    between: list[Any] = []
    take = arena._extents.take

    def interrupted(size: int) -> int | None:
        between.append(arena.put(dump(filled(2))))  # type: ignore[arg-type]
        return take(size)

    monkeypatch.setattr(type(arena._extents), "take", lambda _, size: interrupted(size))
    placed = put(arena, filled(1))
    assert between == [None]
    assert used(arena) == placed.lease.size


def test_where_there_is_no_memory_for_pages_there_is_no_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Writing there all the same would end the process."""
    arena = Arena(Memory(MB))
    first = put(arena, filled(1))

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", fail)
        assert arena.put(dump(filled(2))) is None  # type: ignore[arg-type]
        assert used(arena) == first.lease.size
        del first
        second = put(arena, filled(3))  # on the pages that are there
    third = put(arena, filled(4))
    assert used(arena) == second.lease.size + third.lease.size
