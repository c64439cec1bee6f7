"""A request without a network, for what answers it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Headers = Sequence[tuple[bytes, bytes]]


class StubExchange:
    """An ``Exchange`` whose body is there.

    Attributes:
        parts: of the answer.
        status: of the answer; 0 before it.
    """

    def __init__(self, headers: Headers = (), body: bytes = b"{}") -> None:
        self.headers = headers
        self.is_read = True
        self.is_gone = False
        self.on_gone: Callable[[], None] | None = None
        self.key = self.model = ""
        self.request_id = "stub"
        self.status = 0
        self.parts: list[bytes] = []
        self._body = body

    def take(self) -> bytes:
        body, self._body = self._body, b""
        return body

    async def more(self) -> bytes:
        return self.take()

    def answer(self, status: int, headers: Headers, body: bytes) -> None:
        self.start(status, headers)
        self.parts.append(body)

    def answer_early(self, status: int, headers: Headers, body: bytes, most: int) -> None:
        self.answer(status, headers, body)

    def start(self, status: int, headers: Headers) -> None:
        self.status = status

    async def write(self, part: bytes) -> None:
        self.parts.append(part)

    async def end(self, part: bytes = b"") -> None:
        await self.write(part)
