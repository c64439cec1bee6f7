"""/v1/embeddings: sentence embeddings in OpenAI's form."""

from __future__ import annotations

import array
import base64
import math
import sys
from collections.abc import Sequence
from typing import Any

import msgspec

from ...errors import InvalidInput
from .context import RequestContext
from .json_bodies import JSONAnswer, read_json
from .refusals import invalid, renamed
from .schemas import EmbeddingsRequest, Usage, inputs_of, log_harmless

_read_embeddings = msgspec.json.Decoder(EmbeddingsRequest)


async def embeddings(body: bytes, context: RequestContext) -> JSONAnswer:
    request: EmbeddingsRequest = await read_json(_read_embeddings, body)
    log_harmless(request)
    inputs, _ = inputs_of(request.input, "input")
    context.check_count(len(inputs))
    parameters = {"truncation": True} if request.truncation else {}
    items = [{"do": "embed", "inputs": each, "parameters": parameters} for each in inputs]
    try:
        outputs = await context.compute(items)
    except InvalidInput as error:
        raise renamed(error, {"inputs": "input"}) from None
    return await context.answer(lambda: _response(outputs, request, context.model))


def _response(outputs: Sequence[Any], request: EmbeddingsRequest, model: str) -> dict[str, Any]:
    """An ``EmbeddingsResponse`` as plain data, which is written in pieces."""
    data = []
    for index, output in enumerate(outputs):
        numbers = shortened(output["embedding"], request.dimensions)
        is_text = request.encoding_format == "base64"
        shown = _base64(numbers) if is_text else numbers
        data.append({"embedding": shown, "index": index, "object": "embedding"})
    tokens = sum(output["tokens"] for output in outputs)
    return {"data": data, "model": model, "usage": Usage(tokens, tokens), "object": "list"}


def shortened(
    numbers: list[float], dimensions: int | None, *, normalizes: bool = True
) -> list[float]:
    """The first numbers of a vector; if ``normalizes``, scaled to length 1 again.

    Raises:
        Refusal: it has fewer.
    """
    if dimensions is None or dimensions == len(numbers):
        return numbers
    if dimensions > len(numbers):
        raise invalid("dimensions", f"must be at most {len(numbers)}, the model's dimensions")
    part = numbers[:dimensions]
    if not normalizes:
        return part
    norm = math.hypot(*part) or 1.0
    return [number / norm for number in part]


def _base64(numbers: list[float]) -> str:
    packed = array.array("f", numbers)
    if sys.byteorder != "little":
        packed.byteswap()
    return base64.b64encode(packed.tobytes()).decode()
