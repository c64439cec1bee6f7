"""The options of ``service-streamer simulate``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ...options.checks import Workers
from ...options.kinds import Count, File, Flag, Kind, Number, Seconds, changed, option
from ...options.table import BatchingOptions, ScaleOptions


@dataclass(frozen=True)
class BurstLoad(Kind):
    """So many calls, and after so many seconds again."""

    words = "a number of calls and seconds between bursts, such as 40/500ms"


@dataclass(frozen=True)
class MeanLength(Kind):
    """The mean length of items, and how far lengths spread."""

    words = "a mean length, such as 25, or with its spread 25:0.6"


@dataclass(frozen=True)
class LoadPhases(Kind):
    """Loads in turn, each for so many seconds."""

    words = "loads above 0 and how long each lasts, such as 0.2:60s,3:120s"


@dataclass(frozen=True, kw_only=True)
class SimulateOptions(ScaleOptions, BatchingOptions):
    """All options of ``service-streamer simulate``."""

    worker_num: Workers = changed(
        ScaleOptions, "worker_num", more="With 1:16 workers are started and ended by the load."
    )
    base: float = option(5e-3, Seconds(zero=True), "Time that any batch takes.", shown="5ms")
    per_item: float = option(1e-4, Seconds(zero=True), "Time that each item adds.", shown="100us")
    per_unit: float = option(
        0.0, Seconds(zero=True), "Time that each unit of length adds.",
        "Each item counts as if it were the longest of its batch.",
    )  # fmt: skip
    quadratic: float = option(
        0.0, Seconds(zero=True), "Time that the square of the longest length adds for each item.",
    )  # fmt: skip
    start_duration: float = option(
        5.0, Seconds(zero=True),
        "Time that a worker takes to load its model, of a range of workers.",
        shown="5s",
    )  # fmt: skip
    closed_loop: int | None = option(
        None, Count(none="no"), "Number of callers that each wait for their answer.",
    )  # fmt: skip
    think_time: float = option(
        0.0, Seconds(zero=True), "Time that callers of --closed-loop wait before each call.",
    )  # fmt: skip
    rate: float | None = option(
        None, Number(none="no"), "Calls a second that arrive at random; also beside --bursts.",
    )  # fmt: skip
    bursts: tuple[int, float] | None = option(
        None, BurstLoad(none="no"), "Calls that arrive at once, again and again: 40/500ms.",
    )  # fmt: skip
    load: tuple[tuple[float, float], ...] | None = option(
        None, LoadPhases(none="no"),
        "Calls that arrive at random, in phases: a multiple of what one worker computes, and a "
        "duration each, as 0.2:60s,3:120s,0.2:180s.",
    )  # fmt: skip
    trace: Path | None = option(
        None, File(none="no", exists=True), "File of calls that a streamer with trace= wrote.",
    )  # fmt: skip
    speed: float = option(1.0, Number(), "Factor by which the trace runs faster.")
    items: int = option(1, Count(), "Items of each call, if the load is not a trace.")
    lengths: tuple[float, float] | None = option(
        None, MeanLength(none="no"), "Mean length of the items, or mean and spread such as 25:0.6.",
    )  # fmt: skip
    requests: int | None = option(
        None, Count(none="no"), "Number of calls after which the simulation ends.",
        shown="20000, or the end of the trace or of --seconds",
    )  # fmt: skip
    seconds: float | None = option(
        None, Seconds(none="no"), "Simulated time after which the simulation ends.",
    )  # fmt: skip
    seed: int = option(0, Count(least=None), "Seed of all that is random.")
    fixed_wait: float | None = option(
        None, Seconds(none="no", zero=True),
        "Fixed wait for batches of --batch-size, to compare with.",
    )  # fmt: skip
    sweep: bool = option(False, Flag(), "Try loads from 0.1 to 1.2 of what can be computed.")
    plot: Path | None = option(None, File(none="no"), "SVG file with the latencies of a sweep.")
