"""What a worker reports of a step. Fields only."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # it imports this module
    from .record import BatchReport


@dataclass(slots=True)
class StepReport:
    """What a worker reports of one step of its model. All fields but ``slot`` travel.

    Of a model of steps a batch is one item: it has a place in its worker until it is over.

    Attributes:
        outputs: of streams, by batch: those of this step, as they are or encoded.
        done: the batches that are over, with the joined outputs, or why there are none. Those of
            streams have the output None, since theirs have been sent.
        size: states that the model stepped; 0 if there was only something to report.
        cost: of all of them.
        duration: what ``step`` took, seconds.
        started: items that began before it.
        starting: what ``start`` took for these, seconds.
        waiting: items that the worker holds and has not begun.
        evicted: states that were given up for lack of memory, and begin again.
        started_at: when ``step`` began, by the worker's monotonic clock.
        released: as in ``BatchReport``.
        slot: the worker's; set by the transport.
    """

    outputs: dict[int, Any] = field(default_factory=dict)
    done: list[BatchReport] = field(default_factory=list)
    size: int = 0
    cost: float = 0.0
    duration: float = 0.0
    started: int = 0
    starting: float = 0.0
    waiting: int = 0
    evicted: int = 0
    started_at: float = -math.inf
    released: list[int] | None = None
    slot: int = field(default=-1, kw_only=True)
