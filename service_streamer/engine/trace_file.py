"""Records when calls arrive, for the simulator to replay: one line of JSON for each.

    {"at": 0.001532, "items": 2, "lengths": [25, 3], "priority": 1, "tenant": "a"}

``at`` is in seconds since the streamer was built. Lengths are there if the streamer knows them;
priority and tenant if they are not the usual ones. Nothing of the items themselves is written.
"""

from __future__ import annotations

import collections
import contextlib
import fcntl
import io
import json
import logging
import os
import threading
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..observe.record import Call
from .backend import Backend, PassThrough

logger = logging.getLogger(__name__)

#: Calls that are written at a time. Arbitrary: some ten kilobytes.
_ROOM = 256


class Recording(PassThrough):
    """A backend that notes down each call that is accepted, and never makes one fail.

    When the file cannot be written, that is logged once, and nothing is recorded any more. The file
    is made anew with the first call. ``{pid}`` in its path is the number of the process.
    """

    def __init__(self, inner: Backend, path: Path) -> None:
        super().__init__(inner)
        self._begun = time.monotonic()
        self._file = _TraceFile(path)
        # Also of a streamer that is never closed, and at exit.
        weakref.finalize(self, self._file.close)

    def submit(self, call: Call) -> None:
        at = time.monotonic() - self._begun
        items = call.payloads  # before they are encoded
        self._inner.submit(call)
        if not self._file.is_closed and call.size:
            # The call is accepted: what a user's ``length`` raises now is not its failure.
            with contextlib.suppress(Exception):
                self._file.add(self._line(at, items, call))

    def close(self, *, drain: bool, timeout: float | None) -> None:
        try:
            self._inner.close(drain=drain, timeout=timeout)
        finally:
            self._file.close()

    def _line(self, at: float, items: Sequence[Any], call: Call) -> str:
        # By hand, since json.dumps takes several times as long.
        line = f'{{"at": {at:.6f}, "items": {len(items)}'
        if self._inner.lengths is not None:
            # A call that is over, which it may be by now, has let go of its lengths.
            lengths = call.lengths or self._inner.lengths(items)
            line += f', "lengths": [{", ".join([f"{length:.6g}" for length in lengths])}]'
        if call.options.priority:
            line += f', "priority": {call.options.priority}'
        if call.options.tenant:
            line += f', "tenant": {json.dumps(call.options.tenant)}'
        return line + "}\n"


class _TraceFile:
    """Lines for a file, written many at a time by whoever adds the last of them."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.is_closed = False
        self._begin()

    def _begin(self) -> None:
        self._pid = os.getpid()
        self._lines: collections.deque[str] = collections.deque()  # its methods are atomic
        # Of the file. Reentrant: a user's finalizer that closes may run while it is held.
        self._lock = threading.RLock()
        self._is_writing = self._is_ending = False
        self._file: io.FileIO | None = None

    def add(self, line: str) -> None:
        if os.getpid() != self._pid:  # what waits in a fork's copy is the parent's to write
            self._begin()
        self._lines.append(line)
        if len(self._lines) >= _ROOM and not self._is_writing:  # else a slow file holds up others
            self._write()

    def close(self) -> None:
        """Write what is there, and release the file. May be called again."""
        if os.getpid() == self._pid:
            with self._lock:  # another thread is to write all before it ends
                self._is_ending = True
                self._write()

    def _write(self) -> None:
        with self._lock:
            if self.is_closed or self._is_writing:  # what it interrupts in this thread sees to it
                return
            self._is_writing = True
            lines = self._lines
            try:
                if self._file is None:
                    self._file = self._open()
                rest = "".join([lines.popleft() for _ in range(len(lines))]).encode()
                while rest:
                    rest = rest[self._file.write(rest) :]
            except OSError as error:
                self._is_ending = True
                logger.warning("calls are not recorded any more in %s: %s", self._path, error)
            finally:
                self._is_writing = False
            if self._is_ending:
                self.is_closed = True
                lines.clear()
                file, self._file = self._file, None
                if file is not None:
                    # Some network file systems tell only now that they could not write. And a
                    # worker that was forked has the file, too, and would keep it locked.
                    with contextlib.suppress(OSError), file:
                        fcntl.flock(file, fcntl.LOCK_UN)

    def _open(self) -> io.FileIO:
        path = str(self._path).replace("{pid}", str(os.getpid()))
        file = io.FileIO(path, "a")  # emptied only under the lock
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if file.seek(0, os.SEEK_END):
                file.truncate(0)
        except OSError as error:
            file.close()
            if not isinstance(error, BlockingIOError):
                raise
            raise OSError(
                "another streamer records there; with several processes, put {pid} into the path"
            ) from None
        return file
