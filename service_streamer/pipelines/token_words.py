"""The texts of single tokens, as they stand behind other tokens."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any, NamedTuple

#: What decoders write for a part of a character.
BROKEN = "\ufffd"

_BYTE = re.compile("<0x([0-9A-F]{2})>")

#: How many texts are remembered: those of the likeliest tokens come again and again. Arbitrary.
_KNOWN = 20_000


class Word(NamedTuple):
    """The text of a token.

    Attributes:
        raw: its bytes, if it is a part of a character; else None.
        is_special: whether texts leave it out.
    """

    text: str
    raw: list[int] | None
    is_special: bool


class TokenWords:
    """Texts of the tokens of one tokenizer. Belongs to one thread.

    Args:
        tokenizer: of transformers.

    Attributes:
        anchor: a token with a text of its own: what comes behind it is not the first one. None if
            there is none.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        # Tokens that were added as special ones need not be among those with a role of their own.
        added = getattr(tokenizer, "added_tokens_decoder", {}).items()
        special = (token for token, each in added if each.special)
        self._special = frozenset((*tokenizer.all_special_ids, *special))
        self.anchor = self._find_anchor()
        self.word = lru_cache(_KNOWN)(self._word)

    def _word(self, token: int) -> Word:
        text = self._text(token)
        raw = self._raw(token) if BROKEN in text else None
        return Word(text, raw, token in self._special)

    def _text(self, token: int) -> str:
        if self.anchor is not None and token not in self._special:
            # The first token of a text may lose its blank.
            before, both = self._decoded(self.anchor), self._decoded(self.anchor, token)
            if both.startswith(before):
                return both[len(before) :]
        return self._decoded(token)

    def _raw(self, token: int) -> list[int] | None:
        name = self._tokenizer.convert_ids_to_tokens(token)
        if not isinstance(name, str):
            return None
        found = _BYTE.fullmatch(name)
        if found is not None:
            return [int(found[1], 16)]
        known = _bytes_of_letters()
        return [known[letter] for letter in name] if known.keys() >= set(name) else None

    def _decoded(self, *ids: int) -> str:
        return str(
            self._tokenizer.decode(
                list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
        )

    def _find_anchor(self) -> int | None:
        for token in range(len(self._tokenizer)):
            text = self._decoded(token)
            if token not in self._special and text.isascii() and text.isalpha():
                return token
        return None


@lru_cache(1)
def _bytes_of_letters() -> dict[str, int]:
    """Byte-level vocabularies write each byte as a letter that can be seen, as GPT-2's does."""
    seen = (*range(33, 127), *range(161, 173), *range(174, 256))
    hidden = [byte for byte in range(256) if byte not in seen]
    return {chr(byte): byte for byte in seen} | {chr(256 + at): b for at, b in enumerate(hidden)}
