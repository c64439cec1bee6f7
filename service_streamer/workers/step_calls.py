"""Calls a model of steps, and finds out which of its items an error is about.

    what was raised    of start                         of step
    ---------------    --------                         -------
    InvalidItems       those fail, the others start     those fail, the step is taken again
    out of memory      they are put back, and fewer     the youngest is put back, and the step is
                       start the next time              taken again; in halves, if none can be
    another error      as ``bisection`` says            as ``bisection`` says

Results that cannot be read fail all items of the call, since the model may have taken the step.
Where nothing may be computed again, all items of a call fail. An item that was alone in the call
gets the exception. Several get ``SharedBatchError``, since its text may quote any of them.
"""

from __future__ import annotations

import contextlib
import logging
import time
from array import array
from collections.abc import Callable, MutableSequence, Sequence
from typing import Any

from ..errors import BadModelOutput, InvalidItems, SharedBatchError, WorkerLost
from ..gpu.accelerators import release_memory
from ..gpu.transfers import OnHost, results_on_host
from ..managed_model import ManagedModel
from ..options.checks import is_sequence
from .batch_parts import caught
from .bisection import Bisection, Invalid, Outcome, Returned, Unreadable, bisect
from .model_spec import LoadedModel, describe
from .progress import SIGN_OF_LIFE
from .protocol import Failure
from .stage_calls import by_position
from .stages import FORWARD
from .step_batch import NO_STATE, StepBatch, StepRequest

logger = logging.getLogger(__name__)


class StepCalls:
    """The calls of one model. For the thread of the model.

    No method raises what a model raises, but for what ends the worker. An item that fails gets its
    ``failure``. Those that run have to be ended then, as all others that are done.

    Args:
        check_owner: called after each call of the model: see ``Channel``.
        progress: where the batches in the current call are written, from FORWARD on: ids plus 1.
        on_run: called between two runs of parts, after each ``SIGN_OF_LIFE``.

    Attributes:
        has_costs: whether the model says what a state costs.
    """

    def __init__(
        self,
        model: LoadedModel,
        batch: StepBatch,
        check_owner: Callable[[], None],
        progress: MutableSequence[int] | None = None,
        on_run: Callable[[], None] = lambda: None,
    ) -> None:
        assert model.managed is not None
        self.managed = managed = model.managed
        self.model = model
        self.batch = batch
        self.has_costs = type(managed).cost is not ManagedModel.cost
        self._check_owner = check_owner
        self._progress = progress
        self._on_run = on_run
        self._told_at = time.monotonic()
        self._has_logged = False

    def start(self, requests: list[StepRequest]) -> list[StepRequest]:
        """Give states to as many as possible. Those that fit into no memory are put back.

        Returns:
            Those that have a state. The others have a failure, or are on deck again.
        """
        self._told_at = time.monotonic()
        bisect(Bisection(requests), _Start(self), may_rerun=self.model.may_rerun)
        started = [each for each in requests if each.state is not NO_STATE]
        self.batch.put_back(
            [each for each in requests if each.failure is None and each.state is NO_STATE]
        )
        return started

    def step(self, requests: Sequence[StepRequest]) -> None:
        """Take one step with all that run; each takes up what came of it, or is put back."""
        self._told_at = time.monotonic()
        bisect(Bisection(requests), _Step(self), may_rerun=self.model.may_rerun)

    def resume(self, request: StepRequest, outputs: list[Any]) -> None:
        """Have the item go on where these outputs ended; or it has a failure."""
        item, resume = request.item, getattr(self.managed, "resume", None)
        if resume is None:  # what sent it could not know yet
            text = "the process that held the stream died after outputs of it were handed out"
            request.failure = Failure(WorkerLost(f"{text}, and the model has no resume"))
            return
        ran = self.call(lambda _: resume(item, outputs), [request])
        if isinstance(ran, Returned):
            request.item = ran.value
        else:
            request.failure = _failure_of(ran)

    def look_at_costs(self, requests: Sequence[StepRequest]) -> None:
        """Ask what the states cost now."""
        cost = self.managed.cost
        for request in requests:
            if not self.has_costs:
                request.cost = 1.0
                continue
            try:  # not by ``call``, since there are many of them in each step
                request.cost = found = float(cost(request.state))
                if not 0.0 <= found < float("inf"):
                    text = "must return a number of at least 0; it returned"
                    raise BadModelOutput(f"{describe(cost)} {text} {found}")
            except BaseException as error:
                request.cost = 0.0
                request.failure = _failure_of(caught(error, self.model, request.batch_id))

    def join_outputs(self, request: StepRequest) -> Any:
        """The result of an item that is done; if there is none it has failed."""
        outputs, moves_to_cpu = request.take_outputs(), self.model.moves_to_cpu

        def join(_: Any) -> Any:
            result = self.managed.join_outputs(outputs)
            return results_on_host([result])[0] if moves_to_cpu else result

        ran = self.call(join, [request])
        if isinstance(ran, Returned):
            return ran.value
        request.failure = _failure_of(ran)
        return None

    # -- the end of a state

    def end(self, requests: Sequence[StepRequest]) -> None:
        """These are over, wherever they are."""
        for request in requests:
            self.batch.end(request)
        self.let_go(requests)

    def put_back(self, requests: Sequence[StepRequest]) -> None:
        """Give up these states: their items start again."""
        self.batch.put_back(requests)
        self.let_go(requests)

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

    # -- one call

    def call(
        self, function: Callable[[list[StepRequest]], Any], requests: list[StepRequest]
    ) -> Outcome:
        """Call the model with these.

        Raises:
            DeviceFailed: of the model's guard; or whatever else ends the worker.
        """
        self._write_progress([request.batch_id + 1 for request in requests])
        ran = self._try(function, requests)
        self._write_progress([0] * len(requests))  # not if the worker ends: they are to blame
        self._check_owner()
        return ran

    def tell_that_it_runs(self) -> None:
        """Between two runs: the engine bounds each of them, and not all together."""
        now = time.monotonic()
        if now - self._told_at >= SIGN_OF_LIFE:
            self._told_at = now
            self._on_run()

    def _try(
        self, function: Callable[[list[StepRequest]], Any], requests: list[StepRequest]
    ) -> Outcome:
        try:
            return Returned(function(requests))
        except UnreadableError as error:
            return Unreadable(Failure.caught(BadModelOutput(*error.args)))
        except InvalidItems as error:
            try:
                found = by_position(error, range(len(requests)))
            except BadModelOutput as wrong:
                return Unreadable(Failure.caught(wrong))
            return Invalid({i: Failure.caught(each) for i, each in found.items()})
        except BaseException as error:
            return caught(error, self.model, requests[0].batch_id)

    def _write_progress(self, numbers: list[int]) -> None:
        progress = self._progress
        if progress is not None:
            progress[FORWARD : FORWARD + len(numbers)] = array("q", numbers)


class _Calls:
    """What ``start`` and ``step`` of a model have in common, for ``bisect``."""

    def __init__(self, calls: StepCalls) -> None:
        self._calls = calls
        self._batch = calls.batch
        self._may_rerun = calls.model.may_rerun

    def room(self, items: Sequence[StepRequest]) -> int:
        return len(items)

    def fail(self, items: list[StepRequest], failure: Failure) -> None:
        if len(items) > 1:
            failure = _shared(failure)
        for request in items:
            request.failure = failure


class _Start(_Calls):
    """Has items start."""

    def run(self, part: list[StepRequest]) -> Outcome:
        self._calls.tell_that_it_runs()
        return self._calls.call(self._start, part)

    def _start(self, requests: list[StepRequest]) -> list[Any]:
        managed = self._calls.managed
        found = managed.start([request.item for request in requests])
        try:
            return read_states(found, len(requests), describe(managed.start))
        except UnreadableError as error:
            self._calls.release(error.parts)
            raise

    def done(self, part: list[StepRequest], value: list[Any]) -> None:
        for request, state in zip(part, value, strict=True):
            request.state = state
        self._started += len(part)

    def ran_out(
        self, search: Bisection[StepRequest], part: list[StepRequest], failure: Failure
    ) -> None:
        batch = self._batch
        others = len(batch.running) + self._started
        if len(part) == 1 and not others:
            batch.ran_out_alone()
            self.fail(part, failure)
            search.drop(part)
        elif not self._may_rerun:
            self.fail(part, failure)
            search.drop(part)
        elif len(part) == 1:
            batch.ran_out(others)
            search.drop(search.items)
        else:
            batch.starts.ran_out(len(part))
            search.drop(search.items)
        release_memory()  # only now: where it was raised, frames still held tensors

    _started = 0


class _Step(_Calls):
    """Has items take a step."""

    def run(self, part: list[StepRequest]) -> Outcome:
        self._calls.tell_that_it_runs()
        return self._calls.call(self._step, part)

    def _step(self, requests: list[StepRequest]) -> list[StepPair]:
        managed = self._calls.managed
        found = managed.step([request.state for request in requests])
        moves_to_cpu = self._calls.model.moves_to_cpu
        return read_pairs(found, len(requests), describe(managed.step), moves_to_cpu=moves_to_cpu)

    def done(self, part: list[StepRequest], value: list[StepPair]) -> None:
        self._calls.model.guard.row = 0
        for request, pair in zip(part, value, strict=True):
            if isinstance(pair, Failure):
                request.failure = pair
            else:
                request.stepped(*pair)

    def ran_out(
        self, search: Bisection[StepRequest], part: list[StepRequest], failure: Failure
    ) -> None:
        """Give up the youngest of those that have not taken the step."""
        batch, size, youngest = self._batch, len(self._batch.running), None
        if self._may_rerun and size > 1:
            batch.ran_out(size - 1)
            youngest = batch.youngest(search.items)
        elif self._may_rerun:
            batch.ran_out_alone()
        if youngest is not None:
            self._calls.put_back([youngest])
            search.drop([youngest])
        elif self._may_rerun and len(part) > 1:
            search.shrink(part)
            # The youngest next: if they fail the others have more.
            left = set(search.items)
            search.reorder(each for each in reversed(batch.running) if each in left)
        else:
            self.fail(part, failure)
            self._calls.let_go(part)
            search.drop(part)
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


def _failure_of(ran: Outcome) -> Failure:
    """Of a call for a single item that did not return."""
    assert not isinstance(ran, Returned)
    if isinstance(ran, Failure):
        return ran
    return next(iter(ran.failures.values())) if isinstance(ran, Invalid) else ran.failure


# -- what ``start`` and ``step`` return

#: What a model returned for a state: its output, and whether it is done; or why its item fails.
StepPair = tuple[Any, bool] | Failure


class UnreadableError(BadModelOutput):
    """The results of a call say nothing of any item.

    Attributes:
        parts: of them, as far as they have any.
    """

    def __init__(self, text: str, parts: Sequence[Any] = ()) -> None:
        super().__init__(text)
        self.parts = parts


def read_states(found: Any, expected: int, name: str) -> list[Any]:
    """So many states, that a function of this name returned.

    Raises:
        UnreadableError: they are not as many.
    """
    return _read(found, expected, name, "states, one per item")


def read_pairs(found: Any, expected: int, name: str, *, moves_to_cpu: bool) -> list[StepPair]:
    """So many pairs, with their tensors on the CPU. One that is none is its item's failure.

    Raises:
        UnreadableError: they are not as many.
    """
    if type(found) is OnHost:
        found = results_on_host(found)
    pairs = _read(found, expected, name, "pairs (output, is_done), one per state")
    read = [_read_pair(pair, name) for pair in pairs]
    if moves_to_cpu:
        # The first output says whether there are tensors of a GPU: so without those that are None.
        outputs = [each[0] for each in read if type(each) is tuple and each[0] is not None]
        moved = results_on_host(outputs)
        if moved is not outputs:
            left = iter(moved)
            read = [
                (next(left), each[1]) if type(each) is tuple and each[0] is not None else each
                for each in read
            ]
    return read


def _read(found: Any, expected: int, name: str, what: str) -> list[Any]:
    parts = _as_list(found)
    if parts is None or len(parts) != expected:
        raise UnreadableError(
            f"{name} must return a sequence of {expected} {what}; it returned {_kind(found)}",
            parts or (),
        )
    return parts


def _read_pair(pair: Any, name: str) -> StepPair:
    if type(pair) is tuple and len(pair) == 2 and type(pair[1]) is bool:  # the usual case
        return pair
    if isinstance(pair, Exception):
        return Failure.caught(pair)
    parts = _as_list(pair)
    # Where a model returns all outputs and then all flags, of two items, these look like pairs.
    if parts is not None and len(parts) == 2 and _is_flag(parts[1]):
        return parts[0], bool(parts[1])
    return Failure(
        BadModelOutput(
            f"{name} must return a pair (output, is_done) for each state, and is_done must be "
            f"True or False; it returned {_kind(pair)}"
        )
    )


def _is_flag(value: Any) -> bool:
    """Whether it is one bool, also of numpy or torch."""
    kind = str(getattr(value, "dtype", ""))
    return type(value) is bool or (
        kind in ("bool", "torch.bool") and not tuple(getattr(value, "shape", ()))
    )


def _as_list(found: Any) -> list[Any] | None:
    if not is_sequence(found):
        return None
    try:
        return list(found)
    except TypeError:  # an array without dimensions
        return None


def _kind(found: Any) -> str:
    parts = _as_list(found)
    kind = type(found).__qualname__
    if parts is None:
        return kind
    return f"{kind} of {len(parts)}"
