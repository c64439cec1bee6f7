"""Models of steps for the tests, importable by workers."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

from service_streamer import InvalidInput, InvalidItems, ManagedModel
from service_streamer.testing import Gate


class Countdown(ManagedModel):
    """Counts to the item, which is a number, or a dict with "n" and what happens at which step.

    "raise_at", "kill_at", "unsendable_at": the output at which that happens. "invalid": refused by
    ``start``. With a gate, each step waits there.
    """

    def init_model(self, gate: Gate | None = None) -> None:
        self.gate = gate
        self.released = 0
        self.sizes: list[int] = []

    def start(self, items: list[Any]) -> list[dict[str, Any]]:
        wanted = [item if isinstance(item, dict) else {"n": item} for item in items]
        invalid = {
            i: InvalidInput(f"{each['invalid']}")
            for i, each in enumerate(wanted)
            if "invalid" in each
        }
        if invalid:
            raise InvalidItems(invalid)
        if any("raise_at_start" in each for each in wanted):
            raise ValueError("cannot begin")
        return [{**each, "made": 0} for each in wanted]

    def step(self, states: list[dict[str, Any]]) -> list[tuple[Any, bool]]:
        if self.gate is not None:
            self.gate.go_through()
        self.sizes.append(len(states))
        for state in states:
            at = state["made"] + 1
            if state.get("raise_at") == at:
                raise ValueError(f"cannot make {at}")
            if state.get("kill_at") == at:
                os.kill(os.getpid(), signal.SIGKILL)
        outputs = []
        for state in states:
            state["made"] += 1
            made = state["made"]
            output: Any = threading.Lock() if state.get("unsendable_at") == made else made
            if made % state.get("every", 1):
                output = None
            outputs.append((output, made >= state["n"]))
        return outputs

    def release(self, state: dict[str, Any]) -> None:
        self.released += 1


class Resumed(Countdown):
    """Goes on counting where another worker was."""

    def resume(self, item: dict[str, Any], outputs: list[int]) -> dict[str, Any]:
        assert outputs == [*range(1, len(outputs) + 1)]
        return {**item, "made": len(outputs)}

    def start(self, items: list[Any]) -> list[dict[str, Any]]:
        states = super().start(items)
        return [
            {**state, "made": item.get("made", 0)}
            for state, item in zip(states, items, strict=True)
        ]


class Summed(Countdown):
    """Sums up what it counts for ``predict``."""

    def join_outputs(self, outputs: list[int]) -> int:
        return sum(outputs)


class LongTexts(Countdown):
    """Its outputs are long."""

    def step(self, states: Any) -> Any:
        return [("x" * 200_000, is_over) for _, is_over in super().step(states)]


class LongNumbers(Resumed):
    """Its outputs are long numbers."""

    def step(self, states: list[dict[str, Any]]) -> list[tuple[Any, bool]]:
        return [(f"{made:<100000}", is_over) for made, is_over in super().step(states)]

    def resume(self, item: dict[str, Any], outputs: list[Any]) -> dict[str, Any]:
        return super().resume(item, [*map(int, outputs)])
