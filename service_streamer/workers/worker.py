"""The worker's side, the same in every transport: load the model, then answer batches."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from ..errors import BadModelOutput
from ..managed_model import ManagedModel
from ..options import is_sequence
from .messages import BatchOutcome, Failure

__all__ = ["Channel", "ModelSpec", "Predict", "check_model", "describe", "serve"]

Predict = Callable[[list[Any]], Any]


class Channel(Protocol):
    """A worker's end of its private connection to the web process."""

    def receive(self) -> tuple[int, list[Any], dict[int, Failure]] | None:
        """Block for the next batch: its id, its items, and by position why an item is missing.

        None means: end now.
        """

    def send(self, outcome: BatchOutcome) -> None:
        """Answer a batch; an output that cannot travel becomes a failure of its position."""


class ModelSpec:
    """What a worker loads: a ManagedModel subclass, a function, or where to import one of them."""

    __slots__ = ("args", "kwargs", "model")

    def __init__(
        self, model: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ):
        self.model = model
        self.args = tuple(args)
        self.kwargs = dict(kwargs or {})

    def load(self, gpu_id: int | str | None) -> Predict:
        """The function that computes a batch. Raises whatever importing and loading raise."""
        model = self.model
        if isinstance(model, str):
            model = import_model(model)
        if isinstance(model, type):
            managed: ManagedModel = model(gpu_id)
            managed.init_model(*self.args, **self.kwargs)
            return managed.predict
        if self.args or self.kwargs:
            raise TypeError(
                f"{describe(model)} is a function: init arguments are for a ManagedModel"
            )
        predict: Predict = model
        return predict


def import_model(path: str) -> Any:
    """Import ``"package.module:Name"``; dots in Name reach into classes."""
    module_name, _, name = path.partition(":")
    model: Any = importlib.import_module(module_name)
    for part in name.split("."):
        model = getattr(model, part)
    check_model(model)
    return model


def check_model(model: Any) -> None:
    """Refuse what no worker could run.

    Raises:
        TypeError: it is neither a complete ManagedModel subclass nor a callable.
    """
    if isinstance(model, type):
        if not issubclass(model, ManagedModel):
            raise TypeError(f"{describe(model)} is a class but no subclass of ManagedModel")
        missing = sorted(getattr(model, "__abstractmethods__", ()))
        if missing:
            raise TypeError(f"{describe(model)} does not define {' and '.join(missing)}")
    elif isinstance(model, ManagedModel):
        raise TypeError(
            f"pass the class {type(model).__qualname__} itself, not an instance: "
            "each worker builds its own"
        )
    elif not callable(model):
        raise TypeError(
            "the model must be a ManagedModel subclass, a function of a batch, "
            f'or an import string "package.module:Name"; not {model!r}'
        )


def describe(model: Any) -> str:
    """The model's name for messages."""
    if isinstance(model, str):
        return model
    name = getattr(model, "__qualname__", None) or type(model).__qualname__
    return f"{getattr(model, '__module__', None) or type(model).__module__}.{name}"


def serve(channel: Channel, predict: Predict) -> None:
    """Answer batches until the channel says to end. Nothing that a model raises ends it.

    ``SystemExit`` and the like are no errors of a batch: they end the worker, as they say.
    """
    name = describe(predict)
    while (received := channel.receive()) is not None:
        batch_id, items, failures = received
        channel.send(_compute(predict, name, batch_id, items, failures))
        del received, items, failures  # or the batch would stay in memory until the next one comes


def _compute(
    predict: Predict, name: str, batch_id: int, items: list[Any], failures: dict[int, Failure]
) -> BatchOutcome:
    size = len(items) + len(failures)
    expected = len(items)
    started = time.perf_counter()
    try:
        outputs = _checked(predict(items), expected, name) if items else []
    except Exception as error:
        return BatchOutcome(batch_id, [], {}, Failure.caught(error), time.perf_counter() - started)
    duration = time.perf_counter() - started
    if failures:
        results = iter(outputs)
        outputs = [None if i in failures else next(results) for i in range(size)]
    return BatchOutcome(batch_id, outputs, failures, None, duration)


def _checked(outputs: Any, expected: int, name: str) -> list[Any]:
    got = type(outputs).__qualname__
    if is_sequence(outputs):
        try:
            results = list(outputs)
        except TypeError:  # an array without dimensions
            pass
        else:
            if len(results) == expected:
                return results
            got = f"{got} of {len(results)}"
    raise BadModelOutput(
        f"{name} must return a sequence of {expected} results, one per item; it returned {got}"
    )
