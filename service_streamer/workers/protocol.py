"""The messages between the web process and a worker process, and how exceptions travel.

    to a worker process      (batch_id, payloads[, released[, calls or is_stream]])
                             (DROP or HOLD or RESUME, batch_ids), of a model of steps
    from a worker process    (VERSION, kind, *fields), of one of these:
                                 WorkerReady     the first one
                                 StartFailure    instead of it, and the last one
                                 BatchReport     one for each batch
                                 StepReport      one for each step, of a model of steps
                                 DeviceFailure   the last one

Each is one pickled tuple. Only ``encode`` and ``decode`` know its layout. It holds no classes:
looking one up costs more than all the rest of a small message. A payload is an item or output that
is pickled already, each by itself, so that one that does not unpickle fails alone; or its place in
shared memory. ``released`` are the blocks of shared memory that the sender no longer reads.

A message travels as a frame: its length, 8 bytes little-endian, and its bytes. An empty frame asks
the worker to end. ``multiprocessing.Connection`` cannot read or write a part of a message and go on
later, so one large batch could block the whole web process on one worker. Hence the two classes for
frames: their parent's end must not block, a worker's end may.

Beside the messages there is a page of shared memory with numbers. They say which batches a worker
is at, so that the web process knows it after the worker's end, however it ends. And they say which
of them nobody waits for, so that the worker knows it while it computes.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import io
import operator
import os
import pickle
import traceback
from collections import deque
from collections.abc import MutableSequence, Sequence
from typing import Any, NamedTuple, cast

from ..errors import BadMessage, InvalidInput, ModelError, RemoteTraceback, UnpicklableItem
from ..observe.record import BatchReport, StepReport
from ..reporting import MAX_TEXT, summary
from .memory.arena import PAGE, Memory

#: Of the messages from workers: to be raised with every change of them. A worker that starts after
#: an upgrade of the package has another one than a web process that has been running since before.
VERSION = 6

#: In the place of a batch's id, to a worker of a model of steps: a list of batches to be dropped.
#: Others are at a batch until it is over, and read in shared memory that nobody waits for it.
DROP = -1
#: The same for streams that are not to be stepped for a while, and for those that are again.
HOLD, RESUME = -2, -3

#: The most bytes of a pickled exception. A larger one would hold up every caller whose answer comes
#: from the same worker. Arbitrary; a thousand times what exceptions have.
_LARGEST_ERROR_BYTES = 1 << 20
#: The most characters of a traceback.
_LONGEST_TRACEBACK = 2 * MAX_TEXT
#: These say nothing of the worker that they come from.
_BLAMES_INPUT = (InvalidInput, UnpicklableItem, BadMessage)

#: Exit codes of worker processes; Python itself uses 1 and 2.
EXIT_START_FAILED = 3
EXIT_FORK_RETURNED = 70  # EX_SOFTWARE of sysexits.h
EXIT_DEVICE_FAILED = 74  # EX_IOERR
EXIT_UNGUARDED_MAIN = 78  # EX_CONFIG of sysexits.h
EXIT_NO_FREEZE_SUPPORT = 79

Frame = bytes | bytearray | memoryview

_HEADER_SIZE = 8
#: What a pipe holds on Linux: more is never there to be read at once.
_READ_SIZE = 65_536


# -- failures


class Failure:
    """An error on its way to callers: each of them gets an exception of its own.

    Sharing one instance would let the traceback grow with every caller that raises it and keep the
    frames of all of them alive. What the model raised stays pickled until a caller asks for it:
    unpickling imports modules and runs code of users, which must not hold up the engine's thread.

    Args:
        error: the exception to hand out copies of.
        remote_traceback: where it was raised, if that was in a worker; becomes the cause.
        cause: otherwise, what becomes the cause.

    Attributes:
        text: type and text of the exception, in a line.
        blames_input: whether it says that the sender of an item is at fault.
    """

    __slots__ = ("_cause", "_error", "_pickled", "blames_input", "remote_traceback", "text")

    def __init__(
        self,
        error: BaseException,
        remote_traceback: str | None = None,
        cause: Failure | None = None,
    ) -> None:
        self._error: BaseException | None = error
        self._pickled: bytes | str = ""  # or why it could not be
        self._cause = cause
        self.remote_traceback = remote_traceback
        self.text = summary(error)
        self.blames_input = isinstance(error, _BLAMES_INPUT)

    @property
    def message(self) -> str:
        """The text without the name of the exception, as for one of ours."""
        return self.text.partition(": ")[2]

    @classmethod
    def caught(cls, error: BaseException) -> Failure:
        """In a worker, of the exception that was just caught there."""
        text = _format(error)
        # The text says it all. The frames would keep the whole batch alive.
        for name in ("__traceback__", "__context__", "__cause__"):
            _set(error, name, None)
        return cls(error, text)

    def exception(self) -> BaseException:
        """A copy of the error to raise at one caller. For the caller's thread."""
        original = self._error
        if original is None:
            original = self._error = self._unpickled()
        try:
            error = copy.copy(original)
        except (Exception, SystemExit):  # a constructor with other arguments than it kept
            error = original  # then they share it
        if type(error) is not type(original):
            error = original
        _set(error, "args", original.args)  # a constructor that words them would do it twice
        if self.remote_traceback is not None:
            _set(error, "__cause__", RemoteTraceback(self.remote_traceback))
        elif self._cause is not None:
            _set(error, "__cause__", self._cause.exception())
        else:
            _set(error, "__cause__", original.__cause__)
        return error

    def _unpickled(self) -> BaseException:
        reason = self._pickled
        if isinstance(reason, bytes):
            try:
                error, args = pickle.loads(reason)
                _set(error, "args", args)
                return cast(BaseException, error)
            except (Exception, SystemExit) as error:  # its class cannot be imported here, say
                reason = f"it cannot be unpickled in this process: {summary(error)}"
        return ModelError(f"{self.text} (stands in for the worker's exception: {reason})")

    def __getstate__(self) -> tuple[Any, ...]:
        pickled = self._pickled
        if self._error is not None:
            try:
                buffer = _Buffer()
                pickler = pickle.Pickler(buffer, pickle.HIGHEST_PROTOCOL)
                pickler.dump((self._error, self._error.args))
                pickled = buffer.getvalue()
                pickle.loads(pickled)  # an odd constructor fails only here
            except _TooLarge:
                pickled = f"pickled, it has more than {_LARGEST_ERROR_BYTES} bytes"
            except (Exception, SystemExit):
                pickled = "it cannot be pickled"
        return pickled, self.text, self.remote_traceback, self.blames_input, self._cause

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self._error = None
        self._pickled, self.text, self.remote_traceback, self.blames_input, self._cause = state


class _TooLarge(Exception):
    """The pickled exception has more than ``_LARGEST_ERROR_BYTES``."""


class _Buffer(io.BytesIO):
    """Takes no more than a pickled exception may have: what is large is never copied whole."""

    def write(self, data: Any, /) -> int:
        if self.tell() + len(data) > _LARGEST_ERROR_BYTES:
            raise _TooLarge
        return super().write(data)


def _set(error: BaseException, name: str, value: Any) -> None:
    """Set an attribute, also of an exception that is a frozen dataclass."""
    BaseException.__setattr__(error, name, value)


def _format(error: BaseException) -> str:
    """The traceback of an exception and of its causes. A text of megabytes is cut in its middle."""
    try:
        text = "".join(traceback.format_exception(error))
    except Exception:  # of the exception's own attributes
        return summary(error)
    left_out, half = len(text) - _LONGEST_TRACEBACK, _LONGEST_TRACEBACK // 2
    if left_out > 0:
        text = f"{text[:half]}... ({left_out} more characters) ...{text[-half:]}"
    return text


# -- messages


class WorkerReady(NamedTuple):
    """From a worker: it has loaded its model, and waits for batches.

    Attributes:
        slot: the worker's; set by the transport.
        description: what the model says of itself; None if it says nothing.
        places: of a model of steps, how many items it steps at a time; 0 for other models.
        resumes: whether such a model can go on with an item where its outputs ended.
        wants_rows: whether the model gets its items as the rows of an array.
    """

    slot: int = -1
    description: dict[str, Any] | None = None
    places: int = 0
    resumes: bool = False
    wants_rows: bool = False


class StartFailure(NamedTuple):
    """From a worker: it could not load its model, and ends.

    Attributes:
        failure: what loading it raised.
        is_out_of_memory: whether the device had too little memory for it.
    """

    failure: Failure
    is_out_of_memory: bool


class DeviceFailure(NamedTuple):
    """From a worker: its GPU is of no use to it any more, and it ends.

    Attributes:
        batch_ids: the batches that the GPU may have failed at.
        fault: what the GPU reported.
        error: what the model raised, with its traceback; may quote items.
    """

    batch_ids: frozenset[int]
    fault: str
    error: str


FromWorker = WorkerReady | StartFailure | BatchReport | StepReport | DeviceFailure

#: By the kind in a message. Plain ints, not an enum, which would be pickled by its name.
_KINDS = (WorkerReady, StartFailure, BatchReport, DeviceFailure, StepReport)
_REPORT = _KINDS.index(BatchReport)
_STEP = _KINDS.index(StepReport)

#: The fields of a report that travel; in C, since there is one report for each batch.
_of_report = operator.attrgetter(
    *(each.name for each in dataclasses.fields(BatchReport) if each.name != "slot")
)
_of_step = operator.attrgetter(
    *(each.name for each in dataclasses.fields(StepReport) if each.name not in ("done", "slot"))
)


class Breach(Exception):
    """A worker has written what the protocol does not allow; the text says what."""


def encode(message: FromWorker) -> tuple[Any, ...]:
    """The message as the tuple that is pickled."""
    if isinstance(message, BatchReport):
        return VERSION, _REPORT, *_of_report(message)
    if isinstance(message, StepReport):
        return VERSION, _STEP, [_of_report(each) for each in message.done], *_of_step(message)
    return VERSION, _KINDS.index(type(message)), *message


def decode(message: tuple[Any, ...]) -> FromWorker:
    """The message that was encoded so.

    Only its version is checked: unpickling it has run whatever code it names, so checks of its
    contents could not protect this process from a worker.

    Raises:
        Breach: it is of another version. Whatever else is raised, it is no message at all.
    """
    version, kind, *fields = message
    if version != VERSION:
        raise Breach(
            f"its messages have version {version!r:.40}, and this process reads version {VERSION}; "
            "restart this process if the package was upgraded while it ran"
        )
    if kind == _REPORT:
        return BatchReport(*fields)
    if kind == _STEP:
        done, outputs, *others = fields
        return StepReport(outputs, [BatchReport(*each) for each in done], *others)
    return _KINDS[kind](*fields)


# -- frames


class FrameReader:
    """Reads frames; at most one thread at a time. Does not own the descriptor."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._rest = b""  # what was read of the next frame, while its length is not known
        self._body = bytearray()  # of the next frame, when it did not come at once
        self._filled = 0

    def read(self) -> list[Frame]:
        """Read once; the frames that are whole now, often one, perhaps none.

        Raises:
            BlockingIOError: there is nothing to read, and the descriptor does not block.
            EOFError: the other end is closed.
            MemoryError, OverflowError: a frame is too large, or the bytes are no frames.
        """
        if self._filled < len(self._body):
            count = os.readv(self._descriptor, [memoryview(self._body)[self._filled :]])
            if not count:
                raise EOFError
            self._filled += count
            if self._filled < len(self._body):
                return []
            frame, self._body, self._filled = self._body, bytearray(), 0
            return [frame]
        data = os.read(self._descriptor, _READ_SIZE)
        if not data:
            raise EOFError
        return self._split(self._rest + data if self._rest else data)

    def _split(self, data: bytes) -> list[Frame]:
        frames: list[Frame] = []
        start = 0
        self._rest = b""
        while (available := len(data) - start) >= _HEADER_SIZE:
            length = int.from_bytes(data[start : start + _HEADER_SIZE], "little")
            start += _HEADER_SIZE
            if length > available - _HEADER_SIZE:
                # The rest goes right where it belongs, however large it is.
                try:
                    self._body = bytearray(length)
                except (MemoryError, OverflowError):
                    if not frames:
                        raise
                    self._rest = data[start - _HEADER_SIZE :]  # the next time, then
                    return frames
                self._filled = len(data) - start
                self._body[: self._filled] = data[start:]
                return frames
            frames.append(memoryview(data)[start : start + length])
            start += length
        self._rest = data[start:]
        return frames


class FrameWriter:
    """Writes frames in order and keeps what the pipe does not take yet; one thread at a time.

    A finalizer that calls ``write`` may interrupt ``flush`` at any line, but not another ``write``.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._unwritten: deque[memoryview] = deque()

    def write(self, frame: bytes) -> bool:
        """Append a frame and write what the pipe takes; whether nothing is left to ``flush``.

        Raises:
            BrokenPipeError: the other end is closed.
        """
        header = len(frame).to_bytes(_HEADER_SIZE, "little")
        written = 0
        if not self._unwritten:
            with contextlib.suppress(BlockingIOError):
                written = os.writev(self.descriptor, (header, frame))
        if written == len(header) + len(frame):
            return True
        whole = memoryview(header)[written:], memoryview(frame)[max(0, written - _HEADER_SIZE) :]
        self._unwritten.extend(part for part in whole if part)
        return False

    @property
    def has_rest(self) -> bool:
        """Whether something is kept, for ``flush``."""
        return bool(self._unwritten)

    def drop(self) -> None:
        """Let go of what is kept."""
        self._unwritten.clear()

    def flush(self) -> bool:
        """Write what the pipe takes now; whether nothing is left.

        Raises:
            BrokenPipeError: the other end is closed.
        """
        unwritten = self._unwritten
        while unwritten:
            try:
                count = os.write(self.descriptor, unwritten[0])
            except BlockingIOError:
                return False
            if count == len(unwritten[0]):
                unwritten.popleft()
            else:
                unwritten[0] = unwritten[0][count:]
        return True


# -- the page of numbers


#: Numbers for the batches that nobody waits for: how many those were so far, and the last of them.
#: A worker has fewer at a time.
UNWANTED = 8

#: After so many seconds without news a worker says that it has not hung: between two steps, or two
#: runs of parts of one batch. For the engine takes it for hung that is silent for batch_timeout,
#: which may be short.
SIGN_OF_LIFE = 0.1


def add_unwanted(numbers: MutableSequence[int], batch_id: int) -> None:
    """Note a batch that nobody waits for any more; for the parent."""
    count = numbers[0]
    numbers[1 + count % (UNWANTED - 1)] = batch_id + 1
    numbers[0] = count + 1


def is_unwanted(numbers: Sequence[int], number: int) -> bool:
    """Whether the batch, of this id plus 1, is among those. False for 0, which is none."""
    return number > 0 and number in numbers[1:]


class StageProgress:
    """A number for each stage, in memory of both processes: a batch's id plus 1, or 0.

    Of a model of steps, a number from FORWARD on for each batch in the model's current call. Before
    these numbers are those that the parent writes.

    Each number is written by one store, so nobody reads a part of one.

    Raises:
        OSError: the system has no such memory.
    """

    def __init__(self) -> None:
        self._memory = Memory(PAGE)

    def for_worker(self, places: int = 0) -> tuple[MutableSequence[int], Sequence[int]]:
        """Where the stages write, and where they read what is unwanted. For the worker, once.

        Args:
            places: how many items a model of steps may have in a call.
        """
        os.truncate(self._memory.descriptor, PAGE + 8 * places)  # a number has 8 bytes
        numbers: Any = self._numbers()
        return numbers[UNWANTED:], numbers[:UNWANTED]

    def drop(self, batch_id: int) -> None:
        """Nobody waits for the batch any more. For the parent; never raises."""
        with contextlib.suppress(OSError):
            numbers: Any = self._numbers()
            add_unwanted(numbers, batch_id)

    def begun(self, first: int = 0) -> frozenset[int]:
        """Ids of the batches that are in a stage, or were when the worker ended.

        Empty if it is not known: this process has no free descriptor, or no address space.

        Args:
            first: the first stage that counts.
        """
        try:
            numbers = self._numbers()
        except OSError:
            return frozenset()
        return frozenset(number - 1 for number in numbers[UNWANTED + first :] if number)

    def _numbers(self) -> memoryview[int]:
        memory = self._memory
        memory.size = os.fstat(memory.descriptor).st_size  # the worker may have enlarged it
        return memoryview(memory.map()).cast("q")
