"""Several web processes on one socket, and what they share the model over: Redis.

this process      the socket; a Redis and a worker host, unless there are some; watches over
                  the web processes and starts those again that die
web process       a service with a RedisStreamer; ends when this process does, however it does
"""

from __future__ import annotations

import contextlib
import logging
import math
import multiprocessing
import multiprocessing.connection
import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Mapping
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
from .running import SAME_SIGNAL, run_service
from .service import Service

__all__ = ["launch_fleet"]

logger = logging.getLogger(__name__)

#: Before what died is started again, seconds: what dies at once must not keep a core busy.
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
    given = {**given}
    with contextlib.ExitStack() as stack:
        sock = listen(given)
        stack.callback(sock.close)
        wakeup = stack.enter_context(_Wakeup())
        fleet = _Fleet(given, sock, wakeup)
        if not given["redis"]:
            # Nobody else may read or write what passes there.
            given["secret"] = given["secret"] or secrets.token_hex(32)
            redis = stack.enter_context(LocalRedis(password=secrets.token_hex(16)))
            given["redis"] = redis.url
            fleet.redis = redis
            host = stack.enter_context(_Host(given, wakeup))
            fleet.run()
            return host.failure
        fleet.run()
    return None


class _Wakeup:
    """Wakes the main thread: signals to end do, and other threads that have something to tell.

    Attributes:
        ours: is readable then.
    """

    def __enter__(self) -> _Wakeup:
        self.ours, self._theirs = socket.socketpair()
        self._theirs.setblocking(False)
        numbers = (signal.SIGINT, signal.SIGTERM)
        self._before = {number: signal.signal(number, lambda *_: None) for number in numbers}
        self._descriptor = signal.set_wakeup_fd(self._theirs.fileno(), warn_on_full_buffer=False)
        return self

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(self._descriptor)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self.ours.close()
        self._theirs.close()

    def ring(self) -> None:
        """From any thread."""
        with contextlib.suppress(OSError):
            self._theirs.send(b"\0")

    def answer(self) -> None:
        """Take up what has come, so that the next wait is for something new."""
        self.ours.recv(4096)


class _Host:
    """The worker host of this process, in a thread.

    Attributes:
        failure: why it serves no more, if it was not told to end.
    """

    def __init__(self, given: Mapping[str, Any], wakeup: _Wakeup) -> None:
        options = model_options(given)
        self._worker = RedisWorker(
            options.pop("predict_function_or_model"),
            redis_broker=given["redis"],
            prefix=given["prefix"],
            secret=given["secret"],
            model_name=model_name(given["model"]),
            **options,
        )
        self._wakeup = wakeup
        self._progress = Progress(model_name(given["model"]))
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
            self._worker.wait_ready()
            self._progress.close()
            self._worker.run_forever()
        except StreamerError as error:
            self.failure = error
        self._wakeup.ring()


class _Fleet:
    """The web processes. Of the main thread."""

    def __init__(self, given: Mapping[str, Any], sock: socket.socket, wakeup: _Wakeup) -> None:
        self._given = given
        self._sock = sock
        self._wakeup = wakeup
        self._context = multiprocessing.get_context("spawn")
        # Web processes see its end when this process is gone.
        self._theirs, self._ours = self._context.Pipe(duplex=False)
        self._processes: dict[int, BaseProcess] = {}
        self._redis_watch = -1
        #: To be started again if it dies; None if it is somebody else's.
        self.redis: LocalRedis | None = None

    def run(self) -> None:
        """Until a signal, or until the worker host ends."""
        try:
            self._watch_redis()
            for number in range(self._given["web_workers"]):
                self._start(number)
            while not self._await_change():
                pass
        finally:
            self._end()

    def _start(self, number: int, *, is_restart: bool = False) -> None:
        process = self._context.Process(
            target=_web_process,
            args=(self._given, self._sock, self._theirs, number, is_restart),
            name=f"web {number}",
        )
        process.start()
        logger.info("web process %d runs (pid %d)", number, process.pid)
        self._processes[number] = process

    def _await_change(self) -> bool:
        """Start again what has died; whether it is time to end."""
        sentinels = {each.sentinel: number for number, each in self._processes.items()}
        watched = [self._redis_watch] if self._redis_watch >= 0 else []
        ready = multiprocessing.connection.wait([self._wakeup.ours, *watched, *sentinels])
        if self._wakeup.ours in ready:
            return True
        for sentinel in ready:
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
        if multiprocessing.connection.wait([self._wakeup.ours], _PAUSE):
            return True
        if self._redis_watch in ready and self.redis is not None:
            self.redis.kill()  # which takes up its end
            self.redis.start()
            self._watch_redis()
        for number in range(self._given["web_workers"]):
            if number not in self._processes:
                self._start(number, is_restart=True)
        return False

    def _watch_redis(self) -> None:
        if self._redis_watch >= 0:
            os.close(self._redis_watch)
        self._redis_watch = -1
        if self.redis is not None and hasattr(os, "pidfd_open"):  # Linux
            self._redis_watch = os.pidfd_open(self.redis.pid)

    def _end(self) -> None:
        began = time.monotonic()
        deadline = began + self._given["timeout"] + _GRACE
        self._sock.close()
        self._ours.close()  # which tells them to end
        if multiprocessing.connection.wait([self._wakeup.ours], 0):
            self._wakeup.answer()  # the wish that this is the end of
        while alive := [each for each in self._processes.values() if each.is_alive()]:
            sentinels = [each.sentinel for each in alive]
            left = max(0.0, deadline - time.monotonic())
            ready = multiprocessing.connection.wait([self._wakeup.ours, *sentinels], left)
            if self._wakeup.ours in ready:
                self._wakeup.answer()
                if time.monotonic() - began <= SAME_SIGNAL:
                    continue
            if not ready or self._wakeup.ours in ready:
                for process in alive:
                    process.kill()
                deadline = math.inf
        for process in self._processes.values():
            process.join()
        self._theirs.close()
        if self._redis_watch >= 0:
            os.close(self._redis_watch)


def _web_process(
    given: Mapping[str, Any],
    sock: socket.socket,
    owner: multiprocessing.connection.Connection,
    number: int,
    is_restart: bool,
) -> None:
    configure_logging(given["log_format"])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal, which the owner gets as well
    options = service_options(given)
    streamer = make_redis_streamer(given, given["redis"])
    address = sock.getsockname()

    def ready(service: Service, seconds: float) -> None:
        logger.info("web process %d can be asked", number)
        if number == 0 and not is_restart:
            announce(service, address, seconds)

    run_service(
        streamer, options, sock, given["server"],
        on_ready=ready, owner=owner.fileno(), serves_at_once=not is_restart,
    )  # fmt: skip
