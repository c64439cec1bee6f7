"""A process of connections that each ask again as soon as they are answered.

It asks only while it is told to, and needs nothing but the standard library.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Iterator
from typing import Any

from on_gpu.beside import answer_questions
from on_gpu.checkpoints import images, texts
from on_gpu.running import Row
from yardstick.stats import percentile

__all__ = ["Client", "paths_of"]


class Client:
    """Args: task: of the services."""

    def __init__(self, task: str) -> None:
        self._task = task

    def rate(
        self,
        port: int,
        tokens: int | None,
        items: int,
        connections: int,
        warm: float,
        seconds: float,
    ) -> Row:
        """Ask all the while; what came in the window after the first seconds.

        Args:
            items: of each request.

        Returns:
            Items per second, latencies of requests in seconds, and how many requests failed.
        """
        requests = itertools.cycle(_requests(self._task, tokens, items))
        return asyncio.run(_load(port, requests, items, connections, warm, seconds))


async def _load(
    port: int,
    requests: Iterator[bytes],
    items: int,
    connections: int,
    warm: float,
    seconds: float,
) -> Row:
    opens = time.perf_counter() + warm
    closes = opens + seconds
    took: list[float] = []
    failed = 0

    async def call() -> None:
        nonlocal failed
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
        try:
            while time.perf_counter() < closes:
                started = time.perf_counter()
                writer.write(next(requests))
                status = await _status(reader)
                ended = time.perf_counter()
                if opens <= ended < closes:
                    took.append(ended - started)
                    failed += status != 200
        finally:
            writer.close()

    await asyncio.gather(*(call() for _ in range(connections)))
    return {
        "per_s": (len(took) - failed) * items / seconds,
        "p50": percentile(took, 0.5),
        "p99": percentile(took, 0.99),
        "failed": failed,
    }


async def _status(reader: asyncio.StreamReader) -> int:
    """Of an answer, all of which is read."""
    head = await reader.readuntil(b"\r\n\r\n")
    lines = head.lower().split(b"\r\n")
    (length,) = (int(line[15:]) for line in lines if line.startswith(b"content-length:"))
    await reader.readexactly(length)
    return int(head.split(b" ", 2)[1])


def paths_of(task: str) -> tuple[str, str, dict[str, Any]]:
    """Where a task is asked, the name of its inputs, and what else a request has."""
    if task == "feature-extraction":
        # As OpenAI's client asks by default.
        return "/v1/embeddings", "input", {"model": "-", "encoding_format": "base64"}
    return "/predict", "inputs", {}


def _requests(task: str, tokens: int | None, items: int) -> list[bytes]:
    path, name, more = paths_of(task)
    if tokens is None:
        return [_request(path, file, "image/jpeg") for file in images()]
    given = texts(tokens, is_masked=task == "fill-mask")
    chunks = [given[i : i + items] for i in range(0, len(given), items)]
    return [
        _request(
            path,
            json.dumps({name: chunk if items > 1 else chunk[0], **more}).encode(),
            "application/json",
        )
        for chunk in chunks
    ]


def _request(path: str, body: bytes, kind: str) -> bytes:
    head = (
        f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: {kind}\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


if __name__ == "__main__":
    answer_questions(lambda settings: Client(settings["task"]))
