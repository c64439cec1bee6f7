"""The access log: one line for each request, when its answer is complete or its client has gone.

A line never has the body, the query, a header besides X-Request-ID, or a key: of a key it has the
name. Clients choose the path, so what could end a line or begin another field is escaped.
"""

from __future__ import annotations

import logging
from typing import Any
from urllib.parse import quote

_logger = logging.getLogger("service_streamer.access")

#: Maximum bytes of a path; the rest is cut off.
_LONGEST_PATH = 2048

_PLAIN = "!#$&'()*+,/:;<=>?@[]^`{|}~"


class Line(dict[str, Any]):
    """A line: a mapping for logs in JSON, and a text for others. Without what is None."""

    def __str__(self) -> str:
        method, path, status = self["method"], self["path"], self["status"]
        rest = [f"{name}={each}" for name, each in self.items() if name not in _IN_FRONT]
        return " ".join([f"{method} {path} {status}", *rest])


_IN_FRONT = ("method", "path", "status")


def _safe(value: bytes | str) -> str:
    """In printable ASCII without spaces, quotes, backslashes and percent signs of its own."""
    return quote(value, safe=_PLAIN)


def _path(target: bytes) -> str:
    """The path of a request's target, without the query, which may hold what is private."""
    path = target.partition(b"?")[0].partition(b"#")[0]
    # A percent sign is the client's own escape, and safe.
    return "%".join(map(_safe, path[:_LONGEST_PATH].split(b"%")))


def log_request(
    *,
    method: bytes,
    target: bytes,
    status: int,
    size: int,
    seconds: float,
    request_id: str,
    client: tuple[str, int] | None,
    key: str,
    model: str,
) -> None:
    """Write the line of a request that is over.

    Args:
        size: bytes of the answer's body, without its framing.
        key, model: their names; empty if unknown.
    """
    line = Line(
        method=method.decode("ascii"),
        path=_path(target),
        status=status,
        bytes=size,
        seconds=round(seconds, 6),
        request_id=request_id,
    )
    if client is not None:
        line["client"] = client[0]
    if key:
        line["key"] = _safe(key)
    if model:
        line["model"] = _safe(model)
    _logger.info(line)


def log_unreadable(client: tuple[str, int] | None, size: int) -> None:
    """Write the line of bytes in place of a head that are not HTTP: they were answered with 400."""
    line = Line(method="-", path="-", status=400, bytes=size)
    if client is not None:
        line["client"] = client[0]
    _logger.info(line)
