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

import contextlib
import logging
import time
from abc import abstractmethod
from array import array
from collections.abc import Callable, MutableSequence, Sequence
from typing import Any

from ..errors import BadModelOutput, InvalidItems, SharedBatchError, WorkerLost
from ..gpu.accelerators import release_memory
from ..gpu.transfers import results_on_host
from ..managed_model import ManagedModel
from ..observe.record import BatchReport, StepReport
from .mending import Bisection, Invalid, Outcome, Returned
from .model_spec import LoadedModel, describe
from .outputs import StepPair, UnreadableError, read_pairs, read_states
from .protocol import DROP, HOLD, RESUME, SIGN_OF_LIFE, Failure
from .stages import FORWARD, Channel, outcome_of
from .step_batch import NO_STATE, StepBatch, StepRequest

logger = logging.getLogger(__name__)

#: So many messages about unknown items are remembered: many times what two threads may have under
#: way.
_MOST_EARLY = 1000


def serve_steps(
    channel: Channel, model: LoadedModel, progress: MutableSequence[int] | None = None
) -> None:
    """Take steps until the channel says to end. Nothing that a model raises ends it.

    Then what runs is released, and nothing more is sent. ``SystemExit`` and the like end the worker
    as they say.

    Args:
        progress: where the ids of the batches in the model's current call are written, plus 1, from
            FORWARD on; 0 for none. While items start it is these, and while it steps all that run.

    Raises:
        DeviceFailed: of the model's guard.
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

    def __init__(
        self, channel: Channel, model: LoadedModel, progress: MutableSequence[int] | None
    ) -> None:
        assert model.managed is not None
        self.model = model
        self.managed = managed = model.managed
        self.batch = StepBatch(
            model.places,
            model.max_cost,
            may_rerun=model.may_rerun,
            has_costs=type(managed).cost is not ManagedModel.cost,
        )
        self.channel = channel
        self._progress = progress
        self._report = StepReport()
        self._sent_at = time.monotonic()
        self._has_worked = False  # in the last round, or something has come since
        self._has_logged = False
        #: DROP or HOLD of items that have not come yet, since two threads send; the last ones.
        self._early: dict[int, int] = {}

    # -- messages

    def drain(self) -> bool:
        """Receive what waits. Blocks if there is nothing to do; False at the end."""
        channel = self.channel
        while True:
            if (self._has_worked or self._report.done) and not channel.is_waiting():
                self._has_worked = False
                return True
            received = channel.receive()
            if received is None:
                return False
            self._has_worked = True
            if received[0] in (DROP, HOLD, RESUME):
                self._tell(*received)
            else:
                self._take(received)
            del received  # it holds items, and would do so until the next comes

    def _take(self, received: tuple[Any, ...]) -> None:
        is_stream = bool(received[3])
        batch_id, items, failures = self.channel.decode(received)[:3]
        told = self._early.pop(batch_id, None)
        if failures or told == DROP:
            now = time.monotonic()
            self._report.done.append(BatchReport(batch_id, [None], failures, started_at=now))
            return
        item, *handed_out = items
        request = StepRequest(batch_id, item, is_stream, is_held=told == HOLD)
        self.batch.deck.append(request)
        if handed_out:  # with another worker, which was lost
            self._resume(request, handed_out)
            if request.failure is not None:
                self._finish([request], time.monotonic())

    def _tell(self, what: int, ids: list[int]) -> None:
        """The callers of these have gone, or these are to rest, or to go on."""
        known = self.batch.find(set(ids))
        for batch_id in set(ids) - {each.batch_id for each in known}:  # over, or about to come
            if what == DROP or (what == HOLD and batch_id not in self._early):
                self._early[batch_id] = what
            elif what == RESUME and self._early.get(batch_id) == HOLD:
                del self._early[batch_id]
        while len(self._early) > _MOST_EARLY:
            del self._early[next(iter(self._early))]
        if what != DROP:
            for request in known:
                request.is_held = what == HOLD
            return
        self.end(known)
        now = time.monotonic()
        self._report.done += [self._report_of(request, None, now) for request in known]

    def send(self) -> None:
        """Report the step, if there is something to report."""
        report, now = self._report, time.monotonic()
        report.evicted, self.batch.evicted = report.evicted + self.batch.evicted, 0
        has_news = report.outputs or report.done or report.started or report.evicted
        if not has_news and not (report.size and now - self._sent_at >= SIGN_OF_LIFE):
            return
        self._report = StepReport()
        self._sent_at = now
        report.waiting = len(self.batch.deck)
        self.channel.encode_step(report)
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
        _Start(self, chosen).run_all(may_rerun=self.model.may_rerun)
        now = time.monotonic()
        started = [each for each in chosen if each.state is not NO_STATE]
        batch.put_back([each for each in chosen if each.failure is None and each.state is NO_STATE])
        batch.begin(started, began)
        self._look_at_costs(started)
        batch.learn_start(started, None if len(started) < len(chosen) else now - began)
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
        over, size = len(report.done), len(batch.running)
        report.size, report.cost = len(running), batch.cost
        report.started_at = began = time.monotonic()
        _Step(self, running).run_all(may_rerun=self.model.may_rerun)
        now = time.monotonic()
        report.duration = now - began
        if not batch.evicted and not any(each.failure for each in running):
            batch.learn_step(report.duration)
        for request in batch.running:
            if request.is_stream and request.outputs:
                (report.outputs[request.batch_id],) = request.take_outputs()
                request.item = None  # it does not start again
            elif not request.is_stream:
                request.time_output(now)
        self._sweep(now)
        self._look_at_costs(batch.running)
        self._sweep(now)
        if len(report.done) > over:  # as many have run until one was done
            batch.memory.fitted(size)

    def _look_at_costs(self, requests: Sequence[StepRequest]) -> None:
        """Ask what the states cost now."""
        cost = self.managed.cost
        for request in requests if self.batch.has_costs else ():
            try:  # not by ``call``, since there are many of them in each step
                request.cost = found = float(cost(request.state))
                if not 0.0 <= found < float("inf"):
                    text = "must return a number of at least 0; it returned"
                    raise BadModelOutput(f"{describe(cost)} {text} {found}")
            except BaseException as error:
                request.cost = 0.0
                request.failure = _failure_of(outcome_of(error, self.model, request.batch_id))

    def _sweep(self, now: float) -> None:
        """End those that run and are done or have failed."""
        running = self.batch.running
        self._finish([each for each in running if each.is_done or each.failure is not None], now)

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
        started_at = min(request.started_at, now)
        report = BatchReport(
            request.batch_id, [result], duration=now - started_at, started_at=started_at
        )
        report.output_times = request.output_times
        report.ceiling = self.batch.memory.limit
        if request.failure is not None:
            report.failures = {0: request.failure}
        request.item = None
        return report

    # -- calls of the model

    def _resume(self, request: StepRequest, outputs: list[Any]) -> None:
        """Have the item go on where these outputs ended; or it has a failure."""
        item, resume = request.item, getattr(self.managed, "resume", None)
        if resume is None:  # what sent it could not know yet
            text = "the process that held the stream died after outputs of it were handed out"
            request.failure = Failure(WorkerLost(f"{text}, and the model has no resume"))
            return
        outcome = self.call(lambda _: resume(item, outputs), [request])
        if isinstance(outcome, Returned):
            request.item = outcome.value
        else:
            request.failure = _failure_of(outcome)

    def _join_outputs(self, request: StepRequest) -> Any:
        """The result of an item that is done; if there is none it has failed."""
        outputs, moves_to_cpu = request.take_outputs(), self.model.moves_to_cpu

        def join(_: Any) -> Any:
            result = self.managed.join_outputs(outputs)
            return results_on_host([result])[0] if moves_to_cpu else result

        outcome = self.call(join, [request])
        if isinstance(outcome, Returned):
            return outcome.value
        request.failure = _failure_of(outcome)
        return None

    def call(
        self, function: Callable[[list[StepRequest]], Any], requests: list[StepRequest]
    ) -> Outcome:
        """Call the model with these. Raises what ends the worker."""
        self._write_progress([request.batch_id + 1 for request in requests])
        outcome = self._try(function, requests)
        self._write_progress([0] * len(requests))  # not if the worker ends: they are to blame
        self.channel.check_owner()
        return outcome

    def _try(
        self, function: Callable[[list[StepRequest]], Any], requests: list[StepRequest]
    ) -> Outcome:
        try:
            return Returned(function(requests))
        except UnreadableError as error:
            failure = Failure.caught(BadModelOutput(*error.args))
            return Invalid(dict.fromkeys(range(len(requests)), failure))
        except BaseException as error:
            outcome = outcome_of(error, self.model, requests[0].batch_id, len(requests))
            if isinstance(error, InvalidItems) and isinstance(outcome, Failure):
                # It names an item that there is not: no search finds the one at fault.
                return Invalid(dict.fromkeys(range(len(requests)), outcome))
            return outcome

    def _write_progress(self, numbers: list[int]) -> None:
        progress = self._progress
        if progress is not None:
            progress[FORWARD : FORWARD + len(numbers)] = array("q", numbers)

    # -- the end of a state

    def end(self, requests: Sequence[StepRequest]) -> None:
        """These are over, wherever they are."""
        for request in requests:
            self.batch.end(request)
        self.let_go(requests)

    def put_back(self, request: StepRequest) -> None:
        """Give up its state: the item starts again."""
        self.batch.put_back([request])
        self.let_go([request])

    def let_go(self, requests: Sequence[StepRequest]) -> None:
        """Release the states of these."""
        states = [each.state for each in requests if each.state is not NO_STATE]
        for request in requests:
            request.state = NO_STATE
        self.release(states)

    def release(self, states: Sequence[Any]) -> None:
        for state in states:
            try:
                self.managed.release(state)
            except Exception:
                if not self._has_logged:  # in each worker: it may be so for each state
                    self._has_logged = True
                    with contextlib.suppress(Exception):  # of a filter or handler of a user's
                        text = "%s raised: what the state held may not be free"
                        logger.warning(text, describe(self.managed.release), exc_info=True)


class _RequestParts(Bisection[StepRequest]):
    """Items with which the model is called together."""

    def __init__(self, stepper: _Stepper, requests: Sequence[StepRequest]) -> None:
        super().__init__(requests)
        self._stepper = stepper
        self._may_rerun = stepper.model.may_rerun
        self._told_at = time.monotonic()

    @abstractmethod
    def call_model(self, requests: list[StepRequest]) -> list[Any]:
        """What it returns for each. Raises UnreadableError, and what the model raises."""

    def run(self, part: list[StepRequest]) -> Outcome:
        now = time.monotonic()
        if now - self._told_at >= SIGN_OF_LIFE:
            self._told_at = now
            self._stepper.channel.send(StepReport())
        return self._stepper.call(self.call_model, part)

    def fail(self, items: list[StepRequest], failure: Failure) -> None:
        if len(items) > 1:
            failure = _shared(failure)
        for request in items:
            request.failure = failure


class _Start(_RequestParts):
    """Has items start."""

    _started = 0  # so far

    def call_model(self, requests: list[StepRequest]) -> list[Any]:
        managed = self._stepper.managed
        found = managed.start([request.item for request in requests])
        try:
            return read_states(found, len(requests), describe(managed.start))
        except UnreadableError as error:
            self._stepper.release(error.parts)
            raise

    def done(self, part: list[StepRequest], value: list[Any]) -> None:
        for request, state in zip(part, value, strict=True):
            request.state = state
        self._started += len(part)

    def ran_out(self, part: list[StepRequest], failure: Failure) -> None:
        """The part fails if it can never fit; else it waits, and all that come after it."""
        batch = self._stepper.batch
        others = len(batch.running) + self._started
        is_alone = len(part) == 1 and not others
        if is_alone:
            batch.ran_out_alone()
        if is_alone or not self._may_rerun:
            self.fail(part, failure)
            self.drop(part)
        else:
            if len(part) == 1:
                batch.ran_out(others)
            else:
                batch.starts.ran_out(len(part))
            self.drop(self.items)
        release_memory()  # only now: where it was raised, frames still held tensors


class _Step(_RequestParts):
    """Has items take a step."""

    def call_model(self, requests: list[StepRequest]) -> list[StepPair]:
        managed = self._stepper.managed
        found = managed.step([request.state for request in requests])
        moves_to_cpu = self._stepper.model.moves_to_cpu
        return read_pairs(found, len(requests), describe(managed.step), moves_to_cpu=moves_to_cpu)

    def done(self, part: list[StepRequest], value: list[StepPair]) -> None:
        self._stepper.model.guard.row = 0
        for request, pair in zip(part, value, strict=True):
            if isinstance(pair, Failure):
                request.failure = pair
            else:
                request.stepped(*pair)

    def ran_out(self, part: list[StepRequest], failure: Failure) -> None:
        """Give up the youngest of those that have not taken the step."""
        batch, youngest = self._stepper.batch, None
        size = len(batch.running)
        if self._may_rerun and size > 1:
            batch.ran_out(size - 1)
            youngest = batch.youngest(self.items)
        elif self._may_rerun:
            batch.ran_out_alone()
        if youngest is not None:
            self._stepper.put_back(youngest)
            self.drop([youngest])
        elif self._may_rerun and len(part) > 1:
            self.shrink(part)
            # The youngest next: if they fail the others have more.
            left = set(self.items)
            self.reorder(each for each in reversed(batch.running) if each in left)
        else:
            self.fail(part, failure)
            self._stepper.let_go(part)
            self.drop(part)
        release_memory()  # only now: where it was raised, frames still held tensors


def _shared(failure: Failure) -> Failure:
    """For items that were in one call, if it is not known which of them it was.

    The model's exception may quote the item at fault, so it goes to the log only.
    """
    with contextlib.suppress(Exception):  # of a filter or handler of a user's
        text = "a model raised on several items, and which is at fault is not known:\n%s"
        logger.error(text, failure.remote_traceback)
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
