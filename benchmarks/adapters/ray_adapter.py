"""Ray Serve, called through a handle in the process that has started it: without HTTP.

``Ray`` has a cluster of its own; ``Handle`` is for who has one already.
"""
# mypy: ignore-errors

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import ray
from ray import serve

from adapters.adapter import Outcome
from adapters.workloads import BATCH_SIZE, WORKLOADS, is_answer, items

__all__ = ["Handle", "Ray", "cluster"]

_APPLICATION = "yardstick"
#: So many calls may be in a replica: as good as no bound.
_MOST_ONGOING = 10_000


class Response:
    """A call that was made."""

    __slots__ = ("_response",)

    def __init__(self, response: Any) -> None:
        self._response = response

    def result(self, timeout: float) -> Any:
        return self._response.result(timeout_s=timeout)


class Handle:
    """A deployment on the cluster that this process has, one at a time.

    Settings: ``batch_wait_timeout_s`` of ``serve.batch``; ``max_queued_requests`` and
    ``max_ongoing_requests`` of the deployment; ``in_thread``, whether a replica computes in a
    thread, and can take calls meanwhile."""

    drivers = frozenset({"alone", "threads", "until-empty", "asyncio", "futures", "open-loop"})

    def __init__(self, workload: str, workers: int, settings: Mapping[str, Any]) -> None:
        self._name = workload
        self._handle = serve.run(
            _deployment(workload, workers, **settings),
            name=_APPLICATION,
            route_prefix=None,
            logging_config={"enable_access_log": False, "log_level": "ERROR"},
        )
        for _ in range(5):
            self.predict(items(workload, 1)[0])
        self._loop: asyncio.AbstractEventLoop | None = None

    def predict(self, item: Any) -> Any:
        return self._handle.remote(item).result()

    def submit(self, item: Any) -> Any:
        return Response(self._handle.remote(item))

    async def apredict(self, item: Any) -> Any:
        return await self._handle.remote(item)

    def start(self, item: Any, deadline: float | None, done: Callable[[Outcome], object]) -> None:
        # A handle's answers have no callbacks; awaiting is the cheapest way to wait for many.
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=self._loop.run_forever, daemon=True).start()
        asyncio.run_coroutine_threadsafe(self._call(item, deadline, done), self._loop)

    async def _call(
        self, item: Any, deadline: float | None, done: Callable[[Outcome], object]
    ) -> None:
        outcome: Outcome = "failed"
        try:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            async with asyncio.timeout(left):
                answer = await self._handle.remote(item)
            if is_answer(self._name, item, answer):
                outcome = "served"
        except TimeoutError:
            outcome = "expired"  # and Ray is told so: the call is cancelled
        except ray.serve.exceptions.BackPressureError:
            outcome = "rejected"
        except Exception:
            outcome = "failed"
        finally:
            done(outcome)

    def close(self) -> None:
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
        serve.delete(_APPLICATION)


class Ray(Handle):
    """The same with a cluster of its own."""

    def __init__(self, workload: str, workers: int, settings: Mapping[str, Any]) -> None:
        self._cluster = contextlib.ExitStack()
        self._cluster.enter_context(cluster(os.cpu_count()))
        super().__init__(workload, workers, settings)

    def close(self) -> None:
        super().close()
        self._cluster.close()


@contextlib.contextmanager
def cluster(cores: int) -> Iterator[None]:
    """One on this machine, with Ray Serve; nothing of it is left: its processes are in groups of
    their own, and do not end with that of this process."""
    ray.init(
        num_cpus=cores,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        configure_logging=False,
        _temp_dir=tempfile.gettempdir(),
    )
    try:
        serve.start(
            proxy_location="Disabled",
            logging_config={"enable_access_log": False, "log_level": "ERROR"},
        )
        yield
    finally:
        serve.shutdown()
        ray.shutdown()


def _deployment(
    workload: str,
    workers: int,
    batch_wait_timeout_s: float = 0.0,
    max_queued_requests: int = -1,
    max_ongoing_requests: int = _MOST_ONGOING,
    in_thread: bool = True,
) -> Any:
    @serve.deployment(
        num_replicas=workers,
        max_ongoing_requests=max_ongoing_requests,
        max_queued_requests=max_queued_requests,
        ray_actor_options={"num_cpus": 0},
    )
    class Model:
        def __init__(self) -> None:
            self._workload = WORKLOADS[workload]()
            self._workload.load()

        @serve.batch(max_batch_size=BATCH_SIZE, batch_wait_timeout_s=batch_wait_timeout_s)
        async def compute(self, batch: list[Any]) -> list[Any]:
            if in_thread:
                return await asyncio.to_thread(self._workload.predict, batch)
            return self._workload.predict(batch)

        async def __call__(self, item: Any) -> Any:
            return await self.compute(item)

    return Model.bind()
