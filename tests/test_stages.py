"""Models with stages: what runs at the same time, in what order, and what becomes of errors."""

from __future__ import annotations

import sys
import threading
import time
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from batcher_walk import make_batcher
from serve_process import until
from service_streamer import ManagedModel, Streamer, ThreadedStreamer, WorkerLost
from service_streamer.observe.record import Call
from service_streamer.testing import Gate
from service_streamer.workers.model_spec import ModelSpec
from service_streamer.workers.protocol import Progress
from service_streamer.workers.transport import BatchReport, ThreadTransport, WorkerDied
from stage_models import STAGES, ForwardOnly, PredictWins, SlowStages, Staged
from worker_loop import Batches, Clock, loaded, model_of, raised, served, ticking


def worker_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if "service_streamer" in thread.name]


def test_a_batch_that_nobody_waits_for_goes_through_no_more_stages() -> None:
    """The worker reads that in memory that the engine writes: here, from the beginning."""
    for model in (Staged, ForwardOnly, PredictWins):
        seen: list[Any] = []
        worker = loaded(model)
        worker.preprocess = worker.preprocess and _noting(seen, worker.preprocess)
        worker.forward = _noting(seen, worker.forward)
        progress = Progress()
        progress.add_unwanted(1)
        reports = Batches([1, 2], [3], [4]).serve(worker, progress=progress)
        assert [report.failure is None for report in reports] == [True, False, True]
        assert reports[1].failure is not None
        assert reports[1].failure.blames_input, "the worker is not at fault"
        assert [3] not in seen


def _noting(seen: list[Any], stage: Any) -> Any:
    def noted(batch: Any) -> Any:
        seen.append(batch)
        return stage(batch)

    return noted


# -- which models have stages


@pytest.mark.parametrize(
    ("model", "outputs"), [(Staged, [2, 4]), (ForwardOnly, [3, 6]), (PredictWins, [3, 6])]
)
def test_a_model_is_computed_by_its_stages_or_by_its_own_predict(
    model: type[ManagedModel], outputs: list[int]
) -> None:
    (report,) = served(loaded(model), [1, 2])
    assert report.outputs == outputs
    assert (report.stages is not None) == (model is not PredictWins)
    by_hand: Any = model()
    by_hand.init_model()
    assert by_hand.predict([1, 2]) == outputs


def test_a_class_without_either_is_refused() -> None:
    class Nothing(ManagedModel):
        def init_model(self) -> None: ...

    with pytest.raises(TypeError, match=r"Nothing does not define predict or forward$"):
        ThreadedStreamer(Nothing)


def test_a_wrong_number_of_results_names_the_last_stage() -> None:
    class Loses(ForwardOnly):
        def postprocess(self, outputs: list[int]) -> list[int]:
            return outputs[1:]

    (report,) = served(loaded(Loses), [1, 2])
    assert "Loses.postprocess must return a sequence of 2 results" in str(raised(report))


class Columns(ManagedModel):
    """Returns two arrays of a row per item in place of results."""

    def init_model(self, kind: Any) -> None:
        self.kind = kind

    def forward(self, batch: list[int]) -> Any:
        return self.kind((np.array(batch), np.array([batch, batch]).T))


class Pair(NamedTuple):
    labels: Any
    rows: Any


@pytest.mark.parametrize("kind", [tuple, list])
def test_columns_are_no_results_even_if_there_are_as_many_as_items(kind: Any) -> None:
    model = loaded(Columns, kind)
    for report in served(model, [1, 2, 3, 4], [1, 2], [3, 4]):
        assert "of 2, each with a row for every item" in str(raised(report))
    # The search for a bad item divides the batch: into parts of two, too.
    (report,) = served(loaded(Columns, kind), [1, 2, 3, 4], calls=1)
    assert sorted(report.failures) == [0, 1, 2, 3]
    (report,) = served(loaded(Columns, kind), [1, 2])
    assert len(report.outputs) == 2, "these may be results, for all that is known"


def test_results_of_any_shape_are_results() -> None:
    class Squares(ForwardOnly):
        def forward(self, batch: list[int]) -> Any:
            return tuple(np.ones((len(batch), len(batch))))

    reports = served(loaded(Squares), *([1] * size for size in (1, 2, 3, 2, 1)))
    assert [len(report.outputs) for report in reports] == [1, 2, 3, 2, 1]


@pytest.mark.parametrize(
    ("kind", "name"),
    [(lambda parts: Pair(*parts), "Pair of 2 fields"),
     (lambda parts: torch.tensor(parts[1]).max(-1), "max of 2 fields"),
     (lambda parts: np.array(1.0), "ndarray without dimensions"),
     (lambda parts: torch.tensor(1.0), "Tensor without dimensions")],
    ids=["NamedTuple", "torch", "0-d array", "0-d tensor"],
)  # fmt: skip
def test_what_is_no_sequence_of_results_is_named(kind: Any, name: str) -> None:
    (report,) = served(loaded(Columns, kind), [1, 2])
    assert str(raised(report)).endswith(f"it returned {name}")


# -- overlap


def test_three_batches_are_in_three_stages_at_the_same_time() -> None:
    meeting = [[(stage, "meet")] for stage in reversed(STAGES)]
    reports = served(loaded(Staged), [1], *meeting, [2], *meeting, together=True)
    assert [report.outputs for report in reports] == [[2], [0], [0], [0], [4], [0], [0], [0]]


def test_a_batch_is_preprocessed_while_another_one_is_computed(gate: Gate) -> None:
    with Streamer(SlowStages, batch_size=1, model_init_args=(gate, {}, 2)) as streamer:
        # The first one makes the others wait, and finds them there when it is done.
        first = streamer.submit([("preprocess", "gate")])
        gate.await_arrival()
        others = [streamer.submit([number]) for number in range(5)]
        meeting = [streamer.submit([(stage, "meet")]) for stage in ("forward", "preprocess")]
        gate.let_through()
        for future in [first, *meeting]:
            assert future.result() == [0]
        assert [future.result() for future in others] == [[2 * n] for n in range(5)]


@pytest.mark.parametrize("together", [True, False])
def test_a_stage_has_a_thread_of_its_own_only_while_batches_overlap(together: bool) -> None:
    each = [[(stage, "thread")] for stage in STAGES]
    reports = served(loaded(Staged), [0], *each, together=together)
    here = threading.current_thread().name
    names = ["service_streamer intake", here, "service_streamer outlet"]
    assert [report.outputs[0] for report in reports[1:]] == (names if together else [here] * 3)


class Modes(ManagedModel):
    """A result says how the last two threads that it was in compute with torch."""

    def init_model(self) -> None:
        torch.set_grad_enabled(False)
        torch.set_default_device("meta")

    def preprocess(self, items: list[int]) -> list[Any]:
        return [torch.ones(1).device.type for _ in items]

    def forward(self, batch: list[Any]) -> list[Any]:
        return batch

    def postprocess(self, outputs: list[Any]) -> list[Any]:
        device = torch.ones(1).device.type  # nothing is computed there: it takes torch seconds
        has_grad = (torch.ones(1, device="cpu", requires_grad=True) * 2).requires_grad
        name = threading.current_thread().name
        return [(each, device, has_grad, name) for each in outputs]


def test_modes_of_torch_hold_in_all_stages() -> None:
    before = torch.is_grad_enabled()
    try:
        reports = served(loaded(Modes), [1], [2], together=True)
    finally:
        torch.set_grad_enabled(before)
        torch.set_default_device(None)
    here = threading.current_thread().name
    assert reports[0].outputs == [("meta", "meta", False, here)]
    assert reports[1].outputs == [("meta", "meta", False, "service_streamer outlet")]


class OneByOne(Batches):
    """The next batch comes when the one before is answered."""

    def __init__(self, *batches: list[Any]) -> None:
        super().__init__(*batches, together=True)
        self._answered = threading.Semaphore(1)

    def receive(self) -> tuple[Any, ...] | None:
        assert self._answered.acquire(timeout=60)
        return super().receive()

    def send(self, report: BatchReport) -> None:
        super().send(report)
        self._answered.release()


def test_when_batches_come_one_by_one_again_the_overlap_ends() -> None:
    here, count = threading.current_thread().name, 100
    channel = OneByOne(*([("preprocess", "thread")] for _ in range(count)))
    names = [report.outputs[0] for report in channel.serve(loaded(Staged), ticking())]
    # As it begins again after each batch here, every tenth or so is in this thread.
    assert 3 <= names.count(here) <= count // 2
    assert not worker_threads()


#: Batches overlap if that saves so many seconds of each.
UNIT = 2e-4


class Timed(ManagedModel):
    """Items say what each stage takes, in units. A result is the thread of the last stage."""

    def init_model(self, clock: Clock) -> None:
        self.clock = clock

    def preprocess(self, items: list[dict[str, float]]) -> list[dict[str, float]]:
        return self.take("preprocess", items)

    def forward(self, batch: list[dict[str, float]]) -> list[dict[str, float]]:
        return self.take("forward", batch)

    def postprocess(self, outputs: list[dict[str, float]]) -> list[str]:
        self.take("postprocess", outputs)
        return [threading.current_thread().name for _ in outputs]

    def take(self, stage: str, items: list[dict[str, float]]) -> list[dict[str, float]]:
        self.clock.now += UNIT * sum(item.get(stage, 0.0) for item in items)
        return items


class TimedBatches(Batches):
    """Decoding and encoding take time as well."""

    def __init__(self, clock: Clock, seconds: dict[str, float]) -> None:
        super().__init__([seconds], [seconds], together=True)
        self.clock, self.seconds = clock, seconds

    def decode(self, received: Any) -> Any:
        self.clock.now += UNIT * self.seconds.get("decode", 0.0)
        return super().decode(received)

    def encode(self, report: BatchReport) -> None:
        self.clock.now += UNIT * self.seconds.get("encode", 0.0)


@pytest.mark.parametrize(
    ("seconds", "pays"),
    [
        ({}, False),
        ({"forward": 9.0}, False),
        ({"preprocess": 9.0, "forward": 0.5}, False),
        ({"preprocess": 2.0, "forward": 2.0}, True),
        ({"preprocess": 2.0, "postprocess": 2.0}, True),
        ({"decode": 2.0, "forward": 2.0}, True),
        # An echo of large arrays: both hold the interpreter's lock.
        ({"decode": 5.0, "encode": 5.0}, False),
        ({"decode": 5.0, "forward": 0.5, "encode": 5.0}, False),
    ],
)
def test_batches_overlap_if_that_saves_time(seconds: dict[str, float], pays: bool) -> None:
    clock = Clock()
    reports = TimedBatches(clock, seconds).serve(loaded(Timed, clock), clock)
    here = threading.current_thread().name
    names = [report.outputs[0] for report in reports]
    assert names == [here, "service_streamer outlet" if pays else here]


def test_overlap_ends_when_it_saves_nothing_any_more() -> None:
    """As after a first batch for which kernels were compiled."""
    clock = Clock()
    slow: dict[str, float] = dict.fromkeys(STAGES, 2.0)
    channel = Batches([slow], *([{}] for _ in range(100)), together=True)
    reports = channel.serve(loaded(Timed, clock), clock)
    names = [report.outputs[0] for report in reports]
    assert names[1] == "service_streamer outlet"
    assert names[-1] == threading.current_thread().name
    # Those that were on their way when it turned out are some more than eight.
    assert names.count("service_streamer outlet") <= 20


def test_batches_do_not_overlap_under_gevent(monkeypatch: pytest.MonkeyPatch) -> None:
    patched = SimpleNamespace(is_module_patched=lambda name: name == "threading")
    monkeypatch.setitem(sys.modules, "gevent.monkey", patched)
    reports = served(loaded(Staged), *([("preprocess", "thread")] for _ in range(3)), together=True)
    assert {report.outputs[0] for report in reports} == {threading.current_thread().name}


@pytest.mark.parametrize("stage", ["intake", "outlet"])
def test_batches_do_not_overlap_where_no_thread_can_be_started(
    stage: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As under ``ulimit -u`` and in a container with few pids."""
    start = threading.Thread.start

    def fails(thread: threading.Thread) -> None:
        if thread.name == f"service_streamer {stage}":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", fails)
    each = [[(stage, "thread")] for stage in STAGES]
    reports = served(loaded(Staged), *each, *each, together=True)
    assert {report.outputs[0] for report in reports} == {threading.current_thread().name}
    (record,) = caplog.records
    assert "can't start new thread" in record.message
    assert not worker_threads()


def test_the_report_has_the_seconds_of_each_stage() -> None:
    first, second = served(loaded(Staged), [1], [2], together=True)
    for report in (first, second):
        assert report.stages is not None
        assert all(seconds >= 0 for seconds in report.stages)
        assert report.pace == max(report.stages)
        assert report.duration <= sum(report.stages)
    (plain,) = served(loaded(PredictWins), [1])
    assert plain.stages is None
    assert plain.pace == plain.duration


class Fills(ManagedModel):
    """From some call on it returns views of memory that the next call writes to."""

    def init_model(self, kind: Any, from_call: int) -> None:
        self.kind, self.from_call, self.calls = kind, from_call, 0
        self.buffer = kind([0] * 8)

    def predict(self, batch: list[int]) -> Any:
        self.calls += 1
        outputs = self.buffer[: len(batch)]
        outputs[:] = self.kind(batch)
        return outputs if self.calls >= self.from_call else outputs + 0


class FillsInForward(Fills):
    predict = ManagedModel.predict
    forward = Fills.predict


class Encoded(Batches):
    """As that of a process: nothing holds the outputs afterwards."""

    def encode(self, report: BatchReport) -> None:
        report.outputs = [
            (int(output), threading.current_thread().name) for output in report.outputs
        ]


@pytest.mark.parametrize("from_call", [1, 4, 1000])
@pytest.mark.parametrize("kind", [np.array, torch.tensor], ids=["numpy", "torch"])
@pytest.mark.parametrize("owner", [Fills, FillsInForward])
def test_memory_that_the_model_returns_again_is_sent_before_the_next_call(
    owner: type[ManagedModel], kind: Any, from_call: int
) -> None:
    model = loaded(owner, kind, from_call)
    model.moves_to_cpu = True  # as in a process
    channel = Encoded(*([number, number] for number in range(100)), together=True)
    reports = channel.serve(model, ticking())
    assert model.keeps_outputs == (from_call <= 100)
    outputs = [output for report in reports for output in report.outputs]
    here = threading.current_thread().name
    if from_call == 1:
        assert outputs == [(number, here) for number in range(100) for _ in range(2)]
    else:
        assert outputs[2] == (1, "service_streamer outlet")
        assert (outputs[-1] == (99, here)) == model.keeps_outputs


@pytest.mark.parametrize("from_call", [1, 1000])
def test_memory_is_known_to_be_the_models_also_after_a_batch_in_parts(from_call: int) -> None:
    model = loaded(Fills, np.array, from_call)
    model.moves_to_cpu, model.ceiling.limit = True, 2
    (report,) = Encoded([1, 2, 3, 4]).serve(model)
    assert [output for output, _ in report.outputs] == [1, 2, 3, 4]
    assert model.keeps_outputs == (from_call == 1)


# -- errors


@pytest.mark.parametrize("stage", STAGES)
def test_a_worker_ends_after_the_batches_before_and_none_behind(stage: str) -> None:
    after = ([number] for number in range(6))
    channel = Batches([1], [2], [(stage, "exit")], *after, together=True)
    with pytest.raises(SystemExit):
        channel.serve(loaded(Staged), ticking())
    assert [report.batch_id for report in channel.reports][:2] == [0, 1]
    until(lambda: not worker_threads())


def test_an_answer_that_comes_after_the_end_of_its_worker_is_too_late(
    gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threading.Thread, "join", lambda *_: None)  # it would wait for seconds
    monkeypatch.setattr(time, "monotonic", ticking())
    transport = ThreadTransport(ModelSpec(Staged, (gate,)))
    transport.start(0, 0, 1)
    transport.wait(None)
    for number, stage in enumerate(("preprocess", "postprocess")):
        transport.send(0, number, [(stage, "gate")])
    transport.send(0, 2, [("forward", "exit")])
    gate.await_arrival()
    gate.let_through()
    gate.await_arrival()  # it stays there
    events: list[Any] = []
    while not any(isinstance(event, WorkerDied) for event in events):
        events += transport.wait(None)
    (outlet,) = (each for each in threading.enumerate() if each.name.endswith(" outlet"))
    monkeypatch.undo()
    gate.let_through()
    outlet.join()
    assert transport.wait(0) == []
    transport.close(1.0)


# -- too little memory


def test_batches_below_a_ceiling_overlap_in_parts_that_fit() -> None:
    model = loaded(Staged, None, {"forward": 5})
    served(model, *(list(range(16)) for _ in range(10)), together=True)
    staged = model_of(model)
    # The first batch is preprocessed whole, then as it is computed: no part is prepared twice.
    assert staged.sizes["preprocess"][0] == 16
    fitted = [size for size in staged.sizes["forward"] if size <= 5]
    assert sum(staged.sizes["preprocess"]) <= 16 + 2 * sum(fitted)
    assert max(staged.sizes["preprocess"][-4:]) <= 5


@pytest.mark.parametrize("limit", [0, 1, 2, 3])
@pytest.mark.parametrize("stage", STAGES)
def test_nothing_is_computed_twice_without_reruns_when_an_item_never_fits(
    stage: str, limit: int
) -> None:
    model = loaded(Staged, may_rerun=False)
    model.ceiling.limit = limit
    (report,) = served(model, [1, 2, 3, (stage, "full"), 5], together=True)
    if stage == "preprocess" or not limit:  # else each part that runs out is known
        assert sorted(report.failures) == [0, 1, 2, 3, 4]
    else:
        assert 3 in report.failures
        assert len(report.failures) <= limit
    assert sum(model_of(model).sizes["forward"]) <= 5


ITEMS = st.one_of(
    st.integers(0, 9), st.tuples(st.sampled_from(STAGES), st.sampled_from(["raise", "full"]))
)


def is_odd(item: Any) -> bool:
    """Whether something happens at it; an item that is too large fails alone."""
    return isinstance(item, tuple)


@settings(deadline=None, max_examples=60, suppress_health_check=list(HealthCheck))
@given(
    batches=st.lists(st.lists(ITEMS, min_size=1, max_size=8), min_size=1, max_size=12),
    room=st.dictionaries(st.sampled_from(STAGES), st.integers(1, 8)),
    together=st.booleans(),
    shared=st.booleans(),
)
# The item runs out twice: when its batch is computed, and again when that is done in parts.
@example([[1, 2, 3, ("forward", "full"), 5]], {"postprocess": 2}, True, False)
@example([[1, 2, 3, 4, ("forward", "full")]], {"postprocess": 2}, False, False)
def test_every_batch_is_answered_once_and_rightly(
    batches: list[list[Any]], room: dict[str, int], together: bool, shared: bool
) -> None:
    model = loaded(Staged, None, room)
    reports = served(model, *batches, together=together, calls=int(shared))
    assert [report.batch_id for report in reports] == list(range(len(batches)))
    for report, batch in zip(reports, batches, strict=True):
        bad = [stage for stage, happens in filter(is_odd, batch) if happens == "raise"]
        if bad and not shared:
            error = raised(report)
            assert type(error) is ValueError
            assert str(error) in {f"in {stage}" for stage in bad}
            assert str(error).removeprefix("in ") in str(error.__cause__)
        else:
            assert report.outputs == [None if is_odd(item) else 2 * item for item in batch]
            assert sorted(report.failures) == [n for n, item in enumerate(batch) if is_odd(item)]


# -- how much a worker is sent


@pytest.mark.parametrize(
    ("stages", "count"),
    [
        ((0.0, 0.0, 0.0), 2),
        ((0.0, 0.01, 0.0), 2),
        ((0.0004, 0.01, 0.0001), 2),  # stages of a twentieth
        ((0.002, 0.0114, 0.002), 3),
        ((0.02, 0.02, 0.02), 4),
        ((0.02, 0.0, 0.0), 2),
        ((1.0, 0.9, 0.9), 4),
    ],
)
def test_a_worker_is_sent_as_many_batches_as_its_stages_need(
    stages: tuple[float, float, float], count: int
) -> None:
    batcher, now = make_batcher(batch_size=1, max_latency=0.1), 0.0
    sent = [*batcher.worker_ready(0, now).batches]
    for number in range(100):
        sent += batcher.call_submitted(Call([number], None), now).batches
    for _ in range(60):
        batch = sent.pop(0)
        now += max(stages)
        report = BatchReport(batch.id, [None], duration=sum(stages), stages=stages, slot=0)
        sent += batcher.batch_returned(report, now).batches
    assert len(sent) == count


# -- the end of a worker


def test_an_item_that_kills_its_worker_in_any_stage_fails_alone(gate: Gate) -> None:
    with Streamer(Staged, 1, model_init_args=(gate,), mp_start_method="fork") as streamer:
        # The worker is known to have stages, and many batches wait for it.
        futures = [streamer.submit([("preprocess", "gate")])]
        gate.await_arrival()
        futures += [streamer.submit([number]) for number in range(20)]
        gate.let_through()
        for stage in STAGES:
            killer = streamer.submit([(stage, "kill")])
            futures += [streamer.submit([number]) for number in range(10)]
            with pytest.raises(WorkerLost, match="SIGKILL"):
                killer.result()
        numbers = [0, *range(20), *(3 * [*range(10)])]
        assert [future.result() for future in futures] == [[2 * number] for number in numbers]
