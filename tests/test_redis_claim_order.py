"""A worker host claims what another one has left: no newer call overtakes it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis

import models
from conftest import await_that
from redis_peers import Keys, Traffic
from service_streamer import Future, RedisStreamer, RedisWorker

Host = Callable[..., RedisWorker]
Client = Callable[..., RedisStreamer]

#: A sign of life is due every third of it.
CLAIM_TIMEOUT = 1.0

CLAIMER, FINISHER = "claimer", "finisher"


class Stage:
    """A worker host beside another one, and what the threads of the first do in between.

    Attributes:
        streamer: a client.
        worker: the host, once it was started.
        traffic: of this process with Redis.
    """

    def __init__(
        self, host: Host, client: Client, ask: redis.Redis, keys: Keys, traffic: Traffic, path: Path
    ) -> None:
        self._host, self._path = host, path
        self._ask, self._keys = ask, keys
        self._ids: list[bytes] = []
        self.streamer = client()
        self.traffic = traffic
        self.worker: RedisWorker

    def start(self, *items: Any, **options: Any) -> list[Future]:
        """Start it, while another host computes these items; returns their futures."""
        futures = [self.streamer.submit([item]) for item in items]
        await_that(lambda: self._ask.xlen(self._keys.calls) == len(items))
        self._ask.xgroup_create(self._keys.calls, "hosts", "0")
        [(_, entries)] = self._ask.xreadgroup("hosts", "another", {self._keys.calls: ">"})
        self._ids = [id_ for id_, _ in entries]
        self.worker = worker = self._host(
            models.Remembering, 1, model_init_args=(self._path,), claim_timeout=CLAIM_TIMEOUT,
            **options,
        )  # fmt: skip
        await_that(lambda: self._claim() and worker.stats().state == "serving")
        return futures

    def _claim(self, **options: Any) -> Any:
        """As the other host does: now and again while it is alive."""
        return self._ask.xclaim(
            self._keys.calls, "hosts", "another", 0, self._ids, justid=True, **options
        )

    def leave(self) -> None:
        """The other host leaves its calls."""
        self._claim(idle=10**9)

    def tell_of_left(self) -> None:
        self._ask.xadd(self.inbox, {"left": "another"})

    @property
    def inbox(self) -> str:
        [key] = self._ask.keys(self._keys.inbox("*"))
        return str(key.decode())

    def await_sign_of_life(self) -> None:
        """Block until the next one has been answered."""
        is_answered = threading.Event()

        def note(answer: Any) -> Any:
            is_answered.set()
            return answer

        self.traffic.at_answer("sign of life", note, thread=FINISHER)
        is_answered.wait()

    def give_others_time(self) -> None:
        """For a thread that need not wait, it is more than enough."""
        for _ in range(100):
            self._ask.ping()

    def computed(self) -> str:
        return self._path.read_text()


@pytest.fixture
def stage(
    host: Host, client: Client, ask: redis.Redis, keys: Keys, traffic: Traffic, tmp_path: Path
) -> Stage:
    return Stage(host, client, ask, keys, traffic, tmp_path / "computed")


def test_call_of_which_a_sign_of_life_tells_is_not_overtaken_by_what_is_claimed_next(
    stage: Stage,
) -> None:
    futures = stage.start("old")
    is_claimed = threading.Event()

    def note_claim(answer: Any) -> Any:
        if answer:
            is_claimed.set()
        else:
            stage.traffic.at_answer("XREADGROUP", note_claim, thread=CLAIMER)
        return answer

    def claim_newer(answer: Any) -> Any:
        """While the thread that has got the old call stands still."""
        stage.traffic.at_answer("XREADGROUP", note_claim, thread=CLAIMER)
        futures.append(stage.streamer.submit(["new"]))
        is_claimed.wait()
        stage.give_others_time()
        return answer

    def leave() -> None:
        stage.leave()
        stage.traffic.at_answer("sign of life", claim_newer, thread=FINISHER)

    stage.traffic.at_command("sign of life", leave, thread=FINISHER)
    await_that(lambda: len(futures) == 2)
    assert [future.result() for future in futures] == [["old"], ["new"]]
    assert stage.computed() == "['old']\n['new']\n"


def test_calls_are_taken_over_in_order_though_a_sign_of_life_comes_meanwhile(stage: Stage) -> None:
    futures = stage.start(0, 1, 2)

    def stand_still(answer: Any) -> Any:
        """With two of the calls, for which there is room, until a sign of life has passed."""
        stage.await_sign_of_life()
        return answer

    stage.traffic.at_answer("take over", stand_still, thread=CLAIMER)
    stage.await_sign_of_life()  # the next one is due after the calls were taken over
    stage.leave()
    stage.tell_of_left()
    assert [future.result() for future in futures] == [[0], [1], [2]]
    assert stage.computed() == "[0]\n[1]\n[2]\n"


def test_sign_of_life_does_not_wait_for_a_length_function(stage: Stage) -> None:
    def length(item: str) -> int:
        if item == "new":  # the claimer asks, and has claimed nothing else
            stage.leave()
            stage.await_sign_of_life()
        return 1

    old = stage.start("old", length=length)
    assert stage.streamer.predict(["new"]) == ["new"]
    assert [future.result() for future in old] == [["old"]]
    assert stage.computed() == "['new']\n['old']\n"
