"""The access log: one line for each request, when its answer is complete or its client has gone.

A line never has the body, the query, a header besides X-Request-ID, or a key: of a key it has the
name. Clients choose the path, so what could end a line or begin another field is escaped.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from time import perf_counter
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from .exchange import Headers
from .http_exchange import HTTPExchange

if TYPE_CHECKING:
    from .connection import Connection

_logger = logging.getLogger("service_streamer.access")

#: Status of a request whose client disconnected before the end of the answer, as nginx has it.
_GONE = 499

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


class AccessLog:
    """Writes the lines. Belongs to one event loop.

    Args:
        write: gets each line.
    """

    def __init__(self, write: Callable[[Line], None] = _logger.info) -> None:
        self._write = write

    def answered(self, exchange: LoggedExchange, status: int) -> None:
        """A request is over."""
        client = exchange.carrier.client
        line = Line(
            method=exchange.method.decode("ascii"),
            path=_path(exchange.target),
            status=status,
            bytes=exchange.sent,
            seconds=round(perf_counter() - exchange.began, 6),
            request_id=exchange.request_id,
        )
        if client is not None:
            line["client"] = client[0]
        if exchange.key:
            line["key"] = _safe(exchange.key)
        if exchange.model:
            line["model"] = _safe(exchange.model)
        self._write(line)

    def unreadable(
        self, client: tuple[str, int] | None, exchange: HTTPExchange | None, size: int
    ) -> None:
        """Bytes that are not HTTP were answered with 400.

        Args:
            exchange: whose body they should be; None if they should be a head.
            size: bytes of the answer's body.
        """
        if isinstance(exchange, LoggedExchange):
            exchange.sent = size
            exchange.log_once(400)
        else:
            line = Line(method="-", path="-", status=400, bytes=size)
            if client is not None:
                line["client"] = client[0]
            self._write(line)


class LoggedExchange(HTTPExchange):
    """A request that is logged once, at its end.

    Attributes:
        began: when its head had arrived, by ``perf_counter``.
        sent: bytes of the answer's body, without its framing.
    """

    __slots__ = ("_log", "_status", "began", "sent")

    def __init__(self, log: AccessLog, carrier: Connection, *request: Any, **more: Any) -> None:
        super().__init__(carrier, *request, **more)
        self._log: AccessLog | None = log
        self._status = self.sent = 0
        self.began = perf_counter()

    @classmethod
    def to(cls, log: AccessLog) -> Callable[..., HTTPExchange]:
        """What makes those of a log."""
        return functools.partial(cls, log)

    def log_once(self, status: int) -> None:
        log, self._log = self._log, None
        if log is not None:
            log.answered(self, status)

    def answer(self, status: int, headers: Headers, body: bytes) -> None:
        self._count(body)
        super().answer(status, headers, body)

    async def write(self, part: bytes) -> None:
        self._count(part)
        await super().write(part)

    async def end(self, part: bytes = b"") -> None:
        self._count(part)
        await super().end(part)

    def _count(self, part: bytes) -> None:
        if not (self.is_gone or self.is_over or self.method == b"HEAD"):
            self.sent += len(part)

    def lost(self) -> None:
        if not self.is_over:
            self.log_once(_GONE)
        super().lost()

    def _head(self, status: int, headers: Headers, more: bytes) -> bytes:
        self._status = status
        return super()._head(status, headers, more)

    def _is_complete(self) -> None:
        super()._is_complete()
        self.log_once(self._status)
