"""One worker process as its parent sees it: the process, and the parent's ends of its pipes."""

from __future__ import annotations

import contextlib
import multiprocessing.connection
import multiprocessing.process
import os
import threading
from collections.abc import Callable
from multiprocessing import forkserver
from typing import Any

from ..options import WorkerOptions
from .child import Boot, run_child
from .messages import Failure
from .pipes import FrameReader, FrameWriter
from .placement import environment
from .worker import ModelSpec

__all__ = ["WorkerProcess"]


class WorkerProcess:
    """One process and the parent's ends of its pipes. ``write`` is for any thread."""

    def __init__(self, slot: int) -> None:
        self.slot = slot
        self.process: Any = None
        self.is_ready = False
        self.is_gone = False
        self.start_failure: Failure | None = None
        self.has_unwritten = False
        #: Readable when the process has ended.
        self.death_descriptor = -1
        self._write_lock = threading.Lock()
        self._requests, self.request_end = multiprocessing.connection.Pipe(duplex=False)
        self.response_end, self._responses = multiprocessing.connection.Pipe(duplex=False)
        os.set_blocking(self.request_end.fileno(), False)
        os.set_blocking(self.response_end.fileno(), False)
        self._writer = FrameWriter(self.request_end.fileno())
        self.reader = FrameReader(self.response_end.fileno())

    def __str__(self) -> str:
        return f"worker {self.slot} (pid {self.process.pid})"

    def start(self, options: WorkerOptions, spec: ModelSpec | None) -> None:
        """Start the process; on an error nothing of it is left.

        Args:
            spec: for a forked child, which has it in its memory; None if it comes as a frame.
        """
        try:
            self._start(options, spec)
        except BaseException:
            if self.process is not None and self.process.pid is not None:
                self.process.kill()
                self.reap()
            else:
                self._release()
            raise
        finally:
            # The child has its own copies; with ours open there would be no end-of-file.
            self._requests.close()
            self._responses.close()

    def _start(self, options: WorkerOptions, spec: ModelSpec | None) -> None:
        context: Any = multiprocessing.get_context(options.mp_start_method)
        if options.mp_start_method == "forkserver":
            forkserver.ensure_running()  # or it would keep the environment of its first child
        with environment(options, self.slot) as variables:
            boot = Boot(spec, options.device(self.slot), variables)
            # Not a daemon in multiprocessing's sense: those may not have children, which a model
            # may want (data loaders). The engine sees to it that none outlives the interpreter.
            self.process = context.Process(
                target=run_child,
                args=(boot, self._requests, self._responses),
                name=f"service_streamer worker {self.slot}",
                daemon=False,
            )
            self.process.start()
        if hasattr(os, "pidfd_open"):
            # Unlike multiprocessing's sentinel, a pipe whose other end a model's own child
            # processes may inherit, this tells the end of the worker itself.
            with contextlib.suppress(OSError):  # Linux before 5.3
                self.death_descriptor = os.pidfd_open(self.process.pid)
        if self.death_descriptor < 0:
            self.death_descriptor = os.dup(self.process.sentinel)

    def write(self, frame: bytes) -> bool:
        """Write or keep the frame; False if some is kept and the loop should flush it."""
        with self._write_lock:
            if self.is_gone:
                return True
            return self._written(lambda: self._writer.write(frame))

    def flush(self) -> None:
        with self._write_lock:
            self._written(self._writer.flush)

    def _written(self, write: Callable[[], bool]) -> bool:
        try:
            self.has_unwritten = not write()
        except BrokenPipeError:  # it is dying, and its descriptor will say so
            self.has_unwritten = False
            return True
        return not self.has_unwritten

    def reap(self) -> int | None:
        """Collect the dead process and release everything of it; its exit code."""
        self.process.join()
        exit_code: int | None = self.process.exitcode
        self._release()
        with contextlib.suppress(ValueError):  # somebody else has collected it: gevent may
            self.process.close()
        return exit_code

    def abandon_in_forked_child(self) -> None:
        """Let go of a process that is not this one's child."""
        self._write_lock = threading.Lock()  # somebody may have held it at the fork
        self._release()
        # There is no public way to say it, and multiprocessing, which does not notice a plain fork,
        # would fail to join it when this process exits.
        getattr(multiprocessing.process, "_children", set()).discard(self.process)

    def _release(self) -> None:
        with self._write_lock:
            self.is_gone = True
            self.has_unwritten = False
            self._writer = FrameWriter(-1)  # and let go of what was never written
        if self.death_descriptor >= 0:
            os.close(self.death_descriptor)
        self.request_end.close()
        self.response_end.close()
