"""Log probabilities of tokens, in the forms of OpenAI and text-generation-inference. Pure.

The model returns them as described in ``pipelines.answers``: for each token ``{"token", "id",
"logprob", "top"}``, with ``"bytes"`` for a part of a character, and ``"special"`` for a token that
the text leaves out.
"""

from __future__ import annotations

import codecs
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

_Tokens = Sequence[Mapping[str, Any]]

#: In place of minus infinity, which JSON lacks: OpenAI's number.
_LEAST = -9999.0


def chat_logprobs(tokens: _Tokens) -> dict[str, Any]:
    """``logprobs`` of a choice of ``/v1/chat/completions``, without the token that ends it."""
    content = [
        {**_of_chat(token), "top_logprobs": [*map(_of_chat, token["top"])]}
        for token in tokens
        if not token.get("special")
    ]
    return {"content": content, "refusal": None}


def _of_chat(token: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "token": token["token"],
        "logprob": _finite(token["logprob"]),
        "bytes": [*_bytes(token)],
    }


def _bytes(token: Mapping[str, Any]) -> bytes:
    raw = token.get("bytes")
    return token["token"].encode() if raw is None else bytes(raw)


class Echo(NamedTuple):
    """A prompt that begins the text of an answer.

    Attributes:
        tokens: the prompt's, the first one with the log probability None; None if not asked for.
        size: number of its tokens, if that was asked for.
    """

    text: str
    tokens: _Tokens | None = None
    size: int = 0


class LegacyLogprobs:
    """``logprobs`` of one choice of ``/v1/completions``, part by part. Counts its characters.

    Args:
        with_special: whether special tokens are told, too. Programs that echo prompts count tokens.
    """

    def __init__(self, *, with_special: bool = False) -> None:
        self._with_special = with_special
        self._at = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def of(self, tokens: _Tokens, text: str, echo: Echo | None = None) -> dict[str, Any]:
        """The part of these tokens, and of a prompt before them.

        Args:
            text: of the part.
        """
        part: dict[str, list[Any]] = {
            "tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []
        }  # fmt: skip
        if echo is not None:
            for token in echo.tokens or ():
                self._add(part, token, echo.text)
            self._at = len(echo.text)
        for token in tokens:
            if self._with_special or not token.get("special"):
                self._add(part, token, "" if self._at else text)
        return part

    def _add(self, part: dict[str, list[Any]], token: Mapping[str, Any], text: str = "") -> None:
        """Add a token.

        Args:
            text: which it is part of, if it may be the first token.
        """
        name = _legacy_name(token)
        value = None if token["logprob"] is None else _finite(token["logprob"])
        top = {_legacy_name(each): _finite(each["logprob"]) for each in token["top"]}
        part["tokens"].append(name)
        part["token_logprobs"].append(value)
        part["top_logprobs"].append(None if value is None else {**top, name: value})
        raw = _bytes(token)
        if raw and not 0x80 <= raw[0] < 0xC0:  # a character that was begun has no end
            self._at += len(self._decoder.decode(b"", final=True))
        part["text_offset"].append(self._at)
        if token.get("special") and not text.startswith(name, self._at):
            return  # the text does not have it
        if text and name[:1] == " " and not text.startswith(" ", self._at):
            raw = raw[1:]  # as the first token of a text may stand for a blank that is not there
        # Of a character in several tokens only the last one adds to the length.
        self._at += len(self._decoder.decode(raw))


def _legacy_name(token: Mapping[str, Any]) -> str:
    raw = token.get("bytes")
    if raw is None:
        name: str = token["token"]
        return name
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def hub_token(token: Mapping[str, Any]) -> dict[str, Any]:
    """A token in text-generation-inference's form."""
    return {
        "id": token["id"],
        "text": token["token"],
        "logprob": _finite(token["logprob"]),
        "special": bool(token.get("special")),
    }


def hub_top_tokens(token: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The likeliest tokens in a token's place, in text-generation-inference's form."""
    return [hub_token(each) for each in token["top"]]


def best_rows(rows: Sequence[Mapping[str, Any]], count: int) -> list[Mapping[str, Any]]:
    """The rows with the highest log probability per token, best first."""
    return sorted(rows, key=_mean, reverse=True)[:count]


def _mean(row: Mapping[str, Any]) -> float:
    values = [_finite(token["logprob"]) for token in row["logprobs"]]
    return sum(values) / max(1, len(values))


def _finite(value: float) -> float:
    return value if value > _LEAST else _LEAST
