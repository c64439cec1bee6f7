"""Refuse options of a pipeline that cannot be had, before any worker is started.

A worker finds out the same, in the same words, after it has imported torch. What only it knows,
such as the task of a model folder, is left to it.
"""

from __future__ import annotations

from ..gpu.places import places, visible_gpus
from ..options.checks import Devices, device_names
from ..pipelines.precision import check_quantization
from ..pipelines.tasks import check_suits, known_task
from ..pipelines.weights import check_accelerate, check_attention
from ..reporting import counted
from .command_options import ModelCommandOptions, PipelineOptions, ServeOptions

#: Of the model that comes with this package.
_SHIPPED_TASK = "fill-mask"


def check_task(task: str | None, options: PipelineOptions) -> None:
    """Refuse what does not suit the task. Nothing is known of a model whose task is None.

    Raises:
        ValueError: the task is unknown, or an option does not suit it.
    """
    if task is not None:
        check_suits(known_task(task), vars(options), lambda name: f"--{name.replace('_', '-')}")


def check_pipeline(options: ModelCommandOptions) -> None:
    """Refuse what does not suit the task or the devices, or needs a package that is missing.

    Args:
        options: of a command; the model is a pipeline's.

    Raises:
        ImportError: a package is missing.
        ValueError: an option does not suit the task or the devices.
    """
    check_task(options.task or (_SHIPPED_TASK if options.model is None else None), options)
    needs_device = options.quantization is not None or options.attention is not None
    device = device_of(options) if needs_device else None
    if options.quantization is not None:
        check_quantization(options.quantization, device)
    if options.attention is not None:
        check_attention(options.attention, device)
    if options.devices_per_worker > 1:
        places(
            options.cuda_devices,
            options.most_workers,
            visible_gpus(),
            options.devices_per_worker,
        )
        check_accelerate(options.devices_per_worker)


def device_of(options: ModelCommandOptions) -> str | None:
    """The kind of device of the workers of a command: "cuda" or "cpu"; None if unknown."""
    if isinstance(options, ServeOptions) and options.ray is not None:
        return "cuda" if options.num_gpus else "cpu"
    return device_kind(options.cuda_devices)


def gpus_of_worker(options: ModelCommandOptions) -> int:
    """The number of GPUs that a pipeline of a command is spread over."""
    if isinstance(options, ServeOptions) and options.ray is not None:
        return max(1, int(options.num_gpus))
    return options.devices_per_worker


def unused_gpus(options: ModelCommandOptions) -> str:
    """A sentence on GPUs that no worker of a pipeline uses, and what to do; empty if none is.

    A single worker is the default, and its pipeline uses one GPU of those that it sees.
    """
    is_local = not (isinstance(options, ServeOptions) and options.ray is not None)
    is_asked = is_local and options.cuda_devices == "auto"
    count = (visible_gpus().count if is_asked else None) or 0
    each = options.devices_per_worker
    workers = options.most_workers
    used = workers * each
    if count <= used:
        return ""
    return (
        f"{count} GPUs are visible, and {counted(workers, 'worker')} will use {used} of "
        f"them; --workers {count // each} uses all, or name those to use with --devices"
    )


def device_kind(devices: Devices) -> str | None:
    """The kind of device that every worker has to do with: "cuda" or "cpu"; None if unknown."""
    if devices is not None and not isinstance(devices, str):
        return "cpu" if "cpu" in device_names(devices) else "cuda"
    count = visible_gpus().count
    if count is None:
        return None
    return "cuda" if count else "cpu"
