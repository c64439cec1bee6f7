"""Who is started, retired and given up, and when: walks of a supervisor without any workers."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest

from service_streamer.supervision.supervisor import Fate, Loss, Supervisor, backoff


class Walk:
    """A supervisor whose orders are carried out at once; workers are ready when told so."""

    def __init__(
        self,
        worker_num: int = 1,
        *,
        ready: bool = True,
        max_restarts: int = 10,
        start_timeout: float | None = None,
    ) -> None:
        self.supervisor = Supervisor(worker_num, start_timeout)
        self.supervisor.max_restarts, self.supervisor.jitter = max_restarts, lambda: 0.0
        self.now = 0.0
        self.places: dict[int, int] = {}
        self.log: list[str] = []
        self.obey()
        if ready:
            for slot in list(self.places):
                self.ready(slot)
            self.log.clear()

    def obey(self) -> None:
        while self.supervisor.due <= self.now:
            orders = self.supervisor.orders(self.now)
            for slot, place in orders.start:
                self.places[slot] = place
                self.log.append(f"start {slot} at {place}")
            self.log += [f"keep {slot}" for slot in orders.keep]
            self.log += [f"retire {slot}" for slot in orders.retire]
            self.log += [f"stop {slot}" for slot in orders.stop]
            self.log += [f"kill {slot}" for slot, _ in orders.kill]

    def do(self, what: str, *arguments: Any, **named: Any) -> Any:
        """Tell the supervisor something, and carry out what it orders then."""
        result = getattr(self.supervisor, what)(*arguments, **named)
        self.obey()
        return result

    def ready(self, slot: int) -> None:
        self.do("ready", slot, self.now)

    def waits(self, slot: int, *, has_place: bool = False) -> None:
        """For its place on a cluster."""
        self.do("waits", slot, has_place=has_place)

    def retires(self, slot: int) -> None:
        """A worker has no more batches, and ends."""
        assert self.supervisor.vacant(slot)
        assert not self.lose(slot), "it was wanted"

    def lose(self, slot: int, loss: Loss = Loss.CRASHED, **more: Any) -> bool:
        """Whether that was not wanted."""
        del self.places[slot]
        fate = self.do("lost", slot, loss, self.now, **more)
        return fate is not Fate.EXPECTED

    def pass_time(self) -> None:
        self.now = self.supervisor.due
        self.obey()

    def states(self) -> dict[str, int]:
        return Counter(state.value for _, _, state in self.supervisor.workers())

    def told(self) -> list[str]:
        log, self.log = self.log, []
        return log


def test_all_are_started_and_nothing_is_due_then() -> None:
    walk = Walk(3, ready=False)
    assert walk.told() == ["start 0 at 0", "start 1 at 1", "start 2 at 2"]
    assert walk.states() == {"starting": 3}
    assert walk.supervisor.is_starting
    for slot in range(3):
        assert not walk.supervisor.is_ready
        walk.ready(slot)
    assert walk.supervisor.is_ready
    assert walk.supervisor.due == math.inf
    assert walk.told() == []


def test_pauses_double_while_workers_die_without_having_done_anything() -> None:
    walk = Walk(max_restarts=9)
    pauses = []
    for slot in range(10):
        died_at = walk.now
        walk.lose(slot)
        if walk.supervisor.failed:
            break
        if slot not in walk.places and slot + 1 not in walk.places:
            assert walk.states() == {"backing off": 1}
            walk.pass_time()
        pauses.append(walk.now - died_at)
        walk.ready(slot + 1)
    assert pauses == pytest.approx([0, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5, 5])
    assert walk.states() == {"failed": 1}
    assert walk.supervisor.is_broken


def test_successors_that_are_condemned_one_after_the_other_have_pauses() -> None:
    walk = Walk()
    pauses = []
    for slot in range(5):
        walk.do("condemn", slot, walk.now)
        walk.retires(slot)
        ended_at = walk.now
        if slot + 1 not in walk.places:
            walk.pass_time()
        pauses.append(walk.now - ended_at)
        walk.ready(slot + 1)
    assert pauses == pytest.approx([0.0, 0.1, 0.2, 0.4, 0.8])
    assert not walk.supervisor.failed


@pytest.mark.parametrize(("jitter", "pause"), [(0.0, 0.8), (0.5, 0.6), (1.0, 0.4)])
def test_jitter_shortens_pauses(jitter: float, pause: float) -> None:
    assert backoff(3, 0.1, 5.0, jitter) == pytest.approx(pause)


@pytest.mark.parametrize("how", ["progress", "life"])
def test_progress_or_a_long_life_ends_the_row(how: str) -> None:
    walk = Walk(max_restarts=2)
    for slot in range(50):
        if how == "life":
            walk.now += 60.0
        walk.lose(slot, ends_row=how == "progress")
        assert walk.places == {slot + 1: 0}, "started at once"
        walk.ready(slot + 1)
    assert walk.supervisor.restarts_at.total() == 50


@pytest.mark.parametrize("loss", [Loss.CRASHED, Loss.START_FAILED])
def test_one_that_dies_while_loading_is_tried_three_times(loss: Loss) -> None:
    walk = Walk(ready=False)
    walk.lose(0)
    walk.lose(1)
    walk.pass_time()
    assert not walk.supervisor.failed
    walk.lose(2, loss)
    assert walk.supervisor.is_broken
    assert not walk.supervisor.was_served
    assert walk.supervisor.due == walk.now + 1.0


# -- replacing


def test_a_condemned_worker_ends_before_the_next_one_starts() -> None:
    walk = Walk(2)
    assert walk.do("condemn", 1, walk.now, ends_row=True)
    assert not walk.do("condemn", 1, walk.now)
    assert walk.told() == ["retire 1"]
    walk.retires(1)
    assert walk.told() == ["start 2 at 1"]
    assert walk.supervisor.restarts_at == {1: 1}


@pytest.mark.parametrize("how", [("renew", False), ("condemn", 0, 0.0)])
def test_a_successor_that_cannot_load_its_model_is_tried_as_after_any_loss(how: Any) -> None:
    walk = Walk()
    walk.do(*how)
    walk.retires(0)
    for slot in range(1, 12):
        assert not walk.supervisor.failed
        walk.lose(slot, Loss.START_FAILED)
        walk.now += 5.0
        walk.obey()
    assert walk.supervisor.is_broken


def test_renewal_goes_one_by_one_and_the_new_is_ready_before_the_old_ends() -> None:
    walk = Walk(2)
    generation = walk.do("renew")
    assert walk.told() == ["start 2 at 0"]
    walk.ready(2)
    assert walk.told() == ["retire 0"]
    assert walk.supervisor.vacant(0)
    assert not walk.supervisor.vacant(0)
    assert not walk.lose(0), "it was wanted"
    assert walk.told() == ["start 3 at 1"]
    assert not walk.supervisor.is_renewed(generation)
    walk.ready(3)
    walk.retires(1)
    assert walk.supervisor.is_renewed(generation)
    assert walk.supervisor.restarts_at.total() == 0


def test_of_two_renewals_at_a_time_the_one_decides_that_takes_less_memory() -> None:
    walk = Walk(2)
    walk.do("renew", overlap=False)
    walk.retires(0)
    walk.do("renew", overlap=True)
    walk.ready(2)
    assert walk.told() == ["retire 0", "start 2 at 0", "retire 2"]


def test_a_renewal_joins_none_whose_last_old_worker_only_finishes_what_it_holds() -> None:
    walk = Walk(2)
    walk.do("renew", overlap=False)
    walk.retires(0)
    walk.ready(2)
    walk.do("renew", overlap=True)
    walk.retires(1)
    walk.ready(3)
    assert walk.told()[2:] == ["retire 1", "start 3 at 1", "start 4 at 0"]


def test_a_renewal_joins_none_whose_last_old_worker_only_stands_in() -> None:
    walk = Walk(2)
    walk.lose(0)
    walk.lose(2)
    walk.supervisor.scale(1)
    walk.do("renew", overlap=False)
    walk.pass_time()
    walk.do("renew", overlap=True)
    walk.ready(3)
    walk.retires(1)
    assert walk.told()[-3:] == ["start 3 at 0", "retire 1", "start 4 at 0"]


def test_renewal_gives_failed_places_another_chance() -> None:
    walk = Walk(max_restarts=0)
    walk.lose(0)
    walk.do("renew")
    assert walk.told() == ["start 1 at 0"]
    assert not walk.supervisor.is_broken


# -- renewal beside workers that wait for a place on a cluster


def test_renewal_goes_on_beside_one_that_waits_for_its_place() -> None:
    walk = Walk(2, ready=False)
    walk.ready(0)
    generation = walk.do("renew")
    assert walk.told()[2:] == [], "that one may be loading, so far as is known"
    walk.waits(1)
    assert walk.told() == ["start 2 at 0"]
    assert not walk.supervisor.is_renewed(generation)
    walk.ready(2)
    walk.supervisor.vacant(0)
    assert not walk.supervisor.is_renewed(generation)
    walk.lose(0)
    assert walk.supervisor.is_renewed(generation)
    walk.waits(1, has_place=True)
    assert not walk.supervisor.is_renewed(generation), "it loads now"
    walk.ready(1)
    assert walk.told() == ["retire 0"], "it is new, and stays"
    assert walk.supervisor.is_renewed(generation)


def test_a_renewal_waits_for_the_successor_of_one_that_it_has_ended() -> None:
    walk = Walk(2)
    generation = walk.do("renew", overlap=False)
    walk.retires(0)
    walk.waits(2)
    assert walk.told() == ["retire 0", "start 2 at 0"], "or nobody would serve in the end"
    assert not walk.supervisor.is_renewed(generation)


def test_a_renewal_ends_no_other_worker_while_a_successor_has_still_to_start() -> None:
    walk = Walk(2)
    walk.lose(0)
    walk.ready(2)
    walk.do("renew")
    walk.do("renew", overlap=False)
    walk.do("condemn", 2, walk.now)
    walk.ready(3)
    walk.retires(2)
    walk.retires(3)
    assert walk.told()[-2:] == ["retire 2", "retire 3"]


def exchanged_beside_another() -> tuple[Walk, int]:
    """Worker 3 is to follow 0, and loads; worker 2, which had no place, has got one, and is ready.

    Returns the generation of the renewal, too.
    """
    walk = Walk(3, ready=False)
    for slot in (0, 1):
        walk.ready(slot)
    walk.waits(2)
    generation = walk.do("renew", overlap=False)
    walk.retires(0)
    walk.waits(2, has_place=True)
    walk.ready(2)
    assert walk.told()[3:] == ["retire 0", "start 3 at 0"]
    return walk, generation


def test_one_that_is_ready_elsewhere_does_not_end_an_exchange() -> None:
    walk, generation = exchanged_beside_another()
    walk.lose(3)
    assert walk.supervisor.aborted == generation
    assert walk.told() == ["start 4 at 0"], "and nobody else retires"
    assert walk.states() == {"ready": 2, "starting": 1}


def test_one_that_is_ready_stands_in_for_one_of_which_it_is_heard_later_that_it_waits() -> None:
    walk, _ = exchanged_beside_another()
    walk.waits(3)
    assert walk.told() == ["retire 1"]


# -- scaling


def test_one_that_still_retires_is_kept_if_more_are_wanted_again() -> None:
    walk = Walk(3)
    walk.do("want", 1)
    walk.retires(1)
    walk.told()
    walk.do("want", 3)
    assert walk.told() == ["start 3 at 1", "keep 2"]
    assert not walk.supervisor.vacant(2)
    walk.ready(3)
    walk.do("want", 2)
    assert walk.told() == ["retire 2"]


@pytest.mark.parametrize(
    "why",
    ["renewed", "condemned", "condemned while it retires", "winding down", "succeeded",
     "succeeded by one that has died"],
)  # fmt: skip
def test_one_that_retires_for_another_reason_is_not_kept(why: str) -> None:
    walk = Walk(2)
    match why:
        case "renewed":
            walk.do("renew", overlap=False)
        case "condemned":
            walk.do("condemn", 0, walk.now)
        case "condemned while it retires":
            walk.do("want", 1)
            assert not walk.do("condemn", 1, walk.now)
        case "winding down":
            walk.do("want", 1)
            walk.supervisor.is_winding_down = True
        case "succeeded":
            walk.do("renew")
            walk.ready(2)
        case "succeeded by one that has died":  # the place is tried again when it has ended
            walk.do("renew")
            walk.ready(2)
            walk.lose(2)
    walk.supervisor.want(1)
    walk.do("want", 2)
    assert not [line for line in walk.told() if line.startswith("keep")]


def test_scaling_down_stops_those_that_still_load() -> None:
    walk = Walk(2, ready=False)
    walk.do("scale", 1)
    assert walk.told()[2:] == ["stop 1"]
    walk.lose(1)
    assert walk.states() == {"starting": 1}


def test_scaling_gives_failed_places_another_chance_and_keeps_who_stands_in() -> None:
    walk = Walk(2, max_restarts=0)
    walk.lose(0)
    assert walk.states() == {"ready": 1, "failed": 1}
    walk.do("scale", 1)
    assert walk.told() == ["start 2 at 0"], "and worker 1 goes on"
    walk.ready(2)
    assert walk.told() == ["retire 1"]


def test_one_that_is_ended_since_it_is_slow_takes_no_batches() -> None:
    walk = Walk(ready=False, start_timeout=1.0)
    walk.pass_time()
    assert not walk.supervisor.ready(0, walk.now)
    walk.lose(0)
    assert not walk.supervisor.failed
