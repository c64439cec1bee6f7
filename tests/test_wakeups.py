"""Threads whose calls a batch has answered are woken one after another, and none is forgotten."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from service_streamer.engine.backend import BlockingReply, predict_blocking
from service_streamer.engine.wakeups import AT_ONCE, PATIENCE, Relay, wake
from service_streamer.observe.record import Call


class Sleeper:
    """A thread that runs only when the test says so."""

    def __init__(self) -> None:
        self.relay: Relay | None = None
        self.has_left = self.is_awake = False

    def wake(self) -> None:
        self.is_awake = True

    def run(self) -> None:
        assert self.is_awake
        assert self.relay is not None
        self.relay.pass_on()


def awake(sleepers: list[Sleeper]) -> int:
    return sum(sleeper.is_awake for sleeper in sleepers)


def test_each_thread_wakes_the_next() -> None:
    sleepers = [Sleeper() for _ in range(6)]
    wake(sleepers)
    for number in range(AT_ONCE, 7):
        assert awake(sleepers) == min(number, 6)
        assert sleepers[min(number, 6) - 1].is_awake, "in their order"
        sleepers[number - AT_ONCE].run()


def test_few_are_woken_without_a_relay() -> None:
    sleepers = [Sleeper() for _ in range(AT_ONCE)]
    wake(sleepers)
    assert all(sleeper.is_awake and sleeper.relay is None for sleeper in sleepers)


def test_a_thread_that_does_not_wait_any_more_holds_up_nobody() -> None:
    sleepers = [Sleeper() for _ in range(5)]
    sleepers[0].has_left = sleepers[1].has_left = sleepers[3].has_left = True
    wake(sleepers)
    assert [sleeper.is_awake for sleeper in sleepers] == [True] * 5


def test_all_are_woken_when_it_takes_too_long() -> None:
    now = 10.0
    sleepers = [Sleeper() for _ in range(9)]
    relay = Relay(sleepers, clock=lambda: now)
    relay.pass_on()
    now += 0.9 * PATIENCE
    sleepers[0].run()
    assert awake(sleepers) == 2
    now += 0.2 * PATIENCE
    sleepers[1].run()
    assert awake(sleepers) == 9


def test_a_reply_that_was_given_up_passes_the_relay_on() -> None:
    """Its time ends just as it is answered: in whichever order that is seen, the next is woken."""
    given_up, other = BlockingReply(), BlockingReply()
    assert not given_up.wait(0.0)
    Relay([given_up, other]).pass_on()
    assert other.wait(0.0)

    late, other = BlockingReply(), BlockingReply()
    relay = Relay([other])
    late.relay = relay  # set, and the lock not released yet
    assert not late.wait(0.0)
    assert other.wait(0.0)


def test_an_interrupted_thread_passes_the_relay_on(monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted:
        def acquire(self, timeout: float = -1) -> bool:
            raise KeyboardInterrupt

        def release(self) -> None: ...

    interrupted, other = BlockingReply(), BlockingReply()
    monkeypatch.setattr(interrupted, "_arrived", Interrupted())
    with pytest.raises(KeyboardInterrupt):
        interrupted.wait(None)
    Relay([interrupted, other]).pass_on()
    assert other.wait(0.0)


def test_a_thread_that_is_interrupted_before_it_waits_passes_the_relay_on() -> None:
    replies: list[Any] = []

    class Interrupted:
        def check_not_in_callback(self) -> None: ...

        def submit(self, call: Call) -> None:
            replies.append(call.reply)  # it is accepted
            raise KeyboardInterrupt

    for _ in range(AT_ONCE):
        with pytest.raises(KeyboardInterrupt):
            predict_blocking(Interrupted(), [1], None)  # type: ignore[arg-type]  # no more is used
    other = BlockingReply()
    wake([*replies, other])
    assert other.wait(0.0)


def test_real_threads_are_all_woken() -> None:
    replies = [BlockingReply() for _ in range(50)]
    threads = [threading.Thread(target=reply.wait, args=(60.0,)) for reply in replies]
    for thread in threads:
        thread.start()
    for reply in replies:
        reply.put([1])
    wake(replies)
    for thread in threads:
        thread.join(60.0)
    assert not any(thread.is_alive() for thread in threads)
    assert all(reply.result() == [1] for reply in replies)
