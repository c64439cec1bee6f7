"""Batching of models of steps: who gets a place where, and what becomes of it.

That each call ends once with all its outputs, in any order of events, is seen by the walks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from service_streamer import WorkerLost
from walk.world import World


@pytest.fixture
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    """Workers with four places each, or as the test says, which are ready."""
    options: dict[str, Any] = {"workers": 1, "places": 4, **getattr(request, "param", {})}
    world = World(batch_size=options["places"], **options)
    for _ in range(options["workers"]):
        world.do(("ready", 0))
    yield world
    world.finish()
    world.dispose()


def replace(world: World) -> None:
    """The only worker dies, and another one is ready after some time."""
    world.do(("lose", 0, 0))
    while "loading" not in world.workers.values():
        world.do(("advance", 1.0))
    world.do(("ready", 0))


def held(world: World) -> list[int]:
    """How many items each worker has."""
    return [len(batches) for batches in world.held.values()]


@pytest.mark.parametrize("world", [{"places": 1}], indirect=True)
def test_the_record_of_an_item_that_is_lost_says_as_much_as_that_of_another(world: World) -> None:
    records: list[Any] = []
    world.streamer.engine.watch(records.append)
    for event in (("stream",), ("submit", 1), ("stream",)):
        world.do(event)
    world.do(("step", 0, 0))
    world.do(("lose", 0, 0))  # the first has had an output, and fails; the second begins again
    counted = [(each.pending, each.failed, each.answered, each.expired) for each in records]
    assert counted == [(1, 1, 0, 0)] * 2
    assert all(each.rejected == 0 and each.queued >= 0.0 for each in records)


def test_timing_says_when_outputs_of_a_stream_came(world: World) -> None:
    for event in (("stream",), ("stream",), ("submit", 1)):
        world.do(event)
    call, short, silent = (known.handle for known in world.calls)
    for seconds in (1.0, 1.0, 5.0, 1.0):
        world.do(("advance", seconds))
        world.do(("step", 0, 0))
        if short.timing is None:
            world.do(("done", 1))
    assert call.timing is None, "it is not over"
    for _ in range(2):
        world.do(("done", 0))
    assert call.timing[4:] == (1.0, 7.0 / 3, 5.0)
    assert short.timing[4:] == (1.0, None, None)
    assert silent.timing[4:] == (None, None, None), "its worker told nothing"


@pytest.mark.parametrize("world", [{"places": 2, "batch_timeout": 5.0}], indirect=True)
def test_a_worker_whose_items_all_rest_is_not_hung(world: World) -> None:
    resting = ("stream", None, 0, "", 1)
    for event in (resting, resting, ("submit", 1)):  # the last one is on deck
        world.do(event)
    for _ in range(2):
        world.do(("step", 0, 0))
    assert len(world.resting) == 2
    for _ in range(10):
        world.do(("advance", 4.0))
    assert world.workers == {0: "ready"}
    world.do(("read", 0, 9))
    assert world.workers == {0: "ready"}
    for _ in range(6):
        world.do(("advance", 1.0))
    assert world.workers == {0: "ending"}


@pytest.mark.parametrize("world", [{"workers": 2}], indirect=True)
def test_the_worker_with_the_fewest_items_gets_the_next(world: World) -> None:
    for _ in range(6):
        world.do(("stream",))
    assert held(world) == [3, 3]
    of_first = sorted((item.call for (item,) in world.held[0].values()), reverse=True)
    for call in of_first[:2]:
        world.do(("leave", call))
    assert held(world) == [1, 3]
    world.do(("stream",))
    assert held(world) == [2, 3]


def test_what_was_lost_once_shares_a_worker_and_is_alone_after_that(world: World) -> None:
    for _ in range(4):
        world.do(("submit", 1))
    for count in (4, 1):  # one of them may be what kills
        replace(world)
        assert held(world) == [count]
    world.finish()
    assert all(known.outcome == known.items for known in world.calls)


def test_one_that_kills_its_worker_again_and_again_fails_alone(world: World) -> None:
    for _ in range(4):
        world.do(("submit", 1))
    killer, deaths = world.calls[1], 0
    while not all(known.is_over for known in world.calls):
        if killer.items[0] in [
            item for batches in world.held.values() for (item,) in batches.values()
        ]:
            replace(world)
            deaths += 1
        else:
            world.do(("done", 0))
    assert isinstance(killer.outcome, WorkerLost)
    assert all(known.outcome == known.items for known in world.calls if known is not killer)
    assert deaths <= 4
