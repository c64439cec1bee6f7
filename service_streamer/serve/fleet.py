"""Several web processes on one socket, and what they share the model over: Redis.

this process      the socket; a Redis and a worker host, unless there are some; watches over
                  the web processes and starts those again that die; tells them how its host stands
web process       a service with a RedisStreamer; ends when this process does, however it does
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import multiprocessing
import multiprocessing.connection
import os
import secrets
import signal
import socket
import tempfile
import threading
import time
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from ..engine.operator_signals import (
    EndSignals,
    RollingRestart,
    SignalSocket,
    Terminal,
    hold_signals,
    log_standing,
    passed_on_later,
    take_signals,
)
from ..errors import StreamerError
from ..options.table import ServeOptions
from ..redis.local import LocalRedis
from .http.dashboard import advised
from .http.hosting import standing
from .http.service import Service
from .http.siblings import Siblings
from .http.web_options import ServiceOptions
from .launching import (
    Progress,
    announce,
    listen,
    make_redis_streamer,
    make_redis_worker,
    model_name,
    service_options,
)
from .logs import configure_logging
from .running import ServiceFailed, run_service

__all__ = ["launch_fleet"]

logger = logging.getLogger(__name__)

#: Before what died is started again, seconds: what dies at once must not keep a core busy.
_PAUSE = 1.0
#: How long web processes have to end beyond what a request may take, seconds.
_GRACE = 10.0
#: The longest wait that the system takes, seconds; with less nothing is lost.
_LONGEST_WAIT = 3600.0
#: How often web processes are told how the worker host of this process stands, seconds.
_INTERVAL = 1.0
#: The most bytes of that.
_MOST_TOLD = 1024


def launch_fleet(options: ServeOptions) -> Exception | None:
    """As ``launch``, with several web processes.

    Raises:
        CannotListen: the address is in use, or none of this machine.
        FileNotFoundError: no Redis was named, and none is installed.
        TypeError, ValueError: options that do not fit.
    """
    configure_logging(options.log_format)
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        sock = listen(options)
        stack.callback(sock.close)
        wakeup = stack.enter_context(SignalSocket())
        folder = tempfile.TemporaryDirectory(prefix="service_streamer-", ignore_cleanup_errors=True)
        place = Path(stack.enter_context(folder))
        if options.redis_broker is not None:
            _Fleet(options, began, sock, wakeup, place).run()
            return None
        redis = stack.enter_context(LocalRedis(password=secrets.token_hex(16)))
        options = dataclasses.replace(
            options,
            redis_broker=redis.url,
            # No other process may read or write what passes there.
            secret=options.secret or secrets.token_hex(32),
        )
        host = stack.enter_context(_Host(options, wakeup))
        _Fleet(options, began, sock, wakeup, place, redis, host).run()
        return host.failure


_ENDS = frozenset((signal.SIGINT, signal.SIGTERM))


class _Host:
    """The worker host of this process, in a thread.

    Attributes:
        failure: why it serves no more, if it was not told to end. A ``ServiceFailed`` if it had
            loaded its model.
    """

    def __init__(self, options: ServeOptions, wakeup: SignalSocket) -> None:
        self._worker = make_redis_worker(options)
        self._wakeup = wakeup
        self._progress = Progress(model_name(options.model))
        self._thread = threading.Thread(target=self._run, name="worker host")
        self.failure: Exception | None = None

    def __enter__(self) -> _Host:
        self._progress.__enter__()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._worker.stop()
        self._worker.close()  # whichever part of its life it is in
        self._thread.join()
        self._progress.__exit__()

    def _run(self) -> None:
        try:
            self._serve()
        except Exception as error:  # our bug; the service must not go on without its host
            logger.exception("the worker host failed; this is a bug in it")
            self.failure = ServiceFailed(f"the service ends, since its worker host failed: {error}")
        finally:
            self._wakeup.ring()

    def _serve(self) -> None:
        try:
            self._worker.wait_ready()
        except StreamerError as error:
            self.failure = error
            self._worker.close()  # at once: its workers would be tried again
            return
        self._progress.close()
        try:
            self._worker.run_forever()
        except StreamerError as error:
            self.failure = ServiceFailed(
                f"the service ends, since its worker host has ended: {error}"
            )

    def restart(self) -> None:
        """Replace its workers one at a time. Blocks. Raises StreamerError."""
        self._worker.restart_workers()

    def standing(self) -> tuple[str, str]:
        """Its state and a sentence about it."""
        return standing(self._worker.stats())

    def report(self) -> list[str]:
        """For the log."""
        stats = self._worker.stats()
        gist = [] if stats is None else [stats.gist]
        return [": ".join(self.standing()), *gist, *advised(self._worker.findings())]


class _Fleet:
    """The web processes. Of the main thread."""

    def __init__(
        self,
        options: ServeOptions,
        began: float,
        sock: socket.socket,
        wakeup: SignalSocket,
        folder: Path,
        redis: LocalRedis | None = None,
        host: _Host | None = None,
    ) -> None:
        self._options = options
        self._began = began
        self._sock = sock
        self._wakeup = wakeup
        self._folder = folder  # of the sockets that they talk over
        self._context = multiprocessing.get_context("spawn")
        # Without a lock, which a web process could hold when it is killed.
        self._told = self._context.RawArray("c", _MOST_TOLD)
        # Web processes see its end when this process is gone.
        self._theirs, self._ours = self._context.Pipe(duplex=False)
        self._processes: dict[int, BaseProcess] = {}
        self._redis_watch = -1
        #: To be started again if it dies; None if it is somebody else's.
        self.redis = redis
        #: Computes in this process; None if that is done elsewhere.
        self.host = host
        self._terminal = Terminal()
        self._restart = RollingRestart(self._restart_host, lambda: self._pass_on(signal.SIGHUP))

    def run(self) -> None:
        """Until a signal, or until the worker host ends."""
        try:
            self._watch_redis()
            for number in range(self._options.web_workers):
                self._start(number)
            while not self._await_change():
                pass
        finally:
            self._end()

    def _start(self, number: int, *, is_restart: bool = False) -> None:
        process = self._context.Process(
            target=_web_process,
            args=(
                self._options, service_options(self._options, has_own_host=self.host is not None),
                self._began, self._sock, self._theirs, self._folder, self._told, number, is_restart,
            ),
            name=f"web {number}",
        )  # fmt: skip
        with passed_on_later():
            process.start()
        logger.info("web process %d runs (pid %d)", number, process.pid)
        self._processes[number] = process

    def _await_change(self) -> bool:
        """Start again what has died; whether it is time to end."""
        sentinels = {each.sentinel: number for number, each in self._processes.items()}
        watched = [self._redis_watch] if self._redis_watch >= 0 else []
        self._tell()
        interval = None if self.host is None else _INTERVAL
        ready = multiprocessing.connection.wait([self._wakeup.ours, *watched, *sentinels], interval)
        if not ready:
            return False
        if self._wakeup.ours in ready and self._is_to_end():
            return True
        for sentinel in ready:
            if sentinel is self._wakeup.ours:
                continue
            if sentinel == self._redis_watch:
                logger.error("Redis died; it is started again, and what it held is lost")
                continue
            number = sentinels[sentinel]  # type: ignore[index]
            process = self._processes.pop(number)
            process.join()
            logger.warning(
                "web process %d (pid %d) died (exit code %s); it is started again",
                number, process.pid, process.exitcode,
            )  # fmt: skip
        if [*ready] == [self._wakeup.ours]:
            return False
        if multiprocessing.connection.wait([self._wakeup.ours], _PAUSE) and self._is_to_end():
            return True
        if self._redis_watch in ready and self.redis is not None:
            self.redis.kill()  # which takes up its end
            self.redis.start()
            self._watch_redis()
        for number in range(self._options.web_workers):
            if number not in self._processes:
                self._start(number, is_restart=True)
        return False

    def _is_to_end(self) -> bool:
        """Take up the signals that have come; whether one of them is the wish to end."""
        numbers = {*self._wakeup.answer()}
        if signal.SIGHUP in numbers and not self._terminal.is_closed():
            numbers.discard(signal.SIGHUP)
            if self.host is not None:
                self._restart.begin()
            else:
                self._pass_on(signal.SIGHUP)
        if signal.SIGUSR1 in numbers:
            numbers.discard(signal.SIGUSR1)
            if self.host is not None:
                log_standing(self.host.report())
            self._pass_on(signal.SIGUSR1)
        # Not those of other handlers, SIGUSR2's among them: Python writes each of them here.
        return not numbers.isdisjoint({0, signal.SIGHUP, *_ENDS})

    def _tell(self) -> None:
        """Tell the web processes how the host stands."""
        if self.host is not None:
            told = "\n".join(self.host.standing()).replace("\0", "").encode()[: _MOST_TOLD - 1]
            if told != self._told.value:
                self._told.value = told

    def _restart_host(self) -> None:
        assert self.host is not None
        self.host.restart()

    def _pass_on(self, number: signal.Signals) -> None:
        """To the web processes: on SIGHUP they empty their caches and ask what the model is."""
        for process in [*self._processes.values()]:
            if process.pid is not None and process.exitcode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, number)

    def _watch_redis(self) -> None:
        if self._redis_watch >= 0:
            os.close(self._redis_watch)
        self._redis_watch = -1
        if self.redis is not None and hasattr(os, "pidfd_open"):  # Linux
            self._redis_watch = os.pidfd_open(self.redis.pid)

    def _end(self) -> None:
        signals = EndSignals()
        signals.begin()
        deadline = time.monotonic() + self._options.timeout + _GRACE
        self._sock.close()
        self._ours.close()  # which tells them to end
        while alive := [each for each in self._processes.values() if each.is_alive()]:
            sentinels = [each.sentinel for each in alive]
            left = min(max(0.0, deadline - time.monotonic()), _LONGEST_WAIT)
            ready = multiprocessing.connection.wait([self._wakeup.ours, *sentinels], left)
            is_wished = False
            if self._wakeup.ours in ready:
                is_wished = not _ENDS.isdisjoint(self._wakeup.answer())
                if not is_wished or not signals.is_second():
                    continue
            if is_wished or time.monotonic() >= deadline:
                for process in alive:
                    process.kill()
                deadline = math.inf
        for process in self._processes.values():
            process.join()
        self._theirs.close()
        if self._redis_watch >= 0:
            os.close(self._redis_watch)


def _web_process(
    options: ServeOptions,
    web: ServiceOptions,
    began: float,
    sock: socket.socket,
    owner: multiprocessing.connection.Connection,
    folder: Path,
    told: Any,
    number: int,
    is_restart: bool,
) -> None:
    hold_signals()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal, which the owner gets as well
    take_signals()
    configure_logging(options.log_format)
    streamer = make_redis_streamer(options)
    address = sock.getsockname()

    def ready(service: Service, _: float) -> None:
        logger.info("web process %d can be asked", number)
        if number == 0 and not is_restart:
            # The model may have been loaded before this process could ask for it.
            announce(service, address, time.monotonic() - began)

    run_service(
        streamer, web, sock, options.server,
        on_ready=ready, owner=owner.fileno(), serves_at_once=not is_restart,
        siblings=Siblings(folder, number, options.web_workers, lambda: _heard(told.value)),
    )  # fmt: skip


def _heard(told: bytes) -> tuple[str, str] | None:
    """How the worker host of the service stands; None if that is not told."""
    state, _, detail = told.decode(errors="ignore").partition("\n")
    return (state, detail) if state else None
