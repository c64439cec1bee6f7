"""The preprocess processes of a worker, which feed the one process that has the GPU.

    worker process                                       preprocess processes
    --------------                                       --------------------
    64 items ── 16 to each, over pipes ────────────────▶ preprocess(16 items)
    collate(4 parts) ◀── over pipes and shared memory ── what it returned
    forward

A batch is split, so that it is ready n times sooner and no more batches wait inside of the worker.
The processes are workers of the worker: the same transport starts them and tells their ends.

One that dies takes a part of a batch with it. The batch fails as if ``preprocess`` had raised, so
the worker searches for the item at fault, while a new process starts and the model stays loaded.
"""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ..errors import InvalidItems
from ..managed_model import ManagedModel
from ..observe.record import BatchReport, StepReport
from ..options.table import WorkerOptions
from ..reporting import summary
from .model_spec import ModelSpec
from .preprocessing import InvalidPart, PreprocessSpec, check_preprocess
from .process import ProcessTransport
from .protocol import EXIT_START_FAILED, Failure, WorkerReady
from .stage_calls import by_position
from .transport import WorkerDied, WorkerWaits

logger = logging.getLogger(__name__)

_Event = WorkerReady | WorkerDied | BatchReport

#: How long idle processes may take to end, seconds. Less than the worker itself has.
_CLOSE_GRACE = 2.0

#: How long those that are left work alone after one could not be started again, seconds. Arbitrary:
#: many times what a start takes.
_START_INTERVAL = 30.0


class PreprocessPool:
    """Stands in for the ``preprocess`` of a model. One thread at a time.

    The kernel ends the processes with the thread that started them. So ``start`` is for the main
    thread, and those that die later are started again by a thread of this pool's own.

    Args:
        spec: the worker's; as it was pickled, if the worker was not forked.
        options: the worker's ``preprocess_options``.

    Attributes:
        transport: what starts the processes and talks with them.
        may_start_at: when the next may start, after a start that failed; on the monotonic clock.
    """

    def __init__(self, spec: ModelSpec | bytes, options: WorkerOptions) -> None:
        self._is_forked = options.mp_start_method == "fork"
        self.transport = ProcessTransport(PreprocessSpec(spec), options, noun="preprocess process")
        self._count = options.most_workers
        self._started = 0  # so far, for names of slots
        self._sent = 0  # parts so far, for their ids
        self._places: dict[int, int] = {}  # of the living, by slot
        self._ready: set[int] = set()  # slots
        self._starter: ThreadPoolExecutor | None = None
        self.may_start_at = -math.inf
        self._collate: Callable[[list[Any]], Any] = list

    def start(self) -> None:
        """Start all of them. Returns before they are ready."""
        for place in range(self._count):
            self._start(place)

    def wait_ready(self) -> None:
        """Block until all of them are.

        Raises:
            WorkerStartError: one of them could not start; its cause has the traceback.
        """
        while len(self._ready) < self._count:
            for event in self._events(None):
                if isinstance(event, WorkerDied):
                    raise event.failure.exception()

    def attach(self, model: ManagedModel) -> None:
        """Stand in for the ``preprocess`` of this model.

        Raises:
            TypeError: it has none.
        """
        check_preprocess(type(model))
        self._collate = model.collate
        model.preprocess = self  # type: ignore[method-assign]

    def __call__(self, items: Any) -> Any:
        """Preprocess a batch.

        Raises:
            WorkerLost: a process died of it, or with it.
            InvalidItems: as ``preprocess`` raised it of parts.
            Exception: whatever ``preprocess`` or ``collate`` raises.
            SystemExit: no process is left, and none can be started.
        """
        self._revive()
        parts = _split(items, len(self._ready))
        payloads = self.transport.encode(parts)
        waiting: dict[int, int] = {}  # positions of parts, by slot
        first, self._sent = self._sent, self._sent + len(parts)
        for position, slot in enumerate(sorted(self._ready)[: len(parts)]):
            waiting[slot] = position
            self.transport.send(slot, first + position, [payloads[position]])
        outputs: list[Any] = [None] * len(parts)
        failure: Failure | None = None
        while waiting:
            for event in self._events(None):
                # One before, of which a part could not be sent, may still be answered.
                is_late = isinstance(event, BatchReport) and event.batch_id < first
                is_other = is_late or isinstance(event, WorkerReady)
                position = -1 if is_other else waiting.pop(event.slot, -1)
                if position < 0:  # it has no part of this batch
                    continue
                if isinstance(event, BatchReport):
                    failure = failure or event.failure or event.failures.get(0)
                    outputs[position] = event.outputs[0] if event.outputs else None
                elif isinstance(event, WorkerDied):
                    failure = event.failure  # it says more than what another part raised
        if failure is not None:
            self._replace()
            raise failure.exception()
        prepared = self.transport.decode(outputs)
        errors: dict[int, Exception] = {}
        start = 0
        for part, made in zip(parts, prepared, strict=True):
            if isinstance(made, InvalidPart):
                positions = range(start, start + len(part))
                errors |= by_position(InvalidItems(made.errors()), positions)
            start += len(part)
        if errors:
            raise InvalidItems(errors)
        return self._collate(prepared)

    def close(self) -> None:
        """End them."""
        self.transport.close(_CLOSE_GRACE)
        if self._starter is not None:
            self._starter.shutdown()

    def _start(self, place: int) -> None:
        slot = self._started
        self._started += 1
        self.transport.start(slot, place, self._count)
        self._places[slot] = place

    def _replace(self) -> None:
        """Start those again that have died. Returns before they are ready."""
        missing = set(range(self._count)) - set(self._places.values())
        if missing and self._is_forked:
            # A fork now could inherit locks that other threads hold.
            self._give_up("a preprocess process has died, and cannot be forked again")
        if not self._places or time.monotonic() >= self.may_start_at:
            for place in missing:
                try:
                    self._start_in_thread(place)
                except (OSError, RuntimeError, MemoryError) as error:
                    # No processes, threads, descriptors or memory are left in the system.
                    what = f"preprocess process {place} cannot be started again: {summary(error)}"
                    if not self._places:
                        self._give_up(what)
                    self.may_start_at = time.monotonic() + _START_INTERVAL
                    logger.warning("%s", what)
                    break

    def _start_in_thread(self, place: int) -> None:
        starter = self._starter or ThreadPoolExecutor(1, "service_streamer starter")
        started = starter.submit(self._start, place)  # or there is no thread, and no starter
        self._starter = starter
        started.result()

    def _revive(self) -> None:
        """Take note of those that have died; block until there is one."""
        self._events(0)
        self._replace()
        while not self._ready:
            for event in self._events(None):
                if isinstance(event, WorkerDied) and not self._places:
                    self._give_up(event.failure.text)

    def _give_up(self, why: str) -> None:
        """End the worker, which the engine replaces by a new one."""
        logger.error("the worker ends, since its preprocessing is lost: %s", why)
        raise SystemExit(EXIT_START_FAILED)

    def _events(self, timeout: float | None) -> list[_Event]:
        waited = self.transport.wait(timeout)
        # It has no steps, and needs no place on a cluster.
        events = [event for event in waited if not isinstance(event, (StepReport, WorkerWaits))]
        for event in events:
            if isinstance(event, WorkerReady):
                self._ready.add(event.slot)
            elif isinstance(event, WorkerDied):
                del self._places[event.slot]
                is_first_start = event.slot < self._count and event.slot not in self._ready
                if event.slot not in self._ready:
                    self.may_start_at = time.monotonic() + _START_INTERVAL
                self._ready.discard(event.slot)
                if not is_first_start:  # ``wait_ready`` raises it
                    logger.warning("%s", event.failure.message)
        return events


def _split(items: Any, count: int) -> list[Any]:
    """Adjacent parts of nearly the same size: at most ``count``, and none of them empty."""
    size = len(items)
    count = min(count, size)
    bounds = [size * part // count for part in range(count + 1)]
    return [items[start:stop] for start, stop in itertools.pairwise(bounds)]
