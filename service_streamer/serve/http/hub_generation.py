"""Generated text in the form of text-generation-inference: parameters, answers, and /generate."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from ...errors import InvalidInput
from ...pipelines.requests import Parameter
from ...pipelines.structure import FORMS
from .context import RequestContext
from .events import TokenEvents, hub_reason
from .generation_schemas import GenerateRequest, GenerateResponse, text_form
from .json_bodies import JSONAnswer, read_json
from .logprobs import hub_token, hub_top_tokens
from .refusals import invalid, renamed, unsupported
from .streaming import EventStream

#: Further parameters of these requests, besides the model's own.
HUB_PARAMETERS: Mapping[str, Parameter] = {
    "details": Parameter("boolean", "Return the text's tokens with their log probabilities."),
    "stop_sequences": Parameter("strings", "The same as stop.", low=0, high=16),
    "decoder_input_details": Parameter("boolean", "Not supported: must be false."),
    "watermark": Parameter("boolean", "Not supported: must be false."),
}  # fmt: skip


class HubWishes(NamedTuple):
    """What a request wants to be told of its text.

    Attributes:
        names: of the model's parameters in this request, where they differ.
        has_details: its tokens, with their log probabilities.
        has_top: the likeliest tokens in place of each.
        has_prompt: the whole text, with the prompt.
        seed: which the details repeat.
    """

    names: Mapping[str, str]
    has_details: bool = False
    has_top: bool = False
    has_prompt: bool = False
    seed: int | None = None

    def events(self, prompt: object) -> TokenEvents:
        """The events of a stream.

        Args:
            prompt: which the text may begin with, unless it is a chat.
        """
        begins = prompt if self.has_prompt and isinstance(prompt, str) else ""
        return TokenEvents(self.seed, begins, with_top=self.has_top)


def hub_generation(sent: Mapping[str, Any]) -> tuple[dict[str, Any], HubWishes]:
    """The model's parameters, and what the answer has to have.

    Raises:
        InvalidInput, Refusal: a parameter is wrong, or is not supported.
    """
    parameters = {name: value for name, value in sent.items() if value is not None}
    ours = {
        name: parameter.check(name, parameters.pop(name))
        for name, parameter in HUB_PARAMETERS.items()
        if name in parameters
    }
    for name in ("decoder_input_details", "watermark"):
        if ours.get(name):
            raise unsupported(f"parameters.{name}")
    if parameters.get("stop") in ([], ()):
        del parameters["stop"]
    if ours.get("stop_sequences"):
        _leave_one(parameters, ("stop",), "stop_sequences")
        parameters["stop"] = ours["stop_sequences"]
    names = {}
    has_details = bool(ours.get("details")) or "logprobs" in parameters
    if has_details and "logprobs" not in parameters:
        parameters["logprobs"] = 0
        names["parameters.logprobs"] = "parameters.details"
    form = text_form(parameters.pop("grammar", None), "parameters.grammar")
    if form:
        _leave_one(parameters, FORMS, "grammar")
    names |= dict.fromkeys((f"parameters.{name}" for name in form), "parameters.grammar")
    seed = parameters.get("seed")
    wishes = HubWishes(
        names,
        has_details,
        bool(parameters.get("logprobs")),
        parameters.get("return_full_text") is True,
        seed if type(seed) is int else None,
    )
    return parameters | form, wishes


def _leave_one(parameters: Mapping[str, Any], ours: Iterable[str], theirs: str) -> None:
    """Raises Refusal: one of these parameters is sent beside another one for the same."""
    for name in ours:
        if name in parameters:
            raise invalid(f"parameters.{theirs}", f"is sent with {name}; leave one of them out")


def hub_details(
    rows: Sequence[Mapping[str, Any]], wishes: HubWishes, name: str
) -> list[dict[str, Any]]:
    """The texts of one input, with their details if those are wanted.

    Args:
        rows: of the model; each has its text under ``name``.
    """
    return [_text(row, wishes, name) for row in rows]


def _text(row: Mapping[str, Any], wishes: HubWishes, name: str) -> dict[str, Any]:
    answer: dict[str, Any] = {"generated_text": row[name]}
    if wishes.has_details:
        answer["details"] = _details(row, wishes)
    return answer


def _details(row: Mapping[str, Any], wishes: HubWishes) -> dict[str, Any]:
    tokens = row["logprobs"]
    at_string = row.get("has_stop_string", False)
    details = {
        "finish_reason": hub_reason(row["finish_reason"], at_string=at_string),
        "generated_tokens": row["completion_tokens"],
        "seed": wishes.seed,
        "prefill": [],
        "tokens": [*map(hub_token, tokens)],
    }
    if wishes.has_top:
        details["top_tokens"] = [*map(hub_top_tokens, tokens)]
    return details


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
