"""One request and its computation: the hot path of the web process.

     check     headers: key and its limits, length, timeout
     read      the body
     compute   its items in the streamer, await its reply

The call of a client that disconnects is withdrawn.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any

from ...engine.backend import LoopReply
from ...engine.streams import AsyncStream
from ...errors import InvalidInput
from ...observe.record import ORDINARY, Call, CallOptions, Timing
from ...workers.protocol import Failure
from ..v2.infer_answer import encode
from .admission import answer_too_large
from .api_keys import COMPUTE
from .events import Form
from .exchange import Disconnected, Exchange
from .headers import (
    check_framing,
    decompressed,
    read_priority,
    read_seconds,
    read_tenant,
    timing_header,
)
from .json_bodies import READ_AT_ONCE, WRITTEN_AT_ONCE, JSONAnswer, LargeAnswer, write_json
from .keyring import KeyHolder
from .refusals import Refusal, late_body, renamed, too_large, unsupported
from .service import Description, Service
from .slow_readers import WRITE_TIMEOUT
from .streaming import MAX_BUFFERED, EventStream, open_streams

#: A body that is too large is received up to this multiple of the limit.
_SPILL = 16

JSON_TYPE = (b"content-type", b"application/json")


class RequestContext:
    """A request that is being read and computed, for its operation. Belongs to one task.

    Args:
        service: the model that computes it. The limits that all models have in common are its.

    Attributes:
        answer_size: bytes of the answer, as workers send them, or about; 0 if unknown.
    """

    __slots__ = (
        "_began",
        "_coding",
        "_held",
        "_loop",
        "_mailbox",
        "_reply",
        "_service",
        "_wanted",
        "answer_size",
        "call_options",
        "caller",
        "content_type",
        "exchange",
        "timeout",
        "timing",
    )

    def __init__(self, service: Service, exchange: Exchange) -> None:
        self._service = service
        self._loop, self._mailbox = service.loop
        self._held = 0  # bytes of the body
        self.answer_size = 0
        self._coding = b""
        self._began = self._loop.time()
        self._reply: LoopReply | None = None
        self._wanted = math.inf  # seconds that the client waits, as it says
        self.exchange = exchange
        #: The header Content-Type; empty if missing.
        self.content_type = b""
        #: Seconds until the result is due.
        self.timeout = service.options.timeout
        #: Timing of the last call; None if unknown.
        self.timing: Timing | None = None
        self.call_options = ORDINARY
        #: Who has sent it, once it is admitted; None without keys.
        self.caller: KeyHolder | None = None

    # -- reading

    def check(self) -> None:
        """Check the headers. Then the request has to ``leave``. Raises Refusal."""
        service, exchange = self._service, self.exchange
        options = service.options
        priority, tenant, has_deadline = 0, "", False
        priority_header, tenant_header = options.priority_header, options.tenant_header
        wanted = options.headers_read
        if service.keyring is not None:
            caller = service.keyring.authorize(exchange.headers, COMPUTE)
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
                service.budgets.bodies.check(size, options.max_bodies)
            elif name == b"x-request-timeout":
                self._wanted = read_seconds(value)
                self.timeout = min(self.timeout, self._wanted)
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
            self.call_options = CallOptions(priority, tenant, has_deadline)

    def leave(self) -> None:
        """The request is over: nothing of it counts as open any more."""
        if self.caller is not None:
            self.caller.leave()
        bodies, answers, _ = self._service.budgets
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
        options, wanted = self._service.options, self.call_options
        if timeout is not None:
            self._wanted = min(self._wanted, timeout)
            self.timeout = min(self.timeout, timeout)
            wanted = wanted._replace(has_deadline=options.knows_callers)
        if options.priority_header and priority:
            wanted = wanted._replace(priority=priority)
        self.call_options = wanted

    def hold(self, size: int) -> None:
        """Count bytes of the body until ``leave``. Raises Refusal: there is no room for them."""
        self._service.budgets.bodies.take(size, self._service.options.max_bodies)
        self._held += size

    def expect_answer(self, size: int) -> None:
        """Count about so many bytes of an answer until ``leave``. Raises Refusal: no room."""
        if size <= WRITTEN_AT_ONCE:  # those have a bound by their number
            return
        most = self._service.options.max_answers
        if size > most:
            raise answer_too_large(size, most)
        _, answers, senders = self._service.budgets
        if answers.size + size > most and senders:
            slowest = min(senders, key=LargeAnswer.rate)
            slowest.end_if_slow(WRITE_TIMEOUT)
        answers.take(size, most)
        self.answer_size += size

    def _count_answer(self, size: int) -> None:
        """The answer has come, and may be larger than was expected. Raises Refusal: no room."""
        self._service.budgets.answers.give_back(self.answer_size)
        self.answer_size = 0
        self.expect_answer(size)

    async def read(self) -> bytes:
        """The body.

        Raises:
            Refusal: it is too large, or too slow; or those of all requests are too large.
            Disconnected: the client disconnected.
        """
        max_body = self._service.options.max_body
        body = self.exchange.take()
        self.hold(len(body))
        if not self.exchange.is_read:
            body = await self._read_rest(body)
        if len(body) > max_body:
            raise too_large(max_body, len(body))
        if self._coding:
            body = await decompressed(body, self._coding, max_body)
            self.hold(len(body))
        return body

    async def _read_rest(self, body: bytes) -> bytes:
        parts, exchange, max_body = [body], self.exchange, self._service.options.max_body
        try:
            async with asyncio.timeout(self.timeout):
                while not exchange.is_read:
                    part = await exchange.more()
                    self.hold(len(part))
                    parts.append(part)
                    if self._held > max_body:
                        raise too_large(max_body)
        except TimeoutError:
            raise late_body(self.timeout) from None
        return b"".join(parts)

    # -- computing

    def turn_to(self, service: Service) -> None:
        """Compute with another model than the one that the request was read for."""
        self._service = service
        self.timeout = min(service.options.timeout, self._wanted)

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
            raise self._service.backend.late(self.timeout) from None
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
        backend, exchange = self._service.backend, self.exchange
        reply = LoopReply(self._loop, self._mailbox)
        left = self.left
        self._reply = reply
        exchange.on_gone = self._client_has_gone
        try:
            if exchange.is_gone:
                raise Disconnected
            new = Call(items, reply, left, self.call_options, is_watched=True, more=True)
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
        assert outcome is not None  # only this request ends the wait
        if isinstance(outcome, Failure):
            try:
                raise outcome.exception()
            finally:  # they may hold the error itself, whose traceback has this frame: a cycle
                del outcome, reply, new
        self.timing = getattr(reply.call, "timing", None)
        size = sum(map(_size_of, outcome))
        if size <= WRITTEN_AT_ONCE:
            return backend.decode(outcome)
        self._count_answer(size)
        return await asyncio.to_thread(backend.decode, outcome)

    def _client_has_gone(self) -> None:
        if self._reply is not None:
            self._reply.future.cancel()

    def open_stream(self, item: Any, max_buffered: int) -> AsyncStream:
        """Compute one item; whoever gets its outputs watches the connection. Raises as ``stream``.

        Args:
            max_buffered: how many outputs may wait until the item rests.
        """
        options = self.call_options._replace(stream=True)
        call = Call([item], timeout=self.left, options=options)
        return AsyncStream(self._service.backend, call, max_buffered)

    # -- for the operation

    @property
    def description(self) -> Description:
        """The model's."""
        return self._service.description

    @property
    def model(self) -> str:
        """Its name."""
        return self._service.model

    @property
    def has_steps(self) -> bool:
        """Whether its outputs come one by one."""
        return self._service.has_steps

    def check_streams(self) -> None:
        """Raises Refusal: the model has no streams."""
        if not self.has_steps:
            raise unsupported("stream")

    def check_count(self, count: int) -> None:
        """Raises Refusal: the queue can never hold so many inputs."""
        most = self._service.options.max_pending
        if most is not None and count > most:
            raise Refusal(
                413,
                f"{count} inputs exceed the queue's limit of {most} (--max-pending); send fewer at "
                "once",
                code="too_many_inputs",
            )

    def compute(self, items: list[Any]) -> Awaitable[list[Any]]:
        """Compute items in batches with other callers' items."""
        service = self._service
        sizes = service.admission.check(service.description, items)
        if sizes.answer:
            self.expect_answer(sizes.answer)
        return self._compute_large(items, sizes.large) if sizes.large else self.submit(items)

    async def compute_each(
        self,
        do: str,
        inputs: Iterable[Any],
        parameters: Mapping[str, Any],
        names: Mapping[str, str],
        **more: Any,
    ) -> list[Any]:
        """Compute an operation of the model on each input.

        Args:
            do: the operation.
            names: what the request calls the model's fields, for errors.
            more: further fields of each item.
        """
        items = [{"do": do, "inputs": each, "parameters": parameters, **more} for each in inputs]
        self.check_count(len(items))
        try:
            return await self.compute(items)
        except InvalidInput as error:
            raise renamed(error, names) from None

    async def answer(self, make: Callable[[], Any], size: int = 0) -> JSONAnswer:
        """The answer in JSON, of what was computed last.

        Args:
            make: makes it, in a thread if it is large.
            size: bytes of its numbers, if that is known here.
        """
        if max(size, self.answer_size) <= WRITTEN_AT_ONCE:
            return encode(make())
        timing = () if self.timing is None else (timing_header(self.timing),)
        return await write_json(make, self.exchange, (JSON_TYPE, *timing))

    async def _compute_large(self, items: list[Any], large: int) -> list[Any]:
        admission = self._service.admission
        turn = admission.enter(large, self.left)
        is_done = False
        try:
            await self.await_turn(turn)
            outputs = await self.submit(items)
            is_done = True
            return outputs
        finally:
            admission.leave(large, turn, is_done=is_done)

    async def stream(self, item: Any, form: Form, *others: Any) -> EventStream:
        """Compute an item; its outputs are sent as they come. Returns with the first of them.

        Args:
            others: more items. The form then gets the outputs of all of them as ``Numbered``.
        """
        service = self._service
        large = service.admission.check(service.description, [item, *others]).large
        turn = service.admission.enter(large, self.left)
        try:
            await self.await_turn(turn)
            outputs = await open_streams(
                lambda each: self.open_stream(each, MAX_BUFFERED), [item, *others]
            )
        except BaseException:
            service.admission.leave(large, turn, is_done=False)
            raise

        def closed(stream: EventStream) -> None:
            service.streams.discard(stream)
            service.admission.leave(large, turn, is_done=True)

        stream = EventStream(outputs, form, self.exchange, closed)
        service.streams.add(stream)
        await stream.begin()
        service.requests.streams += 1
        return stream


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


def answer_early(exchange: Exchange, refused: Refusal, max_body: int) -> None:
    """Answer before the body is read; a bounded part of it is dropped."""
    headers = (JSON_TYPE, *refused.headers)
    exchange.answer_early(refused.status, headers, refused.body, _SPILL * max_body)
