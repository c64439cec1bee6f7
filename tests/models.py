"""Models for the tests, at the top level of a module so that spawned workers can import them."""

from __future__ import annotations

import ctypes
import dataclasses
import multiprocessing
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

from service_streamer import ManagedModel
from service_streamer.testing import Gate


def echo(batch: list[Any]) -> list[Any]:
    return list(batch)


def double(batch: list[Any]) -> list[Any]:
    return [2 * item for item in batch]


def double_positive(batch: list[int]) -> list[int]:
    """Refuses a batch for any item below 0."""
    if min(batch) < 0:
        raise ValueError(f"{min(batch)} is below 0")
    return [2 * item for item in batch]


def batch_sizes(batch: list[Any]) -> list[int]:
    """Tells each item how many it was computed with."""
    return [len(batch)] * len(batch)


def environment(batch: list[str]) -> list[str | None]:
    return [os.environ.get(name) for name in batch]


def process_ids(batch: list[Any]) -> list[int]:
    return [os.getpid()] * len(batch)


class OddError(Exception):
    """Pickles, but cannot be unpickled: its constructor wants other arguments than it keeps."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(first + second)


@dataclasses.dataclass(frozen=True)
class FrozenError(Exception):
    code: int


class WordedError(Exception):
    """Words its text by itself, and would do so again each time that it is made anew."""

    def __init__(self, code: object) -> None:
        super().__init__(f"error {code}")


class DetailedError(Exception):
    def __init__(self, text: str, code: int) -> None:
        super().__init__(text, code)
        self.code = code
        self.detail = {"why": text}


class TellsWhere(Exception):
    """Tells in which thread it was unpickled."""

    where = ""

    def __reduce__(self) -> Any:
        return _tells_where, ()


def _tells_where() -> TellsWhere:
    error = TellsWhere()
    error.where = threading.current_thread().name
    return error


def misbehave(batch: list[Any]) -> Any:
    """Does what its first item says."""
    match batch[0]:
        case "raise":
            raise DetailedError("bad luck", 7)
        case "raise frozen":
            raise FrozenError(3)
        case "raise worded":
            raise WordedError(5)
        case "raise stop":
            raise StopIteration
        case "raise timeout":
            raise TimeoutError("the model's own")
        case "raise odd":
            raise OddError("odd", "ly")
        case "raise unpicklable":
            error = ValueError("holds a lock")
            error.lock = threading.Lock()  # type: ignore[attr-defined]
            raise error
        case "raise and tell where":
            raise TellsWhere
        case "result that tells where":
            return [TellsWhere() for _ in batch]
        case "exit":
            sys.exit(5)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "segfault":
            ctypes.string_at(0)
        case "short":
            return batch[:-1]
        case "long":
            return [*batch, None]
        case "none":
            return None
        case "generator":
            return (item for item in batch)
        case "dict":
            return dict.fromkeys(range(len(batch)))
        case "text":
            return "x" * len(batch)
        case "tuple":
            return tuple(batch)
        case "unpicklable result":
            return [threading.Lock() if item == "unpicklable result" else item for item in batch]
    return batch


class NothingToLoad(ManagedModel):
    """The base of models whose ``init_model`` has nothing to do."""

    def init_model(self) -> None:
        """There is nothing to load."""


class Echoing(ManagedModel):
    """The base of models that return their items; itself it has no ``init_model``."""

    def predict(self, batch: list[Any]) -> list[Any]:
        return batch


class Doubler:
    """A model object, of which a bound method is passed."""

    def __init__(self, factor: int) -> None:
        self.factor = factor

    def predict(self, batch: list[int]) -> list[int]:
        return [self.factor * item for item in batch]


class Multiplier(ManagedModel):
    """Multiplies by what it is initialised with, and tells where it runs."""

    def init_model(self, factor: int = 2, *, offset: int = 0) -> None:
        self.factor = factor
        self.offset = offset

    def predict(self, batch: list[Any]) -> list[Any]:
        return [
            self.gpu_id if item == "gpu" else item * self.factor + self.offset for item in batch
        ]


class Describes(Echoing):
    """Says of itself what it is given; raises it if it is an exception."""

    def init_model(self, said: Any) -> None:
        self.said = said

    def describe(self) -> Any:
        if isinstance(self.said, BaseException):
            raise self.said
        return self.said


class WhereAndWho(NothingToLoad):
    """Tells its device and its process."""

    def predict(self, batch: list[Any]) -> list[Any]:
        return [(self.gpu_id, os.getpid()) for _ in batch]


class NeedsFile(ManagedModel):
    """Cannot be loaded without the file; tells its process."""

    def init_model(self, path: Path) -> None:
        path.read_bytes()

    def predict(self, batch: list[Any]) -> list[int]:
        return process_ids(batch)


class WithThread(ManagedModel):
    """Has a thread that never ends, as prefetchers do."""

    def init_model(self) -> None:
        threading.Thread(target=threading.Event().wait).start()

    def predict(self, batch: list[Any]) -> list[Any]:
        if "exit" in batch:
            sys.exit(7)
        if "interrupt in silence" in batch:
            sys.stderr.close()
            raise KeyboardInterrupt
        return batch


class BrokenInit(Echoing):
    def init_model(self, how: str = "raise") -> None:
        if how == "exit":
            sys.exit(9)
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise FileNotFoundError("no weights at /nowhere")


class Unending(ManagedModel):
    """Is at the item 0 until nobody waits for it any more."""

    def init_model(self, gate: Gate) -> None:
        self.gate = gate

    def raise_if_unwanted(self) -> None:
        """Workers replace it."""

    def predict(self, batch: list[int]) -> list[int]:
        if 0 in batch:
            self.gate.go_through()
        while 0 in batch:
            self.raise_if_unwanted()
            time.sleep(0.001)
        return batch


class Gated(ManagedModel):
    """Waits at a gate in each batch, and tells each item the size of its batch."""

    def init_model(self, gate: Gate) -> None:
        self.gate = gate

    def predict(self, batch: list[Any]) -> list[Any]:
        self.gate.go_through()
        return [len(batch)] * len(batch)


def gated(gate: Gate) -> Any:
    """The same for a thread: a function."""
    model = Gated()
    model.init_model(gate)
    return model.predict


def children() -> list[str]:
    """The ids of this process's children, the resource tracker's aside."""
    return [str(process.pid) for process in multiprocessing.active_children()]


def await_worker_threads() -> None:
    """Return when they have ended: closing does not wait for those that were lost, nor long for
    those that still load.
    """
    for thread in threading.enumerate():
        if thread.name.startswith("service_streamer worker"):
            thread.join()


class GatedInit(Echoing):
    def init_model(self, gate: Gate) -> None:
        gate.go_through()


class Remembering(ManagedModel):
    """Counts its batches in a file, one line per batch."""

    def init_model(self, path: Path) -> None:
        self.path = path

    def predict(self, batch: list[Any]) -> list[Any]:
        with self.path.open("a") as file:
            file.write(f"{batch}\n")
        return batch


class Diary(ManagedModel):
    """Waits at a gate in each batch, and then notes it in a file, one line per item."""

    def init_model(self, gate: Gate, path: Path) -> None:
        self.gate = gate
        self.path = path

    def predict(self, batch: list[Any]) -> list[Any]:
        self.gate.go_through()
        with self.path.open("a") as file:
            file.writelines(f"{item}\n" for item in batch)
        return batch


class GatedOnFirst(ManagedModel):
    """On the first device it waits at the gate before its first batch; tells its device."""

    def init_model(self, gate: Gate) -> None:
        self.gate: Gate | None = gate

    def predict(self, batch: list[Any]) -> list[Any]:
        if self.gpu_id == 0 and self.gate is not None:
            self.gate.go_through()
            self.gate = None
        return [self.gpu_id] * len(batch)


class DeviceFullError(RuntimeError):
    pass


class Fitting(ManagedModel):
    """Computes at most ten items at once, and "huge" never; tells each item its run and its size.

    Attributes:
        runs: how many there were so far, with those that ran out of memory.
    """

    out_of_memory_errors = (DeviceFullError,)

    def init_model(self) -> None:
        self.runs = 0

    def predict(self, batch: list[Any]) -> list[Any]:
        self.runs += 1
        if len(batch) > 10 or "huge" in batch:
            raise DeviceFullError(f"no room for {len(batch)}")
        return [(item, self.runs, len(batch)) for item in batch]


class NamesNoErrors(NothingToLoad, Echoing):
    out_of_memory_errors = ["MemoryError"]  # type: ignore[assignment]  # noqa: RUF012


def shapes(batch: list[Any]) -> list[Any]:
    return [(each.shape, float(each.sum()), 2 * each) for each in batch]


def loud(batch: list[int]) -> list[int]:
    """Prints so many bytes, which is more than a pipe holds."""
    for size in batch:
        print("worker" + "." * size, flush=True)  # noqa: T201 - what is tested
    return batch
