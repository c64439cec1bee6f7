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
from typing import NamedTuple

from . import tuning


class LearnedCost:
    """The line of durations over costs. Not thread-safe.

    Attributes:
        base: what a batch costs however small it is, seconds; 0 at least.
        per_unit: what each unit of cost adds, seconds; 0 at least.
        is_known: whether there was a batch.
        is_fitted: whether the line is more than a guess: there were some batches, not all alike.
        was_fitted: whether it ever was. The slope is kept while all batches are alike.
    """

    def __init__(self) -> None:
        self._forget()

    def _forget(self) -> None:
        self.base = self.per_unit = 0.0
        self.is_known = self.is_fitted = self.was_fitted = False
        self._batches = 0
        self._is_varied = False  # their costs are not all alike
        # Weighted sums over the batches so far: of 1, cost, duration and their products.
        self._w = self._c = self._d = self._cc = self._cd = self._dd = 0.0

    def observe(self, cost: float, duration: float, size: int = 1) -> float:  # noqa: ARG002
        """A batch of this cost took so many seconds.

        Args:
            size: how many items it had; the line does not ask.

        Returns:
            Its weight among the batches so far; 0 if it says nothing.
        """
        if duration <= 0.0:
            return 0.0
        if 0 < self._batches < tuning.FITTED_BATCHES and duration > tuning.NO_WORK * self.duration(
            cost
        ):
            # Such as what a web server asks a model about itself: it would outweigh hundreds.
            self._forget()
        # An error of a tenth counts the same in a short batch and in a long one; and of a first
        # batch that compiles for a minute nothing is left as soon as others have come.
        # Nor does one that had nothing to do, and was over at once, outweigh all others.
        bounded = max(duration, tuning.LEAST_DURATION * self.duration(cost))
        weight = 1.0 / (bounded * bounded)
        keep = tuning.FORGETTING
        w = self._w = self._w * keep + weight
        c = self._c = self._c * keep + weight * cost
        d = self._d = self._d * keep + weight * duration
        cc = self._cc = self._cc * keep + weight * cost * cost
        cd = self._cd = self._cd * keep + weight * cost * duration
        dd = self._dd = self._dd * keep + weight * duration * duration
        mean_cost, mean_duration = c / w, d / w
        if not self.is_known:
            # One batch does not show how much of it is base; half is as wrong as all or nothing.
            self.is_known = True
            self.per_unit = 0.5 * mean_duration / mean_cost if mean_cost else 0.0
        ridge = tuning.RIDGE * mean_cost * mean_cost
        spread = cc / w - mean_cost * mean_cost
        self._batches += 1
        together = cd / w - mean_cost * mean_duration
        self._is_varied = spread > tuning.LEAST_SPREAD * mean_cost * mean_cost
        self.is_fitted = (
            self._batches >= tuning.FITTED_BATCHES
            and self._is_varied
            and together * together >= tuning.EXPLAINED * spread * (dd / w - mean_duration**2)
        )
        if self.is_fitted:
            self.was_fitted = True
        if ridge:
            slope = together + ridge * self.per_unit
            slope /= max(0.0, spread) + ridge
            self.per_unit = min(max(0.0, slope), mean_duration / mean_cost)
        self.base = max(0.0, mean_duration - self.per_unit * mean_cost)
        return weight

    @property
    def mean(self) -> float:
        """What a batch took of late, seconds; 0 while nothing is known."""
        return self._d / self._w if self._w else 0.0

    @property
    def line(self) -> tuple[float, float] | None:
        """``base`` and ``per_unit``; None while too few batches, or too similar ones, were seen.

        Unlike with ``is_fitted``, the line need not explain the durations: it may be flat.
        """
        is_known = self._batches >= tuning.FITTED_BATCHES and self._is_varied
        return (self.base, self.per_unit) if is_known else None

    @property
    def padding(self) -> tuple[float, float]:
        """What a batch costs beside its items, and what each unit of padding adds, seconds."""
        return self.base, self.per_unit

    def duration(self, cost: float) -> float:
        """Seconds for a batch of that cost; 0 while nothing is known."""
        return self.base + self.per_unit * cost


class PaddedCost(LearnedCost):
    """The line of durations over costs, and the plane over sizes and costs. Not thread-safe.

    A batch of n items, padded to the longest, takes a + p · n + b · n · longest. The line has no p.
    That is near enough to say how long a batch takes. But batches that were cut small for their
    lengths are short ones, too: then the line takes p for b, and padding for dearer than it is, and
    still more batches are cut small.

    The plane is fitted by least squares with the weights of the line, over more batches. While
    batches are too much alike to show the p, or the p and the b, these stay as they were: of such
    batches noise alone would decide. Before they show any there is only the line.
    """

    def _forget(self) -> None:
        super()._forget()
        self._a, self._p = 0.0, 0.0
        self._b: float | None = None  # not known
        # Weighted sums over the batches so far: of 1, size, cost, duration and their products.
        self._moments = [0.0] * 9

    def observe(self, cost: float, duration: float, size: int = 1) -> float:
        weight = super().observe(cost, duration)
        if not weight:
            return 0.0
        products = (
            1.0, size, cost, duration,
            size * size, size * cost, cost * cost, size * duration, cost * duration,
        )  # fmt: skip
        self._moments = moments = [
            so_far * tuning.PADDING_FORGETTING + weight * product
            for so_far, product in zip(self._moments, products, strict=True)
        ]
        w = moments[0]
        s, c, took, ss, sc, cc, sd, cd = (moment / w for moment in moments[1:])
        ss, sc, cc = ss - s * s, sc - s * c, cc - c * c  # variances, and covariances
        sd, cd = sd - s * took, cd - c * took
        if cc > tuning.LEAST_SPREAD * c * c:
            together = ss * cc - sc * sc
            if together > tuning.PADDING_SPREAD * s * s * cc:
                self._p = max(0.0, (cc * sd - sc * cd) / together)
            b = (cd - sc * self._p) / cc
            if b < 0.0:
                b, self._p = 0.0, max(0.0, sd / ss) if ss > 0.0 else 0.0
            self._b = b
        self._a = max(0.0, took - self._p * s - (self._b or 0.0) * c)
        return weight

    @property
    def padding(self) -> tuple[float, float]:
        return super().padding if self._b is None else (self._a, self._b)


class SizeTrial(NamedTuple):
    """The trial of a batch size.

    Attributes:
        step: of the cost that is tried.
        cost: of the batch; infinity if no batch can have it.
        waste: what it takes longer than a batch of the best size would for as much, seconds.
        is_run: whether the next batch is to be of this cost. Otherwise the trial is skipped.
    """

    step: int
    cost: float
    waste: float
    is_run: bool


class BestCost:
    """Up to which cost larger batches compute faster for each unit of it. Not thread-safe.

    Costs are kept in steps of the square root of two. The rate of each step is measured, not
    fitted. While more waits than fits, a batch size trial cuts a batch of a step beside the best
    one: seldom where nothing changes, and never for more than ``TRIAL_SHARE`` of the time.

    A larger step with few batches is cut for a while if the fitted line says that it is better.
    The model was cold when the first batches were measured. And where callers wait for each other,
    small batches leave too few items for a trial. That may waste more time, but hardly twice.

    Args:
        max_cost: the most that a batch of several items may cost.

    Attributes:
        limit: the cost up to which to fill a batch; infinity while the largest are the best.
    """

    def __init__(self, max_cost: float = math.inf) -> None:
        self.limit = math.inf
        #: The step beyond which no batch of several items comes, so that no trial would end.
        self._most = _step(min(max_cost, 1e300))
        self._rates: dict[int, float] = {}  # seconds for each unit of cost, by step
        self._counts: dict[int, int] = {}  # batches, by step
        self._noise = 0.0  # by which share a batch differs from others of its step, on average
        self._best: int | None = None  # step, once one is known
        self._believed: int | None = None  # the best one, while the model says so and no rate
        self._displaced = 0  # the step that is the best one by what was measured
        self._believed_until = self._patience = 0  # batches of it; of any size beyond the other
        self._budget = 0.0  # seconds that trials may waste
        self._interval = tuning.FIRST_INTERVAL
        self._since = 0  # batches since the last trial
        self._trial: int | None = None  # the step of the last one, until it is back
        self._trials = 0  # so far: the steps beside the best take turns

    def observe(self, cost: float, duration: float, *, is_full: bool, model: LearnedCost) -> None:
        """A batch came back.

        Args:
            is_full: whether more waited than it took.
            model: fitted to all batches, that one included.
        """
        if cost <= 0.0 or duration <= 0.0:
            return
        step, rate = _step(cost), duration / cost
        known, count = self._rates.get(step, rate), self._counts.get(step, 0)
        if count < tuning.ENOUGH_BATCHES:
            # The mean, since it is not known what is usual: the first batch may have had no work.
            self._rates[step] = known + (rate - known) / (count + 1)
        else:
            self._noise += (
                min(1.0, abs(rate / known - 1.0)) - self._noise
            ) * tuning.NOISE_LEARNING_RATE
            # A batch that took far longer than usual was held up by something else.
            weight = (
                tuning.SIZE_UNLEARNING_RATE
                if rate < tuning.MUCH_FASTER * known
                else tuning.SIZE_LEARNING_RATE
            )
            self._rates[step] = known + (min(rate, 2.0 * known) - known) * weight
        self._counts[step] = count + 1
        # A smaller batch says nothing about whether that many items ever wait.
        if self._believed is not None and cost > _cost_of(self._displaced):
            self._patience -= 1
            if not self._patience:
                self._counts[self._believed] = max(self._counts[self._believed], tuning.FEW_BATCHES)
                self._believed_until = 0
                is_full = True  # so that another one is chosen
        if not is_full:
            return
        if step == self._trial and self._best is not None:
            self._trial = None
            if rate < max(tuning.AS_GOOD * self._rates[self._best], tuning.MUCH_FASTER * known):
                # The device has changed, or it was chance: another trial of the step tells.
                self._interval = tuning.FIRST_INTERVAL
                self._trials -= 1
        self._since += 1
        self._budget = min(
            self._budget + tuning.TRIAL_SHARE * duration, tuning.MOST_SAVED * duration
        )
        self._choose(model)

    def trial(self, model: LearnedCost) -> SizeTrial | None:
        """The trial that is due while more waits than fits; None if none is. Changes nothing."""
        best = self._best
        if best is None or self._believed is not None or self._since < self._interval:
            return None
        rates = self._rates
        step = min(best, self._most) + tuning.TRIAL_STEPS[self._trials % len(tuning.TRIAL_STEPS)]
        # Below the cost of one item only where the costs of batches are, too.
        if not min(0, *rates) <= step <= min(self._most, max(rates)):
            return SizeTrial(step, math.inf, math.inf, False)
        cost = _cost_of(step)
        is_measured = self._counts.get(step, 0) >= tuning.ENOUGH_BATCHES
        took = rates[step] * cost if is_measured else model.duration(cost)
        waste = took - rates[best] * cost
        return SizeTrial(step, cost, waste, waste <= self._budget)

    def begin(self, trial: SizeTrial) -> None:
        """A batch was cut while this trial was due. If it was skipped another one is next."""
        self._trials += 1
        if trial.cost == math.inf:
            return
        self._since = 0
        if self._counts.get(trial.step, 0) >= tuning.ENOUGH_BATCHES:
            self._interval = min(2 * self._interval, tuning.LAST_INTERVAL)
        if trial.is_run:
            self._budget -= max(0.0, trial.waste)
            self._trial = trial.step

    def _choose(self, model: LearnedCost) -> None:
        """The largest step that is as good as any; more than the largest known may be better."""
        if self._believed is not None and self._counts[self._believed] < self._believed_until:
            return  # it is being measured
        self._believed = None
        rates, largest = self._rates, max(self._rates)
        known = [
            step for step in rates if self._counts[step] >= tuning.ENOUGH_BATCHES or step == largest
        ]
        # The best of several noisy rates is mostly one that chance has made good.
        as_good = tuning.AS_GOOD - min(tuning.MOST_NOISE, self._noise)
        wanted = min(rates[step] for step in known) / as_good
        best = max(step for step in known if rates[step] <= wanted)
        if model.is_fitted and best < largest:
            better = [
                step
                for step in rates
                if best < step <= self._most
                and self._counts[step] < tuning.FEW_BATCHES
                and model.duration(_cost_of(step)) <= wanted * _cost_of(step)
            ]
            if better:
                # Not the largest: far beyond its points, a line always says that larger is better.
                self._displaced, best = best, min(better)
                self._believed = best
                self._believed_until = self._counts[best] + tuning.MEASURED_BATCHES
                self._patience = tuning.PATIENCE_BATCHES
        if best != self._best:
            self._best = best
            self._interval = tuning.FIRST_INTERVAL
        self.limit = math.inf if best == largest else _cost_of(best)


def _step(cost: float) -> int:
    return round(2.0 * math.log2(cost))


def _cost_of(step: int) -> float:
    """Of one unit or more a whole number: 2.8 would be two items, and of another step."""
    cost: float = 2.0 ** (step / 2)
    return float(round(cost)) if cost >= 1.0 else cost
