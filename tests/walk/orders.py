"""All orders of up to six events of two calls and two workers.

States that look the same from outside, and have come about with the same counts, are visited once.
From each it is seen whether everything ends when all is well from then on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from .world import Event, Fault, World


class Plan(NamedTuple):
    """Which events to put into all orders.

    Attributes:
        begins: the calls that there may be, each of which may be made more than once.
        happens: names of the other events.
        options: of the ``World``.
        before: what happens first.
        calls: how many may be made.
        depth: how many events.
    """

    begins: tuple[Event, ...]
    happens: frozenset[str]
    options: dict[str, Any]
    before: tuple[Event, ...] = ()
    calls: int = 2
    depth: int = 6


_WORKERS = frozenset({"ready", "done", "fail", "lose"})

PLANS = {
    "workers": Plan((("submit", 1), ("quiet", 3)), _WORKERS | {"spoil"}, {"batch_size": 2}),
    "leaving": Plan(
        (("submit", 2), ("predict", 1, 1.0), ("stream", 1.0)),
        frozenset({"ready", "done", "cancel", "leave", "drop", "expire", "advance"}),
        {"batch_size": 2},
    ),
    "refusals": Plan(
        (("submit", 2), ("stream", None), ("predict", 3)),
        frozenset({"ready", "done", "cancel", "leave", "lose"}),
        {"batch_size": 2, "max_pending": 2},
        calls=3,
    ),
    "lengths": Plan(
        (("submit", 3), ("stream", 1.0, 1, "a"), ("predict", 2, None, 0, "b")),
        frozenset({"ready", "done", "fail", "cancel"}),
        {"batch_size": 2, "has_lengths": True},
    ),
    "closing": Plan(
        (("submit", 1), ("stream", 1.0), ("predict", 3)),
        frozenset({"ready", "done", "lose", "leave", "close", "drain"}),
        {"batch_size": 2},
    ),
    "steps": Plan(
        (("submit", 2), ("stream", None, 0, "", 1)),
        frozenset({"ready", "step", "read", "done", "fail", "lose", "leave"}),
        {"batch_size": 2, "places": 2, "resumes": True},
    ),
    "scaling": Plan(
        (("submit", 1), ("predict", 3)),
        frozenset({"ready", "unready", "done", "scale", "restart", "end"}),
        {"batch_size": 2},
    ),
    "once": Plan(
        (("submit", 1), ("submit", 3)), _WORKERS | {"leave"}, {"batch_size": 2, "retry": False}
    ),
    # The refusal of what is hopeless needs a rate that is known, and a queue.
    "behind": Plan(
        (("submit", 1, 0.5), ("stream", 0.5), ("stream", None), ("predict", 1, 0.5)),
        frozenset({"done", "cancel", "leave", "drop", "lose", "advance"}),
        {"batch_size": 1, "workers": 1},
        before=(("ready", 0), ("flood", 36), ("busy", 33, 1.0)),
        calls=3,
        depth=3,
    ),
}


def explore(plan: Plan, depth: int | None = None) -> tuple[int, str | None]:
    """Let everything happen in every order.

    Returns:
        How many states there are, and what is wrong in the first that is wrong, with its events.
    """
    seen: set[Any] = set()
    level: list[tuple[tuple[Event, ...], list[Event]]] = [((), _visit(plan, (), seen))]
    for _ in range(plan.depth if depth is None else depth):
        following = []
        for events, possible in level:
            for event in possible:
                program = (*events, event)
                try:
                    found = _visit(plan, program, seen)
                except Exception as error:
                    what = str(error) if isinstance(error, Fault) else repr(error)
                    text = f"{what}\n    run({plan.options!r}, {[*plan.before, *program]!r})"
                    return len(seen), text
                if found:
                    following.append((program, found))
        level = following
    return len(seen), None


def _visit(plan: Plan, events: tuple[Event, ...], seen: set[Any]) -> list[Event]:
    """What can happen after these events; nothing if another order has led to the same state."""
    world = World(**plan.options)
    try:
        for event in (*plan.before, *events[:-1]):
            world.let(event)
        for event in events[-1:]:
            world.do(event)
        state = world.state()
        if state in seen:
            return []
        seen.add(state)
        possible = list(_enabled(plan, world, events))
        world.finish()
    finally:
        world.dispose()
    return possible


def _enabled(plan: Plan, world: World, events: tuple[Event, ...]) -> Iterator[Event]:
    if world.transport.has_ended:
        return
    if sum(event in plan.begins for event in events) < plan.calls:
        yield from plan.begins
    for name in sorted(plan.happens):
        yield from _of(name, world, events)


def _of(name: str, world: World, events: tuple[Event, ...]) -> Iterable[Event]:
    """The events of this name, one for each whom it may happen to."""
    states = [*world.workers.values()]
    if name in ("ready", "unready"):  # those that load are all alike
        return [(name, 0, *((0,) if name == "unready" else ()))] if "loading" in states else ()
    if name == "lose":
        return [(name, which, 0) for which in range(len(states) - states.count("loading"))]
    if name == "end":
        return [
            ("lose", which, 0)
            for which, state in enumerate(each for each in states if each != "loading")
            if state == "ending"
        ]
    if name == "step":
        return [(name, which, 0) for which in range(sum(map(bool, world.held.values())))]
    if name in ("done", "fail", "spoil"):
        return [(name, which) for which in range(sum(map(len, world.held.values())))]
    if name in ("close", "drain"):
        return () if world.is_closing else [("close", name == "drain")]
    once = {"advance": ("advance", 2.0), "restart": ("restart", "auto"), "scale": ("scale", 1)}
    if name in once:
        return () if once[name] in events else [once[name]]
    kinds = {"cancel": ("submit", "quiet"), "expire": ("predict",), "leave": ("stream", "predict")}
    open_calls = world.count_open(*kinds.get(name, ("stream",)))
    return [(name, which) for which in range(open_calls)]
