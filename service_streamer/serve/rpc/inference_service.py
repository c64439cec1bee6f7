"""The methods of the Open Inference Protocol's gRPC service.

ModelInfer          message ──▶ a RequestContext, as of a request over HTTP ──▶ message, or a status
ModelStreamInfer    the same for each message of a stream, in order; of a model of steps a message
                    for each output

The metadata of a call stand in the place of a request's headers.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from time import perf_counter
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from ...errors import InvalidInput, Overloaded, PredictTimeout
from ..http.api_keys import COMPUTE
from ..http.context import RequestContext
from ..http.endpoint import check_served
from ..http.exchange import Headers, find_request_id, new_request_id
from ..http.models import Models
from ..http.operations import INFER
from ..http.refusals import Refusal, refusal, stopping
from ..http.service import Service
from ..http.streaming import MAX_BUFFERED
from ..http.tensor_inference import read_tensors, write_tensors
from ..http.v2_pages import repository_index
from ..v2.infer_answer import VERSION, model_config, model_metadata, server_metadata
from ..v2.infer_request import InferRequest
from .inference_messages import (
    SERVICE,
    ModelConfigRequest,
    ModelConfigResponse,
    ModelInferRequest,
    ModelMetadataRequest,
    ModelMetadataResponse,
    ModelReadyRequest,
    ModelReadyResponse,
    ModelStreamInferResponse,
    RepositoryIndexRequest,
    RepositoryIndexResponse,
    ServerLiveResponse,
    ServerMetadataResponse,
    ServerReadyResponse,
    read_message,
    write_message,
)

_FRAMING = ("content-length", "transfer-encoding")


class MetadataExchange:
    """An ``Exchange`` whose headers are the metadata of a call. gRPC reads and answers by itself.

    Headers of HTTP's framing are left out: they say nothing about the message.

    gRPC cancels the task of a client that has gone, so nothing is watched here.
    """

    is_read = True
    is_gone = False
    key = model = ""

    def __init__(self, metadata: Any) -> None:
        self.headers: Headers = [
            (name.encode(), value if isinstance(value, bytes) else value.encode())
            for name, value in metadata or ()
            if name not in _FRAMING
        ]
        self.on_gone: Callable[[], object] | None = None
        self._request_id = ""

    @property
    def request_id(self) -> str:
        if not self._request_id:
            self._request_id = (find_request_id(self.headers) or new_request_id()).decode()
        return self._request_id

    def take(self) -> bytes:
        return b""

    async def more(self) -> bytes:
        return b""

    def answer(self, status: int, headers: Headers, body: bytes) -> None:
        raise NotImplementedError

    def answer_early(self, status: int, headers: Headers, body: bytes, most: int) -> None:
        raise NotImplementedError

    def start(self, status: int, headers: Headers) -> None:
        raise NotImplementedError

    async def write(self, part: bytes) -> None:
        raise NotImplementedError

    async def end(self, part: bytes = b"") -> None:
        raise NotImplementedError


logger = logging.getLogger(__name__)

_Code = grpc.StatusCode

_CODES = {
    400: _Code.INVALID_ARGUMENT,
    401: _Code.UNAUTHENTICATED,
    403: _Code.PERMISSION_DENIED,
    404: _Code.NOT_FOUND,
    408: _Code.DEADLINE_EXCEEDED,
    413: _Code.INVALID_ARGUMENT,
    415: _Code.INVALID_ARGUMENT,
    422: _Code.INVALID_ARGUMENT,
    429: _Code.RESOURCE_EXHAUSTED,
    501: _Code.UNIMPLEMENTED,
    503: _Code.UNAVAILABLE,
    504: _Code.DEADLINE_EXCEEDED,
}

#: Bytes of an error's text in a header, where what is not ASCII is percent-encoded. Clients take
#: headers of 8 kB.
_LONGEST_TEXT = 6000

#: Bytes of a message whose numbers are read in the event loop, in a few milliseconds. More are read
#: in a thread, in pieces: other requests are answered meanwhile.
_AT_ONCE = 256 << 10

#: Requests of one stream that are computed at once. Arbitrary: a batch, mostly.
_MOST_AT_ONCE = 64


def _path(method: str) -> str:
    return f"/{SERVICE}/{method}"


_INFER, _STREAM = _path("ModelInfer"), _path("ModelStreamInfer")

#: As over HTTP, the health of the server, and what it is, are for everybody, those of a model for
#: any key, and they count against no limit.
_OPEN = frozenset(_path(name) for name in ("ServerLive", "ServerReady", "ServerMetadata"))

#: Triton's: a client wants to be told which message is a request's last.
_WANTS_END = "triton_enable_empty_final_response"
_IS_END = "triton_final_response"


def code_of(refused: Refusal) -> grpc.StatusCode:
    """The status of an error that HTTP has another one for."""
    if refused.reason == "overloaded":
        return _Code.RESOURCE_EXHAUSTED
    return _CODES.get(refused.status, _Code.INTERNAL)


class InferenceService(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Answers the calls of the models of one web process. Belongs to its event loop."""

    def __init__(self, models: Models) -> None:
        self._models = models
        self._handlers = {
            _INFER: grpc.unary_unary_rpc_method_handler(self._infer),
            _path("ServerLive"): self._told(_path("ServerLive"), self._server_live),
            _path("ServerReady"): self._told(_path("ServerReady"), self._server_ready),
            _path("ModelReady"): self._told(_path("ModelReady"), self._model_ready),
            _path("ServerMetadata"): self._told(_path("ServerMetadata"), self._server_metadata),
            _path("ModelMetadata"): self._told(_path("ModelMetadata"), self._model_metadata),
            _path("ModelConfig"): self._told(_path("ModelConfig"), self._model_config),
            _path("RepositoryIndex"): self._told(_path("RepositoryIndex"), self._index),
        }

    def service(self, details: Any) -> Any:
        """For gRPC: the handler of a method; None for one that is not there.

        The key is checked here, before a message is received: it may have many megabytes.
        """
        path: str = details.method
        if not path.startswith(_path("")):  # of health or reflection, or of no service
            return None
        if path in _OPEN:
            return self._handlers[path]
        headers = MetadataExchange(details.invocation_metadata).headers
        scope = COMPUTE if path in (_INFER, _STREAM) else None
        try:
            caller = self._models.first.authorize(headers, scope)
        except Refusal as error:  # as a stream, of which nothing has to be read
            refuse = functools.partial(self._refuse, error, path)
            return grpc.stream_stream_rpc_method_handler(refuse)
        if path == _STREAM:
            answer = functools.partial(self._infer_stream, caller.key.concurrency)
            return grpc.stream_stream_rpc_method_handler(answer)
        return self._handlers.get(path)

    async def _refuse(self, error: Refusal, path: str, _: Any, context: Any) -> None:
        await _abort(context, _refused(self._models.first, error, context, path))

    def _told(self, path: str, tell: Callable[[bytes], Awaitable[Any]]) -> Any:
        async def handle(message: bytes, context: Any) -> bytes:
            try:
                answer: bytes = (await tell(message)).SerializeToString()
            except Exception as error:
                await _abort(context, _refused(self._models.first, error, context, path))
                raise
            return answer

        return grpc.unary_unary_rpc_method_handler(handle)

    # -- health and metadata

    async def _server_live(self, _: bytes) -> Any:
        return ServerLiveResponse(live=True)

    async def _server_ready(self, _: bytes) -> Any:
        return ServerReadyResponse(ready=(await self._models.look())[0] == "ready")

    async def _model_ready(self, message: bytes) -> Any:
        service = self._find(_parsed(ModelReadyRequest, message))
        return ModelReadyResponse(ready=(await service.look())[0] == "ready")

    async def _server_metadata(self, _: bytes) -> Any:
        return ServerMetadataResponse(**server_metadata(over_http=False))

    async def _model_metadata(self, message: bytes) -> Any:
        service = self._find_known(_parsed(ModelMetadataRequest, message))
        return ModelMetadataResponse(**model_metadata(service.model, service.description))

    async def _model_config(self, message: bytes) -> Any:
        service = self._find_known(_parsed(ModelConfigRequest, message))
        config = model_config(service.model, service.description, service.options.batch_size)
        return ModelConfigResponse(config=config)

    async def _index(self, message: bytes) -> Any:
        asked = _parsed(RepositoryIndexRequest, message)
        models = await repository_index(self._models, only_ready=asked.ready)
        return RepositoryIndexResponse(models=models)

    def _find(self, request: Any) -> Service:
        return self._of(request.name, request.version)

    def _find_known(self, request: Any) -> Service:
        service = self._find(request)
        if not service.is_known:
            raise stopping(service.standing()[1])
        return service

    def _of(self, name: str, version: str) -> Service:
        service = self._models.get(name)
        if version not in ("", VERSION):
            raise Refusal(
                404,
                f"version: {name!r} has the version {VERSION} only; not {version[:100]!r}",
            )
        return service

    # -- inference

    def _turned(self, call: RequestContext, message: Any) -> Service:
        """The model of a message, which the call then computes with. Raises Refusal."""
        service = self._of(message.model_name, message.model_version)
        call.turn_to(service)
        return service

    async def _infer(self, data: bytes, context: Any) -> bytes:
        began = perf_counter()
        service = self._models.first
        try:
            with _entered(service, context) as call:
                call.hold(len(data))
                message, size = _parsed(ModelInferRequest, data), len(data)
                del data  # the message has its own copy
                service = self._turned(call, message)
                done = await self._inferred(service, call, message, size)
        except asyncio.CancelledError:
            service.requests.disconnects += 1
            raise
        except Exception as error:
            await _abort(context, _refused(service, error, context, _INFER))
            raise
        service.requests.served(_INFER, perf_counter() - began)
        return done

    async def _inferred(
        self, service: Service, call: RequestContext, message: Any, size: int
    ) -> bytes:
        service.requests.open += 1
        try:
            request = await ready_request(service, message, size)
            results = await call.compute(read_tensors(request, call))
            answer = write_message(service.model, request, write_tensors(request, results, call))
            done: bytes = answer.SerializeToString()
            return done
        finally:
            service.request_over()

    async def _infer_stream(
        self, most: int | None, messages: AsyncIterator[bytes], context: Any
    ) -> AsyncIterator[bytes]:
        """Answer requests in their order; several are computed at once.

        Args:
            most: requests that the key may have open; None for no limit. No more are begun, so none
                is refused if the key sends nothing else.
        """
        places = asyncio.Semaphore(min(most or _MOST_AT_ONCE, _MOST_AT_ONCE))
        waiting: asyncio.Queue[asyncio.Queue[Any] | None] = asyncio.Queue(_MOST_AT_ONCE)
        tasks: set[asyncio.Task[None]] = set()

        def done(task: asyncio.Task[None]) -> None:
            tasks.discard(task)
            places.release()

        async def read() -> None:
            try:
                async for data in messages:
                    answers: asyncio.Queue[Any] = asyncio.Queue(MAX_BUFFERED)
                    await waiting.put(answers)
                    await places.acquire()
                    task = asyncio.create_task(self._answer_one(data, context, answers))
                    tasks.add(task)
                    task.add_done_callback(done)
            except Exception:  # the stream is broken, and gRPC ends it
                logger.debug("a stream of requests broke off", exc_info=True)
            await waiting.put(None)  # not if it is cancelled: nobody takes it then

        reading = asyncio.create_task(read())
        try:
            while (answers := await waiting.get()) is not None:
                while (answer := await answers.get()) is not None:
                    yield answer.SerializeToString()
        finally:
            for task in (reading, *tasks):
                task.cancel()
            await asyncio.gather(reading, *tasks, return_exceptions=True)

    async def _answer_one(self, data: bytes, context: Any, answers: asyncio.Queue[Any]) -> None:
        """Put the answers to a message, and None behind them."""
        began = perf_counter()
        service, id_ = self._models.first, ""
        try:
            with _entered(service, context) as call:
                call.hold(len(data))
                message = _parsed(ModelInferRequest, data)
                id_ = message.id
                service = self._turned(call, message)
                await self._send_answers(service, call, message, len(data), answers)
            service.requests.served(_STREAM, perf_counter() - began)
        except asyncio.CancelledError:
            service.requests.disconnects += 1
            raise
        except Exception as error:
            refused = _refused(service, error, context, _STREAM)
            failed = ModelStreamInferResponse(error_message=str(refused))
            failed.infer_response.id = id_
            await answers.put(failed)
        await answers.put(None)

    async def _send_answers(
        self,
        service: Service,
        call: RequestContext,
        message: Any,
        size: int,
        answers: asyncio.Queue[Any],
    ) -> None:
        service.requests.open += 1
        try:
            request = await ready_request(service, message, size)
            wants_end = bool(request.parameters.pop(_WANTS_END, False))
            items = read_tensors(request, call)
            if service.has_steps and len(items) == 1:
                await _send_steps(service, call, request, items[0], answers)
                last = ModelStreamInferResponse()
                last.infer_response.MergeFrom(write_message(service.model, request, ()))
            else:
                last = _streamed(call, request, await call.compute(items))
            if wants_end:
                last.infer_response.parameters[_IS_END].bool_param = True
            if wants_end or last.infer_response.outputs:
                await answers.put(last)
        finally:
            service.request_over()


async def _send_steps(
    service: Service, call: RequestContext, request: InferRequest, item: Any, answers: Any
) -> None:
    """A message for each output of a model of steps."""
    requests = service.requests
    admission = service.admission
    large = admission.check(service.description, [item]).large
    turn = admission.enter(large, call.left)
    try:
        await call.await_turn(turn)
        async with call.open_stream(item, MAX_BUFFERED) as outputs:
            requests.streams += 1
            async for output in outputs:
                await answers.put(_streamed(call, request, [output]))
                requests.outputs += 1
    finally:
        admission.leave(large, turn, is_done=True)


def _streamed(call: RequestContext, request: InferRequest, results: list[Any]) -> Any:
    answer = write_message(call.model, request, write_tensors(request, results, call))
    streamed = ModelStreamInferResponse()
    streamed.infer_response.MergeFrom(answer)
    return streamed


@contextlib.contextmanager
def _entered(service: Service, context: Any) -> Iterator[RequestContext]:
    """A call that counts against the limits of its key within the block.

    Raises:
        Refusal: a key or a header is wrong, the key's limits are reached, or its time is over.
    """
    call = RequestContext(service, MetadataExchange(context.invocation_metadata()))
    try:
        call.check()
        left = context.time_remaining()
        if left is not None:
            call.hasten(max(left, 0.0), 0)
        yield call
    except PredictTimeout as error:
        raise refusal(error, debug=service.options.debug, timeout=call.timeout) from None
    finally:
        call.leave()


async def ready_request(service: Service, message: Any, size: int) -> InferRequest:
    check_served(service, INFER)
    service.backend.check_room()
    if size <= _AT_ONCE or message.raw_input_contents:  # these become views
        return read_message(message)
    return await asyncio.to_thread(read_message, message)


def _parsed(kind: Any, data: bytes) -> Any:
    try:
        return kind.FromString(data)
    except DecodeError:
        raise InvalidInput(
            f"the message is no {SERVICE.partition('.')[0]}.{kind.__name__}"
        ) from None


def _refused(service: Service, error: Exception, context: Any, path: str) -> Refusal:
    if type(error) is Overloaded:
        service.overloaded()
    named = MetadataExchange(context.invocation_metadata()).request_id
    refused = refusal(error, debug=service.options.debug, request_id=named)
    service.requests.refused(path, refused.status, refused.reason)
    return refused


async def _abort(context: Any, refused: Refusal) -> None:
    """End a call with an error. Always raises."""
    more = tuple(
        (name.decode(), value.decode()) for name, value in refused.headers if name == b"retry-after"
    )
    await context.abort(code_of(refused), shortened(str(refused)), more)


def shortened(text: str) -> str:
    """As much of an error's text as fits into a header of gRPC."""
    size = 0
    for number, each in enumerate(text):
        size += 1 if " " <= each <= "~" and each != "%" else 3 * len(each.encode())
        if size > _LONGEST_TEXT:
            return text[:number]
    return text
