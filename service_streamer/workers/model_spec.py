"""A model as a worker loads it, and as it stands there: what is called, and what was learned."""

from __future__ import annotations

import importlib
import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any

from ..gpu.device_errors import Guard, Named, check_named
from ..managed_model import ManagedModel, find_length, has_stages, has_steps
from ..reporting import quiet_log
from .codec import Codec
from .mending import Ceiling, Measure
from .stacking import View

if TYPE_CHECKING:  # workers need no options, and would import the whole table at every start
    from ..options.table import WorkerOptions

_log = quiet_log(__name__)

Predict = Callable[[Any], Any]


class LoadedModel:
    """A model in its worker, and what the worker has learned of it.

    Attributes:
        predict: computes a batch, with all its stages.
        preprocess, postprocess: the stages around ``forward``; None where it has none.
        forward: computes a batch between them; where there are no stages it is ``predict``.
        description: what the model says of itself; None if it says nothing.
        name: of the function that returns results, for messages.
        out_of_memory_errors: what it raises for a batch that is too large, besides torch's.
        may_rerun: whether items may be computed again after such an error.
        ceiling: how much it is given at once.
        measure: says what items cost, for the ceiling; None where each counts one.
        stack: whether they are given to it as the rows of an array.
        guard: looks at what it raises; set where an error may end the process.
        view: see ``stacking``; set likewise.
        managed: the ManagedModel, if it is one.
        moves_to_cpu: whether results on another device can not be handed out; set likewise.
        keeps_outputs: whether ``forward`` was seen to return memory that the model keeps, and may
            write to in the next call.
        places: how many states a model of steps has at once; 0 for a model without steps.
        max_cost: the most that these may cost together, by the model's ``cost``.
    """

    def __init__(
        self, spec: ModelSpec, predict: Predict, managed: ManagedModel | None = None
    ) -> None:
        self.predict = predict
        self.managed = managed
        self.places = 0
        self.description: dict[str, Any] | None = None
        self.out_of_memory_errors: Named = ()
        if managed is not None:
            self.places = spec.batch_size if has_steps(type(managed)) else 0
            self.description = _description(managed)
            self.out_of_memory_errors = check_named(
                managed.out_of_memory_errors, f"{describe(type(managed))}.out_of_memory_errors"
            )
        if self.places and self.description is not None:  # for services beyond a broker
            self.description["steps"] = True
        self.preprocess: Predict | None = None
        self.postprocess: Predict | None = None
        self.forward = predict
        last = predict
        if managed is not None and has_stages(type(managed)):
            self.forward = last = managed.forward
            if type(managed).preprocess is not ManagedModel.preprocess:
                self.preprocess = managed.preprocess
            if type(managed).postprocess is not ManagedModel.postprocess:
                self.postprocess = last = managed.postprocess
        self.name = describe(last)
        self.may_rerun = spec.may_rerun
        self.ceiling = Ceiling()
        self.guard = Guard()
        self.measure = spec.measure_of(managed)
        # Of the class: an attribute of the object, or what is not True, is the user's own.
        self.stack = getattr(type(managed), "stack", None) is True
        self.view: View | None = None
        self.moves_to_cpu = False
        self.keeps_outputs = False
        self.max_cost = spec.max_batch_cost

    def lengths(self, items: Sequence[Any]) -> list[float] | None:
        """What the items cost; None where each counts one."""
        if self.measure is None:
            return None
        lengths = self.measure.lengths(items)
        if lengths is None:  # what was learned in the other unit is of no use
            self.measure, self.ceiling = None, Ceiling()
        return lengths

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
    """A model that loads another one, and may leave the rest to that.

    Attributes:
        wants_rows: whether it makes rows of its items by itself, so that they should lie so.
        view: see ``stacking``; set in a worker process.
    """

    wants_rows: bool = False
    view: View | None = None

    def unwrapped(self) -> ManagedModel:
        """What is called once it is loaded."""
        return self


@dataclass(eq=False)
class ModelSpec:
    """What a worker loads: a ManagedModel subclass, a function, or where to import one of them.

    Args:
        args, kwargs: of ``init_model`` and ``init_preprocess``.
        may_rerun: whether items may be computed again after an out-of-memory error. If not, it is
            the error of those that were computed at once, and the worker only learns from it.
        codec: what items come encoded with and results are to go encoded with; None pickles them.
        has_lengths: whether the web process knows what items cost.
        measure: how, if it is not the model's class that says it.
        preprocess_options: of the worker's preprocess processes; None for none.
        batch_size: how many states a model of steps has at once.
        max_batch_cost: the most that these may cost together.
    """

    #: What is said of a result that cannot be encoded.
    cannot_send = "the result, of type {kind}, cannot be sent from the worker"
    #: And of one that cannot be decoded where it comes to.
    cannot_load = "a result cannot be unpickled in the web process"

    model: Any
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] | None = None
    _: KW_ONLY
    may_rerun: bool = True
    codec: Codec | None = None
    has_lengths: bool = False
    measure: Measure | None = None
    preprocess_options: WorkerOptions | None = None
    batch_size: int = 1
    max_batch_cost: float = math.inf

    def __post_init__(self) -> None:
        # Copies: a worker that is started again loads the model as the first one did.
        self.args, self.kwargs = tuple(self.args), dict(self.kwargs or {})

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
        if isinstance(model, type):
            owner: type[ManagedModel] = model
            kwargs = self.kwargs or {}
            model = owner._variant(*self.args, **kwargs)
            if self.preprocess_options is not None and not has_stages(model):
                model = owner  # the variant has nothing to run in preprocess processes
            if isinstance(self.model, str) and not self.has_lengths and not has_steps(model):
                self._warn_of_length(owner)
            managed: ManagedModel = model(gpu_id)
            if has_stages(model):
                managed.init_preprocess(*self.args, **kwargs)
            managed.init_model(*self.args, **kwargs)
            if attach is not None:
                attach(managed)
            if isinstance(managed, Wrapper):
                managed = managed.unwrapped()
            return LoadedModel(self, managed.predict, managed)
        if self.args or self.kwargs:
            raise TypeError(
                f"{describe(model)} is a function: init arguments are for a ManagedModel"
            )
        return LoadedModel(self, model)

    def _warn_of_length(self, model: type[ManagedModel]) -> None:
        if find_length(model) is not None:
            _log(
                logging.WARNING,
                "%s.length is not used: the web process does not import a model that is named by a "
                'string. Set length="%s.length" (--length %s.length), which the web process '
                "imports, or name a function in a lighter module",
                describe(model), self.model, self.model,
            )  # fmt: skip

    def measure_of(self, managed: ManagedModel | None) -> Measure | None:
        """How a worker finds out what items cost; None where each counts one."""
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
        text = "%s.describe() failed; the model is served without a description"
        _log(logging.WARNING, text, describe(type(model)), exc_info=True)
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
            missing += _missing_steps(model)
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
    """Refuse a model that has nothing to run in preprocess processes.

    Args:
        model: as it was given; of one that is named by a string nothing is known yet.

    Raises:
        TypeError: it does not define ``preprocess`` and ``forward``.
    """
    if isinstance(model, str):
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


def _missing_steps(model: type[ManagedModel]) -> list[str]:
    """What a class without ``predict`` and ``forward`` lacks to be a model of steps, or at all."""
    starts = model.start is not ManagedModel.start
    if not starts and not has_steps(model):
        return ["predict or forward"]
    missing = [] if starts else ["start, as a model with step must"]
    if not has_steps(model):
        missing.append("step, as a model with start must")
    return missing


def describe(model: Any) -> str:
    """The model's name for messages."""
    if isinstance(model, str):
        return model
    name = getattr(model, "__qualname__", None) or type(model).__qualname__
    return f"{getattr(model, '__module__', None) or type(model).__module__}.{name}"
