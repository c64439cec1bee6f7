"""A worker of a model of steps: items come and go between two steps, and outputs go out after each.

    drain     receive what waits; block only if there is nothing to do
    start     as many of those on deck as have a place, memory and time
    step      once, with all that run
    report    outputs of streams, and what is over, in one message

All in the thread that loaded the model. ``step_batch`` decides what runs. Errors:

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
import time
from abc import abstractmethod
from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ..errors import BadModelOutput, InvalidItems, SharedBatchError, WorkerLost
from ..gpu.accelerators import release_memory
from ..gpu.transfers import OnHost, results_on_host
from ..managed_model import ManagedModel
from ..observe.record import BatchReport, StepReport
from ..reporting import quiet_log
from .mending import Bisection, Invalid, Outcome, Returned
from .model_spec import LoadedModel, describe
from .protocol import DROP, HOLD, RESUME, SIGN_OF_LIFE, Failure, Progress
from .stages import FORWARD, Channel, as_list, describe_outputs, outcome_of
from .step_batch import NO_STATE, StepBatch, StepRequest

_log = quiet_log(__name__)

#: What a model returned for a state: its output, and whether it is done; or why its item fails.
StepPair = tuple[Any, bool] | Failure


def serve_steps(channel: Channel, model: LoadedModel, progress: Progress) -> None:
    """Take steps until the channel says to end; see ``serve``.

    Then what runs is released, and nothing more is sent.
    """
    stepper = _Stepper(channel, model, progress)
    while stepper.drain():
        stepper.start()
        stepper.step()
        stepper.send()
    stepper.end(list(stepper.batch.running))


class _Stepper:
    """The items of one worker, the calls of its model, and what is to be reported.

    No method raises what a model raises, but for what ends the worker: an item that fails gets its
    ``failure``.
    """

    def __init__(self, channel: Channel, model: LoadedModel, progress: Progress) -> None:
        assert model.managed is not None
        self.model = model
        self.managed = managed = model.managed
        self._has_costs = type(managed).cost is not ManagedModel.cost  # else each state costs 1
        self.batch = StepBatch(
            model.places,
            model.max_cost,
            may_rerun=model.may_rerun,
            new_cost=None if self._has_costs else 1.0,
        )
        self.channel = channel
        self._progress = progress.stages
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
            self._resume(request, items[1:])
        if request.failure is not None:
            self._finish([request], time.monotonic())
        else:
            self.batch.deck.append(request)

    def _obey(self, order: int, ids: list[int]) -> None:
        """The callers of these have gone, or these are to rest, or to go on."""
        requests = self.batch.find(set(ids))  # others are over
        if order == DROP:
            self.end(requests)
            now = time.monotonic()
            self._report.done += [self._report_of(request, None, now) for request in requests]
        for request in requests:
            request.is_held = order == HOLD

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
            self.end(self.batch.find({each.batch_id for each in report.done}))
        self.channel.send(report)

    # -- one round

    def start(self) -> None:
        """Start those on deck for which there is a place, memory and time."""
        batch, report = self.batch, self._report
        chosen = batch.next()
        if not chosen:
            return
        self._has_worked = True
        began = time.monotonic()
        for request, state in self._results_of(_Start(self, chosen)).items():
            request.state = state
        now = time.monotonic()
        started = [each for each in chosen if each.state is not NO_STATE]
        batch.put_back([each for each in chosen if each.failure is None and each.state is NO_STATE])
        self._look_at_costs(started)
        batch.begin(started, began, None if len(started) < len(chosen) else now - began)
        report.started += len(started)
        report.starting += now - began
        self._finish([each for each in chosen if each.failure is not None], now)

    def step(self) -> None:
        """Take a step with all that run, and end those that are done or have failed."""
        batch, report = self.batch, self._report
        while (costly := batch.excess()) is not None:
            self.put_back(costly)
        running = [each for each in batch.running if not each.is_held]
        if not running:
            return
        self._has_worked = True
        size = len(batch.running)
        report.size = len(running)
        began = time.monotonic()
        for request, pair in self._results_of(_Step(self, running)).items():
            output, request.is_done = pair
            if output is not None:
                request.outputs.append(output)
        now = time.monotonic()
        report.duration = now - began
        if not report.evicted and not any(each.failure for each in running):
            batch.learn_step(report.duration)
        for request in batch.running:
            if not request.is_stream:
                if len(request.outputs) > len(request.times):
                    request.times.append(now)
            elif request.outputs:
                (report.outputs[request.batch_id],) = request.outputs
                request.outputs = []
                request.let_go_of_item()
        self._look_at_costs([each for each in batch.running if not each.is_over])
        over = [each for each in batch.running if each.is_over]
        self._finish(over, now)
        if over:  # as many have run until one was done
            batch.memory.fitted([1] * size)

    def _results_of(self, parts: _Parts) -> dict[StepRequest, Any]:
        """Call the model. Those without a result have failed, or start again."""
        parts.run_all(may_rerun=self.model.may_rerun)
        for request, failure in parts.failures.items():
            request.failure = failure
        return parts.results

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
                request.cost = 0.0
                request.failure = _failure_of(outcome_of(error, self.model, request.batch_id))

    def _finish(self, over: list[StepRequest], now: float) -> None:
        for request in over:
            result = None
            if request.failure is None and not request.is_stream:
                result = self._join_outputs(request)
            if request.is_done:
                self.batch.learn_growth(request)
            self._report.done.append(self._report_of(request, result, now))
        self.end(over)

    def _report_of(self, request: StepRequest, result: Any, now: float) -> BatchReport:
        """What became of an item, which is let go of."""
        request.item = None
        started_at = min(request.started_at, now)
        return BatchReport(
            request.batch_id,
            [result],
            {} if request.failure is None else {0: request.failure},
            duration=now - started_at,
            started_at=started_at,
            ceiling=self.batch.memory.limit,
            output_times=request.output_times,
        )

    # -- calls of the model

    def _resume(self, request: StepRequest, outputs: list[Any]) -> None:
        """Have the item go on where these outputs ended; or it has a failure."""
        item, resume = request.item, getattr(self.managed, "resume", None)
        if resume is None:  # what sent it could not know yet
            text = "the process that held the stream died after outputs of it were handed out"
            request.failure = Failure(WorkerLost(f"{text}, and the model has no resume"))
        else:
            request.item = self._call_alone(request, lambda _: resume(item, outputs))

    def _join_outputs(self, request: StepRequest) -> Any:
        """The result of an item that is done; if there is none it has failed."""
        outputs, request.outputs = request.outputs, []

        def join(_: Any) -> Any:
            result = self.managed.join_outputs(outputs)
            return results_on_host([result])[0] if self.model.moves_to_cpu else result

        return self._call_alone(request, join)

    def _call_alone(
        self, request: StepRequest, function: Callable[[list[StepRequest]], Any]
    ) -> Any:
        """Call the model for one item; if it raises, the item has failed, and None is returned."""
        outcome = self.call(function, [request])
        if isinstance(outcome, Returned):
            return outcome.value
        request.failure = _failure_of(outcome)
        return None

    def call(
        self, function: Callable[[list[StepRequest]], Any], requests: list[StepRequest]
    ) -> Outcome:
        """Call the model with these. Raises what ends the worker."""
        self._write_progress([request.batch_id + 1 for request in requests])
        try:
            outcome: Outcome = Returned(function(requests))
        except BaseException as error:
            outcome = outcome_of(error, self.model, requests[0].batch_id, len(requests))
            if isinstance(error, InvalidItems) and isinstance(outcome, Failure):
                # It names an item that does not exist. The text quotes no item, so all may read it.
                outcome = Invalid(dict.fromkeys(range(len(requests)), outcome))
        self._write_progress([0] * len(requests))  # not if the worker ends: they are to blame
        self.channel.check_owner()
        return outcome

    def _write_progress(self, numbers: list[int]) -> None:
        self._progress[FORWARD : FORWARD + len(numbers)] = array("q", numbers)

    # -- the end of a state

    def end(self, requests: Sequence[StepRequest]) -> None:
        """These are over, wherever they are."""
        for request in requests:
            self.batch.end(request)
            self.give_up_state(request)

    def put_back(self, request: StepRequest) -> None:
        """The item starts again, later."""
        self.batch.put_back([request])
        self._report.evicted += 1
        self.give_up_state(request)

    def give_up_state(self, request: StepRequest) -> None:
        """Release the state, if there is one."""
        state, request.state = request.state, NO_STATE
        if state is not NO_STATE:
            self.release(state)

    def release(self, state: Any) -> None:
        try:
            self.managed.release(state)
        except Exception:
            text = "%s raised: what the state held may not be free"
            self._log_once(logging.WARNING, text, describe(self.managed.release), exc_info=True)


class _Parts(Bisection[StepRequest]):
    """Items with which the model is called together."""

    def __init__(self, stepper: _Stepper, requests: Sequence[StepRequest]) -> None:
        super().__init__(requests)
        self._stepper = stepper
        stepper.channel.last_sign_at = time.monotonic()

    @abstractmethod
    def call_model(self, requests: list[StepRequest]) -> list[Any]:
        """What it returns for each: a Failure where that cannot be read."""

    def run(self, part: list[StepRequest]) -> Outcome:
        self._stepper.channel.sign_of_life()
        return self._stepper.call(self.call_model, part)

    def fail(self, items: Iterable[StepRequest], failure: Failure) -> None:
        requests = [*items]
        super().fail(requests, _shared(failure) if len(requests) > 1 else failure)


class _Start(_Parts):
    """Has items start."""

    def call_model(self, requests: list[StepRequest]) -> list[Any]:
        start, size = self._stepper.managed.start, len(requests)
        found = start([request.item for request in requests])
        states = as_list(found)
        if states is not None and len(states) == size:
            return states
        for state in states or ():
            self._stepper.release(state)
        return [_unreadable(found, start, f"a sequence of {size} states, one per item")] * size

    def ran_out(self, part: list[StepRequest], failure: Failure) -> None:
        """The part fails if it can never fit; else it waits, and all that come after it."""
        batch = self._stepper.batch
        others = len(batch.running) + len(self.results)
        if len(part) > 1:
            batch.starts.ran_out([1] * len(part))
        else:
            batch.ran_out(others)
        if self._stepper.model.may_rerun and (others or len(part) > 1):
            self.drop(self.items)
        else:
            self.fail(part, failure)
        release_memory()  # only now: where it was raised, frames still held tensors


class _Step(_Parts):
    """Has items take a step."""

    def call_model(self, requests: list[StepRequest]) -> list[StepPair]:
        step = self._stepper.managed.step
        found = step([request.state for request in requests])
        return _read_pairs(found, len(requests), step, self._stepper.model.moves_to_cpu)

    def fitted(self, part: list[StepRequest]) -> None:  # noqa: ARG002 - however many
        self._stepper.model.guard.row = 0

    def ran_out(self, part: list[StepRequest], failure: Failure) -> None:
        """Give up the youngest of those that have not taken the step."""
        batch = self._stepper.batch
        others = len(batch.running) - 1
        batch.ran_out(others)
        youngest = batch.youngest(self.items) if others else None
        if youngest is not None:
            self._stepper.put_back(youngest)
            self.drop([youngest])
        elif self._stepper.model.may_rerun and len(part) > 1:
            self.shrink(part)
            # The youngest next: if they fail the others have more.
            left = set(self.items)
            self.reorder(each for each in reversed(batch.running) if each in left)
        else:
            self.fail(part, failure)
            for request in part:
                self._stepper.give_up_state(request)
        release_memory()  # only now: where it was raised, frames still held tensors


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


def _failure_of(outcome: Outcome) -> Failure:
    """Of a call for a single item that did not return."""
    assert not isinstance(outcome, Returned)
    if isinstance(outcome, Failure):
        return outcome
    return outcome.failures[0] if isinstance(outcome, Invalid) else outcome.failure


# -- what a step returned


def _read_pairs(found: Any, expected: int, step: Any, moves_to_cpu: bool) -> list[StepPair]:
    """So many pairs, that ``step`` returned, with their tensors on the CPU.

    Where there is none the item fails. If they are not as many all fail: which are whose is not
    known, and the model may have taken the step.
    """
    if type(found) is OnHost:
        found = results_on_host(found)
    parts = as_list(found)
    if parts is None or len(parts) != expected:
        what = f"a sequence of {expected} pairs (output, is_done), one per state"
        return [_unreadable(found, step, what)] * expected
    pairs = [_read_pair(part, step) for part in parts]
    if not moves_to_cpu:
        return pairs
    # The first output says whether there are tensors of a GPU: so without those that are None.
    outputs = [each[0] for each in pairs if type(each) is tuple and each[0] is not None]
    moved = iter(results_on_host(outputs))
    return [
        (next(moved), each[1]) if type(each) is tuple and each[0] is not None else each
        for each in pairs
    ]


def _unreadable(found: Any, function: Any, expected: str) -> Failure:
    """Of an item, if the model's function returned something else."""
    text = f"{describe(function)} must return {expected}; it returned {describe_outputs(found)}"
    return Failure(BadModelOutput(text))


def _read_pair(pair: Any, step: Any) -> StepPair:
    if type(pair) is tuple and len(pair) == 2 and type(pair[1]) is bool:  # the usual case
        return pair
    if isinstance(pair, Exception):
        return Failure.caught(pair)
    parts = as_list(pair)
    # Where a model returns all outputs and then all flags, of two items, these look like pairs.
    if parts is not None and len(parts) == 2 and _is_flag(parts[1]):
        return parts[0], bool(parts[1])
    what = "a pair (output, is_done) for each state, and is_done must be True or False"
    return _unreadable(pair, step, what)


def _is_flag(value: Any) -> bool:
    """Whether it is one bool, also of numpy or torch."""
    kind = str(getattr(value, "dtype", ""))
    return type(value) is bool or (
        kind in ("bool", "torch.bool") and not tuple(getattr(value, "shape", ()))
    )
