"""Several web processes on one socket, which share the model over Redis.

this process      the socket; without --redis, a Redis and a worker host; restarts web processes
                  that die, and shows them the state of its host
web process       a service with a RedisStreamer; ends with this process
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
from .http.admission import ServiceOptions
from .http.dashboard import advised
from .http.hosting import standing
from .http.service import Service
from .http.siblings import Siblings
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

#: Seconds until a dead process is restarted.
_PAUSE = 1.0
#: Seconds that web processes get to end, beyond the timeout of a request.
_GRACE = 10.0
#: Maximum seconds of one wait: the system refuses longer ones.
_LONGEST_WAIT = 3600.0
#: Seconds between two updates of the worker host's state for the web processes.
_INTERVAL = 1.0
#: Maximum bytes of that state.
_MOST_STATE = 1024


def launch_fleet(options: ServeOptions) -> Exception | None:
    """As ``launch``, with several web processes.

    Raises:
        CannotListen: the address is in use, or not of this machine.
        FileNotFoundError: no Redis was given, and none is installed.
        TypeError, ValueError: invalid options.
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
            # Only this service may use it.
            secret=options.secret or secrets.token_hex(32),
        )
        host = stack.enter_context(_Host(options, wakeup))
        _Fleet(options, began, sock, wakeup, place, redis, host).run()
        return host.failure


_ENDS = frozenset((signal.SIGINT, signal.SIGTERM))


class _Host:
    """The worker host of this process, in a thread.

    Attributes:
        failure: why it ended without ``__exit__``; a ``ServiceFailed`` if it had loaded its model.
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
        self._worker.close()  # in any state
        self._thread.join()
        self._progress.__exit__()

    def _run(self) -> None:
        try:
            self._serve()
        except Exception as error:  # our bug; the service must end with its host
            logger.exception("the worker host failed; this is a bug in it")
            self.failure = ServiceFailed(f"the service ends, since its worker host failed: {error}")
        finally:
            self._wakeup.ring()

    def _serve(self) -> None:
        try:
            self._worker.wait_ready()
        except StreamerError as error:
            self.failure = error
            self._worker.close()  # now: its workers would be retried
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
        """Its state, and a sentence about it."""
        return standing(self._worker.stats())

    def report(self) -> list[str]:
        """Lines for the log."""
        stats = self._worker.stats()
        gist = [] if stats is None else [stats.gist]
        return [": ".join(self.standing()), *gist, *advised(self._worker.findings())]


class _Fleet:
    """The web processes. For the main thread."""

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
        self._folder = folder  # of the web processes' sockets
        self._context = multiprocessing.get_context("spawn")
        # Without a lock, which a killed web process could hold.
        self._host_state = self._context.RawArray("c", _MOST_STATE)
        # Web processes see its end of file when this process ends.
        self._theirs, self._ours = self._context.Pipe(duplex=False)
        self._processes: dict[int, BaseProcess] = {}
        self._redis_watch = -1
        #: Restarted if it dies; None for an external Redis.
        self.redis = redis
        #: The worker host in this process; None for external ones.
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
                self._began, self._sock, self._theirs, self._folder, self._host_state, number,
                is_restart,
            ),
            name=f"web {number}",
        )  # fmt: skip
        with passed_on_later():
            process.start()
        logger.info("web process %d runs (pid %d)", number, process.pid)
        self._processes[number] = process

    def _await_change(self) -> bool:
        """Wait for an event, and restart dead processes; true to end."""
        sentinels = {each.sentinel: number for number, each in self._processes.items()}
        watched = [self._redis_watch] if self._redis_watch >= 0 else []
        self._share_host_state()
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
                logger.error("Redis died and is restarted; its calls are lost")
                continue
            number = sentinels[sentinel]  # type: ignore[index]
            process = self._processes.pop(number)
            process.join()
            logger.warning(
                "web process %d (pid %d) died (exit code %s) and is restarted",
                number, process.pid, process.exitcode,
            )  # fmt: skip
        if [*ready] == [self._wakeup.ours]:
            return False
        if multiprocessing.connection.wait([self._wakeup.ours], _PAUSE) and self._is_to_end():
            return True
        if self._redis_watch in ready and self.redis is not None:
            self.redis.kill()  # reaps it
            self.redis.start()
            self._watch_redis()
        for number in range(self._options.web_workers):
            if number not in self._processes:
                self._start(number, is_restart=True)
        return False

    def _is_to_end(self) -> bool:
        """Handle the signals that have come; true if one of them asks to end."""
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
        # Other handlers' signals come here too, such as SIGUSR2.
        return not numbers.isdisjoint({0, signal.SIGHUP, *_ENDS})

    def _share_host_state(self) -> None:
        """Show the host's state to the web processes."""
        if self.host is not None:
            state = "\n".join(self.host.standing()).replace("\0", "").encode()[: _MOST_STATE - 1]
            if state != self._host_state.value:
                self._host_state.value = state

    def _restart_host(self) -> None:
        assert self.host is not None
        self.host.restart()

    def _pass_on(self, number: signal.Signals) -> None:
        """Send a signal to the web processes: SIGHUP empties caches and renews the description."""
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
        self._ours.close()  # asks them to end
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
    host_state: Any,
    number: int,
    is_restart: bool,
) -> None:
    hold_signals()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent process too
    take_signals()
    configure_logging(options.log_format)
    streamer = make_redis_streamer(options)
    address = sock.getsockname()

    def ready(service: Service, _: float) -> None:
        logger.info("web process %d is ready", number)
        if number == 0 and not is_restart:
            # The model may have been loaded before this process could ask for it.
            announce(service, address, time.monotonic() - began)

    run_service(
        streamer, web, sock, options.server,
        on_ready=ready, owner=owner.fileno(), serves_at_once=not is_restart,
        siblings=Siblings(
            folder, number, options.web_workers, lambda: _read_host_state(host_state.value)
        ),
    )  # fmt: skip


def _read_host_state(shared: bytes) -> tuple[str, str] | None:
    """The shared state of the service's worker host; None if there is none."""
    state, _, detail = shared.decode(errors="ignore").partition("\n")
    return (state, detail) if state else None
