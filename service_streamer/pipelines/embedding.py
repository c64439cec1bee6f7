"""Sentence embeddings from a model of features, as sentence-transformers has them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..errors import InvalidInput
from .inputs import read_text
from .requests import Request
from .texts import TextPredictor, fit_text

__all__ = ["SentenceEmbedder"]

_POOLINGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_lasttoken": "lasttoken",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
}


class SentenceEmbedder:
    """ "embed": one vector of length 1 per text. Belongs to one thread.

    Pooling is over the tokens of the text: their mean, unless the model's files say otherwise.

    Args:
        features: what counts tokens and knows the model.
        read_json: reads a JSON file of the model, or answers None.

    Attributes:
        limit: the most tokens of a text.
        obstacle: why the embeddings would not be those of sentence-transformers, if so.
    """

    def __init__(self, features: TextPredictor, read_json: Callable[[str], Any]) -> None:
        self.pipeline = features.pipeline
        self.tokenizer = features.tokenizer
        settings = read_json("sentence_bert_config.json") or {}
        limits = (features.limit, settings.get("max_seq_length"))
        self.limit: int | None = min((each for each in limits if each), default=None)
        self.lowers = bool(settings.get("do_lower_case"))
        self.pooling, self.obstacle = _pooling(read_json)

    def prepare(self, request: Request) -> None:
        """Check the text, and turn it into token ids. Raises InvalidInput."""
        truncates = bool(request.parameters.get("truncation"))
        text = read_text(request.inputs, may_be_blank=True)
        text = fit_text(text, self.limit, self.tokenizer, truncates=truncates)
        ids = self.tokenizer(
            text.lower() if self.lowers else text, truncation=truncates, max_length=self.limit
        )["input_ids"]
        if not ids:
            raise InvalidInput("inputs: the text has no tokens; send a text")
        if self.limit is not None and len(ids) > self.limit:
            raise InvalidInput(
                f"inputs: the text has {len(ids)} tokens, and the limit is {self.limit}; shorten "
                "it, or have it cut with the parameter truncation"
            )
        request.inputs, request.tokens = ids, len(ids)
        request.group_by({})

    def run(self, requests: list[Request]) -> list[Any]:
        """Compute requests in one forward pass."""
        import torch

        device = self.pipeline.device
        longest = max(request.tokens for request in requests)
        # Whatever stands where the mask is 0 is ignored.
        padding = [
            [self.tokenizer.pad_token_id or 0] * (longest - each.tokens) for each in requests
        ]
        ids = [each.inputs + more for each, more in zip(requests, padding, strict=True)]
        mask = [
            [1] * each.tokens + [0] * len(more)
            for each, more in zip(requests, padding, strict=True)
        ]
        with self.pipeline.device_placement(), torch.inference_mode():
            attention = torch.tensor(mask, device=device)
            states = self.pipeline.model(
                input_ids=torch.tensor(ids, device=device), attention_mask=attention
            )[0]
            pooled = _pool(states.float(), attention, self.pooling)
            vectors = torch.nn.functional.normalize(pooled, dim=-1).cpu()
        return [
            {"embedding": vector, "tokens": request.tokens}
            for vector, request in zip(vectors.tolist(), requests, strict=True)
        ]


def _pool(states: Any, mask: Any, pooling: str) -> Any:
    if pooling == "cls":
        return states[:, 0]  # padding is behind the text
    if pooling == "lasttoken":
        return states[range(len(states)), mask.sum(dim=1) - 1]
    weights = mask.unsqueeze(-1).to(states.dtype)
    if pooling == "max":
        return states.masked_fill(weights == 0, float("-inf")).amax(dim=1)
    return (states * weights).sum(dim=1) / weights.sum(dim=1)


def _pooling(read_json: Callable[[str], Any]) -> tuple[str, str]:
    """How the model's files say to pool, and why that cannot be done here."""
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
