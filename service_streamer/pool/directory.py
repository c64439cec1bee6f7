"""The private directory of a user's pools, the files of a pool in it, and who starts the pool.

    NAME.lock   locked by the pool's process for as long as it has the name; never read
    NAME.sock   its socket
    NAME.log    its log, unless it has another one; stays

Only its user may enter the directory, so whoever connects is this user, as root may be. The peers
look at each other's user all the same.

Whoever gets the lock starts the pool. The kernel releases the lock when the pool ends.

     first client                       the pool's process
     ------------                       ------------------
     elect: locks NAME.lock
     listen: binds NAME.sock
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
import stat
from pathlib import Path
from typing import NamedTuple

from ..options.kinds import POOL_NAME

#: The most bytes of a socket's path: ``sun_path`` has 108, with a zero at its end.
_MAX_PATH_BYTES = 107

_FOLDER = "service-streamer"  # no name that Python imports: it may lie in a path of modules

#: The directory of this process's pools, if its parent has chosen it.
chosen: str | None = None


class PoolPaths(NamedTuple):
    """The files of a pool."""

    lock: str
    socket: str
    log: str


def own_directory() -> str:
    """The directory of this process's pools; it is made if it is not there.

    It is in ``XDG_RUNTIME_DIR`` if that is this user's own, or else in ``/tmp``.

    Raises:
        PermissionError: another user could enter it, or has made it.
        OSError: it cannot be made.
    """
    user, path = os.geteuid(), chosen
    if path is None:
        runtime = os.environ.get("XDG_RUNTIME_DIR", "")
        if os.path.isabs(runtime) and _why_unsafe(runtime, user) is None:
            path = os.path.join(runtime, _FOLDER)
        else:
            path = f"/tmp/{_FOLDER}-{user}"
    make_private(path, user)
    return path


def make_private(path: str, user: int) -> None:
    """Make the directory if it is not there: something that tidies up may have removed it.

    Raises:
        PermissionError, OSError: see ``own_directory``.
    """
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        pass
    except FileNotFoundError:
        raise FileNotFoundError(
            f"the directory {path} for shared pools is gone, and the one that it was in; make that "
            "again, or start this process again with another XDG_RUNTIME_DIR"
        ) from None
    why = _why_unsafe(path, user)
    if why is not None:
        raise PermissionError(
            f"the directory {path} for shared pools {why}; remove it, or set XDG_RUNTIME_DIR to a "
            "directory that only this user may enter"
        )


def _why_unsafe(path: str, user: int) -> str | None:
    """Why others could put files there, or take them away; None if they cannot."""
    try:
        found = os.lstat(path)
    except OSError as error:
        return f"cannot be looked at ({error.strerror})"
    if stat.S_ISLNK(found.st_mode):
        return "is a symbolic link"
    if not stat.S_ISDIR(found.st_mode):
        return "is no directory"
    if found.st_uid != user:
        return f"belongs to another user (id {found.st_uid})"
    if found.st_mode & 0o077:
        return f"may be entered by other users (its mode is {stat.S_IMODE(found.st_mode):o})"
    return None


def paths_of(name: str, directory: str) -> PoolPaths:
    """The files of a pool.

    Raises:
        ValueError: the name is none, or the path of the socket would be too long.
    """
    POOL_NAME.check("shared", name)
    socket = os.path.join(directory, f"{name}.sock")
    size = len(os.fsencode(socket))
    if size > _MAX_PATH_BYTES:
        raise ValueError(
            f"the path {socket} has {size} bytes, and that of a socket at most {_MAX_PATH_BYTES}; "
            "choose a shorter name, or set XDG_RUNTIME_DIR to a directory with a shorter path"
        )
    lock, log = (os.path.join(directory, f"{name}.{kind}") for kind in ("lock", "log"))
    return PoolPaths(lock, socket, log)


#: Connections that may wait to be accepted: gunicorn's workers all connect at once.
_BACKLOG = 512


def elect(paths: PoolPaths) -> int | None:
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


def has_process(paths: PoolPaths) -> bool:
    """Whether the name has a pool. Removes what a killed one has left behind.

    A pool also has its name if a cleaner of old files has removed its lock, and its socket is left.
    """
    descriptor = elect(paths) if os.path.exists(paths.lock) else None
    if descriptor is None:
        return os.path.exists(paths.lock) or _is_listened_to(paths)
    if _is_listened_to(paths):
        os.close(descriptor)  # without removing the socket
        return True
    Leadership(descriptor, paths).resign(keep_log=False)
    return False


def pool_names() -> list[str]:
    """The pools of this user that have a process, in order.

    Raises:
        OSError: see ``own_directory``.
    """
    directory = own_directory()
    found = {path.stem for path in Path(directory).iterdir() if path.suffix in (".sock", ".lock")}
    return sorted(
        name for name in found if _is_name(name) and has_process(paths_of(name, directory))
    )


def _is_name(name: str) -> bool:
    try:
        POOL_NAME.check("shared", name)
    except ValueError:  # another program has made the file
        return False
    return True


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


def listen(paths: PoolPaths) -> socket.socket:
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
        descriptor: from ``elect``.

    Attributes:
        is_over: whether it was given up.
    """

    def __init__(self, descriptor: int, paths: PoolPaths) -> None:
        self._descriptor = descriptor
        self._paths = paths
        self.is_over = False

    def resign(self, *, keep_log: bool) -> None:
        """Give it up, and remove the files: the next one makes its own. Idempotent.

        Args:
            keep_log: whether more may be logged. Else an empty log is removed, as most are.
        """
        if not self.is_over:
            self.is_over = True
            if self._has_the_files():
                log, paths = self._paths.log, [self._paths.socket, self._paths.lock]
                with contextlib.suppress(FileNotFoundError):
                    if not keep_log and not os.stat(log).st_size:
                        paths.insert(0, log)  # while the lock is held: then it may be another's
                for path in paths:
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(path)
            os.close(self._descriptor)

    def _has_the_files(self) -> bool:
        """False if somebody has removed the lock, and another process may have made its own."""
        try:
            return os.stat(self._paths.lock).st_ino == os.fstat(self._descriptor).st_ino
        except FileNotFoundError:
            return False


#: Memory without a name; the end of a process that is no child; the user at the other end of a
#: connection; descriptors that arrive one message at a time.
_NEEDED = (
    (os, "memfd_create"),
    (os, "pidfd_open"),
    (socket, "SO_PEERCRED"),
    (socket, "SOCK_SEQPACKET"),
)


def why_unsupported() -> str:
    """Why no pool can be shared here, and what to do; empty if one can."""
    missing = [name for module, name in _NEEDED if not hasattr(module, name)]
    if not missing:
        return ""
    return (
        f"a shared pool needs Linux: this system has no {', '.join(missing)}; use one process "
        "with a pool of its own (serve: --web-workers 1), or share workers over Redis"
    )
