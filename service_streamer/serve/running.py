"""Run a service in this process until a signal ends it.

     signal ──▶ not ready any more: new requests get 503
            ──▶ open requests are answered, within the timeout of a request
            ──▶ the server closes its connections, the streamer ends its workers

A second signal, at least SAME_SIGNAL later, ends the service immediately. For SIGHUP and SIGUSR1
see ``engine/operator_signals.py``.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import logging
import signal
import socket
import time
from collections.abc import Callable
from typing import Any

import uvloop

from ..engine.operator_signals import (
    EndSignals,
    RollingRestart,
    Terminal,
    heeded,
    hold_signals,
    log_standing,
)
from ..errors import StreamerBroken
from ..streamer import BaseStreamer
from ..workers.diagnosis import counted
from .http.accepting import Turns
from .http.admission import ServiceOptions
from .http.app import create_app, stopping
from .http.dashboard import advised
from .http.listening import ServerName, make_server
from .http.pool_view import PoolFigures
from .http.prometheus import METRICS, Exposition
from .http.request_figures import REQUESTS, requests_of
from .http.service import Service
from .http.siblings import Siblings

__all__ = ["ServiceFailed", "run_service"]

logger = logging.getLogger(__name__)

#: Thresholds of Python's garbage collector: requests usually have no reference cycles.
_GC_THRESHOLDS = (20_000, 20, 100)


class ServiceFailed(StreamerBroken):
    """The streamer failed after its model was loaded: a bug."""


def run_service(
    streamer: BaseStreamer,
    options: ServiceOptions,
    sock: socket.socket,
    server_name: ServerName = "uvicorn",
    *,
    on_ready: Callable[[Service, float], None] = lambda _service, _seconds: None,
    owner: int | None = None,
    serves_at_once: bool = True,
    siblings: Siblings | None = None,
    turns: Turns | None = None,
) -> Exception | None:
    """Serve until SIGINT or SIGTERM, or until the model cannot be loaded.

    Args:
        streamer: closed at the end.
        sock: a listening socket; closed at the end.
        on_ready: called once when the model is loaded, with the seconds that it took.
        owner: a file descriptor whose end of file ends the service like a signal.
        serves_at_once: whether to answer requests while the model loads. Not for a restarted
            process: its siblings on the same socket are ready.
        siblings: the other web processes, if any.
        turns: the order in which they accept connections.

    Returns:
        Why the model could not be loaded, or the streamer's failure; else None.
    """
    running = _Running(
        streamer, options, sock, server_name, on_ready, owner, serves_at_once, siblings, turns
    )
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(running.run())
    finally:
        hold_signals()  # the loop has reset them to their defaults
        streamer.close(drain=False)


#: Seconds that connections get after the second signal.
_HURRY = 0.5


class _Running:
    def __init__(
        self,
        streamer: BaseStreamer,
        options: ServiceOptions,
        sock: socket.socket,
        server_name: ServerName,
        on_ready: Callable[[Service, float], None],
        owner: int | None,
        serves_at_once: bool,
        siblings: Siblings | None,
        turns: Turns | None,
    ) -> None:
        self._streamer = streamer
        self._options = options
        self._sock = sock
        self._server_name = server_name
        self._on_ready = on_ready
        self._owner = owner
        self._serves_at_once = serves_at_once
        self._siblings = siblings
        self._turns = turns
        self._failure: Exception | None = None
        self._reports: set[asyncio.Task[None]] = set()
        self._end_signals = EndSignals()

    async def run(self) -> Exception | None:
        began = time.monotonic()
        self._ended = asyncio.Event()
        self._hurried = asyncio.Event()
        self._may_serve = asyncio.Event()
        service = Service(
            self._streamer,
            self._options,
            on_ready=lambda: self._ready(service, time.monotonic() - began),
            on_failure=self._failed,
        )
        if self._siblings is not None:
            await self._meet(service, self._siblings)
        app = create_app(service)
        if self._options.opentelemetry:
            from .http.app import traced

            app = traced(app, self._streamer)
        options = self._options
        server = make_server(
            self._server_name, app, self._sock,
            write_timeout=options.write_timeout, max_unread=options.max_unread, turns=self._turns,
        )  # fmt: skip
        loop = asyncio.get_running_loop()
        self._handle_signals(service, loop)
        loop.add_signal_handler(signal.SIGTERM, self._signalled)
        if self._owner is None:
            loop.add_signal_handler(signal.SIGINT, self._signalled)
        else:  # it gets the terminal's signals too
            loop.add_reader(self._owner, self._owner_gone, self._owner)
        if service.pool is not None and not service.pool.is_shared:
            streamer: Any = self._streamer
            streamer.engine.when_ended(functools.partial(self._engine_ended, loop))
        service.start()
        ended = loop.create_task(self._ended.wait())
        if not self._serves_at_once:
            may_serve = loop.create_task(self._may_serve.wait())
            await asyncio.wait((may_serve, ended), return_when=asyncio.FIRST_COMPLETED)
            may_serve.cancel()
        serving = loop.create_task(server.serve())
        await asyncio.wait((serving, ended), return_when=asyncio.FIRST_COMPLETED)
        service.stop()
        if self._turns is not None:
            self._turns.end()
        if not serving.done() and self._failure is None:
            await self._drain(service)
        await service.cut_streams(stopping())
        server.stop(in_a_hurry=self._hurried.is_set())
        ended.cancel()
        hurried = loop.create_task(self._hurried.wait())
        await asyncio.wait((serving, hurried), return_when=asyncio.FIRST_COMPLETED)
        hurried.cancel()
        if serving.done():
            await serving
        else:
            server.stop(in_a_hurry=True)
            await asyncio.wait((serving,), timeout=_HURRY)
            serving.cancel()
        if self._siblings is not None:
            self._siblings.close()
        return self._failure

    async def _meet(self, service: Service, siblings: Siblings) -> None:
        try:
            await siblings.listen(
                {
                    METRICS: Exposition(service).snapshot,
                    REQUESTS: lambda: requests_of(service).encoded(),
                }
            )
        except OSError as error:
            logger.warning("each web process reports only its own figures: %s", error)
        service.siblings = siblings

    async def _drain(self, service: Service) -> None:
        open_ = service.requests.open
        if open_:
            logger.info("stopping; %s still open", counted(open_, "request"))
        drained = asyncio.create_task(service.drained(self._options.timeout + 1))
        hurried = asyncio.create_task(self._hurried.wait())
        await asyncio.wait((drained, hurried), return_when=asyncio.FIRST_COMPLETED)
        drained.cancel()
        hurried.cancel()
        if service.requests.open:
            logger.warning("%s cut off", counted(service.requests.open, "request"))

    def _ready(self, service: Service, seconds: float) -> None:
        # The current objects are permanent. Full collections would scan them again and again, which
        # takes a few percent of a core.
        gc.collect()
        gc.freeze()
        gc.set_threshold(*_GC_THRESHOLDS)
        self._on_ready(service, seconds)
        self._may_serve.set()

    def _handle_signals(self, service: Service, loop: asyncio.AbstractEventLoop) -> None:
        terminal = Terminal()
        streamer: Any = self._streamer
        has_workers = service.pool is not None and not service.pool.is_shared

        def refresh() -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(service.refresh)

        def hang_up() -> None:
            if terminal.is_closed():
                self._signalled()
            elif has_workers:
                restart.begin()
            else:
                logger.info("SIGHUP: the model runs in another process; only the cache is emptied")
                streamer.clear_cache()
                service.refresh()

        async def report() -> None:
            state, detail = await service.look()
            lines = [f"{state}: {detail}"]
            if service.pool is None:
                lines.append(streamer.stats().gist)
            elif has_workers:  # those of a shared pool are reported by the parent
                figures = PoolFigures.of(streamer)
                lines += [figures.stats.gist, *advised(figures.findings)]
            log_standing(lines)

        def begin_report() -> None:
            task = loop.create_task(report())
            self._reports.add(task)  # the loop alone would let it be collected
            task.add_done_callback(self._reported)

        if has_workers:
            restart = RollingRestart(streamer.restart_workers, refresh)
        for number in heeded():
            loop.add_signal_handler(number, hang_up if number == signal.SIGHUP else begin_report)

    def _reported(self, task: asyncio.Task[None]) -> None:
        self._reports.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            log_standing([f"the report failed: {error!r}"])

    def _signalled(self) -> None:
        if not self._ended.is_set():
            self._end_signals.begin()
            self._ended.set()
        elif self._end_signals.is_second():
            self._hurried.set()

    def _owner_gone(self, owner: int) -> None:
        asyncio.get_running_loop().remove_reader(owner)
        if not self._ended.is_set():
            self._end_signals.begin()
            self._ended.set()

    def _engine_ended(self, loop: asyncio.AbstractEventLoop) -> None:
        """In the engine's thread: it was closed by us, or failed."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(self._end_without_engine)

    def _end_without_engine(self) -> None:
        if not self._ended.is_set():
            self._failed(ServiceFailed("the service ends, since its streamer failed: see the log"))

    def _failed(self, error: Exception) -> None:
        self._failure = error
        self._ended.set()
