"""How a system is asked, point after point; each yields rows of figures, in seconds.

``spec`` is what ``library.py`` is given: "workload", "workers", "seconds" of each window, "points",
and what a driver's own text names. A point's own entries go before those of the spec.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

from adapters import beside, closed_loop, direct_adapter, open_loop
from adapters.adapter import Adapter, ByHand
from adapters.workloads import (
    BATCH_SIZE,
    SIMULATED,
    WORKLOADS,
    capacity,
    cost,
    ideal,
    is_answer,
    items,
)
from yardstick.stats import percentile

__all__ = ["DRIVERS", "Figures", "Spec"]

Spec = Mapping[str, Any]
Figures = dict[str, Any]
Rows = Iterator[tuple[Mapping[str, Any], Figures]]

#: About the seconds of one turn of a system and of batches by hand: long enough for many batches of
#: both, and short enough that the machine is the same in all of it.
_TURN = 0.9
#: Items that are computed by hand over and over.
_BY_HAND = 2 * BATCH_SIZE
#: Before a closed loop's window; more where batches are long.
_WARM_UP = 0.3
#: How often a lone caller calls, and how many of these calls come too early to count.
_CALLS, _EARLY = 60, 10
#: Turns of the plain loop, and calls in each: many short ones, since a machine drifts.
_TURNS, _CALLS_IN_TURN = 6, 10
#: A future's result must be there by then, seconds.
_LONGEST = 60.0


def alone(start: Callable[[], Adapter], spec: Spec) -> Rows:
    """A lone caller's time over that of the model, called directly: medians.

    "over" and "ratio" are of calls in turn with direct ones: both meet the same moments of the
    machine, and the same overshoot of sleep. "over_loop" is of a caller that calls again at once,
    as programs do, in turn with direct calls in such a loop. Nothing has run in this process
    between two calls then, so that more of the memory that a call needs has left the caches.
    """
    system, model = start(), WORKLOADS[spec["workload"]]()

    def directly(number: int) -> None:
        model.predict([number])

    def through(number: int) -> None:
        _check(spec, number, system.predict(number))

    own: list[float] = []
    took: list[float] = []
    for number in range(_CALLS):
        own += _times(directly, (number,))
        took += _times(through, (number,))
    direct, alternating = (statistics.median(each[_EARLY:]) for each in (own, took))
    loops: dict[Callable[[int], None], list[float]] = {directly: [], through: []}
    for call in (directly, through, through, directly) * _TURNS:
        loops[call] += _times(call, range(_CALLS_IN_TURN))
    own_loop, in_loop = (statistics.median(loops[call]) for call in (directly, through))
    figures = {
        "over": alternating - direct,
        "ratio": alternating / direct,
        "over_loop": in_loop - own_loop,
    }
    yield {}, figures
    system.close()


def _times(call: Callable[[int], None], numbers: Iterable[int]) -> list[float]:
    """Seconds of each call."""
    took = []
    for number in numbers:
        started = time.perf_counter()
        call(number)
        took.append(time.perf_counter() - started)
    return took


def closed(drive: Callable[..., Figures], start: Callable[[], Adapter], spec: Spec) -> Rows:
    """Callers in a closed loop: "callers" threads or tasks, with items of "bytes" for arrays."""
    system = start()
    for point in spec["points"]:
        here = {**spec, **point}
        name, callers, workers = spec["workload"], here["callers"], spec.get("workers", 1)
        size = {"size": here["bytes"]} if "bytes" in here else {}
        warm_up = _WARM_UP + (4 * cost(name, BATCH_SIZE) if name in SIMULATED else 0.0)
        work = items(name, callers, **size)
        figures = drive(system, name, work, warm_up, spec["seconds"])
        rate = figures["rate"] or 0.0
        if name in SIMULATED:
            figures["share"] = rate / workers / ideal(name, max(1, callers // workers))
        if "bytes" in here:
            figures["gb_per_s"] = rate * here["bytes"] / 1e9
        yield point, figures
    system.close()


def until_empty(start: Callable[[], Adapter], spec: Spec) -> Rows:
    """ "callers" threads take from "count" items until none is left: the rate of each point."""
    system, name = start(), spec["workload"]
    for point in spec["points"]:
        here = {**spec, **point}
        # So that what is learned is learned; other items, since some remember.
        other = items(name, max(here["callers"], here["count"] // 4), seed=2)
        closed_loop.until_empty(system, name, other, here["callers"])
        took = closed_loop.until_empty(system, name, items(name, here["count"]), here["callers"])
        yield point, {"rate": here["count"] / took}
    system.close()


def futures(start: Callable[[], Adapter], spec: Spec) -> Rows:
    """One thread submits "count" items, and then waits for all of them."""
    system = start()
    work = items(spec["workload"], spec["count"])
    started = time.perf_counter()
    pending = [system.submit(item) for item in work]
    for item, future in zip(work, pending, strict=True):
        _check(spec, item, future.result(_LONGEST))
    yield {}, {"rate": spec["count"] / (time.perf_counter() - started)}
    system.close()


def offered(start: Callable[[], Adapter], spec: Spec) -> Rows:
    """An open loop at each "load", a multiple of the capacity; "warm_up" and "deadline" or None."""
    name, deadline = spec["workload"], spec.get("deadline")
    workers = spec.get("workers", 1)
    most = workers * capacity(name)
    system: Adapter | None = None
    for point in spec["points"]:
        system = system or start()
        figures, has_ended = open_loop.load(
            system, int, point["load"] * most, spec["warm_up"], spec["seconds"], deadline, most
        )
        yield point, figures
        if deadline is not None or not has_ended:  # what is left would be in the next one's way
            system.close()
            system = None
    if system is not None:
        system.close()


def by_hand(start: Callable[[], Adapter], spec: Spec) -> Rows:
    """Without a system: "count" items, over and over for "seconds"; once if "repeats" is false."""
    system = cast("ByHand", start())
    for point in spec["points"]:
        here = {**spec, **point}
        size = {"size": here["bytes"]} if "bytes" in here else {}
        work = items(spec["workload"], here["count"], **size)
        for _ in system.batches(work[:BATCH_SIZE]):
            pass  # the first takes longer
        rate = direct_adapter.rate(
            system, work, spec["seconds"] if here.get("repeats", True) else 0.0
        )
        figures: Figures = {"rate": rate}
        if "bytes" in here:
            figures["gb_per_s"] = rate * here["bytes"] / 1e9
        yield point, figures
    system.close()


def beside_hand(start: Callable[[], Adapter], spec: Spec) -> Rows:
    """ "callers" threads in a closed loop, in turn with batches by hand of the same workload.

    A turn is hand, system, system, hand, each while the other has nothing to do: a machine that
    becomes slower at a steady pace does so for both. The share of a turn is a quotient of
    neighbours. "by-hand" is the median of all turns, and "by-hand_turns" has each. A system that
    is a ``ByHand`` itself computes instead of being asked: what its shares lack to 1 is noise.
    """
    name = spec["workload"]
    hand = beside.Beside(name, _BY_HAND)  # loads while the system does
    system = start()
    turns = max(1, round(spec["seconds"] / _TURN))
    quarter = spec["seconds"] / turns / 4
    is_by_hand = isinstance(system, direct_adapter.Direct)
    measured: Callable[..., tuple[float, list[float]]] = _batches if is_by_hand else _calls
    for point in spec["points"]:
        work = items(name, {**spec, **point}["callers"])
        measured(system, name, work, quarter)  # so that what is learned is learned
        rates: list[float] = []
        by_hand: list[float] = []
        took: list[float] = []
        for _ in range(turns):
            before = hand.rate(quarter)
            rate, latencies = measured(system, name, work, 2 * quarter)
            rates.append(rate)
            by_hand.append(statistics.fmean((before, hand.rate(quarter))))
            took += latencies
        shares = [over / under for over, under in zip(rates, by_hand, strict=True)]
        figures: Figures = {
            "rate": statistics.fmean(rates),
            "rate_by_hand": statistics.fmean(by_hand),
            "by-hand": statistics.median(shares),
            "by-hand_turns": shares,
        }
        if took:
            figures |= {"p50": percentile(took, 0.5), "p99": percentile(took, 0.99)}
        yield point, figures
    hand.close()
    system.close()


def _calls(
    system: Adapter, name: str, work: Sequence[Any], seconds: float
) -> tuple[float, list[float]]:
    """The rate of threads that ask again and again, and the latencies of their calls."""
    called = closed_loop.window(system, name, work, _WARM_UP, seconds)
    return closed_loop.rate_in_part(*called), closed_loop.latencies(*called)


def _batches(
    system: ByHand, name: str, work: Sequence[Any], seconds: float
) -> tuple[float, list[float]]:
    """The same of a system that is by hand; its batches have no latencies."""
    work = items(name, _BY_HAND)
    direct_adapter.rate(system, work[:BATCH_SIZE], 0.0)
    return direct_adapter.rate(system, work, seconds), []


def _check(spec: Spec, item: Any, answer: Any) -> None:
    if not is_answer(spec["workload"], item, answer):
        raise closed_loop.WrongAnswer(f"{item!r:.80} was answered with {answer!r:.80}")


#: What each adapter's ``drivers`` are of.
DRIVERS: dict[str, Callable[[Callable[[], Adapter], Spec], Rows]] = {
    "alone": alone,
    "threads": functools.partial(closed, closed_loop.threads),
    "asyncio": functools.partial(closed, closed_loop.tasks),
    "until-empty": until_empty,
    "futures": futures,
    "open-loop": offered,
    "by-hand": by_hand,
    "beside-hand": beside_hand,
}
