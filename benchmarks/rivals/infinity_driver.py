"""MiniLM in infinity, within the process: sentences per second, as JSON by setting.

Run by the interpreter of .rivals/infinity, as
``infinity_driver.py FOLDER mixed|equal COUNT SETTING,SETTING,...``. A setting is
``BATCH_SIZE/characters|tokens/transformers|bettertransformer``: what it sorts by, and whether the
model computes as it does for us, or as older versions of optimum could make it do.
"""
# mypy: ignore-errors

from __future__ import annotations

import asyncio
import json
import logging
import sys
import time
import warnings
from pathlib import Path

import torch
from infinity_emb import AsyncEmbeddingEngine, EngineArgs

from minilm import THREADS, sentences_of

CALLERS = 256


async def closed_loop(engine: AsyncEmbeddingEngine, work: list[str]) -> float:
    """Sentences per second of tasks that take one after the other, until none is left."""
    waiting = iter(work)

    async def call() -> None:
        for sentence in waiting:
            vectors, _ = await engine.embed(sentences=[sentence])
            assert len(vectors) == 1

    started = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(CALLERS):
            group.create_task(call())
    return len(work) / (time.perf_counter() - started)


async def measure(folder: str, kind: str, count: int, setting: str) -> float:
    size, lengths, forward = setting.split("/")
    options = EngineArgs(
        model_name_or_path=folder,
        engine="torch",
        device="cpu",
        dtype="float32",  # as ours computes
        batch_size=int(size),
        compile=False,
        bettertransformer=forward == "bettertransformer",
        model_warmup=False,  # there is one below
        lengths_via_tokenize=lengths == "tokens",
    )

    def work(number: int, seed: int) -> list[str]:
        return sentences_of(Path(folder), number, seed=seed, are_equal=kind == "equal")

    engine = AsyncEmbeddingEngine.from_args(options)
    await engine.astart()
    await closed_loop(engine, work(max(count // 4, 64), seed=2))
    rate = await closed_loop(engine, work(count, seed=1))
    await engine.astop()
    return rate


def main() -> None:
    folder, kind, count, settings = sys.argv[1:]
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    torch.set_num_threads(THREADS)
    rates = {
        setting: asyncio.run(measure(folder, kind, int(count), setting))
        for setting in settings.split(",")
    }
    print(json.dumps(rates))


if __name__ == "__main__":
    main()
