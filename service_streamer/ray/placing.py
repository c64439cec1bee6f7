"""Why a worker has no place on the cluster yet, in words. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple


class Node(NamedTuple):
    """A node that is alive.

    Attributes:
        name: of its host.
        resources: all that it has, by Ray's names.
    """

    name: str
    resources: Mapping[str, float]


class Unplaced(NamedTuple):
    """Why a worker has no place.

    Attributes:
        why: in words.
        is_room: all that it asks for is free. Its process may only be slow to start, as on a busy
            host; or a rule of its own forbids what is free.
    """

    why: str
    is_room: bool


def why_not_placed(
    wanted: Mapping[str, float], nodes: Sequence[Node], free: Mapping[str, float]
) -> Unplaced:
    """What a worker asks for, what is missing, and what the cluster has.

    Args:
        wanted: by Ray's names.
        free: of all nodes together.
    """
    asks = _amounts(wanted) or "nothing"
    if not nodes:
        return Unplaced(f"it asks for {asks}, and the cluster has no node", is_room=False)
    has = {name: sum(node.resources.get(name, 0) for node in nodes) for name in wanted}
    fits = any(
        all(node.resources.get(name, 0) >= amount for name, amount in wanted.items())
        for node in nodes
    )
    missing = [name for name, amount in wanted.items() if has[name] < amount]
    held = [name for name, amount in wanted.items() if free.get(name, 0) < amount]
    if missing:
        why = f"the cluster has too little {_names(missing)}"
    elif not fits:
        why = "no node has all of that"
    elif held:
        why = f"others hold its {_names(held)}"
    else:
        why = (
            "its process is being started, or its scheduling_strategy allows no node that has that "
            "free"
        )
    state = ", ".join(
        f"{name} {_number(free.get(name, 0))} of {_number(has[name])}" for name in has
    )
    count = f"{len(nodes)} node" + ("s" if len(nodes) > 1 else "")
    text = f"it asks for {asks}, and {why} (free on {count}: {state or 'nothing it asks for'})"
    return Unplaced(text, is_room=fits and not (missing or held))


def _amounts(wanted: Mapping[str, float]) -> str:
    return ", ".join(f"{_number(amount)} {name}" for name, amount in wanted.items())


def _names(names: Sequence[str]) -> str:
    return " and ".join(names)


def _number(amount: float) -> str:
    return f"{amount:.4g}"
