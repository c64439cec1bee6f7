"""The log of a pool's process, which never waits for whoever reads it.

    the pool's own lines ───────────────┐
                                        ├─▶ a thousand at most ─▶ a file, or the first
    what its workers print ─▶ a pipe ───┘                         client's stderr

That stderr may be a pipe that nobody reads, and a write to a full pipe blocks. The descriptor
cannot be told not to block: the client has the same. So a thread of its own writes there, and what
finds no room is dropped and counted. Another thread reads what is printed, so that no worker has to
wait.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import select

from ..engine.timer import start_thread

#: Lines that may wait, or pieces of what is printed.
_MOST_LINES = 1000

#: Bytes of such a piece.
_PIECE = 4096

_STDOUT, _STDERR = 1, 2


def opened_log(path: str) -> int:
    """A descriptor that appends to the file, which is made if it is not there.

    Raises:
        OSError: it cannot be written to.
    """
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)


class PoolLog(logging.Handler):
    """Writes lines in a thread of its own; counts those for which there is no room.

    Args:
        descriptor: where it writes to.
        layout: of a line, as of ``logging.Formatter``.
        path: of the file that this is, if it may be renamed: then a new one is begun.
    """

    def __init__(self, descriptor: int, layout: str, path: str | None = None) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter(layout))
        self._descriptor = descriptor
        self._path = path
        self._dropped = 0
        # Unlike a Queue it may be put to by a finalizer that runs while the same thread does so.
        self._lines: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._thread = start_thread(self._write_on, "log")
        self._printed: int | None = None

    def catch_output(self) -> None:
        """Log what this process and its children print, which have a pipe for that from here on."""
        self._descriptor = os.dup(self._descriptor)  # one of those that are about to be replaced
        self._end_reader, self._end_writer = os.pipe()
        self._printed, writer = os.pipe()
        for each in (_STDOUT, _STDERR):
            os.dup2(writer, each)
        os.close(writer)
        start_thread(self._read_on, "output")

    def emit(self, record: logging.LogRecord) -> None:
        """Locked by the caller."""
        self._put(f"{self.format(record)}\n".encode(errors="backslashreplace"))

    def _put(self, lines: bytes) -> None:
        """Locked, for the count."""
        if self._lines.qsize() >= _MOST_LINES:
            self._dropped += lines.count(b"\n") or 1
        else:
            self._lines.put(lines)

    def end(self, seconds: float) -> None:
        """Wait so long for what is left to be written.

        If it is, what this process prints from here on goes there directly.
        """
        if self._printed is None:
            self._lines.put(None)
        else:
            os.close(self._end_writer)
        self._thread.join(seconds)
        if self._printed is not None and not self._thread.is_alive():
            for each in (_STDOUT, _STDERR):
                os.dup2(self._descriptor, each)

    def _read_on(self) -> None:
        assert self._printed is not None
        while self._end_reader not in select.select([self._printed, self._end_reader], [], [])[0]:
            self._take(self._printed)
        os.set_blocking(self._printed, False)
        with contextlib.suppress(BlockingIOError):
            while self._take(self._printed):
                pass
        self._lines.put(None)

    def _take(self, printed: int) -> bool:
        piece = os.read(printed, _PIECE)
        with self.lock:  # type: ignore[union-attr]  # it has one: see logging.Handler
            self._put(piece)
        return bool(piece)

    def _write_on(self) -> None:
        while (lines := self._lines.get()) is not None:
            self._write(lines)
            with self.lock:  # type: ignore[union-attr]  # as above
                dropped, self._dropped = self._dropped, 0
            if dropped:
                text = f"{dropped} log lines were dropped: the log's reader was too slow\n"
                self._write(text.encode())

    def _write(self, rest: bytes) -> None:
        # Not through sys.stderr, whose lock the end of the process would wait for.
        with contextlib.suppress(OSError):  # the reader is gone, or the disk is full
            self._follow()
            while rest:
                try:
                    rest = rest[os.write(self._descriptor, rest) :]
                except BlockingIOError:  # a client has made it so
                    select.select([], [self._descriptor], [])

    def _follow(self) -> None:
        """Begin a new file if the last one was renamed or removed, as by logrotate."""
        if self._path is None:
            return
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.stat(self._path), os.fstat(self._descriptor)):
                return
        with contextlib.suppress(OSError):  # then the old one goes on
            new = opened_log(self._path)
            os.dup2(new, self._descriptor, inheritable=False)
            os.close(new)
