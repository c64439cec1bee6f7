"""service_streamer: the best way to put a deep-learning model behind a web service.

Only the names below are promised. All but the errors are imported when first used, so that a worker
process, which imports this package too, does not load what only the web process needs.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from . import errors
from .errors import *  # noqa: F403

if TYPE_CHECKING:
    from .engine.streams import AsyncStream, Stream
    from .future import Future
    from .gpu.transfers import OnHost, to_device, to_host, to_pinned
    from .managed_model import ManagedModel
    from .observe.metrics import BatchMetrics, Histogram, StreamerStats, WorkerStats
    from .observe.record import Reason, Timing
    from .ray.ray_streamer import RayStreamer
    from .redis.redis_stats import RedisStreamerStats, RedisWorkerStats
    from .redis.redis_streamer import RedisStreamer
    from .redis.redis_worker import RedisWorker, run_redis_workers_forever
    from .streamer import Streamer, ThreadedStreamer

__version__ = "1.0.0"

__all__ = [  # noqa: RUF022 - grouped by what they are
    # Streamers
    "Future",
    "ManagedModel",
    "AsyncStream",
    "Stream",
    "Streamer",
    "StreamerStats",
    "ThreadedStreamer",
    # To a GPU and back
    "OnHost",
    "to_device",
    "to_host",
    "to_pinned",
    # What they did
    "BatchMetrics",
    "Histogram",
    "Reason",
    "Timing",
    "WorkerStats",
    # Over Redis
    "RayStreamer",
    "RedisStreamer",
    "RedisStreamerStats",
    "RedisWorker",
    "RedisWorkerStats",
    "run_redis_workers_forever",
]
__all__ += errors.__all__  # in the one form that all type checkers read

#: Where the names are, but for the errors.
_MODULES = {
    "engine.streams": ("AsyncStream", "Stream"),
    "future": ("Future",),
    "gpu.transfers": ("OnHost", "to_device", "to_host", "to_pinned"),
    "managed_model": ("ManagedModel",),
    "observe.metrics": ("BatchMetrics", "Histogram", "StreamerStats", "WorkerStats"),
    "observe.record": ("Reason", "Timing"),
    "ray.ray_streamer": ("RayStreamer",),
    "redis.redis_stats": ("RedisStreamerStats", "RedisWorkerStats"),
    "redis.redis_streamer": ("RedisStreamer",),
    "redis.redis_worker": ("RedisWorker", "run_redis_workers_forever"),
    "streamer": ("Streamer", "ThreadedStreamer"),
}


def __getattr__(name: str) -> Any:
    if name == "service_streamer":  # as in 0.1.2, where importing the package imported it as well
        return importlib.import_module(f".{name}", __name__)
    module = next((module for module, names in _MODULES.items() if name in names), None)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .reporting import explain_missing

    extra = "ray" if name == "RayStreamer" else "redis"
    with explain_missing(name, extra, extra, "msgpack"):
        value = getattr(importlib.import_module(f".{module}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
