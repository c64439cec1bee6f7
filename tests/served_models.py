"""Models of their own for ``serve``, which do what a test tells them with their items."""

from __future__ import annotations

import json
import os
import signal
from typing import Any

from service_streamer import InvalidInput, ManagedModel, Overloaded, PredictTimeout
from service_streamer.testing import Gate
from stream_models import Countdown


class SecretError(Exception):
    """What nobody outside may read of."""


#: What an item has its batch raise, each with a secret in its text.
SECRET_ERRORS: dict[str, type[Exception]] = {
    "raise": SecretError, "value error": ValueError, "timeout error": TimeoutError,
    "recursion error": RecursionError, "overloaded": Overloaded, "predict timeout": PredictTimeout,
}  # fmt: skip


class Obedient(ManagedModel):
    """Answers each item with itself, unless it is told something else.

    It waits at the gate, if the environment has one, before each batch, and writes down there which
    items it computes.
    """

    def init_model(self) -> None:
        folder = os.environ.get("TEST_GATE")
        self.gate = Gate(folder) if folder else None
        self.record = os.environ.get("TEST_RECORD")

    def predict(self, batch: list[Any]) -> list[Any]:
        if self.record:
            with open(self.record, "a") as record:
                record.write(json.dumps(batch) + "\n")
        if self.gate is not None:
            self.gate.go_through()
        return [self._answer(item) for item in batch]

    def _answer(self, item: Any) -> Any:
        match item:
            case "invalid":
                raise InvalidInput("inputs: must not be 'invalid'; send another word")
            case "unicode error":
                b"\xff the password is 12345".decode()
            case str() if item in SECRET_ERRORS:
                raise SECRET_ERRORS[item]("the password is 12345")
            case "surrogate in words":
                raise InvalidInput("inputs: \ud83d")
            case "surrogate in a field":
                raise InvalidInput("inputs[\ud83d]: is wrong")
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "nan":
                return float("nan")
            case "object":
                return object()
            case "surrogate":
                return "\ud83d"
        return item


def size(item: Any) -> int:
    """What an input costs, of those that have a length."""
    if not isinstance(item, str):
        raise InvalidInput("inputs: must be a string; it has no length")
    return len(item)


class Sized(Obedient):
    """Says what its inputs cost."""

    length = staticmethod(size)


class Failing(ManagedModel):
    """Cannot be loaded."""

    def init_model(self) -> None:
        raise OSError("the weights are not there")

    def predict(self, batch: list[Any]) -> list[Any]:
        raise NotImplementedError


def double(batch: list[Any]) -> list[Any]:
    """No class: a function will do."""
    return [2 * item for item in batch]


class Late(Obedient):
    """Is loaded when the test lets it, and waits for nobody from then on."""

    def init_model(self) -> None:
        super().init_model()
        if self.gate is not None:
            self.gate.go_through()
            self.gate.close()
            self.gate = None


def kinds(batch: list[Any]) -> list[str]:
    """Says what each item is."""
    return [f"{type(item).__name__} {item!r}" for item in batch]


class Counting(Countdown):
    """Counts in steps; an item with "size" gets texts of so many characters instead of numbers.

    One with "odd_at" gets something at that step that JSON cannot say.

    With a gate in the environment each step waits there; it writes down how many items it has.
    """

    def init_model(self) -> None:  # type: ignore[override]
        folder = os.environ.get("TEST_GATE")
        super().init_model(Gate(folder) if folder else None)
        self.record = os.environ.get("TEST_RECORD")

    def step(self, states: list[dict[str, Any]]) -> list[tuple[Any, bool]]:
        outputs = super().step(states)
        if self.record:
            with open(self.record, "a") as record:
                record.write(f"{len(states)}\n")
        return [
            (self._shown(state, output), is_done)
            for state, (output, is_done) in zip(states, outputs, strict=True)
        ]

    def _shown(self, state: dict[str, Any], output: Any) -> Any:
        if state.get("odd_at") == state["made"]:
            return object()
        return "x" * state["size"] if "size" in state else output
