"""Which options suit which task, and need which packages. Pure: for the command and its workers.

The command refuses with these words what a worker would refuse after it has imported torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from .tasks import ALIASES, GENERATING, TASKS

#: Tasks whose models are not compiled: their batches are made by transformers' pipelines, or have a
#: shape for each length.
_UNCOMPILED = GENERATING | {
    "zero-shot-classification", "audio-classification", "automatic-speech-recognition",
}  # fmt: skip


def known_task(task: str) -> str:
    """The task by our name of it.

    Raises:
        ValueError: the task is unknown.
    """
    task = ALIASES.get(task, task)
    if task not in TASKS:
        raise ValueError(f"unknown task {task!r}; must be one of {', '.join(sorted(TASKS))}")
    return task


def check_suits(
    task: str, options: Mapping[str, Any], name: Callable[[str], str] = lambda option: option
) -> None:
    """Refuse an option that was given and does not suit the task.

    Args:
        task: one of ``TASKS``.
        options: values by the names of options; others than those of pipelines are left alone.
        name: what the user calls an option.

    Raises:
        ValueError: an option does not suit the task; the text says what to do.
    """
    takes = TASKS[task].takes
    if options.get("max_batch_tokens") is not None and (takes != "text" or task in GENERATING):
        raise ValueError(
            f"{name('max_batch_tokens')} has no effect on {task}: it is for tasks on texts "
            f"other than generation; leave it out, or set {name('max_batch_cost')}"
        )
    if options.get("max_batch_seconds") is not None and takes != "audio":
        option = name("max_batch_seconds")
        raise ValueError(f"{option} has no effect on {task}: it is for sounds; leave it out")
    if options.get("compile") and task in _UNCOMPILED:
        raise ValueError(f"models of {task} cannot be compiled here; leave {name('compile')} out")
    if options.get("preprocess_workers") and task == "image-to-text":
        option = name("preprocess_workers")
        raise ValueError(f"{task} runs by steps, and has no preprocess; leave {option} out")
    if options.get("preprocess_workers") and takes == "text":
        option = name("preprocess_workers")
        raise ValueError(
            f"{option} is for images and sounds: the texts of {task} are tokenized by compiled "
            f"code; leave {option} out"
        )
