"""Text generation: two operations.

"predict"     through the pipeline, in its own form
"generate"    through the model, with finish reason and number of tokens

Inputs are prompts, or chats of which the tokenizer's template makes prompts.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import InvalidInput
from .inputs import read_text
from .requests import Request, call_pipeline, plain, quote
from .tasks import MOST_NEW_TOKENS
from .text_handler import PromptedText
from .text_pieces import first_of
from .texts import fit_text

_MOST_MESSAGES = 256
_LEAST = {"role", "content"}  # fields of a message
_MOST_FIELDS = {*_LEAST, "name", "tool_calls", "tool_call_id"}


class Generator(PromptedText):
    """ "generate": continues prompts, with finish reasons."""

    side = "left"

    def same_length(self, request: Request, options: Mapping[str, Any]) -> int | None:
        # Options that read the prompt would read its padding, too.
        return request.tokens if self.looks_back(options) else None

    def forward(self, batch: list[Request]) -> list[Any]:
        """Compute requests of one group, in one call of the model."""
        return self.texts_of(batch, goes_on=True)

    def room(self, request: Request) -> int:
        room = MOST_NEW_TOKENS if self.limit is None else self.limit - request.tokens
        if room < 1:
            raise InvalidInput(
                f"inputs: the text has {request.tokens} tokens, and the limit is {self.limit} "
                "including generated tokens; shorten it"
            )
        return room

    def beyond(self, request: Request, room: int) -> str:
        return (
            f"the text has {request.tokens} tokens, which leaves {room} of the model's {self.limit}"
        )

    def encode_chat(self, request: Request) -> list[int]:
        messages = request.inputs
        if not self.tokenizer.chat_template:
            return super().encode_chat(request)
        if not 1 <= len(messages) <= _MOST_MESSAGES:
            raise InvalidInput(f"inputs: a chat must have 1 to {_MOST_MESSAGES} messages")
        whole = ""
        for number, message in enumerate(messages):
            if not isinstance(message, Mapping) or not _LEAST <= message.keys() <= _MOST_FIELDS:
                raise InvalidInput(
                    f'inputs[{number}]: must be {{"role": ..., "content": ...}}; '
                    f"not {quote(message)}"
                )
            for name, value in message.items():  # strings only: other content may name files
                field = f"inputs[{number}].{name}"
                if name == "content" and value == "":
                    continue  # an answer may have been empty
                if name == "tool_calls" and name not in str(self.tokenizer.chat_template):
                    text = "the model's chat template takes no tool calls; leave them out"
                    raise InvalidInput(f"{field}: {text}")
                whole += read_text(value, field=field, may_be_blank=True)
                fit_text(whole, self.limit, self.tokenizer, field=field)
        request.inputs = [*map(_for_template, messages, range(len(messages)))]
        goes_on = messages[-1]["role"] == "assistant"
        try:
            ids = self.counter.apply_chat_template(
                request.inputs,
                add_generation_prompt=not goes_on,
                continue_final_message=goes_on,
                return_dict=True,
            )["input_ids"]
        except Exception as error:  # the template's own checks raise errors of jinja2
            roles = [message["role"] for message in messages]
            field = f"inputs[{roles.index('tool')}].role" if "tool" in roles else "inputs"
            text = f"{field}: the model's template refuses the chat: {error}"
            raise InvalidInput(text) from None
        return list(ids)


class PipelineGenerator(Generator):
    """ "predict" of text generation, in the pipeline's own form."""

    samples_by_default = True
    takes_tokens = False  # the form has the prompt as it was sent

    def forward(self, batch: list[Request]) -> list[Any]:
        """Compute requests of one group, in one call of the pipeline."""
        parameters = batch[0].parameters
        options = self._options(parameters)
        if "return_full_text" in parameters:
            options["return_full_text"] = parameters["return_full_text"]
        inputs = [request.inputs for request in batch]
        with self._sampling(batch[0]):
            outputs = call_pipeline(self.pipeline, inputs, options, len(inputs))
        if stops := parameters.get("stop"):
            for request, records in zip(batch, outputs, strict=True):
                for record in records:
                    _cut(record, request.inputs, stops)
        return outputs

    def result(self, request: Request, rows: list[list[int]]) -> Any:
        """The pipeline's result for these rows of new tokens."""
        import torch
        from transformers.utils.chat_template_utils import Chat

        prompt, parameters = request.encoded, request.parameters
        is_text = isinstance(request.inputs, str)
        options = self.pipeline._sanitize_parameters(
            return_full_text=parameters.get("return_full_text")
        )[2]
        records: list[Any] = []
        for row in rows:
            outputs = {
                "generated_sequence": torch.tensor([[[*prompt, *row]]]),
                "input_ids": torch.tensor([prompt]),
                "prompt_text": request.inputs if is_text else Chat(request.inputs),
            }
            records += self.pipeline.postprocess(outputs, **options)
        for record in records:
            _cut(record, request.inputs, parameters.get("stop", ()))
        return plain(records)

    def _config(self, keywords: dict[str, Any]) -> Any:
        return super()._config(self.pipeline._prepare_generate_kwargs(keywords))


def _for_template(message: Mapping[str, Any], place: int) -> dict[str, Any]:
    """A copy of a message in which calls of tools, and their arguments, are no longer JSON."""
    copied = dict(message)
    if "tool_calls" in copied:
        try:
            copied["tool_calls"] = json.loads(copied["tool_calls"])
            functions: list[dict[str, Any]] = [each["function"] for each in copied["tool_calls"]]
            for function in functions:
                sent = function.setdefault("arguments", {})
                with contextlib.suppress(ValueError):  # the model that wrote them broke off
                    function["arguments"] = json.loads(sent or "{}") if type(sent) is str else sent
        except (ValueError, TypeError, KeyError, AttributeError):
            wanted = '[{"function": {"name": ..., "arguments": ...}}, ...]'
            raise InvalidInput(f"inputs[{place}].tool_calls: must be {wanted}") from None
    return copied


def _cut(record: dict[str, Any], inputs: Any, stops: Sequence[str]) -> None:
    """Cut a record's generated text at the first stop string; keep the whole prompt."""
    holder, name, text = record, "generated_text", record["generated_text"]
    if isinstance(text, list):  # a message without content has only what the model thought
        holder, name, text = text[-1], "content", text[-1].get("content") or ""
        inputs = inputs[-1]["content"] if inputs[-1]["role"] == "assistant" else ""
    prompt = inputs if isinstance(inputs, str) and text.startswith(inputs) else ""
    at = first_of(stops, text, len(prompt))
    if at is not None:
        holder[name] = text[:at]
