"""What is measured, in which order, for how long: the parts and the runs of each. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from on_gpu.running import Kind

__all__ = ["CPU", "FULL", "NEEDS_GPU", "PARTS", "QUICK", "SIMULATED", "Run", "Scale", "runs"]

#: In this order, so that what the goals need is there first if time runs out.
PARTS = ("hand", "workers", "served", "memory", "devices", "images", "sizes")

#: What is recorded of a part that can say nothing on a CPU.
NEEDS_GPU = "needs a GPU"


@dataclass(frozen=True)
class Scale:
    """How thorough a run is.

    Attributes:
        budget: seconds for all of it; what has not begun by then is not measured.
        tokens: lengths of sentences.
        hand_sizes: batch sizes, batched by hand.
        size: the batch size with which numbers of workers are compared.
        workers: these.
        sizes: by number of workers, the other batch sizes.
        calls: how many items a call has; with batches smaller than ``size`` it is one.
        rounds: of ``size`` with each length, in turn with hand-batched; other sizes have one. In a
            round each way has two windows.
        first_warm, warm, seconds: before a streamer's first window, before others, and in one.
        tasks: that are served over HTTP, with ``served_rounds`` of windows of ``served_seconds``.
        ways: of running out of memory.
        models: of images.
    """

    budget: float
    tokens: tuple[int, ...]
    hand_sizes: tuple[int, ...]
    size: int
    workers: tuple[int, ...]
    sizes: dict[int, tuple[int, ...]]
    calls: tuple[int, ...]
    rounds: tuple[int, ...]
    first_warm: float
    warm: float
    seconds: float
    tasks: tuple[str, ...]
    served_rounds: int
    served_seconds: float
    ways: tuple[str, ...] = ("share", "ballast")
    models: tuple[str, ...] = ("Listed", "Stacked", "Returned")


_POWERS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
_TASKS = ("text-classification", "image-classification", "feature-extraction", "fill-mask")
_OTHERS = tuple(size for size in _POWERS if size != 64)

FULL = Scale(
    budget=1500,
    tokens=(16, 128),
    hand_sizes=_POWERS,
    size=64,
    workers=(1, 2, 4, 8),
    sizes={1: _OTHERS, 8: (16, 256)},
    calls=(1, 64),
    rounds=(5, 5),
    first_warm=1.2,
    warm=0.2,
    seconds=0.5,
    tasks=_TASKS,
    served_rounds=5,
    served_seconds=1.0,
)

QUICK = Scale(
    budget=170,
    tokens=(16, 128),
    hand_sizes=(1, 8, 64, 512),
    size=64,
    workers=(1, 2, 4),
    sizes={1: (512,)},
    calls=(1, 64),
    rounds=(1, 1),
    first_warm=1.0,
    warm=0.2,
    seconds=0.5,
    tasks=("text-classification", "image-classification"),
    served_rounds=1,
    served_seconds=1.0,
    ways=("share",),
    models=("Listed", "Stacked"),
)

#: Shows that the program runs; its figures are none of a GPU.
CPU = Scale(
    budget=300,
    tokens=(4, 8),
    hand_sizes=(1, 2, 4),
    size=4,
    workers=(1,),
    sizes={},
    calls=(1, 4),
    rounds=(1, 1),
    first_warm=0.1,
    warm=0.05,
    seconds=0.1,
    tasks=("text-classification", "image-classification"),
    served_rounds=1,
    served_seconds=0.2,
    models=("Stacked",),
)

#: A stage that sleeps in place of a device: what feeding it costs the rest.
SIMULATED = Scale(
    budget=900,
    tokens=(16, 128),
    hand_sizes=(1, 8, 64),
    size=64,
    workers=(1,),
    sizes={},
    calls=(1, 64),
    rounds=(5, 5),
    first_warm=1.0,
    warm=0.2,
    seconds=0.5,
    tasks=("text-classification", "image-classification"),
    served_rounds=5,
    served_seconds=2.0,
    models=("Stacked",),
)


@dataclass(frozen=True)
class Run:
    """One process of measurements.

    Attributes:
        title: for progress and errors.
        module: of this package.
        settings: for it.
        timeout: after which it is killed, seconds.
    """

    title: str
    module: str
    settings: dict[str, Any]
    timeout: float


def runs(part: str, scale: Scale, devices: Sequence[str], kind: Kind) -> list[Run] | str:
    """Those of one part; or why there are none.

    Args:
        devices: the names of the devices, for ``cuda_devices``; ("cpu",) without one.
        kind: what computes.
    """
    first = list(devices[:1])
    timed = {"kind": kind, "warm": scale.warm, "seconds": scale.seconds}
    if part == "hand":
        swept = {"device": first[0], "tokens": scale.tokens, "sizes": scale.hand_sizes, **timed}
        return [Run("hand-batched", "sweep", swept, 150)]
    if part == "workers":
        return [_streamed(scale, first, kind, count, scale.size) for count in scale.workers]
    if part == "served":
        return [_served(scale, first[0], kind, task) for task in scale.tasks]
    if part == "sizes":
        return [
            _streamed(scale, first, kind, count, size)
            for count, sizes in scale.sizes.items()
            for size in sizes
        ]
    if part == "images":
        shown = {"device": first[0], "models": scale.models, **timed}
        return [Run("images", "images", shown, 120)]
    if kind != "cuda":
        return NEEDS_GPU
    if part == "memory":
        cramped = {
            "device": first[0], "tokens": 128, "batch_size": 512, "items": 2048,
            "ways": scale.ways, **timed,
        }  # fmt: skip
        return [Run("out of memory", "exhausted", cramped, 150)]
    if len(devices) == 1:
        return "one device here"
    return [_streamed(scale, list(devices), kind, 2 * len(devices), scale.size)]


def _served(scale: Scale, device: str, kind: Kind, task: str) -> Run:
    # Texts have a few words between the two tokens that begin and end them.
    tokens = (
        (None,)
        if task == "image-classification"
        else tuple(sorted({max(n, 8) for n in scale.tokens}))
    )
    settings = {
        "device": device,
        "kind": kind,
        "task": task,
        "tokens": tokens,
        "rounds": scale.served_rounds,
        "first_warm": scale.first_warm,
        "warm": scale.warm,
        "seconds": scale.served_seconds,
    }
    # Four ways, twice in a round; and time for loading.
    windows = 2 * 4 * scale.served_rounds * len(tokens)
    timeout = 180 + 2 * windows * (scale.warm + scale.served_seconds)
    return Run(task, "served", settings, timeout)


def _streamed(scale: Scale, devices: list[str], kind: Kind, workers: int, size: int) -> Run:
    rounds = scale.rounds if size == scale.size else [1] * len(scale.tokens)
    calls = scale.calls if size >= scale.size else scale.calls[:1]
    settings = {
        "devices": devices,
        "workers": workers,
        "batch_size": size,
        "tokens": scale.tokens,
        "calls": calls,
        "rounds": rounds,
        "kind": kind,
        "first_warm": scale.first_warm,
        "warm": scale.warm,
        "seconds": scale.seconds,
    }
    # By hand and each kind of call, twice in a round; and two minutes for loading.
    windows = 2 * (1 + len(calls)) * sum(rounds)
    timeout = 120 + 2 * windows * (scale.warm + scale.seconds)
    on = f" on {len(devices)} devices" if len(devices) > 1 else ""
    return Run(
        f"{workers} worker{'s' * (workers > 1)}{on}, batches of {size}",
        "streamed",
        settings,
        timeout,
    )
