"""What a system costs at least: a bare pipe to another process, and threads with bare locks.

Both are written for these benchmarks only. They know that nothing ever fails, that every caller
calls again, and that nobody gives up. So they show what the operating system and the interpreter
allow.
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import pickle
import queue
import threading
from collections import deque
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any

from adapters.workloads import BATCH_SIZE, WORKLOADS

__all__ = ["BareLocks", "BarePipe"]

#: So many callers are woken by the thread that computes. Each of them wakes the next one, so that
#: they do not queue for the interpreter lock.
_AT_ONCE = 2
#: How long the batcher waits for callers that have not called again, seconds. Only the last ones,
#: which have ended, take that long.
_PATIENCE = 0.05


class _Worker:
    """A worker process that gets a pickled batch, computes it, and sends the results back."""

    def __init__(self, workload: str) -> None:
        context = multiprocessing.get_context("spawn")
        requests, self._requests = context.Pipe(duplex=False)
        self._results, results = context.Pipe(duplex=False)
        self._process = context.Process(
            target=_compute, args=(workload, requests, results), daemon=True
        )
        self._process.start()
        requests.close()
        results.close()
        self.predict([0])  # returns when the model is loaded

    def predict(self, batch: list[Any]) -> list[Any]:
        self._requests.send_bytes(pickle.dumps(batch, pickle.HIGHEST_PROTOCOL))
        answers: list[Any] = pickle.loads(self._results.recv_bytes())
        return answers

    def close(self) -> None:
        self._process.kill()
        self._process.join()


def _compute(workload: str, requests: Connection, results: Connection) -> None:
    model = WORKLOADS[workload]()
    model.load()
    while True:
        batch: list[Any] = pickle.loads(requests.recv_bytes())
        results.send_bytes(pickle.dumps(model.predict(batch), pickle.HIGHEST_PROTOCOL))


class BarePipe:
    """One item to a worker process, and its result back."""

    drivers = frozenset({"alone"})

    def __init__(self, workload: str, workers: int, settings: Mapping[str, Any]) -> None:
        if workers != 1 or settings:
            raise ValueError("a bare pipe has one worker and no settings")
        self._worker = _Worker(workload)

    def predict(self, item: Any) -> Any:
        return self._worker.predict([item])[0]

    def close(self) -> None:
        self._worker.close()


class _Call:
    """One call. Its thread waits for ``ready``, and then wakes the next caller of the relay."""

    __slots__ = ("answer", "item", "ready", "relay")

    def __init__(self, item: Any) -> None:
        self.item = item
        self.answer: Any = None
        self.relay: deque[_Call] | None = None
        self.ready = threading.Lock()
        self.ready.acquire()


class BareLocks:
    """Callers that each wait for a lock of their own, and one thread that computes batches.

    That thread waits until every caller that it has woken has called again, but for no more than a
    full batch: in a closed loop all of them do, and that is the best rule there.

    Settings: ``in_process``, whether a worker process computes the batches.
    """

    drivers = frozenset({"alone", "threads"})

    def __init__(self, workload: str, workers: int, settings: Mapping[str, Any]) -> None:
        if workers != 1 or not settings.keys() <= {"in_process"}:
            raise ValueError("bare locks have one worker and no settings but in_process")
        self._worker = _Worker(workload) if settings.get("in_process") else None
        self._model: Any = self._worker
        if self._model is None:
            self._model = WORKLOADS[workload]()
            self._model.load()
        self._waiting: deque[_Call] = deque()
        self._target = math.inf  # with so many waiting calls a caller wakes the batcher
        self._enough: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._is_closed = False
        self._batcher = threading.Thread(target=self._run, daemon=True)
        self._batcher.start()

    def predict(self, item: Any) -> Any:
        call = _Call(item)
        self._waiting.append(call)
        if len(self._waiting) >= self._target:
            self._target = math.inf
            self._enough.put(None)
        call.ready.acquire()
        relay = call.relay
        if relay:
            with contextlib.suppress(IndexError):  # another caller was faster
                relay.popleft().ready.release()
        return call.answer

    def close(self) -> None:
        """No caller may be waiting any more."""
        self._is_closed = True
        self._enough.put(None)
        self._batcher.join()
        if self._worker is not None:
            self._worker.close()

    def _run(self) -> None:
        waiting, callers = self._waiting, 1
        while True:
            self._collect(min(BATCH_SIZE, callers))
            if self._is_closed:
                return
            batch = [waiting.popleft() for _ in range(min(BATCH_SIZE, len(waiting)))]
            answers = self._model.predict([call.item for call in batch])
            relay = deque(batch[_AT_ONCE:])
            for call, answer in zip(batch, answers, strict=True):
                call.answer, call.relay = answer, relay
            callers = len(batch) + len(waiting)
            for call in batch[:_AT_ONCE]:
                call.ready.release()
            # What the last batch had is not to live until the next one is full.
            del batch, answers, relay, call, answer

    def _collect(self, count: int) -> None:
        """Wait for so many calls; for the first one only, if no more come for a while."""
        waiting, patience = self._waiting, _PATIENCE
        while len(waiting) < count and not self._is_closed:
            self._target = count
            if len(waiting) >= count:  # a caller has come before it could see the target
                break
            try:
                self._enough.get(timeout=None if count == 1 else patience)
            except queue.Empty:
                count = 1
        self._target = math.inf
