"""Bookkeeping of a client's open calls in Redis. No I/O."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from ..remote.open_calls import OpenCalls, RemoteCall


class SentCalls(OpenCalls):
    """Each is an entry of Redis once it is sent, and is found again there by its id.

    Attributes:
        is_known: whether Redis has accepted a call of this client.
        delivered: id of the last call delivered to hosts; empty if none.
        to_tell: ids of entries, and what is to be done with them: see ``TELL``.
    """

    def __init__(self) -> None:
        super().__init__()
        self._put_in = 0
        self._newest_id = b""  # of an entry
        self._reasons: dict[int, str] = {}  # of notices, by number of the call
        self._last_doubted = 0  # number of the last call that was looked for
        self._newest_before = 0  # number of the newest call at the last ``doubtful``
        self.is_known = False
        self.delivered = b""
        self.to_tell: list[tuple[bytes, bytes]] = []

    @property
    def first(self) -> int:
        """The position of the next batch's first call among all calls sent.

        By it Redis can tell which calls of a batch it already has.
        """
        return self._put_in + 1

    @property
    def count_put_in(self) -> int:
        """How many calls Redis has accepted so far."""
        return self._put_in

    def progress(self) -> object:
        """A value that changes when a call ends, or when hosts come nearer to the newest one."""
        return len(self._calls), min(_parts(self.delivered), _parts(self._newest_id))

    def put_in(self, ids: Sequence[bytes]) -> list[RemoteCall]:
        """Note the ids of the accepted calls; returns the others, which Redis refused."""
        self._put_in += len(ids)
        self.is_known = True
        for call, id_ in zip(self._sending, ids, strict=False):
            call.message = b""
            call.id = self._newest_id = id_
            if call.is_over:
                self._drop(call)
        return self.accepted(len(ids))

    def skip_batch(self) -> None:
        """Forget the batch that is being sent. Redis may have it, so its positions stay taken."""
        self._put_in += len(self._sending)
        self._sending = []

    def _drop(self, call: RemoteCall) -> None:
        if call.id:  # else ``put_in`` drops it once its id is known
            self.to_tell.append((call.id, b"drop"))

    def hold(self, call: RemoteCall, *, is_held: bool) -> None:
        """Have a stream rest, or go on, if its entry is known."""
        if call.id and not call.is_over:
            self.to_tell.append((call.id, b"hold" if is_held else b"go"))

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
        noticed = [
            call for number in self._reasons if (call := self._calls.get(number)) and call.id
        ]
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

    def _over(self, call: RemoteCall) -> bool:
        is_news = super()._over(call)
        if is_news and self._reasons:
            self._reasons.pop(call.number, None)
        return is_news


def _parts(id_: bytes) -> tuple[int, int]:
    """An entry's id in a form that can be compared."""
    time, _, number = id_.partition(b"-")
    return int(time or 0), int(number or 0)
