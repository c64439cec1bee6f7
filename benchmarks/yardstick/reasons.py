"""Why others are ahead where they are: known from profiles and from their sources. Pure."""

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
    "its HTTP server is written in Rust, ours in Python, where uvicorn and the parsing of HTTP are "
    "half of what a request takes; a model that takes no time leaves nothing else to measure"
)
_TRIES = (
    "now and then this project tries another size of batch, to learn what is best, mostly in its "
    "first seconds; who is left out of a smaller one waits for one batch more. Without that the "
    "p99 is as good as theirs"
)
_MISSES = (
    "a batch has just room for all callers here. This project waits for them, and computes them "
    "together; whose thread is woken up too late waits for a whole batch. The original computes "
    "them in two groups that take turns: all wait alike, longer in the median, and a sixth to a "
    "quarter fewer are computed"
)
_FIRST = (
    "computes who comes back first without waiting for the others: a shorter median, and with 32 "
    "callers a longer tail"
)
_SLOW_START = (
    "waits for 0.1 s until its first batch is full; this project computes the first sentence at "
    "once, and has one small batch more of some twenty. Nothing is left of that in an hour"
)
_LENGTHS = (
    "sentences are batched by length here, for which batches of this small model are hardly "
    "faster; it costs some percent of the processor, which the model uses too, and a sentence of "
    "unusual length waits for others like it"
)
_STREAM = (
    "of a stream so thin some calls come close together by chance, and look like a burst, of which "
    "more is then waited for, for a few milliseconds and in vain. In simulation a p99 of 44.7 ms "
    "instead of 44.0; the rest is within the spread of the rounds, or not explained"
)

#: The first that holds is shown.
REASONS: tuple[Reason, ...] = (
    Reason("http", "mosec", _RUST, point={"workload": "echo"}),
    Reason("http", "mosec", _RUST.partition(";")[0], figures=("all", "web")),
    Reason(
        "http",
        "mosec",
        "some of its connections wait much longer than the others: connections / rate is a mean of "
        "51 ms, longer than ours, and far beyond this median. wrk knows the times of those only "
        "that were answered",
        figures=("p50", "p99"),
    ),
    Reason(
        "overload-http",
        "mosec",
        f"{_RUST.partition(';')[0]}",
        figures=("rejection_p99",),
    ),
    Reason(
        "overload-http",
        "mosec",
        "512 requests may wait with both; here a batch more is with the worker already, so that "
        "the device does not wait for the next one: 52 ms more in the median, and sometimes more",
        figures=("p50", "p99"),
    ),
    Reason(
        "killed",
        "mosec",
        "what the dead worker had in hand fails there, and is computed again here: after the batch "
        "that the other worker is at",
        figures=("worst",),
    ),
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
        "some of its callers wait much longer than others: a p99 of more than three times ours",
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
