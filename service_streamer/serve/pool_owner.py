"""The pool of a service with several web processes: started, watched and ended by their parent."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import secrets
import select
import signal
import threading
import time
from pathlib import Path

from ..engine.operator_signals import SignalSocket
from ..errors import PredictTimeout, StreamerClosed, StreamerError
from ..options.table import StreamerOptions
from ..pool.control import ask_pool, await_end
from ..pool.directory import has_process, own_directory, paths_of
from ..pool.pool_client import PoolClient
from .hosted_model import ServiceFailed
from .http.dashboard import advice_for
from .http.pool_view import PoolFigures
from .logs import LoadingProgress, lines_of, name_lines
from .opening import streamer_of

logger = logging.getLogger(__name__)

#: Seconds to wait for an answer of the pool. It answers at once, if it does: nobody else uses it.
_PATIENCE = 2.0


def owned(options: StreamerOptions) -> StreamerOptions:
    """With a pool that only the processes of one service know, and that ends with them."""
    return dataclasses.replace(options, shared=f"serve-{secrets.token_hex(4)}", linger=0.0)


class PoolOwner:
    """A client of the pool that computes nothing. For the main thread, but for ``retire``.

    Args:
        target, options: of the web processes' streamers.
        label: what is waited for.
        model: its name, for the log.
        wakeup: rung when the service has to end.
        grace: seconds that the pool may take to end, without clients, before it is killed: that of
            its workers.

    Attributes:
        directory: that of the pool's files; known within the block.
        settled: set when the model is loaded, or cannot be.
        failure: why the pool serves no more; a ``ServiceFailed`` if it has served.
    """

    def __init__(
        self,
        target: str,
        options: StreamerOptions,
        label: str,
        wakeup: SignalSocket,
        *,
        model: str,
        grace: float = 15.0,
    ) -> None:
        assert options.shared is not None
        self._name = options.shared
        self._target = target
        self._model = model
        self._grace = grace
        # This client makes no calls: the web processes have the cache.
        self._options = dataclasses.replace(
            options, cache_size=0, cache_ttl=None, deduplicate=False
        )
        self._wakeup = wakeup
        self._progress = LoadingProgress(label)
        self._changed = threading.Event()
        self._is_ending = self._is_retired = False
        self._thread = threading.Thread(target=self._run, name="pool owner")
        name_lines(self._thread, model)
        self.failure: Exception | None = None
        self.settled = threading.Event()

    def __enter__(self) -> PoolOwner:
        try:
            self.directory = own_directory()
            self._paths = paths_of(self._name, self.directory)
            self._streamer = streamer_of(self._target, self._options, self._model)
        except PermissionError as error:
            raise ValueError(str(error)) from error
        with lines_of(self._model):
            logger.info("the web processes share pool %s", self._name)
        self._progress.__enter__()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_ending = True
        self._changed.set()
        pid = self._client.pool_pid
        self._streamer.close(drain=False)
        self._thread.join()
        self._progress.__exit__()
        self._end_pool(pid)

    def give_up(self, why: Exception) -> None:
        """Do not wait any more until the model is loaded. From any thread."""
        self.failure = why
        self.settled.set()

    def retire(self) -> None:
        """End the pool while the service goes on. From any thread."""
        self._is_retired = True
        self.__exit__()

    @property
    def _client(self) -> PoolClient:
        client = self._streamer.pool_client
        assert client is not None
        return client

    def _end_pool(self, pid: int | None) -> None:
        """Wait until it has ended: it does by itself without clients."""
        with contextlib.suppress(StreamerError, OSError):  # there is none, or no directory of it
            pid = ask_pool(self._name, "stop", False, patience=_PATIENCE)
        if pid is not None and not self._await_end(pid) and self._is_pool(pid):
            logger.warning("pool %s (pid %d) does not end, and is killed", self._name, pid)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            await_end(pid, self._grace)
        has_process(self._paths)  # removes what a killed one has left

    def _await_end(self, pid: int) -> bool:
        """Wait for the end of the pool, at most until a signal; false if it has not ended."""
        until = time.monotonic() + self._grace
        with contextlib.suppress(ProcessLookupError):
            descriptor = os.pidfd_open(pid)
            try:
                # Its signals are the main thread's.
                signals = [] if self._is_retired else [self._wakeup.ours.fileno()]
                while (left := until - time.monotonic()) > 0:
                    ready = select.select([descriptor, *signals], [], [], left)[0]
                    if descriptor in ready:
                        return True
                    if ready and not {signal.SIGINT, signal.SIGTERM}.isdisjoint(
                        self._wakeup.answer()
                    ):
                        return False
                return False
            finally:
                os.close(descriptor)
        return True

    def _is_pool(self, pid: int) -> bool:
        with contextlib.suppress(OSError):
            line = Path(f"/proc/{pid}/cmdline").read_bytes()
            return line.startswith(f"service-streamer pool {self._name}".encode())
        return False

    def _run(self) -> None:
        try:
            self._watch()
        except StreamerClosed:
            pass
        except Exception as error:  # our bug; the service must end with its pool
            logger.exception("watching the pool failed; this is a bug in it")
            self.failure = ServiceFailed(f"the service ends, since its pool failed: {error}")
        finally:
            self.settled.set()
            self._wakeup.ring()

    def _watch(self) -> None:
        backend = self._streamer.backend
        backend.when_workers_change(self._changed.set)
        try:
            self._await_start()  # the service ends if none can be started
            self._streamer.wait_ready()
        except StreamerClosed:
            return
        except StreamerError as error:
            self.failure = error
            return
        self._progress.close()
        self.settled.set()
        while not self._is_ending:
            self._changed.wait()
            self._changed.clear()
            try:
                # It fails if the next pool cannot be started, for example.
                self._streamer.stats()
            except StreamerClosed:
                return
            except PredictTimeout:
                if self._client.pool_pid is None:
                    # Nothing tells that none can be started, other than a question.
                    self._changed.set()
                continue  # it hangs, and may go on; or it starts slowly
            except StreamerError as error:
                self.failure = ServiceFailed(
                    f"the service ends, since its workers have no process any more: {error}"
                )
                return

    def _await_start(self) -> None:
        while True:
            try:
                self._client.try_start_once()
                return
            except PredictTimeout as error:  # its process takes long to start; the service may end
                logger.info("the process of the workers is not there yet: %s", error)

    def restart(self) -> None:
        """Replace the workers one at a time. Blocks. Raises StreamerError."""
        self._streamer.restart_workers()

    def report(self) -> list[str]:
        """Lines for the log. Raises StreamerError: the pool does not answer."""
        figures = PoolFigures.of(self._streamer)
        return [figures.stats.gist, *advice_for(figures.findings)]
