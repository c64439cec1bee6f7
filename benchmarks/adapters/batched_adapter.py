"""batched: a thread of this process that computes what a queue has, or a task of its event loop."""
# mypy: ignore-errors

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from batched import aio, dynamically

from adapters.adapter import Outcome
from adapters.workloads import BATCH_SIZE, WORKLOADS, is_answer

__all__ = ["Batched"]


class Batched:
    """Settings: ``timeout_ms`` and ``batch_size`` of ``batched.dynamically``, and of that of
    ``batched.aio``, which tasks get."""

    drivers = frozenset({"alone", "threads", "beside-hand", "until-empty", "asyncio", "open-loop"})

    def __init__(self, workload: str, workers: int, settings: Mapping[str, Any]) -> None:
        if workers != 1:
            raise ValueError(f"batched has one worker, not {workers}")
        self._name = workload
        model = WORKLOADS[workload]()
        model.load()

        def predict(batch: list[Any]) -> list[Any]:
            return model.predict(batch)

        self._predict = predict
        self._settings = {"batch_size": BATCH_SIZE, **settings}
        self._batched = dynamically(predict, **self._settings)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._aio: Any = None

    def predict(self, item: Any) -> Any:
        return self._batched(item)

    def submit(self, item: Any) -> Any:
        raise NotImplementedError("batched has no public futures")

    async def apredict(self, item: Any) -> Any:
        loop = asyncio.get_running_loop()
        if self._loop is not loop:  # it belongs to the loop that it was first called in
            self._loop, self._aio = loop, aio.dynamically(self._predict, **self._settings)
        return await self._aio(item)

    def start(
        self,
        item: Any,
        deadline: float | None,  # noqa: ARG002 - it has neither deadlines nor a bound
        done: Callable[[Outcome], object],
    ) -> None:
        # Its public calls wait, each in a thread or a task of its
        # own; this is what they are made of, and costs less.
        future = self._batched._schedule([item])[0].future

        def ended(_: Any) -> None:
            is_served = future.exception() is None and is_answer(self._name, item, future.result())
            done("served" if is_served else "failed")

        future.add_done_callback(ended)

    def close(self) -> None:
        self._batched.batch_queue.stop()  # and not shutdown, which waits for all that is queued
