"""Frames on their way into a socket that does not block, and the users at its two ends."""

from __future__ import annotations

import os
import socket
import struct
import threading
from collections.abc import Callable

#: Bytes of the length that comes before each frame.
HEADER_SIZE = 8


class Outbox:
    """Writes frames in order, and keeps what the socket does not take yet. Any thread.

    The frames are those of ``workers.protocol.FrameReader``. Each is made when the ones before it
    have gone: what has to be sent meanwhile goes with it.

    Args:
        next_frame: makes the next one; empty if nothing is to be sent. Called by one thread at a
            time.
    """

    def __init__(self, descriptor: int, next_frame: Callable[[], bytes]) -> None:
        self._descriptor = descriptor
        self._next_frame = next_frame
        # Reentrant: a finalizer that drops a call may run in the midst of a write.
        self._lock = threading.RLock()
        self._is_writing = False
        self._rest: memoryview | None = None
        self.is_closed = False

    @property
    def has_rest(self) -> bool:
        """Whether something waits for room in the socket."""
        return self._rest is not None

    def write(self) -> bool:
        """Write what the socket takes; whether nothing is left.

        Raises:
            OSError: the other end is gone.
        """
        with self._lock:
            if self._is_writing:  # what this has interrupted goes on with it
                return True
            self._is_writing = True
            try:
                while not self.is_closed:
                    data = self._rest if self._rest is not None else self._next()
                    if not data:
                        break
                    try:
                        count = os.write(self._descriptor, data)
                    except BlockingIOError:
                        self._rest = data
                        return False
                    self._rest = data[count:] if count < len(data) else None
                return True
            finally:
                self._is_writing = False

    def _next(self) -> memoryview:
        frame = self._next_frame()
        return memoryview(framed(frame) if frame else b"")

    def close(self) -> None:
        """Write nothing more: the descriptor is about to be another file's."""
        with self._lock:
            self.is_closed = True
            self._rest = None


def framed(frame: bytes) -> bytes:
    """A frame as it is sent."""
    return len(frame).to_bytes(HEADER_SIZE, "little") + frame


def user_of(connection: socket.socket) -> tuple[int, int]:
    """The process and the user at the other end, as the kernel knows them."""
    size = struct.calcsize("3i")
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    pid, user, _ = struct.unpack("3i", found)
    return pid, user
