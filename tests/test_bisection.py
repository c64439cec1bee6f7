"""How a worker finds the calls at fault: which parts of a batch it runs, and what fails."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from service_streamer import InvalidInput, InvalidItems, ManagedModel
from worker_loop import Batches, Clock, loaded, served, texts


class Raising:
    """Raises on the bad ones of its items, after it has named the invalid ones. Keeps its runs."""

    __name__ = __qualname__ = "Raising"

    def __init__(self, bad: Collection[Any], invalid: Collection[Any] = ()) -> None:
        self._bad = set(bad)
        self._invalid = invalid
        self.runs: list[list[Any]] = []

    def __call__(self, batch: list[Any]) -> list[Any]:
        self.runs.append(list(batch))
        wrong = {
            i: InvalidInput(f"invalid {item}")
            for i, item in enumerate(batch)
            if item in self._invalid
        }
        if wrong:
            raise InvalidItems(wrong)
        if self._bad & set(batch):
            raise ValueError(f"raised on {batch}")
        return batch

    @property
    def texts(self) -> str:
        return " ".join("".join(run) for run in self.runs)


@pytest.mark.parametrize(
    ("bad", "runs"),
    [
        ("c", "abcdefgh abcd ab c defg h"),
        ("a", "abcdefgh abcd ab a bcde fgh"),
        ("h", "abcdefgh abcd ef g h"),
        ("", "abcdefgh"),
        ("abcdefgh", "abcdefgh abcd ab a bcde bc b cd c d e f g h"),
    ],
)
def test_a_bad_call_is_found_by_halves_and_fails_alone(bad: str, runs: str) -> None:
    model = Raising(bad)
    (report,) = served(model, list("abcdefgh"), calls=1)
    assert model.texts == runs
    assert report.runs == len(model.runs) - 1
    assert report.failure is None
    assert texts(report) == {"abcdefgh".index(item): f"raised on ['{item}']" for item in bad}
    assert report.outputs == [None if item in bad else item for item in "abcdefgh"]
    assert report.has_failed == (len(bad) == 8)


@pytest.mark.parametrize(
    ("bad", "most_runs"),
    [
        ([37], 6 + 4),  # one for each halving
        ([0, 1], 2 * 6 + 4),
        ([0, 63], 2 * 6 + 4),
        ([17, 48], 2 * 6 + 4),
        ([*range(64)], 85),
    ],
    ids=["one", "neighbours", "the ends", "two", "all"],
)
def test_bad_calls_are_found_in_few_model_calls(bad: list[int], most_runs: int) -> None:
    model = Raising(bad)
    (report,) = served(model, list(range(64)), calls=1)
    assert len(model.runs) <= most_runs
    assert sorted(report.failures) == bad


@settings(deadline=None)
@given(
    sizes=st.lists(st.integers(1, 3), min_size=1, max_size=40),
    bad=st.sets(st.integers(0, 120)),
    invalid=st.sets(st.integers(0, 120), max_size=3),
)
def test_each_call_has_results_or_fails(sizes: list[int], bad: set[int], invalid: set[int]) -> None:
    owners = [call for call, size in enumerate(sizes) for _ in range(size)]
    model = Raising(bad - invalid, invalid)
    (report,) = served(model, list(range(len(owners))), calls=sizes)
    at_fault = {owners[i] for i in bad - invalid if i < len(owners)}
    fails = {i for i, owner in enumerate(owners) if owner in at_fault or i in invalid}
    assert set(report.failures) == fails
    assert report.outputs == [None if i in fails else i for i in range(len(owners))]
    assert len(model.runs) <= 2 * len(sizes) + math.log2(len(sizes)) + len(invalid)


def test_the_items_of_a_call_are_not_parted() -> None:
    model = Raising("b")
    (report,) = served(model, list("abcdef"), calls=[2, 2, 2])
    assert model.texts == "abcdef abcd ab cdef"
    assert texts(report) == dict.fromkeys([0, 1], "raised on ['a', 'b']")


def test_a_call_of_which_only_a_part_fits_fails_as_a_whole() -> None:
    model = loaded(calls := Raising("b"))
    model.ceiling.limit = 2
    (report,) = served(model, list("abcd"), calls=[3, 1])
    assert calls.texts == "ab d"
    assert sorted(report.failures) == [0, 1, 2]


def test_the_items_of_one_call_fail_together_after_one_run() -> None:
    model = Raising("b")
    (report,) = served(model, list("abc"))
    assert model.texts == "abc"
    assert (str(report.failure.exception()), report.runs) == ("raised on ['a', 'b', 'c']", 0)


def test_invalid_items_are_no_reason_for_a_search() -> None:
    model = Raising("", "bd")
    (report,) = served(model, list("abcde"), calls=1)
    assert model.texts == "abcde ace"
    assert texts(report) == {1: "invalid b", 3: "invalid d"}
    assert report.runs == 0


def test_what_fails_only_at_times_has_results() -> None:
    raises = [True, True]

    def model(batch: list[int]) -> list[int]:
        if raises:
            raises.pop()
            raise ValueError("only twice")
        return batch

    (report,) = served(model, [1, 2, 3, 4], calls=1)
    assert (report.outputs, report.failures, report.failure) == ([1, 2, 3, 4], {}, None)
    assert report.runs == 4


@pytest.mark.parametrize("wrong", [ValueError, MemoryError])
@pytest.mark.parametrize("memory", [np.zeros(8), np.frombuffer(bytearray(64))], ids=["own", "lent"])
@pytest.mark.parametrize("form", [list, lambda rows: [{"name": "x", "row": row} for row in rows]])
def test_results_of_a_part_outlive_the_next_call_of_a_model_that_reuses_its_memory(
    wrong: type[Exception], memory: Any, form: Any
) -> None:
    class Reuses(ManagedModel):
        out_of_memory_errors = (MemoryError,)

        def init_model(self) -> None:
            pass

        def predict(self, batch: list[int]) -> Any:
            if 2 in batch and len(batch) > 2:
                raise wrong("two")
            memory[: len(batch)] = batch
            return form(memory[: len(batch), None])

    (report,) = served(loaded(Reuses), [0, 1, 2, 3, 4, 5, 6, 7], calls=1)
    expected = form(np.arange(8.0)[:, None])
    assert str(report.outputs) == str(expected)


def test_a_worker_says_between_two_runs_that_it_has_not_hung() -> None:
    clock = Clock()

    def model(batch: list[int]) -> list[int]:
        clock.now += 0.06
        if 3 in batch:
            raise ValueError("three")
        return batch

    channel = Batches([0, 1, 2, 3], calls=1)
    (report,) = channel.serve(loaded(model), clock)
    assert (report.runs, channel.signs) == (3, 1), "after a tenth of a second, not after each run"
