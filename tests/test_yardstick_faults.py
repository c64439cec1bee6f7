"""How the yardstick kills parts of pools and services, and what it counts then."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from adapters.leftovers import alive_with, growth, holdings
from adapters.sharing_client import Load, Refused


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
