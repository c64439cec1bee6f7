"""Memory that other processes have made, passed on to a process that runs already.

     MemorySender                                        Windows
     ------------                                        -------
     send(memory) ── its number and descriptor ────────▶ window(number): mapped when it is needed
     message with a wire of that number ───────────────▶ payloads: views of the pages, no copy
     ◀── message: blocks without views, with the number  pop_ended()
     forget(number) ───────────────────────────────────▶ unmapped

Descriptors go through a socket of their own, so they need no ``/proc``, which may be hidden or
missing, and the other messages need no ``recvmsg``. A descriptor is sent before the message that
needs it. So it is there when that message is read.
"""

from __future__ import annotations

import collections
import contextlib
import os
import socket
import threading
from typing import Any

from .shared_memory import Memory
from .window import Window

#: Most memories that a reader has at a time: each costs it a mapping and two descriptors. Far below
#: the usual limit of 1024 descriptors; arbitrary.
_MOST = 128

_NUMBER_SIZE = 8


def _packed(number: int) -> bytes:
    return number.to_bytes(_NUMBER_SIZE, "little", signed=True)


class MemorySocket:
    """The receiving end; closed when it is collected. It can be passed to a new process."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.connection = connection

    def __reduce__(self) -> Any:
        return MemorySocket, (self.connection,)

    def __del__(self) -> None:
        self.connection.close()


def memory_sockets() -> tuple[MemorySender, MemorySocket]:
    """Both ends. Raises OSError: there are no descriptors left."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return MemorySender(ours), MemorySocket(theirs)


class MemorySender:
    """Passes memory on to one reader. Not thread-safe. Never blocks."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._connection = connection
        self._passed: dict[int, Memory] = {}
        self._forgotten: collections.deque[int] = collections.deque()  # the reader is not told yet

    def __del__(self) -> None:
        self._connection.close()

    def send(self, memory: Memory) -> bool:
        """Pass memory on if that was not done; whether the reader has it."""
        if memory.number in self._passed:
            return True
        self._say_forgotten()
        if self._forgotten or len(self._passed) >= _MOST:
            return False
        with contextlib.suppress(OSError):  # the reader takes nothing more, or is gone
            socket.send_fds(self._connection, [_packed(memory.number)], [memory.descriptor])
            self._passed[memory.number] = memory
            return True
        return False

    def passed(self) -> list[Memory]:
        """What the reader has."""
        return [*self._passed.values()]

    def forget(self, number: int) -> None:
        """The reader reads nothing of this memory, and will not: let it unmap that."""
        if self._passed.pop(number, None) is not None:
            self._forgotten.append(number)
            self._say_forgotten()

    def _say_forgotten(self) -> None:
        with contextlib.suppress(OSError):
            while self._forgotten:
                self._connection.send(_packed(-self._forgotten[0]))
                self._forgotten.popleft()

    def close(self) -> None:
        """The reader is gone."""
        self._passed.clear()
        self._connection.close()


class Windows:
    """Reads payloads from memory that a ``MemorySender`` passes on.

    For any thread, except ``pop_ended``.

    Args:
        received: from where the memory comes.
        private: see ``Window``.

    Attributes:
        is_used: whether any memory was ever passed on.
    """

    def __init__(self, received: MemorySocket, *, private: bool) -> None:
        self.is_used = False
        self._received = received
        self._private = private
        self._windows: dict[int, Window] = {}
        self._unread: list[tuple[int, int]] = []
        self._lock = threading.RLock()  # a finalizer of a user's may interrupt us

    def close(self) -> None:
        """Nothing more is to come. What was loaded can still be read."""
        with self._lock:
            self._received.connection.close()
            self._windows.clear()

    def abandon(self) -> None:
        """Close this process's copies, in a forked child: another thread may hold the lock."""
        with contextlib.suppress(OSError):  # without gevent's hub, which is the parent's
            os.close(self._received.connection.detach())
        self._windows = {}

    def fileno(self) -> int:
        """Readable when ``take_in`` has something to do."""
        return self._received.connection.fileno()

    def take_in(self) -> bool:
        """Take in what was passed on or is to be forgotten; whether more may come."""
        with self._lock:
            try:
                while True:
                    data, descriptors, _, _ = socket.recv_fds(
                        self._received.connection, _NUMBER_SIZE, 1, socket.MSG_CMSG_CLOEXEC
                    )
                    if not data:
                        return False
                    self._take(int.from_bytes(data, "little", signed=True), descriptors)
            except BlockingIOError:
                return True
            except OSError:  # the other end is gone
                return False

    def _take(self, number: int, descriptors: list[int]) -> None:
        if number < 0:
            self._windows.pop(-number, None)
        elif descriptors:  # else this process may not have more
            self.is_used = True
            memory = Memory.received(descriptors[0])
            self._windows[number] = Window(memory, private=self._private)

    def window(self, number: int, block: int) -> Window:
        """For a payload in a block of this memory.

        Raises:
            OSError: this process had no descriptor free when the memory came.
        """
        window = self._windows.get(number)
        if window is None:
            self.take_in()
            window = self._windows.get(number)
        if window is None:
            self._unread.append((number, block))
            raise OSError("this process has too many files open to read shared memory")
        return window

    def pop_ended(self) -> list[tuple[int, int]]:
        """The blocks that are no longer in use, with the numbers of their memories."""
        with self._lock:
            unread, self._unread = self._unread, []
            return unread + [
                (number, block)
                for number, window in self._windows.items()
                for block in window.pop_ended()
            ]

    def view(self, address: int, size: int) -> memoryview | None:
        """See ``Window.view``."""
        with self._lock:
            views = (each.view(address, size) for each in self._windows.values())
            return next((each for each in views if each is not None), None)
