"""infinity's engine within this process, on MiniLM, which it loads and computes by itself."""
# mypy: ignore-errors

from __future__ import annotations

import asyncio
import logging
import threading
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from infinity_emb import AsyncEmbeddingEngine, EngineArgs

from adapters.adapter import Outcome
from adapters.workloads import BATCH_SIZE, minilm_folder
from minilm import THREADS

__all__ = ["Infinity"]


class Infinity:
    """Settings: those of ``EngineArgs``, such as ``batch_size``, ``bettertransformer`` and
    ``lengths_via_tokenize``."""

    drivers = frozenset({"until-empty"})

    def __init__(self, workload: str, workers: int, settings: Mapping[str, Any]) -> None:
        if workload != "minilm" or workers != 1:
            raise ValueError(f"infinity computes MiniLM with one worker, not {workload}, {workers}")
        import torch

        logging.disable(logging.WARNING)
        warnings.simplefilter("ignore")
        torch.set_num_threads(THREADS)
        options = {"batch_size": BATCH_SIZE, "bettertransformer": False, **settings}
        self._engine = AsyncEmbeddingEngine.from_args(
            EngineArgs(
                model_name_or_path=str(minilm_folder()),
                engine="torch",
                device="cpu",
                dtype="float32",  # as everybody else computes
                compile=False,
                model_warmup=False,  # there is one in each driver
                **options,
            )
        )
        # It has tasks for callers, of one loop; this one is for callers that are threads.
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self._run(self._engine.astart())

    def predict(self, item: Any) -> Any:
        (vector,), _ = self._run(self._engine.embed(sentences=[item]))
        return vector

    def submit(self, item: Any) -> Any:
        raise NotImplementedError("infinity has no futures")

    async def apredict(self, item: Any) -> Any:
        raise NotImplementedError("infinity's engine belongs to a loop of its own here")

    def start(self, item: Any, deadline: float | None, done: Callable[[Outcome], object]) -> None:
        raise NotImplementedError("infinity is measured with as many callers as there are")

    def close(self) -> None:
        self._run(self._engine.astop())
        self._loop.call_soon_threadsafe(self._loop.stop)

    def _run(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()
