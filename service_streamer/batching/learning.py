"""What is learned: what a batch costs, and which calls are about to arrive.

The cost of a batch is its number of items, or, where items have lengths, that number times its
longest item: what a model computes that pads. The line a + b · cost is learned from every batch
that comes back, by least squares with a forgetting factor: what a batch costs however small it is,
and what each unit of cost adds. It says what is worth waiting for, and when padding costs more than
a batch of its own would.

Arrivals are learned by watching. The calls that arrive soon after the results of a batch went out
are counted. As many are expected after the next batch. So are the calls that follow the first one
of a burst. Nothing is ever delayed to find out.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

#: How long callers are watched for after their answers, as a share of the batch's duration.
#: Tuned between 0.1 and 0.5 with ``python benchmarks/scheduling_grid.py --quick``: a lower value
#: misses callers that return slowly, a higher one helps only them.
WATCH_SHARE = 0.35
#: The longest gap between two calls of one burst, as a share of a batch's duration.
#: Tuned with ``python benchmarks/scheduling_grid.py --quick`` (rows "bursts"): a higher value takes
#: a steady stream for a burst.
BURST_SHARE = 0.05
#: A burst has at least this many times the calls that its time would bring anyway.
#: Chosen by reasoning: calls of a stream that happen to be close together are about three times as
#: many as its rate says. Checked with ``service-streamer simulate --base 5ms --rate 500``.
BURST_FACTOR = 4.0
#: The share of answered callers that seems to return at once where all calls are independent.
#: Chosen by reasoning, checked with ``pytest tests/test_batching.py -k by_chance``, over loads of
#: 0.5 to 4 calls in the time of one.
CHANCE = 0.3
#: Fewer expected calls than this are not waited for.
#: Chosen by reasoning: less than half a call is more likely none than one.
LEAST_EXPECTED = 0.5
#: Weight of the newest batch in what is learned about arrivals, lengths and the queue.
#: Tuned with ``python benchmarks/scheduling_grid.py --quick``: high, because load changes within a
#: second.
LEARNING_RATE = 0.25
#: The number of batches over which the rate of arrivals is averaged.
#: Tuned with ``python benchmarks/scheduling_grid.py --quick`` (rows "Poisson").
RATE_BATCHES = 16
#: The weight of a batch after one more batch: half after 17.
#: Chosen by reasoning, checked with ``pytest tests/test_cost.py``: low enough to follow a throttled
#: device, high enough to tell noise from slope.
FORGETTING = 0.96
#: The weight of the slope known before against the batches, in units of their squared costs.
#: Chosen by reasoning: it decides only while all batches are of one size.
RIDGE = 1e-3
#: The line is more than a guess after this many batches.
#: Chosen by reasoning, checked with ``pytest tests/test_cost.py -k line``.
FITTED_BATCHES = 8
#: And if the variance of their costs is at least this share of the squared mean.
#: Chosen by reasoning: a tenth of a standard deviation.
LEAST_SPREAD = 0.01
#: And if the line explains this share of the variance of the durations.
#: Chosen by reasoning, checked with ``pytest tests/test_cost.py -k noisy``: of a few batches, noise
#: explains up to a half.
EXPLAINED = 0.5
#: A batch counts as if it took at least this share of the duration that the line predicts.
#: Chosen by reasoning: a batch without work then weighs as much as 16 usual ones, not as all.
LEAST_DURATION = 0.25
#: The first batches are forgotten when a later one takes this many times what they predict.
#: Chosen by reasoning, checked with ``pytest tests/test_cost.py -k odd``: a server asks a
#: model about itself first, which takes no time.
NO_WORK = 16.0
#: The same for what padding costs.
#: Found with ``make yardstick ARGS='--only infilling'``: the sizes and costs of batches differ
#: little, so that it takes many to tell what is due to which.
PADDING_FORGETTING = 0.99
#: What each item costs is fitted if the variance of sizes, of batches of the same cost, is at least
#: this share of the squared mean.
#: Found with ``make yardstick ARGS='--only infilling'``, checked with ``pytest
#: tests/test_cost.py -k small``: of batches that are more alike noise decides.
PADDING_SPREAD = 1e-3


_NEVER = -math.inf


@dataclass(slots=True)
class _Watch:
    """Counts the calls that arrive after one batch's results went out."""

    answered: int
    opened_at: float
    closes_at: float
    first_at: float  # when it became the oldest one
    last_arrival: float
    arrived: int = 0


class ArrivalForecast:
    """How many calls are about to arrive, and until when a free worker should wait for them.

    Calls and not items are counted, since callers come back: one whose calls have ten
    items and one in turn is still one caller.

    Times are in seconds of any one monotonic clock, given as ``now``. Not thread-safe.

    Args:
        round_trip: how long results take to callers, and their next calls back, seconds: so much
            longer they are watched for.

    Attributes:
        call_size: items of a call, of late.
        closedness: from 0, where calls come whenever they come, to 1, where those who are answered
            call again at once: what comes within the watches, beyond what would come anyway.
    """

    def __init__(self, round_trip: float = 0.0) -> None:
        self._round_trip = round_trip
        self._watches: deque[_Watch] = deque()
        self._return_rate = 0.0  # calls that come back, per call answered
        self._gap = 0.0  # seconds from one that comes back to the next
        # Of the burst that may be going on: no object, since every lone call begins one.
        self._burst_closes_at = _NEVER  # before which another one belongs to it; if there is one
        self._burst_arrived = 0  # calls after the first
        self._burst_began_at = self._burst_last_at = 0.0
        self._burst_size = 0.0  # calls that follow the first of a burst
        self._burst_gap = 0.0
        self._burst_gap_limit = 0.0  # what is further apart is no burst, seconds
        self._burst_ends_at = 0.0
        self._last_event = -math.inf  # when the last arrived, or answers went out after that
        self._calls = 0  # that arrived since
        self._counted_at = 0.0
        self._rate = 0.0  # calls per second, of late
        self._excess = self._possible = 0.0  # calls of a watch beyond the rate, and at most
        self.call_size = 1.0
        self.closedness = 0.0

    def answered(self, calls: int, duration: float, now: float) -> None:
        """A batch that took ``duration`` seconds is back; the results of ``calls`` calls go out."""
        watches = self._watches
        self._end_watches(now)
        passed = now - self._counted_at
        if passed > 0.0:
            weight = passed / (passed + RATE_BATCHES * duration)
            self._rate += (self._calls / passed - self._rate) * weight
            self._calls, self._counted_at = 0, now
        if calls:
            closes_at = now + WATCH_SHARE * duration + self._round_trip
            watches.append(_Watch(calls, now, closes_at, now, now))
            self._last_event = now

    def arrived(self, size: int, now: float) -> None:
        """A call of ``size`` items arrived. It is put down to the oldest answers still watched."""
        if size != self.call_size:
            self.call_size += (size - self.call_size) * LEARNING_RATE
        self._calls += 1
        self._last_event = now
        closes_at = self._burst_closes_at
        if now <= closes_at:
            self._burst_arrived += 1
            self._burst_last_at = now
            self._burst_closes_at = min(now + self._burst_gap_limit, self._burst_ends_at)
        elif closes_at > _NEVER:
            self._learn_burst()
        watches = self._watches
        if watches:
            self._end_watches(now)
        if watches:
            watch = watches[0]
            watch.arrived += 1
            watch.last_arrival = now
            if watch.arrived == watch.answered:
                self._learn(now)

    def began(self, duration: float, now: float) -> None:
        """The call that has just arrived found nothing waiting: a burst may have begun.

        Not while callers that were answered may be about to call again.

        Args:
            duration: of a batch of it, seconds.
        """
        watches = self._watches
        if watches and self.closedness > 0.0 and watches[-1].closes_at > now:
            return
        if self._burst_closes_at == _NEVER:  # else it is one of them, after a part of them was sent
            gap = self._burst_gap_limit = BURST_SHARE * duration
            self._burst_ends_at = now + WATCH_SHARE * duration
            self._burst_began_at = self._burst_last_at = now
            self._burst_closes_at = now + gap
            self._burst_arrived = 0

    def expected(self, now: float) -> float:
        """How many calls are about to come; 0 for fewer than ``LEAST_EXPECTED``."""
        self._end_watches(now)
        if _NEVER < self._burst_closes_at < now:
            self._learn_burst()
        expected, rate = 0.0, self._return_rate
        if self.closedness:
            for watch in self._watches:
                missing = rate * watch.answered - watch.arrived
                if missing > 0.0:
                    expected += missing
            expected *= self.closedness
        if now <= self._burst_closes_at:
            expected = max(expected, self._burst_size - self._burst_arrived)
        return expected if expected >= LEAST_EXPECTED else 0.0

    def wait_until(self, missing: float, worth: float, now: float) -> float:
        """Until when to wait for some of the expected calls; ``now`` or before for not at all.

        A call that is late may not come at all. So the wait for it is never longer than its worth.

        Args:
            missing: calls to wait for; no more than are expected.
            worth: the longest wait for them that pays, seconds.
        """
        watches, closes_at = self._watches, self._burst_closes_at
        if closes_at > _NEVER:
            gap = self._burst_gap
        elif watches:
            gap, closes_at = self._gap, watches[-1].closes_at
        else:
            return now
        return now if missing * gap >= worth else min(closes_at, self._last_event + worth)

    def _end_watches(self, now: float) -> None:
        watches = self._watches
        while watches and watches[0].closes_at <= now:
            self._learn(watches[0].closes_at)

    def _learn(self, now: float) -> None:
        """The oldest watch has ended: what comes from now on is put down to the next."""
        watches = self._watches
        watch = watches.popleft()
        if watches and watches[0].opened_at < now:
            watches[0].first_at = now
        arrived, answered = watch.arrived, watch.answered
        self._return_rate += (arrived / answered - self._return_rate) * LEARNING_RATE
        by_chance = min(self._rate * (now - watch.first_at), float(answered))
        self._excess += (arrived - by_chance - self._excess) * LEARNING_RATE
        self._possible += (answered - by_chance - self._possible) * LEARNING_RATE
        if self._possible > 0.0:
            # What is little may be chance, too.
            closedness = (self._excess / self._possible - CHANCE) / (1.0 - CHANCE)
            self.closedness = min(1.0, max(0.0, closedness))
        if arrived:
            gap = (watch.last_arrival - watch.opened_at) / arrived
            self._gap += (gap - self._gap) * LEARNING_RATE

    def _learn_burst(self) -> None:
        self._burst_closes_at = _NEVER
        arrived = self._burst_arrived
        if not arrived:  # it was a lone call, as nearly always
            self._burst_size -= self._burst_size * LEARNING_RATE
            return
        lasted = self._burst_last_at - self._burst_began_at
        size = arrived if arrived > BURST_FACTOR * self._rate * lasted else 0
        self._burst_size += (size - self._burst_size) * LEARNING_RATE
        self._burst_gap += (lasted / arrived - self._burst_gap) * LEARNING_RATE


def _means(
    sums: list[float], products: Sequence[float], weight: float, keep: float
) -> tuple[list[float], list[float]]:
    """The sums with one more batch, the first of which is that of the weights; and their means."""
    sums = [so_far * keep + weight * new for so_far, new in zip(sums, products, strict=True)]
    return sums, [each / sums[0] for each in sums[1:]]


class LearnedCost:
    """The line of durations over costs, and the plane over sizes and costs. Not thread-safe.

    A batch of n items, padded to the longest, takes a + p · n + b · n · longest. The line has no p.
    That is near enough to say how long a batch takes. But batches that were cut small for their
    lengths are short ones, too: then the line takes p for b, and padding for dearer than it is, and
    still more batches are cut small.

    The plane is fitted by least squares with the weights of the line, over more batches. While
    batches are too much alike to show the p, or the p and the b, these stay as they were: of such
    batches noise alone would decide. Before they show any there is only the line.

    Attributes:
        base: what a batch costs however small it is, seconds; 0 at least.
        per_unit: what each unit of cost adds, seconds; 0 at least.
        is_fitted: whether the line is more than a guess: there were some batches, not all alike.
        was_fitted: whether it ever was. The slope is kept while all batches are alike.
    """

    def __init__(self) -> None:
        self._forget()

    def _forget(self) -> None:
        self.base = self.per_unit = 0.0
        self.is_fitted = self.was_fitted = False
        self._batches = 0
        self._is_varied = False  # their costs are not all alike
        # Weighted sums over the batches so far: of 1, cost, duration and their products.
        self._sums = [0.0] * 6
        self._moments = [0.0] * 9  # the same of 1, size, cost, duration and their products
        self._p = 0.0
        #: What a batch costs beside its items, and what each unit of padding adds, seconds.
        self.padding = 0.0, 0.0
        self._has_plane = False

    def observe(self, cost: float, duration: float, size: int | None = None) -> None:
        """A batch of this cost took so many seconds.

        Args:
            size: how many items it had; None where items have no lengths, and nothing is padded.
        """
        if duration <= 0.0:
            return
        if 0 < self._batches < FITTED_BATCHES and duration > NO_WORK * self.duration(cost):
            # Such as what a web server asks a model about itself: it would outweigh hundreds.
            self._forget()
        # An error of a tenth counts the same in a short batch and in a long one; and of a first
        # batch that compiles for a minute nothing is left as soon as others have come.
        # Nor does one that had nothing to do, and was over at once, outweigh all others.
        bounded = max(duration, LEAST_DURATION * self.duration(cost))
        weight = 1.0 / (bounded * bounded)
        products = 1.0, cost, duration, cost * cost, cost * duration, duration * duration
        self._sums, (c, d, cc, cd, dd) = _means(self._sums, products, weight, FORGETTING)
        if not self._batches:
            # One batch does not show how much of it is base; half is as wrong as all or nothing.
            self.per_unit = 0.5 * d / c if c else 0.0
        ridge = RIDGE * c * c
        spread, together = cc - c * c, cd - c * d
        self._batches += 1
        self._is_varied = spread > LEAST_SPREAD * c * c
        explains = together * together >= EXPLAINED * spread * (dd - d * d)
        self.is_fitted = self.is_settled and self._is_varied and explains
        self.was_fitted |= self.is_fitted
        if ridge:
            slope = (together + ridge * self.per_unit) / (max(0.0, spread) + ridge)
            self.per_unit = min(max(0.0, slope), d / c)
        self.base = max(0.0, d - self.per_unit * c)
        if not self._has_plane:
            self.padding = self.base, self.per_unit
        if size is not None:
            self._observe_size(size, cost, duration, weight)

    def _observe_size(self, size: int, cost: float, duration: float, weight: float) -> None:
        products = (
            1.0, size, cost, duration,
            size * size, size * cost, cost * cost, size * duration, cost * duration,
        )  # fmt: skip
        self._moments, (s, c, took, ss, sc, cc, sd, cd) = _means(
            self._moments, products, weight, PADDING_FORGETTING
        )
        ss, sc, cc = ss - s * s, sc - s * c, cc - c * c  # variances, and covariances
        sd, cd = sd - s * took, cd - c * took
        b = self.padding[1]
        if cc > LEAST_SPREAD * c * c:
            self._has_plane = True
            together = ss * cc - sc * sc
            if together > PADDING_SPREAD * s * s * cc:
                self._p = max(0.0, (cc * sd - sc * cd) / together)
            b = (cd - sc * self._p) / cc
            if b < 0.0:
                b, self._p = 0.0, max(0.0, sd / ss) if ss > 0.0 else 0.0
        if self._has_plane:
            self.padding = max(0.0, took - self._p * s - b * c), b

    @property
    def mean(self) -> float:
        """What a batch took of late, seconds; 0 while nothing is known."""
        return self._sums[2] / self._sums[0] if self._batches else 0.0

    @property
    def is_settled(self) -> bool:
        """Whether it says what usual batches take, though they may be too alike for a slope."""
        return self._batches >= FITTED_BATCHES

    @property
    def line(self) -> tuple[float, float] | None:
        """``base`` and ``per_unit``; None while too few batches, or too similar ones, were seen.

        Unlike with ``is_fitted``, the line need not explain the durations: it may be flat.
        """
        return (self.base, self.per_unit) if self.is_settled and self._is_varied else None

    def duration(self, cost: float) -> float:
        """Seconds for a batch of that cost; 0 while nothing is known."""
        return self.base + self.per_unit * cost
