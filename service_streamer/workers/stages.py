"""The stages of one batch in its worker.

    stage      what it does                                     where it runs while batches overlap
    -----      ------------                                     -----------------------------------
    INTAKE     decode the items, preprocess                     a thread of its own
    FORWARD    forward; or predict, of a model without stages   the thread that loaded the model
    OUTLET     postprocess, check the results, encode, send     a thread of its own

A batch goes back to FORWARD, whichever stage raised, if it is too large for the device's memory,
if the model calls some items invalid, or if one of several calls is at fault. It is computed there
in parts, from its items on: all stages of a part run one after the other. So a stage may be called
in the thread of another one, but never twice at the same time.
"""

from __future__ import annotations

import contextlib
import copy
import sys
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import BadModelOutput, InvalidInput, InvalidItems
from ..gpu.accelerators import kind_in_use, release_memory
from ..gpu.device_errors import is_out_of_memory
from ..gpu.transfers import PLAIN, OnHost, StageTimer, first_value, results_on_host
from ..observe.record import BatchReport, StepReport
from ..options.checks import is_sequence
from .mending import Bisection, Invalid, Outcome, OutOfMemory, Returned, at_positions, by_position
from .model_spec import LoadedModel, Predict, stacks
from .protocol import SIGN_OF_LIFE, Failure, Progress

INTAKE, FORWARD, OUTLET = range(3)

#: The last one decodes the item at a position again, if a model writes to copies; else it is None.
DecodedBatch = tuple[int, list[Any], dict[int, Failure], Callable[[int], Any] | None]


class Channel(ABC):
    """A worker's end of its private connection to the web process.

    One thread calls ``receive`` and ``decode``, one other ``encode``, and any of them ``send``.
    """

    @abstractmethod
    def receive(self) -> tuple[Any, ...] | None:
        """Block for the next batch, whose id comes first. None: end now.

        Its fourth member are the items of each call, as in ``Transport.send``; of a model of steps
        whether it is a stream. Such a model may also get an order with the ids of batches, as in
        ``Transport.tell``.
        """

    @abstractmethod
    def send(self, report: BatchReport | StepReport) -> None:
        """Answer a batch, or report a step; it is encoded."""

    def is_waiting(self) -> bool:
        """Whether ``receive`` would return at once."""
        return False

    def decode(self, received: Any) -> DecodedBatch:
        """The batch's id, its items, by position why an item is missing, and ``decode_again``."""
        return *received[:3], None

    def encode(self, report: BatchReport | StepReport) -> None:  # noqa: B027 - optional
        """Make the outputs ready to travel.

        One of a batch that cannot becomes a failure of its position. A stream of which an output
        cannot is then among those that are over.
        """

    def check_owner(self) -> None:  # noqa: B027
        """End a process that the model has forked and that came back from the model."""

    def interrupt(self) -> bool:
        """Make ``receive`` return None, now or soon, for another thread; False if it cannot."""
        return False

    last_sign_at = 0.0  # when the last sign of life was due

    def sign_of_life(self) -> None:
        """Between two runs of parts: say that the worker has not hung, ten times a second."""
        now = time.monotonic()
        if now - self.last_sign_at >= SIGN_OF_LIFE:
            self.last_sign_at = now
            self.send(StepReport())


@dataclass(eq=False)
class Job:
    """One batch on its way through the stages. Belongs to one stage at a time."""

    batch_id: int
    items: list[Any]  # that were decoded; empty once they are not needed any more
    failures: dict[int, Failure]  # by position, of items that have no result
    #: Of the item at a position; without it the model gets what it has written to.
    decode_again: Callable[[int], Any] | None
    calls: int | Sequence[int]  # as in ``Transport.send``
    #: What ``preprocess`` made of the parts in which the batch is probably computed, mostly of one
    #: that has all, by their positions.
    prepared: dict[tuple[int, ...], Any] = field(default_factory=dict)
    data: Any = None  # what ``forward`` made of all items
    #: In order, of the items that have no failure; None before the end.
    results: list[Any] | None = None
    failure: Failure | None = None  # why the batch failed
    #: What became of computing it at once, if it is to be computed in parts for that.
    outcome: Outcome | None = None
    runs: int = 0  # more of them, to find the calls on which the model raises
    #: Of the outputs of ``forward``, to be sent before the next call if the model keeps it.
    memory: weakref.ref[Any] | None = None
    timer: StageTimer | None = None  # measures ``forward``, where a GPU may be in use
    started_at: float = 0.0  # when the model began with it, of the monotonic clock
    #: Of the model's code, by stage; of ``forward`` the GPU's time, where it has one.
    seconds: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])
    decoding: float = 0.0  # seconds
    encoding: float = 0.0

    def __post_init__(self) -> None:
        self.size = len(self.items) + len(self.failures)

    @property
    def positions(self) -> list[int]:
        """Of the items in the batch."""
        return [i for i in range(self.size) if i not in self.failures]

    def call_of(self) -> Sequence[int]:
        """The number of the call that an item is of, by the item's position."""
        if isinstance(self.calls, int):
            return range(self.size) if self.calls else [0] * self.size
        return [call for call, size in enumerate(self.calls) for _ in range(size)]

    def fail(self, failure: Failure) -> None:
        """It goes no further."""
        self.data = self.outcome = None
        self.failure = failure

    @property
    def by_stage(self) -> tuple[float, float, float]:
        """Seconds of each stage, with decoding and encoding."""
        intake, forward, outlet = self.seconds
        return self.decoding + intake, forward, outlet + self.encoding

    def saves(self, worth: float) -> bool:
        """Whether more than ``worth`` seconds are saved of each batch if such batches overlap.

        Then the slowest stage is left. Decoding and encoding hold the interpreter's lock: they can
        be hidden behind what the model does, but not behind each other.
        """
        if sum(self.seconds) <= worth:  # of a fast model, and all that is looked at
            return False
        stages = self.by_stage
        return sum(stages) - max(stages) > worth


def outcome_of(
    error: BaseException, model: LoadedModel, batch_id: int, named: int = 0
) -> Invalid | OutOfMemory | Failure:
    """What a model's error means; raises it again if it is no error of a batch.

    ``named`` items were in the call, if the model knows them by their positions. Else, as 0,
    ``InvalidItems`` is an error of all of them. So it is if it names an item that there is not.
    """
    if isinstance(error, InvalidItems):
        try:
            if named:
                return invalid_outcome(error, named)
            error = next(iter(error.errors.values()))
        except BadModelOutput as wrong:
            error = wrong
    if is_out_of_memory(error, model.out_of_memory_errors):
        return OutOfMemory(Failure.caught(error))
    if not isinstance(error, Exception):
        raise error
    model.guard.look(error, batch_id)  # before it loses its causes
    return Failure.caught(error)


def invalid_outcome(error: InvalidItems, named: int) -> Invalid:
    """What follows for the items of a call with so many. Raises BadModelOutput: it has no such."""
    errors = by_position(error, range(named))
    return Invalid({position: Failure.caught(each) for position, each in errors.items()})


class Stages:
    """Runs the stages of one model. Each method belongs to the thread of its stage.

    None of them raises what a model raises: that becomes the failure of the batch, or of the calls
    at fault. They raise DeviceFailed, and what ends a worker.
    Batches that nobody waits for any more go no further.
    """

    def __init__(self, channel: Channel, model: LoadedModel, progress: Progress) -> None:
        self.channel = channel
        self.model = model
        self.progress = progress.stages
        self._unwanted, self._is_unwanted = progress.unwanted, progress.is_unwanted
        managed: Any = model.managed
        if hasattr(managed, "raise_if_unwanted"):
            managed.raise_if_unwanted = lambda: self.check_wanted(self.progress[FORWARD] - 1)
        self.has_stages = model.forward is not model.predict
        #: A stage may be called in the thread of another one, but never twice at a time.
        self._preprocessing, self._postprocessing = threading.Lock(), threading.Lock()
        #: Batches that a GPU may not have finished. If it fails, it failed at one of them: an error
        #: comes up in any stage of any batch, often in ``forward`` of the next one.
        self.launched: set[int] = set()

    def take_in(self, received: tuple[Any, ...]) -> Job:
        """INTAKE, of what the channel has received."""
        began = time.monotonic()
        self.progress[INTAKE] = received[0] + 1
        job = Job(*self.channel.decode(received), received[3])
        job.decoding = time.monotonic() - began
        if job.items and (self.model.preprocess is not None or self.model.stack):
            job.started_at = time.monotonic()
            self._run(self._prepare, job, len(job.items))
            job.seconds[INTAKE] = time.monotonic() - job.started_at
            self.channel.check_owner()  # in a fork this thread may be the only one
        self.progress[INTAKE] = 0
        return job

    def _prepare(self, job: Job) -> None:
        """Preprocess those parts of the batch that probably fit into memory."""
        model, items, positions = self.model, job.items, job.positions
        # First: where it knows none, the ceiling is a new one.
        lengths = model.lengths(items) if model.ceiling.limit else None
        start = 0
        while start < len(items):
            left = lengths and lengths[start:]
            stop = start + model.ceiling.room(len(items) - start, left)
            with at_positions(range(start, stop)):
                part = self.prepare(items[start:stop])
            job.prepared[tuple(positions[start:stop])] = part
            start = stop

    def complete(self, job: Job) -> None:
        """All stages after INTAKE, in this thread."""
        self.compute(job)
        while not self.finish(job):
            self.compute(job)

    def compute(self, job: Job) -> None:
        """FORWARD; or all stages, if the batch is computed in parts."""
        if job.failure is not None or not job.items:
            return
        self.progress[FORWARD] = job.batch_id + 1
        started = time.monotonic()
        if not job.started_at:
            job.started_at = started
        if "torch" in sys.modules and kind_in_use() is not None:
            job.timer = StageTimer()
            self.launched.add(job.batch_id)
        in_parts = (
            job.outcome is not None or len(job.prepared) > 1 or bool(self.model.ceiling.limit)
        )
        if not in_parts:
            # Of a batch that preprocess has made the positions are not known.
            self._run(self._forward, job, 0 if self.has_stages else len(job.items))
            in_parts = job.outcome is not None
        if in_parts:
            _BatchParts(self, job).compute()
        if job.timer is not None:
            job.timer.stop()
        else:
            job.seconds[FORWARD] += time.monotonic() - started
        self.channel.check_owner()  # in a fork no other thread would answer
        self.progress[FORWARD] = 0

    def _forward(self, job: Job) -> None:
        data = job.prepared.popitem()[1] if job.prepared else job.items
        job.data = self.through(self.model.forward, data)

    def finish(self, job: Job, *, is_overlapped: bool = False) -> bool:
        """OUTLET. False: the batch goes back to ``compute``, in parts."""
        self.progress[OUTLET] = job.batch_id + 1
        timer = job.timer
        if timer is not None:
            job.seconds[FORWARD] += timer.seconds()
        started = time.monotonic()
        if job.failure is None and job.results is None and job.items:
            self._run(self._make_results_apart if is_overlapped else self._make_results, job)
        job.seconds[OUTLET] += time.monotonic() - started
        self.launched.discard(job.batch_id)
        job.timer = None
        is_finished = job.outcome is None
        if is_finished:
            self._answer(job, is_overlapped=is_overlapped)
        self.progress[OUTLET] = 0
        return is_finished

    def _make_results_apart(self, job: Job) -> None:
        timer = job.timer if self.model.moves_to_cpu else None
        with contextlib.nullcontext() if timer is None else timer.following():
            self._make_results(job)

    def _make_results(self, job: Job) -> None:
        if self.model.moves_to_cpu:
            job.memory = self.memory(job.data)
        job.results = self.results(job.data, len(job.items))

    def _answer(self, job: Job, *, is_overlapped: bool) -> None:
        report = self._report(job)
        began = time.monotonic()
        self.channel.encode(report)
        if job.memory is not None and job.memory() is not None:  # though nothing here looks at it
            self.model.keeps_outputs = True
        job.encoding = time.monotonic() - began
        if is_overlapped or self.has_stages:
            report.stages = job.by_stage
        self.channel.send(report)

    def _report(self, job: Job) -> BatchReport:
        """The report of a finished job, which lets go of all that it holds.

        Nothing may hold the items when the report is encoded: their blocks of shared memory are
        released with it.
        """
        model, results, failures = self.model, job.results or [], job.failures
        job.items, job.data, job.results, job.decode_again = [], None, None, None
        padding = None
        if job.failure is not None:
            results, failures = [], {}
        else:
            model.guard.row = 0
            if failures:
                left = iter(results)
                results = [None if i in failures else next(left) for i in range(job.size)]
            if model.managed is not None:
                padding = model.padding
        return BatchReport(
            job.batch_id,
            results,
            failures,
            job.failure,
            sum(job.seconds),
            job.started_at or time.monotonic(),  # no item could be decoded
            model.ceiling.limit,
            padding,
            runs=job.runs,
        )

    # -- what the model is called for; a model with ``stack`` for each array by itself

    def prepare(self, items: list[Any]) -> Any:
        """Preprocess. Raises what the model raises, as the others do."""
        data = stacks(items, self.model.view) if self.model.stack else items
        if self.model.preprocess is None:
            return data
        with self._preprocessing:
            return self.through(self.model.preprocess, data)

    def through(self, stage: Predict, data: Any) -> Any:
        return [each.through(stage) for each in data] if self.model.stack else stage(data)

    def results(self, outputs: Any, size: int) -> list[Any]:
        """So many results: postprocess, and check what that returned."""
        if not self.model.stack:
            return self._postprocessed(outputs, size)
        results: list[Any] = [None] * size
        for rows, positions in outputs:
            part = self._postprocessed(rows, len(positions))
            for position, result in zip(positions, part, strict=True):
                results[position] = result
        return results

    def _postprocessed(self, outputs: Any, size: int) -> list[Any]:
        if self.model.postprocess is not None:
            with self._postprocessing:
                outputs = self.model.postprocess(outputs)
        return check_outputs(self.model, outputs, size)

    def memory(self, outputs: Any) -> weakref.ref[Any] | None:
        """As ``memory_of`` says."""
        return memory_of(outputs[0].batch if self.model.stack else outputs)

    # -- errors

    def check_wanted(self, batch_id: int) -> None:
        """Raises InvalidInput, of which nobody learns: nobody waits for the batch."""
        if self._is_unwanted(batch_id):
            raise InvalidInput("nobody waits for the results any more")

    def is_searched(self, job: Job) -> bool:
        """Whether calls at fault are to be found: several share the batch, and are waited for."""
        return bool(job.calls) and not self._is_unwanted(job.batch_id)

    def _run(self, stage: Callable[[Job], None], job: Job, named: int = 0) -> None:
        """Run a stage of the whole batch. If it raises, the batch fails, or goes on in parts."""
        try:
            if self._unwanted[0]:  # some were so far
                self.check_wanted(job.batch_id)
            stage(job)
        except BaseException as error:
            outcome = outcome_of(error, self.model, job.batch_id, named)
            if isinstance(outcome, Failure) and not self.is_searched(job):
                job.fail(outcome)
            else:
                job.data, job.outcome = None, outcome
            job.prepared.clear()


class _BatchParts(Bisection[int]):
    """The items of a batch by their positions, of which each part goes through all stages.

    It goes through the last one at once, and all results but those of the last part are copied: a
    model may write to the same memory again with its next call.
    """

    def __init__(self, stages: Stages, job: Job) -> None:
        positions = job.positions
        super().__init__(positions, job.call_of().__getitem__)
        self._stages = stages
        self._model = model = stages.model
        self._job = job
        self._items = dict(zip(positions, job.items, strict=True))
        self._prepared, job.prepared = job.prepared, {}
        # Those that the model has had, and may have written to.
        self._touched = set(() if job.outcome is None else positions)
        stages.channel.last_sign_at = job.started_at  # the run before this took its time, too
        lengths = model.lengths(job.items)  # first: where it knows none, the ceiling is a new one
        self._lengths = None if lengths is None else dict(zip(positions, lengths, strict=True))
        model.ceiling.begin(len(positions), lengths)

    def compute(self) -> None:
        """Compute the batch in as many runs as it takes."""
        job, known = self._job, self._job.outcome
        job.outcome = None
        part = self.next_part()
        if isinstance(known, OutOfMemory) and not self._model.may_rerun:
            self.ran_out(part, known.failure)
            self.fail(self.items, known.failure)
        if len(part) < len(job.items):
            known = None  # of which part it holds is not known: each of them will tell
        job.runs += self.run_all(may_rerun=bool(job.calls), known=known)
        job.failures |= self.failures
        if job.failure is None:
            job.results = [*self.results.values()]  # the parts go from left to right

    def room(self) -> int:
        return self._model.ceiling.room(len(self.items), self._lengths_of(self.items))

    def run(self, part: list[int]) -> Outcome:
        stages, model, job = self._stages, self._model, self._job
        stages.channel.sign_of_life()
        named = len(part)
        try:
            stages.check_wanted(job.batch_id)
            if tuple(part) in self._prepared:
                data = self._prepared.pop(tuple(part))
                self._touched.update(part)
            else:
                data = stages.prepare([self._item(position) for position in part])
            if stages.has_stages:
                named = 0  # of what preprocess has made the positions are not known
            data = stages.through(model.forward, data)
            is_last = len(part) == len(self.items)
            if is_last and model.moves_to_cpu:
                job.memory = stages.memory(data)
            results = stages.results(data, len(part))
            return Returned(results if is_last else [*map(in_own_memory, results)])
        except BaseException as error:
            outcome = outcome_of(error, model, job.batch_id, named)
        if isinstance(outcome, Failure) and not stages.is_searched(job):
            job.fail(outcome)
            self.drop(self.items)  # nothing more of the batch is run
        return outcome

    def _item(self, position: int) -> Any:
        if self._job.decode_again is not None and position in self._touched:
            return self._job.decode_again(position)
        self._touched.add(position)
        return self._items[position]

    def fitted(self, part: list[int]) -> None:
        self._model.guard.row = 0
        was_cut = len(part) < len(self.items)
        self._model.ceiling.fitted(len(part), self._lengths_of(part), was_cut=was_cut)

    def ran_out(self, part: list[int], failure: Failure) -> None:
        release_memory()  # only now: where it was raised, frames still held tensors
        self._model.ceiling.ran_out(len(part), self._lengths_of(part))
        if len(part) == 1 or not self._model.may_rerun:
            self.fail(part, failure)
            self.shrink(part)  # if the device is full, and not this item to blame

    def _lengths_of(self, items: Sequence[int]) -> list[float] | None:
        return None if self._lengths is None else [self._lengths[position] for position in items]


# -- what a model returned


def check_outputs(model: LoadedModel, outputs: Any, expected: int) -> list[Any]:
    """A model's outputs as a list of ``expected`` results. Raises BadModelOutput."""
    if model.moves_to_cpu or type(outputs) is OnHost:
        outputs = results_on_host(outputs)
    kind = type(outputs)
    if kind is list and len(outputs) == expected != model.columns:  # the usual case
        return list(outputs)
    # A NamedTuple, or what torch.max returns: its parts are no results, however many there are.
    has_fields = hasattr(kind, "_fields") or hasattr(kind, "n_fields")
    results = as_list(outputs)
    # (logits, hidden), say. For as many items as arrays, results may look the same. So these are
    # refused only if the model has returned such arrays for another number of items. The search for
    # a bad item, which follows then, soon comes to as many items as arrays.
    are_columns = (
        isinstance(outputs, (list, tuple))
        and len(outputs) > 0
        and all(tuple(getattr(each, "shape", ()))[:1] == (expected,) for each in outputs)
    )
    if are_columns and len(outputs) != expected:
        model.columns = len(outputs)
    are_columns = are_columns and len(outputs) == model.columns
    if results is not None and len(results) == expected and not (has_fields or are_columns):
        return results
    raise BadModelOutput(
        f"{model.name} must return a sequence of {expected} results, one per item; "
        f"it returned {describe_outputs(outputs)}{' fields' * has_fields}"
        f"{', each with a row for every item' * are_columns}"
    )


def memory_of(outputs: Any) -> weakref.ref[Any] | None:
    """The array or tensor in whose memory the outputs lie, by the first of them."""
    base = first_value(outputs)
    if type(base) in PLAIN:
        return None
    array = getattr(sys.modules.get("numpy"), "ndarray", ())
    tensor = getattr(sys.modules.get("torch"), "Tensor", ())
    owner = None
    while isinstance(base, (array, tensor)):
        owner, base = base, base._base if isinstance(base, tensor) else base.base
    # Another base is memory that is shared, say.
    return None if owner is None or base is not None else weakref.ref(owner)


def in_own_memory(result: Any) -> Any:
    """A copy of the result: a model may write to its outputs with its next call."""
    if type(result) not in PLAIN:
        with contextlib.suppress(Exception):  # of a user's class
            return copy.deepcopy(result)
    return result


def as_list(found: Any) -> list[Any] | None:
    """A sequence as a list; else None."""
    if not is_sequence(found):
        return None
    try:
        return list(found)
    except TypeError:  # an array without dimensions
        return None


def describe_outputs(found: Any) -> str:
    kind, parts = type(found).__qualname__, as_list(found)
    if parts is not None:
        return f"{kind} of {len(parts)}"
    return f"{kind} without dimensions" if is_sequence(found) else kind
