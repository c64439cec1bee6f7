"""Scores of labels, best first: computed on the device, so that only what is answered leaves it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .requests import Request

__all__ = ["Labels"]

#: Default of ``top_k``, as in transformers' pipelines of images and sounds.
_TOP = 5


class Labels:
    """Ranks the labels of a classifier, as transformers' pipelines do.

    Args:
        config: of the model.
        default: the function that turns logits into scores unless the model's kind of problem or a
            request says otherwise: "sigmoid", "softmax" or "none".
    """

    def __init__(self, config: Any, default: str) -> None:
        self.names = config.id2label
        kinds = {"regression": "none", "multi_label_classification": "sigmoid"}
        self.function = kinds.get(config.problem_type, default)

    def most(self, requests: Sequence[Request]) -> int:
        """Number of labels to rank, which suffices for each of the requests."""
        return max(_top(request) for request in requests)

    def rank(self, logits: Any, function: str | None, most: int) -> tuple[Any, Any]:
        """Scores and numbers of the best labels, without waiting for the device.

        Args:
            logits: a tensor of shape (rows, labels), on any device.
            function: as a request may name it.
            most: number of labels to return, if there are that many.

        Returns:
            Two tensors of shape (rows, most): float32 scores, and int64 numbers of labels.
        """
        scores = logits.float()
        function = function or self.function
        if function == "softmax":
            scores = scores.softmax(-1)
        elif function == "sigmoid":
            scores = scores.sigmoid()
        # Stable: of equal scores the first label is first, as in the pipelines. topk promises none.
        scores, numbers = scores.sort(dim=-1, descending=True, stable=True)
        return scores[:, :most].contiguous(), numbers[:, :most].contiguous()

    def answers(self, requests: Sequence[Request], ranked: tuple[Any, Any]) -> list[Any]:
        """A list of ``{"label", "score"}`` for each request, best first."""
        scores, numbers = (tensor.tolist() for tensor in ranked)
        return [
            [
                {"label": self.names[number], "score": score}
                for score, number in zip(row[:count], best, strict=False)
            ]
            for row, best, count in zip(
                scores, numbers,
                map(_top, requests), strict=True,
            )
        ]  # fmt: skip


def _top(request: Request) -> int:
    return int(request.parameters.get("top_k", _TOP))
