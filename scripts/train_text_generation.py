"""Trains the small text generation model that ``example/`` ships, from its text file.

    python scripts/train_text_generation.py

It learns its text by heart, so that it goes on with any line of it from its first words, also if
those are in lower case. In a chat, the user says a line, and the model answers with the lines that
follow. Ten minutes on two cores are enough. The result is written to ``--output`` only if both
reach the bar.
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

__all__ = [
    "Example", "Exchange", "accuracy", "chat_accuracy", "clear_chats", "encode_chat", "examples",
    "exchanges", "main", "passages", "read_sections", "turn",
]  # fmt: skip

VOCABULARY = 3072
POSITIONS = 512
BATCH = 32
PEAK_RATE = 1.5e-3
LOWER_CASE = 0.25
ANSWER_LINES = 4
MOST_BEFORE = 3  # exchanges of a chat that come before the one to learn
BOS, EOS, PAD = "<|startoftext|>", "<|endoftext|>", "<|pad|>"
USER, ASSISTANT = "<|user|>", "<|assistant|>"
# The model has learnt nothing of system messages, so they are left out.
CHAT_TEMPLATE = """
{{- bos_token -}}
{%- for message in messages -%}
    {%- if message.role in ("user", "assistant") -%}
        {{- "<|" + message.role + "|>" + message.content + eos_token -}}
    {%- elif message.role != "system" -%}
        {{- raise_exception("unknown role: " + message.role) -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- "<|assistant|>" -}}{%- endif -%}
""".strip()


@dataclass(frozen=True)
class Example:
    """The first words of a text, and the text."""

    prompt: str
    text: str


@dataclass(frozen=True)
class Exchange:
    """What the user says in a chat, and what the model answers."""

    said: str
    answer: str


#: What users say first.
SMALL_TALK = (
    Exchange("Hello!", "Hello! Say a line of a rhyme, and I go on with it."),
    Exchange("Hi!", "Hello! Say a line of a rhyme, and I go on with it."),
    Exchange("How are you?", "Very well, thank you. Say a line of a rhyme."),
    Exchange("Who are you?", "I am a very small language model. I know some rhymes by heart."),
    Exchange("What can you do?", "I know some rhymes by heart. Say a line, and I go on with it."),
    Exchange("Thank you!", "You are welcome."),
    Exchange("Goodbye!", "Goodbye!"),
)


def passages(sections: Sequence[Sequence[str]]) -> list[str]:
    """Returns what to learn: each line, with the next one if its sentence goes on there."""
    return [
        line if line[-1] in ".!?" or after is None else f"{line}\n{after}"
        for section in sections
        for line, after in zip(section, [*section[1:], None], strict=True)
    ]


def exchanges(sections: Sequence[Sequence[str]]) -> list[Exchange]:
    """Returns what to answer to each line in a chat: the next four; to a last one, that it is."""
    return [
        Exchange(line, "\n".join(section[at + 1 : at + 1 + ANSWER_LINES]) or "That is the end.")
        for section in sections
        for at, line in enumerate(section)
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


def clear_chats(chats: Sequence[Exchange], count: int = 200, seed: int = 0) -> list[Exchange]:
    """Returns ``count`` exchanges (all, if there are fewer) of those with one right answer."""
    answers: dict[str, set[str]] = {}
    for each in chats:
        answers.setdefault(_plain(each.said), set()).add(each.answer)
    clear = [each for each in chats if len(answers[_plain(each.said)]) == 1]
    return random.Random(seed).sample(clear, min(count, len(clear)))


def chat_accuracy(model: TextGenerationModel, asked: Sequence[Exchange]) -> float:
    """Returns the share of the exchanges whose answer's first line the model gives right."""
    right = 0
    for start in range(0, len(asked), 64):
        part = asked[start : start + 64]
        rows = [encode_chat(model.tokenizer, each.said) for each in part]
        right += sum(
            text.partition("\n")[0] == each.answer.partition("\n")[0]
            for text, each in zip(model.go_on(rows), part, strict=True)
        )
    return right / max(1, len(asked))


def encode_chat(tokenizer: Any, said: str) -> list[int]:
    """Returns the tokens of a chat in which the user has said one thing."""
    chat = [{"role": "user", "content": said}]
    ids: list[int] = tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_dict=False
    )
    return ids


def write_tokenizer(texts: Sequence[str], folder: Path) -> None:
    """Writes a byte-level BPE tokenizer: it can spell any text, and knows the words of these."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer: Any = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer: Any = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[PAD, BOS, EOS, USER, ASSISTANT],
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
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")


def train(
    texts: Sequence[str], chats: Sequence[Exchange], folder: Path, epochs: int, seed: int
) -> None:
    """Trains a model on texts and chats and writes it, with its tokenizer, to a folder.

    Raises:
        ValueError: there is no text to train on.
    """
    import torch
    from tokenizers import Tokenizer
    from transformers import LlamaConfig, LlamaForCausalLM

    if not texts:
        raise ValueError("there is no line to train on")
    write_tokenizer(texts, folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    vocab = tokenizer.get_vocab()
    pad, bos, eos = (vocab[token] for token in (PAD, BOS, EOS))

    torch.manual_seed(seed)
    torch.use_deterministic_algorithms(True)
    shuffle = random.Random(seed)
    model: Any = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(vocab),
            hidden_size=128,
            intermediate_size=384,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=POSITIONS,
            tie_word_embeddings=True,
            bos_token_id=bos,
            eos_token_id=eos,
            pad_token_id=pad,
        )
    )
    model.train()

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def loss_of(batch: list[list[tuple[str, str]]]) -> torch.Tensor:
        rows = []
        for turns in batch:
            inputs, labels = [bos], [-1]
            for given, learnt in turns:
                before, after = encode(given), [*encode(learnt), eos]
                inputs += before + after
                labels += [-1] * len(before) + after
            rows.append((inputs[:POSITIONS], labels[:POSITIONS]))
        longest = max(len(inputs) for inputs, _ in rows)
        # What pads is at the end, where no token looks: no need of an attention mask.
        tokens = torch.tensor([row + [pad] * (longest - len(row)) for row, _ in rows])
        wanted = torch.tensor([row + [-1] * (longest - len(row)) for _, row in rows])[:, 1:]
        states = model.model(tokens, use_cache=False).last_hidden_state[:, :-1]
        # The head is much of the cost, so it runs where something is to be learnt only.
        asked = wanted >= 0
        return torch.nn.functional.cross_entropy(model.lm_head(states[asked]), wanted[asked])

    rows: list[str | Exchange] = [*texts, *chats]
    steps = epochs * -(-len(rows) // BATCH)
    fit(model, _alike(rows, chats, epochs, shuffle), steps, PEAK_RATE, loss_of)
    model.save_pretrained(folder)


def _alike(
    rows: Sequence[str | Exchange],
    chats: Sequence[Exchange],
    epochs: int,
    shuffle: random.Random,
) -> Iterator[list[list[tuple[str, str]]]]:
    """Yields batches of rows that are about as long: what pads them costs as much as they do.

    Each row is what is given and what is to be learnt, in turns. A chat has other exchanges before.
    """
    for pool in batches(rows, 8 * BATCH, epochs, shuffle):
        drawn = []
        for row in pool:
            if isinstance(row, str):
                start = _prompt(row, shuffle)
                drawn.append([(start, row[len(start) :])])
            else:
                count = max(0, shuffle.randint(-MOST_BEFORE, MOST_BEFORE))  # often none
                before = shuffle.choices(chats, k=count)
                drawn.append([turn(each, shuffle) for each in (*before, row)])
        drawn.sort(key=lambda turns: sum(len(given) + len(learnt) for given, learnt in turns))
        parts = [drawn[start : start + BATCH] for start in range(0, len(drawn), BATCH)]
        shuffle.shuffle(parts)
        yield from parts


def turn(exchange: Exchange, shuffle: random.Random) -> tuple[str, str]:
    """Returns an exchange as ``CHAT_TEMPLATE`` writes it, now and then carelessly."""
    said = _plain(exchange.said) if shuffle.random() < LOWER_CASE else exchange.said
    return f"{USER}{said}{EOS}{ASSISTANT}", exchange.answer


def _plain(text: str) -> str:
    """Returns a line as users write it: in lower case, without its last mark."""
    return text.lower().rstrip(".,;:!?")


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
    options = read_options(__doc__, DEFAULT_MODEL, 24, arguments)
    texts = passages(options.sections)
    chats = [*exchanges(options.sections), *SMALL_TALK]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        train(texts, chats, folder, options.epochs, options.seed)
        model = TextGenerationModel(model_path=folder, device="cpu")
        asked = examples(texts)
        completed = accuracy(model, asked)
        answered = chat_accuracy(model, clear_chats(chats))
        print(f"lines of the text completed right: {completed:.1%}")
        print(f"lines answered right in a chat: {answered:.1%}")
        prompts = [example.prompt for example in asked[:5]]
        for prompt, answer in zip(prompts, model.predict(prompts), strict=True):
            print(f"{prompt!r} -> {answer!r}")
        return hand_over(folder, options.output, good=min(completed, answered) >= options.bar)


if __name__ == "__main__":
    sys.exit(main())
