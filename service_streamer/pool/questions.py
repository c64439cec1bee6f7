"""What clients and visitors ask a pool beside their calls: each in a thread of its own."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..engine.engine import Engine
from ..observe.metrics import BatchMetrics, StreamerStats, WorkerStats
from ..observe.recent import Summary
from ..options.checks import Workers
from ..options.table import StreamerOptions
from ..supervision.supervisor import Overlap
from .wishes import Wishes

if TYPE_CHECKING:
    from .pool_server import PoolServer

__all__ = ["Questions"]


class Questions:
    """Answers with what the engine says. Any thread.

    Args:
        options: of the engine.
        wishes: of who has started the pool.
    """

    def __init__(self, name: str, engine: Engine, options: StreamerOptions, wishes: Wishes) -> None:
        self._name = name
        self._engine = engine
        self._options = options
        self._wishes = wishes
        self._started_at = time.monotonic()

    def answer(self, server: PoolServer, method: str, arguments: tuple[Any, ...]) -> Any:
        """Whatever the method returns.

        Raises:
            Exception: whatever it raises.
        """
        if method in ("stop", "replace", "status"):
            return getattr(self, method)(server, *arguments)
        if method in _METHODS:
            return getattr(self, method)(*arguments)
        raise ValueError(f"the pool has no answer to {method!r:.40}")

    # -- of clients

    def stats(self) -> StreamerStats:
        return self._engine.stats()

    def metrics(self) -> BatchMetrics:
        return self._engine.metrics()

    def workers(self) -> list[WorkerStats]:
        return self._engine.workers()

    def summary(self) -> Summary:
        return self._engine.summary(self._options, is_local=False)

    def model_description(self) -> Mapping[str, Any] | None:
        return self._engine.model_description()

    def wait_ready(self, timeout: float | None) -> None:
        self._engine.wait_ready(timeout)

    def restart_workers(self, timeout: float | None, overlap: Overlap) -> None:
        self._engine.restart_workers(timeout, overlap)

    def scale(self, worker_num: Workers) -> None:
        self._engine.scale(worker_num)

    def try_start_once(self) -> None:
        self._engine.try_start_once()

    # -- of visitors

    def status(self, server: PoolServer) -> dict[str, Any]:
        return {
            "name": self._name,
            "pid": os.getpid(),
            "state": "retired" if server.has_retired else self._engine.state.value,
            "seconds": time.monotonic() - self._started_at,
            "clients": server.clients(),
            "stats": self._engine.stats(),
            "workers": self._engine.workers(),
            "wishes": dict(self._wishes),
        }

    def stop(self, server: PoolServer, drain: bool) -> int:
        server.end(drain=drain)
        return os.getpid()

    def replace(self, server: PoolServer) -> int:
        server.retire()
        return os.getpid()


_METHODS = frozenset(
    {
        "stats", "metrics", "workers", "summary", "model_description", "wait_ready",
        "restart_workers", "scale", "try_start_once",
    }
)  # fmt: skip
