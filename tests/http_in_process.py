"""The HTTP server in this process: clients, models and time, without network, workers and waiting.

A test runs by ``run(main())`` in an event loop whose time stands still until ``pass_time``. Its
clients talk to any application, or to the service of a model.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, NamedTuple, TypeVar

from service_streamer import Overloaded
from service_streamer.serve.http.app import (
    ASGIBridge,
    ExchangeBridge,
    Models,
    create_app,
    create_site,
)
from service_streamer.serve.http.listening import HTTPServer, Turns
from service_streamer.serve.http.service import Keyring, Service, ServiceOptions
from service_streamer.testing import ManualClock

__all__ = [
    "ASGIBridge", "ExchangeBridge", "HTTPServer", "Keyring", "StubClient", "StubStreamer", "Turns",
    "asking", "await_that", "in_event_loop", "in_still_time", "pass_time", "post", "run", "serving",
    "serving_as", "settled",
]  # fmt: skip

T = TypeVar("T")


class StillLoop(asyncio.SelectorEventLoop):
    """An event loop whose time stands still until its clock is moved."""

    def __init__(self) -> None:
        self.clock = ManualClock(1000.0)
        self.clients: list[StubClient] = []
        super().__init__()

    def time(self) -> float:
        return self.clock()


def run(main: Coroutine[Any, Any, T]) -> T:
    with asyncio.Runner(loop_factory=StillLoop) as runner:
        return runner.run(main)


def in_still_time(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """A test that is a coroutine function, run by ``run``. Its clients leave at its end."""

    async def to_the_end(*args: Any, **kwargs: Any) -> None:
        await test(*args, **kwargs)
        loop: Any = asyncio.get_running_loop()
        for client in loop.clients:
            client.leave()

    @functools.wraps(test)
    def started(*args: Any, **kwargs: Any) -> None:
        run(to_the_end(*args, **kwargs))

    return started


def in_event_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """A test that is a coroutine function, run in a loop whose time is the usual one."""

    @functools.wraps(test)
    def started(*args: Any, **kwargs: Any) -> None:
        asyncio.run(test(*args, **kwargs))

    return started


async def settled() -> None:
    """Let all tasks go as far as they can."""
    for _ in range(20):
        await asyncio.sleep(0)


async def await_that(holds: Callable[[], Any]) -> None:
    """Let other threads and tasks go on until something holds. The alarm of the test is the end."""
    while not holds():
        await asyncio.sleep(0)


async def pass_time(seconds: float) -> None:
    loop: Any = asyncio.get_running_loop()
    loop.clock.advance(seconds)
    await settled()


class StubClient(asyncio.Transport):
    """A client, and the transport between it and a connection of the service.

    Args:
        application: answers the requests.
        beside: another client of the same server; None for a server of its own.
        is_secure: whether the connection is encrypted.
        options: of ``HTTPServer``.

    Attributes:
        server: the HTTP server.
        connection: the server's end, an asyncio protocol.
        received: all that the service has sent.
        is_closed: whether the service has closed the connection.
        is_aborted: whether it did so without sending what is unread.
        is_read: whether the service reads what is sent.
        unread: bytes of answers that the client has not read, as the service sees it.
        late: how often the service has written after it had closed the connection.
    """

    def __init__(
        self,
        application: Any,
        *,
        beside: StubClient | None = None,
        is_secure: bool = False,
        **options: Any,
    ) -> None:
        super().__init__({"sslcontext": "any"} if is_secure else {})
        self.received = b""
        self.is_closed = self.is_aborted = False
        self.is_read = True
        self._has_left = False
        self.unread = self.late = 0
        no_socket: Any = None
        self.server = (
            HTTPServer(application, no_socket, **options) if beside is None else beside.server
        )
        self.connection: Any = self.server.connected()
        self.connection.connection_made(self)
        loop = asyncio.get_running_loop()
        if isinstance(loop, StillLoop):
            loop.clients.append(self)

    def send(self, data: bytes) -> None:
        self.connection.data_received(data)

    async def tell(self, data: bytes) -> None:
        """Send, and let the service go as far as it can."""
        self.send(data)
        await settled()

    async def ask(self, request: bytes) -> tuple[int, bytes]:
        """Send a request, and wait for the answer: its status and its body."""
        self.received = b""
        self.send(request)
        await await_that(lambda: self.received)
        head, _, body = self.received.partition(b"\r\n\r\n")
        return int(head.split()[1]), body

    def leave(self) -> None:
        """Disconnect, if it is not done yet."""
        self.is_closed = True
        if not self._has_left:
            self._has_left = True
            self.connection.connection_lost(None)

    def stop_reading(self) -> None:
        self.connection.pause_writing()

    def read_on(self) -> None:
        self.connection.resume_writing()

    # -- the transport's

    def write(self, data: Any) -> None:
        if self.is_closed:
            self.late += 1
        else:
            self.received += bytes(data)

    def writelines(self, parts: Any) -> None:
        self.write(b"".join(parts))

    def close(self) -> None:
        self.is_closed = True

    def abort(self) -> None:
        self.is_closed = self.is_aborted = True

    def is_closing(self) -> bool:
        return self.is_closed

    def pause_reading(self) -> None:
        assert self.is_read
        self.is_read = False

    def resume_reading(self) -> None:
        assert not self.is_read
        self.is_read = True

    def get_write_buffer_size(self) -> int:
        return self.unread


async def asking(application: Any, request: bytes, **options: Any) -> StubClient:
    """A client that has sent this; the service has gone as far as it can."""
    client = StubClient(application, **options)
    await client.tell(request)
    return client


def post(body: bytes, head: bytes = b"", path: bytes = b"/", version: bytes = b"1.1") -> bytes:
    """A request with a body."""
    length = b"content-length: %d\r\n" % len(body)
    return b"POST %b HTTP/%b\r\nhost: a\r\n%b%b\r\n%b" % (path, version, length, head, body)


class StubStreamer:
    """A streamer without workers, and its backend. Its model returns its items.

    It answers when it is flushed.

    Attributes:
        calls: all that were submitted, in order.
        told: their items, and "flush" where it was flushed.
        open: those that are accepted and not answered.
        is_full: whether no call has room.
        is_held: whether the test answers the open calls itself.
    """

    def __init__(self) -> None:
        self.backend = self
        self.calls: list[Any] = []
        self.told: list[Any] = []
        self.open: list[Any] = []
        self.is_full = self.is_held = False

    def check_room(self) -> None:
        if self.is_full:
            raise Overloaded("no room")

    def submit(self, call: Any) -> None:
        self.calls.append(call)
        self.told.append([*call.payloads])
        if call.payloads == ["refuse"]:
            raise Overloaded("full")
        if call.payloads == ["fail"]:
            raise RuntimeError("a bug")
        call.reply.call = call
        self.open.append(call)

    def flush(self) -> None:
        self.told.append("flush")
        while self.open and not self.is_held:
            call = self.open.pop()
            call.reply.end([*call.payloads])

    def withdraw(self, call: Any) -> None:
        self.open.remove(call)

    def decode(self, outputs: list[Any]) -> list[Any]:
        return outputs

    def when_workers_change(self, callback: Callable[[], None]) -> None:
        """They do not."""

    def model_description(self) -> dict[str, Any]:
        return {}


class ServedModel(NamedTuple):
    """A service of one model.

    Attributes:
        site: answers a ``StubClient``.
        app: the same for an ASGI server.
    """

    service: Service
    site: Any
    app: Any


@asynccontextmanager
async def serving_as(streamer: Any, about: ServiceOptions) -> AsyncIterator[ServedModel]:
    """The service of a streamer, whose model is known."""
    ready = asyncio.Event()
    service = Service(streamer, about, on_ready=ready.set)
    models = Models([service], keyring=Keyring(about.api_keys) if about.needs_key else None)
    service.start()
    await ready.wait()
    yield ServedModel(service, create_site(models), create_app(models))
    service.stop()


def serving(
    streamer: Any, model: str = "m", **options: Any
) -> AbstractAsyncContextManager[ServedModel]:
    """The same; the options are those of ``serve``."""
    return serving_as(streamer, ServiceOptions(model, **options))
