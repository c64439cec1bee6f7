"""Who starts the pool: whoever gets its lock, which the kernel releases when the pool ends.

     first client                       the pool's process
     ------------                       ------------------
     elected: locks NAME.lock
     listening: binds NAME.sock
     starts the process with both ────▶ holds the lock, accepts
     closes its own copies              resigns: closes the lock, or ends by any signal

The lock belongs to the open file, and not to a process: it goes over with the descriptor, and there
is no moment without an owner. Other clients can connect as soon as the socket is bound, before the
process has begun to accept.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket

from .directory import PoolPaths

#: Connections that may wait to be accepted: gunicorn's workers all connect at once.
_BACKLOG = 512


def elected(paths: PoolPaths) -> int | None:
    """A descriptor that holds the lock of the name; None if another process does.

    Raises:
        OSError: the file cannot be made.
    """
    while True:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        descriptor = os.open(paths.lock, flags, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The one before us may have removed the file between our two steps.
            if os.stat(paths.lock).st_ino == os.fstat(descriptor).st_ino:
                return descriptor
        except BlockingIOError:
            os.close(descriptor)
            return None
        except FileNotFoundError:
            pass
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def is_led(paths: PoolPaths) -> bool:
    """Whether the name has a pool. Removes what a killed one has left behind.

    A pool also has its name if a cleaner of old files has removed its lock, and its socket is left.
    """
    descriptor = elected(paths) if os.path.exists(paths.lock) else None
    if descriptor is None:
        return os.path.exists(paths.lock) or _is_listened_to(paths)
    if _is_listened_to(paths):
        os.close(descriptor)  # without removing the socket
        return True
    Leadership(descriptor, paths).resign()
    return False


def _is_listened_to(paths: PoolPaths) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.setblocking(False)
        try:
            connection.connect(paths.socket)
        except BlockingIOError:  # more connections wait than it may have
            return True
        except OSError:
            return False
    return True


def listening(paths: PoolPaths) -> socket.socket:
    """The pool's socket. Only for who holds the lock: it replaces that of a pool before."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(paths.socket)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(paths.socket)
        listener.listen(_BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener


class Leadership:
    """The lock of a name, in the process that holds it.

    Args:
        descriptor: from ``elected``.

    Attributes:
        is_over: whether it was given up.
    """

    def __init__(self, descriptor: int, paths: PoolPaths) -> None:
        self._descriptor = descriptor
        self._paths = paths
        self.is_over = False

    def resign(self) -> None:
        """Give it up, and remove the files: the next one makes its own. Idempotent."""
        if not self.is_over:
            self.is_over = True
            if self._has_the_files():
                for path in (self._paths.socket, self._paths.lock):
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(path)
            os.close(self._descriptor)

    def _has_the_files(self) -> bool:
        """False if somebody has removed the lock, and another process may have made its own."""
        try:
            return os.stat(self._paths.lock).st_ino == os.fstat(self._descriptor).st_ino
        except FileNotFoundError:
            return False
