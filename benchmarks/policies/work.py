"""What is to be served: arrival processes at a rate of 1, and models by what their batches cost."""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from random import Random

from policies.service import Duration, Job
from service_streamer.simulate import CostModel, LogNormal

__all__ = ["ARRIVALS", "BATCH_SIZE", "MODELS", "Model", "at_rate", "read_times"]

#: The most items of a batch, for all.
BATCH_SIZE = 64
#: Jobs of a random process.
JOBS = 6_000
_TRACES = Path(__file__).parent / "traces"


@dataclass(frozen=True)
class Model:
    """What batches cost.

    Attributes:
        cost: of a batch; see ``CostModel``.
        lengths: draws the length of an item; None where items have none.
        typical: the mean length.
    """

    cost: CostModel
    lengths: LogNormal | None = None
    typical: float = 1.0

    def duration(self) -> Duration:
        """Of a batch, seconds. Remembers what it has worked out."""
        known: dict[tuple[int, float], float] = {}
        cost = self.cost

        def duration(size: int, longest: float) -> float:
            found = known.get((size, longest))
            if found is None:
                found = known[size, longest] = cost.duration(size, size * longest)
            return found

        return duration

    @property
    def single(self) -> float:
        """Seconds for one item of the mean length."""
        return self.cost.duration(1, self.typical)

    @property
    def capacity(self) -> float:
        """The most items of the mean length that a worker computes per second."""
        return max(
            size / self.cost.duration(size, size * self.typical)
            for size in range(1, BATCH_SIZE + 1)
        )


#: Where the figures come from:
#:
#: - gpu: the simulated GPU of all benchmarks here (``adapters/workloads.py``);
#: - titan-xp: the BERT of the original's published tables, 12.78 calls per second one by one and
#:   422.88 in batches of 64 (``adapters/workloads.py``);
#: - minilm: all-MiniLM-L6-v2 on two cores, sentences of 25 words in the mean. The record of the
#:   benchmarks has 161 sentences per second one by one, and 344 sorted, in batches of 16. That
#:   makes 3.5 ms + 0.1075 ms for each word, padding included. It predicts 75 for batches of 64 in
#:   the order of arrival, where 71 were measured;
#: - minilm-even: the same, where all sentences have 25 words.
MODELS = {
    "gpu": Model(CostModel(5e-3, 1e-4)),
    "titan-xp": Model(CostModel(77.1e-3, 1.158e-3)),
    "minilm-even": Model(CostModel(3.5e-3, 25 * 0.1075e-3)),
    "minilm": Model(CostModel(3.5e-3, per_unit=0.1075e-3), LogNormal(25, 0.8), 25.0),
}


def _gamma(variation: float) -> Callable[[], list[float]]:
    """Gaps of a gamma distribution with this coefficient of variation; 1 makes it Poisson."""

    def times() -> list[float]:
        random, shape = Random(1), 1 / variation**2
        now, made = 0.0, []
        for _ in range(JOBS):
            now += random.gammavariate(shape, 1 / shape)
            made.append(now)
        return made

    return times


def _trace(name: str) -> Callable[[], list[float]]:
    return lambda: read_times(_TRACES / name)


#: Times of arrival, in the order of the tables, of one per time unit.
ARRIVALS = {
    "Poisson": _gamma(1),
    "Gamma, 2": _gamma(2),
    "Gamma, 4": _gamma(4),
    "Azure, conversation": _trace("azure-2023-conv.csv"),
    "Azure, code": _trace("azure-2023-code.csv"),
}


def read_times(path: Path, most: int | None = None) -> list[float]:
    """The arrivals of a recorded trace, scaled to one per time unit.

    Args:
        path: of a file of Azure's (``TIMESTAMP``: date and time) or of BurstGPT (``Timestamp``:
            seconds).
        most: read no more than so many.

    Raises:
        OSError: it cannot be read.
        ValueError: it has no such column, or less than two times.
    """
    times: list[float] = []
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            if len(times) == most:
                break
            if "TIMESTAMP" in row:
                whole, _, part = row["TIMESTAMP"].partition(".")
                seconds = (datetime.fromisoformat(whole) - datetime(2023, 1, 1)).total_seconds()
                times.append(seconds + float(f"0.{part or 0}"))
            elif "Timestamp" in row:
                times.append(float(row["Timestamp"]))
            else:
                raise ValueError(f"{path} has no column TIMESTAMP or Timestamp")
    if len(times) < 2:
        raise ValueError(f"{path} has less than two arrivals")
    times.sort()
    first, span = times[0], times[-1] - times[0]
    return [(at - first) * (len(times) - 1) / span for at in times]


def at_rate(
    times: Sequence[float], rate: float, deadline: float, lengths: LogNormal | None
) -> list[Job]:
    """The jobs at so many per second.

    Args:
        deadline: of each after its arrival, seconds; infinity for none.
        lengths: draws those of items; the same at each rate.
    """
    random = Random(2)
    return [
        Job(number, at / rate, at / rate + deadline, lengths(random) if lengths else 1.0)
        for number, at in enumerate(times)
    ]
