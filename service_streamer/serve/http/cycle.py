"""One request and its computation: the hot path of the web process.

     check     headers: key and its limits, length, timeout
     read      the body
     submit    to the streamer, await its reply

The call of a client that disconnects is withdrawn.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from typing import Any

from ...engine.backend import Backend, LoopReply, Mailbox
from ...engine.streams import AsyncStream
from ...observe.record import ORDINARY, Call, Precedence, Timing
from .admission import ByteBudgets, ServiceOptions, answer_too_large, make_budgets
from .api_keys import COMPUTE
from .content_coding import decompressed
from .exchange import Disconnected, Exchange
from .headers import check_framing, read_priority, read_seconds, read_tenant
from .json_bodies import READ_AT_ONCE, WRITTEN_AT_ONCE, LargeAnswer
from .keyring import KeyHolder, Keyring
from .refusals import Refusal, too_large
from .slow_readers import WRITE_TIMEOUT

#: A body that is too large is received up to this multiple of the limit.
_SPILL = 16

JSON_TYPE = (b"content-type", b"application/json")


class Cycle:
    """A request that is being read and computed. Belongs to one task.

    Args:
        loop: the running one; to ask asyncio for it costs a system call in Python 3.11.
        mailbox: of the loop.
        keyring: checks the request's key; None if the service needs none.
        budgets: of all requests.

    Attributes:
        answer_size: bytes of the answer, as workers send them, or about; 0 if unknown.
    """

    __slots__ = (
        "_asked",
        "_backend",
        "_began",
        "_budgets",
        "_coding",
        "_held",
        "_keyring",
        "_loop",
        "_mailbox",
        "_options",
        "_reply",
        "answer_size",
        "caller",
        "content_type",
        "exchange",
        "precedence",
        "timeout",
        "timing",
    )

    def __init__(
        self,
        options: ServiceOptions,
        backend: Backend,
        exchange: Exchange,
        loop: asyncio.AbstractEventLoop,
        mailbox: Mailbox,
        keyring: Keyring | None = None,
        budgets: ByteBudgets | None = None,
    ) -> None:
        self._options = options
        self._backend = backend
        self._keyring = keyring
        self._budgets = make_budgets() if budgets is None else budgets
        self._held = 0  # bytes of the body
        self.answer_size = 0
        self._coding = b""
        self._loop = loop
        self._mailbox = mailbox
        self._began = loop.time()
        self._reply: LoopReply | None = None
        self._asked = math.inf  # seconds that the client waits, as it says
        self.exchange = exchange
        #: The header Content-Type; empty if missing.
        self.content_type = b""
        #: Seconds until the result is due.
        self.timeout = options.timeout
        #: Timing of the last call; None if unknown.
        self.timing: Timing | None = None
        self.precedence = ORDINARY
        #: Who has sent it, once it is admitted; None without keys.
        self.caller: KeyHolder | None = None

    # -- reading

    def check(self) -> None:
        """Check the headers. Then the request has to ``leave``. Raises Refusal."""
        options, exchange = self._options, self.exchange
        priority, tenant, has_deadline = ORDINARY
        priority_header, tenant_header = options.priority_header, options.tenant_header
        wanted = options.headers_read
        if self._keyring is not None:
            caller = self._keyring.authorize(exchange.headers, COMPUTE)
            exchange.key = caller.key.name
            caller.enter()
            self.caller = caller
            tenant = caller.tenant
        for name, value in exchange.headers:
            if name not in wanted:
                continue
            if name == b"content-type":
                self.content_type = value
            elif name == b"content-length":
                size = int(value) if len(value) < 20 else None  # leading zeros have no end
                if size is None or size > options.max_body:
                    raise too_large(options.max_body, size)
                self._budgets.bodies.check(size, options.max_bodies)
            elif name == b"x-request-timeout":
                self._asked = read_seconds(value)
                self.timeout = min(self.timeout, self._asked)
                has_deadline = options.knows_callers
            elif name == priority_header:
                priority = read_priority(name, value)
            elif name == b"content-encoding":
                self._coding = value if not self._coding else self._coding + b", " + value
            elif name == b"transfer-encoding":
                check_framing(value)
            elif name == tenant_header:
                # A key's holder can only name parts of its own tenant.
                part = read_tenant(name, value)
                tenant = f"{tenant}: {part}" if tenant and part else part or tenant
        if priority or tenant or has_deadline:
            self.precedence = Precedence(priority, tenant, has_deadline)

    def leave(self) -> None:
        """The request is over: nothing of it counts as open any more."""
        if self.caller is not None:
            self.caller.leave()
        bodies, answers, _ = self._budgets
        bodies.give_back(self._held)
        answers.give_back(self.answer_size)

    def header(self, name: bytes) -> bytes:
        """Another header, of a name in lower case; empty if missing."""
        for each, value in self.exchange.headers:
            if each == name:
                return value
        return b""

    def hasten(self, timeout: float | None, priority: int) -> None:
        """Heed what the body says: seconds until the result is due, and a priority.

        A priority counts only where requests may say theirs: unknown clients could outrank others.
        """
        options, precedence = self._options, self.precedence
        if timeout is not None:
            self._asked = min(self._asked, timeout)
            self.timeout = min(self.timeout, timeout)
            precedence = precedence._replace(has_deadline=options.knows_callers)
        if options.priority_header and priority:
            precedence = precedence._replace(priority=priority)
        self.precedence = precedence

    def hold(self, size: int) -> None:
        """Count bytes of the body until ``leave``. Raises Refusal: there is no room for them."""
        self._budgets.bodies.take(size, self._options.max_bodies)
        self._held += size

    def expect_answer(self, size: int) -> None:
        """Count about so many bytes of an answer until ``leave``. Raises Refusal: no room."""
        if size <= WRITTEN_AT_ONCE:  # those have a bound by their number
            return
        most = self._options.max_answers
        if size > most:
            raise answer_too_large(size, most)
        _, answers, senders = self._budgets
        if answers.size + size > most and senders:
            slowest = min(senders, key=LargeAnswer.rate)
            slowest.end_if_slow(WRITE_TIMEOUT)
        answers.take(size, most)
        self.answer_size += size

    def _count_answer(self, size: int) -> None:
        """The answer has come, and may be larger than was expected. Raises Refusal: no room."""
        self._budgets.answers.give_back(self.answer_size)
        self.answer_size = 0
        self.expect_answer(size)

    async def read(self) -> bytes:
        """The body.

        Raises:
            Refusal: it is too large, or too slow; or those of all requests are too large.
            Disconnected: the client disconnected.
        """
        body = self.exchange.take()
        self.hold(len(body))
        if not self.exchange.is_read:
            body = await self._read_rest(body)
        if len(body) > self._options.max_body:
            raise too_large(self._options.max_body, len(body))
        if self._coding:
            body = await decompressed(body, self._coding, self._options.max_body)
            self.hold(len(body))
        return body

    async def _read_rest(self, body: bytes) -> bytes:
        parts, exchange = [body], self.exchange
        try:
            async with asyncio.timeout(self.timeout):
                while not exchange.is_read:
                    part = await exchange.more()
                    self.hold(len(part))
                    parts.append(part)
                    if self._held > self._options.max_body:
                        raise too_large(self._options.max_body)
        except TimeoutError:
            raise late_body(self.timeout) from None
        return b"".join(parts)

    # -- computing

    @property
    def left(self) -> float:
        """Seconds until the result is due."""
        return self.timeout - (self._loop.time() - self._began)

    async def await_turn(self, turn: asyncio.Future[None]) -> None:
        """Wait until the request may be computed.

        Raises:
            Disconnected: the client disconnected.
            PredictTimeout: the result is due.
        """
        exchange = self.exchange
        if exchange.is_gone:
            raise Disconnected
        exchange.on_gone = turn.cancel
        try:
            async with asyncio.timeout(self.left):
                await turn
        except TimeoutError:
            raise self._backend.late(self.timeout) from None
        except asyncio.CancelledError:
            if exchange.is_gone:
                raise Disconnected from None
            raise
        finally:
            exchange.on_gone = None

    async def submit(self, items: Sequence[Any]) -> list[Any]:
        """Compute items in batches with other callers' items, as ``apredict`` does.

        Raises:
            Disconnected: the client disconnected; the call is withdrawn.
            Exception: as ``predict``.
        """
        backend, exchange = self._backend, self.exchange
        reply = LoopReply(self._loop, self._mailbox)
        left = self.left
        self._reply = reply
        exchange.on_gone = self._client_has_gone
        try:
            if exchange.is_gone:
                raise Disconnected
            new = Call(items, reply, left, self.precedence, is_watched=True, more=True)
            if self._held <= READ_AT_ONCE:
                backend.submit(new)
            else:  # pickling it takes as long as reading it did
                await _to_its_end(backend.submit, new)
            reply.flush_soon(backend)
            outcome = await reply.future
        except asyncio.CancelledError:
            call = reply.call
            if call is not None:
                backend.withdraw(call)
            if exchange.is_gone:
                raise Disconnected from None
            raise
        finally:
            # Both hold this object.
            self._reply = exchange.on_gone = None
        assert outcome is not None  # only this cycle ends the wait
        outputs, failure = outcome
        if failure is not None:
            try:
                raise failure.exception()
            finally:  # they may hold the error itself, whose traceback has this frame: a cycle
                del failure, outcome, reply, new
        self.timing = getattr(reply.answered, "timing", None)
        size = sum(map(_size_of, outputs))
        if size <= WRITTEN_AT_ONCE:
            return backend.decode(outputs)
        self._count_answer(size)
        return await asyncio.to_thread(backend.decode, outputs)

    def _client_has_gone(self) -> None:
        if self._reply is not None:
            self._reply.future.cancel()

    def open_stream(self, item: Any, max_buffered: int) -> AsyncStream:
        """Compute one item; whoever gets its outputs watches the connection. Raises as ``stream``.

        Args:
            max_buffered: how many outputs may wait until the item rests.
        """
        return AsyncStream(self._backend, item, self.left, self.precedence, max_buffered, False)


async def _to_its_end(function: Callable[[Any], object], value: Any) -> None:
    """Call it in a thread. Who is cancelled meanwhile goes on when it is over."""
    call = asyncio.ensure_future(asyncio.to_thread(function, value))
    try:
        await asyncio.shield(call)
    except asyncio.CancelledError:
        await asyncio.wait([call])
        raise


def _size_of(output: Any) -> int:
    """Bytes of an encoded output; 0 if that is unknown, as where the model runs in a thread."""
    if type(output) is bytes:
        return len(output)
    size: int = getattr(output, "nbytes", 0)
    return size


def answer(
    exchange: Exchange,
    status: int,
    body: bytes,
    headers: tuple[tuple[bytes, bytes], ...] = (),
) -> None:
    """Answer with JSON."""
    exchange.answer(status, (JSON_TYPE, *headers), body)


def late_body(timeout: float) -> Refusal:
    text = f"the body did not arrive within {timeout:.3g} s, set by --timeout or the client"
    return Refusal(408, "timeout", text, reason="timeout", code="request_timeout")


def answer_early(exchange: Exchange, refused: Refusal, max_body: int) -> None:
    """Answer before the body is read; a bounded part of it is dropped."""
    headers = (JSON_TYPE, *refused.headers)
    exchange.answer_early(refused.status, headers, refused.body, _SPILL * max_body)
