"""A worker's end of a connection over which items and results travel encoded, each by itself."""

from __future__ import annotations

import pickle
from abc import abstractmethod
from collections.abc import Callable
from typing import Any

from ..errors import BadMessage, ModelError, UnpicklableItem
from ..gpu.faults import DeviceFailed, Guard
from ..observe.record import BatchReport, StepReport
from .item_pickling import Encoding
from .memory.payload import ATOMS, LARGE_IN_BATCH, PROTOCOL
from .model_spec import ItemCodec, LoadedModel, ModelSpec
from .protocol import Failure, FromWorker, encode, summary
from .runner import Channel


class CodedChannel(Channel):
    """Decodes items and encodes results; how messages travel is up to the classes below.

    Attributes:
        codec: how items come and results go; None for pickled.
        cannot_send: what is said of a result that cannot go.
        guard: looks at what items and results raise that cannot travel.
    """

    #: Follows what is said of an item, or of a model, of which this process cannot import a part.
    advice = ". Define it in a module that the worker can import"

    def __init__(self, encoder: Encoding) -> None:
        self.codec: ItemCodec | None = None
        self.cannot_send = ModelSpec.cannot_send
        self.guard = Guard()
        self._encoder = encoder

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
        decode = self._decoder(payloads, *more)
        failures: dict[int, Failure] = {}
        if decode is pickle.loads:
            try:
                return batch_id, list(map(decode, payloads)), failures
            except (Exception, SystemExit):
                pass  # one by one, then, to find out which
        items: list[Any] = []
        for position, payload in enumerate(payloads):
            try:
                items.append(decode(payload))
            except (Exception, SystemExit) as error:  # in unpickling it is no wish to end
                self._look(error, batch_id)
                why = f"{summary(error)}{self.advise(error)}"
                failed: Exception = UnpicklableItem(
                    f"the item cannot be unpickled in the worker: {why}"
                )
                if self.codec is not None:
                    failed = BadMessage(f"the item cannot be decoded: {summary(error)}")
                failed.__cause__ = error
                failures[position] = Failure.caught(failed)
        return batch_id, items, failures

    def _decoder(self, payloads: list[Any], *more: Any) -> Callable[[Any], Any]:  # noqa: ARG002
        """What decodes the payloads of a batch; ``more`` came with them."""
        return pickle.loads if self.codec is None else self.codec.decode

    def _look(self, error: BaseException, batch_id: int) -> None:
        try:
            self.guard.look(error)
        except DeviceFailed as end:
            end.batch_ids.add(batch_id)
            raise

    def encode(self, report: BatchReport) -> None:
        self.check_owner()  # before anything is written to memory that is shared
        payloads: list[Any] = []
        if self.codec is None and _are_small_atoms(report.outputs):
            # As most results are. These can travel, so nothing is to be said of any.
            report.outputs = [pickle.dumps(output, PROTOCOL) for output in report.outputs]
            self._place(report, report.outputs)
            return
        encode = self._encoder.encode if self.codec is None else self.codec.encode
        for position, output in enumerate(report.outputs):
            try:
                payloads.append(encode(output))
            except (Exception, SystemExit) as error:
                self._look(error, report.batch_id)
                report.failures[position] = Failure.caught(self._unsendable(output, error))
                payloads.append(None)
        report.outputs.clear()
        output = None  # or the blocks that the results look at would not be released
        self._place(report, payloads)
        report.outputs = payloads

    def encode_step(self, report: StepReport) -> None:
        self.check_owner()
        for done in report.done:
            self.encode(done)
        encode = self._encoder.encode if self.codec is None else self.codec.encode
        outputs, payloads = report.outputs, []
        for batch_id, output in [*outputs.items()]:
            try:
                payloads.append(encode(output))
            except (Exception, SystemExit) as error:
                self._look(error, batch_id)
                del outputs[batch_id]
                report.done = [each for each in report.done if each.batch_id != batch_id]
                failure = Failure.caught(self._unsendable(output, error))
                report.done.append(BatchReport(batch_id, failure=failure))
        self._place(report, payloads)
        report.outputs = dict(zip(outputs, payloads, strict=True))

    def _place(self, report: BatchReport | StepReport, payloads: list[Any]) -> None:
        """Make payloads ready that do not go with the message."""

    def _unsendable(self, output: Any, error: BaseException) -> ModelError:
        cannot_send = self.cannot_send.format(kind=type(output).__qualname__)
        failed = ModelError(
            f"{cannot_send} ({summary(error)}); return plain data, numbers or arrays"
        )
        failed.__cause__ = error
        return failed


def _are_small_atoms(outputs: list[Any]) -> bool:
    """Whether no output has parts, or is large."""
    kinds = {*map(type, outputs)}
    return kinds <= ATOMS and (
        str not in kinds
        or all(len(output) < LARGE_IN_BATCH for output in outputs if type(output) is str)
    )
