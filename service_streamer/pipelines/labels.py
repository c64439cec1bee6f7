"""Scores of labels, best first: computed on the device, so that only what is answered leaves it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .requests import Request

#: Default of ``top_k``, as in transformers' pipelines of images and sounds.
_TOP = 5


class Labels:
    """The best labels of images or sounds.

    Args:
        config: of the model.
        function: what turns its logits into scores, unless a request names another function:
            "sigmoid", "softmax" or "none".
    """

    def __init__(self, config: Any, function: str) -> None:
        self.names = config.id2label
        self.function = function

    def plan(self, requests: Sequence[Request]) -> tuple[list[str], int]:
        """The function of each request, and the most labels that one of them asks for."""
        functions = [each.parameters.get("function_to_apply", self.function) for each in requests]
        return functions, max(map(_top, requests))

    def answers(self, requests: Sequence[Request], ranked: tuple[Any, Any]) -> list[Any]:
        """A list of ``{"label", "score"}`` for each request, best first.

        Args:
            ranked: what ``rank`` returned, on the host.
        """
        scores, numbers = (tensor.tolist() for tensor in ranked)
        return [
            [
                {"label": self.names[number], "score": score}
                for score, number in zip(row[: _top(request)], best, strict=False)
            ]
            for request, row, best in zip(requests, scores, numbers, strict=True)
        ]


def default_function(config: Any, of_one: str = "sigmoid") -> str:
    """The function that turns a classifier's logits into scores, as transformers chooses it.

    Args:
        of_one: that of a model with one label.
    """
    kind = getattr(config, "problem_type", None)
    if kind == "regression":
        return "none"
    if kind == "multi_label_classification":
        return "sigmoid"
    return of_one if config.num_labels == 1 else "softmax"


def rank(logits: Any, functions: list[str], top: int | None) -> tuple[Any, Any]:
    """Scores and numbers of the best labels of each item, without waiting for the device.

    Args:
        logits: a tensor of shape (items, labels), or with more rows behind.
        functions: of each item: "sigmoid", "softmax" or "none".
        top: number of labels, if there are that many; None for all.

    Returns:
        Two tensors of shape (items, top): float32 scores, and int64 numbers of labels.
    """
    scores = _scores(logits[: len(functions)].float(), functions)
    # Stable: of equal scores the first label is first, as in the pipelines. topk promises none.
    scores, numbers = scores.sort(dim=-1, descending=True, stable=True)
    return scores[:, :top], numbers[:, :top]


def _scores(logits: Any, functions: list[str]) -> Any:
    names = set(functions)
    if len(names) == 1:
        return _applied(logits, functions[0])
    scores = logits.clone()
    for name in names - {"none"}:
        rows = [at for at, each in enumerate(functions) if each == name]
        scores[rows] = _applied(logits[rows], name)
    return scores


def _applied(logits: Any, function: str) -> Any:
    if function == "softmax":
        return logits.softmax(-1)
    return logits.sigmoid() if function == "sigmoid" else logits


def _top(request: Request) -> int:
    return int(request.parameters.get("top_k", _TOP))
