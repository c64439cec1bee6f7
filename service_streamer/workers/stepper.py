"""A worker of a model of steps: items come and go between two steps, and outputs go out after each.

    drain     receive what waits; block only if there is nothing to do
    start     as many of those on deck as have a place, memory and time
    step      once, with all that run
    send      outputs of streams, and what is over, in one message

    taken up ──▶ on deck ── start ──▶ running ── end ──▶ over
                 (first in,    ▲        │
                  first out)   └────────┘ evicted: its state is given up, and it starts again

What is put back goes before the others on deck. Of those that can start again the last that began
is given up first, so that some always get to their end. All is in the thread that loaded the model.
Errors:

    what was raised    of start                         of step
    ---------------    --------                         -------
    InvalidItems       those fail, the others start     those fail, the step is taken again
    out of memory      they are put back, and fewer     the youngest is put back, and the step is
                       start the next time              taken again; in halves, if none can be
    another error      as ``Bisection`` says            as ``Bisection`` says

Results that cannot be read fail all items of the call, since the model may have taken the step.
Where nothing may be computed again, all items of a call fail. An item that was alone in the call
gets the exception. Several get ``SharedBatchError``, since its text may quote any of them.
"""

from __future__ import annotations

import logging
import math
import time
from array import array
from bisect import insort
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from ..batching.learning import LearnedCost
from ..errors import BadModelOutput, InvalidItems, SharedBatchError, WorkerLost
from ..gpu.accelerators import release_memory
from ..gpu.transfers import results_on_host
from ..managed_model import ManagedModel
from ..observe.record import BatchReport, StepReport
from ..reporting import quiet_log
from .mending import Bisection, Ceiling, Invalid, Outcome
from .model_spec import LoadedModel, StepPair, as_list, check_pairs, describe, unreadable
from .protocol import DROP, FORWARD, HOLD, RESUME, SIGN_OF_LIFE, Channel, Failure, Progress

_log = quiet_log(__name__)

#: In place of a state, or of an item. Those of users may be anything, and None, too.
NOTHING: Any = object()

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
    item: Any  # until it cannot start again, since its caller has seen outputs
    is_stream: bool = False  # its outputs go out as they come; otherwise joined, at its end
    is_held: bool = False  # it rests: its consumer is behind
    is_done: bool = False
    failure: Failure | None = None
    state: Any = NOTHING  # of the model
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

    def report(self, result: Any, now: float, ceiling: float) -> BatchReport:
        """What became of it."""
        self.item = NOTHING
        started_at = min(self.started_at, now)
        output_times: tuple[float, float | None, float | None] | None = None
        if self.times:
            gaps = [later - earlier for earlier, later in pairwise(self.times)]
            mean = sum(gaps) / len(gaps) if gaps else None
            output_times = self.times[0] - self.started_at, mean, max(gaps, default=None)
        return BatchReport(
            self.batch_id,
            [result],
            {} if self.failure is None else {0: self.failure},
            duration=now - started_at,
            started_at=started_at,
            ceiling=ceiling,
            output_times=output_times,
        )


#: Calls the model with these items; returns a result for each.
_Function = Callable[[list[StepRequest]], list[Any]]
#: Has some items fail or wait, after the model lacked memory for these.
_RanOut = Callable[["_Together", list[StepRequest], Failure], None]


class _Together(Bisection[StepRequest]):
    """Items with which the model is called together."""

    def __init__(
        self,
        stepper: _Stepper,
        requests: list[StepRequest],
        function: _Function,
        ran_out: _RanOut,
    ) -> None:
        super().__init__(requests)
        self._stepper, self._function, self._ran_out = stepper, function, ran_out
        stepper.channel.last_sign_at = time.monotonic()

    def run(self, part: list[StepRequest]) -> Outcome:
        stepper, size = self._stepper, len(part)
        at = slice(FORWARD, FORWARD + size)
        stepper.channel.sign_of_life()
        stepper.progress[at] = array("q", [request.batch_id + 1 for request in part])
        try:
            outcome: Outcome = self._function(part)
        except BaseException as error:
            outcome = stepper.model.outcome_of(error, part[0].batch_id, size)
            if isinstance(error, InvalidItems) and isinstance(outcome, Failure):
                # It names an item that does not exist. The text quotes no item, so all may read it.
                outcome = Invalid(dict.fromkeys(range(size), outcome))
        stepper.progress[at] = array("q", [0] * size)  # not if the worker ends: they are to blame
        stepper.channel.check_owner()
        return outcome

    def ran_out(self, part: list[StepRequest], failure: Failure) -> None:
        self._ran_out(self, part, failure)
        release_memory()  # only now: where it was raised, frames still held tensors

    def outcomes(self) -> dict[StepRequest, Any]:
        """Call the model; the results. Those without one have failed, or start again."""
        self.run_all(may_rerun=self._stepper.model.may_rerun)
        for request, failure in self.failures.items():
            request.failure = failure
        return self.results

    def fail(self, items: Iterable[StepRequest], failure: Failure) -> None:
        requests = [*items]
        super().fail(requests, _shared(failure) if len(requests) > 1 else failure)


def serve_steps(channel: Channel, model: LoadedModel, progress: Progress) -> None:
    """Take steps until the channel says to end; see ``serve``.

    Then what runs is released, and nothing more is sent.
    """
    stepper = _Stepper(channel, model, progress)
    while stepper.drain():
        stepper.start()
        stepper.step()
        stepper.send()
    stepper.end([*stepper.running])


class _Stepper:
    """The items of one worker, the calls of its model, and what is to be reported.

    No method raises what a model raises, but for what ends the worker: an item that fails gets its
    ``failure``.
    """

    def __init__(self, channel: Channel, model: LoadedModel, progress: Progress) -> None:
        assert model.managed is not None
        self.model = model
        self.managed = managed = model.managed
        self.channel = channel
        self.deck: deque[StepRequest] = deque()
        self.running: list[StepRequest] = []  # in the order in which they began
        self._has_costs = type(managed).cost is not ManagedModel.cost  # else each state costs 1
        self._admission = _Admission(
            model.places, model.max_cost, new_cost=None if self._has_costs else 1.0
        )
        self._awaits_end = False  # nothing starts before an item is over: they cost too much
        self.progress = progress.stages
        self._report = StepReport()
        self._sent_at = time.monotonic()
        self._has_worked = False  # in the last round, or something has come since
        self._log_once = quiet_log(__name__, once=True)  # it may be so for each state

    # -- messages

    def drain(self) -> bool:
        """Receive what waits. Blocks if there is nothing to do; False at the end."""
        while not (self._has_worked or self._report.done) or self.channel.is_waiting():
            received = self.channel.receive()
            if received is None:
                return False
            self._has_worked = True
            if received[0] in (DROP, HOLD, RESUME):
                self._obey(*received)
            else:
                self._take(received)
            del received  # it holds items, and would do so until the next comes
        self._has_worked = False
        return True

    def _take(self, received: tuple[Any, ...]) -> None:
        batch_id, items, failures, _ = self.channel.decode(received)
        request = StepRequest(batch_id, items[0] if items else None, bool(received[3]))
        if failures:
            request.failure = next(iter(failures.values()))
        elif len(items) > 1:  # outputs, handed out by another worker, which was lost
            resume = getattr(self.managed, "resume", None)
            if resume is None:  # what sent it could not know yet
                text = "the process that held the stream died after outputs of it were handed out"
                request.failure = Failure(WorkerLost(f"{text}, and the model has no resume"))
            else:
                request.item = self._call_alone(request, lambda: resume(items[0], items[1:]))
        if request.failure is None:
            self.deck.append(request)
        else:
            self._finish([request])

    def _obey(self, order: int, ids: list[int]) -> None:
        """The callers of these have gone, or these are to rest, or to go on."""
        requests = self._find(ids)  # others are over
        if order == DROP:
            self._finish(requests)
        for request in requests:
            request.is_held = order == HOLD

    def _find(self, ids: Iterable[int]) -> list[StepRequest]:
        wanted = set(ids)
        return [each for each in (*self.running, *self.deck) if each.batch_id in wanted]

    def send(self) -> None:
        """Report the step, if there is something to report."""
        report, now = self._report, time.monotonic()
        has_news = report.outputs or report.done or report.started or report.evicted
        if not has_news and not (report.size and now - self._sent_at >= SIGN_OF_LIFE):
            return
        self._report = StepReport()
        self._sent_at = now
        self.channel.encode(report)
        if report.done:  # also a stream of which an output cannot travel
            self.end(self._find(each.batch_id for each in report.done))
        self.channel.send(report)

    # -- one round

    def start(self) -> None:
        """Start those on deck for which there is a place, memory and time."""
        if not self.deck or (self._awaits_end and self.running):
            return
        admission, report = self._admission, self._report
        count = admission.room(len(self.deck), self.running)
        if not count:
            return
        chosen = [self.deck.popleft() for _ in range(count)]
        self._has_worked = True
        began = time.monotonic()
        states = _Together(self, chosen, self._call_start, self._unstart).outcomes()
        for request, state in states.items():
            request.state = state
        now = time.monotonic()
        started = [each for each in chosen if each.state is not NOTHING]
        waiting = [each for each in chosen if each.failure is None and each.state is NOTHING]
        self.deck.extendleft(reversed(waiting))
        self._look_at_costs(started)
        for request in started:
            request.started_at = min(request.started_at, began)
            request.first_cost = request.cost
            if not self.model.may_rerun:
                request.item = NOTHING
        self.running += started
        admission.learn_start(started, now - began if len(started) == count else None)
        report.started += len(started)
        report.starting += now - began
        self._finish([each for each in chosen if each.failure is not None])

    def step(self) -> None:
        """Take a step with all that run, and end those that are done or have failed."""
        admission, report, max_cost = self._admission, self._report, self.model.max_cost
        while len(self.running) > 1 and sum(each.cost for each in self.running) > max_cost:
            self._awaits_end = True
            if not self._evict(self.running):
                break
        running = [each for each in self.running if not each.is_held]
        if not running:
            return
        self._has_worked = True
        size = len(self.running)
        report.size = len(running)
        began = time.monotonic()
        pairs = _Together(self, running, self._call_step, self._unstep).outcomes()
        for request, pair in pairs.items():
            output, request.is_done = pair
            if output is not None:
                request.outputs.append(output)
        now = time.monotonic()
        report.duration = now - began
        if not report.evicted and not any(each.failure for each in running):
            admission.learn_step(report.duration)
        for request in self.running:
            if not request.is_stream:
                if len(request.outputs) > len(request.times):
                    request.times.append(now)
            elif request.outputs:
                (report.outputs[request.batch_id],) = request.outputs
                request.outputs = []
                request.item = NOTHING
        self._look_at_costs([each for each in self.running if not each.is_over])
        over = [each for each in self.running if each.is_over]
        self._finish(over)
        if over:  # as many have run until one was done
            admission.places.fitted([1] * size)

    def _look_at_costs(self, requests: Sequence[StepRequest]) -> None:
        """Ask what the states cost now."""
        cost = self.managed.cost
        for request in requests if self._has_costs else ():
            try:  # not by ``call``, since there are many of them in each step
                request.cost = found = float(cost(request.state))
                if not 0.0 <= found < float("inf"):
                    text = "must return a number of at least 0; it returned"
                    raise BadModelOutput(f"{describe(cost)} {text} {found}")
            except BaseException as error:
                outcome: Any = self.model.outcome_of(error, request.batch_id)
                request.cost, request.failure = 0.0, getattr(outcome, "failure", outcome)

    def _finish(self, over: list[StepRequest]) -> None:
        """These are done, have failed, or were dropped: report it."""
        now = time.monotonic()
        for request in over:
            result = None
            if request.is_done and not request.failure and not request.is_stream:
                result = self._join_outputs(request)
            if request.is_done:
                self._admission.learn_growth(request.cost - request.first_cost)
            self._report.done.append(request.report(result, now, self._admission.places.limit))
        self.end(over)

    def end(self, requests: Sequence[StepRequest]) -> None:
        """These are over, wherever they are."""
        for request in requests:
            if request in self.deck:
                self.deck.remove(request)
            if request in self.running:  # else it leaves no room
                self.running.remove(request)
                self._awaits_end = False
            self._give_up_state(request)

    # -- states that are given up

    def _unstart(self, together: _Together, part: list[StepRequest], failure: Failure) -> None:
        """Too little memory: the part fails if it can never fit. Else it and all behind it wait."""
        others = len(self.running) + len(together.results)
        if len(part) > 1:
            self._admission.starts.ran_out([1] * len(part))
        else:
            self._admission.ran_out(others)
        if self.model.may_rerun and (others or len(part) > 1):
            together.drop(together.items)
        else:
            together.fail(part, failure)

    def _unstep(self, together: _Together, part: list[StepRequest], failure: Failure) -> None:
        """Too little memory: give up the youngest of those that have not taken the step."""
        others = len(self.running) - 1
        self._admission.ran_out(others)
        if others and (youngest := self._evict(together.items)):
            together.drop([youngest])
        elif self.model.may_rerun and len(part) > 1:
            together.shrink(part)
            # The youngest next: if they fail the others have more.
            together.reorder(sorted(together.items, key=self.running.index, reverse=True))
        else:
            together.fail(part, failure)
            for request in part:
                self._give_up_state(request)

    def _evict(self, among: Sequence[StepRequest]) -> StepRequest | None:
        """Put back the last that began of these, and can start again; None if there is none."""
        youngest = next((each for each in reversed(among) if each.item is not NOTHING), None)
        if youngest is not None:
            self._report.evicted += 1
            self.running.remove(youngest)
            self._give_up_state(youngest)
            youngest.outputs = []
            self.deck.appendleft(youngest)
        return youngest

    def _give_up_state(self, request: StepRequest) -> None:
        """Release the state, if there is one."""
        state, request.state = request.state, NOTHING
        if state is not NOTHING:
            self._release(state)

    def _release(self, state: Any) -> None:
        try:
            self.managed.release(state)
        except Exception:
            text = "%s raised: what the state held may not be free"
            self._log_once(logging.WARNING, text, describe(self.managed.release), exc_info=True)

    # -- calls of the model

    def _call_start(self, requests: list[StepRequest]) -> list[Any]:
        start, size = self.managed.start, len(requests)
        found = start([request.item for request in requests])
        states = as_list(found)
        if states is not None and len(states) == size:
            return states
        for state in states or ():
            self._release(state)
        return [unreadable(found, start, f"a sequence of {size} states, one per item")] * size

    def _call_step(self, requests: list[StepRequest]) -> list[StepPair]:
        found = self.managed.step([request.state for request in requests])
        pairs = check_pairs(self.model, found, len(requests))
        self.model.guard.row = 0
        return pairs

    def _join_outputs(self, request: StepRequest) -> Any:
        """The result of an item that is done; if there is none it has failed."""
        outputs, request.outputs = request.outputs, []

        def join() -> Any:
            result = self.managed.join_outputs(outputs)
            return results_on_host([result])[0] if self.model.moves_to_cpu else result

        return self._call_alone(request, join)

    def _call_alone(self, request: StepRequest, function: Callable[[], Any]) -> Any:
        """Call the model for one item; if it raises, the item has failed, and None is returned."""
        alone = _Together(self, [request], lambda _: [function()], _Together.fail)
        return alone.outcomes().get(request)


class _Admission:
    """How many items start before the next step. Pure.

    While items start, those that run wait: a language model reads prompts, and no text goes on. To
    start many at once would make a long pause between two outputs of all who run. So as many start
    as take about one step, and always one, so that each gets its turn.
    """

    def __init__(self, places: int, max_cost: float, *, new_cost: float | None) -> None:
        # How many may run, and how many may start in one call, learned from lack of memory. One
        # more at a time: of too many, each is given up after a step that ran out.
        self.places = Ceiling(growth=0.0, asked=places)
        self.starts = Ceiling(growth=0.0, asked=places)
        self._each_place = [1] * places
        self._max_cost = max_cost
        self._start_time = LearnedCost()
        self._step_time = 0.0  # seconds, lately; 0 while it is not known
        self._new_cost = new_cost  # of a new item's state, lately; None while it is not known
        self._growth: float | None = None  # by how much that grows until it is done

    def room(self, waiting: int, running: Sequence[StepRequest]) -> int:
        """How many of those that wait start now, beside those that run."""
        room = min(
            waiting,
            self._room_in_time() if running else math.inf,
            self.starts.room(self._each_place),
            self.places.room(self._each_place) - len(running),
        )
        return self._room_in_cost(max(0, int(room)), running)

    def _room_in_cost(self, room: int, running: Sequence[StepRequest]) -> int:
        """How many may start, of so many, for what they will cost; a single one always."""
        if self._max_cost == math.inf:
            return room
        if self._new_cost is None:
            return min(1, room)  # it will tell
        growth = self._growth or 0.0
        # What is left to grow, and the cost, of each.
        costs = sorted(
            (max(0.0, each.first_cost + growth - each.cost), each.cost) for each in running
        )
        for count in range(room):
            insort(costs, (growth, self._new_cost))
            if len(costs) > 1 and _peak(costs) > self._max_cost:
                return count
        return room

    def _room_in_time(self) -> float:
        """How many may start while others wait for them: at least one."""
        starts = self._start_time
        allowed = max(STALL_STEPS * self._step_time, STALL_STARTS * starts.duration(1))
        if starts.per_unit * 1e9 <= allowed:  # each takes nothing beside the call, or none began
            return math.inf
        return max(1, int((allowed - starts.base) / starts.per_unit))

    def learn_start(self, started: Sequence[StepRequest], seconds: float | None) -> None:
        """These have started together, in so many seconds; None after an error."""
        for request in started:
            self._new_cost = _average(self._new_cost, request.cost, COST_RATE)
        if seconds is not None:
            self._start_time.observe(len(started), seconds)
            self.starts.fitted([1] * len(started))

    def learn_step(self, seconds: float) -> None:
        """A step took so many seconds, without an error."""
        before = self._step_time or seconds
        self._step_time = _average(before, min(seconds, LONGEST_STEP * before), STEP_RATE)

    def learn_growth(self, growth: float) -> None:
        """An item is done, whose state costs so much more than at first."""
        self._growth = _average(self._growth, growth, COST_RATE)

    def ran_out(self, others: int) -> None:
        """There was no memory for an item beside so many others."""
        if others:
            self.places.ran_out([1] * (others + 1), keep=others)
        else:  # it does not fit, whoever runs: so it may have been the reason for the bounds
            self.places.ran_out([1])
            self.starts.ran_out([1])


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


def _shared(failure: Failure) -> Failure:
    """For items that were in one call, if it is not known which of them it was.

    The model's exception may quote the item at fault, so it goes to the log only.
    """
    text = "a model raised on several items, and which is at fault is not known:\n%s"
    _log(logging.ERROR, text, failure.remote_traceback)
    kind = failure.text.partition(": ")[0]
    return Failure(
        SharedBatchError(
            f"the model raised {kind} on a batch that this call shared with other calls, and "
            "the call at fault is not known; with retry=True only that call fails. The log has "
            "the exception"
        )
    )
