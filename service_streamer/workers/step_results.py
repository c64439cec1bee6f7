"""Reads what ``start`` and ``step`` of a model returned."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..errors import BadModelOutput
from ..gpu.transfers import OnHost, results_on_host
from ..options.checks import is_sequence
from .protocol import Failure

#: What a model returned for a state: its output, and whether it is done; or why its item fails.
StepPair = tuple[Any, bool] | Failure


class UnreadableError(BadModelOutput):
    """The results of a call say nothing of any item.

    Attributes:
        parts: of them, as far as they have any.
    """

    def __init__(self, text: str, parts: Sequence[Any] = ()) -> None:
        super().__init__(text)
        self.parts = parts


def read_states(found: Any, expected: int, name: str) -> list[Any]:
    """So many states, that a function of this name returned.

    Raises:
        UnreadableError: they are not as many.
    """
    return _read(found, expected, name, "states, one per item")


def read_pairs(found: Any, expected: int, name: str, *, moves_to_cpu: bool) -> list[StepPair]:
    """So many pairs, with their tensors on the CPU. One that is none is its item's failure.

    Raises:
        UnreadableError: they are not as many.
    """
    if type(found) is OnHost:
        found = results_on_host(found)
    pairs = _read(found, expected, name, "pairs (output, is_done), one per state")
    read = [_read_pair(pair, name) for pair in pairs]
    if moves_to_cpu:
        # The first output says whether there are tensors of a GPU: so without those that are None.
        outputs = [each[0] for each in read if type(each) is tuple and each[0] is not None]
        moved = results_on_host(outputs)
        if moved is not outputs:
            left = iter(moved)
            read = [
                (next(left), each[1]) if type(each) is tuple and each[0] is not None else each
                for each in read
            ]
    return read


def _read(found: Any, expected: int, name: str, what: str) -> list[Any]:
    parts = _as_list(found)
    if parts is None or len(parts) != expected:
        raise UnreadableError(
            f"{name} must return a sequence of {expected} {what}; it returned {_kind(found)}",
            parts or (),
        )
    return parts


def _read_pair(pair: Any, name: str) -> StepPair:
    if type(pair) is tuple and len(pair) == 2 and type(pair[1]) is bool:  # the usual case
        return pair
    if isinstance(pair, Exception):
        return Failure.caught(pair)
    parts = _as_list(pair)
    # Where a model returns all outputs and then all flags, of two items, these look like pairs.
    if parts is not None and len(parts) == 2 and _is_flag(parts[1]):
        return parts[0], bool(parts[1])
    return Failure(
        BadModelOutput(
            f"{name} must return a pair (output, is_done) for each state, and is_done must be "
            f"True or False; it returned {_kind(pair)}"
        )
    )


def _is_flag(value: Any) -> bool:
    """Whether it is one bool, also of numpy or torch."""
    kind = str(getattr(value, "dtype", ""))
    return type(value) is bool or (
        kind in ("bool", "torch.bool") and not tuple(getattr(value, "shape", ()))
    )


def _as_list(found: Any) -> list[Any] | None:
    if not is_sequence(found):
        return None
    try:
        return list(found)
    except TypeError:  # an array without dimensions
        return None


def _kind(found: Any) -> str:
    parts = _as_list(found)
    kind = type(found).__qualname__
    if parts is None:
        return kind
    return f"{kind} of {len(parts)}"
