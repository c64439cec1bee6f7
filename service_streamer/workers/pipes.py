"""Frames over a pipe, for an end that may block (a worker's) and one that must not (the parent's).

A frame is its length, 8 bytes little-endian, and its bytes. An empty frame is the stop sentinel.
``multiprocessing.Connection`` can neither read nor write a part of a message and go on later, so
one large batch could block the whole web process on one worker; hence this.
"""

from __future__ import annotations

import os
from collections import deque

__all__ = ["FrameReader", "FrameWriter"]

_HEADER_SIZE = 8


class FrameReader:
    """Reads frames; at most one thread at a time. Does not own the descriptor."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._start(bytearray(_HEADER_SIZE), is_header=True)

    def read(self) -> bytearray | None:
        """The next frame. None if it is not all there yet and the descriptor does not block.

        Raises:
            EOFError: the other end is closed.
        """
        while True:
            while self._filled < len(self._buffer):
                try:
                    count = os.readv(self._descriptor, [memoryview(self._buffer)[self._filled :]])
                except BlockingIOError:
                    return None
                if not count:
                    raise EOFError
                self._filled += count
            if not self._is_header:
                frame = self._buffer
                self._start(bytearray(_HEADER_SIZE), is_header=True)
                return frame
            self._start(bytearray(int.from_bytes(self._buffer, "little")), is_header=False)

    def _start(self, buffer: bytearray, *, is_header: bool) -> None:
        self._buffer = buffer
        self._is_header = is_header
        self._filled = 0


class FrameWriter:
    """Writes frames in order and keeps what the pipe does not take yet; one thread at a time."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._unwritten: deque[memoryview] = deque()

    def write(self, frame: bytes) -> bool:
        """Append a frame and write what the pipe takes; whether nothing is left to ``flush``.

        Raises:
            BrokenPipeError: the other end is closed.
        """
        self._unwritten.append(memoryview(len(frame).to_bytes(_HEADER_SIZE, "little")))
        if frame:
            self._unwritten.append(memoryview(frame))
        return self.flush()

    def flush(self) -> bool:
        """Write what the pipe takes now; whether nothing is left."""
        while self._unwritten:
            # Two buffers are one frame. More would only matter if many small ones piled up.
            buffers = [self._unwritten[i] for i in range(min(2, len(self._unwritten)))]
            try:
                count = os.writev(self._descriptor, buffers)
            except BlockingIOError:
                return False
            for buffer in buffers:
                if count < len(buffer):
                    self._unwritten[0] = buffer[count:]
                    break
                count -= len(buffer)
                self._unwritten.popleft()
        return True
