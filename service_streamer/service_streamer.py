"""The module of this name in version 0.1.2: its names, for applications that import them from here.

    import service_streamer
    service_streamer.service_streamer.WORKER_TIMEOUT = 7200

sets for how long ``predict`` waits, in seconds, in every streamer of this process that was built
without ``worker_timeout``; None is for ever. It may be set at any time. New programs pass
``worker_timeout`` to a streamer, or ``timeout`` to a call.
"""

from __future__ import annotations

import sys
import types
from typing import TYPE_CHECKING, Any

import service_streamer as package

from .base_streamer import BaseStreamer
from .options import kinds

if TYPE_CHECKING:
    from . import (
        Future,
        ManagedModel,
        RedisStreamer,
        RedisWorker,
        Streamer,
        ThreadedStreamer,
        run_redis_workers_forever,
    )

    WORKER_TIMEOUT: float | None

__all__ = [
    "TIMEOUT",
    "TIME_SLEEP",
    "WORKER_TIMEOUT",
    "Future",
    "ManagedModel",
    "RedisStreamer",
    "RedisWorker",
    "Streamer",
    "ThreadedStreamer",
    "run_redis_workers_forever",
]

#: Without effect: nothing is polled any more.
TIMEOUT = 1
TIME_SLEEP = 0.001

#: What 0.1.2 had here, and what to use instead.
_GONE = {
    "StreamWorker": "Streamer",
    "ThreadedWorker": "ThreadedStreamer",
    "logger": 'logging.getLogger("service_streamer")',
    "mp": "the option mp_start_method",
}


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(package, name)
    instead = _GONE.get(name)
    if instead is None and name.startswith("_") and not name.startswith("__"):
        instead = "the public names"
    advice = "" if instead is None else f": it was internal in 0.1.2; use {instead}"
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{advice}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Module(types.ModuleType):
    """This module: that its WORKER_TIMEOUT is set, streamers notice."""

    @property
    def WORKER_TIMEOUT(self) -> float | None:  # noqa: N802 - the name that applications set
        return BaseStreamer.library_timeout

    @WORKER_TIMEOUT.setter
    def WORKER_TIMEOUT(self, seconds: float | None) -> None:  # noqa: N802
        BaseStreamer.library_timeout = kinds.TIME_LIMIT.check("WORKER_TIMEOUT", seconds)


sys.modules[__name__].__class__ = _Module
