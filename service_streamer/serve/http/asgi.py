"""Between exchanges and ASGI, both ways.

our connections ──▶ ASGIBridge ──▶ Starlette, for all that is no operation of the model
an ASGI server, or middleware that traces requests ──▶ ExchangeBridge ──▶ an endpoint
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import httptools

from .exchange import (
    Application,
    Disconnected,
    Headers,
    HTTPExchange,
    find_request_id,
    new_request_id,
)

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

_CLOSE = (b"connection", b"close")


class ASGIBridge:
    """Has an ASGI application answer the exchanges of our connections."""

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        self._app = app

    async def __call__(self, exchange: Any) -> None:
        """Raises Disconnected, and what the application raises."""
        try:
            scope = _scope(exchange)
        except httptools.HttpParserInvalidURLError:
            text = ((b"content-type", b"text/plain; charset=utf-8"),)
            exchange.answer(400, text, b"Invalid URL.")
            return
        await self._app(scope, *_ends(exchange))


def exchange_of(scope: Scope) -> HTTPExchange | None:
    """The request of one of our connections; None with another server."""
    found: HTTPExchange | None = scope.get("state", {}).get("exchange")
    return found


def request_id_of(scope: Scope) -> str:
    """As ``Exchange.request_id``."""
    exchange = exchange_of(scope)
    if exchange is not None:
        return exchange.request_id
    return (find_request_id(scope["headers"]) or new_request_id()).decode()


def _scope(exchange: HTTPExchange) -> Scope:
    path, raw_path, query = exchange.url()
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1" if exchange.is_new else "1.0",
        "method": exchange.method.decode("ascii"),
        "scheme": "https" if exchange.carrier.is_secure else "http",
        "path": path,
        "raw_path": raw_path,
        "query_string": query,
        "root_path": "",
        "headers": exchange.headers,
        "server": exchange.carrier.server,
        "client": exchange.carrier.client,
        "state": {"exchange": exchange},
    }


def _ends(exchange: HTTPExchange) -> tuple[Receive, Send]:
    """``receive`` and ``send`` of a request."""
    is_taken = False
    begun: tuple[int, Headers] | None = None
    is_over = asyncio.Event()  # the client has gone, or has its answer

    async def receive() -> Message:
        nonlocal is_taken
        if not is_taken:
            try:
                body = await exchange.more()
            except Disconnected:
                return {"type": "http.disconnect"}
            is_taken = exchange.is_read
            return {"type": "http.request", "body": body, "more_body": not is_taken}
        if not (exchange.is_gone or exchange.is_over):
            exchange.on_gone = is_over.set
            await is_over.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        nonlocal begun
        if message["type"] == "http.response.start":
            named = [(name.lower(), value) for name, value in message.get("headers", ())]
            if any(b"\n" in part or b"\r" in part for header in named for part in header):
                raise ValueError("a header of the answer has a line break")
            if _CLOSE in named:
                named.remove(_CLOSE)
                exchange.keeps_alive = False
            begun = message["status"], named
            return
        body, is_last = message.get("body", b""), not message.get("more_body", False)
        with contextlib.suppress(Disconnected):  # as servers do: ``receive`` says so
            if begun is not None:
                (status, headers), begun = begun, None
                if is_last and exchange.method != b"HEAD":
                    without = [each for each in headers if each[0] != b"content-length"]
                    exchange.answer(status, without, body)
                    is_over.set()
                    return
                exchange.start(status, headers)
            if is_last:
                is_over.set()
                await exchange.end(body)
            else:
                await exchange.write(body)

    return receive, send


class _ASGIExchange:
    """An ``Exchange`` of any ASGI server. ``close`` sends what is left of it."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.headers: Headers = scope["headers"]
        self.is_read = self.is_gone = False
        self.key = self.model = ""
        self.request_id = request_id_of(scope)
        self._ours = exchange_of(scope)
        self._receive = receive
        self._send = send
        self._body = b""
        self._begun: tuple[int, Headers] | None = None
        self._answer = b""
        self._on_gone: Callable[[], object] | None = None
        self._watch: asyncio.Task[None] | None = None

    @property
    def on_gone(self) -> Callable[[], object] | None:
        return self._on_gone

    @on_gone.setter
    def on_gone(self, callback: Callable[[], object] | None) -> None:
        self._on_gone = callback
        if callback is not None and self._watch is None:
            self._watch = asyncio.get_running_loop().create_task(self._await_end())

    async def _await_end(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.is_gone = True
        if self._on_gone is not None:
            self._on_gone()

    def take(self) -> bytes:
        body, self._body = self._body, b""
        return body

    async def more(self) -> bytes:
        if not self.is_read:
            message = await self._receive()
            if message["type"] != "http.request":
                self.is_gone = True
                raise Disconnected
            self.is_read = not message.get("more_body", False)
            self._body += message.get("body", b"")
        return self.take()

    def answer(self, status: int, headers: Headers, body: bytes) -> None:
        self.start(status, (*headers, (b"content-length", b"%d" % len(body))))
        self._answer = body

    def answer_early(self, status: int, headers: Headers, body: bytes, _: int) -> None:
        self.answer(status, (*headers, _CLOSE), body)  # the server drops the body

    def start(self, status: int, headers: Headers) -> None:
        if self._ours is None:
            headers = (*headers, (b"x-request-id", self.request_id.encode()))
        else:
            self._ours.key, self._ours.model = self.key, self.model
        self._begun = status, headers

    async def write(self, part: bytes) -> None:
        await self._put(part, more_body=True)

    async def end(self, part: bytes = b"") -> None:
        await self._put(part, more_body=False)

    async def _put(self, part: bytes, *, more_body: bool) -> None:
        begun, self._begun = self._begun, None
        if self.is_gone:
            raise Disconnected
        try:
            if begun is not None:
                status, headers = begun
                start = {"type": "http.response.start", "status": status, "headers": [*headers]}
                await self._send(start)
            await self._send({"type": "http.response.body", "body": part, "more_body": more_body})
        except OSError:
            raise Disconnected from None

    async def close(self) -> None:
        try:
            if self._begun is not None and not self.is_gone:
                await self._put(self._answer, more_body=False)
        except Disconnected:
            pass
        finally:
            if self._watch is not None:
                self._watch.cancel()


class ExchangeBridge:
    """An ASGI application that has the exchanges of any ASGI server answered."""

    def __init__(self, application: Application) -> None:
        self._application = application

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises what the application raises."""
        exchange = _ASGIExchange(scope, receive, send)
        try:
            await self._application(exchange)
        except Disconnected:
            exchange.is_gone = True
        finally:
            await exchange.close()
