"""Figures of the web processes of a service, exchanged over sockets in a private folder.

A request for /metrics or /stats reaches one of them, which asks the others, so that every answer
is complete.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable
from pathlib import Path

#: The question for all metrics of a process; and, before the name of a model, for its requests.
METRICS = b"metrics"
_REQUESTS = b"requests "

#: Seconds to wait for a process's answer, and its maximum size in bytes.
_PATIENCE = 1.0
_MOST_BYTES = 16 << 20


def question_of(model: str) -> bytes:
    """The question for a model's requests. Names have no line ends."""
    return _REQUESTS + model.encode()


class Siblings:
    """The service's web processes, seen from one of them. Belongs to one event loop.

    Args:
        folder: private folder of the service.
        number: number of this process.
        count: number of web processes.
    """

    def __init__(self, folder: Path, number: int, count: int) -> None:
        self._folder = folder
        self.number = number
        self._count = count
        self._server: asyncio.Server | None = None

    async def listen(self, metrics: Callable[[], bytes], requests: Callable[[str], bytes]) -> None:
        """Answer the others from now on.

        Args:
            metrics: all of this process.
            requests: those of a model, by its name; empty if there is no such model.

        Raises:
            OSError: the folder is gone, or its path is too long for a socket.
        """

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                with contextlib.suppress(OSError, ValueError):
                    question = (await reader.readline()).rstrip()
                    if question == METRICS:
                        writer.write(metrics())
                    elif question.startswith(_REQUESTS):
                        name = question.removeprefix(_REQUESTS).decode("utf-8", "replace")
                        writer.write(requests(name))
                    await writer.drain()
            finally:
                writer.close()

        path = self._path(self.number)
        with contextlib.suppress(FileExistsError):
            self._folder.mkdir(
                0o700
            )  # it is deleted with the last process, and may be needed again
        if self._folder.stat().st_uid != os.geteuid():
            raise PermissionError(f"{self._folder} belongs to another user")
        path.unlink(missing_ok=True)  # left by a dead process of the same number
        self._server = await asyncio.start_unix_server(answer, path)

    async def others(self, question: bytes) -> dict[int, bytes]:
        """The others' answers by number, without those that did not answer in time."""
        numbers = [number for number in range(self._count) if number != self.number]
        answers = await asyncio.gather(*(self._ask(number, question) for number in numbers))
        return {number: each for number, each in zip(numbers, answers, strict=True) if each}

    def close(self) -> None:
        """Stop answering. The last process deletes the folder."""
        if self._server is not None:
            self._server.close()
        with contextlib.suppress(OSError):
            self._path(self.number).unlink(missing_ok=True)
            os.rmdir(self._folder)

    def _path(self, number: int) -> Path:
        return self._folder / str(number)

    async def _ask(self, number: int, question: bytes) -> bytes:
        writer: asyncio.StreamWriter | None = None
        try:
            async with asyncio.timeout(_PATIENCE):
                reader, writer = await asyncio.open_unix_connection(
                    self._path(number), limit=_MOST_BYTES
                )
                writer.write(question + b"\n")
                return await reader.read()
        except (OSError, TimeoutError):
            return b""
        finally:
            if writer is not None:
                writer.close()
