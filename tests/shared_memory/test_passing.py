"""Memory that is passed on to a process which runs already."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import pytest
from ends import MB, filled, put, used

from service_streamer.workers.memory import passing
from service_streamer.workers.memory.arena import Arena
from service_streamer.workers.memory.passing import MemorySender, Windows, memory_sockets
from service_streamer.workers.memory.shared_memory import Memory
from service_streamer.workers.memory.window import Window
from service_streamer.workers.payload_channel import PayloadChannel

pytestmark = pytest.mark.usefixtures("nothing_is_mapped")


def ends(*, private: bool = False) -> tuple[MemorySender, Windows]:
    sender, receiver = memory_sockets()
    return sender, Windows(receiver, private=private)


def mapped() -> int:
    """How many memories of ours this process has mapped."""
    return Path("/proc/self/maps").read_text().count("service_streamer")


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_payload_is_read_in_memory_that_came_later() -> None:
    sender, windows = ends(private=True)
    reader = PayloadChannel(None, Window(Memory(MB), private=True), windows)
    arenas = [Arena(Memory(MB)) for _ in range(2)]
    payloads = [put(arena, filled(n)) for n, arena in enumerate(arenas)]
    for arena in arenas:
        assert sender.send(arena.memory)
        assert sender.send(arena.memory)  # nothing is sent again
    load = reader.loader()
    numbers = [arena.memory.number for arena in arenas]
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
    again = Window(arenas[1].memory)
    assert (again.load(wires[1], again.look(wires[1])) == 1).all()


def test_what_is_forgotten_is_unmapped_and_closed() -> None:
    sender, windows = ends()
    before = mapped(), descriptors()
    memories = [Memory(MB) for _ in range(3)]
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


def test_what_is_forgotten_may_come_again() -> None:
    sender, windows = ends()
    arena = Arena(Memory(MB))
    placed = put(arena, filled(5))
    for _ in range(2):
        assert sender.send(arena.memory)
        window = windows.window(arena.memory.number, 0)
        look = window.look(placed.wire)
        item = window.load(placed.wire, look)
        assert (item == 5).all()
        del item, look
        assert windows.ended() == [(arena.memory.number, placed.lease.block)]
        sender.forget(arena.memory.number)


def test_a_reader_that_takes_nothing_gets_no_more_and_blocks_nobody() -> None:
    sender, windows = ends()
    memory = Memory(MB)
    rounds = 0
    while sender.send(memory):  # until the socket is full
        sender.forget(memory.number)
        rounds += 1
    assert rounds > 1
    assert windows.take_in()
    assert sender.send(memory)
    assert windows.window(memory.number, 0)


def test_a_reader_has_so_many_memories_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passing, "_MOST", 2)
    sender, _ = ends()
    one, other, third = (Memory(MB) for _ in range(3))
    assert sender.send(one)
    assert sender.send(other)
    assert not sender.send(third)
    sender.forget(one.number)
    assert sender.send(third)
    assert {each.number for each in sender.passed()} == {other.number, third.number}


def test_a_block_that_could_not_be_read_is_reported() -> None:
    sender, windows = ends()
    # As the kernel delivers it to a process that may not open more files: without a descriptor.
    sender._connection.send(passing._packed(7))
    with pytest.raises(OSError, match="too many files open"):
        windows.window(7, 4096)
    assert windows.ended() == [(7, 4096)]
    assert windows.ended() == []


def test_the_end_of_the_sender_is_seen() -> None:
    sender, windows = ends()
    assert windows.take_in()
    sender.close()
    assert not sender.send(Memory(MB))
    assert not windows.take_in()


def test_several_memories_with_the_same_blocks_are_told_apart() -> None:
    sender, windows = ends()
    writer = PayloadChannel(Arena(Memory(MB)), Window(Memory(MB)))
    reader = PayloadChannel(None, Window(writer.arena.memory), windows)  # type: ignore[union-attr]
    arenas = [Arena(Memory(MB)) for _ in range(2)]
    batch: list[Any] = [put(writer.arena, filled(9))]  # type: ignore[arg-type]
    for n, arena in enumerate(arenas):
        assert sender.send(arena.memory)
        placed = put(arena, filled(n))
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
    assert used(writer.arena)  # type: ignore[arg-type]
    items.clear()
    writer.released(reader.sent([]))
    assert not any(map(used, arenas))
    assert not used(writer.arena)  # type: ignore[arg-type]


class Borrowed:
    """A lease of a block in a third process's memory."""

    def __init__(self, lease: Any, number: int) -> None:
        self.lease = lease
        self.block = number, lease.block
