"""Where the time of a call went: exactly, with a clock that stands still; and with real workers."""

from __future__ import annotations

import pytest

from service_streamer import Timing
from service_streamer.observe.record import BatchRecord, BatchReport, Call
from stub_engine import StubEngine

# -- all times are sums of powers of two, and so exact


def test_of_a_call_that_waits_for_its_worker(one: StubEngine) -> None:
    future = one.submit("a", "b")
    assert future.timing is None
    one.clock.advance(0.5)
    one.transport.ready(0)
    one.clock.advance(4.0)
    assert future.timing is None
    one.transport.echo(duration=2.0, started_at=one.clock() - 3.0)
    assert future.result(0) == ["a", "b"]
    assert future.timing == Timing(queued=0.5, sent=1.0, computed=2.0, returned=1.0)
    assert future.timing is not None
    assert future.timing.total == 4.5


def test_the_calls_of_a_batch_differ_in_when_they_came(one: StubEngine) -> None:
    one.transport.ready(0)
    one.submit("busy")
    one.clock.advance(1.0)
    first = one.submit("a")
    one.clock.advance(0.5)
    second = one.submit("b")
    one.transport.echo()
    one.clock.advance(2.0)
    one.transport.echo(duration=1.0, started_at=one.clock() - 2.0)
    assert first.timing == Timing(0.5, 0.0, 1.0, 1.0)
    assert second.timing == Timing(0.0, 0.0, 1.0, 1.0)


def test_of_several_batches_the_last_one_counts(one: StubEngine) -> None:
    one.transport.ready(0)
    future = one.submit(*range(6))
    one.clock.advance(1.0)
    one.transport.echo(0, duration=1.0)
    assert future.timing is None, "it is not done"
    one.clock.advance(2.0)
    one.transport.echo(1, duration=0.5, started_at=one.clock() - 1.0)
    assert future.result(0) == [*range(6)]
    assert future.timing == Timing(queued=1.0, sent=1.0, computed=0.5, returned=0.5)


def test_of_a_batch_that_is_run_again_all_before_the_last_run_is_waiting(one: StubEngine) -> None:
    one.transport.ready(0)
    good = one.submit("good")
    one.clock.advance(1.0)
    one.transport.lose(0)
    slot = one.transport.started[-1][0]
    one.clock.advance(4.0)
    one.transport.ready(slot)
    one.clock.advance(4.0)
    one.transport.echo(duration=2.0, started_at=one.clock() - 2.0)
    assert good.timing == Timing(queued=5.0, sent=2.0, computed=2.0, returned=0.0)


def test_without_a_result_nothing_is_told(one: StubEngine) -> None:
    empty, cancelled = one.submit(), one.submit("a")
    assert cancelled.cancel()
    cut_off = one.submit("b")
    one.engine.close(drain=False, timeout=None)
    assert [future.timing for future in (empty, cancelled, cut_off)] == [None] * 3
    assert empty.result(0) == []


@pytest.mark.parametrize(
    ("started_at", "duration", "expected"),
    [
        (2.0, 1.0, (1.0, 1.0, 1.0, 2.0)),
        (1.0, 4.0, (1.0, 0.0, 4.0, 0.0)),
        (-float("inf"), 1.0, (1.0, 3.0, 1.0, 0.0)),  # nobody tells
        (float("nan"), 1.0, (1.0, 3.0, 1.0, 0.0)),
        (0.5, 1.0, (1.0, 3.0, 1.0, 0.0)),  # of another clock: it began before it was cut,
        (4.5, 1.0, (1.0, 3.0, 1.0, 0.0)),  # or ended after it was back
        (1e9, 1.0, (1.0, 3.0, 1.0, 0.0)),
        (2.0, 64.0, (1.0, 0.0, 4.0, 0.0)),  # a clock that runs faster
    ],
)
def test_nothing_is_negative_and_the_sum_is_right_whatever_the_workers_clock_says(
    started_at: float, duration: float, expected: tuple[float, ...]
) -> None:
    call = Call(["a"], None)
    call.unanswered = 0
    call.batch = BatchRecord(0, 0, [(call, 0, 1)], ["a"])
    call.batch.cut_at, call.batch.back_at = 1.0, 5.0
    call.batch.report = BatchReport(0, duration=duration, started_at=started_at)
    assert call.timing is not None
    assert call.timing[:4] == expected
    assert call.timing.total == 5.0
