"""The pool's side: takes calls from all clients at a time, and lets the engine compute them.

     clients             this thread                     the engine's thread
     -------             -----------                     -------------------
     calls ────────────▶ read, all that has come
                         engine.submit, each;
                         engine.flush ─────────────────▶ batches, retries, isolation
                                                         reply.end, reply.put_part
     answers ◀────────────────────────────────────────── one message for each client
                         what a client does not take
     the rest ◀───────── goes when it has room

A client that reads nothing holds up nobody: its answers wait here, and its streams rest.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import logging
import math
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from ..engine.engine import Engine
from ..engine.threads import start_thread
from ..supervision.supervisor import Overlap
from .directory import Leadership
from .fingerprint import Fingerprint, differences
from .pool_memory import ClientMemory, PoolMemory
from .pool_protocol import (
    FAILED,
    PARTING,
    PROTOCOL,
    REFUSED,
    VISITOR_PROTOCOL,
    WELCOME,
    WORKERS,
    Hello,
    Unserved,
    frame_of,
    own_fault,
    pack,
    send_first,
    times,
    unpack,
    user_of,
)
from .sessions import ClientRequests, Deferred, Session

logger = logging.getLogger(__name__)

#: Seconds for the last answers to go out to clients that read them.
_LAST_GRACE = 2.0

#: Seconds until it accepts again when it could not: when a client has left, it can.
_ACCEPT_PAUSE = 0.25


class PoolServer:
    """Serves the clients of a pool in the thread that calls ``run``.

    Args:
        listener: the pool's socket; closed when nobody can connect any more.
        engine: not started yet; ended by ``run``.
        fingerprint: of whoever has started the pool.
        memory: what the workers read.
        leadership: given up when the pool retires; else by the caller of ``run``.
    """

    def __init__(
        self,
        name: str,
        listener: socket.socket,
        engine: Engine,
        fingerprint: Fingerprint,
        leadership: Leadership,
        memory: PoolMemory,
    ) -> None:
        self._name = name
        self._engine = engine
        self._fingerprint = fingerprint
        self._leadership = leadership
        self._memory = memory
        self._selector = selectors.DefaultSelector()
        self._listener: socket.socket | None = listener
        self._accepts_at = math.inf  # again, after a pause; infinity while it accepts
        self._requests = ClientRequests(
            engine,
            {
                # of clients
                "stats": engine.stats,
                "metrics": engine.metrics,
                "workers": engine.workers,
                "summary": engine.summary,
                "model_description": engine.model_description,
                "wait_ready": lambda timeout: Deferred(timeout, lambda: engine.wait_ready(0)),
                "restart_workers": self._restart_workers,
                "scale": engine.scale,
                "try_start_once": engine.try_start_once,
                # of visitors
                "status": self._status,
                "stop": self.end,
                "replace": self.retire,
            },
        )
        self._sessions: set[Session] = set()
        self._dirty: set[Session] = set()
        self._started_at = time.monotonic()
        self._clients = 0
        self._linger = 0.0  # the longest that a client has asked for
        self._idle_until = self._started_at + times.first_client
        self._latest = math.inf  # when it ends, whoever is left
        self._wakeup_reader, self._wakeup_writer = os.pipe()
        self._orders: collections.deque[Callable[[], None]] = collections.deque()
        self._ending: threading.Thread | None = None
        self._has_ended = self._is_terminated = False
        for descriptor in (self._wakeup_reader, self._wakeup_writer, listener.fileno()):
            os.set_blocking(descriptor, False)
        self._selector.register(self._wakeup_reader, selectors.EVENT_READ)
        self._selector.register(listener, selectors.EVENT_READ)

    # -- for any thread

    def end(self, drain: bool = True) -> int:
        """Take no more calls, finish those that were read, and return from ``run``.

        Also for signal handlers. Returns the process that ends.
        """
        self._orders.append(lambda: self._begin_end(drain=drain))
        self._wake()
        return os.getpid()

    def retire(self) -> int:
        """Give the name to the next pool, and serve the clients that are there until they leave.

        Returns the process that does so.
        """
        self._orders.append(lambda: self._retire(math.inf))
        self._wake()
        return os.getpid()

    def terminate(self) -> None:
        """Retire, and end after a stated time; the second time, end at once. For signal handlers.

        A SIGTERM may have gone to all processes of a service, which need the pool yet.
        """
        if self._is_terminated:
            self.end(drain=False)
        else:
            self._is_terminated = True
            self._orders.append(lambda: self._retire(times.term_grace))
            self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # it is full, which wakes as well
            os.write(self._wakeup_writer, b"\0")

    def _workers_changed(self) -> None:
        """In the engine's thread."""
        self._orders.append(self._announce_workers)
        self._wake()

    def _announce_workers(self) -> None:
        self._requests.due = -math.inf
        for session in self._sessions:
            with self._sparing_others(session):
                if session.memory is not None:
                    session.memory.review()
                if session.is_client:
                    session.tell((WORKERS, 0))
        self._send_all()

    def _send_all(self) -> None:
        """Send the answers that have come. In the engine's thread, and in this one."""
        dirty = self._dirty
        while dirty:
            with contextlib.suppress(KeyError):
                session = dirty.pop()
                if not session.send():
                    self._orders.append(functools.partial(self._watch, session, is_full=True))
                    self._wake()

    # -- questions

    def _restart_workers(self, timeout: float | None, overlap: Overlap) -> Deferred:
        restart = self._engine.begin_restart(overlap)
        return Deferred(timeout, lambda: self._engine.wait_restarted(restart, 0))

    def _status(self) -> dict[str, Any]:
        clients = [each for each in self._sessions if each.is_client]
        return {
            "name": self._name,
            "pid": os.getpid(),
            "state": "retired" if self._leadership.is_over else self._engine.state.value,
            "seconds": time.monotonic() - self._started_at,
            "clients": sorted((each.pid, len(each.calls)) for each in clients),
            "stats": self._engine.stats(),
            "workers": self._engine.workers(),
            "fingerprint": dict(self._fingerprint),
        }

    # -- the loop

    def run(self) -> None:
        """Serve until it is told to end, or no client is left for as long as they have wished."""
        self._engine.on_answered = self._send_all
        self._engine.when_ended(self._engine_ended)
        self._engine.when_workers_change(self._workers_changed)
        self._engine.start()
        try:
            while not self._has_ended:
                now = time.monotonic()
                if self._accepts_at <= now:
                    self._accept_again()
                if self._ends_at <= now:
                    self._run_out()
                if self._requests.due <= now:
                    self._requests.answer_waiting()
                    self._send_all()
                until = min(self._ends_at, self._accepts_at, self._requests.due)
                ready = self._selector.select(None if until == math.inf else max(0.0, until - now))
                self._take_in(ready)
            self._send_last_answers()
        finally:
            self._engine.close(drain=False, timeout=None)
            for session in [*self._sessions]:
                session.close()
            self._selector.close()
            os.close(self._wakeup_reader)
            os.close(self._wakeup_writer)

    @property
    def _ends_at(self) -> float:
        """When the time to stay is over; infinity if that is not known, or the end has begun."""
        if self._ending is not None:
            return math.inf
        if self._clients:
            return self._latest
        return -math.inf if self._listener is None else self._idle_until

    def _take_in(self, ready: list[tuple[selectors.SelectorKey, int]]) -> None:
        frames: list[tuple[Session, list[Any]]] = []
        for key, events in ready:
            session = key.data if isinstance(key.data, Session) else None
            with self._sparing_others(session):
                if session is not None:
                    if events & selectors.EVENT_WRITE:
                        self._watch(session, is_full=not session.send())
                    if events & selectors.EVENT_READ:
                        self._read(session, frames)
                elif isinstance(key.data, ClientMemory):
                    self._selector.unregister(key.data)
                    key.data.close()
                elif key.fileobj is self._listener:
                    self._accept(self._listener)
                else:
                    with contextlib.suppress(BlockingIOError):
                        os.read(self._wakeup_reader, 4096)
        if frames:
            with self._sparing_others():
                self._requests.take(frames)
        self._send_all()
        self._run_orders()

    def _run_orders(self) -> None:
        while self._orders:
            with self._sparing_others():
                self._orders.popleft()()

    @contextlib.contextmanager
    def _sparing_others(self, session: Session | None = None) -> Iterator[None]:
        """Log an internal error; end only its session."""
        try:
            yield
        except Exception as error:
            own_fault(error)
            if session is not None:
                session.break_off()
            else:  # it may be of a client that came: the next one would fail at once, too
                self._pause_accepting()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except BlockingIOError:
                return
            except OSError as error:  # no descriptors are left, or the client is gone again
                logger.warning("pool %s could not accept a client: %s", self._name, error)
                self._pause_accepting()
                return
            pid, user = user_of(connection)
            if user not in (os.geteuid(), 0):
                logger.warning("refused process %d of user %d", pid, user)
                connection.close()
                continue
            connection.setblocking(False)
            session = Session(connection, pid, self._engine, self._dirty, self._wake)
            self._sessions.add(session)
            self._selector.register(connection, selectors.EVENT_READ, session)

    def _pause_accepting(self) -> None:
        """Accept nobody for a moment: it would fail again at once, and again."""
        if self._listener is not None and self._accepts_at == math.inf:
            self._selector.unregister(self._listener)
            self._accepts_at = time.monotonic() + _ACCEPT_PAUSE

    def _accept_again(self) -> None:
        self._accepts_at = math.inf
        if self._listener is not None:
            self._selector.register(self._listener, selectors.EVENT_READ)

    def _close_listener(self) -> None:
        """Nobody else can connect: the next one elects a new pool when this one has ended."""
        listener, self._listener = self._listener, None
        if listener is not None:
            if self._accepts_at == math.inf:
                self._selector.unregister(listener)
            listener.close()

    def _watch(self, session: Session, *, is_full: bool) -> None:
        if session.is_gone or session.is_watched == is_full:
            return
        session.is_watched = is_full
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if is_full else 0)
        self._selector.modify(session.connection, events, session)

    def _read(self, session: Session, frames: list[tuple[Session, list[Any]]]) -> None:
        try:
            if not session.has_begun:
                session.begin(self._memory)
            for frame in session.reader.read():
                messages = unpack(frame)
                if session.hello is None:
                    first, *messages = messages
                    self._greet(session, first)
                if session.hello is not None:
                    frames.append((session, messages))
        except BlockingIOError:
            pass
        except (EOFError, OSError):
            self._lose(session)
        except Exception:  # it is no client of ours, or of another version
            logger.warning(
                "pool %s: process %d sent a message that cannot be read",
                self._name, session.pid, exc_info=True,
            )  # fmt: skip
            self._lose(session)

    def _greet(self, session: Session, message: Any) -> None:
        """Answer the first message of a client, or of a visitor.

        Raises:
            TypeError: it is no such message.
        """
        protocol = VISITOR_PROTOCOL if message[1] is None else PROTOCOL
        if message[0] != protocol:
            session.tell((REFUSED, [f"the protocol is {protocol} there and {message[0]} here"]))
            return
        hello = Hello(*message)
        if hello.fingerprint is not None:
            if self._leadership.is_over:
                raise EOFError  # it has come just before: the next pool may have what it wants
            if differ := differences(self._fingerprint, hello.fingerprint):
                session.tell((REFUSED, differ))
                return
            self._clients += 1
            self._linger = max(self._linger, hello.linger)
        session.hello = hello
        session.tell((WELCOME, os.getpid()))
        if session.is_client and self._ending is not None:
            session.tell((PARTING, 0))

    def _lose(self, session: Session) -> None:
        if session.is_gone:
            return
        self._selector.unregister(session.connection)
        self._sessions.discard(session)
        if session.is_client:
            self._clients -= 1
            self._idle_until = time.monotonic() + self._linger
        self._requests.due = -math.inf  # questions of it may wait
        kept = session.close()
        if kept is not None:
            self._selector.register(kept, selectors.EVENT_READ, kept)

    # -- the end

    def _retire(self, bound: float) -> None:
        if self._listener is not None:
            self._close_listener()
            self._leadership.resign(keep_log=True)
            logger.info("pool %s has given up its name; it serves its clients to the end",
                        self._name)  # fmt: skip
        self._latest = min(self._latest, time.monotonic() + bound)

    def _run_out(self) -> None:
        """The time to stay is over."""
        if not self._clients:
            logger.info("pool %s ends: no client is left", self._name)
            self._begin_end(drain=False)
            return
        logger.warning(
            "pool %s was told to end, and still has clients after %g s: it finishes what it has "
            "read, and they go on with another pool", self._name, times.term_grace,
        )  # fmt: skip
        self._begin_end(drain=True, timeout=times.term_drain)

    def _begin_end(self, *, drain: bool, timeout: float | None = None) -> None:
        if self._ending is None:
            self._requests.is_ending = True
            self._close_listener()
            for session in [*self._sessions]:
                if session.hello is not None:
                    session.tell((PARTING, session.read))
            self._send_all()
        self._ending = start_thread(
            lambda: self._engine.close(drain=drain, timeout=timeout), "ending"
        )

    def _engine_ended(self) -> None:
        self._has_ended = True
        self._wake()

    def _send_last_answers(self) -> None:
        """To the clients that read them."""
        until = time.monotonic() + _LAST_GRACE
        self._dirty |= self._sessions
        self._requests.answer_waiting()
        self._send_all()
        self._run_orders()
        while any(each.is_watched for each in self._sessions) and time.monotonic() < until:
            for key, events in self._selector.select(max(0.0, until - time.monotonic())):
                if isinstance(key.data, Session) and events & selectors.EVENT_WRITE:
                    self._watch(key.data, is_full=not key.data.send())
                elif isinstance(key.data, Session):
                    self._lose(key.data)


def turn_away(listener: socket.socket, reason: Unserved) -> None:
    """Tell all that have connected why they are not served, and close. Does not block."""
    connections: list[socket.socket] = []
    listener.setblocking(False)
    # Closed before they are told: who tries again is not to come to this one once more.
    with listener, contextlib.suppress(OSError):  # nobody else, or none that can be told
        while True:
            connections.append(listener.accept()[0])
    for connection in connections:
        with connection, contextlib.suppress(OSError):  # it has gone
            connection.setblocking(False)
            if user_of(connection)[1] in (os.geteuid(), 0):
                send_first(connection, None)
                connection.send(frame_of(pack([(FAILED, *reason)])))
