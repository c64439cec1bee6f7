"""The stages of one batch in its worker.

    stage      what it does                                     where it runs while batches overlap
    -----      ------------                                     -----------------------------------
    INTAKE     decode the items, preprocess                     a thread of its own
    FORWARD    forward; or predict, of a model without stages   the thread that loaded the model
    OUTLET     postprocess, check the results, encode, send     a thread of its own

A batch that is too large for the device's memory, or of which a call is at fault, goes back to
FORWARD, whichever stage raised: it is computed there in parts, from its items on. So a stage may be
called in the thread of another one, but never twice at the same time.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, MutableSequence, Sequence
from typing import Any

from ..errors import BadModelOutput, InvalidInput, InvalidItems
from ..gpu.accelerators import kind_in_use
from ..gpu.transfers import PLAIN, OnHost, StageTimer, results_on_host
from ..observe.record import BatchReport
from ..options.checks import is_sequence
from .batch_parts import Job, caught, compute_in_parts, prepared_parts
from .bisection import OutOfMemory
from .model_spec import LoadedModel
from .progress import is_unwanted
from .stage_calls import StageCalls, memory_of, one_at_a_time, stacked

INTAKE, FORWARD, OUTLET = range(3)


class Stages:
    """Runs the stages of one model. Each method belongs to the thread of its stage.

    None of them raises what a model raises: that becomes the failure of the batch, or of the calls
    at fault.

    Args:
        progress: where each stage writes which batch it is at: its id plus 1, or 0.
        unwanted: batches that nobody waits for any more: see ``StageProgress``. They go no further.

    Attributes:
        on_run: called between two runs of parts of one batch, by whoever calls ``compute``.
    """

    def __init__(
        self,
        model: LoadedModel,
        progress: MutableSequence[int] | None = None,
        unwanted: Sequence[int] = (),
    ) -> None:
        self.model = model
        self.progress = [0, 0, 0] if progress is None else progress
        self._unwanted = unwanted
        self.on_run: Callable[[], None] = lambda: None
        managed: Any = model.managed
        if hasattr(managed, "raise_if_unwanted"):
            managed.raise_if_unwanted = lambda: self._check_wanted(self.progress[FORWARD])
        #: Whether reports say what each stage took, also where batches do not overlap.
        self.has_stages = model.forward is not model.predict
        self._postprocess = one_at_a_time(model.postprocess)
        self._has_plain_results = self._postprocess is None and not model.stack
        calls = StageCalls(one_at_a_time(model.preprocess), model.forward, self._results, memory_of)
        self._calls = stacked(calls, model) if model.stack else calls
        #: Batches that a GPU may not have finished. If it fails, it failed at one of them: an error
        #: comes up in any stage of any batch, often in ``forward`` of the next one.
        self.launched: set[int] = set()

    def take_in(self, job: Job) -> None:
        """Preprocess. Raises DeviceFailed, and whatever ends the worker, as the others do."""
        calls = self._calls
        if calls.prepare is None or not job.items:
            return
        started = job.started_at = time.monotonic()
        job.data = None
        try:
            self._prepare(job)
        except BaseException as error:
            self._failed(job, error)
        job.seconds[INTAKE] = time.monotonic() - started

    def _is_wanted(self, number: int) -> bool:
        """Whether anybody waits for the batch of this number."""
        unwanted = self._unwanted
        return not (unwanted and unwanted[0] and is_unwanted(unwanted, number))

    def _check_wanted(self, number: int) -> None:
        """Raises InvalidInput, of which nobody learns: the batch of this number is unwanted."""
        if not self._is_wanted(number):
            raise InvalidInput("nobody waits for the results any more")

    def _failed(self, job: Job, error: BaseException) -> None:
        """What a stage raised: the batch fails, or is computed in parts."""
        ran = caught(error, self.model, job.batch_id)
        if isinstance(ran, OutOfMemory) or (job.is_shared and self._is_wanted(job.batch_id + 1)):
            job.data = job.parts = None
            job.known = ran
        else:
            job.fail(ran)

    def compute(self, job: Job) -> None:
        """Run ``forward``, or ``predict``."""
        if job.failure is not None or not job.items:
            return
        started = time.monotonic()
        if not job.started_at:
            job.started_at = started
        if "torch" in sys.modules and kind_in_use() is not None:
            job.timer = StageTimer()
            self.launched.add(job.batch_id)
        is_whole = job.known is None and job.parts is None and not self.model.ceiling.limit
        if is_whole:
            try:
                is_whole = self._compute(job)
            except BaseException as error:
                self._failed(job, error)
                is_whole = job.known is None
        if not is_whole:
            compute_in_parts(
                job,
                self.model,
                self._calls,
                is_wanted=lambda: self._is_wanted(job.batch_id + 1),
                on_run=self.on_run,
            )
        if job.timer is not None:
            job.timer.stop()
        else:
            job.seconds[FORWARD] += time.monotonic() - started

    def finish(self, job: Job, *, is_overlapped: bool = False) -> bool:
        """Make results. False: the batch has to go back to ``compute``, which does it in parts."""
        timer = job.timer
        outputs = job.data
        if (
            timer is None
            and self._has_plain_results
            and type(outputs) is list
            and job.parts is None
            and len(outputs) == len(job.items) != self.model.columns
            and PLAIN.issuperset(map(type, outputs))
        ):
            # As most models return, and what follows would find nothing to do. It is many calls,
            # and after a model that took some milliseconds their code has left the caches.
            job.data = list(outputs)
            return True
        del outputs
        if timer is not None:
            job.seconds[FORWARD] += timer.seconds()
        started = time.monotonic()
        if job.failure is None and job.items:
            moves_to_cpu = self.model.moves_to_cpu
            try:
                if moves_to_cpu:
                    self._look_at_memory(job)
                if moves_to_cpu and timer is not None and is_overlapped and timer.is_of_device:
                    with timer.following():
                        self._finish(job)
                else:
                    self._finish(job)
            except BaseException as error:
                self._failed(job, error)
        job.seconds[OUTLET] += time.monotonic() - started
        self.launched.discard(job.batch_id)
        if job.known is None:
            return True
        job.is_redone = True
        job.timer = None
        return False

    def report(self, job: Job) -> BatchReport:
        """The report of a finished job, which lets go of all that it holds.

        Nothing may hold the items when the report is encoded: their blocks of shared memory are
        released with it.
        """
        model, results, failures = self.model, job.data, job.failures
        job.items, job.data, job.again = [], None, None
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

    def sent(self, job: Job) -> None:
        """Its results are encoded, and nothing here looks at them any more."""
        if job.memory is not None and job.memory() is not None:
            self.model.keeps_outputs = True

    # -- the stages, without what becomes of errors

    def _prepare(self, job: Job) -> None:
        self._check_wanted(job.batch_id + 1)
        calls = self._calls
        prepare = calls.prepare
        while prepare is not None and job.items:
            try:
                if self.model.ceiling.limit:
                    job.parts = prepared_parts(job, self.model, calls)
                else:
                    job.data = prepare(job.items)
                return
            except InvalidItems as error:
                job.drop_invalid(error)

    def _compute(self, job: Job) -> bool:
        """Whether that was all: else the batch has to be computed without its invalid items."""
        self._check_wanted(job.batch_id + 1)
        try:
            job.data = self._calls.compute(job.data)
        except InvalidItems as error:
            # Of a batch that preprocess has made the positions are not known.
            if self.has_stages:
                raise
            job.drop_invalid(error)
            job.data = None
            return False
        return True

    def _look_at_memory(self, job: Job) -> None:
        if job.parts is None:
            job.memory = self._calls.memory(job.data)

    def _finish(self, job: Job) -> None:
        self._check_wanted(job.batch_id + 1)
        parts = job.parts
        if parts is None:
            job.data = self._calls.finish(job.data, len(job.items))
            return
        job.data, job.parts = [result for part in parts for result in part.data], None

    def _results(self, outputs: Any, size: int) -> list[Any]:
        if self._postprocess is not None:
            outputs = self._postprocess(outputs)
        return check_outputs(self.model, outputs, size)


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
        except TypeError:
            got += " without dimensions"
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
