""" "predict" and "rerank" of text classification."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import InvalidInput
from .inputs import read_text
from .requests import Request, quote
from .rows import default_function, rank
from .tensors import TensorHandler, Text, logits_of


class TextClassifier(TensorHandler):
    """Labels of texts and of pairs of texts, with scores."""

    takes_pairs = True

    def __init__(self, pipeline: Any) -> None:
        import inspect

        super().__init__(pipeline)
        config = pipeline.model.config
        self._labels: Mapping[int, str] = config.id2label
        self._function = default_function(config)
        # A classifier reads one output: what a decoder keeps for the next token is of no use.
        takes = inspect.signature(pipeline.model.forward).parameters
        self._more = {"use_cache": False} if "use_cache" in takes else {}

    def prepare(self, request: Request) -> None:
        inputs = request.inputs
        if not isinstance(inputs, Mapping):
            super().prepare(request)
            return
        if inputs.keys() - {"text_pair"} != {"text"}:
            raise InvalidInput(
                'inputs: must be a string, or {"text": ..., "text_pair": ...}; '
                f"not {quote(dict(inputs))}"
            )
        texts: dict[str, str] = {}
        for name, value in inputs.items():
            field = f"inputs.{name}"
            texts[name] = self.fit(read_text(value, field=field), request, field)
        request.inputs = texts
        self.choose_group(request)

    def text_of(self, request: Request) -> Text:
        inputs = request.inputs
        if isinstance(inputs, str):
            return inputs
        text: str = inputs["text"]
        return (text, inputs["text_pair"]) if "text_pair" in inputs else text

    def plan(self, requests: list[Request]) -> tuple[list[str], int | None]:
        """The function of each text, and the most labels that a request asks for; None for all."""
        functions = [each.parameters.get("function_to_apply", self._function) for each in requests]
        tops = [each.parameters.get("top_k", 1) for each in requests]
        return functions, None if None in tops else max(tops)

    def compute(self, inputs: Mapping[str, Any], plan: Any) -> Any:
        functions, top = plan
        return rank(logits_of(self.pipeline.model(**inputs, **self._more)), functions, top)

    def results(self, requests: list[Request], outputs: Any) -> list[Any]:
        results: list[Any] = []
        lists = (each.tolist() for each in outputs)
        for request, values, numbers in zip(requests, *lists, strict=True):
            top = request.parameters.get("top_k", 1)
            records = [
                {"label": self._labels[number], "score": score}
                for number, score in zip(numbers[:top], values[:top], strict=True)
            ]
            # The pipeline gives the one label of a pair without a list.
            is_list = "top_k" in request.parameters or isinstance(request.inputs, str)
            results.append(records if is_list else records[0])
        return results


class PairScorer(TextClassifier):
    """ "rerank": how well the two texts of a pair match, as the model's one logit.

    Args:
        pipeline: a pipeline of transformers whose model has one label.
    """

    warms_up = False  # "predict" has run the model

    def prepare(self, request: Request) -> None:
        inputs = request.inputs
        if not isinstance(inputs, Mapping) or inputs.keys() != {"text", "text_pair"}:
            raise InvalidInput(
                f'inputs: must be {{"text": ..., "text_pair": ...}}; not {quote(inputs)}'
            )
        super().prepare(request)

    def plan(self, requests: list[Request]) -> tuple[list[str], int | None]:
        return ["none"] * len(requests), 1

    def results(self, requests: list[Request], outputs: Any) -> list[Any]:
        scores = outputs[0].tolist()
        return [
            {"score": score, "tokens": request.tokens}
            for request, (score,) in zip(requests, scores, strict=True)
        ]
