"""The worker's side, the same in every transport: load the model, then answer batches."""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import logging
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from ..errors import BadModelOutput
from ..managed_model import ManagedModel, find_length, has_stages
from ..options.checks import is_sequence
from .batch_ceiling import Ceiling, Measure, Named, check_named, is_out_of_memory
from .memory.payload import on_cpu
from .protocol import BatchReport, Failure
from .stacking import View, stacks
from .sticky_errors import Guard

if TYPE_CHECKING:  # workers need no options, and would import the whole table at every start
    from ..options.table import WorkerOptions

__all__ = [
    "Channel",
    "ItemCodec",
    "LoadedModel",
    "ModelSpec",
    "Predict",
    "check_model",
    "check_outputs",
    "describe",
    "serve",
]

logger = logging.getLogger(__name__)

Predict = Callable[[list[Any]], Any]


class ItemCodec(Protocol):
    """How items and results travel to and from a worker process, if they are not pickled."""

    def encode(self, item: Any) -> bytes:
        """Raises TypeError or ValueError: it cannot travel."""

    def decode(self, payload: bytes) -> Any:
        """Raises ValueError: it is not what ``encode`` makes."""


class Channel(Protocol):
    """A worker's end of its private connection to the web process."""

    def receive(self) -> tuple[int, list[Any], dict[int, Failure]] | None:
        """Block for the next batch: its id, its items, and by position why an item is missing.

        None means: end now.
        """

    def send(self, report: BatchReport) -> None:
        """Answer a batch; an output that cannot travel becomes a failure of its position."""


class LoadedModel:
    """A model in its worker, and what the worker has learned of it. Belongs to one thread.

    Attributes:
        predict: computes a batch.
        description: what the model says of itself; None if it says nothing.
        name: of ``predict``, for messages.
        out_of_memory_errors: what it raises for a batch that is too large, besides torch's.
        may_rerun: whether items may be computed again after such an error.
        ceiling: how much it is given at once.
        measure: says what items cost, for the ceiling; None where each counts one.
        stack: whether they are given to it as the rows of an array.
        pins: whether a GPU is to copy its items by itself.
        guard: looks at what it raises; set where an error may end the process.
        view: see ``stacking``; set likewise.
        managed: the ManagedModel, if it is one.
        moves_to_cpu: whether results on another device can not be handed out; set likewise.
    """

    __slots__ = (
        "ceiling",
        "description",
        "guard",
        "managed",
        "may_rerun",
        "measure",
        "moves_to_cpu",
        "name",
        "out_of_memory_errors",
        "pins",
        "predict",
        "stack",
        "view",
    )

    def __init__(
        self,
        predict: Predict,
        *,
        out_of_memory_errors: Named = (),
        may_rerun: bool = True,
        managed: ManagedModel | None = None,
        measure: Measure | None = None,
    ) -> None:
        self.predict = predict
        self.managed = managed
        self.description = None if managed is None else _description(managed)
        self.name = describe(predict)
        self.out_of_memory_errors = out_of_memory_errors
        self.may_rerun = may_rerun
        self.ceiling = Ceiling()
        self.guard = Guard()
        self.measure = measure
        # Of the class: an attribute of the object, or what is not True, is the user's own.
        self.stack = getattr(type(managed), "stack", None) is True
        self.pins = getattr(type(managed), "pin_memory", None) is True
        self.view: View | None = None
        self.moves_to_cpu = False

    def lengths(self, items: Sequence[Any]) -> list[float] | None:
        """What the items cost; None where each counts one."""
        if self.measure is None:
            return None
        lengths = self.measure.lengths(items)
        if lengths is None:  # what was learned in the other unit is of no use
            self.measure, self.ceiling = None, Ceiling()
        return lengths

    @property
    def padding(self) -> float | None:
        """The share of padding in the last batch, if the model tells it."""
        # What is no such share is the user's, and has the same name by chance; also what raises.
        # numpy's are floats, too: the web process should not need numpy to read them.
        padding: object = None
        with contextlib.suppress(Exception):
            padding = getattr(self.managed, "padding", None)
        return float(padding) if isinstance(padding, float) and 0 <= padding <= 1 else None


class ModelSpec:
    """What a worker loads: a ManagedModel subclass, a function, or where to import one of them.

    Args:
        may_rerun: whether items may be computed again after an out-of-memory error. If not, it is
            the error of those that were computed at once, and the worker only learns from it.
        codec: what items come encoded with and results are to go encoded with; None pickles them.
        has_lengths: whether the web process knows what items cost.
        measure: how, if it is not the model's class that says it.
        preprocess_options: of the worker's preprocess processes; None for none.
    """

    __slots__ = (
        "args",
        "codec",
        "has_lengths",
        "kwargs",
        "may_rerun",
        "measure",
        "model",
        "preprocess_options",
    )

    def __init__(
        self,
        model: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        may_rerun: bool = True,
        codec: ItemCodec | None = None,
        has_lengths: bool = False,
        measure: Measure | None = None,
        preprocess_options: WorkerOptions | None = None,
    ):
        self.model = model
        self.args = tuple(args)
        self.kwargs = dict(kwargs or {})
        self.may_rerun = may_rerun
        self.codec = codec
        self.has_lengths = has_lengths
        self.measure = measure
        self.preprocess_options = preprocess_options

    def load(
        self,
        gpu_id: int | str | None,
        *,
        attach: Callable[[ManagedModel], None] | None = None,
    ) -> LoadedModel:
        """The model, ready to ``serve``. Raises whatever importing and loading raise.

        Args:
            attach: called with the model when that is loaded, if it is a ManagedModel.

        Raises:
            TypeError: its ``out_of_memory_errors`` is no tuple of exception classes and texts.
        """
        model = self.model
        if isinstance(model, str):
            model = import_model(model)
            if isinstance(model, type) and not self.has_lengths and find_length(model) is not None:
                logger.warning(
                    "%s.length is not used: the web process does not import a model that is named "
                    'by a string. Set length="%s.length" (--length %s.length), which the web '
                    "process imports, or name a function in a lighter module",
                    describe(model), self.model, self.model,
                )  # fmt: skip
        if isinstance(model, type):
            managed: ManagedModel = model(gpu_id)
            if has_stages(model):
                managed.init_preprocess(*self.args, **self.kwargs)
            managed.init_model(*self.args, **self.kwargs)
            if attach is not None:
                attach(managed)
            return LoadedModel(
                managed.predict,
                out_of_memory_errors=check_named(
                    managed.out_of_memory_errors, f"{describe(model)}.out_of_memory_errors"
                ),
                may_rerun=self.may_rerun,
                managed=managed,
                measure=self._measure(managed),
            )
        if self.args or self.kwargs:
            raise TypeError(
                f"{describe(model)} is a function: init arguments are for a ManagedModel"
            )
        return LoadedModel(model, may_rerun=self.may_rerun, measure=self._measure())

    def _measure(self, managed: ManagedModel | None = None) -> Measure | None:
        is_class_s = self.has_lengths and self.measure is None
        if managed is None or not is_class_s or find_length(type(managed)) is None:
            return self.measure
        return Measure(getattr(managed, "length", None))


def _description(model: ManagedModel) -> dict[str, Any] | None:
    """What the model says of itself, as plain data; None if it says nothing, or nothing usable."""
    try:
        found = model.describe()
        # Plain data, since unpickling objects would run code of users in the engine's thread.
        if found is None:
            return None
        if not isinstance(found, Mapping):
            raise TypeError(f"it must return a dict, not {type(found).__name__}")
        plain: dict[str, Any] = json.loads(json.dumps(dict(found)))
        return plain
    except (Exception, SystemExit):
        with contextlib.suppress(Exception):  # of a filter or handler of a user's
            text = "%s.describe() failed; the model is served without a description"
            logger.warning(text, describe(type(model)), exc_info=True)
        return None


def import_model(path: str) -> Any:
    """Import ``"package.module:Name"``; dots in Name reach into classes."""
    module_name, _, name = path.partition(":")
    model: Any = importlib.import_module(module_name)
    for part in name.split("."):
        model = getattr(model, part)
    check_model(model)
    return model


def check_model(model: Any) -> None:
    """Refuse what no worker could run.

    Raises:
        TypeError: it is neither a complete ManagedModel subclass nor a callable.
    """
    if isinstance(model, type):
        if not issubclass(model, ManagedModel):
            raise TypeError(f"{describe(model)} is a class but no subclass of ManagedModel")
        missing = sorted(getattr(model, "__abstractmethods__", ()))
        if model.predict is ManagedModel.predict and not has_stages(model):
            missing.append("predict")
        if missing:
            raise TypeError(f"{describe(model)} does not define {' and '.join(missing)}")
    elif isinstance(model, ManagedModel):
        raise TypeError(
            f"pass the class {type(model).__qualname__} itself, not an instance: "
            "each worker builds its own"
        )
    elif not callable(model):
        raise TypeError(
            "the model must be a ManagedModel subclass, a function of a batch, "
            f'or an import string "package.module:Name"; not {model!r}'
        )


def describe(model: Any) -> str:
    """The model's name for messages."""
    if isinstance(model, str):
        return model
    name = getattr(model, "__qualname__", None) or type(model).__qualname__
    return f"{getattr(model, '__module__', None) or type(model).__module__}.{name}"


def serve(channel: Channel, model: LoadedModel) -> None:
    """Answer batches until the channel says to end. Nothing that a model raises ends it.

    ``SystemExit`` and the like are no errors of a batch: they end the worker, as they say.

    Raises:
        DeviceFailed: of the model's guard.
    """
    while (received := channel.receive()) is not None:
        # Nothing here may hold the batch: it would stay in memory until the next one comes, and
        # its blocks of shared memory are released with the report.
        report = _compute(model, *received)
        del received
        channel.send(report)
        del report


def _compute(
    model: LoadedModel, batch_id: int, items: list[Any], failures: dict[int, Failure]
) -> BatchReport:
    size = len(items) + len(failures)
    started_at = time.monotonic()
    ran = _run(model, items) if items and not model.ceiling.limit else None
    if ran is None or isinstance(ran, _OutOfMemory):
        ran, too_large = _run_in_chunks(model, items, ran)
        if too_large:
            positions = [i for i in range(size) if i not in failures]
            failures = failures | {positions[i]: failure for i, failure in too_large.items()}
    duration = time.monotonic() - started_at
    ceiling = model.ceiling.limit
    if isinstance(ran, Failure):
        return BatchReport(batch_id, [], {}, ran, duration, started_at, ceiling)
    model.guard.row = 0
    if failures:
        results = iter(ran)
        ran = [None if i in failures else next(results) for i in range(size)]
    return BatchReport(batch_id, ran, failures, None, duration, started_at, ceiling, model.padding)


class _OutOfMemory:
    """What became of a run for which the device had not enough memory."""

    __slots__ = ("failure",)

    def __init__(self, failure: Failure) -> None:
        self.failure = failure


def _run_in_chunks(
    model: LoadedModel, items: list[Any], whole: _OutOfMemory | None
) -> tuple[list[Any] | Failure, dict[int, Failure]]:
    """Compute a batch in as many runs as it takes.

    Args:
        whole: what became of computing it at once, if that has been tried.

    Returns:
        The results of those that fitted, or why the batch failed; by index, why an item did not.
    """
    outputs: list[Any] = []
    too_large: dict[int, Failure] = {}
    lengths = model.lengths(items)
    for chunk in model.ceiling.chunks(len(items), lengths, may_rerun=model.may_rerun):
        ran = whole or _run(model, items[chunk.start : chunk.stop])
        whole = None  # it was the first chunk: without a limit that is the whole batch
        if isinstance(ran, Failure):
            return ran, {}
        if isinstance(ran, list):
            outputs += ran
            continue
        chunk.has_run_out = True
        if chunk.is_last_try:
            too_large |= dict.fromkeys(range(chunk.start, chunk.stop), ran.failure)
    return outputs, too_large


def _run(model: LoadedModel, items: list[Any]) -> list[Any] | Failure | _OutOfMemory:
    try:
        if model.stack:
            return _run_stacked(model, items)
        return check_outputs(model, model.predict(items), len(items))
    except BaseException as error:
        too_large = is_out_of_memory(error, model.out_of_memory_errors)
        if not too_large:
            if not isinstance(error, Exception):
                raise
            model.guard.look(error)  # before it loses its causes
        failure = Failure.caught(error)
    if not too_large:
        return failure
    # Only now: within the block the exception holds the frames of the model, and they its tensors.
    _release_memory()
    return _OutOfMemory(failure)


def _cuda() -> Any:
    """``torch.cuda``, or None where torch is not loaded, or not to its end."""
    return getattr(sys.modules.get("torch"), "cuda", None)


def _release_memory() -> None:
    """Give unused memory back to the device; a fragmented cache is of no use there."""
    gc.collect()  # a frame that holds its own exception is a cycle
    # Where that fails, so will the next run, and with an error that says more.
    with contextlib.suppress(Exception):
        cuda = _cuda()
        if cuda is not None and cuda.is_initialized():  # or this would make a context, of 0.5 GB
            cuda.empty_cache()


def _run_stacked(model: LoadedModel, items: list[Any]) -> list[Any]:
    results: list[Any] = [None] * len(items)
    for stack in stacks(items, model.view):
        size = len(stack.positions)
        outputs = check_outputs(model, model.predict(stack.batch), size)
        for position, output in zip(stack.positions, outputs, strict=True):
            results[position] = output
    return results


def check_outputs(model: LoadedModel, outputs: Any, expected: int) -> list[Any]:
    """A model's outputs as a list of ``expected`` results. Raises BadModelOutput."""
    if model.moves_to_cpu:
        outputs = on_cpu(outputs)
    got = type(outputs).__qualname__
    if is_sequence(outputs):
        try:
            results = list(outputs)
        except TypeError:  # an array without dimensions
            pass
        else:
            if len(results) == expected:
                return results
            got = f"{got} of {len(results)}"
    raise BadModelOutput(
        f"{model.name} must return a sequence of {expected} results, one per item; "
        f"it returned {got}"
    )
