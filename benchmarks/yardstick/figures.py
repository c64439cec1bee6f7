"""What the figures are called, in which unit they are shown, and which of two is better. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from yardstick.record import Record, Spread

__all__ = [
    "FIGURES",
    "Figure",
    "by_round",
    "figures_of",
    "modes",
    "peers",
    "quotients",
    "rivals_of",
    "shown",
    "spread",
    "spread_of",
]


@dataclass(frozen=True)
class Figure:
    """One figure of the record.

    Attributes:
        title: for tables, with its unit.
        better: "higher" or "lower"; None where neither is, by itself.
        scale: from the record's unit to the one that is shown.
        decimals: how many are shown; None shows three digits of whatever size it has.
        repeats: another figure that says the same; where both are there, they are one loss.
        absent: what a table says where the figure was looked for and is not there.
        is_bad_if_absent: whether that is worse than any figure.
    """

    title: str
    better: str | None = None
    scale: float = 1.0
    decimals: int | None = None
    repeats: str | None = None
    absent: str = "-"
    is_bad_if_absent: bool = False


_MS = 1e3
_US = 1e6

FIGURES = {
    "over": Figure("added to the model's own time, ms", "lower", _MS),
    "over_loop": Figure("added in a plain loop, ms", "lower", _MS),
    "ratio": Figure("time / the model's own", "lower", decimals=2, repeats="over"),
    "rate": Figure("per second", "higher"),
    "share": Figure("share of ideal", "higher", decimals=3, repeats="rate"),
    "batch": Figure("a batch of 64, ms", "lower", _MS, decimals=1, repeats="rate"),
    "by-hand": Figure("share of batches of 64 by hand", "higher", decimals=3, repeats="rate"),
    "sorted": Figure("share of sorted beforehand", "higher", decimals=3, repeats="rate"),
    "copy": Figure("share of a plain copy", "higher", decimals=3, repeats="rate"),
    "gb_per_s": Figure("GB/s each way", "higher", repeats="rate"),
    "p50": Figure("p50, ms", "lower", _MS, absent="not served", is_bad_if_absent=True),
    "p99": Figure("p99, ms", "lower", _MS, absent="not served", is_bad_if_absent=True),
    "latency": Figure("mean latency, ms", "lower", _MS),
    "offered": Figure("offered per second"),
    "goodput": Figure("goodput, share of capacity", "higher", decimals=3),
    "served": Figure("served", "higher", decimals=3, repeats="goodput"),
    "rejected": Figure("rejected", decimals=3),
    "expired": Figure("expired", decimals=3),
    "rejection_p99": Figure("rejection, p99, ms", "lower", _MS),
    "lag_p99": Figure("delay of the client, p99, ms", None, _MS),
    "web": Figure("processor of the web process, µs per request", "lower", _US),
    "all": Figure("processor of all processes, µs per request", "lower", _US),
    "errors": Figure("errors", "lower", decimals=0),
    "sent": Figure("sent", decimals=0),
    "answered": Figure("answered", decimals=0),
    "failed": Figure("failed", "lower"),
    "lost": Figure("lost", "lower", decimals=0),
    "before": Figure("answered share of calls due before", decimals=3),
    "gone": Figure("failed or lost", decimals=0, absent="overloaded before"),
    "recovery": Figure(
        "recovery to 0.9 of the rate, s",
        "lower",
        decimals=2,
        absent="not back",
        is_bad_if_absent=True,
    ),
    "worst": Figure("longest latency, s", "lower", decimals=2, is_bad_if_absent=True),
    "noticing": Figure("noticing, ms", None, _MS),
    "spawn": Figure("spawn, ms", None, _MS),
    "import": Figure("import, ms", None, _MS),
    "init": Figure("init, ms", None, _MS),
    "first_batch": Figure("first batch, ms", None, _MS),
    "total": Figure("total, ms", "lower", _MS),
    "us": Figure("processor, µs per request", "lower", decimals=1),
    "preprocess": Figure("preprocess, ms", "lower", _MS, decimals=2),
    "postprocess": Figure("postprocess, ms", "lower", _MS, decimals=2),
    "besides": Figure("both: besides the forward pass, ms", "lower", _MS, decimals=2),
    "head": Figure("head, on a GPU part of the forward pass, ms", None, _MS, decimals=2),
    "pipeline": Figure("transformers' own pipeline, ms", None, _MS, decimals=2),
    "to_end": Figure("times batches that run to their end", "higher", decimals=2),
    "first_steps": Figure("first output after an item begins, p99, steps", "lower", decimals=2),
    "wait_p50": Figure("a client's longest wait for a first output, p50, ms", "lower", _MS),
    "wait_p99": Figure("a client's longest wait for a first output, p99, ms", "lower", _MS),
    "starved": Figure("clients that were never served", "lower", decimals=0),
    "objects": Figure("more objects", "lower", decimals=0),
    "growth": Figure("more memory, bytes per stream", "lower", decimals=0),
    "held": Figure("places still taken", "lower", decimals=0),
    "per_step": Figure("processor of the web process, µs per step", "lower", _US, decimals=0),
    "times": Figure("tokens per second, ratio", "higher", decimals=2),
    "slower": Figure("time, ratio", "lower", decimals=2),
    "to_streamer": Figure("times Streamer", "lower", decimals=2),
    "over_redis": Figure("times RedisStreamer", "lower", decimals=2),
    "rate_redis": Figure("times RedisStreamer", "higher", decimals=2),
    "to_target": Figure("p99 / target", "lower", decimals=2, repeats="p99"),
    "most_workers": Figure("most workers", decimals=0),
    "last": Figure("workers at the end", decimals=0),
    "all_ready": Figure("until all were ready, s", "lower", decimals=1),
    "shrunk": Figure("back to one worker after, s", None, decimals=0, absent="not back"),
    "turns": Figure("changes of direction", "lower", decimals=0),
    "to_one_worker": Figure("times one worker", "higher", decimals=2),
    "to_one": Figure("times one process", "higher", decimals=3),
    "batch_to_one": Figure("mean batch size / one process", "higher", decimals=3),
    "mean_batch": Figure("mean batch size", "higher", decimals=1),
    "pool_us": Figure("processor of the pool's process, µs per item", "lower", decimals=1),
    "grown": Figure("growth of the process, with all imports, MB", "lower", 1e-6, decimals=1),
    "joined": Figure("of it: for the pool, MB", "lower", 1e-6, decimals=1),
    "torch": Figure("torch imported", "lower", decimals=0),
    "hung": Figure("hung", "lower", decimals=0),
    "left": Figure("left behind", "lower", decimals=0),
    "copies": Figure("copies of the model", "lower", decimals=0),
    "processes": Figure("busy web processes", decimals=1),
    "paper": Figure("per second, on paper", "higher", decimals=0),
    "to_single": Figure("times one web process", "higher", decimals=1),
    "kills": Figure("kills", decimals=0),
    "rounds": Figure("rounds", decimals=0),
    "unnamed": Figure("unnamed errors", "lower", decimals=0),
    "twice": Figure("computed twice", "lower", decimals=0),
    "recovered": Figure(
        "until the next answer, ms",
        "lower",
        _MS,
        decimals=0,
        absent="not back",
        is_bad_if_absent=True,
    ),
    "recovered_worst": Figure("longest, ms", "lower", _MS, decimals=0, repeats="recovered"),
    "whole": Figure(
        "until both workers are ready, s",
        "lower",
        decimals=1,
        absent="not back",
        is_bad_if_absent=True,
    ),
    "whole_worst": Figure("longest, s", "lower", decimals=1, repeats="whole", absent="not back"),
    "worker_us": Figure("processor of its worker, µs per request", "lower", decimals=1),
}

#: Share of what was due that a service answers which can do what it is asked.
_KEEPS_UP = 0.9

_SERVERS = ("serve", "serve-shared", "flask-gevent")
#: The modes of this project that a peer is compared with: those that do the same work, with the
#: model in the same place. The best of those that were measured counts.
_COMPARABLE = {
    "original-threaded": ("threaded",),
    "original-streamer": ("streamer",),
    "original-redis": ("redis",),
    "batched": ("threaded", "streamer"),
    "ray": ("streamer", "ray-streamer"),
    "infinity": ("threaded", "streamer"),
    "original-gevent": _SERVERS,
    "litserve": _SERVERS,
    "mosec": _SERVERS,
    "mlserver": _SERVERS,
    "ray-http": _SERVERS,
}
#: All modes, with any of which a peer is compared where a section has none of its own.
_MODES = ("threaded", "streamer", "redis", "ray-streamer", *_SERVERS)

#: Sections whose shares the report makes of the rates of one round, where the rows do not have them
#: themselves: the share, and of whom.
_SHARE_OF = {
    "infilling": ("by-hand", "by-hand"),
    "minilm": ("sorted", "by-hand-sorted"),
    "arrays": ("copy", "copy"),
}


def rivals_of(record: Record, section: str, peer: str) -> list[str]:
    """The modes of this project with which a peer is compared in a section."""
    there = modes(record, section)
    return [each for each in there if each in _COMPARABLE.get(peer, ())] or there


def modes(record: Record, section: str, *, with_failed: bool = False) -> list[str]:
    """Those of this project with a result in a section; with those, maybe, that failed in it."""
    there = _there(record, section, with_failed)
    return [each for each in _MODES if each in there]


def peers(record: Record, section: str, *, with_failed: bool = False) -> list[str]:
    """Those of others that one could choose instead."""
    there = _there(record, section, with_failed)
    return [each for each in _COMPARABLE if each in there]


def _there(record: Record, section: str, with_failed: bool) -> set[str]:
    failed = {failure.system for failure in record.failures_of(section)} if with_failed else set()
    return {*record.systems(section), *failed}


def figures_of(record: Record, section: str, system: str) -> list[str]:
    """The names, in the order of the tables, that its rows have, or that may be made of them."""
    rows = (each for each in record.results if (each.section, each.system) == (section, system))
    names = {name for row in rows for name in row.figures}
    names |= {"gone", *_SHARE_OF.get(section, ())[:1]}
    return [name for name in FIGURES if name in names]


def by_round(
    record: Record, section: str, system: str, figure: str, point: Mapping[str, Any]
) -> dict[int, float]:
    """A figure of each round, made of others of the same round where it is no measured one."""
    if figure == "gone":
        failed = by_round(record, section, system, "failed", point)
        lost = by_round(record, section, system, "lost", point)
        before = by_round(record, section, system, "before", point)
        return {  # of a service that kept up until then: else the kill is not to blame
            number: failed[number] + lost[number]
            for number in failed.keys() & lost.keys()
            if before.get(number, 1.0) >= _KEEPS_UP
        }
    measured = _measured(record, section, system, figure, point)
    name, whole = _SHARE_OF.get(section, ("", ""))
    if figure == name and not measured:
        return quotients(
            by_round(record, section, system, "rate", point),
            by_round(record, section, whole, "rate", point),
        )
    return measured


def spread_of(
    record: Record, section: str, system: str, figure: str, point: Mapping[str, Any]
) -> Spread | None:
    """The median over the rounds, and the lowest and the highest: of their turns, if they had such.

    None where there is no such figure.
    """
    found = spread(by_round(record, section, system, figure, point))
    series = _measured(record, section, system, f"{figure}_turns", point)
    turns = [turn for each in series.values() for turn in each]
    if found is None or not turns:
        return found
    return Spread(found.median, min(turns), max(turns), len(turns))


def _measured(
    record: Record, section: str, system: str, figure: str, point: Mapping[str, Any]
) -> dict[int, Any]:
    """By round, as the rows have it."""
    return {
        result.round: result.figures[figure]
        for result in record.results
        if result.section == section
        and result.system == system
        and result.figures.get(figure) is not None
        and all(result.point.get(key) == value for key, value in point.items())
    }


def quotients(over: Mapping[int, float], under: Mapping[int, float]) -> dict[int, float]:
    """Of the rounds that both have: figures of different rounds are never divided."""
    both = sorted(over.keys() & under.keys())
    return {number: over[number] / under[number] for number in both if under[number]}


def spread(values: Mapping[int, float]) -> Spread | None:
    """None of none."""
    if not values:
        return None
    numbers = list(values.values())
    return Spread(statistics.median(numbers), min(numbers), max(numbers), len(numbers))


def shown(figure: str, value: float) -> str:
    """In its unit, which the title names."""
    known = FIGURES.get(figure, Figure(figure))
    scaled = value * known.scale
    if known.decimals is not None:
        return f"{scaled:,.{known.decimals}f}"
    if scaled == round(scaled):
        return f"{scaled:,.0f}"  # a count, such as of failures
    size = abs(scaled)
    return f"{scaled:,.{0 if size >= 100 else 1 if size >= 10 else 2 if size >= 1 else 3}f}"
