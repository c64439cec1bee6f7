"""Models whose preprocessing runs in processes of its own. Workers import this module."""

from __future__ import annotations

import logging
import os
import re
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np

from models import Echoing, NothingToLoad
from service_streamer import InvalidInput, InvalidItems, ManagedModel

logger = logging.getLogger(__name__)


class Where(ManagedModel):
    """Tells for each item where it was preprocessed and computed; some items do harm."""

    def init_preprocess(self, base: int, folder: Path | None = None) -> None:
        self.base = base
        self.folder = folder

    def init_model(self, base: int, folder: Path | None = None) -> None:
        self.is_loaded = True

    def preprocess(self, items: list[Any]) -> list[Any]:
        if self.folder is not None:
            (self.folder / str(os.getpid())).touch()
        return [(item, self.prepared_item(item), os.getpid()) for item in items]

    def prepared_item(self, item: Any) -> Any:
        if item == "raise":
            raise ValueError("no such image")
        if item == "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        if item == "hang":
            re.match("(a+)+$", "a" * 60 + "b")  # never lets go of the interpreter
        if item == "lock":
            return threading.Lock()
        if item == "opens":
            return Opens()
        if item == "device":
            return os.environ["CUDA_VISIBLE_DEVICES"], os.environ["OMP_NUM_THREADS"]
        if item == "thread":
            return threading.main_thread().name
        if item == "loaded":
            return hasattr(self, "is_loaded")
        return item + self.base

    def forward(self, batch: list[Any]) -> list[Any]:
        return [(prepared, pid, os.getpid()) for _, prepared, pid in batch]


class Opens:
    """Opens a file of this machine when it is unpickled, which another process cannot."""

    def __reduce__(self) -> tuple[Any, ...]:
        return open, ("/nonexistent/vocabulary",)


class Forgetful(ManagedModel):
    """Loads what preprocess needs where only the worker does."""

    def init_model(self) -> None:
        self.vocabulary = {"a": 1}

    def preprocess(self, items: list[str]) -> list[int]:
        return [self.vocabulary[item] for item in items]

    def forward(self, batch: list[int]) -> list[int]:
        return batch


class Images(NothingToLoad):
    """Gets rows of one array, and returns its sums; large parts use shared memory."""

    stack = True

    def preprocess(self, items: Any) -> Any:
        return {"pixels": items.astype(np.float32) * 2, "scale": 2}

    def forward(self, batch: Any) -> Any:
        assert batch["scale"] == 2
        assert type(batch["pixels"]) is np.ndarray
        return batch["pixels"].sum(axis=(1, 2))


class Pads(ManagedModel):
    """Pads texts to the longest of a part, and then of the batch. Its steps are logged."""

    def init_preprocess(self, filler: str = "-") -> None:
        self.filler = filler

    def init_model(self, filler: str = "-") -> None:
        logger.info("loaded")

    def preprocess(self, items: list[str]) -> tuple[int, list[Any]]:
        logger.info("preprocessed")
        width = max(map(len, items))
        return width, [(item.ljust(width, self.filler), os.getpid()) for item in items]

    def collate(self, parts: list[Any]) -> tuple[int, list[Any]]:
        width = max(width for width, _ in parts)
        rows = [row for _, rows in parts for row in rows]
        return width, [(text.ljust(width, self.filler), pid) for text, pid in rows]

    def forward(self, batch: tuple[int, list[Any]]) -> list[Any]:
        return batch[1]


class LosesFile(Where):
    """Can be started as long as its file is there."""

    def init_preprocess(self, base: int, folder: Path | None = None) -> None:
        assert folder is not None
        (folder / "vocabulary").read_text()
        super().init_preprocess(base)


class OnlyPredict(NothingToLoad, Echoing):
    """Has no stages."""


class SmallMemory(Where):
    """Has memory for two items at once."""

    def forward(self, batch: list[Any]) -> list[Any]:
        if len(batch) > 2:
            raise RuntimeError("CUDA out of memory")
        return super().forward(batch)


class NamesInvalid(NothingToLoad):
    """Ten times each number; those below 0 are invalid."""

    def preprocess(self, items: list[int]) -> list[int]:
        errors: dict[int, Exception] = {
            i: InvalidInput(f"{item} is below 0") for i, item in enumerate(items) if item < 0
        }
        if errors:
            raise InvalidItems(errors)
        return items

    def forward(self, batch: list[int]) -> list[int]:
        return [10 * item for item in batch]
