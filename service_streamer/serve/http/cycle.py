"""One request and its answer, on bare ASGI: what every request pays for is kept short.

     read      the key, the length, the time that the caller gives; then the body
     compute   submit to the streamer, await its reply
     answer    the result, or the one refusal that the error stands for

One timer per request. If it rings before the request is over, which is seldom, it looks after what
takes long: a caller who sends slowly gets a deadline, one who went away has the call withdrawn.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, MutableMapping, Sequence
from typing import Any

from ...engine.backend import Backend
from ...engine.waiting import LoopReply
from ...observe.record import ORDINARY, Call, Precedence, Timing
from .headers import check_key, read_priority, read_seconds, read_tenant
from .refusals import Refusal, too_large
from .web_options import ServiceOptions

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

#: After how many seconds a request takes long. Before that nobody looks whether its caller is
#: there: to know costs a task, as much as all the rest of a short request.
_LONG = 0.1

#: How much of a body that is too large is read all the same, so that its sender, who may not look
#: before all is sent, gets the answer; as a multiple of what is allowed, and for how many seconds.
_SPILL = 16
_SPILL_TIME = 30.0

_CONTENT_TYPE = (b"content-type", b"application/json")


class Disconnected(Exception):
    """The caller has gone away: nobody is there to be answered."""


class Cycle:
    """A request that is being read and computed. Of one task of one event loop."""

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
        #: What the caller sent, and whether that is all of it.
        self.body = b""
        self.is_read = False
        #: What the caller says that the body is; empty if they do not.
        self.content_type = b""
        #: What the caller calls this request, as it came.
        self.request_id = b""
        #: How long they wait for the result, seconds.
        self.timeout = options.timeout
        #: Where the time of the last call went; None if that is not known.
        self.timing: Timing | None = None
        #: Which of those that wait go before them.
        self.precedence = ORDINARY

    def close(self) -> None:
        """It is over."""
        self._timer.cancel()
        self._task = None
        if self._watch is not None:
            self._watch.cancel()
            # Its exception's frames hold us: a cycle, for each that took long.
            self._watch = None

    # -- reading

    async def read(self, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Check the headers and read the body.

        Raises:
            Refusal: it is not to be served.
            Disconnected: the caller went away meanwhile.
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
                if int(value) > options.max_body:  # the server has checked that it is one
                    raise too_large(options.max_body, int(value))
            elif name == b"x-request-timeout":
                self.timeout = min(self.timeout, read_seconds(value))
                has_deadline = options.knows_callers
            elif name == priority_header:
                priority = read_priority(name, value)
            elif name == tenant_header:
                # Of a key's holder: a part of theirs, and nobody else's.
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
                    408, "timeout", "the body of the request did not come in time",
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
        """Have items computed together with other callers'; as ``apredict`` does.

        Raises:
            Disconnected: the caller went away; the call is withdrawn.
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
        assert outcome is not None  # nobody but us ends the wait
        outputs, failure = outcome
        if failure is not None:
            try:
                raise failure.exception()
            finally:  # they may hold the error itself, whose traceback has this frame: a cycle
                del failure, outcome, reply
        self.timing = getattr(reply.answered, "timing", None)
        return backend.decode(outputs)

    def _takes_long(self) -> None:
        if self._reply is not None:
            self._watch = self._loop.create_task(self._await_departure())
        elif self._task is not None:  # it is still being read
            self._timer = self._loop.call_later(max(0.0, self.timeout - _LONG), self._is_too_slow)

    def _is_too_slow(self) -> None:
        if self._reply is not None:  # read just in time; from now on it is looked after
            self._takes_long()
        elif self._task is not None:
            self._is_slow = True
            self._task.cancel()

    async def _await_departure(self) -> None:
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
    """Send a whole answer."""
    await send(
        {
            "type": "http.response.start",
            "status": status,
            "headers": [_CONTENT_TYPE, (b"content-length", b"%d" % len(body)), *headers],
        }
    )
    await send({"type": "http.response.body", "body": body})


async def answer_early(send: Send, receive: Receive, refused: Refusal, max_body: int) -> None:
    """Answer a request whose body has not been read, and swallow a bounded part of that."""
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
