"""A client's connection to its pool; and how it comes to one: by connecting, or by an election."""

from __future__ import annotations

import collections
import contextlib
import itertools
import os
import selectors
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

from ..errors import PoolMismatch, StreamerError
from ..workers.arena import Memory
from ..workers.protocol import FrameReader
from .directory import PoolPaths, elect, listen, make_private
from .pool_memory import ReadingLink, results_of_workers
from .pool_process import start_pool
from .pool_protocol import (
    FAILED,
    FRAME_MESSAGES,
    FRAME_SIZE,
    REFUSED,
    WELCOME,
    Hello,
    Outbox,
    PoolBoot,
    Unserved,
    pack,
    send_first,
    take_first,
    unpack,
    user_of,
)

#: Held while there are descriptors that a forked child would keep without knowing it.
_gate = threading.RLock()


#: A message, the bytes of its payloads, and what is called when it is sent.
_Message = tuple[tuple[Any, ...], int, Callable[[], object] | None]


class Connector:
    """Finds the pool of a name, or starts it. For the thread of a client, but for ``wake``.

    Args:
        boot: what a new pool is started with, given the descriptors of lock and listener.
        hello: for the pool.
        memory: where large items of this client are; may be let go of.
        user: the id of the user whose directory that is.
        log: the file of the pool's log; None for this process's stderr.

    Attributes:
        selector: for that thread, while it is open.
        elections: how many times this process has started the pool.
        failure: why the last pool could not serve; None if it has not said.
    """

    selector: selectors.BaseSelector

    def __init__(
        self,
        name: str,
        paths: PoolPaths,
        hello: Hello,
        boot: Callable[[int, int], PoolBoot],
        memory: Memory | None,
        user: int,
        log: str | None,
    ) -> None:
        self.log = log or "this process's stderr"
        self.name = name
        self.paths = paths
        self._hello = hello
        self._boot = boot
        self.memory = memory
        self._user = user
        self.elections = 0
        self.failure: Unserved | None = None
        self._link: PoolLink | None = None  # the last one
        self._wakeup: tuple[int, int] | None = None  # a pipe, while it is open
        self._lock = threading.RLock()  # of the pipe; a finalizer may wake us while it is held

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        """Have what a thread needs to wait with, until the end of the block.

        Raises:
            OSError: there are no descriptors left.
        """
        with _gate:
            reader, writer = os.pipe()
            try:
                self.selector = selectors.DefaultSelector()
                self.selector.register(reader, selectors.EVENT_READ)
            except BaseException:
                os.close(reader)
                os.close(writer)
                raise
            for descriptor in (reader, writer):
                os.set_blocking(descriptor, False)
            self._wakeup = reader, writer
            _open.add(self)
        try:
            yield
        finally:
            with _gate, self._lock:
                _open.discard(self)
                if self._link is not None:
                    self._link.close()
                self._close_all()

    def _close_all(self) -> None:
        wakeup, self._wakeup = self._wakeup, None
        if wakeup is not None:  # else a fork has closed it under a greenlet, which is copied, too
            self.selector.close()
            for descriptor in wakeup:
                os.close(descriptor)

    def abandon_in_forked_child(self) -> None:
        """Close this process's copies, or the pool would not see the end of the parent.

        Without a lock, which a thread may hold that does not exist here. Nothing is unregistered:
        the parent's selector is the same.
        """
        if self._link is not None:
            self._link.abandon()
        self._close_all()

    def rest(self, seconds: float | None) -> None:
        """Wait so long, or until woken."""
        if self.selector.select(seconds):
            self.calm()

    def calm(self) -> None:
        """Forget that it was woken."""
        assert self._wakeup is not None
        with contextlib.suppress(BlockingIOError):
            os.read(self._wakeup[0], 4096)

    def wake(self) -> None:
        """Let the thread look up. Any thread, and finalizers."""
        with self._lock:
            if self._wakeup is not None:
                with contextlib.suppress(BlockingIOError):
                    os.write(self._wakeup[1], b"\0")

    def connect(self) -> PoolLink | None:
        """A connection on which nothing was received yet; None if it has to be tried again.

        Raises:
            OSError, StreamerError: a pool cannot be started, or this process has another user
                than the one that made the connector.
        """
        if os.geteuid() != self._user:
            raise StreamerError(
                f"the streamer of pool {self.name!r} was built as user {self._user}, and this "
                f"process has become user {os.geteuid()}, which may not use the directory "
                f"{os.path.dirname(self.paths.socket)}; build the streamer after the change of "
                "user, or start the server as the user that it changes to"
            )
        with _gate:
            connection = self._connected()
            if connection is None and self._elect():
                self.elections += 1
                connection = self._connected()
            if connection is None:
                return None
            link = self._link = PoolLink(self, connection)
        with contextlib.suppress(OSError):  # the pool is gone again, as reading will show
            send_first(connection, None if self.memory is None else self.memory.descriptor)
        link.put((*self._hello,))
        link.write()
        return link

    def _connected(self) -> socket.socket | None:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.setblocking(False)
            connection.connect(self.paths.socket)
            _, user = user_of(connection)
            if user not in (self._user, 0):
                raise StreamerError(
                    f"the socket {self.paths.socket} is that of another user ({user})"
                )
        except (FileNotFoundError, ConnectionRefusedError, BlockingIOError):
            connection.close()
            return None
        except BaseException:
            connection.close()
            raise
        return connection

    def _elect(self) -> bool:
        """Whether this process has started the pool."""
        make_private(os.path.dirname(self.paths.lock), os.geteuid())
        lock = elect(self.paths)
        if lock is None:
            return False
        try:
            with listen(self.paths) as listener:
                start_pool(self._boot(lock, listener.fileno()))
        finally:
            os.close(lock)  # the pool has its own
        return True


class PoolLink:
    """A connection. ``put`` and ``write`` are for any thread, the rest for the one that reads.

    Attributes:
        pid: the pool's process, once it has said a word.
        has_failed: whether an exception of our own has ended it.
    """

    def __init__(self, connector: Connector, connection: socket.socket) -> None:
        self._connection = connection
        self._connector = connector
        self._reader = FrameReader(connection.fileno())
        self._outbox = Outbox(connection.fileno(), self._next_frame)
        self._messages: collections.OrderedDict[int, _Message] = collections.OrderedDict()
        self._keys = itertools.count(1)
        self._is_full = False  # watched for room
        self._is_due = False  # the reading thread is going to write
        self._is_closed = self._has_begun = self.has_failed = False
        self.pid: int | None = None
        #: Where large results for this client are; None if these come with the messages.
        self.results: ReadingLink | None = None
        connector.selector.register(connection, selectors.EVENT_READ, self)

    def put(
        self, message: tuple[Any, ...], size: int = 0, on_sent: Callable[[], object] | None = None
    ) -> int:
        """Add a message, which goes with the next ``write``.

        Args:
            size: bytes of its payloads.
            on_sent: called when it can no longer be taken back, in order.

        Returns:
            Its key, for ``take_back``.
        """
        key = next(self._keys)
        self._messages[key] = message, size, on_sent
        return key

    def take_back(self, key: int) -> bool:
        """Do not send a message; false if that has begun."""
        return self._messages.pop(key, None) is not None

    def _next_frame(self) -> bytes:
        waiting, size = self._messages, 0
        messages: list[tuple[Any, ...]] = []
        while waiting and len(messages) < FRAME_MESSAGES and size < FRAME_SIZE:
            try:
                _, (message, more, on_sent) = waiting.popitem(last=False)
            except KeyError:  # the last one was taken back just now
                break
            if on_sent is not None:
                on_sent()
            messages.append(message)
            size += more
        return pack(messages) if messages else b""

    def write(self) -> None:
        """Write what the pool takes; the rest goes when it has room."""
        with contextlib.suppress(OSError):  # it is gone; the reading thread sees it, too
            if not self._outbox.write() and not self._is_full:
                self._connector.wake()

    def cut(self) -> None:
        """End the connection, since an exception may have cut off a frame; the reading thread sees.

        The client connects again, and sends what is open.
        """
        with contextlib.suppress(OSError):  # it is gone already
            self._connection.shutdown(socket.SHUT_RDWR)

    def write_soon(self) -> None:
        """Have the reading thread write: with one call of the system for all that is put meanwhile.

        For when many calls are open: it costs a lone caller the time to wake that thread.
        """
        if not self._is_due:
            self._is_due = True
            self._connector.wake()

    def welcome(self, is_done: Callable[[], bool]) -> list[Any] | None:
        """Wait for the pool's first word; what came after it, or None if the pool is gone.

        Args:
            is_done: whether nobody waits for it any more.

        Raises:
            PoolMismatch: it has another model, other options, or is of another version.
        """
        while not is_done():
            messages = self.read()
            if messages is None:
                return None
            if messages:
                first, *rest = messages
                if first[0] == FAILED:
                    self._connector.failure = Unserved(*first[1:])
                    return None
                if first[0] == REFUSED:
                    name = self._connector.name
                    raise PoolMismatch(
                        f"pool {name!r} is running and differs from what this process asks "
                        f"for: {'; '.join(first[1])}. Use another name, or let new processes have "
                        f"a new pool with: service-streamer pool replace {name}"
                    )
                assert first[0] == WELCOME
                self.pid = first[1]
                return rest
        return None

    def read(self) -> list[Any] | None:
        """Wait for messages; none if it was woken, None if the pool is gone."""
        messages: list[Any] = []
        for key, events in self._connector.selector.select():
            if key.data is self.results and self.results is not None:
                if not self.results.take_in():
                    self._connector.selector.unregister(self.results)
            elif key.data is not self:
                self._connector.calm()
            elif events & selectors.EVENT_READ:
                try:
                    if not self._has_begun:
                        self._begin()
                    for frame in self._reader.read():
                        messages += unpack(frame)
                except BlockingIOError:
                    pass
                except (EOFError, OSError):
                    return None
            if self._outbox.has_rest:
                self.write()
        if self._is_due:
            self._is_due = False  # before: what is put from here on wakes this thread again
            self.write()
        if self._outbox.has_rest is not self._is_full:
            self._is_full = not self._is_full
            room = selectors.EVENT_WRITE if self._is_full else 0
            self._connector.selector.modify(self._connection, selectors.EVENT_READ | room, self)
        return messages

    def _begin(self) -> None:
        """Raises BlockingIOError, EOFError, OSError: see ``take_first``."""
        descriptor = take_first(self._connection)
        self._has_begun = True
        if descriptor is not None:
            self.results = results_of_workers(descriptor)
            self._connector.selector.register(self.results, selectors.EVENT_READ, self.results)

    def close(self) -> None:
        """Leave the pool. Idempotent."""
        with _gate:  # a child that is forked half-way would keep the rest open
            if not self._is_closed:
                self._is_closed = True
                results, self.results = self.results, None
                if results is not None:
                    with contextlib.suppress(KeyError):  # the pool has closed its end before
                        self._connector.selector.unregister(results)
                    results.close()
                self._outbox.close()
                self._messages.clear()
                self._connector.selector.unregister(self._connection)
                self._connection.close()

    def abandon(self) -> None:
        """See ``Connector.abandon_in_forked_child``."""
        if not self._is_closed:
            self._is_closed = True
            if self.results is not None:
                self.results.abandon()
            os.close(self._connection.detach())


_open: set[Connector] = set()


def _abandon_all() -> None:
    global _gate
    _gate = threading.RLock()
    for connector in [*_open]:
        connector.abandon_in_forked_child()
    _open.clear()


# A copy of the lock of an election, in a child that lives on, would outlast the pool.
os.register_at_fork(
    before=lambda: _gate.acquire() and None,
    after_in_parent=lambda: _gate.release(),
    after_in_child=_abandon_all,
)
