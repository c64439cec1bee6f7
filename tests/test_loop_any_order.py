"""The loop with its batcher and supervisor, over workers to which anything may happen."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

from service_streamer import errors
from service_streamer.batching.batcher import Batcher
from service_streamer.engine.core import Core, EngineState
from service_streamer.engine.loop import Loop, send
from service_streamer.observe.record import Call
from service_streamer.supervision.autoscaling import Autoscaling
from service_streamer.supervision.health import BatchBound
from service_streamer.supervision.supervisor import Loss, RestartPolicy, Supervisor, WorkerState
from service_streamer.workers.protocol import Failure
from service_streamer.workers.transport import (
    BatchReport,
    WorkerDied,
    WorkerEvent,
    WorkerReady,
)

START_FAILED = Failure(errors.WorkerStartError("no"))
DIED = Failure(errors.WorkerLost("died"))


class Reply:
    def __init__(self) -> None:
        self.outcomes = 0

    def complete(self, _: object) -> None:
        self.outcomes += 1

    def fail(self, failure: Failure) -> None:
        failure.exception()
        self.outcomes += 1


class Worker:
    def __init__(self) -> None:
        self.state = "loading"
        self.was_ready = self.is_sick = False
        self.batches: dict[int, int] = {}


class Workers:
    """A transport; what becomes of its workers is random, but nothing bad while they are well."""

    def __init__(self, rng: random.Random, sick: float) -> None:
        self._rng, self._sick = rng, sick
        self.workers: dict[int, Worker] = {}

    def start(self, slot: int, *_: object) -> None:
        self.workers[slot] = Worker()

    def send(self, slot: int, batch_id: int, payloads: list[Any]) -> None:
        if slot in self.workers:
            assert self.workers[slot].state in ("ready", "killed")
            self.workers[slot].batches[batch_id] = len(payloads)

    def stop(self, slot: int) -> None:
        if slot in self.workers:
            assert not self.workers[slot].batches
            self.workers[slot].state = "stopped"

    def kill(self, slot: int, _: str) -> None:
        if slot in self.workers:
            self.workers[slot].state = "killed"

    def events(self, *, well: bool) -> list[WorkerEvent]:
        events = [self._event(slot, worker, well) for slot, worker in [*self.workers.items()]]
        told = [event for event in events if event is not None]
        self._rng.shuffle(told)
        return told

    def _event(self, slot: int, worker: Worker, well: bool) -> WorkerEvent | None:
        chance = 0.0 if well else self._rng.random()
        worker.is_sick &= not well
        if worker.state == "loading" and chance < 0.4:
            worker.state, worker.was_ready = "ready", True
            worker.is_sick = not well and self._rng.random() < self._sick
            return WorkerReady(slot)
        if worker.state == "loading" and chance < 0.5:
            del self.workers[slot]
            losses = [Loss.START_FAILED, Loss.DIED_STARTING, Loss.NO_MEMORY]
            return WorkerDied(slot, START_FAILED, self._rng.choice(losses))
        if worker.state in ("stopped", "killed") and chance < 0.5:
            del self.workers[slot]
            loss = Loss.CRASHED if worker.was_ready else Loss.DIED_STARTING
            return WorkerDied(slot, DIED, loss)
        if worker.state != "ready":
            return None
        batch_id = next(iter(worker.batches), None)
        if batch_id is not None and chance < 0.6:
            size = worker.batches.pop(batch_id)
            if worker.is_sick or (not well and self._rng.random() < 0.2):
                return BatchReport(batch_id, failure=Failure(ValueError("bad")), slot=slot)
            return BatchReport(batch_id, [None] * size, duration=0.01, slot=slot)
        if 0.6 <= chance < 0.67:
            del self.workers[slot]
            is_device = batch_id is not None and chance < 0.63
            return WorkerDied(
                slot, DIED, Loss.DEVICE_FAILED if is_device else Loss.CRASHED,
                batch_id if is_device else None,
            )  # fmt: skip
        return None


@pytest.mark.parametrize("seed", range(60))
def test_every_call_is_answered_once_and_every_worker_is_ready_in_the_end(seed: int) -> None:
    rng = random.Random(seed)
    now = 0.0
    retry = rng.random() < 0.8
    batcher = Batcher(
        batch_size=4,
        max_latency=0.01,
        max_attempts=rng.choice([2, 3]) if retry else 1,
        isolate_errors=retry and rng.random() < 0.8,
        batch_timeout=rng.choice([BatchBound(20.0), BatchBound(fixed=5.0)]),
        expired=Failure(errors.PredictTimeout("late")),
    )
    policy = RestartPolicy(
        max_restarts=rng.choice([0, 2, 10]), start_timeout=rng.choice([None, 30.0])
    )
    supervisor = Supervisor(rng.randint(1, 4), policy)
    most = supervisor.wanted + rng.choice([0, 3])
    scaling = Autoscaling(supervisor.wanted, most, rng.choice([None, 0.01]))
    core = Core(batcher, supervisor, scaling=scaling, clock=lambda: now, jitter=rng.random)
    workers: Any = Workers(rng, sick=rng.choice([0.0, 0.3]))
    loop = Loop(core, workers, hang="{:g}", slow_start="{:g}")
    replies: list[Reply] = []

    def submit() -> None:
        reply = Reply()
        call = Call([0] * rng.choice([1, 1, 3, 9]), reply)
        call.deadline = now + rng.choice([math.inf, 1.0, 30.0])
        replies.append(reply)
        with core.lock:
            actions = batcher.call_submitted(call, now, is_watched=True)
            core.queue(actions.batches)
            core.undone.append(actions)
        send(core, workers)

    for slot, _ in supervisor.orders(now).start:
        workers.start(slot)
    for _ in range(120):
        now += rng.choice([0.0, 0.001, 0.1, 1.0, 10.0])
        if core.refusal is None and rng.random() < 0.5:
            submit()
        if rng.random() < 0.06:
            with core.lock:
                core.revive()
                if rng.random() < 0.5:
                    supervisor.renew(rng.choice([True, False, "auto"]))
                else:
                    least = rng.randint(1, 4)
                    core.set_bounds(least, least + rng.choice([0, 3]))
        loop._handle(workers.events(well=False))
        batcher.check_invariants()
    is_draining = rng.random() < 0.3
    if is_draining:
        with core.lock:
            core.begin_drain(math.inf)
    for _ in range(3_000):  # all is well from now on
        timeout = loop._handle(workers.events(well=True))
        batcher.check_invariants()
        if timeout is None:
            break
        states = {state for _, _, state in supervisor.workers()}
        is_at_rest = states == {WorkerState.READY}  # none has still to end
        if batcher.is_empty and is_at_rest and not batcher.health.trials and not is_draining:
            break
        now += 0.01 if timeout == math.inf else min(timeout, 5.0)
    else:
        raise AssertionError("it never comes to rest")
    assert [reply.outcomes for reply in replies] == [1] * len(replies)
    if not is_draining:
        assert core.state is EngineState.RUNNING
        assert not supervisor.failed
        assert batcher._slots.taking == len(workers.workers), "one is held back for ever"
