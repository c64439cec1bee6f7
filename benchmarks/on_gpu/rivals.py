"""What else computes a task on the same device: ``transformers.pipeline``, and infinity.

Both are asked within their process, without HTTP, for 64 items at a time. infinity has another
interpreter as a rule, so nothing of this project's package is imported before it is needed.
"""

from __future__ import annotations

import asyncio
import importlib.util
import io
import itertools
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from on_gpu.beside import answer_questions
from on_gpu.checkpoints import images, texts
from on_gpu.passes import pass_ms
from on_gpu.running import Kind, Row
from on_gpu.simulated import device_ms, slow_down, tokens_of

__all__ = ["INFINITY", "SIZE", "Infinity", "Pipeline", "infinitys_python"]

SIZE = 64

#: The variable that names an interpreter with infinity.
INFINITY = "ON_GPU_INFINITY"

#: Calls in flight at infinity: one computes, the next ones are there.
_IN_FLIGHT = 4


class Pipeline:
    """A pipeline of transformers, as its documentation has it: ``pipeline(...)(items)``."""

    def __init__(self, task: str, kind: Kind, folder: str) -> None:
        import torch
        import transformers

        self._torch: Any = torch
        self._task, self._kind = task, kind
        options: dict[str, Any] = {"batch_size": SIZE}
        if kind == "cuda":
            options["dtype"] = torch.float16
        else:
            torch.set_num_threads(1)
        if task == "feature-extraction":
            options["return_tensors"] = True
        build: Any = transformers.pipeline
        self._pipeline = build(task, folder, device=0 if kind == "cuda" else -1, **options)
        if kind == "simulated":
            slow_down(self._pipeline.model)

    def rate(self, tokens: int | None, warm: float, seconds: float) -> float:
        """Items per second."""
        given = _items(self._task, tokens)
        chunks = itertools.cycle([given[i : i + SIZE] for i in range(0, len(given), SIZE)])
        return _rate(lambda: self._compute(next(chunks)), warm, seconds)

    def answers(self, tokens: int | None, count: int) -> list[Any]:
        """To the first items, each computed alone."""
        return [self._compute([item])[0] for item in _items(self._task, tokens)[:count]]

    def device_ms(self, tokens: int | None) -> float | None:
        """Of the forward pass of a full batch, all of it queued before it begins."""
        if self._kind == "simulated":
            return device_ms(SIZE, tokens_of(tokens))
        made = [self._pipeline.preprocess(item) for item in self._loaded(self._batch(tokens))]
        device = self._pipeline.device
        batch = {
            name: self._torch.cat([each[name] for each in made]).to(device)
            for name in ("input_ids", "attention_mask", "pixel_values")
            if name in made[0]
        }
        if "pixel_values" in batch:
            batch["pixel_values"] = batch["pixel_values"].to(self._pipeline.model.dtype)

        def compute() -> None:
            with self._torch.inference_mode():
                self._pipeline.model(**batch)

        compute()
        return pass_ms(compute, self._kind, "device")

    def _batch(self, tokens: int | None) -> list[Any]:
        return _items(self._task, tokens)[:SIZE]

    def _loaded(self, items: list[Any]) -> list[Any]:
        if self._task != "image-classification":
            return items
        from PIL import Image

        return [Image.open(io.BytesIO(item)) for item in items]

    def _compute(self, items: list[Any]) -> list[Any]:
        results = self._pipeline(self._loaded(items))
        if self._task != "feature-extraction":
            return list(results)
        # Items of equal length, so none is padded.
        means = self._torch.cat(list(results)).float().mean(dim=1)
        vectors: list[Any] = self._torch.nn.functional.normalize(means, dim=-1).tolist()
        return vectors


class Infinity:
    """infinity's engine, with its own batching and its threads for tokenizing."""

    def __init__(self, task: str, kind: Kind, folder: str) -> None:
        from infinity_emb import (  # type: ignore[import-not-found, unused-ignore]
            AsyncEmbeddingEngine,
            EngineArgs,
        )

        self._task = task
        self._loop = asyncio.new_event_loop()
        self._engine: Any = AsyncEmbeddingEngine.from_args(
            EngineArgs(
                model_name_or_path=folder,
                engine="torch",
                device="cuda" if kind == "cuda" else "cpu",
                dtype="float16" if kind == "cuda" else "float32",
                batch_size=SIZE,
                bettertransformer=False,  # torch's own attention is in the model already
                compile=False,
            )
        )
        self._loop.run_until_complete(self._engine.astart())

    def rate(self, tokens: int | None, warm: float, seconds: float) -> float:
        given = _items(self._task, tokens)
        chunks = itertools.cycle([given[i : i + SIZE] for i in range(0, len(given), SIZE)])
        return self._loop.run_until_complete(self._rate(chunks, warm, seconds))

    async def _rate(self, chunks: Iterator[list[Any]], warm: float, seconds: float) -> float:
        ask = self._engine.embed if self._task == "feature-extraction" else self._engine.classify
        opens, done = time.perf_counter() + warm, 0
        closes = opens + seconds

        async def call() -> None:
            nonlocal done
            while time.perf_counter() < closes:
                chunk = next(chunks)
                await ask(sentences=chunk)
                done += len(chunk) * (opens <= time.perf_counter() < closes)

        await asyncio.gather(*(call() for _ in range(_IN_FLIGHT)))
        return done / seconds


def _rate(compute: Callable[[], list[Any]], warm: float, seconds: float) -> float:
    for lasts in (warm, seconds):
        done, started = 0, time.perf_counter()
        while not done or time.perf_counter() - started < lasts:
            done += len(compute())
        elapsed = time.perf_counter() - started
    return done / elapsed


def _items(task: str, tokens: int | None) -> list[Any]:
    if tokens is None:
        return list(images())
    return list(texts(tokens, is_masked=task == "fill-mask"))


def infinitys_python() -> str | None:
    """An interpreter that has infinity: the named one, this one, or that of ``make yardstick``."""
    if named := os.environ.get(INFINITY):
        return named
    if importlib.util.find_spec("infinity_emb"):
        return sys.executable
    made = Path(__file__).parents[2] / ".rivals" / "infinity" / "bin" / "python"
    return str(made) if os.access(made, os.X_OK) else None


def _load(settings: Row) -> Pipeline | Infinity:
    built = Infinity if settings["rival"] == "infinity" else Pipeline
    return built(settings["task"], settings["kind"], settings["folder"])


if __name__ == "__main__":
    answer_questions(_load)
