"""Single flight: identical items that are in flight are computed once and answered to all.

     caller threads              SingleFlight                     the backend
     --------------              ------------                     -----------
     submit(call)
       key: the item, pickled
       ├─ lock ── join ── unlock
       └─ the items that are not in flight ─────────────────────▶ one call: a computation
     ◀── reply.end ───────────────────── to all who wait ◀─────── its outcome
       decode, in the caller's thread again

A caller is complete when all its items are. Its new items are one call of the backend and not one
each: a call costs a message to a pool or to Redis, counts as a call in stats and traces, and is
accepted or refused as a whole.

A caller waits for another's item only if its computation serves as well as its own would:

    the computation                             is joined by
    ---------------                             ------------
    is with a worker                            every caller
    waits, of another tenant                    none: a flood must not delay the other tenants
    waits, with a deadline of its caller's      callers with a later deadline, or without one
    waits, with a priority                      callers without a deadline, of at most that priority
    ends before the caller's time does          none, if it cannot be extended

Two items are the same if they pickle to the same bytes: so 1, 1.0 and True are three. An item that
does not pickle, which a thread can compute all the same, is computed for itself. Results may be
kept for later callers.
"""

from __future__ import annotations

import copy
import hashlib
import logging
import math
import pickle
import threading
import time
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass, field
from typing import Any

from .engine.backend import IN_CALLBACK, Backend, Outcome, PassThrough
from .engine.threads import Timer, is_owned, start_thread
from .errors import ModelError, SharedBatchError, StreamerError
from .observe.metrics import nonzero
from .observe.record import Call, CallOptions, Timing
from .options.table import SharingOptions
from .reporting import explain_missing, quiet_log, summary
from .workers.memory_link import shareable
from .workers.protocol import Failure

_log = quiet_log(__name__)

_MISSING = object()

#: Not the highest one, so that a key means the same whatever Python computes it.
_PROTOCOL = 5

#: Keys beyond so many bytes are replaced by digests, or the cache would hold every image twice.
_LONGEST_KEY = 256
#: What begins so is no pickle.
_DIGEST = b"#"

#: For so many times the first caller's timeout a backend keeps a computation that it cannot extend:
#: later callers may join it. It is withdrawn when no caller waits, so that only a process that was
#: killed has it computed in vain.
_SLACK = 2.0

#: Errors of ours by which only callers fail whose time ends when that of the computation does.
_LATE = frozenset({"PredictTimeout", "TooLate"})
#: Errors of ours that mean that nothing was computed. Others may come after a part was.
_NOT_COMPUTED = _LATE | {"UnpicklableItem"}
#: Errors of ours that are about no call: no worker can compute anything.
_OF_NO_CALL = frozenset({"StreamerBroken", "StreamerClosed", "WorkerStartError"})

#: Results by key.
Cache = MutableMapping[bytes | None, Any]


def make_cache(options: SharingOptions) -> Cache | None:
    """Beyond its size the least recently used result is dropped. None if none are kept.

    Raises:
        ImportError: cachetools is not installed.
    """
    size, ttl = options.cache_size, options.cache_ttl
    if not size:
        return None
    with explain_missing("cache_size", "cache", "cachetools"):
        from cachetools import LRUCache, TTLCache
    cache: Cache = LRUCache(size) if ttl is None else TTLCache(size, ttl, timer=time.monotonic)
    return cache


def _key_of(item: Any) -> bytes | None:
    """What is the same for the same items only; None if the item has none."""
    try:
        key = pickle.dumps(item, _PROTOCOL)
    except (Exception, SystemExit):  # code of the item's
        return None
    if len(key) > _LONGEST_KEY:
        return _DIGEST + hashlib.blake2b(key, digest_size=32).digest()
    return key


class SharedOutput:
    """An output that several get. It stays as it was computed: each gets a copy of their own."""

    __slots__ = ("_output",)

    def __init__(self, output: Any) -> None:
        self._output = output

    def copy(self) -> Any:
        """For the caller's thread: this may be code of the user's."""
        try:
            return copy.deepcopy(self._output)
        except (Exception, SystemExit) as error:
            raise ModelError(
                f"a result of type {type(self._output).__qualname__} cannot be copied for one of "
                f"several callers, which deduplicate=True needs: {summary(error)}"
            ) from error.with_traceback(None)


@dataclass(slots=True, eq=False)
class Caller:
    """Who waits for a call. Guarded by the lock of single flight until it is over."""

    call: Call  # as it was made; without a reply when it is over
    items: list[Item] = field(default_factory=list)  # by position; none when it is over
    answered_by: Computation | None = None  # the one that gave the last output

    @property
    def deadline(self) -> float:
        return self.call.deadline

    @property
    def is_over(self) -> bool:
        """Answered, failed or gone; never changes back."""
        return self.call.reply is None

    @property
    def computations(self) -> dict[Computation, None]:
        """Those that it waits for, or has waited for. Any thread."""
        return dict.fromkeys([item.computation for item in self.items])

    @property
    def is_running(self) -> bool:
        """Whether a part of it is known to be with a worker. Any thread."""
        return any(computation.is_running for computation in self.computations)

    @property
    def timing(self) -> Timing | None:
        """Where its time went, with the last computation. None from the cache."""
        computation = self.answered_by
        timing: Timing | None = getattr(computation and computation.call, "timing", None)
        if computation is None or timing is None:
            return None
        missed = max(0.0, self.call.arrived_at - computation.submitted_at)
        *stages, first, between, longest = timing
        if first is not None:
            first = max(0.0, first - missed)
        for stage, seconds in enumerate(stages):
            stages[stage] = max(0.0, seconds - missed)
            missed = max(0.0, missed - seconds)
        return Timing._make([*stages, first, between, longest])

    def outputs(self) -> list[Any] | None:
        """Those of all its items; None while one is missing. Locked."""
        if any(item.output is _MISSING for item in self.items):
            return None
        return [item.output for item in self.items]

    def end(self) -> Any:
        """It is over; returns the reply, and lets go of its items. Locked."""
        reply = self.call.reply
        self.call.reply, self.call.payloads, self.items = None, (), []
        return reply


@dataclass(slots=True, eq=False)
class Item:
    """An item in flight, or one that a caller found in the cache."""

    key: bytes | None  # None of an item that cannot be shared
    payload: Any  # as the backend gets it
    computation: Computation
    output: Any = _MISSING
    wanted: int = 0  # by so many callers, and at how many positions


@dataclass(slots=True, eq=False)
class Computation:
    """One call of the backend's, whose reply it is."""

    flight: SingleFlight  # gets the outcome
    options: CallOptions  # as the backend has them
    until: float  # when the backend drops it, if it is not with a worker by then
    submitted_at: float
    items: list[Item] = field(default_factory=list)  # none when it is over
    callers: dict[Caller, None] = field(default_factory=dict)  # all that wait for an item of it
    call: Any = None  # the backend's, set by the backend before it can be over
    is_stale: bool = False  # its outputs are too old for the cache

    @property
    def is_over(self) -> bool:
        """Answered, failed or given up; nor is there one before it has items."""
        return not self.items

    @property
    def is_running(self) -> bool:
        """Whether a part of it is known to be with a worker."""
        return not self.is_over and self.call is not None and bool(self.call.is_running)

    def end(self, outcome: Outcome) -> None:
        """For the backend: it is over."""
        if isinstance(outcome, Failure):
            self.flight.fail(self, outcome)
        else:
            self.flight.answer(self, outcome)


class SingleFlight(PassThrough):
    """A backend that computes nothing twice that is in flight, nor what is in its cache.

    Args:
        copies: whether outputs are objects that are handed out as they are, so that several
            callers need copies.
        may_rerun: whether an item may be computed again when its call failed.

    Attributes:
        deduplicated, cached: items that another's computation, or the cache, has answered so far.
        lock: guards all records, and the cache. Nothing else is done under it.
    """

    def __init__(
        self,
        inner: Backend,
        *,
        copies: bool = False,
        may_rerun: bool = True,
        cache: Cache | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(inner)
        self._copies = copies
        self._may_rerun = may_rerun
        self._cache = cache
        self._clock = clock
        # Reentrant as an engine's: a finalizer of a user's may run while it is held.
        self.lock = threading.RLock()
        self.timer: Timer[Caller] = Timer(self._time_ended, self.lock, clock)
        # In flight. Nearly always one for each key; never many: one that waits for each tenant and
        # priority.
        self._items: dict[bytes | None, list[Item]] = {}
        self.deduplicated = self.cached = 0
        self._is_closing = False

    @property
    def computations(self) -> set[Computation]:
        """All that are in flight. Locked."""
        return {item.computation for same in self._items.values() for item in same}

    # -- callers

    def check_room(self) -> None:
        """A call that is shared, or whose results are kept, needs no room."""

    def submit(self, call: Call) -> None:
        self._inner.check_process()  # before the lock, which a fork may have copied while held
        timeout = call.timeout
        is_refused = self._is_closing or (timeout is not None and timeout <= 0)
        # The outputs of a stream are handed out once.
        keys = [] if is_refused or call.is_stream else [_key_of(item) for item in call.payloads]
        if not any(keys):  # it cannot be shared
            self._inner.submit(call)
            return
        call.arrived_at = self._clock()
        if timeout is not None:
            call.deadline = call.arrived_at + timeout
        caller = call.reply.call = Caller(call)
        own = self._computation(caller)
        try:
            with self.lock:
                for key, payload in zip(keys, call.payloads, strict=True):
                    output = _MISSING if self._cache is None else self._cache.get(key, _MISSING)
                    if output is _MISSING:
                        self._join(caller, own, key, payload)
                    else:
                        self.cached += 1
                        caller.items.append(Item(key, payload, own, output))
                outputs = caller.outputs()
            if outputs is None:
                self._prolong(caller)
                self._start(own)
                # A call that is flushed later must not hold up others. These may have joined, and
                # flushed, before there was anything to flush.
                if not call.more or len(own.callers) > 1:
                    self._inner.flush()
        except BaseException as error:  # also of a signal handler: others may have joined already
            own.call = None  # it was not accepted, or is computed for nobody
            reply = self._leave(caller)
            self.fail(own, None)
            if reply is None and isinstance(error, Exception):
                return  # another computation of it has failed meanwhile, so it was answered
            raise
        if outputs is not None:  # of the cache: nothing is to be undone if this is interrupted
            caller.end().end(outputs)
        elif call.is_watched and timeout is not None:
            self.timer.watch(caller)

    def _join(self, caller: Caller, own: Computation, key: bytes | None, payload: Any) -> None:
        """Have the caller wait for an item that is in flight, or for one of its own. Locked.

        An interrupt may end it between any lines: what it has left behind, ``_leave`` finds.
        """
        for item in reversed(self._items.get(key, ())):
            if self._serves(item.computation, own, caller.deadline):
                break
        else:
            item = Item(key, payload, own)
            own.items.append(item)
            if key is not None:
                self._items.setdefault(key, []).append(item)
        item.wanted += 1
        caller.items.append(item)
        item.computation.callers[caller] = None

    def _serves(self, computation: Computation, own: Computation, deadline: float) -> bool:
        """Whether a caller that waits until the deadline fares as well as with its own."""
        if self._inner.extend is None and deadline > computation.until:
            return False
        if computation.is_running:
            return True
        is_late = own.options.has_deadline and computation.until > own.until
        return computation.options.serves(own.options) and not is_late

    def _prolong(self, caller: Caller) -> None:
        """Have the backend keep what a caller has joined, if it waits longer than those before.

        Not a computation that goes by its deadline. If it comes too late for one, that fails of its
        time, and starts again for the other callers.
        """
        extend, deadline = self._inner.extend, caller.deadline
        if extend is None:
            return
        for computation in caller.computations:
            call = computation.call
            if deadline <= computation.until or computation.options.has_deadline or call is None:
                continue
            if extend(call, deadline):
                with self.lock:
                    computation.until = max(computation.until, deadline)

    def cancel(self, call: Any) -> bool:
        """Withdraw a call of which nothing has been sent but what others wait for, too."""
        if type(call) is not Caller:
            return self._inner.cancel(call)
        return self._leave(call, is_cancel=True) is not None

    def withdraw(self, call: Any, *, has_expired: bool = False) -> None:
        if type(call) is Caller:
            self._leave(call, has_expired=has_expired)
        else:
            self._inner.withdraw(call, has_expired=has_expired)

    def _time_ended(self, caller: Caller) -> None:
        reply = self._leave(caller, has_expired=True)
        self._hand_out(reply, Failure(self._inner.late(caller.call.timeout)))

    def _leave(self, caller: Caller, *, has_expired: bool = False, is_cancel: bool = False) -> Any:
        """A caller no longer waits; returns its reply, None if it stays or was over.

        Args:
            is_cancel: whether it stays if a worker has what nobody else waits for.
        """
        self._inner.check_process()
        with self.lock:
            computations = caller.computations
            if caller.is_over or (
                is_cancel
                and any(each.is_running and len(each.callers) == 1 for each in computations)
            ):
                return None
            items, reply = caller.items, caller.end()
            for item in items:
                item.wanted -= 1
            for each in computations:
                each.callers.pop(caller, None)
            abandoned = [each for each in computations if not (each.is_over or each.callers)]
            for each in abandoned:
                self._end(each)
        for each in abandoned:
            if each.call is not None:  # else it is just being submitted: ``_start`` sees its end
                self._inner.withdraw(each.call, has_expired=has_expired)
        return reply

    # -- computations

    def _computation(self, caller: Caller) -> Computation:
        """A new one, for a caller and those that join it."""
        now, until = self._clock(), caller.deadline
        if self._inner.extend is None:
            until = max(until, now + (until - now) * _SLACK)
        return Computation(self, caller.call.options, until, now)

    def _end(self, computation: Computation) -> tuple[list[Item], list[Caller]]:
        """It is over, and nobody can join it; returns its items and who waits for them. Locked."""
        items, callers = computation.items, [*computation.callers]
        computation.items, computation.callers = [], {}  # they refer to it
        for item in items:
            others = [each for each in self._items.pop(item.key, ()) if each is not item]
            if others:
                self._items[item.key] = others
        return items, callers

    def _start(self, computation: Computation) -> None:
        """Submit it, unless it has no items; call ``flush`` next.

        It is withdrawn if its last caller has left by then.
        """
        if computation.is_over:
            return
        timeout = None if computation.until == math.inf else computation.until - self._clock()
        payloads = [item.payload for item in computation.items]
        self._inner.submit(Call(payloads, computation, timeout, computation.options, more=True))
        if computation.is_over and computation.call is not None:
            self._inner.withdraw(computation.call)

    def answer(self, computation: Computation, outputs: list[Any]) -> None:
        """A computation succeeded."""
        with self.lock:
            if computation.is_over:  # given up, just now
                return
            cache = None if computation.is_stale else self._cache
            items, callers = self._end(computation)
            for item, output in zip(items, outputs, strict=True):
                self.deduplicated += max(0, item.wanted - 1)
                if cache is not None or item.wanted > 1:
                    output = SharedOutput(output) if self._copies else shareable(output)
                if cache is not None and item.key is not None:
                    cache[item.key] = output
                item.output = output
            answers: list[tuple[Any, list[Any]]] = []
            for caller in callers:
                caller.answered_by = computation
                found = caller.outputs()
                if found is not None:
                    answers.append((caller.end(), found))
        for reply, found in answers:
            self._hand_out(reply, found)

    def fail(self, computation: Computation, failure: Failure | None) -> None:
        """A computation failed: fail callers as ``_failures`` says, and serve the others anew.

        Without a failure its own caller was refused, which is no matter of the others'.
        """
        failing = [(computation, failure)]
        for computation, failure in failing:  # which grows: what starts again may fail at once
            with self.lock:
                failures = {} if failure is None else self._failures(computation, failure)
                _, callers = self._end(computation)
            for caller, why in failures.items():
                self._hand_out(self._leave(caller), why)
            with self.lock:
                waiting = [caller for caller in callers if not caller.is_over]
                waiting.sort(key=_urgency)
                restarted = [
                    again for caller in waiting for again in self._join_again(caller, computation)
                ]
            for again in restarted:
                try:
                    self._start(again)
                except (Exception, SystemExit) as error:  # which may be of the user's ``length``
                    failing.append((again, Failure(error.with_traceback(None))))
            for caller in waiting:
                self._prolong(caller)
            if restarted:
                self._inner.flush()

    def _join_again(self, caller: Caller, failed: Computation) -> list[Computation]:
        """Have a caller wait for what it does not get of a computation: each item by itself.

        So one round more finds the item at fault, however the calls overlap. Returns a new
        computation for each item, empty if the caller has joined another one. Locked.
        """
        restarted = []
        items, caller.items = caller.items, []
        for item in items:
            if item.computation is failed and item.output is _MISSING:
                restarted.append(self._computation(caller))
                self._join(caller, restarted[-1], item.key, item.payload)
            else:
                caller.items.append(item)
        return restarted

    def _failures(self, computation: Computation, failure: Failure) -> dict[Caller, Failure]:
        """The callers that fail of a failed computation. Locked.

        A call fails of any of its items. Who waits for only some of them does not know that it is
        of theirs: so these are computed again, each by itself.
        """
        name = failure.text.partition(":")[0]  # without unpickling it
        kind = name if failure.remote_traceback is None else ""  # a model may raise ours, too
        # Our words: those of the model may quote an item that is another caller's.
        shared = SharedBatchError(
            f"a call that shared items with this one failed with {name}, and with retry=False "
            "those items are not computed again"
        )
        failures: dict[Caller, Failure] = {}
        for caller in computation.callers:
            has_all = set(caller.items).issuperset(computation.items)
            fails = has_all or kind == "PredictTimeout"
            if fails and (kind not in _LATE or caller.deadline <= computation.until):
                failures[caller] = failure
            elif kind not in _NOT_COMPUTED and not self._may_rerun:
                failures[caller] = failure if kind in _OF_NO_CALL else Failure(shared)
        return failures

    def _hand_out(self, reply: Any, outcome: Outcome) -> None:
        """Hand out the outcome of a caller that is over, unless it had left. Without the lock."""
        try:
            if reply is not None:
                reply.end(outcome)
        except BaseException:
            # A callback of a user's may raise anything, and others wait for their answers.
            _log(logging.ERROR, "a callback of a future raised", exc_info=True)
        if self._is_closing:
            self.timer.look()  # it ends when nothing is left

    # -- the rest

    def decode(self, outputs: list[Any]) -> list[Any]:
        if self._copies:
            outputs = [
                output.copy() if type(output) is SharedOutput else output for output in outputs
            ]
        return self._inner.decode(outputs)

    def describe(self) -> str:
        return " | ".join([self._inner.describe(), *nonzero(self, "deduplicated", "cached")])

    def forget(self) -> None:
        """Empty the cache. What is being computed does not come into it either."""
        self._inner.check_process()
        with self.lock:
            if self._cache is not None:
                self._cache.clear()
            for computation in self.computations:
                computation.is_stale = True

    def check_not_in_callback(self) -> None:
        self._inner.check_not_in_callback()
        if threading.current_thread() is self.timer.thread:
            raise StreamerError(IN_CALLBACK)

    def close(self, *, drain: bool, timeout: float | None) -> None:
        try:
            self._inner.check_process()
        except StreamerError:
            return  # a fork's copy
        if is_owned(self.lock):
            # A finalizer interrupts this thread, which must not wait for others that need its lock.
            start_thread(lambda: self.close(drain=drain, timeout=timeout), "closing")
            return
        self._is_closing = True
        self._inner.close(drain=drain, timeout=timeout)
        self.timer.abandon()  # last, since calls are watched until they are over

    def abandon(self) -> None:
        self._is_closing = True
        self.timer.abandon()
        self._inner.abandon()


def _urgency(caller: Caller) -> tuple[bool, float, float]:
    """The least is the most urgent, and of equals it waits longest: the others can join it."""
    if caller.call.options.has_deadline:
        return False, caller.deadline, 0
    return True, -caller.call.options.priority, -caller.deadline
