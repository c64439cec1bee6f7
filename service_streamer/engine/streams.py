"""The outputs of one item as they come: for the thread, or the task, that asks for them.

    engine's thread                  consumer's thread, or task
    ---------------                  --------------------------
    put_part(output) ──▶ buffer ──▶  next(stream): decode, hand out
    complete / fail  ──▶ buffer ──▶  the end, or the error
                         ◀────────   close, or nothing refers to it: the place is freed

What the consumer has not asked for yet waits in a buffer of its own, so one that lags holds up
nobody. If it lags too far, its stream rests until it has caught up, or fails, as it has chosen.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import AsyncIterator, Iterator
from types import TracebackType
from typing import Any, Self

from ..errors import Overloaded
from ..observe.record import Call, Precedence, Timing
from ..workers.protocol import Failure
from .backend import Accepted, Backend, Mailbox, mailbox_of

__all__ = ["AsyncStream", "Stream"]


class _Outputs:
    """Where the outputs of a call go until they are asked for. The engine holds it with the call.

    Args:
        backend: accepts the call.
        max_buffered: from so many outputs on that wait for the consumer, its item rests.
        fails_behind: the stream fails then instead.
    """

    def __init__(self, backend: Backend, max_buffered: int, *, fails_behind: bool) -> None:
        #: Set by the backend before the call can end, and let go of when it ends.
        self.call: Accepted | None = None
        self.backend = backend
        self.is_over = False  # nothing more comes
        self.answered: Accepted | None = None
        self.buffer: deque[Any] = deque()  # encoded
        self._max_buffered = max_buffered
        #: Beyond it the stream fails. A worker goes on until it is told, and has at most as many
        #: outputs under way as fit into its pipe: some thousands, if they are tiny.
        self._most = max_buffered if fails_behind else 4 * max_buffered + 8192
        self._is_held = False
        self._failure: Failure | None = None

    def submit(
        self, item: Any, timeout: float | None, precedence: Precedence, *, more: bool
    ) -> None:
        """Raises what ``Backend.submit`` raises."""
        # Watched, since a consumer that is busy elsewhere does not look at the time.
        self.backend.submit(Call([item], self, timeout, precedence, True, more, is_stream=True))

    # -- in the engine's thread

    def put_part(self, output: Any) -> Mailbox | None:
        """An output has come.

        Returns:
            The mailbox to which the consumer's wake-up was added, and that is to be posted.
        """
        if self.is_over:  # the consumer has just gone
            return None
        call, size = self.call, len(self.buffer)
        if size < self._most:
            self.buffer.append(output)
            mailbox = self.wake()
            # Again now and then, if more come all the same: the item is with another worker by now.
            is_due = not self._is_held or size % self._max_buffered == 0
            if size >= self._max_buffered and is_due and call is not None:
                self.backend.hold(call, is_held=True)
                self._is_held = True
                self._resume()  # the consumer may have caught up before that was set
            return mailbox
        lagging = Overloaded(
            f"{size} outputs of the stream wait for their consumer, which is too slow; "
            "max_buffered sets how many may"
        )
        self.fail(Failure(lagging))
        if call is not None:
            self.backend.withdraw(call)
        return None

    def complete(self, outputs: list[Any]) -> None:
        """All outputs have come; these are those that have not been handed out yet."""
        self.answered, self.call = self.call, None
        self.buffer += outputs
        self.is_over = True
        self.wake_now()

    def fail(self, failure: Failure) -> None:
        """No more outputs come. Those that have come are handed out before the error."""
        self.call = None
        self._failure = failure
        self.is_over = True
        self.wake_now()

    def wake_now(self) -> None:
        """Let the consumer go on at once."""
        mailbox = self.wake()
        if mailbox is not None:
            mailbox.post_looks()

    def wake(self) -> Mailbox | None:
        """Let the consumer go on, when the mailbox that is returned is posted; at once for None."""
        raise NotImplementedError

    # -- in that of the consumer

    def taken(self) -> Any:
        """The next output, decoded."""
        output = self.buffer.popleft()
        if self._is_held:
            self._resume()
        return self.backend.decode([output])[0]

    def _resume(self) -> None:
        """Let the item go on if half of the buffer is free."""
        call = self.call
        if call is not None and 2 * len(self.buffer) <= self._max_buffered:
            self._is_held = False
            self.backend.hold(call, is_held=False)

    def error(self) -> BaseException | None:
        """What the call failed with, once."""
        failure, self._failure = self._failure, None
        return None if failure is None else failure.exception()

    def close(self) -> None:
        """The consumer wants no more. If it waits, in another thread or task, it goes on."""
        self.leave()
        self.wake_now()

    def leave(self) -> None:
        """Nobody waits any more: the item's place is freed. A finalizer may call this."""
        call, self.call = self.call, None
        self.is_over = True
        self.buffer.clear()
        self._failure = None
        if call is not None:
            self.backend.withdraw(call)


class _ThreadOutputs(_Outputs):
    """For a thread that waits."""

    def __init__(self, backend: Backend, max_buffered: int, *, fails_behind: bool) -> None:
        super().__init__(backend, max_buffered, fails_behind=fails_behind)
        self._is_waiting = False
        self._baton = threading.Lock()  # released to wake the consumer
        self._baton.acquire()
        self._seat = threading.Lock()  # of the consumer, while it waits

    def wake(self) -> None:
        if self._is_waiting:
            self._is_waiting = False
            with contextlib.suppress(RuntimeError):  # it has been released already
                self._baton.release()

    def wait(self) -> None:
        """Block until something has come; now and then it returns sooner."""
        self._is_waiting = True
        # What comes from now on wakes us; what came just before is seen here.
        if not (self.buffer or self.is_over):
            self._baton.acquire()
        self._is_waiting = False

    def sit_down(self) -> None:
        """Before ``wait``. Raises RuntimeError if another thread waits: one of them would hang."""
        if not self._seat.acquire(blocking=False):
            raise RuntimeError("another thread waits for the next output of this stream")

    def get_up(self) -> None:
        self._seat.release()


class _LoopOutputs(_Outputs):
    """For a task of an asyncio loop."""

    def __init__(self, backend: Backend, max_buffered: int, *, fails_behind: bool) -> None:
        super().__init__(backend, max_buffered, fails_behind=fails_behind)
        self.loop = asyncio.get_running_loop()
        self.mailbox = mailbox_of(self.loop)
        self._waiter: asyncio.Future[None] | None = None

    def wake(self) -> Mailbox | None:
        if self._waiter is None:
            return None
        self.mailbox.add_look(self._look)
        return self.mailbox

    def _look(self) -> None:
        """In the loop: something has come."""
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def check_alone(self) -> None:
        """Raises RuntimeError if another task waits: it would wait for ever."""
        if self._waiter is not None:
            raise RuntimeError("another task waits for the next output of this stream")

    async def wait(self) -> None:
        """Wait until something has come."""
        self._waiter = self.loop.create_future()
        try:
            if not (self.buffer or self.is_over):
                await self._waiter
        finally:
            self._waiter = None


class Stream(Iterator[Any]):
    """The outputs of one item, from ``Streamer.stream``. For one thread.

    Leave the loop whenever you like: when nothing refers to the stream any more, or by ``close`` or
    the end of a ``with`` block, its place in the worker is freed before the next step.
    """

    def __init__(
        self,
        backend: Backend,
        item: Any,
        timeout: float | None,
        precedence: Precedence,
        max_buffered: int,
        fails_behind: bool,
    ) -> None:
        self._outputs = _ThreadOutputs(backend, max_buffered, fails_behind=fails_behind)
        self._outputs.submit(item, timeout, precedence, more=False)

    @property
    def timing(self) -> Timing | None:
        """Where the time of the call went; None until it is over, and unless it has succeeded."""
        answered = self._outputs.answered
        return None if answered is None else answered.timing

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
        while not outputs.buffer:
            if outputs.is_over:
                if outputs.buffer:  # they came in between
                    break
                error = outputs.error()
                if error is not None:
                    raise error
                raise StopIteration
            outputs.backend.check_not_in_callback()
            outputs.sit_down()
            try:
                outputs.wait()
            except BaseException:  # a KeyboardInterrupt, or the greenlet is killed
                outputs.leave()
                raise
            finally:
                outputs.get_up()
        return outputs.taken()

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

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # it was not accepted; or in a fork
            self._outputs.leave()


class AsyncStream(AsyncIterator[Any]):
    """The same for asyncio, from ``Streamer.astream``. For one task of the loop it was made in.

    Cancelling the task that waits for an output, or leaving the loop, frees the place.
    """

    def __init__(
        self,
        backend: Backend,
        item: Any,
        timeout: float | None,
        precedence: Precedence,
        max_buffered: int,
        fails_behind: bool,
    ) -> None:
        self._outputs = _LoopOutputs(backend, max_buffered, fails_behind=fails_behind)
        self._outputs.submit(item, timeout, precedence, more=True)
        self._outputs.mailbox.flush_soon(backend)

    @property
    def timing(self) -> Timing | None:
        """As of ``Stream``."""
        answered = self._outputs.answered
        return None if answered is None else answered.timing

    @property
    def is_ready(self) -> bool:
        """Whether the next output, the end or an error is there and need not be waited for."""
        outputs = self._outputs
        return bool(outputs.buffer) or outputs.is_over

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        """Wait for an output. Raises StopAsyncIteration at the end, and what ``Stream`` raises."""
        outputs = self._outputs
        outputs.backend.check_process()
        while not outputs.buffer:
            if outputs.is_over:
                if outputs.buffer:
                    break
                error = outputs.error()
                if isinstance(error, (StopIteration, StopAsyncIteration)):  # no coroutine may
                    raise RuntimeError(f"the model raised {type(error).__name__}") from error
                if error is not None:
                    raise error
                raise StopAsyncIteration
            outputs.check_alone()
            try:
                await outputs.wait()
            except BaseException:  # the task is cancelled
                outputs.leave()
                raise
        return outputs.taken()

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

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # it was not accepted; or in a fork
            self._outputs.leave()
