"""``preprocess_workers``: the processes that feed the one process that has the GPU.

    worker process                                       preprocess processes
    --------------                                       --------------------
    64 items ── 16 to each, over pipes ────────────────▶ preprocess(16 items)
    collate(4 parts) ◀── over pipes and shared memory ── what it returned
    forward

A batch is split, so that it is ready n times sooner and no more batches wait inside of the worker.
The processes are workers of the worker, without its model: the same transport starts them and tells
their ends. Their items are parts of batches, and their results what ``preprocess`` made of them.

One that dies takes a part of a batch with it. The batch fails as if ``preprocess`` had raised, so
the worker searches for the item at fault, while a new process starts and the model stays loaded.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import logging
import math
import os
import pickle
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ..errors import InvalidItems
from ..managed_model import ManagedModel
from ..observe.record import BatchReport
from ..options.table import WorkerOptions
from ..reporting import summary
from .mending import Invalid, failures_by_position
from .model_spec import LoadedModel, ModelSpec, check_preprocess, import_model
from .process import ProcessTransport
from .protocol import EXIT_START_FAILED, WorkerReady
from .transport import WorkerDied, WorkerEvent

logger = logging.getLogger(__name__)

#: Of Linux's prctl.
_PR_SET_PDEATHSIG = 1

#: How long idle processes may take to end, seconds. Less than the worker itself has.
_CLOSE_GRACE = 2.0

#: How long those that are left work alone after one could not be started again, seconds. Arbitrary:
#: many times what a start takes.
_START_INTERVAL = 30.0


class PreprocessPool:
    """Stands in for the ``preprocess`` of a model. One thread at a time.

    The kernel ends the processes with the thread that started them. So ``start`` is for the main
    thread, and those that die later are started again by a thread of this pool's own.
    """

    def __init__(self, spec: ModelSpec | bytes, options: WorkerOptions) -> None:
        self._is_forked = options.mp_start_method == "fork"
        self.transport = ProcessTransport(PreprocessSpec(spec), options, noun="preprocess process")
        self._count = options.most_workers
        self._slots = itertools.count()
        self._batch_ids = itertools.count()
        self._places: dict[int, int] = {}  # of the living, by slot
        self._ready: set[int] = set()  # slots
        self._starter: ThreadPoolExecutor | None = None
        self.may_start_at = -math.inf  # after a start that failed; on the monotonic clock
        self._collate: Callable[[list[Any]], Any] = list

    def start(self) -> None:
        """Start all of them. Returns before they are ready."""
        for place in range(self._count):
            self._start(place)

    def wait_ready(self) -> None:
        """Block until all of them are. Raises WorkerStartError, whose cause has the traceback."""
        while len(self._ready) < self._count:
            for event in self._events(None):
                if isinstance(event, WorkerDied):
                    raise event.failure.exception()

    def attach(self, model: LoadedModel) -> None:
        """Stand in for the ``preprocess`` of this model. Raises TypeError: it has none."""
        managed: Any = model.managed
        check_preprocess(model.predict if managed is None else type(managed))
        self._collate = managed.collate
        model.preprocess = model.pool = self

    def __call__(self, items: Any) -> Any:
        """Preprocess a batch. Raises whatever ``preprocess`` or ``collate`` raises.

        Raises:
            WorkerLost: a process died of it, or with it.
            SystemExit: no process is left, and none can be started.
        """
        self._events(0)  # some may have died since
        self._replace()
        while not self._ready:
            for event in self._events(None):
                if isinstance(event, WorkerDied) and not self._places:
                    self._give_up(event.failure.text)
        size, count = len(items), min(len(self._ready), len(items))
        bounds = [size * part // count for part in range(count + 1)]
        parts = [items[start:stop] for start, stop in itertools.pairwise(bounds)]
        errors: dict[int, Any] = {}
        prepared = self.transport.decode(self._outputs(self.transport.encode(parts)))
        for start, made in zip(bounds, prepared, strict=False):
            if isinstance(made, Invalid):
                errors |= {start + i: each.exception() for i, each in made.failures.items()}
        if errors:
            raise InvalidItems(errors)
        return self._collate(prepared)

    def _outputs(self, payloads: list[Any]) -> list[Any]:
        """Have each payload computed by a process of its own."""
        batch_id = next(self._batch_ids)
        outputs: dict[int, Any] = dict.fromkeys(sorted(self._ready)[: len(payloads)])
        for slot, payload in zip(outputs, payloads, strict=True):
            self.transport.send(slot, batch_id, [payload])
        working, failure = set(outputs), None
        while working:
            for event in self._events(None):
                # One of a batch before, of which another part could not be sent, has another id.
                if isinstance(event, BatchReport) and event.batch_id == batch_id:
                    failure = failure or event.failure or event.failures.get(0)
                    outputs[event.slot] = event.outputs[0] if event.outputs else None
                    working.remove(event.slot)
                elif isinstance(event, WorkerDied) and event.slot in working:
                    failure = event.failure  # it says more than what another part raised
                    working.remove(event.slot)
        if failure is not None:
            self._replace()
            raise failure.exception()
        return [*outputs.values()]

    def close(self) -> None:
        """End them."""
        self.transport.close(_CLOSE_GRACE)
        if self._starter is not None:
            self._starter.shutdown()

    def _start(self, place: int) -> None:
        slot = next(self._slots)
        self.transport.start(slot, place, self._count)
        self._places[slot] = place

    def _replace(self) -> None:
        """Start those again that have died. Returns before they are ready."""
        missing = set(range(self._count)) - set(self._places.values())
        if missing and self._is_forked:
            # A fork now could inherit locks that other threads hold.
            self._give_up("a preprocess process has died, and cannot be forked again")
        if self._places and time.monotonic() < self.may_start_at:
            return
        for place in missing:
            try:
                starter = self._starter or ThreadPoolExecutor(1, "service_streamer starter")
                started = starter.submit(self._start, place)  # or there is no thread: no starter
                self._starter = starter
                started.result()
            except (OSError, RuntimeError, MemoryError) as error:
                # No processes, threads, descriptors or memory are left in the system.
                what = f"preprocess process {place} cannot be started again: {summary(error)}"
                if not self._places:
                    self._give_up(what)
                self.may_start_at = time.monotonic() + _START_INTERVAL
                logger.warning("%s", what)
                return

    def _give_up(self, why: str) -> None:
        """End the worker, which the engine replaces by a new one."""
        logger.error("the worker ends, since its preprocessing is lost: %s", why)
        raise SystemExit(EXIT_START_FAILED)

    def _events(self, timeout: float | None) -> list[WorkerEvent]:
        events = self.transport.wait(timeout)
        for event in events:
            if isinstance(event, WorkerReady):
                self._ready.add(event.slot)
            elif isinstance(event, WorkerDied):
                del self._places[event.slot]
                was_ready = event.slot in self._ready
                self._ready.discard(event.slot)
                if not was_ready:
                    self.may_start_at = time.monotonic() + _START_INTERVAL
                if was_ready or event.slot >= self._count:  # else ``wait_ready`` raises it
                    logger.warning("%s", event.failure.message)
        return events


# -- in a preprocess process


class PreprocessSpec(ModelSpec):
    """What a preprocess process loads: of the worker's spec, pickled if that was not forked."""

    cannot_send = "what preprocess returned, of type {kind}, cannot be sent to the worker"
    cannot_load = "what preprocess returned cannot be unpickled in the worker"

    def __init__(self, spec: ModelSpec | bytes) -> None:
        super().__init__(spec)
        self._worker = os.getpid()

    def load(self, gpu_id: int | str | None) -> LoadedModel:
        """The function of a list of one part. Raises whatever importing and loading raise."""
        _end_with(self._worker)
        spec: ModelSpec = pickle.loads(self.model) if isinstance(self.model, bytes) else self.model
        model = import_model(spec.model) if isinstance(spec.model, str) else spec.model
        check_preprocess(model)
        managed: ManagedModel = model(gpu_id)
        managed.preprocesses_only = True
        managed.init_preprocess(*spec.args, **spec.kwargs or {})

        def preprocess(parts: list[Any]) -> list[Any]:
            (part,) = parts
            try:
                return [managed.preprocess(part)]
            except InvalidItems as error:
                return [failures_by_position(error, len(part))]
            except AttributeError as error:
                # The usual mistake. The second is None, or a model of a user's that is wrapped.
                if error.obj is managed or error.obj is managed.model:
                    error.add_note(
                        "A preprocess process calls init_preprocess, and not init_model: load "
                        "there what preprocess needs."
                    )
                raise

        return LoadedModel(self, preprocess)


def _end_with(worker: int) -> None:
    """Have the kernel end this process with its worker, also when it hangs in native code.

    The worker is killed because of such a hang; the thread that watches for its end may not get to
    run then. Raises SystemExit: the worker has ended already.
    """
    with contextlib.suppress(AttributeError, OSError):  # not Linux
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != worker:
        raise SystemExit(EXIT_START_FAILED)
