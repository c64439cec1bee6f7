"""The shapes that a compiled model is compiled for. Pure.

A compiled model is fast for the shapes that it was compiled for, and each takes seconds to minutes.
So batches are padded to a few shapes: rows to powers of two, tokens to doubling lengths. At most
half of a padded dimension is padding.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import NamedTuple

__all__ = ["NO_BUCKETS", "Buckets", "bucket", "make_buckets"]

#: The shortest texts are padded to so many tokens: kernels work on blocks of about this size.
_SHORTEST = 16
#: The longest bucket of a model without a limit. Arbitrary: most encoders take so many tokens.
_LONGEST = 512


def bucket(n: int, buckets: Sequence[int]) -> int:
    """The smallest of ``buckets`` (ascending) that holds ``n``; ``n`` itself if none does."""
    at = bisect_left(buckets, n)
    return buckets[at] if at < len(buckets) else n


class Buckets(NamedTuple):
    """The shapes of a compiled model, as rows × tokens.

    Attributes:
        rows: items of a batch, ascending.
        tokens: tokens of each item, ascending; empty for items of one shape, such as images.
        most: upper bound on rows × tokens of a shape; None sets no bound.
    """

    rows: tuple[int, ...]
    tokens: tuple[int, ...]
    most: int | None = None

    def shape(self, rows: int, tokens: int = 0) -> tuple[int, int]:
        """The shape to pad a batch to; without a bucket that holds it, its own.

        Args:
            rows: the items of the batch.
            tokens: tokens of the longest item.
        """
        return bucket(rows, self.rows), bucket(tokens, self.tokens)

    def shapes(self) -> Iterator[tuple[int, int]]:
        """Every shape to compile, the smallest first; 0 tokens for items of one shape."""
        for tokens in self.tokens or (0,):
            for rows in self.rows:
                if rows == 1 or self.most is None or rows * tokens <= self.most:
                    yield rows, tokens


#: Of a model that is not compiled: batches keep their shapes.
NO_BUCKETS = Buckets((), ())


def make_buckets(batch_size: int, limit: int | None, most: int | None = None) -> Buckets:
    """The buckets of a text model.

    Args:
        batch_size: upper bound on the items of a batch.
        limit: upper bound on the tokens of a text; None without a limit, 0 for images.
        most: upper bound on the tokens of a batch, padding included; None sets no bound.
    """
    longest = _LONGEST if limit is None else limit
    return Buckets(_doubling(1, batch_size), _doubling(_SHORTEST, longest) if longest else (), most)


def _doubling(first: int, last: int) -> tuple[int, ...]:
    below = takewhile(lambda each: each < last, (first << by for by in range(64)))
    return (*below, last)
