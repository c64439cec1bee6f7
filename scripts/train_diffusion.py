"""Trains the small diffusion of points that ``example/`` ships, on shapes that it draws.

    python scripts/train_diffusion.py

A minute or two is enough. The result is written to ``--output`` only if it reaches the
bar: so large a share of the points that it draws has to lie on the shape.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from training import ROOT, fit, hand_over

sys.path[:0] = [str(ROOT), str(ROOT / "example")]

from diffusion_model import (  # noqa: E402
    BLOCK,
    DEFAULT_MODEL,
    SHAPES,
    ManagedDiffusionModel,
    velocity,
)

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

__all__ = ["main", "on_shape", "outline"]

BLOCKS = 32  # in a batch
HIDDEN = 96
PEAK_RATE = 4e-3
WIDTH = 0.15  # a point that is so near to a line is on it; pictures are about 3 wide

Curve = Callable[["NDArray[np.float64]"], tuple[Any, Any]]


def _arc(x: float, y: float, radius: float, start: float = 0, end: float = 2 * math.pi) -> Curve:
    def curve(t: NDArray[np.float64]) -> tuple[Any, Any]:
        angle = start + (end - start) * t
        return x + radius * np.cos(angle), y + radius * np.sin(angle)

    return curve


def _heart(t: NDArray[np.float64]) -> tuple[Any, Any]:
    a = 2 * math.pi * t
    y = 13 * np.cos(a) - 5 * np.cos(2 * a) - 2 * np.cos(3 * a) - np.cos(4 * a)
    return 1.6 * np.sin(a) ** 3, (y + 2) / 10


def _spiral(t: NDArray[np.float64]) -> tuple[Any, Any]:
    t = np.sqrt(t)  # as many points outside as its turns are longer there
    return 1.6 * t * np.cos(5 * math.pi * t), 1.6 * t * np.sin(5 * math.pi * t)


def _star(t: NDArray[np.float64]) -> tuple[Any, Any]:
    angles = math.pi * (0.5 + np.arange(11) / 5)
    radii = np.where(np.arange(11) % 2, 0.75, 1.75)
    corners = np.stack([radii * np.cos(angles), radii * np.sin(angles)])
    side = (10 * t).astype(int).clip(0, 9)
    x, y = corners[:, side] + (10 * t - side) * (corners[:, side + 1] - corners[:, side])
    return x, y


#: The curves of each shape, and their share of its points.
CURVES: dict[str, list[tuple[float, Curve]]] = {
    "heart": [(1.0, _heart)],
    "smile": [
        (0.6, _arc(0, 0, 1.6)),
        (0.1, _arc(-0.55, 0.55, 0.15)),
        (0.1, _arc(0.55, 0.55, 0.15)),
        (0.2, _arc(0, -0.1, 0.9, 1.15 * math.pi, 1.85 * math.pi)),
    ],
    "spiral": [(1.0, _spiral)],
    "star": [(1.0, _star)],
}


def outline(shape: str, count: int, random: np.random.Generator) -> NDArray[np.float32]:
    """Returns points that lie on a shape, of shape (count, 2)."""
    shares, curves = zip(*CURVES[shape], strict=True)
    which = random.choice(len(curves), count, p=shares)
    t = random.random(count)
    points = np.empty((count, 2), np.float32)
    for number, curve in enumerate(curves):
        chosen = which == number
        points[chosen] = np.stack(curve(t[chosen]), axis=-1)
    return points


def on_shape(
    model: ManagedDiffusionModel, shape: str, count: int = 512, of: str | None = None
) -> float:
    """Returns the share of the points of a picture that lie on its shape, of 0.0 to 1.0.

    Args:
        of: another shape, to measure how well the picture is told from that.
    """
    [picture] = model.start([{"shape": shape, "points": count}])
    ends = False
    while not ends:
        [(points, ends)] = model.step([picture])
    line = outline(of or shape, 2048, np.random.default_rng(0))
    distance = np.sqrt(((points[:, None] - line) ** 2).sum(-1)).min(axis=1)
    return float((distance < WIDTH).mean())


def train(folder: Path, steps: int, seed: int) -> None:
    """Trains a network and writes its weights to a folder."""
    import torch

    torch.manual_seed(seed)
    torch.use_deterministic_algorithms(True)
    random = np.random.default_rng(seed)

    def normal(inputs: int, outputs: int) -> torch.nn.Parameter:
        return torch.nn.Parameter(torch.randn(inputs, outputs) / math.sqrt(inputs))

    weights: Any = torch.nn.ParameterDict(
        {
            "points": normal(14, HIDDEN),  # x and y, and three sines and cosines of each
            "angle": normal(7, HIDDEN),
            "shape": normal(len(SHAPES), HIDDEN),
            "first": normal(HIDDEN, HIDDEN),
            "first bias": torch.zeros(HIDDEN),
            "second": normal(HIDDEN, HIDDEN),
            "second bias": torch.zeros(HIDDEN),
            "last": normal(HIDDEN, 2),
        }
    )

    def drawings() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for _ in range(steps):
            shapes = random.integers(len(SHAPES), size=BLOCKS)
            points = [outline(SHAPES[shape], BLOCK, random) for shape in shapes]
            yield torch.from_numpy(shapes), torch.from_numpy(np.stack(points))

    def loss_of(batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        shapes, points = batch
        angles = math.pi / 2 * torch.rand(BLOCKS)
        cos, sin = torch.cos(angles)[:, None, None], torch.sin(angles)[:, None, None]
        noise = torch.randn_like(points)
        moving = velocity(weights, cos * points + sin * noise, angles, shapes, torch)
        return torch.nn.functional.mse_loss(moving, cos * noise - sin * points)

    fit(weights, drawings(), steps, PEAK_RATE, loss_of)
    arrays: dict[str, Any] = {name: each.detach().numpy() for name, each in weights.items()}
    np.savez(folder / "weights.npz", **arrays)


def main(arguments: Sequence[str] | None = None) -> int:
    """Trains, measures, and writes the model if it reaches the bar; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, default=DEFAULT_MODEL, help="the model's folder")
    parser.add_argument("--steps", type=int, default=4000, help="batches to train with")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--bar", type=float, default=0.9, help="the least share to accept")
    options = parser.parse_args(arguments)
    if options.steps < 1:
        parser.error("--steps must be 1 or more")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        train(folder, options.steps, options.seed)
        model = ManagedDiffusionModel()
        model.init_model(folder)
        shares = {shape: on_shape(model, shape) for shape in SHAPES}
        print("points on the shape:", ", ".join(f"{s} {share:.1%}" for s, share in shares.items()))
        return hand_over(folder, options.output, good=min(shares.values()) >= options.bar)


if __name__ == "__main__":
    sys.exit(main())
