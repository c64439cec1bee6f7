"""Batches that are too large for the device: how far they are cut, and what is learned of it."""

from __future__ import annotations

import math
import pickle
import sys
import weakref
from collections.abc import Callable, Iterable
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import models
from conftest import pool_only
from models import DeviceFullError
from service_streamer import BadModelOutput, ManagedModel, WorkerStartError
from service_streamer.workers import runner
from service_streamer.workers.batch_ceiling import FIRST_INTERVAL, LONGEST_INTERVAL, Ceiling
from service_streamer.workers.model_spec import LoadedModel, ModelSpec, Predict
from service_streamer.workers.protocol import BatchReport, Failure
from service_streamer.workers.runner import serve

# -- the decisions


class Run(NamedTuple):
    start: int
    stop: int
    fitted: bool
    limit: int  # before it

    @property
    def size(self) -> int:
        return self.stop - self.start


def compute(
    ceiling: Ceiling,
    size: int,
    room: int | Callable[[], int],
    *,
    huge: Iterable[int] = (),
    may_rerun: bool = True,
) -> list[Run]:
    """The runs of a batch, where ``room`` items fit at once and those at ``huge`` never do."""
    runs: list[Run] = []
    done: list[int] = []
    for chunk in ceiling.chunks(size, may_rerun=may_rerun):
        most = room if isinstance(room, int) else room()
        positions = range(chunk.start, chunk.stop)
        fitted = len(positions) <= most and not set(positions) & set(huge)
        runs.append(Run(chunk.start, chunk.stop, fitted, ceiling.limit))
        chunk.has_run_out = not fitted
        if fitted or chunk.is_last_try:
            done += positions
    assert done == list(range(size)), "each item is done once, in order"
    return runs


def sizes(runs: list[Run]) -> list[int]:
    """Of each run; negative where it ran out."""
    return [run.size if run.fitted else -run.size for run in runs]


def settled(limit: int, asked: int) -> Ceiling:
    """A ceiling at this limit, found with a batch of this size."""
    ceiling = Ceiling()
    compute(ceiling, asked, limit)
    assert ceiling.limit == limit
    return ceiling


def until_probe(ceiling: Ceiling, size: int, room: int) -> tuple[int, Run]:
    """Compute batches until one has a probe: after how many runs of the limit's size, and it."""
    full = 0
    while True:
        for run in compute(ceiling, size, room):
            if run.size > run.limit > 0:
                return full, run
            full += run.size == run.limit


def test_without_trouble_there_is_no_limit() -> None:
    ceiling = Ceiling()
    for size in (1, 64, 10_000):
        assert sizes(compute(ceiling, size, 10_000)) == [size]
    assert ceiling.limit == 0
    assert not compute(ceiling, 0, 1)


@pytest.mark.parametrize(
    ("size", "room", "expected", "limit"),
    [
        (64, 63, [-64, 32, 32], 32),
        (64, 32, [-64, 32, 32], 32),
        (64, 31, [-64, -32, 16, 16, 16, 16], 16),
        (7, 6, [-7, 4, 3], 4),
        (7, 2, [-7, -4, 2, 2, 2, 1], 2),
        (3, 1, [-3, -2, 1, 1, 1], 1),
        (2, 1, [-2, 1, 1], 1),
    ],
)
def test_a_batch_is_halved_until_it_fits(
    size: int, room: int, expected: list[int], limit: int
) -> None:
    ceiling = Ceiling()
    assert sizes(compute(ceiling, size, room)) == expected
    assert ceiling.limit == limit
    later = sizes(compute(ceiling, size, room))
    assert later == [run for run in expected if run > 0]


def test_smaller_batches_are_left_alone() -> None:
    ceiling = settled(16, asked=64)
    for size in range(1, 17):
        assert sizes(compute(ceiling, size, 16)) == [size]
    assert sizes(compute(ceiling, 17, 16)) == [16, 1]


def test_a_chunk_below_the_limit_that_runs_out_lowers_it() -> None:
    ceiling = settled(16, asked=64)
    assert sizes(compute(ceiling, 10, 5)) == [-10, 5, 5]
    assert ceiling.limit == 5


def test_a_probe_is_a_quarter_more_and_has_to_be_earned() -> None:
    ceiling = settled(32, asked=64)
    full, probe = until_probe(ceiling, 64, 50)
    assert full + 2 >= FIRST_INTERVAL
    assert (probe.size, probe.fitted) == (40, True)
    assert ceiling.limit == 40
    full, probe = until_probe(ceiling, 64, 50)
    assert (full, probe.size, probe.fitted) == (FIRST_INTERVAL, 50, True)


def test_probes_that_run_out_cost_one_run_and_become_rare() -> None:
    ceiling = settled(32, asked=64)
    until_probe(ceiling, 64, 32)
    waits = []
    for _ in range(8):
        assert ceiling.limit == 32, "what is known to fit stays"
        full, probe = until_probe(ceiling, 64, 32)
        assert not probe.fitted
        waits.append(full)
    assert waits == [min(FIRST_INTERVAL * 2**i, LONGEST_INTERVAL) for i in range(1, 9)]


def test_memory_that_is_there_again_ends_the_limit() -> None:
    ceiling = settled(1, asked=64)
    limits = []
    while ceiling.limit:
        limits.append(until_probe(ceiling, 64, 64)[1].limit)
    assert limits[:9] == [1, 2, 3, 4, 5, 6, 7, 8, 10]
    assert len(limits) == 18
    assert sizes(compute(ceiling, 64, 64)) == [64]


def test_the_limit_stays_until_as_much_has_fitted_as_is_asked_for() -> None:
    ceiling = settled(32, asked=64)
    for _ in range(10 * FIRST_INTERVAL):
        compute(ceiling, 40, 40)
    assert ceiling.limit == 40
    assert sizes(compute(ceiling, 64, 64)) == [50, 14]
    for _ in range(10 * FIRST_INTERVAL):
        compute(ceiling, 64, 64)
    assert ceiling.limit == 0


@pytest.mark.parametrize("position", range(16))
def test_a_huge_item_fails_alone_and_slows_nobody_afterwards(position: int) -> None:
    ceiling = Ceiling()
    runs = compute(ceiling, 16, 16, huge=[position])
    assert [run.start for run in runs if run.size == 1 and not run.fitted] == [position]
    assert sum(not run.fitted for run in runs) == 5
    assert len(runs) <= 2 * math.log2(16) + 6
    assert ceiling.limit == 0
    ceiling = settled(8, asked=16)
    compute(ceiling, 16, 8, huge=[position])
    assert ceiling.limit == 8


def test_a_huge_item_does_not_hide_that_the_others_are_too_many() -> None:
    ceiling = Ceiling()
    runs = compute(ceiling, 64, 16, huge=[0])
    assert sizes(runs) == [-64, -32, -16, -8, -4, -2, -1, 1, 2, 4, 8, 16, -32, 16, 16]
    assert ceiling.limit == 16


def test_a_device_without_any_room_fails_each_item_and_is_tried_again() -> None:
    ceiling = Ceiling()
    runs = compute(ceiling, 16, 0)
    assert len(runs) == 2 * 16 - 1
    assert sizes(compute(ceiling, 16, 16)) == [16]


def test_what_may_not_run_twice_is_only_learned_from() -> None:
    ceiling = Ceiling()
    assert sizes(compute(ceiling, 64, 20, may_rerun=False)) == [-64]
    assert sizes(compute(ceiling, 64, 20, may_rerun=False)) == [-32, 16, 16]
    assert sizes(compute(ceiling, 64, 20, may_rerun=False)) == [16] * 4
    assert sizes(compute(ceiling, 3, 0, may_rerun=False)) == [-3]
    assert ceiling.limit == 2


def halvings(size: int) -> int:
    return math.ceil(math.log2(size)) + 1


#: However long an example takes: on a busy machine that says nothing.
ANY_TIME = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


@ANY_TIME
@given(
    batches=st.lists(st.integers(1, 200), min_size=1, max_size=40),
    room=st.integers(1, 220),
    pace=st.integers(1, 60),
    data=st.data(),
)
def test_every_batch_is_done_in_few_runs_whatever_fits(
    batches: list[int], room: int, pace: int, data: st.DataObject
) -> None:
    """What fits changes every ``pace`` runs; at least one item always does."""
    ceiling = Ceiling()
    count = 0

    def changing() -> int:
        nonlocal room, count
        count += 1
        if count % pace == 0:
            room = data.draw(st.integers(1, 220))
        return room

    full: int | None = None  # that fitted since the last probe or cut
    for size in batches:
        runs = compute(ceiling, size, changing)
        fitted = sum(run.fitted for run in runs)
        assert len(runs) - fitted <= halvings(size) + fitted // FIRST_INTERVAL
        for run in runs:
            if run.size > run.limit > 0:
                assert full is None or full >= FIRST_INTERVAL
                full = 0
            elif not run.fitted:
                full = 0
            elif run.size == run.limit and full is not None:
                full += 1


@ANY_TIME
@given(batches=st.lists(st.integers(1, 300), min_size=1, max_size=60), room=st.integers(1, 300))
def test_where_the_same_always_fits_it_is_found_once(batches: list[int], room: int) -> None:
    ceiling = Ceiling()
    runs = [run for size in batches for run in compute(ceiling, size, room)]
    probes = sum(run.size > run.limit > 0 for run in runs)
    failed = sum(not run.fitted for run in runs)
    assert failed <= halvings(max(batches)) - 1 + probes
    assert probes <= len(runs) // FIRST_INTERVAL
    assert ceiling.limit <= room


@ANY_TIME
@given(
    size=st.integers(1, 200),
    room=st.integers(1, 200),
    huge=st.sets(st.integers(0, 199), max_size=8),
    before=st.integers(0, 200),
)
def test_huge_items_fail_alone_at_the_cost_of_a_search_each(
    size: int, room: int, huge: set[int], before: int
) -> None:
    ceiling = Ceiling()
    compute(ceiling, 200, before or 200)
    runs = compute(ceiling, size, room, huge=huge)
    alone = {run.start for run in runs if run.size == 1 and not run.fitted}
    assert alone == {position for position in huge if position < size}
    fitted = sum(run.fitted for run in runs)
    bound = (len(alone) + 1) * halvings(size) + fitted // FIRST_INTERVAL
    assert len(runs) - fitted <= bound


# -- the worker


class Channel(runner.Channel):
    """Hands out batches, and keeps the answers."""

    def __init__(self, *batches: list[Any], failures: dict[int, Failure] | None = None) -> None:
        self._batches = list(batches)
        self._failures = failures or {}
        self.reports: list[BatchReport] = []

    def receive(self) -> tuple[int, list[Any], dict[int, Failure]] | None:
        if not self._batches:
            return None
        return len(self.reports), self._batches.pop(0), dict(self._failures)

    def send(self, report: BatchReport) -> None:
        self.reports.append(report)


def served(predict: Predict, *batches: list[Any], may_rerun: bool = True) -> list[BatchReport]:
    channel = Channel(*batches)
    serve(
        channel,
        LoadedModel(predict, out_of_memory_errors=(DeviceFullError,), may_rerun=may_rerun),
    )
    return channel.reports


class Limited:
    """Computes at most ``room`` items at once and "huge" never; notes what it was given."""

    def __init__(self, room: int, error: type[BaseException] = DeviceFullError) -> None:
        self.room = room
        self.error = error
        self.seen: list[int] = []

    def predict(self, batch: list[Any]) -> list[Any]:
        self.seen.append(len(batch))
        if len(batch) > self.room or "huge" in batch:
            raise self.error(f"no room for {len(batch)}")
        return [2 * item for item in batch]


def text(failure: Failure | None) -> str:
    assert failure is not None
    return str(failure.exception())


def test_results_come_together_again_in_order() -> None:
    model = Limited(10)
    first, second, third = served(model.predict, [1, 2], list(range(64)), list(range(20)))
    assert (first.outputs, first.ceiling) == ([2, 4], 0)
    assert (second.outputs, second.ceiling) == ([2 * i for i in range(64)], 8)
    assert (third.outputs, third.ceiling) == ([2 * i for i in range(20)], 8)
    assert model.seen == [2, 64, 32, 16, *[8] * 8, 8, 8, 4]


def test_without_an_error_the_model_gets_the_very_list() -> None:
    batch = [1, 2, 3]
    seen = []

    def predict(items: list[Any]) -> list[Any]:
        seen.append(items)
        return items

    served(predict, batch)
    assert seen[0] is batch


def test_an_item_that_is_too_large_fails_alone_with_its_own_error() -> None:
    (outcome,) = served(Limited(10).predict, [1, 2, "huge", 4, "huge", 6])
    assert outcome.failure is None
    assert outcome.ceiling == 0
    assert [outcome.outputs[i] for i in (0, 1, 3, 5)] == [2, 4, 8, 12]
    assert sorted(outcome.failures) == [2, 4]
    error = outcome.failures[4].exception()
    assert isinstance(error, DeviceFullError)
    assert str(error) == "no room for 1"
    assert "in predict" in str(error.__cause__)


def test_items_that_never_arrived_keep_their_positions() -> None:
    missing = Failure(ValueError("not decoded"))
    channel = Channel([1, "huge", 3], failures={0: missing, 3: missing})
    serve(channel, LoadedModel(Limited(10).predict, out_of_memory_errors=(DeviceFullError,)))
    (outcome,) = channel.reports
    assert len(outcome.outputs) == 5
    assert (outcome.outputs[1], outcome.outputs[4]) == (2, 6)
    assert sorted(outcome.failures) == [0, 2, 3]
    assert text(outcome.failures[2]) == "no room for 1"
    assert outcome.failures[3] is missing


def test_a_wrong_number_of_results_is_told_of_the_chunk() -> None:
    def predict(batch: list[Any]) -> list[Any]:
        if len(batch) > 4:
            raise DeviceFullError
        return batch[1:]

    (outcome,) = served(predict, [1, 2, 3, 4, 5])
    assert outcome.failure is not None
    error = outcome.failure.exception()
    assert isinstance(error, BadModelOutput)
    assert "predict must return a sequence of 3 results" in str(error)
    assert "it returned list of 2" in str(error)
    assert outcome.ceiling == 3


def test_another_error_in_a_chunk_is_the_batch_s() -> None:
    def predict(batch: list[Any]) -> list[Any]:
        if len(batch) > 2:
            raise DeviceFullError
        return [1 // item for item in batch]

    failed, fine = served(predict, [1, 1, 0, 1], [1, 1, 1])
    assert isinstance(failed.failure and failed.failure.exception(), ZeroDivisionError)
    assert (failed.outputs, failed.failures, failed.ceiling) == ([], {}, 2)
    assert (fine.outputs, fine.failure) == ([1, 1, 1], None)


def test_what_the_model_does_not_name_is_an_ordinary_error() -> None:
    model = Limited(2, MemoryError)
    (outcome,) = served(model.predict, [1, 2, 3])
    assert isinstance(outcome.failure and outcome.failure.exception(), MemoryError)
    assert outcome.ceiling == 0
    assert model.seen == [3]


class Interruption(BaseException):
    pass


def test_more_than_an_exception_counts_only_if_it_is_named() -> None:
    model = Limited(2, Interruption)
    with pytest.raises(Interruption):
        served(model.predict, [1, 2, 3])
    channel = Channel([1, 2, 3])
    serve(channel, LoadedModel(model.predict, out_of_memory_errors=(Interruption,)))
    assert channel.reports[0].outputs == [2, 4, 6]


def test_nothing_runs_twice_that_may_not() -> None:
    model = Limited(2)
    reports = served(model.predict, [1, 2, 3, 4], [1, 2, 3, "huge"], [1], may_rerun=False)
    assert model.seen == [4, 2, 2, 1]
    assert [outcome.failure for outcome in reports] == [None] * 3
    assert {i: text(failure) for i, failure in reports[0].failures.items()} == dict.fromkeys(
        range(4), "no room for 4"
    )
    assert reports[0].ceiling == 2
    assert reports[1].outputs[:2] == [2, 4]
    assert sorted(reports[1].failures) == [2, 3]
    assert reports[2].outputs == [2]


# -- torch


class FakeTorchError(RuntimeError):
    pass


def fake_torch(monkeypatch: pytest.MonkeyPatch, **attributes: Any) -> ModuleType:
    module = ModuleType("torch")
    for name, value in attributes.items():
        setattr(module, name, value)
    monkeypatch.setitem(sys.modules, "torch", module)
    return module


class FakeCuda(SimpleNamespace):
    def __init__(self, *, is_initialized: bool = True, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.is_initialized = lambda: is_initialized
        self.emptied = 0

    def empty_cache(self) -> None:
        self.emptied += 1


@pytest.mark.parametrize(
    ("of_torch", "of_cuda"),
    [
        ({"OutOfMemoryError": FakeTorchError}, {"OutOfMemoryError": FakeTorchError}),
        ({}, {"OutOfMemoryError": FakeTorchError}),
        ({"OutOfMemoryError": FakeTorchError}, {}),
    ],
)
def test_torch_s_error_counts_for_every_model(
    monkeypatch: pytest.MonkeyPatch, of_torch: dict[str, Any], of_cuda: dict[str, Any]
) -> None:
    cuda = FakeCuda(**of_cuda)
    fake_torch(monkeypatch, cuda=cuda, **of_torch)
    model = Limited(2, FakeTorchError)
    reports = served(model.predict, [1, 2, 3, 4], ["huge"])
    assert reports[0].outputs == [2, 4, 6, 8]
    assert text(reports[1].failures[0]) == "no room for 1"
    assert cuda.emptied == 2, "also after an item that failed alone"


def test_a_torch_that_comes_with_the_first_batch_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    model = Limited(2, FakeTorchError)

    def predict(batch: list[Any]) -> list[Any]:
        fake_torch(monkeypatch, OutOfMemoryError=FakeTorchError)
        return model.predict(batch)

    assert served(predict, [1, 2, 3])[0].outputs == [2, 4, 6]


@pytest.mark.parametrize(
    "attributes",
    [{}, {"cuda": None}, {"OutOfMemoryError": "no class", "cuda": SimpleNamespace()}],
)
def test_half_a_torch_does_no_harm(
    monkeypatch: pytest.MonkeyPatch, attributes: dict[str, Any]
) -> None:
    fake_torch(monkeypatch, **attributes)
    reports = served(Limited(2).predict, [1, 2, 3], [0, None])
    assert reports[0].outputs == [2, 4, 6]
    assert isinstance(reports[1].failure and reports[1].failure.exception(), TypeError)
    monkeypatch.setitem(sys.modules, "torch", None)
    assert served(Limited(2).predict, [1, 2, 3])[0].outputs == [2, 4, 6]


def test_no_context_is_made_on_a_device_that_is_not_in_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda = FakeCuda(is_initialized=False)
    fake_torch(monkeypatch, cuda=cuda)
    assert served(Limited(2).predict, [1, 2, 3])[0].outputs == [2, 4, 6]
    assert cuda.emptied == 0


def test_a_cache_that_cannot_be_emptied_does_not_end_the_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def empty_cache() -> None:
        raise RuntimeError("device-side assert triggered")

    cuda = FakeCuda()
    cuda.empty_cache = empty_cache  # type: ignore[method-assign]
    fake_torch(monkeypatch, cuda=cuda)
    assert served(Limited(2).predict, [1, 2, 3])[0].outputs == [2, 4, 6]


class Tensor:
    pass


@pytest.mark.parametrize("is_cyclic", [False, True])
@pytest.mark.parametrize("batch", [[1, 2], ["huge"]])
def test_the_tensors_of_a_run_are_gone_before_the_cache_is_emptied(
    monkeypatch: pytest.MonkeyPatch, batch: list[Any], is_cyclic: bool
) -> None:
    tensors: list[weakref.ref[Tensor]] = []
    alive: list[bool] = []
    cuda = FakeCuda()
    cuda.empty_cache = lambda: alive.append(tensors[-1]() is not None)  # type: ignore[method-assign]
    fake_torch(monkeypatch, cuda=cuda)
    model = Limited(1)

    def predict(items: list[Any]) -> list[Any]:
        tensor = Tensor()
        tensors.append(weakref.ref(tensor))
        try:
            return model.predict(items)
        except DeviceFullError as error:
            kept = error if is_cyclic else None  # its traceback holds this frame, and that it
            raise DeviceFullError(f"in other words: {kept}") from error

    served(predict, batch)
    assert alive == [False]


def test_real_torch_has_the_names() -> None:
    torch = pytest.importorskip("torch")
    for error in (torch.OutOfMemoryError, torch.cuda.OutOfMemoryError):
        assert served(Limited(2, error).predict, [1, 2, 3])[0].outputs == [2, 4, 6]


# -- what a model says of itself


def load(**attributes: Any) -> LoadedModel:
    """A model whose ``init_model`` sets these attributes."""

    class Model(ManagedModel):
        def init_model(self) -> None:
            vars(self).update(attributes)

        def predict(self, batch: list[Any]) -> list[Any]:
            return batch

    return ModelSpec(Model).load(None)


def test_a_model_may_name_its_errors_when_it_is_loaded() -> None:
    assert load(out_of_memory_errors=(MemoryError,)).out_of_memory_errors == (MemoryError,)
    assert load().out_of_memory_errors == ()


@pytest.mark.parametrize(
    "errors", [MemoryError, [MemoryError], None, "MemoryError", ("",), (int,), (1,)]
)
def test_what_is_no_tuple_of_exception_classes_is_refused(errors: object) -> None:
    with pytest.raises(TypeError, match=r"Model\.out_of_memory_errors must be a tuple of exce"):
        load(out_of_memory_errors=errors)


@pytest.mark.parametrize("may_rerun", [True, False])
def test_whether_it_may_run_again_travels_with_the_model(may_rerun: bool) -> None:
    for model in (models.Fitting, models.double, "models:Fitting"):
        spec: ModelSpec = pickle.loads(pickle.dumps(ModelSpec(model, may_rerun=may_rerun)))
        assert spec.load(None).may_rerun is may_rerun
    assert ModelSpec(models.double).may_rerun


# -- with real workers

Build = Callable[..., Any]


def test_a_batch_that_is_too_large_is_answered_all_the_same(build: Build) -> None:
    streamer = build(models.Fitting, batch_size=64)
    for first_run in (4, 12):
        results = streamer.predict(list(range(64)))
        assert results == [(i, first_run + i // 8, 8) for i in range(64)]


def test_callers_are_not_failed_by_an_item_that_is_too_large(build: Build) -> None:
    streamer = build(models.Fitting, batch_size=8)
    calls = [streamer.submit([item]) for item in (1, "huge", 3)]
    with pytest.raises(DeviceFullError, match="no room for 1"):
        calls[1].result()
    for call, item in ((calls[0], 1), (calls[2], 3)):
        ((result, _, _),) = call.result()
        assert result == item


@pool_only("the client is not told why a worker host is not there")
def test_a_model_that_names_no_errors_does_not_start(build: Build) -> None:
    streamer = build(models.NamesNoErrors)
    with pytest.raises(WorkerStartError, match="out_of_memory_errors must be a tuple"):
        streamer.wait_ready()
    models.await_worker_threads()
