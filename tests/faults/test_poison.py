"""Bad items among good ones: who fails, who does not, and what it costs to find out."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from fault_models import Mishap, Recording

from service_streamer import Future, SharedBatchError, Streamer, WorkerLost
from service_streamer.testing import Gate

#: The calls of the usual batch, all of them in one.
BATCH = 64

# Halving a batch of 64 down to one item takes 6 steps, and each runs two halves.
FOR_ONE = 2 * 6
# So many it takes if all are bad.
FOR_ALL = 2 * BATCH - 2


class Bench:
    """A streamer whose first worker loads when all calls are there, and what its models compute."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "batches"
        self._path.touch()
        self._gate = Gate(folder / "gate")
        self._streamer: Streamer | None = None

    def ends(
        self, calls: Sequence[Sequence[Any]], batch_size: int = BATCH, **options: Any
    ) -> list[Any]:
        """What each call ends with: its results, or its exception."""
        self._streamer = Streamer(
            Recording, batch_size, model_init_args=(self._path, self._gate), **options
        )
        futures = [self._streamer.submit(call) for call in calls]
        self._gate.let_through(100)  # the workers to come as well
        return [end(future) for future in futures]

    @property
    def stats(self) -> Any:
        assert self._streamer is not None
        return self._streamer.stats()

    @property
    def batches(self) -> list[list[Any]]:
        """What the model was called with, in order."""
        return [ast.literal_eval(line) for line in self._path.read_text().splitlines()]

    def close(self) -> None:
        if self._streamer is not None:
            self._streamer.close()
        self._gate.close()


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path)
    yield bench
    bench.close()


def end(future: Future) -> Any:
    return future.exception() or future.result()


def singles(size: int, bad: dict[int, str]) -> list[list[Any]]:
    """Calls of one item each: their number, or what is bad at that position."""
    return [[bad.get(i, i)] for i in range(size)]


def assert_ends(ends: Sequence[Any], bad: dict[int, type[Exception]]) -> None:
    """The calls at these positions ended with these errors, the others with their results."""
    assert {i: type(ends[i]) for i in range(len(ends)) if isinstance(ends[i], Exception)} == bad
    assert [ends[i] for i in range(len(ends)) if i not in bad] == [
        [2 * i] for i in range(len(ends)) if i not in bad
    ]


# -- items that kill their worker


def test_of_a_thousand_calls_only_the_poisonous_one_fails(bench: Bench) -> None:
    ends = bench.ends(singles(1001, {357: "kill"}))
    assert_ends(ends, {357: WorkerLost})
    # By halves 7 workers die. To load this model takes longer than a few calls of it, so the parts
    # are smaller; one by one it takes 3: of the batch, and the attempts of the one that is alone.
    assert 3 <= bench.stats.restarts <= 7
    assert bench.stats.isolated == 1


def test_a_call_of_many_items_fails_for_one_of_them_and_its_neighbours_do_not(bench: Bench) -> None:
    calls = [[0, 1, 2], [3], [4, 5, "kill", 6, 7, 8, 9, 10], [11], [12, 13]]
    ends = bench.ends(calls, batch_size=15)
    assert isinstance(ends.pop(2), WorkerLost)
    assert ends == [[0, 2, 4], [6], [22], [24, 26]]
    assert bench.stats.isolated == 1


# -- items on which the model raises


def test_one_item_that_raises_costs_two_model_calls_for_each_halving(bench: Bench) -> None:
    ends = bench.ends(singles(BATCH, {21: "raise"}))
    assert_ends(ends, {21: Mishap})
    assert len(bench.batches) == 1 + FOR_ONE
    assert bench.stats.isolated == 1


@pytest.mark.parametrize("bad", [3, 16, 64])
def test_however_many_items_raise_all_others_are_computed(bench: Bench, bad: int) -> None:
    places = range(0, BATCH, BATCH // bad)[:bad]
    ends = bench.ends(singles(BATCH, dict.fromkeys(places, "raise")))
    assert_ends(ends, dict.fromkeys(places, Mishap))
    assert len(bench.batches) <= 1 + FOR_ALL
    assert bench.stats.isolated == bad


# -- models that must not compute anything twice


def computed_once(bench: Bench) -> bool:
    items = [item for batch in bench.batches for item in batch]
    return sorted(map(str, items)) == sorted(set(map(str, items)))


@pytest.mark.parametrize(("fault", "error"), [("raise", SharedBatchError), ("kill", WorkerLost)])
def test_without_retry_the_whole_batch_fails_and_nothing_is_computed_twice(
    bench: Bench, fault: str, error: type[Exception]
) -> None:
    ends = bench.ends(singles(20, {3: fault}), batch_size=8, retry=False)
    assert_ends(ends, dict.fromkeys(range(8), error))
    assert computed_once(bench)
    assert bench.stats.retries == 0


def test_without_isolation_a_call_that_was_alone_fails_with_what_the_model_raised(
    bench: Bench,
) -> None:
    [end] = bench.ends([[1, "raise", 2]], isolate_errors=False)
    assert isinstance(end, Mishap)


def test_without_isolation_what_a_dead_worker_had_is_computed_again(bench: Bench) -> None:
    ends = bench.ends(singles(BATCH, {3: "kill"}), isolate_errors=False)
    assert_ends(ends, {3: WorkerLost})
