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
from typing import Any

from ..engine.operator_signals import (
    OperatorSignals,
    RollingRestart,
    SignalSocket,
    hold_signals,
    log_standing,
    passed_on_later,
    take_signals,
)
from ..errors import PoolMismatch
from ..workers.starting import startable
from .command_options import ServeOptions
from .configuration import Configuration
from .fleet_models import FleetModels
from .followed_models import FollowedModels, Plan
from .hosted_model import ServiceFailed
from .http.accepting import Turns
from .http.keyring import SharedCells, cells_needed
from .http.models import Models
from .http.request_figures import Siblings
from .launching import announce, listen, reserve_rpc
from .logs import configure_logging
from .opening import open_model
from .pool_preparation import prepare_pools
from .running import FleetPart, run_service

logger = logging.getLogger(__name__)

#: Seconds until a dead process is restarted.
_PAUSE = 1.0
#: Seconds that web processes get to end, beyond the timeout of a request.
GRACE = 10.0
#: Maximum seconds of one wait: the system refuses longer ones.
_LONGEST_WAIT = 3600.0
#: Exit code of a web process that would fail again. Arbitrary; not one of Python's.
_CANNOT_SERVE = 7


def launch_fleet(configuration: Configuration, options: ServeOptions) -> Exception | None:
    """As ``launch``, with several web processes.

    Raises:
        CannotListen: the address is in use, or not of this machine.
        ModelUnavailable: the hub has no such model, or cannot be asked for it.
        TypeError, ValueError: invalid options.
    """
    configure_logging(options.log_format, names_models=configuration.are_named)
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        sock = listen(options)
        stack.callback(sock.close)
        rpc = reserve_rpc(options)
        rpc_address = None if rpc is None else stack.enter_context(rpc).getsockname()[:2]
        wakeup = stack.enter_context(SignalSocket())
        folder = tempfile.TemporaryDirectory(prefix="service_streamer-", ignore_cleanup_errors=True)
        place = Path(stack.enter_context(folder))
        prepare_pools(options.log_format, names_models=configuration.are_named)
        models = stack.enter_context(FleetModels(configuration, options, rpc_address, wakeup))
        fleet = _Fleet(models, began, sock, wakeup, place)
        fleet.run()
        return models.failure or fleet.failure


class _Fleet:
    """The web processes. For the main thread.

    Attributes:
        failure: why there are none any more, unless a signal has ended them.
    """

    def __init__(
        self,
        models: FleetModels,
        began: float,
        sock: socket.socket,
        wakeup: SignalSocket,
        folder: Path,
    ) -> None:
        self._models = models
        self._options = models.plan.options
        self._count = models.plan.processes
        self._began = began
        self._sock = sock
        self._wakeup = wakeup
        self._folder = folder  # of the web processes' sockets
        self._context = multiprocessing.get_context("spawn")
        # Without a lock, which a killed web process could hold.
        self._connections = self._context.RawArray("i", [-1] * self._count)
        has_keys = self._options.api_key_file is not None
        self._cells = self._context.RawArray("d", cells_needed(self._count)) if has_keys else None
        # Web processes see its end of file when this process ends.
        self._theirs, self._ours = self._context.Pipe(duplex=False)
        self._processes: dict[int, BaseProcess] = {}
        self._given_up: set[int] = set()  # numbers that are not restarted
        self.failure: Exception | None = None
        self._is_hurried = False
        self._restart = RollingRestart(models.renew, lambda: self._pass_on(signal.SIGHUP))
        self._signals = OperatorSignals(
            end=lambda: None, hurry=self._hurry, restart=self._hang_up, report=self._begin_report
        )

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
        plan = self._models.plan
        ours, theirs = self._context.Pipe()
        process = self._context.Process(
            target=_web_process,
            args=(
                plan, theirs, self._began, self._sock, self._theirs, self._folder,
                self._connections, self._cells, number, is_restart,
            ),
            name=f"web {number}",
        )  # fmt: skip
        with startable(), passed_on_later():
            process.start()
        theirs.close()
        self._models.attach(number, ours, plan.number)
        logger.info("web process %d runs (pid %d)", number, process.pid)
        self._processes[number] = process

    def _await_change(self) -> bool:
        """Wait for an event, and restart dead processes; true to end."""
        sentinels = {each.sentinel: number for number, each in self._processes.items()}
        links = self._models.links
        ready = multiprocessing.connection.wait([self._wakeup.ours, *sentinels, *links])
        if self._wakeup.ours in ready and self._heed_signals():
            return True
        for link in links.keys() & {*ready}:
            self._models.heard(links[link])
        gone = [sentinel for sentinel in sentinels if sentinel in ready]
        for sentinel in gone:
            number = sentinels[sentinel]
            self._models.detach(number)
            process = self._processes.pop(number)
            process.join()
            Turns(self._connections, number).close()
            if self._cells is not None:  # its requests are not open any more
                SharedCells(self._cells, number, self._count)
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
        if not gone:
            return False
        if multiprocessing.connection.wait([self._wakeup.ours], _PAUSE) and self._heed_signals():
            return True
        for number in range(self._count):
            if number not in self._processes and number not in self._given_up:
                self._start(number, is_restart=True)
        return False

    def _heed_signals(self) -> bool:
        """Do what the signals ask for that have come; true if it is time to end."""
        numbers = {*self._wakeup.answer()}
        if self._signals.ends_since is not None:  # a terminal that is closed then hurries nobody
            numbers.discard(signal.SIGHUP)
        for number in numbers:
            self._signals.heed(number)
        has_failed = 0 in numbers and self._models.failure is not None
        return has_failed or self._signals.ends_since is not None

    def _hurry(self) -> None:
        self._is_hurried = True

    def _hang_up(self) -> None:
        if self._models.may_change:
            self._restart.begin()
        else:
            self._pass_on(signal.SIGHUP)

    def _begin_report(self) -> None:
        if self._models.has_pools:
            # Not in this thread, which has to see to signals and deaths: the pool may hang.
            threading.Thread(target=self._report, name="report", daemon=True).start()
        self._pass_on(signal.SIGUSR1)

    def _report(self) -> None:
        try:
            self._models.report(log_standing)
        except Exception:
            logger.exception("SIGUSR1: the report failed")

    def _pass_on(self, number: signal.Signals) -> None:
        """Send a signal to the web processes: SIGHUP empties caches and renews the description."""
        for process in [*self._processes.values()]:
            if process.pid is not None and process.exitcode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, number)

    def _end(self) -> None:
        self._signals.ends_since = time.monotonic()
        deadline = time.monotonic() + self._options.timeout + GRACE
        self._sock.close()
        self._ours.close()  # asks them to end
        while alive := [each for each in self._processes.values() if each.is_alive()]:
            sentinels = [each.sentinel for each in alive]
            left = min(max(0.0, deadline - time.monotonic()), _LONGEST_WAIT)
            ready = multiprocessing.connection.wait([self._wakeup.ours, *sentinels], left)
            if self._wakeup.ours in ready:
                self._heed_signals()
            if self._is_hurried or time.monotonic() >= deadline:
                for process in alive:
                    process.kill()
                deadline = math.inf
        for process in self._processes.values():
            process.join()
        self._theirs.close()


def _web_process(
    plan: Plan,
    link: multiprocessing.connection.Connection,
    began: float,
    sock: socket.socket,
    owner: multiprocessing.connection.Connection,
    folder: Path,
    connections: Any,
    cells: Any,
    number: int,
    is_restart: bool,
) -> None:
    hold_signals()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent process too
    take_signals()
    options = plan.options
    configure_logging(options.log_format, names_models=plan.are_named)
    prepare_pools(options.log_format, plan.directory, names_models=plan.are_named)
    address = sock.getsockname()

    def ready(models: Models, _: float) -> None:
        logger.info("web process %d is ready", number)
        if number == 0 and not is_restart:
            # The model may have been loaded before this process could ask for it.
            announce(models, address, time.monotonic() - began, plan.rpc_address)

    try:
        opened = [each.opened() for each in plan.models]
    except Exception as error:  # as of its first start it was made: something has changed since
        logger.error("web process %d cannot serve: %s", number, error)
        sys.exit(_CANNOT_SERVE)
    part = FleetPart(
        owner=owner.fileno(),
        serves_at_once=not is_restart,
        siblings=Siblings(folder, number, plan.processes),
        turns=Turns(connections, number),
        cells=None if cells is None else SharedCells(cells, number, plan.processes),
        repository=lambda models, hosted: FollowedModels(models, hosted, plan, link),
    )
    models = [each.named for each in plan.models]
    configuration = Configuration(models, open_model, are_named=plan.are_named)
    failure = run_service(
        configuration, opened, sock, on_ready=ready, rpc_address=plan.rpc_address, part=part
    )
    if failure is not None:
        logger.error("web process %d cannot serve: %s", number, failure)
    if isinstance(failure, PoolMismatch):  # its code is not that of the service any more
        sys.exit(_CANNOT_SERVE)
