"""/generate: continues one text, or makes another of it.

It has the form of text-generation-inference, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from ...errors import InvalidInput
from .context import RequestContext
from .generation_schemas import GenerateRequest, GenerateResponse
from .hub_generation import hub_details, hub_generation
from .json_bodies import JSONAnswer, read_json
from .refusals import invalid, renamed
from .streaming import EventStream

_read_generate = msgspec.json.Decoder(GenerateRequest)


async def generate(body: bytes, context: RequestContext) -> JSONAnswer | EventStream:
    request: GenerateRequest = await read_json(_read_generate, body)
    field, text = ("inputs", request.inputs) if request.text is None else ("text", request.text)
    if text is None:
        raise invalid("text", "is missing; send the text to continue")
    if field == "text" and request.inputs is not None:
        raise invalid("inputs", "means the same as text; leave one of them out")
    parameters, wishes = hub_generation(request.parameters or {})
    check_single(parameters)
    parameters.pop("return_full_text", None)
    is_another = context.description.get("task") == "text2text-generation"
    item = {"do": "generate", "inputs": text, "parameters": parameters}
    try:
        if request.stream:
            context.check_streams()
            return await context.stream(item, wishes.events(None if is_another else text))
        [rows] = await context.compute([item])
    except InvalidInput as error:
        raise renamed(error, {"inputs": field, **wishes.names}) from None
    [answer, *_] = hub_details(rows, wishes, "text")
    if field == "text":
        answer["text"] = ("" if is_another else text) + answer.pop("generated_text")
    elif wishes.has_prompt and not is_another:
        answer["generated_text"] = text + answer["generated_text"]
    return await context.answer(lambda: GenerateResponse(**answer))


def check_single(parameters: Mapping[str, Any]) -> None:
    if parameters.get("num_return_sequences", 1) != 1:
        raise invalid(
            "parameters.num_return_sequences", "/generate returns one text; use /v1/completions"
        )
