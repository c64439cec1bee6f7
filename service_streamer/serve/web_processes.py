"""How many web processes ``--web-workers auto`` means."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence

from ..pool.directory import why_unsupported
from ..workers.environment import available_cores
from .command_options import ServeOptions
from .configuration import NamedModel
from .fitting import device_of

logger = logging.getLogger(__name__)

#: One pool carries about 100,000 items per second, and a web process some 20,000 requests.
_MOST = 8


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
    return max(1, min(count, _MOST))


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
