"""How the yardstick asks a system in one's own process, and kills parts of it: what it counts."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import time
from array import array
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from adapters import beside, closed_loop, drivers, open_loop, workloads
from adapters.leftovers import alive_with, growth, holdings
from adapters.sharing_client import Load, Refused
from yardstick.judging import REJECTED, SERVED, UNANSWERED
from yardstick.stats import percentile, poisson


def test_arrays_are_told_apart_and_have_the_size_asked_for() -> None:
    one, other = workloads.items("arrays", 2, size=4096)
    assert one.nbytes == 4096
    assert workloads.is_answer("arrays", one, one.copy())
    assert not workloads.is_answer("arrays", one, other)
    assert not workloads.is_answer("arrays", one, one[:-1])


def test_percentile() -> None:
    assert percentile([], 0.5) is None
    assert percentile([3.0], 0.99) == 3.0
    assert percentile([5.0, 1.0, 4.0, 2.0, 3.0], 0.5) == 3.0
    assert percentile([float(n) for n in range(101)], 0.99) == 99.0


def test_poisson_has_its_rate_and_its_spread_and_is_the_same_for_all() -> None:
    due = list(poisson(1000.0, 20.0))
    assert due == list(poisson(1000.0, 20.0))
    assert due == sorted(due)
    assert due[-1] < 20
    assert len(due) == pytest.approx(20_000, rel=0.03)
    gaps = np.diff(due)
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.05)  # as an exponential has


@pytest.mark.parametrize("deadline", [1.0, None])
def test_what_a_system_kept_from_being_made_counts_as_not_answered(deadline: float | None) -> None:
    """The other rules are those for services, whose tests are in test_yardstick_servers.py."""
    calls = [
        (9.9, 9.9, 9.95, REJECTED),  # due before the window
        (11.0, 11.0, 11.5, SERVED),
        (12.0, 20.5, 20.6, SERVED),  # made long after it was due
        (13.0, 0.0, 0.0, UNANSWERED),  # never made: its user got nothing
    ]
    due, made, ended, outcomes = zip(*calls, strict=True)
    log = open_loop.Log(due, array("d", made), array("d", ended), bytearray(outcomes))
    figures = open_loop.judged(log, 10.0, 20.0, deadline, capacity=1.0)
    assert figures["offered"] == pytest.approx(0.1)
    assert figures["lag_p99"] == pytest.approx(8.5)
    if deadline is None:
        assert figures["served"] == pytest.approx(2 / 3)
        assert figures["p50"] == pytest.approx(8.6)
        assert figures["p99"] is None
    else:
        assert figures["served"] == pytest.approx(1 / 3)
        assert figures["expired"] == pytest.approx(2 / 3)
        assert figures["goodput"] == pytest.approx(0.1)


class System:
    """Answers with what it is asked, and says so first."""

    def __init__(self, told: Callable[[], None]) -> None:
        self._told = told

    def predict(self, item: Any) -> Any:
        self._told()
        return item

    def close(self) -> None: ...


def test_a_lone_caller_takes_turns_with_direct_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = 0.0
    called: list[str] = []

    class Model:
        def predict(self, batch: list[Any]) -> list[Any]:
            nonlocal clock
            clock += 1.0
            called.append("model")
            return batch

    def be_slow() -> None:
        """Take 2 s, and 3 s if the last call was not followed by a direct one."""
        nonlocal clock
        clock += 3.0 if called[-1] == "system" else 2.0
        called.append("system")

    monkeypatch.setitem(drivers.WORKLOADS, "echo", Model)
    monkeypatch.setattr(drivers.time, "perf_counter", lambda: clock)
    ((_, figures),) = drivers.alone(lambda: System(be_slow), {"workload": "echo"})  # type: ignore[arg-type, return-value]
    assert figures == {"over": 1.0, "ratio": 2.0, "over_loop": 2.0}


def test_a_system_and_batches_by_hand_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []

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
    ((_, figures),) = drivers.beside_hand(lambda: System(lambda: said.append("system")), spec)  # type: ignore[arg-type, return-value]
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


@pytest.mark.parametrize(
    ("drive", "arguments"),
    [
        (closed_loop.threads, (0.0, 0.0)),
        (closed_loop.tasks, (0.0, 0.0)),
        (closed_loop.until_empty, (2,)),
    ],
)
def test_wrong_answers_are_found(drive: Any, arguments: tuple[Any, ...]) -> None:
    with pytest.raises(closed_loop.WrongAnswer, match="3 was answered with 4"):
        drive(Wrong(), "echo", [3], *arguments)


def test_processes_are_found_by_their_environment_wherever_they_are() -> None:
    words = "import os, sys; os.setsid(); print(flush=True); sys.stdin.read()"
    child = subprocess.Popen(
        [sys.executable, "-c", words], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        env={**os.environ, "MARK": "this test"},
    )  # fmt: skip
    with child:
        assert child.stdout is not None
        child.stdout.readline()
        assert alive_with("MARK", "this test") == {child.pid}
        assert alive_with("MARK", "this") == set()
        held = holdings([child.pid])[child.pid]
        assert held == len(os.listdir(f"/proc/{child.pid}/fd")) + 1  # and a thread
        child.communicate()
    assert alive_with("MARK", "this test") == set()
    assert holdings([child.pid]) == {}


def test_what_each_fault_leaves_behind_counts_and_what_comes_and_goes_does_not() -> None:
    assert growth([{1: 40 + n % 3, 2: 14} for n in range(20)]) == 0
    assert growth([{1: 40, 2: 14 + n} for n in range(20)]) == 19
    assert growth([{1: 40 + n} for n in range(10)] + [{2: 90} for _ in range(10)]) == 0


class Streamer:
    """Gives what it is asked if that is even; else it does as the last digit says."""

    def predict(self, items: list[int]) -> list[int]:
        match items[0] % 10:
            case 1:
                raise Refused("503")
            case 5:
                raise TimeoutError
            case 7:
                return [-items[0]]
        return items


@pytest.mark.parametrize(
    ("number", "outcome"), [(2, "answered"), (1, "Refused"), (5, "hung"), (7, "wrong")]
)
def test_every_outcome_of_a_call_has_its_name(number: int, outcome: str) -> None:
    load = Load(Streamer(), 0, number - 1)
    assert load.outcome(is_large=False) == outcome
    assert load.end(0.0) == {"outcomes": {}, "hung": 0}
