"""What became of the calls of an open loop, in figures. Pure; used in every system's interpreter.

A call that a client makes late counts from when it was due: had it come by itself, as a user's
does, it would have waited since then. So nothing is hidden where a client cannot keep up.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from yardstick.stats import percentile

__all__ = [
    "EXPIRED",
    "FAILED",
    "REJECTED",
    "SERVED",
    "UNANSWERED",
    "Calls",
    "killed",
    "load",
    "mean_latency",
    "overload",
    "recovery",
    "scaled",
]

#: What became of a call: nothing, within the time that was waited for it; a result; a refusal at
#: once; the word that it took too long; anything else.
UNANSWERED, SERVED, REJECTED, EXPIRED, FAILED = range(5)

#: Tenths of a second that make the span over which a rate is taken, after a kill.
_SPAN = 5
#: Share of the rate before at which a service is back.
_BACK = 0.9


@dataclass(frozen=True)
class Calls:
    """All calls of a run, each with its number, in the order in which they were due.

    Attributes:
        due, made, ended: seconds from the start of the run; ``ended`` of those that did.
        outcomes: what became of each.
    """

    due: Sequence[float]
    made: Sequence[float]
    ended: Sequence[float]
    outcomes: Sequence[int]

    def latency(self, number: int) -> float:
        return self.ended[number] - self.due[number]


def load(calls: Calls, first: float, end: float) -> dict[str, Any]:
    """What the calls met that were due from ``first`` until ``end``.

    Returns:
        p50, p99: latency of all of them, where what was not served took for ever: None if such a
        one is at that place; offered: calls per second; served: their share; lag_p99: how late they
        were made.
    """
    window = _due_within(calls, first, end)
    is_served = [calls.outcomes[n] == SERVED for n in window]
    latencies = [
        calls.latency(n) if served else math.inf
        for n, served in zip(window, is_served, strict=True)
    ]
    return {
        "p50": _finite(percentile(latencies, 0.5)),
        "p99": _finite(percentile(latencies, 0.99)),
        "offered": len(window) / (end - first),
        "served": sum(is_served) / max(1, len(window)),
        "lag_p99": _lag(calls, window),
    }


def scaled(seen: Sequence[tuple[float, int, int]], rise: float, fall: float) -> dict[str, Any]:
    """What became of the number of workers when the load rose, and when it fell.

    Args:
        seen: again and again, the time, and how many workers are ready, and how many are wanted.
        rise, fall: when the load did.

    Returns:
        most_workers: that were ready until the fall; all_ready: seconds after the rise until they
        were; shrunk: seconds after the fall until there were as few as before the rise, None if
        there never were; turns: how often more were wanted after fewer, or fewer after more.
    """
    most = max(ready for at, ready, _ in seen if at < fall)
    least = min(ready for at, ready, _ in seen if at < rise)
    reached = next(at for at, ready, _ in seen if ready == most)
    back = next((at for at, ready, _ in seen if at > fall and ready <= least), None)
    steps = [(before, after) for (_, _, before), (_, _, after) in itertools.pairwise(seen)]
    grows = [after > before for before, after in steps if after != before]
    return {
        "most_workers": most,
        "all_ready": max(0.0, reached - rise),
        "shrunk": None if back is None else back - fall,
        "turns": sum(before is not after for before, after in itertools.pairwise(grows)),
    }


def mean_latency(calls: Calls, first: float, end: float, most: float) -> float:
    """Of the calls due in the window, seconds: ``most`` where one took longer, or failed."""
    window = _due_within(calls, first, end)
    took = (calls.latency(n) if _is_in_time(calls, n, most) else most for n in window)
    return sum(took) / max(1, len(window))


def overload(
    calls: Calls, first: float, end: float, deadline: float, capacity: float
) -> dict[str, Any]:
    """The same where most cannot be served, and a result is of use until a deadline only.

    Shares are of the calls that were due in the window. Goodput is what was delivered in it, to
    calls in time whenever they were due: no more than can be computed in that while.

    Args:
        deadline: of each call, seconds from when it was due.
        capacity: of the model, results per second.

    Returns:
        goodput: in time, as a share of capacity; served, rejected, expired, failed: shares; p50,
        p99: latency of those in time; rejection_p99: from call to refusal; offered, lag_p99.
    """
    window = _due_within(calls, first, end)
    delivered = sum(
        _is_in_time(calls, n, deadline) and first <= calls.ended[n] < end
        for n in range(len(calls.due))
    )
    latencies = [calls.latency(n) for n in window if _is_in_time(calls, n, deadline)]
    refusals = [calls.ended[n] - calls.made[n] for n in window if calls.outcomes[n] == REJECTED]
    count = max(1, len(window))
    served, rejected = len(latencies) / count, len(refusals) / count
    failed = sum(calls.outcomes[n] == FAILED for n in window) / count
    return {
        "goodput": delivered / (end - first) / capacity,
        "served": served,
        "rejected": rejected,
        # Too late is too late, whether or not something came in the end.
        "expired": max(0.0, 1 - served - rejected - failed),
        "failed": failed,
        "p50": percentile(latencies, 0.5),
        "p99": percentile(latencies, 0.99),
        "rejection_p99": percentile(refusals, 0.99),
        "offered": len(window) / (end - first),
        "lag_p99": _lag(calls, window),
    }


def killed(calls: Calls, first: float, killed_at: float, end: float) -> dict[str, Any]:
    """What a run was like in which a worker was killed.

    Args:
        first: from when on the rate before is taken.
        end: of the load.

    Returns:
        sent, answered, failed, lost: counts; failed is every answer that is no result, and lost
        what was never answered. before: results until the kill as a share of the calls that were
        due; where that is low, recovery says little. recovery: see ``recovery``. worst: the longest
        latency of a result.
        timeline_sent, timeline_answered, timeline_failed: counts for each tenth of a second.
    """
    numbers = range(len(calls.due))
    answered = [n for n in numbers if calls.outcomes[n] == SERVED]
    failed = [n for n in numbers if calls.outcomes[n] in (REJECTED, EXPIRED, FAILED)]
    lost = len(numbers) - len(answered) - len(failed)
    results = [calls.ended[n] for n in answered]
    due_before = max(1, _count(calls.due, first, killed_at))
    return {
        "sent": len(numbers),
        "answered": len(answered),
        "failed": len(failed),
        "lost": lost,
        "before": _count(results, first, killed_at) / due_before,
        "recovery": recovery(calls.due, results, first, killed_at, end),
        "worst": max((calls.latency(n) for n in answered), default=None),
        "timeline_sent": _per_tenth(calls.made, end),
        "timeline_answered": _per_tenth(results, end),
        "timeline_failed": _per_tenth([calls.ended[n] for n in failed], end),
        "killed_at": killed_at,
    }


def recovery(
    due: Sequence[float], results: Sequence[float], first: float, killed_at: float, end: float
) -> float | None:
    """Seconds from the kill until results, having become fewer, come at 0.9 of the rate before.

    The rate is taken over half a second, every tenth, and has to hold for half a second more: what
    has piled up comes in a burst. A half second in which fewer calls were due than before needs as
    much fewer results, or chance would count as a fault.

    Returns:
        0 if the rate never fell; None if it was not back at the end.
    """
    before = _count(results, first, killed_at) / (killed_at - first)
    span = _SPAN / 10
    starts = [killed_at + n / 10 for n in range(int((end - killed_at - span) * 10 + 1e-6) + 1)]
    is_back = []
    for at in starts:
        wanted = min(before * span, _count(due, at, at + span))
        is_back.append(_count(results, at, at + span) >= _BACK * wanted)
    if not before or not is_back:
        return None
    if all(is_back):
        return 0.0
    for number in range(is_back.index(False), len(is_back)):
        if all(is_back[number : number + _SPAN + 1]):
            return starts[number] - killed_at
    return None


def _finite(value: float | None) -> float | None:
    return None if value == math.inf else value


def _count(times: Sequence[float], first: float, end: float) -> int:
    return sum(first <= at < end for at in times)


def _due_within(calls: Calls, first: float, end: float) -> list[int]:
    return [number for number, at in enumerate(calls.due) if first <= at < end]


def _is_in_time(calls: Calls, number: int, deadline: float) -> bool:
    return calls.outcomes[number] == SERVED and calls.latency(number) <= deadline


def _lag(calls: Calls, window: Sequence[int]) -> float | None:
    return percentile([calls.made[n] - calls.due[n] for n in window], 0.99)


def _per_tenth(times: Sequence[float], end: float) -> list[int]:
    counts = [0] * round(end * 10)
    for at in times:
        tenth = int(at * 10)
        if 0 <= tenth < len(counts):
            counts[tenth] += 1
    return counts
