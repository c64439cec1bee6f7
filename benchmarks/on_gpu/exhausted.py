"""A device whose memory does not suffice for a batch, really: what comes of the calls.

In two ways. With a *share*, torch refuses its process more than a part of the device; with
*ballast*, the device itself is full but for a little. Both leave room for the activations of one
and a half times ``FITS`` sentences, and batches are many times that.
"""

from __future__ import annotations

import contextlib
import itertools
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from on_gpu.beside import Beside
from on_gpu.device import as_visible
from on_gpu.model import Bert, Tokens, sentences
from on_gpu.notes import Batch, batches_in
from on_gpu.running import Kind, Row, answer
from on_gpu.streamed import PATIENCE, feed
from service_streamer import Streamer

__all__ = ["FITS", "CrampedBert", "judge"]

FITS = 64

#: The most sentences of a batch.
_LARGEST = 512

#: Results are those of half precision, and differ with the size of a batch: a word is right whose
#: logit is within this of the best. Of 30 522 words seldom more than one or two are.
_TOLERANCE = 0.05

#: For kernels that are loaded late, where the device itself is full, bytes.
_SPARE = 256 << 20


class CrampedBert(Bert):
    """BERT on a device that is nearly full."""

    def init_model(self, folder: str, *, kind: Kind = "cuda", way: str = "share") -> None:
        super().init_model(folder, kind=kind)
        cuda = self.torch.cuda

        def compute(size: int) -> None:
            self.logits(self.preprocess(list(sentences(size, 128, kind))))

        # While there is room: kernels are loaded when they are first needed, and those of large
        # batches are others. Where one that is needed later finds none, CUDA says so in other ways.
        with contextlib.suppress(self.torch.OutOfMemoryError):
            compute(_LARGEST)
        cuda.empty_cache()
        cuda.reset_peak_memory_stats()
        weights = cuda.memory_reserved()
        for _ in range(2):
            compute(FITS)
        cuda.synchronize()
        room = int(weights + 1.5 * (cuda.max_memory_reserved() - weights))
        cuda.empty_cache()
        free, total = cuda.mem_get_info()
        if way == "share":
            cuda.set_per_process_memory_fraction(room / total)
        else:
            left = room - cuda.memory_reserved() + _SPARE
            self._ballast = self.torch.empty(free - left, dtype=self.torch.uint8, device="cuda")


def measure(settings: Row) -> Iterator[Row]:
    tokens, size, device = settings["tokens"], settings["batch_size"], settings["device"]
    given = list(sentences(settings["items"], tokens, "cuda"))
    with Beside("hand", {"kind": "cuda"}, device) as hand:
        hand.wait_ready()
        right = hand.ask("best", given=given, size=FITS // 2, tolerance=_TOLERANCE)
    for way in settings["ways"]:
        with tempfile.TemporaryDirectory() as folder:
            yield {
                "way": way,
                "tokens": tokens,
                "batch_size": size,
                **_survive(settings, way, given, right, Path(folder)),
            }


def _survive(
    settings: Row, way: str, given: list[Tokens], right: list[list[int]], folder: Path
) -> Row:
    size = settings["batch_size"]
    with Streamer(
        CrampedBert,
        batch_size=size,
        cuda_devices=[as_visible(settings["device"])],
        model_init_args=(str(folder),),
        model_init_kwargs={"way": way},
        batch_timeout=PATIENCE,
        start_timeout=PATIENCE,
    ) as streamer:
        streamer.wait_ready(PATIENCE)
        began = time.monotonic()
        futures = [streamer.submit([item]) for item in given]
        words: list[Any] = []
        errors: list[str] = []
        for future in futures:
            try:
                words += future.result(PATIENCE)
            except Exception as error:
                words.append(None)
                errors.append(f"{type(error).__name__}: {error}")
        took = time.monotonic() - began
        until = time.monotonic_ns()
        window = feed(
            streamer,
            itertools.cycle([[item] for item in given]),
            in_flight=2 * size,
            step=FITS,
            warm=settings["warm"],
            seconds=settings["seconds"],
        )
        stats = streamer.stats()
    # Of each process its own: of several, if a worker died.
    batches = sorted(itertools.chain.from_iterable(batches_in(folder)))
    return {
        **judge(words, right),
        "errors": errors[:3],
        "seconds": round(took, 2),
        **_runs([batch for batch in batches if batch.left <= until]),
        "afterwards_per_s": window.rate,
        "afterwards_ran_out": sum(b.has_run_out for b in batches if b.left > until),
        "ceiling": stats.ceilings.get(0),
        "failed": stats.failed,
        "restarts": stats.restarts,
        "stats": stats.gist,
    }


def judge(words: Sequence[int | None], right: Sequence[Sequence[int]]) -> Row:
    """How many calls were answered, and rightly.

    Args:
        words: the results; None where a call failed.
        right: of each sentence the word that is best by hand, and then those as good as that.
    """
    pairs = list(zip(words, right, strict=True))
    return {
        "calls": len(pairs),
        "answered": sum(word is not None for word in words),
        "right": sum(word in accepted for word, accepted in pairs),
        "same": sum(word == accepted[0] for word, accepted in pairs),
    }


def _runs(batches: Sequence[Batch]) -> Row:
    return {
        "runs": len(batches),
        "ran_out": sum(batch.has_run_out for batch in batches),
        "sizes": [-batch.size if batch.has_run_out else batch.size for batch in batches[:40]],
    }


if __name__ == "__main__":
    answer(measure)
