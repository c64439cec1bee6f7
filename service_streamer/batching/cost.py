"""What a batch costs: a + b · cost, learned from every batch that comes back.

The cost of a batch is its number of items, or, where items have lengths, that number times its
longest item: what a model computes that pads. Two things are learned apart:

- the line, by least squares with a forgetting factor: what a batch costs however small it is, and
  what each unit of cost adds. It says what is worth waiting for, and when padding costs more than a
  batch of its own would;
- the best cost: a device slows down beyond some size, when its caches are full. No line tells that,
  so the rates of batches are kept by size, and a batch of another size is tried now and then.
"""

from __future__ import annotations

import math

__all__ = ["BestCost", "LearnedCost"]

#: What a batch still weighs after the next one: half of it after 17. Low enough to follow a device
#: that is throttled, high enough to tell noise from slope.
FORGETTING = 0.96

#: How much the slope known before weighs against the batches, in units of their squared costs. It
#: decides only while all batches are of one size, which says nothing about a slope.
_RIDGE = 1e-3

#: Of how many batches a line is more than a guess, and how different they have to be: a variance,
#: as a share of the square of the mean. Arbitrary: a tenth of a standard deviation.
_FITTED, _ALIKE = 8, 0.01
#: What share of the variance of durations the line has to explain. Of a few batches noise explains
#: up to a half.
_EXPLAINED = 0.5

#: How short a batch may be for its cost before it weighs no more than that: as 16 of the usual.
_LEAST_DURATION = 0.25

#: If one of the first batches takes so many times what those before it say, they had nothing to do.
_NOTHING_TO_DO = 16.0


class LearnedCost:
    """The line of durations over costs. Not thread-safe.

    Attributes:
        base: what a batch costs however small it is, seconds; 0 at least.
        per_unit: what each unit of cost adds, seconds; 0 at least.
        is_known: whether there was a batch.
        is_fitted: whether the line is more than a guess: there were some batches, not all alike.
    """

    __slots__ = (
        "_batches",
        "_c",
        "_cc",
        "_cd",
        "_d",
        "_dd",
        "_w",
        "base",
        "is_fitted",
        "is_known",
        "per_unit",
    )

    def __init__(self) -> None:
        self._forget()

    def _forget(self) -> None:
        self.base = self.per_unit = 0.0
        self.is_known = self.is_fitted = False
        self._batches = 0
        # Weighted sums over the batches so far: of 1, cost, duration and their products.
        self._w = self._c = self._d = self._cc = self._cd = self._dd = 0.0

    def observe(self, cost: float, duration: float) -> None:
        """A batch of this cost took so many seconds."""
        if duration <= 0.0:
            return
        if 0 < self._batches < _FITTED and duration > _NOTHING_TO_DO * self.duration(cost):
            # Such as what a web server asks a model about itself: it would outweigh hundreds.
            self._forget()
        # An error of a tenth counts the same in a short batch and in a long one; and of a first
        # batch that compiles for a minute nothing is left as soon as others have come.
        # Nor does one that had nothing to do, and was over at once, outweigh all others.
        bounded = max(duration, _LEAST_DURATION * self.duration(cost))
        weight = 1.0 / (bounded * bounded)
        keep = FORGETTING
        w = self._w = self._w * keep + weight
        c = self._c = self._c * keep + weight * cost
        d = self._d = self._d * keep + weight * duration
        cc = self._cc = self._cc * keep + weight * cost * cost
        cd = self._cd = self._cd * keep + weight * cost * duration
        dd = self._dd = self._dd * keep + weight * duration * duration
        mean_cost, mean_duration = c / w, d / w
        if not self.is_known:
            # Of one batch nobody knows what is base; half is as wrong as all or nothing.
            self.is_known = True
            self.per_unit = 0.5 * mean_duration / mean_cost if mean_cost else 0.0
        ridge = _RIDGE * mean_cost * mean_cost
        spread = cc / w - mean_cost * mean_cost
        self._batches += 1
        together = cd / w - mean_cost * mean_duration
        self.is_fitted = (
            self._batches >= _FITTED
            and spread > _ALIKE * mean_cost * mean_cost
            and together * together >= _EXPLAINED * spread * (dd / w - mean_duration**2)
        )
        if ridge:
            slope = together + ridge * self.per_unit
            slope /= max(0.0, spread) + ridge
            self.per_unit = min(max(0.0, slope), mean_duration / mean_cost)
        self.base = max(0.0, mean_duration - self.per_unit * mean_cost)

    @property
    def mean(self) -> float:
        """What a batch took of late, seconds; 0 while nothing is known."""
        return self._d / self._w if self._w else 0.0

    def duration(self, cost: float) -> float:
        """Seconds for a batch of that cost; 0 while nothing is known."""
        return self.base + self.per_unit * cost


#: A rate that is so close to the best is as good: the difference may be noise.
_AS_GOOD = 0.95
#: What fewer batches of a step say is no reason to cut smaller ones.
_ENOUGH = 3
#: Weight of the newest batch in the rate of its size; and where it took less than this share of
#: what was known, which was wrong then: a cold model, or one held up, is slower than it will be.
_LEARNING_RATE, _UNLEARNING_RATE = 0.25, 0.5
_WRONG = 0.8
#: Of a larger size with fewer batches it is the model that is believed, if it says better: they may
#: be of a model that was cold. It is then cut until so many more of them have been measured, or so
#: many of any size beyond the one that would be cut otherwise: then it seems that as much never
#: waits.
_THIN, _TRUSTED, _PATIENCE = 16, 8, 64
#: How much of the time may go into trying other sizes.
_TRIALS = 0.01
#: In units of a batch's duration, how much of that may be saved up: enough for one of twice the
#: size of which each unit takes three times as long.
_MOST_SAVED = 4.0
#: A trial follows after so many batches that were cut while more waited; twice as many after each
#: trial that found nothing better, up to the second number.
_FIRST_TRIAL, _LAST_TRIAL = 3, 96


class BestCost:
    """Up to which cost larger batches compute faster for each unit of it. Not thread-safe.

    Costs are kept in steps of the square root of two. What a step is worth is measured, not fitted.
    While more waits than fits, a batch of a step beside the best is tried now and then: seldom
    where nothing changes, and never for more than ``_TRIALS`` of the time.

    The next larger one of which little is known is believed, and cut for a while, if the model says
    that it is better: first impressions are of a cold model, and where callers wait for each other,
    small batches leave too few for a trial. That may waste more, but hardly more than once.

    Attributes:
        limit: the cost up to which to fill a batch; infinity while the largest are the best.
    """

    __slots__ = (
        "_believed",
        "_believed_until",
        "_best",
        "_budget",
        "_counts",
        "_displaced",
        "_interval",
        "_patience",
        "_rates",
        "_since",
        "_trial",
        "_tried",
        "limit",
    )

    def __init__(self) -> None:
        self.limit = math.inf
        self._rates: dict[int, float] = {}  # seconds for each unit of cost, by step
        self._counts: dict[int, int] = {}  # batches, by step
        self._best: int | None = None  # step, once one is known
        self._believed: int | None = None  # the best one, while the model says so and no rate
        self._displaced = 0  # the step that is the best one by what was measured
        self._believed_until = self._patience = 0  # batches of it; of any size beyond the other
        self._budget = 0.0  # seconds that trials may waste
        self._interval = _FIRST_TRIAL
        self._since = 0  # batches since the last trial
        self._trial: int | None = None  # the step of the last one, until it is back
        self._tried = 0  # how many trials, so that each step beside the best has its turn

    def observe(
        self, cost: float, duration: float, *, is_full: bool, model: LearnedCost | None = None
    ) -> None:
        """A batch came back.

        Args:
            is_full: whether more waited than it took.
            model: fitted to all batches, that one included; without one, only what was measured is
                believed.
        """
        if cost <= 0.0 or duration <= 0.0:
            return
        step, rate = round(2.0 * math.log2(cost)), duration / cost
        known, count = self._rates.get(step, rate), self._counts.get(step, 0)
        if count < _ENOUGH:
            # The mean, since nobody knows what is usual: the first may have had nothing to do.
            self._rates[step] = known + (rate - known) / (count + 1)
        else:
            # One that took far longer than usual was held up by something else.
            weight = _UNLEARNING_RATE if rate < _WRONG * known else _LEARNING_RATE
            self._rates[step] = known + (min(rate, 2.0 * known) - known) * weight
        self._counts[step] = count + 1
        # What is smaller anyway says nothing of whether as much ever waits.
        if self._believed is not None and cost > _cost_of(self._displaced):
            self._patience -= 1
            if not self._patience:
                self._counts[self._believed] = max(self._counts[self._believed], _THIN)
                self._believed_until = 0
                is_full = True  # so that another one is chosen
        if not is_full:
            return
        if step == self._trial and self._best is not None:
            self._trial = None
            if rate < max(_AS_GOOD * self._rates[self._best], _WRONG * known):
                # If that is not chance things have changed, and it is soon known: try it again.
                self._interval = _FIRST_TRIAL
                self._tried -= 1
        self._since += 1
        self._budget = min(self._budget + _TRIALS * duration, _MOST_SAVED * duration)
        self._choose(model)

    def trial(self, model: LearnedCost) -> float:
        """The cost of a batch to try now instead of one of ``limit``; infinity for none."""
        if self._best is None or self._believed is not None or self._since < self._interval:
            return math.inf
        counts = self._counts
        step = self._best + (-1, -2, 1, 2, -4)[self._tried % 5]
        self._tried += 1
        least = min(0, *self._rates)  # below that of one item only where costs are, too
        if not least <= step <= max(self._rates):
            return math.inf
        self._since = 0
        cost = _cost_of(step)
        took = model.duration(cost)
        if counts.get(step, 0) >= _ENOUGH:
            self._interval = min(2 * self._interval, _LAST_TRIAL)
            took = self._rates[step] * cost
        wasted = took - self._rates[self._best] * cost
        if wasted > self._budget:
            return math.inf
        self._budget -= max(0.0, wasted)
        self._trial = step
        return cost

    def _choose(self, model: LearnedCost | None) -> None:
        """The largest step that is as good as any; more than the largest known may be better."""
        if self._believed is not None and self._counts[self._believed] < self._believed_until:
            return  # it is being measured
        self._believed = None
        rates, largest = self._rates, max(self._rates)
        known = [step for step in rates if self._counts[step] >= _ENOUGH or step == largest]
        wanted = min(rates[step] for step in known) / _AS_GOOD
        best = max(step for step in known if rates[step] <= wanted)
        if model is not None and model.is_fitted and best < largest:
            better = [
                step
                for step in rates
                if step > best
                and self._counts[step] < _THIN
                and model.duration(_cost_of(step)) <= wanted * _cost_of(step)
            ]
            if better:
                # Not the largest: whatever a line says of what is far away, it says that it pays.
                self._displaced, best = best, min(better)
                self._believed = best
                self._believed_until = self._counts[best] + _TRUSTED
                self._patience = _PATIENCE
        if best != self._best:
            self._best = best
            self._interval = _FIRST_TRIAL
        self.limit = math.inf if best == largest else _cost_of(best)


def _cost_of(step: int) -> float:
    """Of one unit or more a whole number: 2.8 would be two items, and of another step."""
    cost: float = 2.0 ** (step / 2)
    return float(round(cost)) if cost >= 1.0 else cost
