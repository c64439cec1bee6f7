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
from .computations import Computations

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    Stats = TypeVar("Stats", bound=DataclassInstance)

__all__ = ["Share", "SingleFlight", "make_share"]

logger = logging.getLogger(__name__)


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
        self._lock = threading.RLock()
        self._computations = Computations(
            can_extend=extend is not None,
            slack=slack,
            may_rerun=may_rerun,
            cache=cache,
            shared=SharedOutput if copies else kept,
        )
        self._copies = copies
        self._extend = extend
        self._clock = clock
        self._timer: Timer[Caller] = Timer(self._time_ended, clock)
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
        with self._lock:
            computation, outlived, is_complete = self._computations.join(caller, keys, items, now)
        if is_complete:  # from the cache
            _finish(caller)
            return
        for other in outlived:
            self._prolong(other, deadline)
        if computation is not None:
            try:
                self._start(computation, now, more)
            except BaseException as error:
                if self._refused(computation, caller, error):
                    raise
                return
            # Others may have joined, and flushed, before there was anything to flush.
            if more and computation.caller_count + computation.left_count > 1:
                self._inner.flush()
        elif not more:
            self._inner.flush()  # what it shares may wait for others to be made, and it must not
        if call.is_watched and timeout is not None:
            self._timer.watch(caller)

    def _start(self, computation: Computation, now: float, more: bool) -> None:
        computation.owner = self
        timeout = None if computation.until == math.inf else computation.until - now
        self._inner.submit(
            Call(computation.items, computation, timeout, computation.precedence, more=more)
        )
        with self._lock:
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
            with self._lock:
                computation.until = max(computation.until, deadline)

    def _refused(self, computation: Computation, caller: Caller, error: BaseException) -> bool:
        """The backend did not accept a computation; whether to raise that at its caller."""
        with self._lock:
            was_over = caller.is_over  # another computation of it has failed meanwhile
            abandoned = self._computations.refused(computation, caller)
            has_others = not computation.is_over
        self._drop(abandoned, self._inner.withdraw)
        if has_others:  # which have joined it meanwhile
            self.failed(computation, Failure(copy.copy(error).with_traceback(None)))
        return not was_over or not isinstance(error, Exception)

    def answered(self, computation: Computation, outputs: list[Any]) -> None:
        """For a computation: it succeeded."""
        with self._lock:
            complete = self._computations.answered(computation, outputs, computation.call)
        for caller in complete:
            _finish(caller)
        if self._is_closing:
            self._timer.look()  # it ends when nothing is left

    def failed(self, computation: Computation, failure: Failure) -> None:
        """For a computation: it failed, or was refused."""
        # A list and not a recursion: what is started for the others may fail at once, too.
        failing = [(computation, failure, False)]
        has_submitted = False
        while failing:
            computation, failure, is_final = failing.pop()
            is_late = failure.text.startswith(PredictTimeout.__qualname__)  # without unpickling it
            with self._lock:
                failed, sharers, restarted, abandoned = self._computations.failed(
                    computation, self._clock(), is_late=is_late, is_final=is_final
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
                    is_final = not isinstance(error, PredictTimeout)
                    failing.append((again, Failure(error.with_traceback(None)), is_final))
        if has_submitted:
            self._inner.flush()
        if self._is_closing:
            self._timer.look()

    # -- callers that give up

    def cancel(self, call: Any) -> bool:
        """Withdraw a call of which nothing has been sent but what others wait for, too."""
        if type(call) is not Caller:
            return self._inner.cancel(call)
        self._inner.check_process()
        with self._lock:
            if not self._computations.can_cancel(call):
                return False
            abandoned = self._computations.leave(call)
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
        with self._lock:
            if call.is_over:
                return
            abandoned = self._computations.leave(call)
        call.reply = None
        self._drop(abandoned, how)

    def _time_ended(self, caller: Caller) -> None:
        with self._lock:
            if caller.is_over:
                return
            abandoned = self._computations.leave(caller)
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
        return self._computations.deduplicated, self._computations.cached

    def describe(self) -> str:
        counts = (
            ("deduplicated", self._computations.deduplicated),
            ("cached", self._computations.cached),
        )
        return " | ".join(
            [self._inner.describe(), *(f"{name} {count}" for name, count in counts if count)]
        )

    def forget(self) -> None:
        """Empty the cache. What is being computed does not come into it either."""
        self._inner.check_process()
        with self._lock:
            self._computations.forget()

    def check_not_in_callback(self) -> None:
        self._inner.check_not_in_callback()
        if threading.current_thread() is self._timer.thread:
            raise StreamerError(IN_CALLBACK)

    def close(self, *, drain: bool, timeout: float | None) -> None:
        try:
            self._inner.check_process()
        except StreamerError:
            return  # a fork's copy
        if is_owned(self._lock) or self._timer.is_held:
            # A finalizer interrupts this thread, which must not wait for others that need its lock.
            start_thread(lambda: self.close(drain=drain, timeout=timeout), "closing")
            return
        self._is_closing = True
        self._inner.close(drain=drain, timeout=timeout)
        with self._lock:
            is_over = not len(self._computations)
        if is_over:  # else this is a callback, and the backend closes when that returns
            self._timer.close()
        else:
            self._timer.abandon()

    def abandon(self) -> None:
        """The streamer was forgotten. For a finalizer, which may run under our lock."""
        self._is_closing = True
        self._timer.abandon()


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
