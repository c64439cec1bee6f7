"""A Streamer with some workers, in turn with the same model batched by hand in one process."""

from __future__ import annotations

import itertools
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from on_gpu.device import Watch, as_visible, memory_used_mb
from on_gpu.hand import HandProcess
from on_gpu.model import Bert, sentences
from on_gpu.notes import activity, batches_in, workers_in
from on_gpu.running import Row, answer
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
    devices, is_small = settings["devices"], settings["is_small"]
    watched = [] if is_small else devices
    with tempfile.TemporaryDirectory() as folder, Watch(watched) as watch:
        before = memory_used_mb(watched) if watched else None
        began = time.monotonic()
        with (
            HandProcess(devices[0], is_small=is_small) as hand,
            Streamer(
                Bert,
                batch_size=settings["batch_size"],
                worker_num=settings["workers"],
                cuda_devices=[as_visible(device) for device in devices],
                model_init_args=(folder,),
                model_init_kwargs={"is_small": is_small},
                worker_timeout=PATIENCE,
                batch_timeout=PATIENCE,
                start_timeout=PATIENCE,
            ) as streamer,
        ):
            streamer.wait_ready(PATIENCE)
            hand.wait_ready()
            loaded = memory_used_mb(watched) if watched else None
            started = round(time.monotonic() - began, 1)
            yield from _windows(settings, streamer, hand, watch, Path(folder))
            yield {
                "kind": "processes",
                "workers": settings["workers"],
                "batch_size": settings["batch_size"],
                "start_s": started,
                **_memory(settings["workers"], before, loaded, watched, Path(folder)),
                "told": workers_in(Path(folder)),
                "stats": streamer.stats().gist,
                "torch_in_web_process": "torch" in sys.modules,
            }


def _windows(
    settings: Row, streamer: Streamer, hand: HandProcess, watch: Watch, folder: Path
) -> Iterator[Row]:
    size, workers = settings["batch_size"], settings["workers"]
    for tokens, rounds in zip(settings["tokens"], settings["rounds"], strict=True):
        given = sentences(_SENTENCES, tokens, is_small=settings["is_small"])
        warm = settings["first_warm"]  # the streamer learns what batches cost
        by_hand = 0.0
        for number, items in itertools.product(range(rounds), settings["calls"]):
            if items == settings["calls"][0]:
                by_hand = hand.rate(
                    tokens, size, warm=settings["warm"], seconds=settings["seconds"]
                )
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
            warm = settings["warm"]
            yield {
                "kind": "window",
                "workers": workers,
                "batch_size": size,
                "tokens": tokens,
                "call_items": items,
                "round": number,
                "by_hand_per_s": by_hand,
                "streamed_per_s": window.rate,
                "share": window.rate / by_hand,
                # What is said in the first half is of before.
                "utilisation": watch.utilisation((window.start + window.stop) // 2, window.stop),
                **activity(batches_in(folder), window.start, window.stop),
            }


def _memory(
    workers: int, before: float | None, loaded: float | None, watched: list[str], folder: Path
) -> Row:
    """Of one process, in MiB: the device's used memory divided among the workers and the process
    that is batched by hand, which are alike; and what torch says that it has had."""
    used = memory_used_mb(watched) if watched else None
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
