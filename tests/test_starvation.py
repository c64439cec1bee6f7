"""Nobody waits for ever: each kind of call against a flood of each other kind, table by table."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator

import pytest

from service_streamer.batching.call_queue import CallQueue
from service_streamer.batching.cost import LearnedCost
from service_streamer.batching.length_queue import LengthQueue
from service_streamer.batching.overload import UNKNOWN
from service_streamer.batching.tuning import AGING
from service_streamer.observe.record import ORDINARY, Call, Precedence

#: Calls that wait when the one comes that must not wait for ever.
BEFORE = 5
BATCH_SIZE = 4

_NAMES = itertools.count()

#: What a call is like, by name: priority, tenant, seconds that it has, and whether they were given
#: with it. A tenant of ``None`` is a new one for each call.
KINDS: dict[str, tuple[int, str | None, float, bool]] = {
    "plain": (0, "", math.inf, False),
    "timed": (0, "", 20.0, False),  # by a default that all have
    "deadline": (0, "", 30.0, True),
    "short deadline": (0, "", 2.0, True),
    "long deadline": (0, "", 3600.0, True),
    "high": (9, "", math.inf, False),
    "low": (-9, "", math.inf, False),
    "high, with a deadline": (9, "", 30.0, True),
    "of another tenant": (0, "b", math.inf, False),
    "of another tenant, with a deadline": (0, "b", 2.0, True),
    "of tenants that come once": (0, None, math.inf, False),
}
FLOODS = [kind for kind in KINDS if kind != "low"]


def make(kind: str, now: float, name: str, length: float = 1.0) -> Call:
    priority, tenant, seconds, is_given = KINDS[kind]
    call = Call([name], name)
    if tenant is None:
        tenant = f"tenant {next(_NAMES)}"
    precedence = Precedence(priority, tenant, is_given)
    call.precedence = ORDINARY if precedence == ORDINARY else precedence
    call.arrived_at = now
    call.deadline = now + seconds
    call.lengths = [length]
    return call


def pending() -> CallQueue:
    return CallQueue()


def shaped() -> LengthQueue:
    return LengthQueue(LearnedCost(), batch_size=BATCH_SIZE)


def turns_until_cut(
    queue: CallQueue | LengthQueue,
    flood: Iterator[str],
    kind: str,
    room: int,
    per_item: float = 1e-4,
    length: float = 1.0,
) -> int:
    """Items that are cut before the call of a kind is, while as many come as are cut."""
    now = 0.0
    for _ in range(BEFORE):
        queue.add(make(next(flood), now, "flood"))
        now += per_item
    waits = make(kind, now, "waits", length)
    queue.add(waits)
    for turn in itertools.count(room, room):
        for _ in range(room):
            now += per_item
            queue.add(make(next(flood), now, "flood"))
        taken = queue.take(room, now, UNKNOWN)
        queue.check_invariants()
        assert not taken.late
        if not waits.pending:
            return turn
        if turn > 4_000:
            pytest.fail(f"{kind} waits for ever")
    raise AssertionError


@pytest.mark.parametrize("waits", KINDS)
@pytest.mark.parametrize("flood", FLOODS)
def test_each_kind_is_passed_over_a_bounded_number_of_times_by_each_other(
    flood: str, waits: str
) -> None:
    turns = turns_until_cut(pending(), itertools.repeat(flood), waits, room=1)
    assert turns <= AGING * (BEFORE + 2)


@pytest.mark.parametrize("waits", KINDS)
@pytest.mark.parametrize("flood", FLOODS)
def test_nor_where_items_have_lengths(flood: str, waits: str) -> None:
    turns = turns_until_cut(shaped(), itertools.repeat(flood), waits, room=1, length=50.0)
    # In the line, and again in the window.
    assert turns <= AGING * (BEFORE + 2) + AGING * 8 * BATCH_SIZE


@pytest.mark.parametrize("queue", [pending, shaped])
@pytest.mark.parametrize("waits", KINDS)
def test_nor_by_all_others_together(
    queue: Callable[[], CallQueue | LengthQueue], waits: str
) -> None:
    flood = itertools.cycle(FLOODS)
    turns = turns_until_cut(queue(), flood, waits, room=BATCH_SIZE, length=9.0)
    assert turns <= 2 * AGING * 8 * BATCH_SIZE


def test_tenants_that_come_once_do_not_starve_one_that_has_several_calls() -> None:
    queue = pending()
    ours = [make("of another tenant", 0.0, "ours") for _ in range(20)]
    for call in ours:
        queue.add(call)
    for turn in range(20 * (AGING + 1)):
        while queue.items < sum(call.pending for call in ours) + BEFORE:
            queue.add(make("of tenants that come once", float(turn), "flood"))
        queue.take(1, 0.0, UNKNOWN)
    assert not any(call.pending for call in ours), "one turn in eight"
    turns = queue._fair
    assert turns is not None
    assert len(turns._lines) < 100, "and who has had a turn and is gone is forgotten"


@pytest.mark.parametrize(("flood", "waits"), [("plain", "deadline"), ("low", "high")])
def test_those_who_are_in_a_hurry_still_go_before_the_others(flood: str, waits: str) -> None:
    for before in range(AGING):  # whichever turn it is
        queue = pending()
        for _ in range(20):
            queue.add(make(flood, 0.0, "flood"))
        queue.add(make("high", 0.0, "first"))  # so that they take turns
        queue.take(1 + before, 0.0, UNKNOWN)
        hurried = make(waits, 1.0, "waits")
        queue.add(hurried)
        queue.take(2, 1.0, UNKNOWN)
        assert not hurried.pending
