""" "predict", "embed_all" and "embed" of feature extraction."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import accumulate
from typing import Any

from .encoding import Text
from .requests import Request
from .tensors import TensorHandler


class FeatureExtractor(TensorHandler):
    """The last hidden state of each token of a text."""

    takes_tokens = True

    def plan(self, requests: list[Request]) -> tuple[int, Any]:
        """The number of texts, and where their tokens are among all rows' tokens."""
        import torch

        longest = self.padded_length(requests)
        places: list[int] = []
        for row, request in enumerate(requests):
            start = row * longest + (longest - request.tokens if self.pads_left else 0)
            places += range(start, start + request.tokens)
        return len(requests), torch.tensor(places)

    def compute(self, inputs: Mapping[str, Any], plan: tuple[int, Any]) -> Any:
        count, places = plan
        states = self.pipeline.model(**inputs)[0]
        if states.shape[1] != inputs["input_ids"].shape[1]:  # it has a state for several tokens
            return states[:count]
        return states.flatten(0, 1).index_select(0, places)  # without those of padding

    def results(self, requests: list[Request], outputs: Any) -> list[Any]:
        states = outputs.float().numpy()  # numpy has no bfloat16, and is twice as fast
        if outputs.ndim > 2:
            rows = [states[at][: each.tokens] for at, each in enumerate(requests)]
        else:
            ends = accumulate(request.tokens for request in requests)
            pairs = zip(requests, ends, strict=True)
            rows = [states[end - each.tokens : end] for each, end in pairs]
        return [
            [row if each.wants_arrays else row.tolist()]
            for each, row in zip(requests, rows, strict=True)
        ]


class TokenEmbedder(FeatureExtractor):
    """ "embed_all": the same, as an operation of its own."""

    warms_up = False  # "predict" has run the model


_POOLINGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_lasttoken": "lasttoken",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
}


class SentenceEmbedder(TensorHandler):
    """ "embed": one vector of length 1 per text.

    Pooling is over the tokens of the text: their mean, unless the model's files say otherwise.

    Args:
        pipeline: a pipeline of transformers.
        read_json: reads a JSON file of the model; returns None if there is no such file.

    Attributes:
        limit: maximum number of tokens of a text.
        obstacle: why the embeddings would differ from sentence-transformers'; empty if they agree.
    """

    inputs = ("input_ids", "attention_mask")
    side = "right"  # poolings look for the first and the last token
    takes_tokens = may_be_blank = True

    def __init__(self, pipeline: Any, read_json: Callable[[str], Any]) -> None:
        super().__init__(pipeline)
        self.can_batch = True  # with a mask, any token will do as padding
        settings = read_json("sentence_bert_config.json") or {}
        limits = (self.limit, settings.get("max_seq_length"))
        self.limit = min((each for each in limits if each), default=None)
        self.lowers = bool(settings.get("do_lower_case"))
        self.pooling, self.obstacle = _pooling(read_json)

    def text_of(self, request: Request) -> Text:
        text: str = request.inputs
        return text.lower() if self.lowers else text

    def plan(self, requests: list[Request]) -> tuple[int, Any]:
        """The number of texts, and which vectors keep their length; None if none does."""
        kept = [each.parameters.get("normalize") is False for each in requests]
        if not any(kept):
            return len(requests), None
        import torch

        return len(requests), torch.tensor(kept)[:, None]

    def compute(self, inputs: Mapping[str, Any], plan: tuple[int, Any]) -> Any:
        import torch

        count, kept = plan
        states = self.pipeline.model(**inputs)[0]
        pooled = _pool(states.float(), inputs["attention_mask"], self.pooling)[:count]
        vectors = torch.nn.functional.normalize(pooled, dim=-1)
        return vectors if kept is None else torch.where(kept, pooled, vectors)

    def results(self, requests: list[Request], outputs: Any) -> list[Any]:
        return [
            {"embedding": vector, "tokens": request.tokens}
            for vector, request in zip(outputs.numpy().tolist(), requests, strict=True)
        ]


def _pool(states: Any, mask: Any, pooling: str) -> Any:
    import torch

    if pooling == "cls":
        return states[:, 0]  # padding is behind the text
    if pooling == "lasttoken":
        rows = torch.arange(len(states), device=states.device)  # numbers of the host's would wait
        return states[rows, mask.sum(dim=1) - 1]
    weights = mask.unsqueeze(-1).to(states.dtype)
    if pooling == "max":
        return states.masked_fill(weights == 0, float("-inf")).amax(dim=1)
    return (states * weights).sum(dim=1) / weights.sum(dim=1)


def _pooling(read_json: Callable[[str], Any]) -> tuple[str, str]:
    """The pooling mode from the model's files, and why it is not supported."""
    modules = read_json("modules.json")
    if modules is None:
        return "mean", ""
    kinds = {str(module.get("type")).rpartition(".")[2]: module for module in modules}
    unknown = sorted(kinds.keys() - {"Transformer", "Pooling", "Normalize"})
    if unknown:
        return "mean", f"it has modules of sentence-transformers, such as {unknown[0]}"
    if "Pooling" not in kinds:
        return "mean", ""
    settings = read_json(f"{kinds['Pooling'].get('path')}/config.json") or {}
    named = settings.get("pooling_mode")  # of newer versions
    modes = [named] if named else [mode for mode, on in settings.items() if on is True]
    pooled = [
        _POOLINGS.get(mode, mode) for mode in modes
        if mode == named or mode.startswith("pooling_mode")
    ]  # fmt: skip
    if len(pooled) > 1 or any(mode not in _POOLINGS.values() for mode in pooled):
        return "mean", f"it pools by {' and '.join(map(str, pooled))}"
    return (pooled[0] if pooled else "mean"), ""
