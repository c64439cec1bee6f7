"""Calls a model of steps, and finds out which of its items an error is about.

    what was raised    of start                         of step
    ---------------    --------                         -------
    InvalidItems       those fail, the others start     those fail, the step is taken again
    out of memory      they are put back, and fewer     the youngest is put back, and the step is
                       start the next time              taken again; in halves, if none can be
    another error      in halves, to a single item      the same

Results that cannot be read fail all items of the call, since the model may have taken the step.
Where nothing may be computed again, all items of a call fail. An item that was alone in the call
gets the exception. Several get ``SharedBatchError``, since its text may quote any of them.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, MutableSequence, Sequence
from typing import Any

from ..errors import BadModelOutput, WorkerLost
from ..gpu.torch_process import release_memory
from ..gpu.transfers import results_on_host
from ..managed_model import ManagedModel
from .chunked_run import OutOfMemory, caught
from .model_spec import LoadedModel, describe
from .protocol import Failure
from .step_batch import NO_STATE, StepBatch, StepRequest
from .step_caller import Invalid, Returned, StepCaller, Unreadable, failure_of
from .step_results import StepPair, UnreadableError, read_pairs, read_states

logger = logging.getLogger(__name__)


class StepCalls:
    """The calls of one model. For the thread of the model.

    No method raises what a model raises, but for what ends the worker. An item that fails gets its
    ``failure``. Those that run have to be ended then, as all others that are done.

    Args:
        check_owner, progress: see ``StepCaller``.

    Attributes:
        has_costs: whether the model says what a state costs.
    """

    def __init__(
        self,
        model: LoadedModel,
        batch: StepBatch,
        check_owner: Callable[[], None],
        progress: MutableSequence[int] | None = None,
    ) -> None:
        assert model.managed is not None
        self._managed = managed = model.managed
        self._model = model
        self._batch = batch
        self._caller = StepCaller(model, check_owner, progress)
        self._call = self._caller.call
        self.has_costs = type(managed).cost is not ManagedModel.cost
        self._has_logged = False

    # -- start

    def start(self, requests: list[StepRequest]) -> list[StepRequest]:
        """Give states to as many as possible. Those that fit into no memory are put back.

        Returns:
            Those that have a state. The others have a failure, or are on deck again.
        """
        batch, started = self._batch, list[StepRequest]()
        todo = [requests]  # a stack, the first ones last
        while todo:
            part = todo.pop()
            ran = self._call(self._begin, part)
            if isinstance(ran, Returned):
                for request, state in zip(part, ran.value, strict=True):
                    request.state = state
                started += part
            elif isinstance(ran, Invalid):
                self._fail_some(part, ran)
                todo.append([each for each in part if each.failure is None])
            elif isinstance(ran, OutOfMemory):
                others = len(batch.running) + len(started)
                if len(part) == 1 and not others:
                    batch.ran_out_alone()
                    self._fail(part, ran.failure, names_item=True)
                elif not self._model.may_rerun:
                    self._fail(part, self._caller.blame(part, ran.failure), names_item=True)
                elif len(part) == 1:
                    batch.ran_out(others)
                    todo = []
                else:
                    batch.start_ran_out(len(part))
                    todo = []
                release_memory()  # only now: where it was raised, frames still held tensors
            elif isinstance(ran, Unreadable):
                self._fail(part, ran.failure)
            elif len(part) == 1 or not self._model.may_rerun:
                self._fail(part, self._caller.blame(part, ran))
            else:
                todo += _halves(part)
            todo = [part for part in todo if part]
        batch.put_back(
            [each for each in requests if each.failure is None and each.state is NO_STATE]
        )
        return started

    def _begin(self, requests: list[StepRequest]) -> list[Any]:
        name = describe(self._managed.start)
        found = self._managed.start([request.item for request in requests])
        try:
            return read_states(found, len(requests), name)
        except UnreadableError as error:
            self._release(error.parts)
            raise

    def resume(self, request: StepRequest, outputs: list[Any]) -> None:
        """Have the item go on where these outputs ended; or it has a failure."""
        item, resume = request.item, getattr(self._managed, "resume", None)
        if resume is None:  # what sent it could not know yet
            text = "the process that held the stream died after outputs of it were handed out"
            self._fail([request], Failure(WorkerLost(f"{text}, and the model has no resume")))
            return
        ran = self._call(lambda _: resume(item, outputs), [request])
        if isinstance(ran, Returned):
            request.item = ran.value
        else:
            self._fail([request], failure_of(ran))

    # -- step

    def step(self, requests: Sequence[StepRequest]) -> None:
        """Take one step with all that run; each takes up what came of it, or is put back."""
        waiting = [list(requests)]  # a stack of those that have not taken the step
        while waiting:
            part = waiting.pop()
            ran = self._call(self._advance, part)
            if isinstance(ran, Returned):
                self._model.guard.row = 0
                self._take_up(part, ran.value)
            elif isinstance(ran, Invalid):
                self._fail_some(part, ran)
                waiting.append(part)
            elif isinstance(ran, OutOfMemory):
                able = {each for some in (part, *waiting) for each in some}
                in_order = [each for each in requests if each in able]
                waiting += self._make_room(part, in_order, ran.failure)
            elif isinstance(ran, Unreadable):
                self._fail(part, ran.failure)
            elif len(part) == 1 or not self._model.may_rerun:
                self._fail(part, self._caller.blame(part, ran))
            else:
                waiting += _halves(part)
            waiting = [left for some in waiting if (left := _able(some))]

    def _advance(self, requests: list[StepRequest]) -> list[StepPair]:
        found = self._managed.step([request.state for request in requests])
        name = describe(self._managed.step)
        return read_pairs(found, len(requests), name, moves_to_cpu=self._model.moves_to_cpu)

    def _take_up(self, requests: list[StepRequest], pairs: list[StepPair]) -> None:
        for request, pair in zip(requests, pairs, strict=True):
            if isinstance(pair, Failure):
                self._fail([request], pair, names_item=True)
            else:
                request.stepped(*pair)

    def _make_room(
        self, part: list[StepRequest], able: list[StepRequest], failure: Failure
    ) -> list[list[StepRequest]]:
        """Give up the youngest of those that have not taken the step.

        Args:
            part: those that ran out.
            able: with all others that have not taken the step, in order.

        Returns:
            What is to take the step next, as a stack.
        """
        batch = self._batch
        size = len(batch.running)
        if not self._model.may_rerun:
            self._fail(part, self._caller.blame(part, failure), names_item=True)
            return []
        youngest = None
        if size > 1:
            batch.ran_out(size - 1)
            youngest = batch.youngest(able)
        else:
            batch.ran_out_alone()
        if youngest is not None:
            self.put_back([youngest])
        elif len(part) > 1:
            release_memory()
            first, second = reversed(_halves(part))
            return [first, second]  # the youngest next: if it fails the others have more
        else:
            self._fail(part, failure, names_item=True)
            self._let_go(part)
        release_memory()  # as above
        return [part]

    # -- the end of a state

    def end(self, requests: Sequence[StepRequest]) -> None:
        """These are over, wherever they are."""
        for request in requests:
            self._batch.end(request)
        self._let_go(requests)

    def put_back(self, requests: Sequence[StepRequest]) -> None:
        """Give up these states: their items start again."""
        self._batch.put_back(requests)
        self._let_go(requests)

    def _let_go(self, requests: Sequence[StepRequest]) -> None:
        states = [each.state for each in requests if each.state is not NO_STATE]
        for request in requests:
            request.state = NO_STATE
        self._release(states)

    def _release(self, states: Sequence[Any]) -> None:
        for state in states:
            try:
                self._managed.release(state)
            except Exception:
                if not self._has_logged:  # in each worker: it may be so for each state
                    self._has_logged = True
                    with contextlib.suppress(Exception):  # of a filter or handler of a user's
                        text = "%s raised: what the state held may not be free"
                        logger.warning(text, describe(self._managed.release), exc_info=True)

    # -- what else a model is asked

    def look_at_costs(self, requests: Sequence[StepRequest]) -> None:
        """Ask what the states cost now."""
        cost = self._managed.cost
        for request in requests:
            if not self.has_costs:
                request.cost = 1.0
                continue
            try:  # not by _call, since there are many of them in each step
                request.cost = found = float(cost(request.state))
                if not 0.0 <= found < float("inf"):
                    text = "must return a number of at least 0; it returned"
                    raise BadModelOutput(f"{describe(cost)} {text} {found}")
            except BaseException as error:
                request.cost = 0.0
                ran = caught(error, self._model, request.batch_id)
                self._fail([request], failure_of(ran))

    def join_outputs(self, request: StepRequest) -> Any:
        """The result of an item that is done; if there is none it has failed."""
        outputs, moves_to_cpu = request.take_outputs(), self._model.moves_to_cpu

        def join(_: Any) -> Any:
            result = self._managed.join_outputs(outputs)
            return results_on_host([result])[0] if moves_to_cpu else result

        ran = self._call(join, [request])
        if isinstance(ran, Returned):
            return ran.value
        self._fail([request], failure_of(ran))
        return None

    # -- failures

    def _fail(
        self, requests: Sequence[StepRequest], failure: Failure, *, names_item: bool = False
    ) -> None:
        for request in requests:
            request.failure, request.names_item = failure, names_item

    def _fail_some(self, part: list[StepRequest], invalid: Invalid) -> None:
        for position, failure in invalid.failures.items():
            self._fail([part[position]], failure, names_item=True)


def _halves(part: list[StepRequest]) -> list[list[StepRequest]]:
    """The second one, and the first one, which is the next on a stack."""
    half = (len(part) + 1) // 2
    return [part[half:], part[:half]]


def _able(part: list[StepRequest]) -> list[StepRequest]:
    """Those that neither have failed nor were put back."""
    return [each for each in part if each.failure is None and each.state is not NO_STATE]
