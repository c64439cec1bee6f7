"""A model that names the invalid items of its batch: the others are computed once, without them."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from batcher_walk import make_batcher
from preprocess_models import NamesInvalid
from service_streamer import (
    BadModelOutput,
    InvalidInput,
    InvalidItems,
    ManagedModel,
    Streamer,
    ThreadedStreamer,
)
from service_streamer.batching.batcher import Batcher
from service_streamer.observe.record import BatchRecord, BatchReport
from service_streamer.testing import Gate
from worker_loop import Batches, loaded, model_of, raised, served, texts


def refuse(items: Sequence[Any]) -> None:
    errors = {i: InvalidInput(f"{item} < 0") for i, item in enumerate(items) if np.min(item) < 0}
    if errors:
        raise InvalidItems(errors)


class Staged(ManagedModel):
    def init_model(self) -> None:
        self.sizes: list[int] = []

    def preprocess(self, items: list[Any]) -> list[Any]:
        refuse(items)
        return items

    def forward(self, batch: list[Any]) -> list[Any]:
        self.sizes.append(len(batch))
        return [10 * item for item in batch]


class Whole(ManagedModel):
    def init_model(self) -> None:
        self.sizes: list[int] = []

    def predict(self, batch: list[Any]) -> list[Any]:
        refuse(batch)
        self.sizes.append(len(batch))
        return [10 * item for item in batch]


@pytest.mark.parametrize("model", [Staged, Whole])
@pytest.mark.parametrize(
    ("items", "sizes"), [([1, -2, 3, -4], [2]), ([-1, -2], []), ([-1, 2, 3], [2])]
)
def test_the_valid_items_of_a_batch_are_computed_once_without_the_others(
    model: type[Staged], items: list[int], sizes: list[int]
) -> None:
    worker = loaded(model)
    (report,) = served(worker, items)
    assert report.failure is None
    assert report.outputs == [None if item < 0 else 10 * item for item in items]
    assert texts(report) == {i: f"{item} < 0" for i, item in enumerate(items) if item < 0}
    assert model_of(worker).sizes == sizes


def test_positions_are_those_of_the_batch_where_items_are_missing_already() -> None:
    lost = object()
    (report,) = served(loaded(Staged), [1, -2, 3], failures={0: lost, 2: lost})
    assert report.outputs == [None, 10, None, None, 30]
    assert report.failures.pop(0) is report.failures.pop(2) is lost
    assert texts(report) == {3: "-2 < 0"}


def test_invalid_items_fail_alone_below_a_ceiling() -> None:
    worker = loaded(Staged)
    worker.ceiling.limit = 2
    (report,) = served(worker, [1, 2, 3, -4, 5, -6])
    assert report.outputs == [10, 20, 30, None, 50, None]
    assert texts(report) == {3: "-4 < 0", 5: "-6 < 0"}


@pytest.mark.parametrize("model", [Staged, Whole])
def test_invalid_rows_of_a_stacked_batch_fail_alone(model: type[ManagedModel]) -> None:
    """Rows of one shape are a batch for the model, so it counts among those only."""

    class Stacks(model):  # type: ignore[misc,valid-type]
        stack = True

    items = [np.array(row) for row in ([1, 1], [2], [-3, 1], [4, 4], [-5], [6])]
    (report,) = served(loaded(Stacks), items)
    assert sorted(report.failures) == [2, 4]
    done = [None if each is None else each.tolist() for each in report.outputs]
    assert done == [[10, 10], [20], None, [40, 40], None, [60]]


class Copies(Batches):
    """As that of a process: a model writes to copies of what was sent."""

    def decode(self, received: Any) -> Any:
        number, sent, failures = received[:3]
        return number, copy.deepcopy(sent), failures, lambda position: copy.deepcopy(sent[position])


@pytest.mark.parametrize("together", [False, True])
def test_valid_items_are_as_they_were_sent_when_they_are_preprocessed_again(together: bool) -> None:
    class Writes(Staged):
        def preprocess(self, items: list[Any]) -> list[Any]:
            for item in items:
                item += 1
            return super().preprocess(items)

    batch = [np.array(1), np.array(-5), np.array(3)]
    for report in Copies(batch, batch, together=together).serve(loaded(Writes)):
        assert report.outputs == [20, None, 40]


def test_items_are_as_they_were_sent_when_they_are_preprocessed_in_smaller_parts() -> None:
    class Writes(Staged):
        out_of_memory_errors = (OverflowError,)

        def preprocess(self, items: list[Any]) -> list[Any]:
            return [item.__iadd__(1) for item in items]

        def forward(self, batch: list[Any]) -> list[Any]:
            if len(batch) > 1:
                raise OverflowError
            return super().forward(batch)

    worker = loaded(Writes)
    worker.ceiling.limit = 2
    (report,) = Copies([np.array(each) for each in range(4)]).serve(worker)
    assert report.outputs == [10, 20, 30, 40]


class Wrong(Staged):
    def init_model(self, *positions: Any) -> None:  # type: ignore[override]
        super().init_model()
        self.positions = positions

    def preprocess(self, items: list[Any]) -> list[Any]:
        raise InvalidItems(dict.fromkeys(self.positions, InvalidInput("wrong")))


@pytest.mark.parametrize("limit", [0, 2])
@pytest.mark.parametrize(("position", "shown"), [(4, "4"), (-1, "-1"), ("a", "'a'")])
def test_an_item_that_is_not_there_is_an_error_of_the_model(
    position: Any, shown: str, limit: int
) -> None:
    worker = loaded(Wrong, position)
    worker.ceiling.limit = limit
    error = raised(served(worker, [1, 2, 3, 4])[0])
    assert isinstance(error, BadModelOutput)
    assert f"names item {shown}," in str(error)


def test_a_call_for_whose_item_another_is_named_that_is_not_there_fails_alone() -> None:
    def count_from_one(batch: list[int]) -> list[int]:
        wrong = [number for number, item in enumerate(batch, 1) if item < 0]
        if wrong:
            raise InvalidItems(dict.fromkeys(wrong, InvalidInput("wrong")))
        return batch

    (report,) = served(count_from_one, [1, 2, 3, -4], calls=1)
    assert report.failure is None
    assert [*report.failures] == [3]
    assert "names item 1, but the model was called with 1" in report.failures[3].text


def test_invalid_items_are_an_error_of_the_batch_later_than_in_preprocess() -> None:
    class Late(Staged):
        def preprocess(self, items: list[Any]) -> list[Any]:
            return items

        def forward(self, batch: list[Any]) -> list[Any]:
            refuse(batch)
            return batch

    error = raised(served(loaded(Late), [1, -2])[0])
    assert (type(error), str(error)) == (InvalidInput, "-2 < 0")


@pytest.mark.parametrize("size", [1, 3])
def test_each_caller_gets_the_error_of_its_own_item(gate: Gate, size: int) -> None:
    """Also where nothing may be computed again."""
    ran: list[int] = []

    def predict(batch: list[int]) -> list[int]:
        gate.go_through()
        refuse(batch)
        ran.append(len(batch))
        return batch

    with ThreadedStreamer(predict, batch_size=64, isolate_errors=False) as streamer:
        futures = [streamer.submit([0])]
        gate.await_arrival()
        futures += [streamer.submit([i] * (size - 1) + [-i if i % 2 else i]) for i in range(1, 9)]
        gate.let_through(100)
        for i, future in enumerate(futures[1:], 1):
            if i % 2:
                with pytest.raises(InvalidInput, match=rf"^-{i} < 0$") as caught:
                    future.result(60)
                assert type(caught.value) is InvalidInput
            else:
                assert future.result(60) == [i] * size
    assert sum(ran) == 1 + 8 * size - 4


@pytest.mark.parametrize("workers", [0, 2])
def test_each_caller_gets_the_error_of_its_own_item_across_processes(workers: int) -> None:
    with Streamer(NamesInvalid, batch_size=64, preprocess_workers=workers) as streamer:
        batch = [1, -2, 3, 4, 5, -6, 7]
        futures = [streamer.submit([item]) for item in batch]
        for item, future in zip(batch, futures, strict=True):
            if item < 0:
                with pytest.raises(InvalidInput, match=f"^{item} is below 0$"):
                    future.result(60)
            else:
                assert future.result(60) == [10 * item]
        with pytest.raises(InvalidInput, match=r"^-6 is below 0$"):
            streamer.predict([1, 2, 3, 4, 5, -6, -7])
        assert streamer.stats().isolated == 0


def test_invalid_items_are_copied_and_pickled_with_their_errors() -> None:
    errors = {3: InvalidInput("no"), 1: ValueError("two")}
    invalid = InvalidItems(errors)
    for each in (invalid, pickle.loads(pickle.dumps(invalid)), copy.copy(invalid)):
        assert str(each) == "no (and 1 more)"
        assert {i: str(error) for i, error in each.errors.items()} == {3: "no", 1: "two"}
    assert str(InvalidItems({0: ValueError("inputs: wrong")})) == "inputs: wrong"
    with pytest.raises(ValueError, match=r"^errors must have the exception of at least one item"):
        InvalidItems({})
    with pytest.raises(TypeError, match=r"^errors\[1\] must be an exception; it is a str$"):
        InvalidItems({1: "text"})  # type: ignore[dict-item]


def test_nothing_is_learned_from_items_that_were_not_computed() -> None:
    def batcher(*, invalid: int, computed: int) -> Batcher:
        learned = make_batcher(batch_size=64, max_latency=0.1)
        for _ in range(20):
            for failed, size, took in [
                (0, 64, 0.068),
                (0, 8, 0.012),
                (invalid, invalid + computed, 0.0001 if not computed else 0.004 + 0.001 * computed),
            ]:
                batch, failures = BatchRecord(0, 0, [], [None] * size), dict.fromkeys(range(failed))
                batch.report = BatchReport(0, failures=failures, duration=took)
                batch.back_at = 1.0
                learned.scheduler.answered(batch, size)
        return learned

    expected = batcher(invalid=0, computed=32).queue.cost
    for each in (batcher(invalid=32, computed=0), batcher(invalid=32, computed=32)):
        learned = each.queue.cost
        assert learned.base == pytest.approx(expected.base, rel=0.05)
        assert learned.per_unit == pytest.approx(expected.per_unit, rel=0.05)
