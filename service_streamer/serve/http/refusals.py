"""Errors as HTTP answers: the one table of exceptions and statuses."""

from __future__ import annotations

import difflib
import logging
import re
import secrets
import traceback
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from ...errors import (
    BadMessage,
    BrokerError,
    InternalError,
    InvalidInput,
    Overloaded,
    PredictTimeout,
    RemoteTraceback,
    SharedBatchError,
    StreamerBroken,
    StreamerClosed,
    TooLate,
    UnpicklableItem,
    WorkerLost,
    WorkerStartError,
)

logger = logging.getLogger(__name__)

_FIELD = re.compile(r"([a-zA-Z_][\w.]*(?:\[[^]]*\][\w.]*)*): ")
_PLACE = re.compile(r" - at `\$\.?(.*)`$")
_LONGEST_NAME = 100  # characters of an unknown field
_NAMED = re.compile(r"field `([^`]*)`")

#: How like a known field an unknown one must be, from 0 to 1, to be taken for it. OpenAI's
#: ``top_logprobs`` and our ``logprobs`` are not the same: 0.8.
_LIKENESS = 0.85


#: ``type`` of an error, and its reason in metrics, by status; all others are invalid requests.
_OF_STATUS = {
    401: ("authentication_error", "unauthorized"),
    403: ("permission_error", "forbidden"),
    404: ("not_found", "invalid"),
    408: ("timeout", "timeout"),
    413: ("invalid_request_error", "too_large"),
    429: ("rate_limit_error", "rate_limited"),
    500: ("server_error", "failed"),
    503: ("unavailable", "unavailable"),
    504: ("timeout", "timeout"),
}


class Refusal(Exception):
    """An error answer.

    Args:
        status: HTTP status.
        message: for people: what is wrong, and what to do.
        kind: the error's ``type``, for programs; None for that of the status.
        reason: label in metrics; None for that of the status.
        param: the wrong field of the request.
        code: stable error code, for programs.
        retry_after: seconds until a retry makes sense.
        log_id: id of the log record with the details.
        key: name of the API key that is refused, for the access log.
        more: further headers.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str | None = None,
        reason: str | None = None,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
        log_id: str | None = None,
        key: str = "",
        more: tuple[tuple[bytes, bytes], ...] = (),
    ) -> None:
        message = _without_surrogates(message)
        super().__init__(message)
        usual_kind, usual_reason = _OF_STATUS.get(status, ("invalid_request_error", "invalid"))
        self.status = status
        self.reason = reason or usual_reason
        param = None if param is None else _without_surrogates(param)
        error = {"message": message, "type": kind or usual_kind, "param": param, "code": code}
        if log_id is not None:
            error["id"] = log_id
        self.body = msgspec.json.encode({"error": error})
        self.headers = more
        if retry_after is not None:
            self.headers += ((b"retry-after", b"%d" % retry_after),)
        self.log_id = log_id
        self.key = key

    def in_openais_form(self) -> Refusal:
        """This refusal with status 400 instead of 422, as OpenAI's clients expect."""
        if self.status == 422:
            self.status = 400
        return self

    def in_v2_form(self) -> Refusal:
        """This refusal in the form of the Open Inference Protocol, which has no status 422."""
        self.body = msgspec.json.encode({"error": str(self)})
        return self.in_openais_form()


class _Row(NamedTuple):
    status: int
    kind: str
    message: str
    reason: str
    retry_after: int | None = None
    code: str | None = None  # defaults to the kind


#: The first match counts. Other errors are the model's or ours: only the log has their details.
_TABLE: tuple[tuple[type[Exception], _Row], ...] = (
    (
        Overloaded,
        _Row(503, "overloaded", "the service is overloaded; retry soon", "overloaded", 1),
    ),
    (
        TooLate,
        _Row(
            503,
            "overloaded",
            "the request cannot be computed within its timeout{}: too much waits, or it is "
            "too large; retry later, or send less at once",
            "overloaded",
            1,
        ),
    ),
    (
        PredictTimeout,
        _Row(504, "timeout", "the result was not ready within the request's timeout{}", "timeout"),
    ),
    (
        UnpicklableItem,
        _Row(
            400,
            "invalid_request_error",
            "the inputs are too large or nested too deeply to send to the model",
            "invalid",
            code="invalid_value",
        ),
    ),
    (
        SharedBatchError,
        _Row(
            503,
            "server_error",
            "the model failed on a batch that this request shared with other requests; retry",
            "failed",
            1,
        ),
    ),
    (StreamerClosed, _Row(503, "unavailable", "the service is stopping", "unavailable", 5)),
    (
        BadMessage,
        _Row(
            503,
            "unavailable",
            "the worker hosts have different settings than the service",
            "unavailable",
            30,
        ),
    ),
    (
        BrokerError,
        _Row(503, "unavailable", "the model is currently unreachable", "unavailable", 5),
    ),
    (StreamerBroken, _Row(503, "unavailable", "the model is not running", "unavailable", 30)),
    (WorkerStartError, _Row(503, "unavailable", "the model is not running", "unavailable", 30)),
)


def refusal(
    error: Exception, *, debug: bool, request_id: str | None = None, timeout: float | None = None
) -> Refusal:
    """The answer for an error; internal details go to the log.

    Args:
        debug: whether the answer shows internal details.
        request_id: the request's id; None if the caller knows none.
        timeout: of the request, in seconds.
    """
    if isinstance(error, Refusal):
        # Its frames hold the request: a reference cycle.
        return error.with_traceback(None)
    if isinstance(error, InvalidInput):
        return _invalid(str(error))
    is_models = isinstance(
        error.__cause__, RemoteTraceback
    )  # the model's own exception, of any class
    for kind, row in () if is_models else _TABLE:
        if isinstance(error, kind):
            known = f" of {timeout:.3g} s, set by --timeout or the client" if timeout else ""
            message = row.message.format(known)
            message += f" ({error})" if debug else ""
            return Refusal(
                row.status, message,
                kind=row.kind, reason=row.reason, code=row.code or row.kind,
                retry_after=row.retry_after,
            )  # fmt: skip
    return _internal(error, debug=debug, request_id=request_id)


def undecodable(error: Exception, fields: Sequence[str] = ()) -> Refusal:
    """The answer for a body that is not JSON, or does not match its operation's schema.

    Args:
        fields: fields of the operation's requests.
    """
    if isinstance(error, msgspec.ValidationError):
        return _mistyped(str(error), fields)
    if isinstance(error, UnicodeDecodeError):
        text = "the body is not valid UTF-8"
    elif isinstance(error, RecursionError):
        text = "the body is nested too deeply"
    else:
        text = f"the body is not valid JSON: {error}"
    return Refusal(400, text, code="invalid_json")


def _invalid(text: str) -> Refusal:
    text = text or "the model refuses the inputs, and does not say why"  # empty is no error to gRPC
    named = _FIELD.match(text)
    return Refusal(422, text, param=named.group(1) if named else "inputs", code="invalid_value")


def _mistyped(text: str, fields: Sequence[str]) -> Refusal:
    """Turn msgspec's message and path into a field's name and a sentence."""
    place, named = _PLACE.search(text), _NAMED.search(text)
    what = _PLACE.sub("", text).replace("`", "")
    param = place.group(1) if place else ""
    code = "invalid_type" if "expected" in what.lower() else "invalid_value"
    if named is not None:
        name = named.group(1)[:_LONGEST_NAME]
        param = f"{param}.{name}" if param else name
        is_unknown = "unknown" in what
        code = "unknown_parameter" if is_unknown else "missing_required_parameter"
        what = f"unknown field `{param}`{'' if place else _meant(name, fields)}"
        what = what if is_unknown else f"missing field `{param}`"
        return Refusal(422, what, param=param, code=code)
    message = f"{param or 'the body'}: {what[0].lower()}{what[1:]}"
    return Refusal(422, message, param=param or None, code=code)


def _meant(name: str, fields: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, fields, 1, _LIKENESS)
    return f"; did you mean `{close[0]}`?" if close else ""


def _internal(error: Exception, *, debug: bool, request_id: str | None) -> Refusal:
    id_ = request_id or secrets.token_hex(8)
    logger.error("request %s failed", id_, exc_info=error, extra={"request_id": id_})
    code, message = "model_failed", "the model failed on this request"
    if isinstance(error, WorkerLost):
        code, message = "worker_lost", "the model's process died while it computed this request"
    elif isinstance(error, InternalError):
        code, message = "internal_error", "a bug in service_streamer ended this request"
    message += f"; the service's log has the details under id {id_}"
    if debug:
        message += "\n" + "".join(traceback.format_exception(error))
    return Refusal(500, message, log_id=id_, code=code)


def _without_surrogates(text: str) -> str:
    """Escape surrogates, which JSON cannot have: a model's error may contain any text."""
    return text.encode("utf-8", "backslashreplace").decode()


def too_large(limit: int, size: int | None = None) -> Refusal:
    """The answer for a body that is too large."""
    shown = f" of {size} bytes" if size is not None else ""
    text = f"the body{shown} exceeds the limit of {limit} bytes (--max-body); send less at once"
    return Refusal(413, text, code="request_too_large")


def late_body(timeout: float) -> Refusal:
    text = f"the body did not arrive within {timeout:.3g} s, set by --timeout or the client"
    return Refusal(408, text, code="request_timeout")


def stopping(text: str = "the service is stopping") -> Refusal:
    """The answer when the model is not there, or not any more."""
    return Refusal(503, text, code="unavailable", retry_after=5)


def invalid(param: str, text: str, code: str = "invalid_value") -> Refusal:
    return Refusal(422, f"{param}: {text}", param=param, code=code)


def unsupported(param: str, text: str = "is not supported; leave it out") -> Refusal:
    return invalid(param, text, "unsupported_parameter")


def renamed(error: InvalidInput, names: Mapping[str, str]) -> InvalidInput:
    """The same error in the words of the request.

    Args:
        names: what the request calls the model's fields.
    """
    field, colon, text = str(error).partition(":")
    name, bracket, rest = field.partition("[")  # of a message of a chat
    if names.get("parameters.truncation") == "truncate":
        text = text.replace("set the parameter truncation", "set truncate to true")
    return InvalidInput(names.get(name, name) + bracket + rest + colon + text)
