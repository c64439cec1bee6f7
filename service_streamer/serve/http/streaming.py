"""An answer in parts: the outputs of a stream as server-sent events.

begin     wait for the first output; what fails before it has a status of its own
send_to   the head; then each output as it comes, several at once where several are there
cut       the service ends: an error event
close     the item's place is freed

When the client disconnects, the stream is left at once, and its place in the worker is free at the
next step. While the client does not read, sending blocks and outputs wait in the stream's own
buffer, which is bounded: then the item rests.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from .events import KEEP_ALIVE, Form, Numbered, event, on_one_line
from .exchange import Disconnected, Exchange
from .refusals import Refusal

#: How many outputs of a stream may wait for its client, beside what the connection's buffer holds.
MAX_BUFFERED = 128

#: Seconds without an output until a comment is sent: proxies often end a connection after 60.
_QUIET = 15.0

_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx must not wait for more of them
)


class OutputStream(Protocol):
    """The outputs of an item, or of several, as ``AsyncStream`` has them."""

    @property
    def is_ready(self) -> bool:
        """Whether the next output, the end or an error need not be waited for."""

    async def __anext__(self) -> Any:
        """Wait for an output. Raises StopAsyncIteration at the end."""

    async def aclose(self) -> None:
        """Ask for no more. A task that waits for an output goes on."""


class EventStream:
    """A stream that is sent to one client. Belongs to one task, which must close it.

    Args:
        stream: the outputs.
        form: makes events of them.
        exchange: whose body has been read.
        on_close: called once, when it is closed.

    Attributes:
        outputs: how many have been made events of.
    """

    __slots__ = (
        "_chunk",
        "_comment",
        "_exchange",
        "_failure",
        "_form",
        "_is_gone",
        "_is_over",
        "_is_waiting",
        "_leaving",
        "_loop",
        "_on_close",
        "_sent_at",
        "_stream",
        "_timer",
        "outputs",
    )

    def __init__(
        self,
        stream: OutputStream,
        form: Form,
        exchange: Exchange,
        on_close: Callable[[EventStream], None] = lambda _: None,
    ) -> None:
        self.outputs = 0
        self._stream = stream
        self._form = form
        self._on_close: Callable[[EventStream], None] | None = on_close
        self._chunk = b""
        self._failure: Exception | None = None
        self._is_over = self._is_waiting = False
        self._sent_at = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._comment: asyncio.Task[None] | None = None  # while one is being sent
        self._loop = asyncio.get_running_loop()
        self._leaving: asyncio.Task[None] | None = None
        self._exchange: Exchange = exchange
        exchange.on_gone = self._leave
        if exchange.is_gone:
            self._leave()

    async def begin(self) -> None:
        """Wait for the first output, or for the end.

        Raises:
            Disconnected: the client has disconnected.
            Exception: it failed before there was an output.
        """
        try:
            self._chunk = await self._next()
            if self._failure is not None and not self._chunk:
                raise self._failure
        except BaseException:
            await self.close()
            raise

    async def send_to(self, refuse: Callable[[Exception], Refusal]) -> Refusal | None:
        """Send all of it, after ``begin``; closes it.

        Args:
            refuse: says what the client is told of an error.

        Returns:
            What the client was told of an error after the first output; None if there was none.

        Raises:
            Disconnected: the client has disconnected.
        """
        exchange = self._exchange
        refused = None
        try:
            exchange.start(200, _HEADERS)
            self._sent_at = self._loop.time()
            self._timer = self._loop.call_later(_QUIET, self._tick)
            chunk, self._chunk = self._chunk, b""
            while not self._is_over:
                await self._comment_is_sent()
                await exchange.write(chunk)
                self._sent_at = self._loop.time()
                chunk = await self._next()
            if self._failure is not None:
                refused = refuse(self._failure)
                chunk += on_one_line(event(refused.body))
            await self._comment_is_sent()
            await exchange.end(chunk)
        finally:
            await self.close()
        return refused

    async def cut(self, why: Exception) -> None:
        """End it with an error, which the client is told of."""
        if not self._is_over:
            self._failure = why
            await self._stream.aclose()

    async def close(self) -> None:
        """Free the item's place. Idempotent."""
        on_close, self._on_close = self._on_close, None
        if on_close is None:
            return
        self._exchange.on_gone = None
        for each in (self._leaving, self._timer, self._comment):
            if each is not None:
                each.cancel()
        await self._stream.aclose()
        # Their frames, and those of an error, hold this object: reference cycles.
        self._leaving = self._timer = self._comment = self._failure = None
        on_close(self)

    async def _next(self) -> bytes:
        """The events of all outputs that are there, after waiting for the first of them.

        At the end of the stream the last event is there, too, or what has failed is noted.
        """
        stream, form = self._stream, self._form
        chunk = []
        self._is_waiting = True
        try:
            while True:
                output = await anext(stream)
                self._is_waiting = False
                chunk.append(form.output(output))
                self.outputs += 1
                if not stream.is_ready:
                    break
        except StopAsyncIteration:
            if self._exchange.is_gone:
                raise Disconnected from None
            self._is_over = True
            if self._failure is None:
                chunk.append(form.end())
        except Exception as error:
            self._is_over = True
            self._failure = error
        finally:
            self._is_waiting = False
        return on_one_line(b"".join(chunk))

    async def _comment_is_sent(self) -> None:
        """Parts follow each other."""
        comment, self._comment = self._comment, None
        if comment is not None:
            await comment

    def _tick(self) -> None:
        """Nothing may have been sent for a while. One timer: a timer per output would cost more."""
        left = self._sent_at + _QUIET - self._loop.time()
        if left <= 0:
            if self._is_waiting and (self._comment is None or self._comment.done()):
                self._comment = self._loop.create_task(self._send_comment())
            left = _QUIET
        self._timer = self._loop.call_later(left, self._tick)

    async def _send_comment(self) -> None:
        with contextlib.suppress(Disconnected):  # as the next output will find
            await self._exchange.write(KEEP_ALIVE)
        self._sent_at = self._loop.time()

    def _leave(self) -> None:
        """The client has gone. Whoever waits for an output goes on."""
        self._leaving = self._loop.create_task(self._stream.aclose())


class JoinedStreams:
    """The outputs of several streams, as ``Numbered``. Belongs to one task.

    Each stream is asked for one output at a time, so a client that does not read stops them all. It
    fails with the first of them that fails; its owner then closes it.

    Args:
        streams: which it closes.
    """

    def __init__(self, streams: Sequence[OutputStream]) -> None:
        self._streams = streams
        self._open = len(streams)
        self._found: deque[Numbered] = deque()
        self._failure: Exception | None = None
        self._arrived = asyncio.Event()
        self._asking: set[asyncio.Task[None]] = set()  # asyncio itself does not keep tasks
        for number in range(len(streams)):
            self._ask(number)

    @property
    def is_ready(self) -> bool:
        """Whether the next output, the end or an error need not be waited for."""
        return bool(self._found) or self._failure is not None or not self._open

    async def __anext__(self) -> Numbered:
        while not self.is_ready:
            self._arrived.clear()
            await self._arrived.wait()
        failure, self._failure = self._failure, None
        if failure is not None:  # first: a wrong request is refused before an output, if possible
            try:
                raise failure
            finally:  # its traceback has this frame: a cycle
                del failure
        if not self._found:
            raise StopAsyncIteration
        found = self._found.popleft()
        self._ask(found.number)
        return found

    async def aclose(self) -> None:
        """Ask for no more. The tasks that wait for outputs end by themselves."""
        for stream in self._streams:
            await stream.aclose()

    def _ask(self, number: int) -> None:
        task = asyncio.create_task(self._next(number))
        self._asking.add(task)
        task.add_done_callback(self._asking.discard)

    async def _next(self, number: int) -> None:
        try:
            self._found.append(Numbered(number, await anext(self._streams[number])))
        except StopAsyncIteration:
            self._open -= 1
        except Exception as error:
            self._failure = error
        self._arrived.set()


async def open_streams(
    open_one: Callable[[Any], OutputStream], items: Sequence[Any]
) -> OutputStream:
    """The stream of an item, or the joined ones of several.

    Raises:
        Exception: of the first one that cannot be opened; the others are closed then.
    """
    streams: list[OutputStream] = []
    try:
        for item in items:
            streams.append(open_one(item))
    except BaseException:
        for stream in streams:
            await stream.aclose()
        raise
    return streams[0] if len(streams) == 1 else JoinedStreams(streams)
