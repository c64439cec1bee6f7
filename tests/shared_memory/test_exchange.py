"""What each side tells the other, the web process's end and the worker's."""

from __future__ import annotations

import contextlib
import gc
import itertools
import multiprocessing
import os
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ends import MB, SIZE, Link, Unmapped, decode, filled, put, read_only, used

from service_streamer.workers.memory import shared_memory
from service_streamer.workers.memory.arena import PAGE, Arena, Lent
from service_streamer.workers.memory.shared_memory import (
    Memory,
    Placed,
    default_limit,
)
from service_streamer.workers.payload_channel import (
    Memories,
    Received,
    SharedMemory,
    in_worker,
    kept,
)

pytestmark = pytest.mark.usefixtures("nothing_is_mapped")

# -- accounts


def test_a_block_is_lent_until_it_was_given_back_as_often() -> None:
    arena, lent = Arena(Memory(MB)), Lent()
    arena.rows = 4
    rows: list[Any] = [put(arena, filled(n)) for n in range(4)]
    block = rows[0].lease.block
    lent.lend([rows[0], rows[1], b"", None])  # in one message: told once
    lent.lend([rows[2], rows[0]])
    lent.lend([])
    rows.clear()
    arena._open.clear()
    lent.ended([])
    assert used(arena) > 0
    lent.ended([block])
    assert used(arena) > 0
    lent.ended([block])
    assert used(arena) == 0


def test_one_message_can_tell_of_the_end_of_a_block_twice() -> None:
    arena, lent = Arena(Memory(MB)), Lent()
    placed = put(arena, filled(1))
    block = placed.lease.block
    for _ in range(3):
        lent.lend([placed])
    del placed
    lent.ended([block, block])
    assert used(arena) > 0
    lent.ended([block])
    assert used(arena) == 0


def test_a_reader_tells_of_a_block_as_often_as_it_was_told() -> None:
    link = Link(private=False, rows=4)
    rows = [link.encode(filled(n)) for n in range(4)]
    block = rows[0].wire[1]
    first = link.send(*rows[:2])
    second = link.send(*rows[2:], rows[0])
    [reader] = link.readers
    assert reader.sent([]) == []
    del first[0]
    assert reader.sent([]) == []
    del first[0]
    assert reader.sent([]) == [block]
    del second[0], second[1]
    link.send(rows[1])
    assert reader.sent([]) == [block]
    link.send(rows[1])
    second.clear()
    assert reader.sent([]) == [block, block]
    assert reader.sent([]) == []


def test_two_rows_in_one_answer_are_one_look_at_their_block() -> None:
    link = Link(private=False, rows=4)
    payloads: list[Any] = [link.encode(filled(n)) for n in range(2)]
    link.writers[0].sent(payloads)
    received = payloads
    link.readers[0].received(received)
    assert [decode(each)[0] for each in received] == [0, 1]
    received.clear()
    ended = link.readers[0].sent([])
    assert len(ended) == 1


def test_where_nothing_is_large_nothing_is_counted() -> None:
    link = Link()
    assert link.share(1, "a", filled(1, 10))[:2] == [1, "a"]
    assert not link.arena.is_used
    assert not link.windows[0].is_used
    assert link.readers[0].sent([None, b"x"]) == []
    link.share(filled(1))
    assert link.arena.is_used
    assert link.windows[0].is_used


def test_failed_results_and_small_ones_are_no_news() -> None:
    link = Link(private=False)
    received: list[Any] = [None, pickle.dumps(3), link.encode(filled(7)).wire]
    link.readers[0].received(received)
    assert received[:2] == [None, pickle.dumps(3)]
    assert type(received[2]) is Received
    assert decode(received[1]) == 3
    assert decode(received[2])[0] == 7


# -- results for several


def test_each_who_decodes_what_is_kept_gets_memory_of_their_own(private: bool) -> None:
    link = Link(private=private)
    item = {"a": filled(7), "b": [read_only(filled(8)), memoryview(bytes(SIZE))]}
    payload = link.encode(item)
    link.writers[0].sent([payload])
    received: list[Any] = [payload.wire]
    del payload
    link.readers[0].received(received)
    copied = kept(received[0])
    first, second, third = decode(received[0]), decode(copied), decode(copied)
    first["a"][:] = 1
    second["a"][:] = 2
    assert set(third["a"].tobytes()) == {7}
    assert set(decode(copied)["a"].tobytes()) == {7}
    assert set(first["a"].tobytes()) == {1}
    for one, other in itertools.combinations((first, second, third), 2):
        assert not np.shares_memory(one["a"], other["a"])
        assert not np.shares_memory(one["b"][0], other["b"][0])
    assert not third["b"][0].flags.writeable
    assert third["b"][1].readonly
    received.clear()
    assert link.used > 0
    del first, one, other
    assert link.used == 0, "what is kept holds nothing of the worker's"
    assert set(decode(copied)["b"][0].tobytes()) == {8}


def test_a_large_stream_can_be_kept() -> None:
    link = Link(private=False)
    received: list[Any] = [link.encode([bytes(SIZE), filled(3)]).wire]
    link.readers[0].received(received)
    copied = kept(received.pop())
    assert decode(copied)[0] == bytes(SIZE)
    assert decode(copied)[1][-1] == 3


@pytest.mark.parametrize("payload", [None, b"abc", pickle.dumps([1])])
def test_what_came_with_the_message_is_kept_as_it_is(payload: Any) -> None:
    assert kept(payload) is payload


# -- the whole of it


def test_both_ways_between_the_web_process_and_a_worker() -> None:
    """As the two sides use it; each message is what comes out of the other's pickle."""
    web = SharedMemory(4 * MB)
    ends = web.for_worker(1)
    assert ends is not None
    memories, here = ends
    encoder, there = in_worker(memories)
    assert there is not None
    results: list[Any] = []
    for turn in range(40):
        items = [web.encoder.encode(filled(turn + n)) for n in range(3)]
        message = pickle.dumps((items, here.sent(items)))
        del items
        payloads, ended = pickle.loads(message)
        there.released(ended)
        load = there.loader()
        batch = [load(payload) for payload in payloads]
        del load, payloads
        outputs = [encoder.encode(np.concatenate([each, each])) for each in batch]
        batch.clear()
        message = pickle.dumps((outputs, there.sent(outputs)))
        del outputs
        payloads, ended = pickle.loads(message)
        here.released(ended)
        here.received(payloads)
        results += [(decode(payload), turn + n) for n, payload in enumerate(payloads)]
        payloads.clear()
        while len(results) > 4:
            got, value = results.pop(0)
            assert got.tobytes() == bytes([value]) * (2 * SIZE)
            del got
    assert web.arena is not None
    assert used(web.arena) == 0
    results.clear()
    there.released(here.sent([]))
    assert encoder._arena is not None
    assert used(encoder._arena) == 0
    web.close()


def answer(memories: Memories, connection: Connection) -> None:
    """A worker: doubles what comes, until nothing does."""
    encoder, exchange = in_worker(memories)
    assert exchange is not None
    while (message := connection.recv()) is not None:
        payloads, ended = message
        exchange.released(ended)
        load = exchange.loader()
        batch = [load(payload) for payload in payloads]
        del load
        results = []
        for item in batch:
            item *= 2  # where it is
            results.append(encoder.encode(item))
        batch.clear()
        item = None
        connection.send((results, exchange.sent(results)))


def memory_descriptors() -> int:
    count = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the one that lists them
            count += os.readlink(f"/proc/self/fd/{name}").startswith("/memfd:service_streamer")
    return count


def test_a_process_that_was_spawned_reads_and_writes_there() -> None:
    context = multiprocessing.get_context("spawn")
    web = SharedMemory(4 * MB)
    ends = web.for_worker(1)
    assert ends is not None
    memories, here = ends
    ours, theirs = context.Pipe()
    process = context.Process(target=answer, args=(memories, theirs))
    process.start()
    theirs.close()
    del memories, ends
    items: list[Any] = [web.encoder.encode(filled(n)) for n in range(3)]
    for _ in range(3):  # the same ones: the process writes to copies of its own
        batch = [*items]
        ours.send((batch, here.sent(batch)))
        payloads, ended = ours.recv()
        assert all(type(payload) is tuple for payload in payloads)
        here.released(ended)
        here.received(payloads)
        assert [set(decode(payload).tobytes()) for payload in payloads] == [{0}, {2}, {4}]
        del payloads
    items.clear()
    result = web.encoder.encode(filled(7))
    batch = [result]
    del result
    ours.send((batch, here.sent(batch)))
    payloads, ended = ours.recv()
    here.released(ended)
    here.received(payloads)
    got = decode(payloads.pop())
    assert web.arena is not None
    assert used(web.arena) == 0
    ours.send(None)
    process.join()
    assert process.exitcode == 0
    assert set(got.tobytes()) == {14}, "it outlives the process"
    ours.close()


def test_descriptors_are_closed_with_the_last_use() -> None:
    gc.collect()
    before = memory_descriptors()
    for _ in range(3):
        web = SharedMemory(4 * MB)
        ends = web.for_worker(2)
        assert ends is not None
        encoder, there = in_worker(ends[0])
        payload = web.encoder.encode(filled(7))
        ends[1].sent([payload])
        got = there.loader()(payload.wire)  # type: ignore[union-attr]
        assert memory_descriptors() > before
        del payload, encoder, there, ends
        web.close()
        del web
        assert got[0] == 7
        del got
        gc.collect()
        assert memory_descriptors() == before


def test_memory_is_closed_once() -> None:
    memory = Memory(PAGE)
    memory.__del__()
    reused = os.open("/dev/null", os.O_RDONLY)  # most likely that number again
    del memory
    os.fstat(reused)
    os.close(reused)


def test_memory_that_cannot_be_had_leaves_no_descriptor() -> None:
    before = memory_descriptors()
    with pytest.raises(OSError):  # noqa: PT011
        Memory(-1)
    gc.collect()
    assert memory_descriptors() == before


# -- how much there is


@pytest.mark.parametrize(
    ("files", "limit"),
    [
        ({}, None),
        ({"memory.max": "max\n"}, None),
        ({"memory.max": "4000000\n"}, 1_000_000),
        ({"memory/memory.limit_in_bytes": "8000000\n"}, 2_000_000),
        ({"memory/memory.limit_in_bytes": "9223372036854771712\n"}, None),
        ({"memory.max": "max\n", "memory/memory.limit_in_bytes": "8000000\n"}, 2_000_000),
        ({"memory.max": "4000000", "memory/memory.limit_in_bytes": "8000000"}, 1_000_000),
        ({"memory.max": ""}, None),
        ({"memory.max": "0"}, 0),
    ],
    ids=str,
)
def test_a_quarter_of_what_there_is_may_be_shared(
    files: dict[str, str], limit: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_memory, "Path", lambda root: tmp_path)
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert default_limit() == (machine // 4 if limit is None else limit)


@pytest.mark.parametrize("limit", [0, 1, 2 * PAGE - 1])
def test_too_little_memory_is_none(limit: int, caplog: pytest.LogCaptureFixture) -> None:
    memory = SharedMemory(limit)
    assert memory.arena is None
    assert memory.for_worker(1) is None
    assert type(memory.encoder.encode(filled(1))) is bytes
    memory.expect_rows(4)
    memory.close()
    assert caplog.records == []
    encoder, exchange = in_worker(None)
    assert exchange is None
    assert type(encoder.encode(filled(1))) is bytes


@pytest.mark.parametrize("limit", [2 * PAGE, 2 * PAGE + 1, 10 * PAGE])
def test_a_little_memory_does_no_harm(limit: int) -> None:
    memory = SharedMemory(limit)
    ends = memory.for_worker(4)
    assert ends is not None
    assert ends[0].responses.size >= PAGE
    assert decode(memory.encoder.encode(filled(1)))[0] == 1


def test_without_memory_files_all_goes_through_pipes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delattr(os, "memfd_create")
    memory = SharedMemory(4 * MB)
    assert memory.for_worker(1) is None
    assert decode(memory.encoder.encode(filled(1)))[0] == 1
    [record] = caplog.records
    assert "no shared memory" in record.getMessage()


def test_where_nothing_can_be_mapped_all_goes_through_pipes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    memories = Memories(Memory(MB), Memory(MB))
    monkeypatch.setattr(Memory, "mapped", Unmapped.mapped)
    memory = SharedMemory(4 * MB)
    assert memory.for_worker(1) is None
    assert len(caplog.records) == 1
    encoder, exchange = in_worker(memories)
    assert exchange is not None
    assert type(encoder.encode(filled(1))) is bytes


def test_a_closed_memory_is_still_what_was_put_there() -> None:
    memory = SharedMemory(4 * MB)
    ends = memory.for_worker(1)
    assert ends is not None
    payload: Any = memory.encoder.encode(filled(7))
    memory.close()
    assert memory.for_worker(1) is None
    _, there = in_worker(ends[0])
    assert there is not None
    assert set(there.loader()(payload.wire).tobytes()) == {7}
    assert type(memory.encoder.encode(filled(7))) is bytes


def test_one_thread_may_close_while_another_one_puts_something_down() -> None:
    for _ in range(20):
        memory = SharedMemory(4 * MB)
        begun = threading.Barrier(2)

        def encode(memory: SharedMemory = memory, begun: threading.Barrier = begun) -> None:
            begun.wait()
            for number in range(10):
                payload = memory.encoder.encode(filled(number))
                assert type(payload) is Placed or decode(payload)[0] == number

        with ThreadPoolExecutor(1) as thread:
            done = thread.submit(encode)
            begun.wait()
            memory.close()
            done.result()
