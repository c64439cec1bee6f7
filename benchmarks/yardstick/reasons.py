"""Why other systems are better at some points: known from profiles and from their sources. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["REASONS", "Reason", "why"]


@dataclass(frozen=True)
class Reason:
    """Why a system is ahead in a section. Only shown where it is.

    Attributes:
        figures: of which it is true; none for all of the section.
        point: what a point must have for it to be true there.
    """

    section: str
    peer: str
    text: str
    figures: tuple[str, ...] = ()
    point: Mapping[str, Any] = field(default_factory=dict)

    def holds(self, section: str, peer: str, figure: str, point: Mapping[str, Any]) -> bool:
        return (
            (self.section, self.peer) == (section, peer)
            and (not self.figures or figure in self.figures)
            and self.point.items() <= point.items()
        )


_UNKNOWN = "not explained yet"
_RUST = (
    "its HTTP server is written in Rust, ours in Python. A model that takes no time leaves nothing "
    "else to measure"
)
_REFUSALS = (
    "its threads in Rust refuse while its worker computes. Here one thread of Python sends the "
    "results of a batch, forms the next one and refuses, and shares two cores with the load "
    "generator"
)
_BROKER = (
    "it pushes and pops a list, and forgets a call that a dying host has popped. Here a call is "
    "acknowledged, and taken over if its host dies: more commands, and more Python, for each"
)
_FEWER_STEPS = (
    "it has fewer steps for a call, whose code has left the caches after 5 ms of sleep. On the "
    "faster machine of an earlier run both added the same (0.065 and 0.068 ms)"
)
_TRIES = (
    "the version that was measured tried another batch size now and then, mostly in its first "
    "seconds. Calls that did not fit into a smaller batch waited for the next one. Without such "
    "trials, which are gone now, the p99 was as good as theirs"
)
_MISSES = (
    "one batch has just room for all callers. This project waits for them and computes them "
    "together; a caller whose thread wakes up late waits for a whole batch. The original computes "
    "them in two groups in turn: its median is longer, and its throughput a sixth to a quarter "
    "lower"
)
_FIRST = (
    "it computes the first callers that return without waiting for the others: its median is "
    "shorter, and with 32 callers its tail is longer"
)
_SLOW_START = (
    "it waits for 0.1 s until its first batch is full. This project computes the first sentence "
    "at once, and so has one small batch more among some twenty. A longer run does not show this"
)
_LENGTHS = (
    "this project batches sentences by length. Batches of this small model are hardly faster for "
    "it. It takes some percent of the processor, which the model uses too, and a sentence of "
    "unusual length waits for sentences of similar length"
)
_STREAM = (
    "at this low load, some calls arrive close together by chance and look like a burst. This "
    "project then waits some milliseconds in vain for more. In simulation the p99 is 44.7 ms "
    "instead of 44.0; the rest is within the spread of the rounds, or not explained"
)

#: The first that holds is shown.
REASONS: tuple[Reason, ...] = (
    Reason("http", "mosec", _RUST, point={"workload": "echo"}),
    Reason("http", "mosec", _RUST.partition(".")[0], figures=("all", "web")),
    Reason(
        "http",
        "mosec",
        "some of its connections wait much longer than others: connections / rate gives a mean of "
        "51 ms, longer than ours, and far above this median. wrk measures only the requests that "
        "were answered",
        figures=("p50", "p99"),
    ),
    Reason("overload-http", "mosec", _REFUSALS, figures=("rejection_p99",)),
    Reason(
        "overload-http",
        "mosec",
        "512 requests may wait in both systems. Here the worker already holds one batch more, so "
        "that the device does not wait for the next one: 52 ms more in the median, sometimes more",
        figures=("p50", "p99"),
    ),
    Reason(
        "killed",
        "mosec",
        "requests of the killed worker fail there. Here another worker computes them again, after "
        "its present batch",
        figures=("worst",),
    ),
    Reason(
        "shared-faults-http",
        "mosec",
        "requests of the killed worker fail there. Here the other worker computes them first, and "
        "the next request after them",
        figures=("recovered", "recovered_worst"),
        point={"killed": "worker"},
    ),
    Reason("alone", "batched", _FEWER_STEPS),
    Reason("alone", "original-redis", _BROKER),
    Reason("callers", "original-redis", _BROKER),
    Reason("load-http", "mosec", _STREAM, point={"load": 0.1}),
    Reason("load-http", "original-gevent", _STREAM, point={"load": 0.1}),
    Reason("callers", "original-streamer", _MISSES, point={"callers": 64}),
    Reason("callers", "original-threaded", _MISSES, point={"callers": 64}),
    Reason("callers", "batched", _FIRST, figures=("p50",)),
    Reason("callers", "batched", "within the spread of the rounds", figures=("p99",)),
    Reason("callers", "original-threaded", _TRIES),
    Reason("callers", "original-streamer", _TRIES),
    Reason("asyncio", "batched", _TRIES),
    Reason(
        "load",
        "batched",
        "some of its callers wait much longer than others: its p99 is more than three times ours",
        point={"load": 0.95},
        figures=("p50",),
    ),
    Reason("infilling", "original-threaded", _LENGTHS),
    Reason("infilling", "original-streamer", _LENGTHS),
    Reason("infilling", "batched", _LENGTHS),
    Reason("original-futures", "original-streamer", _SLOW_START),
    Reason("original-futures", "original-threaded", _SLOW_START),
    Reason("original-gevent", "original-threaded", _SLOW_START),
)


def why(section: str, peer: str, figure: str, point: Mapping[str, Any]) -> str:
    """The reason that is known for one figure, or that none is."""
    holding = (each.text for each in REASONS if each.holds(section, peer, figure, point))
    return next(holding, _UNKNOWN)
