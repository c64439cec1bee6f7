"""One request and its answer, as endpoints see them, whatever speaks HTTP.

``connection.py`` has those of our own connections, ``asgi.py`` those of any ASGI server.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

#: Names in lower case.
Headers = Sequence[tuple[bytes, bytes]]


class Disconnected(Exception):
    """The client has disconnected: no answer can be sent."""


class Exchange(Protocol):
    """A request and its answer. Belongs to one task of one event loop.

    Attributes:
        headers: of the request.
        is_read: whether the whole body has arrived.
        is_gone: whether the client has disconnected.
        on_gone: called in the loop when the client disconnects before the answer is complete.
        key, model: names of the API key and of the model, for the access log; empty if unknown.
    """

    headers: Headers
    is_read: bool
    is_gone: bool
    on_gone: Callable[[], object] | None
    key: str
    model: str

    @property
    def request_id(self) -> str:
        """The client's X-Request-ID, or one made for the request. Every answer repeats it."""

    def take(self) -> bytes:
        """What has arrived of the body since the last time."""

    async def more(self) -> bytes:
        """Wait for more of the body; empty at its end. Raises Disconnected."""

    def answer(self, status: int, headers: Headers, body: bytes) -> None:
        """Send a whole answer. To a client that has gone it is dropped.

        Args:
            headers: besides those of the length, the date and the connection.
        """

    def answer_early(self, status: int, headers: Headers, body: bytes, most: int) -> None:
        """Answer before the body has arrived, and close the connection afterwards.

        Many clients read the answer only after they have sent everything. So the body is received
        and dropped.

        Args:
            most: bytes to drop at most.
        """

    def start(self, status: int, headers: Headers) -> None:
        """Begin an answer whose body comes in parts."""

    async def write(self, part: bytes) -> None:
        """Send a part, and wait while the client does not read. Raises Disconnected."""

    async def end(self, part: bytes = b"") -> None:
        """Send the last part. Raises Disconnected."""


#: Answers an exchange.
Application = Callable[[Exchange], Awaitable[None]]
