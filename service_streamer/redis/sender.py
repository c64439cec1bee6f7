"""What a client sends to Redis: calls, what became of them, and signs of life."""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Sequence
from typing import Any

from ..engine.timer import is_owned
from ..errors import Overloaded
from ..remote.call_book import CallBook
from ..remote.open_calls import RemoteCall
from ..workers.protocol import Failure
from .hosts_seen import HostsSeen
from .ledger import SentCalls
from .link import Address, Link
from .lost_calls import LostCalls
from .scripts import CHECK, ENQUEUE, REFRESH, TELL, Keys, Script

#: Maximum calls and bytes of one ENQUEUE.
_MOST_CALLS = 512
_MOST_BYTES = 4 << 20

#: Maximum ids of one request.
_MOST_IDS = 1000


class Sender:
    """The requests of one client. Each method raises LinkError, and may be repeated then.

    Args:
        max_pending: maximum number of open calls of all clients.
        reply_ttl: seconds that Redis keeps replies for an unreachable client.

    Attributes:
        link: of whichever thread sends.
        name: the client's, once it was started.
    """

    def __init__(
        self,
        address: Address,
        keys: Keys,
        book: CallBook[SentCalls],
        hosts: HostsSeen,
        lost: LostCalls,
        *,
        max_pending: int,
        reply_ttl: float,
    ) -> None:
        self._keys = keys
        self._book = book
        self._calls = book.calls
        self._hosts = hosts
        self._lost = lost
        self._max_pending = max_pending
        self._life = math.ceil(1000 * reply_ttl)
        self._lock = threading.RLock()  # guards the next two
        self.link = Link(address)
        self._is_under_way = False  # ENQUEUE is sent, its answer not read
        self.name = ""

    # -- calls

    def put_in_now(self, call: RemoteCall) -> None:
        """Send a new call from the caller's thread if it is the only one: no thread wakes up.

        The sender's thread receives the answer.
        """
        if not self.link.is_connected or not self._calls.is_alone(call):
            return
        try:
            if not self._lock.acquire(blocking=False):
                return
            with self._book.lock:
                is_alone = not self._is_under_way and self._calls.is_alone(call)
            if is_alone and self.link.is_connected:
                self._begin()
        except Exception:  # the sender's thread repeats it
            pass
        finally:  # a signal handler may raise right after it is acquired
            if is_owned(self._lock):
                self._lock.release()

    def interrupted(self) -> None:
        """A signal handler has raised in this caller's thread, perhaps in ``put_in_now``."""
        if is_owned(self._lock):  # just before it was to be released
            self._lock.release()

    def put_in(self) -> bool:
        """Send the next batch, or finish the one under way; whether there was one."""
        with self._lock:
            if not self._is_under_way:
                self._begin()
            return self.end()

    def end(self) -> bool:
        """Receive the answer to the batch under way; whether there was one."""
        is_any, self._is_under_way = self._is_under_way, False
        if is_any:  # if that fails, the same batch is sent again
            self._put_in_answered(*self.link.receive())
        return is_any

    def _begin(self) -> None:
        sent = self._calls
        with self._book.lock:
            batch = sent.batch(_MOST_CALLS, _MOST_BYTES)
        if not batch:
            return
        now = time.monotonic()
        arguments: list[Any] = []
        for call in batch:
            left = call.deadline - now
            milliseconds = -1 if left == math.inf else max(0, math.ceil(left * 1000))
            arguments += (milliseconds, call.message)
        self.link.send(
            ENQUEUE,
            (self._keys.calls, self._keys.client(self.name)),
            self._max_pending,
            self._life,
            sent.first,
            *arguments,
        )
        self._is_under_way = True

    def _put_in_answered(self, is_known: int, ids: list[bytes]) -> None:
        book, sent = self._book, self._calls
        with book.lock:
            self._lost.was_forgotten |= sent.is_known and not is_known
            refused = sent.put_in(ids)
            book.rejected += len(refused)
            if refused:
                book.changed.notify_all()
        if refused:
            text = (
                f"{self._max_pending} calls of all clients are pending, which is max_pending; "
                "retry later"
            )
            book.fail_soon(refused, Failure(Overloaded(text)))

    def begin_again(self) -> None:
        """Forget what is under way: a bug of ours came in between."""
        with self._lock, self._book.lock:
            self.link.close()
            self._is_under_way = False
            self._calls.skip_batch()

    def _ask(self, script: Script, keys: Sequence[str], *arguments: Any) -> Any:
        """Run another script, after the batch under way."""
        with self._lock:
            self.end()
            return self.link.run(script, keys, *arguments)

    # -- what callers have given up

    def tell(self) -> bool:
        """Tell Redis and the hosts what nobody waits for, and which streams rest; whether any."""
        told = self._calls.to_tell[:_MOST_IDS]
        if told:
            with self._lock:
                self.end()
                self._tell(self.link, told)
        return bool(told)

    def tell_last(self, link: Link) -> None:
        """At the end, over another link: all of that."""
        while told := self._calls.to_tell[:_MOST_IDS]:
            self._tell(link, told)

    def _tell(self, link: Link, told: list[tuple[bytes, bytes]]) -> None:
        """It may be told twice."""
        link.run(
            TELL,
            (self._keys.calls,),
            self._keys.inboxes,
            self._keys.orders,
            self._life,
            *itertools.chain.from_iterable(told),
        )
        with self._book.lock:
            del self._calls.to_tell[: len(told)]

    # -- signs of life

    def refresh(self) -> None:
        """Give a sign of life, and look at the hosts and at old calls."""
        sent = self._calls
        with self._lock:
            self.end()
            put_in = sent.count_put_in if sent.is_known else -1
            is_known = self.look(self.link, put_in)
            self._lost.was_forgotten |= sent.is_known and not is_known
        if self._book.is_closing:
            with self._book.lock:
                self._book.changed.notify_all()  # who drains watches the progress
        self.check(is_all=True)

    def look(self, link: Link, put_in: int = -1) -> bool:
        """Ask Redis for hosts and calls, over any link; returns whether it knew this client."""
        is_known, models, queued, self._calls.delivered, announced = link.run(
            REFRESH,
            (self._keys.calls, self._keys.client(self.name), self._keys.model),
            self._life,
            self._keys.inboxes,
            put_in,
        )
        self._hosts.take_in(models, queued, announced)
        return bool(is_known)

    def check(self, *, is_all: bool) -> None:
        """Look for calls that may be lost: see ``LostCalls``."""
        keys = (self._keys.calls, self._keys.replies(self.name))
        self._lost.check(
            lambda mark, ids: self._ask(CHECK, keys, mark, self._life, *ids), is_all=is_all
        )
