"""Single flight: identical items that are in flight are computed once and answered to all.

     caller threads              SingleFlight                     the backend
     --------------              ------------                     -----------
     submit(call)
       key: the item, pickled
       ├─ lock ── computations: join ── unlock
       └─ those that are not in flight ─────────────────────────▶ one call: a computation
     ◀── reply.complete / reply.fail ─── to all who wait ◀─────── its outcome
       decode, in the caller's thread again

Two items are the same if they pickle to the same bytes: so 1, 1.0 and True are three. An item that
does not pickle, which a thread can compute all the same, is computed for itself. The decisions are
in ``computations.py``; the lock guards them, and nothing else is done under it.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, MutableMapping
from typing import TYPE_CHECKING, Any, TypeVar

from ..engine.backend import IN_CALLBACK, Backend, PassThrough
from ..engine.build import of_shared_call
from ..engine.timer import Timer, is_owned, start_thread
from ..errors import PredictTimeout, StreamerError
from ..observe.record import Call
from ..options.table import SharingOptions
from ..workers.payload_channel import kept
from ..workers.protocol import Failure
from .cache import SharedOutput, key_of, make_cache
from .callers import Caller, Computation
from .computations import Computations, Ending

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    Stats = TypeVar("Stats", bound=DataclassInstance)

logger = logging.getLogger(__name__)

#: Errors of ours that mean that nothing was computed. Others may come after a part was.
_ENDINGS = {
    "PredictTimeout": Ending.LATE,
    "TooLate": Ending.HOPELESS,
    "UnpicklableItem": Ending.NOT_SENT,
}


class SingleFlight(PassThrough):
    """A backend that computes nothing twice that is in flight, nor what is in its cache.

    Args:
        copies: whether outputs are objects that are handed out as they are, so that all but one of
            each caller must get a copy.
        extend: keeps a call of the backend's until a deadline; False if it is over. None if that
            cannot be done.
        slack: see ``Computations``.
        may_rerun: whether anything may be computed twice.
        cache: of outputs by key; None keeps none.
        clock: seconds from a monotonic clock: the one that ``extend`` goes by.

    Attributes:
        computations: what is in flight, and for whom; guarded by ``lock``.
        lock: guards ``computations``.
        timer: ends calls whose time is over before their computation is.
    """

    def __init__(
        self,
        inner: Backend,
        *,
        copies: bool = False,
        extend: Callable[[Any, float], bool] | None = None,
        slack: float = 1.0,
        may_rerun: bool = True,
        cache: MutableMapping[bytes, Any] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(inner)
        # Reentrant as an engine's: a finalizer of a user's may run while it is held.
        self.lock = threading.RLock()
        self.computations = Computations(
            can_extend=extend is not None,
            slack=slack,
            may_rerun=may_rerun,
            cache=cache,
            shared=SharedOutput if copies else kept,
        )
        self._copies = copies
        self._extend = extend
        self._clock = clock
        self.timer: Timer[Caller] = Timer(self._time_ended, clock)
        self._is_closing = False

    # -- calls

    def check_room(self) -> None:
        """A call that is shared, or whose results are kept, needs no room."""

    def submit(self, call: Call) -> None:
        self._inner.check_process()  # before the lock, which a fork may have copied while held
        items, timeout, more = call.payloads, call.timeout, call.more
        if call.is_stream:  # its outputs are handed out once
            self._inner.submit(call)
            return
        keys = [key_of(item) for item in items]
        is_refused = self._is_closing or (timeout is not None and timeout <= 0)
        if is_refused or not any(keys):  # it cannot be shared
            self._inner.submit(call)
            return
        now = self._clock()
        deadline = math.inf if timeout is None else now + timeout
        caller = call.reply.call = Caller(len(keys), call.reply, deadline, call.precedence, timeout)
        try:
            with self.lock:
                computation, outlived, is_complete = self.computations.join(
                    caller, keys, items, now
                )
            if is_complete:  # from the cache
                _finish(caller)
                return
            for other in outlived:
                self._prolong(other, deadline)
            if computation is not None:
                self._start(computation, now, more)
                caller.own = None
        except BaseException as error:  # also of a signal handler: others may have joined already
            if self._refused(caller.own, caller, error):
                raise
            return
        if computation is not None:
            # Others may have joined, and flushed, before there was anything to flush.
            if more and computation.caller_count + computation.left_count > 1:
                self._inner.flush()
        elif not more:
            self._inner.flush()  # what it shares may wait for others to be made, and it must not
        if call.is_watched and timeout is not None:
            self.timer.watch(caller)

    def _start(self, computation: Computation, now: float, more: bool) -> None:
        computation.owner = self
        timeout = None if computation.until == math.inf else computation.until - now
        self._inner.submit(
            Call(computation.items, computation, timeout, computation.precedence, more=more)
        )
        with self.lock:
            call = computation.accepted = computation.call
            is_over = computation.is_over
        if is_over and call is not None:
            # It is answered already; or all callers left meanwhile, and none could withdraw it.
            self._inner.withdraw(call)

    def _prolong(self, computation: Computation, deadline: float) -> None:
        """Have the backend keep a computation for a caller that waits longer than those before.

        If that comes too late, it fails of its time, and starts again for the other callers.
        """
        extend, call = self._extend, computation.accepted
        if extend is not None and call is not None and extend(call, deadline):
            with self.lock:
                computation.until = max(computation.until, deadline)

    def _refused(
        self, computation: Computation | None, caller: Caller, error: BaseException
    ) -> bool:
        """The backend did not accept a computation; whether to raise that at its caller.

        Args:
            computation: of the caller's own; None if it has none.
        """
        with self.lock:
            was_over = caller.is_over  # another computation of it has failed meanwhile
            abandoned = self.computations.refused(computation, caller)
            has_others = computation is not None and not computation.is_over
        self._drop(abandoned, self._inner.withdraw)
        if computation is not None and has_others:  # which have joined it meanwhile
            self._fail(computation, Failure(copy.copy(error).with_traceback(None)), Ending.REFUSED)
        return not was_over or not isinstance(error, Exception)

    def answered(self, computation: Computation, outputs: list[Any]) -> None:
        """For a computation: it succeeded."""
        with self.lock:
            complete = self.computations.answered(computation, outputs, computation.call)
        for caller in complete:
            _finish(caller)
        if self._is_closing:
            self.timer.look()  # it ends when nothing is left

    def failed(self, computation: Computation, failure: Failure) -> None:
        """For a computation: it failed."""
        is_ours = failure.remote_traceback is None  # and not of a model, which may raise ours, too
        kind = failure.text.partition(":")[0] if is_ours else ""  # without unpickling it
        self._fail(computation, failure, _ENDINGS.get(kind, Ending.COMPUTED))

    def _fail(self, computation: Computation, failure: Failure, ending: Ending) -> None:
        # A list and not a recursion: what is started for the others may fail at once, too.
        failing = [(computation, failure, ending)]
        has_submitted = False
        while failing:
            computation, failure, ending = failing.pop()
            with self.lock:
                failed, sharers, restarted, abandoned = self.computations.failed(
                    computation, self._clock(), ending
                )
            self._drop(abandoned, self._inner.withdraw)
            for caller in failed:
                _finish(caller, failure)
            for caller in sharers:
                _finish(caller, of_shared_call(failure))
            for again in restarted:
                try:
                    self._start(again, self._clock(), more=True)
                    has_submitted = True
                except (Exception, SystemExit) as error:  # which may be of the user's ``length``
                    # Also for lack of time: then callers that have more are tried.
                    is_late = isinstance(error, PredictTimeout)
                    ending = Ending.LATE if is_late else Ending.NOT_SENT
                    failing.append((again, Failure(error.with_traceback(None)), ending))
        if has_submitted:
            self._inner.flush()
        if self._is_closing:
            self.timer.look()

    # -- callers that give up

    def cancel(self, call: Any) -> bool:
        """Withdraw a call of which nothing has been sent but what others wait for, too."""
        if type(call) is not Caller:
            return self._inner.cancel(call)
        self._inner.check_process()
        with self.lock:
            if not self.computations.can_cancel(call):
                return False
            abandoned = self.computations.leave(call)
        call.reply = None
        self._drop(abandoned, self._inner.withdraw)
        return True

    def withdraw(self, call: Any) -> None:
        self._leave(call, self._inner.withdraw)

    def expire(self, call: Any) -> None:
        self._leave(call, self._inner.expire)

    def _leave(self, call: Any, how: Callable[[Any], None]) -> None:
        if type(call) is not Caller:
            how(call)
            return
        self._inner.check_process()
        with self.lock:
            if call.is_over:
                return
            abandoned = self.computations.leave(call)
        call.reply = None
        self._drop(abandoned, how)

    def _time_ended(self, caller: Caller) -> None:
        with self.lock:
            if caller.is_over:
                return
            abandoned = self.computations.leave(caller)
        self._drop(abandoned, self._inner.expire)
        _finish(caller, Failure(self._inner.late(caller.timeout)))

    @staticmethod
    def _drop(computations: Iterable[Computation], how: Callable[[Any], None]) -> None:
        for computation in computations:
            if computation.accepted is not None:  # else ``_start`` sees that it is over
                how(computation.accepted)

    # -- the rest

    def decode(self, outputs: list[Any]) -> list[Any]:
        if self._copies:
            outputs = [
                output.copy() if type(output) is SharedOutput else output for output in outputs
            ]
        return self._inner.decode(outputs)

    def with_counts(self, stats: Stats) -> Stats:
        """The stats of the backend, with what was done here."""
        deduplicated, cached = self.counts
        return dataclasses.replace(stats, deduplicated=deduplicated, cached=cached)

    @property
    def counts(self) -> tuple[int, int]:
        """Items that were answered by another caller's computation, and from the cache."""
        return self.computations.deduplicated, self.computations.cached

    def describe(self) -> str:
        counts = (
            ("deduplicated", self.computations.deduplicated),
            ("cached", self.computations.cached),
        )
        return " | ".join(
            [self._inner.describe(), *(f"{name} {count}" for name, count in counts if count)]
        )

    def forget(self) -> None:
        """Empty the cache. What is being computed does not come into it either."""
        self._inner.check_process()
        with self.lock:
            self.computations.forget()

    def check_not_in_callback(self) -> None:
        self._inner.check_not_in_callback()
        if threading.current_thread() is self.timer.thread:
            raise StreamerError(IN_CALLBACK)

    def close(self, *, drain: bool, timeout: float | None) -> None:
        try:
            self._inner.check_process()
        except StreamerError:
            return  # a fork's copy
        if is_owned(self.lock) or self.timer.is_held:
            # A finalizer interrupts this thread, which must not wait for others that need its lock.
            start_thread(lambda: self.close(drain=drain, timeout=timeout), "closing")
            return
        self._is_closing = True
        self._inner.close(drain=drain, timeout=timeout)
        with self.lock:
            is_over = not len(self.computations)
        if is_over:  # else this is a callback, and the backend closes when that returns
            self.timer.close()
        else:
            self.timer.abandon()

    def abandon(self) -> None:
        """The streamer was forgotten. For a finalizer, which may run under our lock."""
        self._is_closing = True
        self.timer.abandon()


#: Makes a backend one that computes nothing twice.
Share = Callable[..., SingleFlight]


def make_share(options: SharingOptions) -> Share | None:
    """What to call with a backend, and the keyword arguments of ``SingleFlight``; None for nothing.

    Raises:
        ImportError: the cache needs a package that is not installed.
    """
    if not options.is_on:
        return None
    cache = None
    if options.cache_size:
        cache = make_cache(options.cache_size, options.cache_ttl, time.monotonic)
    return functools.partial(SingleFlight, cache=cache)


def _finish(caller: Caller, failure: Failure | None = None) -> None:
    """Hand out the outcome. Without the lock, and only by the thread that found the caller over."""
    reply, outputs = caller.reply, caller.outputs
    caller.reply, caller.outputs = None, []
    try:
        if failure is None:
            reply.complete(outputs)
        else:
            reply.fail(failure)
    except BaseException:
        # A callback of a user's may raise anything, and others wait for their answers.
        with contextlib.suppress(Exception):
            logger.exception("a callback of a future raised")
