"""What the web processes of one service tell each other, over sockets in a folder of their own.

A scrape of /metrics reaches any one of them. It asks the others, so that every scrape has all.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable
from pathlib import Path

__all__ = ["Siblings"]

#: How long a process has to answer another one, seconds, and the most that it may answer.
_PATIENCE = 1.0
_MOST_BYTES = 16 << 20


class Siblings:
    """The web processes of one service, as one of them sees them. Of one event loop.

    Args:
        folder: that only this service can look into.
        number: of this process.
        count: how many there are.
        host: how the worker host that the service has started stands, as ``hosting.standing``;
            None if there is none, or it is not known yet.
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

    async def listen(self, tell: Callable[[], bytes]) -> None:
        """Answer the others from now on.

        Args:
            tell: what to answer.

        Raises:
            OSError: the folder is gone, or its path is too long for a socket.
        """

        async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(OSError):
                writer.write(tell())
                await writer.drain()
            writer.close()

        path = self._path(self.number)
        with contextlib.suppress(FileExistsError):
            self._folder.mkdir(0o700)  # the last one deleted it, and is started again
        if self._folder.stat().st_uid != os.geteuid():
            raise PermissionError(f"{self._folder} belongs to another user")
        path.unlink(missing_ok=True)  # of a process of the same number that has died
        self._server = await asyncio.start_unix_server(answer, path)

    async def others(self) -> dict[int, bytes]:
        """What the others answer, by their numbers; without those that do not answer in time."""
        numbers = [number for number in range(self._count) if number != self.number]
        answers = await asyncio.gather(*map(self._ask, numbers))
        return {number: told for number, told in zip(numbers, answers, strict=True) if told}

    def close(self) -> None:
        """Answer nobody any more. The last one deletes the folder."""
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
