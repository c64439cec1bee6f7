"""Bookkeeping of a client's open calls in Redis. No I/O."""

from __future__ import annotations

import collections
import math
from collections.abc import Sequence
from typing import NamedTuple

from ..remote.open_calls import OpenCalls, RemoteCall

#: So often within the time after which a call is silent the progress is noted.
_LOOKS = 100


class _Look(NamedTuple):
    """How far calls were at some time.

    Attributes:
        time: on the monotonic clock.
        delivered: id of the last call delivered to hosts.
        newest: number of the newest call of this client.
    """

    time: float
    delivered: bytes
    newest: int


class SentCalls(OpenCalls):
    """Each is an entry of Redis once it is sent.

    Attributes:
        is_known: whether Redis has accepted a call of this client.
        delivered: id of the last call delivered to hosts; empty if none.
        to_tell: ids of entries, and what is to be done with them: see ``TELL``.
    """

    def __init__(self, max_pending: int) -> None:
        super().__init__(max_pending)
        self._put_in = 0
        self._newest_id = b""  # of an entry
        self._looks: collections.deque[_Look] = collections.deque()
        self._begins_anew = False  # with the last look
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

    def silent(self, now: float, limit: float) -> list[RemoteCall]:
        """Calls without a deadline that have made no progress for ``limit`` seconds.

        A call makes progress while hosts come nearer to it in the queue. One that was delivered
        to a host must be answered in that time, or must hand out outputs if it is a stream.

        If it was not looked for long, this process was stopped, and answers may lie in Redis: then
        the time begins anew. But not twice in a row, or a Redis that hangs would keep calls open.
        """
        looks = self._looks
        self._begins_anew = (
            not self._begins_anew and bool(looks) and now - looks[-1].time > limit / 2
        )
        if self._begins_anew:
            looks.clear()
        if looks and now - looks[-1].time < limit / _LOOKS:
            return []
        looks.append(_Look(now, self.delivered, next(reversed(self._calls), 0)))
        while len(looks) > 1 and looks[1].time <= now - limit:
            looks.popleft()
        before = looks[0]
        if before.time > now - limit:
            return []
        stands_still = before.delivered == self.delivered
        reached = _parts(before.delivered)
        found: list[RemoteCall] = []
        for call in self._calls.values():
            if call.number > before.newest:
                break
            if not stands_still and call.id and _parts(call.id) > reached:
                break  # hosts come nearer to it, and to those behind it
            if call.deadline == math.inf and _is_quiet(call, now, limit):
                found.append(call)
        return found


def _is_quiet(call: RemoteCall, now: float, limit: float) -> bool:
    """Whether it is no stream whose consumer has got something, or is behind."""
    inflow = call.inflow
    if inflow is None:
        return True
    if inflow.is_held or inflow.handed_out != inflow.counted:
        inflow.counted, inflow.counted_at = inflow.handed_out, now
    return now - inflow.counted_at >= limit


def _parts(id_: bytes) -> tuple[int, int]:
    """An entry's id in a form that can be compared."""
    time, _, number = id_.partition(b"-")
    return int(time or 0), int(number or 0)
