"""service_streamer: the best way to put a deep-learning model behind a web service.

Only the names below are promised. They are imported when first used, so that a worker process,
which imports this package too, does not load what only the web process needs.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .broker.stats import RedisStreamerStats, RedisWorkerStats
    from .broker.streamer import RedisStreamer
    from .broker.worker import RedisWorker, run_redis_workers_forever
    from .errors import (
        BadMessage,
        BadModelOutput,
        BrokerError,
        BrokerUnavailable,
        InvalidInput,
        ModelError,
        Overloaded,
        PredictTimeout,
        SharedBatchError,
        StreamerBroken,
        StreamerClosed,
        StreamerError,
        StreamerForked,
        UnpicklableItem,
        WorkerError,
        WorkerLost,
        WorkerStartError,
        WorkerStartTimeout,
    )
    from .futures import Future
    from .managed_model import ManagedModel
    from .metrics import BatchMetrics, Histogram
    from .scheduling.records import Reason, Timing
    from .stats import StreamerStats, WorkerStats
    from .streamers import Streamer, ThreadedStreamer

__version__ = "1.0.0.dev0"

__all__ = [  # noqa: RUF022 - grouped by what they are
    # Streamers
    "Future",
    "ManagedModel",
    "Streamer",
    "StreamerStats",
    "ThreadedStreamer",
    # What they did
    "BatchMetrics",
    "Histogram",
    "Reason",
    "Timing",
    "WorkerStats",
    # Over Redis
    "RedisStreamer",
    "RedisStreamerStats",
    "RedisWorker",
    "RedisWorkerStats",
    "run_redis_workers_forever",
    # Errors
    "BadMessage",
    "BadModelOutput",
    "BrokerError",
    "BrokerUnavailable",
    "InvalidInput",
    "ModelError",
    "Overloaded",
    "PredictTimeout",
    "SharedBatchError",
    "StreamerBroken",
    "StreamerClosed",
    "StreamerError",
    "StreamerForked",
    "UnpicklableItem",
    "WorkerError",
    "WorkerLost",
    "WorkerStartError",
    "WorkerStartTimeout",
]

_MODULES = {
    "BatchMetrics": "metrics",
    "Future": "futures",
    "Histogram": "metrics",
    "ManagedModel": "managed_model",
    "Reason": "scheduling.records",
    "RedisStreamer": "broker.streamer",
    "RedisStreamerStats": "broker.stats",
    "RedisWorker": "broker.worker",
    "RedisWorkerStats": "broker.stats",
    "Streamer": "streamers",
    "StreamerStats": "stats",
    "ThreadedStreamer": "streamers",
    "Timing": "scheduling.records",
    "WorkerStats": "stats",
    "run_redis_workers_forever": "broker.worker",
}


def __getattr__(name: str) -> Any:
    if name == "service_streamer":  # as in 0.1.2, where importing the package imported it as well
        return importlib.import_module(f".{name}", __name__)
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = importlib.import_module(f".{_MODULES.get(name, 'errors')}", __name__)
    except ModuleNotFoundError as error:
        if error.name not in ("redis", "msgpack"):
            raise
        from .extras import missing

        text = missing(name, error.name, "redis")
        raise ImportError(text, name=error.name) from error
    value = getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
