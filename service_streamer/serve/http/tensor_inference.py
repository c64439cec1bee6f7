"""Inference with tensors, the Open Inference Protocol: the operation, for HTTP and for gRPC."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import msgspec

from ...reporting import missing
from ..v2.infer_answer import (
    OutputTensor,
    answer_of,
    check_wanted,
    chosen,
    encode,
    output_tensors,
    outputs_of,
    wanted_of,
)
from ..v2.infer_request import (
    InferenceHeader,
    InferRequest,
    calling,
    check_tensors,
    count_of,
    items_of,
    parse_header,
)
from .context import RequestContext
from .json_bodies import BinaryAnswer, JSONAnswer, decoded
from .predicting import with_parameters
from .refusals import Refusal, invalid

#: How long the JSON of a body with binary data is.
LENGTH_HEADER = b"inference-header-content-length"

_NAMED = "Inference-Header-Content-Length"

#: Bytes of JSON that are read in the event loop, in a few milliseconds. More are read in a thread,
#: in pieces: other requests are answered meanwhile.
_AT_ONCE = 256 << 10

_read_header = msgspec.json.Decoder(InferenceHeader)


async def infer_tensors(body: bytes, context: RequestContext) -> JSONAnswer | BinaryAnswer:
    try:
        json, binary = _parted(body, context)
        if len(json) <= _AT_ONCE:
            request = _request(json, binary)
        else:
            request = await asyncio.to_thread(_request, json, binary)
        results = await context.compute(read_tensors(request, context))
        tensors = write_tensors(request, results, context)
        answer, parts = answer_of(context.model, request, tensors)
    except ModuleNotFoundError as error:
        raise lacks_numpy(error) from None
    if not parts:
        size = sum(4 * math.prod(each.shape) for each, _ in tensors)
        return await context.answer(lambda: answer, size)
    header = encode(answer)
    length = b"%d" % len(header)
    return BinaryAnswer(
        b"".join((header, *parts)),
        ((b"content-type", b"application/octet-stream"), (LENGTH_HEADER, length)),
    )


def lacks_numpy(error: ModuleNotFoundError) -> Refusal:
    """The answer where numpy is not installed. Raises other errors."""
    if error.name != "numpy":
        raise error
    text = missing("a request with tensors of numbers", "numpy", "oip")
    return Refusal(501, text, kind="server_error", reason="unavailable", code="not_installed")


def _parted(body: bytes, context: RequestContext) -> tuple[bytes | memoryview, memoryview]:
    """The JSON of a body, and the binary data behind it. Raises Refusal."""
    length = context.header(LENGTH_HEADER)
    if not length:
        return body, memoryview(b"")
    size = int(length) if length.isdigit() and len(length) < 20 else -1
    if not 0 < size <= len(body):
        raise invalid(
            _NAMED, f"must be the bytes of JSON at the beginning of the {len(body)} of the body"
        )
    whole = memoryview(body)
    return whole[:size], whole[size:]


def _request(json: bytes | memoryview, binary: memoryview) -> InferRequest:
    """Raises Refusal, InvalidInput."""
    return parse_header(decoded(_read_header, json), binary)


def read_tensors(request: InferRequest, context: RequestContext) -> list[Any]:
    """The items of a request, before anything is queued. Raises Refusal, InvalidInput."""
    description = context.description
    count = count_of(request.inputs)
    context.check_count(count)
    check_tensors(request.inputs, description.get("inputs") or ())
    if request.wanted:
        outputs = outputs_of(description)
        if outputs:
            check_wanted(request.wanted, [each["name"] for each in outputs])
    call = calling(request.parameters)
    context.hasten(call.timeout, call.priority)
    return with_parameters(items_of(request, description), call.parameters, context)


def write_tensors(
    request: InferRequest, results: list[Any], context: RequestContext
) -> list[tuple[OutputTensor, bool]]:
    """The tensors of the answer, and whether each is binary data. Raises InvalidInput."""
    return chosen(output_tensors(results, wanted_of(context.description)), request)
