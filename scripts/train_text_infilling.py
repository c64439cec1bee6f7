"""Trains the small text infilling model that ``example/`` ships, from its text file.

    python scripts/train_text_infilling.py

It learns its text by heart: each word of each line is masked in turn. A few minutes on two cores
are enough. The result is written to ``--output`` only if it reaches the bar and answers those of
the three ``REQUIRED`` sentences that are in the text.
"""

from __future__ import annotations

import json
import random
import re
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from training import ROOT, batches, fit, hand_over, read_lines, read_options

sys.path[:0] = [str(ROOT), str(ROOT / "example")]

from bert_model import DEFAULT_MODEL, MASK, TextInfillingModel  # noqa: E402

if TYPE_CHECKING:
    import torch

__all__ = ["Example", "accuracy", "clear_examples", "main", "read_lines", "sample_examples"]

MAX_TOKENS = 16
POSITIONS = 64
BATCH = 128
PEAK_RATE = 2e-3
EXTRA_MASKS = 0.15
NO_MARKS = 0.4
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", MASK]
LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789"
PUNCTUATION = "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~"
# Words that many sentences could do without or swap: too easy or too open to measure.
FUNCTION_WORDS = (
    "about above after again all along also and any are because been before being but can cannot "
    "could did does doth down each ever every for from had has hast hath have her here hers him "
    "his how into its like may might more most must nor not off often once one only other our out "
    "over own shall she should some such than that the thee their them then there these they "
    "thine this those thou though through thus thy till too under until upon very was were what "
    "when where which while who whom whose why will with would yet you your"
)


@dataclass(frozen=True)
class Example:
    """A sentence with one ``[MASK]``, and the word that belongs there."""

    sentence: str
    answer: str


REQUIRED = (
    Example("twinkle twinkle [MASK] star.", "little"),
    Example("Happy birthday to [MASK].", "you"),
    Example("the answer to life, the [MASK], and everything.", "universe"),
)


def clear_examples(lines: Sequence[str]) -> list[Example]:
    """Returns the examples of a text that have one right answer.

    A word counts if it has three letters or more, is no function word and no part of a
    contraction, and if no other line of the text, but for case and punctuation, is the same
    sentence with another word in its place. A line too long to train on gives no examples.
    """
    function_words = set(FUNCTION_WORDS.split())
    answers: defaultdict[str, set[str]] = defaultdict(set)
    examples: list[tuple[str, Example]] = []
    for line in lines:
        if len(_pieces(line)) > MAX_TOKENS - 2:
            continue
        for found in re.finditer(r"(?<!['-])\b[a-z]+\b(?!['-])", line.lower()):
            answer = found.group()
            before, after = line[: found.start()], line[found.end() :]
            context = " ".join([*_words(before), MASK, *_words(after)])
            answers[context].add(answer)
            if len(answer) >= 3 and answer not in function_words:
                examples.append((context, Example(before + MASK + after, answer)))
    return [example for context, example in examples if len(answers[context]) == 1]


def sample_examples(lines: Sequence[str], count: int = 200, seed: int = 0) -> list[Example]:
    """Returns ``count`` of a text's clear examples (all, if it has fewer), drawn with ``seed``."""
    examples = clear_examples(lines)
    return random.Random(seed).sample(examples, min(count, len(examples)))


def accuracy(model: TextInfillingModel, examples: Sequence[Example]) -> float:
    """Returns the share of the examples that the model answers right; 0.0 of none."""
    right = 0
    for start in range(0, len(examples), 64):
        part = examples[start : start + 64]
        answers = model.predict([example.sentence for example in part])
        right += sum(a == example.answer for a, example in zip(answers, part, strict=True))
    return right / max(1, len(examples))


def write_tokenizer(lines: Sequence[str], folder: Path) -> None:
    """Writes a lower-case WordPiece tokenizer with every word of the text.

    Letters, digits and the text's commonest word endings are there too, so that any English
    sentence can be spelt.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    words = Counter(word for line in lines for word in _words(line))
    endings = Counter(word[-size:] for word in words for size in (2, 3, 4) if len(word) > size + 1)
    common = sorted(endings, key=lambda ending: (-endings[ending], ending))[:150]
    tokens = [*SPECIAL, *PUNCTUATION, *LETTERS]
    tokens += ["##" + piece for piece in [*LETTERS, *sorted(common)]]
    tokens += sorted(set(words) - set(tokens))
    vocab = {token: number for number, token in enumerate(tokens)}

    tokenizer: Any = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(token, vocab[token]) for token in ("[CLS]", "[SEP]")],
    )
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    (folder / "vocab.txt").write_text("\n".join(tokens) + "\n", encoding="utf-8")
    names = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
    config = {
        "tokenizer_class": "BertTokenizer",
        "do_lower_case": True,
        "model_max_length": POSITIONS,
        **dict(zip(names, SPECIAL, strict=True)),
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")


def train(lines: Sequence[str], folder: Path, epochs: int, seed: int) -> None:
    """Trains a model on the text and writes it, with its tokenizer, to a folder.

    Raises:
        ValueError: no line of the text is short enough to train on.
    """
    import torch
    from tokenizers import Tokenizer
    from transformers import BertConfig, BertForMaskedLM

    write_tokenizer(lines, folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    rows = [encoding.ids for encoding in tokenizer.encode_batch(list(lines))]
    rows = [row for row in rows if len(row) <= MAX_TOKENS]
    # Any word can be asked for, but punctuation cannot: it is no answer.
    vocab = tokenizer.get_vocab()
    marks = {vocab[mark] for mark in PUNCTUATION}
    pairs = [(row, at) for row in rows for at in range(1, len(row) - 1) if row[at] not in marks]
    if not pairs:
        raise ValueError(f"the text has no line with a word and of {MAX_TOKENS} tokens at most")

    torch.manual_seed(seed)
    torch.use_deterministic_algorithms(True)
    shuffle = random.Random(seed)
    model: Any = BertForMaskedLM(
        BertConfig(
            vocab_size=len(vocab),
            hidden_size=128,
            num_hidden_layers=3,
            num_attention_heads=4,
            intermediate_size=512,
            max_position_embeddings=POSITIONS,
            hidden_dropout_prob=0.05,
            attention_probs_dropout_prob=0.0,
        )
    )
    steps = epochs * -(-len(pairs) // BATCH)

    def loss_of(batch: list[tuple[list[int], int]]) -> torch.Tensor:
        corrupted = [_corrupt(row, at, marks, shuffle) for row, at in batch]
        longest = max(map(len, corrupted))
        inputs = torch.zeros(len(batch), longest, dtype=torch.long)  # [PAD] is token 0
        labels = torch.full_like(inputs, -1)
        for number, tokens in enumerate(corrupted):
            for at, (token, hidden) in enumerate(tokens):
                inputs[number, at] = vocab[MASK] if hidden else token
                labels[number, at] = token if hidden else -1
        asked = labels >= 0
        states = model.bert(inputs, attention_mask=(inputs > 0).long()).last_hidden_state
        # The head is most of the cost, so it runs at the masked words only.
        return torch.nn.functional.cross_entropy(model.cls(states[asked]), labels[asked])

    fit(model, batches(pairs, BATCH, epochs, shuffle), steps, PEAK_RATE, loss_of)
    model.save_pretrained(folder)


def _corrupt(
    row: list[int], asked: int, marks: set[int], shuffle: random.Random
) -> list[tuple[int, bool]]:
    """Returns a row's tokens, each with whether to mask it: the asked one, and some others.

    The others keep the model from leaning on one neighbour. Now and then the punctuation goes,
    since users leave it out.
    """
    bare = shuffle.random() < NO_MARKS
    last = len(row) - 1
    return [
        (token, at == asked or (0 < at < last and shuffle.random() < EXTRA_MASKS))
        for at, token in enumerate(row)
        if not (bare and token in marks)
    ]


def _words(text: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", text.lower())


def _pieces(line: str) -> list[str]:
    """Splits a line of the text as its tokenizer does: all its words are in the vocabulary."""
    return re.findall(r"[a-z0-9]+|[^\sa-z0-9]", line.lower())


def main(arguments: Sequence[str] | None = None) -> int:
    """Trains, measures, and writes the model if it reaches the bar; returns the exit status."""
    options = read_options(__doc__, DEFAULT_MODEL, 32, arguments)
    lines = [line for section in options.sections for line in section]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        train(lines, folder, options.epochs, options.seed)
        model = TextInfillingModel(MAX_TOKENS, folder, device="cpu")
        reached = accuracy(model, sample_examples(lines))
        print(f"accuracy on sentences of the text: {reached:.1%}")
        known = {" ".join(_words(line)) for line in lines}
        required = [
            example
            for example in REQUIRED
            if " ".join(_words(example.sentence.replace(MASK, example.answer))) in known
        ]
        answers = model.predict([example.sentence for example in required])
        for example, answer in zip(required, answers, strict=True):
            print(f"{example.sentence} -> {answer}")
        good = reached >= options.bar and answers == [example.answer for example in required]
        return hand_over(folder, options.output, good=good)


if __name__ == "__main__":
    sys.exit(main())
