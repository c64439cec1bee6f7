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
from service_streamer.workers.protocol import VERSION, BatchReport, StepReport


def local(name: str) -> Any:
    """A variable of the function that serves the worker's pipes, or the batch: the nearest."""
    frame = inspect.currentframe()
    while frame is not None and name not in frame.f_locals:
        frame = frame.f_back
    assert frame is not None
    return frame.f_locals[name]


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
            _commit(item)
    return [2 * item for item in batch]


#: What an answer to a batch of one item has else than a right one.
_ANSWERS: dict[str, dict[str, Any]] = {
    "answers twice": {},
    "answers what it does not hold": {"batch_id": 1_000_000},
    "answers with an id that is none": {"batch_id": []},
    "answers with too few results": {"outputs": []},
    "answers with too many results": {"outputs": [b"", b""]},
}
_MESSAGES: dict[str, Any] = {
    "sends outputs of what it does not hold": StepReport({10**100: b""}),
}
_RAW_MESSAGES: dict[str, tuple[Any, ...]] = {
    "unknown kind": (VERSION, "gossip", 1),
    "another version": (VERSION + 1, 2, 0),
    "no message": (),
}


def _commit(breach: str) -> None:
    end = local("channel")
    if breach in _ANSWERS:
        right: dict[str, Any] = {
            "batch_id": local("job").batch_id,
            "outputs": [pickle.dumps(None)],
            "started_at": 0.0,
        }
        end.send(BatchReport(**{**right, **_ANSWERS[breach]}))
    elif breach in _MESSAGES:
        end.send(_MESSAGES[breach])
    elif breach in _RAW_MESSAGES:
        end.send_raw(_RAW_MESSAGES[breach])
    elif breach == "no tuple":
        end.writer.write(pickle.dumps(5))
    elif breach == "no pickle":
        end.writer.write(b"not a pickle")
    else:
        assert breach == "no frame"
        os.write(end.writer.descriptor, b"print() went to the wrong descriptor\n")
