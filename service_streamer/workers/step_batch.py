"""Which items of a worker run, and which wait for a place. Pure: the stepper calls the model.

    taken up ──▶ on deck ── begin ──▶ running ── end ──▶ over
                 (first in,    ▲        │
                  first out)   └────────┘ put_back: its state is given up, and it starts again

What is put back goes before the others on deck. Of those that can start again the last that began
is given up first, so that some always get to their end.
"""

from __future__ import annotations

import math
from bisect import insort
from collections import deque
from collections.abc import Collection, Sequence
from typing import Any

from ..batching.learning import LearnedCost
from .mending import Ceiling

#: Of an item that does not run. A model's own states may be anything, and None, too.
NO_STATE: Any = object()

#: Before each step, as many items start as take this many steps' time.
#: Chosen by reasoning: outputs then come at half their pace at worst while items start, and where a
#: start is shorter than a step, most places are filled in one or two steps.
STALL_STEPS = 1.0
#: Or as many as take this many times what one takes that starts anyway.
#: Chosen by reasoning: where it is the call of ``start`` that costs, and not its items, the others
#: come along for little.
STALL_STARTS = 1.5
#: Weight of the newest step in what a step takes.
#: Chosen by reasoning: a few steps, since their number of states changes as fast.
STEP_RATE = 0.25
#: A step counts at most this many times what steps have taken.
#: Chosen by reasoning: one that was held up says nothing of the next.
LONGEST_STEP = 2.0
#: Weight of the newest item in what a new one costs.
#: Chosen by reasoning: items differ, so that a mean of some is needed.
COST_RATE = 0.1


class StepRequest:
    """One item: what its caller wants, and how far it is.

    Attributes:
        batch_id: of the batch, which it is alone.
        item: until it can not start again.
        is_stream: whether its outputs go out as they come; otherwise joined, at its end.
        state: of the model; ``NO_STATE`` unless it runs.
        cost: of the state.
        first_cost: the same, when it started.
        outputs: all so far; of a stream those of this step.
        made: outputs since it started.
        sent: outputs of a stream that went out, in all.
        started_at: when it started first, by the monotonic clock; infinity before.
        timed: outputs of one that is no stream of which the time is known.
        first_at, last_at: when the first and the last of these were made.
        longest_between: the longest time from one to the next, seconds.
        is_held: whether it rests: its consumer is behind.
        is_done: whether it has come to its end.
        failure: why it failed; opaque here. None if it has not.
    """

    __slots__ = (
        "batch_id",
        "cost",
        "failure",
        "first_at",
        "first_cost",
        "is_done",
        "is_held",
        "is_stream",
        "item",
        "last_at",
        "longest_between",
        "made",
        "outputs",
        "sent",
        "started_at",
        "state",
        "timed",
    )

    def __init__(self, batch_id: int, item: Any, is_stream: bool = False) -> None:
        self.batch_id = batch_id
        self.item = item
        self.is_stream = is_stream
        self.state: Any = NO_STATE
        self.cost = self.first_cost = 0.0
        self.outputs: list[Any] = []
        self.made = self.sent = self.timed = 0
        self.started_at = self.first_at = self.last_at = math.inf
        self.longest_between = 0.0
        self.failure: Any = None
        self.is_done = self.is_held = False

    def stepped(self, output: Any, is_done: bool) -> None:
        """Take up what a step has made of it; an output of None is nothing."""
        self.is_done = is_done
        if output is not None:
            self.made += 1
            self.outputs.append(output)

    def time_output(self, now: float) -> None:
        """A step is over: note it, if it has made an output that none before a restart was."""
        if self.made <= self.timed:
            return
        if self.timed:
            self.longest_between = max(self.longest_between, now - self.last_at)
        else:
            self.first_at = now
        self.last_at = now
        self.timed = self.made

    @property
    def output_times(self) -> tuple[float, float | None, float | None] | None:
        """See ``BatchReport``."""
        if not self.timed:
            return None
        first, gaps = self.first_at - self.started_at, self.timed - 1
        if not gaps:
            return first, None, None
        return first, (self.last_at - self.first_at) / gaps, self.longest_between

    def take_outputs(self) -> list[Any]:
        """What is to go out now; at the end, or of a stream after each step."""
        outputs, self.outputs = self.outputs, []
        self.sent += len(outputs)
        return outputs


class StepBatch:
    """The items of one worker. Not thread-safe: it belongs to the thread of the model.

    Args:
        places: how many run at most.
        max_cost: what they may cost together.
        may_rerun: whether an item may start again.

    Attributes:
        deck: those that wait, in order.
        running: in the order in which they began.
        memory: how many may run, learned from lack of memory.
        starts: how many may start in one call, likewise.
        awaits_end: nothing starts before an item is over: they cost too much.
        evicted: states that were given up; whoever reports them sets it to 0.
    """

    def __init__(
        self,
        places: int,
        max_cost: float = math.inf,
        *,
        may_rerun: bool = True,
    ) -> None:
        self.deck: deque[StepRequest] = deque()
        self.running: list[StepRequest] = []
        self.places = places
        # One more at a time: of too many, each is given up after a step that ran out.
        self.memory, self.starts = Ceiling(growth=0.0), Ceiling(growth=0.0)
        self.memory.begin(places)
        self.starts.begin(places)
        self.awaits_end = False
        self.evicted = 0
        self._max_cost = max_cost
        self._may_rerun = may_rerun

    @property
    def cost(self) -> float:
        """Of all states."""
        return sum(request.cost for request in self.running)

    def find(self, ids: Collection[int]) -> list[StepRequest]:
        """Those with these ids."""
        return [each for each in (*self.running, *self.deck) if each.batch_id in ids]

    def next(self, most: float, mean_cost: float | None, growth: float = 0.0) -> list[StepRequest]:
        """Take from the deck those that start now.

        Args:
            most: not more than these, for another reason.
            mean_cost: of a new state; None if that is not known, and one may start to tell it.
            growth: of that until it is done.
        """
        running = len(self.running)
        if self.awaits_end and running:
            return []
        size = self.memory.room(self.places)
        most = min(most, self.starts.room(self.places))
        is_bounded = self._max_cost < math.inf
        if is_bounded and mean_cost is None:
            most = 1
        # What is left to grow, and the cost, of each.
        costs = sorted(
            (max(0.0, each.first_cost + growth - each.cost), each.cost) for each in self.running
        )
        chosen: list[StepRequest] = []
        while self.deck and len(chosen) < most:
            then = running + len(chosen) + 1
            if is_bounded:
                insort(costs, (growth, mean_cost or 0.0))
            # A single one always fits.
            if then > 1 and (then > size or (is_bounded and _peak(costs) > self._max_cost)):
                break
            chosen.append(self.deck.popleft())
        return chosen

    def begin(self, requests: Sequence[StepRequest], now: float) -> None:
        """These have a state now."""
        for request in requests:
            request.started_at = min(request.started_at, now)
            request.made = 0
            if not self._may_rerun:
                request.item = None
        self.running += requests

    def can_start_again(self, request: StepRequest) -> bool:
        """Whether it may, and its caller sees nothing of it."""
        return self._may_rerun and not request.sent

    def excess(self) -> StepRequest | None:
        """The one to be given up since all together cost too much; None if none is."""
        if len(self.running) < 2 or self.cost <= self._max_cost:
            return None
        self.awaits_end = True
        return self.youngest(self.running)

    def youngest(self, among: Sequence[StepRequest]) -> StepRequest | None:
        """The last that began of these, and can start again; None if none can."""
        return next(filter(self.can_start_again, reversed(among)), None)

    def put_back(self, requests: Sequence[StepRequest]) -> None:
        """Before the others on deck, in this order. Their states are given up."""
        given_up = set(requests)
        left = [each for each in self.running if each not in given_up]
        self.evicted += len(self.running) - len(left)
        self.running = left
        for request in reversed(requests):
            request.outputs = []
            self.deck.appendleft(request)

    def ran_out(self, keep: int) -> None:
        """There is memory for no more than so many."""
        self.memory.ran_out(keep + 1, keep=max(1, keep))

    def ran_out_alone(self) -> None:
        """An item does not fit, whoever runs. So it may have been the reason for the bounds."""
        self.memory.ran_out(1)
        self.starts.ran_out(1)

    def end(self, request: StepRequest) -> None:
        """It is over, wherever it is."""
        if request in self.deck:
            self.deck.remove(request)
        if request not in self.running:  # then it leaves no room
            return
        self.running.remove(request)
        self.awaits_end = False


class StepAdmission:
    """Learns what starts and steps take and what new items cost. Not thread-safe: one per worker.

    While items start, those that run wait: a language model reads prompts, and no text goes on. To
    put starts off saves no time in all, since the work stays the same, and others run by then. But
    to start many at once makes a long pause between two outputs of all who run. So as many start as
    take about one step, and always one, so that each gets its turn.

    Args:
        cost: of each state, if it is the same for all.

    Attributes:
        step: seconds of a step, lately; 0 while none is known.
        cost: of a new item's state, lately; None while none is known.
        growth: by how much that grows until it is done.
    """

    __slots__ = ("_has_grown", "_starts", "cost", "growth", "step")

    def __init__(self, cost: float | None = None) -> None:
        self._starts = LearnedCost()
        self.step = 0.0
        self.cost = cost
        self.growth = 0.0
        self._has_grown = False

    def started(self, size: int, seconds: float) -> None:
        """So many items have started together, without an error."""
        self._starts.observe(size, seconds)

    def costs(self, cost: float) -> None:
        """A state that has just started costs this much."""
        self.cost = cost if self.cost is None else self.cost + (cost - self.cost) * COST_RATE

    def grew(self, growth: float) -> None:
        """A state that is done costs so much more than when it started."""
        self.growth += (growth - self.growth) * (COST_RATE if self._has_grown else 1.0)
        self._has_grown = True

    def stepped(self, seconds: float) -> None:
        """A step took so many seconds, without an error."""
        if self.step:
            self.step += (min(seconds, LONGEST_STEP * self.step) - self.step) * STEP_RATE
        else:
            self.step = seconds

    def most(self, running: int) -> float:
        """How many items may start now: at least one, and all if nothing runs that would wait."""
        starts = self._starts
        if not running or not starts.is_known:
            return math.inf
        allowed = max(STALL_STEPS * self.step, STALL_STARTS * starts.duration(1))
        if starts.per_unit * 1e9 <= allowed:  # each takes nothing beside the call
            return math.inf
        return max(1, int((allowed - starts.base) / starts.per_unit))


def _peak(costs: Sequence[tuple[float, float]]) -> float:
    """The most that states cost together, if all grow alike until each is done.

    So tokens do. The peak is where one of them is done, with all that grow as long or longer.

    Args:
        costs: what each has left to grow, and its cost, ascending.
    """
    total = peak = 0.0
    for number, (left, cost) in enumerate(reversed(costs), 1):
        total += cost
        peak = max(peak, total + number * left)
    return peak
