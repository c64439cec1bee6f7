"""Several web processes on one socket, which share the model.

this process      the socket; restarts web processes that die; starts, watches and ends the pool
pool              a process of its own, with the workers; started again by its clients
web process       a service with a streamer that shares the pool; ends with this process

With --redis the web processes have the worker hosts behind it instead, and there is no pool.
"""

from __future__ import annotations

import contextlib
import logging
import math
import multiprocessing
import multiprocessing.connection
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

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
from ..errors import PoolMismatch, StreamerError
from ..options.table import ServeOptions, StreamerOptions
from ..streamer import BaseStreamer
from .http.accepting import Turns
from .http.service import Service
from .http.siblings import Siblings
from .launching import (
    announce,
    listen,
    make_redis_streamer,
    pool_of_service,
    service_options,
    streamer_of,
    waits_for,
)
from .logs import configure_logging
from .pool_owner import PoolOwner, owned
from .pool_preparation import prepare_pools
from .running import ServiceFailed, run_service

__all__ = ["launch_fleet"]

logger = logging.getLogger(__name__)

#: Seconds until a dead process is restarted.
_PAUSE = 1.0
#: Seconds that web processes get to end, beyond the timeout of a request.
_GRACE = 10.0
#: Maximum seconds of one wait: the system refuses longer ones.
_LONGEST_WAIT = 3600.0
#: Exit code of a web process that would fail again. Arbitrary; neither Python's nor uvicorn's.
_CANNOT_SERVE = 7


def launch_fleet(options: ServeOptions) -> Exception | None:
    """As ``launch``, with several web processes.

    Raises:
        CannotListen: the address is in use, or not of this machine.
        ModelUnavailable: the hub has no such model, or cannot be asked for it.
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
            fleet = _Fleet(_Plan(options, None), began, sock, wakeup, place)
            fleet.run()
            return fleet.failure
        prepare_pools(options.log_format)
        target, pool = pool_of_service(options)
        pool = owned(pool)
        owner = stack.enter_context(PoolOwner(target, pool, waits_for(options), wakeup))
        plan = _Plan(options, (target, pool), owner.directory)
        fleet = _Fleet(plan, began, sock, wakeup, place, owner)
        fleet.run()
        return owner.failure or fleet.failure


class _Plan(NamedTuple):
    """What web processes are made of.

    Attributes:
        pool: the model, and the options of its pool; None with an external Redis. They are made
            once: a model on the hub may have another commit a moment later.
        directory: of the pool's files, which is chosen once: with another, a web process that is
            restarted after XDG_RUNTIME_DIR was removed would start a second pool.
    """

    options: ServeOptions
    pool: tuple[str, StreamerOptions] | None
    directory: str | None = None

    @property
    def processes(self) -> int:
        """The number of web processes."""
        count = self.options.web_workers
        assert count != "auto"
        return count

    def streamer(self) -> BaseStreamer:
        if self.pool is None:
            return make_redis_streamer(self.options)
        target, pool = self.pool
        return streamer_of(target, pool)


_ENDS = frozenset((signal.SIGINT, signal.SIGTERM))


class _Fleet:
    """The web processes. For the main thread.

    Attributes:
        failure: why there are none any more, unless a signal has ended them.
    """

    def __init__(
        self,
        plan: _Plan,
        began: float,
        sock: socket.socket,
        wakeup: SignalSocket,
        folder: Path,
        owner: PoolOwner | None = None,
    ) -> None:
        self._plan = plan
        self._options = plan.options
        self._count = plan.processes
        self._began = began
        self._sock = sock
        self._wakeup = wakeup
        self._folder = folder  # of the web processes' sockets
        self._context = multiprocessing.get_context("spawn")
        # Without a lock, which a killed web process could hold.
        self._connections = self._context.RawArray("i", [-1] * self._count)
        # Web processes see its end of file when this process ends.
        self._theirs, self._ours = self._context.Pipe(duplex=False)
        self._processes: dict[int, BaseProcess] = {}
        self._given_up: set[int] = set()  # numbers that are not restarted
        self.failure: Exception | None = None
        self._owner = owner  # None for external workers
        self._terminal = Terminal()
        self._restart = RollingRestart(self._restart_workers, lambda: self._pass_on(signal.SIGHUP))

    def run(self) -> None:
        """Until a signal, or until no pool can be started."""
        try:
            for number in range(self._count):
                self._start(number)
            while not self._await_change():
                pass
        finally:
            self._end()

    def _start(self, number: int, *, is_restart: bool = False) -> None:
        process = self._context.Process(
            target=_web_process,
            args=(
                self._plan, self._began, self._sock, self._theirs, self._folder, self._connections,
                number, is_restart,
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
        ready = multiprocessing.connection.wait([self._wakeup.ours, *sentinels])
        if self._wakeup.ours in ready and self._is_to_end():
            return True
        for sentinel in ready:
            if sentinel is self._wakeup.ours:
                continue
            number = sentinels[sentinel]  # type: ignore[index]
            process = self._processes.pop(number)
            process.join()
            Turns(self._connections, number).close()
            if process.exitcode == _CANNOT_SERVE:
                self._given_up.add(number)
                logger.error(
                    "web process %d (pid %d) is not restarted, since it would fail again; restart "
                    "the service",
                    number, process.pid,
                )  # fmt: skip
                continue
            logger.warning(
                "web process %d (pid %d) died (exit code %s) and is restarted",
                number, process.pid, process.exitcode,
            )  # fmt: skip
        if len(self._given_up) == self._count:
            self.failure = ServiceFailed(
                "the service ends, since its web processes cannot be started; the log says why"
            )
            return True
        if [*ready] == [self._wakeup.ours]:
            return False
        if multiprocessing.connection.wait([self._wakeup.ours], _PAUSE) and self._is_to_end():
            return True
        for number in range(self._count):
            if number not in self._processes and number not in self._given_up:
                self._start(number, is_restart=True)
        return False

    def _is_to_end(self) -> bool:
        """Handle the signals that have come; true if one of them asks to end."""
        numbers = {*self._wakeup.answer()}
        if signal.SIGHUP in numbers and not self._terminal.is_closed():
            numbers.discard(signal.SIGHUP)
            if self._owner is not None:
                self._restart.begin()
            else:
                self._pass_on(signal.SIGHUP)
        if signal.SIGUSR1 in numbers:
            numbers.discard(signal.SIGUSR1)
            if self._owner is not None:
                # Not in this thread, which has to see to signals and deaths: the pool may hang.
                threading.Thread(target=self._report, name="report", daemon=True).start()
            self._pass_on(signal.SIGUSR1)
        # Other handlers' signals come here too, such as SIGUSR2.
        return not numbers.isdisjoint({0, signal.SIGHUP, *_ENDS})

    def _restart_workers(self) -> None:
        assert self._owner is not None
        self._owner.restart()

    def _report(self) -> None:
        assert self._owner is not None
        try:
            log_standing(self._owner.report())
        except StreamerError as error:
            log_standing([f"the process of the workers does not answer: {error}"])

    def _pass_on(self, number: signal.Signals) -> None:
        """Send a signal to the web processes: SIGHUP empties caches and renews the description."""
        for process in [*self._processes.values()]:
            if process.pid is not None and process.exitcode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, number)

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


def _web_process(
    plan: _Plan,
    began: float,
    sock: socket.socket,
    owner: multiprocessing.connection.Connection,
    folder: Path,
    connections: Any,
    number: int,
    is_restart: bool,
) -> None:
    hold_signals()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent process too
    take_signals()
    options = plan.options
    configure_logging(options.log_format)
    prepare_pools(options.log_format, plan.directory)
    address = sock.getsockname()

    def ready(service: Service, _: float) -> None:
        logger.info("web process %d is ready", number)
        if number == 0 and not is_restart:
            # The model may have been loaded before this process could ask for it.
            announce(service, address, time.monotonic() - began)

    try:
        streamer = plan.streamer()
    except Exception as error:  # as of its first start it was made: something has changed since
        logger.error("web process %d cannot serve: %s", number, error)
        sys.exit(_CANNOT_SERVE)
    failure = run_service(
        streamer, service_options(options), sock, options.server,
        on_ready=ready, owner=owner.fileno(), serves_at_once=not is_restart,
        siblings=Siblings(folder, number, plan.processes), turns=Turns(connections, number),
    )  # fmt: skip
    if failure is not None:
        logger.error("web process %d cannot serve: %s", number, failure)
    if isinstance(failure, PoolMismatch):  # its code is not that of the service any more
        sys.exit(_CANNOT_SERVE)
