"""What each side tells the other, the web process's end and the worker's."""

from __future__ import annotations

import contextlib
import gc
import itertools
import mmap
import os
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ends import MB, PAGE, SIZE, Link, decode, filled, is_shared, read_only, used

from service_streamer.workers.payload_channel import Memories, SharedMemory, in_worker, kept

pytestmark = pytest.mark.usefixtures("nothing_is_mapped")

# -- accounts


@pytest.mark.parametrize("releases", [[[0]] * 3, [[0, 0], [0]], [[0], [0, 0]]])
def test_a_block_is_lent_until_it_was_given_back_as_often(releases: list[list[int]]) -> None:
    link = Link(rows=4)
    writer = link.writers[0]
    rows = [link.encode(filled(n)) for n in range(4)]
    block = rows[0].wire[1]
    for batch in ([rows[0], rows[1], b"", None], [rows[2], rows[0]], [rows[3]]):
        writer.sent(batch)  # in one message: told once
    rows.clear()
    batch.clear()
    link.close_rows()
    writer.released([])
    for release in releases:
        assert used(link.arena) > 0
        writer.released([block for _ in release])
    assert used(link.arena) == 0


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


def test_memory_is_unused_while_nothing_is_large() -> None:
    link = Link()
    assert link.share(1, "a", filled(1, 10))[:2] == [1, "a"]
    assert not link.arena.is_used
    assert not link.readers[0].window.is_used
    assert link.readers[0].sent([None, b"x"]) == []
    link.share(filled(1))
    assert link.arena.is_used
    assert link.readers[0].window.is_used


def test_failed_results_and_small_ones_are_no_news_and_two_rows_are_one_look() -> None:
    link = Link(private=False, rows=4)
    rows = [link.encode(filled(n)) for n in range(2)]
    received = link.receive(None, pickle.dumps(3), *rows)
    assert received[:2] == [None, pickle.dumps(3)]
    assert [decode(each)[0] for each in received[2:]] == [0, 1]
    received.clear()
    assert len(link.readers[0].sent([])) == 1


# -- results for several


def test_each_caller_gets_memory_of_its_own_of_a_kept_result(private: bool) -> None:
    link = Link(private=private)
    item = {"a": filled(7), "b": [read_only(filled(8)), memoryview(bytes(SIZE))]}
    received = link.receive(link.encode(item))
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


def test_a_large_stream_can_be_kept_and_a_small_result_is_kept_as_it_is() -> None:
    link = Link(private=False)
    received = link.receive(link.encode([bytes(SIZE), filled(3)]))
    copied = kept(received.pop())
    assert decode(copied)[0] == bytes(SIZE)
    assert decode(copied)[1][-1] == 3
    for payload in (None, b"abc", pickle.dumps([1])):
        assert kept(payload) is payload


# -- how long it lives


def memory_descriptors() -> int:
    count = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the one that lists them
            count += os.readlink(f"/proc/self/fd/{name}").startswith("/memfd:service_streamer")
    return count


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
    memory = Link().arena.memory
    memory.__del__()
    reused = os.open("/dev/null", os.O_RDONLY)  # most likely that number again
    del memory
    assert os.readlink(f"/proc/self/fd/{reused}") == "/dev/null"
    os.close(reused)


# -- how much there is


@pytest.mark.parametrize(
    ("files", "limit"),
    [
        ({}, None), ({"memory.max": "max\n"}, None), ({"memory.max": "4000000\n"}, 1_000_000),
        ({"memory/memory.limit_in_bytes": "8000000\n"}, 2_000_000),
        ({"memory/memory.limit_in_bytes": "9223372036854771712\n"}, None),
        ({"memory.max": "max\n", "memory/memory.limit_in_bytes": "8000000\n"}, 2_000_000),
        ({"memory.max": "4000000", "memory/memory.limit_in_bytes": "8000000"}, 1_000_000),
        ({"memory.max": ""}, None), ({"memory.max": "0"}, 0),
    ],
    ids=str,
)  # fmt: skip
def test_a_quarter_of_what_there_is_may_be_shared(
    files: dict[str, str], limit: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = Path.read_text
    monkeypatch.setattr(
        Path, "read_text", lambda path: read(tmp_path / path.relative_to("/sys/fs/cgroup"))
    )
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert SharedMemory(None).size == (machine // 4 if limit is None else limit) // 2


def test_too_little_memory_is_none_and_a_little_does_no_harm(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for limit in (0, 1, 2 * PAGE - 1):
        memory = SharedMemory(limit)
        assert memory.arena is None
        assert memory.for_worker(1) is None
        assert not is_shared(memory.encoder.encode(filled(1)))
        memory.expect_rows(4)
        memory.close()
    assert caplog.records == []
    encoder, exchange = in_worker(None)
    assert exchange is None
    assert not is_shared(encoder.encode(filled(1)))
    for limit in (2 * PAGE, 2 * PAGE + 1, 10 * PAGE):
        memory = SharedMemory(limit)
        ends = memory.for_worker(4)
        assert ends is not None
        assert ends[0].responses.size >= PAGE
        assert decode(memory.encoder.encode(filled(1)))[0] == 1


@pytest.mark.parametrize("lacks", ["memory files", "room to map them"])
def test_payloads_go_through_pipes_where_there_is_no_shared_memory(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, lacks: str
) -> None:
    memories = Memories(Link().arena.memory, Link().arena.memory)

    def unmapped(*_: Any) -> mmap.mmap:
        raise OSError(12, "Cannot allocate memory")

    if lacks == "memory files":
        monkeypatch.delattr(os, "memfd_create")
    else:
        monkeypatch.setattr(mmap, "mmap", unmapped)
    memory = SharedMemory(4 * MB)
    assert memory.for_worker(1) is None
    assert decode(memory.encoder.encode(filled(1)))[0] == 1
    [record] = caplog.records
    assert "no shared memory" in record.getMessage()
    if lacks == "memory files":
        return
    encoder, exchange = in_worker(memories)
    assert exchange is not None
    assert not is_shared(encoder.encode(filled(1)))


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
    assert not is_shared(memory.encoder.encode(filled(7)))


def test_memory_may_be_closed_while_another_thread_writes() -> None:
    for _ in range(20):
        memory = SharedMemory(4 * MB)
        begun = threading.Barrier(2)

        def encode(memory: SharedMemory = memory, begun: threading.Barrier = begun) -> None:
            begun.wait()
            for number in range(10):
                payload = memory.encoder.encode(filled(number))
                assert is_shared(payload) or decode(payload)[0] == number

        with ThreadPoolExecutor(1) as thread:
            done = thread.submit(encode)
            begun.wait()
            memory.close()
            done.result()
