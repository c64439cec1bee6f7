"""Cross-origin requests: which web pages may call the service from a browser.

Keys travel in headers that a page has to set itself, never in cookies, so answers do not allow
credentials, and ``*`` is no risk to them.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable

from .exchange import HTTPExchange
from .refusals import Refusal

_METHODS = b"GET, HEAD, POST"

#: Headers of answers that scripts may read.
_EXPOSED = (
    b"access-control-expose-headers: X-Request-ID, Server-Timing, Retry-After, "
    b"Inference-Header-Content-Length\r\n"
)

#: Seconds that browsers may keep the answer of a preflight. Some keep none longer than 2 hours.
_MAX_AGE = b"3600"

#: Names of headers, as a browser lists them.
_NAMES = re.compile(rb"[A-Za-z0-9!#$%&'*+.^_`|~, -]{1,4096}")

_JSON = (b"content-type", b"application/json")

Site = Callable[[HTTPExchange], Awaitable[None]]


class CrossOrigin:
    """Answers preflights, and adds the headers that browsers ask for to all other answers.

    Args:
        site: answers all other requests.
        origins: those that are allowed, such as https://example.com; ``*`` allows all.
    """

    def __init__(self, site: Site, origins: tuple[str, ...]) -> None:
        self._site = site
        self._takes_all = "*" in origins
        self._origins = frozenset(origin.encode() for origin in origins)

    async def __call__(self, exchange: HTTPExchange) -> None:
        """Raises what the site raises."""
        origin = asked = None
        wanted = b""
        for name, value in exchange.headers:
            if name == b"origin":
                origin = value
            elif name == b"access-control-request-method":
                asked = value
            elif name == b"access-control-request-headers":
                wanted = value
        exchange.more_lines = self._lines(origin)
        if exchange.method == b"OPTIONS" and origin is not None and asked is not None:
            self._answer(exchange, origin, wanted)
        else:
            await self._site(exchange)

    def _allows(self, origin: bytes) -> bool:
        return self._takes_all or origin in self._origins

    def _lines(self, origin: bytes | None) -> bytes:
        if self._takes_all:
            return b"access-control-allow-origin: *\r\n" + _EXPOSED
        # A cache must not give one origin the answer for another one.
        if origin is not None and self._allows(origin):
            return b"access-control-allow-origin: %b\r\nvary: Origin\r\n%b" % (origin, _EXPOSED)
        return b"vary: Origin\r\n"

    def _answer(self, exchange: HTTPExchange, origin: bytes, wanted: bytes) -> None:
        if not self._allows(origin):
            shown = origin[:100].decode("latin-1")
            refused = Refusal(
                403,
                f"Origin: web pages of {shown!r} may not call this service; the operator can allow "
                "it with --cors-origin",
                param="Origin",
                code="origin_not_allowed",
            )
            exchange.answer(refused.status, (_JSON,), refused.body)
            return
        headers = [
            (b"access-control-allow-methods", _METHODS),
            (b"access-control-max-age", _MAX_AGE),
            (b"vary", b"Access-Control-Request-Method, Access-Control-Request-Headers"),
        ]
        if _NAMES.fullmatch(wanted):
            headers.append((b"access-control-allow-headers", wanted))
        exchange.answer(204, headers, b"")
