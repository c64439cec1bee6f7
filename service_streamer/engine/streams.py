"""The outputs of one item as they come: for the thread, or the task, that asks for them.

    engine's thread                  consumer's thread, or task
    ---------------                  --------------------------
    put_part(output) ──▶ buffer ──▶  next(stream): decode, hand out
    end(outcome)     ──▶ buffer ──▶  the end, or the error
                         ◀────────   close, or nothing refers to it: the place is freed

What the consumer has not asked for yet waits in a buffer of its own, so one that lags holds up
no other. If it lags too far, its stream rests until it has caught up, or fails, as it has chosen.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import weakref
from collections import deque
from collections.abc import AsyncIterator, Iterator
from typing import Any, Self

from ..errors import Overloaded, StreamerError
from ..observe.record import Call, Timing
from ..workers.protocol import Failure
from .backend import Backend, Mailbox, Outcome, mailbox_of
from .threads import Doorbell


class Outputs:
    """Where the outputs of a call go until they are asked for. The engine has it with the call."""

    #: What says that no more come.
    stop: type[Exception]

    def __init__(self, backend: Backend, max_buffered: int, *, fails_behind: bool) -> None:
        self.call: Any = None
        self.backend = backend
        self.is_over = False  # nothing more comes
        self.buffer: deque[Any] = deque()  # encoded
        self._max_buffered = max_buffered
        #: Beyond it the stream fails. A worker goes on until it is told, and has at most as many
        #: outputs under way as fit into its pipe: some thousands, if they are tiny.
        self._max_kept = max_buffered if fails_behind else 4 * max_buffered + 8192
        self._is_held = False
        self._failure: Failure | None = None
        self._why_cut_off = ""

    def submit(self, call: Call) -> None:
        """Raises what ``Backend.submit`` raises."""
        call.reply = self
        call.is_watched = True  # a consumer that is busy elsewhere does not look at the time
        self.backend.submit(call)

    # -- in the engine's thread

    def put_part(self, output: Any) -> Mailbox | None:
        """An output has come; returns the mailbox that is to wake the consumer, if one is."""
        if self.is_over:  # the consumer has just gone
            return None
        size = len(self.buffer)
        if size >= self._max_kept:
            lagging = Overloaded(
                f"{size} outputs of the stream wait for their consumer, which is too slow; "
                "max_buffered sets how many may"
            )
            self.end(Failure(lagging))
            self.backend.withdraw(self.call)
            return None
        self.buffer.append(output)
        mailbox = self.wake()
        # Again now and then, if more come all the same: the item is with another worker by now.
        if size >= self._max_buffered and (not self._is_held or size % self._max_buffered == 0):
            self.backend.hold(self.call, is_held=True)
            self._is_held = True
            self._resume()  # the consumer may have caught up before that was set
        return mailbox

    def end(self, outcome: Outcome) -> None:
        """The last outputs have come, or no more come; all are handed out before the error."""
        if isinstance(outcome, Failure):
            self._failure = outcome
        else:
            self.buffer += outcome
        self.is_over = True
        self.wake_now()

    def wake_now(self) -> None:
        """Let the consumer go on at once."""
        mailbox = self.wake()
        if mailbox is not None:
            mailbox.deliver_soon()

    def wake(self) -> Mailbox | None:
        """Let the consumer go on: at once, or when the mailbox that is returned delivers."""
        raise NotImplementedError

    # -- in that of the consumer

    @property
    def is_ready(self) -> bool:
        """Whether ``take`` has something to say."""
        return bool(self.buffer) or self.is_over

    def take(self) -> list[Any]:
        """The next output, decoded; none if it has yet to come. Raises what ends the stream."""
        is_over = self.is_over  # first, since the last outputs are there when it is set
        if self.buffer:
            try:
                outputs = [self.buffer.popleft()]
            except IndexError:  # another thread has taken it just now
                return []
            if self._is_held:
                self._resume()
            return self.backend.decode(outputs)
        if is_over:
            raise self._end_error()
        return []

    def _resume(self) -> None:
        """Let the item go on if half of the buffer is free."""
        if not self.is_over and 2 * len(self.buffer) <= self._max_buffered:
            self._is_held = False
            try:
                self.backend.hold(self.call, is_held=False)
            except BaseException:  # of a signal handler: with the next output again
                self._is_held = True
                raise

    def _end_error(self) -> BaseException:
        """What the call failed with, once; then that there are no more outputs."""
        if self._why_cut_off:  # each time, since the end would say that these were all outputs
            return StreamerError(self._why_cut_off)
        failure, self._failure = self._failure, None
        if failure is None:
            return self.stop()
        error = failure.exception()
        if isinstance(error, (StopIteration, StopAsyncIteration)):  # it would be taken for the end
            wrong = RuntimeError(f"the model raised {type(error).__name__}")
            wrong.__cause__ = error
            return wrong
        return error

    def close(self) -> None:
        """The consumer wants no more. If it waits, in another thread or task, it goes on."""
        self.leave()
        self.wake_now()

    def cut_off(self, why: str) -> None:
        """The consumer has ended while it waited: free the place, and tell whoever asks next."""
        if not self.is_over:
            self._why_cut_off = why
            self.leave()

    def leave(self) -> None:
        """The consumer has gone: the item's place is freed. A finalizer may call this."""
        was_over, self.is_over = self.is_over, True
        self.buffer.clear()
        self._failure = None
        if self.call is not None and not was_over:
            self.backend.withdraw(self.call)


class ThreadOutputs(Outputs):
    """For a thread that waits."""

    stop = StopIteration

    def __init__(self, backend: Backend, max_buffered: int, *, fails_behind: bool) -> None:
        super().__init__(backend, max_buffered, fails_behind=fails_behind)
        self._doorbell = Doorbell()
        self.seat = threading.Lock()  # of the consumer, while it waits

    def wake(self) -> None:
        self._doorbell.ring()

    def wait(self) -> None:
        """Block until something has come; now and then it returns sooner."""
        self.backend.check_not_in_callback()
        if not self.seat.acquire(blocking=False):  # one output would wake only one of the two
            raise RuntimeError("another thread waits for the next output of this stream")
        try:
            if not self.is_ready:
                self._doorbell.wait(None)
        except BaseException as error:
            # The end of a time does not end the stream: gevent.Timeout, or a handler of a signal.
            is_killed = type(error).__name__ == "GreenletExit"
            if is_killed or isinstance(error, (KeyboardInterrupt, SystemExit)):
                self.cut_off(
                    f"{type(error).__name__} interrupted the wait for an output of this stream, so "
                    "the stream was closed before its end"
                )
            raise
        finally:
            self.seat.release()


class LoopOutputs(Outputs):
    """For a task of an asyncio loop."""

    stop = StopAsyncIteration

    def __init__(self, backend: Backend, max_buffered: int, *, fails_behind: bool) -> None:
        super().__init__(backend, max_buffered, fails_behind=fails_behind)
        self.loop = asyncio.get_running_loop()
        self.mailbox = mailbox_of(self.loop)
        self._waiter: asyncio.Future[Any] | None = None
        #: The task in which a wait was cancelled, if no task has waited since.
        self.cancelled_in: asyncio.Task[Any] | None = None

    def submit(self, call: Call) -> None:
        call.more = True
        super().submit(call)
        self.mailbox.flush_soon(self.backend)

    def wake(self) -> Mailbox | None:
        waiter = self._waiter
        if waiter is None:
            return None
        self.mailbox.put(waiter, None)
        return self.mailbox

    async def wait(self) -> None:
        """Wait until something has come."""
        if self._waiter is not None:
            raise RuntimeError("another task waits for the next output of this stream")
        if asyncio.get_running_loop() is not self.loop:
            raise RuntimeError("this stream was made in another event loop")
        self._waiter = self.loop.create_future()
        self.cancelled_in = None
        try:
            if not self.is_ready:
                await self._waiter
        except asyncio.CancelledError:
            self._leave_with_task()
            raise
        except BaseException:  # the coroutine is closed
            self.cut_off(
                "the coroutine that waited for an output of this stream was closed, and the stream "
                "with it, before its end"
            )
            raise
        finally:
            self._waiter = None

    def _leave_with_task(self) -> None:
        """A wait was cancelled: leave the stream at the end of this task, unless it waits again.

        Whether the task ends, or only a time within it has ended, is not known before. And code
        that looks at how the task ended holds its frames, and with these the stream, for as long.
        A task that was made for that wait alone, as by ``asyncio.wait_for``, is not waited for:
        another one goes on.
        """
        task = asyncio.current_task()
        if task is None:
            return
        coroutine = task.get_coro()
        frame = getattr(coroutine, "cr_frame", None) or getattr(coroutine, "gi_frame", None)
        if frame is None or frame.f_globals.get("__name__") in _HELPERS:  # anext has no frame
            return
        if task not in _cancelled:
            _cancelled[task] = weakref.WeakSet()
            task.add_done_callback(_leave_streams)
        _cancelled[task].add(self)
        self.cancelled_in = task


#: Streams for which a wait was cancelled, by the task in which that was.
_cancelled: weakref.WeakKeyDictionary[asyncio.Task[Any], weakref.WeakSet[LoopOutputs]]
_cancelled = weakref.WeakKeyDictionary()


def _leave_streams(task: asyncio.Task[Any]) -> None:
    """A task has ended in which waits for outputs were cancelled."""
    for outputs in _cancelled.pop(task, ()):
        if outputs.cancelled_in is task:  # else another one goes on
            outputs.cancelled_in = None  # it may hold the frames that hold this stream
            outputs.cut_off(_TASK_HAS_ENDED)


_TASK_HAS_ENDED = (
    "the task that waited for an output of this stream was cancelled and has ended, so the stream "
    "was closed before its end; to end a wait only, use asyncio.timeout(...) in the task that goes "
    "on, or asyncio.wait_for(anext(stream), ...)"
)

#: Where the coroutine of a task comes from that was made for one wait.
_HELPERS = (__name__, "asyncio.tasks")


class _AnyStream:
    """The outputs of one item, as they are asked for. Raises what ``Backend.submit`` raises."""

    _kind: type[Outputs]

    def __init__(
        self, backend: Backend, call: Call, max_buffered: int, *, fails_behind: bool = False
    ) -> None:
        self._outputs = self._kind(backend, max_buffered, fails_behind=fails_behind)
        self._outputs.submit(call)

    @property
    def timing(self) -> Timing | None:
        """Where the time of the call went; None until it is over, and unless it has succeeded."""
        outputs = self._outputs
        return outputs.call.timing if outputs.is_over and outputs.call is not None else None

    @property
    def is_ready(self) -> bool:
        """Whether the next output, the end or an error is there and need not be waited for."""
        return self._outputs.is_ready

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # it was not accepted; or in a fork
            self._outputs.leave()


class Stream(_AnyStream, Iterator[Any]):
    """The outputs of one item, from ``Streamer.stream``. For one thread.

    Leave the loop whenever you like: when nothing refers to the stream any more, or by ``close`` or
    the end of a ``with`` block, its place in the worker is freed before the next step.
    """

    _kind = ThreadOutputs
    _outputs: ThreadOutputs

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

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncStream(_AnyStream, AsyncIterator[Any]):
    """The same for asyncio, from ``Streamer.astream``. For one task of the loop it was made in.

    Leaving the loop frees the place, as does cancelling the task that waits for an output, at its
    end: who asks for more then gets a StreamerError. A wait that was cancelled alone, as by
    ``asyncio.timeout`` or ``asyncio.wait_for(anext(stream), ...)``, leaves the stream as it is: the
    next output can be waited for again.
    """

    _kind = LoopOutputs
    _outputs: LoopOutputs

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

    async def __aexit__(self, *_: object) -> None:
        self._outputs.close()
