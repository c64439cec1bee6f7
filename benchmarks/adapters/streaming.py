"""Streams of a model of steps that sleeps: a step of n items takes 20 ms and 0.2 ms for each.

``python -m adapters.streaming '{"seconds": 10}'`` prints one row for each question:

- ``refilled``: 128 callers in a closed loop, 32 places, outputs per item lognormal (mean 94, at
  most 512). ``rate``: outputs per second. ``share``: of what batches give that are refilled at
  every step without any loss. ``to_end``: how many times what batches give that run to their end.
  ``first_steps``: from the start of an item until its first output is here, p99, in steps.
- ``overhead``: processor of the web process per step, by streams.
- ``slow``: the time of a step while as many clients do not read, over that without them.
- ``dropped``: 10,000 streams that are left after their first output. ``objects``: how many more
  there are in this process. ``growth``: of its memory and the worker's, bytes for each stream.
  ``held``: places that are still taken.
- ``neighbours``: p50 of items of 16 outputs while one of 512 is in every batch, over that without.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import json
import resource
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from adapters.steps import BASE, CALLERS, PER_ITEM, PLACES, lengths, refilled, to_the_end
from service_streamer import ManagedModel, Streamer

STREAMS = (1, 32, 128)
SLOW = 256
SHORT, LONG = 16, 512
DROPPED, AT_ONCE = 10_000, 100


class Steps(ManagedModel):
    """Items are numbers of outputs. Each output is when its item began, by the monotonic clock."""

    def init_model(self, base: float = BASE, per_item: float = PER_ITEM) -> None:
        self.base, self.per_item = base, per_item

    def start(self, items: list[int]) -> list[list[float]]:
        return [[float(item), time.monotonic()] for item in items]

    def step(self, states: list[list[float]]) -> list[tuple[float, bool]]:
        time.sleep(self.base + self.per_item * len(states))
        for state in states:
            state[0] -= 1
        return [(state[1], state[0] <= 0) for state in states]


def streamer(places: int, *init: float) -> Streamer:
    built = Streamer(Steps, batch_size=places, worker_timeout=None, model_init_args=init)
    built.wait_ready()
    return built


@contextlib.asynccontextmanager
async def running(tasks: Sequence[Any]) -> Any:
    begun = [asyncio.create_task(task) for task in tasks]
    try:
        yield
    finally:
        for task in begun:
            task.cancel()
        await asyncio.gather(*begun, return_exceptions=True)


async def _refilled(seconds: float) -> dict[str, float]:
    work = lengths(4000)
    items = itertools.cycle(work)
    outputs, firsts = [0], list[float]()

    async def caller(pool: Streamer) -> None:
        while True:
            is_first = True
            async for began in pool.astream(next(items)):
                outputs[0] += 1
                if is_first:
                    firsts.append(time.monotonic() - began)
                is_first = False

    with streamer(PLACES) as pool:
        async with running([caller(pool) for _ in range(CALLERS)]):
            await asyncio.sleep(3.0)
            firsts.clear()
            before, began = outputs[0], time.monotonic()
            await asyncio.sleep(seconds)
            rate = (outputs[0] - before) / (time.monotonic() - began)
    step = BASE + PER_ITEM * PLACES
    return {
        "rate": rate,
        "share": rate / refilled(work, PLACES, 20_000),
        "to_end": rate / to_the_end(work, PLACES),
        "first_steps": statistics.quantiles(firsts, n=100)[-1] / step,
    }


async def _overhead(streams: int, seconds: float) -> dict[str, float]:
    async def consume(pool: Streamer) -> None:
        async for _ in pool.astream(10**9):
            pass

    with streamer(streams, 5e-3, 0.0) as pool:
        async with running([consume(pool) for _ in range(streams)]):
            await asyncio.sleep(1.0)
            steps, spent = pool.metrics.sizes.count, time.process_time()
            await asyncio.sleep(seconds)
            spent = time.process_time() - spent
            return {"per_step": spent / (pool.metrics.sizes.count - steps)}


async def _slow(seconds: float) -> dict[str, float]:
    with streamer(2 * SLOW, 5e-3, 0.0) as pool:

        async def step() -> float:
            """Seconds of one, for those who read."""
            began, count = time.monotonic(), 0
            async for _ in pool.astream(10**9):
                count += 1
                if time.monotonic() - began >= seconds:
                    break
            return (time.monotonic() - began) / count

        without = await step()
        idle = [pool.astream(10**9, max_buffered=64) for _ in range(SLOW)]
        await asyncio.sleep(3.0)  # until all of them are behind
        ratio = await step() / without
        del idle
    return {"slower": ratio}


async def _dropped() -> dict[str, float]:
    async def leave(pool: Streamer) -> None:
        async for _ in pool.astream(10**9):
            break

    async def drop(pool: Streamer, count: int) -> tuple[int, int]:
        """Objects, and bytes of memory, when so many more have been dropped."""
        for _ in range(count // AT_ONCE):
            await asyncio.gather(*(leave(pool) for _ in range(AT_ONCE)))
        async for _ in pool.astream(1):  # by its end the worker has let go of all others
            pass
        gc.collect()
        workers = [Path("/proc/self"), *_children()]
        return len(gc.get_objects()), sum(map(_resident, workers))

    with streamer(AT_ONCE, 5e-4, 0.0) as pool:
        objects, memory = await drop(pool, DROPPED // 5)
        more, most = await drop(pool, DROPPED)
        held = pool.stats().in_flight
    return {"objects": more - objects, "growth": (most - memory) / DROPPED, "held": held}


def _children() -> list[Path]:
    own = Path("/proc/self/task").iterdir()
    return [Path("/proc", pid) for task in own for pid in (task / "children").read_text().split()]


def _resident(process: Path) -> int:
    return int(process.joinpath("statm").read_text().split()[1]) * resource.getpagesize()


async def _neighbours(seconds: float) -> dict[str, float]:
    async def once(pool: Streamer, length: int) -> float:
        began = time.monotonic()
        async for _ in pool.astream(length):
            pass
        return time.monotonic() - began

    async def again(pool: Streamer, length: int) -> None:
        while True:
            await once(pool, length)

    async def short(pool: Streamer) -> float:
        took, until = list[float](), time.monotonic() + seconds
        while time.monotonic() < until:
            took += await asyncio.gather(*(once(pool, SHORT) for _ in range(7)))
        return statistics.median(took)

    with streamer(8) as pool:
        without = await short(pool)
        async with running([again(pool, LONG)]):
            return {"slower": await short(pool) / without}


def rows(seconds: float) -> Iterator[dict[str, Any]]:
    yield {"point": {"question": "refilled"}, "figures": asyncio.run(_refilled(seconds))}
    for streams in STREAMS:
        found = asyncio.run(_overhead(streams, seconds / 2))
        yield {"point": {"question": "overhead", "streams": streams}, "figures": found}
    yield {"point": {"question": "slow"}, "figures": asyncio.run(_slow(seconds / 2))}
    yield {"point": {"question": "dropped"}, "figures": asyncio.run(_dropped())}
    yield {"point": {"question": "neighbours"}, "figures": asyncio.run(_neighbours(seconds / 2))}


def main() -> None:
    options = json.loads(sys.argv[1]) if len(sys.argv) > 1 else {}
    for row in rows(options.get("seconds", 10.0)):
        print(json.dumps(row), flush=True)
    print(json.dumps({"ended": True}), flush=True)


if __name__ == "__main__":
    main()
