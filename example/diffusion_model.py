"""A diffusion of points: noise becomes a picture, step by step. A model of steps, without any text.

    python example/diffusion_model.py star

A request asks for a shape. Its points begin as noise, and a small network moves them a little at
each step, until they are the shape. Each step's output is the picture so far. Requests have numbers
of steps and seeds of their own, join the others at any step, and leave when they are done.

The network is small and numpy computes it, so this file shows little else than what a model of
steps is: ``ManagedDiffusionModel``. ``scripts/train_diffusion.py`` trains the network.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from example_common import quote
from service_streamer import InvalidInput, InvalidItems, ManagedModel

if TYPE_CHECKING:
    from numpy.typing import NDArray

DEFAULT_MODEL = Path(__file__).resolve().parent / "models" / "diffusion"
SHAPES = ("heart", "smile", "spiral", "star")
BLOCK = 64  # points that are computed together
MAX_POINTS = 4096
MAX_STEPS = 1000

#: What the network knows of a number is its sines and cosines, at these frequencies.
_FREQUENCIES = (1.0, 2.0, 4.0)


def velocity(
    weights: Mapping[str, Any], points: Any, angles: Any, shapes: Any, xp: Any = np
) -> Any:
    """Returns where the network moves points.

    A picture at the angle ``a`` is ``cos(a) * shape + sin(a) * noise``: noise at a right angle, the
    shape at 0. The velocity is its derivative by the angle.

    Args:
        weights: arrays by name, as ``scripts/train_diffusion.py`` writes them.
        points: of shape (blocks, points, 2).
        angles: of each block.
        shapes: of each block, its number in ``SHAPES``.
        xp: numpy, or torch with tensors for arrays.
    """
    # Of three dimensions, so that numpy multiplies block by block. In one product of all points of
    # a batch, the order of sums may depend on their number, and so the last digits.
    hidden = _waves(points, xp) @ weights["points"]
    hidden = hidden + _waves(angles[:, None, None], xp) @ weights["angle"]
    hidden = hidden + weights["shape"][shapes][:, None, :]
    for name in ("first", "second"):
        hidden = xp.tanh(hidden) @ weights[name] + weights[f"{name} bias"]
    return xp.tanh(hidden) @ weights["last"]


def _waves(values: Any, xp: Any) -> Any:
    waves = [wave(values * each) for each in _FREQUENCIES for wave in (xp.sin, xp.cos)]
    return xp.concatenate([values, *waves], -1)


@dataclass
class Picture:
    """The state of a request.

    Attributes:
        shape: the number of what it becomes.
        count: how many points were asked for.
        steps: how many steps it takes.
        taken: how many it has taken.
        points: of shape (blocks, BLOCK, 2).
    """

    shape: int
    count: int
    steps: int
    taken: int
    points: NDArray[np.float32]


class ManagedDiffusionModel(ManagedModel):
    """The diffusion in a worker.

    An item is a mapping: ``{"shape": "heart", "steps": 30, "seed": 7, "points": 512}``. All but the
    shape may be left out. An output is the picture after a step: an array of shape (points, 2).
    ``predict`` and ``submit`` return the last one.
    """

    def init_model(self, model_path: str | os.PathLike[str] = DEFAULT_MODEL) -> None:
        """Loads the network from a folder that ``scripts/train_diffusion.py`` wrote.

        Raises:
            FileNotFoundError: it is not there.
        """
        with np.load(Path(model_path) / "weights.npz") as file:
            self.model: dict[str, NDArray[np.float32]] = dict(file)

    def start(self, items: list[Any]) -> list[Picture]:
        """Returns the noise that each item's picture begins with.

        Raises:
            InvalidItems: some items are not valid; their errors are ``InvalidInput``.
        """
        pictures, errors = [], {}
        for position, item in enumerate(items):
            try:
                pictures.append(_begin(item))
            except InvalidInput as error:
                errors[position] = error
        if errors:
            raise InvalidItems(errors)
        return pictures

    def step(self, states: list[Picture]) -> list[tuple[NDArray[np.float32], bool]]:
        """Moves all points of all pictures in one call of the network."""
        blocks = [len(state.points) for state in states]
        points = np.concatenate([state.points for state in states])
        angles = np.array([_angle(state, state.taken) for state in states], np.float32)
        turns = np.array(
            [_angle(state, state.taken) - _angle(state, state.taken + 1) for state in states],
            np.float32,
        )
        shapes = np.array([state.shape for state in states])
        angles, turns, shapes = (np.repeat(each, blocks) for each in (angles, turns, shapes))
        moving = velocity(self.model, points, angles, shapes)
        turns = turns[:, None, None]
        moved = np.cos(turns) * points - np.sin(turns) * moving
        # No state has changed so far: if one of the lines above raises, it may be called again.
        outputs = []
        for state, part in zip(states, np.split(moved, np.cumsum(blocks)[:-1]), strict=True):
            state.points = part
            state.taken += 1
            picture = part.reshape(-1, 2)[: state.count].copy()
            outputs.append((picture, state.taken == state.steps))
        return outputs

    def cost(self, state: Picture) -> float:
        """Returns the number of its points: ``max_batch_cost`` bounds those of a batch."""
        return float(BLOCK * len(state.points))

    def join_outputs(self, outputs: list[NDArray[np.float32]]) -> NDArray[np.float32]:
        """Returns the last picture."""
        return outputs[-1]


def _begin(item: Any) -> Picture:
    if not isinstance(item, Mapping):
        raise InvalidInput(
            f'item: must be a mapping such as {{"shape": "heart"}}, not {quote(item)}'
        )
    if unknown := [name for name in item if name not in ("shape", "steps", "seed", "points")]:
        raise InvalidInput(f"unknown field {quote(unknown[0])}; use shape, steps, seed and points")
    shape = item.get("shape")
    if not isinstance(shape, str) or shape not in SHAPES:
        raise InvalidInput(f"shape: must be one of {', '.join(SHAPES)}; not {quote(shape)}")
    steps = _whole_number(item, "steps", 30, 1, MAX_STEPS)
    count = _whole_number(item, "points", 512, 1, MAX_POINTS)
    random = np.random.default_rng(_whole_number(item, "seed", 0, 0, 2**63 - 1))
    noise = random.standard_normal((-(-count // BLOCK), BLOCK, 2), np.float32)
    return Picture(SHAPES.index(shape), count, steps, 0, noise)


def _whole_number(item: Mapping[str, Any], name: str, default: int, least: int, most: int) -> int:
    value = item.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise InvalidInput(f"{name}: must be an int from {least} to {most}, not {quote(value)}")
    return value


def _angle(state: Picture, taken: int) -> float:
    """The angle of a picture after so many steps: see ``velocity``."""
    return float(np.pi / 2 * (1 - taken / state.steps))


def draw(points: NDArray[np.float32], width: int = 40) -> str:
    """Returns points as text for a terminal, in Braille signs: each has 2 x 4 dots."""
    rows = width // 2
    size = np.array([2 * width, 4 * rows])
    at = ((points * (1, -1) / 5 + 0.5) * size).astype(int)
    at = at[((at >= 0) & (at < size)).all(axis=1)]
    # Unicode numbers the dots of a sign downwards, but has put the lowest two at the end.
    bits = np.array([[0x01, 0x08], [0x02, 0x10], [0x04, 0x20], [0x40, 0x80]])
    signs = np.full((rows, width), 0x2800)
    np.bitwise_or.at(signs, (at[:, 1] // 4, at[:, 0] // 2), bits[at[:, 1] % 4, at[:, 0] % 2])
    return "\n".join("".join(map(chr, row)) for row in signs)


def main(arguments: Sequence[str] | None = None) -> None:
    """Shows how a picture comes to be, as it is streamed."""
    import argparse

    from service_streamer import ThreadedStreamer

    parser = argparse.ArgumentParser(description="Draws a shape out of noise, step by step.")
    parser.add_argument("shape", choices=SHAPES, nargs="?", default="heart")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--points", type=int, default=1024)
    item = vars(parser.parse_args(arguments))
    with ThreadedStreamer(ManagedDiffusionModel) as streamer:
        for picture in streamer.stream(item):
            print(draw(picture), end="\n\n")


if __name__ == "__main__":
    main()
