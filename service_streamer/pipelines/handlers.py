"""What computes the requests of one operation, in the stages of a ``ManagedModel``.

A compiled model is fast for the shapes that it was compiled for, and each takes seconds to minutes.
So batches are padded to a few shapes, ``Buckets``: rows to powers of two, tokens to doubling
lengths. At most half of a padded dimension is padding.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import takewhile
from typing import Any, NamedTuple

from ..errors import InvalidInput
from ..gpu.out_of_memory import is_out_of_memory
from .requests import Request, plain

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


class Handler(ABC):
    """Computes the requests of one operation.

    ``prepare``, ``encode`` and ``collate`` run in the thread of ``preprocess``, ``forward`` in that
    of ``forward`` and ``finish`` in that of ``postprocess``. What they share must not change: a
    tokenizer keeps its truncation and padding, so each thread that tokenizes has its own copy.

    Attributes:
        limit: maximum number of tokens of a text; None without a limit.
        buckets: the shapes of batches. ``collate`` pads to ``buckets.shape(rows, tokens)``, and
            ``forward`` or ``finish`` drops the rows that were added.
        has_buckets: whether ``collate`` does so; then the model can be compiled.
        warms_up: whether the first request is slow, because it runs the model as no other handler
            does.
        computes_whole: whether it cannot cut sounds. Then those that are longer than
            ``buckets.most`` samples are refused.
    """

    limit: int | None = None
    buckets: Buckets = NO_BUCKETS
    has_buckets: bool = False
    warms_up: bool = True
    computes_whole: bool = False

    @abstractmethod
    def prepare(self, request: Request) -> None:
        """Check a request, and set its key. Raises InvalidInput."""

    def encode(self, requests: list[Request]) -> None:  # noqa: ARG002
        """Check what is cheaper for many requests at once. Sets ``error`` of invalid ones."""
        return

    def collate(self, requests: list[Request]) -> Any:
        """Make a batch for ``forward`` of requests of the same key, without the GPU."""
        return requests

    @abstractmethod
    def forward(self, batch: Any) -> Any:
        """Compute a batch. Tensors that it returns may stay on the GPU."""

    def finish(self, requests: list[Request], outputs: Any) -> list[Any]:
        """One result per request, as JSON data, from what ``forward`` returned."""
        return [plain(output) for _, output in zip(requests, outputs, strict=True)]


class Describer(Handler):
    """ "describe": returns the model's description."""

    def __init__(self, description: Mapping[str, Any]) -> None:
        self._description = description

    def prepare(self, request: Request) -> None:
        request.inputs, request.parameters = None, {}
        request.group_by({})

    def forward(self, batch: list[Request]) -> list[Any]:
        return [self._description] * len(batch)


# -- errors that the web process can load, which has neither torch nor transformers


@contextmanager
def portable_errors() -> Iterator[None]:
    """Replace errors by those that the web process can load."""
    try:
        yield
    except Exception as error:
        known = portable(error)
        if known is error:
            raise
        raise known from error


def portable(error: Exception) -> Exception:
    """The error, or a substitute that the web process can load without transformers."""
    if is_out_of_memory(error):
        return error  # the worker makes the batch smaller
    module = type(error).__module__.partition(".")[0]
    if module in ("builtins", "service_streamer"):
        return error
    if type(error).__name__ == "PipelineException":  # of an input that a pipeline refuses
        return InvalidInput(f"inputs: {error}")
    return RuntimeError(f"{type(error).__name__}: {error}")
