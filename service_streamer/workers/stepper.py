"""A worker of a model of steps: items come and go between two steps, and outputs go out after each.

    drain     receive what waits; block only if there is nothing to do
    start     as many of those on deck as have a place, memory and time
    step      once, with all that run
    report    outputs of streams, and what is over, in one message

All in the thread that loaded the model. The decisions are in ``step_batch``, and what becomes of
errors in ``step_calls``.
"""

from __future__ import annotations

import time
from collections.abc import MutableSequence
from typing import TYPE_CHECKING, Any

from ..observe.record import BatchReport, StepReport
from .model_spec import LoadedModel
from .protocol import DROP, HOLD, RESUME, SIGN_OF_LIFE
from .step_batch import StepAdmission, StepBatch, StepRequest
from .step_calls import StepCalls

if TYPE_CHECKING:  # it imports this module
    from .runner import Channel

#: So many that were dropped, or are to rest, and are unknown are remembered: many times what two
#: threads may have under way.
MOST_GONE = 1000


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
    stepper.close()


class _Stepper:
    """What runs, and what is to be reported of it."""

    def __init__(
        self, channel: Channel, model: LoadedModel, progress: MutableSequence[int] | None
    ) -> None:
        self._channel = channel
        self._model = model
        self._batch = StepBatch(model.places, model.max_cost, may_rerun=model.may_rerun)
        self._calls = StepCalls(
            model, self._batch, channel.check_owner, progress, lambda: channel.send(StepReport())
        )
        self._admission = StepAdmission(None if self._calls.has_costs else 1.0)
        self._report = StepReport()
        self._sent_at = time.monotonic()
        self._has_worked = False  # in the last round, or something has come since
        #: Dropped before they came, since two threads send: an ordered set of the last ones.
        self._gone: dict[int, None] = {}
        #: The same of those that are to rest.
        self._held_early: dict[int, None] = {}

    def drain(self) -> bool:
        """Receive what waits. Blocks if there is nothing to do; False at the end."""
        channel = self._channel
        while True:
            if (self._has_worked or self._report.done) and not channel.is_waiting():
                self._has_worked = False
                return True
            received = channel.receive()
            if received is None:
                return False
            self._has_worked = True
            if received[0] == DROP:
                self._drop(received[1])
            elif received[0] in (HOLD, RESUME):
                self._hold(set(received[1]), is_held=received[0] == HOLD)
            else:
                self._take(received)
            del received  # it holds items, and would do so until the next comes

    def _take(self, received: tuple[Any, ...]) -> None:
        is_stream = bool(received[3])
        batch_id, items, failures = self._channel.decode(received)[:3]
        if failures or batch_id in self._gone:
            self._gone.pop(batch_id, None)
            now = time.monotonic()
            self._report.done.append(BatchReport(batch_id, [None], failures, started_at=now))
            return
        item, *handed_out = items
        request = StepRequest(batch_id, item, is_stream)
        if batch_id in self._held_early:
            del self._held_early[batch_id]
            request.is_held = True
        self._batch.deck.append(request)
        if handed_out:  # with another worker, which was lost
            self._calls.resume(request, handed_out)
            if request.failure is not None:
                self._end([request], time.monotonic())

    def _hold(self, ids: set[int], *, is_held: bool) -> None:
        """These are to rest, or to go on; those that are unknown as in ``_drop``."""
        known = self._batch.find(ids)
        for request in known:
            request.is_held = is_held
        unknown = ids - {each.batch_id for each in known}
        if is_held:
            _remember(unknown, self._held_early)
        else:
            for batch_id in unknown:
                self._held_early.pop(batch_id, None)

    def _drop(self, ids: list[int]) -> None:
        """The callers of these have gone; those that are unknown are over, or about to come."""
        dropped = self._batch.find(set(ids))
        _remember(set(ids) - {each.batch_id for each in dropped}, self._gone)
        self._calls.end(dropped)
        now = time.monotonic()
        for request in dropped:
            self._report.done.append(self._report_of(request, None, now))
        self._sweep(now)

    def start(self) -> None:
        """Start those on deck for which there is a place, memory and time."""
        batch, admission, report = self._batch, self._admission, self._report
        most = admission.most(len(batch.running))
        chosen = batch.next(most, admission.cost, admission.growth)
        if not chosen:
            return
        self._has_worked = True
        began = time.monotonic()
        started = self._calls.start(chosen)
        now = time.monotonic()
        batch.begin(started, began)
        self._calls.look_at_costs(started)
        for request in started:
            request.first_cost = request.cost
            admission.costs(request.cost)
        if len(started) == len(chosen):
            admission.started(len(started), now - began)
            batch.starts.fitted(len(started))
        report.started += len(started)
        report.starting += now - began
        self._end([each for each in chosen if each.failure is not None], now)

    def step(self) -> None:
        """Take a step with all that run, and end those that are done or have failed."""
        batch, calls, report = self._batch, self._calls, self._report
        while (costly := batch.excess()) is not None:
            calls.put_back([costly])
            self._sweep(time.monotonic())
        running = [each for each in batch.running if not each.is_held]
        if not running:
            return
        self._has_worked = True
        over, size = len(report.done), len(batch.running)
        report.size, report.cost = len(running), batch.cost
        report.started_at = began = time.monotonic()
        calls.step(running)
        now = time.monotonic()
        report.duration = now - began
        if not batch.evicted and not any(each.failure for each in running):
            self._admission.stepped(report.duration)
        for request in batch.running:
            if request.is_stream and request.outputs:
                (report.outputs[request.batch_id],) = request.take_outputs()
                request.item = None  # it does not start again
            elif not request.is_stream:
                request.time_output(now)
        self._sweep(now)
        calls.look_at_costs(batch.running)
        self._sweep(now)
        if len(report.done) > over:  # as many have run until one was done
            batch.memory.fitted(size)

    def _sweep(self, now: float) -> None:
        """End those that are done or have failed."""
        running = self._batch.running
        self._end([each for each in running if each.is_done or each.failure is not None], now)

    def _end(self, over: list[StepRequest], now: float) -> None:
        for request in over:
            result = None
            if request.failure is None and not request.is_stream:
                result = self._calls.join_outputs(request)
            if request.is_done:
                self._admission.grew(request.cost - request.first_cost)
            self._report.done.append(self._report_of(request, result, now))
        self._calls.end(over)

    def _report_of(self, request: StepRequest, result: Any, now: float) -> BatchReport:
        """What became of an item, which is let go of."""
        started_at = min(request.started_at, now)
        report = BatchReport(
            request.batch_id, [result], duration=now - started_at, started_at=started_at
        )
        report.output_times = request.output_times
        report.ceiling = self._batch.memory.limit
        if request.failure is not None:
            report.failures = {0: request.failure}
        request.item = None
        return report

    def send(self) -> None:
        """Report the step, if there is something to report."""
        report, now = self._report, time.monotonic()
        report.evicted, self._batch.evicted = report.evicted + self._batch.evicted, 0
        has_news = report.outputs or report.done or report.started or report.evicted
        if not has_news and not (report.size and now - self._sent_at >= SIGN_OF_LIFE):
            return
        self._report = StepReport()
        self._sent_at = now
        report.waiting = len(self._batch.deck)
        self._channel.encode_step(report)
        if report.done:  # also a stream of which an output cannot travel
            self._calls.end(self._batch.find({each.batch_id for each in report.done}))
            self._sweep(now)
        self._channel.send(report)

    def close(self) -> None:
        """Release what runs."""
        self._calls.end(list(self._batch.running))


def _remember(ids: set[int], among: dict[int, None]) -> None:
    among |= dict.fromkeys(ids)
    while len(among) > MOST_GONE:
        del among[next(iter(among))]
