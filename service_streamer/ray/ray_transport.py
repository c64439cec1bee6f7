"""Workers that are actors of a Ray cluster: one call to an actor for each batch.

    driver                                              actor (see actor.py)
    ------                                              -----
    encode (caller)  items -> bytes, buffers
    send (any thread)      one object ── compute ─────▶ predict
    wait (loop thread)     one object ◀── its result ──
    decode (caller)  bytes, buffers -> results

Ray finds a place for each worker and says when it is lost. It computes nothing twice: what was lost
is the engine's to compute again, since Ray would repeat a batch that has killed an actor. Ray calls
a function for each result, in a thread of its own, and that only puts it into a queue. So nothing
polls, and no thread waits for a call.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from ..errors import WorkerLost, WorkerStartError
from ..gpu.accelerators import allocator_variables
from ..gpu.places import Place
from ..observe.record import BatchReport, StepReport
from ..options.checks import Device
from ..options.table import ResourceOptions
from ..reporting import quiet_log, summary
from ..supervision.supervisor import Loss
from ..workers.codec import ByValue, Codec, encode_spec
from ..workers.model_spec import ModelSpec
from ..workers.protocol import Failure, WorkerReady
from ..workers.transport import WorkerDied, WorkerEvent, WorkerTransport, WorkerWaits
from ..workers.worker_main import Boot
from .cluster import Actor, Cluster, LeftCluster, verdict
from .frames import frame, keep
from .known_actor import KnownActor
from .losses import Verdict
from .placing import Unplaced, why_not_placed
from .times import times

_log = quiet_log(__name__)

#: So often it is asked whether a worker that replaces another has a place, if there is room for
#: both: a busy host takes more than ``times.placing`` to start a process.
_LOOKS = 6


class RayTransport(WorkerTransport[KnownActor]):
    """One actor per slot.

    Args:
        spec: what the workers load. If another process has pickled it, items come pickled from
            there as well, and outputs are handed out so.

    Raises:
        TypeError: the model cannot be pickled.
    """

    def __init__(
        self,
        cluster: Cluster,
        spec: ModelSpec | bytes,
        request: ResourceOptions,
    ) -> None:
        super().__init__()
        self._cluster = cluster
        self._request = request
        self._start_actor = cluster.workers(request)
        if isinstance(spec, bytes):
            self._spec = cluster.put(spec)
        else:
            by_value = RayByValue()
            self._spec = cluster.put(encode_spec(spec, by_value))
            self.codec = Codec(keep, by_value)
        sharers = (math.floor(1 / request.num_gpus + 1e-9),) if 0 < request.num_gpus < 1 else ()
        # Ray leaves a worker without a GPU all those of its node.
        hidden = {"CUDA_VISIBLE_DEVICES": ""}
        variables = allocator_variables({}) if request.num_gpus else hidden
        gpu_id = 0 if request.num_gpus else None
        self._boot = Boot(None, Place(None, gpu_id, variables, sharers=sharers))
        self._happened: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._events: list[WorkerEvent] = []
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._is_closed = False
        self._has_left = False
        left = functools.partial(self._happened.put, self._disconnected)
        self._stop_watching = cluster.when_left(left)

    def device(self, place: int) -> Device | None:
        """The GPUs that Ray has given to it, with their host; None if it has none, or no place."""
        for worker in [*self._workers.values()]:
            if worker.place == place and worker.gpus:
                return f"{worker.host}:{worker.gpus}"
        return None

    def start(self, slot: int, place: int, worker_num: int) -> None:  # noqa: ARG002 - Ray places it
        worker = self._workers[slot] = KnownActor(slot, place)
        if self._has_left:  # it may seem to be connected until it has
            self._happened.put(functools.partial(self._asked, worker, None, LeftCluster()))
            return

        def start() -> Actor:
            actor = self._start_actor(self._boot, self._spec)
            worker.made(actor)  # here: after ``close`` no loop looks at what comes
            return actor

        self._aside(start, functools.partial(self._asked, worker))
        self._at(times.placing, functools.partial(self._ask_for_place, worker, _LOOKS))

    def _send_batch(
        self, worker: KnownActor, batch_id: int, payloads: list[Any], calls: int | list[int]
    ) -> None:
        worker.unanswered[batch_id] = 1 if calls is True else len(payloads)
        message = (batch_id, payloads, None, calls)
        if worker.has_steps:
            self._take(worker, message)
        else:
            done = functools.partial(self._answered, batch_id)
            self._call(worker, done, "compute", frame(message))
        worker.last_sent = batch_id

    def _send_order(self, worker: KnownActor, order: tuple[int, list[int]]) -> None:
        self._take(worker, order)

    def wait(self, timeout: float | None) -> list[WorkerEvent]:
        if self._timers:
            left = max(0.0, self._timers[0][0] - time.monotonic())
            timeout = left if timeout is None else min(timeout, left)
        try:
            happened = self._happened.get(timeout=timeout)
            while True:
                if happened is not None:
                    happened()
                happened = self._happened.get_nowait()
        except queue.Empty:
            pass
        now = time.monotonic()
        while self._timers and self._timers[0][0] <= now:
            heapq.heappop(self._timers)[2]()
        events, self._events = self._events, []
        return events

    def wakeup(self) -> None:
        self._happened.put(None)

    def stop(self, slot: int) -> None:
        if slot in self._workers:
            self._end(self._workers[slot], times.stop)

    def kill(self, slot: int, why: str) -> None:
        worker = self._workers.get(slot)
        if worker is None or worker.killed_for is not None:
            return
        worker.killed_for = why
        if not worker.is_placed:
            self._end_unplaced(worker, why)
            return

        def told(_: KnownActor, stacks: Any, __: BaseException | None) -> None:
            worker.stacks = stacks or ""
            worker.kill()

        self._call(worker, told, "stacks", group="control")
        self._at(times.stacks, functools.partial(self._kill, worker))

    def when_exiting(self, then: Callable[[], None]) -> Callable[[], object]:
        cancel, forget = super().when_exiting(then), self._cluster.when_exiting(then)

        def both() -> None:
            cancel()
            forget()

        return both

    def close(self, grace: float) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        for worker in [*self._workers.values()]:
            self._end(worker, grace)
        while self._workers:
            self.wait(None)  # what still comes back has no caller any more
        self._timers.clear()
        self._stop_watching()

    # -- calls; ``done`` runs in the loop's thread, while the worker is there

    def _call(
        self,
        worker: KnownActor,
        done: Callable[[KnownActor, Any, BaseException | None], None],
        method: str,
        *arguments: Any,
        group: str = "",
    ) -> None:
        actor = worker.actor
        if actor is None:  # it was lost meanwhile
            return
        with worker.lock:
            worker.open_calls += 1

        def happened(result: Any, error: BaseException | None) -> None:
            self._happened.put(functools.partial(self._returned, worker, done, result, error))

        actor.call(happened, method, *arguments, group=group)

    def _returned(
        self,
        worker: KnownActor,
        done: Callable[[KnownActor, Any, BaseException | None], None],
        result: Any,
        error: BaseException | None,
    ) -> None:
        with worker.lock:
            worker.open_calls -= 1
        if worker.is_gone:
            return
        if error is not None:
            found = verdict(error)
            if found.is_gone:
                self._lose(worker, found, error)
        try:
            done(worker, result, error)
        except Exception as broken:  # what it has sent is no message, or not allowed
            self._give_up(worker, broken)
        self._look(worker)

    def _take(self, worker: KnownActor, message: Any) -> None:
        """Have a worker of a model of steps take a message, after those before it."""

        def taken(_: KnownActor, __: Any, error: BaseException | None) -> None:
            if error is not None:  # it would wait for this one for ever, with all that come later
                self._lose(worker, verdict(error), error)

        with worker.lock:
            number, worker.taken = worker.taken, worker.taken + 1
        self._call(worker, taken, "take", number, frame(message), group="intake")

    # -- what comes of them

    def _asked(self, worker: KnownActor, actor: Actor | None, error: BaseException | None) -> None:
        """Ray has taken it up, and looks for a place for it; or it refuses to."""
        if actor is None:
            if not worker.is_gone:
                failed = WorkerStartError(f"{worker} could not be started: {error}")
                is_over = isinstance(error, LeftCluster)
                loss = Loss.NEVER_AGAIN if is_over else Loss.START_FAILED
                cause = None if error is None else Failure(error.with_traceback(None))
                self._tell(worker, WorkerDied(worker.slot, Failure(failed, cause=cause), loss))
        elif not worker.is_gone:
            worker.actor = actor
            self._call(worker, self._placed, "where", group="control")
            self._call(worker, self._ended, "watch", group="control")
            self._call(worker, self._started, "start")

    def _placed(self, worker: KnownActor, result: Any, error: BaseException | None) -> None:
        if error is None:
            worker.host, worker.pid, worker.gpus = result
            worker.is_placed = True
            if worker.is_waiting:
                worker.is_waiting = False
                self._tell(worker, WorkerWaits(worker.slot, has_place=True))

    def _started(self, worker: KnownActor, result: Any, error: BaseException | None) -> None:
        if error is not None:
            return  # it has ended: ``watch`` says how
        whereabouts, answer = result
        self._placed(worker, whereabouts, None)
        if answer is None:
            return
        for event in worker.heard(answer):
            if isinstance(event, WorkerReady) and event.places:
                self._call(worker, self._reported, "reports", group="control")
            self._tell(worker, event)

    def _answered(
        self, batch_id: int, worker: KnownActor, result: Any, error: BaseException | None
    ) -> None:
        if error is not None:
            self._refuse(worker, batch_id, error)
        elif result is not None:
            events = self._take_in(worker, result)
            if events and type(events[0]) is StepReport:  # it only says that it has not hung
                done = functools.partial(self._answered, batch_id)
                self._call(worker, done, "answer")

    def _reported(self, worker: KnownActor, result: Any, error: BaseException | None) -> None:
        if error is None and result is not None:
            self._call(worker, self._reported, "reports", group="control")
            for each in result:
                self._take_in(worker, each)

    def _take_in(self, worker: KnownActor, result: Any) -> Sequence[WorkerEvent]:
        events = worker.heard(result)
        if not events:  # its GPU has failed, so it ends by itself
            self._end(worker, times.stop)
        for event in events:
            self._tell(worker, event)
        return events

    def _refuse(self, worker: KnownActor, batch_id: int, error: BaseException) -> None:
        """Ray did not take the batch: it fails, or smaller parts of it are sent."""
        found = verdict(error)
        if found.is_refused and worker.unanswered.pop(batch_id, None) is not None:
            refused = WorkerLost(f"the batch could not be sent to {worker}: {found.end}")
            refused.__cause__ = error.__cause__
            self._tell(worker, BatchReport(batch_id, failure=Failure(refused), slot=worker.slot))

    def _ended(self, worker: KnownActor, result: Any, error: BaseException | None) -> None:
        """The worker's thread has ended, or its process has."""
        if error is None:
            worker.exit_code = result
        worker.has_ended = True

    def _tell(self, worker: KnownActor, event: WorkerEvent) -> None:
        self._events.append(event)
        if type(event) is WorkerDied:
            self._forget(worker)

    # -- the end of a worker

    def _end(self, worker: KnownActor, grace: float) -> None:
        """Ask it to end, and see to it that it does."""
        if worker.is_ready:
            self._call(worker, lambda *_: None, "stop", group="control")
            self._at(grace, functools.partial(self._kill, worker))
        else:
            self._kill(worker)

    def _kill(self, worker: KnownActor) -> None:
        if worker.actor is None:
            self._gone(worker)
        elif not worker.is_gone:
            if worker.kill() or not self._is_closed:
                # Ray tells it as a failure of the calls that are open, if it can be reached.
                self._at(times.last_calls, functools.partial(self._gone, worker))
            else:  # the interpreter ends, and the actor with it
                self._gone(worker)

    def _lose(self, worker: KnownActor, found: Verdict, error: BaseException) -> None:
        """A call failed. What it has answered may still be on its way."""
        if worker.loss is None:
            worker.loss = found, error
            self._kill(worker)  # it may only be unreachable, and would hold its place for ever

    def _disconnected(self) -> None:
        """This process has left the cluster: no call comes back, and Ray ends the actors."""
        self._has_left = True
        error = LeftCluster()
        for worker in [*self._workers.values()]:
            worker.lose_contact()
            worker.loss = worker.loss or (verdict(error), error)
            self._gone(worker)

    def _give_up(self, worker: KnownActor, error: Exception) -> None:
        """What the worker has sent cannot be read; the rest makes no sense then."""
        worker.note_breach(error)
        self._kill(worker)

    def _look(self, worker: KnownActor) -> None:
        """Whether it has ended, and all its calls have come back."""
        if worker.has_ended and not worker.open_calls:
            self._gone(worker)

    def _gone(self, worker: KnownActor) -> None:
        """Say that it is lost; nothing more of it counts."""
        if worker.is_gone:
            return
        self._forget(worker)
        self._events.append(worker.died())

    def _forget(self, worker: KnownActor) -> None:
        self._workers.pop(worker.slot, None)
        worker.forget()

    # -- a worker without a place

    def _ask_for_place(self, worker: KnownActor, looks: int) -> None:
        """Say what is missing if it has no place yet. ``looks`` are left, with this one."""
        if not (worker.is_placed or worker.is_gone):
            self._find_out(lambda found: self._say(worker, found, looks))

    def _say(self, worker: KnownActor, found: Unplaced, looks: int) -> None:
        if worker.is_placed or worker.is_gone or self._is_closed:
            return
        others = self._workers.values()
        if any(each.is_ready and each.place == worker.place for each in others):
            if found.is_room and looks > 1:
                self._at(times.placing, functools.partial(self._ask_for_place, worker, looks - 1))
                return
            # It is to replace that one, which may hold what it waits for: so it must go first.
            error = WorkerStartError(
                f"{worker} has no place beside the one that it replaces: {found.why}"
            )
            self._tell(worker, WorkerDied(worker.slot, Failure(error), Loss.NO_MEMORY))
        else:
            worker.is_waiting = True
            self._tell(worker, WorkerWaits(worker.slot))
            _log(
                logging.WARNING,
                "%s has no place on the cluster yet: %s. It is started when there is one; "
                "until then the others serve",
                worker, found.why,
            )  # fmt: skip

    def _end_unplaced(self, worker: KnownActor, why: str) -> None:
        def found(unplaced: Unplaced) -> None:
            if not worker.is_gone:
                worker.killed_for = f"{why}, for lack of a place: {unplaced.why}"
                self._gone(worker)

        self._find_out(found)
        self._at(times.last_calls, functools.partial(self._gone, worker))

    def _find_out(self, then: Callable[[Unplaced], None]) -> None:
        """What is missing for a worker."""

        def found(nodes: Any, error: BaseException | None) -> None:
            if error is None:
                then(why_not_placed(self._request.amounts, *nodes))
            else:
                why = f"the cluster cannot be asked why ({summary(error)})"
                then(Unplaced(why, is_room=False))

        self._aside(self._cluster.nodes, found)

    def _aside(
        self, ask: Callable[[], Any], then: Callable[[Any, BaseException | None], None]
    ) -> None:
        """Ask the cluster in a thread, since it may not answer for a while.

        That no thread can be started, as at exit in Python 3.12, is an answer, too.
        """

        def run() -> None:
            result, error = None, None
            try:
                result = ask()
            except Exception as raised:
                error = raised
            self._happened.put(functools.partial(then, result, error))

        name = "service_streamer Ray question"
        try:
            threading.Thread(target=run, name=name, daemon=True).start()
        except RuntimeError as error:
            self._happened.put(functools.partial(then, None, error))

    def _at(self, delay: float, then: Callable[[], None]) -> None:
        """Do it after so many seconds; if that is infinite, never."""
        if delay < math.inf:
            entry = time.monotonic() + delay, next(self._order), then
            heapq.heappush(self._timers, entry)


class RayByValue(ByValue):
    """The main module of this process is not that of an actor."""

    @property
    def is_needed(self) -> bool:
        return True

    def is_known(self, thing: Any) -> bool:
        return getattr(thing, "__module__", None) != "__main__" and super().is_known(thing)
