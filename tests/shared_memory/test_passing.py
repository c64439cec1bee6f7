"""Memory that is passed on to a process which runs already."""

from __future__ import annotations

import gc
import os
import socket
from pathlib import Path
from typing import Any

import pytest
from ends import MB, Link, filled, used

from service_streamer.workers.memory.passing import (
    MemorySender,
    MemorySocket,
    Windows,
    memory_sockets,
)

pytestmark = pytest.mark.usefixtures("nothing_is_mapped")


def ends(*, private: bool = False) -> tuple[MemorySender, Windows]:
    sender, receiver = memory_sockets()
    return sender, Windows(receiver, private=private)


def mapped() -> int:
    """How many memories of ours this process has mapped."""
    return Path("/proc/self/maps").read_text().count("service_streamer")


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def new_memory() -> Any:
    return Link(MB).arena.memory


def test_a_payload_is_read_in_memory_that_came_later() -> None:
    sender, windows = ends(private=True)
    reader = Link().readers[0]
    reader.more = windows
    links = [Link(MB) for _ in range(2)]
    payloads = [link.encode(filled(n)) for n, link in enumerate(links)]
    for link in links:
        assert sender.send(link.arena.memory)
        assert sender.send(link.arena.memory)  # nothing is sent again
    load = reader.loader()
    numbers = [link.arena.memory.number for link in links]
    wires = [(*each.wire, number) for each, number in zip(payloads, numbers, strict=True)]
    items = [load(wire) for wire in wires]
    for n, item in enumerate(items):
        assert (item == n).all()
        item += 1  # which no other reader sees
    assert reader.sent([]) == []
    del item, items[0], load
    assert reader.sent([]) == [(numbers[0], wires[0][1])]
    items.clear()
    assert reader.sent([]) == [(numbers[1], wires[1][1])]
    [again] = links[1].send(payloads[1])
    assert (again == 1).all()


def test_forgotten_memory_is_unmapped_and_closed() -> None:
    sender, windows = ends()
    before = mapped(), descriptors()
    memories = [new_memory() for _ in range(3)]
    for memory in memories:
        assert sender.send(memory)
    assert windows.take_in()
    assert mapped() == before[0] + 3
    for memory in memories:
        sender.forget(memory.number)
        sender.forget(memory.number)  # once is enough
    assert windows.take_in()
    del memory, memories
    gc.collect()
    assert (mapped(), descriptors()) == before


def test_a_reader_that_takes_nothing_gets_no_more_and_blocks_nobody() -> None:
    sender, windows = ends()
    memory = new_memory()
    rounds = 0
    while sender.send(memory):  # until the socket is full
        sender.forget(memory.number)
        rounds += 1
    assert rounds > 1
    assert windows.take_in()
    assert sender.send(memory)
    assert windows.window(memory.number, 0)


def test_a_reader_has_so_many_memories_at_most() -> None:
    sender, windows = ends()
    memories = [new_memory() for _ in range(129)]
    sent = []
    for memory in memories:
        sent.append(sender.send(memory))
        assert windows.take_in()
    assert sent == [True] * 128 + [False]
    sender.forget(memories[0].number)
    assert sender.send(memories[128])
    assert {each.number for each in sender.passed()} == {each.number for each in memories[1:]}


def test_a_block_that_could_not_be_read_is_reported() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    windows = Windows(MemorySocket(theirs), private=False)
    # As the kernel delivers it to a process that may not open more files: without a descriptor.
    ours.send((7).to_bytes(8, "little", signed=True))
    with pytest.raises(OSError, match="too many files open"):
        windows.window(7, 4096)
    assert windows.ended() == [(7, 4096)]
    assert windows.ended() == []
    ours.close()


def test_the_end_of_the_sender_is_seen() -> None:
    sender, windows = ends()
    assert windows.take_in()
    sender.close()
    assert not sender.send(new_memory())
    assert not windows.take_in()


def test_several_memories_with_the_same_blocks_are_told_apart() -> None:
    sender, windows = ends()
    link = Link(MB)
    [writer], [reader] = link.writers, link.readers
    reader.more = windows
    links = [Link(MB) for _ in range(2)]
    arenas = [each.arena for each in links]
    batch: list[Any] = [link.encode(filled(9))]
    for n, (each, arena) in enumerate(zip(links, arenas, strict=True)):
        assert sender.send(arena.memory)
        placed = each.encode(filled(n))
        placed.wire = *placed.wire[:5], arena.memory.number
        placed.lease = Borrowed(placed.lease, arena.memory.number)
        batch.append(placed)
    assert len({each.wire[1] for each in batch}) == 1  # the first block of each
    writer.sent(batch)
    load = reader.loader()
    items = [load(wire) for wire in batch]
    del placed, load
    assert [int(item[0]) for item in items] == [9, 0, 1]
    assert all(used(arena) for arena in arenas)
    del items[1]
    writer.released(reader.sent([]))
    assert [used(arena) > 0 for arena in arenas] == [False, True]
    assert used(link.arena)
    items.clear()
    writer.released(reader.sent([]))
    assert not any(map(used, arenas))
    assert not used(link.arena)


class Borrowed:
    """A lease of a block in a third process's memory."""

    def __init__(self, lease: Any, number: int) -> None:
        self.lease = lease
        self.block = number, lease.block
