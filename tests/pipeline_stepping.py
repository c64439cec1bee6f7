"""Drives a pipeline's steps by hand, as a worker does."""

from __future__ import annotations

import random
from typing import Any

from service_streamer.pipelines import SteppedPipeline

__all__ = ["item", "outputs_of", "results_of"]


def item(inputs: Any, do: str = "predict", **parameters: Any) -> dict[str, Any]:
    return {"do": do, "inputs": inputs, "parameters": parameters}


def outputs_of(model: SteppedPipeline, items: list[Any], seed: int | None = None) -> list[Any]:
    """The outputs of each item. With a seed they begin at random steps, a few at a time."""
    source = random.Random(seed)
    waiting = list(enumerate(items))
    running: dict[int, Any] = {}
    outputs: list[list[Any]] = [[] for _ in items]
    while waiting or running:
        count = len(waiting) if seed is None else source.randrange(3)
        if begun := waiting[:count]:
            states = model.start([each for _, each in begun])
            running |= {at: state for (at, _), state in zip(begun, states, strict=True)}
            del waiting[:count]
        if not running:
            continue
        order = list(running)
        source.shuffle(order)
        steps = model.step([running[at] for at in order])
        assert len(steps) == len(order)
        for at, (output, is_done) in zip(order, steps, strict=True):
            if output is not None:
                outputs[at].append(output)
            if is_done:
                model.release(running.pop(at))
    loop: Any = model.loop
    assert loop is None or not loop._homes
    return outputs


def results_of(model: SteppedPipeline, items: list[Any], seed: int | None = None) -> list[Any]:
    return [model.join_outputs(outputs) for outputs in outputs_of(model, items, seed)]
