"""Bodies that are not JSON: a file by itself, and forms with files. Pure.

A form is cut at its boundary in one pass, since the whole body is there. That needs no package, no
temporary files, and costs the same whatever the body has.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from .refusals import Refusal

__all__ = ["Sent", "read_sent"]

#: The most parts of a form, and the most bytes of a part's own headers.
_MOST_PARTS = 1024
_LONGEST_HEAD = 2048

_MULTIPART = re.compile(r'multipart/form-data\s*;.*?boundary=("[^"]{1,70}"|[^\s;"]{1,70})', re.I)
_DISPOSITION = re.compile(rb"content-disposition:\s*form-data\b(.*)", re.IGNORECASE)
_NAME = re.compile(rb';\s*name=("(?:[^"\\]|\\.)*"|[^\s;"]+)', re.IGNORECASE)
_FILENAME = re.compile(rb";\s*filename\*?=", re.IGNORECASE)

#: What content types say of a body that is a file.
_FILES = ("image/", "audio/", "video/", "application/octet-stream")


class Sent(NamedTuple):
    """A request that came in another form than JSON.

    Attributes:
        inputs: bytes of a file, the text of a field, or a list of several of them.
        parameters: the JSON of the field "parameters"; None if there is none.
    """

    inputs: Any
    parameters: bytes | None = None


def read_sent(content_type: bytes, body: bytes, takes: str | None) -> Sent | None:
    """What a body has that is not JSON.

    Args:
        content_type: the header; empty if there is none.
        takes: what the model's inputs are: "text", "image" or "audio"; None if that is not known.

    Returns:
        None for a body that is to be read as JSON, whatever its content type.

    Raises:
        Refusal: the model takes no files, or the form cannot be read.
    """
    kind = content_type[:256].decode("latin-1").strip().lower()
    if kind.startswith("multipart/"):
        return _form(content_type, body, is_text=takes == "text")
    is_file = kind.startswith(_FILES)
    looks_like_json = body.lstrip()[:1] in (b"{", b"")
    if takes in ("image", "audio"):
        # Programs that send a file often name no type, and curl names that of a form.
        is_json = looks_like_json or "json" in kind
        return None if is_json else Sent(body)
    if not is_file or (takes == "text" and looks_like_json):
        return None
    if takes == "text":
        raise Refusal(
            415,
            "invalid_request_error",
            f"Content-Type: this model takes text, not {kind}; send JSON such as "
            '{"inputs": "a text"}',
            reason="invalid",
            param="Content-Type",
            code="unsupported_media_type",
        )
    return Sent(body)


def _form(content_type: bytes, body: bytes, *, is_text: bool) -> Sent:
    found = _MULTIPART.match(content_type[:512].decode("latin-1").strip())
    if found is None:
        raise _unreadable("only multipart/form-data with a boundary can be read")
    delimiter = b"--" + found[1].strip('"').encode("latin-1")
    if body.count(delimiter) > _MOST_PARTS + 1:
        raise _unreadable(f"it has more than {_MOST_PARTS} parts; send fewer at once")
    # A delimiter is a line of its own, the first one included.
    _, *parts = (b"\r\n" + body).split(b"\r\n" + delimiter)
    if not parts or parts[-1][:2] != b"--":
        raise _unreadable("it has no end; it may have been cut off on the way")
    inputs: list[bytes | str] = []
    parameters: bytes | None = None
    for part in parts[:-1]:
        name, is_file, content = _part(part)
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
                f"{name}: is no field of this form; send files, or texts as 'inputs', and "
                "'parameters' as JSON",
                reason="invalid",
                param=name,
                code="unknown_parameter",
            )
    if not inputs:
        raise Refusal(
            422,
            "invalid_request_error",
            "inputs: is missing; send a file, or a text as 'inputs'",
            reason="invalid",
            param="inputs",
            code="missing_required_parameter",
        )
    return Sent(inputs if len(inputs) > 1 else inputs[0], parameters)


def _part(part: bytes) -> tuple[str, bool, bytes]:
    """Its name, whether it is a file, and its content."""
    end = part.find(b"\r\n\r\n", 0, _LONGEST_HEAD)
    if end < 0:
        raise _unreadable(f"a part has no head of at most {_LONGEST_HEAD} bytes")
    for line in part[:end].split(b"\r\n"):
        found = _DISPOSITION.fullmatch(line)
        name = found and _NAME.search(found[1])
        if found and name:
            shown = name[1].strip(b'"')[:100].decode("utf-8", "backslashreplace")
            return shown, _FILENAME.search(found[1]) is not None, part[end + 4 :]
    raise _unreadable("a part has no name")


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
