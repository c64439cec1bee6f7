"""Places that have failed are tried again for ever; a renewal may end the old worker first."""

from __future__ import annotations

import math
import threading
from typing import Any

import pytest

import service_streamer.workers.transport as events
from service_streamer import WorkerStartError
from service_streamer.supervision.supervisor import Loss, Supervisor
from service_streamer.workers.protocol import Failure
from stub_engine import StubEngine
from test_supervision import Walk

# -- tried again for ever


@pytest.mark.parametrize("loss", [Loss.START_FAILED, Loss.CRASHED, Loss.NO_MEMORY])
@pytest.mark.parametrize("was_served", [False, True])
def test_a_place_that_has_failed_is_tried_again_for_ever(loss: Loss, was_served: bool) -> None:
    walk = Walk(ready=was_served, max_restarts=0 if was_served else 10)
    pauses: list[float] = []
    slot = 0
    while len(pauses) < 10:
        lost_at = walk.now
        walk.lose(slot, Loss.CRASHED if was_served and not slot else loss)
        if slot + 1 not in walk.places:
            walk.pass_time()
        slot += 1
        if walk.supervisor.failed:
            pauses.append(walk.now - lost_at)
            assert walk.supervisor.is_broken, "though a worker loads"
            assert walk.states() == {"failed": 1}
    assert pauses == pytest.approx([1, 2, 4, 8, 16, 32, 60, 60, 60, 60])
    restarts = walk.supervisor.restarts_at.total()
    walk.ready(slot)
    assert not walk.supervisor.is_broken
    assert walk.states() == {"ready": 1}
    assert walk.supervisor.restarts_at.total() == restarts + 1


@pytest.mark.parametrize("loss", [Loss.START_FAILED, Loss.NO_MEMORY])
def test_with_an_owner_that_ends_a_failed_start_waits_for_another_worker(loss: Loss) -> None:
    walk = Walk(2, ready=False, max_restarts=0)
    walk.supervisor.tries_once = True
    walk.lose(0, loss)
    walk.now = 1e6
    walk.obey()
    assert walk.supervisor.retry_at(0) == math.inf
    assert walk.told() == ["start 0 at 0", "start 1 at 1"]
    walk.ready(1)
    assert walk.told() == ["start 2 at 0"]
    walk.lose(2, loss)
    walk.pass_time()
    assert walk.told() == ["start 3 at 0"], "as ever, now that there is something to serve"


# -- the end


def test_at_the_end_nothing_is_started_while_a_worker_is_there() -> None:
    walk = Walk(3)
    walk.supervisor.is_winding_down = True
    walk.lose(0)
    walk.lose(1)
    assert walk.told() == []
    assert walk.supervisor.due == math.inf
    walk.lose(2)
    assert walk.told() == ["start 3 at 0"], "one, for what is still to be computed"
    walk.lose(3)
    walk.pass_time()
    assert len(walk.told()) == 1


# -- replacing without overlap


def test_without_overlap_the_old_worker_ends_first() -> None:
    walk = Walk(2)
    generation = walk.supervisor.renew(overlap=False)
    walk.obey()
    assert walk.told() == ["retire 0"]
    for old, new in ((0, 2), (1, 3)):
        assert walk.supervisor.vacant(old)
        assert not walk.lose(old)
        assert walk.told() == [f"start {new} at {old}"]
        assert not walk.supervisor.is_renewed(generation)
        walk.ready(new)
        assert walk.told() == (["retire 1"] if not old else [])
    assert walk.supervisor.is_renewed(generation)
    assert walk.supervisor.restarts_at.total() == 0


def test_auto_ends_the_old_ones_first_when_two_do_not_fit() -> None:
    walk = Walk(2)
    generation = walk.supervisor.renew()
    walk.obey()
    walk.lose(2, Loss.NO_MEMORY)
    assert walk.supervisor.aborted != generation
    assert walk.told() == ["start 2 at 0", "retire 0"]
    walk.supervisor.vacant(0)
    walk.lose(0)
    walk.ready(3)
    assert walk.told() == ["start 3 at 0", "retire 1"]
    walk.supervisor.vacant(1)
    walk.lose(1)
    walk.ready(4)
    assert walk.supervisor.is_renewed(generation)


@pytest.mark.parametrize(("worker_num", "overlap"), [(1, "auto"), (2, True)])
def test_the_only_worker_is_never_ended_first_unasked(worker_num: int, overlap: str) -> None:
    walk = Walk(worker_num)
    generation = walk.supervisor.renew(overlap)  # type: ignore[arg-type]
    walk.obey()
    walk.lose(worker_num, Loss.NO_MEMORY)
    assert walk.supervisor.aborted == generation
    assert walk.states() == {"ready": worker_num}


# -- the time to load


def test_the_time_to_load_is_learned() -> None:
    supervisor = Supervisor(2, "auto")
    supervisor.orders(0.0)
    assert supervisor.due == 3600.0
    supervisor.ready(0, 10.0)
    supervisor.lost(0, Loss.CRASHED, 20.0)
    supervisor.orders(20.0)
    assert supervisor.due == 620.0, "the least"
    supervisor.ready(2, 30.0)
    supervisor.orders(30.0)
    assert supervisor.due == 3600.0, "as it was when it started"
    supervisor.ready(1, 300.0)
    supervisor.lost(1, Loss.CRASHED, 320.0)
    supervisor.orders(320.0)
    assert supervisor.due == 3320.0


def test_nobody_is_ended_since_this_process_was_held_up() -> None:
    supervisor = Supervisor(1, 10.0)
    supervisor.orders(0.0)
    assert supervisor.orders(16.0).kill == []
    supervisor.ready(0, 16.0)
    supervisor.renew()
    supervisor.orders(16.0)
    assert supervisor.due == 26.0
    assert supervisor.orders(32.0).kill == []
    assert supervisor.due == 37.0
    assert supervisor.orders(37.0).kill == [(1, 10.0)]


# -- the engine


def test_an_owner_that_ends_is_not_told_of_another_try(caplog: pytest.LogCaptureFixture) -> None:
    two = StubEngine(2)
    two.engine.try_start_once()
    for slot in (0, 1):
        two.cannot_start(slot, f"worker {slot} cannot load the model")
    with pytest.raises(WorkerStartError):
        two.engine.wait_serving(None)
    two.engine.close(drain=False, timeout=None)
    assert caplog.messages == [
        "worker 0 cannot load the model; it is tried again when another worker is ready",
        "worker 1 cannot load the model",
    ]


def failed_restart(setup: StubEngine, overlap: Any) -> str:
    """Restart the only worker; the new one has not enough memory, and this is the error."""
    setup.transport.ready(0)
    raised: list[BaseException] = []

    def restart() -> None:
        try:
            setup.engine.restart_workers(None, overlap)
        except WorkerStartError as error:
            raised.append(error)

    thread = threading.Thread(target=restart)
    thread.start()
    if overlap is False:
        setup.transport.await_that(lambda: setup.transport.stopped == [0])
        setup.transport.lose(0)
    setup.transport.await_that(lambda: len(setup.transport.started) == 2)
    failure = Failure(WorkerStartError("CUDA out of memory"))
    setup.transport.deliver(events.WorkerDied(1, failure, Loss.NO_MEMORY))
    thread.join()
    return str(raised[0])


def test_new_weights_that_do_not_fit_at_all_are_no_reason_for_advice(one: StubEngine) -> None:
    assert failed_restart(one, overlap=False) == "CUDA out of memory"
    one.transport.await_that(lambda: len(one.transport.started) == 3)


def test_a_lone_worker_whose_successor_does_not_fit_stays_and_the_error_says_what_to_do(
    one: StubEngine,
) -> None:
    text = failed_restart(one, overlap="auto")
    assert "CUDA out of memory; two workers do not fit" in text
    assert "overlap=False" in text
    future = one.submit("a")
    one.transport.echo()
    assert future.result(0) == ["a"]
