"""Several streams as one: the outputs of all of them, as they come."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from .events import Numbered
from .streaming import OutputStream


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
