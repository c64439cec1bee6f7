"""Models for the tests of shared pools, importable by workers."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stream_models import Countdown


def large_or_small(batch: list[str]) -> list[bytes | str]:
    return [b"x" * 100_000 if item == "large" else item for item in batch]


def echo_or_pid(batch: list[Any]) -> list[Any]:
    """The process of the worker in the place of None."""
    return [os.getpid() if item is None else item for item in batch]


class Crowded(Countdown):
    """Its outputs are how many items were in the step."""

    def step(self, states: list[dict[str, Any]]) -> list[tuple[Any, bool]]:
        return [(len(states), is_last) for _, is_last in super().step(states)]


def memory_each(batch: list[Any]) -> list[bytearray]:
    return [bytearray(1_300_000) for _ in batch]


def fail_in_turn(starts: Path, errors: Sequence[Exception | int | None]) -> None:
    """In the process of a pool: the first of them fail, exit with a status, or serve."""
    with starts.open("a") as file:
        file.write("x")
        number = file.tell() - 1
    error = errors[number] if number < len(errors) else None
    if isinstance(error, int):
        os._exit(error)
    if error is not None:
        raise error
