"""The thread of a worker host that sends outcomes, outputs and signs of life."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from threading import Lock

from ..reporting import report_bug
from ..workers.protocol import Failure
from .held_calls import HeldCalls
from .host_outcomes import HostOutcomes
from .host_parts import HostParts
from .host_scripts import KEEP
from .intake import Intake
from .link import Backoff, Link, LinkError, NoGroup, Outages
from .redis_clock import TOLERANCE
from .takeover import Takeover

#: Maximum bytes of one request.
_MOST_BYTES = 4 << 20

#: Maximum bytes that the engine's thread sends itself, so little that it does not block.
_AT_ONCE_BYTES = 1 << 15


class Finisher:
    """Sends what the engine's thread has queued, or lets that thread send it.

    Args:
        on_failure: called if this host cannot go on.

    Attributes:
        lock: guards the next one, and the streams.
        link: of whichever thread sends.
        has_drained: the engine has ended: nothing new comes.
        give_up_at: monotonic time to stop retrying Redis.
    """

    def __init__(
        self,
        parts: HostParts,
        held: HeldCalls,
        takeover: Takeover,
        intake: Intake,
        *,
        on_failure: Callable[[BaseException], None],
    ) -> None:
        self._parts = parts
        self._options = parts.options
        self._keys = parts.keys
        self._held = held
        self._takeover = takeover
        self._intake = intake
        self.lock = Lock()
        self.link = Link(parts.address)
        self._outcomes = HostOutcomes(parts, held, on_failure)  # guarded by ``lock``
        self._is_outputs_turn = True
        self.has_drained = False
        self.give_up_at = math.inf

    def run(self, outages: Outages, has_failed: Callable[[], bool]) -> None:
        """Send until all is sent after the engine has ended.

        Args:
            has_failed: whether other hosts should claim the calls of this one.
        """
        backoff = Backoff(random.random)
        keep_at = 0.0
        interval = self._options.claim_timeout / 3
        while not self._has_finished:
            try:
                now = time.monotonic()
                if now >= self.give_up_at:
                    return
                if keep_at <= now and not has_failed():
                    self._keep()
                    keep_at = now + interval
                if not self._finish_next():
                    now = time.monotonic()
                    self._held.has_work.wait(
                        min(max(keep_at - now, 0.1), self._held.streams.wait(now))
                    )
                outages.over(self._parts.address)
                backoff.succeeded()
            except NoGroup:  # the keys were deleted; the claimer makes them again
                keep_at = time.monotonic() + interval
                time.sleep(backoff.failed())
            except LinkError as error:
                outages.lost(error)
                time.sleep(backoff.failed())
                keep_at = 0.0
            except BaseException as bug:  # callers must not wait for a dead thread
                with self.lock:
                    self._begin_again(bug)
                time.sleep(backoff.failed())

    @property
    def _has_finished(self) -> bool:
        """Whether nothing more is to be sent."""
        return self.has_drained and not len(self._outcomes) and not len(self._held.streams)

    def finish_now(self) -> None:
        """Send what is new from the engine's thread if nothing is under way: no thread wakes up.

        The finisher receives the answer. Only few bytes, and no exceptions to unpickle.
        """
        if self._held.streams.is_ready:
            self._held.has_work.ring()
        if not self.link.is_connected or not self.lock.acquire(blocking=False):
            return
        try:
            is_free = not self._outcomes.is_under_way and not self._held.streams.is_under_way
            if is_free and self.link.is_connected:
                if self._held.streams.is_ready:
                    self._held.streams.send(self.link, time.monotonic(), _AT_ONCE_BYTES)
                    return
                self._outcomes.send_now(self.link, _AT_ONCE_BYTES)
        except LinkError:  # the finisher repeats it
            pass
        except Exception as bug:
            self._begin_again(bug)
        finally:
            self.lock.release()

    def _begin_again(self, bug: BaseException) -> None:
        """What was being sent fails: a bug of ours came in between. Locked."""
        failure = Failure(report_bug("the worker host", bug))
        self.link.close()
        self._outcomes.put_back(failure)
        self._held.streams.fail(failure)
        self._held.has_work.ring()

    def _finish_next(self) -> bool:
        """Send the next outcomes, or finish those under way; whether there were any."""
        with self.lock:
            if not self._outcomes.is_under_way and not self._held.streams.is_under_way:
                # In turn, or one kind could hold up the other.
                self._is_outputs_turn = not self._is_outputs_turn
                if self._is_outputs_turn or not len(self._outcomes):
                    self._held.streams.send(self.link, time.monotonic(), _MOST_BYTES)
                if not self._held.streams.is_under_way:
                    self._outcomes.send(self.link)
            return self.end()

    def end(self) -> bool:
        """Receive the answer to what is under way; whether there was anything."""
        if self._held.streams.is_under_way:
            self._held.streams.receive(self.link)
            return True
        return self._outcomes.receive(self.link)

    def _keep(self) -> None:
        """Send a sign of life for this host and its claims; claim calls of silent hosts."""
        options, intake = self._options, self._intake
        with self._held.lock:
            ids = [claim.id for claim in self._held.claims]
            workers = self._parts.engine.serving
            # At least a batch, even if this host is full: these calls have waited longest.
            room = max(self._held.room(workers), self._parts.batch_size)
            is_in = self._takeover.has_joined and not self._held.is_leaving.is_set()
            room = room if workers and is_in else 0
        # Nothing while the claimer submits calls, which takes long if the length function does:
        # the sign of life does not wait for it. The claimer looks for these calls next.
        takes = room > 0 and intake.lock.acquire(blocking=False)
        try:
            with self.lock:
                self.end()
                asked = time.monotonic()
                expected = self._takeover.expected(asked)
                redis_now, gone, claimed, more = self.link.run(
                    KEEP, (self._keys.calls, self._parts.inbox, self._keys.model),
                    options.name, options.life, room if takes else 0, self._takeover.least_idle,
                    self._keys.inboxes, expected, math.ceil(1000 * TOLERANCE),
                    self._parts.announcement() if is_in else b"", *ids,
                )  # fmt: skip
            self._takeover.read_clock(redis_now, asked)
            if gone:
                taken_away = self._held.forget(gone)
                with self._held.lock:
                    self._held.counts["taken_away"] += taken_away
            for id_, fields, claims in claimed:
                intake.claimed(id_, fields, claims)
        finally:
            if takes:
                intake.lock.release()
        if more and room:  # for the claimer, before new calls
            self._takeover.has_orphans = True
            with self.lock:
                self.end()
                self.link.call("XADD", self._parts.inbox, "NOMKSTREAM", "*", "left", "")
