"""Runs an ASGI application on uvicorn, for ``python example/..._example.py``.

It says where it serves once the model is there, and how to try it; ends with 0 on SIGTERM and
Ctrl-C, when what was accepted is answered; and with one line and 1 if the model cannot be loaded.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import socket
import sys
from collections.abc import Callable
from typing import Any

import uvicorn

from service_streamer import StreamerClosed, StreamerError

GRACE = 30  # seconds for which requests may hold up the end


def serve(app: Any, wait_ready: Callable[[], None], curl: str, *, has_model_option: bool) -> None:
    """Parses the command line and serves until a signal comes.

    Args:
        app: its lifespan starts the streamer.
        wait_ready: blocks until the model is there. Called when the lifespan has begun.
        curl: what to try, with ``{url}`` where the address belongs.
        has_model_option: whether there is ``--model``, which sets the environment's ``MODEL``.
    """
    parser = argparse.ArgumentParser(description=sys.modules["__main__"].__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    if has_model_option:
        parser.add_argument("--model", help="a model's folder or hub name ($MODEL)")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    args = parser.parse_args()
    if has_model_option and args.model:
        os.environ["MODEL"] = args.model  # where the workers, too, look
    config = uvicorn.Config(
        app,
        args.host,
        args.port,
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=GRACE,
    )
    listener = config.bind_socket()
    for number in (signal.SIGINT, signal.SIGTERM):
        # When it has shut down uvicorn raises the signal that made it do so once more.
        signal.signal(number, lambda *_: sys.exit())
    server = _Server(config, wait_ready, curl.replace("{url}", _url(listener)), _url(listener))
    server.run(sockets=[listener])
    if server.failure:
        sys.exit(server.failure)


class _Server(uvicorn.Server):
    def __init__(
        self, config: uvicorn.Config, wait_ready: Callable[[], None], curl: str, url: str
    ) -> None:
        super().__init__(config)
        self.failure: str | None = None
        self._wait_ready = wait_ready
        self._lines = f"serving on {url} (uvicorn); try:\n{curl}"

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        # Beside it, or a signal would have to wait for the model.
        self._announcement = asyncio.create_task(self._announce())

    async def _announce(self) -> None:
        try:
            await asyncio.to_thread(self._wait_ready)
        except StreamerClosed:
            return
        except StreamerError as error:
            self.failure = f"{type(error).__name__}: {error}"
            self.should_exit = True
        else:
            print(self._lines, flush=True)


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
