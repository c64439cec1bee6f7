"""What a worker does, from its start to its end.

    prepare    signals, stacks, environment, and a thread that watches the parent
    load       the model; say that it is there, or why not
    serve      batches, until the stop sentinel or the parent's end

``run_worker`` does all of that, as the main function of a worker process. An actor of Ray does the
last two with ``serve_model``, on a channel of its own.
"""

from __future__ import annotations

import collections
import contextlib
import faulthandler
import gc
import multiprocessing
import os
import pickle
import select
import sys
import threading
import traceback
from abc import abstractmethod
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from .. import managed_model
from ..errors import ModelError
from ..gpu.accelerators import limit_memory
from ..gpu.device_errors import DeviceFailed, Guard, is_out_of_memory
from ..gpu.places import Place, check_torch, missing_gpu, set_environment, visible_gpus
from ..observe.record import BatchReport, StepReport
from ..reporting import summary
from .arena import Memory
from .codec import Codec
from .memory_link import MakeLink, MemoryLink
from .model_spec import LoadedModel, ModelSpec, Wrapper
from .protocol import (
    EXIT_DEVICE_FAILED,
    EXIT_FORK_RETURNED,
    EXIT_START_FAILED,
    FORWARD,
    Channel,
    DecodedBatch,
    DeviceFailure,
    Failure,
    Frame,
    FrameReader,
    FrameWriter,
    FromWorker,
    Progress,
    StartFailure,
    WorkerReady,
    encode,
)
from .runner import serve
from .starting import STACKS_SIGNAL, ignore_group_signals, limit_loaded_torch

#: The advice about what is defined in the main module.
_OF_MAIN = (
    ". Workers import the main module under another name: define classes and functions outside of "
    "`if __name__ == '__main__':`, or in a module of their own"
)

_FORK_RETURNED = (
    b"service_streamer: a process that the model has forked returned from the model, and ends; "
    b"in the model, let it end with os._exit\n"
)


class Boot(NamedTuple):
    """What a worker needs from the start."""

    spec: ModelSpec | None  # its model; None if it comes as the first frame
    place: Place
    make_link: MakeLink | None = None  # to the memory that it shares with its parent
    progress: Memory | None = None  # where it writes which batches it is at
    prepare: Callable[[], None] | None = None  # called first


class CodedChannel(Channel):
    """A worker's end of a connection over which items and results travel as payloads.

    The subclasses carry the messages.
    """

    #: What to do if this process cannot import a part of an item or of a model.
    advice = ". Define it in a module that the worker can import"

    def __init__(self, codec: Codec, link: MemoryLink | None = None) -> None:
        self.codec = codec
        self.link = link  # the memory that large ones lie in; None if all go with the messages
        self.cannot_send = ModelSpec.cannot_send
        self.guard = Guard()

    @abstractmethod
    def send_raw(self, message: tuple[Any, ...]) -> None:
        """Send what is encoded already."""

    def advise(self, error: BaseException) -> str:
        """What to do about something that this process cannot import, to follow what is wrong."""
        if not isinstance(error, (AttributeError, ImportError)):
            return ""
        return _OF_MAIN if "__mp_main__" in str(error) else self.advice

    def send(self, report: FromWorker) -> None:
        """Send a message of any kind. Any thread."""
        self.send_raw(encode(report))

    def decode(self, received: Any) -> DecodedBatch:
        batch_id, payloads, released, _ = received
        if self.link is not None:
            self.link.receive(payloads, released)
        decode = self.codec.decode
        items: list[Any] = []
        failures: dict[int, Failure] = {}
        for position, payload in enumerate(payloads):
            try:
                items.append(decode(payload))
            except (Exception, SystemExit) as error:  # unpickling must not end the worker
                self.guard.look(error, batch_id)
                failed = self.codec.refuse_item(error, self.advise(error))
                failed.__cause__ = error
                failures[position] = Failure.caught(failed)
        kept = [*payloads]
        payloads.clear()  # or blocks would be kept until the next batch
        if len(kept) == 1:
            return batch_id, items, failures, None
        return batch_id, items, failures, lambda at: self.codec.decode_again(kept[at])

    def encode(self, report: BatchReport | StepReport) -> None:
        self.check_owner()  # before anything is written to memory that is shared
        if isinstance(report, BatchReport):
            ids = [report.batch_id] * len(report.outputs)
            report.failures |= self._encode(report, report.outputs, ids)
            return
        for done in report.done:
            self.encode(done)
        ids, outputs = [*report.outputs], [*report.outputs.values()]
        report.outputs.clear()
        failures = {ids[at]: each for at, each in self._encode(report, outputs, ids).items()}
        report.outputs.update(zip(ids, outputs, strict=True))
        for batch_id, failure in failures.items():
            del report.outputs[batch_id]
            report.done = [each for each in report.done if each.batch_id != batch_id]
            report.done.append(BatchReport(batch_id, failure=failure))

    def _encode(
        self, report: BatchReport | StepReport, outputs: list[Any], ids: list[int]
    ) -> dict[int, Failure]:
        """Encode outputs of these batches; by position why some cannot be.

        In place, so that nothing holds what is encoded, or its blocks were not released.
        """
        encode, failures = self.codec.encode, {}
        for position in range(len(outputs)):
            try:
                outputs[position] = encode(outputs[position])
            except (Exception, SystemExit) as error:
                self.guard.look(error, ids[position])
                cannot_send = self.cannot_send.format(kind=type(outputs[position]).__qualname__)
                failed = ModelError(
                    f"{cannot_send} ({summary(error)}); return plain data, numbers or arrays"
                )
                failed.__cause__ = error
                failures[position], outputs[position] = Failure.caught(failed), None
        if self.link is not None:
            report.released = self.link.lend(outputs)
        return failures


def run_worker(boot: Boot, requests: Connection, responses: Connection, stacks: Connection) -> None:
    """Load the model, say so, and serve until the stop sentinel or the parent's end.

    The stacks go to ``stacks`` when this process crashes or is asked for them.
    """
    pid = os.getpid()
    try:
        ignore_group_signals()
        os.set_blocking(stacks.fileno(), False)  # the parent reads it after our end only
        faulthandler.disable()  # or a forked child kept the handlers that Ray put in its parent
        faulthandler.enable(stacks.fileno())
        faulthandler.register(STACKS_SIGNAL, stacks.fileno())
        set_environment(boot.place.variables)  # a fork server has an environment of its own
        channel = _PipeChannel(requests, responses, boot.make_link)
        watch = (requests.fileno(), channel.link)
        threading.Thread(
            target=_exit_with_parent, args=watch, name="parent watch", daemon=True
        ).start()
        with contextlib.suppress(EOFError):  # the parent has gone
            serve_model(channel, boot, b"" if boot.spec else channel.next_frame())
    except BaseException as error:
        # A thread that the model has started could prevent a normal end, and the parent would not
        # learn that this worker is dead.
        code = 1
        try:
            if isinstance(error, SystemExit) and isinstance(error.code, int | None):
                code = error.code or 0
            else:
                traceback.print_exception(error)
            if os.getpid() == pid:  # else it is a fork of the model's, and they are not its own
                for child in multiprocessing.active_children():
                    child.terminate()
            sys.stdout.flush()
            sys.stderr.flush()
        finally:  # also if standard error is closed, say
            os._exit(code & 0xFF)


def _exit_with_parent(descriptor: int, link: MemoryLink | None) -> None:
    """End this process when the parent dies, even in the midst of a batch.

    The parent closes the request pipe only after our end, so its hanging up means that it is dead.
    A poll for no event reports hang-ups only, so this thread wakes up for nothing else. But for
    memory of third processes: what is to be forgotten is unmapped here, since the worker may not
    get another batch.
    """
    poll = select.poll()
    poll.register(descriptor, 0)
    if link is not None and link.fileno() >= 0:
        poll.register(link, select.POLLIN)
    while descriptor not in dict(poll.poll()):
        if link is not None and not link.take_in():
            poll.unregister(link)
    os._exit(0)


class _PipeChannel(CodedChannel):
    """The worker's ends of its pair of pipes; they block."""

    def __init__(
        self, requests: Connection, responses: Connection, make_link: MakeLink | None
    ) -> None:
        link = None if make_link is None else make_link()
        super().__init__(Codec(link.arena.put if link and link.arena else None), link)
        self._pid = os.getpid()
        self._connections = requests, responses  # they close their descriptors when collected
        self._reader = FrameReader(requests.fileno())
        self._frames: collections.deque[Frame] = collections.deque()  # read, not yet received
        self.writer = FrameWriter(responses.fileno())
        self._poll = select.poll()
        self._poll.register(requests.fileno(), select.POLLIN)

    def check_owner(self) -> None:
        """End a fork that came back from the model: it must not answer, nor take a batch.

        Else the parent would get two answers to a batch, and the two processes would steal each
        other's bytes. Not a normal end, which would run the exit functions of the worker.
        """
        if os.getpid() != self._pid:
            try:
                os.write(2, _FORK_RETURNED)  # without locks, which another thread may have held
            finally:
                os._exit(EXIT_FORK_RETURNED)

    def receive(self) -> tuple[Any, ...] | None:
        frame = self.next_frame()
        received: tuple[Any, ...] | None = pickle.loads(frame) if frame else None
        return received

    def is_waiting(self) -> bool:
        return bool(self._frames or self._poll.poll(0))

    def next_frame(self) -> Frame:
        self.check_owner()
        while not self._frames:
            self._frames.extend(self._reader.read())
        return self._frames.popleft()

    def send_raw(self, message: tuple[Any, ...]) -> None:
        self.check_owner()
        pickled = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        self.writer.write(pickled)  # the pipe blocks until it has all of it


def serve_model(channel: CodedChannel, boot: Boot, pickled: Frame) -> None:
    """Load the model, say so, and answer batches until the channel says to end.

    ``pickled`` is the model's spec, if the boot has none.

    Raises:
        SystemExit: with one of our exit codes: it could not be loaded, or its device has failed;
            the channel has been told. Or what the model raised to end the worker.
    """
    try:
        model = _load(channel, boot, pickled)
    except Exception as error:
        lacks_memory = is_out_of_memory(error, (MemoryError,))  # before its causes are let go of
        channel.send(StartFailure(Failure.caught(error), lacks_memory))
        sys.exit(EXIT_START_FAILED)
    del pickled  # it may have many megabytes
    gc.freeze()  # or each full collection would go through all that the model has loaded
    channel.send(WorkerReady(-1, model.description, model.places, model.resumes, model.wants_rows))
    progress = Progress(boot.progress)
    if len(progress.stages) < FORWARD + model.places:
        progress = Progress()  # of its own: then the parent takes all batches for begun
    try:
        serve(channel, model, progress)
    except DeviceFailed as end:
        channel.send(DeviceFailure(frozenset(end.batch_ids), end.fault, end.error))
        sys.exit(EXIT_DEVICE_FAILED)
    if model.pool is not None:
        model.pool.close()


def _load(channel: CodedChannel, boot: Boot, pickled: Frame) -> LoadedModel:
    """The model, ready to serve the channel."""
    if boot.prepare is not None:
        boot.prepare()
    place = boot.place
    limit_loaded_torch(place.variables)
    try:
        spec: ModelSpec = boot.spec or pickle.loads(pickled)
    except (AttributeError, ImportError) as error:  # a part of the model is not to be found here
        raise ImportError(f"{error}{channel.advise(error)}") from error
    problem = missing_gpu(place, visible_gpus()) if place.needs_gpu else ""
    if problem:  # the model would silently run on the CPU
        raise RuntimeError(f'{problem}; name an available device, or "cpu"')
    managed_model.shown_device = place.gpu_id
    pool = None
    if spec.preprocess_options is not None:
        from .preprocessing import PreprocessPool  # others need neither it nor what it imports

        pool = PreprocessPool(bytes(pickled) if pickled else spec, spec.preprocess_options)
        pool.start()
    # If its module imports torch; a limit that the model sets itself comes later, and counts.
    is_limited = limit_memory(place.sharers)
    model = spec.load(place.gpu_id)
    if not is_limited:
        limit_memory(place.sharers)
    if pool is not None:
        pool.attach(model)
        pool.wait_ready()
    check_torch(place)
    channel.codec = spec.codec or channel.codec
    channel.cannot_send = spec.cannot_send
    model.moves_to_cpu = True
    model.guard = channel.guard
    model.guard.may_end = True
    if channel.link is not None:
        model.view = channel.link.view
        if isinstance(model.managed, Wrapper):
            model.managed.view = model.view
    return model
