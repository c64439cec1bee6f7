"""Measurements of MiniLM: sentences per second, as JSON by batch size; ``lengths.py`` runs it.

``python lengths_driver.py in-order|sorted|streamer|without-length mixed|equal COUNT SIZE,SIZE,...``
where a streamer may also have ``default`` for its size.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from minilm import MiniLM, MiniLMWithoutLength, sentences
from service_streamer import Streamer

CALLERS = 256
_STREAMERS = {"streamer": MiniLM, "without-length": MiniLMWithoutLength}


def closed_loop(predict: Callable[[list[str]], Any], work: list[str]) -> float:
    """Sentences per second of callers that take one after the other, until none is left."""
    waiting = iter(work)  # a list's, of which threads can take
    failures: list[BaseException] = []

    def call() -> None:
        try:
            for sentence in waiting:
                assert len(predict([sentence])) == 1
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=call, daemon=True) for _ in range(CALLERS)]
    started = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return len(work) / (time.perf_counter() - started)


def streamed(model: type[MiniLMWithoutLength], kind: str, count: int, size: str) -> float:
    are_equal = kind == "equal"
    made = Streamer(model) if size == "default" else Streamer(model, batch_size=int(size))
    with made as streamer:
        # So that what is learned is learned; other sentences, since some remember.
        closed_loop(streamer.predict, sentences(max(count // 4, 64), seed=2, are_equal=are_equal))
        return closed_loop(streamer.predict, sentences(count, are_equal=are_equal))


def direct(model: MiniLMWithoutLength, work: list[str], size: int) -> float:
    """Sentences per second of one thread with batches of this size, without anything between."""
    model.predict(work[:size])
    started = time.perf_counter()
    for first in range(0, len(work), size):
        model.predict(work[first : first + size])
    return len(work) / (time.perf_counter() - started)


def main() -> None:
    way, kind, count, sizes = sys.argv[1:]
    if way in _STREAMERS:
        rates = {
            size: streamed(_STREAMERS[way], kind, int(count), size) for size in sizes.split(",")
        }
    else:
        model = MiniLM()
        model.init_model()
        work = sentences(int(count), are_equal=kind == "equal")
        if way == "sorted":
            work.sort(key=MiniLM.length)
        rates = {size: direct(model, work, int(size)) for size in sizes.split(",")}
    print(json.dumps(rates))


if __name__ == "__main__":
    main()
