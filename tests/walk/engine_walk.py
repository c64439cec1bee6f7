"""Long random walks on an engine: thousands a minute, the same for the same seed."""

from __future__ import annotations

import random
from itertools import count
from typing import Any

from .world import Event, World, play, run

#: Seconds of a batch in each stage: three alike, and one beside which the others matter.
_STAGES = [(0.01, 0.01, 0.01), (0.001, 0.01, 0.004)]


def make(seed: int) -> tuple[dict[str, Any], list[Event]]:
    """Options of a ``World``, and what happens in it."""
    rng = random.Random(seed)
    pick = rng.choice
    options: dict[str, Any] = {
        "batch_size": pick([1, 2, 4]),
        "max_latency": pick([0.0, 0.05]),
        "workers": pick([1, 2, 2, 3]),
        "max_pending": pick([None, None, 6]),
        "retry": rng.random() < 0.8,
        "isolate_errors": rng.random() < 0.8,
        "max_attempts": pick([2, 3]),
        "batch_timeout": pick([None, 5.0]),
    }
    if rng.random() < 0.3:
        options["most"] = options["workers"] + 2
    if rng.random() < 0.4:
        options["places"] = options["batch_size"]
        options["resumes"] = rng.random() < 0.5
    else:
        options["stages"] = pick([None, None, *_STAGES])
        if rng.random() < 0.4:
            options["has_lengths"] = True
            options["max_batch_cost"] = pick([None, 20.0])
    # Some walks have only a few kinds of events, which lead deeper into what those do.
    kinds = [*_KINDS]
    if rng.random() < 0.5:
        kinds = [kind for kind in kinds if kind[0] in _ALWAYS or rng.random() < 0.4]
    weights = [weight for _, weight, _ in kinds]
    events: list[Event] = [("ready", 0)] if rng.random() < 0.8 else []
    if rng.random() < 0.15:  # more comes than is computed, and how fast that is is known
        events += [("flood", 50 * options["batch_size"], None), ("busy", 40, 1.0)]
    for _ in range(pick([10, 30, 80])):
        name, _, arguments = rng.choices(kinds, weights)[0]
        events.append((name, *arguments(rng)))
    if rng.random() < 0.3:
        events.append(pick([("close", False), ("close", True), ("close", True, 3.0)]))
        for _ in range(pick([0, 3, 10])):
            name, _, arguments = rng.choices(kinds, weights)[0]
            events.append((name, *arguments(rng)))
    return options, events


def _which(rng: random.Random) -> int:
    return rng.choice([0, 0, 0, 1, 1, 2, 3])


def _how(rng: random.Random) -> tuple[Any, ...]:
    """Timeout, priority and tenant of a call."""
    if rng.random() < 0.5:
        return ()
    return (
        rng.choice([None, 0.01, 0.5, 3.0]),
        rng.choice([0, 0, 1, -1]),
        rng.choice(["", "", "a", "b"]),
    )


def _call(rng: random.Random) -> tuple[Any, ...]:
    return (rng.choice([1, 1, 2, 3, 7]), *_how(rng))


def _stream(rng: random.Random) -> tuple[Any, ...]:
    how = _how(rng) or (None, 0, "")
    return (*how, rng.choice([1, 2, 1024]), rng.random() < 0.2)


def _worker_event(rng: random.Random) -> Event:
    name = rng.choice(["done", "done", "fail", "spoil", "ready", "lose", "step"])
    numbers = {"lose": (rng.randrange(4),), "step": (rng.randrange(2),)}.get(name, ())
    return (name, _which(rng), *numbers)


def _interrupted(rng: random.Random) -> tuple[Any, ...]:
    name = rng.choice(["submit", "submit", "quiet", "predict", "stream", "cancel", "leave"])
    numbers = _call(rng) if name in ("submit", "quiet", "predict") else (_which(rng),)
    if name == "stream":
        numbers = _stream(rng)
    return (rng.randrange(90), (name, *numbers))


#: Name, weight, and what makes the numbers.
_KINDS: list[tuple[str, int, Any]] = [
    ("submit", 12, _call),
    ("quiet", 8, _call),
    ("predict", 8, _call),
    ("stream", 12, _stream),
    ("cancel", 4, lambda rng: (_which(rng),)),
    ("leave", 4, lambda rng: (_which(rng),)),
    ("drop", 3, lambda rng: (_which(rng),)),
    ("cycle", 2, lambda rng: (_which(rng),)),
    ("collect", 1, lambda rng: ()),
    ("expire", 3, lambda rng: (_which(rng),)),
    ("read", 6, lambda rng: (_which(rng), rng.choice([1, 2, 9]))),
    ("advance", 8, lambda rng: (rng.choice([0.001, 0.02, 0.3, 1.0, 6.0]),)),
    ("ready", 6, lambda rng: (_which(rng),)),
    ("waits", 1, lambda rng: (_which(rng), rng.randrange(2))),
    ("unready", 1, lambda rng: (_which(rng), rng.randrange(3))),
    ("done", 20, lambda rng: (_which(rng),)),
    ("fail", 4, lambda rng: (_which(rng),)),
    ("spoil", 2, lambda rng: (_which(rng),)),
    ("step", 8, lambda rng: (_which(rng), rng.randrange(2))),
    ("lose", 3, lambda rng: (_which(rng), rng.randrange(4))),
    ("together", 4, lambda rng: tuple(_worker_event(rng) for _ in range(rng.choice([2, 3])))),
    ("interrupt", 6, _interrupted),
    ("scale", 1, lambda rng: rng.choice([(1,), (2,), (3,), (1, 3)])),
    ("restart", 1, lambda rng: (rng.choice([True, False, "auto"]),)),
]  # fmt: skip

_ALWAYS = ("submit", "stream", "ready", "done", "advance")


def walk(seed: int) -> str | None:
    """Walk; what was wrong, with the shortest walk that shows it, or None."""
    options, events = make(seed)
    fault = run(options, events)
    return None if fault is None else shorten(options, events)


def shorten(options: dict[str, Any], events: list[Event]) -> str:
    """Leave out what the fault does not need; the program that is left, and its fault."""
    fault = run(options, events) or "it is gone"
    size = len(events) // 2
    while size:
        start = 0
        while start < len(events):
            fewer = events[:start] + events[start + size :]
            found = run(options, fewer)
            if found is None:
                start += size
            else:
                events, fault = fewer, found
        size //= 2
    for name in sorted(options):
        fewer_options = {key: value for key, value in options.items() if key != name}
        if "batch_size" in fewer_options and (found := run(fewer_options, events)) is not None:
            options, fault = fewer_options, found
    return f"{fault}\n    run({options!r}, {events!r})"


_STATES: dict[str, tuple[dict[str, Any], list[Event]]] = {
    "idle": ({"batch_size": 2}, [("ready", 0), ("ready", 0)]),
    "busy": ({"batch_size": 2}, [("ready", 0), ("submit", 3), ("stream", None), ("predict", 2)]),
    "starting": ({"batch_size": 2}, [("submit", 1), ("stream", 9.0, 1, "a")]),
    "lengths": ({"batch_size": 2, "has_lengths": True}, [("ready", 0), ("submit", 5)]),
    "steps": (
        {"batch_size": 2, "places": 2},
        [("ready", 0), ("stream", None, 0, "", 1), ("step", 0, 0), ("submit", 2)],
    ),
}

_ACTIONS: list[Event] = [
    ("submit", 1), ("quiet", 3, 5.0), ("predict", 2, None, 1, "a"), ("stream", None),
    ("leave", 0), ("cancel", 0),
]  # fmt: skip

#: What is interrupted where: an action of a caller in a state, by name.
INTERRUPTED = {
    f"{state} {action[0]}": (options, before, action)
    for state, (options, before) in _STATES.items()
    for action in _ACTIONS
    if action[0] not in ("leave", "cancel") or state in ("busy", "starting", "steps")
}


def interrupt_everywhere(name: str, *, first: int = 0, step: int = 1) -> tuple[int, str | None]:
    """Let a caller's action be interrupted at each place where a signal may be handled.

    Args:
        name: one of ``INTERRUPTED``.
        first, step: where to begin, and how far apart the places are.

    Returns:
        How many places there are, and what is wrong after the first that is wrong.
    """
    options, before, action = INTERRUPTED[name]
    for place in count(first, step):
        events = [*before, ("interrupt", place, action), ("submit", 1)]
        world = World(**options)
        fault = play(world, events)
        if fault is not None:
            return place, f"{fault}\n    run({options!r}, {events!r})"
        if not world.was_interrupted:  # it has no more places
            return place, None
    raise AssertionError
