"""Single flight: identical items that are in flight are computed once and answered to all.

     caller threads              SingleFlight                     the backend
     --------------              ------------                     -----------
     submit(call)
       key: the item, pickled
       ├─ lock ── flights: board ── unlock
       └─ those that are not in flight ─────────────────────────▶ one call: a flight
     ◀── reply.complete / reply.fail ─── to all who wait ◀─────── its outcome
       decode, in the caller's thread again

Two items are the same if they pickle to the same bytes: so 1, 1.0 and True are three. An item that
does not pickle, which a thread can compute all the same, is computed for itself. ``flights.py`` has
who is answered by what; the lock guards that, and nothing else is done under it.
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

from ..engine.backend import Backend, Wrapper
from ..engine.blame import of_shared_call
from ..engine.timer import Timer, is_owned, start_thread
from ..errors import PredictTimeout, StreamerError
from ..observe.record import Call
from ..options.table import SharingOptions
from ..workers.payload_channel import kept
from ..workers.protocol import Failure
from .callers import Caller, Computation
from .computations import Computations
from .keys import SharedOutput, key_of

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    Stats = TypeVar("Stats", bound=DataclassInstance)

__all__ = ["Share", "SingleFlight", "make_share"]

logger = logging.getLogger(__name__)


class SingleFlight(Wrapper):
    """A backend that computes nothing twice that is in flight, nor what is in its cache.

    Args:
        copies: whether outputs are objects that are handed out as they are, so that all but one of
            those who get one must get a copy.
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
        self._flights = Computations(
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

    def submit(self, call: Call) -> None:
        self._inner.check_process()  # before the lock, which a fork may have copied while held
        items, timeout, more = call.payloads, call.timeout, call.more
        keys = [key_of(item) for item in items]
        is_refused = self._is_closing or (timeout is not None and timeout <= 0)
        if is_refused or not any(keys):  # nobody can share it
            self._inner.submit(call)
            return
        now = self._clock()
        deadline = math.inf if timeout is None else now + timeout
        passenger = call.reply.call = Caller(
            len(keys), call.reply, deadline, call.precedence, timeout
        )
        with self._lock:
            flight, outlived, is_complete = self._flights.board(passenger, keys, items, now)
        if is_complete:  # from the cache
            _tell(passenger)
            return
        for other in outlived:
            self._prolong(other, deadline)
        if flight is not None:
            try:
                self._launch(flight, now, more)
            except BaseException as error:
                if self._refused(flight, passenger, error):
                    raise
                return
            # Others may have boarded, and flushed, before there was anything to flush.
            if more and flight.aboard + flight.gone > 1:
                self._inner.flush()
        elif not more:
            self._inner.flush()  # what it shares may wait for others to be made, and it must not
        if call.is_watched and timeout is not None:
            self._timer.watch(passenger)

    def _launch(self, flight: Computation, now: float, more: bool) -> None:
        landing = _Landing(self, flight)
        timeout = None if flight.until == math.inf else flight.until - now
        self._inner.submit(Call(flight.items, landing, timeout, flight.precedence, more=more))
        with self._lock:
            flight.call = landing.call
            is_over = flight.is_over
        if is_over and landing.call is not None:
            # It is answered already; or all have gone meanwhile, and nobody could withdraw it.
            self._inner.withdraw(landing.call)

    def _prolong(self, flight: Computation, deadline: float) -> None:
        """Have the backend keep a flight for one who waits longer than those before.

        If that comes too late, it fails of its time, and is launched again for who is left.
        """
        extend, call = self._extend, flight.call
        if extend is not None and call is not None and extend(call, deadline):
            with self._lock:
                flight.until = max(flight.until, deadline)

    def _refused(self, flight: Computation, passenger: Caller, error: BaseException) -> bool:
        """The backend has not accepted a flight; whether that is to be raised at its passenger."""
        with self._lock:
            was_over = passenger.is_over  # another flight of it has failed meanwhile
            abandoned = self._flights.refused(flight, passenger)
            has_others = not flight.is_over
        self._drop(abandoned, self._inner.withdraw)
        if has_others:  # who have boarded it meanwhile
            self._fail(flight, Failure(copy.copy(error).with_traceback(None)))
        return not was_over or not isinstance(error, Exception)

    def _answer(self, flight: Computation, outputs: list[Any], call: Any) -> None:
        with self._lock:
            complete = self._flights.answered(flight, outputs, call)
        for passenger in complete:
            _tell(passenger)
        if self._is_closing:
            self._timer.look()  # it ends when nothing is left

    def _fail(self, flight: Computation, failure: Failure, *, is_final: bool = False) -> None:
        # A list and not a recursion: each launch for those who are left may fail at once, too.
        failing = [(flight, failure, is_final)]
        has_launched = False
        while failing:
            flight, failure, is_final = failing.pop()
            is_late = failure.text.startswith(PredictTimeout.__qualname__)  # without unpickling it
            with self._lock:
                failed, bystanders, launched, abandoned = self._flights.failed(
                    flight, self._clock(), is_late=is_late, is_final=is_final
                )
            self._drop(abandoned, self._inner.withdraw)
            for passenger in failed:
                _tell(passenger, failure)
            for passenger in bystanders:
                _tell(passenger, of_shared_call(failure))
            for again in launched:
                try:
                    self._launch(again, self._clock(), more=True)
                    has_launched = True
                except (Exception, SystemExit) as error:  # which may be of the user's ``length``
                    # Of too little time, too: then those are tried who have more.
                    is_final = not isinstance(error, PredictTimeout)
                    failing.append((again, Failure(error.with_traceback(None)), is_final))
        if has_launched:
            self._inner.flush()
        if self._is_closing:
            self._timer.look()

    # -- callers who give up

    def cancel(self, call: Any) -> bool:
        """Withdraw a call of which nothing has been sent but what others wait for, too."""
        if type(call) is not Caller:
            return self._inner.cancel(call)
        self._inner.check_process()
        with self._lock:
            if not self._flights.can_cancel(call):
                return False
            abandoned = self._flights.leave(call)
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
            abandoned = self._flights.leave(call)
        call.reply = None
        self._drop(abandoned, how)

    def _time_ended(self, passenger: Caller) -> None:
        with self._lock:
            if passenger.is_over:
                return
            abandoned = self._flights.leave(passenger)
        self._drop(abandoned, self._inner.expire)
        _tell(passenger, Failure(self._inner.late(passenger.timeout)))

    @staticmethod
    def _drop(flights: Iterable[Computation], how: Callable[[Any], None]) -> None:
        for flight in flights:
            if flight.call is not None:  # else who launches it sees that it is over
                how(flight.call)

    # -- the rest

    def decode(self, outputs: list[Any]) -> list[Any]:
        if self._copies:
            outputs = [
                output.copy() if type(output) is SharedOutput else output for output in outputs
            ]
        return self._inner.decode(outputs)

    def counted(self, stats: Stats) -> Stats:
        """The stats of the backend, with what was done here."""
        flights = self._flights
        return dataclasses.replace(stats, deduplicated=flights.deduplicated, cached=flights.cached)

    def describe(self) -> str:
        counts = ("deduplicated", self._flights.deduplicated), ("cached", self._flights.cached)
        return " | ".join(
            [self._inner.describe(), *(f"{name} {count}" for name, count in counts if count)]
        )

    def forget(self) -> None:
        """Empty the cache. What is being computed does not come into it either."""
        self._inner.check_process()
        with self._lock:
            self._flights.forget()

    def check_not_in_callback(self) -> None:
        self._inner.check_not_in_callback()
        if threading.current_thread() is self._timer.thread:
            raise StreamerError(
                "a callback of a future cannot wait for this streamer, whose thread it runs in; "
                "use submit, and a callback of that future"
            )

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
            is_over = not len(self._flights)
        if is_over:  # else this is a callback, and the backend closes when that returns
            self._timer.close()
        else:
            self._timer.abandon()

    def abandon(self) -> None:
        """The streamer was forgotten. For a finalizer, which may run under our lock."""
        self._is_closing = True
        self._timer.abandon()


class _Landing:
    """What a flight's outcome goes to."""

    __slots__ = ("_flight", "_owner", "call")

    def __init__(self, owner: SingleFlight, flight: Computation) -> None:
        self._owner = owner
        self._flight = flight
        self.call: Any = None

    def complete(self, outputs: list[Any]) -> None:
        self._owner._answer(self._flight, outputs, self.call)

    def fail(self, failure: Failure) -> None:
        self._owner._fail(self._flight, failure)


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
        from .cache import make_cache

        cache = make_cache(options.cache_size, options.cache_ttl, time.monotonic)
    return functools.partial(SingleFlight, cache=cache)


def _tell(passenger: Caller, failure: Failure | None = None) -> None:
    """Hand out the outcome. Without the lock, and only by who has found the passenger over."""
    reply, outputs = passenger.reply, passenger.outputs
    passenger.reply, passenger.outputs = None, []
    try:
        if failure is None:
            reply.complete(outputs)
        else:
            reply.fail(failure)
    except BaseException:
        # A callback of a user's may raise anything, and others wait for their answers.
        with contextlib.suppress(Exception):
            logger.exception("a callback of a future raised")
