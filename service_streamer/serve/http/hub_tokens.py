"""Texts to tokens and back: /tokenize and /decode; /detokenize, as vLLM calls it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from ...errors import InvalidInput
from .context import Context, decoded, encode, invalid, renamed, unsupported
from .hub_schemas import (
    DecodeRequest,
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokensOfPrompt,
)
from .token_inputs import inputs_of

_read_tokenize = msgspec.json.Decoder(TokenizeRequest)
_read_decode = msgspec.json.Decoder(DecodeRequest)
_read_detokenize = msgspec.json.Decoder(DetokenizeRequest)


async def tokenize(body: bytes, context: Context) -> bytes:
    request: TokenizeRequest = decoded(_read_tokenize, body)
    if request.prompt_name is not None:
        raise unsupported("prompt_name", "is not supported; write the prompt before the text")
    parameters = {"add_special_tokens": request.add_special_tokens}
    if request.prompt is not None:
        if request.inputs is not None:
            raise invalid("prompt", "means the same as inputs; leave one of them out")
        [tokens] = await _computed("tokenize", [request.prompt], parameters, "prompt", context)
        ids = [token["id"] for token in tokens]
        return encode(TokensOfPrompt(len(ids), context.description.get("max_tokens"), ids))
    texts = request.inputs
    if not texts:
        problem = "is missing" if texts is None else "is empty"
        raise invalid("inputs", f"{problem}; send a text, or a list of texts")
    texts = [texts] if isinstance(texts, str) else texts
    return encode(await _computed("tokenize", texts, parameters, "inputs", context))


async def decode(body: bytes, context: Context) -> bytes:
    request: DecodeRequest = decoded(_read_decode, body)
    inputs, _ = inputs_of(request.ids, "ids")
    parameters = {"skip_special_tokens": request.skip_special_tokens}
    return encode(await _computed("decode", inputs, parameters, "ids", context))


async def detokenize(body: bytes, context: Context) -> bytes:
    request: DetokenizeRequest = decoded(_read_detokenize, body)
    parameters = {"skip_special_tokens": request.skip_special_tokens}
    [text] = await _computed("decode", [request.tokens], parameters, "tokens", context)
    return encode(DetokenizeResponse(text))


async def _computed(
    do: str, inputs: Iterable[Any], parameters: Mapping[str, Any], field: str, context: Context
) -> list[Any]:
    items = [{"do": do, "inputs": each, "parameters": parameters} for each in inputs]
    context.check_count(len(items))
    try:
        return await context.compute(items)
    except InvalidInput as error:
        raise renamed(error, {"inputs": field}) from None
