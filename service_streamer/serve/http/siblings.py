"""Metrics exchange between the web processes of a service, over sockets in a private folder.

A scrape of /metrics reaches one of them, which asks the others, so that every scrape is complete.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable
from pathlib import Path

__all__ = ["Siblings"]

#: Seconds to wait for a process's answer, and its maximum size in bytes.
_PATIENCE = 1.0
_MOST_BYTES = 16 << 20


class Siblings:
    """The service's web processes, seen from one of them. Belongs to one event loop.

    Args:
        folder: private folder of the service.
        number: number of this process.
        count: number of web processes.
        host: state of the worker host that the service started, as ``hosting.standing``; returns
            None if there is no host, or its state is unknown.
    """

    def __init__(
        self,
        folder: Path,
        number: int,
        count: int,
        host: Callable[[], tuple[str, str] | None] = lambda: None,
    ) -> None:
        self._folder = folder
        self.number = number
        self._count = count
        self.host = host
        self._server: asyncio.Server | None = None

    async def listen(self, snapshot: Callable[[], bytes]) -> None:
        """Answer the others from now on, with the result of ``snapshot``.

        Raises:
            OSError: the folder is gone, or its path is too long for a socket.
        """

        async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(OSError):
                writer.write(snapshot())
                await writer.drain()
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

    async def others(self) -> dict[int, bytes]:
        """The others' answers by number, without those that did not answer in time."""
        numbers = [number for number in range(self._count) if number != self.number]
        answers = await asyncio.gather(*map(self._ask, numbers))
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

    async def _ask(self, number: int) -> bytes:
        writer: asyncio.StreamWriter | None = None
        try:
            async with asyncio.timeout(_PATIENCE):
                reader, writer = await asyncio.open_unix_connection(
                    self._path(number), limit=_MOST_BYTES
                )
                return await reader.read()
        except (OSError, TimeoutError):
            return b""
        finally:
            if writer is not None:
                writer.close()
