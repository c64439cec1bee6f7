"""A client of a shared pool: what it sends, keeps and sends again. The test speaks for the pool."""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import resource
import socket
import stat
import struct
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import models
import pools
import service_streamer.pool.pool_protocol as protocol
from pools import FakePool, Peer, fake_pool
from service_streamer import Overloaded, Streamer, StreamerBroken, StreamerError, WorkerLost
from service_streamer.observe.record import CallOptions
from service_streamer.pool.pool_protocol import WITHDRAW, pack
from stream_models import Countdown

Client = Callable[..., Streamer]

US = os.geteuid()


@pytest.fixture
def pool(shared: Client) -> Iterator[FakePool]:
    with fake_pool() as pool:
        yield pool


@pytest.fixture
def client(shared: Client, pool: FakePool) -> Iterator[Client]:
    """Builds streamers of the pool, which end before it does."""
    built: list[Streamer] = []

    def client(*args: Any, **options: Any) -> Streamer:
        built.append(shared(*args, shared="a", **options))
        return built[-1]

    yield client
    for each in built:
        each.close(drain=False)


def answer(peer: Peer, call: Any) -> None:
    """Double its only item."""
    peer.send((call[0], pack(2 * item_of(call)), None))


def item_of(call: Any) -> Any:
    return pickle.loads(call[1] if type(call[1]) is bytes else call[1][0])


@pytest.mark.parametrize(
    ("retry", "read", "lost"),
    [(True, None, []), (False, None, [1, 2, 3]), (False, 0, []), (False, 2, [1, 2])],
)
def test_calls_that_a_lost_pool_may_have_computed_fail_without_retries(
    client: Client, pool: FakePool, retry: bool, read: int | None, lost: list[int]
) -> None:
    streamer = client(models.double, retry=retry)
    futures = {n: streamer.submit([n]) for n in (1, 2, 3)}
    with pool.accepted() as peer:
        assert [item_of(peer.receive()) for _ in futures] == [1, 2, 3]
        if read is not None:
            peer.send((protocol.PARTING, read))
    for n in lost:
        with pytest.raises(WorkerLost, match="retry is False"):
            futures.pop(n).result()
    futures[4] = streamer.submit([4])
    with pool.accepted() as peer:
        for n, future in futures.items():
            call = peer.receive()
            assert item_of(call) == n
            answer(peer, call)
            assert future.result() == [2 * n]


def test_calls_that_come_while_a_pool_ends_go_to_the_next_one_in_order(
    client: Client, pool: FakePool
) -> None:
    streamer = client(models.double, retry=False)
    first, second = streamer.submit([1]), streamer.submit([2])
    with pool.accepted() as peer:
        read, _ = peer.receive(), peer.receive()
        peer.send((protocol.PARTING, 1))
        answer(peer, read)
        assert first.result() == [2]
        third = streamer.submit([3])
        peer.connection.shutdown(socket.SHUT_WR)
        assert peer.receive_all() == []
    with pool.accepted() as peer:
        for future, result in ((second, [4]), (third, [6])):
            answer(peer, peer.receive())
            assert future.result() == result


def test_a_stream_is_sent_again_until_outputs_of_it_were_handed_out(
    client: Client, pool: FakePool
) -> None:
    stream = client(Countdown, 4).stream("item", timeout=3000)
    deadlines = set()
    for n in range(3):
        with pool.accepted() as peer:
            number, payloads, deadline, options, _ = peer.receive()
            assert [*map(pickle.loads, payloads)] == ["item"]
            assert CallOptions(*options).stream
            deadlines.add(deadline)
            if n == 2:
                peer.send((number, pack("x")))
                assert next(stream) == "x"
    assert len(deadlines) == 1
    with pytest.raises(WorkerLost, match="outputs of it were handed out"):
        next(stream)


def test_a_stream_whose_consumer_is_behind_is_paused(client: Client, pool: FakePool) -> None:
    stream = client(Countdown, 4).stream(100, timeout=None, max_buffered=4)
    with pool.accepted() as peer:
        number = peer.receive()[0]
        peer.send(*((number, pack(n)) for n in range(1, 20)))
        assert peer.receive() == (protocol.HOLD_STREAM, number)
        assert [next(stream) for _ in range(19)] == [*range(1, 20)]
        assert peer.receive() == (protocol.RESUME_STREAM, number)


def test_nothing_is_written_to_the_pool_with_the_lock_of_the_calls(
    client: Client, pool: FakePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Callers and finalizers need that lock, also while the pool takes nothing."""
    streamer = client(Countdown, 4)
    lock = streamer.backend._calls.lock  # type: ignore[attr-defined]
    held: list[bool] = []
    write = os.write

    def watched(descriptor: int, data: bytes) -> int:
        if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            held.append(lock._is_owned())
        return write(descriptor, data)

    monkeypatch.setattr(os, "write", watched)
    stream = streamer.stream(10**9, timeout=None, max_buffered=4)
    with pool.accepted() as peer:
        number = peer.receive()[0]
        peer.send(*[(number, pack(1))] * 100_010)  # of a model that cannot rest: it fails
        assert peer.receive_kind(WITHDRAW) == (WITHDRAW, number)
    with pytest.raises(Overloaded, match="wait for their consumer"):
        list(stream)
    assert True not in held
    assert len(held) > 1


def test_a_call_that_is_given_up_is_withdrawn_from_the_pool_that_has_it(
    client: Client, pool: FakePool
) -> None:
    streamer = client(models.double, shared_memory_limit=0)
    first, second = streamer.submit([1]), streamer.submit([2])
    with pool.accepted() as peer:
        number = peer.receive()[0]
        peer.receive()
        first.cancel()
        assert peer.receive() == (WITHDRAW, number)
    second.cancel()
    third = streamer.submit([3])
    with pool.accepted() as peer:
        answer(peer, peer.receive())
        assert third.result() == [6]
        streamer.submit([b"x" * 10_000_000])  # more than the socket takes
        unsent, *_ = (streamer.submit([n]) for n in (4, 5, 6))
        unsent.cancel()
        peer.receive()
        assert [item_of(peer.receive()) for _ in range(2)] == [5, 6], "never sent"


def test_a_forgotten_client_leaves_when_its_last_call_is_given_up(
    shared: Client, pool: FakePool
) -> None:
    streamer = Streamer(models.double, shared="a", linger=0)
    first, last = streamer.submit([1]), streamer.submit([2])
    with pool.accepted() as peer:
        calls = peer.receive(), peer.receive()
        del streamer
        gc.collect()
        answer(peer, calls[0])
        assert first.result() == [2]
        last.cancel()
        assert peer.receive_all() in ([], [(WITHDRAW, calls[1][0])])


def test_calls_wait_within_a_bound_without_a_pool_that_refuses_them(
    client: Client, pool: FakePool
) -> None:
    streamer = client(models.double, 1, max_pending=2)
    futures = [streamer.submit([0]), streamer.submit([1])]
    with pytest.raises(Overloaded, match="wait until the pool is there, and max_pending is 2"):
        streamer.submit([2])
    with pool.accepted() as peer:
        for _ in futures:
            peer.receive()
        while len(futures) < 34:  # of 16 workers, with a batch each and one sent ahead
            futures.append(streamer.submit([len(futures)]))
        with pytest.raises(Overloaded, match="34 calls of this process have no answer"):
            streamer.submit([34])
        futures[0].cancel()
        streamer.submit([34])
    with pool.accepted() as peer:  # those of a lost pool wait beyond the bound
        assert [item_of(peer.receive()) for _ in range(34)] == [*range(1, 35)]
        with pytest.raises(Overloaded):
            streamer.submit([35])


def test_messages_go_together_until_they_are_many_or_large(client: Client, pool: FakePool) -> None:
    streamer = client(models.double, shared_memory_limit=0)
    for _ in range(protocol.FRAME_MESSAGES + 1):
        streamer.submit([1])
    for size in (protocol.FRAME_SIZE, 1):
        streamer.submit([b"x" * size])
    with pool.accepted() as peer:
        frames = [peer.receive_frame() for _ in range(3)]
    assert [*map(len, frames)] == [protocol.FRAME_MESSAGES, 2, 1]


def test_the_memory_of_items_is_used_again_when_no_worker_reads_them(
    client: Client, pool: FakePool
) -> None:
    streamer = client(models.echo, shared_memory_limit=8 << 20)
    item = bytearray(1 << 20)
    calls: list[Any] = []

    with pool.accepted() as peer:

        def has_room() -> bool:
            """Whether one more item goes through shared memory, and not with the message."""
            streamer.submit([item])
            calls.append(peer.receive())
            return type(calls[-1][1]) is not bytes

        while has_room():
            pass
        assert len(calls) > 2
        first, second, third, *_ = (call[0] for call in calls)
        future = streamer.submit([0])
        peer.send((first, pack(0), None), (peer.receive()[0], pack(0), None))
        future.result()
        assert not has_room(), "a worker may read it, though its call is over"
        peer.send((protocol.FREED, [first, second, 9]))
        future = streamer.submit([0])
        peer.send((peer.receive()[0], pack(0), None))
        future.result()
        assert has_room()
        assert not has_room(), "the next pool may have to read it, though no worker does"
        peer.send((second, pack(0), None))
        future = streamer.submit([0])
        peer.send((peer.receive()[0], pack(0), None))
        future.result()
        assert has_room()
        assert third in {call[0] for call in calls}


@pytest.fixture
def foreign(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever is at the other end of a socket is another user."""
    getsockopt = socket.socket.getsockopt

    def of_another_user(connection: socket.socket, level: int, option: int, *size: int) -> Any:
        found = getsockopt(connection, level, option, *size)
        return struct.pack("3i", 1, US + 1, 1) if option == socket.SO_PEERCRED else found

    monkeypatch.setattr(socket.socket, "getsockopt", of_another_user)


@pytest.mark.usefixtures("foreign")
def test_a_socket_of_another_user_is_told_nothing(client: Client, pool: FakePool) -> None:
    text = rf"that of another user \({US + 1}\)"
    with pytest.raises(StreamerError, match=text):
        client(models.double).predict([1])
    assert f"that of another user ({US + 1})" in pools.command("status", "a", code=1)
    for _ in range(2):
        with pool.accepts() as connection:
            assert connection.recv(1) == b""


def test_a_process_that_has_become_another_user_is_told_both(
    client: Client, pool: FakePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    streamer = client(models.double)
    with monkeypatch.context() as patch:
        with pool.accepted():
            patch.setattr(os, "geteuid", lambda: US + 1)
        with pytest.raises(StreamerError, match=f"as user {US}, .* become user {US + 1}, "):
            streamer.predict([1])


def test_a_client_without_a_free_descriptor_does_not_take_a_pool_without_memory_for_one(
    client: Client, pool: FakePool
) -> None:
    future = client(models.double).submit([1])
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with pool.accepts() as connection:
        peer = Peer(connection)
        connection.recv(1)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
        try:
            socket.send_fds(connection, [b"\0"], [0])
            with contextlib.suppress(BrokenPipeError):  # the client may have left already
                peer.send((protocol.WELCOME, os.getpid()))
            with pytest.raises(StreamerBroken, match="ulimit -n"):
                future.result()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
            peer.close()
