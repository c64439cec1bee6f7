"""What padding costs, learned from every batch that comes back.

A batch of n items, padded to the longest, takes a + p · n + b · n · longest. The line of
``LearnedCost`` has no p. That is near enough to say how long a batch takes. But batches that were
cut small for their lengths are short ones, too: then the line takes p for b, and padding for dearer
than it is, and still more batches are cut small.
"""

from __future__ import annotations

from .cost import LearnedCost
from .tuning import FORGETTING, RIDGE

__all__ = ["PaddedCost"]


class PaddedCost(LearnedCost):
    """The line of durations over costs, and the plane over sizes and costs. Not thread-safe.

    The plane is fitted by least squares with the weights of the line. While batches are all of one
    size, or their costs tell no more than their sizes, each item by itself counts as it did before;
    at first as nothing.
    """

    __slots__ = ("_per_item", "_per_unit", "_s", "_sc", "_sd", "_ss")

    def _forget(self) -> None:
        super()._forget()
        self._per_item = self._per_unit = 0.0
        # Weighted sums over the batches so far, as those of the line: of size and its products.
        self._s = self._ss = self._sc = self._sd = 0.0

    def observe(self, cost: float, duration: float, size: int = 1) -> float:
        weight = super().observe(cost, duration)
        if not weight:
            return 0.0
        keep = FORGETTING
        s = self._s = self._s * keep + weight * size
        self._ss = self._ss * keep + weight * size * size
        self._sc = self._sc * keep + weight * size * cost
        self._sd = self._sd * keep + weight * size * duration
        w = self._w
        size_, cost_, took = s / w, self._c / w, self._d / w
        sd = self._sd / w - size_ * took
        cd = self._cd / w - cost_ * took
        sc = self._sc / w - size_ * cost_
        # As with the line: the ridge decides only what the batches do not show.
        ss = max(0.0, self._ss / w - size_ * size_) + RIDGE * size_ * size_
        cc = max(0.0, self._cc / w - cost_ * cost_) + RIDGE * cost_ * cost_
        sd += RIDGE * size_ * size_ * self._per_item
        cd += RIDGE * cost_ * cost_ * self._per_unit
        together = ss * cc - sc * sc
        per_item = (cc * sd - sc * cd) / together if together > 0.0 else 0.0
        if per_item <= 0.0 or not size_ * cost_:
            self._per_item, self._per_unit = 0.0, self.per_unit
            return weight
        per_unit = (cd - sc * per_item) / cc
        if per_unit <= 0.0:
            per_item, per_unit = sd / ss, 0.0
        self._per_item, self._per_unit = per_item, per_unit
        return weight

    @property
    def padding(self) -> tuple[float, float]:
        if not self._w:
            return 0.0, 0.0
        items = self._per_item * self._s + self._per_unit * self._c
        return max(0.0, (self._d - items) / self._w), self._per_unit
