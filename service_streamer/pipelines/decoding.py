"""Texts of tokens: of single ones, and of texts that differ in one of them."""

from __future__ import annotations

import re
from collections.abc import Sequence
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


#: Decoders (of the package tokenizers) that write each token by itself; only the first one of a
#: text may be written in another form.
_PIECEWISE = ("ByteLevel", "Metaspace", "WordPiece")


class Piece(NamedTuple):
    """What a token adds to a text: "" if it is left out.

    Attributes:
        first: as the first token of the text.
        later: behind others.
        is_skipped: whether it is left out.
    """

    first: str
    later: str
    is_skipped: bool


class _Joined(NamedTuple):
    text: str
    has_any: bool


class TokenDecoder:
    """Decodes texts with one token exchanged. Belongs to one thread.

    Most decoders write token by token. Then the text before and behind the token is put together
    once, of pieces that are remembered. Decoding each text takes ten times as long.

    Args:
        tokenizer: a tokenizer of transformers.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._padding: int | None = tokenizer.pad_token_id
        self._cleans = cleans_spaces(tokenizer)
        self._words: dict[int, str] = {}
        self._pieces: dict[tuple[int, bool], Piece | None] = {}
        self._backend: Any = getattr(tokenizer, "backend_tokenizer", None)
        is_piecewise = type(getattr(self._backend, "decoder", None)).__name__ in _PIECEWISE
        self._anchor = TokenWords(tokenizer).anchor if is_piecewise else None

    def word(self, token: int) -> str:
        """The text of one token."""
        word = self._words.get(token)
        if word is None:
            word = self._words[token] = str(self._tokenizer.decode([token]))
        return word

    def variants(
        self, ids: Sequence[int], at: int, tokens: Sequence[int], *, skips_special: bool
    ) -> list[str]:
        """The texts of ``ids`` with each of the tokens in its place, without padding.

        Args:
            at: the place.
            skips_special: leave special tokens out.
        """
        before = self._joined(ids[:at], skips_special=skips_special, is_first=True)
        behind = self._joined(ids[at + 1 :], skips_special=skips_special, is_first=False)
        texts: list[str] = []
        for token in tokens:
            piece = self._piece(token, skips_special=skips_special)
            if before and behind and piece and (before.has_any or not piece.is_skipped):
                text = piece.later if before.has_any else piece.first
                texts.append(self._cleaned(before.text + text + behind.text))
            else:  # or the token behind it may be the first
                whole = [*ids[:at], token, *ids[at + 1 :]]
                texts.append(self._whole(whole, skips_special=skips_special))
        return texts

    def _joined(self, ids: Sequence[int], *, skips_special: bool, is_first: bool) -> _Joined | None:
        """The text of tokens; None if it is not known without the others."""
        parts: list[str] = []
        for token in ids:
            piece = self._piece(token, skips_special=skips_special)
            if piece is None:
                return None
            if not piece.is_skipped:
                parts.append(piece.first if is_first else piece.later)
                is_first = False
        return _Joined("".join(parts), bool(parts))

    def _piece(self, token: int, *, skips_special: bool) -> Piece | None:
        key = token, skips_special
        if key not in self._pieces:
            self._pieces[key] = self._made_piece(token, skips_special=skips_special)
        return self._pieces[key]

    def _made_piece(self, token: int, *, skips_special: bool) -> Piece | None:
        if self._anchor is None:
            return None
        if token == self._padding:
            return Piece("", "", is_skipped=True)
        decode, anchor = self._backend.decode, self._anchor
        start = decode([anchor], skip_special_tokens=False)
        both = decode([anchor, token], skip_special_tokens=skips_special)
        first = decode([token], skip_special_tokens=skips_special)
        # A part of a character is written only together with the rest of it.
        if not both.startswith(start) or "\ufffd" in both:
            return None
        is_skipped = not first and bool(decode([token], skip_special_tokens=False))
        return Piece(first, both[len(start) :], is_skipped)

    def _whole(self, ids: Sequence[int], *, skips_special: bool) -> str:
        kept = [token for token in ids if token != self._padding]
        return str(self._tokenizer.decode(kept, skip_special_tokens=skips_special))

    def _cleaned(self, text: str) -> str:
        return str(self._tokenizer.clean_up_tokenization(text)) if self._cleans else text


def cleans_spaces(tokenizer: Any) -> bool:
    """Whether decoding removes spaces before punctuation, as transformers decides it."""
    if not getattr(tokenizer, "clean_up_tokenization_spaces", False):
        return False
    model = getattr(getattr(tokenizer, "backend_tokenizer", None), "model", None)
    name = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"
    return type(model).__name__ != "BPE" or bool(getattr(tokenizer, name, True))
