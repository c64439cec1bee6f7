"""Whichever service_streamer this interpreter has: this project, or the original 0.1.2."""

from __future__ import annotations

import contextlib
import functools
import json
import multiprocessing
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import service_streamer
from adapters.adapter import Adapter, Outcome
from adapters.managed import MODELS, STAGED, MiniLMWithoutLength
from adapters.workloads import BATCH_SIZE, STAGES, WORKLOADS, is_answer, items

__all__ = ["Original", "Ours", "service_streamer_adapter"]

#: The original's modules are not those of this project.
_IS_ORIGINAL = not hasattr(service_streamer, "Overloaded")
_START_TIMEOUT = 60.0


class Single:
    """The future of a call of one item."""

    __slots__ = ("_future",)

    def __init__(self, future: Any) -> None:
        self._future = future

    def result(self, timeout: float) -> Any:
        return self._future.result(timeout)[0]


class Ours:
    """Settings: ``mode`` ("threaded", "streamer", "redis" or "ray"); ``broker``, for redis;
    ``has_length``, whether items have the lengths that the workload knows; ``has_stages``, whether
    a model with stages has them; ``most_workers``, where the load decides on their number. Others
    are the streamer's (of redis: the worker host's)."""

    drivers = frozenset(
        {"alone", "threads", "beside-hand", "until-empty", "asyncio", "futures", "open-loop"}
    )

    def __init__(self, workload: str, workers: int, settings: Mapping[str, Any]) -> None:
        self._name = workload
        self.streamer, self._hosts = _started(workload, workers, **settings)
        # Each worker has had a batch: the first takes longer with some models.
        self.streamer.predict(items(workload, BATCH_SIZE * workers))

    def predict(self, item: Any) -> Any:
        return self.streamer.predict([item])[0]

    def submit(self, item: Any) -> Single:
        return Single(self.streamer.submit([item]))

    async def apredict(self, item: Any) -> Any:
        return (await self.streamer.apredict([item]))[0]

    def start(self, item: Any, deadline: float | None, done: Callable[[Outcome], object]) -> None:
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        try:
            future = self.streamer.submit([item], left)
        except service_streamer.Overloaded:
            done("rejected")
        except service_streamer.PredictTimeout:
            done("expired")
        except Exception:
            done("failed")
        else:
            future.add_done_callback(functools.partial(self._done, item, done))

    def _done(self, item: Any, done: Callable[[Outcome], object], future: Any) -> None:
        match future.exception():
            case None:
                is_right = is_answer(self._name, item, future.result()[0])
                done("served" if is_right else "failed")
            case service_streamer.PredictTimeout():
                done("expired")
            case service_streamer.Overloaded():
                done("rejected")
            case _:
                done("failed")

    def close(self) -> None:
        self.streamer.close(drain=False)
        if self._hosts is not None:
            self._hosts.close()


class Original:
    """The settings of ``Ours``. Its futures have no callbacks, and no asyncio."""

    drivers = frozenset({"alone", "threads", "beside-hand", "until-empty", "futures", "open-loop"})

    def __init__(self, workload: str, workers: int, settings: Mapping[str, Any]) -> None:
        self._name = workload
        self._streamer, self._hosts = _started(workload, workers, **settings)
        self._streamer.predict(items(workload, BATCH_SIZE * workers))
        self._calls: queue.SimpleQueue[tuple[Any, float | None, Any, Any]] = queue.SimpleQueue()
        self._reader: threading.Thread | None = None

    def predict(self, item: Any) -> Any:
        return self._streamer.predict([item])[0]

    def submit(self, item: Any) -> Single:
        return Single(self._streamer.submit([item]))

    async def apredict(self, item: Any) -> Any:
        raise NotImplementedError("the original has no asyncio")

    def start(self, item: Any, deadline: float | None, done: Callable[[Outcome], object]) -> None:
        if self._reader is None:
            self._reader = threading.Thread(target=self._read, daemon=True)
            self._reader.start()
        try:
            self._calls.put((item, deadline, done, self._streamer.submit([item])))
        except Exception:
            done("failed")

    def _read(self) -> None:
        """Wait for one call after the other, since they end in their order.

        Waiting until the call's own deadline is the only use that the original has for one.
        """
        while True:
            item, deadline, done, future = self._calls.get()
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            try:
                (answer,) = future.result(left)
            except TimeoutError:
                done("expired")
            except Exception:
                done("failed")
            else:
                done("served" if is_answer(self._name, item, answer) else "failed")

    def close(self) -> None:
        for worker in multiprocessing.active_children():  # it would first finish all that waits
            worker.kill()
        if self._hosts is not None:
            self._hosts.close()


def service_streamer_adapter(workload: str, workers: int, settings: Mapping[str, Any]) -> Adapter:
    """Of this interpreter's package."""
    return (Original if _IS_ORIGINAL else Ours)(workload, workers, settings)


class Hosts:
    """A program of its own with worker processes, as on another host. Ready when it returns."""

    def __init__(self, workload: str, workers: int, **spec: Any) -> None:
        # Each worker leaves word of itself when it has loaded its model.
        self._folder = tempfile.TemporaryDirectory()
        self._pids = Path(self._folder.name)
        spec = {"workload": workload, "workers": workers, **spec}
        # Without our output, which the original's worker processes, that outlive it, would keep.
        self._process = subprocess.Popen(
            [sys.executable, "-m", "adapters.redis_hosts", json.dumps(spec)],
            stdout=subprocess.DEVNULL,
            env={**os.environ, "YARDSTICK_PIDS": self._folder.name},
        )
        ends = time.monotonic() + _START_TIMEOUT
        while len(list(self._pids.iterdir())) < workers:
            if self._process.poll() is not None or time.monotonic() > ends:
                self.close()
                raise RuntimeError(f"worker processes over Redis did not start: {spec}")
            time.sleep(0.02)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for file in self._pids.iterdir():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(file.name), signal.SIGKILL)
        self._folder.cleanup()


def _started(
    workload: str,
    workers: int,
    mode: str,
    broker: str = "",
    has_length: bool = True,
    has_stages: bool = True,
    batch_size: int = BATCH_SIZE,
    most_workers: int | None = None,
    **options: Any,
) -> tuple[Any, Hosts | None]:
    """A streamer with its workers, which have all loaded their model."""
    staged = STAGED.get(workload) if has_stages and not _IS_ORIGINAL else None
    if mode == "threaded":
        if workers != 1:
            raise ValueError(f"a ThreadedStreamer has one worker, not {workers}")
        if staged is not None and workload in STAGES:  # a real one is a function, as in README.md
            streamer: Any = service_streamer.ThreadedStreamer(staged, batch_size, **options)
            streamer.wait_ready()
            return streamer, None
        model = WORKLOADS[workload]()
        model.load()
        if has_length and not _IS_ORIGINAL and hasattr(model, "length"):
            options["length"] = model.length
        return service_streamer.ThreadedStreamer(model.predict, batch_size, **options), None
    if mode == "redis":
        prefix = uuid.uuid4().hex
        # First, since what is published before it has subscribed is lost to the original.
        streamer = service_streamer.RedisStreamer(broker, prefix)
        hosts = Hosts(workload, workers, broker=broker, prefix=prefix, options=options)
        return streamer, hosts
    managed = staged or MODELS[workload]
    if workload == "minilm" and not has_length:
        managed = MiniLMWithoutLength
    kind: Any = service_streamer.Streamer
    if mode == "ray":  # a worker asks for nothing: the models sleep
        kind = functools.partial(service_streamer.RayStreamer, num_gpus=0, num_cpus=0)
    number = workers if most_workers is None else (workers, most_workers)
    streamer = kind(managed, batch_size, worker_num=number, **options)
    streamer._wait_for_worker_ready()
    return streamer, None
