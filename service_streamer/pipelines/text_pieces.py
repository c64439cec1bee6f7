"""The text of tokens that come one by one, in pieces that stay as they are.

The prompt and the pieces are together the text of all tokens: many decoders write the first token
of a text in another way than those behind it.

What may still change is held back: a part of a character, and what may turn out to be the beginning
of a stop string. The pieces joined are the text of all the tokens, cut at the first stop string.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from .decoding import BROKEN, TokenWords, cleans_spaces

#: Decoders (of the package tokenizers) whose text of later tokens does not depend on earlier ones,
#: but for the token just before.
_LOCAL = ("ByteLevel", "Metaspace", "WordPiece", "Sequence", "ByteFallback", "Fuse", "BPEDecoder")

_BYTE = re.compile("<0x[0-9A-F]{2}>")

#: How many tokens of a prompt are decoded with the new ones. Where their text is empty, or begins
#: with a part of a character, which has up to four bytes, the next number is tried, then all.
_CONTEXT = (8, 9, 10, 11, 64)

#: The clean-up of spaces looks at most so far back (" n't", and one more to be sure).
_CLEANED = 5


class TextDecoder:
    """Decodes the tokens of one tokenizer. Belongs to one thread.

    Attributes:
        is_local: whether a text grows by the text of its last tokens.
        unsure: number of characters at the end that later tokens may change.
        bytes: tokens that are one byte each, for characters that the vocabulary lacks. If one of
            them is no part of a character, all that follow each other without another token between
            them are decoded in another way.
        skipped: tokens that are left out.
        word: the text of one token, as it stands behind others.
    """

    def __init__(self, tokenizer: Any) -> None:
        from transformers import PreTrainedTokenizerFast

        backend = getattr(tokenizer, "backend_tokenizer", None)
        cleans = cleans_spaces(tokenizer)
        self.is_local = type(getattr(backend, "decoder", None)).__name__ in _LOCAL and not cleans
        self.unsure = _CLEANED if cleans else 0
        self.skipped = frozenset(tokenizer.all_special_ids)
        words = tokenizer.get_vocab().items() if backend is not None else ()
        self.bytes = frozenset(token for word, token in words if _BYTE.fullmatch(word))
        self.word = TokenWords(tokenizer).word
        self.decode: Callable[[list[int]], str] = lambda ids: str(
            tokenizer.decode(ids, skip_special_tokens=True)
        )
        kind: Any = type(tokenizer)
        usual: Any = PreTrainedTokenizerFast
        if self.is_local and (kind._decode, kind.decode) == (usual._decode, usual.decode):
            # A tenth of the time, for the same text.
            self.decode = backend.decode  # type: ignore[union-attr]


class TextPieces:
    """The text of one answer.

    Args:
        decoder: of its tokenizer.
        stops: strings that end it; they are not part of it.
        prompt: tokens before the first one, whose text is not part of it.
        unstopped: so many tokens are not ended by one of the strings.

    Attributes:
        has_stopped: whether it has one of them.
    """

    def __init__(
        self,
        decoder: TextDecoder,
        stops: Sequence[str] = (),
        prompt: Sequence[int] = (),
        *,
        unstopped: int = 0,
    ) -> None:
        self._unstopped = unstopped
        self._decoder = decoder
        self._stops = stops
        tail = PromptTail(decoder.decode, prompt)
        self._tokens, self._prompt = [*tail.tokens], tail.text
        self._sent = 0  # number of characters
        self._held = ""  # settled, but perhaps the beginning of a stop string
        #: The text is settled up to ``_read``. Tokens are decoded from ``_start`` on, where it was
        #: settled before, since a text may begin otherwise than it goes on.
        self._start, self._read = 0, len(tail.tokens)
        self._before = tail.text  # from _start to _read
        self._is_broken = False  # whether all ends with a part of a character
        self._ends_with_byte = False
        self.has_stopped = False

    def push(self, token: int) -> str:
        """The piece that a token adds; "" for none, or not yet."""
        if self.has_stopped:
            return ""
        self._tokens.append(token)
        new = self._unsent()
        self._unstopped -= 1
        at = first_of(self._stops, new) if self._unstopped < 0 else None
        if at is not None:
            self.has_stopped = True
            return self._send(new[:at])
        if token not in self._decoder.skipped:
            self._ends_with_byte = token in self._decoder.bytes
        if self._is_broken or self._ends_with_byte:
            return ""
        if self._decoder.is_local:
            self._settle()
        sure = len(new) - max(self._decoder.unsure, _begun(self._stops, new))
        self._held = new[max(sure, 0) :]
        return self._send(new[: max(sure, 0)])

    def finish(self) -> str:
        """The rest, once there are no more tokens."""
        if self.has_stopped:
            return ""
        # Of all tokens: whatever a decoder does, the whole text is the right one.
        whole = _behind(self._decoder.decode(self._tokens), self._prompt)
        return self._send(whole[self._sent :])

    def _send(self, piece: str) -> str:
        self._sent += len(piece)
        return piece

    def _unsent(self) -> str:
        text = self._decoder.decode(self._tokens[self._start :])
        self._is_broken = text.endswith(BROKEN)
        if self._decoder.is_local:
            return self._held + _behind(text, self._before)
        return _behind(text, self._prompt)[self._sent :]

    def _settle(self) -> None:
        text = self._decoder.decode(self._tokens[self._read :])
        if text:  # special tokens alone are no beginning
            self._start = self._read
        else:
            text = self._decoder.decode(self._tokens[self._start :])
        self._read = len(self._tokens)
        self._before = text


class PromptTail:
    """The last tokens of a prompt, for the text of what comes behind them.

    Args:
        decode: gives the text of tokens, without special ones.
        prompt: its tokens.

    Attributes:
        tokens: to be decoded with those behind them.
        text: of them.
    """

    def __init__(self, decode: Callable[[list[int]], str], prompt: Sequence[int]) -> None:
        self._decode = decode
        for count in (*_CONTEXT, len(prompt)):
            self.tokens = [*prompt[-count:]] if count else []
            self.text = decode(self.tokens) if self.tokens else ""
            if self.text and not self.text.startswith(BROKEN):
                break

    def text_behind(self, tokens: Sequence[int]) -> str:
        """What these tokens add to the prompt's text."""
        return _behind(self._decode([*self.tokens, *tokens]), self.text)


def _behind(text: str, before: str) -> str:
    """The part of a text behind its beginning, as that was written by itself."""
    if not text.startswith(before):
        before = before.rstrip(BROKEN)  # a character has got its other parts
    if text.startswith(before):
        return text[len(before) :]
    count = len("".join(before.split()))  # some blanks were cleaned up
    for at, character in enumerate(text):
        if not count:
            return text[at:]
        count -= not character.isspace()
    return ""


def first_of(stops: Sequence[str], text: str, start: int = 0) -> int | None:
    """Where the first of the strings begins in a text; None if it has none of them."""
    found = (at for stop in stops if (at := text.find(stop, start)) >= 0)
    return min(found, default=None)


def _begun(stops: Sequence[str], text: str) -> int:
    """Length of the longest end of the text that a stop string begins with."""
    most = 0
    for stop in stops:
        for length in range(min(len(stop) - 1, len(text)), most, -1):
            if text.endswith(stop[:length]):
                most = length
                break
    return most
