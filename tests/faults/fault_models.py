"""Models, items and results of which each goes wrong in its own way, importable by workers."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import multiprocessing
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any, ClassVar

from sticky_models import Gpu, make_error

from service_streamer import (
    ManagedModel,
    StreamerBroken,
    StreamerClosed,
    StreamerError,
    WorkerStartError,
)
from service_streamer.testing import Gate

#: The columns of the matrix.
FAULTS = ("raise", "raise unpicklable", "exit", "kill", "segfault", "hang", "GPU error")


class Mishap(Exception):
    """What the fault "raise" raises."""


class LockedMishap(Exception):
    """Cannot be pickled."""

    def __init__(self) -> None:
        super().__init__("holds a lock")
        self.lock = threading.Lock()


class Hang:
    """What hangs in this process within the block, and goes on at its end. Workers hang for good.

    Attributes:
        has_begun: set when something hangs.
    """

    _of_process: ClassVar[dict[int, Hang]] = {}  # a forked worker has a copy, and another id

    def __init__(self) -> None:
        self.has_begun = threading.Event()
        self.may_go_on = threading.Event()

    def __enter__(self) -> Hang:
        self._of_process[os.getpid()] = self
        return self

    def __exit__(self, *_: object) -> None:
        del self._of_process[os.getpid()]
        self.may_go_on.set()

    @classmethod
    def here(cls) -> None:
        hang = cls._of_process.get(os.getpid()) or Hang()
        hang.has_begun.set()
        hang.may_go_on.wait()


def commit(fault: str) -> str:
    """Do what is named by the fault; returns only from a ``Hang`` that is over."""
    match fault:
        case "raise":
            raise Mishap("as asked")
        case "raise unpicklable":
            raise LockedMishap
        case "exit":
            sys.exit(5)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "segfault":
            ctypes.string_at(0)
        case "hang":
            Hang.here()
        case "GPU error":
            if multiprocessing.parent_process() is not None:  # a worker: its GPU is gone for good
                gpu = Gpu()
                gpu.error = make_error("assert")
                sys.modules["torch"] = gpu.module()
            raise make_error("assert")
    return "let go"


class FailsToPickle:
    """Goes wrong where it is pickled; what arrives is a string."""

    def __init__(self, fault: str) -> None:
        self.fault = fault

    def __reduce__(self) -> tuple[Any, ...]:
        return str, (commit(self.fault),)


class FailsToUnpickle:
    """Goes wrong where it is unpickled; what arrives is a string."""

    def __init__(self, fault: str) -> None:
        self.fault = fault

    def __reduce__(self) -> tuple[Any, ...]:
        return commit, (self.fault,)


class Faulty(ManagedModel):
    """Doubles numbers; an item ``(stage, fault)`` makes it go wrong there.

    It loads only when the gate lets it: what is submitted before shares a batch.
    """

    def init_model(self, gate: Gate) -> None:
        gate.go_through()

    def predict(self, batch: list[Any]) -> list[Any]:
        return [self._result(item) for item in batch]

    def _result(self, item: Any) -> Any:
        match item:
            case "predict", fault:
                return commit(fault)
            case "pickle a result", fault:
                return FailsToPickle(fault)
            case "unpickle a result", fault:
                return FailsToUnpickle(fault)
        return 2 * item


class FaultyOnDevice1(ManagedModel):
    """Goes wrong on the device 1 while it loads; tells its device."""

    def init_model(self, fault: str) -> None:
        if self.gpu_id == 1:
            commit(fault)

    def predict(self, batch: list[Any]) -> list[Any]:
        return [self.gpu_id] * len(batch)


def double_slowly(batch: list[int]) -> list[int]:
    """Doubles, in the time that a model takes."""
    time.sleep(0.01)
    return [2 * item for item in batch]


class AwayOnce(ManagedModel):
    """Its first process dies of its first batch, and the next one cannot load it."""

    def init_model(self, path: Path) -> None:
        self.path = path
        path.touch()
        if path.read_bytes() == b"died":
            path.write_bytes(b"away")
            raise FileNotFoundError("no weights for now")

    def predict(self, batch: list[Any]) -> list[Any]:
        if not self.path.read_bytes():
            self.path.write_bytes(b"died")
            os._exit(3)
        return batch


def fail_as_a_streamer_of_its_own(batch: list[Any]) -> list[Any]:
    """As a model that calls another model through a streamer, whose workers are gone."""
    errors: list[type[StreamerError]] = [StreamerBroken, StreamerClosed, WorkerStartError]
    raise errors[batch[0]]("the other model is away")


class Indiscreet(ManagedModel):
    """Doubles numbers; raises on strings, and quotes all that the batch has."""

    def init_model(self, gate: Gate | None = None) -> None:
        if gate is not None:
            gate.go_through()

    def predict(self, batch: list[Any]) -> list[int]:
        secrets = [item for item in batch if isinstance(item, str)]
        if secrets:
            raise ValueError(f"no numbers: {secrets}")
        return [2 * item for item in batch]


class OutOfMemory(Exception):
    pass


class Small(ManagedModel):
    """Computes one item at a time, and says of which it had more."""

    out_of_memory_errors = (OutOfMemory,)

    def init_model(self, gate: Gate) -> None:
        gate.go_through()

    def predict(self, batch: list[Any]) -> list[Any]:
        if len(batch) > 1:
            raise OutOfMemory(f"no room for {batch}")
        return batch


class GatedLater(ManagedModel):
    """Cannot be loaded without the file, and waits at the gate with it."""

    def init_model(self, path: Path, gate: Gate) -> None:
        path.read_bytes()
        gate.go_through()

    def predict(self, batch: list[Any]) -> list[Any]:
        return batch


class Exclusive(ManagedModel):
    """Needs memory that only so many processes can have; tells its version."""

    def init_model(self, folder: Path, room: int) -> None:
        self.version = (folder / "version").read_text()
        for place in range(room):
            # Kept as long as this process lives, and of one process alone, even of two that start.
            self.memory = (folder / f"memory{place}").open("w")
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(self.memory, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            self.memory.close()
        raise RuntimeError("CUDA error: out of memory")

    def predict(self, batch: list[Any]) -> list[str]:
        return [self.version] * len(batch)


def culprit(stage: str, fault: str) -> Any:
    """An item for ``Faulty`` that goes wrong at this stage."""
    match stage:
        case "pickle an item":
            return FailsToPickle(fault)
        case "unpickle an item":
            return FailsToUnpickle(fault)
    return stage, fault
