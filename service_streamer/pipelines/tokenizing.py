""" "tokenize" and "decode": what a model's tokenizer does, without the model.

All of it is done while a batch is prepared, in another thread than that of the model.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

from ..errors import InvalidInput
from .handlers import Handler
from .inputs import read_text, read_tokens
from .requests import Request, quote
from .texts import vocabulary_size

#: Maximum number of characters of a text, and of tokens. It has no relation to the model's limit: a
#: long text is tokenized to divide it into parts. Arbitrary: it takes about a quarter of a second,
#: for which the other requests of the batch wait.
_LONGEST = 100_000


class _TokenHandler(Handler):
    """Answers requests as soon as they are prepared."""

    has_buckets = True
    warms_up = False

    def __init__(self, pipeline: Any) -> None:
        #: Of the thread that prepares batches.
        self.tokenizer = copy.deepcopy(pipeline.tokenizer)

    def forward(self, batch: list[Request]) -> list[Any]:
        return [request.encoded for request in batch]

    def finish(self, requests: list[Request], outputs: list[Any]) -> list[Any]:  # noqa: ARG002
        return outputs


class TextToTokens(_TokenHandler):
    """ "tokenize": ``[{"id", "text", "special", "start", "stop"}, ...]`` of a text.

    ``start`` and ``stop`` are the token's place in the text, in characters; both are None for
    special tokens, and if the tokenizer does not know them.
    """

    def prepare(self, request: Request) -> None:
        text = read_text(request.inputs, may_be_blank=True)
        if len(text) > _LONGEST:
            raise InvalidInput(
                f"inputs: the text has {len(text):,} characters, and the limit is {_LONGEST:,}; "
                "send it in parts"
            )
        adds = request.parameters.get("add_special_tokens", True)
        has_places = bool(getattr(self.tokenizer, "is_fast", False))
        row = self.tokenizer(
            text,
            add_special_tokens=adds,
            return_special_tokens_mask=True,
            return_offsets_mapping=has_places,
            verbose=False,
        )
        ids = row["input_ids"]
        places = row["offset_mapping"] if has_places else [None] * len(ids)
        names = self.tokenizer.convert_ids_to_tokens(ids)
        request.encoded = [
            _token(text, *each)
            for each in zip(ids, names, row["special_tokens_mask"], places, strict=True)
        ]
        request.group_by({})


def _token(
    text: str, token: int, name: str, is_special: int, place: tuple[int, int] | None
) -> dict[str, Any]:
    start = stop = None
    if place is not None and not is_special:
        start, stop = place
        name = text[start:stop]
    return {"id": token, "text": name, "special": bool(is_special), "start": start, "stop": stop}


class TokensToText(_TokenHandler):
    """ "decode": the text of a list of tokens."""

    def __init__(self, pipeline: Any) -> None:
        super().__init__(pipeline)
        self._size = vocabulary_size(pipeline)

    def prepare(self, request: Request) -> None:
        if not isinstance(request.inputs, (list, tuple)):
            raise InvalidInput(f"inputs: must be a list of tokens; not {quote(request.inputs)}")
        if len(request.inputs) > _LONGEST:
            raise InvalidInput(
                f"inputs: there are {len(request.inputs):,} tokens, and the limit is {_LONGEST:,}; "
                "send them in parts"
            )
        tokens = read_tokens(request.inputs, self._size)
        skips = request.parameters.get("skip_special_tokens", True)
        request.encoded = str(self.tokenizer.decode(tokens, skip_special_tokens=skips))
        request.group_by({})


#: Of all tasks that take text.
TOKEN_HANDLERS: Mapping[str, Callable[[Any], Handler]] = {
    "tokenize": TextToTokens,
    "decode": TokensToText,
}
