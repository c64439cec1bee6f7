"""What computes the requests of one operation, in the stages of a ``ManagedModel``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from .buckets import NO_BUCKETS, Buckets
from .requests import Request, plain


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
