"""The web application in this process: requests and answers, without sockets or workers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Self, TypeVar

import httpx

from service_streamer import ManagedModel, ThreadedStreamer
from service_streamer.serve.http.app import Models, create_app
from service_streamer.serve.http.service import Service, ServiceOptions

T = TypeVar("T")


class WebApplication:
    """Serves a model, "m" unless it is named. Its event loop runs only in requests and ``run``.

    Args:
        predict: the model, a function of a batch.
        description: of the model, as ``ManagedModel.describe`` returns it.
        keyring: checks API keys.
        siblings: other web processes of the service.
        kind: of the streamer, or what builds one of the model.
        names: of several models, which are alike.
        options: of the web process.

    Attributes:
        service: of the first model.
        streamer: its.
    """

    def __init__(
        self,
        predict: Callable[[list[Any]], list[Any]] = list,
        description: Mapping[str, Any] = MappingProxyType({}),
        *,
        keyring: Any = None,
        siblings: Any = None,
        kind: Callable[[type[ManagedModel]], Any] = ThreadedStreamer,
        names: Sequence[str] = ("m",),
        **options: Any,
    ) -> None:
        class Model(ManagedModel):
            def init_model(self) -> None:
                """Nothing to load."""

            def describe(self) -> dict[str, Any]:
                return {"operations": ["predict"], **description}

            def predict(self, batch: list[Any]) -> list[Any]:
                return predict(batch)

        self._runner = asyncio.Runner()
        self.streamer = kind(Model)
        self.service, *others = self._services = [
            Service(self.streamer, ServiceOptions(name, **options)) for name in names
        ]
        models = Models(self._services, are_named=bool(others), keyring=keyring)
        models.siblings = siblings
        for each in self._services:
            each.siblings = siblings
        transport = httpx.ASGITransport(create_app(models), raise_app_exceptions=False)
        self.client = httpx.AsyncClient(transport=transport, base_url="http://m")
        self.run(self._start())

    async def _start(self) -> None:
        self.streamer.wait_ready()
        for service in self._services:
            service.start()
        while not all(service.is_known for service in self._services):
            await asyncio.sleep(0)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """What a coroutine returns in the loop of the application."""
        return self._runner.run(coroutine)

    def get(self, path: str, **headers: str) -> httpx.Response:
        return self.run(self.client.get(path, headers=_named(headers)))

    def post(self, path: str, body: Any, **headers: str) -> httpx.Response:
        """Send JSON, or bytes as they are."""
        return self.run(self.send(path, body, **headers))

    async def send(self, path: str, body: Any, **headers: str) -> httpx.Response:
        """As ``post``, for ``run``."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        named = {"content-type": "application/json", **_named(headers)}
        return await self.client.post(path, content=content, headers=named)

    def close(self) -> None:
        async def stop() -> None:
            for service in self._services:
                service.stop()
            await self.client.aclose()

        self.run(stop())
        self._runner.close()
        self.streamer.close(drain=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _named(headers: dict[str, str]) -> dict[str, str]:
    return {name.replace("_", "-"): value for name, value in headers.items()}
