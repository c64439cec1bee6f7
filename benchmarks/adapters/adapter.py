"""What a system must be able to do to be measured, whatever it is called there."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, Protocol, cast

__all__ = ["ADAPTERS", "Adapter", "ByHand", "CallQueue", "Outcome", "load"]

#: What became of a call: answered; refused at once; given up since its time had ended; anything
#: else, such as an error or a wrong answer.
Outcome = Literal["served", "rejected", "expired", "failed"]

#: Where each is, by its name: in its own module, since each has its own interpreter.
ADAPTERS = {
    "service_streamer": "service_streamer_adapter:service_streamer_adapter",
    "batched": "batched_adapter:Batched",
    "ray": "ray_adapter:Ray",
    "infinity": "infinity_adapter:Infinity",
    "direct": "direct_adapter:Direct",
    "copy": "direct_adapter:Copy",
    "bare-pipe": "bare_adapter:BarePipe",
    "bare-locks": "bare_adapter:BareLocks",
}


class CallQueue(Protocol):
    """A call that was made."""

    def result(self, timeout: float) -> Any:
        """Wait for the answer; raises after ``timeout`` seconds, and what the call raised."""


class Adapter(Protocol):
    """A system with its workers; each call is of one item, and may be made from any thread.

    Attributes:
        drivers: which of ``drivers.DRIVERS`` it can be measured with.
    """

    drivers: frozenset[str]

    def __init__(self, workload: str, workers: int, settings: Mapping[str, Any]) -> None:
        """Return when every worker has loaded its model.

        Args:
            settings: options of the system, by the names that it has for them, and which of its
                modes this is.
        """

    def predict(self, item: Any) -> Any:
        """The answer."""

    def submit(self, item: Any) -> CallQueue:
        """Make the call, without waiting."""

    async def apredict(self, item: Any) -> Any:
        """The answer, for tasks of one event loop."""

    def start(self, item: Any, deadline: float | None, done: Callable[[Outcome], object]) -> None:
        """Make the call without waiting; it never raises.

        Args:
            deadline: when the answer is of no use any more, as ``time.monotonic`` has it; None for
                never. Told to systems that can make use of it.
            done: called exactly once, from any thread, as soon as it is known what became of it.
        """

    def close(self) -> None:
        """End its workers, without finishing what waits."""


class ByHand(Protocol):
    """No system at all: what could be computed without one."""

    drivers: frozenset[str]

    def __init__(self, workload: str, workers: int, settings: Mapping[str, Any]) -> None: ...

    def batches(self, items: Sequence[Any]) -> Iterator[int]:
        """Compute them all, batch after batch; yield how many items each had."""

    def close(self) -> None: ...


def load(name: str, workload: str, workers: int, settings: Mapping[str, Any]) -> Adapter | ByHand:
    """Start a system. Raises KeyError of an unknown name, and whatever the system raises."""
    module, _, attribute = ADAPTERS[name].partition(":")
    make = getattr(importlib.import_module(f"adapters.{module}"), attribute)
    return cast("Adapter | ByHand", make(workload, workers, settings))
