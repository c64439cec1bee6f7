"""Bodies that are not JSON: single files, and forms with files. Pure."""

from __future__ import annotations

from typing import Any, NamedTuple

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from .refusals import Refusal

__all__ = ["Sent", "read_sent"]

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
            "invalid_request_error",
            f"Content-Type: this model takes text, not {kind}; send JSON, such as "
            '{"inputs": "a text"}',
            reason="invalid",
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
                "invalid_request_error",
                f"unknown form field `{name}`; send files, or texts as `inputs`, and `parameters` "
                "as JSON",
                reason="invalid",
                param=name,
                code="unknown_parameter",
            )
    if not inputs:
        raise Refusal(
            422,
            "invalid_request_error",
            "missing form field `inputs`; send a file, or a text as `inputs`",
            reason="invalid",
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
    return Refusal(
        400,
        "invalid_request_error",
        f"the form cannot be read: {why}",
        reason="invalid",
        code="invalid_form",
    )
