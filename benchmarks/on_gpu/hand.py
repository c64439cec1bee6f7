"""Batched by hand, in one process: what the same model does without any middleware.

``Hand`` is asked by other measurements, which have it in a process beside them and measure both in
turn; ``sweep.py`` asks it for each size.
"""

from __future__ import annotations

import itertools
import tempfile
import time

from on_gpu import simulated
from on_gpu.beside import answer_questions
from on_gpu.model import Bert, Tokens, sentences
from on_gpu.passes import Pace, pass_ms
from on_gpu.running import Kind

__all__ = ["Hand"]

#: Different batches in turn. Arbitrary.
_BATCHES = 8
#: At least, before the clock counts, and while it does.
_FEWEST = 3


class Hand:
    """The model, and what it is asked for."""

    def __init__(self, kind: Kind) -> None:
        self._kind = kind
        self._folder = tempfile.TemporaryDirectory()
        self._model = Bert()
        self._model.init_model(self._folder.name, kind=kind)

    def rate(self, tokens: int, size: int, warm: float, seconds: float) -> float:
        """Sentences per second: making tensors of lists, copies both ways, reading the results."""
        given = sentences(_BATCHES * size, tokens, self._kind)
        batches = itertools.cycle([list(given[i : i + size]) for i in range(0, len(given), size)])
        for lasts in (warm, seconds):
            done, started = 0, time.perf_counter()
            while done < _FEWEST or time.perf_counter() - started < lasts:
                self._model.predict(next(batches))
                done += 1
            elapsed = time.perf_counter() - started
        return done * size / elapsed

    def forward_ms(self, tokens: int, size: int) -> float | None:
        """Of the forward pass alone, as it runs."""
        return self._pass_ms(tokens, size, "host")

    def device_ms(self, tokens: int, size: int) -> float | None:
        """Of the forward pass alone, with all kernels queued before the first one starts."""
        return self._pass_ms(tokens, size, "device")

    def best(self, given: list[Tokens], size: int, tolerance: float) -> list[list[int]]:
        """Of each sentence the likeliest word, and then those within the tolerance of it."""
        words: list[list[int]] = []
        for start in range(0, len(given), size):
            batch = self._model.preprocess(given[start : start + size])
            values, found = self._model.logits(batch).float().topk(8, dim=-1)
            for row, ids in zip(values.tolist(), found.tolist(), strict=True):
                words.append(
                    [i for value, i in zip(row, ids, strict=True) if value >= row[0] - tolerance]
                )
        return words

    def _pass_ms(self, tokens: int, size: int, pace: Pace) -> float | None:
        if self._kind == "simulated":
            return simulated.device_ms(size, tokens)
        given = self._model.preprocess(list(sentences(size, tokens, self._kind)))
        given = given.to(self._model.device)
        return pass_ms(lambda: self._model.logits(given), self._kind, pace)


if __name__ == "__main__":
    answer_questions(lambda settings: Hand(settings["kind"]))
