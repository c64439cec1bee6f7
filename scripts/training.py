"""What the scripts share that train the small models: the text, the loop, the bar."""

from __future__ import annotations

import argparse
import random
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import torch

ROOT = Path(__file__).resolve().parent.parent
TEXT = ROOT / "example" / "data" / "text_infilling.txt"

Row = TypeVar("Row")


def read_sections(text: Path = TEXT) -> list[list[str]]:
    """Returns the lines of a training text, those that nothing divides together.

    Comments and blank lines divide: what comes after them does not follow on what came before.

    Raises:
        OSError: the file cannot be read.
        UnicodeDecodeError: it is not UTF-8.
    """
    sections: list[list[str]] = [[]]
    for line in map(str.strip, text.read_text(encoding="utf-8").splitlines()):
        if line and not line.startswith("#"):
            sections[-1].append(line)
        elif sections[-1]:
            sections.append([])
    return sections if sections[-1] else sections[:-1]


def read_lines(text: Path = TEXT) -> list[str]:
    """Returns the lines of a training text, as ``read_sections`` does, in one list."""
    return [line for section in read_sections(text) for line in section]


def read_options(
    description: str | None, output: Path, epochs: int, arguments: Sequence[str] | None
) -> argparse.Namespace:
    """Parses the options of a training script; ends the program if they are wrong.

    Args:
        description: the script's docstring, of which the first line is shown.
        output: where the model goes unless ``--output`` says otherwise.
        epochs: how often the text is seen unless ``--epochs`` says otherwise.
        arguments: None takes those of the command line.
    """
    parser = argparse.ArgumentParser(description=description and description.splitlines()[0])
    parser.add_argument("--output", type=Path, default=output, help="the model's folder")
    parser.add_argument("--text", type=Path, default=TEXT, help="one sentence on each line")
    parser.add_argument("--epochs", type=int, default=epochs)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--bar", type=float, default=0.95, help="the least share of right answers to accept"
    )
    options = parser.parse_args(arguments)
    if options.epochs < 1:
        parser.error("--epochs must be 1 or more")
    try:
        options.sections = read_sections(options.text)
    except (OSError, UnicodeDecodeError) as error:
        parser.error(f"cannot read the text: {error}")
    return options


def batches(
    rows: Sequence[Row], size: int, epochs: int, shuffle: random.Random
) -> Iterator[list[Row]]:
    """Yields all rows in batches, in another order in each epoch."""
    rows = list(rows)
    for _ in range(epochs):
        shuffle.shuffle(rows)
        for start in range(0, len(rows), size):
            yield rows[start : start + size]


def fit(
    model: torch.nn.Module,
    batches: Iterable[Row],
    steps: int,
    peak_rate: float,
    loss_of: Callable[[Row], torch.Tensor],
) -> None:
    """Trains a model with AdamW and a one-cycle schedule, and shows how it goes.

    Args:
        steps: how many batches there are.
        peak_rate: the highest learning rate.
        loss_of: computes the loss of a batch.
    """
    import torch
    from tqdm import tqdm

    optimizer = torch.optim.AdamW(model.parameters(), lr=peak_rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=peak_rate, total_steps=max(steps, 2), pct_start=0.1
    )
    progress = tqdm(batches, total=steps, unit="batch")
    for batch in progress:
        loss: Any = loss_of(batch)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        progress.set_postfix(loss=f"{loss.item():.3f}", refresh=False)


def hand_over(folder: Path, output: Path, *, good: bool) -> int:
    """Copies a model that reaches the bar to where it belongs; returns the exit status."""
    if not good:
        print("that is below the bar: nothing was written", file=sys.stderr)
        return 1
    output.mkdir(parents=True, exist_ok=True)
    for file in folder.iterdir():
        # Not shutil.copy: the weights are written readable by their owner only.
        shutil.copyfile(file, output / file.name)
    print(f"written to {output}")
    return 0
