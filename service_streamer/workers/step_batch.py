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
from dataclasses import dataclass, field
from itertools import pairwise
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


@dataclass(slots=True, eq=False)
class StepRequest:
    """One item: what its caller wants, and how far it is."""

    batch_id: int  # of the batch, which it is alone
    item: Any  # until it cannot start again
    is_stream: bool = False  # its outputs go out as they come; otherwise joined, at its end
    is_held: bool = False  # it rests: its consumer is behind
    may_restart: bool = True  # unseen by its caller
    is_done: bool = False
    failure: Any = None  # why it failed; opaque here
    state: Any = NO_STATE  # of the model
    cost: float = 1.0  # of the state
    first_cost: float = 1.0  # the same, when it started
    outputs: list[Any] = field(default_factory=list)  # all so far; of a stream those of this step
    started_at: float = math.inf  # first, by the monotonic clock
    #: When its outputs came, if it is no stream: of those that it makes again, the first time.
    times: list[float] = field(default_factory=list)

    @property
    def is_over(self) -> bool:
        """Whether it is done or has failed."""
        return self.is_done or self.failure is not None

    @property
    def output_times(self) -> tuple[float, float | None, float | None] | None:
        """See ``BatchReport``."""
        if not self.times:
            return None
        first = self.times[0] - self.started_at
        gaps = [later - earlier for earlier, later in pairwise(self.times)]
        return (first, sum(gaps) / len(gaps), max(gaps)) if gaps else (first, None, None)

    def let_go_of_item(self) -> None:
        """It does not start again."""
        self.may_restart, self.item = False, None


class StepBatch:
    """The items of one worker.

    While items start, those that run wait: a language model reads prompts, and no text goes on. To
    start many at once would make a long pause between two outputs of all who run. So as many start
    as take about one step, and always one, so that each gets its turn.
    """

    def __init__(
        self, places: int, max_cost: float, *, may_rerun: bool, new_cost: float | None
    ) -> None:
        self.deck: deque[StepRequest] = deque()
        self.running: list[StepRequest] = []  # in the order in which they began
        # How many may run, and how many may start in one call, learned from lack of memory. One
        # more at a time: of too many, each is given up after a step that ran out.
        self.memory = Ceiling(growth=0.0, asked=places)
        self.starts = Ceiling(growth=0.0, asked=places)
        self._awaits_end = False  # nothing starts before an item is over: they cost too much
        self._places = places
        self._max_cost = max_cost
        self._may_rerun = may_rerun
        self._start_time = LearnedCost()
        self._step_time = 0.0  # seconds, lately; 0 while it is not known
        self._new_cost = new_cost  # of a new item's state, lately; None while it is not known
        self._growth: float | None = None  # by how much that grows until it is done

    @property
    def cost(self) -> float:
        """Of all states."""
        return sum(request.cost for request in self.running)

    def find(self, ids: Collection[int]) -> list[StepRequest]:
        """Those with these ids."""
        return [each for each in (*self.running, *self.deck) if each.batch_id in ids]

    def next(self) -> list[StepRequest]:
        """Take from the deck those that start now."""
        running = len(self.running)
        if not self.deck or (self._awaits_end and running):
            return []
        room = min(
            len(self.deck),
            self._most_in_time(),
            self.starts.room([1] * self._places),
            self.memory.room([1] * self._places) - running,
        )
        return [self.deck.popleft() for _ in range(self._most_in_cost(int(room)))]

    def _most_in_cost(self, room: int) -> int:
        """How many items may start, of so many, for what they will cost; a single one always."""
        if self._max_cost == math.inf:
            return room
        if self._new_cost is None:
            return min(1, room)  # it will tell
        growth = self._growth or 0.0
        # What is left to grow, and the cost, of each.
        costs = sorted(
            (max(0.0, each.first_cost + growth - each.cost), each.cost) for each in self.running
        )
        for count in range(room):
            insort(costs, (growth, self._new_cost))
            if len(costs) > 1 and _peak(costs) > self._max_cost:
                return count
        return room

    def _most_in_time(self) -> float:
        """How many items may start now: at least one, and all if nothing runs that would wait."""
        starts = self._start_time
        if not self.running:
            return math.inf
        allowed = max(STALL_STEPS * self._step_time, STALL_STARTS * starts.duration(1))
        if starts.per_unit * 1e9 <= allowed:  # each takes nothing beside the call, or none began
            return math.inf
        return max(1, int((allowed - starts.base) / starts.per_unit))

    def begin(self, requests: Sequence[StepRequest], now: float, seconds: float | None) -> None:
        """These have started together, in so many seconds; None after an error."""
        for request in requests:
            request.started_at = min(request.started_at, now)
            request.first_cost = request.cost
            self._new_cost = _average(self._new_cost, request.cost, COST_RATE)
            if not self._may_rerun:
                request.let_go_of_item()
        self.running += requests
        if seconds is not None:
            self._start_time.observe(len(requests), seconds)
            self.starts.fitted([1] * len(requests))

    def learn_step(self, seconds: float) -> None:
        """A step took so many seconds, without an error."""
        before = self._step_time or seconds
        self._step_time = _average(before, min(seconds, LONGEST_STEP * before), STEP_RATE)

    def learn_growth(self, request: StepRequest) -> None:
        """An item is done."""
        self._growth = _average(self._growth, request.cost - request.first_cost, COST_RATE)

    def excess(self) -> StepRequest | None:
        """The one to be given up since all together cost too much; None if none is."""
        if len(self.running) < 2 or self.cost <= self._max_cost:
            return None
        self._awaits_end = True
        return self.youngest(self.running)

    def youngest(self, among: Sequence[StepRequest]) -> StepRequest | None:
        """The last that began of these, and can start again; or None."""
        return next((each for each in reversed(among) if each.may_restart), None)

    def put_back(self, requests: Sequence[StepRequest]) -> None:
        """Before the others on deck, in this order. Their states are given up."""
        self.running = [each for each in self.running if each not in requests]
        for request in requests:
            request.outputs = []
        self.deck.extendleft(reversed(requests))

    def ran_out(self, others: int) -> None:
        """There was no memory for an item beside so many others."""
        if others:
            self.memory.ran_out([1] * (others + 1), keep=others)
        else:  # it does not fit, whoever runs: so it may have been the reason for the bounds
            self.memory.ran_out([1])
            self.starts.ran_out([1])

    def end(self, request: StepRequest) -> None:
        """It is over, wherever it is."""
        if request in self.deck:
            self.deck.remove(request)
        if request in self.running:  # else it leaves no room
            self.running.remove(request)
            self._awaits_end = False


def _average(before: float | None, value: float, rate: float) -> float:
    return value if before is None else before + (value - before) * rate


def _peak(costs: Sequence[tuple[float, float]]) -> float:
    """The most that states cost together, if all grow alike until each is done.

    So tokens do. The peak is where one of them is done, with all that grow as long or longer.
    ``costs`` are what each has left to grow, and its cost, ascending.
    """
    total = peak = 0.0
    for number, (left, cost) in enumerate(reversed(costs), 1):
        total += cost
        peak = max(peak, total + number * left)
    return peak
