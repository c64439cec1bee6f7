"""Bookkeeping of calls: a client's open calls, a worker host's claims, Redis's clock. No I/O."""

from __future__ import annotations

import collections
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from .outflow import Outflow

__all__ = [
    "TOLERANCE",
    "Claim",
    "Claims",
    "Inflow",
    "Patience",
    "RedisClock",
    "RemoteCall",
    "SentCalls",
]

#: Seconds to claim ahead: an answer, a claim, and a busy interpreter in between.
_CLAIMING_TIME = 0.01
#: Batches to claim ahead for an instant model; measured, more did not help.
_MOST_AHEAD = 7


class Inflow:
    """Outputs of a client's stream on their way from Redis to its consumer.

    Attributes:
        handed_out: how many have come.
        missing: the number of an output that had not come before others, and the round of reading
            in which that was noticed.
        backlog: encoded, those that came while the consumer was behind.
        is_held: the consumer is behind: it has as much as it takes for now.
        is_passing: a thread is passing on the backlog.
        end: what comes after it, None before that has come: opaque here.
    """

    __slots__ = ("backlog", "end", "handed_out", "is_held", "is_passing", "missing")

    def __init__(self) -> None:
        self.handed_out = 0
        self.missing: tuple[int, int] | None = None
        self.backlog: collections.deque[bytes] = collections.deque()
        self.is_held = self.is_passing = False
        self.end: Any = None


class RemoteCall:
    """A client's call, on its way to a worker host or back.

    Attributes:
        number: the client's number for it.
        message: for Redis; dropped once sent.
        order: encoded precedence, sent beside the message; empty for an ordinary call.
        timeout: seconds that the caller waits; None for ever.
        deadline: end of that time on the client's clock.
        reply: receives the outcome; opaque here.
        is_over: answered, refused or given up; final.
        is_taken: being sent, or sent.
        id: id of its entry in Redis; empty until known.
        mark: that of a stream, sent beside the message; empty for another call.
        inflow: of a stream, its outputs; None for another call.
    """

    __slots__ = (
        "deadline", "id", "inflow", "is_over", "is_taken", "mark", "message", "number", "order",
        "reply", "timeout",
    )  # fmt: skip

    def __init__(
        self,
        number: int,
        message: bytes,
        timeout: float | None,
        deadline: float,
        reply: Any,
        order: bytes = b"",
        mark: bytes = b"",
    ) -> None:
        self.number = number
        self.message = message
        self.order = order
        self.timeout = timeout
        self.deadline = deadline
        self.reply = reply
        self.is_over = self.is_taken = False
        self.id = b""
        self.mark = mark
        self.inflow = Inflow() if mark else None

    #: A client does not learn when a host claims its call, nor the call's timing.
    is_running = False
    timing = None


class SentCalls:
    """The open calls of a client.

         state      held by                        leaves when
         -----      -------                        -----------
         unsent     _unsent                        it is sent, or its caller gives up
         sending    _sending, with _calls          Redis has answered
         sent       _calls                         its reply arrives, or its caller gives up

    Attributes:
        is_known: whether Redis has accepted a call of this client.
        to_withdraw: ids of entries whose callers have given up.
        to_tell: ids of streams, and what their hosts are to do with them: see ``TELL``.
    """

    def __init__(self) -> None:
        self._calls: dict[int, RemoteCall] = {}
        self._unsent: collections.OrderedDict[int, RemoteCall] = collections.OrderedDict()
        self._sending: list[RemoteCall] = []
        self._put_in = 0
        self._newest_id = b""  # of an entry
        self._reasons: dict[int, str] = {}  # of notices, by number of the call
        self._last_doubted = 0  # number of the last call that was looked for
        self._newest_before = 0  # number of the newest call at the last ``doubtful``
        self.is_known = False
        self.to_withdraw: list[bytes] = []
        self.to_tell: list[tuple[bytes, bytes]] = []

    def __len__(self) -> int:
        return len(self._calls)

    @property
    def first(self) -> int:
        """The position of the next batch's first call among all calls sent."""
        return self._put_in + 1

    @property
    def count_put_in(self) -> int:
        """How many calls Redis has accepted so far."""
        return self._put_in

    def progress(self, delivered: bytes) -> tuple[int, tuple[int, int]]:
        """A value that changes when a call ends, or when hosts come nearer to the newest one.

        Args:
            delivered: id of the last call delivered to hosts; empty if none.
        """
        return len(self._calls), min(_parts(delivered), _parts(self._newest_id))

    def add(self, call: RemoteCall) -> None:
        self._calls[call.number] = call
        self._unsent[call.number] = call

    def is_alone(self, call: RemoteCall) -> bool:
        """Whether it is the only call to send."""
        return len(self._unsent) == 1 and not self._sending and call.number in self._unsent

    def batch(self, most_calls: int, most_bytes: int) -> list[RemoteCall]:
        """The next calls to send: exactly the same ones until ``put_in``.

        So Redis can tell by the first one's position which of them it already has.
        """
        if not self._sending:
            size = 0
            while self._unsent and len(self._sending) < most_calls and size < most_bytes:
                call = next(iter(self._unsent.values()))
                if not call.is_taken:  # else an interrupt came before the del below
                    call.is_taken = True
                    self._sending.append(call)
                    size += len(call.message)
                del self._unsent[call.number]
        return self._sending

    def put_in(self, ids: Sequence[bytes]) -> list[RemoteCall]:
        """Note the ids of the accepted calls; returns the others, which Redis refused."""
        batch, self._sending = self._sending, []
        self._put_in += len(ids)
        self.is_known = True
        for call, id_ in zip(batch, ids, strict=False):
            call.message = b""
            call.id = id_ or call.id  # which its first outputs may have told
            self._newest_id = id_ or self._newest_id
            if call.is_over and id_:
                self._drop(call)
        return [call for call in batch[len(ids) :] if self._over(call)]

    def answered(self, number: int) -> RemoteCall | None:
        """End a call whose reply arrived; None if it is over already."""
        call = self._calls.get(number)
        return call if call is not None and self._over(call) else None

    def give_up(self, call: RemoteCall) -> bool:
        """End a call whose caller gives up; false if it was over already."""
        if not self._over(call):
            return False
        if call.id:
            self._drop(call)
        elif self._unsent.pop(call.number, None) is not None:
            call.message = b""
        return True

    def _drop(self, call: RemoteCall) -> None:
        if call.inflow is not None:  # its place is freed wherever it is
            self.to_tell.append((call.id, b"drop"))
        else:
            self.to_withdraw.append(call.id)

    def hold(self, call: RemoteCall, *, is_held: bool) -> None:
        """Have a stream rest, or go on, if its entry is known."""
        if call.id and not call.is_over:
            self.to_tell.append((call.id, b"hold" if is_held else b"go"))

    def stream(self, number: int, id_: bytes) -> RemoteCall | None:
        """The open stream of which outputs have come, if it is one.

        Args:
            id_: of its entry, if its first outputs have come: it may be unknown, since an answer of
                Redis was lost. Then a stream that was given up could not be dropped until now.
        """
        call = self._calls.get(number)
        if call is None:
            if id_:
                self.to_tell.append((id_, b"drop"))
            return None
        call.id = call.id or id_
        return call if call.inflow is not None else None

    def noticed(self, number: int, reason: str) -> bool:
        """Take in a notice that a host cannot read a call; whether the call is open."""
        if number not in self._calls:
            return False
        self._reasons[number] = reason
        return True

    def doubtful(self, most: int, *, all_sent: bool = False) -> list[RemoteCall]:
        """Calls to look for in Redis: those with notices, and some that have waited long.

        Long means since the last time. All calls get their turn.

        Args:
            most: maximum number of calls without notices.
            all_sent: also calls that have not waited long.
        """
        noticed = [self._calls[number] for number in self._reasons if number in self._calls]
        if not most:
            return noticed
        newest = next(reversed(self._calls), 0)
        oldest, upto = self._last_doubted, newest if all_sent else self._newest_before
        waiting = (call for call in self._calls.values() if oldest < call.number <= upto)
        doubted = [*itertools.islice((call for call in waiting if call.id), most)]
        self._newest_before = newest
        self._last_doubted = doubted[-1].number if len(doubted) == most else 0
        return [*noticed, *(call for call in doubted if call.number not in self._reasons)]

    @property
    def has_more_doubts(self) -> bool:
        """Whether the last ``doubtful`` left some calls out."""
        return self._last_doubted > 0

    def gone(self, calls: Iterable[RemoteCall]) -> list[tuple[RemoteCall, str]]:
        """End calls that are not in Redis and have no reply, with the reason of their notice.

        Returns the calls that were open. The reason is empty without a notice.
        """
        found = []
        for call in calls:
            reason = self._reasons.get(call.number, "")
            if self._over(call):
                found.append((call, reason))
        return found

    def give_up_all(self) -> list[RemoteCall]:
        """End all calls; returns those that were open."""
        return [call for call in [*self._calls.values()] if self.give_up(call)]

    def _over(self, call: RemoteCall) -> bool:
        if call.is_over:
            return False
        call.is_over = True
        del self._calls[call.number]
        if self._reasons:
            self._reasons.pop(call.number, None)
        return True


def _parts(id_: bytes) -> tuple[int, int]:
    """An entry's id in a form that can be compared."""
    time, _, number = id_.partition(b"-")
    return int(time or 0), int(number or 0)


class Patience:
    """A timeout that starts again at each sign of progress.

    Args:
        limit: seconds without a new sign.
        now: monotonic time.
    """

    def __init__(self, limit: float, now: float) -> None:
        self._limit = limit
        self._since = now
        self._sign: object = None

    def left(self, sign: object, now: float) -> float:
        """Seconds left, given the current sign; 0 or less if the time is over."""
        if sign != self._sign:
            self._sign = sign
            self._since = now
        return self._since + self._limit - now


class Claim:
    """A call that a worker host has claimed.

    Attributes:
        id: id of its entry in Redis.
        client: name of the client; empty if unreadable, unverified if ``is_unread``.
        number: the client's number for it.
        size: number of items.
        call: the engine's call, until it is over; opaque here.
        is_open: whether it is still to be computed.
        is_set_aside: whether its message is in the stream of malformed ones.
        is_unread: whether this host could not read its message.
        outflow: of a stream, its outputs on their way to Redis; None for another call.
    """

    __slots__ = (
        "call", "client", "id", "is_open", "is_set_aside", "is_unread", "number", "outflow", "size",
    )  # fmt: skip

    def __init__(self, id: bytes, client: str, number: int, size: int) -> None:
        self.id = id
        self.client = client
        self.number = number
        self.size = size
        self.call: Any = None
        self.outflow: Outflow | None = None
        self.is_open = True
        self.is_set_aside = self.is_unread = False


class Claims:
    """A worker host's claims in progress, and how much more it should claim.

    It claims as many items as its workers compute at once, and enough further batches to keep them
    busy during a request to Redis: one, if a batch takes longer. No more, since other hosts cannot
    compute what this host has claimed.

    Attributes:
        open_items: items that are claimed and not computed yet.
    """

    def __init__(self, batch_size: int) -> None:
        self._batch_size = batch_size
        self._claims: dict[bytes, Claim] = {}
        self._mean_size = 1.0
        self._is_full = False
        self.open_items = 0

    def __len__(self) -> int:
        return len(self._claims)

    def __iter__(self) -> Iterator[Claim]:
        return iter(self._claims.values())

    def get(self, id_: bytes) -> Claim | None:
        return self._claims.get(id_)

    def room(
        self, workers: int, batch_duration: float, held: int = 2, *, is_stepping: bool = False
    ) -> int:
        """How many calls to claim.

        Args:
            workers: how many serve.
            batch_duration: seconds between two batches of a worker.
            held: the most batches that a worker holds.
            is_stepping: whether the model is one of steps: a batch is one item then, and those that
                a worker holds beyond its places are enough to claim ahead.

        Once full, 0 until there is room for half a batch, so that few requests claim many calls.
        """
        ahead = _CLAIMING_TIME / batch_duration if batch_duration > 0 else _MOST_AHEAD
        batches = held - 1 + min(max(1, math.ceil(ahead)), _MOST_AHEAD)
        most = (held if is_stepping else batches * self._batch_size) * workers
        items = most - self.open_items
        is_little = items < self._batch_size // 2 and not is_stepping
        self._is_full = items <= 0 or (self._is_full and is_little)
        if self._is_full:
            return 0
        return max(1, math.floor(items / self._mean_size))

    def claimed(self, claim: Claim) -> bool:
        """Add a claim; false if it is known: after a lost connection claims may come twice."""
        if claim.id in self._claims:
            return False
        self._claims[claim.id] = claim
        self.open_items += claim.size
        # A moving average over about thirty calls.
        self._mean_size += (claim.size - self._mean_size) / 32
        return True

    def computed(self, claim: Claim) -> bool:
        """Note that there is an outcome; false if there was one already."""
        if not claim.is_open:
            return False
        claim.is_open = False
        claim.call = None
        self.open_items -= claim.size
        return True

    def finished(self, claims: Iterable[Claim]) -> None:
        """Forget claims: Redis has the outcome, or another host has claimed the call."""
        for claim in claims:
            self._claims.pop(claim.id, None)

    def gone(self, ids: Iterable[bytes]) -> list[Any]:
        """Forget claims that other hosts took; returns the engine's calls to withdraw."""
        claims = [self._claims[id_] for id_ in ids if id_ in self._claims]
        self.finished(claims)
        calls = [claim.call for claim in claims if claim.is_open]
        for claim in claims:
            self.computed(claim)
        return calls


#: A larger difference from the expected time of Redis is a step of its clock, seconds.
TOLERANCE = 1.0

#: Seconds that the clock before a step is remembered: older calls may still wait.
_REMEMBERED = 600.0


class RedisClock:
    """Converts deadlines, which are times of Redis's clock, to our monotonic clock.

    Redis's clock may be set while calls wait, and it is unknown which calls came before. So a
    deadline has passed only if it has by every recent setting: computing too late does less harm
    than dropping a call. For one thread at a time.
    """

    def __init__(self) -> None:
        self._offset = 0.0  # Redis's time minus ours
        self._read_at: float | None = None
        self._left: list[tuple[float, float]] = []  # earlier offsets, and until when they count

    def read(self, redis_now: float, asked: float, answered: float) -> float:
        """Take in Redis's time; returns the step of its clock in seconds, 0 if there was none.

        Args:
            redis_now: Redis's time.
            asked, answered: our time before and after the request.
        """
        least, most = redis_now - answered, redis_now - asked
        step = 0.0
        if self._read_at is None:
            self._offset = least
        elif least - TOLERANCE <= self._offset <= most + TOLERANCE:
            self._offset = max(least, min(self._offset, most))
        else:
            step = (least + most) / 2 - self._offset
            self._left.append((self._offset, answered + _REMEMBERED))
            self._offset = least
        self._left = [each for each in self._left if each[1] > answered]
        self._read_at = answered
        return step

    def expected(self, now: float) -> float:
        """Redis's expected time now."""
        return self._offset + now

    def was_read_since(self, then: float) -> bool:
        """Whether Redis's time was read since then."""
        return self._read_at is not None and self._read_at >= then

    def left(self, deadline: float, now: float) -> float:
        """Seconds until a deadline; 0 or less if it has passed."""
        offset = min((offset for offset, _ in self._left), default=self._offset)
        return deadline - min(offset, self._offset) - now
