"""What the command line asks pools: a connection for one question, and no client."""

from __future__ import annotations

import contextlib
import os
import select
import socket
from typing import Any, BinaryIO

from ..errors import StreamerBroken
from ..workers.protocol import Failure
from .directory import own_directory, paths_of
from .pool_protocol import (
    ANSWER,
    ASK,
    HEADER_SIZE,
    REFUSED,
    VISITOR_PROTOCOL,
    Hello,
    frame_of,
    pack,
    send_first,
    times,
    unpack,
    user_of,
)

#: Maximum seconds of one wait: the system refuses longer ones.
_MAX_WAIT = 86400.0


def ask_pool(name: str, method: str, *arguments: Any, patience: float | None = None) -> Any:
    """Ask the pool of a name.

    Args:
        patience: how long it may take to answer, in seconds; None for ``times.visit``.

    Raises:
        StreamerBroken: there is none, it does not answer, or it is that of another user.
        ValueError: the name is none, or the path of its socket would be too long.
        OSError: see ``own_directory``.
        Exception: whatever the pool raised.
    """
    patience = times.visit if patience is None else patience
    directory = own_directory()
    paths = paths_of(name, directory)
    hello = Hello(VISITOR_PROTOCOL, None, 0.0)
    question = pack([(*hello,), (ASK, 1, method, arguments)])
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(patience)
        try:
            connection.connect(paths.socket)
            _, user = user_of(connection)
            if user not in (os.geteuid(), 0):
                raise StreamerBroken(f"the socket {paths.socket} is that of another user ({user})")
            send_first(connection, None)
            connection.sendall(frame_of(question))
            with connection.makefile("rb") as file:
                value = _read_answer(file)
        except (FileNotFoundError, ConnectionRefusedError):
            raise StreamerBroken(
                f"there is no pool {name!r} in {directory}; processes with another "
                "XDG_RUNTIME_DIR have theirs elsewhere"
            ) from None
        except (BlockingIOError, TimeoutError):
            raise StreamerBroken(
                f"the pool {name!r} did not answer within {patience:g} s; is its process stopped?"
            ) from None
        except (OSError, EOFError) as error:
            raise StreamerBroken(f"the pool {name!r} does not answer: {error!r}") from None
    if isinstance(value, Failure):
        raise value.exception()
    return value


def _read_answer(file: BinaryIO) -> Any:
    """Raises OSError, EOFError, TimeoutError."""
    file.read(1)  # comes before the first frame
    while header := file.read(HEADER_SIZE):
        for message in unpack(file.read(int.from_bytes(header, "little"))):
            if message[0] == ANSWER:
                return message[2]
            if message[0] == REFUSED:
                raise OSError("; ".join(message[1]))
    raise EOFError("it has closed the connection")


def await_end(pid: int, seconds: float) -> bool:
    """Wait at most so many seconds, and a day, for a pool to end; whether it has ended."""
    with contextlib.suppress(ProcessLookupError):
        descriptor = os.pidfd_open(pid)
        try:
            poll = select.poll()
            poll.register(descriptor, select.POLLIN)
            return bool(poll.poll(1000 * min(seconds, _MAX_WAIT)))
        finally:
            os.close(descriptor)
    return True
