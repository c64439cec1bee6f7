"""Redis's clock, which may be set while calls wait, as tables: when a deadline has passed."""

from __future__ import annotations

import pytest

from service_streamer.redis.redis_clock import RedisClock

#: Our monotonic clock, and what Redis's says then.
NOW, REDIS = 1000.0, 1_700_000_000.0


@pytest.fixture
def clock() -> RedisClock:
    clock = RedisClock()
    assert clock.read(REDIS, NOW, NOW) == 0
    return clock


def test_a_deadline_is_as_far_as_the_clock_says(clock: RedisClock) -> None:
    assert clock.left(REDIS + 5, NOW) == 5
    assert clock.left(REDIS + 5, NOW + 7) == -2
    assert clock.expected(NOW + 2) == REDIS + 2


def test_clock_knows_whether_it_was_read_since(clock: RedisClock) -> None:
    assert not RedisClock().was_read_since(NOW)
    assert clock.was_read_since(NOW)
    assert not clock.was_read_since(NOW + 0.1)


@pytest.mark.parametrize("early", [0.0, 0.5, 3.0])
@pytest.mark.parametrize("late", [0.0, 0.5, 30.0])
def test_a_slow_question_or_answer_is_no_step(clock: RedisClock, early: float, late: float) -> None:
    assert clock.read(REDIS + 10, NOW + 10 - early, NOW + 10 + late) == 0
    assert clock.left(REDIS + 15, NOW + 10) == pytest.approx(5)


@pytest.mark.parametrize("off", [-0.9, 0.9])
def test_a_clock_that_drifts_is_followed(clock: RedisClock, off: float) -> None:
    for beat in range(1, 5):
        now = NOW + 10 * beat
        assert clock.read(REDIS + (10 + off) * beat, now, now) == 0
        assert clock.expected(now) == pytest.approx(REDIS + (10 + off) * beat)


@pytest.mark.parametrize("step", [-600.0, -30.0, -1.5, 1.5, 30.0, 600.0])
def test_no_call_loses_time_by_a_step(clock: RedisClock, step: float) -> None:
    before = REDIS + 20  # the deadline of a call that was put in before, and of one that was after
    after = REDIS + 10 + step + 20
    assert clock.read(REDIS + 10 + step, NOW + 10, NOW + 10) == pytest.approx(step)
    assert clock.left(before, NOW + 10) >= 10
    assert clock.left(after, NOW + 10) >= 20
    assert clock.expected(NOW + 11) == pytest.approx(REDIS + 11 + step)
    # Of several steps the one counts that leaves most time.
    clock.read(REDIS + 12, NOW + 12, NOW + 12)
    assert clock.left(before, NOW + 12) >= 8
    assert clock.left(after, NOW + 12) >= 18


@pytest.mark.parametrize("step", [-600.0, 600.0])
def test_a_step_is_forgotten_when_calls_of_before_cannot_wait_any_more(
    clock: RedisClock, step: float
) -> None:
    clock.read(REDIS + 10 + step, NOW + 10, NOW + 10)
    later = 1000.0
    assert clock.read(REDIS + step + later, NOW + later, NOW + later) == 0
    assert clock.left(REDIS + step + later + 5, NOW + later) == pytest.approx(5)
