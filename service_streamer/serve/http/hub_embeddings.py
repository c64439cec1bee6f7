"""Embeddings in the forms of text-embeddings-inference: /embed and /embed_all."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from operator import mul
from typing import Any

import msgspec

from ...errors import InvalidInput
from .context import RequestContext
from .embeddings import shortened
from .hub_schemas import (
    EmbedAllRequest,
    EmbedRequest,
    HubFeaturesRequest,
    SimilarityInputs,
    cutting,
)
from .json_bodies import JSONAnswer, read_json
from .refusals import renamed, unsupported
from .schemas import hub_parameters, inputs_of
from .service import Description

_HAS_NUMPY = find_spec("numpy") is not None

_read_embed = msgspec.json.Decoder(EmbedRequest)
_read_embed_all = msgspec.json.Decoder(EmbedAllRequest)

#: Names of the model's parameters in these requests.
TRUNCATE = {
    "parameters.truncation": "truncate", "parameters.truncation_side": "truncation_direction",
    "parameters.prompt_name": "prompt_name",
}  # fmt: skip

#: Fields of ``/`` with which a text gets one vector.
_OF_VECTORS = ("normalize", "dimensions", "prompt_name")


async def embed(body: bytes, context: RequestContext) -> JSONAnswer:
    request: EmbedRequest = await read_json(_read_embed, body)
    inputs, _ = inputs_of(request.inputs, "inputs")
    return await _embedded(
        inputs,
        cutting(request, takes_prompts=True),
        context,
        request.dimensions,
        normalizes=request.normalize,
    )


async def embed_all(body: bytes, context: RequestContext) -> JSONAnswer:
    request: EmbedAllRequest = await read_json(_read_embed_all, body)
    inputs, _ = inputs_of(request.inputs, "inputs")
    outputs = await _computed("embed_all", inputs, cutting(request), context)
    return await context.answer(lambda: [states for [states] in outputs])


async def infer_features(request: HubFeaturesRequest, context: RequestContext) -> JSONAnswer:
    """The answer of ``/`` for models that embed texts."""
    parameters = hub_parameters(request) | cutting(request, takes_prompts=True)
    inputs = request.inputs
    field = next((name for name in _OF_VECTORS if getattr(request, name) is not None), None)
    if isinstance(inputs, SimilarityInputs):
        _check_embeds(context, "inputs.sentences")
        return await _similarities(inputs, parameters, context)
    texts = [inputs] if isinstance(inputs, str) else inputs
    if field is not None:
        _check_embeds(context, field)
        normalizes = request.normalize is not False
        return await _embedded(
            texts, parameters, context, request.dimensions, normalizes=normalizes
        )
    outputs = await _computed("predict", texts, parameters, context)
    return await context.answer(lambda: outputs[0] if isinstance(inputs, str) else outputs)


def _check_embeds(context: RequestContext, field: str) -> None:
    if "embed" not in context.description.get("operations", ()):
        obstacle = context.description.get("no_embeddings")
        why = f", since {obstacle}" if obstacle else ""
        raise unsupported(field, f"is not supported: this model has no sentence embeddings{why}")


async def _embedded(
    inputs: Iterable[Any],
    parameters: Mapping[str, Any],
    context: RequestContext,
    dimensions: int | None,
    *,
    normalizes: bool,
) -> JSONAnswer:
    own = parameters if normalizes else {**parameters, "normalize": False}
    outputs = await _computed("embed", inputs, own, context)
    return await context.answer(
        lambda: [
            shortened(each["embedding"], dimensions, normalizes=normalizes) for each in outputs
        ]
    )


async def _similarities(
    inputs: SimilarityInputs, parameters: Mapping[str, Any], context: RequestContext
) -> JSONAnswer:
    """Cosines of the sentence and the others."""
    texts = [inputs.source_sentence, *inputs.sentences]
    outputs = await _computed("embed", texts, parameters, context)
    first, *others = (each["embedding"] for each in outputs)
    return await context.answer(lambda: [sum(map(mul, first, other)) for other in others])


async def _computed(
    do: str, inputs: Iterable[Any], parameters: Mapping[str, Any], context: RequestContext
) -> list[Any]:
    items = vector_items(do, inputs, parameters, context.description)
    context.check_count(len(items))
    try:
        return await context.compute(items)
    except InvalidInput as error:
        raise said(error, TRUNCATE) from None


def gives_vectors(description: Description) -> bool:
    """Whether the model answers vectors, which may come as arrays: in a tenth of the memory."""
    return _HAS_NUMPY and bool(description.get("vector_size"))


def vector_items(
    do: str, inputs: Iterable[Any], parameters: Mapping[str, Any], description: Description
) -> list[Any]:
    """An item for each input of an operation that answers vectors."""
    item: dict[str, Any] = {"do": do, "inputs": None, "parameters": parameters}
    if gives_vectors(description):
        item["arrays"] = True
    return [{**item, "inputs": each} for each in inputs]


def said(error: InvalidInput, names: Mapping[str, str]) -> InvalidInput:
    """The same error in the words of these requests."""
    text = str(renamed(error, names))
    return InvalidInput(text.replace("set the parameter truncation", "set truncate to true"))
