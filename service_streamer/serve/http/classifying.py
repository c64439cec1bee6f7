"""/predict of text classification, in text-embeddings-inference's form."""

from __future__ import annotations

from typing import Any

from ...errors import InvalidInput
from .context import RequestContext
from .hub_embeddings import TRUNCATE, said
from .hub_schemas import ClassificationRequest, cutting
from .json_bodies import JSONAnswer
from .refusals import invalid, unsupported

_FIELDS = ("truncate", "truncation_direction", "raw_scores")


def is_hub_form(request: ClassificationRequest) -> bool:
    """Whether a request can only be of text-embeddings-inference's form."""
    return any(getattr(request, name) is not None for name in _FIELDS) or (
        isinstance(request.inputs, list) and any(isinstance(each, list) for each in request.inputs)
    )


async def classify(request: ClassificationRequest, context: RequestContext) -> JSONAnswer:
    """All labels with their scores, best first: of one text, or of each text and pair of a list."""
    if request.stream:
        raise unsupported("stream")
    is_one = isinstance(request.inputs, str)
    inputs = [request.inputs] if isinstance(request.inputs, str) else request.inputs
    if not inputs:
        raise invalid("inputs", "is empty; send at least one text")
    if not is_one:
        _check_lists(inputs)
    parameters: dict[str, Any] = {"top_k": None, **(request.parameters or {}), **cutting(request)}
    if request.raw_scores:
        parameters["function_to_apply"] = "none"
    context.check_count(len(inputs))
    items = [{"do": "predict", "inputs": _input(each), "parameters": parameters} for each in inputs]
    try:
        outputs = await context.compute(items)
    except InvalidInput as error:
        raise said(error, TRUNCATE) from None
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
