"""A model in a web process: its streamer, the service that shows it, and how both end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Any, NamedTuple

from ..base_streamer import BaseStreamer
from ..errors import StreamerBroken
from ..streamer import PoolStreamer, ScaledStreamer
from .http.admission import ServiceOptions
from .http.dashboard import advice_for
from .http.pool_view import PoolFigures
from .http.service import Service

logger = logging.getLogger(__name__)


class ServiceFailed(StreamerBroken):
    """The streamer failed after its model was loaded: a bug."""


class OpenedModel(NamedTuple):
    """A model whose workers are being started."""

    streamer: BaseStreamer
    options: ServiceOptions


class HostedModel:
    """Belongs to one event loop.

    Args:
        opened: its streamer is closed by ``close``.
        on_ready: called once when the model is known.
        on_failure: called with the reason when it never answers again.
    """

    def __init__(
        self,
        opened: OpenedModel,
        on_ready: Callable[[], None],
        on_failure: Callable[[Exception], None],
    ) -> None:
        self.streamer = opened.streamer
        self.service = Service(
            opened.streamer, opened.options, on_ready=on_ready, on_failure=on_failure
        )
        self._on_failure = on_failure
        # Not those of a ThreadedStreamer, which are threads of this process.
        self.has_workers = (
            isinstance(opened.streamer, ScaledStreamer) and opened.streamer.pool_client is None
        )

    def start(self) -> None:
        streamer = self.streamer
        if isinstance(streamer, PoolStreamer) and streamer.pool_client is None:
            loop = asyncio.get_running_loop()
            streamer.engine.when_ended(lambda: self._engine_ended(loop))
            # Worker hosts trace their own batches; those of a shared pool are not traced.
            if self.service.options.opentelemetry:
                from ..tracing import trace_batches

                trace_batches(streamer)
        self.service.start()

    def _engine_ended(self, loop: asyncio.AbstractEventLoop) -> None:
        """In the engine's thread: it was closed by us, or failed."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(self._end_without_engine)

    def _end_without_engine(self) -> None:
        service = self.service
        if not (service.is_draining or service.is_retired):
            error = ServiceFailed("its streamer failed: see the log")
            service.fail(error)
            self._on_failure(error)

    def restart_workers(self) -> None:
        """As ``Streamer.restart_workers``, which blocks."""
        streamer: Any = self.streamer
        streamer.restart_workers()

    async def report(self) -> list[str]:
        """How it stands, in a few lines."""
        streamer: Any = self.streamer
        state, detail = await self.service.look()
        failure = self.service.failure
        lines = [f"{state}: {detail if failure is None else failure}"]
        if self.service.pool is None:
            lines.append(streamer.stats().gist)
        elif self.has_workers:  # those of a shared pool are reported by the parent
            figures = PoolFigures.of(streamer)
            lines += [figures.stats.gist, *advice_for(figures.findings)]
        return lines

    def close(self) -> None:
        """End the streamer and its workers. Blocks."""
        self.streamer.close(drain=False)
