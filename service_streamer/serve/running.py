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
import ctypes
import gc
import logging
import math
import os
import signal
import socket
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import uvloop

from ..engine.operator_signals import (
    SAME_SIGNAL,
    OperatorSignals,
    RollingRestart,
    heeded,
    hold_signals,
    log_standing,
)
from ..reporting import counted
from .configuration import Configuration
from .hosted_model import HostedModel, OpenedModel, ServiceFailed
from .http.accepting import Turns
from .http.app import create_app, create_site, traced
from .http.asgi import ASGIBridge
from .http.background import Failures, start_task
from .http.cors import CrossOrigin
from .http.keyring import Keyring, SharedCells
from .http.listening import HTTPServer
from .http.models import Models, Repository
from .http.prometheus import exposition_of
from .http.refusals import stopping
from .http.request_figures import Siblings
from .http.service import Service
from .http.tls import TLS
from .replacing import ModelRepository

if TYPE_CHECKING:
    from .rpc.rpc_server import RPCServer

logger = logging.getLogger(__name__)

#: Seconds between two looks at the files of certificates and keys.
_LOOK = 1.0

#: Thresholds of Python's garbage collector: requests usually have no reference cycles.
_GC_THRESHOLDS = (20_000, 20, 100)


class FleetPart(NamedTuple):
    """What one of several web processes has in common with the others.

    Attributes:
        owner: a file descriptor whose end of file ends the service like a signal.
        serves_at_once: whether to answer requests while the models load. Not for a restarted
            process: its siblings on the same socket are ready.
        siblings: the others.
        turns: the order in which they accept connections.
        cells: where they count the requests of API keys; None without such a count.
        repository: makes what loads models, and takes them away, as their parent says.
    """

    owner: int
    serves_at_once: bool
    siblings: Siblings
    turns: Turns
    cells: SharedCells | None
    repository: Callable[[Models, list[HostedModel]], Repository]


def run_service(
    configuration: Configuration,
    opened: Sequence[OpenedModel],
    sock: socket.socket,
    *,
    on_ready: Callable[[Models, float], None] = lambda _models, _seconds: None,
    rpc_address: tuple[str, int] | None = None,
    part: FleetPart | None = None,
    same_signal: float = SAME_SIGNAL,
) -> Exception | None:
    """Serve until SIGINT or SIGTERM, or until no model can be loaded.

    Args:
        configuration: where the models come from, also those that are loaded later.
        opened: the models; their streamers are closed at the end.
        sock: a listening socket; closed at the end.
        on_ready: called once when the models are loaded, with the seconds that it took.
        rpc_address: where to answer gRPC, with whoever listens there with SO_REUSEPORT; None for
            nowhere.
        part: given if this is one of several web processes.
        same_signal: see ``OperatorSignals``.

    Returns:
        Why no model could be loaded, or their streamers' failure; else None.
    """
    keep_freed_memory()
    running = _Running(configuration, opened, sock, on_ready, rpc_address, part, same_signal)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(running.run())
    finally:
        hold_signals()  # the loop has reset them to their defaults
        running.close()


#: Seconds that connections get after the second signal.
_HURRY = 0.5


async def _look(*files: TLS | Keyring | None) -> None:
    """Have files read again when they change, whether or not anybody asks for what is in them.

    A web process without requests would else miss a change, and if the file is broken afterwards,
    go on with what the others have long replaced: a revoked key, say.

    Also say when no file can be opened: uvloop closes new connections then without a word.
    """
    looks: list[tuple[Callable[[], object], Failures]] = [
        (each.look, Failures("--ssl-certfile or --api-key-file was not read again"))
        for each in files
        if each is not None
    ]
    lacks_files = "no file can be opened, so new connections are closed: raise `ulimit -n`"
    looks.append((Path(os.devnull).read_bytes, Failures(lacks_files)))
    while True:
        await asyncio.sleep(_LOOK)
        for look, failures in looks:
            with failures:
                look()


class _Running:
    def __init__(
        self,
        configuration: Configuration,
        opened: Sequence[OpenedModel],
        sock: socket.socket,
        on_ready: Callable[[Models, float], None],
        rpc_address: tuple[str, int] | None,
        part: FleetPart | None,
        same_signal: float,
    ) -> None:
        self._configuration = configuration
        self._opened = opened
        self._options = opened[0].options
        self._sock = sock
        self._on_ready = on_ready
        self._rpc_address = rpc_address
        self._rpc: RPCServer | None = None
        self._part = part
        self._hosted: list[HostedModel] = []
        self._failure: Exception | None = None
        self._is_ready = False
        self._reports: set[asyncio.Task[None]] = set()
        self._same_signal = same_signal

    async def run(self) -> Exception | None:
        self._began = time.monotonic()
        self._ended = asyncio.Event()
        self._hurried = asyncio.Event()
        self._may_serve = asyncio.Event()
        for each in self._opened:
            self._host(each)
        keyring, tls = self._keyring(), TLS.of(self._options)
        self._models = models = Models(
            [each.service for each in self._hosted],
            are_named=self._configuration.are_named,
            keyring=keyring,
        )
        models.on_change = self._settled
        part = self._part
        if part is None:
            models.repository = ModelRepository(models, self._hosted, self._configuration)
        else:
            await self._meet(part.siblings)
            models.repository = part.repository(models, self._hosted)
        options = self._options
        site: Any = create_site(models)
        if options.opentelemetry:
            site = ASGIBridge(traced(create_app(models)))
        if options.cors_origins:
            site = CrossOrigin(site, options.cors_origins)
        server = HTTPServer(
            site, self._sock, turns=None if part is None else part.turns,
            tls=tls, access_log=options.access_log,
        )  # fmt: skip
        loop = asyncio.get_running_loop()
        looking = loop.create_task(_look(tls, keyring))
        self._handle_signals(loop)
        if part is not None:
            loop.add_reader(part.owner, self._owner_gone, part.owner)
        for hosted in self._hosted:
            hosted.start()
        ended = loop.create_task(self._ended.wait())
        if part is not None and not part.serves_at_once:
            may_serve = loop.create_task(self._may_serve.wait())
            await asyncio.wait((may_serve, ended), return_when=asyncio.FIRST_COMPLETED)
            may_serve.cancel()
        if self._rpc_address is not None:
            from .rpc.rpc_server import RPCServer

            self._rpc = RPCServer(models, self._rpc_address)
            await self._rpc.start()
        rpc = self._rpc
        serving = loop.create_task(server.serve())
        await asyncio.wait((serving, ended), return_when=asyncio.FIRST_COMPLETED)
        server.drain()
        if rpc is not None:
            await rpc.drain()
        for service in self._services():
            service.stop()
        if part is not None:
            part.turns.end()
        if not serving.done() and self._failure is None:
            await self._drain()
        for service in self._services():
            await service.cut_streams(stopping())
        if rpc is not None:
            await rpc.stop(0 if self._hurried.is_set() else _HURRY)
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
        looking.cancel()
        if part is not None:
            part.siblings.close()
        return self._failure

    def _keyring(self) -> Keyring | None:
        options = self._options
        if not options.needs_key:
            return None
        cells = None if self._part is None else self._part.cells
        return Keyring(options.api_keys, options.api_key_file, cells)

    def _services(self) -> list[Service]:
        """Those of all models, also of replaced ones whose requests are open."""
        return [each.service for each in self._hosted]

    def _host(self, opened: OpenedModel) -> None:
        hosted = HostedModel(opened, self._settled, lambda error: self._model_failed(hosted, error))
        self._hosted.append(hosted)

    def close(self) -> None:
        """End the workers of all models."""
        with ThreadPoolExecutor(max(1, len(self._hosted))) as threads:
            for _ in threads.map(HostedModel.close, self._hosted):
                pass

    async def _meet(self, siblings: Siblings) -> None:
        def requests(model: str) -> bytes:
            service = self._models.find(model)
            return b"" if service is None else service.figures().encoded()

        try:
            await siblings.listen(exposition_of(self._models).snapshot, requests)
        except OSError as error:
            logger.warning("each web process reports only its own figures: %s", error)
        self._models.siblings = siblings
        for service in self._models:
            service.siblings = siblings

    async def _drain(self) -> None:
        services = self._services()
        open_ = sum(each.requests.open for each in services)
        if open_:
            logger.info("stopping; %s still open", counted(open_, "request"))
        longest = max(each.options.timeout for each in services)

        async def all_drained() -> None:
            await asyncio.gather(*(each.drained(longest + 1) for each in services))

        drained = asyncio.create_task(all_drained())
        hurried = asyncio.create_task(self._hurried.wait())
        await asyncio.wait((drained, hurried), return_when=asyncio.FIRST_COMPLETED)
        drained.cancel()
        hurried.cancel()
        open_ = sum(each.requests.open for each in services)
        if open_:
            logger.warning("%s cut off", counted(open_, "request"))

    def _settled(self) -> None:
        """A model is loaded, or will never be, or is not among those that serve any more.

        Those of worker hosts are not waited for, beside one that is loaded: these may never come.
        """
        models = self._models
        is_answering = any(each.is_known and each.failure is None for each in models)
        if self._is_ready or models.loading or not is_answering:
            return
        self._is_ready = True
        # The current objects are permanent. Full collections would scan them again and again, which
        # takes a few percent of a core.
        gc.collect()
        gc.freeze()
        gc.set_threshold(*_GC_THRESHOLDS)
        self._on_ready(self._models, time.monotonic() - self._began)
        self._may_serve.set()
        if self._rpc is not None:
            self._rpc.look_soon()

    def _model_failed(self, hosted: HostedModel, error: Exception) -> None:
        """A model will never answer again. The service ends if it is the last one."""
        if all(each.failure is not None for each in self._models):
            if isinstance(error, ServiceFailed):
                error = ServiceFailed("the service ends, since its streamer failed: see the log")
            if not self._ended.is_set():
                self._failure = error
                self._signals.ends_since = -math.inf
                self._ended.set()
            return
        logger.error("model %s is not served: %s", hosted.service.model, error)
        self._settled()

    def _handle_signals(self, loop: asyncio.AbstractEventLoop) -> None:
        hosted = self._hosted

        def refresh() -> None:
            for each in hosted:
                if not each.has_workers:  # of those with workers their restart has emptied it
                    streamer: Any = each.streamer
                    streamer.clear_cache()
                each.service.refresh()

        def refresh_soon() -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(refresh)

        def hang_up() -> None:
            if self._configuration.read is not None or any(each.has_workers for each in hosted):
                restart.begin()
            else:
                logger.info("SIGHUP: the model runs in another process; only the cache is emptied")
                refresh()

        async def report() -> None:
            for each in [*hosted]:
                lines = await each.report()
                if len(hosted) > 1:
                    lines[0] = f"{each.service.model}: {lines[0]}"
                log_standing(lines)

        def begin_report() -> None:
            task = start_task(report(), "SIGUSR1: the report failed")
            self._reports.add(task)  # the loop alone would let it be collected
            task.add_done_callback(self._reports.discard)

        def renew() -> None:
            repository = self._models.repository
            assert isinstance(repository, ModelRepository)
            repository.renew(loop)

        restart = RollingRestart(renew, refresh_soon)
        self._signals = OperatorSignals(
            end=self._ended.set,
            hurry=self._hurried.set,
            restart=hang_up,
            report=begin_report,
            same_signal=self._same_signal,
        )
        # With an owner, that gets the terminal's signals.
        ends = [signal.SIGTERM] if self._part is not None else [signal.SIGTERM, signal.SIGINT]
        for number in (*ends, *heeded()):
            loop.add_signal_handler(number, self._signals.heed, number)

    def _owner_gone(self, owner: int) -> None:
        asyncio.get_running_loop().remove_reader(owner)
        if self._signals.ends_since is None:
            self._signals.heed(signal.SIGTERM)


#: Names of glibc's <malloc.h>.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3

#: Freed bytes that stay with this process. Arbitrary: four of the largest bodies, by default.
_KEPT = 64 << 20

#: Blocks below this are of the heap. The most that glibc allows.
_LARGEST = 32 << 20


def keep_freed_memory() -> None:
    """Have this process keep what it frees, up to a bound; no effect without glibc.

    By default the C library gives a large block back to the system when it is freed. The next body
    gets new pages, which the system has to clear: for arrays of 602 kB over HTTP that was 40 % of
    the web process's time.
    """
    with contextlib.suppress(AttributeError, OSError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_MMAP_THRESHOLD, _LARGEST)
        mallopt(_TRIM_THRESHOLD, _KEPT)
