"""What the processes of pools call before they serve: they import this module, and little else."""

from __future__ import annotations

import functools
import pickle
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from service_streamer.engine.engine import Engine
from service_streamer.observe.record import BatchRecord


def breaks(place: Any, name: str, concerns: Callable[..., bool] = lambda *_: True) -> None:
    """Have something of ours raise the first time that it concerns a call."""
    inner, has_raised = getattr(place, name), False

    def raises_once(*args: Any, **options: Any) -> Any:
        nonlocal has_raised
        if not has_raised and concerns(*args):
            has_raised = True
            raise LookupError("of ours")
        return inner(*args, **options)

    setattr(place, name, raises_once)


break_submit = functools.partial(breaks, Engine, "submit")
break_timing = functools.partial(breaks, BatchRecord, "spent")
break_outputs = functools.partial(breaks, Engine, "hold")


def break_packing() -> None:
    breaks(pickle, "dumps", has_answers)


def has_answers(messages: Any, *_: Any) -> bool:
    return type(messages) is list and any(each[0] > 0 for each in messages)


def hold_late(path: Path) -> None:
    """When a stream is to be held for the first time, let a test read all that came before that."""
    hold, has_held = Engine.hold, False

    def held_late(engine: Engine, call: Any, *, is_held: bool) -> None:
        nonlocal has_held
        if is_held and not has_held:
            has_held = True
            path.read_bytes()
            while call.reply.session.unsent:
                time.sleep(0.001)
        hold(engine, call, is_held=is_held)

    Engine.hold = held_late  # type: ignore[method-assign]
