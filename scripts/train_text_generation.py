"""Trains the small text generation model that ``example/`` ships, from its text file.

    python scripts/train_text_generation.py

It learns its text by heart, so that it goes on with any line of it from its first words, also if
those are in lower case. A few minutes on two cores are enough. The result is written to
``--output`` only if it reaches the bar.
"""

from __future__ import annotations

import json
import random
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from training import ROOT, batches, fit, hand_over, read_options, read_sections

sys.path[:0] = [str(ROOT), str(ROOT / "example")]

from generation_model import DEFAULT_MODEL, TextGenerationModel  # noqa: E402

if TYPE_CHECKING:
    import torch

__all__ = ["Example", "accuracy", "examples", "main", "passages", "read_sections"]

VOCABULARY = 3072
POSITIONS = 128
BATCH = 32
PEAK_RATE = 1.5e-3
LOWER_CASE = 0.25
BOS, EOS, PAD = "<|startoftext|>", "<|endoftext|>", "<|pad|>"


@dataclass(frozen=True)
class Example:
    """The first words of a text, and the text."""

    prompt: str
    text: str


def passages(sections: Sequence[Sequence[str]]) -> list[str]:
    """Returns what to learn: each line, with the next one if its sentence goes on there."""
    return [
        line if line[-1] in ".!?" or after is None else f"{line}\n{after}"
        for section in sections
        for line, after in zip(section, [*section[1:], None], strict=True)
    ]


def examples(texts: Sequence[str], count: int = 200, seed: int = 0) -> list[Example]:
    """Returns ``count`` texts (all, if there are fewer) with the words that tell them from others.

    Those are the first two words, or as many as no other text begins with, however it is written.
    A text of which less than a word would be left to say is no example.
    """
    texts = sorted(set(texts))
    begin = Counter(start.lower() for text in texts for start in _starts(text))
    found = []
    for text in texts:
        clear = [start for start in _starts(text)[1:-1] if begin[start.lower()] == 1]
        if clear:
            found.append(Example(clear[0], text))
    return random.Random(seed).sample(found, min(count, len(found)))


def accuracy(model: TextGenerationModel, asked: Sequence[Example]) -> float:
    """Returns the share of the examples that the model completes right, to the last sign."""
    right = 0
    for start in range(0, len(asked), 64):
        part = asked[start : start + 64]
        answers = model.predict([example.prompt for example in part])
        right += sum(a == example.text for a, example in zip(answers, part, strict=True))
    return right / max(1, len(asked))


def write_tokenizer(texts: Sequence[str], folder: Path) -> None:
    """Writes a byte-level BPE tokenizer: it can spell any text, and knows the words of these."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer: Any = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer: Any = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[PAD, BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([*texts, *map(str.lower, texts)], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": POSITIONS,
        "padding_side": "left",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")


def train(texts: Sequence[str], folder: Path, epochs: int, seed: int) -> None:
    """Trains a model on the texts and writes it, with its tokenizer, to a folder.

    Raises:
        ValueError: there is no text to train on.
    """
    import torch
    from tokenizers import Tokenizer
    from transformers import GPTNeoConfig, GPTNeoForCausalLM

    if not texts:
        raise ValueError("there is no line to train on")
    write_tokenizer(texts, folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    vocab = tokenizer.get_vocab()
    pad, bos, eos = (vocab[token] for token in (PAD, BOS, EOS))

    torch.manual_seed(seed)
    torch.use_deterministic_algorithms(True)
    shuffle = random.Random(seed)
    model: Any = GPTNeoForCausalLM(
        GPTNeoConfig(
            vocab_size=len(vocab),
            hidden_size=128,
            num_layers=3,
            attention_types=[[["global", "local", "global"], 1]],
            num_heads=4,
            window_size=64,
            max_position_embeddings=POSITIONS,
            resid_dropout=0.0,
            embed_dropout=0.0,
            attention_dropout=0.0,
            bos_token_id=bos,
            eos_token_id=eos,
            pad_token_id=pad,
        )
    )
    model.train()

    def loss_of(batch: list[str]) -> torch.Tensor:
        rows = []
        for text in batch:
            start = _prompt(text, shuffle)
            first = tokenizer.encode(start).ids
            rest = tokenizer.encode(text[len(start) :], add_special_tokens=False).ids
            rows.append((first, [*rest, eos][: POSITIONS - len(first)]))
        longest = max(len(first) + len(rest) for first, rest in rows)
        inputs = torch.full((len(rows), longest), pad)
        labels = torch.full_like(inputs, -1)
        for number, (first, rest) in enumerate(rows):
            end = len(first) + len(rest)
            inputs[number, :end] = torch.tensor([*first, *rest])
            labels[number, len(first) : end] = torch.tensor(rest)
        # What pads is at the end, where no token looks: no need of an attention mask.
        states = model.transformer(inputs, use_cache=False).last_hidden_state[:, :-1]
        asked = labels[:, 1:] >= 0
        # The head is much of the cost, so it runs where something is to be learnt only.
        scores = model.lm_head(states[asked])
        return torch.nn.functional.cross_entropy(scores, labels[:, 1:][asked])

    steps = epochs * -(-len(texts) // BATCH)
    fit(model, _alike(texts, epochs, shuffle), steps, PEAK_RATE, loss_of)
    model.save_pretrained(folder)


def _alike(texts: Sequence[str], epochs: int, shuffle: random.Random) -> Iterator[list[str]]:
    """Yields batches of texts that are about as long: what pads them costs as much as they do."""
    for pool in batches(texts, 8 * BATCH, epochs, shuffle):
        pool.sort(key=len)
        parts = [pool[start : start + BATCH] for start in range(0, len(pool), BATCH)]
        shuffle.shuffle(parts)
        yield from parts


def _prompt(text: str, shuffle: random.Random) -> str:
    """Returns the part of a text that is given: its first word, which nobody could guess.

    Now and then it is more and in lower case, as users write.
    """
    starts = _starts(text)
    return shuffle.choice(starts).lower() if shuffle.random() < LOWER_CASE else starts[0]


def _starts(text: str) -> list[str]:
    """Returns the first word of a text's first line, its first two words, and so on."""
    line = text.partition("\n")[0]
    return [line[: word.end()] for word in re.finditer(r"\S+", line)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Trains, measures, and writes the model if it reaches the bar; returns the exit status."""
    options = read_options(__doc__, DEFAULT_MODEL, 40, arguments)
    texts = passages(options.sections)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        train(texts, folder, options.epochs, options.seed)
        model = TextGenerationModel(model_path=folder, device="cpu")
        asked = examples(texts)
        reached = accuracy(model, asked)
        print(f"lines of the text completed right: {reached:.1%}")
        prompts = [example.prompt for example in asked[:5]]
        for prompt, answer in zip(prompts, model.predict(prompts), strict=True):
            print(f"{prompt!r} -> {answer!r}")
        return hand_over(folder, options.output, good=reached >= options.bar)


if __name__ == "__main__":
    sys.exit(main())
