"""Embeddings: /v1/embeddings in OpenAI's form; /embed, /embed_all and / in Hugging Face's forms."""

from __future__ import annotations

import array
import base64
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from operator import mul
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from .context import RequestContext
from .json_bodies import JSONAnswer, read_json
from .refusals import invalid, unsupported
from .schemas import (
    HarmlessFields,
    HubTextRequest,
    Ignored,
    TextsOrTokens,
    Usage,
    hub_parameters,
    inputs_of,
    log_harmless,
)
from .service import Description

_HAS_NUMPY = find_spec("numpy") is not None

Truncate = Annotated[
    bool | None, Meta(description="truncate a text that is too long instead of refusing it")
]
#: A pattern, since generated clients give "left" and "Left" of an enum the same name.
_Side = Annotated[str, Meta(pattern="^(left|right|Left|Right)$")]
Direction = Annotated[_Side | None, Meta(description="side that is truncated: left or right")]
PromptName = Annotated[
    str | None, Meta(description="which of the model's prompts comes before a text")
]
NO_PROMPTS = "is only for sentence embeddings; write the prompt before the text"

_Dimensions = Annotated[int, Meta(ge=1, description="so many of the first numbers")] | None


class EmbeddingsRequest(HarmlessFields, forbid_unknown_fields=True):
    """OpenAI's form, and ``truncation``."""

    input: TextsOrTokens
    model: Ignored = None
    encoding_format: Literal["float", "base64"] | None = "float"
    dimensions: Annotated[int, Meta(ge=1)] | None = None
    truncation: Annotated[
        bool, Meta(description="Truncate a text that is too long instead of refusing it.")
    ] = False


class Embedding(Struct):
    """Embedding of one text: numbers, or base64 of little-endian float32."""

    embedding: list[float] | str
    index: int
    object: str = "embedding"


class EmbeddingsResponse(Struct):
    """OpenAI's form."""

    data: list[Embedding]
    model: str
    usage: Usage
    object: str = "list"


class TruncationFields(Struct, forbid_unknown_fields=True, kw_only=True):
    """What requests for texts have in common."""

    truncate: Truncate = None
    truncation_direction: Direction = None
    prompt_name: PromptName = None


class EmbedRequest(TruncationFields):
    """Texts, for one vector each."""

    inputs: TextsOrTokens
    normalize: Annotated[bool, Meta(description="scale each vector to length 1")] = True
    dimensions: _Dimensions = None


class EmbedAllRequest(TruncationFields):
    """Texts, for a vector of each of their tokens."""

    inputs: TextsOrTokens


class SimilarityInputs(Struct, forbid_unknown_fields=True):
    """A sentence, and those that it is compared with."""

    source_sentence: str
    sentences: Annotated[list[str], Meta(min_length=1)]


class HubFeaturesRequest(HubTextRequest):
    """The form of Hugging Face's InferenceClient, for models that embed texts.

    With ``normalize``, ``dimensions`` or ``prompt_name`` the answer is one vector per text.
    Otherwise it has a vector of each token.
    """

    inputs: str | list[str] | SimilarityInputs  # type: ignore[assignment]
    normalize: bool | None = None
    dimensions: _Dimensions = None
    prompt_name: PromptName = None
    truncation_direction: Direction = None
    encoding_format: Literal["float"] | None = None


_read_embeddings = msgspec.json.Decoder(EmbeddingsRequest)
_read_embed = msgspec.json.Decoder(EmbedRequest)
_read_embed_all = msgspec.json.Decoder(EmbedAllRequest)

#: Names of the model's parameters in these requests.
TRUNCATE = {
    "parameters.truncation": "truncate", "parameters.truncation_side": "truncation_direction",
    "parameters.prompt_name": "prompt_name",
}  # fmt: skip

#: Fields of ``/`` with which a text gets one vector.
_OF_VECTORS = ("normalize", "dimensions", "prompt_name")


async def embeddings(body: bytes, context: RequestContext) -> JSONAnswer:
    request: EmbeddingsRequest = await read_json(_read_embeddings, body)
    log_harmless(request)
    inputs, _ = inputs_of(request.input, "input")
    parameters = {"truncation": True} if request.truncation else {}
    outputs = await context.compute_each("embed", inputs, parameters, {"inputs": "input"})
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


async def embed(body: bytes, context: RequestContext) -> JSONAnswer:
    request: EmbedRequest = await read_json(_read_embed, body)
    inputs, _ = inputs_of(request.inputs, "inputs")
    return await _embedded(
        inputs,
        truncation_parameters(request, takes_prompts=True),
        context,
        request.dimensions,
        normalizes=request.normalize,
    )


async def embed_all(body: bytes, context: RequestContext) -> JSONAnswer:
    request: EmbedAllRequest = await read_json(_read_embed_all, body)
    inputs, _ = inputs_of(request.inputs, "inputs")
    outputs = await _computed("embed_all", inputs, truncation_parameters(request), context)
    return await context.answer(lambda: [states for [states] in outputs])


async def infer_features(request: HubFeaturesRequest, context: RequestContext) -> JSONAnswer:
    """The answer of ``/`` for models that embed texts."""
    parameters = hub_parameters(request) | truncation_parameters(request, takes_prompts=True)
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
    more = as_arrays(context.description)
    return await context.compute_each(do, inputs, parameters, TRUNCATE, **more)


def as_arrays(description: Description) -> dict[str, Any]:
    """What makes a model answer vectors as arrays, which take a tenth of the memory; else empty."""
    return {"arrays": True} if _HAS_NUMPY and description.get("vector_size") else {}


def truncation_parameters(request: Any, *, takes_prompts: bool = False) -> dict[str, Any]:
    """The model's parameters for what a request says of truncation, and of a prompt.

    Args:
        request: has ``truncate``, ``truncation_direction`` and perhaps ``prompt_name``.

    Raises:
        Refusal: it names a prompt, and its operation takes none.
    """
    parameters: dict[str, Any] = {}
    prompt = getattr(request, "prompt_name", None)
    if prompt is not None:
        if not takes_prompts:
            raise unsupported("prompt_name", NO_PROMPTS)
        parameters["prompt_name"] = prompt
    if request.truncate is not None:
        parameters["truncation"] = request.truncate
    if request.truncation_direction is not None:
        parameters["truncation_side"] = request.truncation_direction.lower()
    return parameters
