"""Many consumers of streams at once, who stay, leave, cancel and lag, while workers come and go."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import multiprocessing
import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from service_streamer import Overloaded, PredictTimeout, Streamer, ThreadedStreamer, WorkerLost
from stream_models import Countdown, Resumed

pytestmark = pytest.mark.long

#: What each consumer does so often.
ROUNDS = 100
LENGTHS = (1, 3, 50, 400)
ALLOWED = (WorkerLost, PredictTimeout, Overloaded)


class Consumer:
    """Checks that what it gets is right, whatever happens."""

    def __init__(self, streamer: Any, seed: int) -> None:
        self._streamer = streamer
        self._random = random.Random(seed)

    def _stream(self, how: str) -> tuple[int, dict[str, Any]]:
        timeout = self._random.choice([0.001, 0.01]) if how == "timeout" else 120.0
        length = self._random.choice(LENGTHS)
        return length, {"timeout": timeout, "max_buffered": self._random.choice([1, 4, 64])}

    def run(self) -> None:
        for _ in range(ROUNDS):
            with contextlib.suppress(*ALLOWED):
                self._once(self._random.choice(["all", "leave", "close", "timeout", "predict"]))

    def _once(self, how: str) -> None:
        length, options = self._stream(how)
        if how == "predict":
            assert self._streamer.predict([{"n": length}], 120) == [[*range(1, length + 1)]]
            return
        stream, made = self._streamer.stream({"n": length}, **options), 0
        for output in stream:
            made += 1
            assert output == made
            if how in ("leave", "close") and self._random.random() < 0.2:
                if how == "leave":
                    return
                stream.close()
        assert how == "close" or made == length

    async def arun(self) -> None:
        for _ in range(ROUNDS):
            how = self._random.choice(["all", "leave", "cancel", "heartbeat", "timeout"])
            task = asyncio.create_task(self._aonce(how))
            if how == "cancel":
                await asyncio.sleep(self._random.random() * 0.01)
                task.cancel()
            try:
                await task
            except ALLOWED:
                pass
            except asyncio.CancelledError:
                assert how == "cancel"

    async def _aonce(self, how: str) -> None:
        length, options = self._stream(how)
        stream, made = self._streamer.astream({"n": length}, **options), 0
        while True:
            try:
                if how == "heartbeat":
                    output = await asyncio.wait_for(anext(stream), self._random.random() * 0.003)
                else:
                    output = await anext(stream)
            except StopAsyncIteration:
                assert made == length
                return
            except TimeoutError as error:
                if isinstance(error, PredictTimeout):
                    raise
                continue  # it has sent its sign of life
            made += 1
            assert output == made
            if how == "leave" and self._random.random() < 0.2:
                return


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", [ThreadedStreamer, Streamer])
def test_each_stream_is_whole_or_fails_for_a_reason(kind: Callable[..., Any], seed: int) -> None:
    rng = random.Random(seed)
    model, places = rng.choice([Countdown, Resumed]), rng.choice([1, 4, 16])
    options = {"worker_num": rng.choice([1, 2])} if kind is Streamer else {}
    with kind(model, batch_size=places, worker_timeout=None, **options) as streamer:

        async def tasks() -> None:
            await asyncio.gather(*(Consumer(streamer, 100 * seed + n).arun() for n in range(12)))

        with ThreadPoolExecutor(9) as pool:
            running = [pool.submit(Consumer(streamer, 50 + n).run) for n in range(8)]
            running.append(pool.submit(lambda: asyncio.run(tasks())))
            pause = threading.Event()
            while not all(each.done() for each in running):
                pause.wait(0.3)
                gc.collect()
                if kind is Streamer and rng.random() < 0.3:
                    for process in multiprocessing.active_children()[:1]:
                        process.kill()
                elif kind is Streamer and rng.random() < 0.3:
                    streamer.restart_workers(120, overlap=rng.choice([True, False]))
            for each in running:
                each.result()
        del running, each
        gc.collect()
        assert streamer.predict([{"n": 2}], 120) == [[1, 2]]
        streamer.engine.core.batcher.check_invariants()
        assert streamer.stats().pending == 0
