"""What happens to an engine, as plain data, and what must hold after each event.

An event is a tuple: a name, and numbers that choose whom it happens to. It has no effect where
there is nobody to choose; so any list of events is a program, and a part of it is another one.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from service_streamer import (
    Overloaded,
    PredictTimeout,
    SharedBatchError,
    StreamerBroken,
    StreamerClosed,
    StreamerError,
    TooLate,
    WorkerError,
    WorkerStartTimeout,
)

from .adapter import (
    DROP,
    HOLD,
    BatchReport,
    EngineStreamer,
    Failure,
    Loss,
    Prediction,
    StepReport,
    WorkerReady,
    WorkerWaits,
    build,
    died,
)
from .interrupts import Interrupted, interrupted_at

Event = tuple[Any, ...]

#: How often the workers are looked after until all must have ended.
_MOST_ROUNDS = 400


class Fault(AssertionError):
    """What must hold does not."""


class Item(NamedTuple):
    """One item, which nothing else is equal to."""

    call: int
    position: int
    length: int


class Known:
    """A call of the walk, and what became of it so far.

    Attributes:
        handle: a future, a stream or a prediction; None if the caller has none, or has left.
        is_maybe: it was interrupted: nobody knows whether it was accepted.
        unanswered: its items without results.
        outcome: its results, or its error; None while it is open.
        ends: how often its future was said to be done.
        made, read: outputs of a stream that its worker has sent, and that its consumer has taken.
    """

    def __init__(self, number: int, size: int, kind: str, timeout: float | None) -> None:
        self.number, self.kind, self.timeout = number, kind, timeout
        self.items = [Item(number, i, (number * 7 + i * 3) % 10 + 1) for i in range(size)]
        self.unanswered = set(self.items)
        self.handle: Any = None
        self.is_maybe = self.is_over = False
        self.outcome: Any = None
        self.ends = 0
        self.made = self.read = 0

    def __repr__(self) -> str:
        return f"call {self.number} ({self.kind}, {len(self.items)} items)"


class _Errors(logging.Handler):
    """Collects what the package logs of its own bugs: only those have a traceback."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info:
            self.texts.append(f"{record.getMessage()}: {record.exc_info[1]!r}")


_LOADING = (Loss.START_FAILED, Loss.CRASHED, Loss.NO_MEMORY)


class World:
    """A streamer over a stub, whose workers and callers do what they are told.

    Args:
        places: of a model of steps; 0 for another model.
        resumes: whether another worker can go on with a stream.
        stages: seconds that a batch takes in each stage of its worker.
        options: of the adapter's ``build``.
    """

    def __init__(
        self,
        *,
        places: int = 0,
        resumes: bool = False,
        stages: tuple[float, float, float] | None = None,
        **options: Any,
    ) -> None:
        self.places, self.resumes, self.stages = places, resumes, stages
        self.options = options
        self.streamer: EngineStreamer = build(**options)
        self.transport, self.clock = self.streamer.transport, self.streamer.clock
        self.calls: list[Known] = []
        self.workers: dict[int, str] = {}
        self.held: dict[int, dict[int, list[Item]]] = {}  # by slot and batch
        self.resting: set[tuple[int, int]] = set()
        self.suspects: set[Item] = set()  # that were at work when their worker died
        self.sharing: dict[str, int] = {}  # by the text of an error: calls of its batch
        self.was_interrupted = self.has_lost = self.has_failed = self.is_closing = False
        self.is_changing = False  # workers come and go, as somebody has asked for
        #: How many workers there are in the end; None if the load decides, or one does not load.
        self.wanted: int | None = None if options.get("most") else options.get("workers", 2)
        self._stats = self.streamer.stats()
        self._errors = _Errors()
        logging.getLogger("service_streamer").addHandler(self._errors)
        self._look()

    # -- events

    def do(self, event: Event) -> None:
        """Let it happen, and check everything."""
        self.let(event)
        self.check()

    def let(self, event: Event) -> None:
        """Let it happen."""
        name, *numbers = event
        if name in _OF_WORKERS:
            self.transport.deliver(*self._of_workers(event))
        elif name == "together":
            self.transport.deliver(*[one for each in numbers for one in self._of_workers(each)])
        else:
            self._happens(event)
        self._see()

    def _happens(self, event: Event) -> None:
        name, *numbers = event
        if name in _CALLS:
            self._ask(name, *numbers)
        else:
            getattr(self, f"_{name}")(*numbers)

    def check(self) -> None:
        """Raise ``Fault`` if something does not hold."""
        self._see()
        self.streamer.check_invariants()
        self._check_counts()
        self._check_waiting()
        if self._errors.texts:
            raise Fault(f"a bug is logged: {self._errors.texts[0]}")

    # Callers: what they begin, and how they leave.

    def _ask(
        self,
        kind: str,
        size: int,
        timeout: float | None = None,
        priority: int = 0,
        tenant: str = "",
    ) -> None:
        """Begin a call: "submit", "quiet" or "predict".

        The future of a quiet one has no callback: such are answered in another way.
        """
        how: dict[str, Any] = {"priority": priority, "tenant": tenant}

        def begin(known: Known) -> None:
            if kind == "predict":
                known.handle = Prediction(self.streamer, known.items, timeout, **how)
                return
            known.handle = self.streamer.submit(known.items, timeout, **how)
            if kind == "submit":
                known.handle.add_done_callback(lambda _: setattr(known, "ends", known.ends + 1))

        self._begin(Known(len(self.calls), size, kind, timeout), begin)

    def _stream(
        self,
        timeout: float | None = None,
        priority: int = 0,
        tenant: str = "",
        max_buffered: int = 1024,
        fails_behind: bool = False,
    ) -> None:
        how: dict[str, Any] = {"priority": priority, "tenant": tenant}
        how |= {"max_buffered": max_buffered, "fails_behind": fails_behind}

        def begin(known: Known) -> None:
            known.handle = self.streamer.stream(known.items[0], timeout, **how)

        self._begin(Known(len(self.calls), 1, "stream", timeout), begin)

    def _begin(self, known: Known, begin: Callable[[Known], None]) -> None:
        try:
            begin(known)
        except Interrupted:
            known.is_maybe = True
            self.calls.append(known)
            raise
        except PredictTimeout:
            if known.timeout is None:
                raise Fault(f"{known} has no timeout, and was refused for its time") from None
        except Overloaded:
            if self.options.get("max_pending") is None:
                raise Fault("Overloaded, without max_pending") from None
        except StreamerClosed:
            if not self.is_closing:
                raise Fault("StreamerClosed, though nobody has closed it") from None
        except (StreamerBroken, WorkerError) as error:
            if not self.has_lost:
                raise Fault(f"refused, though no worker was lost: {error!r}") from None
        else:
            self.calls.append(known)

    def _cancel(self, which: int) -> None:
        for known in self._one(which, "submit", "quiet"):
            if known.handle.cancel():
                known.is_over, known.outcome = True, "cancelled"

    def _leave(self, which: int) -> None:
        for known in self._one(which, "stream", "predict"):
            handle, known.handle = known.handle, None
            known.is_maybe = True  # if it is interrupted
            if known.kind == "stream":
                handle.close()
            else:
                handle.leave(has_expired=False)
            known.is_maybe, known.is_over = False, True

    def _drop(self, which: int) -> None:
        """Forget a stream, without closing it."""
        for known in self._one(which, "stream"):
            known.is_over, known.handle = True, None

    def _cycle(self, which: int) -> None:
        """The same, but it is in a cycle: the collector finds it some time later."""
        for known in self._one(which, "stream"):
            cycle = [known.handle]
            cycle.append(cycle)
            known.handle = None

    def _collect(self) -> None:
        gc.collect()
        for known in self.calls:
            if known.handle is None and not known.is_maybe:
                known.is_over = True

    def _expire(self, which: int) -> None:
        """The caller of a ``predict`` sees that its time has ended."""
        for known in self._one(which, "predict"):
            if known.timeout is not None:
                known.handle.leave(has_expired=True)
                known.handle = None
                known.is_over, known.outcome = True, "expired"

    def _read(self, which: int, most: int = 1) -> None:
        for known in self._one(which, "stream"):
            self._take(known, most)

    def _advance(self, seconds: float) -> None:
        self.clock.advance(seconds)

    def _flood(self, calls: int, timeout: float | None = None) -> None:
        """Many calls of one item."""
        for _ in range(calls):
            self._ask("quiet", 1, timeout)

    def _busy(self, batches: int, seconds: float) -> None:
        """Workers compute many batches, in so many seconds each: so their rate is known."""
        for _ in range(batches):
            self.clock.advance(seconds)
            self.transport.deliver(*self._of_workers(("done", 0)))
            self._look()

    def _interrupt(self, at: int, event: Event) -> None:
        """A signal handler raises in the middle of what a caller does."""
        try:
            with interrupted_at(at):
                self._happens(event)
        except Interrupted:
            self.was_interrupted = True
            if event[0] == "cancel":  # it may be cancelled or not
                for known in self._one(event[1], "submit", "quiet"):
                    if known.handle.cancelled():
                        known.is_over, known.outcome = True, "cancelled"

    # The owner of the streamer.

    def _scale(self, *numbers: int) -> None:
        self.is_changing = True
        self.wanted = numbers[0] if self.wanted and len(numbers) == 1 else None
        with self._unless_closing():
            self.streamer.scale(numbers[0] if len(numbers) == 1 else (numbers[0], numbers[1]))

    def _restart(self, overlap: Any) -> None:
        self.is_changing = True
        with self._unless_closing(), contextlib.suppress(WorkerStartTimeout, WorkerError):
            self.streamer.restart_workers(0, overlap=overlap)

    def _close(self, drain: bool, timeout: float | None = None) -> None:
        """Begin to close."""
        self.is_closing = True
        self.streamer.close(drain, timeout)

    @contextlib.contextmanager
    def _unless_closing(self) -> Iterator[None]:
        try:
            yield
        except StreamerClosed:
            if not self.is_closing:
                raise Fault("StreamerClosed, though nobody has closed it") from None

    # Workers.

    def _of_workers(self, event: Event) -> list[Any]:
        """What a worker reports; nothing if there is none for it."""
        name, which, *numbers = event
        if name == "ready":
            slots = [slot for slot, state in self.workers.items() if state == "loading"]
            return [self._is_ready(slot) for slot in slots[which : which + 1] or slots[:1]]
        if name == "waits":
            slots = [slot for slot, state in self.workers.items() if state == "loading"]
            return [WorkerWaits(slot, bool(numbers[0])) for slot in slots[which : which + 1]]
        if name == "unready":
            self.wanted = None
            slots = [slot for slot, state in self.workers.items() if state == "loading"]
            return [self._dies(slot, _LOADING[numbers[0]]) for slot in slots[which : which + 1]]
        if name == "lose":
            slots = [slot for slot, state in self.workers.items() if state != "loading"]
            loss = (Loss.CRASHED, Loss.DEVICE_FAILED, Loss.OUTAGE, Loss.CRASHED)[numbers[0]]
            is_known = numbers[0] == 3
            return [self._dies(slot, loss, is_known) for slot in slots[which : which + 1]]
        batches = [(slot, batch) for slot, held in self.held.items() for batch in held]
        if name == "step":
            slots = [slot for slot, held in self.held.items() if held and self.places]
            return [self._steps(slot, numbers[0]) for slot in slots[which : which + 1]]
        if not 0 <= which < len(batches):
            return []
        slot, batch = batches[which]
        if not self.places and batch != next(iter(self.held[slot])):
            return []  # a worker computes its batches in their order
        return [self._is_back(slot, batch, name)]

    def _is_ready(self, slot: int) -> WorkerReady:
        self.workers[slot] = "ready"
        self.held.setdefault(slot, {})
        return WorkerReady(slot, None, self.places, self.resumes)

    def _dies(self, slot: int, loss: Loss, is_known: bool = False) -> Any:
        """It may be known that its first batch was at work, and no other one."""
        self.has_lost = True
        is_loading = self.workers.pop(slot) == "loading"
        held = self.held.pop(slot, {})
        first = next(iter(held), None)
        self.resting = {each for each in self.resting if each[0] != slot}
        if first is None and loss is Loss.DEVICE_FAILED:
            loss = Loss.CRASHED
        is_first = is_known or loss is Loss.DEVICE_FAILED
        if loss is not Loss.OUTAGE:
            for batch, items in held.items():
                if batch == first or not is_first:
                    self.suspects |= {*items}
        return died(
            slot,
            loss,
            first if loss is Loss.DEVICE_FAILED else None,
            frozenset({first} & held.keys()) if is_known else None,
            is_loading=is_loading,
        )

    def _is_back(self, slot: int, batch: int, how: str = "done") -> Any:
        items = self.held[slot].pop(batch)
        self.resting.discard((slot, batch))
        report = BatchReport(batch, slot=slot, duration=sum(self.stages or ()), stages=self.stages)
        if how == "done":
            report.outputs = [*items]
            if self.places and self.calls[items[0].call].kind == "stream":
                report.outputs = [None]
            self._answered(items)
        elif how == "spoil":  # the last result cannot travel
            self.has_failed = True
            report.outputs = [*items[:-1], None]
            report.failures = {len(items) - 1: Failure(ValueError("it cannot travel"))}
            self._answered(items[:-1])
        else:
            self.has_failed = True
            text = f"the model raised in {batch}"
            self.sharing[text] = len({item.call for item in items})
            report.failure = Failure(ValueError(text))
        return StepReport(done=[report], slot=slot) if self.places else report

    def _answered(self, items: list[Item]) -> None:
        for item in items:
            self.calls[item.call].unanswered.discard(item)

    def _steps(self, slot: int, skipped: int) -> StepReport:
        """One step, in which each stream gets an output, but for those whose turn is skipped."""
        outputs = {}
        for batch, (item,) in self.held[slot].items():
            known = self.calls[item.call]
            if known.kind == "stream" and (slot, batch) not in self.resting:
                if skipped & 1:
                    continue
                outputs[batch] = b"%d" % known.made
                known.made += 1
        return StepReport(outputs, size=len(self.held[slot]), slot=slot)

    # -- what the engine did

    def _see(self) -> None:
        self.transport.pump()
        self._look()
        self._see_ends()

    def _look(self) -> None:
        transport = self.transport
        started, transport.started = transport.started, []
        stopped, transport.stopped = transport.stopped, []
        killed, transport.killed = transport.killed, []
        sent, transport.sent = transport.sent, []
        told, transport.told = transport.told, []
        for slot, *_ in started:
            self.workers[slot] = "loading"
        for slot in stopped:
            if self.held.get(slot):
                raise Fault(f"worker {slot} was asked to end, and holds {self.held[slot]}")
            if slot in self.workers:
                self.workers[slot] = "ending"
        for slot in killed:
            if slot in self.workers:
                self.workers[slot] = "ending"
        for slot, batch, payloads in sent:
            if slot in self.workers:  # else it goes down with it
                items = payloads[:1] if self.places else payloads
                self.held[slot][batch] = [*items]
                if not self.places:
                    self._check_batch(slot, items)
                if self.places and len(payloads) > 1:
                    self._resumes(items[0], payloads[1:])
        for slot, what, batch in told:
            if batch not in self.held.get(slot, {}):
                continue
            if what == DROP:
                transport.deliver(self._is_back(slot, batch))
            elif what == HOLD:
                self.resting.add((slot, batch))
            else:
                self.resting.discard((slot, batch))
        if told:
            self._look()  # what workers have answered may have had consequences
        if transport.has_ended:
            self.held.clear(), self.workers.clear(), self.resting.clear()

    def _resumes(self, item: Item, begun: list[bytes]) -> None:
        known = self.calls[item.call]
        if begun != [b"%d" % each for each in range(known.made)]:
            raise Fault(f"{known} goes on after {begun}, and {known.made} outputs were made")

    def _see_ends(self) -> None:
        for known in self.calls:
            if known.ends > 1:
                raise Fault(f"{known} has ended {known.ends} times")
            if known.is_over or known.handle is None:
                continue
            if known.kind == "stream":
                if known.made == known.read:
                    self._take(known, 1)
            elif known.handle.done():
                try:
                    known.outcome = known.handle.result()
                except Exception as error:
                    known.outcome = error
                known.is_over = True
                self._check_outcome(known)

    def _take(self, known: Known, most: int) -> None:
        """Read outputs that are there."""
        stream = known.handle
        while most and stream.is_ready:
            most -= 1
            try:
                output = next(stream)
            except StopIteration:
                known.is_over, known.outcome = True, "done"
                if known.unanswered and not known.is_maybe:
                    raise Fault(f"the end of {known} came before it was made") from None
                return
            except Exception as error:
                known.is_over, known.outcome = True, error
                self._check_outcome(known)
                return
            expected = b"%d" % known.read if self.places else known.items[0]
            if output != expected:
                raise Fault(f"{known} gave {output!r} in the place of {expected!r}")
            known.read += bool(self.places)

    def _check_outcome(self, known: Known) -> None:
        outcome = known.outcome
        if not isinstance(outcome, Exception):
            if outcome != known.items:
                raise Fault(f"{known} has the results {outcome}")
            return
        is_right = {
            PredictTimeout: known.timeout is not None,
            TooLate: known.timeout is not None,
            StreamerClosed: self.is_closing,
            Overloaded: known.kind == "stream",
            SharedBatchError: self.has_failed,
            ValueError: self.has_failed,
        }.get(type(outcome), isinstance(outcome, StreamerError) and self.has_lost)
        if self.sharing.get(str(outcome), 1) > 1:
            raise Fault(f"{known} failed with what may be the error of another call")
        if not is_right or "this is a bug" in str(outcome) or "streamer failed" in str(outcome):
            raise Fault(f"{known} failed with {outcome!r}")

    # -- what must hold

    def _check_batch(self, slot: int, items: list[Item]) -> None:
        """Of a batch that was sent: its cost, and whom it is with."""
        most = self.options.get("max_batch_cost")
        if most is not None and 1 < len(items) > most / max(item.length for item in items):
            raise Fault(f"a batch costs more than {most}: {items}")
        held = [*self.held[slot].values()]
        suspects = [item for each in held for item in each if item in self.suspects]
        if suspects and len(held) > 1:
            raise Fault(f"beside what may have ended a worker, {suspects}, others are sent: {held}")

    def _check_waiting(self) -> None:
        """While a worker is free, less than a batch waits, and not for long."""
        waiting, held_back = self._stats.pending, self.streamer.held_back()
        held = [
            len(self.held[slot]) for slot, state in self.workers.items()
            if state == "ready" and slot not in held_back
        ]  # fmt: skip
        if self.places or not waiting:
            return
        if 0 not in held:
            # Nothing is sent ahead that may run only once, or beside a near deadline, nor until the
            # next batch is back if that has gone; and what runs again goes to idle workers.
            is_plain = not (self.has_failed or self.has_lost or self.is_changing)
            is_timed = any(known.timeout is not None for known in self.calls)
            is_ahead = is_plain and not is_timed and self.options.get("retry", True)
            if 1 in held and is_ahead and waiting >= self.options["batch_size"] * len(held):
                raise Fault(f"workers have one batch each, and {waiting} items wait")
            return
        if waiting >= self.options["batch_size"]:
            raise Fault(f"a worker is free, and {waiting} items wait")
        due = self.transport.due
        if due is None or due > self.clock() + self.options.get("max_latency", 0.1) + 1e-6:
            raise Fault(f"a worker is free, items wait, and it is looked again at {due}")

    def _check_counts(self) -> None:
        """What the streamer says of itself is what there is."""
        stats = self._stats = self.streamer.stats()
        sizes = [len(items) for held in self.held.values() for items in held.values()]
        _same("in flight, items", stats.in_flight, sum(sizes))
        _same("in flight, batches", stats.batches_in_flight, len(sizes))
        running = {item for held in self.held.values() for items in held.values() for item in items}
        least = most = at_least_open = at_most_open = 0
        for known in self.calls:
            if known.is_over and not known.is_maybe:
                continue
            waiting = len(known.unanswered - running)
            most += waiting
            at_most_open += 1
            is_sure = known.handle is not None and not known.is_maybe
            if is_sure and not (known.kind == "stream" and known.handle.is_ready):
                least += waiting
                at_least_open += 1
        _within("waiting, items", stats.pending, least, most)
        is_open = stats.accepted - _ended(stats)
        _within("open, calls", is_open, at_least_open, at_most_open)

    def finish(self) -> None:
        """From now on all is well: everything ends, and the streamer serves, unless it is closed.

        Raises:
            Fault: it does not.
        """
        if any(known.handle is None and not known.is_over for known in self.calls):
            self._collect()
        self.check()
        self._come_to_rest()
        if self.wanted is not None and not self.is_closing and len(self.workers) != self.wanted:
            raise Fault(f"{self.wanted} workers are wanted, and there are {self.workers}")
        if not self.is_closing:
            self._ask("submit", 1)
            fresh = self.calls[-1]
            self.check()
            self._come_to_rest()
            if fresh.outcome != fresh.items:
                raise Fault(f"a fresh call was not answered: {fresh.outcome!r}")
            self._close(True)
            self.check()
        self._come_to_rest(is_closed=True)
        if self._stats.state != "closed" or not self.transport.has_ended:
            raise Fault(f"it is {self._stats.state} after its end")
        with contextlib.suppress(StreamerClosed):
            self.streamer.submit([0])
            raise Fault("a closed streamer accepts calls")

    def _come_to_rest(self, *, is_closed: bool = False) -> None:
        transport = self.transport
        for _ in range(_MOST_ROUNDS):
            for number, known in enumerate(self.calls):
                if known.kind == "predict" and known.handle and not known.is_over:
                    late = known.timeout is not None and self.clock() > known.timeout
                    if late:
                        self._leave(number)
                if known.kind == "stream" and known.handle and not known.is_over:
                    self._take(known, 1000)
            self.check()
            if transport.has_ended or (not is_closed and self._is_at_rest()):
                break
            events: list[Any] = []
            for slot, state in [*self.workers.items()]:
                if state == "loading":
                    events.append(self._is_ready(slot))
                elif state == "ending":
                    events.append(self._dies(slot, Loss.CRASHED))
                else:
                    moving = [each for each in self.held[slot] if (slot, each) not in self.resting]
                    events += [self._is_back(slot, batch) for batch in moving[:1]]
            if events:
                transport.deliver(*events)
            elif transport.due is not None and transport.due < math.inf:
                self.clock.advance(max(0.0, transport.due - self.clock()) + 1e-6)
            else:
                break
        left = [known for known in self.calls if not known.is_over and not known.is_maybe]
        if left:
            raise Fault(f"never ended: {left}")
        stats = self._stats
        _same("in the end waiting, items", stats.pending, 0)
        _same("in the end in flight, items", stats.in_flight, 0)
        _same("in the end in flight, batches", stats.batches_in_flight, 0)
        _same("ended calls", _ended(stats), stats.accepted)

    def _is_at_rest(self) -> bool:
        if any(not known.is_over and not known.is_maybe for known in self.calls):
            return False
        if any(self.held.values()) or self._stats.pending:
            return False
        if self.wanted not in (None, len(self.workers)):  # some start after a pause
            return False
        return bool(self.workers) and all(state == "ready" for state in self.workers.values())

    def _one(self, which: int, *kinds: str) -> Iterator[Known]:
        """The one that is meant of the open calls of these kinds, if there is one."""
        found = [
            known for known in self.calls
            if known.kind in kinds and known.handle is not None and not known.is_over
        ]  # fmt: skip
        if 0 <= which < len(found):
            yield found[which]

    def count_open(self, *kinds: str) -> int:
        """How many calls of these kinds are open."""
        return sum(1 for which in range(len(self.calls)) for _ in self._one(which, *kinds))

    def state(self) -> Any:
        """Equal for two worlds that look the same, and have come there with the same counts."""
        now, due = self.clock(), self.transport.due
        return (
            tuple(
                (
                    known.kind, len(known.items), known.timeout, known.is_over, known.is_maybe,
                    type(known.outcome), known.made, known.read, tuple(sorted(known.unanswered)),
                )
                for known in self.calls
            ),
            tuple(
                (state, tuple(map(tuple, self.held.get(slot, {}).values())))
                for slot, state in self.workers.items()
            ),
            tuple(sorted(self.resting)), self.is_closing, self.transport.has_ended, now,
            None if due is None else due - now, self._stats.gist, self._stats.accepted,
            self._stats.answered,
        )  # fmt: skip

    def dispose(self) -> None:
        """Let go of it, in whatever state it is."""
        if not self.transport.has_ended:
            with contextlib.suppress(Exception):
                self._close(False)
        logging.getLogger("service_streamer").removeHandler(self._errors)


_CALLS = frozenset({"submit", "quiet", "predict"})
#: Events of workers, which may come together.
_OF_WORKERS = frozenset({"waits", "ready", "unready", "lose", "step", "done", "fail", "spoil"})


def _ended(stats: Any) -> int:
    """Calls that are over, of those that were accepted: refused ones are counted apart."""
    return int(stats.answered + stats.failed + stats.cancelled + stats.expired)


def _same(what: str, said: int, there: int) -> None:
    _within(what, said, there, there)


def _within(what: str, said: int, least: int, most: int) -> None:
    if not least <= said <= most:
        there = f"{least}" if least == most else f"{least} to {most}"
        raise Fault(f"{what}: stats() says {said}, and there are {there}")


def run(options: dict[str, Any], events: list[Event]) -> str | None:
    """Let these happen in a new world; what was wrong, or None."""
    return play(World(**options), events)


def play(world: World, events: list[Event]) -> str | None:
    """The same in this world, which is disposed of then."""
    try:
        for number, event in enumerate(events):
            try:
                world.do(event)
            except Fault as fault:
                return f"{fault} (after event {number}, {event})"
            except Exception as error:
                return f"{type(error).__name__}: {error} (in event {number}, {event})"
        try:
            world.finish()
        except Fault as fault:
            return f"{fault} (when all was well again)"
    finally:
        world.dispose()
    return None
