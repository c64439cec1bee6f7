"""How the yardstick asks a system within one's own process: arithmetic, judging, and tiny runs."""

from __future__ import annotations

import itertools
import time
from array import array
from typing import Any

import numpy as np
import pytest

from adapters import beside, closed_loop, drivers, open_loop, workloads
from yardstick.libraries import rows
from yardstick.stats import percentile, poisson
from yardstick.systems import SYSTEMS

# Workloads


def test_arrays_are_told_apart_and_have_the_size_asked_for() -> None:
    one, other = workloads.items("arrays", 2, size=4096)
    assert one.nbytes == 4096
    assert workloads.is_answer("arrays", one, one.copy())
    assert not workloads.is_answer("arrays", one, other)
    assert not workloads.is_answer("arrays", one, one[:-1])


# Numbers


def test_percentile() -> None:
    assert percentile([], 0.5) is None
    assert percentile([3.0], 0.99) == 3.0
    assert percentile([5.0, 1.0, 4.0, 2.0, 3.0], 0.5) == 3.0
    assert percentile([float(n) for n in range(101)], 0.99) == 99.0


def test_poisson_has_its_rate_and_its_spread_and_is_the_same_for_all() -> None:
    due = list(poisson(1000.0, 20.0))
    assert due == list(poisson(1000.0, 20.0))
    assert due != list(poisson(1000.0, 20.0, seed=2))
    assert due == sorted(due)
    assert due[-1] < 20
    assert len(due) == pytest.approx(20_000, rel=0.03)
    gaps = np.diff(due)
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.05)  # as an exponential has


# Judging an open loop. The window is from second 10 to 20, and the deadline a second.

SERVED, REJECTED, EXPIRED, FAILED, NOTHING = 1, 2, 3, 4, 0


def judged(
    *calls: tuple[float, float, float, int], deadline: float | None = 1.0, capacity: float = 1.0
) -> dict[str, Any]:
    due, made, ended, outcomes = zip(*calls, strict=True)
    log = open_loop.Log(due, array("d", made), array("d", ended), bytearray(outcomes))
    return open_loop.judged(log, 10.0, 20.0, deadline, capacity)


@pytest.mark.parametrize(
    ("due", "made", "ended", "outcome", "became"),
    [
        (11.0, 11.0, 11.5, SERVED, "served"),
        (11.0, 11.9, 12.0, SERVED, "served"),  # late made, but in time
        (11.0, 11.9, 12.1, SERVED, "expired"),  # in time from when it was made, but not when due
        (11.0, 15.0, 15.1, SERVED, "expired"),
        (11.0, 11.0, 11.0, REJECTED, "rejected"),
        (11.0, 11.0, 12.0, EXPIRED, "expired"),
        (11.0, 11.0, 11.2, FAILED, "failed"),
        (11.0, 11.0, 0.0, NOTHING, "expired"),
        (11.0, 0.0, 0.0, NOTHING, "expired"),  # never made: its user got nothing
        (19.9, 19.9, 20.8, SERVED, "served"),  # due in the window, answered after it
    ],
)
def test_what_became_of_a_call(
    due: float, made: float, ended: float, outcome: int, became: str
) -> None:
    figures = judged((due, made, ended, outcome))
    shares = {name: figures[name] for name in ("served", "rejected", "expired", "failed")}
    assert shares == {name: float(name == became) for name in shares}


@pytest.mark.parametrize("due", [9.9, 20.0])
def test_calls_due_outside_the_window_have_no_share(due: float) -> None:
    figures = judged((due, due, due + 0.5, REJECTED), (12.0, 12.0, 12.5, SERVED))
    assert (figures["served"], figures["rejected"]) == (1.0, 0.0)


@pytest.mark.parametrize(
    ("due", "ended", "outcome", "counts"),
    [
        (11.0, 11.5, SERVED, True),
        (9.5, 10.2, SERVED, True),  # delivered in the window, in time
        (9.0, 10.2, SERVED, False),  # too late
        (19.5, 20.2, SERVED, False),  # delivered after it
        (11.0, 11.5, FAILED, False),
    ],
)
def test_goodput_is_what_is_delivered_in_the_window_in_time(
    due: float, ended: float, outcome: int, counts: bool
) -> None:
    figures = judged((due, due, ended, outcome), capacity=0.1)
    assert figures["goodput"] == pytest.approx(float(counts))


def test_latency_counts_from_when_a_call_was_due() -> None:
    calls = [(11.0 + n, 11.3 + n, 11.4 + n, SERVED) for n in range(5)]
    for deadline in (1.0, None):
        figures = judged(*calls, deadline=deadline)
        assert figures["p50"] == pytest.approx(0.4)
        assert figures["lag_p99"] == pytest.approx(0.3)


def test_offered_is_what_was_made_in_the_window() -> None:
    calls = [(11.0, 11.0, 11.1, SERVED), (12.0, 20.5, 20.6, SERVED), (13.0, 0.0, 0.0, NOTHING)]
    figures = judged(*calls)
    assert figures["offered"] == pytest.approx(0.1)
    assert figures["lag_p99"] == pytest.approx(8.5)


def test_without_a_deadline_whatever_is_answered_is_served() -> None:
    calls = [(11.0, 11.0, 99.0, SERVED), (12.0, 12.0, 0.0, NOTHING)]
    figures = judged(*calls, deadline=None)
    assert figures["served"] == 0.5
    assert figures["p50"] == pytest.approx(88.0)
    assert figures["p99"] is None
    assert "goodput" not in figures


# Real runs, as tiny as can be


STREAMER = SYSTEMS["streamer"]


def measured(**spec: Any) -> list[tuple[Any, Any]]:
    spec = {"workload": "gpu", "seconds": 0.2, **spec}
    return [(row.point, row.figures) for row in rows(STREAMER, {}, 60, **spec)]


def test_a_lone_caller_calls_in_turn_with_direct_calls_and_in_a_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = 0.0
    called: list[str] = []

    class Model:
        def predict(self, batch: list[Any]) -> list[Any]:
            nonlocal clock
            clock += 1.0
            called.append("model")
            return batch

    class Slow:
        """Takes 2 s, and 3 s if its last call was not followed by a direct one."""

        def predict(self, item: Any) -> Any:
            nonlocal clock
            clock += 3.0 if called[-1] == "system" else 2.0
            called.append("system")
            return item

        def close(self) -> None: ...

    monkeypatch.setitem(drivers.WORKLOADS, "echo", Model)
    monkeypatch.setattr(drivers.time, "perf_counter", lambda: clock)
    ((_, figures),) = drivers.alone(Slow, {"workload": "echo"})  # type: ignore[arg-type]
    assert figures == {"over": 1.0, "ratio": 2.0, "over_loop": 2.0}


# Turns and wrong answers


@pytest.mark.parametrize("driver", ["threads", "asyncio"])
def test_closed_loops(driver: str) -> None:
    points = [{"callers": 1}, {"callers": 8}]
    found = measured(driver=driver, points=points)
    assert [point for point, _ in found] == points
    for _, figures in found:
        assert figures.keys() == {"rate", "share", "p50", "p99"}
        assert figures["p99"] >= figures["p50"] > 5e-3  # what the model takes


def test_a_system_and_batches_by_hand_are_never_busy_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[str] = []

    class Quick:
        def predict(self, item: Any) -> Any:
            said.append("system")
            return item

        def close(self) -> None: ...

    class Hand:
        def __init__(self, *_: Any) -> None: ...

        def rate(self, _: float) -> float:
            said.append("hand")
            time.sleep(0.001)  # a call of the system that had not ended would be seen
            said.append("hand")
            return 2.0

        def close(self) -> None: ...

    monkeypatch.setattr(beside, "Beside", Hand)
    monkeypatch.setattr(drivers, "_WARM_UP", 0.0)
    spec = {"workload": "echo", "seconds": 0.04, "points": [{"callers": 3}]}
    ((_, figures),) = drivers.beside_hand(Quick, spec)  # type: ignore[arg-type]
    turns = [name for name, _ in itertools.groupby(said)]
    assert turns == ["system", "hand", "system", "hand"]
    assert said.count("hand") == 4
    assert figures["by-hand"] == figures["rate"] / 2


def test_a_call_counts_by_the_share_of_its_time_in_the_window() -> None:
    caller = closed_loop.Latencies()
    for started, ended in [(0.0, 1.0), (1.0, 3.0), (3.0, 5.0), (5.0, 6.0)]:
        caller.add(started, ended)
    assert closed_loop.rate_in_part([caller], 0.5, 4.0) == pytest.approx((0.5 + 1 + 0.5) / 3.5)
    assert closed_loop.rate_in_part([caller, caller], 1.5, 2.5) == pytest.approx(1.0)


class Wrong:
    """A system that mixes up its answers."""

    def predict(self, item: int) -> int:
        return item + 1

    async def apredict(self, item: int) -> int:
        return item + 1


@pytest.mark.parametrize("drive", [closed_loop.threads, closed_loop.tasks])
def test_wrong_answers_are_found(drive: Any) -> None:
    with pytest.raises(closed_loop.WrongAnswer, match="3 was answered with 4"):
        drive(Wrong(), "echo", [3], 0.0, 0.0)


def test_wrong_answers_are_found_by_those_who_empty_a_list() -> None:
    with pytest.raises(closed_loop.WrongAnswer):
        closed_loop.until_empty(Wrong(), "echo", [3], 2)  # type: ignore[arg-type]
