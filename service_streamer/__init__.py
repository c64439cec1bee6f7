"""service_streamer: the best way to put a deep-learning model behind a web service.

Only the names below are promised. They are imported when first used, so that a worker process,
which imports this package too, does not load what only the web process needs.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .errors import (
        BadMessage,
        BadModelOutput,
        BrokerError,
        BrokerUnavailable,
        ModelError,
        Overloaded,
        PredictTimeout,
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
    from .stats import StreamerStats
    from .streamers import Streamer, ThreadedStreamer

__version__ = "1.0.0.dev0"

__all__ = [  # noqa: RUF022 - grouped by what they are
    # Streamers
    "Future",
    "ManagedModel",
    "Streamer",
    "StreamerStats",
    "ThreadedStreamer",
    # Errors
    "BadMessage",
    "BadModelOutput",
    "BrokerError",
    "BrokerUnavailable",
    "ModelError",
    "Overloaded",
    "PredictTimeout",
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
    "Future": "futures",
    "ManagedModel": "managed_model",
    "Streamer": "streamers",
    "StreamerStats": "stats",
    "ThreadedStreamer": "streamers",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_MODULES.get(name, 'errors')}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
