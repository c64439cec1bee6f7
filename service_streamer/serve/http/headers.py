"""What a request says besides JSON: headers (timeouts, priorities), files, forms, compression.

A small compressed body may be made to grow a thousandfold, so what comes out is bounded, and its
larger part is computed in a thread: the event loop goes on.
"""

from __future__ import annotations

import asyncio
import re
import zlib
from collections.abc import Iterable
from typing import Any, NamedTuple

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from ...observe.record import Timing
from ...options.checks import LONGEST_TENANT, check_priority
from .refusals import Refusal, too_large

#: See https://www.w3.org/TR/server-timing/; in milliseconds.
_TIMING = b"queued;dur=%.3f, sent;dur=%.3f, computed;dur=%.3f, returned;dur=%.3f"


def check_framing(value: bytes) -> None:
    """Refuse a Transfer-Encoding besides chunked: its body would be read undecoded.

    Raises:
        Refusal: 501.
    """
    if value.strip().lower() != b"chunked":
        shown = value[:40].decode("latin-1")
        raise Refusal(
            501,
            f"Transfer-Encoding: {shown!r} is not supported, only chunked; to compress the body, "
            "use Content-Encoding",
            param="Transfer-Encoding",
            code="unsupported_transfer_encoding",
        )


def read_seconds(value: bytes) -> float:
    """Read X-Request-Timeout. Raises Refusal."""
    try:
        seconds = float(value)
        if not 0 < seconds <= 1e9:
            raise ValueError
    except ValueError:
        wanted = "a number of seconds above 0"
        raise _bad_header(b"X-Request-Timeout", wanted, value) from None
    return seconds


def read_priority(name: bytes, value: bytes) -> int:
    """Read a priority from a header. Raises Refusal."""
    try:
        return check_priority(int(value))
    except ValueError:
        wanted = "a whole number; higher numbers go first"
        raise _bad_header(name.title(), wanted, value) from None


def read_tenant(name: bytes, value: bytes) -> str:
    """Read a tenant from a header. Raises Refusal."""
    if len(value) > LONGEST_TENANT:
        raise _bad_header(name.title(), f"at most {LONGEST_TENANT} characters", value)
    return value.decode("latin-1")


def is_allowed_host(allowed: tuple[str, ...], headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """Whether the header Host is in ``ServiceOptions.allowed_hosts``."""
    hosts = [value for name, value in headers if name == b"host"]
    if len(hosts) != 1:
        return False
    host = hosts[0].decode("latin-1").lower()
    host = re.sub(r":\d*$", "", host).rstrip(".").strip("[]")
    return any(
        host.endswith(each[1:]) and host != each[1:] if each.startswith("*.") else host == each
        for each in allowed
    )


def _bad_header(name: bytes, wanted: str, value: bytes) -> Refusal:
    shown, named = value[:40].decode("latin-1"), name.decode()
    return Refusal(
        422, f"{named}: must be {wanted}, not {shown!r}", param=named, code="invalid_value"
    )


def timing_header(timing: Timing) -> tuple[bytes, bytes]:
    """Server-Timing: where the request's time went. Browsers show it."""
    queued, sent, computed, returned = timing[:4]
    values = (1e3 * queued, 1e3 * sent, 1e3 * computed, 1e3 * returned)
    return b"server-timing", _TIMING % values


#: Maximum number of parts of a form.
_MOST_PARTS = 1024

#: Prefixes of the content types of files.
_FILES = ("image/", "audio/", "video/", "application/octet-stream")


class Sent(NamedTuple):
    """A request in another form than JSON.

    Attributes:
        inputs: a file's bytes, a field's text, or a list of them.
        parameters: JSON of the field "parameters"; None without that field.
    """

    inputs: Any
    parameters: bytes | None = None


def read_sent(content_type: bytes, body: bytes, takes: str | None) -> Sent | None:
    """Read a body that is not JSON.

    Args:
        content_type: the header; empty if missing.
        takes: type of the model's inputs: "text", "image" or "audio"; None if unknown.

    Returns:
        None for a body to read as JSON, whatever its content type.

    Raises:
        Refusal: the model takes no files, or the form is malformed.
    """
    kind = content_type[:256].decode("latin-1").strip().lower()
    if kind.startswith("multipart/"):
        return _form(content_type, body, is_text=takes == "text")
    is_file = kind.startswith(_FILES)
    looks_like_json = body.lstrip()[:1] in (b"{", b"")
    if takes in ("image", "audio"):
        # Clients often send a file without a type, and curl sends a form's type.
        is_json = looks_like_json or "json" in kind
        return None if is_json else Sent(body)
    if not is_file or (takes == "text" and looks_like_json):
        return None
    if takes == "text":
        raise Refusal(
            415,
            f"Content-Type: this model takes text, not {kind}; send JSON, such as "
            '{"inputs": "a text"}',
            param="Content-Type",
            code="unsupported_media_type",
        )
    return Sent(body)


def _form(content_type: bytes, body: bytes, *, is_text: bool) -> Sent:
    kind, options = parse_options_header(content_type[:512])
    boundary = options.get(b"boundary")
    if kind != b"multipart/form-data" or not boundary:
        raise _unreadable("only multipart/form-data with a boundary is supported")
    inputs: list[bytes | str] = []
    parameters: bytes | None = None
    for name, is_file, content in _parts(body, boundary):
        if name == "parameters":
            parameters = content
        elif is_file:
            inputs.append(_text(content) if is_text else content)
        elif name == "inputs":
            inputs.append(_text(content))
        else:
            raise Refusal(
                422,
                f"unknown form field `{name}`; send files, or texts as `inputs`, and `parameters` "
                "as JSON",
                param=name,
                code="unknown_parameter",
            )
    if not inputs:
        raise Refusal(
            422,
            "missing form field `inputs`; send a file, or a text as `inputs`",
            param="inputs",
            code="missing_required_parameter",
        )
    return Sent(inputs if len(inputs) > 1 else inputs[0], parameters)


class _Form:
    """Collects the parts of a form from the parser's callbacks."""

    def __init__(self) -> None:
        self.parts: list[tuple[bytes, bytes]] = []  # disposition and content
        self.is_whole = False
        self._disposition = self._field = self._value = b""
        self._content: list[bytes] = []

    def on_part_begin(self) -> None:
        if len(self.parts) == _MOST_PARTS:
            raise _unreadable(f"it has more than {_MOST_PARTS} parts; send fewer at once")
        self._disposition, self._content = b"", []

    def on_header_begin(self) -> None:
        self._field = self._value = b""

    def on_header_field(self, data: bytes, start: int, end: int) -> None:
        self._field += data[start:end]

    def on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def on_header_end(self) -> None:
        if self._field.lower() == b"content-disposition":
            self._disposition = self._value

    def on_part_data(self, data: bytes, start: int, end: int) -> None:
        self._content.append(data[start:end])

    def on_part_end(self) -> None:
        self.parts.append((self._disposition, b"".join(self._content)))

    def on_end(self) -> None:
        self.is_whole = True


def _parts(body: bytes, boundary: bytes) -> list[tuple[str, bool, bytes]]:
    """Name, whether it is a file, and content of each part."""
    form = _Form()
    callbacks: Any = {name: getattr(form, name) for name in vars(_Form) if name.startswith("on_")}
    try:  # also refuses a boundary that is too long
        parser = MultipartParser(boundary, callbacks)
        parser.write(body)
        parser.finalize()
    except FormParserError as error:
        raise _unreadable(str(error)) from None
    if not form.is_whole:
        raise _unreadable("it has no end; it may have been cut off")
    parts = []
    for disposition, content in form.parts:
        _, options = parse_options_header(disposition)
        if b"name" not in options:
            raise _unreadable("a part has no name")
        shown = options[b"name"][:100].decode("utf-8", "backslashreplace")
        parts.append((shown, b"filename" in options, content))
    return parts


def _text(content: bytes) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError:
        raise _unreadable("a text is not valid UTF-8") from None


def _unreadable(why: str) -> Refusal:
    return Refusal(400, f"the form cannot be read: {why}", code="invalid_form")


#: Window sizes for zlib: of gzip, and of the zlib format, which HTTP calls deflate.
_WINDOWS = {b"gzip": 31, b"x-gzip": 31, b"deflate": 15}

#: For the header Accept-Encoding.
CODINGS = b"gzip, deflate, identity"

#: Bytes that are decompressed in the event loop, in about 0.2 ms.
_AT_ONCE = 64 << 10

#: Members of a gzip body, each of which costs about 2 µs even if it is empty. Arbitrary.
_MOST_MEMBERS = 1000

#: Bytes that zlib gets at once. It copies those behind the end of a member.
_PIECE = 4096


async def decompressed(body: bytes, coding: bytes, most: int) -> bytes:
    """A body without its compression.

    Args:
        coding: the header Content-Encoding.
        most: bytes that it may have.

    Raises:
        Refusal: 415, another compression, or several; 400, the body is not compressed that way;
            413, it is too large.
    """
    coding = coding.strip().lower()
    if coding in (b"identity", b""):
        return body
    window = _WINDOWS.get(coding)
    if window is None:
        shown = coding[:40].decode("latin-1")
        raise Refusal(
            415,
            f"Content-Encoding: {shown!r} is not supported; compress the body once with gzip or "
            "deflate, or send it as it is",
            param="Content-Encoding",
            code="unsupported_content_encoding",
            more=((b"accept-encoding", CODINGS),),
        )
    text = _decompress(body, window, _AT_ONCE) if len(body) <= _AT_ONCE else None
    if text is None or len(text) > _AT_ONCE:
        text = await asyncio.to_thread(_decompress, body, window, most)
    if len(text) > most:
        raise too_large(most)
    return text


def _decompress(body: bytes, window: int, most: int) -> bytes:
    """A body without its compression; not more than one byte beyond ``most``. Raises Refusal."""
    name, members = ("gzip", _MOST_MEMBERS) if window == 31 else ("deflate", 1)
    parts: list[bytes] = []
    size = place = 0
    for _ in range(members):
        stream = zlib.decompressobj(window)
        while not stream.eof:
            piece = body[place : place + _PIECE]
            try:
                part = stream.decompress(piece, most + 1 - size)
            except zlib.error:
                raise _malformed(f"is not in the format of {name}") from None
            if not piece and not part:
                raise _malformed(f"ends before the end of its {name} data")
            parts.append(part)
            size += len(part)
            if size > most:
                return b"".join(parts)
            place += len(piece) - len(stream.unconsumed_tail) - len(stream.unused_data)
        if place == len(body):
            return b"".join(parts)
    limit = f" (member limit: {members})" if members > 1 else ""
    raise _malformed(f"goes on after the end of its {name} data{limit}")


def _malformed(problem: str) -> Refusal:
    return Refusal(
        400,
        f"the body {problem}, which the header Content-Encoding announces",
        param="Content-Encoding",
        code="invalid_content_encoding",
    )
