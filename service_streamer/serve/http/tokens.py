"""Texts to tokens and back: /tokenize and /decode; /detokenize, as vLLM calls it."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from .context import RequestContext
from .embeddings import NO_PROMPTS, PromptName
from .json_bodies import JSONAnswer, read_json
from .refusals import invalid, unsupported
from .schemas import Ignored, Token, inputs_of


class TokenizeRequest(Struct, forbid_unknown_fields=True):
    """Texts as ``inputs``; or a ``prompt``, as vLLM has it."""

    inputs: str | list[str] | None = None
    prompt: str | None = None
    add_special_tokens: bool = True
    prompt_name: PromptName = None
    model: Ignored = None


class TokenInText(Struct):
    """A token, and its place in the text, in characters; special tokens have none."""

    id: int
    text: str
    special: bool
    start: int | None
    stop: int | None


class TokensOfPrompt(Struct):
    """vLLM's form."""

    count: int
    max_model_len: int | None
    tokens: list[int]


class DecodeRequest(Struct, forbid_unknown_fields=True):
    """Tokens of one text, or of each of several texts."""

    ids: Annotated[list[Token | list[Token]], Meta(min_length=1)]
    skip_special_tokens: bool = True


class DetokenizeRequest(Struct, forbid_unknown_fields=True):
    """Tokens of one text, in vLLM's form."""

    tokens: Annotated[list[Token], Meta(min_length=1)]
    skip_special_tokens: bool = False
    model: Ignored = None


class DetokenizeResponse(Struct):
    """vLLM's form."""

    prompt: str


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
        [tokens] = await context.compute_each(
            "tokenize", [request.prompt], parameters, {"inputs": "prompt"}
        )
        ids = [token["id"] for token in tokens]
        most = context.description.get("max_tokens")
        return await context.answer(lambda: TokensOfPrompt(len(ids), most, ids))
    texts = request.inputs
    if not texts:
        problem = "is missing" if texts is None else "is empty"
        raise invalid("inputs", f"{problem}; send a text, or a list of texts")
    texts = [texts] if isinstance(texts, str) else texts
    found = await context.compute_each("tokenize", texts, parameters, {"inputs": "inputs"})
    return await context.answer(lambda: found)


async def decode(body: bytes, context: RequestContext) -> JSONAnswer:
    request: DecodeRequest = await read_json(_read_decode, body)
    inputs, _ = inputs_of(request.ids, "ids")
    parameters = {"skip_special_tokens": request.skip_special_tokens}
    found = await context.compute_each("decode", inputs, parameters, {"inputs": "ids"})
    return await context.answer(lambda: found)


async def detokenize(body: bytes, context: RequestContext) -> JSONAnswer:
    request: DetokenizeRequest = await read_json(_read_detokenize, body)
    parameters = {"skip_special_tokens": request.skip_special_tokens}
    [text] = await context.compute_each(
        "decode", [request.tokens], parameters, {"inputs": "tokens"}
    )
    return await context.answer(lambda: DetokenizeResponse(text))
