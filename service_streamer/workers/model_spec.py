"""A model as a worker loads it, and as it stands there: what is called, and what was learned."""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import math
import operator
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import BadModelOutput, InvalidItems
from ..gpu.device_errors import Guard, Named, check_named, is_out_of_memory
from ..gpu.transfers import OnHost, results_on_host
from ..managed_model import ManagedModel, array_module, find_length, has_stages, has_steps
from ..options.checks import is_sequence
from ..reporting import quiet_log
from .codec import Codec
from .mending import Ceiling, Invalid, OutOfMemory, at_positions, failures_by_position
from .protocol import Failure

if TYPE_CHECKING:  # workers need no options, and would import the whole table at every start
    from ..options.table import WorkerOptions

_log = quiet_log(__name__)

Predict = Callable[[Any], Any]

#: Maximum bytes of a pickled length function. Arbitrary.
_LARGEST_MEASURE = 1 << 20

#: Returns the memory at (address, size) if it is in use in one block; else None.
View = Callable[[int, int], memoryview | None]


class LoadedModel:
    """A model in its worker, and what the worker has learned of it."""

    def __init__(
        self, spec: ModelSpec, predict: Predict, managed: ManagedModel | None = None
    ) -> None:
        self.predict = predict  # a batch, with all its stages
        self.managed = managed  # None for a function
        self.places = 0  # how many states a model of steps has at once; 0 for other models
        self.max_cost = spec.max_batch_cost  # of these together
        self.description: dict[str, Any] | None = None  # what the model says of itself, if anything
        #: What it raises for a batch that is too large, besides the errors of torch and others.
        self.out_of_memory_errors: Named = ()
        # The stages, where there are any; else ``forward`` is ``predict``.
        self.forward = predict
        self.preprocess: Predict | None = None
        self.postprocess: Predict | None = None
        if managed is not None:
            kind = type(managed)
            self.description = _description(managed)
            self.out_of_memory_errors = check_named(
                managed.out_of_memory_errors, f"{describe(kind)}.out_of_memory_errors"
            )
            if has_steps(kind):
                self.places = spec.batch_size
                if self.description is not None:  # for services beyond a broker
                    self.description["steps"] = True
            elif has_stages(kind):
                self.forward = managed.forward
                if kind.preprocess is not ManagedModel.preprocess:
                    self.preprocess = managed.preprocess
                if kind.postprocess is not ManagedModel.postprocess:
                    self.postprocess = managed.postprocess
        self.pool: Any = None  # the processes that preprocess for it, if there are any
        self.name = describe(self.postprocess or self.forward)  # what returns results
        self.may_rerun = spec.may_rerun  # items, after an error for lack of memory
        self.ceiling = Ceiling()  # how much it is given at once
        self.length = spec.length_of(managed)  # what an item costs; None where each counts one
        #: Whether items are given to it as the rows of an array. Asked of the class: an attribute
        #: of the object, or what is not True, is the user's own.
        self.stack = getattr(type(managed), "stack", None) is True
        # A worker process sets the next three.
        self.guard = Guard()  # looks at what it raises
        self.view: View | None = None  # see ``stacks``
        self.moves_to_cpu = False  # whether results on another device can not be handed out
        #: Whether ``forward`` was seen to return memory that its next call may write to.
        self.keeps_outputs = False
        #: How many arrays of a row per item it was seen to return in place of results; 0 for none.
        self.columns = 0

    def lengths(self, items: Sequence[Any]) -> Sequence[float]:
        """What the items cost: 1 each where that is not known."""
        if self.length is not None:
            with contextlib.suppress(Exception, SystemExit):  # raised by the user's function
                length: Any = self.length
                if isinstance(length, bytes):
                    length = self.length = pickle.loads(length)
                lengths = [float(length(item)) for item in items]
                if all(0 <= length < float("inf") for length in lengths):
                    return lengths
            self.length, self.ceiling = None, Ceiling()  # what was learned is in another unit
        return [1] * len(items)

    def outcome_of(
        self, error: BaseException, batch_id: int, named: int = 0
    ) -> Invalid | OutOfMemory | Failure:
        """What an error of the model means; raises it again if it is no error of a batch.

        ``named`` items were in the call, if the model knows them by their positions. Else, as 0,
        ``InvalidItems`` is an error of all of them. So it is if it names an item that there is not.
        """
        if isinstance(error, InvalidItems):
            try:
                if named:
                    return failures_by_position(error, named)
                error = next(iter(error.errors.values()))
            except BadModelOutput as wrong:
                error = wrong
        if is_out_of_memory(error, self.out_of_memory_errors):
            return OutOfMemory(Failure.caught(error))
        if not isinstance(error, Exception):
            raise error
        self.guard.look(error, batch_id)  # before it loses its causes
        return Failure.caught(error)

    @property
    def wants_rows(self) -> bool:
        """Whether items of one size should lie side by side."""
        return self.stack or (isinstance(self.managed, Wrapper) and self.managed.wants_rows)

    @property
    def resumes(self) -> bool:
        """Whether a model of steps can go on with an item where its outputs ended."""
        return self.places > 0 and callable(getattr(self.managed, "resume", None))

    @property
    def padding(self) -> float | None:
        """The share of padding in the last batch, if the model tells it."""
        # What is no such share is the user's, and has the same name by chance; also what raises.
        # numpy's are floats, too: the web process should not need numpy to read them.
        try:
            padding: object = getattr(self.managed, "padding", None)
        except Exception:
            return None
        return float(padding) if isinstance(padding, float) and 0 <= padding <= 1 else None


class Wrapper(ManagedModel):
    """A model that loads another one, and may leave the rest to that."""

    wants_rows: bool = False  # whether it makes rows of its items by itself: see ``LoadedModel``
    view: View | None = None  # see ``stacks``; set in a worker process

    def unwrapped(self) -> ManagedModel:
        """What is called once it is loaded."""
        return self


@dataclass(eq=False)
class ModelSpec:
    """What a worker loads: a ManagedModel subclass, a function, or where to import one of them."""

    #: What is said of a result that cannot be encoded.
    cannot_send = "the result, of type {kind}, cannot be sent from the worker"
    #: And of one that cannot be decoded where it comes to.
    cannot_load = "a result cannot be unpickled in the web process"

    model: Any
    args: Sequence[Any] = ()  # of ``init_model`` and ``init_preprocess``
    kwargs: Mapping[str, Any] | None = None
    _: KW_ONLY
    #: Whether items may be computed again after an out-of-memory error. If not, it is the error of
    #: those that were computed at once, and the worker only learns from it.
    may_rerun: bool = True
    codec: Codec | None = None  # of items and results on their way; None pickles them
    has_lengths: bool = False  # whether the web process knows what items cost
    #: How, if it is not the model's class that says it; pickled in a worker process.
    measure: Callable[[Any], Any] | bytes | None = None
    preprocess_options: WorkerOptions | None = None  # of preprocess processes; None for none
    batch_size: int = 1  # how many states a model of steps has at once
    max_batch_cost: float = math.inf  # of these together

    def __post_init__(self) -> None:
        # Copies: a worker that is started again loads the model as the first one did.
        self.args, self.kwargs = tuple(self.args), dict(self.kwargs or {})

    def __getstate__(self) -> dict[str, Any]:
        """What travels to a worker, with the length function pickled by itself.

        It is unpickled only when a batch has run out of memory: a function that the worker cannot
        import must not keep it from starting. One that does not pickle, or is too large since it
        drags a whole tokenizer along, does not go there.
        """
        state = self.__dict__.copy()
        if callable(self.measure):
            state["measure"] = b""
            with contextlib.suppress(Exception, SystemExit):
                pickled = pickle.dumps(self.measure, pickle.HIGHEST_PROTOCOL)
                if len(pickled) <= _LARGEST_MEASURE:
                    state["measure"] = pickled
        return state

    def load(self, gpu_id: int | str | None) -> LoadedModel:
        """The model, ready to ``serve``. Raises whatever importing and loading raise."""
        model = self.model
        if isinstance(model, str):
            model = import_model(model)
        if isinstance(model, type):
            owner: type[ManagedModel] = model
            kwargs = self.kwargs or {}
            model = owner._variant(*self.args, **kwargs)
            if self.preprocess_options is not None and not has_stages(model):
                model = owner  # the variant has nothing to run in preprocess processes
            is_unread = isinstance(self.model, str) and not self.has_lengths
            if is_unread and not has_steps(model) and find_length(owner) is not None:
                _log(
                    logging.WARNING,
                    "%s.length is not used: the web process does not import a model that is named "
                    'by a string. Set length="%s.length" (--length %s.length), which the web '
                    "process imports, or name a function in a lighter module",
                    describe(owner), self.model, self.model,
                )  # fmt: skip
            managed: ManagedModel = model(gpu_id)
            if has_stages(model):
                managed.init_preprocess(*self.args, **kwargs)
            managed.init_model(*self.args, **kwargs)
            if isinstance(managed, Wrapper):
                managed = managed.unwrapped()
            return LoadedModel(self, managed.predict, managed)
        if self.args or self.kwargs:
            raise TypeError(
                f"{describe(model)} is a function: init arguments are for a ManagedModel"
            )
        return LoadedModel(self, model)

    def length_of(self, managed: ManagedModel | None) -> Callable[[Any], Any] | bytes | None:
        """How a worker finds out what an item costs; None where each counts one."""
        if self.measure is None and self.has_lengths and find_length(type(managed)) is not None:
            return getattr(managed, "length", None)
        return self.measure


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
        text = "%s.describe() failed; the model is served without a description"
        _log(logging.WARNING, text, describe(type(model)), exc_info=True)
        return None


def import_model(path: str) -> Any:
    """Import ``"package.module:Name"``; dots in Name reach into classes."""
    module, _, name = path.partition(":")
    model: Any = operator.attrgetter(name)(importlib.import_module(module))
    check_model(model)
    return model


def check_model(model: Any) -> None:
    """Raises TypeError: it is neither a complete ManagedModel subclass nor a callable."""
    if isinstance(model, type):
        if not issubclass(model, ManagedModel):
            raise TypeError(f"{describe(model)} is a class but no subclass of ManagedModel")
        missing = sorted(getattr(model, "__abstractmethods__", ()))
        if model.predict is ManagedModel.predict and not has_stages(model):
            starts, steps = model.start is not ManagedModel.start, has_steps(model)
            if not (starts or steps):
                missing.append("predict or forward")
            elif not starts:
                missing.append("start, as a model with step must")
            elif not steps:
                missing.append("step, as a model with start must")
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


def check_preprocess(model: Any) -> None:
    """Raises TypeError: the model has nothing to run in preprocess processes."""
    if isinstance(model, str):  # nothing is known of it yet
        return
    has_preprocess = (
        isinstance(model, type)
        and issubclass(model, ManagedModel)
        and model.predict is ManagedModel.predict
        and model.preprocess is not ManagedModel.preprocess
    )
    if not has_preprocess:
        raise TypeError(
            "preprocess_workers needs a ManagedModel subclass that defines preprocess and forward "
            f"in place of predict, which {describe(model)} does not"
        )


def describe(model: Any) -> str:
    """The model's name for messages."""
    if isinstance(model, str):
        return model
    name = getattr(model, "__qualname__", None) or type(model).__qualname__
    return f"{getattr(model, '__module__', None) or type(model).__module__}.{name}"


# -- a batch as one array, for models that ask for it (``ManagedModel.stack``)


class Stack(NamedTuple):
    """Items of a batch in one array, on their way through the stages of the model."""

    batch: Any  # its first dimension is the items; or what a stage made of it
    positions: Sequence[int]  # of its items in the whole batch

    def through(self, stage: Callable[[Any], Any]) -> Stack:
        """What a stage makes of it. Raises what that raises."""
        with at_positions(self.positions):
            return Stack(stage(self.batch), self.positions)


def stacks(items: Sequence[Any], view: View | None) -> list[Stack]:
    """The items as arrays, one per shape and dtype.

    Those that are adjacent in one block of ``view`` are not copied. The array has the order of the
    memory, which may be another one than in the batch; the results are sorted back.

    Raises TypeError: an item is neither a numpy array nor a torch tensor.
    """
    alike: dict[Any, list[int]] = {}
    for position, item in enumerate(items):
        kind = array_module(item)
        if kind is None:
            raise TypeError(
                "a model with stack = True takes numpy arrays or torch tensors as items; this item "
                f"is a {type(item).__qualname__}"
            )
        alike.setdefault((kind, item.shape, item.dtype), []).append(position)
    return [_stack(kind, items, positions, view) for (kind, _, _), positions in alike.items()]


def _stack(kind: Any, items: Sequence[Any], positions: list[int], view: View | None) -> Stack:
    alike = [items[position] for position in positions]
    addresses = [] if view is None else [_address(item) for item in alike]
    if view is not None and None not in addresses:
        first, size = alike[0], alike[0].nbytes
        order = sorted(zip(addresses, positions, strict=True))
        start = order[0][0]
        in_line = all(address == start + row * size for row, (address, _) in enumerate(order))
        memory = view(start, size * len(order)) if in_line else None
        if memory is not None:
            array = kind.frombuffer(memory, dtype=first.dtype).reshape(len(order), *first.shape)
            return Stack(array, [position for _, position in order])
    return Stack(_copied(kind, alike), positions)


def _copied(kind: Any, alike: list[Any]) -> Any:
    if hasattr(alike[0], "data_ptr"):
        return kind.stack(alike)
    if any(isinstance(item, kind.ma.MaskedArray) for item in alike):
        return kind.ma.stack(alike)
    # numpy.stack would change the byte order, and the gaps of structures.
    batch = kind.empty((len(alike), *alike[0].shape), alike[0].dtype)
    for row, item in enumerate(alike):
        batch[row, ...] = item  # the ellipsis keeps arrays of objects intact
    return batch


def _address(item: Any) -> Any:
    """Of its values, if the memory there alone determines them; else None."""
    if hasattr(item, "data_ptr"):
        is_strided = str(item.layout) == "torch.strided" and not item.is_quantized
        is_plain = is_strided and item.nbytes and item.is_contiguous()
        return item.data_ptr() if is_plain and not (item.is_conj() or item.is_neg()) else None
    is_plain = item.nbytes and item.flags.c_contiguous and not item.dtype.hasobject
    is_masked = hasattr(item, "mask")
    return item.__array_interface__["data"][0] if is_plain and not is_masked else None


# -- what a model returned


def check_outputs(model: LoadedModel, outputs: Any, expected: int) -> list[Any]:
    """A model's outputs as a list of ``expected`` results. Raises BadModelOutput."""
    if model.moves_to_cpu or type(outputs) is OnHost:
        outputs = results_on_host(outputs)
    kind = type(outputs)
    if kind is list and len(outputs) == expected != model.columns:  # the usual case
        return list(outputs)
    # A NamedTuple, or what torch.max returns: its parts are no results, however many there are.
    has_fields = hasattr(kind, "_fields") or hasattr(kind, "n_fields")
    results = as_list(outputs)
    # (logits, hidden), say. For as many items as arrays, results may look the same. So these are
    # refused only if the model has returned such arrays for another number of items. The search for
    # a bad item, which follows then, soon comes to as many items as arrays.
    are_columns = (
        isinstance(outputs, (list, tuple))
        and len(outputs) > 0
        and all(tuple(getattr(each, "shape", ()))[:1] == (expected,) for each in outputs)
    )
    if are_columns and len(outputs) != expected:
        model.columns = len(outputs)
    are_columns = are_columns and len(outputs) == model.columns
    if results is not None and len(results) == expected and not (has_fields or are_columns):
        return results
    raise BadModelOutput(
        f"{model.name} must return a sequence of {expected} results, one per item; "
        f"it returned {describe_outputs(outputs)}{' fields' * has_fields}"
        f"{', each with a row for every item' * are_columns}"
    )


def as_list(found: Any) -> list[Any] | None:
    """A sequence as a list; else None."""
    if not is_sequence(found):
        return None
    try:
        return list(found)
    except TypeError:  # an array without dimensions
        return None


def describe_outputs(found: Any) -> str:
    kind, parts = type(found).__qualname__, as_list(found)
    if parts is not None:
        return f"{kind} of {len(parts)}"
    return f"{kind} without dimensions" if is_sequence(found) else kind


#: What a model returned for a state: its output, and whether it is done; or why its item fails.
StepPair = tuple[Any, bool] | Failure


def check_pairs(model: LoadedModel, found: Any, expected: int) -> list[StepPair]:
    """So many pairs, that the model's ``step`` returned, with their tensors on the CPU.

    Where there is none the item fails. If they are not as many all fail: which are whose is not
    known, and the model may have taken the step.
    """
    if type(found) is OnHost:
        found = results_on_host(found)
    parts, step = as_list(found), getattr(model.managed, "step", None)
    if parts is None or len(parts) != expected:
        what = f"a sequence of {expected} pairs (output, is_done), one per state"
        return [unreadable(found, step, what)] * expected
    pairs = [_read_pair(part, step) for part in parts]
    if not model.moves_to_cpu:
        return pairs
    # The first output says whether there are tensors of a GPU: so without those that are None.
    outputs = [each[0] for each in pairs if type(each) is tuple and each[0] is not None]
    moved = iter(results_on_host(outputs))
    return [
        (next(moved), each[1]) if type(each) is tuple and each[0] is not None else each
        for each in pairs
    ]


def unreadable(found: Any, function: Any, expected: str) -> Failure:
    """Of an item, if the model's function returned something else."""
    text = f"{describe(function)} must return {expected}; it returned {describe_outputs(found)}"
    return Failure(BadModelOutput(text))


def _read_pair(pair: Any, step: Any) -> StepPair:
    if type(pair) is tuple and len(pair) == 2 and type(pair[1]) is bool:  # the usual case
        return pair
    if isinstance(pair, Exception):
        return Failure.caught(pair)
    parts = as_list(pair)
    # Where a model returns all outputs and then all flags, of two items, these look like pairs.
    if parts is not None and len(parts) == 2 and _is_flag(parts[1]):
        return parts[0], bool(parts[1])
    what = "a pair (output, is_done) for each state, and is_done must be True or False"
    return unreadable(pair, step, what)


def _is_flag(value: Any) -> bool:
    """Whether it is one bool, also of numpy or torch."""
    kind = str(getattr(value, "dtype", ""))
    return type(value) is bool or (
        kind in ("bool", "torch.bool") and not tuple(getattr(value, "shape", ()))
    )
