"""The answer to one request for texts: its rows, and the outputs that it gives step by step.

An output of one text is ``{"text": ..., "tokens": ..., "ids": [...]}``: what is new, the number of
new tokens, and those. The first and the last one have ``prompt_tokens``, too, and the last one
``finish_reason``, ``completion_tokens``, and ``has_stop_string`` if a stop string ended the text.
With several texts it is ``{"choices": [{"index": ..., ...}, ...]}``. The last output of an
operation with a form of its own has that as ``result``.

With the parameter ``logprobs`` an output has ``"logprobs"``, too: ``{"token": its text, "id",
"logprob", "top": [{"token", "id", "logprob"}, ...]}`` for each new token. A token that is a part of
a character has its ``"bytes"``, and one that the text leaves out has ``"special": True``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from ..errors import InvalidInput
from ..gpu.device_errors import is_out_of_memory
from .cached_rows import GeneratedRow
from .requests import Request
from .row_sampling import TokenChoice
from .structure import Structures
from .text_handler import Beginning, TextHandler
from .text_pieces import TextDecoder, TextPieces


class Resumed(NamedTuple):
    """An item that goes on behind the tokens that its outputs had.

    Attributes:
        ids: of each of its texts.
    """

    item: Any
    ids: list[list[int]]


class _Text:
    """One text of an answer."""

    def __init__(self, row: GeneratedRow, text: TextPieces, limit: int, ends: set[int]) -> None:
        self.row = row
        self.text = text
        self.limit = limit
        self.ends = ends
        self.reason = ""
        self.is_closed = False
        self.piece = ""
        self.ids: list[int] = []
        self.logprobs: list[dict[str, Any]] = []

    @property
    def new(self) -> list[int]:
        return self.row.tokens[len(self.row.prompt) :]

    def add(self, choice: TokenChoice, decoder: TextDecoder) -> None:
        """Take the token that the row has got."""
        constraint = self.row.sampling.constraint
        if constraint is not None and constraint.failure is not None:
            return  # the token means nothing
        token = choice.token
        self.ids.append(token)
        if choice.logprob is not None:
            self.logprobs.append(
                {
                    **shown_token(token, choice.logprob, decoder),
                    "top": [shown_token(each, value, decoder) for each, value in choice.top],
                }
            )
        if token in self.ends:
            self.reason = "stop"
        else:
            self.piece += self.text.push(token)
            if self.text.has_stopped or (constraint is not None and constraint.is_over):
                self.reason = "stop"
            elif len(self.row.tokens) - len(self.row.prompt) >= self.limit:
                self.reason = "length"
        if self.reason:
            self.piece += self.text.finish()

    def take(self, prompt_tokens: int) -> dict[str, Any] | None:
        """What is new since the last output; None if there is nothing to show."""
        if self.is_closed or not (self.piece or self.reason or self.logprobs):
            return None
        self.is_closed = bool(self.reason)
        made = len(self.row.tokens) - len(self.row.prompt)
        output: dict[str, Any] = {"text": self.piece, "tokens": len(self.ids), "ids": self.ids}
        if self.row.sampling.alternatives is not None:
            output["logprobs"] = self.logprobs
        if self.reason:
            output["finish_reason"] = self.reason
            if self.text.has_stopped:
                output["has_stop_string"] = True
            output["completion_tokens"] = made
        if self.reason or len(self.ids) == made:
            output["prompt_tokens"] = prompt_tokens
        self.piece, self.ids, self.logprobs = "", [], []
        return output


class Answer:
    """The state of one request for texts.

    Args:
        handler: of its operation.
        request: which ``handler.prepare`` has checked.
        beginning: what ``handler.begin`` returned for it.
        structures: makes constraints, one for each text.
        decoder: of the model's tokenizer.
        ids: tokens that its texts have already, if it goes on where another worker has died.
    """

    def __init__(
        self,
        handler: TextHandler,
        request: Request,
        beginning: Beginning,
        structures: Structures,
        decoder: TextDecoder,
        ids: Sequence[list[int]] = (),
    ) -> None:
        self.handler = handler
        self.request = request
        self.decoder = decoder
        self._failure: Exception | None = None
        self._result: Any = None
        ends = set() if request.parameters.get("ignore_eos") else handler.end_tokens()
        biases = beginning.sampling.logit_bias
        if biases and biases[-1][0] >= structures.size:
            raise InvalidInput(
                f"parameters.logit_bias: the model has no token {biases[-1][0]}; it has "
                f"{structures.size}, from 0 on"
            )
        seed = beginning.seed
        self.texts: list[_Text] = []
        form = structures.make(request.parameters)
        self._has_form = form is not None
        for index in range(beginning.texts):
            plan = beginning.sampling._replace(constraint=None if form is None else form.copied())
            row = GeneratedRow(
                beginning.prompt,
                plan,
                None if seed is None else (seed << 5) + index,
                beginning.encoded,
                beginning.encoder_output,
            )
            pieces = TextPieces(decoder, beginning.stops, beginning.prompt, unstopped=plan.least)
            text = _Text(row, pieces, beginning.most, ends)
            self.texts.append(text)
            for token in ids[index] if index < len(ids) else ():
                row.tokens.append(token)
                row.random.random()  # which chose it
                if plan.constraint is not None:
                    plan.constraint.accept(token)
                text.add(TokenChoice(token), decoder)
            text.piece, text.ids, text.is_closed = "", [], bool(text.reason)  # it was handed out

    @property
    def rows(self) -> list[GeneratedRow]:
        """Those that want more tokens."""
        return [text.row for text in self.texts if not text.reason]

    @property
    def is_done(self) -> bool:
        """Whether all its texts are over."""
        return all(text.reason for text in self.texts)

    @property
    def failure(self) -> Exception | None:
        """Why one of its texts cannot go on, or it has no result; None if all is well."""
        if self._failure is not None or not self._has_form:
            return self._failure
        constraints = (text.row.sampling.constraint for text in self.texts if not text.reason)
        found = (each.failure for each in constraints if each is not None)
        return next((each for each in found if each is not None), None)

    def add(self, row: GeneratedRow, choice: TokenChoice) -> bool:
        """Take a token that one of its rows has got.

        Never raises: the tokens of other answers are still to be taken.

        Returns:
            Whether that text is over. It is also over if the answer has failed.
        """
        text = next(text for text in self.texts if text.row is row)
        try:
            text.add(choice, self.decoder)
        except Exception as error:
            self._failure = error
            return True
        return bool(text.reason)

    def finish(self) -> None:
        """Make the result if all texts are over. If that fails, the answer has a ``failure``.

        Raises:
            Exception: the device has too little memory. ``finish`` may be called again.
        """
        is_taken = all(text.is_closed for text in self.texts)
        if self.failure is not None or not self.is_done or is_taken or self._result is not None:
            return
        try:
            self._result = self.handler.result(self.request, [text.new for text in self.texts])
        except Exception as error:
            if is_out_of_memory(error):
                raise
            self._failure = error

    def take(self) -> Any:
        """Its next output; None if there is nothing to show. The last one after ``finish``."""
        taken = [(at, text.take(self.request.tokens)) for at, text in enumerate(self.texts)]
        outputs = [{"index": at, **output} for at, output in taken if output is not None]
        if not outputs:
            return None
        output: dict[str, Any] = {"choices": outputs}
        if len(self.texts) == 1:
            output = outputs[0]
            del output["index"]
        if self.is_done and self._result is not None:
            output["result"] = self._result
        return output


def ids_of(outputs: Sequence[Any]) -> list[list[int]]:
    """The tokens of each text that outputs have."""
    ids: dict[int, list[int]] = {}
    for output in outputs:
        for choice in output.get("choices", [output]):
            ids.setdefault(choice.get("index", 0), []).extend(choice.get("ids", ()))
    return [ids.get(at, []) for at in range(max(ids, default=-1) + 1)]


def whole_output(result: Any, *, is_text: bool) -> dict[str, Any]:
    """The only output of a request that was computed as a whole.

    Args:
        is_text: whether the result is texts with their ends; then the output is as of others.
    """
    if not is_text:
        return {"result": result}
    texts = [
        {**each, "index": at, "tokens": each["completion_tokens"], "ids": []}
        for at, each in enumerate(result)
    ]
    if len(texts) > 1:
        return {"choices": texts}
    del texts[0]["index"]
    return texts[0]


def joined_outputs(outputs: Sequence[Any]) -> Any:
    """The result of a request, of all its outputs."""
    last = outputs[-1]
    if "result" not in last:
        return _joined_rows(outputs)
    pieces = [piece for output in outputs for piece in output.get("choices", [output])]
    if not any("logprobs" in piece for piece in pieces):
        return last["result"]
    rows = _joined_rows(outputs)
    # The record has the text already, in its own form.
    return [
        {**record, **{name: row[name] for name in row if name != "text"}}
        for record, row in zip(last["result"], rows, strict=True)
    ]


def _joined_rows(outputs: Sequence[Any]) -> list[dict[str, Any]]:
    results: dict[int, dict[str, Any]] = {}
    for output in outputs:
        for choice in output.get("choices", [output]):
            result = results.setdefault(choice.get("index", 0), {"text": ""})
            result["text"] += choice["text"]
            if "logprobs" in choice:
                result.setdefault("logprobs", []).extend(choice["logprobs"])
                if choice.get("has_stop_string"):  # only details of tokens say what ended a text
                    result["has_stop_string"] = True
            for name in ("finish_reason", "prompt_tokens", "completion_tokens"):
                if name in choice:
                    result[name] = choice[name]
    return [results[at] for at in sorted(results)]


def shown_token(token: int, logprob: float | None, decoder: TextDecoder) -> dict[str, Any]:
    """A token with its log probability, as outputs have it."""
    word = decoder.word(token)
    shown = {"token": word.text, "id": token, "logprob": logprob}
    if word.raw is not None:
        shown["bytes"] = word.raw
    if word.is_special:
        shown["special"] = True
    return shown
