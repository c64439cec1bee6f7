"""What a worker does from its model's loading to its end, whatever it runs in."""

from __future__ import annotations

import contextlib
import gc
import pickle
import sys
from abc import abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import ModelError
from ..gpu.faults import DeviceFailed, Guard
from ..gpu.out_of_memory import is_out_of_memory
from ..gpu.places import Place, missing_gpu, visible_gpus
from ..gpu.torch_process import check_torch, limit_memory
from ..managed_model import is_shown
from ..observe.record import BatchReport, StepReport
from ..reporting import summary
from .codec import Codec
from .environment import limit_loaded_torch
from .memory.memory_link import Memories
from .model_spec import LoadedModel, ModelSpec
from .progress import StageProgress
from .protocol import (
    EXIT_DEVICE_FAILED,
    EXIT_START_FAILED,
    DeviceFailure,
    Failure,
    Frame,
    FromWorker,
    StartFailure,
    WorkerStarted,
    encode,
)
from .runner import serve
from .stages import Channel

if TYPE_CHECKING:
    from .preprocessing import PreprocessPool


#: What workers that this process starts call first, asked for at each start; picklable.
preparation: Callable[[], Callable[[], None]] | None = None


class Boot(NamedTuple):
    """What a worker needs from the start.

    Attributes:
        spec: its model, if it is forked; otherwise None, and the model comes as the first frame.
        place: where it runs.
        variables: of its environment; None removes one.
        memories: what it shares with its parent; None for nothing.
        sharers: workers on each GPU that it sees.
        progress: where it writes which batches it is at; None for nowhere.
        prepare: called first; None for nothing.
    """

    spec: ModelSpec | None
    place: Place
    variables: dict[str, str | None]
    memories: Memories | None = None
    sharers: tuple[int, ...] = ()
    progress: StageProgress | None = None
    prepare: Callable[[], None] | None = None


class CodedChannel(Channel):
    """A worker's end of a connection over which items and results travel as payloads.

    The subclasses carry the messages.

    Attributes:
        codec: decodes items and encodes results.
        cannot_send: what is said of a result that cannot go.
        guard: looks at what items and results raise that cannot travel.
    """

    #: Follows what is said of an item, or of a model, of which this process cannot import a part.
    advice = ". Define it in a module that the worker can import"

    def __init__(self, codec: Codec) -> None:
        self.codec = codec
        self.cannot_send = ModelSpec.cannot_send
        self.guard = Guard()

    @abstractmethod
    def send_raw(self, message: tuple[Any, ...]) -> None:
        """Send what is encoded already."""

    def attach(self, model: LoadedModel) -> None:
        """The model has been loaded."""

    def advise(self, error: BaseException) -> str:
        """What to do about something that this process cannot import, to follow what is wrong."""
        return self.advice if isinstance(error, (AttributeError, ImportError)) else ""

    def send(self, report: BatchReport | StepReport) -> None:
        self.send_raw(encode(report))

    def send_message(self, message: FromWorker) -> None:
        """Send a message of any kind. Any thread."""
        self.send_raw(encode(message))

    def decode(self, received: Any) -> tuple[int, list[Any], dict[int, Failure]]:
        batch_id, payloads, *more = received
        self._receive(payloads, *more)
        decode = self.codec.decode
        items: list[Any] = []
        failures: dict[int, Failure] = {}
        for position, payload in enumerate(payloads):
            try:
                items.append(decode(payload))
            except (Exception, SystemExit) as error:  # unpickling must not end the worker
                self._look(error, batch_id)
                failed = self.codec.refuse_item(error, self.advise(error))
                failed.__cause__ = error
                failures[position] = Failure.caught(failed)
        if self.keeps_decoded and len(payloads) > 1:
            self.decoded = [*payloads]  # for items that are computed again
        payloads.clear()  # or blocks would be kept until the next batch
        return batch_id, items, failures

    def decode_again(self, payload: Any) -> Any:
        return self.codec.decode_again(payload)

    def encode(self, report: BatchReport) -> None:
        self.check_owner()  # before anything is written to memory that is shared
        encode, payloads = self.codec.encode, []
        for position, output in enumerate(report.outputs):
            try:
                payloads.append(encode(output))
            except (Exception, SystemExit) as error:
                report.failures[position] = self._unsendable(output, error, report.batch_id)
                payloads.append(None)
        report.outputs.clear()
        output = None  # or the blocks that the results look at would not be released
        report.outputs = payloads
        self._lend(report, payloads)

    def encode_step(self, report: StepReport) -> None:
        self.check_owner()
        for done in report.done:
            self.encode(done)
        encode, outputs, payloads = self.codec.encode, report.outputs, []
        for batch_id, output in [*outputs.items()]:
            try:
                payloads.append(encode(output))
            except (Exception, SystemExit) as error:
                failure = self._unsendable(output, error, batch_id)
                del outputs[batch_id]
                report.done = [each for each in report.done if each.batch_id != batch_id]
                report.done.append(BatchReport(batch_id, failure=failure))
        self._lend(report, payloads)
        report.outputs = dict(zip(outputs, payloads, strict=True))

    def _receive(self, payloads: list[Any], *more: Any) -> None:
        """Prepare the payloads of a batch for decoding, in place; ``more`` came with them."""

    def _lend(self, report: BatchReport | StepReport, payloads: list[Any]) -> None:
        """Prepare payloads that do not go with the message, in place."""

    def _look(self, error: BaseException, batch_id: int) -> None:
        try:
            self.guard.look(error)
        except DeviceFailed as end:
            end.batch_ids.add(batch_id)
            raise

    def _unsendable(self, output: Any, error: BaseException, batch_id: int) -> Failure:
        self._look(error, batch_id)
        cannot_send = self.cannot_send.format(kind=type(output).__qualname__)
        failed = ModelError(
            f"{cannot_send} ({summary(error)}); return plain data, numbers or arrays"
        )
        failed.__cause__ = error
        return Failure.caught(failed)


def serve_model(channel: CodedChannel, boot: Boot, pickled: Frame) -> None:
    """Load the model, say so, and answer batches until the channel says to end.

    Args:
        pickled: the model's spec, if the boot has none.

    Raises:
        SystemExit: with one of our exit codes: it could not be loaded, or its device has failed;
            the channel has been told. Or what the model raised to end the worker.
    """
    try:
        if boot.prepare is not None:
            boot.prepare()
        limit_loaded_torch(boot.variables)
        spec: ModelSpec = boot.spec or _unpickled_spec(channel, pickled)
        _check_gpu(boot.place)
        is_shown(boot.place.gpu_id)
        pool = _start_preprocessing(spec, pickled)
        del pickled
        model = _load(spec, boot, pool)
        channel.codec = spec.codec or channel.codec
        channel.cannot_send = spec.cannot_send
        model.moves_to_cpu = True
        model.guard = channel.guard = Guard(may_end=True)
        channel.attach(model)
        gc.freeze()  # or each full collection would go through all that the model has loaded
    except Exception as error:
        lacks_memory = is_out_of_memory(error, (MemoryError,))  # before its causes are let go of
        channel.send_message(StartFailure(Failure.caught(error), lacks_memory))
        sys.exit(EXIT_START_FAILED)
    # If the parent is gone, there is no one left to report to.
    with contextlib.suppress(BrokenPipeError, EOFError):
        channel.send_message(
            WorkerStarted(model.wants_rows, model.description, model.places, model.resumes)
        )
        try:
            shared = boot.progress.for_worker(model.places) if boot.progress else ()
            serve(channel, model, *shared)
        except DeviceFailed as end:
            channel.send_message(DeviceFailure(frozenset(end.batch_ids), end.fault, end.error))
            sys.exit(EXIT_DEVICE_FAILED)
    if pool is not None:
        pool.close()


def _check_gpu(place: Place) -> None:
    """Raises RuntimeError: its GPU is missing, and the model would silently run on the CPU."""
    problem = missing_gpu(place, visible_gpus()) if place.needs_gpu else ""
    if problem:
        raise RuntimeError(f'{problem}; name an available device, or "cpu"')


def _load(spec: ModelSpec, boot: Boot, pool: PreprocessPool | None) -> LoadedModel:
    # If its module imports torch; a limit that the model sets itself comes later, and counts.
    is_limited = limit_memory(boot.sharers)
    model = spec.load(boot.place.gpu_id, attach=None if pool is None else pool.attach)
    if not is_limited:
        limit_memory(boot.sharers)
    if pool is not None:
        pool.wait_ready()
    check_torch(boot.place)
    return model


def _start_preprocessing(spec: ModelSpec, pickled: Frame) -> PreprocessPool | None:
    """Start the preprocess processes, before the model is loaded; None if there are none to be."""
    if spec.preprocess_options is None:
        return None
    from .preprocessing import PreprocessPool  # others need neither it nor what it imports

    pool = PreprocessPool(bytes(pickled) if pickled else spec, spec.preprocess_options)
    pool.start()
    return pool


def _unpickled_spec(channel: CodedChannel, pickled: Frame) -> ModelSpec:
    """Raises ImportError, with what to do: a part of the model is not to be found here."""
    load: Callable[[Any], ModelSpec] = pickle.loads
    try:
        return load(pickled)
    except (AttributeError, ImportError) as error:
        raise ImportError(f"{error}{channel.advise(error)}") from error
