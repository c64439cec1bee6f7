"""The outputs of one item as they come: for the thread, or the task, that asks for them.

    engine's thread                  consumer's thread, or task
    ---------------                  --------------------------
    put_part(output) ──▶ buffer ──▶  next(stream): decode, hand out
    complete / fail  ──▶ buffer ──▶  the end, or the error
                         ◀────────   close, or nothing refers to it: the place is freed

The buffer is in ``stream_outputs``.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from ..observe.record import Precedence, Timing
from .backend import Backend
from .stream_outputs import LoopOutputs, Outputs, ThreadOutputs

_Kind = TypeVar("_Kind", bound=Outputs)


class _AnyStream(Generic[_Kind]):
    """The outputs of one item, as they are asked for. Raises what ``Backend.submit`` raises.

    Args:
        max_buffered, fails_behind: as of ``Streamer.stream``.
    """

    _kind: type[_Kind]

    def __init__(
        self,
        backend: Backend,
        item: Any,
        timeout: float | None,
        precedence: Precedence,
        max_buffered: int,
        fails_behind: bool,
    ) -> None:
        self._outputs = self._kind(backend, max_buffered, fails_behind=fails_behind)
        self._outputs.submit(item, timeout, precedence)

    @property
    def timing(self) -> Timing | None:
        """Where the time of the call went; None until it is over, and unless it has succeeded."""
        answered = self._outputs.answered
        return None if answered is None else answered.timing

    @property
    def is_ready(self) -> bool:
        """Whether the next output, the end or an error is there and need not be waited for."""
        return self._outputs.is_ready

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # it was not accepted; or in a fork
            self._outputs.leave()


class Stream(_AnyStream[ThreadOutputs], Iterator[Any]):
    """The outputs of one item, from ``Streamer.stream``. For one thread.

    Leave the loop whenever you like: when nothing refers to the stream any more, or by ``close`` or
    the end of a ``with`` block, its place in the worker is freed before the next step.
    """

    _kind = ThreadOutputs

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        """Block until there is an output.

        Raises:
            StopIteration: there are no more.
            PredictTimeout: the time has ended.
            Overloaded: too many outputs waited to be asked for.
            WorkerLost: the worker died after some outputs had been handed out.
            StreamerForked: this is a forked child of the process that made the stream.
            RuntimeError: another thread waits for an output of this stream.
            Exception: whatever the model raised.
        """
        outputs = self._outputs
        outputs.backend.check_process()
        while not (taken := outputs.take()):
            outputs.wait()
        return taken[0]

    def close(self) -> None:
        """Ask for no more; the item's place is freed. A thread that waits for an output goes on."""
        self._outputs.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class AsyncStream(_AnyStream[LoopOutputs], AsyncIterator[Any]):
    """The same for asyncio, from ``Streamer.astream``. For one task of the loop it was made in.

    Leaving the loop frees the place, as does cancelling the task that waits for an output, at its
    end: who asks for more then gets a StreamerError. A wait that was cancelled alone, as by
    ``asyncio.timeout`` or ``asyncio.wait_for(anext(stream), ...)``, leaves the stream as it is: the
    next output can be waited for again.
    """

    _kind = LoopOutputs

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        """Wait for an output. Raises StopAsyncIteration at the end, and what ``Stream`` raises."""
        outputs = self._outputs
        outputs.backend.check_process()
        try:
            while not (taken := outputs.take()):
                await outputs.wait()
        except BaseException:
            del self  # whoever holds the exception holds this frame
            raise
        return taken[0]

    async def aclose(self) -> None:
        """Ask for no more; the item's place is freed. A task that waits for an output goes on."""
        self._outputs.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._outputs.close()
