"""Batched by hand, one size after the other."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from on_gpu.beside import Beside
from on_gpu.running import Row, answer


def measure(settings: Row) -> Iterator[Row]:
    timed = {"warm": settings["warm"], "seconds": settings["seconds"]}
    with Beside("hand", {"kind": settings["kind"]}, settings["device"]) as hand:
        hand.wait_ready()
        for tokens, size in itertools.product(settings["tokens"], settings["sizes"]):
            batch = {"tokens": tokens, "size": size}
            rate = hand.ask("rate", **batch, **timed)
            yield {
                "tokens": tokens,
                "batch_size": size,
                "sentences_per_s": rate,
                "batch_ms": 1e3 * size / rate,
                "forward_ms": hand.ask("forward_ms", **batch),
                "device_ms": hand.ask("device_ms", **batch),
            }


if __name__ == "__main__":
    answer(measure)
