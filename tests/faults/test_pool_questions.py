"""Questions to a shared pool that have to wait for its workers."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

import models
from pools import connected, fake_pool
from service_streamer import Streamer, WorkerStartTimeout
from service_streamer.pool.pool_protocol import ANSWER, ASK, WITHDRAW
from service_streamer.testing import Gate
from service_streamer.workers.protocol import Failure

Shared = Callable[..., Streamer]


def threads(streamer: Streamer) -> int:
    """How many the process of the pool has."""
    streamer.stats()
    pid = streamer.backend.pool_pid  # type: ignore[attr-defined]
    return len(os.listdir(f"/proc/{pid}/task"))


def test_questions_that_wait_have_no_threads_and_go_with_their_clients(
    shared: Shared, gate: Gate
) -> None:
    streamer = shared(models.GatedInit, 1, shared="a", model_init_args=(gate,))
    before = threads(streamer)
    for _ in range(3):
        with connected("a", makes_calls=False) as peer:
            for number in range(1, 21):
                peer.send((ASK, number, "wait_ready", (None,)))
            peer.send((ASK, 99, "stats", ()))
            assert peer.receive()[:2] == (ANSWER, 99)  # the pool has read the others before
            assert threads(streamer) == before
    with connected("a", makes_calls=False) as peer:
        for number in range(1, 5):
            peer.send((ASK, number, "wait_ready", (None,)))
        peer.send((WITHDRAW, 2))
        peer.send((ASK, 5, "wait_ready", (0.001,)))
        kind, number, failure = peer.receive()
        assert (kind, number) == (ANSWER, 5)
        assert isinstance(failure.exception(), WorkerStartTimeout)
        gate.let_through()
        assert [peer.receive() for _ in range(3)] == [(ANSWER, n, None) for n in (1, 3, 4)]
    streamer.wait_ready()
    assert streamer.predict([1]) == [1]
    assert threads(streamer) == before


def test_all_clients_hear_when_the_workers_are_ready_or_replaced(
    shared: Shared, gate: Gate
) -> None:
    clients = [shared(models.GatedInit, 1, shared="a", model_init_args=(gate,)) for _ in range(3)]
    with ThreadPoolExecutor(3) as threads:
        for question in ("wait_ready", "restart_workers"):
            answers = [threads.submit(getattr(each, question)) for each in clients]
            gate.let_through(3)  # a restart may begin when another one has ended
            assert [each.result() for each in answers] == [None] * 3
    assert [each.predict([1]) for each in clients] == [[1]] * 3


def test_too_little_time_is_told_with_the_seconds(shared: Shared) -> None:
    told: list[str] = []

    def ask(question: Callable[[float], None]) -> None:
        with pytest.raises(WorkerStartTimeout) as caught:
            question(500)
        told.append(str(caught.value))

    with fake_pool("a") as pool:
        streamer = shared(models.double, 1, shared="a")
        with pool.accepted() as peer:
            for question in (streamer.wait_ready, streamer.restart_workers):
                asking = threading.Thread(target=ask, args=[question])
                asking.start()
                peer.send((ANSWER, peer.receive()[1], Failure(WorkerStartTimeout("too early"))))
                asking.join()
            streamer.close()
    assert told == [
        "not every worker has loaded its model in 500.0 s",
        "not every worker has been replaced in 500.0 s; the restart goes on",
    ]
