"""The pool's side: takes calls from all clients at a time, and lets the engine compute them.

     clients             this thread                     the engine's thread
     -------             -----------                     -------------------
     calls ────────────▶ read, all that has come
                         engine.submit, each;
                         engine.flush ─────────────────▶ batches, retries, isolation
                                                         reply.complete, reply.put_part
     answers ◀────────────────────────────────────────── one message for each client
                         what a client does not take
     the rest ◀───────── goes when it has room

A client that reads nothing holds up nobody: its answers wait here, and its streams rest.
"""

from __future__ import annotations

import collections
import contextlib
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
from ..engine.timer import start_thread
from ..supervision.supervisor import Overlap
from .client_requests import ClientRequests, Deferred
from .election import Leadership
from .fingerprint import Fingerprint
from .linger import Linger
from .pool_acceptor import PoolAcceptor, greet, is_client
from .pool_memory import PoolMemory
from .pool_protocol import PARTING, WORKERS, own_fault, times, unpack
from .sessions import Session

logger = logging.getLogger(__name__)

#: Seconds for the last answers to go out to clients that read them.
_LAST_GRACE = 2.0


class PoolServer:
    """Serves the clients of a pool in the thread that calls ``run``.

    Args:
        listener: the pool's socket.
        engine: not started yet; ended by ``run``.
        fingerprint: of whoever has started the pool.
        memory: what the workers read.
        leadership: given up when the pool retires, or has ended.
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
        self._acceptor = PoolAcceptor(name, listener, self._selector)
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
        self._linger = Linger(self._started_at, times.first_client)
        self._wakeup_reader, self._wakeup_writer = os.pipe()
        self._full: collections.deque[Session] = collections.deque()  # to be watched for room
        self._orders: collections.deque[Callable[[], None]] = collections.deque()
        self._ending: threading.Thread | None = None
        self._has_ended = self._is_terminated = False
        for descriptor in (self._wakeup_reader, self._wakeup_writer):
            os.set_blocking(descriptor, False)
        self._selector.register(self._wakeup_reader, selectors.EVENT_READ)

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

    def terminated(self) -> None:
        """A SIGTERM has come, perhaps to all processes of a service, which may need the pool yet.

        Retires, and ends after a stated time; a second one ends at once. For signal handlers.
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
        self._orders.append(self._tell_of_workers)
        self._wake()

    def _tell_of_workers(self) -> None:
        self._requests.due = -math.inf
        for session in self._sessions:
            with self._sparing_others(session):
                if session.memory is not None:
                    session.memory.review()
                if session.hello is not None and session.hello.fingerprint is not None:
                    session.tell((WORKERS, 0))
        self._send_all()

    def _send_all(self) -> None:
        """Send the answers that have come. In the engine's thread, and in this one."""
        dirty = self._dirty
        while dirty:
            with contextlib.suppress(KeyError):
                session = dirty.pop()
                if not session.send():
                    self._full.append(session)
                    self._wake()

    # -- questions

    def _restart_workers(self, timeout: float | None, overlap: Overlap) -> Deferred:
        restart = self._engine.begin_restart(overlap)
        return Deferred(timeout, lambda: self._engine.wait_restarted(restart, 0))

    def _status(self) -> dict[str, Any]:
        clients = [each for each in self._sessions if each.hello and each.hello.fingerprint]
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
        self._engine.when_answered(self._send_all)
        self._engine.when_ended(self._engine_ended)
        self._engine.when_workers_change(self._workers_changed)
        self._engine.start()
        try:
            while not self._has_ended:
                now = time.monotonic()
                if self._acceptor.resumes_at <= now:
                    self._acceptor.resume()
                left = self._linger.ends_at - now
                if left <= 0 and self._ending is None:
                    self._run_out()
                if self._ending is not None:
                    left = math.inf
                if self._requests.due <= now:
                    self._requests.answer_waiting()
                    self._send_all()
                left = min(left, self._acceptor.resumes_at - now, self._requests.due - now)
                ready = self._selector.select(None if left == math.inf else max(0.0, left))
                self._take_in(ready)
            self._say_farewell()
        finally:
            self._engine.close(drain=False, timeout=None)
            for session in [*self._sessions]:
                session.close()
            self._leadership.resign()
            self._selector.close()
            os.close(self._wakeup_reader)
            os.close(self._wakeup_writer)

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
                elif key.data is None:
                    with contextlib.suppress(BlockingIOError):
                        os.read(self._wakeup_reader, 4096)
                else:
                    self._accept()
        if frames:
            with self._sparing_others():
                self._requests.take(frames)
        self._send_all()
        while self._full:
            self._watch(self._full.popleft(), is_full=True)
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
                self._acceptor.pause()

    def _accept(self) -> None:
        for connection, pid in self._acceptor.accept():
            session = Session(connection, pid, self._engine, self._dirty, self._wake)
            self._sessions.add(session)
            self._selector.register(connection, selectors.EVENT_READ, session)

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
        if self._leadership.is_over and is_client(message):
            raise EOFError  # it has come just before: the next pool may have what it wants
        if greet(session, message, self._fingerprint):
            assert session.hello is not None
            self._linger.joined(session.hello.linger)
            if self._ending is not None:
                session.tell((PARTING, 0))

    def _lose(self, session: Session) -> None:
        if session.is_gone:
            return
        self._selector.unregister(session.connection)
        self._sessions.discard(session)
        if session.hello is not None and session.hello.fingerprint is not None:
            self._linger.left(time.monotonic())
        self._requests.due = -math.inf  # questions of it may wait
        session.close()

    # -- the end

    def _retire(self, bound: float) -> None:
        if not self._acceptor.is_closed:
            self._acceptor.close()
            self._leadership.resign()
            logger.info("pool %s has given up its name; it serves its clients to the end",
                        self._name)  # fmt: skip
        self._linger.retired(time.monotonic(), bound)

    def _run_out(self) -> None:
        """The time to stay is over."""
        if not self._linger.has_clients:
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
            self._acceptor.close()
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

    def _say_farewell(self) -> None:
        """Send the last answers to the clients that read them."""
        until = time.monotonic() + _LAST_GRACE
        self._dirty |= self._sessions
        self._requests.answer_waiting()
        self._send_all()
        while self._full:
            self._watch(self._full.popleft(), is_full=True)
        while any(each.is_watched for each in self._sessions) and time.monotonic() < until:
            for key, events in self._selector.select(max(0.0, until - time.monotonic())):
                if isinstance(key.data, Session) and events & selectors.EVENT_WRITE:
                    self._watch(key.data, is_full=not key.data.send())
                elif isinstance(key.data, Session):
                    self._lose(key.data)
