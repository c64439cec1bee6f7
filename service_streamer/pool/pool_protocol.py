"""The messages between a client and its pool: tuples. Those of a write are pickled as one list.

    from a client                                    from the pool
    -------------                                    -------------
    Hello: the first one                             WELCOME; or REFUSED or FAILED, and the end
    (number, payload, deadline): a call,             (number, outputs, queued, spent): an answer
     most often                                      (number, outputs or Failure, timing or None)
    (number, payloads, deadline, options,            (number, output): of a stream
     lengths): any other
    (WITHDRAW, number): of a call or question        (FREED, numbers): calls of which no worker
    (HOLD or RESUME, number): a stream                reads large items any more
    (ASK, number, method, arguments)                 (ANSWER, number, value or Failure)
    (RELEASED, 0, blocks): of shared memory          (PARTING, how many calls it has read)
                                                     (WORKERS, 0): one is ready or lost

Outputs are those of a call, or the only one. ``queued`` and ``spent`` are of ``Timing``: what
comes before the batch, and what is the same for all calls of a batch, which is pickled once.

The list travels in a frame of ``workers.protocol``. Items and outputs are pickled by themselves:
the pool never looks into them. Both sides are processes of one user, which could do anything to
each other, so nothing here is signed.
"""

from __future__ import annotations

import dataclasses
import errno
import os
import pickle
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ..observe.record import CallOptions
from ..reporting import report_bug
from ..workers.protocol import Failure
from ..workers.transport import Transport
from .fingerprint import Fingerprint

#: The most messages in a frame, and the bytes of payloads from which on no more go into it: the
#: other side begins with the first one when it has the last.
FRAME_MESSAGES, FRAME_SIZE = 512, 1 << 18

#: Of the messages of a client; to be raised with every change of them. A new option of calls, which
#: go as they are, raises it by itself.
PROTOCOL = 0 + len(CallOptions._fields)
#: Of those of a visitor, which only asks: commands of a new version have to reach older pools.
VISITOR_PROTOCOL = 2

WITHDRAW, HOLD_STREAM, RESUME_STREAM, ASK, RELEASED = -1, -2, -3, -4, -5
WELCOME, REFUSED, ANSWER, PARTING, FREED, WORKERS, FAILED = -1, -2, -3, -4, -5, -6, -7

#: What the process of a pool that this process starts calls before it serves; picklable.
preparation: Callable[[], None] | None = None


@dataclasses.dataclass
class PoolTimes:
    """How long clients and pools wait for each other, in seconds.

    Attributes:
        answer: a client, for an answer that a connected pool gives at once.
        answer_at_start: the same, if the pool may have to start.
        visit: a command, for its answer.
        failing: for at least how long pools must end before they serve until a client gives up.
        between_failures: between two attempts, at most, while pools cannot serve.
        first_client: a new pool, for its first client, which has started it: it may be slow.
        term_grace: after SIGTERM, how long clients may go on calling: gunicorn's workers may take
            30 s to finish their requests.
        term_drain: then, how long the calls that were read may take. Together less than the 90 s
            after which systemd kills all that is left.
    """

    answer: float = 5.0
    answer_at_start: float = 20.0
    visit: float = 10.0
    failing: float = 5.0
    between_failures: float = 1.0
    first_client: float = 30.0
    term_grace: float = 45.0
    term_drain: float = 30.0


#: Of this process, and of the pools that it starts.
times = PoolTimes()


class Unserved(NamedTuple):
    """Why a pool could not serve: what comes with FAILED.

    Attributes:
        why: in its words.
        may_pass: whether the next pool may serve, though nobody changes anything here.
    """

    why: str
    may_pass: bool


class Hello(NamedTuple):
    """The first message of a client.

    Attributes:
        protocol: ``PROTOCOL`` or ``VISITOR_PROTOCOL``. It stays the first field for good.
        fingerprint: what it wants of the pool; None for a visitor, which only asks.
        linger: seconds that the pool is to stay after its last client.
    """

    protocol: int
    fingerprint: Fingerprint | None
    linger: float


#: Of the pickled model, the options and the pool's ``PoolMemory``; a function of a module.
MakeTransport = Callable[[bytes, Any, Any], Transport]


class PoolBoot(NamedTuple):
    """What the process of a pool is started with.

    Attributes:
        name: of the pool.
        directory: of its files.
        fingerprint: of the client that starts it.
        spec: the model, pickled for the workers.
        options: of the engine, without anything that only the client can import.
        transport: makes what the workers are reached by.
        main: of the client's main module, for the workers: see ``multiprocessing.spawn``.
        has_lengths: whether calls come with the lengths of their items.
        log_level: for the loggers of this package.
        log: the file of the log; None for the stderr of the process that starts it.
        prepare: called before the pool serves; None for nothing.
        times: how long it waits.
        lock, listener: descriptors.
    """

    name: str
    directory: str
    fingerprint: Fingerprint
    spec: bytes
    options: Any
    transport: MakeTransport
    main: dict[str, Any]
    has_lengths: bool
    log_level: int
    log: str | None
    prepare: Callable[[], None] | None
    times: PoolTimes
    lock: int
    listener: int


class Items(list[Any]):
    """The payloads of a call, and what they cost: the pool cannot look into them."""

    __slots__ = ("lengths",)
    lengths: Sequence[float]


def own_fault(error: BaseException) -> Failure:
    """Log an exception that is a bug of this package; what the calls that it concerns fail with."""
    return Failure(report_bug("the shared pool", error))


def pack(message: Any) -> bytes:
    return pickle.dumps(message, pickle.HIGHEST_PROTOCOL)


def unpack(frame: Any) -> Any:
    return pickle.loads(frame)


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
        return memoryview(frame_of(frame) if frame else b"")

    def close(self) -> None:
        """Write nothing more: the descriptor is about to be another file's."""
        with self._lock:
            self.is_closed = True
            self._rest = None


def frame_of(frame: bytes) -> bytes:
    """A frame as it is sent."""
    return len(frame).to_bytes(HEADER_SIZE, "little") + frame


def user_of(connection: socket.socket) -> tuple[int, int]:
    """The process and the user at the other end, as the kernel knows them."""
    size = struct.calcsize("3i")
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    pid, user, _ = struct.unpack("3i", found)
    return pid, user


_FIRST = b"\0"


def send_first(connection: socket.socket, descriptor: int | None) -> None:
    """Send the first byte, with a descriptor if any. Raises OSError: the other end is gone."""
    if descriptor is None:
        connection.send(_FIRST)
    else:
        socket.send_fds(connection, [_FIRST], [descriptor])


def take_first(connection: socket.socket) -> int | None:
    """Take the first byte, and the descriptor that came with it, if any.

    Raises:
        BlockingIOError: it has not come yet.
        EOFError, OSError: the other end is gone, or there is no descriptor left for what it passed.
    """
    first, descriptors, flags, _ = socket.recv_fds(connection, 1, 1, socket.MSG_CMSG_CLOEXEC)
    if not first:
        raise EOFError
    if flags & socket.MSG_CTRUNC:  # the other end would count on it
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    return descriptors[0] if descriptors else None
