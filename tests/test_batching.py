"""When a free worker waits for company: tables, no clocks."""

from __future__ import annotations

import pytest

from service_streamer.scheduling.batching import WATCH_SHARE, Company


def closed_loop(company: Company, callers: int, duration: float, rounds: int) -> float:
    """``callers`` that return 10 µs after each other; returns when the last were answered."""
    now = 0.0
    for _ in range(rounds):
        now += duration
        company.answered(callers, duration, now)
        for caller in range(callers):
            company.arrived(1, now + 1e-5 * (caller + 1))
    now += duration
    company.answered(callers, duration, now)
    return now


def test_without_experience_nobody_waits() -> None:
    assert Company().wait_until(1, 1, 5.0) <= 5.0


def test_a_lone_caller_never_waits() -> None:
    company = Company()
    now = closed_loop(company, 1, 0.005, 20)
    company.arrived(1, now + 5e-5)
    assert company.wait_until(1, 1, now + 5e-5) <= now + 5e-5


@pytest.mark.parametrize("callers", [2, 8, 32, 64])
def test_callers_that_always_come_back_are_waited_for(callers: int) -> None:
    company = Company()
    now = closed_loop(company, callers, 0.005, 20)
    company.arrived(1, now + 1e-5)
    waits_until = company.wait_until(1, 1, now + 1e-5)
    assert now < waits_until <= now + WATCH_SHARE * 0.005
    for _ in range(callers - 1):
        company.arrived(1, now + 2e-5)
    assert company.wait_until(callers, 1, now + 2e-5) <= now + 2e-5, "all are there"


def test_nobody_waits_beyond_the_watch() -> None:
    company = Company()
    now = closed_loop(company, 8, 0.005, 20)
    late = now + WATCH_SHARE * 0.005
    assert company.wait_until(1, 1, late) <= late


def test_callers_that_stop_coming_are_soon_not_waited_for() -> None:
    company = Company()
    now = closed_loop(company, 8, 0.005, 20)
    waited = 0
    for _ in range(20):
        now += 0.005
        company.answered(1, 0.005, now)
        waited += company.wait_until(1, 1, now) > now
        now += 0.005
    assert waited <= 3


def test_many_do_not_wait_long_for_few() -> None:
    company = Company()
    now = closed_loop(company, 64, 0.005, 20)
    for _ in range(63):
        company.arrived(1, now + 63e-5)
    assert company.wait_until(63, 1, now + 64e-5) <= now + 64e-5


def test_arrivals_are_put_down_to_the_oldest_answers_first() -> None:
    company = Company()
    for _ in range(20):
        company.answered(2, 1.0, 0.0)
        company.answered(2, 1.0, 0.0)
        for _ in range(3):
            company.arrived(1, 0.01)
        company.arrived(1, 0.02)
    assert company.wait_until(1, 1, 0.02) <= 0.02, "all that were answered are back"
    company.answered(2, 1.0, 0.03)
    assert company.wait_until(1, 1, 0.03) > 0.03


def test_a_lone_caller_of_changing_sizes_never_waits() -> None:
    company = Company()
    now = 0.0
    for _ in range(50):
        for size in (10, 1):
            company.arrived(size, now)
            assert company.wait_until(size, 1, now) <= now
            now += 0.005
            company.answered(1, 0.005, now)
            now += 5e-5


def test_other_free_workers_take_the_company() -> None:
    company = Company()
    now = closed_loop(company, 4, 0.005, 20)
    company.arrived(1, now + 1e-5)
    assert company.wait_until(1, 1, now + 1e-5) > now + 1e-5
    assert company.wait_until(1, 4, now + 1e-5) <= now + 1e-5


def test_a_batch_that_answers_nobody_opens_no_watch() -> None:
    company = Company()
    now = closed_loop(company, 8, 0.005, 20) + 1
    company.answered(0, 0.005, now)
    assert company.wait_until(1, 1, now) <= now
