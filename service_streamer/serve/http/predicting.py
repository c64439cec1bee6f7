"""/predict, and / in the form of Hugging Face's InferenceClient: inputs of any task."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from ...errors import InvalidInput
from ...pipelines.tasks import TASKS
from ..v2.infer_answer import encode
from .classifying import classify, is_hub_form
from .context import RequestContext
from .events import OutputEvents
from .generation_schemas import GenerationRequest, HubGenerationRequest, texts_of
from .headers import Sent, read_sent
from .hub_embeddings import gives_vectors, infer_features, vector_items
from .hub_generation import check_single, hub_details, hub_generation
from .hub_schemas import ClassificationRequest, HubFeaturesRequest
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
    if isinstance(request, ClassificationRequest) and is_hub_form(request):
        return await classify(request, context)
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
    if gives_vectors(context.description):
        return vector_items("predict", items, parameters, context.description)
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
