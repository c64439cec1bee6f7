"""A client's calls that never get a reply: found, and failed with the reason."""

from __future__ import annotations

import collections
import logging
import secrets
from collections.abc import Callable, Sequence

from ..errors import BadMessage, BrokerUnavailable, StreamerError
from ..remote.call_book import CallBook, answer
from ..remote.open_calls import RemoteCall
from ..workers.protocol import Failure
from .ledger import SentCalls
from .link import log
from .wire import REASONS

#: Maximum number of calls per check whether they are still in Redis.
_MOST_DOUBTED = 1000

#: Asks Redis which of the ids, by position, are gone; the mark follows all replies so far.
Ask = Callable[[bytes, Sequence[bytes]], Sequence[int]]


class LostCalls:
    """The sender looks for them; the receiver says what it has read.

    A missing call has been answered, or never will be. Redis adds a mark behind all replies so far,
    which tells the two apart.

    Attributes:
        was_forgotten: Redis had forgotten this client: all calls are to be looked for.
        is_noticed: there are notices to check.
        unreadable, lost: how many calls failed so.
    """

    def __init__(self, book: CallBook[SentCalls], prefix: str, reply_ttl: float) -> None:
        self._book = book
        self._prefix = prefix
        self._reply_ttl = reply_ttl
        self.was_forgotten = self.is_noticed = False
        self.unreadable = self.lost = 0
        self._suspects: dict[bytes, list[RemoteCall]] = {}  # calls missing in Redis, by mark
        self._marks: collections.deque[bytes] = collections.deque()  # marks that were read
        self._warned: set[str] = set()  # reasons of which a warning was logged

    # -- what the receiver has read

    def noticed(self, number: int, reason: str) -> None:
        """A host could not read a call, or this client its reply: a hint to look for the call."""
        with self._book.lock:
            self.is_noticed |= self._book.calls.noticed(number, reason)
        self._book.doorbell.ring()

    def marked(self, mark: bytes) -> None:
        """All replies before a mark have been read."""
        self._marks.append(mark)
        self._book.doorbell.ring()

    # -- in the sender

    def check(self, ask: Ask, *, is_all: bool) -> None:
        """Look for calls in Redis: for those with notices, and for old ones if it is ``all``."""
        most = _MOST_DOUBTED if is_all else 0
        self.is_noticed = False
        looks_for_all = self.was_forgotten and is_all
        is_more = True
        while is_more:
            with self._book.lock:
                calls = self._book.calls.doubtful(most, all_sent=looks_for_all)
            if not calls:
                break
            mark = secrets.token_hex(8).encode()
            gone = ask(mark, [call.id for call in calls])
            suspects = {**self._suspects, mark: [calls[i] for i in gone]}
            self._suspects = {
                mark: calls
                for mark, calls in suspects.items()
                if not all(call.is_over for call in calls)
            }
            is_more = looks_for_all and self._book.calls.has_more_doubts
        self.was_forgotten &= not looks_for_all

    def fail(self) -> None:
        """Fail calls that were missing in Redis and had no reply before the mark."""
        book = self._book
        while self._marks:
            suspects = self._suspects.pop(self._marks.popleft(), ())
            with book.lock:
                lost = book.calls.gone(suspects)
                self.unreadable += sum(bool(reason) for _, reason in lost)
                self.lost += sum(not reason for _, reason in lost)
                if lost:
                    book.changed.notify_all()
            for call, reason in lost:
                book.fail_soon([call], Failure(self._why(reason)))

    def fail_all(self, failure: Failure) -> None:
        """Answer all open calls with an error of ours, in any thread."""
        with self._book.lock:
            calls = self._book.calls.give_up_all()
            self._book.changed.notify_all()
        for call in calls:
            answer(call, call.reply, failure=failure)

    def _why(self, reason: str) -> StreamerError:
        if not reason:
            return BrokerUnavailable(
                "the call is no longer in Redis and has no reply: Redis was unreachable for more "
                f"than reply_ttl ({self._reply_ttl} s), lost its data, had its clock set forward, "
                "or the call was deleted"
            )
        side, _, word = reason.partition(" ")
        what = (
            "a worker host could not read this call"
            if side == "call"
            else "this client could not read the reply to the call"
        )
        text = f"{what}: {REASONS[word]}"
        if reason not in self._warned:
            self._warned.add(reason)
            log(logging.WARNING, "%s (prefix %r)", text, self._prefix)
        return BadMessage(text, reason=word)
