"""Texts that come token by token: their pieces joined are the whole text, cut at a stop string."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from cases import long_cases
from service_streamer.pipelines.text_pieces import TextDecoder, TextPieces, first_of
from tiny_models import folder

pytestmark = pytest.mark.xdist_group("transformers")

KINDS = [
    "WordPiece", "ByteLevel", "Metaspace", "ByteFallback", "none", "slow", "example", "Whisper",
    "suffixes", "added words", "marks",
]  # fmt: skip
EXAMPLE = Path(__file__).parent.parent / "example" / "models" / "text_generation"
TEXT = "Zoë's naïve 42% of\t「你好」 🙂 . isn't it , they 've said ! 👩‍👩‍👧 end"


@pytest.fixture(scope="module", autouse=True)
def no_threads_of_progress_bars() -> None:
    import quiet_torch  # noqa: F401


@cache
def tokenizer_of(kind: str) -> Any:
    import transformers

    if kind == "slow":
        return transformers.ByT5Tokenizer()
    if kind == "suffixes":
        return pieces_with_suffixes()
    if kind == "marks":
        return with_marks()
    if kind in ("Metaspace", "ByteFallback"):
        return pieces_with_spaces(kind)
    sources: dict[str, Any] = {
        "Whisper": folder("whisper"), "ByteLevel": folder("gpt2"), "example": EXAMPLE,
        "added words": EXAMPLE,
    }  # fmt: skip
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(sources.get(kind, folder("")))
    if kind == "added words":  # which are no special ones
        tokenizer.add_tokens(["<think>", "é🙂", "\n\n"])
    if kind == "none":
        tokenizer.backend_tokenizer.decoder = None
    return tokenizer


def with_marks() -> Any:
    """Tokens that were added as special ones, of which transformers knows nothing."""
    import transformers
    from tokenizers import AddedToken, Tokenizer, models

    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="b"))
    tokenizer.add_special_tokens([AddedToken("<mark>", special=True)])
    tokenizer.add_tokens(["word"])
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    assert fast.all_special_ids == []
    assert fast.decode([2], skip_special_tokens=True) == ""
    return fast


def pieces_with_spaces(kind: str, *more: str) -> Any:
    """As SentencePiece makes them; with ``ByteFallback`` as Llama has them.

    Args:
        more: further tokens.
    """
    import tokenizers
    import transformers
    from tokenizers import decoders, models, pre_tokenizers

    words = ["<unk>", "</s>", *more, "▁", *"abcdefghijklmnoprstu.,'!", "▁the", "▁a", "ing", "▁is"]
    words += [f"<0x{byte:02X}>" for byte in range(256)]
    tokenizer = tokenizers.Tokenizer(
        models.Unigram([(word, -1.0) for word in words], 0, byte_fallback=True)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    if kind == "ByteFallback":
        parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        tokenizer.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", eos_token="</s>"
    )


def pieces_with_suffixes() -> Any:
    """They say where a word ends, as CLIP has them."""
    import tokenizers
    import transformers
    from tokenizers import decoders, models

    words = ["<unk>", "</s>", "|", *"abcde", *(f"{each}</w>" for each in "abc,.")]
    vocabulary = {word: at for at, word in enumerate(words)}
    tokenizer = tokenizers.Tokenizer(
        models.BPE(vocabulary, [], unk_token="<unk>", end_of_word_suffix="</w>")
    )
    tokenizer.decoder = decoders.BPEDecoder("</w>")
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", eos_token="</s>"
    )


def pieces_of(
    tokenizer: Any, ids: list[int], stops: tuple[str, ...] = (), prompt: list[int] | None = None
) -> list[str]:
    """The pieces of a text, and with those of a stop string the number of tokens that it took."""
    text = TextPieces(TextDecoder(tokenizer), stops, prompt or ())
    found = []
    for token in ids:
        found.append(text.push(token))
        if text.has_stopped:
            return found
    return [*found, text.finish()]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cleans", [False, *long_cases(True)])
def test_pieces_joined_are_the_text(kind: str, cleans: bool) -> None:
    tokenizer, source = tokenizer_of(kind), random.Random(5)
    tokenizer.clean_up_tokenization_spaces = cleans
    special = tokenizer.all_special_ids or [len(tokenizer) - 2]
    batch = [list(tokenizer(TEXT)["input_ids"]) for _ in range(4)]
    batch += [[source.randrange(len(tokenizer)) for _ in range(40)] for _ in range(12)]
    for _ in range(12):  # the same few, again and again
        few = [source.randrange(len(tokenizer)) for _ in range(3)] + [len(tokenizer) - 1]
        batch.append([source.choice(few) for _ in range(20)])
    for number, ids in enumerate(batch):
        for _ in range(number % 4):  # at the beginning, too
            ids.insert(source.choice([0, source.randrange(len(ids))]), source.choice(special))
        whole = tokenizer.decode(ids, skip_special_tokens=True)
        assert "".join(pieces_of(tokenizer, ids)) == whole
        for at in (1, len(ids) // 2, len(ids) - 1):
            before = tokenizer.decode(ids[:at], skip_special_tokens=True)
            text = "".join(pieces_of(tokenizer, ids[at:], prompt=ids[:at]))
            assert whole.endswith(text)
            if not whole.startswith(before):  # it ends with a part of a character
                before = before.rstrip("\ufffd")
            if whole.startswith(before):
                assert before + text == whole
            else:  # blanks were cleaned up
                assert len("".join((before + text).split())) == len("".join(whole.split()))
        stop = whole[6:9] or "x"
        stops = (stop, whole[-4:] + "never", "nor this")
        pieces = pieces_of(tokenizer, ids, stops)
        at = first_of(stops, whole)
        assert "".join(pieces) == whole[:at]
        if at is not None and not cleans:  # it ends with the first token that completes the string
            has = (
                first_of(stops, tokenizer.decode(ids[:count], skip_special_tokens=True)) is not None
                for count in range(1, len(ids) + 1)
            )
            assert len(pieces) == 1 + list(has).index(True)


def test_nothing_is_sent_that_may_still_change() -> None:
    tokenizer = tokenizer_of("ByteLevel")
    ids = [tokenizer("a🙂b")["input_ids"], tokenizer("to end or to ending")["input_ids"]]
    pieces = pieces_of(tokenizer, ids[0])
    assert "".join(pieces) == "a🙂b"
    assert not any("\ufffd" in piece for piece in pieces)
    assert pieces.count("🙂") == 1
    sent = ""
    for piece in pieces_of(tokenizer, ids[1], ("ending",))[:-1]:
        sent += piece
        assert not sent.endswith(("e", "en", "end", "endi", "endin"))
    assert sent == "to end or to "
    pieces = pieces_of(tokenizer, tokenizer("the end")["input_ids"], ("ending",))
    assert pieces[-1] == "end", "a stop string that was begun is sent at the end"
    assert "".join(pieces) == "the end"


def test_a_text_comes_as_it_is_generated() -> None:
    """Each token of plain text is sent at once, and decoded a few times only."""
    tokenizer = tokenizer_of("ByteLevel")
    decoder = TextDecoder(tokenizer)
    usual, lengths = decoder.decode, []

    def decode(ids: list[int]) -> str:
        lengths.append(len(ids))
        return usual(ids)

    decoder.decode = decode
    text = TextPieces(decoder)
    ids = tokenizer("once upon a time there was a king " * 20)["input_ids"]
    assert all(text.push(token) for token in ids)
    assert max(lengths) == 2
