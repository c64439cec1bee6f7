"""Batched by hand, in one process: what the same model does without any middleware.

A program of its own, which measures sizes one after the other; and ``HandProcess``, which other
measurements have beside them, so that both are measured in turn.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import statistics
import tempfile
import time
import traceback
from collections.abc import Iterator
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Self

from on_gpu.model import Bert, Tokens, sentences
from on_gpu.running import Row, answer

__all__ = ["HandProcess"]

#: Different batches in turn. Arbitrary.
_BATCHES = 8
#: At least, before the clock counts, and while it does.
_FEWEST = 3
#: Of a forward pass on tensors that are on the device already.
_PASSES = 9
#: What the device waits before such a pass, so that all of it is there when it begins: some 20 ms.
_SLEEP_CYCLES = 40_000_000
#: How long a process may take for anything, seconds.
_PATIENCE = 180


def measure(settings: Row) -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as folder:
        model = _loaded(folder, settings["is_small"])
        for tokens, size in itertools.product(settings["tokens"], settings["sizes"]):
            rate = _rate(model, tokens, size, settings)
            yield {
                "tokens": tokens,
                "batch_size": size,
                "sentences_per_s": rate,
                "batch_ms": 1e3 * size / rate,
                **_forward_times(model, tokens, size, is_small=settings["is_small"]),
            }


def _loaded(folder: str, is_small: bool) -> Bert:
    model = Bert()
    model.init_model(folder, is_small=is_small)
    return model


def _rate(model: Bert, tokens: int, size: int, settings: Row) -> float:
    """Sentences per second: making tensors of lists, copies both ways and reading the results."""
    given = sentences(_BATCHES * size, tokens, is_small=settings["is_small"])
    batches = itertools.cycle([list(given[i : i + size]) for i in range(0, len(given), size)])
    for seconds in (settings["warm"], settings["seconds"]):
        done, started = 0, time.perf_counter()
        while done < _FEWEST or time.perf_counter() - started < seconds:
            model.predict(next(batches))
            done += 1
        elapsed = time.perf_counter() - started
    return done * size / elapsed


def _forward_times(model: Bert, tokens: int, size: int, *, is_small: bool) -> Row:
    """Of the forward pass alone, by CUDA's events: as it runs, and without waiting for the host.

    The second is with all kernels queued before the first one starts. Where the two differ, the
    device idles between kernels, and several processes can fill that.
    """
    if is_small:
        return {"forward_ms": None, "device_ms": None}
    given = model.torch.tensor(list(sentences(size, tokens, is_small=False))).to("cuda")
    return {
        "forward_ms": _pass_ms(model, given, has_lead=False),
        "device_ms": _pass_ms(model, given, has_lead=True),
    }


def _pass_ms(model: Bert, given: Any, *, has_lead: bool) -> float | None:
    cuda = model.torch.cuda
    times: list[float] = []
    for _ in range(_PASSES):
        began, ended = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
        cuda.synchronize()
        if has_lead:
            if not hasattr(cuda, "_sleep"):  # it is torch's own, not promised to anybody
                return None
            cuda._sleep(_SLEEP_CYCLES)
        began.record()
        model.forward(given)
        ended.record()
        cuda.synchronize()
        times.append(began.elapsed_time(ended))
    return statistics.median(times)


class HandProcess:
    """The same model in a process beside, which computes only when it is asked to.

    Args:
        device: its ``CUDA_VISIBLE_DEVICES``; "cpu" for none.
        is_small: see ``Bert``.
    """

    def __init__(self, device: str, *, is_small: bool) -> None:
        self._settings = {"is_small": is_small}
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(theirs, device, is_small), name="hand", daemon=True
        )
        self._process.start()
        theirs.close()

    def wait_ready(self) -> None:
        self._answer()

    def rate(self, tokens: int, size: int, *, warm: float, seconds: float) -> float:
        """Sentences per second, in batches of this size."""
        timed = {**self._settings, "warm": warm, "seconds": seconds}
        self._connection.send(("rate", tokens, size, timed))
        rate: float = self._answer()
        return rate

    def best(self, given: list[Tokens], size: int, tolerance: float) -> list[list[int]]:
        """Of each sentence the likeliest word, and then those within the tolerance of it."""
        self._connection.send(("best", given, size, tolerance))
        words: list[list[int]] = self._answer()
        return words

    def _answer(self) -> Any:
        if not self._connection.poll(_PATIENCE):
            raise RuntimeError(f"hand-batched: no answer within {_PATIENCE} s")
        try:
            error, value = self._connection.recv()
        except EOFError:
            raise RuntimeError("hand-batched: its process has died") from None
        if error:
            raise RuntimeError(f"hand-batched: {error}")
        return value

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """End the process: its memory on the device is free afterwards."""
        self._connection.close()
        self._process.join(5)
        self._process.kill()
        self._process.join()


def _serve(connection: Connection, device: str, is_small: bool) -> None:
    Bert.set_gpu_id(device)
    with tempfile.TemporaryDirectory() as folder, contextlib.suppress(EOFError, BrokenPipeError):
        try:
            model = _loaded(folder, is_small)
            connection.send(("", None))
            while True:
                what, *arguments = connection.recv()
                asked = _rate if what == "rate" else _best
                connection.send(("", asked(model, *arguments)))
        except (EOFError, BrokenPipeError):
            raise
        except Exception:
            connection.send((traceback.format_exc(), None))


def _best(model: Bert, given: list[Tokens], size: int, tolerance: float) -> list[list[int]]:
    words: list[list[int]] = []
    for start in range(0, len(given), size):
        logits = model.logits(given[start : start + size]).float()
        values, found = logits.topk(8, dim=-1)
        for row, ids in zip(values.tolist(), found.tolist(), strict=True):
            words.append(
                [i for value, i in zip(row, ids, strict=True) if value >= row[0] - tolerance]
            )
    return words


if __name__ == "__main__":
    answer(measure)
