"""A model of steps for the tests, and the channel that drives a worker's loop step by step."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from service_streamer import InvalidInput, InvalidItems, ManagedModel
from service_streamer.workers.model_spec import LoadedModel, ModelSpec
from service_streamer.workers.protocol import DROP, HOLD, RESUME, Failure
from service_streamer.workers.runner import Channel
from service_streamer.workers.transport import BatchReport, StepReport
from worker_loop import Clock, run


class NoRoomError(Exception):
    pass


class State:
    """Has done ``at`` steps of its item; holds memory until it is released."""

    def __init__(self, item: dict[str, Any]) -> None:
        self.item = item
        self.at = 0


class Counting(ManagedModel):
    """Gives the outputs 0, 1, ... n-1. Items say what happens besides.

    n: steps. start: what happens there. step: likewise, by step: "raise", "invalid", "error" (in
    place of a pair), "full" (never fits), "exit", "quiet" (no output). cost, grows: of the state.

    Args:
        room: how many states fit into memory, and how many start at once.
    """

    out_of_memory_errors = (NoRoomError,)

    def init_model(self, room: int = 1000, at_once: int = 1000) -> None:
        self.room, self.at_once = room, at_once
        self.held: set[State] = set()
        self.calls: list[tuple[str, int]] = []  # of start and step, with how many
        self.most = 0
        self.most_cost = 0.0

    def start(self, items: list[dict[str, Any]]) -> Sequence[Any]:
        self.calls.append(("start", len(items)))
        self.happens([item.get("start") for item in items])
        if len(items) > self.at_once or len(self.held) + len(items) > self.room:
            raise NoRoomError(f"{len(items)} start beside {len(self.held)}")
        states = [State(item) for item in items]
        self.held |= set(states)
        self.most = max(self.most, len(self.held))
        return states

    def step(self, states: Any) -> Any:
        states = list(states)
        self.calls.append(("step", len(states)))
        assert set(states) <= self.held
        whats = [state.item.get("step", {}).get(state.at) for state in states]
        self.happens(whats)
        if len(self.held) > self.room:
            raise NoRoomError(f"{len(self.held)} of {self.room}")
        self.most_cost = max(self.most_cost, sum(map(self.cost, states)) if len(states) > 1 else 0)
        pairs: list[Any] = []
        for state, what in zip(states, whats, strict=True):
            output = None if what == "quiet" else state.at
            state.at += 1
            error = ValueError(f"{state.item}")
            pairs.append(error if what == "error" else (output, state.at == state.item["n"]))
        return pairs

    def happens(self, whats: list[str | None]) -> None:
        if invalid := [i for i, what in enumerate(whats) if what == "invalid"]:
            raise InvalidItems({i: InvalidInput(f"bad {i}") for i in invalid})
        for what in whats:
            if what == "raise":
                raise ValueError("it happens")
            if what == "full":
                raise NoRoomError("it never fits")
            if what == "exit":
                sys.exit(3)

    def release(self, state: State) -> None:
        self.held.remove(state)  # raises KeyError the second time

    def cost(self, state: State) -> float:
        cost: float = state.item.get("cost", 1) + state.item.get("grows", 0) * state.at
        return cost


class Turns(Channel):
    """Hands out messages, turn by turn: one turn before each step. Ends when nothing is left.

    A message is an item, for its whole result; an item in a list, for a stream; a tuple of ids to
    drop; or one of HOLD or RESUME and ids. Batches are numbered in order.

    Attributes:
        outputs: of streams, by batch.
        ends: the reports of batches that are over, by batch.
        steps: the reports of steps.
    """

    def __init__(self, *turns: Sequence[Any]) -> None:
        self._turns = [list(turn) for turn in turns]
        self._count = 0
        self.outputs: dict[int, list[Any]] = {}
        self.ends: dict[int, BatchReport] = {}
        self.steps: list[StepReport] = []
        self.checks = 0
        self.unsendable: dict[int, Any] = {}  # by batch, an output

    def is_waiting(self) -> bool:
        if self._turns and not self._turns[0]:
            del self._turns[0]  # the next turn begins after this step
            return False
        return bool(self._turns)

    def receive(self) -> tuple[Any, ...] | None:
        while self._turns and not self._turns[0]:
            del self._turns[0]
        if not self._turns:
            return None
        message = self._turns[0].pop(0)
        if message is None:
            return None
        if isinstance(message, tuple) and message[:1] in ((HOLD,), (RESUME,)):
            return message[0], list(message[1:])
        if isinstance(message, tuple):
            return DROP, list(message)
        self._count += 1
        is_stream = isinstance(message, list)
        return self._count - 1, message if is_stream else [message], {}, is_stream

    def decode(self, received: Any) -> Any:
        batch_id, items, *_ = received
        if items == ["unreadable"]:
            return batch_id, [], {0: Failure(TypeError("it cannot be unpickled"))}, None
        return batch_id, items, {}, None

    def encode(self, report: Any) -> None:
        for batch_id in [i for i, each in self.unsendable.items() if report.outputs.get(i) == each]:
            del report.outputs[batch_id]
            failure = Failure(TypeError("it cannot travel"))
            report.done.append(BatchReport(batch_id, failure=failure))

    def send(self, report: BatchReport | StepReport) -> None:
        assert isinstance(report, StepReport)
        self.steps.append(report)
        for batch_id, output in report.outputs.items():
            assert batch_id not in self.ends
            self.outputs.setdefault(batch_id, []).append(output)
        for each in report.done:
            assert each.batch_id not in self.ends, "it is over once"
            self.ends[each.batch_id] = each

    def check_owner(self) -> None:
        self.checks += 1

    @property
    def results(self) -> dict[int, Any]:
        """By batch: its result, or the name of the exception that it got."""
        return {batch_id: self._result(each) for batch_id, each in sorted(self.ends.items())}

    def _result(self, report: BatchReport) -> Any:
        failure = report.failure or report.failures.get(0)
        return report.outputs[0] if failure is None else type(failure.exception()).__name__


def loaded(
    model: type[ManagedModel] = Counting, places: int = 4, *args: Any, **options: Any
) -> LoadedModel:
    return ModelSpec(model, args, batch_size=places, **options).load(None)


def served(
    model: LoadedModel, *turns: Sequence[Any], clock: Clock | None = None, **options: Any
) -> Turns:
    """Have the model take its steps. If time stands still, starts take none, and all do start."""
    channel = Turns(*turns)
    run(channel, model, clock or Clock(), **options)
    return channel


def item(n: int, **options: Any) -> dict[str, Any]:
    return {"n": n, **options}
