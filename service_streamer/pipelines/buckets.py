"""The shapes of batches: those that a model is compiled for, and a bound on their tokens. Pure.

A compiled model is fast for the shapes that it was compiled for, and each takes seconds to minutes.
So batches are padded to a few shapes: rows to powers of two, tokens to doubling lengths. At most
half of a padded dimension is padding.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import NamedTuple

#: The shortest texts are padded to so many tokens: kernels work on blocks of about this size.
_SHORTEST = 16
#: The longest bucket of a model without a limit. Arbitrary: most encoders take so many tokens.
_LONGEST = 512


def bucket(n: int, buckets: Sequence[int]) -> int:
    """The smallest of ``buckets`` (ascending) that holds ``n``; ``n`` itself if none does."""
    at = bisect_left(buckets, n)
    return buckets[at] if at < len(buckets) else n


class Buckets(NamedTuple):
    """The shapes of a model's batches, as rows × tokens.

    Attributes:
        rows: items of a batch, ascending; empty if batches may have any number of them.
        tokens: tokens of each item, ascending; empty if items may have any number of them, or if
            they have none, such as images.
        most: upper bound on rows × tokens (or samples) of a batch; None sets no bound.
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

    def parts(self, tokens: Sequence[int]) -> list[list[int]]:
        """Divide a batch into parts of at most ``most`` tokens, padding included.

        An item beyond ``most`` is alone. Items of similar length share a part.

        Args:
            tokens: those of each item.

        Returns:
            The positions of the items of each part; each part in the order of the batch.
        """
        if self.most is None:
            return [list(range(len(tokens)))]
        parts: list[list[int]] = [[]]
        for position in sorted(range(len(tokens)), key=tokens.__getitem__):
            rows, length = self.shape(len(parts[-1]) + 1, tokens[position])
            if parts[-1] and rows * length > self.most:
                parts.append([])
            parts[-1].append(position)
        return [sorted(part) for part in parts]

    def shapes(self) -> Iterator[tuple[int, int]]:
        """Every shape to compile, the smallest first; 0 tokens for items of one shape."""
        for tokens in self.tokens or (0,):
            for rows in self.rows:
                if rows == 1 or self.most is None or rows * tokens <= self.most:
                    yield rows, tokens


#: Of a model that is not compiled: batches keep their shapes, and have any number of tokens.
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
