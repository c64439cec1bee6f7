"""What padding costs, learned from every batch that comes back.

A batch of n items, padded to the longest, takes a + p · n + b · n · longest. The line of
``LearnedCost`` has no p. That is near enough to say how long a batch takes. But batches that were
cut small for their lengths are short ones, too: then the line takes p for b, and padding for dearer
than it is, and still more batches are cut small.
"""

from __future__ import annotations

from .cost import LearnedCost
from .tuning import LEAST_SPREAD, PADDING_FORGETTING, PADDING_SPREAD


class PaddedCost(LearnedCost):
    """The line of durations over costs, and the plane over sizes and costs. Not thread-safe.

    The plane is fitted by least squares with the weights of the line, over more batches. While
    batches are too much alike to show the p, or the p and the b, these stay as they were: of such
    batches noise alone would decide. Before they show any there is only the line.
    """

    __slots__ = ("_a", "_b", "_moments", "_p")

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
            so_far * PADDING_FORGETTING + weight * product
            for so_far, product in zip(self._moments, products, strict=True)
        ]
        w = moments[0]
        s, c, took, ss, sc, cc, sd, cd = (moment / w for moment in moments[1:])
        ss, sc, cc = ss - s * s, sc - s * c, cc - c * c  # variances, and covariances
        sd, cd = sd - s * took, cd - c * took
        if cc > LEAST_SPREAD * c * c:
            together = ss * cc - sc * sc
            if together > PADDING_SPREAD * s * s * cc:
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
