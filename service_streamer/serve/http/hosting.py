"""Health and metrics of a worker host over HTTP, for probes and Prometheus: ``worker --port``.

The host runs in the main thread. This small web server has its own thread, so that it answers while
the host loads its model, waits for Redis or drains.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Self

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from .asgi import ASGIBridge
from .listening import HTTPServer
from .prometheus import exposition_of_host

if TYPE_CHECKING:
    from ...redis.redis_stats import RedisWorkerStats
    from ...redis.redis_worker import RedisWorker

logger = logging.getLogger(__name__)

#: Seconds to wait for open requests at the end.
_GRACE = 1.0


def standing(stats: RedisWorkerStats | None) -> tuple[str, str]:
    """ "ready", "starting", "failing", "draining" or "broken", and a sentence about it.

    Args:
        stats: the host's figures; None before its start.
    """
    if stats is None:
        return "starting", "the worker host is starting"
    pool = stats.pool
    serving = pool.workers["idle"] + pool.workers["busy"]
    match stats.state:
        case "failed" if pool.state != "broken":
            return "broken", "the worker host has stopped serving; see its log"
        case "leaving":
            return "draining", "the worker host is stopping"
        case "disconnected":
            return "failing", "Redis cannot be reached"
    if pool.state in ("broken", "closed"):
        return "broken", "no worker can be started; see the log; the host keeps retrying"
    if not serving:
        is_first = stats.state == "starting"
        return "starting", "the model is loading" if is_first else (
            "no worker is ready; a worker is being restarted"
        )
    if stats.state == "starting":
        return "starting", "the worker host is waiting to join the other hosts of its prefix"
    if pool.trouble is not None:
        return "failing", pool.trouble
    return "ready", "the worker host is serving"


class Probes:
    """Serves ``/health/live``, ``/health/ready``, ``/stats`` and ``/metrics`` in a ``with`` block.

    Args:
        sock: a listening socket; closed at the end.
    """

    def __init__(self, worker: RedisWorker, sock: socket.socket) -> None:
        self._worker = worker
        self._sock = sock
        self._exposition = exposition_of_host(worker, lambda: self._standing()[0] == "ready")
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
        except Exception:  # the host itself continues
            logger.exception("the health and metrics server of this worker host failed")
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
        self._server = HTTPServer(ASGIBridge(app), self._sock)
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
