"""Models that break the protocol between a worker and the web process, importable by workers."""

from __future__ import annotations

import inspect
import multiprocessing
import os
import pickle
import sys
from pathlib import Path
from typing import Any

from service_streamer import ManagedModel
from service_streamer.workers.protocol import (
    VERSION,
    BatchReport,
    StartFailure,
    StepReport,
    WorkerStarted,
)


def channel() -> Any:
    """The worker's end of its pipes, from the frame that serves them."""
    frame = inspect.currentframe()
    assert frame is not None
    while "channel" not in frame.f_locals:
        assert frame.f_back is not None
        frame = frame.f_back
    return frame.f_locals["channel"]


class Forks(ManagedModel):
    """Doubles; an item that names a fault has it forked, and the child ends in that way.

    The last item of such a batch gets the status with which the child has ended.
    """

    def init_model(self, folder: str = "", how: str = "") -> None:
        self.folder = folder
        # With fork, since the model may have any children that it likes.
        self.child = multiprocessing.get_context("fork").Process(target=_wait, daemon=True)
        self.child.start()
        if how:
            self._fork(how)

    def predict(self, batch: list[Any]) -> list[Any]:
        if batch == ["child"]:
            return [self.child.is_alive()]
        results: list[Any] = [2 * item for item in batch]
        for item in batch:
            if isinstance(item, str):
                results[-1] = self._fork(item)
        return results

    def _fork(self, how: str) -> int:
        child = os.fork()
        if child:
            return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if self.folder:
            (Path(self.folder) / "forked").write_text(how)
        if how == "raises":
            raise RuntimeError("in the child")
        if how == "exits":
            sys.exit(7)
        return 0  # "returns"


def _wait() -> None:
    """End with the worker, also if that is killed."""
    worker = multiprocessing.parent_process()
    assert worker is not None
    worker.join()


def breaches(batch: list[Any]) -> list[Any]:
    """Doubles; an item that names a breach has it committed before the answer."""
    for item in batch:
        if isinstance(item, str):
            _commit(item, len(batch))
    return [2 * item for item in batch]


def _commit(breach: str, size: int) -> None:
    end = channel()
    results = [pickle.dumps(None)] * size
    now = 0.0
    match breach:
        case "answers twice":
            end.send_message(BatchReport(batch_id(), results, {}, None, now, now))
        case "answers what it does not hold":
            end.send_message(BatchReport(1_000_000, results, {}, None, now, now))
        case "answers with an id that is none":
            end.send_message(BatchReport([], results, {}, None, now, now))
        case "answers with too few results":
            end.send_message(BatchReport(batch_id(), results[1:], {}, None, now, now))
        case "answers with too many results":
            end.send_message(BatchReport(batch_id(), [*results, b""], {}, None, now, now))
        case "fails with what is no failure":
            end.send_message(BatchReport(batch_id(), [], {}, "no", now, now))
        case "answers without a duration":
            end.send_message(BatchReport(batch_id(), results, {}, None, odd("long"), now))
        case "answers with odd failures":
            end.send_message(BatchReport(batch_id(), results, odd([1]), None, now, now))
        case "answers with a failure that is none":
            end.send_message(BatchReport(batch_id(), results, {0: "no"}, None, now, now))
        case "answers with an odd padding":
            end.send_message(
                BatchReport(batch_id(), results, padding=odd("much"), duration=now, started_at=now)
            )
        case "answers with odd times of outputs":
            times = (now, None, odd("long"))
            end.send_message(
                BatchReport(batch_id(), results, output_times=times, duration=now, started_at=now)
            )
        case "sends outputs of what it does not hold":
            end.send_message(StepReport({10**100: b""}))
        case "is ready twice":
            end.send_message(WorkerStarted())
        case "cannot load when it has loaded":
            end.send_message(StartFailure(odd(None), False))
        case "unknown kind":
            end.send_raw((VERSION, "gossip", 1))
        case "another version":
            end.send_raw((VERSION + 1, 2, batch_id()))
        case "no version":
            end.send_raw(("1", 2, batch_id()))
        case "no message":
            end.send_raw(())
        case "no tuple":
            end.writer.write(pickle.dumps(5))
        case "no pickle":
            end.writer.write(b"not a pickle")
        case "no frame":
            os.write(end.writer.descriptor, b"print() went to the wrong descriptor\n")


def odd(value: object) -> Any:
    return value


def batch_id() -> int:
    frame = inspect.currentframe()
    assert frame is not None
    while "job" not in frame.f_locals:
        assert frame.f_back is not None
        frame = frame.f_back
    number: int = frame.f_locals["job"].batch_id
    return number
