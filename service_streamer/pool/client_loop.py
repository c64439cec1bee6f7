"""A client's thread: finds the pool or starts it, and stays with it; then with the next one."""

from __future__ import annotations

import contextlib
import errno
import logging
import time
from collections.abc import Callable

from ..engine.timer import Doorbell
from ..errors import PoolMismatch, StreamerBroken, StreamerError, WorkerLost
from ..remote.call_book import CallBook, answer
from ..remote.quiet_log import quiet_log
from ..workers.diagnosis import counted
from ..workers.protocol import Failure
from .client_inbox import ClientInbox
from .pool_calls import PoolCall, PoolCalls
from .pool_inquiry import OpenQuestions
from .pool_link import Connector, Opened, PoolLink, Refused

__all__ = ["ClientDoorbell", "ClientLoop"]

log = quiet_log(__name__)

#: From more open calls than these on, what is sent waits for more. Measured: a thread that submits
#: 20 000 calls has up to twice the rate, and 64 callers cost the pool a sixth less.
_MANY = 8

#: How often in a row a pool may end before it has said a word, and for at least how many seconds.
#: Somebody who kills pools may hit some of them early; one that cannot start never says a word.
_MOST_FAILURES, _FAILING = 5, 5.0

#: So often a client that no pool has served yet tries if what a pool said may pass; else once. The
#: tries are so far apart that it serves with what comes up within two seconds.
_MOST_IF_PASSING = 3

#: Seconds between two attempts, from the first to the longest; if pools have ended, to another.
_FIRST_DELAY, _LONGEST_DELAY, _LONGEST_AFTER_FAILURES = 0.005, 0.1, 1.0


class ClientDoorbell(Doorbell):
    """Sends what was put: in the thread that rings, or in the client's if many calls are open.

    Attributes:
        link: while connected.
        opened: while the client's thread runs.
    """

    def __init__(self, book: CallBook[PoolCalls]) -> None:
        super().__init__()
        self._book = book
        self.link: PoolLink | None = None
        self.opened: Opened | None = None

    def ring(self) -> None:
        link = self.link
        if link is not None:
            if len(self._book.calls) > _MANY:
                link.write_soon()
            else:
                link.write()
        if link is None or self._book.is_abandoned:  # then it may have been the last call
            self.wake()

    def wake(self) -> None:
        """Let the thread look whether this client has ended."""
        opened = self.opened
        if opened is not None:
            opened.wake()


class ClientLoop:
    """Connects, sends what is open, and takes in answers. ``fail_all`` is for any thread.

    Args:
        connector: finds the pool, or starts it.
        book: of the client's calls.
        bell: of the same; gets the connection.
        questions: of the client.
        inbox: gets what has come.
        is_done: whether the client has ended.
        may_rerun: whether a call may be computed twice.
    """

    def __init__(
        self,
        connector: Connector,
        book: CallBook[PoolCalls],
        bell: ClientDoorbell,
        questions: OpenQuestions,
        inbox: ClientInbox,
        is_done: Callable[[], bool],
        *,
        may_rerun: bool,
    ) -> None:
        self._connector = connector
        self._book = book
        self._calls = book.calls
        self._bell = bell
        self._questions = questions
        self._inbox = inbox
        self._is_done = is_done
        self._may_rerun = may_rerun
        self._has_served = False  # any pool

    def run(self) -> None:
        """What the thread does: one pool after the other."""
        try:
            while not self._is_done():
                with contextlib.ExitStack() as stack:
                    try:
                        opened = stack.enter_context(self._connector.opened())
                    except OSError as error:  # no descriptors: callers are told, until there are
                        self._fail_unreached(error)
                        time.sleep(_LONGEST_DELAY)
                        continue
                    self._bell.opened = opened
                    try:
                        while not self._is_done():
                            self._serve(opened)
                    finally:
                        self._bell.opened = None
        except BaseException as error:  # callers must not wait for a dead thread
            log(logging.CRITICAL, "the streamer failed; this is a bug in it", exc_info=True)
            self._book.is_closing = True
            self.fail_all(Failure(StreamerBroken(f"the streamer failed: {error!r}")))

    def _serve(self, opened: Opened) -> None:
        """Until no pool can be had, or this client ends."""
        failures, delay, served = 0, _FIRST_DELAY, time.monotonic()
        try:
            while not self._is_done():
                elections = opened.elections
                link = opened.connect()
                if link is not None or opened.elections > elections:
                    opened.failure = None  # that was another pool's
                if link is None:  # somebody else is about to listen, or about to end
                    failures += opened.elections - elections
                elif self._visit(link):
                    failures, delay, served = 0, _FIRST_DELAY, time.monotonic()
                    self._has_served = True
                    if self._calls.read is not None:  # it was told to end: until it is wanted
                        self._rest_until_called(opened)
                    continue
                else:
                    failures += 1
                is_failing = failures >= _MOST_FAILURES and time.monotonic() - served >= _FAILING
                may_pass = opened.failure is not None and opened.failure.may_pass
                # One that has served may do so again soon: what it needs may just be restarted.
                if opened.failure is not None and not self._has_served:
                    is_failing |= failures >= (_MOST_IF_PASSING if may_pass else 1)
                if is_failing and not self._is_done():
                    raise self._broken(opened, failures)
                self._pause(opened, _LONGEST_AFTER_FAILURES if may_pass else delay)
                longest = _LONGEST_AFTER_FAILURES if failures else _LONGEST_DELAY
                delay = min(2 * delay, longest)
        except Refused as error:
            self.fail_all(Failure(PoolMismatch(str(error))))
        except StreamerError as error:
            self.fail_all(Failure(error))
        except OSError as error:
            self._fail_unreached(error)
        self._rest_until_called(opened)  # which tries again

    def _broken(self, opened: Opened, failures: int) -> StreamerBroken:
        why = "its log says why: the file of pool_log, or this process's stderr"
        if opened.failure is not None:
            why = opened.failure.why
        times = f"{failures} times " if failures > 1 else ""
        return StreamerBroken(
            f"the process of pool {self._connector.name!r} has ended {times}before it could serve; "
            f"{why}"
        )

    def _fail_unreached(self, error: OSError) -> None:
        why = f"the pool can be neither reached nor started: {error}"
        if error.errno == errno.EMFILE:
            why += "; raise the limit (ulimit -n), or build fewer streamers"
        self.fail_all(Failure(StreamerBroken(why)))

    def _visit(self, link: PoolLink) -> bool:
        """Stay with a pool until it is gone, or this client ends; whether it has served."""
        try:
            is_served = self._greet(link)
            if is_served:
                self._converse(link)
            return is_served
        finally:
            self._disconnected(link)

    def _pause(self, opened: Opened, seconds: float) -> None:
        """Wait so long, though callers ring meanwhile; or until this client ends."""
        until = time.monotonic() + seconds
        while not self._is_done() and (left := until - time.monotonic()) > 0:
            opened.rest(left)

    def _rest_until_called(self, opened: Opened) -> None:
        while not (self._is_done() or len(self._calls) or len(self._questions)):
            opened.rest(None)

    def _greet(self, link: PoolLink) -> bool:
        """Wait for the pool's first word, and send what is open; whether it came.

        Raises:
            Refused: the pool wants none of us.
        """
        rest = link.welcome(self._is_done)
        if rest is None:
            return False
        with self._book.lock:
            self._bell.link = link
            self._calls.connected(link)
            self._inbox.connected(link)
            for message in self._questions.messages():
                link.put(message)
        link.write()
        self._inbox.on_workers()
        self._inbox.take_in(rest)
        return True

    def _converse(self, link: PoolLink) -> None:
        """Take in answers until the pool is gone, or this client ends."""
        while not self._is_done():
            messages = link.read()
            if messages is None:
                return
            self._inbox.take_in(messages)
            del messages  # or the last results would live until the next ones come

    def _disconnected(self, link: PoolLink) -> None:
        """The pool is gone: what it may not compute again fails."""
        lost: list[PoolCall] = []
        link.close()  # first: no thread sends any more
        with self._book.lock:
            was_connected = self._bell.link is link
            if was_connected:
                self._bell.link = None
                lost = self._calls.disconnected(may_rerun=self._may_rerun)
                replies = [(call, call.reply) for call in lost]
                self._book.changed.notify_all()
        if not was_connected:
            return
        self._inbox.on_workers()
        if lost:
            log(
                logging.WARNING, "pool %s is gone with %s that may not be computed again",
                self._connector.name, counted(len(lost), "call"),
            )  # fmt: skip
            why = "retry is False" if not self._may_rerun else self._calls.why_not_resumed
            text = f"the pool died, or the connection to it, while it held this call, and {why}"
            for call, reply in replies:
                answer(call, reply, failure=Failure(WorkerLost(text)))

    def fail_all(self, failure: Failure) -> None:
        """No pool can be had: nothing that is open will be computed."""
        book = self._book
        with book.lock:
            calls = book.calls.give_up_all()
            replies = [(call, call.reply) for call in calls]
            questions = self._questions.give_up_all()
            book.changed.notify_all()
        for call, reply in replies:
            answer(call, reply, failure=failure)
        for question in questions:
            question.set_result(failure)
