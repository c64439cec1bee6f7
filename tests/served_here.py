"""A service in this process: as ``serve`` has it, on a socket, but the worker is a thread.

No process is started, so torch, once it is here, is not imported again. What processes add, such as
signals and the crossing of items and results, is for tests with ``serve_process.Serving``.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from command_line import launched
from http_in_process import HTTPServer, serving_as
from serve_process import Client
from service_streamer import ThreadedStreamer
from service_streamer.pipelines import PipelineModel
from service_streamer.serve.opening import pool_of_service, service_options
from tiny_models import folder


class Whole(PipelineModel):
    """Without stages, with which the worker would have more threads at times."""

    def predict(self, batch: list[Any]) -> list[Any]:
        results: list[Any] = super().predict(batch)
        return results


class ServingHere(Client):
    """A service of the model that a command line of ``serve`` names.

    Args:
        kind: of the model. SteppedPipeline for one that generates, which a worker finds itself.
    """

    def __init__(self, *arguments: str, kind: type[PipelineModel] = Whole) -> None:
        with pytest.MonkeyPatch.context() as patch:
            [self._named] = launched(patch, "serve", *arguments).models
        self._streamer = _streamer(self._named.options, kind)
        self._has_begun = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))
        self._thread.start()
        self._has_begun.wait()
        super().__init__(f"http://127.0.0.1:{self._port}")

    async def _serve(self) -> None:
        async with serving_as(self._streamer, service_options(self._named)) as served:
            sock = socket.create_server(("127.0.0.1", 0))
            self._port = sock.getsockname()[1]
            self._server = HTTPServer(served.site, sock)
            self._loop = asyncio.get_running_loop()
            await asyncio.to_thread(int)  # whose thread is not left by a test, then
            self._has_begun.set()
            await self._server.serve()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._server.stop)
        self._thread.join()
        self._streamer.close(drain=False)


def _streamer(options: Any, kind: type[PipelineModel]) -> ThreadedStreamer:
    """The streamer of a service, with a worker in this process."""
    _, pool = pool_of_service(options)

    class Model(kind):  # type: ignore[misc,valid-type]
        def init_model(self) -> None:
            import torch

            torch.set_num_threads(1)  # in the thread that computes
            super().init_model(**pool.model_init_kwargs)

    return ThreadedStreamer(
        Model,
        pool.batch_size,
        pool.max_latency,
        pool.worker_timeout,
        max_pending=pool.max_pending,
        length=pool.length,
        max_batch_cost=pool.max_batch_cost,
    )


def served(name: str, *arguments: str, kind: type[PipelineModel] = Whole) -> Any:
    """A fixture: the service of a tiny model."""

    @pytest.fixture(scope="module")
    def fixture() -> Iterator[ServingHere]:
        with ServingHere(str(folder(name)), *arguments, kind=kind) as service:
            yield service

    return fixture
