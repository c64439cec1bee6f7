"""Run ``python example/future_example.py``: how many sentences per second, with and without.

Each sentence is submitted alone, as a user would send it; the streamers make the batches.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Iterable

from tqdm import tqdm

from bert_model import ManagedBertModel, TextInfillingModel
from service_streamer import Streamer, ThreadedStreamer

BATCH_SIZE = 64
SENTENCES = (
    "Happy birthday to [MASK].",
    "twinkle twinkle [MASK] star.",
    "the answer to life, the [MASK], and everything.",
)


def progress(name: str, count: int) -> tqdm[None]:
    return tqdm(total=count, desc=f"{name:24}", unit=" sentences", mininterval=0.5)


def measure_direct(
    name: str, model: TextInfillingModel, sentences: list[str], batch_size: int
) -> float:
    """Sentences per second of the model alone."""
    started = time.perf_counter()
    with progress(name, len(sentences)) as bar:
        for start in range(0, len(sentences), batch_size):
            bar.update(len(model.predict(sentences[start : start + batch_size])))
    return len(sentences) / (time.perf_counter() - started)


def measure_futures(
    name: str, streamer: Streamer | ThreadedStreamer, sentences: list[str]
) -> float:
    """Sentences per second of a streamer, which this closes."""
    with streamer:
        streamer.wait_ready()  # loading the model is not what we measure
        streamer.predict(sentences[:BATCH_SIZE])  # nor is a first batch, which is slower
        started = time.perf_counter()
        with progress(name, len(sentences)) as bar:
            futures = [streamer.submit([sentence]) for sentence in sentences]
            for future in futures:
                bar.update(len(future.result()))
        return len(sentences) / (time.perf_counter() - started)


def measure(sentences: list[str], workers: Iterable[int], devices: list[str]) -> dict[str, float]:
    """Name -> sentences per second."""
    model = TextInfillingModel()
    model.predict(sentences[:BATCH_SIZE])
    rates: dict[str, float] = {}
    name = "one by one"
    rates[name] = measure_direct(name, model, sentences, 1)
    name = f"batches of {BATCH_SIZE}"
    rates[name] = measure_direct(name, model, sentences, BATCH_SIZE)
    name = "ThreadedStreamer"
    rates[name] = measure_futures(name, ThreadedStreamer(model.predict, BATCH_SIZE), sentences)
    for number in workers:
        name = f"Streamer, {number} worker" + "s" * (number > 1)
        streamer = Streamer(
            ManagedBertModel, BATCH_SIZE, worker_num=number, cuda_devices=devices or None
        )
        rates[name] = measure_futures(name, streamer, sentences)
    return rates


def worker_numbers(text: str) -> list[int]:
    """The type of ``--workers``."""
    return [int(number) for number in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description="Sentences per second, with and without batching.")
    parser.add_argument("--sentences", type=int, default=2000)
    parser.add_argument("--workers", type=worker_numbers, default=[1, 2, 4], help="such as 1,2,4")
    args = parser.parse_args()
    if args.sentences < 1:
        parser.error("--sentences must be at least 1")

    from flask_multigpu_example import visible_gpus  # here, or every worker would load Flask

    devices = visible_gpus()
    if not devices:
        print("no GPU here: on a CPU, workers beyond its cores make nothing faster")
    sentences = list(itertools.islice(itertools.cycle(SENTENCES), args.sentences))
    rates = measure(sentences, args.workers, devices)
    slowest = rates["one by one"]
    print(f"\n{'how':24}{'sentences/s':>14}{'speed-up':>10}")
    for name, rate in rates.items():
        print(f"{name:24}{rate:14,.0f}{rate / slowest:9.1f}x")


if __name__ == "__main__":
    main()
