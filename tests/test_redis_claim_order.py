"""Two threads of a worker host claim calls: none overtakes what another host has left."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

import msgpack
import pytest
import redis

import models
from conftest import await_that
from service_streamer import RedisStreamer, RedisWorker
from service_streamer.engine.engine import Engine
from service_streamer.redis.intake import Intake
from service_streamer.redis.link import LinkError
from service_streamer.redis.scripts import Keys

Host = Callable[..., RedisWorker]
Client = Callable[..., RedisStreamer]


class Stage:
    """A worker host whose threads take the turns that a test gives them.

    Attributes:
        submitted: the items that its engine got, in order.
        claimer: what the thread that claims did: "submitted" a call, or "waits" for the lock.
        before_claimed, before_submitted: called in the thread that is about to pass on a call, with
            the name of the thread.
    """

    def __init__(self, ask: redis.Redis, keys: Keys) -> None:
        self._ask, self._keys = ask, keys
        self._to_leave = 0
        self.submitted: list[Any] = []
        self.claimer: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.before_claimed: Callable[[str], object] = lambda _: None
        self.before_submitted: Callable[[str], object] = lambda _: None
        self.worker: RedisWorker

    def starts(self, worker: RedisWorker) -> None:
        self.worker = worker
        worker.wait_ready()
        await_that(lambda: worker.stats().state == "serving")  # type: ignore[union-attr]
        intake = self._host._finisher._intake
        intake.lock = ReportedLock(intake.lock, self.claimer)

    def left(self, streamer: RedisStreamer, *items: Any) -> list[Any]:
        """Calls of these items that another host has claimed, and left; returns their futures."""
        self._to_leave = len(items)
        futures = [streamer.submit([item]) for item in items]
        await_that(lambda: not self._to_leave)
        return futures

    def leaves(self, id_: bytes) -> bool:
        """Whether the host that the test has started is not to have this call now."""
        if not self._to_leave:
            return False
        self._ask.xclaim(self._keys.calls, "hosts", "another", 0, [id_], idle=10**9)
        self._to_leave -= 1
        return True

    def tell_of_left(self) -> None:
        """As another host does that leaves calls."""
        self._ask.xadd(self._host._parts.inbox, {"left": "another"})

    def keep(self) -> None:
        """Give a sign of life, in another thread, and return when that is done."""
        thread = threading.Thread(target=self._host._finisher._keep)
        thread.start()
        thread.join()

    @property
    def _host(self) -> Any:
        return self.worker._host


class ReportedLock:
    """Says so if a thread has to wait for it."""

    def __init__(self, lock: Any, waits: queue.SimpleQueue[str]) -> None:
        self._lock, self._waits = lock, waits
        self.acquire, self.release = lock.acquire, lock.release

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            self._waits.put("waits")
            self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


@pytest.fixture
def stage(ask: redis.Redis, keys: Keys, monkeypatch: pytest.MonkeyPatch) -> Stage:
    stage = Stage(ask, keys)
    claimed, submit = Intake.claimed, Engine.submit

    def watched_claimed(intake: Intake, id_: bytes, *rest: Any, **named: Any) -> None:
        if not stage.leaves(id_):
            stage.before_claimed(thread_name())
            claimed(intake, id_, *rest, **named)

    def watched_submit(engine: Engine, call: Any) -> None:
        stage.before_submitted(thread_name())
        stage.submitted += map(msgpack.unpackb, call.payloads)
        submit(engine, call)
        if thread_name() == "claimer":
            stage.claimer.put("submitted")

    monkeypatch.setattr(Intake, "claimed", watched_claimed)
    monkeypatch.setattr(Engine, "submit", watched_submit)
    return stage


def thread_name() -> str:
    return threading.current_thread().name.removeprefix("service_streamer ")


def once(act: Callable[[], object], thread: str) -> Callable[[str], None]:
    """Acts the first time that this thread comes by."""
    still = [act]

    def come(name: str) -> None:
        if name == thread and still:
            still.pop()()

    return come


def test_what_comes_with_a_sign_of_life_is_not_overtaken_by_what_is_claimed_next(
    stage: Stage, host: Host, client: Client
) -> None:
    # Given a call that a sign of life brings, and a newer one that the claimer gets then
    stage.starts(host(models.echo, 1, claim_timeout=0.3))
    streamer = client()
    futures: list[Any] = []

    def claim_newer() -> None:  # while the thread that has the old call stands still
        futures.append(streamer.submit(["new"]))
        stage.claimer.get()

    stage.before_claimed = once(claim_newer, "finisher")
    futures += stage.left(streamer, "old")
    # Then the newer one waits
    await_that(lambda: len(futures) == 2)
    assert sorted(future.result() for future in futures) == [["new"], ["old"]]
    assert stage.submitted == ["old", "new"]


def test_a_sign_of_life_brings_no_calls_while_older_ones_are_on_their_way(
    stage: Stage, host: Host, client: Client
) -> None:
    # Given three calls that were left, and a claimer that takes two of them
    stage.starts(host(models.echo, 1, claim_timeout=60))
    futures = stage.left(client(), 0, 1, 2)
    # When a sign of life is due before it has submitted them
    stage.before_claimed = once(stage.keep, "claimer")
    stage.tell_of_left()
    # Then that does not bring the third one
    assert [future.result() for future in futures] == [[0], [1], [2]]
    assert stage.submitted == [0, 1, 2]


def test_a_sign_of_life_waits_for_no_length_function(
    stage: Stage, host: Host, client: Client
) -> None:
    # Given a claimer that is asking for the length of an item
    stage.starts(host(models.echo, 1, claim_timeout=60))
    streamer = client()
    old = stage.left(streamer, "old")
    stage.before_submitted = once(stage.keep, "claimer")  # which comes back
    assert streamer.predict(["new"]) == ["new"]
    # Then the claimer gets the calls that the sign of life has left alone
    assert [future.result() for future in old] == [["old"]]
    assert stage.submitted == ["new", "old"]


def test_a_host_that_joins_again_during_a_sign_of_life_does_not_lock_up(
    stage: Stage, host: Host, client: Client
) -> None:
    # Given a call that was left, and a sign of life that is about to bring it
    stage.starts(host(models.echo, 1, claim_timeout=60))
    futures = stage.left(client(), "old")
    finisher, claimer = stage._host._finisher, stage._host._claimer
    lock = finisher.lock = HeldUp(finisher.lock, "keeper")
    keeper = threading.Thread(target=finisher._keep, name="keeper", daemon=True)
    keeper.start()
    lock.arrived.wait()
    # When the claimer has lost Redis meanwhile, and is given that call when it joins again
    take = claimer._take

    def lose(_: int) -> None:
        claimer._take = take
        raise LinkError("Redis is away")

    claimer._take = lose
    stage.tell_of_left()
    assert stage.claimer.get() == "waits"
    # Then the claimer, which waits, does not hold what the sign of life needs
    assert lock.acquire(blocking=False)
    lock.release()
    lock.go_on.set()
    keeper.join()
    assert [future.result() for future in futures] == [["old"]]


class HeldUp:
    """A lock to which one thread comes late.

    Args:
        thread: its name.

    Attributes:
        arrived: it is about to take the lock.
        go_on: it may.
    """

    def __init__(self, lock: Any, thread: str) -> None:
        self._lock, self._thread = lock, thread
        self.acquire, self.release = lock.acquire, lock.release
        self.arrived, self.go_on = threading.Event(), threading.Event()

    def __enter__(self) -> None:
        if threading.current_thread().name == self._thread:
            self.arrived.set()
            self.go_on.wait()
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()
