"""Real models, and arrays: what a simulated model leaves out.

The processor computes them, so what a system uses of it is missing there; and sentences have
lengths, arrays have bytes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from yardstick.libraries import rows
from yardstick.plan import FULL, Scale, Section, Settings, System
from yardstick.processes import RunFailed
from yardstick.record import Row

__all__ = ["SECTIONS", "SIZES"]

#: Of arrays, bytes; the third is an image of 224 x 224 pixels in three colours, float32.
SIZES = (4096, 65_536, 602_112, 4_194_304)
_IMAGE = SIZES[2:3]
_CALLERS_INFILLING = (64, 128, 256)
_BUSY = _CALLERS_INFILLING[1:2]
_CALLERS_MINILM = 256
_CALLERS_ARRAYS = 16
#: Sentences of MiniLM, of each measurement.
_SENTENCES, _SENTENCES_QUICK = 512, 96
#: Seconds for one start of a system and all of its points.
_TIMEOUT = 180.0

Measure = Callable[[System, Settings, Scale], Iterator[Row]]


def _infilling(system: System, settings: Settings, scale: Scale) -> Iterator[Row]:
    """Callers, each with a sentence of its own, in turn with batches of such sentences by hand."""
    yield from _infilling_of(
        _BUSY if scale.is_quick else _CALLERS_INFILLING, system, settings, scale
    )


def _infilling_of(
    callers: Sequence[int], system: System, settings: Settings, scale: Scale
) -> Iterator[Row]:
    points = [{"callers": count} for count in callers]
    yield from _answered(
        rows(
            system,
            settings,
            _TIMEOUT,
            workload="infilling",
            driver="beside-hand",
            seconds=2 * scale.seconds,  # many batches, half of the time by hand
            points=points,
        )
    )


def _minilm(system: System, settings: Settings, scale: Scale) -> Iterator[Row]:
    """256 callers who take one sentence after the other until none is left."""
    count = _SENTENCES_QUICK if scale.is_quick else _SENTENCES
    spec: Mapping[str, Any] = {"driver": "until-empty", "callers": min(_CALLERS_MINILM, count)}
    if _is_by_hand(system):
        spec = {"driver": "by-hand", "repeats": False}
    yield from rows(
        system, settings, _TIMEOUT, workload="minilm", seconds=0.0, points=[{}], count=count, **spec
    )


def _arrays(system: System, settings: Settings, scale: Scale) -> Iterator[Row]:
    """16 callers, each with an array of its own, of an echo; or plain copies of 16 arrays."""
    yield from _arrays_of(_IMAGE if scale.is_quick else SIZES, system, settings, scale)


def _arrays_of(
    sizes: Sequence[int], system: System, settings: Settings, scale: Scale
) -> Iterator[Row]:
    spec: Mapping[str, Any] = {"driver": "threads", "callers": _CALLERS_ARRAYS}
    if _is_by_hand(system):
        spec = {"driver": "by-hand", "count": _CALLERS_ARRAYS}
    points = [{"bytes": size} for size in sizes]
    seconds = scale.seconds / 2
    yield from _answered(
        rows(system, settings, _TIMEOUT, workload="arrays", seconds=seconds, points=points, **spec)
    )


def _answered(measured: Iterator[Row]) -> Iterator[Row]:
    """Raises RunFailed at a point where no call was answered within the window."""
    for row in measured:
        if not row.figures["rate"]:
            raise RunFailed(f"nothing was answered in time at {dict(row.point)}")
        yield row


def _is_by_hand(system: System) -> bool:
    return system.launch["adapter"] in ("direct", "copy")


def _rate(measure: Measure) -> Callable[[System, Settings], float]:
    """For the sweep: that of the one point that this measures."""

    def sweeps(system: System, settings: Settings) -> float:
        (row,) = measure(system, settings, FULL)
        return float(row.figures["rate"])

    return sweeps


SECTIONS = (
    Section(
        "infilling",
        "Text infilling with BERT on this processor",
        (
            "by-hand", "threaded", "streamer", "streamer-serial",
            "original-threaded", "original-streamer", "batched",
        ),
        _infilling,
        quick=("by-hand", "streamer", "original-streamer"),
        situation="infilling",
        sweeps=_rate(functools.partial(_infilling_of, _BUSY)),
        rounds=2,
    ),
    Section(
        "minilm",
        "Sentences of unlike lengths on MiniLM, 256 callers",
        (
            "by-hand-one", "by-hand-64", "by-hand-sorted",
            "threaded", "streamer", "streamer-unsorted",
            "original-streamer", "batched", "infinity",
        ),
        _minilm,
        quick=("by-hand-64", "streamer"),
        situation="minilm",
        sweeps=_rate(_minilm),
        rounds=2,
        # Of 64 in the order of arrival most is padding: those who do not sort want fewer.
        grid={
            "original-streamer": {"max_latency": (0.005,), "batch_size": (4, 8, 16, 64)},
            "batched": {"timeout_ms": (1.0,), "batch_size": (4, 8, 16, 64)},
        },
    ),
    Section(
        "arrays",
        "Arrays to a worker and back, 16 callers",
        ("copy", "threaded", "streamer", "streamer-pipes", "original-streamer", "ray"),
        _arrays,
        quick=("copy", "streamer", "original-streamer"),
        situation="arrays",
        sweeps=_rate(functools.partial(_arrays_of, _IMAGE)),
        rounds=2,
    ),
)  # fmt: skip
