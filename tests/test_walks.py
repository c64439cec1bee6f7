"""Random walks, and all orders of a few events: every accepted call ends once, all counts hold.

``WALK_SECONDS`` is how long the random ones take together, ``WALK_SEED`` their first seed. A walk
that fails says how to repeat it. ``make walk`` goes on for as long as you like.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterator
from itertools import count

import pytest

from cases import long_cases
from walk import engine_walk, orders, public_walk

#: For all kinds together. The clock only decides how many seeds are tried.
SECONDS = float(os.environ.get("WALK_SECONDS", "5"))
SEED = int(os.environ.get("WALK_SEED", "0"))
#: As in CI. There interrupts come at every 9th place and not at every 15th, and orders are those of
#: six events and not of four.
IS_LONG = SECONDS >= 60
STEP = 9 if IS_LONG else 15

#: Which part of that each kind has. Threads are the fastest, and find the most.
SHARES = {
    "engine": 0.2,
    "thread": 0.2,
    "steps_thread": 0.1,
    "process": 0.15,
    "steps_process": 0.1,
    "shared": 0.1,
    "redis": 0.15,
}


@pytest.fixture(scope="module", autouse=True)
def nothing_else_is_collected() -> None:
    """Walks collect garbage again and again, beside all that other tests have imported."""
    gc.collect()
    gc.freeze()


def seeds(kind: str, at_least: int) -> Iterator[int]:
    """Seeds until the time of this kind is over, and so many at least."""
    over = time.monotonic() + SECONDS * SHARES[kind]
    for number in count():
        if number >= at_least and time.monotonic() > over:
            return
        yield SEED + number


@pytest.mark.parametrize("name", orders.PLANS)
def test_everything_ends_after_any_order_of_events(name: str) -> None:
    plan = orders.PLANS[name]
    _, fault = orders.explore(plan, plan.depth if IS_LONG else min(plan.depth, 4))
    assert fault is None, fault


@pytest.mark.parametrize("name", engine_walk.INTERRUPTED)
def test_everything_ends_after_an_interrupt_at_any_place(name: str) -> None:
    """At some places, others with other seeds; ``make walk`` tries them all."""
    _, fault = engine_walk.interrupt_everywhere(name, first=SEED // 1000 % STEP, step=STEP)
    assert fault is None, fault


def test_everything_ends_after_a_walk_on_an_engine() -> None:
    for seed in seeds("engine", 50):
        fault = engine_walk.walk(seed)
        assert fault is None, f"{fault}\n    python -m walk --kind engine --seed {seed} --times 1"


@pytest.fixture
def walks(kind: str, request: pytest.FixtureRequest) -> Callable[[int], str | None]:
    """Walks of this kind, by their seeds."""
    url = request.getfixturevalue("redis_server") if kind == "redis" else ""
    if kind == "shared":
        request.getfixturevalue("shared")  # for its directory of pools
    return lambda seed: public_walk.walk(kind, seed, redis=url)


@pytest.mark.parametrize(
    "kind", ["thread", "steps_thread", "process", *long_cases("steps_process", "redis", "shared")]
)
def test_everything_ends_after_a_walk(kind: str, walks: Callable[[int], str | None]) -> None:
    for seed in seeds(kind, 1):
        fault = walks(seed)
        assert fault is None, f"{fault}\n    python -m walk --kind {kind} --seed {seed} --times 20"
