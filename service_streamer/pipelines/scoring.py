""" "score" of text generation: the log probabilities of a text's own tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..errors import InvalidInput
from .answers import shown_token
from .generation import Generator
from .handlers import Handler
from .requests import Request
from .tensors import raw_logits
from .text_pieces import TextDecoder

#: Tokens of a forward pass, padding included, unless one text alone has more. The model computes
#: the logits of all of them: with a vocabulary of 128,000 that is 0.5 GB in float16. Arbitrary.
_MOST_TOKENS = 2048

#: Maximum number of tokens of a text. A client could else fill the memory with the logits of one.
_LONGEST = 4 * _MOST_TOKENS

#: Positions whose log probabilities are computed together, in float32.
_AT_ONCE = 256


class PromptScorer(Handler):
    """The log probability of each token of a text, given those before it.

    The first token of a text has none: its ``logprob`` is None and its ``top`` is empty.

    Args:
        generator: of the same model; it reads the prompts.
    """

    warms_up = False  # "generate" has run the model

    def __init__(self, generator: Generator) -> None:
        self._generator = generator
        self.pipeline = generator.pipeline
        self.limit = generator.limit
        self._decoder = TextDecoder(generator.tokenizer)

    def prepare(self, request: Request) -> None:
        self._generator.read(request)
        most = min(self.limit or _LONGEST, _LONGEST)
        if request.tokens > most:
            raise InvalidInput(
                f"inputs: the text has {request.tokens} tokens, and the limit is {most} for log "
                "probabilities of a text; shorten it"
            )
        # Logits are large: texts are computed in parts, whatever the batch is.
        request.group_by({})

    def forward(self, batch: list[Request]) -> list[Any]:
        """Compute requests, in as many forward passes as their tokens need."""
        import torch

        found: dict[int, Any] = {}
        with torch.inference_mode(), self.pipeline.device_placement():
            for part in _parts(batch):
                for request, logits in zip(part, self._logits(part), strict=True):
                    found[id(request)] = _scores(logits, request)
        return [found[id(request)] for request in batch]

    def finish(self, requests: list[Request], outputs: list[Any]) -> list[Any]:
        return [
            [
                {
                    **shown_token(token, logprob, self._decoder),
                    "top": [shown_token(each, value, self._decoder) for each, value in top],
                }
                for token, (logprob, top) in zip(
                    request.encoded, [(None, []), *scores], strict=True
                )
            ]
            for request, scores in zip(requests, outputs, strict=True)
        ]

    def _logits(self, part: list[Request]) -> Any:
        """The logits behind each token; padding is behind the texts, where no token sees it."""
        import torch

        shape = len(part), max(request.tokens for request in part)
        ids = torch.full(shape, self._generator.tokenizer.pad_token_id or 0)
        mask = torch.zeros(shape, dtype=torch.long)
        for row, request in enumerate(part):
            ids[row, : request.tokens] = torch.tensor(request.encoded)
            mask[row, : request.tokens] = 1
        device = self.pipeline.device
        return raw_logits(
            self.pipeline.model(
                input_ids=ids.to(device), attention_mask=mask.to(device), use_cache=False
            )
        )


def _parts(batch: list[Request]) -> Iterator[list[Request]]:
    part: list[Request] = []
    for request in sorted(batch, key=lambda each: each.tokens):
        if part and (len(part) + 1) * request.tokens > _MOST_TOKENS:
            yield part
            part = []
        part.append(request)
    yield part


def _scores(logits: Any, request: Request) -> list[tuple[float, list[tuple[int, float]]]]:
    """Of each token but the first: its log probability, and the likeliest tokens with theirs."""
    import torch

    count = request.parameters.get("logprobs", 0)
    tokens = torch.tensor(request.encoded[1:], device=logits.device)
    scores: list[tuple[float, list[tuple[int, float]]]] = []
    for start in range(0, len(tokens), _AT_ONCE):
        chosen = tokens[start : start + _AT_ONCE]
        shares = logits[start : start + len(chosen)].float().log_softmax(dim=-1)
        best = shares.topk(min(count, shares.shape[-1]), dim=-1)
        own = shares.gather(-1, chosen[:, None])[:, 0].tolist()
        rows = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        for share, (ids, values) in zip(own, rows, strict=True):
            scores.append((share, [*zip(ids, values, strict=True)]))
    return scores
