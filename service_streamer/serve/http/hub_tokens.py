"""Texts to tokens and back: /tokenize and /decode; /detokenize, as vLLM calls it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from ...errors import InvalidInput
from .context import RequestContext
from .hub_schemas import (
    NO_PROMPTS,
    DecodeRequest,
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokensOfPrompt,
)
from .json_bodies import JSONAnswer, read_json
from .refusals import invalid, renamed, unsupported
from .schemas import inputs_of

_read_tokenize = msgspec.json.Decoder(TokenizeRequest)
_read_decode = msgspec.json.Decoder(DecodeRequest)
_read_detokenize = msgspec.json.Decoder(DetokenizeRequest)


async def tokenize(body: bytes, context: RequestContext) -> JSONAnswer:
    request: TokenizeRequest = await read_json(_read_tokenize, body)
    if request.prompt_name is not None:
        raise unsupported("prompt_name", NO_PROMPTS)
    parameters = {"add_special_tokens": request.add_special_tokens}
    if request.prompt is not None:
        if request.inputs is not None:
            raise invalid("prompt", "means the same as inputs; leave one of them out")
        [tokens] = await _computed("tokenize", [request.prompt], parameters, "prompt", context)
        ids = [token["id"] for token in tokens]
        most = context.description.get("max_tokens")
        return await context.answer(lambda: TokensOfPrompt(len(ids), most, ids))
    texts = request.inputs
    if not texts:
        problem = "is missing" if texts is None else "is empty"
        raise invalid("inputs", f"{problem}; send a text, or a list of texts")
    texts = [texts] if isinstance(texts, str) else texts
    found = await _computed("tokenize", texts, parameters, "inputs", context)
    return await context.answer(lambda: found)


async def decode(body: bytes, context: RequestContext) -> JSONAnswer:
    request: DecodeRequest = await read_json(_read_decode, body)
    inputs, _ = inputs_of(request.ids, "ids")
    parameters = {"skip_special_tokens": request.skip_special_tokens}
    found = await _computed("decode", inputs, parameters, "ids", context)
    return await context.answer(lambda: found)


async def detokenize(body: bytes, context: RequestContext) -> JSONAnswer:
    request: DetokenizeRequest = await read_json(_read_detokenize, body)
    parameters = {"skip_special_tokens": request.skip_special_tokens}
    [text] = await _computed("decode", [request.tokens], parameters, "tokens", context)
    return await context.answer(lambda: DetokenizeResponse(text))


async def _computed(
    do: str,
    inputs: Iterable[Any],
    parameters: Mapping[str, Any],
    field: str,
    context: RequestContext,
) -> list[Any]:
    items = [{"do": do, "inputs": each, "parameters": parameters} for each in inputs]
    context.check_count(len(items))
    try:
        return await context.compute(items)
    except InvalidInput as error:
        raise renamed(error, {"inputs": field}) from None
