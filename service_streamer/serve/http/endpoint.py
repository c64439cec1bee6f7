"""The fast path: which endpoint a POST is for, and how the endpoint answers it."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Callable
from time import perf_counter
from urllib.parse import quote, unquote

import msgspec

from ...errors import Overloaded
from ..v2.infer_answer import VERSION
from .context import RequestContext, answer, answer_early
from .exchange import Disconnected, Exchange
from .headers import timing_header
from .json_bodies import BinaryAnswer, LargeAnswer, decoded
from .models import Models
from .operations import INFER, OPERATIONS, Operation
from .refusals import Refusal, refusal, stopping
from .service import Service
from .streaming import EventStream


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
        context = RequestContext(service, exchange)
        context.timeout = self._longest
        stream = refused = None
        is_welcome = False  # whether the rest of the body may come, whatever the answer is
        requests.open += 1
        if self._is_logged:
            exchange.model = service.model
        try:
            context.check()
            is_welcome = True
            if models is None:
                check_served(service, operation)
                service.backend.check_room()
            is_welcome = exchange.is_read
            sent = await context.read()
            is_welcome = True
            if models is not None:
                chosen = models.get(_model_named(sent))
                if chosen is not service:
                    chosen.requests.open += 1
                    service.request_over()
                    service, requests = chosen, chosen.requests
                    exchange.model = service.model
                context.turn_to(service)
                check_served(service, operation)
            body = await operation.run(sent, context)
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
            refused = _refusals_of(service, context)(error)
            exchange.key = exchange.key or refused.key
        finally:  # a drain no longer waits for it
            if stream is None:
                context.leave()
                service.request_over()
        if isinstance(stream, LargeAnswer):
            await self._send(service, stream, context, began)
            return
        if stream is not None:
            await self._stream(service, stream, context, began)
            return
        if refused is None:
            assert isinstance(body, (bytes, BinaryAnswer))
            requests.served(operation.path, perf_counter() - began)
            timing = context.timing
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
        self, service: Service, stream: EventStream, context: RequestContext, began: float
    ) -> None:
        """Send a stream that has begun. Its status is known, whatever becomes of it."""
        path = self._operation.path
        try:
            refused = await stream.send_to(_refusals_of(service, context))
        except Disconnected:
            service.requests.disconnects += 1
        else:
            if refused is None:
                service.requests.served(path, perf_counter() - began)
            else:
                service.requests.refused(path, refused.status, refused.reason)
        finally:
            service.requests.outputs += stream.outputs
            context.leave()
            service.request_over()

    async def _send(
        self, service: Service, answer: LargeAnswer, context: RequestContext, began: float
    ) -> None:
        """Send a large answer, which counts when it is made, as small ones do."""
        service.requests.served(self._operation.path, perf_counter() - began)
        senders = service.budgets.senders
        senders.add(answer)
        try:
            with contextlib.suppress(Disconnected):
                await answer.send_to(_refusals_of(service, context))
        finally:
            senders.discard(answer)
            context.leave()
            service.request_over()


def _refusals_of(service: Service, context: RequestContext) -> Callable[[Exception], Refusal]:
    """Says what the client of a request is told of an error."""
    request_id = context.exchange.request_id
    return functools.partial(
        refusal, debug=service.options.debug, request_id=request_id, timeout=context.timeout
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
            f"{operation.path} is not supported: the service runs {task}{needs}; see /docs",
            code="unsupported_operation",
        )


class _Named(msgspec.Struct):
    model: str


_read_name = msgspec.json.Decoder(_Named)


def _model_named(body: bytes) -> str:
    """The field ``model`` of a request. Raises Refusal."""
    named: _Named = decoded(_read_name, body)
    return named.model


#: Below it each model has all paths of a service of its own.
PREFIX = "/models/"

#: Below it the Open Inference Protocol names a model, and perhaps a version.
TENSORS = "/v2/models/"

_PREFIX, _TENSORS = PREFIX.encode(), TENSORS.encode()

_VERSIONED = f"/versions/{VERSION}"


def model_and_place(models: Models, path: str) -> tuple[Service, str] | None:
    """The model of a path below ``TENSORS``, and what follows it and its version.

    Returns:
        None if there is no such model or version.
    """
    found = models.split(path[len(TENSORS) :])
    if found is None:
        return None
    service, rest = found
    if rest.startswith("/versions/"):
        if rest != _VERSIONED and not rest.startswith(f"{_VERSIONED}/"):
            return None
        rest = rest[len(_VERSIONED) :]
    return service, rest


class Routes:
    """The endpoints of the models of one web process."""

    def __init__(self, models: Models) -> None:
        self._models = models
        self._endpoints: dict[Service, dict[bytes, Endpoint]] = {}
        self._at_root: dict[bytes, Endpoint] = {}
        self._of_tensors: dict[bytes, Endpoint] = {}
        self._infers: dict[Service, Endpoint] = {}
        self._number = -1

    def find(self, target: bytes) -> Endpoint | None:
        """The endpoint of a target; None if it is that of no operation."""
        models = self._models
        if self._number != models.number:
            self._renew()
        endpoint = self._at_root.get(target)
        if endpoint is None and target.startswith(_PREFIX):
            found = models.split(target[len(_PREFIX) :].decode("utf-8", "replace"))
            if found is not None:
                service, path = found
                endpoint = self._endpoints[service].get(path.encode() or b"/")
        if endpoint is None and target.startswith(_TENSORS):
            endpoint = self._of_tensors.get(target) or self._infer(target)
        return endpoint

    def _infer(self, target: bytes) -> Endpoint | None:
        """The endpoint for a target that is written in an unusual way, or has a query."""
        path = unquote(target.partition(b"?")[0].decode("utf-8", "replace"))
        found = model_and_place(self._models, path)
        return self._infers[found[0]] if found is not None and found[1] == "/infer" else None

    def _renew(self) -> None:
        models = self._models
        self._endpoints = {
            service: {op.path.encode(): Endpoint(service, op) for op in OPERATIONS}
            for service in models
        }
        default = models.default
        self._at_root = {} if default is None else {**self._endpoints[default]}
        self._at_root |= {
            op.path.encode(): Endpoint(models.first, op, models)
            for op in OPERATIONS
            if op.is_openais and models.are_named
        }
        self._infers = {service: Endpoint(service, INFER) for service in models}
        self._of_tensors = {
            f"{TENSORS}{name}{version}/infer".encode(): endpoint
            for service, endpoint in self._infers.items()
            for name in (service.model, quote(service.model), quote(service.model, safe=""))
            for version in ("", _VERSIONED)
        }
        self._number = models.number
