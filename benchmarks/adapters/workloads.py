"""What is computed, for every system alike; whichever interpreter this is, it can import this."""

from __future__ import annotations

import os
import random
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = [
    "BATCH_SIZE",
    "COSTS",
    "SIMULATED",
    "STAGES",
    "WORKLOADS",
    "Arrays",
    "Echo",
    "EvenStages",
    "Gpu",
    "GpuStages",
    "Infilling",
    "LargeGpu",
    "MiniLM",
    "TitanXp",
    "capacity",
    "cost",
    "ideal",
    "is_answer",
    "items",
    "minilm_folder",
]

#: Of every system.
BATCH_SIZE = 64
#: Seconds of a batch of n: so many, and so many times n. Those of titan-xp make 12.78 calls per
#: second one by one and 422.88 in batches of 64, which the original has published of its BERT.
COSTS = {
    "gpu": (5e-3, 1e-4),
    "large-gpu": (20e-3, 5e-4),
    "titan-xp": (77.1e-3, 1.158e-3),
}
#: The same for each of the stages: preprocess, forward, postprocess. Sleeping stages hold no
#: processor, so that what is measured is how well they overlap.
STAGES = {
    "even-stages": ((20e-3, 0.0), (20e-3, 0.0), (20e-3, 0.0)),
    "gpu-stages": ((2e-3, 0.0), (5e-3, 1e-4), (2e-3, 0.0)),
}
#: What takes a time that is known.
SIMULATED = COSTS.keys() | STAGES.keys()

_ENDS_A_TOKEN = re.compile(r"[\W\u2e80-\U0003ffff]")
_ROOT = Path(__file__).parents[2]
_ARRAY_BYTES = 602_112  # of a picture of 224 x 224, float32


class Echo:
    """Costs nothing: what is left is the middleware."""

    def load(self) -> None:
        """Leave word of this process, by which it can be found and killed."""
        if folder := os.environ.get("YARDSTICK_PIDS"):
            (Path(folder) / str(os.getpid())).touch()

    def predict(self, batch: list[Any]) -> list[Any]:
        return batch


class Arrays(Echo):
    """Echoes arrays: what is left is moving them."""


class Gpu(Echo):
    """Costs what a small model on a GPU does. It sleeps: the processor is the middleware's."""

    name = "gpu"

    def predict(self, batch: list[Any]) -> list[Any]:
        time.sleep(cost(self.name, len(batch)))
        return batch


class LargeGpu(Gpu):
    """Costs what a larger model does."""

    name = "large-gpu"


class TitanXp(Gpu):
    """Costs what the BERT of the original's tables did on its device."""

    name = "titan-xp"


class EvenStages(Echo):
    """Three stages that take equally long, whatever the size of the batch."""

    name = "even-stages"

    def preprocess(self, batch: list[Any]) -> list[Any]:
        return self._stage(0, batch)

    def forward(self, batch: list[Any]) -> list[Any]:
        return self._stage(1, batch)

    def postprocess(self, batch: list[Any]) -> list[Any]:
        return self._stage(2, batch)

    def predict(self, batch: list[Any]) -> list[Any]:
        """The stages one after another: all that a system without stages can do."""
        return self.postprocess(self.forward(self.preprocess(batch)))

    def _stage(self, number: int, batch: list[Any]) -> list[Any]:
        base, per_item = STAGES[self.name][number]
        time.sleep(base + per_item * len(batch))
        return batch


class GpuStages(EvenStages):
    """The simulated GPU, with 2 ms of other work before and after."""

    name = "gpu-stages"


class Infilling(Echo):
    """The shipped model: a sentence with a ``[MASK]`` to the missing word."""

    def load(self) -> None:
        _find_libraries()
        from bert_model import TextInfillingModel

        self._model = TextInfillingModel(model_path=_infilling_folder())
        super().load()

    def predict(self, batch: list[str]) -> list[str]:
        return self._model.predict(batch)

    def preprocess(self, batch: list[str]) -> Any:
        return self._model.encode(batch)

    def forward(self, batch: Any) -> Any:
        return self._model.best(batch)

    def postprocess(self, batch: Any) -> list[str]:
        return self._model.answers(batch)

    @staticmethod
    def length(sentence: str) -> float:
        """As in the example: about its number of tokens."""
        return 1 + len(_ENDS_A_TOKEN.findall(sentence))


class MiniLM(Echo):
    """all-MiniLM-L6-v2: a sentence to its embedding."""

    def load(self) -> None:
        _find_libraries()
        import minilm

        self._model = minilm.MiniLM()
        self._model.init_model()
        super().load()

    def predict(self, batch: list[str]) -> list[Any]:
        return self._model.predict(batch)

    @staticmethod
    def length(sentence: str) -> float:
        return len(sentence.split())


WORKLOADS: dict[str, type[Echo]] = {
    "echo": Echo,
    "gpu": Gpu,
    "large-gpu": LargeGpu,
    "titan-xp": TitanXp,
    "even-stages": EvenStages,
    "gpu-stages": GpuStages,
    "infilling": Infilling,
    "minilm": MiniLM,
    "arrays": Arrays,
}


def cost(name: str, n: int) -> float:
    """Seconds that a batch of n takes; of simulated workloads only.

    With stages, those of the slowest one: what all of them together would take at best.
    """
    return max(base + per_item * n for base, per_item in STAGES.get(name) or (COSTS[name],))


def capacity(name: str, batch_size: int = BATCH_SIZE) -> float:
    """Items per second of one worker whose batches are all full."""
    return batch_size / cost(name, batch_size)


def ideal(name: str, callers: int) -> float:
    """Items per second of so many callers in a closed loop, if one worker lost no time at all."""
    size = min(callers, BATCH_SIZE)
    return size / cost(name, size)


def items(name: str, count: int, seed: int = 1, *, size: int = _ARRAY_BYTES) -> list[Any]:
    """What is asked; the same for the same arguments.

    Args:
        size: bytes of each array.
    """
    if name == "arrays":
        import numpy as np

        return [np.full(max(1, size // 4), seed + number, np.float32) for number in range(count)]
    if name == "infilling":
        return random.Random(seed).choices(_masked_sentences(), k=count)
    if name == "minilm":
        _find_libraries()
        import minilm

        return list(minilm.sentences(count, seed=seed))
    return list(range(count))


def is_answer(name: str, item: Any, answer: Any) -> bool:
    """Whether it can be the answer to this item, and where an item has one only, whether it is."""
    if name == "arrays":
        return bool(answer.nbytes == item.nbytes and answer[-1] == item[-1])
    if name == "infilling":
        return isinstance(answer, str) and answer.isprintable() and answer != ""
    if name == "minilm":
        return len(answer) == 384
    return bool(answer == item)


def minilm_folder() -> Path:
    """Of MiniLM, for who loads it by themselves."""
    _find_libraries()
    import minilm

    return minilm.find()


def _masked_sentences() -> Sequence[str]:
    """Of the shipped model's own text, those that it can take, a word of each hidden."""
    _find_libraries()
    from bert_model import MASK, SentenceEncoder

    encoder = SentenceEncoder(model_path=_infilling_folder())
    sentences = []
    text = (_ROOT / "example" / "data" / "text_infilling.txt").read_text("utf-8")
    for line in text.splitlines():
        words = line.split()
        if words and words[0] != "#":
            words[len(words) // 2] = MASK
            sentence = " ".join(words)
            if len(encoder.tokenizer.encode(sentence).ids) <= encoder.max_sent_len:
                sentences.append(sentence)
    return sentences


def _infilling_folder() -> Path:
    return _ROOT / "service_streamer" / "models" / "text_infilling"


def _find_libraries() -> None:
    """Have torch, where an interpreter has none, come from that which runs the yardstick.

    So all systems compute with the same. Put last, where an interpreter's own packages go before:
    the original's package has the name of this one, which ``bert_model`` imports.
    """
    for folder in (*os.environ.get("YARDSTICK_PACKAGES", "").split(os.pathsep), str(_ROOT)):
        if folder and folder not in sys.path:
            sys.path.append(folder)
    # The ManagedModel of the example uses these. The original does not have them, nor runs it.
    import service_streamer

    for name in ("OnHost", "to_device", "to_host", "to_pinned"):
        if not hasattr(service_streamer, name):
            setattr(service_streamer, name, None)
