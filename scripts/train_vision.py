"""Trains the small image model that ``example/`` ships, on images that it draws.

    python scripts/train_vision.py
    python scripts/train_vision.py --draw star star.jpg      (draws one, to try the model with)

It learns to tell ten shapes, of any colour and size, anywhere, on backgrounds of any kind. A few
minutes on two cores are enough. The result is written to ``--output`` only if it reaches the bar.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import random
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from PIL import Image, ImageDraw

from training import ROOT, batches, fit, hand_over

sys.path[:0] = [str(ROOT), str(ROOT / "example")]

from vision_model import (  # noqa: E402
    DEFAULT_MODEL,
    VisionModel,
    build_network,
    decode_image,
    read_config,
)

if TYPE_CHECKING:
    import torch

__all__ = ["LABELS", "Drawing", "accuracy", "draw", "drawings", "main"]

BATCH = 32
PEAK_RATE = 4e-3
HELD_OUT = 500  # drawings to measure with
IMAGE_SIZE = 224
MEAN, STD = (0.5, 0.5, 0.5), (0.25, 0.25, 0.25)

Point = tuple[float, float]
Colour = tuple[int, ...]


class Drawing(NamedTuple):
    """The bytes of a JPEG, and what it shows."""

    data: bytes
    label: str


def _disc(radius: float = 1.0, x: float = 0.0) -> list[Point]:
    angles = [2 * math.pi * number / 48 for number in range(48)]
    return [(x + radius * math.cos(angle), radius * math.sin(angle)) for angle in angles]


def _star() -> list[Point]:
    angles = [math.pi * (number / 5 - 0.5) for number in range(10)]
    radii = [1.0, 0.45] * 5
    return [(r * math.cos(a), r * math.sin(a)) for r, a in zip(radii, angles, strict=True)]


def _heart() -> list[Point]:
    found = []
    for t in (2 * math.pi * number / 48 for number in range(48)):
        y = 13 * math.cos(t) - 5 * math.cos(2 * t) - 2 * math.cos(3 * t) - math.cos(4 * t)
        found.append((math.sin(t) ** 3, -(y + 2.5) / 15))
    return found


#: Of each shape what is filled, and what is cut out of that; from -1 to 1, and downwards.
SHAPES: dict[str, tuple[list[Point], list[Point]]] = {
    "arrow": (
        [(-1, -0.25), (0.1, -0.25), (0.1, -0.7), (1, 0), (0.1, 0.7), (0.1, 0.25), (-1, 0.25)],
        [],
    ),
    "circle": (_disc(), []),
    "cross": (
        [
            *[(-0.3, -1), (0.3, -1), (0.3, -0.3), (1, -0.3), (1, 0.3), (0.3, 0.3)],
            *[(0.3, 1), (-0.3, 1), (-0.3, 0.3), (-1, 0.3), (-1, -0.3), (-0.3, -0.3)],
        ],
        [],
    ),
    "heart": (_heart(), []),
    "house": (
        [(0, -1), (1, -0.1), (0.75, -0.1), (0.75, 0.9), (-0.75, 0.9), (-0.75, -0.1), (-1, -0.1)],
        [],
    ),
    "moon": (_disc(), _disc(0.85, 0.5)),
    "ring": (_disc(), _disc(0.6)),
    "square": ([(-0.85, -0.85), (0.85, -0.85), (0.85, 0.85), (-0.85, 0.85)], []),
    "star": (_star(), []),
    "triangle": ([(0, -0.95), (1, 0.8), (-1, 0.8)], []),
}
LABELS = tuple(SHAPES)


def draw(label: str, chance: random.Random) -> Image.Image:
    """Returns a drawing of a shape, of which everything else is left to chance."""
    size = chance.randint(160, 400), chance.randint(160, 400)
    noise = np.random.default_rng(chance.getrandbits(32))
    paper = [chance.randrange(256) for _ in range(3)]
    image = _paper(size, paper, chance, noise)
    ink = paper
    while sum(abs(a - b) for a, b in zip(ink, paper, strict=True)) < 200:
        ink = [chance.randrange(256) for _ in range(3)]
    image.paste(tuple(ink), mask=_mask(label, size, chance))
    grain = noise.normal(0, chance.uniform(0, 12), (size[1], size[0], 1))
    return Image.fromarray(np.clip(np.asarray(image) + grain, 0, 255).astype(np.uint8))


def _paper(
    size: tuple[int, int], colour: Sequence[int], chance: random.Random, noise: np.random.Generator
) -> Image.Image:
    """Returns a background: a colour with blots, and perhaps some lines."""
    patches = chance.randint(2, 8), chance.randint(2, 8), 3
    blots = np.clip(np.array(colour) + noise.normal(0, chance.uniform(0, 30), patches), 0, 255)
    image = Image.fromarray(blots.astype(np.uint8)).resize(size, Image.Resampling.BICUBIC)
    pencil = ImageDraw.Draw(image)
    for _ in range(chance.choice([0, 0, 2, 5])):
        ends = [(chance.randrange(size[0]), chance.randrange(size[1])) for _ in range(2)]
        stroke = tuple(chance.randrange(256) for _ in range(3))
        pencil.line(ends, stroke, chance.randint(1, 3))
    return image


def _mask(label: str, size: tuple[int, int], chance: random.Random) -> Image.Image:
    """Returns where a shape is: somewhere in an image, of any size, and not quite upright."""
    radius = min(size) * chance.uniform(0.2, 0.46)
    angle = math.radians(chance.uniform(-180, 180) if label == "arrow" else chance.gauss(0, 15))
    stretch = chance.uniform(0.85, 1.15)
    margins = [max(0.0, side / 2 - 1.1 * radius) for side in size]
    x, y = (side / 2 + chance.uniform(-1, 1) * m for side, m in zip(size, margins, strict=True))

    def place(point: Point) -> Point:
        across, down = point[0] * radius * stretch, point[1] * radius / stretch
        turned = complex(across, down) * complex(math.cos(angle), math.sin(angle))
        # Drawn twice as large: what it is reduced by makes its edges smooth.
        return 2 * (x + turned.real), 2 * (y + turned.imag)

    mask = Image.new("L", (2 * size[0], 2 * size[1]))
    pencil = ImageDraw.Draw(mask)
    for points, fill in zip(SHAPES[label], (255, 0), strict=True):
        if points:
            pencil.polygon([place(point) for point in points], fill)
    return mask.reduce(2)


def drawings(count: int, seed: int | str) -> Iterator[Drawing]:
    """Yields drawings, of each shape as many; always the same for a seed."""
    chance = random.Random(seed)
    for number in range(count):
        label = LABELS[number % len(LABELS)]
        file = io.BytesIO()
        draw(label, chance).save(file, "JPEG", quality=chance.randint(40, 95))
        yield Drawing(file.getvalue(), label)


def accuracy(model: VisionModel, asked: Sequence[Drawing]) -> float:
    """Returns the share of the drawings that the model knows."""
    right = 0
    for start in range(0, len(asked), BATCH):
        part = asked[start : start + BATCH]
        answers = model.predict([drawing.data for drawing in part])
        right += sum(a["label"] == d.label for a, d in zip(answers, part, strict=True))
    return right / max(1, len(asked))


def train(drawn: Sequence[Drawing], folder: Path, epochs: int, seed: int) -> None:
    """Trains a model on the drawings and writes it, with its configuration, to a folder."""
    import torch
    from safetensors.torch import save_file

    fields = {"labels": LABELS, "image_size": IMAGE_SIZE, "mean": MEAN, "std": STD}
    (folder / "config.json").write_text(json.dumps(fields, indent=2) + "\n", "utf-8")
    config = read_config(folder)

    torch.manual_seed(seed)
    torch.use_deterministic_algorithms(True)
    # As fast for so small a network, and the same sums, and weights, on any number of cores.
    torch.set_num_threads(1)
    network = build_network(len(LABELS)).train()
    # It makes the images small, and has nothing to learn: done once, and they fit into memory.
    shrink, rest = network[0], network[1:]
    pixels = torch.stack(
        [shrink(torch.from_numpy(decode_image(drawing.data, config))) for drawing in drawn]
    )
    labels = torch.tensor([LABELS.index(drawing.label) for drawing in drawn])

    def loss_of(rows: list[int]) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(rest(pixels[rows]), labels[rows])

    steps = epochs * -(-len(drawn) // BATCH)
    order = batches(range(len(drawn)), BATCH, epochs, random.Random(seed))
    fit(rest, order, steps, PEAK_RATE, loss_of)
    save_file(network.state_dict(), folder / "model.safetensors")


def read_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parses the options; ends the program if they are wrong. None takes the command line's."""
    parser = argparse.ArgumentParser(description=__doc__ and __doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=DEFAULT_MODEL, help="the model's folder")
    parser.add_argument("--drawings", type=int, default=8000, help="how many to learn from")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--bar", type=float, default=0.97, help="the least share of right answers to accept"
    )
    parser.add_argument(
        "--draw",
        nargs=2,
        metavar=("SHAPE", "FILE"),
        help=f"write a drawing, and train nothing; one of {', '.join(LABELS)}",
    )
    options = parser.parse_args(arguments)
    for name in ("drawings", "epochs"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} must be 1 or more")
    if options.draw and options.draw[0] not in LABELS:
        parser.error(f"--draw: there is no {options.draw[0]!r}; it draws {', '.join(LABELS)}")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Trains, measures, and writes the model if it reaches the bar; returns the exit status."""
    options = read_options(arguments)
    if options.draw:
        label, file = options.draw
        draw(label, random.Random(options.seed)).save(file, "JPEG", quality=85)
        return 0
    from tqdm import tqdm

    count: int = options.drawings
    drawn = list(tqdm(drawings(count, options.seed), total=count, unit="drawing"))
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        train(drawn, folder, options.epochs, options.seed)
        model = VisionModel(folder, device="cpu")
        asked = list(drawings(HELD_OUT, f"held out {options.seed}"))
        reached = accuracy(model, asked)
        print(f"new drawings known: {reached:.1%}")
        return hand_over(folder, options.output, good=reached >= options.bar)


if __name__ == "__main__":
    sys.exit(main())
