"""Several web processes on one socket, and what they share the model over: Redis.

this process      the socket; a Redis and a worker host, unless there are some; watches over
                  the web processes and starts those again that die
web process       a service with a RedisStreamer; ends when this process does, however it does
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import multiprocessing.connection
import secrets
import signal
import socket
from collections.abc import Iterator, Mapping
from multiprocessing.process import BaseProcess
from typing import Any

from ..broker.local import LocalRedis
from ..broker.worker import RedisWorker
from ..errors import StreamerError
from .launching import (
    Progress,
    announce,
    listen,
    make_redis_streamer,
    model_name,
    model_options,
    service_options,
)
from .logs import configure_logging
from .running import run_service
from .service import Service

__all__ = ["launch_fleet"]

logger = logging.getLogger(__name__)

#: Before a web process is started again, seconds: one that dies at once must not keep a core busy.
_PAUSE = 1.0
#: How long web processes have to end beyond what a request may take, seconds.
_GRACE = 10.0


def launch_fleet(given: Mapping[str, Any]) -> Exception | None:
    """As ``launch``, with several web processes.

    Raises:
        CannotListen: the address is in use, or none of this machine.
        FileNotFoundError: no Redis was named, and none is installed.
        TypeError, ValueError: options that do not fit.
    """
    configure_logging(given["log_format"])
    sock = listen(given)
    given = {**given}
    with contextlib.ExitStack() as stack:
        stack.callback(sock.close)
        wakeup = stack.enter_context(_signals())
        if not given["redis"]:
            # Nobody else may read or write what passes there.
            given["secret"] = given["secret"] or secrets.token_hex(32)
            given["redis"] = stack.enter_context(LocalRedis()).url
            failure = _start_host(given, stack)
            if failure is not None:
                return failure
        _Fleet(given, sock, wakeup).run()
    return None


def _start_host(given: Mapping[str, Any], stack: contextlib.ExitStack) -> Exception | None:
    options = model_options(given)
    name = model_name(given["model"])
    with Progress(name):
        try:
            host = RedisWorker(
                options.pop("predict_function_or_model"),
                redis_broker=given["redis"],
                prefix=given["prefix"],
                secret=given["secret"],
                **options,
            )
            stack.enter_context(host)
            host.wait_ready()
        except StreamerError as error:
            return error
    return None


class _Fleet:
    """The web processes. Of the main thread."""

    def __init__(
        self, given: Mapping[str, Any], sock: socket.socket, wakeup: socket.socket
    ) -> None:
        self._given = given
        self._sock = sock
        self._wakeup = wakeup
        self._context = multiprocessing.get_context("spawn")
        # Web processes see its end when this process is gone.
        self._theirs, self._ours = self._context.Pipe(duplex=False)
        self._processes: dict[int, BaseProcess] = {}

    def run(self) -> None:
        """Until a signal."""
        try:
            for number in range(self._given["web_workers"]):
                self._start(number)
            while not self._await_change():
                pass
        finally:
            self._end()

    def _start(self, number: int) -> None:
        process = self._context.Process(
            target=_web_process,
            args=(self._given, self._sock, self._theirs, number),
            name=f"web {number}",
        )
        process.start()
        logger.info("web process %d runs (pid %d)", number, process.pid)
        self._processes[number] = process

    def _await_change(self) -> bool:
        """Start again what has died; whether a signal has come."""
        sentinels = {each.sentinel: number for number, each in self._processes.items()}
        ready = multiprocessing.connection.wait([self._wakeup, *sentinels])
        if self._wakeup in ready:
            return True
        for sentinel in ready:
            number = sentinels[sentinel]  # type: ignore[index]
            process = self._processes.pop(number)
            process.join()
            logger.warning(
                "web process %d (pid %d) died (exit code %s); it is started again",
                number, process.pid, process.exitcode,
            )  # fmt: skip
        if multiprocessing.connection.wait([self._wakeup], _PAUSE):
            return True
        for number in range(self._given["web_workers"]):
            if number not in self._processes:
                self._start(number)
        return False

    def _end(self) -> None:
        self._sock.close()
        self._ours.close()  # which tells them to end
        for process in self._processes.values():
            process.join(self._given["timeout"] + _GRACE)
            if process.is_alive():
                process.kill()
                process.join()
        self._theirs.close()


def _web_process(
    given: Mapping[str, Any],
    sock: socket.socket,
    owner: multiprocessing.connection.Connection,
    number: int,
) -> None:
    configure_logging(given["log_format"])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal, which the owner gets as well
    options = service_options(given)
    streamer = make_redis_streamer(given, given["redis"])

    address = sock.getsockname()

    def ready(service: Service, seconds: float) -> None:
        if number == 0:
            announce(service, address, seconds)

    run_service(streamer, options, sock, given["server"], on_ready=ready, owner=owner.fileno())


@contextlib.contextmanager
def _signals() -> Iterator[socket.socket]:
    """A socket that is readable when a signal to end has come. Main thread."""
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    before = {
        number: signal.signal(number, lambda *_: None) for number in (signal.SIGINT, signal.SIGTERM)
    }
    descriptor = signal.set_wakeup_fd(theirs.fileno())
    try:
        yield ours
    finally:
        signal.set_wakeup_fd(descriptor)
        for number, handler in before.items():
            signal.signal(number, handler)
        ours.close()
        theirs.close()
