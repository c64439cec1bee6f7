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

import copy
import dataclasses
import operator
import os
import pickle
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple, cast

from ..errors import BadMessage, InvalidInput, ModelError, RemoteTraceback, UnpicklableItem
from ..observe.record import BatchReport, StepReport
from ..reporting import MAX_TEXT, summary
from .arena import Memory

#: Of the messages from workers: to be raised with every change of them. A worker that starts after
#: an upgrade of the package has another one than a web process that has been running since before.
VERSION = 9

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

Frame = bytes | bytearray | memoryview

_HEADER_SIZE = 8
#: What a pipe holds on Linux: more is never there to be read at once.
_READ_SIZE = 65_536


# -- failures


class Failure:
    """An error on its way to callers: each of them gets an exception of its own.

    With one instance, its traceback would keep the frames of all callers alive. What the model
    raised stays pickled until a caller asks for it: unpickling runs code of users, which must not
    hold up the engine's thread. Its cause is ``remote_traceback``, of a worker, or ``cause``.
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
        self.text = summary(error)  # type and text, in a line
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
        cause = original.__cause__
        if self.remote_traceback is not None:
            cause = RemoteTraceback(self.remote_traceback)
        elif self._cause is not None:
            cause = self._cause.exception()
        _set(error, "__cause__", cause)
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
                pickled = pickle.dumps((self._error, self._error.args), pickle.HIGHEST_PROTOCOL)
                if len(pickled) > _LARGEST_ERROR_BYTES:
                    pickled = f"pickled, it has more than {_LARGEST_ERROR_BYTES} bytes"
                else:
                    pickle.loads(pickled)  # an odd constructor fails only here
            except (Exception, SystemExit):
                pickled = "it cannot be pickled"
        return pickled, self.text, self.remote_traceback, self.blames_input, self._cause

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self._error = None
        self._pickled, self.text, self.remote_traceback, self.blames_input, self._cause = state


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
    """From a worker: it has loaded its model, and waits for batches."""

    slot: int = -1  # the worker's; set by the transport
    description: dict[str, Any] | None = None  # what the model says of itself, if anything
    places: int = 0  # of a model of steps, how many items it steps at a time; 0 for other models
    resumes: bool = False  # whether such a model can go on with an item where its outputs ended
    wants_rows: bool = False  # whether the model gets its items as the rows of an array


class StartFailure(NamedTuple):
    """From a worker: it could not load its model, and ends."""

    failure: Failure  # what loading it raised
    is_out_of_memory: bool  # whether the device had too little memory for it


class DeviceFailure(NamedTuple):
    """From a worker: its GPU is of no use to it any more, and it ends."""

    batch_ids: frozenset[int]  # those that the GPU may have failed at
    fault: str  # what the GPU reported
    error: str  # what the model raised, with its traceback; may quote items


FromWorker = WorkerReady | StartFailure | BatchReport | StepReport | DeviceFailure

#: By the kind in a message: a plain int, not an enum, which would be pickled by its name.
_KINDS = (WorkerReady, StartFailure, BatchReport, DeviceFailure, StepReport)
_STEP = _KINDS.index(StepReport)


def _reader(kind: Any) -> Callable[[Any], tuple[Any, ...]]:
    """Reads the fields that travel; in C, since there is one report for each batch."""
    if not dataclasses.is_dataclass(kind):
        return tuple
    fields = dataclasses.fields(kind)
    return operator.attrgetter(*(each.name for each in fields if each.init and not each.kw_only))


_READERS = {kind: (number, _reader(kind)) for number, kind in enumerate(_KINDS)}


class Breach(Exception):
    """A worker has written what the protocol does not allow; the text says what."""


def encode(message: FromWorker) -> tuple[Any, ...]:
    """The message as the tuple that is pickled."""
    number, read = _READERS[type(message)]
    fields = read(message)
    if number == _STEP:
        outputs, done, *others = fields
        return VERSION, number, outputs, [encode(each) for each in done], *others
    return VERSION, number, *fields


def decode(message: tuple[Any, ...]) -> FromWorker:
    """The message that was encoded so. Raises Breach if that is of another version.

    It may raise anything else if that is no message: contents are not checked, since unpickling
    has run whatever code they name.
    """
    version, number, *fields = message
    if version != VERSION:
        raise Breach(
            f"its messages have version {version!r:.40}, and this process reads version {VERSION}; "
            "restart this process if the package was upgraded while it ran"
        )
    if number == _STEP:
        fields[1] = [decode(each) for each in fields[1]]
    return _KINDS[number](*fields)


# -- frames


class FrameReader:
    """Reads frames; at most one thread at a time. Does not own the descriptor."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._rest = b""  # what was read of the next frame
        self._body = bytearray()  # of the next frame, when it did not come at once
        self._filled = 0

    def read(self) -> list[Frame]:
        """Read once; the frames that are whole now, often one, perhaps none.

        Raises:
            BlockingIOError: there is nothing to read, and the descriptor does not block.
            EOFError: the other end is closed.
            MemoryError, OverflowError: a frame is too large, or the bytes are no frames.
        """
        self._begin_body()
        if self._body:
            count = os.readv(self._descriptor, [memoryview(self._body)[self._filled :]])
            if not count:
                raise EOFError
            self._filled += count
            if self._filled < len(self._body):
                return []
            frame, self._body = self._body, bytearray()
            return [frame]
        data = os.read(self._descriptor, _READ_SIZE)
        if not data:
            raise EOFError
        if self._rest:
            data = self._rest + data
        frames: list[Frame] = []
        start = 0
        while (body := start + _HEADER_SIZE) <= len(data):
            end = body + int.from_bytes(data[start:body], "little")
            if end > len(data):
                break
            frames.append(memoryview(data)[body:end])
            start = end
        self._rest = data[start:]
        if not frames:  # else these count, also if the rest is no frame
            self._begin_body()
        return frames

    def _begin_body(self) -> None:
        """If the next frame's length is known, have what is missing read to where it belongs."""
        if len(self._rest) >= _HEADER_SIZE:
            self._body = bytearray(int.from_bytes(self._rest[:_HEADER_SIZE], "little"))
            self._filled = len(self._rest) - _HEADER_SIZE
            self._body[: self._filled] = self._rest[_HEADER_SIZE:]
            self._rest = b""


class FrameWriter:
    """Writes frames in order and keeps what the pipe does not take yet. Any thread.

    If the other end is closed, what is written is dropped: who watches that end will say so. A
    finalizer that calls ``write`` may interrupt any line here. It only appends then.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.is_closed = False
        self._unwritten: deque[memoryview] = deque()
        # Reentrant: a finalizer of a user's, which makes a call, may run in the midst of a flush.
        self._lock = threading.RLock()

    def write(self, frame: bytes) -> bool:
        """Append a frame and write what the pipe takes; whether nothing is left to ``flush``."""
        with self._lock:
            is_idle = not self._unwritten
            header = len(frame).to_bytes(_HEADER_SIZE, "little")
            if len(frame) < _READ_SIZE:
                self._unwritten.append(memoryview(header + frame))
            else:  # not copied
                self._unwritten.extend((memoryview(header), memoryview(frame)))
            return is_idle and self.flush()

    def flush(self) -> bool:
        """Write what the pipe takes now; whether nothing is left."""
        with self._lock:
            unwritten = self._unwritten
            while unwritten:
                try:
                    count = 0 if self.is_closed else os.write(self.descriptor, unwritten[0])
                except BlockingIOError:
                    return False
                except BrokenPipeError:
                    count = 0
                if not count:
                    unwritten.clear()
                elif count == len(unwritten[0]):
                    unwritten.popleft()
                else:
                    unwritten[0] = unwritten[0][count:]
            return True

    def close(self) -> None:
        """Write nothing more: the descriptor is about to be another file's."""
        with self._lock:
            self.is_closed = True


# -- progress


#: The stages of one batch: see ``runner``.
INTAKE, FORWARD, OUTLET = range(3)

#: Numbers for the batches that nobody waits for. A worker has fewer at a time.
_UNWANTED = 8

#: After so many seconds without news a worker says that it has not hung: between two steps, or two
#: runs of parts of one batch. For the engine takes it for hung that is silent for batch_timeout,
#: which may be short.
SIGN_OF_LIFE = 0.1

#: Bytes of the page: room for 8 thousand items in one call of a model of steps. Memory is used for
#: what is written only.
PROGRESS_BYTES = 1 << 16


class Progress:
    """Numbers that a worker shares with its parent: which batches it is at, and which it may drop.

    Each is written by one store, so none is torn. Raises OSError: the memory cannot be mapped.
    """

    def __init__(self, memory: Memory | None = None) -> None:
        numbers: Any = [0] * (_UNWANTED + 3)
        if memory is not None:
            numbers = memoryview(memory.map()).cast("q")
        self.unwanted = numbers[:_UNWANTED]  # how many batches those were so far, and the last ones
        #: Of each stage the id of its batch plus 1, or 0. A model of steps has one from FORWARD on
        #: for each batch in its current call.
        self.stages = numbers[_UNWANTED:]

    def add_unwanted(self, batch_id: int) -> None:
        """In the parent: nobody waits for the batch any more."""
        count = self.unwanted[0]
        self.unwanted[1 + count % (_UNWANTED - 1)] = batch_id + 1
        self.unwanted[0] = count + 1

    def is_unwanted(self, batch_id: int) -> bool:
        """Whether the batch is among those. False for -1, which is none."""
        return batch_id >= 0 and batch_id + 1 in self.unwanted[1:]

    def check_wanted(self, batch_id: int) -> None:
        """Raises InvalidInput, of which nobody learns: nobody waits for the batch."""
        if self.is_unwanted(batch_id):
            raise InvalidInput("nobody waits for the results any more")

    def batches(self, first: int = 0) -> frozenset[int]:
        """Those that are in a stage from ``first`` on, or were when the worker ended."""
        return frozenset(number - 1 for number in self.stages[first:] if number)


# -- the worker's end


#: The last one decodes the item at a position again, if a model writes to copies; else it is None.
DecodedBatch = tuple[int, list[Any], dict[int, Failure], Callable[[int], Any] | None]


class Channel(ABC):
    """A worker's end of its private connection to the web process.

    One thread calls ``receive`` and ``decode``, one other ``encode``, and any of them ``send``.
    """

    @abstractmethod
    def receive(self) -> tuple[Any, ...] | None:
        """Block for the next batch, whose id comes first. None: end now.

        Its fourth member are the items of each call, as in ``Transport.send``; of a model of steps
        whether it is a stream. Such a model may also get an order with the ids of batches, as in
        ``Transport.tell``.
        """

    @abstractmethod
    def send(self, report: BatchReport | StepReport) -> None:
        """Answer a batch, or report a step; it is encoded."""

    def is_waiting(self) -> bool:
        """Whether ``receive`` would return at once."""
        return False

    def decode(self, received: Any) -> DecodedBatch:
        """The batch's id, its items, by position why an item is missing, and ``decode_again``."""
        return *received[:3], None

    def encode(self, report: BatchReport | StepReport) -> None:  # noqa: B027 - optional
        """Make the outputs ready to travel. An item fails, or its stream, whose output cannot."""

    def check_owner(self) -> None:  # noqa: B027
        """End a process that the model has forked and that came back from the model."""

    def interrupt(self) -> bool:
        """Make ``receive`` return None, now or soon, for another thread; False if it cannot."""
        return False

    last_sign_at = 0.0  # when the last sign of life was due

    def sign_of_life(self) -> None:
        """Between two runs of parts: say that the worker has not hung, ten times a second."""
        now = time.monotonic()
        if now - self.last_sign_at >= SIGN_OF_LIFE:
            self.last_sign_at = now
            self.send(StepReport())
