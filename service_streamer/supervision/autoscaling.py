"""How many workers there should be, between a least and a most number, by the load.

    what is seen                                            what follows
    ------------                                            ------------
    items wait longer than the target, for a while, and     more workers
    still would when workers started now are ready
    calls are refused, or their time ends, for a while       the same
    for a long time fewer workers would have been enough    fewer workers
    workers start                                           they count as if they were there soon
    a worker cannot be started, or is late                  one more is tried, then none

*How long items wait* is a forecast: the items that wait, over what the workers that are ready
compute in a second. What one of them computes is measured while items wait, since no worker is idle
then. Before that it is what the scheduler has learned of the durations of batches.

*How many more*: enough for what arrives, with some room, and for what will have gathered when new
workers are ready. That is worked off in the time that a worker takes to start: a worker that
computes for less time than it takes to start is hardly worth it.

*Fewer* only after a long time, since a start is dear. If workers were missed soon after some had
been ended, the next time is longer.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from typing import NamedTuple

#: The share of the time that workers should compute. The rest is for what comes unevenly.
#: Chosen by reasoning: at 0.7 a queue of independent calls is short.
UTILIZATION = 0.7

#: By so much the load has to be below what fewer workers can do.
MARGIN = 1.1

#: The target is a wait of so many full batches, and never less than so many seconds: nobody misses
#: that, and a short hold-up of this process is no load.
TARGET_BATCHES = 2.0
LEAST_TARGET = 0.05

#: Items have to wait longer than the target for so many times the target, or for this share of the
#: time that a worker takes to start, if that is longer: a burst is over before a worker is there.
PATIENCE = 2.0
PATIENCE_OF_START = 0.1

#: How often to look while items wait, in the time of that patience.
LOOKS = 4

#: While no worker is ready, or one cannot be started, there is no haste to look again, seconds.
SELDOM = 1.0

#: The fewest batches of each worker by which it is known what a worker computes.
ENOUGH_BATCHES = 4

#: What a worker computes may be so many times what was learned of it, and not more: else it was
#: learned from few batches, and will be known better soon.
MOST_SHARE = 1.25

#: Workers are ended after so many times the time that a worker takes to start, but no less and no
#: more than so many seconds. That doubles each time that workers were missed soon after, up to a
#: factor.
DELAY_OF_START = 10.0
LEAST_DELAY = 60.0
MOST_DELAY = 600.0
MOST_FACTOR = 16.0

#: In how many parts of that time the load is measured. The last ones count of which there are so
#: many, and of these the one with the most load.
PARTS = 12

#: A worker is late after so many times what the last one took to start: some take a bit longer.
LATE = 2.0

#: While others start, the need for more must be larger by this factor: it is an estimate.
CERTAIN = 1.25


class Load(NamedTuple):
    """What an engine has to do, and what it does it with. Totals are since its start."""

    waiting: int  # items that wait for a worker
    in_flight: int  # items that workers hold
    arrived: int  # items in total, also those that were refused
    served: int  # items that came back, in total
    batches: int  # batches that came back, in total
    ready: int  # workers that take batches
    failed: int  # workers that are wanted and could not be started
    full: float  # items that a worker computes at once, at best
    speed: float  # items that a worker computes in a second then; 0 if it is not known
    #: After how many seconds a worker takes more: what a full batch takes; of a model of steps,
    #: from one item that is over to the next.
    turn: float
    start_duration: float  # what the last worker took to start, seconds
    refused: int = 0  # items without room or time, and calls whose time ended, in total


class Autoscaling:
    """Decides on a number of workers. Not thread-safe.

    Tell it the load with ``decide`` whenever ``is_due`` says so.
    """

    def __init__(self, least: int, most: int) -> None:
        #: By the last decision: how long an item may wait for a worker, and how long a new one
        #: would have waited, seconds.
        self.target = self.wait = 0.0
        self.wanted = least
        self._grown_at = -math.inf
        self._refused = 0  # with the last decision
        self._refused_at = -math.inf  # when that was last seen to rise
        self.set_bounds(least, most, -math.inf)

    def set_bounds(self, least: int, most: int, now: float) -> None:
        """Have other bounds. The number changes only as far as it has to; nothing else is kept."""
        if self.wanted < least:  # they start now
            self._grown_at = now
        self._shrunk_at = -math.inf
        self._factor = 1.0  # of the delay
        self.share = 1.0  # of ``Load.speed`` that workers compute, measured while items wait
        self.least, self.most = least, most
        self.wanted = max(least, min(most, self.wanted))
        #: When to call ``decide`` at the latest; infinity while there is nothing to look at.
        self.due = -math.inf if least < self.wanted else math.inf
        #: Whether there is nothing to decide, and whether ``due`` says when to look at what waits
        #: or is refused; else that is when something waits.
        self.is_fixed = self.is_watching = least == most
        #: While items wait longer than the target: when, and the load then.
        self._points: deque[tuple[float, Load]] = deque()
        self._look_for_fewer_anew()

    def _look_for_fewer_anew(self) -> None:
        self._needs: deque[int] = deque(maxlen=PARTS)  # workers that were needed in the last parts
        self._part: tuple[float, int] | None = None  # when the current part began, and ``arrived``

    def is_due(self, waiting: int, now: float) -> bool:
        """Whether to call ``decide``: its time has come, or items begin to wait."""
        return self.due <= now or (waiting > 0 and not self.is_watching)

    def decide(self, load: Load, now: float) -> int:
        """How many workers there should be now; sets ``due``."""
        self.target = max(LEAST_TARGET, TARGET_BATCHES * load.turn)
        speed = self.share * load.speed
        self.wait = self.wait_of(load)
        patience = max(PATIENCE * self.target, PATIENCE_OF_START * load.start_duration)
        if load.refused > self._refused:
            self._refused_at = now
        self._refused = load.refused
        # The queue is bounded, by its room or by the time of calls, and says less than it should.
        is_refusing = now - self._refused_at < patience / 2
        if self.wait > self.target or (is_refusing and load.ready and speed):
            self._grow(load, speed, patience, now, is_refusing)
        else:
            self._points.clear()
        self._shrink(load, speed, now)
        self.is_watching = load.waiting > 0 or is_refusing
        self.due = math.inf
        if self.is_watching and self.wanted < self.most:
            can_tell = load.ready and speed and not load.failed
            self.due = now + (patience / LOOKS if can_tell else max(SELDOM, patience))
        if self._part is not None:
            self.due = min(self.due, self._part[0] + self._delay(load) / PARTS)
        return self.wanted

    def wait_of(self, load: Load) -> float:
        """How long an item that comes now would wait for a worker, seconds; 0 if not known."""
        can_serve = load.ready * load.speed * self.share
        return load.waiting / can_serve if can_serve else 0.0

    # -- more

    def _grow(
        self, load: Load, speed: float, patience: float, now: float, is_refusing: bool
    ) -> None:
        points = self._points
        points.append((now, load))
        while len(points) > 2 and points[1][0] <= now - 2 * patience:
            points.popleft()
        began_at, first = points[0]
        took, served = now - began_at, load.served - first.served
        if took < patience:
            return
        spans = itertools.pairwise(points)
        worked = sum(before.ready * (then - at) for (at, before), (then, _) in spans)  # seconds
        if load.batches - first.batches >= ENOUGH_BATCHES * load.ready:
            # No worker was idle, so what they computed is what they can.
            speed = served / worked or speed
            self.share = min(MOST_SHARE, speed / load.speed)
        else:  # they may be at batches that take much longer than others did
            speed = min(speed, (served + load.ready * load.full) / worked)
        arriving = (load.arrived - first.arrived) / took
        target = 0.0 if is_refusing else self.target
        # Workers that could not be started, or are late: there may be no room for them.
        lacking = load.failed
        if now >= self._grown_at + LATE * load.start_duration:
            lacking = max(lacking, self.wanted - load.ready)
        there = self.wanted - lacking
        need = self._need(load, speed, arriving, target, there, now)
        if lacking:  # perhaps it is that one place only: one more is tried
            need = min(need, there + 1) if lacking == 1 else 0
        if need > there and self.wanted < self.most:
            # They were missed, and so ended too soon; or not, and what was learned fades.
            was_early = now - self._shrunk_at < self._delay(load)
            self._factor = min(MOST_FACTOR, max(1.0, self._factor * (2 if was_early else 0.5)))
            self.wanted, self._grown_at = min(self.most, lacking + need), now
            self._look_for_fewer_anew()

    def _need(
        self, load: Load, speed: float, arriving: float, target: float, served: int, now: float
    ) -> int:
        """Workers for what arrives, and for what will wait when new ones are ready."""
        start = load.start_duration
        coming = max(0, served - load.ready)
        left = max(0.0, self._grown_at + start - now)  # until those that start are there
        if coming and not left:
            return 0  # they are about to be
        computed = speed * (load.ready * start + coming * max(0.0, start - left))
        too_much = load.waiting + arriving * start - computed - target * speed * served
        if too_much <= 0:
            return 0
        catch_up = max(start, 2 * PATIENCE * self.target)
        need = arriving / (speed * UTILIZATION) + too_much / (speed * catch_up)
        return 0 if coming and need <= CERTAIN * served else math.ceil(need - 1e-9)

    # -- fewer

    def _delay(self, load: Load) -> float:
        delay = min(MOST_DELAY, DELAY_OF_START * load.start_duration)
        return self._factor * max(LEAST_DELAY, delay)

    def _shrink(self, load: Load, speed: float, now: float) -> None:
        if self.wanted <= self.least:
            self._look_for_fewer_anew()
            return
        began, arrived = self._part = self._part or (now, load.arrived)
        if now < began + self._delay(load) / PARTS:
            return
        self._part = now, load.arrived
        self.share += (1.0 - self.share) / PARTS  # else an old measurement counts for ever
        arriving = MARGIN * (load.arrived - arrived) / (now - began)
        need = self.wanted if arriving else 0  # as long as nothing has come back
        if speed:
            need = math.ceil(arriving / (speed * UTILIZATION) - 1e-9)
        if load.waiting and not (load.ready and speed):
            self._needs.clear()  # nothing is computed, so that nobody knows what is needed
            return
        self._needs.append(need)
        if len(self._needs) < PARTS or self.wait > self.target / 2:
            return
        # As full batches: a worker that ends computes what it has first. If each counted that has
        # a batch, eight callers who come back at once would keep eight workers, each with one item.
        computing = math.ceil(load.in_flight / load.full) if load.full else self.wanted
        need = max(self.least, computing, *self._needs)
        if need < self.wanted:
            self.wanted, self._shrunk_at = need, now
