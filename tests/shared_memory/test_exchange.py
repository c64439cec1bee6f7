"""What each side tells the other, and memory that is passed on to a process which runs already."""

from __future__ import annotations

import contextlib
import gc
import itertools
import mmap
import os
import pickle
import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ends import MB, SIZE, Link, decode, filled, is_shared, read_only

from service_streamer.pool.pool_memory import MemorySocket, PassingLink, ReadingLink
from service_streamer.workers.codec import Codec
from service_streamer.workers.memory_link import SharedMemory, shareable

pytestmark = pytest.mark.usefixtures("nothing_is_mapped")


# -- results for several


def test_each_caller_gets_memory_of_its_own_of_a_kept_result(private: bool) -> None:
    link = Link(private=private)
    item = {"a": filled(7), "b": [read_only(filled(8)), memoryview(bytes(SIZE))]}
    received = link.receive(link.encode(item))
    copied = shareable(received[0])
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
    copied = shareable(received.pop())
    assert decode(copied)[0] == bytes(SIZE)
    assert decode(copied)[1][-1] == 3
    for payload in (None, b"abc", pickle.dumps([1])):
        assert shareable(payload) is payload


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
        there = ends[0]()
        assert web.arena is not None
        codec = Codec(web.arena.put)
        payload = codec.encode(filled(7))
        batch = [payload]
        ends[1].lend(batch)
        there.receive(batch)
        got = decode(batch.pop())
        assert memory_descriptors() > before
        del payload, there, ends
        web.close()
        codec.close()
        assert not is_shared(codec.encode(filled(7)))
        del web
        assert got[0] == 7
        del got
        gc.collect()
        assert memory_descriptors() == before


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


def test_payloads_go_through_pipes_where_there_is_no_room_to_map_memory(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ends = SharedMemory(4 * MB).for_worker(1)
    assert ends is not None

    def unmapped(*_: Any) -> mmap.mmap:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(mmap, "mmap", unmapped)
    assert SharedMemory(4 * MB).for_worker(1) is None
    [record] = caplog.records
    assert "no shared memory" in record.getMessage()
    assert ends[0]().arena is None


# -- memory that is passed on


def passing(*, private: bool = False) -> tuple[PassingLink, ReadingLink]:
    sender = PassingLink(None, None)
    return sender, ReadingLink(None, None, sender.pop_receiver(), private=private)


def mapped() -> int:
    """How many memories of ours this process has mapped."""
    return Path("/proc/self/maps").read_text().count("service_streamer")


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def new_memory() -> Any:
    return Link(MB).arena.memory


def test_a_payload_is_read_in_memory_that_came_later() -> None:
    sender, reader = passing(private=True)
    links = [Link(MB) for _ in range(2)]
    payloads = [link.encode(filled(n)) for n, link in enumerate(links)]
    for link in links:
        assert sender.pass_on(link.arena.memory)
        assert sender.pass_on(link.arena.memory)  # nothing is sent again
    numbers = [link.arena.memory.number for link in links]
    wires = [(number, *each.wire[1:]) for each, number in zip(payloads, numbers, strict=True)]
    batch: list[Any] = [*wires]
    reader.receive(batch)
    items = [decode(payload) for payload in batch]
    batch.clear()
    for n, item in enumerate(items):
        assert (item == n).all()
        item += 1  # which no other reader sees
    assert reader.lend([]) == []
    del item, items[0]
    assert reader.lend([]) == [(numbers[0], wires[0][1])]
    items.clear()
    assert reader.lend([]) == [(numbers[1], wires[1][1])]
    [again] = links[1].send(payloads[1])
    assert (again == 1).all()


def test_forgotten_memory_is_unmapped_and_closed() -> None:
    sender, link = passing()
    before = mapped(), descriptors()
    memories = [new_memory() for _ in range(3)]
    for memory in memories:
        assert sender.pass_on(memory)
    assert link.take_in()
    assert mapped() == before[0] + 3
    for memory in memories:
        memory.is_left = True
        sender.review()
        sender.review()  # once is enough
    assert link.take_in()
    del memory, memories
    gc.collect()
    assert (mapped(), descriptors()) == before


def test_a_reader_that_takes_nothing_gets_no_more_and_blocks_nobody() -> None:
    sender, link = passing()
    memory = new_memory()
    rounds = 0
    while sender.pass_on(memory):  # until the socket is full
        memory.is_left = True
        sender.review()
        rounds += 1
    assert rounds > 1
    assert link.take_in()
    assert sender.pass_on(memory)
    payloads: list[Any] = [(memory.number, 0, 0, 0, (), b"N.")]
    link.receive(payloads)
    assert payloads[0].load() is None


def test_a_reader_has_so_many_memories_at_most() -> None:
    sender, link = passing()
    memories = [new_memory() for _ in range(129)]
    sent = []
    for memory in memories:
        sent.append(sender.pass_on(memory))
        assert link.take_in()
    assert sent == [True] * 128 + [False]
    memories[0].is_left = True
    sender.review()
    assert sender.pass_on(memories[128])
    assert not sender.pass_on(new_memory())


def test_a_block_that_could_not_be_read_is_reported() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    link = ReadingLink(None, None, MemorySocket(theirs))
    # As the kernel delivers it to a process that may not open more files: without a descriptor.
    ours.send((7).to_bytes(8, "little", signed=True))
    payloads: list[Any] = [(7, 4096, 4096, 4096, (), b"")]
    link.receive(payloads)
    with pytest.raises(OSError, match="too many files open"):
        payloads[0].load()
    payloads.clear()
    assert link.pop_ended() == [(7, 4096)]
    assert link.pop_ended() == []
    ours.close()


def test_the_end_of_the_sender_is_seen() -> None:
    sender, link = passing()
    assert link.take_in()
    sender.close()
    assert not sender.pass_on(new_memory())
    assert not link.take_in()
