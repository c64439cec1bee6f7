"""Frames over a pipe, for an end that may block (a worker's) and one that must not (the parent's).

A frame is its length, 8 bytes little-endian, and its bytes. An empty frame is the stop sentinel.
``multiprocessing.Connection`` can neither read nor write a part of a message and go on later, so
one large batch could block the whole web process on one worker; hence this.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque

__all__ = ["Frame", "FrameReader", "FrameWriter"]

Frame = bytes | bytearray | memoryview

_HEADER_SIZE = 8
#: What a pipe holds on Linux: more is never there to be read at once.
_READ_SIZE = 65_536


class FrameReader:
    """Reads frames; at most one thread at a time. Does not own the descriptor."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._rest = b""  # what was read of the next frame, while its length is not known
        self._body = bytearray()  # of the next frame, when it did not come at once
        self._filled = 0

    def read(self) -> list[Frame]:
        """Read once; the frames that are whole now, often one, perhaps none.

        Raises:
            BlockingIOError: there is nothing to read, and the descriptor does not block.
            EOFError: the other end is closed.
        """
        if self._filled < len(self._body):
            count = os.readv(self._descriptor, [memoryview(self._body)[self._filled :]])
            if not count:
                raise EOFError
            self._filled += count
            if self._filled < len(self._body):
                return []
            frame, self._body, self._filled = self._body, bytearray(), 0
            return [frame]
        data = os.read(self._descriptor, _READ_SIZE)
        if not data:
            raise EOFError
        return self._split(self._rest + data if self._rest else data)

    def _split(self, data: bytes) -> list[Frame]:
        frames: list[Frame] = []
        start = 0
        self._rest = b""
        while (available := len(data) - start) >= _HEADER_SIZE:
            length = int.from_bytes(data[start : start + _HEADER_SIZE], "little")
            start += _HEADER_SIZE
            if length > available - _HEADER_SIZE:
                # The rest goes right where it belongs, however large it is.
                try:
                    self._body = bytearray(length)
                except (MemoryError, OverflowError):
                    if not frames:
                        raise
                    self._rest = data[start - _HEADER_SIZE :]  # the next time, then
                    return frames
                self._filled = len(data) - start
                self._body[: self._filled] = data[start:]
                return frames
            frames.append(memoryview(data)[start : start + length])
            start += length
        self._rest = data[start:]
        return frames


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
        header = len(frame).to_bytes(_HEADER_SIZE, "little")
        written = 0
        if not self._unwritten:
            with contextlib.suppress(BlockingIOError):
                written = os.writev(self._descriptor, (header, frame))
        if written == len(header) + len(frame):
            return True
        whole = memoryview(header)[written:], memoryview(frame)[max(0, written - _HEADER_SIZE) :]
        self._unwritten.extend(part for part in whole if part)
        return False

    def flush(self) -> bool:
        """Write what the pipe takes now; whether nothing is left."""
        unwritten = self._unwritten
        while unwritten:
            try:
                count = os.write(self._descriptor, unwritten[0])
            except BlockingIOError:
                return False
            if count == len(unwritten[0]):
                unwritten.popleft()
            else:
                unwritten[0] = unwritten[0][count:]
        return True
