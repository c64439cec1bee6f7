"""What limits throughput and latency, in plain sentences. Numbers in, text out.

Each finding says what is so, with the numbers it was found by, and what to do about it, if anything
is to be done. What limits throughput is one of these, the first that fits:

    finding      what the recent batches show
    -------      ----------------------------
    saturated    the workers compute nearly all the time, and more waits than fits into a batch
                 or batches are as large as they should be
    one caller   there is one call at a time, so there is nothing to put together
    few callers  the workers are busy, and a batch has what there is: fewer calls than would fit
    overhead     many calls are under way, and most of the time not in the model
    idle         the workers have time to spare
    keeping up   none of these
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ..options.table import StreamerOptions
from ..reporting import counted
from .metrics import StepSummary, Summary
from .record import Reason

#: Shares, from which on something is worth a sentence. All are arbitrary.
_SATURATED = 0.85
_BUSY = 0.5
_MOST = 0.5
_MUCH = 0.3
_SOME = 0.1
_LITTLE = 0.05

#: What a batch twice as large has to gain to be worth a larger bound.
_WORTH = 0.05


class Finding(NamedTuple):
    """One thing that is so.

    Attributes:
        name: which one it is; never changes.
        text: sentences with the numbers.
        advice: what to do about it; empty if nothing is to be done.
    """

    name: str
    text: str
    advice: str = ""

    def __str__(self) -> str:
        return f"{self.text} {self.advice}".strip()


def explain(of: Summary, bounds: StreamerOptions, *, is_local: bool) -> list[Finding]:
    """What there is to say, the most important first.

    Args:
        bounds: of the batches.
        is_local: whether the model is in this process.
    """
    troubles = [*_troubles(of, bounds), *_scaling(of)]
    if of.steps is not None:
        return [*_steps(of.steps, bounds), *troubles]
    if not of.batches:
        return [*_nothing(of), *troubles]
    return [
        _summary(of),
        *troubles,
        *_throughput(of, bounds, is_local),
        *_batches(of, bounds, is_local),
        *_latency(of, bounds, is_local),
    ]


# -- what there is


def _nothing(of: Summary) -> Iterator[Finding]:
    now = of.now
    waiting = f"; {counted(now.pending, 'item')} wait" if now.pending else ""
    if of.ready:
        yield Finding("nothing", f"Nothing has been computed yet{waiting}.")
        return
    states = ", ".join(f"{count} {state}" for state, count in now.workers.items() if count)
    yield Finding(
        "no worker",
        f"Nothing has been computed yet, and no worker is ready ({states or 'there is none'})"
        f"{waiting}.",
        "Calls are accepted meanwhile, and computed when a worker has loaded its model."
        if now.workers.get("starting", 0) + now.workers.get("backing off", 0)
        else "",
    )


def _summary(of: Summary) -> Finding:
    ended = "" if of.ago < 1 else f", the last one {_time(of.ago)} ago"
    rate = f", {_number(of.items / of.seconds)} items/s" if of.seconds > 0 else ""
    ways = [
        (of.queued, "in the queue"),
        (of.behind, "behind the batch before"),
        (of.moved, "on the way"),
        (of.computed, "in the model"),
    ]
    where = ", ".join(f"{_time(took)} {name}" for took, name in ways if took >= 0.01 * of.latency)
    return Finding(
        "summary",
        f"Recently: {counted(of.batches, 'batch', 'batches')} of {_number(of.mean_size)} "
        f"{_plural(round(of.mean_size, 2), 'item', 'items')} on average{rate}{ended}. "
        f"{'A part of a call' if _is_split(of) else 'A call'} took {_time(of.latency)}: {where}.",
    )


def _troubles(of: Summary, bounds: StreamerOptions) -> Iterator[Finding]:
    """What went wrong."""
    if of.batches and not of.ready:
        yield Finding("no worker", f"No worker is ready: the streamer is {of.now.state}.")
    if of.restarts:
        yield Finding(
            "restarts",
            f"{counted(of.restarts, 'worker was', 'workers were')} started again in place of "
            f"{_plural(of.restarts, 'a lost one', 'lost ones')} recently.",
            "The log says what they died of.",
        )
    if of.failed:
        yield Finding("failed", f"{counted(of.failed, 'call')} failed recently.")
    if of.rejected:
        yield Finding(
            "overloaded",
            f"{counted(of.rejected, 'call was', 'calls were')} rejected recently, since "
            + (
                ""
                if bounds.max_pending is None
                else f"max_pending of {bounds.max_pending} items waited, or "
            )
            + "they could not be computed in time.",
            "The load exceeds the workers' capacity: add workers, or have callers slow down.",
        )
    if of.expired:
        yield Finding(
            "expired",
            f"{counted(of.expired, 'call')} timed out recently.",
            ""
            if of.rejected
            else "Either timeouts are too short for the model, or the load exceeds its capacity.",
        )
    for number, ceiling in of.now.ceilings.items():
        if isinstance(ceiling, float):  # in items times the longest of them
            if bounds.max_batch_cost is None or ceiling < bounds.max_batch_cost:
                yield Finding(
                    "ceiling",
                    f"Worker {number} ran out of device memory and computes at most a cost (items "
                    f"times the longest) of {ceiling:g} at once.",
                    f"Set max_batch_cost to {ceiling:g}, or give the model more memory.",
                )
        elif ceiling < bounds.batch_size:
            yield Finding(
                "ceiling",
                f"Worker {number} ran out of device memory and computes at most "
                f"{counted(ceiling, 'item')} at once, though batch_size is {bounds.batch_size}.",
                f"Set batch_size to {ceiling}, or give the model more memory.",
            )
    if of.share(Reason.AGAIN) >= _LITTLE:
        yield Finding(
            "again",
            f"{_share(of.share(Reason.AGAIN))} of the batches were run again after a failure, each "
            "with a part of the items.",
            "The log says what the model raised, or what the workers died of.",
        )


# -- workers


def _scaling(of: Summary) -> Iterator[Finding]:
    """What the load makes of the number of workers."""
    now, ready = of.now, of.ready
    if now.worker_range is None or now.wanted is None:
        return
    least, most = now.worker_range
    needs = f"The load needs {counted(now.wanted, 'worker')} ({least} to {most} are allowed)."
    if not ready:
        needs += " None is ready."
    elif ready < now.wanted:
        needs += f" Only {ready} of them {_plural(ready, 'is', 'are')} ready."
    wait, target = now.wait or 0.0, now.target_wait or 0.0
    if wait > target:
        why = f" A new item waits {_time(wait)} for a worker, and the target is {_time(target)}."
        if ready >= now.wanted == most:
            yield Finding(
                "scaled out",
                f"All {counted(most, 'worker')} that are allowed are ready.{why}",
                "Raise the most of worker_num, or make the model faster.",
            )
            return
        needs += why
        if ready >= now.wanted:
            needs += " If that lasts, more workers are started."
    yield Finding("scaling", needs)


# -- throughput


def _throughput(of: Summary, bounds: StreamerOptions, is_local: bool) -> Iterator[Finding]:
    batch_size, workers = bounds.batch_size, of.ready
    are_alone = of.singles >= _MOST * of.batches and not _is_split(of)
    busy = f"{_plural(workers, 'the worker computes', 'the workers compute')} "
    busy += f"{_share(of.busy)} of the time"
    # What waits would fill more than two batches as they are: callers are not what is missing.
    is_held_up = of.pending > 2 * of.mean_size and of.pending >= 2
    full = Reason.FULL, Reason.PAYS, Reason.TRIED, Reason.COST, Reason.LONG, Reason.TURN
    are_full = of.share(*full) >= _MOST
    if of.busy >= _SATURATED and (of.pending >= batch_size or are_full):
        if of.pending >= 1:
            waits = f"{_number(of.pending)} items wait on average"
        else:
            waits = "a batch is as large as it may be"
        if of.pending_after > 2 * of.pending_before + batch_size:
            waits += f", ever more: {_number(of.pending_before)} in the first quarter of the time, "
            waits += f"{_number(of.pending_after)} in the last"
        yield Finding(
            "saturated",
            f"The workers limit throughput: {busy}, and {waits}.",
            "Make the model faster, or use a Streamer with several workers."
            if is_local
            else ""
            if of.now.worker_range is not None  # see ``_scaling``
            else "Add workers (worker_num), each with a device of its own, or make the model "
            "faster.",
        )
    elif are_alone and 0.5 <= of.callers < 1.5:
        what = "one item" if of.mean_size < 1.05 else "the items of one call"
        yield Finding(
            "one caller",
            f"{_share(of.singles / of.batches)} of the batches had {what}, because calls "
            f"come one at a time ({of.callers:.1f} open calls on average).",
            "Raise the web server's threads or workers, or make calls before the last one is "
            "answered (submit, apredict, more items in each call).",
        )
    elif of.busy >= _BUSY and of.largest < batch_size and not (is_held_up or _is_split(of)):
        gain = of.gain(of.mean_size, batch_size)
        more = "" if gain is None else f" Full ones would compute {_share(gain)} more items/s."
        yield Finding(
            "few callers",
            f"Too few calls are under way to fill batches: {of.callers:.1f} at a time. The "
            f"largest batch had {counted(of.largest, 'item')} of {batch_size}, and {busy}."
            f"{more}",
            "For more throughput have more callers at a time: raise the web server's threads or "
            "workers."
            if gain is None or gain >= _WORTH
            else "",
        )
    elif of.busy < _BUSY and of.callers >= 2 * workers and of.computed < _BUSY * of.latency:
        yield Finding(
            "overhead",
            f"The program around the model limits throughput: {of.callers:.1f} calls are under way "
            f"at a time, and {busy} only.",
            "Have fewer threads in this process, or more items in each call.",
        )
    elif is_held_up:
        are_small = f"though batches had {_number(of.mean_size)} of {batch_size} and"
        if of.share(Reason.COST) >= _SOME:
            are_small = "though"  # larger ones were not allowed
        yield Finding(
            "small batches",
            f"{_number(of.pending)} items wait on average, {are_small} {busy}: the model, or the "
            "process that makes the batches, does not get enough processor time.",
            "If other programs use its cores: set cpu_threads to 1, or have them run elsewhere.",
        )
    elif of.busy < _BUSY:
        yield Finding("idle", f"The callers limit throughput: {busy}.")
    else:
        yield Finding("keeping up", f"The workers keep up with the callers: {busy}.")


def _is_split(of: Summary) -> bool:
    """Whether calls have more items than go into a batch: then parts are not callers."""
    return of.parts > 1.5 * max(1, of.answered + of.failed)


def _batches(of: Summary, bounds: StreamerOptions, is_local: bool) -> Iterator[Finding]:
    """Whether other batches would be better."""
    batch_size = bounds.batch_size
    full, gain = of.share(Reason.FULL), of.gain(batch_size, 2 * batch_size)
    if of.line is not None:
        base, per_unit = of.line
        unit = "item" if not of.has_lengths else "unit of length"
        line = f"a batch takes {_time(base)}, and {_time(per_unit)} more for each {unit}"
        if full >= _MUCH and gain is not None and gain >= _WORTH:
            yield Finding(
                "batch_size",
                f"{_share(full)} of the batches were full: {line}, so that twice the items at once "
                f"would give {_share(gain)} more throughput.",
                f"Raise batch_size from {batch_size}, if the device has the memory.",
            )
        elif gain is not None and gain < _WORTH and of.busy >= _BUSY:
            yield Finding(
                "flat",
                f"Larger batches than {batch_size} would gain little: {line}.",
            )
    elif full >= _MUCH and of.busy >= _BUSY:
        yield Finding(
            "full",
            f"{_share(full)} of the batches had batch_size of {batch_size} items. Whether "
            "larger ones would be faster is unknown: they were all alike.",
            "Try twice the batch_size.",
        )
    if of.stages is not None and of.busy >= _BUSY:
        yield from _stages(of.stages, is_local)
    if of.share(Reason.PAYS) >= _SOME:
        yield Finding(
            "pays",
            f"{_share(of.share(Reason.PAYS))} of the batches had fewer items than waited, because "
            "calls are answered sooner by several small batches: the model computes large ones "
            "hardly faster.",
        )
    if of.share(Reason.COST) >= _SOME:
        yield Finding(
            "cost",
            f"{_share(of.share(Reason.COST))} of the batches were as large as max_batch_cost of "
            f"{bounds.max_batch_cost:g} allows.",
            "Raise it, if the device has the memory." if gain is None or gain >= _WORTH else "",
        )
    if of.padding is not None and of.padding >= _MUCH:
        yield Finding(
            "padding",
            f"{_share(of.padding)} of what the model computes is padding.",
            ""
            if of.has_lengths and of.pending >= batch_size
            else "More callers at a time would leave more items of like length to choose from."
            if of.has_lengths
            else "Say how long an item is (length=), and those of like length are put together.",
        )


def _stages(stages: tuple[float, ...], is_local: bool) -> Iterator[Finding]:
    """Whether the device waits for the work around it."""
    before, forward, after = stages
    if max(before, after) <= forward:
        return
    where = f"preprocess {_time(before)}, forward {_time(forward)}, postprocess {_time(after)}"
    if before >= after:
        advice = (
            "Make preprocess faster, or use a Streamer, whose preprocess_workers share it."
            if is_local
            else "Make preprocess faster, or raise preprocess_workers."
        )
        yield Finding(
            "preprocess",
            f"Preprocessing limits throughput: a batch takes {where} (with its way there and "
            "back).",
            advice,
        )
    else:
        yield Finding(
            "postprocess",
            f"Postprocessing limits throughput: a batch takes {where} (with its way there and "
            "back).",
            "Do more of it in forward on the device, return less for each item, or add workers.",
        )


# -- models of steps


def _steps(of: StepSummary, bounds: StreamerOptions) -> Iterator[Finding]:
    first = (
        ""
        if of.first_output is None
        else (f" Half of the streams had their first output within {_time(of.first_output)}.")
    )
    yield Finding(
        "steps",
        f"Recently: {counted(of.steps, 'step')} of {_number(of.size)} of {of.places} items on "
        f"average, {_time(of.duration)} each.{first}",
    )
    is_full = of.size >= _SATURATED * of.places
    if is_full and of.pending >= 1:
        yield Finding(
            "places",
            f"Nearly all places are taken, and {_number(of.pending)} items wait for one.",
            "If a step takes little longer with more items, and they fit into memory, set "
            f"batch_size above {bounds.batch_size}; else add workers.",
        )
    elif of.pending >= 1 and of.stepping >= _BUSY:
        yield Finding(
            "cost",
            f"{_number(of.pending)} items wait, though a step has {_number(of.size)} of "
            f"{of.places}: they cost as much as max_batch_cost allows, or begin slowly.",
        )
    if of.starting >= _MUCH:
        yield Finding(
            "starting",
            f"The workers spend {_share(of.starting)} of their time in start, in which no step is "
            "taken.",
            "Do less there, or spread it over the first steps.",
        )
    if of.evicted:
        yield Finding(
            "evicted",
            f"{counted(of.evicted, 'item was', 'items were')} given up for lack of device memory, "
            "and began again.",
            "Define cost, and set max_batch_cost to what fits.",
        )
    if of.stepping + of.starting < _BUSY and not of.pending:
        yield Finding("idle", "The workers have time to spare.")


# -- latency


def _latency(of: Summary, bounds: StreamerOptions, is_local: bool) -> Iterator[Finding]:
    if of.latency and of.queued >= _MOST * of.latency and of.queued > 1e-3:
        why = "the workers are busy with those before" if of.busy >= _BUSY else "for expected calls"
        yield Finding(
            "queue",
            f"Calls wait for {_share(of.queued / of.latency)} of their time before they are sent "
            f"({_time(of.queued)} of {_time(of.latency)}): {why}.",
        )
    on_the_way = of.moved / (of.moved + of.computed) if of.moved else 0.0
    if on_the_way >= _MUCH and of.moved > 1e-4:
        others = "The model's thread shares the interpreter with others that are busy."
        yield Finding(
            "transport",
            f"Items and results are on the way for {_time(of.moved)}, and in the model for "
            f"{_time(of.computed)}: they are large, or the model is tiny.",
            others
            if is_local
            else "Use a ThreadedStreamer, send less for each item, or more items in each call.",
        )
    if of.share(Reason.MAX_LATENCY) >= _LITTLE:
        yield Finding(
            "max_latency",
            f"{_share(of.share(Reason.MAX_LATENCY))} of the batches were sent because an item had "
            f"waited for max_latency of {_time(bounds.max_latency)}.",
            "If latency matters more than throughput, lower it.",
        )
    if of.share(Reason.LATE) >= _SOME:
        yield Finding(
            "late",
            f"Before {_share(of.share(Reason.LATE))} of the batches, a free worker waited for "
            "callers that came back later than usual.",
            "Callers that do long work between two calls are better in threads of their own.",
        )
    if of.share(Reason.DEADLINE) >= _LITTLE:
        yield Finding(
            "deadline",
            f"{_share(of.share(Reason.DEADLINE))} of the batches were sent because the deadline "
            "of an item was near.",
            "Give calls more time, or there is none to put them together.",
        )


# -- words


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _share(share: float) -> str:
    return f"{100 * share:.0f} %" if share >= 0.01 or not share else "less than 1 %"


def _time(seconds: float) -> str:
    for scale, unit in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= scale:
            return f"{_number(seconds / scale)} {unit}"
    return f"{_number(seconds * 1e6)} µs"


def _plural(count: float, one: str, many: str) -> str:
    return one if count == 1 else many
