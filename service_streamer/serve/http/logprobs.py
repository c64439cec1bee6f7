"""Log probabilities of tokens, in the forms of OpenAI and text-generation-inference. Pure.

The model returns them as described in ``pipelines.answers``: for each token ``{"token", "id",
"logprob", "top"}``, with ``"bytes"`` for a part of a character, and ``"special"`` for a token that
the text leaves out.
"""

from __future__ import annotations

import codecs
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["LegacyLogprobs", "best_rows", "chat_logprobs", "hub_token", "hub_top_tokens"]

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
    raw = token.get("bytes")
    return {
        "token": token["token"],
        "logprob": _finite(token["logprob"]),
        "bytes": [*token["token"].encode()] if raw is None else raw,
    }


class LegacyLogprobs:
    """``logprobs`` of one choice of ``/v1/completions``, part by part. Counts its characters."""

    def __init__(self) -> None:
        self._at = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def of(self, tokens: _Tokens) -> dict[str, Any]:
        """The part of these tokens, without the token that ends the text."""
        names: list[str] = []
        values: list[float] = []
        tops: list[dict[str, float]] = []
        offsets: list[int] = []
        for token in tokens:
            if token.get("special"):
                continue
            name, value = _legacy_name(token), _finite(token["logprob"])
            names.append(name)
            values.append(value)
            top = {_legacy_name(each): _finite(each["logprob"]) for each in token["top"]}
            tops.append({**top, name: value})
            raw = bytes(_of_chat(token)["bytes"])
            if raw and not 0x80 <= raw[0] < 0xC0:  # a character that was begun has no end
                self._at += len(self._decoder.decode(b"", final=True))
            offsets.append(self._at)
            # Of a character in several tokens only the last one adds to the length.
            self._at += len(self._decoder.decode(raw))
        return {
            "tokens": names,
            "token_logprobs": values,
            "top_logprobs": tops,
            "text_offset": offsets,
        }


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
