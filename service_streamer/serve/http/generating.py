"""/generate: continues one text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from ...errors import InvalidInput
from .context import Context, check_streams, decoded, encode, invalid, renamed
from .events import TokenEvents
from .generation_schemas import GenerateRequest, GenerateResponse
from .streaming import EventStream

__all__ = ["check_single", "generate"]

_read_generate = msgspec.json.Decoder(GenerateRequest)


async def generate(body: bytes, context: Context) -> bytes | EventStream:
    request: GenerateRequest = decoded(_read_generate, body)
    check_single(request.parameters)
    item = {"do": "generate", "inputs": request.text, "parameters": request.parameters}
    try:
        if request.stream:
            check_streams(context)
            return await context.stream(item, TokenEvents())
        [[first, *_]] = await context.compute([item])
    except InvalidInput as error:
        raise renamed(error, {"inputs": "text"}) from None
    return encode(GenerateResponse(request.text + first["text"]))


def check_single(parameters: Mapping[str, Any]) -> None:
    if parameters.get("num_return_sequences", 1) != 1:
        raise invalid(
            "parameters.num_return_sequences", "/generate returns one text; use /v1/completions"
        )
