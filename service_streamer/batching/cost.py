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
