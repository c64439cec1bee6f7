"""The worker's side, the same in every transport: answer batches until it is asked to end.

    stage      what it does                                     where it runs while batches overlap
    -----      ------------                                     -----------------------------------
    INTAKE     receive, decode the items, preprocess            a thread of its own
    FORWARD    forward; or predict, of a model without stages   the thread that loaded the model
    OUTLET     postprocess, check the results, encode, send     a thread of its own

A worker begins by computing batch after batch, all stages of each in one thread: a lone caller
waits for no other thread. When a batch has arrived before the last one was answered, and more
than one stage takes time, it goes on with three threads, until batches come one by one again. Then
batch k + 1 is in INTAKE while batch k is in FORWARD. The batches keep their order, but for one that
is computed in parts. If ``forward`` or ``predict`` of a process returns memory that the model
keeps, batches do not overlap: its next call could write to what is not sent yet.

A batch goes back to FORWARD, whichever stage raised, if it is too large for the device's memory,
if the model calls some items invalid, or if one of several calls is at fault. It is computed there
in parts, from its items on: all stages of a part run one after the other. So a stage may be called
in the thread of another one, but never twice at the same time.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from queue import SimpleQueue
from typing import Any

from ..gpu.accelerators import copy_thread_modes, release_memory
from ..gpu.device_errors import DeviceFailed
from ..gpu.transfers import StageTimer, first_value
from ..managed_model import array_module
from ..observe.record import BatchReport
from ..reporting import quiet_log, summary
from .mending import Bisection, Outcome, OutOfMemory, at_positions
from .model_spec import LoadedModel, Predict, check_outputs, stacks
from .protocol import FORWARD, INTAKE, OUTLET, Channel, Failure, Progress

#: Classes of results that are in nobody's memory but the interpreter's, as most are.
_PLAIN = frozenset((bool, bytes, float, int, str, type(None)))

#: Batches do not overlap if that saves less than so many seconds of each: handing a batch on to
#: another thread takes about 5e-5 each time.
_WORTH = 2e-4

#: Overlap ends after so many batches in a row for which it was of no use: that came while no other
#: one was there, or of which it saved too little.
_USELESS = 8

#: At most so many batches are in the stages and between them. The scheduler sends no more.
_MOST_BATCHES = 4

#: How long results that are on their way may take when the worker has to end, seconds.
_LAST_RESULTS = 5.0


class Stages:
    """What the batches of one worker share."""

    def __init__(self, channel: Channel, model: LoadedModel, progress: Progress) -> None:
        self.channel = channel
        self.model = model
        self.progress = progress
        self.at = at = progress.stages
        managed: Any = model.managed
        if hasattr(managed, "raise_if_unwanted"):
            managed.raise_if_unwanted = lambda: progress.check_wanted(at[FORWARD] - 1)
        self.has_stages = model.forward is not model.predict
        #: A stage may be called in the thread of another one, but never twice at a time.
        self.preprocessing, self.postprocessing = threading.Lock(), threading.Lock()
        #: Batches that a GPU may not have finished. If it fails, it failed at one of them: an error
        #: comes up in any stage of any batch, often in ``forward`` of the next one.
        self.launched: set[int] = set()


class Job(Bisection[int]):
    """One batch on its way through the stages, its items by their positions.

    Belongs to one stage at a time. No stage raises what a model raises: that becomes the failure of
    the batch, or of the calls at fault. They raise DeviceFailed, and what ends a worker.
    """

    _named = 0  # how many items are in a call, if the model knows them by their positions
    _data: Any = None  # what the last stage made of its items
    _trouble: Outcome | None = None  # why a stage could not, of all items
    _failure: Failure | None = None  # why the batch failed
    _runs = 0  # more of them, to find the calls on which the model raises
    #: Of the outputs of ``forward``, to be sent before the next call if the model keeps it.
    _memory: weakref.ref[Any] | None = None
    _timer: StageTimer | None = None  # measures ``forward``, until OUTLET
    _started_at = 0.0  # when the model began with it, of the monotonic clock
    _duration = 0.0  # of the model's code; of ``forward`` the GPU's, where it has one
    _owners: Sequence[int] = ()  # by position the number of an item's call, once needed
    _lengths: dict[int, float] | None = None  # of the items, once they are needed

    def __init__(self, stages: Stages, received: tuple[Any, ...]) -> None:
        """INTAKE, of what the channel has received."""
        self._stages, self._model = stages, stages.model
        stages.at[INTAKE] = received[0] + 1
        began = time.monotonic()
        self.batch_id, items, failures, self._decode_again = stages.channel.decode(received)
        #: Seconds of each stage, with decoding and encoding.
        self._seconds = [time.monotonic() - began, 0.0, 0.0]
        self._size = len(items) + len(failures)
        self._calls: int | Sequence[int] = received[3]  # as in ``Transport.send``
        positions: Iterable[int] = range(self._size)
        super().__init__((i for i in positions if i not in failures) if failures else positions)
        self.failures = failures
        self._decoded = items
        self._positions = self.items  # of ``_decoded``; ``items`` becomes another list
        self._touched: list[int] = []  # items that the model has had, and may have written to
        #: What ``preprocess`` made of the parts in which the batch is probably computed, mostly of
        #: one that has all.
        self._prepared: dict[tuple[int, ...], Any] = {}
        if items and (self._model.preprocess is not None or self._model.stack):
            self._started_at = time.monotonic()
            self._run(self._prepare_parts, self.items)
            self._duration = time.monotonic() - self._started_at
            self._seconds[INTAKE] += self._duration
            stages.channel.check_owner()  # in a fork this thread may be the only one
        stages.at[INTAKE] = 0

    def saves(self, worth: float) -> bool:
        """Whether more than ``worth`` seconds are saved of each batch if such batches overlap.

        Then the slowest stage is left. Decoding and encoding hold the interpreter's lock: they can
        be hidden behind what the model does, but not behind each other.
        """
        if self._duration <= worth:  # of a fast model, and all that is looked at
            return False
        return sum(self._seconds) - max(self._seconds) > worth

    # -- the stages

    def complete(self) -> None:
        """All stages after INTAKE, in this thread."""
        self.compute()
        while not self.finish():
            self.compute()

    def compute(self) -> None:
        """FORWARD; or all stages, if the batch is computed in parts."""
        if not self.items:
            return
        stages = self._stages
        stages.at[FORWARD] = self.batch_id + 1
        self._started_at = self._started_at or time.monotonic()
        self._timer = StageTimer()
        stages.launched.add(self.batch_id)
        is_whole = len(self._prepared) < 2 and not self._model.ceiling.limit
        if is_whole and self._trouble is None:
            self._run(self._forward, self.items)
        if self.items and (self._trouble is not None or not is_whole):
            self._compute_in_parts()
        self._timer.stop()
        stages.channel.check_owner()  # in a fork no other thread would answer
        stages.at[FORWARD] = 0

    def finish(self, *, is_overlapped: bool = False) -> bool:
        """OUTLET. False: the batch goes back to ``compute``, in parts."""
        stages = self._stages
        stages.at[OUTLET] = self.batch_id + 1
        forward = 0.0 if self._timer is None else self._timer.seconds()
        began = time.monotonic()
        if self.items:
            self._run(self._results_apart if is_overlapped else self._results, self.items)
            if self._trouble is None:
                self.items = []
        outlet = time.monotonic() - began
        self._seconds[FORWARD] += forward
        self._seconds[OUTLET] += outlet
        self._duration += forward + outlet
        self._timer = None
        stages.launched.discard(self.batch_id)
        is_finished = not self.items
        if is_finished:
            self._answer(has_stages=is_overlapped or stages.has_stages)
        stages.at[OUTLET] = 0
        return is_finished

    def _answer(self, *, has_stages: bool) -> None:
        channel, report = self._stages.channel, self.report()
        began = time.monotonic()
        channel.encode(report)
        if self._memory is not None and self._memory() is not None:  # nothing here looks at it
            self._model.keeps_outputs = True
        self._seconds[OUTLET] += time.monotonic() - began
        if has_stages:
            report.stages = (self._seconds[INTAKE], self._seconds[FORWARD], self._seconds[OUTLET])
        channel.send(report)

    def report(self) -> BatchReport:
        """Its report, when no item is left. It lets go of all that it holds.

        Nothing may hold the items when the report is encoded: their blocks of shared memory are
        released with it.
        """
        model, outputs, failures = self._model, self._data or [], self.failures
        self._decoded, self._prepared, self.results = [], {}, {}
        self._data = self._decode_again = None
        padding = None
        if self._failure is not None:
            outputs, failures = [], {}
        else:
            model.guard.row = 0
            if failures:
                left = iter(outputs)
                outputs = [None if i in failures else next(left) for i in range(self._size)]
            padding = model.padding
        return BatchReport(
            self.batch_id,
            outputs,
            failures,
            self._failure,
            self._duration,
            self._started_at or time.monotonic(),  # no item could be decoded
            model.ceiling.limit,
            padding,
            runs=self._runs,
        )

    # -- what the model is called for; a model with ``stack`` for each array by itself

    def _run(self, stage: Callable[[list[int]], Any], part: list[int]) -> None:
        """Call the model for a batch, or a part of it: ``_trouble`` is why there is no ``_data``.

        If it raises, and no calls at fault are to be found, the whole batch fails. A batch that
        nobody waits for any more goes no further.
        """
        progress = self._stages.progress
        self._trouble = None
        try:
            if progress.unwanted[0]:  # some were so far
                progress.check_wanted(self.batch_id)
            self._data = stage(part)
            return
        except BaseException as error:
            trouble = self._model.outcome_of(error, self.batch_id, self._named)
        self._trouble, self._data = trouble, None
        if part is self.items:  # of a smaller part, what is prepared of the others is still of use
            self._prepared.clear()
        if isinstance(trouble, Failure) and (
            not self._calls or progress.is_unwanted(self.batch_id)
        ):
            self._failure = trouble
            self.drop(self.items)

    def _prepare_parts(self, items: list[int]) -> None:
        """Preprocess those parts of the batch that probably fit into memory."""
        self._named, start = len(items), 0
        while start < len(items):
            part = items[start : start + self.room(items[start:])]
            with at_positions(range(start, start + len(part))):
                self._prepared[tuple(part)] = self._prepare(part)
            start += len(part)

    def _prepare(self, part: list[int]) -> Any:
        if self._touched and self._decode_again and not set(self._touched).isdisjoint(part):
            data: Any = [*map(self._decode_again, part)]
        elif len(part) == len(self._decoded):
            data = [*self._decoded]
        else:
            decoded = dict(zip(self._positions, self._decoded, strict=True))
            data = [decoded[position] for position in part]
        self._touched += part
        if self._model.stack:
            data = stacks(data, self._model.view)
        if self._model.preprocess is None:
            return data
        with self._stages.preprocessing:
            return self._through(self._model.preprocess, data)

    def _forward(self, part: list[int]) -> Any:
        """Preprocess, if that is not done, and compute."""
        self._named = len(part)
        if self._prepared and tuple(part) in self._prepared:
            data = self._prepared.pop(tuple(part))
        else:
            data = self._prepare(part)
        if self._stages.has_stages:
            self._named = 0  # preprocess may have changed their positions
        return self._through(self._model.forward, data)

    def _results(self, part: list[int]) -> list[Any]:
        """One result for each: postprocess, and check what that returned.

        All but those of the last part are copied: a model may write to the same memory again with
        its next call.
        """
        model, data = self._model, self._data
        if model.moves_to_cpu:
            self._memory = memory_of(data[0].batch if model.stack else data)
        if not model.stack:
            results = self._postprocessed(data, len(part))
        else:
            results = [None] * len(part)
            for rows, positions in data:
                found = self._postprocessed(rows, len(positions))
                for position, result in zip(positions, found, strict=True):
                    results[position] = result
        return results if len(part) == len(self.items) else [*map(in_own_memory, results)]

    def _results_apart(self, part: list[int]) -> list[Any]:
        """The same on a stream of its own, behind what the GPU has to do for this batch."""
        if not self._model.moves_to_cpu or self._timer is None:
            return self._results(part)
        with self._timer.following():
            return self._results(part)

    def _postprocessed(self, outputs: Any, size: int) -> list[Any]:
        if self._model.postprocess is not None:
            with self._stages.postprocessing:
                outputs = self._model.postprocess(outputs)
        return check_outputs(self._model, outputs, size)

    def _through(self, stage: Predict, data: Any) -> Any:
        return [each.through(stage) for each in data] if self._model.stack else stage(data)

    # -- in parts

    def _compute_in_parts(self) -> None:
        """Compute it in as many runs as it takes."""
        model, known = self._model, self._trouble
        self._stages.channel.last_sign_at = self._started_at  # the run before took its time, too
        self._lengths = None  # another batch may have found since that they are unknown
        lengths = self._lengths_of(self.items)
        model.ceiling.begin(lengths)
        part = self.next_part()
        if isinstance(known, OutOfMemory) and not model.may_rerun:
            self.ran_out(part, known.failure)
            self.fail(self.items, known.failure)
        if len(part) < len(self.items):
            known = None  # which part it applies to is not known: each is run
        self._runs = self.run_all(may_rerun=bool(self._calls), known=known)
        self._data = [*self.results.values()]  # the parts go from left to right

    def call_of(self, item: int) -> int:
        if not self._owners:
            calls = self._calls if not isinstance(self._calls, int) else [1] * self._size
            self._owners = [call for call, size in enumerate(calls) for _ in range(size)]
        return self._owners[item]

    def room(self, items: list[int]) -> int:
        if not self._model.ceiling.limit:
            return len(items)
        lengths = self._lengths_of(items)
        return self._model.ceiling.room(lengths)

    def run(self, part: list[int]) -> Outcome:
        self._stages.channel.sign_of_life()
        self._run(self._compute_part, part)
        return self._data if self._trouble is None else self._trouble

    def _compute_part(self, part: list[int]) -> list[Any]:
        """All stages."""
        self._data = self._forward(part)
        return self._results(part)

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
        if self._lengths is None:
            lengths = self._model.lengths(self._decoded)
            self._lengths = dict(zip(self._positions, lengths, strict=True))
        return [self._lengths[position] for position in items]


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


def serve(channel: Channel, model: LoadedModel, progress: Progress) -> None:
    """Answer batches until the channel says to end. Nothing that a model raises ends it.

    ``SystemExit`` and the like are no errors of a batch: they end the worker, as they say. So does
    ``DeviceFailed`` of the model's guard.
    """
    if model.places:
        from .stepper import serve_steps  # other models' workers need not import it

        serve_steps(channel, model, progress)
        return
    stages, may_overlap = Stages(channel, model, progress), _has_real_threads()
    warn_once = quiet_log(__name__, once=True)  # it tries again and again
    received = channel.receive()
    while received is not None:
        job = Job(stages, received)
        # Nothing here may hold the batch: it would stay in memory until the next one comes, and
        # its blocks of shared memory are released with the report.
        del received
        job.complete()
        overlaps = may_overlap and job.saves(_WORTH) and not model.keeps_outputs
        if overlaps and channel.is_waiting():
            overlap = _Overlap(stages)
            if overlap.start(warn_once):
                received = overlap.run()
                del overlap  # it holds that batch
                continue
        received = channel.receive()


def _has_real_threads() -> bool:
    """False where gevent has made greenlets of them: one that reads a pipe would block all."""
    monkey: Any = sys.modules.get("gevent.monkey")
    return monkey is None or not monkey.is_module_patched("threading")


class _Overlap:
    """Runs the stages of consecutive batches at the same time."""

    def __init__(self, stages: Stages) -> None:
        self._stages = stages
        #: For this thread, also batches that came back from the outlet. At its end, each of the
        #: other threads adds what it raised, or None.
        self._prepared: SimpleQueue[Job | BaseException | None] = SimpleQueue()
        #: For the outlet, which ends at None.
        self._computed: SimpleQueue[Job | None] = SimpleQueue()
        self._room = threading.Semaphore(_MOST_BATCHES)
        self._taken = self._answered = 0  # batches
        self._useless = 0  # of those, in a row until now
        self._received: tuple[Any, ...] | None = None  # the batch with which ``serve`` goes on
        self._has_failed = False  # no batch is received any more
        self._take_over_modes = copy_thread_modes()
        self._intake, self._outlet = (
            threading.Thread(
                target=self._run, args=(target,), name=f"service_streamer {name}", daemon=True
            )
            for target, name in ((self._take_batches, "intake"), (self._send_batches, "outlet"))
        )

    def start(self, warn: Callable[..., None]) -> bool:
        """Start the other two threads; False if the system has none left."""
        try:
            self._outlet.start()
            self._intake.start()
        except (RuntimeError, MemoryError) as error:
            if self._outlet.ident is not None:
                self._computed.put(None)
                self._outlet.join()
            warn(
                logging.WARNING,
                "the worker computes batches one after the other, since no threads can be started "
                "(%s). It tries again while batches wait; raise the limit of processes and threads "
                "(ulimit -u, or pids of the container)",
                summary(error),
            )
            return False
        return True

    def run(self) -> tuple[Any, ...] | None:
        """Answer batches; returns one that came alone, or None at the end.

        Raises what ended one of the threads.
        """
        try:
            while (job := self._next()) is not None:
                job.compute()
                self._computed.put(job)
                del job
            self._computed.put(None)
            self._outlet.join()
            while (job := self._next()) is not None:  # it came back after the intake's end
                job.complete()
        except BaseException as error:
            self._has_failed = True
            if isinstance(error, DeviceFailed):
                error.batch_ids |= self._stages.launched
            self._room.release()
            # Results that are on their way are sent before the worker ends.
            self._computed.put(None)
            self._outlet.join(_LAST_RESULTS)
            if self._stages.channel.interrupt():
                self._intake.join(_LAST_RESULTS)
            raise
        self._intake.join()
        return self._received

    def _next(self) -> Job | None:
        job = self._prepared.get()
        if isinstance(job, BaseException):
            raise job
        return job

    def _run(self, target: Callable[[], None]) -> None:
        """Run one of the other threads."""
        end: BaseException | None = None
        try:
            self._take_over_modes()
            target()
        except BaseException as error:
            end = error
        self._prepared.put(end)

    def _take_batches(self) -> None:
        """Until the channel says to end, or overlap is of no use."""
        stages = self._stages
        while True:
            self._room.acquire()
            self._received = received = stages.channel.receive()
            is_useless = self._useless > _USELESS or stages.model.keeps_outputs
            if received is None or is_useless or self._has_failed:
                return
            self._taken += 1
            job = Job(stages, received)
            self._received = received = None
            self._prepared.put(job)
            del job

    def _send_batches(self) -> None:
        """Until this thread says to end."""
        while (job := self._computed.get()) is not None:
            if job.finish(is_overlapped=True):
                is_of_use = job.saves(_WORTH) and self._taken - self._answered > 1
                self._answered += 1
                self._useless = 0 if is_of_use else self._useless + 1
                self._room.release()
            else:
                self._prepared.put(job)
            del job
