"""Answers the requests of an operation: the fast path."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Awaitable, Callable
from time import perf_counter
from typing import Any

import msgspec

from ...errors import Overloaded
from ..v2.infer_answer import encode
from .context import BinaryAnswer, Description
from .cycle import JSON_TYPE, Cycle, answer, answer_early
from .events import Form
from .exchange import Disconnected, Exchange
from .headers import timing_header
from .joined_streams import open_streams
from .json_bodies import WRITTEN_AT_ONCE, JSONAnswer, LargeAnswer, decoded, write_json
from .models import Models
from .operations import Operation
from .refusals import Refusal, refusal
from .service import Service
from .streaming import MAX_BUFFERED, EventStream


class Endpoint:
    """Answers the exchanges of one operation.

    Args:
        service: the model.
        models: given if the body names the model; until it is read, ``service`` stands for it, with
            the longest timeout of all.
    """

    def __init__(
        self, service: Service, operation: Operation, models: Models | None = None
    ) -> None:
        self._service = service
        self._operation = operation
        self._models = models
        self._longest = max(each.options.timeout for each in models or (service,))
        self._is_logged = service.options.access_log

    async def __call__(self, exchange: Exchange) -> None:
        began = perf_counter()
        service, operation, models = self._service, self._operation, self._models
        requests = service.requests
        cycle = ServiceCycle(service, exchange)
        cycle.timeout = self._longest
        stream = refused = None
        is_welcome = False  # whether the rest of the body may come, whatever the answer is
        requests.open += 1
        if self._is_logged:
            exchange.model = service.model
        try:
            cycle.check()
            is_welcome = True
            if models is None:
                check_served(service, operation)
                service.backend.check_room()
            is_welcome = exchange.is_read
            sent = await cycle.read()
            is_welcome = True
            if models is not None:
                chosen = models.get(_model_named(sent))
                if chosen is not service:
                    chosen.requests.open += 1
                    service.request_over()
                    service, requests = chosen, chosen.requests
                    exchange.model = service.model
                cycle.turn_to(service)
                check_served(service, operation)
            body = await operation.run(sent, cycle)
            del sent  # a large answer may be sent for long
            if isinstance(body, (EventStream, LargeAnswer)):
                stream = body
        except Disconnected:
            requests.disconnects += 1
            return
        except asyncio.CancelledError:
            if not service.is_draining:
                raise
            refused = stopping()
        except Exception as error:
            if type(error) is Overloaded:
                service.overloaded()
            refused = _refusals_of(service, cycle)(error)
            exchange.key = exchange.key or refused.key
        finally:  # a drain no longer waits for it
            if stream is None:
                cycle.leave()
                service.request_over()
        if isinstance(stream, LargeAnswer):
            await self._send(service, stream, cycle, began)
            return
        if stream is not None:
            await self._stream(service, stream, cycle, began)
            return
        if refused is None:
            assert isinstance(body, (bytes, BinaryAnswer))
            requests.served(operation.path, perf_counter() - began)
            timing = cycle.timing
            headers = () if timing is None else (timing_header(timing),)
            if isinstance(body, BinaryAnswer):
                exchange.answer(200, (*body.headers, *headers), body.body)
            else:
                answer(exchange, 200, body, headers)
            return
        if operation.is_openais:
            refused = refused.in_openais_form()
        elif operation.is_v2:
            refused = refused.in_v2_form()
        requests.refused(operation.path, refused.status, refused.reason)
        if is_welcome:
            answer(exchange, refused.status, refused.body, refused.headers)
        else:
            answer_early(exchange, refused, service.options.max_body)

    async def _stream(
        self, service: Service, stream: EventStream, cycle: ServiceCycle, began: float
    ) -> None:
        """Send a stream that has begun. Its status is known, whatever becomes of it."""
        path = self._operation.path
        try:
            refused = await stream.send_to(_refusals_of(service, cycle))
        except Disconnected:
            service.requests.disconnects += 1
        else:
            if refused is None:
                service.requests.served(path, perf_counter() - began)
            else:
                service.requests.refused(path, refused.status, refused.reason)
        finally:
            service.requests.outputs += stream.outputs
            cycle.leave()
            service.request_over()

    async def _send(
        self, service: Service, answer: LargeAnswer, cycle: ServiceCycle, began: float
    ) -> None:
        """Send a large answer, which counts when it is made, as small ones do."""
        service.requests.served(self._operation.path, perf_counter() - began)
        senders = service.budgets.senders
        senders.add(answer)
        try:
            with contextlib.suppress(Disconnected):
                await answer.send_to(_refusals_of(service, cycle))
        finally:
            senders.discard(answer)
            cycle.leave()
            service.request_over()


def _refusals_of(service: Service, cycle: ServiceCycle) -> Callable[[Exception], Refusal]:
    """Says what the client of a request is told of an error."""
    request_id = cycle.exchange.request_id
    return functools.partial(
        refusal, debug=service.options.debug, request_id=request_id, timeout=cycle.timeout
    )


def check_served(service: Service, operation: Operation) -> None:
    if service.is_draining or not service.is_known:
        _, text = service.standing()
        raise stopping(text)
    if not service.offers(operation.does):
        task = service.description.get("task", "custom")
        task = "a custom model" if task == "custom" else f"a model for {task}"
        needs = f", and {operation.path} needs {operation.needs}" if operation.needs else ""
        obstacle = service.description.get("no_embeddings")
        if obstacle and operation.does == "embed":
            needs += f"; this one has none, since {obstacle}"
        raise Refusal(
            404,
            "not_found",
            f"{operation.path} is not supported: the service runs {task}{needs}; see /docs",
            reason="invalid",
            code="unsupported_operation",
        )


class _Named(msgspec.Struct):
    model: str


_read_name = msgspec.json.Decoder(_Named)


def _model_named(body: bytes) -> str:
    """The field ``model`` of a request. Raises Refusal."""
    named: _Named = decoded(_read_name, body)
    return named.model


class ServiceCycle(Cycle):
    """A cycle with the operations' view of the service."""

    __slots__ = ("_service",)

    def __init__(self, service: Service, exchange: Exchange) -> None:
        loop, mailbox = service.loop
        super().__init__(
            service.options, service.backend, exchange, loop, mailbox,
            service.keyring, service.budgets,
        )  # fmt: skip
        self._service = service

    def turn_to(self, service: Service) -> None:
        """Compute with another model than the one that the request was read for."""
        self._service, self._backend = service, service.backend
        self.timeout = min(service.options.timeout, self._asked)

    @property
    def description(self) -> Description:
        return self._service.description

    @property
    def model(self) -> str:
        return self._service.model

    @property
    def has_steps(self) -> bool:
        return self._service.has_steps

    def check_count(self, count: int) -> None:
        most = self._service.options.max_pending
        if most is not None and count > most:
            raise Refusal(
                413,
                "invalid_request_error",
                f"{count} inputs exceed the queue's limit of {most} (--max-pending); send fewer at "
                "once",
                reason="too_large",
                code="too_many_inputs",
            )

    def compute(self, items: list[Any]) -> Awaitable[list[Any]]:
        service = self._service
        sizes = service.admission.check(service.description, items)
        if sizes.answer:
            self.expect_answer(sizes.answer)
        return self._compute_large(items, sizes.large) if sizes.large else self.submit(items)

    async def answer(self, make: Callable[[], Any], size: int = 0) -> JSONAnswer:
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


def stopping(text: str = "the service is stopping") -> Refusal:
    """The answer when the model is not there, or not any more."""
    return Refusal(
        503, "unavailable", text, reason="unavailable", code="unavailable", retry_after=5
    )
