"""The stages of one batch in its worker.

    stage      what it does                                     where it runs while batches overlap
    -----      ------------                                     -----------------------------------
    INTAKE     decode the items, preprocess                     a thread of its own
    FORWARD    forward; or predict, of a model without stages   the thread that loaded the model
    OUTLET     postprocess, check the results, encode, send     a thread of its own

A batch that is too large for the device's memory goes back to FORWARD, whichever stage ran out: it
is computed there in smaller parts, from its items on. So a stage may be called in the thread of
another one, but never twice at the same time: each has a lock.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
import time
import weakref
from collections.abc import MutableSequence, Sequence
from typing import Any, NamedTuple

from ..errors import BadModelOutput
from ..options.checks import is_sequence
from .batch_ceiling import Chunk, is_out_of_memory
from .device import OnHost, cuda_in_use, results_on_host
from .model_spec import LoadedModel
from .protocol import BatchReport, Failure
from .stacking import stacks
from .stage_mark import StageMark
from .sticky_errors import DeviceFailed

__all__ = ["FORWARD", "INTAKE", "OUTLET", "Job", "Stages", "check_outputs"]

INTAKE, FORWARD, OUTLET = range(3)

#: Without a GPU there is nothing to follow.
_AT_ONCE = contextlib.nullcontext()


class StagedRows(NamedTuple):
    """Items that the model gets together, on their way through its stages.

    Attributes:
        positions: of the items in their chunk; None for all of it, in order.
        size: items.
        data: what the last stage returned.
    """

    positions: Sequence[int] | None
    size: int
    data: Any


class StagedChunk(NamedTuple):
    """The items ``start`` to ``stop`` of a batch: one part, or several where shapes differ."""

    start: int
    stop: int
    parts: list[StagedRows]


class _OutOfMemory(NamedTuple):
    """What became of a run for which the device had not enough memory."""

    failure: Failure


class Job:
    """One batch on its way through the stages. Belongs to one stage at a time.

    Attributes:
        batch_id, size: of the batch.
        items: those that could be decoded; empty once they are not needed any more.
        failures: by position, of the others, and of those that do not fit into memory.
        pieces: what the last stage made.
        results: of the items; None before the last stage.
        failure: why the batch failed; None if it did not.
        ran_out: what became of computing it at once, if the device's memory was too small.
        is_redone: whether it has been through all stages, and is computed again in parts.
        started_at: when the model began with it, of the monotonic clock.
        memory: of the outputs of ``predict``, where they are to be sent before the next call if the
            model keeps it; else None.
        mark: measures ``forward``, where a GPU may be in use; else None.
        is_device_done: whether the GPU is known to have done all that ``forward`` launched.
        seconds: of the model's code, by stage; of ``forward`` the GPU's time, where it has one.
        carried: seconds of decoding and of encoding.
    """

    __slots__ = (
        "batch_id",
        "carried",
        "failure",
        "failures",
        "is_device_done",
        "is_redone",
        "items",
        "mark",
        "memory",
        "pieces",
        "ran_out",
        "results",
        "seconds",
        "size",
        "started_at",
    )

    def __init__(self, batch_id: int, items: list[Any], failures: dict[int, Failure]) -> None:
        self.batch_id = batch_id
        self.items = items
        self.failures = failures
        self.size = len(items) + len(failures)
        self.pieces: list[StagedChunk] = []
        self.results: list[Any] | None = None
        self.failure: Failure | None = None
        self.ran_out: _OutOfMemory | None = None
        self.is_redone = False
        self.memory: weakref.ref[Any] | None = None
        self.mark: StageMark | None = None
        self.is_device_done = False
        self.started_at = 0.0
        self.seconds = [0.0, 0.0, 0.0]
        self.carried = [0.0, 0.0]

    @property
    def by_stage(self) -> tuple[float, float, float]:
        """Seconds of each stage, with decoding and encoding."""
        (intake, forward, outlet), (decoding, encoding) = self.seconds, self.carried
        return decoding + intake, forward, outlet + encoding

    @property
    def saved(self) -> float:
        """Seconds that are saved of each batch if such batches overlap, at most.

        Then the slowest stage is left. Decoding and encoding hold the interpreter's lock: they can
        be hidden behind what the model does, but not behind each other.
        """
        stages = self.by_stage
        return min(sum(stages) - max(stages), sum(self.seconds))


class Stages:
    """Runs the stages of one model. Each method belongs to the thread of its stage.

    None of them raises what a model raises: that becomes the failure of the batch.

    Args:
        progress: where each stage writes which batch it is at: its id plus 1, or 0.
    """

    def __init__(self, model: LoadedModel, progress: MutableSequence[int] | None = None) -> None:
        self.model = model
        self.progress = [0, 0, 0] if progress is None else progress
        #: Batches that a GPU may not have finished, by id, oldest first.
        self._unfinished: dict[int, StageMark] = {}
        self._preprocessing = threading.Lock()
        self._postprocessing = threading.Lock()

    def take_in(self, job: Job) -> None:
        """Preprocess. Raises DeviceFailed, and whatever ends the worker, as the others do."""
        model = self.model
        if not job.items:
            return
        if model.preprocess is None and not model.stack:  # nothing that could fail
            job.pieces = [
                StagedChunk(0, len(job.items), [StagedRows(None, len(job.items), job.items)])
            ]
            return
        started = job.started_at = time.monotonic()
        try:
            job.pieces = [
                StagedChunk(start, stop, self._prepared(job.items[start:stop]))
                for start, stop in self._planned(job.items)
            ]
        except BaseException as error:
            self._fail(job, self._caught(error, job))
        job.seconds[INTAKE] = time.monotonic() - started

    def compute(self, job: Job) -> None:
        """Run ``forward``, or ``predict``."""
        if job.failure is not None or not job.items:
            return
        started = time.monotonic()
        if not job.started_at:
            job.started_at = started
        if "torch" in sys.modules and cuda_in_use() is not None:
            job.mark = self._unfinished[job.batch_id] = StageMark()
        pieces = job.pieces
        if job.ran_out is None and len(pieces) == 1 and not self.model.ceiling.limit:
            try:
                job.pieces = [StagedChunk(0, len(job.items), self._computed(pieces.pop().parts))]
            except BaseException as error:
                self._fail(job, self._caught(error, job))
        if job.ran_out is not None or pieces:
            self._compute_in_chunks(job)
        if job.mark is not None:
            job.mark.end()
        else:
            job.seconds[FORWARD] += time.monotonic() - started

    def finish(self, job: Job, *, is_overlapped: bool = False) -> bool:
        """Make results. False: the batch is too large, and has to go back to ``compute``."""
        mark, job.mark = job.mark, None
        following: contextlib.AbstractContextManager[None] = _AT_ONCE
        if mark is not None:
            job.is_device_done = mark.is_of_device
            job.seconds[FORWARD] += mark.seconds()
            if is_overlapped and mark.is_of_device and self.model.moves_to_cpu:
                following = mark.following()
        started = time.monotonic()
        if job.failure is None and job.pieces:
            if self.model.moves_to_cpu and self.model.forward is self.model.predict:
                job.memory = _memory_of(job.pieces[0].parts[0].data)
            try:
                with following:
                    job.results = self._results(job)
            except BaseException as error:
                self._fail(job, self._caught(error, job))
        job.pieces = []
        job.seconds[OUTLET] += time.monotonic() - started
        self._unfinished.pop(job.batch_id, None)
        job.is_redone = job.ran_out is not None
        return not job.is_redone

    def _results(self, job: Job) -> list[Any]:
        if job.is_redone:  # then they are finished
            return [result for piece in job.pieces for result in piece.parts[0].data]
        if len(job.pieces) == 1:
            (piece,) = job.pieces
            return self._finished(piece.parts, piece.stop - piece.start)
        results: list[Any] = []
        for piece in job.pieces:
            results += self._finished(piece.parts, piece.stop - piece.start)
        return results

    def report(self, job: Job, *, is_overlapped: bool = False) -> BatchReport:
        """The report of a finished job, which lets go of all that it holds.

        Nothing may hold the items when the report is encoded: their blocks of shared memory are
        released with it.
        """
        model = self.model
        items, results, failure = job.items, job.results, job.failure
        job.items, job.results, job.pieces = [], None, []
        duration, ceiling = sum(job.seconds), model.ceiling.limit
        if not job.started_at:  # no item could be decoded
            job.started_at = time.monotonic()
        stages = job.by_stage if is_overlapped or model.forward is not model.predict else None
        if failure is not None:
            return BatchReport(
                job.batch_id, [], {}, failure, duration, job.started_at, ceiling, stages=stages
            )
        model.guard.row = 0
        failures = job.failures
        outputs = results or []
        if failures:
            left = iter(outputs)
            outputs = [None if i in failures else next(left) for i in range(job.size)]
        del items, results
        return BatchReport(
            job.batch_id, outputs, failures, None, duration, job.started_at, ceiling,
            None if model.managed is None else model.padding, stages=stages,
        )  # fmt: skip

    def sent(self, job: Job) -> None:
        """Its results are encoded, and nothing here looks at them any more."""
        if job.memory is not None and job.memory() is not None:
            self.model.keeps_outputs = True

    # -- one piece

    def _prepared(self, items: list[Any]) -> list[StagedRows]:
        model = self.model
        preprocess = model.preprocess
        if not model.stack:
            if preprocess is None:
                return [StagedRows(None, len(items), items)]
            with self._preprocessing:
                return [StagedRows(None, len(items), preprocess(items))]
        parts: list[StagedRows] = []
        for stack in stacks(items, model.view):
            data = stack.batch
            if preprocess is not None:
                with self._preprocessing:
                    data = preprocess(data)
            parts.append(StagedRows(stack.positions, len(stack.positions), data))
        return parts

    def _computed(self, parts: list[StagedRows]) -> list[StagedRows]:
        forward = self.model.forward
        return [StagedRows(positions, size, forward(data)) for positions, size, data in parts]

    def _finished(self, parts: list[StagedRows], size: int) -> list[Any]:
        model = self.model
        postprocess = model.postprocess
        results: list[Any] = []
        for part in parts:
            outputs = part.data
            if postprocess is not None:
                with self._postprocessing:
                    outputs = postprocess(outputs)
            outputs = check_outputs(model, outputs, part.size)
            if part.positions is None:
                return outputs
            results = results or [None] * size
            for position, output in zip(part.positions, outputs, strict=True):
                results[position] = output
        return results

    # -- too little memory

    def _planned(self, items: list[Any]) -> Sequence[tuple[int, int]]:
        """The chunks in which the items will probably be computed."""
        model = self.model
        if not model.ceiling.limit:
            return ((0, len(items)),)
        return model.ceiling.planned(len(items), model.lengths(items))

    def _compute_in_chunks(self, job: Job) -> None:
        """Compute in as many runs as it takes."""
        model, items = self.model, job.items
        ready = {(start, stop): parts for start, stop, parts in job.pieces}
        whole, job.ran_out, job.pieces = job.ran_out, None, []
        if whole is not None:
            ready.clear()
            # Only now: where the error was raised, its frames still held the model's tensors.
            _release_memory()
        too_large: dict[int, Failure] = {}
        lengths = model.lengths(items)
        for chunk in model.ceiling.chunks(len(items), lengths, may_rerun=model.may_rerun):
            is_part = chunk.stop - chunk.start < len(items)
            if whole is not None and is_part and model.may_rerun:
                whole = None  # which of the parts ran out is not known: each of them will tell
            ran = whole or self._run(job, chunk, ready.pop((chunk.start, chunk.stop), None))
            if isinstance(ran, StagedChunk):
                job.pieces.append(ran)
                continue
            if isinstance(ran, Failure):
                job.failure, job.pieces = ran, []
                return
            # Where nothing is computed again all parts fail, and the first stands for them.
            chunk.has_run_out = ran is not whole or not chunk.start
            if chunk.is_last_try:
                too_large |= dict.fromkeys(range(chunk.start, chunk.stop), ran.failure)
            if model.may_rerun:
                whole = None
        if too_large:
            positions = [i for i in range(job.size) if i not in job.failures]
            job.failures = job.failures | {positions[i]: too_large[i] for i in too_large}

    def _run(
        self, job: Job, chunk: Chunk, parts: list[StagedRows] | None
    ) -> StagedChunk | Failure | _OutOfMemory:
        try:
            if parts is None:
                parts = self._prepared(job.items[chunk.start : chunk.stop])
            parts = self._computed(parts)
            if job.is_redone:  # its last stage may run out as well, and has to be tried here
                size = chunk.stop - chunk.start
                parts = [StagedRows(None, size, self._finished(parts, size))]
            return StagedChunk(chunk.start, chunk.stop, parts)
        except BaseException as error:
            ran = self._caught(error, job)
        parts = None
        if isinstance(ran, _OutOfMemory):
            _release_memory()
        return ran

    # -- errors

    def culprit(self, batch_id: int) -> int:
        """The batch at which the GPU failed, if its error came up with ``batch_id``.

        An error comes up in any stage of any batch, often in ``forward`` of the next one. The GPU
        computes batches in order: it failed at the first one that it has not finished.
        """
        for each, mark in list(self._unfinished.items()):
            if not mark.is_reached:
                return each
        return batch_id

    def _caught(self, error: BaseException, job: Job) -> Failure | _OutOfMemory:
        """What a model's error means; raises it again if it is no error of a batch."""
        model = self.model
        too_large = is_out_of_memory(error, model.out_of_memory_errors)
        if not too_large:
            if not isinstance(error, Exception):
                raise error
            try:
                model.guard.look(error)  # before it loses its causes
            except DeviceFailed as end:
                end.batch_id = job.batch_id
                raise
        failure = Failure.caught(error)
        return _OutOfMemory(failure) if too_large else failure

    @staticmethod
    def _fail(job: Job, ran: Failure | _OutOfMemory) -> None:
        job.pieces = []
        if isinstance(ran, Failure):
            job.failure = ran
        else:
            job.ran_out = ran


def check_outputs(model: LoadedModel, outputs: Any, expected: int) -> list[Any]:
    """A model's outputs as a list of ``expected`` results. Raises BadModelOutput."""
    if model.moves_to_cpu or type(outputs) is OnHost:
        outputs = results_on_host(outputs)
    if type(outputs) is list and len(outputs) == expected != model.columns:  # the usual case
        return list(outputs)
    got = type(outputs).__qualname__
    if is_sequence(outputs):
        try:
            results = list(outputs)
        except TypeError:  # an array without dimensions
            pass
        else:
            count = len(results)
            has_fields = isinstance(outputs, tuple) and _has_fields(type(outputs))
            are_columns = isinstance(outputs, (list, tuple)) and _are_columns(results, expected)
            if count != expected and are_columns:
                model.columns = count
            are_columns &= model.columns == count
            if count == expected and not (has_fields or are_columns):
                return results
            got = f"{got} of {count}"
            if has_fields:
                got += " fields"
            if are_columns:
                got += ", each with a row for every item"
    raise BadModelOutput(
        f"{model.name} must return a sequence of {expected} results, one per item; "
        f"it returned {got}"
    )


def _has_fields(kind: type) -> bool:
    """Whether a kind of tuple has names for its parts: a NamedTuple, or what torch.max returns."""
    return hasattr(kind, "_fields") or hasattr(kind, "n_fields")


def _are_columns(results: list[Any], expected: int) -> bool:
    """Whether they look like a tuple of arrays with a row for each item: (logits, hidden), say.

    For as many items as there are arrays, results may look the same. So they are refused only in a
    model that has returned so many for another number of items. The search for a bad item, which
    follows then, soon comes to that number.
    """
    return bool(results) and all(
        tuple(getattr(each, "shape", ()))[:1] == (expected,) for each in results
    )


def _memory_of(outputs: Any) -> weakref.ref[Any] | None:
    """The array or tensor in whose memory the outputs lie, by the first of them."""
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    array, tensor = getattr(numpy, "ndarray", ()), getattr(torch, "Tensor", ())
    first = outputs
    for _ in range(3):  # outputs, an output, its parts
        if isinstance(first, dict):
            first = next(iter(first.values()), None)
        elif isinstance(first, (list, tuple)):
            first = first[0] if first else None
    base = first
    while base is not None:
        first = base
        if not isinstance(first, (array, tensor)):  # such as memory that is shared
            return None
        base = first._base if isinstance(first, tensor) else first.base
    return None if first is None else weakref.ref(first)


def _release_memory() -> None:
    """Give unused memory back to the device; a fragmented cache is of no use there."""
    gc.collect()  # a frame that holds its own exception is a cycle
    # Where that fails, so will the next run, and with an error that says more.
    with contextlib.suppress(Exception):
        cuda = cuda_in_use()
        if cuda is not None:
            cuda.empty_cache()
