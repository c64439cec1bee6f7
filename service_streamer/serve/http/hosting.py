"""Health and metrics of a worker host over HTTP, for probes and Prometheus: ``worker --port``.

The host itself runs in the main thread; this is a small web server in a thread of its own, so that
it answers while the host loads its model, waits for Redis, or drains.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Self

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from .listening import HTTPServer, make_server
from .prometheus import CONTENT_TYPE_LATEST, HostExposition

if TYPE_CHECKING:
    from ...redis.redis_stats import RedisWorkerStats
    from ...redis.redis_worker import RedisWorker

__all__ = ["Probes", "standing"]

logger = logging.getLogger(__name__)

#: How long the end waits for answers that are under way, seconds.
_GRACE = 1.0


def standing(stats: RedisWorkerStats | None) -> tuple[str, str]:
    """ "ready", "starting", "failing", "draining" or "broken", and a sentence about it.

    Args:
        stats: of the host; None if it was not started.
    """
    if stats is None:
        return "starting", "the worker host starts"
    pool = stats.pool
    serving = pool.workers["idle"] + pool.workers["busy"]
    match stats.state:
        case "failed" if pool.state != "broken":
            return "broken", "the worker host has stopped serving; its log says why"
        case "leaving":
            return "draining", "the worker host is stopping"
        case "disconnected":
            return "failing", "Redis cannot be reached"
    if pool.state in ("broken", "closed"):
        return "broken", "no worker can be started; the log says why, and it is tried again"
    if not serving:
        is_first = stats.state == "starting"
        return "starting", "the model is loading" if is_first else (
            "no worker is ready; one is being started again"
        )
    if stats.state == "starting":
        return "starting", "the worker host waits to join the other hosts of its prefix"
    if pool.trouble is not None:
        return "failing", pool.trouble
    return "ready", "the worker host serves"


class Probes:
    """Answers GET of ``/health/live``, ``/health/ready``, ``/stats`` and ``/metrics``.

    Until the end of the ``with`` block.

    Args:
        sock: listens; closed at the end.
    """

    def __init__(self, worker: RedisWorker, sock: socket.socket) -> None:
        self._worker = worker
        self._sock = sock
        self._exposition = HostExposition(worker, lambda: self._standing()[0] == "ready")
        self._loop: asyncio.AbstractEventLoop | None = None
        self._server: HTTPServer | None = None
        self._has_begun = threading.Event()
        self._thread = threading.Thread(
            target=self._run, name="service_streamer probes", daemon=True
        )

    def __enter__(self) -> Self:
        self._thread.start()
        self._has_begun.wait()
        return self

    def __exit__(self, *_: object) -> None:
        loop, server = self._loop, self._server
        if loop is not None and server is not None and self._thread.is_alive():
            loop.call_soon_threadsafe(lambda: server.stop(in_a_hurry=True))
        self._thread.join(_GRACE)
        self._sock.close()

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except Exception:  # the host goes on, which matters more
            logger.exception("the server for health and metrics of this worker host has failed")
        finally:
            self._has_begun.set()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        handlers: dict[str, Callable[[], Response]] = {
            "/health/live": lambda: _json({"status": "live"}),
            "/health/ready": self._ready,
            "/stats": lambda: _json(self._worker.stats()),
            "/metrics": self._metrics,
        }
        app = Starlette(routes=[Route(path, _endpoint(each)) for path, each in handlers.items()])
        self._server = make_server("uvicorn", app, self._sock)
        self._has_begun.set()
        await self._server.serve()

    def _standing(self) -> tuple[str, str]:
        return standing(self._worker.stats())

    def _ready(self) -> Response:
        state, detail = self._standing()
        return _json({"status": state, "detail": detail}, 200 if state == "ready" else 503)

    def _metrics(self) -> Response:
        return Response(self._exposition.text(), headers={"content-type": CONTENT_TYPE_LATEST})


def _endpoint(handler: Callable[[], Response]) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(_: Request) -> Response:
        return handler()

    return endpoint


def _json(value: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")
