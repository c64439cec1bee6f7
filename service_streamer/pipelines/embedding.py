""" "predict", "embed_all" and "embed" of feature extraction."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate
from typing import Any

from ..errors import InvalidInput
from .encoding import Text
from .requests import Request, quote
from .sentence_files import SentenceSettings
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


class SentenceEmbedder(TensorHandler):
    """ "embed": one vector of length 1 per text, as sentence-transformers makes it.

    Args:
        pipeline: a pipeline of transformers.
        settings: what the model's files ask for, without an obstacle.

    Attributes:
        limit: maximum number of tokens of a text.
    """

    inputs = ("input_ids", "attention_mask")
    side = "right"  # poolings look for the first and the last token
    takes_tokens = may_be_blank = True

    def __init__(self, pipeline: Any, settings: SentenceSettings) -> None:
        super().__init__(pipeline)
        self.can_batch = True  # with a mask, any token will do as padding
        self.settings = settings
        self.limit = min((each for each in (self.limit, settings.limit) if each), default=None)
        #: Numbers of tokens of prompts, by their names.
        self._lengths = {name: self._length(text) for name, text in settings.prompts.items()}

    def fit(self, text: str, request: Request, field: str = "inputs") -> str:
        name, prompts = self._prompt_of(request), self.settings.prompts
        if name is not None and name not in prompts:
            has = f"its prompts are {', '.join(map(quote, prompts))}" if prompts else "it has none"
            raise InvalidInput(
                f"parameters.prompt_name: the model has no prompt {quote(name)}, {has}; write what "
                "comes before the text into the text"
            )
        return super().fit(text if name is None else prompts[name] + text, request, field)

    def _take_tokens(self, request: Request) -> None:
        if "prompt_name" in request.parameters:
            raise InvalidInput(
                "parameters.prompt_name: no prompt comes before a list of tokens; send a text"
            )
        super()._take_tokens(request)

    def text_of(self, request: Request) -> Text:
        text: str = request.inputs
        return text.lower() if self.settings.lowers else text

    def _prompt_of(self, request: Request) -> str | None:
        name: str | None = request.parameters.get("prompt_name", self.settings.default)
        return name

    def _length(self, prompt: str) -> int:
        """Tokens of a prompt, with those that come before any text, and without those behind it."""
        if not prompt:
            return 0
        ids = self.tokenizer(prompt.lower() if self.settings.lowers else prompt)["input_ids"]
        return len(ids) - bool(ids and ids[-1] in self.tokenizer.all_special_ids)

    def plan(self, requests: list[Request]) -> tuple[int, Any, Any]:
        """The number of texts, and of each text what is not usual; None if all is.

        That is which vectors keep their length, and how many tokens are not pooled.
        """
        kept = [each.parameters.get("normalize") is False for each in requests]
        left_out = [0] * len(requests)
        if not self.settings.pools_prompt:
            left_out = [
                self._lengths.get(self._prompt_of(each) or "", 0)
                if isinstance(each.inputs, str)
                else 0
                for each in requests
            ]
        if not any(kept) and not any(left_out):
            return len(requests), None, None
        import torch

        return (
            len(requests),
            torch.tensor(kept)[:, None] if any(kept) else None,
            torch.tensor(left_out)[:, None] if any(left_out) else None,
        )

    def compute(self, inputs: Mapping[str, Any], plan: tuple[int, Any, Any]) -> Any:
        import torch

        count, kept, left_out = plan
        mask = inputs["attention_mask"][:count]
        states = self.pipeline.model(**inputs)[0][:count]
        if left_out is not None:
            places = torch.arange(mask.shape[1], device=mask.device)
            mask = mask * (places >= left_out)
        pooled = _pool(states.float(), mask, self.settings.pooling)
        vectors = torch.nn.functional.normalize(pooled, dim=-1)
        return vectors if kept is None else torch.where(kept, pooled, vectors)

    def results(self, requests: list[Request], outputs: Any) -> list[Any]:
        return [
            {"embedding": vector, "tokens": request.tokens}
            for vector, request in zip(outputs.numpy().tolist(), requests, strict=True)
        ]


def _pool(states: Any, mask: Any, pooling: str) -> Any:
    import torch

    if pooling in ("cls", "lasttoken"):
        rows = torch.arange(len(states), device=states.device)  # numbers of the host's would wait
        first = mask.argmax(dim=1)  # padding is behind the text, and what is left out before it
        return states[rows, first if pooling == "cls" else first + mask.sum(dim=1) - 1]
    weights = mask.unsqueeze(-1).to(states.dtype)
    if pooling == "max":
        return states.masked_fill(weights == 0, float("-inf")).amax(dim=1)
    return (states * weights).sum(dim=1) / weights.sum(dim=1).clamp(min=1)
