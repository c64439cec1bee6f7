"""From the options of a model to its workers, and to what a web process does with it."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any

from ..base_streamer import BaseStreamer
from ..engine.build import find_function
from ..options.table import RayStreamerOptions, RedisStreamerOptions, StreamerOptions
from ..streamer import ScaledStreamer, Streamer
from ..workers.arena import default_limit
from .command_options import ANY_CLUSTER, ModelCommandOptions, PipelineOptions, ServeOptions
from .configuration import NamedModel
from .fitting import check_task, gpus_of_worker, unused_gpus
from .hosted_model import OpenedModel
from .http.admission import ServiceOptions
from .logs import lines_of, name_lines
from .pool_preparation import preparing

logger = logging.getLogger(__name__)

_PIPELINE = "service_streamer.pipelines:PipelineModel"
_CUSTOM = "service_streamer.pipelines:CustomModel"
_PIPELINE_LENGTH = "service_streamer.pipelines.sizes:item_length"

#: Unless it is given, so many batches may wait for each worker: seconds of work, as a rule.
_BATCHES_WAITING = 16
#: And no fewer inputs than this, however small batches are: callers come by the dozen.
_LEAST_WAITING = 256

#: For each worker so many requests may be open whose images are as large as those of a request may
#: be: seconds of work. How many workers there are behind Redis is not known here; arbitrary.
_LARGE_REQUESTS = 4
_WORKERS_BEHIND_REDIS = 8


class ModelUnavailable(Exception):
    """The hub has no such model, or cannot be asked for it."""


class ClusterUnavailable(Exception):
    """There is no Ray cluster to run the workers on, or none that this process can use."""


def only_model(options: ServeOptions) -> NamedModel:
    """The model of a service whose command line names it. Worker hosts name theirs themselves."""
    has_redis = options.redis_broker is not None
    return NamedModel("" if has_redis else model_name(options.model), options)


def open_model(named: NamedModel) -> OpenedModel:
    """Begin to load a model. Raises as ``launch`` does."""
    options = named.options
    if options.redis_broker is not None:
        return OpenedModel(make_redis_streamer(options), service_options(named))
    streamer = streamer_of(*pool_of_service(options), named.name)
    name_lines(streamer.engine.thread, named.name)
    streamer.engine.try_start_once()  # the service ends, or goes on without it, if none is started
    return OpenedModel(streamer, service_options(named))


def streamer_of(target: str, pool: StreamerOptions, model: str) -> ScaledStreamer:
    """The streamer of a service that has workers of its own. For one thread at a time.

    Args:
        model: its name, for the log.

    Raises:
        ClusterUnavailable: the Ray cluster cannot be reached, or used from here.
    """
    if not isinstance(pool, RayStreamerOptions):
        with preparing(model), lines_of(model):
            return Streamer(target, **pool.arguments(Streamer))
    from ..ray.cluster import UnusableCluster
    from ..ray.ray_streamer import RayStreamer

    try:
        with preparing(model):
            return RayStreamer(target, **pool.arguments(RayStreamer))
    except (ConnectionError, UnusableCluster) as error:
        raise ClusterUnavailable(" ".join(str(error).split())) from error.__cause__


def pool_of_service(options: ServeOptions) -> tuple[str, StreamerOptions]:
    """The model, and the options of its workers. Raises as ``pool_options`` does."""
    target, pool = pool_options(options)
    pool = dataclasses.replace(
        pool,
        worker_timeout=options.timeout,  # distinguishes a hang from a slow batch
        max_pending=_max_pending(options),
    )
    if options.ray is not None:
        address = None if options.ray == ANY_CLUSTER else options.ray
        pool = RayStreamerOptions.select({**vars(options), **vars(pool)}, address=address)
    return target, pool


def service_options(named: NamedModel) -> ServiceOptions:
    """What a web process does with a model."""
    options = named.options
    has_redis = options.redis_broker is not None
    return ServiceOptions.select(
        options,
        model=named.name or None,
        max_pending=_max_pending(options),
        batch_size=None if has_redis else options.batch_size,
        max_large_pixels=_max_large_pixels(options),
        max_bodies=_max_bodies(options),
    )


def _max_large_pixels(options: ServeOptions) -> int:
    """Of one web process. Those of one service share the bound of its workers."""
    has_redis = options.redis_broker is not None
    workers = _WORKERS_BEHIND_REDIS if has_redis else options.most_workers
    most = options.max_pixels
    return max(most, _LARGE_REQUESTS * workers * most // _web_processes(options))


def _max_bodies(options: ServeOptions) -> int | None:
    """Of one web process. Those of one service share a quarter of the memory.

    There is room for two of the largest bodies at least: a compressed one, and what it becomes.
    """
    memory = default_limit()
    return max(2 * options.max_body, memory // _web_processes(options)) if memory else None


def _web_processes(options: ServeOptions) -> int:
    return 1 if options.web_workers == "auto" else options.web_workers


def _max_pending(options: ServeOptions) -> int:
    if options.max_pending is not None:
        return options.max_pending
    return max(_LEAST_WAITING, _BATCHES_WAITING * options.most_workers * options.batch_size)


def make_redis_streamer(options: ServeOptions) -> BaseStreamer:
    """The web tier's way to the worker hosts."""
    from ..errors import InvalidInput
    from ..redis.redis_streamer import RedisStreamer

    client = RedisStreamerOptions.select(
        options,
        worker_timeout=None,
        max_pending=_max_pending(options),
        error_types=(InvalidInput,),
    )
    return RedisStreamer(**client.arguments(RedisStreamer))


def pool_options(options: ModelCommandOptions) -> tuple[str, StreamerOptions]:
    """The model of a command, and the options of its workers.

    The revision of a model on the hub is looked up here, once for all workers. They load the same
    commit, also after a restart when the hub has a newer one.

    Raises:
        ModelUnavailable: the hub has no such model, or cannot be asked for it.
        ValueError: options that do not fit.
    """
    model = options.model
    kwargs: dict[str, Any]
    length: Any = _PIPELINE_LENGTH
    if model is not None and ":" in model and not Path(model).exists():
        length = _custom_length(options.length)
        target, kwargs = _CUSTOM, {"target": model, "has_lengths": length is not None}
    else:
        target = _PIPELINE
        unused = unused_gpus(options)
        if unused:
            logger.warning(unused)
        kwargs = {
            **vars(PipelineOptions.select(options)),
            **_pinned(options),
            "devices": gpus_of_worker(options),
            "batch_size": options.batch_size,
        }
    return target, StreamerOptions.select(
        options,
        model_init_kwargs=kwargs,
        length=length,
        max_batch_cost=_max_batch_cost(options.max_batch_cost, options.max_batch_tokens),
    )


def _max_batch_cost(cost: float | None, tokens: int | None) -> float | None:
    """The bound for the scheduler, which counts bytes of text; the worker counts tokens.

    Counting tokens here would take 50 times as long, for each text. The worker counts them anyway,
    and divides a batch with more tokens. So a wrong estimate costs time, but no memory.
    """
    from ..pipelines.sizes import BYTES_PER_TOKEN

    bounds = [cost, None if tokens is None else float(BYTES_PER_TOKEN * tokens)]
    return min((each for each in bounds if each is not None), default=None)


def _pinned(options: ModelCommandOptions) -> dict[str, str | None]:
    """Which model the workers load: of the hub's one commit.

    Raises:
        ModelUnavailable: the hub has no such model, or cannot be asked for it.
        ValueError: an option does not suit the task that the hub names.
    """
    from ..pipelines.hub import name_and_revision, resolve
    from ..pipelines.loading import locate_model
    from ..pipelines.tasks import ALIASES, TASKS

    model, revision, task = options.model, options.revision, options.task
    if model is None or Path(model).exists():
        return {"model": model, "task": task}
    try:
        name, revision = name_and_revision(locate_model(model), revision)
        found = resolve(name, revision)
    except FileNotFoundError as error:
        raise ModelUnavailable(str(error)) from error
    if found.away:
        logger.warning(
            "the hub cannot be asked (%s): %s is loaded from the cache, at commit %s",
            found.away, name, found.commit,
        )  # fmt: skip
    else:
        logger.info("revision %s of %s is commit %s", found.revision, name, found.commit)
    if task is None and ALIASES.get(found.task or "", found.task) in TASKS:
        task = found.task
        check_task(task, options)
    # A branch's name is passed on with its commit, so that the cache learns what it means.
    return {
        "model": name,
        "task": task,
        "revision": found.revision,
        "commit": found.commit,
    }


def _custom_length(place: Any) -> Any:
    """Of the items of ``CustomModel``."""
    if place is None:
        return None
    from ..pipelines.sizes import length_of_inputs

    try:
        return length_of_inputs(find_function(place))
    except (ImportError, AttributeError) as error:
        raise ValueError(f"--length {place} cannot be imported: {error}") from error


def model_name(model: str | None) -> str:
    """What users read: of a folder its last part."""
    if model is None:
        return "text_infilling"
    path = Path(model)
    return path.resolve().name if path.is_dir() else model
