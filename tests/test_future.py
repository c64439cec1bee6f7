"""Futures that are completed together, without a lock of their own."""

from __future__ import annotations

import concurrent.futures
import os
import sys
import threading
from typing import Any

import pytest

from service_streamer import Future
from service_streamer.observe.record import Call
from service_streamer.workers.protocol import Failure


def answered(*futures: Future) -> list[Call]:
    """Calls of these futures that have come back."""
    calls = [Call([number], future) for number, future in enumerate(futures)]
    for call, future in zip(calls, futures, strict=True):
        future.call = call
        call.outputs = [call.payloads[0]]
    return calls


class Plain:
    """A backend whose outputs are not encoded."""

    def decode(self, outputs: list[Any]) -> list[Any]:
        return outputs


def test_futures_that_nobody_waits_for_are_completed_together() -> None:
    futures = [Future(Plain()) for _ in range(3)]  # type: ignore[arg-type]
    calls = answered(*futures)
    assert Future.complete_all(calls) == []
    assert [future.result() for future in futures] == [[0], [1], [2]]
    assert all(future.done() and future.call is None for future in futures)
    assert [call.reply for call in calls] == [None] * 3
    assert [call.outputs for call in calls] == [[]] * 3


def test_futures_with_a_callback_or_a_waiter_are_left_to_be_completed_one_by_one() -> None:
    heard: list[object] = []
    plain, called, waited, done = (Future(Plain()) for _ in range(4))  # type: ignore[arg-type]
    called.add_done_callback(heard.append)
    done.complete([0])
    completed = concurrent.futures.as_completed([done, waited])
    assert next(completed) is done  # and so it waits for the other one
    calls = answered(plain, called, waited)
    left = Future.complete_all(calls)
    assert left == calls[1:]
    assert plain.done()
    assert not called.done()
    for call in left:
        call.reply.complete(call.outputs)
    assert next(completed) is waited
    assert heard == [called]


def test_who_has_the_lock_sees_no_future_finish() -> None:
    future, other = (Future(Plain()) for _ in range(2))  # type: ignore[arg-type]
    with future._condition:
        calls = answered(future, other)
        finishing = threading.Thread(target=lambda: Future.complete_all(calls))
        finishing.start()
        finishing.join()
        assert not future.done()
    assert other.done()


def test_a_future_that_is_over_is_not_completed_again() -> None:
    future = Future(Plain())  # type: ignore[arg-type]
    assert Future.complete_all(answered(future)) == []
    again = answered(future)
    assert Future.complete_all(again) == again  # whoever completes it hears of that
    with pytest.raises(concurrent.futures.InvalidStateError):
        future.complete([1])


def test_the_repr_of_a_future_says_how_it_has_ended() -> None:
    good, bad = (Future(Plain()) for _ in range(2))  # type: ignore[arg-type]
    assert repr(good).endswith(" pending>")
    good.complete([1])
    bad.fail(Failure(ValueError("bad")))
    assert repr(good).endswith(" finished>")
    assert repr(bad).endswith(" failed>")


def test_the_lock_for_all_is_a_new_one_in_a_forked_child() -> None:
    held, release = threading.Event(), threading.Event()

    def hold() -> None:
        with sys.modules[Future.__module__]._making:  # type: ignore[attr-defined]
            held.set()
            release.wait()

    holding = threading.Thread(target=hold)
    holding.start()
    held.wait()
    pid = os.fork()
    if not pid:
        future = Future(Plain())  # type: ignore[arg-type]
        future.add_done_callback(lambda _: os._exit(7))
        future.complete([1])
        os._exit(1)
    release.set()
    holding.join()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
