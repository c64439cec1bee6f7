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
    if type(outputs) is list and len(outputs) == expected != model.columns:  # the usual case
        return list(outputs)
    results = as_list(outputs)
    got = type(outputs).__qualname__
    if results is not None:
        count = len(results)
        has_fields = isinstance(outputs, tuple) and _has_fields(type(outputs))
        are_columns = isinstance(outputs, (list, tuple)) and _are_columns(results, expected)
        if count != expected and are_columns:
            model.columns = count
        are_columns &= model.columns == count
        if count == expected and not (has_fields or are_columns):
            return results
        got = f"{got} of {count}"
        if has_fields:
            got += " fields"
        if are_columns:
            got += ", each with a row for every item"
    elif is_sequence(outputs):
        got += " without dimensions"
    raise BadModelOutput(
        f"{model.name} must return a sequence of {expected} results, one per item; "
        f"it returned {got}"
    )


def _has_fields(kind: type) -> bool:
    """Whether a kind of tuple has names for its parts: a NamedTuple, or what torch.max returns."""
    return hasattr(kind, "_fields") or hasattr(kind, "n_fields")


def _are_columns(results: list[Any], expected: int) -> bool:
    """Whether they look like a tuple of arrays with a row for each item: (logits, hidden), say.

    For as many items as there are arrays, results may look the same. So they are refused only in a
    model that has returned so many for another number of items: the search for a bad item, which
    follows then, soon comes to that number.
    """
    return bool(results) and all(
        tuple(getattr(each, "shape", ()))[:1] == (expected,) for each in results
    )


def memory_of(outputs: Any) -> weakref.ref[Any] | None:
    """The array or tensor in whose memory the outputs lie, by the first of them."""
    first = first_value(outputs)
    if type(first) in PLAIN:
        return None
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    array, tensor = getattr(numpy, "ndarray", ()), getattr(torch, "Tensor", ())
    base = first
    while base is not None:
        first = base
        if not isinstance(first, (array, tensor)):  # such as memory that is shared
            return None
        base = first._base if isinstance(first, tensor) else first.base
    return None if first is None else weakref.ref(first)


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


def unreadable(found: Any, function: Any, what: str) -> Failure:
    """Of an item, if this is what the model's function returned in place of ``what``."""
    parts, kind = as_list(found), type(found).__qualname__
    kind = kind if parts is None else f"{kind} of {len(parts)}"
    text = f"{describe(function)} must return {what}; it returned {kind}"
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
    if not is_sequence(found):
        return None
    try:
        return list(found)
    except TypeError:  # an array without dimensions
        return None
