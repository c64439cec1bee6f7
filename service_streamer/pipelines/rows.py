"""Items that become tensors one by one, such as images and sounds, and share a forward pass.

Scores of labels, best first, are computed on the device, so that only what is answered leaves it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ..errors import InvalidInput
from ..gpu.transfers import OnHost, to_device, to_host, to_pinned
from .handlers import Handler
from .requests import Request


class RowHandler(Handler):
    """Each item is a row of the model's inputs; rows of the same shapes share a forward pass.

    Parameters may differ within a batch.

    Args:
        pipeline: a pipeline of transformers, whose model and processor are used.
    """

    has_buckets = True

    def __init__(self, pipeline: Any) -> None:
        import torch

        self.pipeline = pipeline
        # Decoders and most arithmetic run without the interpreter's lock. torch's number of threads
        # is this worker's share of the processors.
        threads = torch.get_num_threads()
        self._threads = ThreadPoolExecutor(threads, "rows") if threads > 1 else None

    def prepare(self, request: Request) -> None:
        """Nothing: an item is checked in ``encode``, in several threads."""

    def encode(self, requests: list[Request]) -> None:
        spread = map if self._threads is None or len(requests) == 1 else self._threads.map
        for request, row in zip(requests, spread(self._try, requests), strict=True):
            if request.error is None:
                request.encoded = row
                request.group_by({}, *((name, tuple(each.shape)) for name, each in row.items()))

    def collate(self, requests: list[Request]) -> tuple[dict[str, Any], Any]:
        """The model's inputs, with a row for each item, and the plan."""
        import torch

        rows = [request.encoded for request in requests]
        for request in requests:
            request.encoded = None  # the batch has a copy, and requests live until the answer
        rows += rows[-1:] * (self.buckets.shape(len(rows))[0] - len(rows))
        inputs = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
        return to_pinned((inputs, self.plan(requests)))

    def forward(self, batch: tuple[dict[str, Any], Any]) -> OnHost[Any]:
        import torch

        with self.pipeline.device_placement(), torch.inference_mode():
            inputs, plan = to_device(batch, self.pipeline.device)
            return to_host(self.compute(inputs, plan))

    def finish(self, requests: list[Request], outputs: OnHost[Any]) -> list[Any]:
        return self.results(requests, outputs.wait())

    def run(self, inputs: Mapping[str, Any]) -> Any:
        """The outputs of the model, for inputs on its device."""
        dtype = self.pipeline.dtype
        return self.pipeline.model(
            **{
                name: each.to(dtype) if each.is_floating_point() else each
                for name, each in inputs.items()
            }
        )

    def _try(self, request: Request) -> Mapping[str, Any]:
        try:
            return self.read(request)
        except InvalidInput as error:
            request.error = error
            return {}

    @abstractmethod
    def read(self, request: Request) -> Mapping[str, Any]:
        """The model's inputs for one item, on the CPU, without a dimension for batches.

        Called in several threads. Raises InvalidInput.
        """

    def plan(self, requests: list[Request]) -> Any:  # noqa: ARG002
        """What ``compute`` has to know of the requests."""
        return None

    @abstractmethod
    def compute(self, inputs: Mapping[str, Any], plan: Any) -> Any:
        """Run the model, and compute what is answered, on its device.

        Args:
            inputs: the model's, on its device. There may be more rows than requests; those behind
                are of no use.
            plan: of the requests.

        Returns:
            Tensors in any container.
        """

    @abstractmethod
    def results(self, requests: list[Request], outputs: Any) -> list[Any]:
        """One result per request, as JSON data, from what ``compute`` returned, on the host."""


#: Default of ``top_k``, as in transformers' pipelines of images and sounds.
_TOP = 5


class LabelHandler(RowHandler):
    """Answers the best labels of each image or sound: a list of ``{"label", "score"}``.

    Attributes:
        function: what turns the model's logits into scores, unless a request names another
            function: "sigmoid", "softmax" or "none".
    """

    function: str

    def plan(self, requests: list[Request]) -> tuple[list[str], int]:
        """The function of each request, and the most labels that one of them asks for."""
        functions = [each.parameters.get("function_to_apply", self.function) for each in requests]
        return functions, max(map(_top, requests))

    def compute(self, inputs: Mapping[str, Any], plan: tuple[list[str], int]) -> Any:
        """Scores and numbers of the best labels."""
        return rank(self.run(inputs)["logits"], *plan)

    def results(self, requests: list[Request], outputs: Any) -> list[Any]:
        names = self.pipeline.model.config.id2label
        scores, numbers = (tensor.tolist() for tensor in outputs)
        return [
            [
                {"label": names[number], "score": score}
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
