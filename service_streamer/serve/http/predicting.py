"""/predict, and / in the form of Hugging Face's InferenceClient: inputs of any task."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta

from ...errors import InvalidInput
from ...pipelines.tasks import TASKS
from ..v2.infer_answer import encode
from .context import RequestContext
from .embeddings import (
    TRUNCATE,
    Direction,
    HubFeaturesRequest,
    Truncate,
    as_arrays,
    infer_features,
    truncation_parameters,
)
from .events import OutputEvents
from .generation_schemas import GenerationRequest, HubGenerationRequest, texts_of
from .headers import Sent, read_sent
from .hub_generation import check_single, hub_details, hub_generation
from .json_bodies import JSONAnswer, decoded, read_json
from .refusals import Refusal, invalid, renamed, unsupported
from .schemas import (
    HubRequest,
    HubTextRequest,
    PredictRequest,
    TextRequest,
    hub_answer,
    hub_parameters,
    refused_field,
)
from .streaming import EventStream

#: Tasks whose results are texts made of texts.
TEXT_FROM_TEXT = ("text-generation", "text2text-generation")

#: Tasks whose inputs are texts only.
TEXT_TASKS = frozenset(
    (
        "feature-extraction", "fill-mask", "ner", "sentiment-analysis", "text-classification",
        "text-generation", "text2text-generation", "token-classification",
        "zero-shot-classification",
    )
)  # fmt: skip

#: Names of a text that was made of another one, as the client's ``translation`` and
#: ``summarization`` read it.
_NAMES_OF_OTHERS = ("translation_text", "summary_text")


class ClassificationRequest(TextRequest):
    """One text, or a list of texts; or text-embeddings-inference's form.

    In its form a list has lists of one text, or of a pair of texts.
    """

    inputs: str | list[str | Annotated[list[str], Meta(min_length=1, max_length=2)]]  # type: ignore[assignment]
    truncate: Truncate = None
    truncation_direction: Direction = None
    raw_scores: Annotated[
        bool | None, Meta(description="return the model's logits, of all labels")
    ] = None


#: Requests to /predict and to /, of tasks whose inputs may be more than texts.
REQUESTS_OF_TASKS: Mapping[object, tuple[type[TextRequest], type[HubTextRequest]]] = {
    "feature-extraction": (TextRequest, HubFeaturesRequest),
    "text-classification": (ClassificationRequest, HubTextRequest),
    "text-generation": (GenerationRequest, HubGenerationRequest),
}


class _Readers(NamedTuple):
    """Decoders of the requests to both paths."""

    plain: msgspec.json.Decoder[Any]
    hub: msgspec.json.Decoder[Any]


_ANY = _Readers(msgspec.json.Decoder(PredictRequest), msgspec.json.Decoder(HubRequest))
_TEXTS = _Readers(msgspec.json.Decoder(TextRequest), msgspec.json.Decoder(HubTextRequest))
_OF_TASKS = {
    task: _Readers(msgspec.json.Decoder(plain), msgspec.json.Decoder(hub))
    for task, (plain, hub) in REQUESTS_OF_TASKS.items()
}
_read_parameters = msgspec.json.Decoder(dict[str, Any])


async def predict(body: bytes, context: RequestContext) -> JSONAnswer | EventStream:
    task = context.description.get("task")
    request = await _request(_readers(task).plain, body, context)
    if isinstance(request, ClassificationRequest) and _is_hub_form(request):
        return await _classify(request, context)
    inputs, is_one = request.inputs, not isinstance(request.inputs, list)
    if task == "text-generation":
        inputs, is_one = texts_of(inputs)
    if request.stream:
        if isinstance(inputs, list) and len(inputs) != 1:
            raise invalid(
                "stream",
                f"a stream is of one input, not of {len(inputs)}; send a request for each, or "
                "leave stream out",
            )
        [item] = _items(inputs, request.parameters or {}, context)
        return await context.stream(item, OutputEvents(encode))
    outputs = await context.compute(_items(inputs, request.parameters or {}, context))
    return await context.answer(lambda: outputs[0] if is_one else outputs)


async def infer(body: bytes, context: RequestContext) -> JSONAnswer | EventStream:
    task = context.description.get("task")
    request = await _request(_readers(task).hub, body, context)
    if isinstance(request, HubFeaturesRequest):
        if request.stream:
            raise unsupported("stream")
        return await infer_features(request, context)
    refused = refused_field(request)
    if refused is not None:
        raise unsupported(refused)
    parameters = hub_parameters(request)
    if task in TEXT_FROM_TEXT:
        return await _infer_text(request, parameters, context)
    if request.stream:
        raise unsupported("stream")
    inputs = request.inputs
    outputs = await context.compute(_items(inputs, parameters, context))
    is_one = not isinstance(inputs, list)
    return await context.answer(lambda: hub_answer(outputs, task, is_one=is_one))


async def _infer_text(
    request: HubGenerationRequest | HubTextRequest,
    parameters: dict[str, Any],
    context: RequestContext,
) -> JSONAnswer | EventStream:
    parameters, wishes = hub_generation(parameters)
    is_another = context.description.get("task") == "text2text-generation"
    if not is_another:
        parameters.setdefault("return_full_text", False)
    elif parameters.get("return_full_text") is False:
        del parameters["return_full_text"]  # the text is another one
    inputs, is_one = texts_of(request.inputs)
    try:
        if request.stream:
            context.check_streams()
            check_single(parameters)
            if not is_one:
                raise invalid("inputs", "a stream is of one text; send a request for each")
            [item] = _items(inputs, parameters, context)
            return await context.stream(item, wishes.events(inputs[0]))
        outputs = await context.compute(_items(inputs, parameters, context))
    except InvalidInput as error:
        raise renamed(error, wishes.names) from None
    answers = [hub_details(rows, wishes, "generated_text") for rows in outputs]
    for answer in (each for rows in answers for each in rows) if is_another else ():
        answer |= dict.fromkeys(_NAMES_OF_OTHERS, answer["generated_text"])
    return await context.answer(lambda: answers[0] if is_one else answers)


def _readers(task: str | None) -> _Readers:
    if task in _OF_TASKS:
        return _OF_TASKS[task]
    return _TEXTS if task in TEXT_TASKS else _ANY


async def _request(decoder: msgspec.json.Decoder[Any], body: bytes, context: RequestContext) -> Any:
    """Read a request from JSON, a file or a form. Raises Refusal."""
    if context.content_type[:16] != b"application/json":
        task = TASKS.get(context.description.get("task", ""))
        sent = read_sent(context.content_type, body, task.takes if task else None)
        if sent is not None:
            return _of_file(decoder, sent)
    return await read_json(decoder, body)


def _of_file(decoder: msgspec.json.Decoder[Any], sent: Sent) -> Any:
    parameters: Any = {}
    if sent.parameters is not None:
        try:
            parameters = decoded(_read_parameters, sent.parameters)
        except Refusal as refused:
            raise invalid("parameters", f"is not a JSON object: {refused}") from None
    return decoder.type(sent.inputs, parameters)


def _items(inputs: Any, parameters: dict[str, Any], context: RequestContext) -> list[Any]:
    """Items of an input, or of a list of inputs. Raises Refusal."""
    context.check_count(len(inputs) if isinstance(inputs, list) else 1)
    items = inputs if isinstance(inputs, list) else [inputs]
    more = as_arrays(context.description)
    if more:
        return [
            {"do": "predict", "inputs": each, "parameters": parameters, **more} for each in items
        ]
    return with_parameters(items, parameters, context)


def with_parameters(
    items: list[Any], parameters: dict[str, Any], context: RequestContext
) -> list[Any]:
    """Items that are inputs, or have them beside the request's parameters. Raises Refusal."""
    description = context.description
    if parameters and not description.get("takes_parameters"):
        raise unsupported("parameters", "this model takes none; leave them out")
    # A bare input means the same and halves the transport's cost of a text. A model without a
    # description takes any item as it is, as does one of steps; ours take anything but a dict.
    takes_any = not description or description.get("bare_items", False)
    if parameters or (not takes_any and dict in map(type, items)):
        items = [{"do": "predict", "inputs": each, "parameters": parameters} for each in items]
    return items


# -- text classification in text-embeddings-inference's form

_OF_HUB = ("truncate", "truncation_direction", "raw_scores")


def _is_hub_form(request: ClassificationRequest) -> bool:
    """Whether a request can only be of text-embeddings-inference's form."""
    return any(getattr(request, name) is not None for name in _OF_HUB) or (
        isinstance(request.inputs, list) and any(isinstance(each, list) for each in request.inputs)
    )


async def _classify(request: ClassificationRequest, context: RequestContext) -> JSONAnswer:
    """All labels with their scores, best first: of one text, or of each text and pair of a list."""
    if request.stream:
        raise unsupported("stream")
    is_one = isinstance(request.inputs, str)
    inputs = [request.inputs] if isinstance(request.inputs, str) else request.inputs
    if not inputs:
        raise invalid("inputs", "is empty; send at least one text")
    if not is_one:
        _check_lists(inputs)
    parameters: dict[str, Any] = {
        "top_k": None,
        **(request.parameters or {}),
        **truncation_parameters(request),
    }
    if request.raw_scores:
        parameters["function_to_apply"] = "none"
    texts = map(_input, inputs)
    outputs = await context.compute_each("predict", texts, parameters, TRUNCATE)
    return await context.answer(lambda: outputs[0] if is_one else outputs)


def _check_lists(inputs: list[Any]) -> None:
    """Raises Refusal: an input is a string. In the other form that is a part of a pair."""
    for number, each in enumerate(inputs):
        if isinstance(each, str):
            raise invalid(
                f"inputs[{number}]",
                'must be ["a text"] or ["a text", "its pair"], since the request has a list of '
                "lists, truncate, truncation_direction or raw_scores",
            )


def _input(value: str | list[str]) -> Any:
    """A text, or a pair as the model takes it."""
    if isinstance(value, str):
        return value
    if len(value) == 1:
        return value[0]
    return {"text": value[0], "text_pair": value[1]}
