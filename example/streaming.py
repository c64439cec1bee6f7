"""Streams for every web framework of the examples: outputs as server-sent events, as they come.

    data: {"output": ...}      for each output
    data: [DONE]               at the end; or, if the stream failed,
    data: {"error": "..."}

What fails before the first output is raised, so that it becomes an answer with a status of its own.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

from http_errors import MAX_PENDING, answer_to
from service_streamer import AsyncStream, Stream, Streamer, ThreadedStreamer

DEADLINE = 60  # seconds, for each stream
MEDIA_TYPE = "text/event-stream"
HEADERS = {
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # or nginx waits for more of it
}

DONE = b"data: [DONE]\n\n"
_END = object()


def events(stream: Stream, path: str) -> Iterator[bytes]:
    """Waits for the first output and returns an iterator over the events. To close it frees the
    item's place.

    Args:
        stream: the outputs.
        path: of the request, for the log.

    Raises:
        Exception: what failed before there was an output.
    """
    first = next(stream, _END)

    def rest() -> Iterator[bytes]:
        with stream:
            try:
                if first is not _END:
                    yield _event({"output": first})
                for output in stream:
                    yield _event({"output": output})
                yield DONE
            except Exception as error:
                yield _event({"error": answer_to(error, path).text})

    return rest()


async def async_events(stream: AsyncStream, path: str) -> AsyncIterator[bytes]:
    """``events`` for asyncio. To cancel the task that waits for an event frees the place, too."""
    first = await anext(stream, _END)

    async def rest() -> AsyncIterator[bytes]:
        async with stream:
            try:
                if first is not _END:
                    yield _event({"output": first})
                async for output in stream:
                    yield _event({"output": output})
                yield DONE
            except Exception as error:
                yield _event({"error": answer_to(error, path).text})

    return rest()


def _event(content: dict[str, Any]) -> bytes:
    # JSON without line breaks, which would end the event. An array has no JSON, but its list has.
    return b"data: %b\n\n" % json.dumps(content, default=lambda value: value.tolist()).encode()


class Service:
    """The streamer of a process, from the first time that it is asked for until it is closed."""

    def __init__(self, start: Callable[[], Streamer | ThreadedStreamer]) -> None:
        self._start = start
        self._lock = threading.Lock()
        self._streamer: Streamer | ThreadedStreamer | None = None

    def start(self) -> Streamer | ThreadedStreamer:
        """Returns the streamer, which the first call starts."""
        with self._lock:
            if self._streamer is None:
                self._streamer = self._start()
            return self._streamer

    def close(self) -> None:
        """Ends it, if there is one."""
        with self._lock:
            if self._streamer is not None:
                self._streamer.close(timeout=DEADLINE)


def start_drawing() -> Streamer:
    """Returns a streamer whose items are those of ``ManagedDiffusionModel``."""
    return Streamer(
        "diffusion_model:ManagedDiffusionModel",
        batch_size=32,
        worker_timeout=DEADLINE,
        max_pending=MAX_PENDING,
        shared=f"{pool}-drawing" if (pool := os.environ.get("POOL")) else None,
    )
