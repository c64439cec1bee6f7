"""The thread of a worker host that joins the others and claims calls."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable

from ..errors import StreamerBroken, StreamerClosed, WorkerStartError
from ..reporting import report_bug
from .finisher import Finisher
from .held_calls import HeldCalls
from .host_parts import HostParts
from .host_scripts import JOIN, TAKE
from .intake import Intake
from .link import Backoff, Link, LinkError, NoGroup, Outages, entries, log
from .scripts import GROUP, LEFT
from .takeover import Takeover


class Claimer:
    """Claims as many calls as there is room for.

    Args:
        on_failure: called if this host cannot go on.

    Attributes:
        link: its own, whose reads block.
    """

    def __init__(
        self,
        parts: HostParts,
        held: HeldCalls,
        takeover: Takeover,
        intake: Intake,
        finisher: Finisher,
        *,
        on_failure: Callable[[BaseException], None],
    ) -> None:
        self._parts = parts
        self._options = parts.options
        self._keys = parts.keys
        self._held = held
        self._takeover = takeover
        self._intake = intake
        self._finisher = finisher
        self._on_failure = on_failure
        self.link = Link(parts.address, blocks=parts.address.longest_block)
        self._has_joined = False  # at least once
        self._mismatch_since: float | None = None  # hosts with another model exist

    def run(self, outages: Outages) -> None:
        """Claim calls until the host leaves."""
        backoff = Backoff(random.random)
        is_in = False
        while not self._held.is_leaving.is_set():
            try:
                workers = self._parts.engine.wait_serving(None)
                room = self._held.room(workers)
                if not room:
                    self._held.has_room.wait(None)
                    continue
                if not is_in:
                    is_in = self._join(room)
                    outages.over(self._parts.address)
                    if not is_in:
                        self._held.is_leaving.wait(backoff.failed())
                    continue  # the room may have changed
                if self._takeover.has_orphans:
                    self._take(room)
                else:
                    self._read(room)
                backoff.succeeded()
            except LinkError as error:
                is_in = False
                self._takeover.lost_redis()
                if not isinstance(error, NoGroup) and not self._held.is_leaving.is_set():
                    outages.lost(error)
                self._held.is_leaving.wait(backoff.failed())
            except (StreamerBroken, StreamerClosed, WorkerStartError) as error:  # no calls any more
                if not self._held.is_leaving.is_set():
                    self._on_failure(error)
                return
            except BaseException as bug:  # callers must not wait for a dead thread
                if self._held.is_leaving.is_set():  # close() has closed its connection
                    return
                report_bug("the worker host", bug)
                is_in = False  # it gets all its claims again when it joins
                self._takeover.lost_redis()
                self.link.close()
                self._held.is_leaving.wait(backoff.failed())

    def _join(self, room: int) -> bool:
        """Join the hosts of the prefix; false if it must wait."""
        options = self._options
        keys = (self._keys.calls, self._parts.inbox, self._keys.model)
        # A new host may take over calls. After an outage, the others have to come back first.
        is_new = not self._has_joined
        may_take_over = is_new and options.max_attempts > 1
        # The first lock since it may take over calls. The second one so that no call may finish
        # between Redis's answer and its use. The finisher takes them in the same order.
        with self._intake.lock, self._finisher.lock:
            self._finisher.end()
            asked = time.monotonic()
            redis_now, other_models, claimed, taken, more, takes_over = self.link.run(
                JOIN, keys, options.name, options.life, self._keys.inboxes, options.model,
                max(room, self._parts.batch_size),
                self._takeover.idle if may_take_over else LEFT,
                int(may_take_over), self._parts.announcement(),
            )  # fmt: skip
            if other_models:
                self._check_other_models({each.decode(errors="replace") for each in other_models})
                return False
            self._mismatch_since = None
            self._takeover.read_clock(redis_now, asked)
            for id_, fields, claims in (*claimed, *taken):
                self._intake.claimed(id_, fields, claims)
        self._takeover.has_orphans = bool(more)
        if is_new:
            self._has_joined = True
            text = "worker host %s serves %r of %s"
            log(logging.INFO, text, options.name, options.prefix, self._parts.address)
        self._takeover.joined(takes_over=bool(takes_over))
        self._held.has_work.ring()
        return True

    def _check_other_models(self, models: set[str]) -> None:
        """Wait for hosts with other models to end: a killed one disappears after its life.

        Raises:
            WorkerStartError: they are still there after that time.
        """
        now = time.monotonic()
        if self._mismatch_since is None:
            self._mismatch_since = now
        if now - self._mismatch_since <= self._options.life / 1000:
            return
        raise WorkerStartError(
            f"worker hosts of prefix {self._options.prefix!r} serve {', '.join(sorted(models))}, "
            f"but this host has {self._options.model}: calls would get results of either model. "
            "Give each model its own prefix"
        )

    def _read(self, room: int) -> None:
        answer = self.link.call(
            "XREADGROUP", "GROUP", GROUP, self._options.name, "COUNT", room,
            "BLOCK", round(1000 * self._parts.address.longest_block),
            "STREAMS", self._keys.calls, self._parts.inbox, ">", ">",
        )  # fmt: skip
        self._intake.answered_at = time.monotonic()
        calls = self._keys.calls.encode()
        for stream, id_, fields in entries(answer):
            if stream == calls:
                self._intake.claimed(id_, fields, link=self.link)
            else:  # a host has left calls, or this is a wake-up
                self._takeover.has_orphans = True

    def _take(self, room: int) -> None:
        """Claim calls left by others, before new ones."""
        with self._intake.lock:  # or older ones than these could come after them
            claimed, more = self.link.run(
                TAKE,
                (self._keys.calls,),
                self._options.name,
                room,
                self._takeover.least_idle,
            )
            self._intake.answered_at = time.monotonic()
            self._takeover.has_orphans = bool(more)
            for id_, fields, claims in claimed:
                self._intake.claimed(id_, fields, claims, link=self.link)
