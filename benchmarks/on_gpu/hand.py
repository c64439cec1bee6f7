"""Batched by hand, in one process: what the same model does without any middleware.

``Hand`` is asked by other measurements, which have it in a process beside them and measure both in
turn; ``sweep.py`` asks it for each size.
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
import time
from typing import Any, Literal

from on_gpu import simulated
from on_gpu.beside import answer_questions
from on_gpu.model import Bert, Tokens, sentences
from on_gpu.running import Kind

__all__ = ["Hand"]

#: Different batches in turn. Arbitrary.
_BATCHES = 8
#: At least, before the clock counts, and while it does.
_FEWEST = 3
#: Of a forward pass on tensors that are on the device already.
_PASSES = 9
#: What the device waits before such a pass, so that all of it is there when it begins: some 20 ms.
_SLEEP_CYCLES = 40_000_000


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
        """Of the forward pass alone, with all kernels queued before the first one starts.

        Where this is less than ``forward_ms``, the device waits for the host between kernels.
        """
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

    def _pass_ms(self, tokens: int, size: int, paced_by: Literal["host", "device"]) -> float | None:
        if self._kind == "simulated":
            return simulated.device_ms(size, tokens)
        given = self._model.preprocess(list(sentences(size, tokens, self._kind)))
        given = given.to(self._model.device)
        times = [self._one_pass_ms(given, paced_by) for _ in range(_PASSES)]
        known = [each for each in times if each is not None]
        return statistics.median(known) if known else None

    def _one_pass_ms(self, given: Any, paced_by: Literal["host", "device"]) -> float | None:
        """By CUDA's events; on the CPU by the clock."""
        if self._kind == "cpu":
            started = time.perf_counter()
            self._model.logits(given)
            return 1e3 * (time.perf_counter() - started)
        cuda = self._model.torch.cuda
        began, ended = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
        cuda.synchronize()
        if paced_by == "device":
            if not hasattr(cuda, "_sleep"):  # it is torch's own, not promised to anybody
                return None
            cuda._sleep(_SLEEP_CYCLES)
        began.record()
        self._model.logits(given)
        ended.record()
        cuda.synchronize()
        elapsed: float = began.elapsed_time(ended)
        return elapsed


if __name__ == "__main__":
    answer_questions(lambda settings: Hand(settings["kind"]))
