"""Generated text in the form of text-generation-inference: its parameters and its answers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ...pipelines.requests import Parameter
from ...pipelines.structure import FORMS
from .context import invalid, unsupported
from .events import TokenEvents, hub_reason
from .logprobs import best_rows, hub_token, hub_top_tokens
from .text_forms import text_form

#: Further parameters of these requests, besides the model's own.
HUB_PARAMETERS: Mapping[str, Parameter] = {
    "details": Parameter("boolean", "Return the text's tokens with their log probabilities."),
    "top_n_tokens": Parameter(
        "integer", "Return so many of the likeliest tokens in place of each token.", 0, 20
    ),
    "best_of": Parameter(
        "integer", "Generate so many texts, and return the one with the likeliest tokens.", 1, 16
    ),
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
        best_of: number of texts of which the best one is the answer; 1 for no choice.
        has_prompt: the whole text, with the prompt.
        seed: which the details repeat.
    """

    names: Mapping[str, str]
    has_details: bool = False
    has_top: bool = False
    best_of: int = 1
    has_prompt: bool = False
    seed: int | None = None

    def events(self, prompt: object) -> TokenEvents:
        """The events of a stream.

        Args:
            prompt: which the text may begin with, unless it is a chat.
        """
        begins = prompt if self.has_prompt and isinstance(prompt, str) else ""
        return TokenEvents(self.seed, begins, with_top=self.has_top)


def hub_generation(sent: Mapping[str, Any], *, is_stream: bool) -> tuple[dict[str, Any], HubWishes]:
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
    best_of = ours.get("best_of", 1)
    if best_of > 1:
        if is_stream:
            raise invalid("parameters.best_of", "cannot be streamed; leave it out")
        if parameters.get("num_return_sequences", 1) != 1:
            raise invalid("parameters.best_of", "gives one text; leave num_return_sequences out")
        parameters["num_return_sequences"] = best_of
        names["parameters.num_return_sequences"] = "parameters.best_of"
    if ours.get("top_n_tokens"):
        _leave_one(parameters, ("logprobs",), "top_n_tokens")
    has_details = bool(ours.get("details")) or "logprobs" in parameters
    wanted = {
        "top_n_tokens": ours.get("top_n_tokens") or None,
        "details": 0 if has_details else None,
        "best_of": 0 if best_of > 1 else None,
    }
    for name, count in wanted.items():
        if count is not None and "logprobs" not in parameters:
            parameters["logprobs"] = count
            names["parameters.logprobs"] = f"parameters.{name}"
    form = text_form(parameters.pop("grammar", None), "parameters.grammar")
    if form:
        _leave_one(parameters, FORMS, "grammar")
    names |= dict.fromkeys((f"parameters.{name}" for name in form), "parameters.grammar")
    has_top = bool(parameters.get("logprobs"))
    seed = parameters.get("seed")
    wishes = HubWishes(
        names,
        has_details or has_top,
        has_top,
        best_of,
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
    if wishes.best_of == 1:
        return [_text(row, wishes, name) for row in rows]
    first, *others = best_rows(rows, len(rows))
    answer = _text(first, wishes, name)
    if wishes.has_details:
        answer["details"]["best_of_sequences"] = [
            {"generated_text": row[name], **_details(row, wishes)} for row in others
        ]
    return [answer]


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
