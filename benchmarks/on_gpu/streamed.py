"""A Streamer with some workers, in turn with the same model batched by hand in one process.

Rows of the kind "window" are of one round, in which each way had two windows (``turns``).
"""

from __future__ import annotations

import functools
import itertools
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from on_gpu.beside import Beside
from on_gpu.device import as_visible
from on_gpu.model import Bert, Tokens, sentences
from on_gpu.notes import activity, batches_in, workers_in
from on_gpu.nvml import Watch
from on_gpu.running import Row, answer
from on_gpu.turns import in_turn
from service_streamer import Streamer

__all__ = ["PATIENCE", "Window", "feed"]

#: How long anything may take, seconds: loading models, one result.
PATIENCE = 120

#: Different sentences. Arbitrary; more than a large batch has.
_SENTENCES = 4096


class Window(NamedTuple):
    """A time of steady load.

    Attributes:
        rate: items per second, counted in whole batches.
        start, stop: nanoseconds of the monotonic clock.
    """

    rate: float
    start: int
    stop: int


def feed(
    streamer: Streamer,
    calls: Iterable[list[Any]],
    *,
    in_flight: int,
    step: int,
    warm: float,
    seconds: float,
    check: Callable[[list[Any]], None] | None = None,
) -> Window:
    """Keep calls in flight, from one thread; what came in a window after the first seconds.

    All are answered when it returns.

    Args:
        in_flight: so many calls.
        step: the clock is read when so many items have come, a batch: they come together.
        warm, seconds: how long at least before the window, and in it.
        check: gets the results of each call.
    """
    waiting: deque[Any] = deque()
    source = iter(calls)
    opens_at = time.monotonic_ns() + int(warm * 1e9)
    start = done = counted = since = 0
    while True:
        while len(waiting) < in_flight:
            waiting.append(streamer.submit(next(source)))
        results = waiting.popleft().result(PATIENCE)
        if check is not None:
            check(results)
        done += len(results)
        if done - since < step:
            continue
        since, now = done, time.monotonic_ns()
        if not start:
            if now >= opens_at:
                start, counted = now, done
        elif now - start >= seconds * 1e9:
            break
    for future in waiting:
        future.result(PATIENCE)
    return Window((done - counted) / (now - start) * 1e9, start, now)


def measure(settings: Row) -> Iterator[Row]:
    devices, kind = settings["devices"], settings["kind"]
    watched = devices if kind == "cuda" else []
    with tempfile.TemporaryDirectory() as folder, Watch(watched) as watch:
        before = watch.memory_used_mb()
        began = time.monotonic()
        with (
            Beside("hand", {"kind": kind}, devices[0]) as hand,
            Streamer(
                Bert,
                batch_size=settings["batch_size"],
                worker_num=settings["workers"],
                cuda_devices=[as_visible(device) for device in devices],
                model_init_args=(folder,),
                model_init_kwargs={"kind": kind},
                worker_timeout=PATIENCE,
                batch_timeout=PATIENCE,
                start_timeout=PATIENCE,
            ) as streamer,
        ):
            streamer.wait_ready(PATIENCE)
            hand.wait_ready()
            loaded = watch.memory_used_mb()
            started = round(time.monotonic() - began, 1)
            yield from _windows(settings, streamer, hand, watch, Path(folder))
            yield {
                "kind": "processes",
                "workers": settings["workers"],
                "batch_size": settings["batch_size"],
                "start_s": started,
                **_memory(settings["workers"], before, loaded, watch, Path(folder)),
                "told": workers_in(Path(folder)),
                "stats": streamer.stats().gist,
                "torch_in_web_process": "torch" in sys.modules,
            }


def _windows(
    settings: Row, streamer: Streamer, hand: Beside, watch: Watch, folder: Path
) -> Iterator[Row]:
    size, workers, kind = settings["batch_size"], settings["workers"], settings["kind"]
    timed = {"warm": settings["warm"], "seconds": settings["seconds"]}
    for tokens, rounds in zip(settings["tokens"], settings["rounds"], strict=True):
        given = sentences(_SENTENCES, tokens, kind)
        batch = {"tokens": tokens, "size": size}
        device_ms = hand.ask("device_ms", **batch)

        def by_hand(batch: Row = batch) -> Row:
            return {"per_s": hand.ask("rate", **batch, **timed)}

        def streamed(items: int, warm: float, given: Sequence[Tokens] = given) -> Row:
            window = feed(
                streamer,
                itertools.cycle(
                    [list(given[i : i + items]) for i in range(0, len(given) - items + 1, items)]
                ),
                in_flight=max(2 * workers, 4 * workers * size // items),
                step=size,
                warm=warm,
                seconds=settings["seconds"],
            )
            return {
                "per_s": window.rate,
                # What is said in the first half is of before.
                **watch.between((window.start + window.stop) // 2, window.stop),
                **activity(batches_in(folder), window.start, window.stop),
            }

        # The streamer learns what batches cost.
        streamed(settings["calls"][0], settings["first_warm"])
        ways = {"by hand": by_hand} | {
            str(items): functools.partial(streamed, items, settings["warm"])
            for items in settings["calls"]
        }
        for number, rows in in_turn(ways, rounds):
            hand_per_s = rows.pop("by hand")["per_s"]
            for items, row in rows.items():
                per_s = row.pop("per_s")
                yield {
                    "kind": "window",
                    "workers": workers,
                    "batch_size": size,
                    "tokens": tokens,
                    "call_items": int(items),
                    "round": number,
                    "by_hand_per_s": hand_per_s,
                    "streamed_per_s": per_s,
                    "share": per_s / hand_per_s,
                    "device_ms": device_ms,
                    "device_share": _device_share(per_s, size, device_ms, len(settings["devices"])),
                    **row,
                }


def _device_share(per_s: float, size: int, device_ms: float | None, devices: int) -> float | None:
    """Items times the device time of each, in full batches, of the time that there was."""
    return None if device_ms is None else per_s / size * device_ms / 1e3 / devices


def _memory(
    workers: int, before: float | None, loaded: float | None, watch: Watch, folder: Path
) -> Row:
    """Of one process, in MiB: the device's used memory divided among the workers and the process
    that is batched by hand, which are alike; and what torch says that it has had."""
    used = watch.memory_used_mb()
    peaks = [batches[-1] for batches in batches_in(folder) if batches]

    def each(now: float | None) -> float | None:
        return None if now is None or before is None else round((now - before) / (workers + 1))

    return {
        "loaded_mb": each(loaded),
        "used_mb": each(used),
        "allocated_mb": round(max((batch.allocated for batch in peaks), default=0) / 2**20) or None,
        "reserved_mb": round(max((batch.reserved for batch in peaks), default=0) / 2**20) or None,
    }


if __name__ == "__main__":
    answer(measure)
