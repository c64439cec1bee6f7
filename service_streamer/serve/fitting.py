"""What is known before any worker is started: options that cannot be had, and "auto".

A worker finds out the same, in the same words, after it has imported torch. What only it knows,
such as the task of a model folder, is left to it.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence

from ..gpu.places import places, visible_gpus
from ..options.checks import Devices, device_names
from ..pipelines.precision import check_quantization
from ..pipelines.tasks import check_suits, known_task
from ..pipelines.weights import check_accelerate, check_attention
from ..pool.directory import why_unsupported
from ..reporting import counted
from ..workers.starting import available_cores
from .command_options import ModelCommandOptions, PipelineOptions, ServeOptions
from .configuration import NamedModel

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


logger = logging.getLogger(__name__)

#: One pool carries about 100,000 items per second, and a web process some 20,000 requests.
_MOST_PROCESSES = 8


def chosen_count(cores: int, workers: int | None, *, is_on_cpu: bool) -> tuple[int, str]:
    """The number of web processes, and why. Pure.

    Args:
        cores: those that this service may use.
        workers: worker processes on this host; None if the model is on other hosts.
        is_on_cpu: whether the workers compute on these cores.
    """
    if workers is None:
        return _bounded(cores), f"{cores} cores, and the workers are on other hosts"
    if is_on_cpu:
        return 1, "the workers need the cores: they compute on the CPU"
    left = cores - workers - 1
    why = f"{cores} cores, less one for each worker ({workers}) and one for the pool"
    return _bounded(left), why


def _bounded(count: int) -> int:
    return max(1, min(count, _MOST_PROCESSES))


def with_count(
    options: ServeOptions, models: Sequence[NamedModel]
) -> tuple[ServeOptions, Sequence[NamedModel]]:
    """The options of the service and its models with a number of web processes for "auto"."""
    if options.web_workers != "auto":
        return options, models
    here = [each.options for each in models if not _is_remote(each.options)]
    if why_unsupported() and any(each.options.redis_broker is None for each in models):
        count, why = 1, "several need a shared pool, which needs Linux"
    else:
        workers = sum(each.most_workers for each in here) if here else None
        is_on_cpu = any(device_of(each) == "cpu" for each in here)
        count, why = chosen_count(available_cores(), workers, is_on_cpu=is_on_cpu)
    logger.info("--web-workers auto: %d (%s)", count, why)

    def counted(each: ServeOptions) -> ServeOptions:
        return dataclasses.replace(each, web_workers=count)

    return counted(options), [NamedModel(name, counted(each)) for name, each in models]


def _is_remote(options: ServeOptions) -> bool:
    """Whether the workers are on other hosts."""
    return options.redis_broker is not None or options.ray not in (None, "local")
