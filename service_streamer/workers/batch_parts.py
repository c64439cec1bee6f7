"""A batch on its way through a worker, and how it is computed in parts.

It is computed in parts if the device's memory is too short for all of it, if the model raises on it
and several calls share it, and if the model calls some items invalid. Then all stages of a part
run one after the other in the thread of the model, from the part's items on.
"""

from __future__ import annotations

import contextlib
import copy
import time
import weakref
from collections.abc import Callable, Sequence
from itertools import chain, repeat
from typing import Any, NamedTuple

from ..errors import BadModelOutput, InvalidInput, InvalidItems
from ..gpu.accelerators import release_memory
from ..gpu.device_errors import DeviceFailed, is_out_of_memory
from ..gpu.transfers import PLAIN, StageTimer
from .bisection import Bisection, Invalid, Outcome, OutOfMemory, Returned, bisect
from .model_spec import LoadedModel
from .progress import SIGN_OF_LIFE
from .protocol import Failure
from .stage_calls import StageCalls, at_positions, by_position


class BatchPart(NamedTuple):
    """Items of a batch, by their positions, and what the last stage made of them."""

    positions: Sequence[int]
    data: Any


class Job:
    """One batch on its way through the stages. Belongs to one stage at a time.

    Args:
        calls: as in ``Transport.send``.

    Attributes:
        again: gives the item at a position as it was sent, where a model writes to copies only;
            else None: the model gets what it has written to.
        batch_id: of the batch.
        size: items of the batch.
        items: those that may still get results; empty once they are not needed any more.
        positions: of these items in the batch.
        failures: by position, of the others.
        data: what the last stage made of all items: at first these themselves, at last the list of
            results.
        parts: the same where the batch is computed in parts; else None, as it is at last.
        failure: why the batch failed; None if it did not.
        known: what became of computing it at once, if it is to be computed in parts for that.
        runs: how many more runs it took to find the calls on which the model raises.
        is_redone: whether it has been through all stages, and is computed again in parts.
        started_at: when the model began with it, of the monotonic clock.
        memory: of the outputs of ``forward``, where they are to be sent before the next call if the
            model keeps it; else None.
        timer: measures ``forward``, where a GPU may be in use; else None.
        seconds: of the model's code, by stage; of ``forward`` the GPU's time, where it has one.
        decoding, encoding: seconds.
    """

    __slots__ = (
        "_calls",
        "again",
        "batch_id",
        "data",
        "decoding",
        "encoding",
        "failure",
        "failures",
        "is_redone",
        "items",
        "known",
        "memory",
        "parts",
        "positions",
        "runs",
        "seconds",
        "size",
        "started_at",
        "timer",
    )

    def __init__(
        self,
        batch_id: int,
        items: list[Any],
        failures: dict[int, Failure],
        calls: int | Sequence[int] = 0,
    ) -> None:
        self.batch_id = batch_id
        self.items = items
        self.failures = failures
        self.size = len(items) + len(failures)
        self.positions: Sequence[int] = range(self.size)
        if failures:
            self.positions = [i for i in self.positions if i not in failures]
        self._calls = calls
        self.again: Callable[[int], Any] | None = None
        self.data: Any = items
        self.parts: list[BatchPart] | None = None
        self.failure: Failure | None = None
        self.known: Outcome | None = None
        self.runs = 0
        self.is_redone = False
        self.memory: weakref.ref[Any] | None = None
        self.timer: StageTimer | None = None
        self.started_at = 0.0
        self.seconds = [0.0, 0.0, 0.0]
        self.decoding = self.encoding = 0.0

    @property
    def is_shared(self) -> bool:
        """Whether several calls have items in it, of which one may fail alone."""
        return bool(self._calls)

    def call_of(self) -> Sequence[int]:
        """The number of the call that an item is of, by the item's position."""
        if isinstance(self._calls, int):
            return range(self.size) if self._calls else [0] * self.size
        return [*chain.from_iterable(repeat(i, size) for i, size in enumerate(self._calls))]

    def fail(self, failure: Failure) -> None:
        """It goes no further, and lets go of what the stages made."""
        self.data = self.parts = self.known = None
        self.failure = failure

    def drop(self, failures: dict[int, Failure]) -> None:
        """Go on without the items at these positions."""
        self.failures |= failures
        left = [
            (position, item)
            for position, item in zip(self.positions, self.items, strict=True)
            if position not in failures
        ]
        self.positions = [position for position, _ in left]
        self.items = self.data = [item for _, item in left]

    def drop_invalid(self, invalid: InvalidItems) -> None:
        """Go on without the invalid ones. Raises BadModelOutput: there are no such items."""
        errors = by_position(invalid, self.positions)
        self.drop({position: Failure.caught(error) for position, error in errors.items()})

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


def caught(error: BaseException, model: LoadedModel, batch_id: int) -> Failure | OutOfMemory:
    """What a model's error means; raises it again if it is no error of a batch."""
    if isinstance(error, InvalidItems):  # where they could not be dropped
        error = next(iter(error.errors.values()))
    too_large = is_out_of_memory(error, model.out_of_memory_errors)
    if not too_large:
        if not isinstance(error, Exception):
            raise error
        try:
            model.guard.look(error)  # before it loses its causes
        except DeviceFailed as end:
            end.batch_ids.add(batch_id)
            raise
    failure = Failure.caught(error)
    return OutOfMemory(failure) if too_large else failure


def prepared_parts(job: Job, model: LoadedModel, calls: StageCalls) -> list[BatchPart]:
    """The parts in which the items will probably be computed. Raises what the model raises."""
    prepare, items = calls.prepare, job.items
    assert prepare is not None
    lengths = model.lengths(items)  # first: where it knows none any more, the ceiling is a new one
    parts: list[BatchPart] = []
    for start, stop in model.ceiling.planned(len(items), lengths):
        with at_positions(range(start, stop)):
            parts.append(BatchPart(job.positions[start:stop], prepare(items[start:stop])))
    return parts


def compute_in_parts(
    job: Job,
    model: LoadedModel,
    calls: StageCalls,
    *,
    is_wanted: Callable[[], bool],
    on_run: Callable[[], None],
) -> None:
    """Compute a batch in as many runs as it takes; then ``parts`` has what came of them.

    Args:
        is_wanted: whether anybody still waits for it.
        on_run: called between two runs, after each ``SIGN_OF_LIFE``.
    """
    known, job.known = job.known, None
    is_redone = job.is_redone or known is not None
    parts = _Parts(job, model, calls, is_wanted, on_run, is_redone=is_redone)
    if isinstance(known, OutOfMemory):
        # Only now: where the error was raised, its frames still held the model's tensors.
        release_memory()
    elif known is None:
        parts.ready = {tuple(part.positions): part.data for part in job.parts or ()}
        if job.parts is None and job.data is not None:
            parts.ready[tuple(job.positions)] = job.data
    job.data = job.parts = None
    lengths = model.lengths(job.items)  # first: as in ``prepared_parts``
    if lengths is not None:
        parts.lengths = dict(zip(job.positions, lengths, strict=True))
    model.ceiling.begin(len(job.items), lengths)
    search = Bisection(job.positions, job.call_of().__getitem__)
    first = search.part(parts.room(search.items))
    if isinstance(known, OutOfMemory) and not model.may_rerun:
        parts.ran_out(search, first, known.failure)
        parts.fail(search.items, known.failure)
    else:
        if len(first) < len(job.items):
            known = None  # of which part it holds is not known: each of them will tell
        job.runs += bisect(search, parts, may_rerun=job.is_shared, known=known)
    if job.failure is not None:
        return
    if parts.failures:
        job.drop(parts.failures)
    job.data, job.parts = (None, parts.done_parts) if job.items else ([], None)


class _Parts:
    """Runs parts of a batch, for ``bisect``.

    Each part goes through the last stage at once: what a call of the model returned is not safe
    from the next one, since a model may write to the same memory again.
    """

    def __init__(
        self,
        job: Job,
        model: LoadedModel,
        calls: StageCalls,
        is_wanted: Callable[[], bool],
        on_run: Callable[[], None],
        *,
        is_redone: bool,
    ) -> None:
        self.ready: dict[tuple[int, ...], Any] = {}
        self.lengths: dict[int, float] | None = None
        self.failures: dict[int, Failure] = {}
        self.done_parts: list[BatchPart] = []
        self._job = job
        self._model = model
        self._calls = calls
        self._is_wanted = is_wanted
        self._on_run = on_run
        self._items = dict(zip(job.positions, job.items, strict=True))
        # Those that the model has had, and may have written to.
        self._touched = set(job.positions) if is_redone else set()
        self._told_at = job.started_at  # the run before this took its time, too
        self._left = 0

    def room(self, items: Sequence[int]) -> int:
        self._left = len(items)
        return self._model.ceiling.room(len(items), self._lengths_of(items))

    def run(self, part: list[int]) -> Outcome:
        job = self._job
        if job.failure is not None:
            return job.failure
        if not self._is_wanted():
            return self._fail_all(Failure(InvalidInput("nobody waits for the results any more")))
        now = time.monotonic()
        if now - self._told_at >= SIGN_OF_LIFE:
            self._told_at = now
            self._on_run()
        ran = self._try(part)
        if isinstance(ran, OutOfMemory):
            release_memory()
        elif isinstance(ran, Failure) and not job.is_shared:
            self._fail_all(ran)
        return ran

    def _try(self, part: list[int]) -> Outcome:
        calls, model = self._calls, self._model
        has_positions = True  # what is called next knows the items by their positions
        data: Any
        try:
            if tuple(part) in self.ready:
                data = self.ready.pop(tuple(part))
                self._touched.update(part)
            else:
                data = [self._item(position) for position in part]
                if calls.prepare is not None:
                    data = calls.prepare(data)
            has_positions = model.forward is model.predict
            data = calls.compute(data)
            has_positions = False
            return Returned([*map(_detached, calls.finish(data, len(part)))])
        except InvalidItems as error:
            if has_positions:
                try:
                    found = by_position(error, range(len(part)))
                except BadModelOutput as wrong:
                    return caught(wrong, model, self._job.batch_id)
                return Invalid({i: Failure.caught(each) for i, each in found.items()})
            return caught(error, model, self._job.batch_id)
        except BaseException as error:
            return caught(error, model, self._job.batch_id)

    def _item(self, position: int) -> Any:
        again = self._job.again
        if again is not None and position in self._touched:
            return again(position)
        self._touched.add(position)
        return self._items[position]

    def done(self, part: list[int], value: Any) -> None:
        model = self._model
        model.guard.row = 0
        self.done_parts.append(BatchPart(part, value))
        model.ceiling.fitted(len(part), self._lengths_of(part), was_cut=len(part) < self._left)

    def fail(self, items: list[int], failure: Failure) -> None:
        self.failures |= dict.fromkeys(items, failure)

    def ran_out(self, search: Bisection[int], part: list[int], failure: Failure) -> None:
        self._model.ceiling.ran_out(len(part), self._lengths_of(part))
        if len(part) == 1 or not self._model.may_rerun:
            self.fail(part, failure)
            search.drop(part)
            search.shrink(part)  # if the device is full, and not this item to blame

    def _fail_all(self, failure: Failure) -> Failure:
        self._job.fail(failure)
        return failure

    def _lengths_of(self, items: Sequence[int]) -> list[float] | None:
        return None if self.lengths is None else [self.lengths[position] for position in items]


def _detached(result: Any) -> Any:
    """The result in memory of its own: a model may write to its outputs with its next call."""
    if type(result) not in PLAIN:
        with contextlib.suppress(Exception):  # of a user's class
            return copy.deepcopy(result)
    return result
