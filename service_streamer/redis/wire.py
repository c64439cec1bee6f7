"""The messages: a call to a worker host, and its reply.

    call     (FORMAT, codec, client, number, [[payload, ...], headers])
    reply    (FORMAT, codec, client, number, [payload, ...])          the results
             (FORMAT, codec, client, number, failure)                 why there are none
             (FORMAT, codec, client, number, {first: n, outputs: [payload, ...], error: failure})
                                                                      the end of a stream
    outputs  (FORMAT, codec, client, 0, [(number, first, [payload, ...], id), ...])   of streams

Each is a msgpack array. With a secret it follows its HMAC-SHA256, which is verified before anything
is decoded. The headers of a call are a map: ``priority``, ``tenant`` and ``has_deadline``, as far
as they are not those of an ordinary call, and ``stream``, true, if its outputs are wanted as they
come. Outputs of a call are numbered from 0: ``first`` is the number of the first one in a message.
A payload is an item or result, encoded by the codec; a worker host passes it to its worker
processes as it is. Anyone who can write to Redis can send messages, so their contents are not
trusted.

    model    (FORMAT, codec, "hosts", 0, description)     the description of the hosts' model

    notice   b"NUMBER REASON"     a host could not read a call; unsigned, as the secrets may
                                  differ. The client only uses its reason, one of ``REASONS``, and
                                  only if the call is gone from Redis.
"""

from __future__ import annotations

import builtins
import contextlib
import hmac
import re
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgpack

from .. import errors
from ..errors import BadMessage, ModelError, RemoteTraceback
from ..observe.record import ORDINARY, CallOptions
from ..options.table import BrokerOptions
from ..remote.open_calls import OutputRun, RemoteAnswer
from ..reporting import summary
from ..workers.protocol import Failure
from .serializers import MsgpackCodec, PickleCodec, WireCodec, check_complete

#: Reasons in notices why a message cannot be read, and their explanations for its sender.
REASONS: Mapping[str, str] = {
    "signature": "the signature is wrong; give clients and worker hosts the same secret",
    "secret": "only one side has a secret; give clients and worker hosts the same secret",
    "serializer": "the serializers differ; give clients and worker hosts the same serializer",
    "size": "it exceeds the reader's max_message_bytes; raise that option there",
    "format": "its format differs; install the same version of service_streamer on both sides",
    "unreadable": "it cannot be decoded; see the log of the side that reads it",
}

#: The first element of every message. Raise it with any change of the messages: both sides must
#: have the same, and say so if they do not.
_FORMAT = 2
_MAC_BYTES = 32

#: A client's name, which becomes part of a key.
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")

#: A notice; and the bytes of a message that may contain its sender.
_NOTICE = re.compile(rb"(\d{1,20}) ([a-z]{1,20})")
_LONGEST_HEAD = 256

#: Maximum length of an exception's chain of causes.
_CAUSES = 3


class Wire:
    """Makes and reads messages. Both sides need the same codec, secret and prefix. Thread-safe.

    The prefix is part of the signature, so that a message is valid for one model only.

    Attributes:
        codec: encodes items, results and the contents of exceptions.
        max_bytes: maximum size of a message.
    """

    def __init__(self, options: BrokerOptions) -> None:
        self._is_pickle = options.serializer == "pickle"
        self.codec: WireCodec = PickleCodec() if self._is_pickle else MsgpackCodec()
        self.max_bytes = options.max_message_bytes
        secret, end = options.secret, b"\0" + options.prefix.encode() + b"\0"
        self._secret = secret.encode() if isinstance(secret, str) else secret
        self._call_context = b"call" + end
        self._reply_context = b"reply" + end
        self._outputs_context = b"outputs" + end
        self._model_context = b"model" + end
        self._error_types = {_name(kind): kind for kind in options.error_types}

    # -- calls

    def call(
        self,
        client: str,
        number: int,
        payloads: Sequence[bytes],
        options: CallOptions = ORDINARY,
    ) -> bytes:
        """The message of a call. Raises ValueError: it would exceed ``max_bytes``."""
        headers: dict[str, Any] = {}
        if options is not ORDINARY:
            usual = CallOptions._field_defaults
            headers = {
                name: value for name, value in options._asdict().items() if value != usual[name]
            }
        content = payloads, headers
        body = msgpack.packb(
            (_FORMAT, self.codec.name, client, number, content), unicode_errors=_ANY
        )
        return self._sealed(body, self._call_context)

    def read_call(self, message: object) -> tuple[str, int, list[bytes], CallOptions]:
        """The client, its number for the call, the items, and the headers. Raises BadMessage."""
        client, number, content = self._read(message, self._call_context)
        if type(content) is not list or len(content) != 2 or not _are_bytes(content[0]):
            raise BadMessage("it has no items")
        payloads, headers = content
        return client, number, payloads, _read_headers(headers)

    # -- replies

    def results(self, client: str, number: int, payloads: Sequence[bytes]) -> bytes:
        """A reply with the results; with an error if they exceed ``max_bytes``."""
        body = msgpack.packb((_FORMAT, self.codec.name, client, number, payloads))
        try:
            return self._sealed(body, self._reply_context)
        except ValueError as error:
            return self.failure(client, number, ModelError(f"the results are too large: {error}"))

    def failure(self, client: str, number: int, error: BaseException) -> bytes:
        """A reply with an error."""
        content = self._encoded_error(error, _CAUSES)
        body = msgpack.packb(
            (_FORMAT, self.codec.name, client, number, content), unicode_errors=_ANY
        )
        try:
            return self._sealed(body, self._reply_context)
        except ValueError:
            short = ModelError(f"{type(error).__qualname__}, whose text is too long to send")
            return self.failure(client, number, short)

    def stream_end(
        self,
        client: str,
        number: int,
        first: int,
        payloads: Sequence[bytes],
        error: BaseException | None = None,
    ) -> bytes:
        """The end of a stream, with the outputs from ``first`` on that were not handed out yet."""
        content: dict[str, Any] = {"first": first, "outputs": payloads}
        if error is not None:
            content["error"] = self._encoded_error(error, _CAUSES)
        body = msgpack.packb(
            (_FORMAT, self.codec.name, client, number, content), unicode_errors=_ANY
        )
        try:
            return self._sealed(body, self._reply_context)
        except ValueError as large:
            if error is None:
                error = ModelError(f"the outputs are too large: {large}")
            return self.failure(client, number, error)

    def outputs(self, client: str, runs: Sequence[OutputRun]) -> bytes:
        """Outputs of a client's streams. Raises ValueError: they would exceed ``max_bytes``."""
        body = msgpack.packb((_FORMAT, self.codec.name, client, 0, runs))
        return self._sealed(body, self._outputs_context)

    def read_outputs(self, message: object, client: str) -> list[OutputRun]:
        """Outputs of this client's streams. Raises BadMessage."""
        recipient, _, content = self._read(message, self._outputs_context)
        if recipient != client:
            raise BadMessage("it is for another client")
        if type(content) is not list:
            raise BadMessage("it has no outputs")
        runs: list[OutputRun] = []
        for run in content:
            if type(run) is not list or [type(each) for each in run] != [int, int, list, bytes]:
                raise BadMessage("its outputs are malformed")
            runs.append(OutputRun(*run))
            if not _are_outputs(runs[-1].first, runs[-1].outputs):
                raise BadMessage("its outputs are malformed")
        return runs

    def read_reply(self, message: object, client: str) -> RemoteAnswer:
        """The reply to a call of this client. Raises BadMessage."""
        recipient, number, content = self._read(message, self._reply_context)
        if recipient != client:
            raise BadMessage("it is for another client")
        if _are_bytes(content):
            return RemoteAnswer(number, content)
        if type(content) is not dict:
            return RemoteAnswer(number, [], self._failure(content))
        first, outputs, error = map(content.get, ("first", "outputs", "error"))
        if outputs is None or not _are_outputs(first, outputs):
            raise BadMessage("its outputs are malformed")
        failure = None if error is None else self._failure(error)
        return RemoteAnswer(number, outputs, failure, first)

    # -- announcements

    def announcement(self, description: Mapping[str, Any]) -> bytes:
        """What the model of a worker host says of itself; nothing if that cannot be sent."""
        body = (_FORMAT, self.codec.name, "hosts", 0, description)
        try:
            return self._sealed(msgpack.packb(body, unicode_errors=_ANY), self._model_context)
        except (ValueError, TypeError, OverflowError):
            return self.announcement({})

    def read_announcement(self, message: object) -> dict[str, Any]:
        """What the model says of itself. Raises BadMessage."""
        _, _, description = self._read(message, self._model_context)
        if type(description) is not dict:
            raise BadMessage("it describes no model")
        return description

    # -- notices

    @staticmethod
    def sender(message: object) -> tuple[str, int] | None:
        """The claimed client and number of a message, unverified; None if it has none."""
        if not isinstance(message, bytes):
            return None
        for start in (0, _MAC_BYTES):
            with contextlib.suppress(Exception):  # msgpack raises a dozen classes
                unpacker = msgpack.Unpacker()
                unpacker.feed(message[start : start + _LONGEST_HEAD])
                is_one = unpacker.read_array_header() == 5
                _, _, client, number = (unpacker.unpack() for _ in range(4))
                if is_one and type(number) is int and _NAME.fullmatch(client):
                    return client, number
        return None

    @staticmethod
    def notice(number: int, reason: str) -> bytes:
        """A notice for a call that cannot be read."""
        return f"{number} {reason}".encode()

    @staticmethod
    def read_notice(notice: bytes) -> tuple[int, str] | None:
        """The number of a call, and one of ``REASONS``; None if malformed."""
        match = _NOTICE.fullmatch(notice)
        if match is None:
            return None
        reason = match[2].decode()
        return int(match[1]), reason if reason in REASONS else "unreadable"

    # -- signatures

    def _sealed(self, body: bytes, context: bytes) -> bytes:
        if len(body) + _MAC_BYTES > self.max_bytes:
            raise ValueError(f"{len(body)} bytes, but max_message_bytes is {self.max_bytes}")
        if self._secret is None:
            return body
        return hmac.digest(self._secret, context + body, "sha256") + body

    def _unsealed(self, message: object, context: bytes) -> Any:
        if not isinstance(message, bytes):
            raise BadMessage("it has no content")
        if len(message) > self.max_bytes:
            text = f"it has {len(message)} bytes, but max_message_bytes is {self.max_bytes}"
            raise BadMessage(text, reason="size")
        body: bytes | memoryview = message
        if self._secret is not None:
            mac, body = message[:_MAC_BYTES], memoryview(message)[_MAC_BYTES:]
            expected = hmac.digest(self._secret, b"".join((context, body)), "sha256")
            if not hmac.compare_digest(mac, expected):
                text = "its signature is wrong; give clients and worker hosts the same secret"
                raise BadMessage(text, reason="signature")
        try:
            check_complete(body)
            fields: Any = msgpack.unpackb(body, unicode_errors=_ANY)
        except Exception as error:  # msgpack raises a dozen classes, or RecursionError
            text = f"it cannot be decoded ({summary(error)})"
            if self._secret is not None:
                raise BadMessage(text) from None
            text += "; it may be signed, but this side has no secret"
            raise BadMessage(text, reason="secret") from None
        return fields

    def _read(self, message: object, context: bytes) -> tuple[str, int, Any]:
        fields = self._unsealed(message, context)
        if type(fields) is not list or len(fields) != 5 or fields[0] != _FORMAT:
            text = f"it is not a message of format {_FORMAT}"
            text += "; install the same version of service_streamer on both sides"
            raise BadMessage(text, reason="format")
        _, codec, client, number, content = fields
        if type(client) is not str or not _NAME.fullmatch(client) or type(number) is not int:
            raise BadMessage("it does not name its client")
        if codec != self.codec.name:
            text = f"it has serializer {reprlib.repr(codec)}, but this side has {self.codec.name!r}"
            raise BadMessage(text, reason="serializer")
        return client, number, content

    # -- exceptions

    def _encoded_error(self, error: BaseException, causes: int) -> tuple[Any, ...]:
        """An exception's class, by its name and perhaps pickled, text, traceback and cause."""
        pickled: bytes | None = None
        if self._is_pickle:
            with contextlib.suppress(Exception):  # its class cannot be imported
                pickled = self.codec.encode(type(error))
        cause = error.__cause__
        trace = cause.text if isinstance(cause, RemoteTraceback) else None
        encoded_cause = None
        if cause is not None and trace is None and causes:
            encoded_cause = self._encoded_error(cause, causes - 1)
        return _name(type(error)), pickled, _text(error), trace, encoded_cause

    def _failure(self, content: Any, causes: int = _CAUSES) -> Failure:
        if not (isinstance(content, list) and len(content) == 5):
            raise BadMessage("it has neither results nor an error")
        name, pickled, text, trace, cause = content
        if not (isinstance(name, str) and isinstance(text, str)):
            raise BadMessage("its error has no name")
        error = self._error(name, pickled, text)
        if isinstance(trace, str):
            return Failure(error, trace)
        if cause is not None and causes:
            return Failure(error, cause=self._failure(cause, causes - 1))
        return Failure(error)

    def _error(self, name: str, pickled: Any, text: str) -> BaseException:
        """An exception of this class and text, or of a base class that can have the text alone.

        The name is not trusted: classes are looked up among those that this side knows.
        """
        kind: Any = self._error_types.get(name) or _KNOWN.get(name)
        if kind is None and self._is_pickle:
            with contextlib.suppress(Exception):  # it cannot be imported here
                kind = self.codec.decode(pickled)
        args = (text,) if text else ()
        for each in () if kind is None else kind.__mro__:
            if each is Exception and each is not kind:  # it would say nothing of its class
                break
            with contextlib.suppress(Exception):  # it needs other arguments than a text
                known = _KNOWN.get(_name(each))
                if known is not None:
                    return known(*args)
                # A user's constructor would word the text once more.
                error: BaseException = each.__new__(each, *args)
                BaseException.__setattr__(error, "args", args)  # also of a frozen dataclass
                str(error)
                return error
        short = name.rpartition(".")[2]
        return ModelError(f"{f'{short}: {text}' if text else short} (stands in for {name})")


#: Lone surrogates: a model's error may quote its input.
_ANY = "surrogatepass"


def _name(kind: type[BaseException]) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _text(error: BaseException) -> str:
    """What an exception of this class has to be given to have this text."""
    args = error.args
    quotes = type(error).__str__ is KeyError.__str__
    if quotes and len(args) == 1 and type(args[0]) is str:
        return str(args[0])
    try:
        return str(error)
    except (Exception, SystemExit):
        return summary(error).partition(": ")[2]


def _are_bytes(values: Any) -> bool:
    if type(values) is list and len(values) == 1:  # the usual call
        return type(values[0]) is bytes
    return type(values) is list and {type(value) for value in values} == {bytes}


def _are_outputs(first: Any, outputs: Any) -> bool:
    return type(first) is int and first >= 0 and (outputs == [] or _are_bytes(outputs))


def _read_headers(headers: Any) -> CallOptions:
    """What a call says besides its items. Raises BadMessage."""
    if headers == {}:  # nearly all calls
        return ORDINARY
    try:
        return CallOptions(**headers).checked()
    except (TypeError, ValueError):
        raise BadMessage("its headers are malformed") from None


_BUILT_IN = {
    _name(kind): kind
    for kind in vars(builtins).values()
    if isinstance(kind, type) and issubclass(kind, Exception)
}
_KNOWN: dict[str, type[BaseException]] = _BUILT_IN | {
    _name(kind): kind for kind in (getattr(errors, name) for name in errors.__all__)
}


Serializer = Literal["msgpack", "pickle"]
Secret = str | bytes
