"""Autoscaling in simulated time: the load rises from a fifth of a worker to three, and falls again.

Nothing but the scheduler and the number of workers is measured, so a machine and Ray say nothing.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from service_streamer.simulate import CostModel, Phases, Poisson, percentile, simulate
from service_streamer.supervision.autoscaling import LEAST_TARGET

__all__ = ["MODELS", "Stepped", "stepped"]

LEAST, MOST = 1, 16


class Stepped(NamedTuple):
    """A model, and what its workers take to start.

    Attributes:
        base, per_item: what a batch takes, seconds.
        start: seconds.
    """

    base: float
    per_item: float
    batch_size: int
    start: float


MODELS = (
    Stepped(0.1, 1e-3, 8, 1.0),
    Stepped(0.1, 5e-3, 8, 5.0),
    Stepped(0.2, 2e-2, 8, 20.0),
    Stepped(0.5, 0.05, 16, 30.0),
)


def stepped(model: Stepped, seed: int = 0) -> dict[str, Any]:
    """What becomes of the calls, and of the number of workers.

    Returns:
        p99: of all calls but those after the rise, until workers were started, had loaded, and had
        computed what had gathered, seconds; to_target: that in multiples of the target;
        most_workers, turns, sent: as on the cluster; last: workers at the end.
    """
    cost = CostModel(model.base, model.per_item)
    one = cost.capacity(1, model.batch_size)
    rise = 10 * model.start + 60
    phases = [(rise, 0.2), (3 * rise, 3.0), (6 * rise, 0.2)]
    report = simulate(
        Phases([(until, Poisson(share * one)) for until, share in phases]),
        cost,
        workers=(LEAST, MOST),
        start_duration=model.start,
        batch_size=model.batch_size,
        seconds=6 * rise,
        warm_up=0,
        seed=seed,
    )
    target = max(LEAST_TARGET, 2 * cost.duration(model.batch_size, model.batch_size))
    # Time to load, and as long again for what has gathered meanwhile.
    settled = rise + 3 * model.start + 4 * target
    calls = zip(report.arrived, report.latencies, strict=True)
    later = sorted(took for at, took in calls if at < rise or at >= settled)
    p99 = percentile(later, 0.99)
    numbers = [number for _, number in report.workers]
    return {
        "p99": p99, "to_target": p99 / target, "most_workers": max(numbers),
        "turns": report.changes, "sent": report.calls, "last": numbers[-1],
    }  # fmt: skip
