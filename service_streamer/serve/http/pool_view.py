"""What a web process knows of the workers that compute for it: of its own, or of a shared pool.

Those of its own are looked at directly. A shared pool is another process, which must be asked: in a
thread, so that the event loop goes on if the pool takes its time.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from ...errors import StreamerError
from ...observe.explain import Finding
from ...observe.metrics import BatchMetrics, StreamerStats, WorkerStats
from ...streamer import PoolStreamer

if TYPE_CHECKING:  # most services share no pool
    from ...pool.pool_client import PoolClient

#: Seconds that a request for figures waits for the pool.
_PATIENCE = 2.0

#: Seconds that an answer of the pool is used again. Each question takes time of the process that
#: carries the predictions, and /health/ready needs no key.
_FRESH = 0.1

T = TypeVar("T")


class PoolFigures(NamedTuple):
    """How the workers stand."""

    stats: StreamerStats
    metrics: BatchMetrics
    workers: list[WorkerStats]
    findings: list[Finding]

    @classmethod
    def of(cls, streamer: PoolStreamer) -> PoolFigures:
        """Asks the streamer, which blocks if its pool is another process."""
        return cls(streamer.stats(), streamer.metrics, streamer.workers(), streamer.findings())


class PoolView:
    """The workers of one model. Belongs to one event loop.

    Attributes:
        is_shared: whether other processes use the same workers.
    """

    def __init__(self, streamer: PoolStreamer) -> None:
        self._streamer = streamer
        client = streamer.pool_client
        self.is_shared = client is not None
        if client is not None:
            self._stats: StreamerStats | None = None
            self._figures: PoolFigures | None = None
            self._for_stats = _Question(client, streamer.stats)
            self._for_figures = _Question(client, lambda: PoolFigures.of(streamer))

    @property
    def has_steps(self) -> bool | None:
        """Whether the model is one of steps; None if only its description says so."""
        return None if self.is_shared else self._streamer.engine.batcher.has_steps

    def stats(self) -> StreamerStats | None:
        """As they were at the last ``look`` or later; None if the pool did not answer."""
        return self._stats if self.is_shared else self._streamer.stats()

    def figures(self) -> PoolFigures | None:
        """As they were at the last ``renew`` or later; None if the pool did not answer."""
        return self._figures if self.is_shared else PoolFigures.of(self._streamer)

    async def look(self) -> None:
        """Have the stats of now."""
        if self.is_shared:
            self._stats = await self._for_stats.answer()

    async def renew(self) -> None:
        """Have all figures of now."""
        if self.is_shared:
            figures = self._figures = await self._for_figures.answer()
            self._stats = None if figures is None else figures.stats

    async def description(self) -> Mapping[str, Any] | None:
        """As ``Backend.model_description``."""
        describe = self._streamer.backend.model_description
        return await _in_thread(describe) if self.is_shared else describe()


class _Question(Generic[T]):
    """Asks the pool, once for all who want to know at about the same time.

    Args:
        client: of the pool.
        ask: asks it, and blocks.
    """

    def __init__(self, client: PoolClient, ask: Callable[[], T]) -> None:
        self._client = client
        self._ask = ask
        self._asking: asyncio.Future[T] | None = None
        self._fresh_until = 0.0

    async def answer(self) -> T | None:
        """None if there is no pool now, or it does not answer in time."""
        if self._client.pool_pid is None:
            return None  # a probe must not wait until there is one again
        now = asyncio.get_running_loop().time()
        asking = self._asking
        if asking is None or (asking.done() and (asking.exception() or now >= self._fresh_until)):
            asking = self._asking = asyncio.ensure_future(_in_thread(self._ask))
            self._fresh_until = now + _FRESH
        try:
            return await asyncio.wait_for(asyncio.shield(asking), _PATIENCE)
        except (TimeoutError, StreamerError):
            return None


async def _in_thread(ask: Callable[[], T]) -> T:
    """What a function returns or raises that may block; the end of the loop does not wait for it.

    Threads of an executor are joined at the end of the loop.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def answer(value: T | None, error: BaseException | None) -> None:
        if future.done():  # its caller was cancelled
            return
        if error is None:
            future.set_result(value)  # type: ignore[arg-type]
        else:
            future.set_exception(error)

    def run() -> None:
        value, error = None, None
        try:
            value = ask()
        except BaseException as raised:
            error = raised
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(answer, value, error)

    threading.Thread(target=run, name="question", daemon=True).start()
    return await future
