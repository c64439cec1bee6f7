"""Who owes what to whom: the calls of a client, and what a worker host has claimed. No I/O."""

from __future__ import annotations

import collections
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

__all__ = ["Claim", "Claims", "Patience", "RemoteCall", "SentCalls"]


#: What to be ahead of Redis by, seconds: an answer, a claim, and a busy interpreter in between.
_CLAIMING_TIME = 0.01
#: Batches of a model that takes no time at all; measured, more did not help.
_MOST_AHEAD = 7


class RemoteCall:
    """A call of a client's, on its way to a worker host or back.

    Attributes:
        number: the client's own.
        message: for Redis, until it is there, or not to be there any more.
        order: goes beside it; empty for an ordinary call.
        timeout: how long somebody waits for it, seconds; None for ever.
        deadline: when nobody waits for it any more, on the client's clock.
        reply: where the outcome goes; opaque here.
        is_over: answered, refused or given up; never changes back.
        is_taken: whether it is being put in, or is.
        id: of its entry in Redis; empty before it is known.
    """

    __slots__ = (
        "deadline", "id", "is_over", "is_taken", "message", "number", "order", "reply", "timeout",
    )  # fmt: skip

    def __init__(
        self,
        number: int,
        message: bytes,
        timeout: float | None,
        deadline: float,
        reply: Any,
        order: bytes = b"",
    ) -> None:
        self.number = number
        self.message = message
        self.order = order
        self.timeout = timeout
        self.deadline = deadline
        self.reply = reply
        self.is_over = self.is_taken = False
        self.id = b""

    #: A client is not told when a host claims its call, nor where its time went.
    is_running = False
    timing = None


class SentCalls:
    """The calls of a client that are not over.

         state      held by                        leaves when
         -----      -------                        -----------
         unsent     _unsent                        it is its turn, or nobody waits for it any more
         sending    _sending, with _calls          Redis has answered, whatever happens to it
         sent       _calls                         its reply is there, or nobody waits any more

    Attributes:
        is_known: whether Redis has taken a call of this client's.
        to_withdraw: ids of entries that nobody waits for any more.
    """

    def __init__(self) -> None:
        self._calls: dict[int, RemoteCall] = {}
        self._unsent: collections.OrderedDict[int, RemoteCall] = collections.OrderedDict()
        self._sending: list[RemoteCall] = []
        self._put_in = 0
        self._newest_id = b""  # of an entry
        self._reasons: dict[int, str] = {}  # of notices, by the number of the call
        self._last_doubted = 0  # the number of the call
        self._newest_before = 0  # the number of a call, when it was last asked what to doubt
        self.is_known = False
        self.to_withdraw: list[bytes] = []

    def __len__(self) -> int:
        return len(self._calls)

    @property
    def first(self) -> int:
        """The number, among all that are put in, of the first one of a batch."""
        return self._put_in + 1

    @property
    def count_put_in(self) -> int:
        """How many calls Redis has taken so far."""
        return self._put_in

    def progress(self, delivered: bytes) -> tuple[int, tuple[int, int]]:
        """Changes when one of these is over, and while hosts come nearer to the last one put in.

        Args:
            delivered: id of the last call that hosts were given; empty if there was none.
        """
        return len(self._calls), min(_parts(delivered), _parts(self._newest_id))

    def add(self, call: RemoteCall) -> None:
        self._calls[call.number] = call
        self._unsent[call.number] = call

    def is_alone(self, call: RemoteCall) -> bool:
        """Whether it is all that there is to put in."""
        return len(self._unsent) == 1 and not self._sending and call.number in self._unsent

    def batch(self, most_calls: int, most_bytes: int) -> list[RemoteCall]:
        """What to put in next. The same one, to the letter, until it is said to be put in.

        For then Redis can tell, by the number of the first one, which of them it has already.
        """
        if not self._sending:
            size = 0
            while self._unsent and len(self._sending) < most_calls and size < most_bytes:
                call = next(iter(self._unsent.values()))
                if not call.is_taken:  # else an interrupt came before the last line, the last time
                    call.is_taken = True
                    self._sending.append(call)
                    size += len(call.message)
                del self._unsent[call.number]
        return self._sending

    def put_in(self, ids: Sequence[bytes]) -> list[RemoteCall]:
        """Redis has taken the first of the batch; returns the others, which it has refused."""
        batch, self._sending = self._sending, []
        self._put_in += len(ids)
        self.is_known = True
        for call, id_ in zip(batch, ids, strict=False):
            call.message = b""
            call.id = id_
            self._newest_id = id_ or self._newest_id
            if call.is_over and id_:
                self.to_withdraw.append(id_)
        return [call for call in batch[len(ids) :] if self._over(call)]

    def answered(self, number: int) -> RemoteCall | None:
        """Its reply is there; None if nobody waits for it any more, or has it already."""
        call = self._calls.get(number)
        return call if call is not None and self._over(call) else None

    def give_up(self, call: RemoteCall) -> bool:
        """Nobody waits for it any more; whether that is news."""
        if not self._over(call):
            return False
        if call.id:
            self.to_withdraw.append(call.id)
        elif self._unsent.pop(call.number, None) is not None:
            call.message = b""
        return True

    def noticed(self, number: int, reason: str) -> bool:
        """Somebody says that a host cannot read a call; whether it is one of these."""
        if number not in self._calls:
            return False
        self._reasons[number] = reason
        return True

    def doubtful(self, most: int, *, all_sent: bool = False) -> list[RemoteCall]:
        """What to look for in Redis: calls of notices, and some of those that wait for long.

        That is since they were asked for the last time. All of them have their turn.

        Args:
            most: of those that there is no notice of; 0 for none.
            all_sent: also those that do not wait for long.
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
        """Whether ``doubtful`` had to leave some out the last time that it was asked for any."""
        return self._last_doubted > 0

    def gone(self, calls: Iterable[RemoteCall]) -> list[tuple[RemoteCall, str]]:
        """They are not in Redis, and have no reply. Those that were not over, and of which notice.

        The reason is empty if there was none.
        """
        found = []
        for call in calls:
            reason = self._reasons.get(call.number, "")
            if self._over(call):
                found.append((call, reason))
        return found

    def give_up_all(self) -> list[RemoteCall]:
        """It ends: those that somebody still waits for."""
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
    """Of the id of an entry, so that they can be compared; zeros of none."""
    time, _, number = id_.partition(b"-")
    return int(time or 0), int(number or 0)


class Patience:
    """For how long to wait for something of which there are signs now and then that it goes on.

    Args:
        limit: the longest without a new sign, seconds.
        now: of a monotonic clock.
    """

    def __init__(self, limit: float, now: float) -> None:
        self._limit = limit
        self._since = now
        self._sign: object = None

    def left(self, sign: object, now: float) -> float:
        """How long to wait for another sign than this one, seconds; not above 0 if it is over."""
        if sign != self._sign:
            self._sign = sign
            self._since = now
        return self._since + self._limit - now


class Claim:
    """A call that a worker host has claimed.

    Attributes:
        id: of its entry in Redis.
        client: whom it is of; empty if that cannot be read. Unproven if it is unread.
        number: the client's own.
        size: how many items it has.
        call: what the engine has made of it, until that is over; opaque here.
        is_open: whether it is not computed yet.
        is_set_aside: whether its message is in the stream of those that cannot be read.
        is_unread: whether this host could not read its message.
    """

    __slots__ = (
        "call", "client", "id", "is_open", "is_set_aside", "is_unread", "number", "size",
    )  # fmt: skip

    def __init__(self, id: bytes, client: str, number: int, size: int) -> None:
        self.id = id
        self.client = client
        self.number = number
        self.size = size
        self.call: Any = None
        self.is_open = True
        self.is_set_aside = self.is_unread = False


class Claims:
    """What a worker host has claimed and not finished, and how much more it should claim.

    That is as many items as its workers compute at once, and enough batches besides to keep them
    busy while Redis is asked for more: one, if a batch takes longer than that. No more, since what
    this host has claimed no other can compute.

    Attributes:
        open_items: claimed and not computed yet.
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

    def room(self, workers: int, batch_duration: float) -> int:
        """How many calls to claim, with so many workers that take batches, and so long for one.

        When there was none, 0 until there is for half a batch, so that claims come by the dozen.
        """
        ahead = _CLAIMING_TIME / batch_duration if batch_duration > 0 else _MOST_AHEAD
        batches = 1 + min(max(1, math.ceil(ahead)), _MOST_AHEAD)
        most = batches * self._batch_size * workers
        items = most - self.open_items
        self._is_full = items <= 0 or (self._is_full and items < self._batch_size // 2)
        if self._is_full:
            return 0
        return max(1, math.floor(items / self._mean_size))

    def claimed(self, claim: Claim) -> bool:
        """Whether that is news: what is lost with a connection may be told twice."""
        if claim.id in self._claims:
            return False
        self._claims[claim.id] = claim
        self.open_items += claim.size
        # Over the last thirty or so: what comes is much like what came.
        self._mean_size += (claim.size - self._mean_size) / 32
        return True

    def computed(self, claim: Claim) -> bool:
        """There is an outcome; whether that is news."""
        if not claim.is_open:
            return False
        claim.is_open = False
        claim.call = None
        self.open_items -= claim.size
        return True

    def finished(self, claims: Iterable[Claim]) -> None:
        """Redis knows the outcome, or that another host has claimed it."""
        for claim in claims:
            self._claims.pop(claim.id, None)

    def gone(self, ids: Iterable[bytes]) -> list[Any]:
        """Other hosts have claimed these; returns what the engine has made of them, to withdraw."""
        claims = [self._claims[id_] for id_ in ids if id_ in self._claims]
        self.finished(claims)
        calls = [claim.call for claim in claims if claim.is_open]
        for claim in claims:
            self.computed(claim)
        return calls
