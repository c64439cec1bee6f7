"""Large items and results of a shared pool: the ends of a client, of the pool and of a worker."""

from __future__ import annotations

import functools
import gc
import os
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from service_streamer import Streamer
from service_streamer.pool.client_memory import ClientMemory, ResultMemory
from service_streamer.pool.pool_memory import ClientItems, PoolMemory
from service_streamer.workers.memory import passing
from service_streamer.workers.memory.arena import Arena
from service_streamer.workers.memory.payload import Parts, dump
from service_streamer.workers.memory.shared_memory import Memory, Placed
from service_streamer.workers.payload_channel import in_worker

Shared = Callable[..., Streamer]

MB = 1 << 20
SIZE = 100_000


def filled(value: int, size: int = SIZE) -> Any:
    return np.full(size, value, "u1")


class Worker:
    """A worker's end, and the pool's end of it."""

    def __init__(self, pool: PoolMemory) -> None:
        found = pool.for_worker(1)
        assert found is not None
        memories, self.channel = found
        self.encoder, exchange = in_worker(memories)
        assert exchange is not None
        self.exchange = exchange

    def answers(self, payloads: list[Any], compute: Callable[[Any], Any] = lambda x: x) -> Any:
        """The results of a batch, as the pool gets them."""
        batch = [*payloads]
        self.exchange.released(self.channel.sent(batch))
        load = self.exchange.loader()
        outputs = [self.encoder.encode(compute(load(each))) for each in batch]
        del load
        self.channel.released(self.exchange.sent(outputs))
        self.channel.received(outputs)
        return outputs


class Client:
    """A client's end, and the pool's end of it."""

    def __init__(self, pool: PoolMemory) -> None:
        self.arena = Arena(Memory(4 * MB))
        self.end = ClientMemory(Memory.received(os.dup(self.arena.memory.descriptor)), pool)
        self.results = ResultMemory(os.dup(self.end._receiver.connection.fileno()))
        del self.end._receiver
        self.freed: list[int] = []

    def items(self, *items: Any) -> list[Any]:
        """The payloads of a call, as the pool has them for workers."""
        wires, leases = [], []
        for item in items:
            parts = dump(item)
            assert type(parts) is Parts
            placed = self.arena.put(parts)
            assert placed is not None
            wires.append(placed.wire)
            leases.append(placed.lease)
        del placed
        return self.end.taken(wires, functools.partial(self.freed.append, len(leases)))

    def read(self, outputs: list[Any]) -> list[Any]:
        """What arrives of the outputs of a call."""
        given = pickle.loads(pickle.dumps(self.end.given(outputs)))
        assert self.results.received(given)
        return [each.load() if type(each) is not bytes else pickle.loads(each) for each in given]

    def settle(self) -> None:
        """Its next message."""
        self.end.released(self.results.ended())


@pytest.fixture
def pool() -> Iterator[PoolMemory]:
    memory = PoolMemory(32 * MB)
    yield memory
    memory.close()
    gc.collect()


@pytest.mark.usefixtures("nothing_is_mapped")
def test_a_call_of_large_data_leaves_nothing(pool: PoolMemory) -> None:
    worker, client = Worker(pool), Client(pool)
    outputs = worker.answers(items := client.items(filled(1), filled(2)), lambda item: item + 1)
    assert client.freed == []
    items.clear()
    assert client.freed == [2]
    one, other = client.read(outputs)
    assert (one == 2).all()
    assert (other == 3).all()
    other += 1  # it may be written to
    outputs.clear()
    client.settle()
    assert len(client.end._held) == 2
    del one
    client.settle()
    assert len(client.end._held) == 1
    del other
    client.settle()
    assert not client.end._held
    assert not pool.arena.used  # type: ignore[union-attr] # nothing was copied
    client.end.close()
    worker.channel.close()


@pytest.mark.usefixtures("nothing_is_mapped")
@pytest.mark.parametrize("why", ["pinned", "many"])
def test_what_a_worker_cannot_map_is_copied(
    why: str, pool: PoolMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, client = Worker(pool), Client(pool)
    if why == "pinned":
        worker.channel.is_pinned = True
    else:
        monkeypatch.setattr(passing, "_MOST", 0)
    items = client.items(filled(1))
    batch = [*items]
    worker.channel.sent(batch)
    assert len(batch[0]) == 5  # in the pool's own memory
    assert (worker.exchange.loader()(batch[0]) == 1).all()
    assert pool.arena.used  # type: ignore[union-attr]
    items.clear()
    assert client.freed == [1]
    client.end.close()


def test_what_has_no_room_in_the_pool_either_goes_with_the_message(pool: PoolMemory) -> None:
    worker, client = Worker(pool), Client(pool)
    worker.channel.is_pinned = True
    hold = pool.arena.put(Parts([b""], [memoryview(bytes(16 * MB))]))  # type: ignore[union-attr]
    assert hold is not None
    batch = client.items(filled(3))
    worker.channel.sent(batch)
    assert type(batch[0]) is bytes
    item = worker.exchange.loader()(batch[0])
    assert (item == 3).all()
    item += 1


@pytest.mark.usefixtures("nothing_is_mapped")
def test_a_client_that_keeps_results_leaves_room_for_others(pool: PoolMemory) -> None:
    worker = Worker(pool)
    greedy, other = Client(pool), Client(pool)
    size = 16 * MB // 12

    def made(value: int) -> list[Any]:
        return [worker.encoder.encode(filled(value, size))]

    def received(outputs: list[Any]) -> list[Any]:
        worker.channel.released(worker.exchange.sent(outputs))
        worker.channel.received(outputs)
        worker.exchange.released(worker.channel.sent([]))
        return outputs

    kept = [greedy.read(received(made(n)))[0] for n in range(20)]
    assert all((each == n).all() for n, each in enumerate(kept))
    held = len(greedy.end._held)
    assert 2 <= held <= 4  # a third of the memory
    for n in range(20):
        (result,) = other.read(received(made(n)))
        assert (result == n).all()
        assert other.end._held  # it is there, and not in the message
        del result
        other.settle()
    kept.clear()
    greedy.settle()
    assert not greedy.end._held
    for each in (greedy, other):
        each.end.close()


@pytest.mark.usefixtures("nothing_is_mapped")
def test_memory_is_unmapped_when_its_writer_and_the_last_view_are_gone(pool: PoolMemory) -> None:
    worker, client = Worker(pool), Client(pool)
    (result,) = client.read(worker.answers(client.items(filled(1))))
    windows, theirs = client.results._windows._windows, worker.exchange.more._windows  # type: ignore[union-attr]
    assert len(windows) == len(theirs) == 1
    client.end.review()  # as when another worker has ended
    worker.channel.close()
    client.end.review()
    client.results.take_in()
    assert len(windows) == 1  # the result is there
    assert (result == 1).all()
    del result
    client.settle()
    client.results.take_in()
    assert not windows
    client.end.close()


@pytest.mark.usefixtures("nothing_is_mapped")
def test_a_worker_unmaps_the_memory_of_clients_that_left(pool: PoolMemory) -> None:
    worker, client = Worker(pool), Client(pool)
    more = worker.exchange.more
    assert more is not None
    kept: list[Any] = []
    worker.answers(client.items(filled(1)), lambda item: kept.append(item) or item)  # type: ignore[func-returns-value]
    client.end.close()
    more.take_in()
    assert len(more._windows) == 1  # the model still has the item
    assert (kept.pop() == 1).all()
    worker.channel.released(worker.exchange.sent([]))
    more.take_in()
    assert not more._windows


def test_a_pool_without_shared_memory_takes_items_out_of_that_of_clients() -> None:
    pool = PoolMemory(0)
    client = Client(pool)
    (payload,) = client.items(filled(4))
    assert client.freed == [1]
    assert (pickle.loads(payload) == 4).all()
    client.end.close()


def test_items_are_copied_also_if_the_memory_of_the_client_cannot_be_mapped() -> None:
    class Unmapped:
        """Has copies of the parts then."""

        look = parts = ended = lambda *_: [b"stream", bytearray(SIZE)]

    items: Any = ClientItems(Memory(MB))
    items._window = Unmapped()
    assert type(items.copied((), Arena(Memory(MB)))) is Placed
