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
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ..errors import BadModelOutput, InvalidInput, InvalidItems
from ..gpu.accelerators import kind_in_use, release_memory
from ..gpu.device_errors import is_out_of_memory
from ..gpu.transfers import OnHost, StageTimer, first_value, results_on_host
from ..managed_model import array_module
from ..observe.record import BatchReport, StepReport
from ..options.checks import is_sequence
from .mending import Bisection, Invalid, Outcome, OutOfMemory, Returned, at_positions, by_position
from .model_spec import LoadedModel, Predict, stacks
from .protocol import SIGN_OF_LIFE, Failure, Progress

INTAKE, FORWARD, OUTLET = range(3)

#: Classes of results that are in nobody's memory but the interpreter's, as most are.
_PLAIN = frozenset((bool, bytes, float, int, str, type(None)))

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


class Job(Bisection[int]):
    """One batch on its way through the stages, its items by their positions.

    Belongs to one stage at a time. Its first run is of all items, and each stage may be in another
    thread. If that fails, or is too large, a part at a time goes through all stages.
    """

    def __init__(self, stages: Stages, received: tuple[Any, ...]) -> None:
        began = time.monotonic()
        self.batch_id, items, failures, self._decode_again = stages.channel.decode(received)
        self.decoding = time.monotonic() - began
        self.size = len(items) + len(failures)
        self.calls: int | Sequence[int] = received[3]  # as in ``Transport.send``
        positions: Iterable[int] = range(self.size)
        super().__init__((i for i in positions if i not in failures) if failures else positions)
        self.failures = failures
        self.decoded = items
        self._positions = self.items  # of ``decoded``; ``items`` becomes another list
        self._touched: list[int] = []  # items that the model has had, and may have written to
        self._lengths: dict[int, float] = {}  # of the items, once they are needed
        #: What ``preprocess`` made of the parts in which the batch is probably computed, mostly of
        #: one that has all.
        self.prepared: dict[tuple[int, ...], Any] = {}
        #: Of the model's code, by stage; of ``forward`` the GPU's time, where it has one.
        self.seconds = [0.0, 0.0, 0.0]
        self._stages, self._model = stages, stages.model
        self.data: Any = None  # what the last stage made of its items
        self.trouble: Outcome | None = None  # why a stage could not, of all items
        self.named = 0  # how many items are in a call, if the model knows them by their positions
        self.failure: Failure | None = None  # why the batch failed
        self.runs = 0  # more of them, to find the calls on which the model raises
        #: Of the outputs of ``forward``, to be sent before the next call if the model keeps it.
        self.memory: weakref.ref[Any] | None = None
        self.timer: StageTimer | None = None  # measures ``forward``, where a GPU is in use
        self.started_at = 0.0  # when the model began with it, of the monotonic clock
        self.encoding = 0.0  # seconds
        self._owners: Sequence[int] = ()  # by position the number of an item's call, once needed

    def take(self, part: list[int]) -> list[Any]:
        """The items at these positions: decoded again if the model may have written to them."""
        if self._touched and self._decode_again and not set(self._touched).isdisjoint(part):
            return [*map(self._decode_again, part)]
        self._touched += part
        if len(part) == len(self.decoded):
            return [*self.decoded]
        decoded = dict(zip(self._positions, self.decoded, strict=True))
        return [decoded[position] for position in part]

    def fail_all(self, failure: Failure) -> None:
        """It goes no further."""
        self.failure = failure
        self.drop(self.items)

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

    # -- in parts

    def compute_in_parts(self) -> None:
        """Compute it in as many runs as it takes."""
        model, known = self._model, self.trouble
        self._stages.channel.last_sign_at = self.started_at  # the run before took its time, too
        self._lengths = {}  # another batch may have found since that they are unknown
        lengths = self._lengths_of(self.items)
        model.ceiling.begin(lengths)
        part = self.next_part()
        if isinstance(known, OutOfMemory) and not model.may_rerun:
            self.ran_out(part, known.failure)
            self.fail(self.items, known.failure)
        if len(part) < len(self.items):
            known = None  # which part it applies to is not known: each is run
        self.runs = self.run_all(may_rerun=bool(self.calls), known=known)
        self.data = [*self.results.values()]  # the parts go from left to right

    def call_of(self, item: int) -> int:
        if not self._owners:
            calls = self.calls if not isinstance(self.calls, int) else [1] * self.size
            self._owners = [call for call, size in enumerate(calls) for _ in range(size)]
        return self._owners[item]

    def room(self, items: list[int]) -> int:
        if not self._model.ceiling.limit:
            return len(items)
        lengths = self._lengths_of(items)
        return self._model.ceiling.room(lengths)

    def run(self, part: list[int]) -> Outcome:
        self._stages.channel.sign_of_life()
        trouble = self._stages.attempt(self, self._stages.compute_part, part)
        return Returned(self.data) if trouble is None else trouble

    def fitted(self, part: list[int]) -> None:
        self._model.guard.row = 0
        self._model.ceiling.fitted(self._lengths_of(part), was_cut=len(part) < len(self.items))

    def ran_out(self, part: list[int], failure: Failure) -> None:
        release_memory()  # only now: where it was raised, frames still held tensors
        self._model.ceiling.ran_out(self._lengths_of(part))
        if len(part) == 1 or not self._model.may_rerun:
            self.fail(part, failure)
            self.shrink(part)  # if the device is full, and not this item to blame

    def _lengths_of(self, items: list[int]) -> list[float]:
        """Call it before the ceiling is used: if lengths turn out unknown, that is replaced."""
        if not self._lengths:
            lengths = self._model.lengths(self.decoded)
            self._lengths = dict(zip(self._positions, lengths, strict=True))
        return [self._lengths[position] for position in items]

    # -- the end

    def report(self) -> BatchReport:
        """Its report, when no item is left. It lets go of all that it holds.

        Nothing may hold the items when the report is encoded: their blocks of shared memory are
        released with it.
        """
        model, outputs, failures = self._model, self.data or [], self.failures
        self.decoded, self.prepared, self.results = [], {}, {}
        self.data = self._decode_again = None
        padding = None
        if self.failure is not None:
            outputs, failures = [], {}
        else:
            model.guard.row = 0
            if failures:
                left = iter(outputs)
                outputs = [None if i in failures else next(left) for i in range(self.size)]
            padding = model.padding
        return BatchReport(
            self.batch_id,
            outputs,
            failures,
            self.failure,
            sum(self.seconds),
            self.started_at or time.monotonic(),  # no item could be decoded
            model.ceiling.limit,
            padding,
            runs=self.runs,
        )


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
        self.progress[INTAKE] = received[0] + 1
        job = Job(self, received)
        if job.items and (self.model.preprocess is not None or self.model.stack):
            job.started_at = time.monotonic()
            self._run(job, self._prepare)
            job.seconds[INTAKE] = time.monotonic() - job.started_at
            self.channel.check_owner()  # in a fork this thread may be the only one
        self.progress[INTAKE] = 0
        return job

    def _prepare(self, job: Job, items: list[int]) -> None:
        """Preprocess those parts of the batch that probably fit into memory."""
        job.named, start = len(items), 0
        while start < len(items):
            part = items[start : start + job.room(items[start:])]
            with at_positions(range(start, start + len(part))):
                job.prepared[tuple(part)] = self.prepare(job, part)
            start += len(part)

    def complete(self, job: Job) -> None:
        """All stages after INTAKE, in this thread."""
        self.compute(job)
        while not self.finish(job):
            self.compute(job)

    def compute(self, job: Job) -> None:
        """FORWARD; or all stages, if the batch is computed in parts."""
        if not job.items:
            return
        self.progress[FORWARD] = job.batch_id + 1
        began = time.monotonic()
        job.started_at = job.started_at or began
        kind = kind_in_use()
        if kind is not None:
            job.timer = StageTimer(kind)
        self.launched.add(job.batch_id)
        in_parts = job.trouble is not None or len(job.prepared) > 1 or self.model.ceiling.limit
        if not in_parts:
            self._run(job, self.forward)
            in_parts = job.trouble is not None
        if in_parts and job.items:
            job.compute_in_parts()
        if job.timer is not None:
            job.timer.stop()
        else:
            job.seconds[FORWARD] += time.monotonic() - began
        self.channel.check_owner()  # in a fork no other thread would answer
        self.progress[FORWARD] = 0

    def finish(self, job: Job, *, is_overlapped: bool = False) -> bool:
        """OUTLET. False: the batch goes back to ``compute``, in parts."""
        self.progress[OUTLET] = job.batch_id + 1
        if job.timer is not None:
            job.seconds[FORWARD] += job.timer.seconds()
        started = time.monotonic()
        if job.items:
            self._run(job, self._results_apart if is_overlapped else self.results)
            if job.trouble is None:
                job.items = []
        job.seconds[OUTLET] += time.monotonic() - started
        self.launched.discard(job.batch_id)
        job.timer = None
        is_finished = not job.items
        if is_finished:
            self._answer(job, is_overlapped=is_overlapped)
        self.progress[OUTLET] = 0
        return is_finished

    def _results_apart(self, job: Job, part: list[int]) -> list[Any]:
        timer = job.timer if self.model.moves_to_cpu else None
        with contextlib.nullcontext() if timer is None else timer.following():
            return self.results(job, part)

    def _answer(self, job: Job, *, is_overlapped: bool) -> None:
        report = job.report()
        began = time.monotonic()
        self.channel.encode(report)
        if job.memory is not None and job.memory() is not None:  # though nothing here looks at it
            self.model.keeps_outputs = True
        job.encoding = time.monotonic() - began
        if is_overlapped or self.has_stages:
            report.stages = job.by_stage
        self.channel.send(report)

    # -- what the model is called for; a model with ``stack`` for each array by itself

    def prepare(self, job: Job, part: list[int]) -> Any:
        """Preprocess, if that is not done. Raises what the model raises, as the others do."""
        if job.prepared and tuple(part) in job.prepared:
            return job.prepared.pop(tuple(part))
        data: Any = job.take(part)
        if self.model.stack:
            data = stacks(data, self.model.view)
        if self.model.preprocess is None:
            return data
        with self._preprocessing:
            return self._through(self.model.preprocess, data)

    def forward(self, job: Job, part: list[int]) -> Any:
        """Preprocess, if that is not done, and compute."""
        job.named = len(part)
        data = self.prepare(job, part)
        if self.has_stages:
            job.named = 0  # preprocess may have changed their positions
        return self._through(self.model.forward, data)

    def results(self, job: Job, part: list[int]) -> list[Any]:
        """One result for each: postprocess, and check what that returned.

        All but those of the last part are copied: a model may write to the same memory again with
        its next call.
        """
        if self.model.moves_to_cpu:
            job.memory = memory_of(job.data[0].batch if self.model.stack else job.data)
        if not self.model.stack:
            results = self._postprocessed(job.data, len(part))
        else:
            results = [None] * len(part)
            for rows, positions in job.data:
                found = self._postprocessed(rows, len(positions))
                for position, result in zip(positions, found, strict=True):
                    results[position] = result
        return results if len(part) == len(job.items) else [*map(in_own_memory, results)]

    def _postprocessed(self, outputs: Any, size: int) -> list[Any]:
        if self.model.postprocess is not None:
            with self._postprocessing:
                outputs = self.model.postprocess(outputs)
        return check_outputs(self.model, outputs, size)

    def compute_part(self, job: Job, part: list[int]) -> list[Any]:
        """All stages."""
        job.data = self.forward(job, part)
        return self.results(job, part)

    def _through(self, stage: Predict, data: Any) -> Any:
        return [each.through(stage) for each in data] if self.model.stack else stage(data)

    # -- errors

    def check_wanted(self, batch_id: int) -> None:
        """Raises InvalidInput, of which nobody learns: nobody waits for the batch."""
        if self._is_unwanted(batch_id):
            raise InvalidInput("nobody waits for the results any more")

    def attempt(
        self, job: Job, stage: Callable[[Job, list[int]], Any], part: list[int]
    ) -> Invalid | OutOfMemory | Failure | None:
        """Call the model for a batch, or a part of it. Returns why there is no ``data`` of it.

        If it raises, and no calls at fault are to be found, the whole batch fails.
        """
        try:
            if self._unwanted[0]:  # some were so far
                self.check_wanted(job.batch_id)
            job.data = stage(job, part)
            return None
        except BaseException as error:
            outcome = outcome_of(error, self.model, job.batch_id, job.named)
        job.data = None
        if isinstance(outcome, Failure) and (not job.calls or self._is_unwanted(job.batch_id)):
            job.fail_all(outcome)
        return outcome

    def _run(self, job: Job, stage: Callable[[Job, list[int]], Any]) -> None:
        """Run a stage of the whole batch."""
        job.trouble = self.attempt(job, stage, job.items)
        if job.trouble is not None:
            job.prepared.clear()


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
    owner, base = None, first_value(outputs)
    while type(base) not in _PLAIN and (module := array_module(base)) is not None:
        owner, base = base, base.base if module.__name__ == "numpy" else base._base
    # Another base is memory that is shared, say.
    return None if owner is None or base is not None else weakref.ref(owner)


def in_own_memory(result: Any) -> Any:
    """A copy of the result: a model may write to its outputs with its next call."""
    if type(result) not in _PLAIN:
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
