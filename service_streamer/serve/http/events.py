"""Server-sent events of the answers that come in parts. Pure: outputs in, bytes out.

form                    events
----                    ------
OutputEvents            {"output": ...} for each output of any model
CompletionEvents        OpenAI's text_completion chunks
ChatEvents              OpenAI's chat.completion.chunk, the role first
TokenEvents             text-generation-inference's tokens, which Hugging Face's client reads

The last three are of a model that generates text. Each of its outputs has the new piece of a text:
"text", and with the last piece "finish_reason" ("stop" or "length"), "prompt_tokens" and
"completion_tokens" of all of it. If there are several texts, an output has "choices": such mappings
with the "index" of their text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol

import msgspec

from .logprobs import Echo, LegacyLogprobs, chat_logprobs, hub_token, hub_top_tokens

#: The end of a stream that has succeeded. A stream that has failed ends without it.
DONE = b"data: [DONE]\n\n"

#: A comment, which clients skip: it shows proxies that the connection is alive.
KEEP_ALIVE = b": keep-alive\n\n"

#: What counts tokens: no chunk, a last one, or each chunk those of its text, too.
UsageIn = Literal["none", "last", "each"]

#: Characters that JSON has as they are, and that clients in Python take for line breaks.
_LINE_BREAKS = {"\x85": rb"\u0085", "\u2028": rb"\u2028", "\u2029": rb"\u2029"}

#: JSON on one line, in which no line break can end the event.
_Encode = Callable[[Any], bytes]
_encode: _Encode = msgspec.json.Encoder().encode


def hub_reason(reason: str, *, at_string: bool) -> str:
    """text-generation-inference's name of a finish reason."""
    if reason == "stop":
        return "stop_sequence" if at_string else "eos_token"
    return reason


def event(data: bytes) -> bytes:
    """One event; ``data`` is JSON without line breaks."""
    return b"data: %b\n\n" % data


def on_one_line(events: bytes) -> bytes:
    """The events with every line break in their JSON escaped: ``str.splitlines`` knows many."""
    if not events.isascii():
        for character, escaped in _LINE_BREAKS.items():
            events = events.replace(character.encode(), escaped)
    return events


class Numbered(NamedTuple):
    """An output of one of several items whose outputs are sent together."""

    number: int
    output: Any


class Form(Protocol):
    """Turns the outputs of one stream into events. For one stream only: it may count."""

    def output(self, output: Any) -> bytes:
        """The events of an output."""

    def end(self) -> bytes:
        """The events after the last output of a stream that has succeeded."""


class OutputEvents:
    """Each output as it is.

    Args:
        encode: turns an event into JSON, as the answer without a stream is.
    """

    def __init__(self, encode: _Encode) -> None:
        self._encode = encode

    def output(self, output: Any) -> bytes:
        return event(self._encode({"output": output}))

    def end(self) -> bytes:
        return DONE


class CompletionEvents:
    """OpenAI's chunks of ``/v1/completions``.

    Args:
        head: the chunks' id, object, created and model.
        usage: which chunks count tokens.
        texts: number of texts for each prompt.
        echoes: of each prompt, what begins its texts; empty for nothing.
    """

    def __init__(
        self,
        head: Mapping[str, Any],
        *,
        usage: UsageIn,
        texts: int = 1,
        echoes: Sequence[Echo] = (),
    ) -> None:
        self._chunk = _Chunk(head, usage=usage)
        self._texts = texts
        self._echoes = echoes
        self._logprobs: dict[int, LegacyLogprobs] = {}  # of texts that have begun

    def output(self, output: Any) -> bytes:
        number = 0
        if isinstance(output, Numbered):
            number, output = output
        return b"".join(self._event(number, piece) for piece in _pieces(output))

    def _event(self, number: int, piece: Mapping[str, Any]) -> bytes:
        place, text, reason = self._chunk.taken(piece, number)
        index = number * self._texts + place
        echo = self._echoes[number] if self._echoes and index not in self._logprobs else None
        found = self._logprobs.setdefault(index, LegacyLogprobs(with_special=bool(self._echoes)))
        if echo is not None:
            text = echo.text + text
        logprobs = None
        if "logprobs" in piece:
            logprobs = found.of(piece["logprobs"], text, echo)
        return self._chunk.of(
            {"text": text, "index": index, "logprobs": logprobs, "finish_reason": reason}
        )

    def end(self) -> bytes:
        return self._chunk.end()


class ChatEvents:
    """OpenAI's chunks of ``/v1/chat/completions``.

    Args:
        head, usage: as of ``CompletionEvents``.
    """

    def __init__(self, head: Mapping[str, Any], *, usage: UsageIn) -> None:
        self._chunk = _Chunk(head, usage=usage)
        self._begun: set[int] = set()

    def output(self, output: Any) -> bytes:
        return b"".join(map(self._event, _pieces(output)))

    def _event(self, piece: Mapping[str, Any]) -> bytes:
        index, text, reason = self._chunk.taken(piece)
        events = b""
        if index not in self._begun:
            self._begun.add(index)
            events += self._delta(index, {"role": "assistant", "content": ""}, None)
        logprobs = None
        if piece.get("logprobs"):
            logprobs = chat_logprobs(piece["logprobs"])
        if text or (logprobs is not None and logprobs["content"]):
            events += self._delta(index, {"content": text}, None, logprobs)
        if reason is not None:
            events += self._delta(index, {}, reason)
        return events

    def end(self) -> bytes:
        return self._chunk.end()

    def _delta(
        self,
        index: int,
        delta: Mapping[str, str],
        reason: str | None,
        logprobs: dict[str, Any] | None = None,
    ) -> bytes:
        return self._chunk.of(
            {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        )


class TokenEvents:
    """text-generation-inference's events. Of one sequence: its form has no index for others.

    Without log probabilities an event may be of several tokens; it has the last one's id then.

    Args:
        seed: which the last event repeats.
        prompt: begins the whole text of the last event, if that is wanted; else empty.
        with_top: whether events have the likeliest tokens.
    """

    def __init__(
        self, seed: int | None = None, prompt: str = "", *, with_top: bool = False
    ) -> None:
        self._seed = seed
        self._with_top = with_top
        self._count = 0
        self._texts: list[str] = [prompt]

    def output(self, output: Any) -> bytes:
        details = text = None
        if "text" not in output:  # it was computed as a whole, in the form of a pipeline
            text = output["result"][0]["generated_text"]
            output = {"text": text, "tokens": 1, "ids": []}
        self._count += output["tokens"]
        self._texts.append(output["text"])
        reason = output.get("finish_reason")
        if reason is not None:
            text = "".join(self._texts)
            details = {
                "finish_reason": hub_reason(reason, at_string=output.get("has_stop_string", False)),
                "generated_tokens": output["completion_tokens"],
                "input_length": output["prompt_tokens"],
                "seed": self._seed,
            }
        last_id = output["ids"][-1] if output["ids"] else 0
        token = {"id": last_id, "text": "", "logprob": None, "special": False}
        data: dict[str, Any] = {"index": self._count, "token": token}
        if output.get("logprobs"):  # of one token, then
            last = output["logprobs"][-1]
            token.update(hub_token(last))
            if self._with_top:
                data["top_tokens"] = hub_top_tokens(last)
        token["text"] = output["text"]  # joined, they are the text of the answer
        if output["text"]:  # held back until the end token, and clients may skip special tokens
            token["special"] = False
        return event(_encode({**data, "generated_text": text, "details": details}))

    def end(self) -> bytes:
        return DONE


def _pieces(output: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """The new pieces of an output's texts."""
    pieces: Sequence[Mapping[str, Any]] = output.get("choices", (output,))
    return pieces


class _Chunk:
    """What OpenAI's two forms have in common. What all chunks have is encoded once."""

    def __init__(self, head: Mapping[str, Any], *, usage: UsageIn) -> None:
        self._usage = usage
        self._head = b"data: %b," % _encode(head)[:-1]
        self._taken: dict[int, int] = {}  # tokens by prompt
        self._made: dict[tuple[int, int], int] = {}  # and by text
        self._place = 0, 0  # prompt and text of the last piece

    def taken(self, piece: Mapping[str, Any], number: int = 0) -> tuple[int, str, str | None]:
        """Index, text and finish reason of a piece, whose tokens are counted.

        Args:
            number: of the prompt.
        """
        index: int = piece.get("index", 0)
        reason: str | None = piece.get("finish_reason")
        self._place = place = number, index
        self._taken[number] = piece.get("prompt_tokens", self._taken.get(number, 0))
        self._made[place] = self._made.get(place, 0) + piece["tokens"]
        return index, piece["text"], reason

    def of(self, choice: Mapping[str, Any]) -> bytes:
        usage = b""
        if self._usage == "each":
            taken, made = self._taken[self._place[0]], self._made[self._place]
            usage = b',"usage":' + _counted(taken, made)
        elif self._usage == "last":
            usage = b',"usage":null'
        return b'%b"choices":[%b]%b}\n\n' % (self._head, _encode(choice), usage)

    def end(self) -> bytes:
        if self._usage == "none":
            return DONE
        usage = _counted(sum(self._taken.values()), sum(self._made.values()))
        return b'%b"choices":[],"usage":%b}\n\n%b' % (self._head, usage, DONE)


def _counted(taken: int, made: int) -> bytes:
    return _encode(
        {"prompt_tokens": taken, "completion_tokens": made, "total_tokens": taken + made}
    )
