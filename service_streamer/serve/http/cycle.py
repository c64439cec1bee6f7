"""One request and its answer, on bare ASGI: the hot path of the web process.

     read      headers (key, length, timeout), then the body
     compute   submit to the streamer, await its reply
     answer    the result, or the refusal of the error

One timer per request. It seldom fires before the request ends. If it does, a slow sender gets a
deadline, and the call of a client that disconnects is withdrawn.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, MutableMapping, Sequence
from typing import Any

from ...engine.backend import Backend, LoopReply
from ...engine.streams import AsyncStream
from ...observe.record import ORDINARY, Call, Precedence, Timing
from .admission import ServiceOptions
from .headers import check_key, read_priority, read_seconds, read_tenant
from .refusals import Refusal, too_large

__all__ = [
    "Cycle",
    "Disconnected",
    "Receive",
    "Scope",
    "Send",
    "answer",
    "answer_early",
]

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

#: Seconds until the client's connection is watched. Watching costs a task, as much as the rest of a
#: short request.
_LONG = 0.1

#: A body that is too large is read up to this multiple of the limit, for this many seconds: many
#: clients read the answer only after they have sent everything.
_SPILL = 16
_SPILL_TIME = 30.0

_CONTENT_TYPE = (b"content-type", b"application/json")


class Disconnected(Exception):
    """The client has disconnected: no answer can be sent."""


class Cycle:
    """A request that is being read and computed. Belongs to one task."""

    __slots__ = (
        "_backend",
        "_began",
        "_is_gone",
        "_is_slow",
        "_loop",
        "_options",
        "_receive",
        "_reply",
        "_task",
        "_timer",
        "_watch",
        "body",
        "content_type",
        "is_read",
        "precedence",
        "request_id",
        "timeout",
        "timing",
    )

    def __init__(self, options: ServiceOptions, backend: Backend, receive: Receive) -> None:
        self._options = options
        self._backend = backend
        self._receive = receive
        self._loop = asyncio.get_running_loop()
        self._began = self._loop.time()
        self._task: asyncio.Task[Any] | None = asyncio.current_task()
        self._reply: LoopReply | None = None
        self._watch: asyncio.Task[None] | None = None
        self._is_gone = self._is_slow = False
        self._timer = self._loop.call_later(_LONG, self._takes_long)
        #: The body, and whether it is complete.
        self.body = b""
        self.is_read = False
        #: The header Content-Type; empty if missing.
        self.content_type = b""
        #: The header X-Request-ID; empty if missing.
        self.request_id = b""
        #: Seconds until the result is due.
        self.timeout = options.timeout
        #: Timing of the last call; None if unknown.
        self.timing: Timing | None = None
        self.precedence = ORDINARY

    def close(self) -> None:
        """End the timer and the watch of the connection."""
        self._timer.cancel()
        self._task = None
        if self._watch is not None:
            self._watch.cancel()
            # Its exception's frames hold this object: a reference cycle.
            self._watch = None

    # -- reading

    async def read(self, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Check the headers and read the body.

        Raises:
            Refusal: the request is refused.
            Disconnected: the client disconnected.
        """
        options = self._options
        priority, tenant, has_deadline = ORDINARY
        priority_header, tenant_header = options.priority_header, options.tenant_header
        wanted = options.headers_read
        if options.api_keys:
            tenant = check_key(options.api_keys, headers)
        for name, value in headers:
            if name not in wanted:
                continue
            if name == b"content-type":
                self.content_type = value
            elif name == b"content-length":
                if int(value) > options.max_body:  # the server has checked its form
                    raise too_large(options.max_body, int(value))
            elif name == b"x-request-timeout":
                self.timeout = min(self.timeout, read_seconds(value))
                has_deadline = options.knows_callers
            elif name == priority_header:
                priority = read_priority(name, value)
            elif name == tenant_header:
                # A key's holder can only name parts of its own tenant.
                part = read_tenant(name, value)
                tenant = f"{tenant}: {part}" if tenant and part else part or tenant
            elif name == b"x-request-id":
                self.request_id = self.request_id or value
        if priority or tenant or has_deadline:
            self.precedence = Precedence(priority, tenant, has_deadline)
        try:
            message = await self._receive()
            self.body = message.get("body", b"")
            if message.get("more_body", False) or message["type"] != "http.request":
                await self._read_rest(message)
        except asyncio.CancelledError:
            if self._is_slow:
                raise Refusal(
                    408, "timeout", "the body of the request did not arrive in time",
                    reason="timeout", code="request_timeout",
                ) from None  # fmt: skip
            raise
        self.is_read = True
        if len(self.body) > self._options.max_body:
            raise too_large(self._options.max_body, len(self.body))

    async def _read_rest(self, message: Message) -> None:
        chunks = [self.body]
        size = len(self.body)
        while message["type"] == "http.request" and message.get("more_body", False):
            message = await self._receive()
            chunk = message.get("body", b"")
            chunks.append(chunk)
            size += len(chunk)
            if size > self._options.max_body:
                raise too_large(self._options.max_body)
        if message["type"] != "http.request":
            raise Disconnected
        self.body = b"".join(chunks)

    # -- computing

    async def submit(self, items: Sequence[Any]) -> list[Any]:
        """Compute items in batches with other callers' items, as ``apredict`` does.

        Raises:
            Disconnected: the client disconnected; the call is withdrawn.
            Exception: as ``predict``.
        """
        backend = self._backend
        reply = LoopReply(self._loop)
        left = self.timeout - (self._loop.time() - self._began)
        self._reply = reply
        try:
            backend.submit(Call(items, reply, left, self.precedence, is_watched=True, more=True))
            reply.flush_soon(backend)
            outcome = await reply.future
        except asyncio.CancelledError:
            call = reply.call
            if call is not None:
                backend.withdraw(call)
            if self._is_gone:
                raise Disconnected from None
            raise
        finally:
            self._reply = None
        assert outcome is not None  # only this cycle ends the wait
        outputs, failure = outcome
        if failure is not None:
            try:
                raise failure.exception()
            finally:  # they may hold the error itself, whose traceback has this frame: a cycle
                del failure, outcome, reply
        self.timing = getattr(reply.answered, "timing", None)
        return backend.decode(outputs)

    def open_stream(self, item: Any, max_buffered: int) -> AsyncStream:
        """Compute one item; whoever gets its outputs watches the connection. Raises as ``stream``.

        Args:
            max_buffered: how many outputs may wait until the item rests.
        """
        self._timer.cancel()
        left = self.timeout - (self._loop.time() - self._began)
        return AsyncStream(self._backend, item, left, self.precedence, max_buffered, False)

    def _takes_long(self) -> None:
        if self._reply is not None:
            self._watch = self._loop.create_task(self._watch_connection())
        elif self._task is not None:  # still reading the body
            self._timer = self._loop.call_later(max(0.0, self.timeout - _LONG), self._is_too_slow)

    def _is_too_slow(self) -> None:
        if self._reply is not None:  # read just in time
            self._takes_long()
        elif self._task is not None:
            self._is_slow = True
            self._task.cancel()

    async def _watch_connection(self) -> None:
        message = await self._receive()
        if message["type"] == "http.disconnect" and self._reply is not None:
            self._is_gone = True
            self._reply.future.cancel()


async def answer(
    send: Send,
    status: int,
    body: bytes,
    headers: tuple[tuple[bytes, bytes], ...] = (),
) -> None:
    await send(
        {
            "type": "http.response.start",
            "status": status,
            "headers": [_CONTENT_TYPE, (b"content-length", b"%d" % len(body)), *headers],
        }
    )
    await send({"type": "http.response.body", "body": body})


async def answer_early(send: Send, receive: Receive, refused: Refusal, max_body: int) -> None:
    """Answer before the body is read, then read and drop a bounded part of it."""
    body = refused.body
    headers = [_CONTENT_TYPE, (b"content-length", b"%d" % len(body)), *refused.headers]
    headers.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": refused.status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": True})
    try:
        async with asyncio.timeout(_SPILL_TIME):
            left = _SPILL * max_body
            while left > 0:
                message = await receive()
                left -= len(message.get("body", b""))
                if message["type"] != "http.request" or not message.get("more_body", False):
                    break
    except TimeoutError:
        pass
    await send({"type": "http.response.body", "body": b""})
