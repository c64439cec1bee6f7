"""What a model returned, as results: how many there are, and in whose memory they lie."""

from __future__ import annotations

import contextlib
import copy
import sys
import weakref
from typing import Any

from ..errors import BadModelOutput
from ..gpu.transfers import PLAIN, OnHost, first_value, results_on_host
from ..options.checks import is_sequence
from .model_spec import LoadedModel, describe
from .protocol import Failure


def check_outputs(model: LoadedModel, outputs: Any, expected: int) -> list[Any]:
    """A model's outputs as a list of ``expected`` results. Raises BadModelOutput."""
    if model.moves_to_cpu or type(outputs) is OnHost:
        outputs = results_on_host(outputs)
    kind = type(outputs)
    # A NamedTuple, or what torch.max returns: its parts are no results, however many there are.
    has_fields = kind is not list and (hasattr(kind, "_fields") or hasattr(kind, "n_fields"))
    results = as_list(outputs)
    if results is not None and len(results) == expected and not has_fields:
        return results
    raise BadModelOutput(
        f"{model.name} must return a sequence of {expected} results, one per item; "
        f"it returned {_described(outputs)}{' fields' * has_fields}"
    )


def memory_of(outputs: Any) -> weakref.ref[Any] | None:
    """The array or tensor in whose memory the outputs lie, by the first of them."""
    base = first_value(outputs)
    if type(base) in PLAIN:
        return None
    array = getattr(sys.modules.get("numpy"), "ndarray", ())
    tensor = getattr(sys.modules.get("torch"), "Tensor", ())
    owner = None
    while isinstance(base, (array, tensor)):
        owner, base = base, base._base if isinstance(base, tensor) else base.base
    # Another base is memory that is shared, say.
    return None if owner is None or base is not None else weakref.ref(owner)


def in_own_memory(result: Any) -> Any:
    """A copy of the result: a model may write to its outputs with its next call."""
    if type(result) not in PLAIN:
        with contextlib.suppress(Exception):  # of a user's class
            return copy.deepcopy(result)
    return result


# -- of a model of steps

#: What a model returned for a state: its output, and whether it is done; or why its item fails.
StepPair = tuple[Any, bool] | Failure


def read_pairs(found: Any, expected: int, step: Any, moves_to_cpu: bool) -> list[StepPair]:
    """So many pairs, that ``step`` returned, with their tensors on the CPU.

    Where there is none the item fails. If they are not as many all fail: which are whose is not
    known, and the model may have taken the step.
    """
    if type(found) is OnHost:
        found = results_on_host(found)
    parts = as_list(found)
    if parts is None or len(parts) != expected:
        what = f"a sequence of {expected} pairs (output, is_done), one per state"
        return [unreadable(found, step, what)] * expected
    pairs = [_read_pair(part, step) for part in parts]
    if not moves_to_cpu:
        return pairs
    # The first output says whether there are tensors of a GPU: so without those that are None.
    outputs = [each[0] for each in pairs if type(each) is tuple and each[0] is not None]
    moved = iter(results_on_host(outputs))
    return [
        (next(moved), each[1]) if type(each) is tuple and each[0] is not None else each
        for each in pairs
    ]


def unreadable(found: Any, function: Any, expected: str) -> Failure:
    """Of an item, if the model's function returned something else."""
    text = f"{describe(function)} must return {expected}; it returned {_described(found)}"
    return Failure(BadModelOutput(text))


def _read_pair(pair: Any, step: Any) -> StepPair:
    if type(pair) is tuple and len(pair) == 2 and type(pair[1]) is bool:  # the usual case
        return pair
    if isinstance(pair, Exception):
        return Failure.caught(pair)
    parts = as_list(pair)
    # Where a model returns all outputs and then all flags, of two items, these look like pairs.
    if parts is not None and len(parts) == 2 and _is_flag(parts[1]):
        return parts[0], bool(parts[1])
    what = "a pair (output, is_done) for each state, and is_done must be True or False"
    return unreadable(pair, step, what)


def _is_flag(value: Any) -> bool:
    """Whether it is one bool, also of numpy or torch."""
    kind = str(getattr(value, "dtype", ""))
    return type(value) is bool or (
        kind in ("bool", "torch.bool") and not tuple(getattr(value, "shape", ()))
    )


def as_list(found: Any) -> list[Any] | None:
    """A sequence as a list; else None."""
    if type(found) is not list and not is_sequence(found):
        return None
    try:
        return list(found)
    except TypeError:  # an array without dimensions
        return None


def _described(found: Any) -> str:
    kind, parts = type(found).__qualname__, as_list(found)
    if parts is not None:
        return f"{kind} of {len(parts)}"
    return f"{kind} without dimensions" if is_sequence(found) else kind
