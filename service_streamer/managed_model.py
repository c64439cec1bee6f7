"""The class that users subclass: a model that is loaded in the worker, on the worker's device."""

from __future__ import annotations

import inspect
import sys
from abc import ABC, abstractmethod
from collections import UserDict
from collections.abc import Mapping, Sequence
from typing import Any

from .gpu.places import show_only


class ManagedModel(ABC):
    """A model that lives in a worker. Write ``init_model`` and ``predict``; pass the *class* on.

    The worker builds it with its device, calls ``init_model`` once and then ``predict`` per batch,
    always in one thread. The web process never builds one, so it needs no memory for the model.
    Import heavy libraries (torch, ...) in ``init_model`` or in a module that only it imports.

    In place of ``predict`` a model may define three stages, which the worker runs as a pipeline:
    while ``forward`` computes a batch, ``preprocess`` prepares the next one and ``postprocess``
    finishes the one before. Only ``forward`` is required::

        def preprocess(self, items: list[str]) -> Tokens: ...  # on the CPU, such as tokenizing
        def forward(self, batch: Tokens) -> Tensor: ...        # on the GPU
        def postprocess(self, outputs: Tensor) -> list[str]: ...  # on the CPU, such as decoding

    No stage runs twice at the same time, and each gets the batches in order. ``forward`` is called
    in the thread that called ``init_model``; the other two may be called in other threads. What two
    stages share must be thread-safe; so pass on what ``postprocess`` needs instead of setting
    attributes. A class that defines ``predict`` has no stages, whatever else it defines.

    Where ``preprocess`` is slow Python code, such as the decoding of images, ``preprocess_workers``
    runs it in several processes. Load what it needs in ``init_preprocess``: those processes do not
    call ``init_model``.

    If some items cost more than others, say what an item costs, so that those that are alike are
    computed together. In any unit, cheaply: it is asked for in the web process, for each item::

        @staticmethod
        def length(item: str) -> int:
            return len(item)

    There is no such method unless a subclass defines it; then each item counts one. A classmethod
    will do, too, and a plain method as long as it asks nothing of ``self``: there is no model in
    the web process. If the model is named by an import string, its class is unknown there: pass
    ``length=`` to the streamer.

    A model whose work has steps, such as the tokens of a text, defines ``start`` and ``step`` in
    place of ``predict``. Each item gets a state, and has a place in its worker until that is done.
    Items come and go between any two steps, and outputs go out after each::

        def start(self, items: list[str]) -> list[State]: ...
        def step(self, states: list[State]) -> list[tuple[Output | None, bool]]: ...

    ``release``, ``cost`` and ``join_outputs`` may be defined besides. All these methods are called
    in the thread that called ``init_model``.

    Attributes:
        inputs, outputs: for clients that send tensors (``/v2``): what an item and a result are
            made of, each as (name, datatype, shape), such as ``("x", "FP32", (-1, 3))``. The first
            size is that of the batch, and -1 is any size. With one input an item is an array, with
            several it is a dict of arrays. Requests that do not fit are refused before they are
            queued. Left empty, any tensors are taken and returned. Asked of the class.
        gpu_id: this worker's entry of ``cuda_devices`` as you wrote it, or None if you named none.
            The worker sees that device only (``CUDA_VISIBLE_DEVICES``), so for CUDA it is always
            ``cuda:0``.
        model: None until your ``init_model`` sets it. Yours to use or to leave.
        out_of_memory_errors: exception classes, and parts of exceptions' texts, that mean that a
            batch was too large for the device. Such a batch is computed again in smaller parts, and
            later ones stay below what fitted. Those of torch, CUDA, cuBLAS, cuDNN, ROCm, XLA, CuPy
            and ONNX Runtime are known; name others in your class or in ``init_model``, such as
            ``(MemoryError, "arena exhausted")``. If ``predict`` raises one for a single item, it
            is that item's error.
        stack: whether ``predict`` gets the items of a batch as the rows of one array: of shape
            ``(n, *shape of an item)``, of numpy or torch as the items are, which then all have to
            be arrays or tensors. If a batch has several shapes or dtypes, ``predict`` is called
            once for each. In a worker process large ones mostly lie so already, and are not copied.
            With False it gets a list. Asked of the class.
        preprocesses_only: True in a process of ``preprocess_workers``, which has no model.
        padding: what share of the last batch's elements (tokens, say) was padding, 0.0 to 1.0, for
            the metrics: set it in ``predict`` or ``postprocess``, each time. Of a batch that was
            computed in parts the last one counts. What is no such float is ignored.
    """

    inputs: Sequence[tuple[str, str, Sequence[int]]] = ()
    outputs: Sequence[tuple[str, str, Sequence[int]]] = ()
    out_of_memory_errors: tuple[type[BaseException] | str, ...] = ()
    padding: float | None = None
    preprocesses_only: bool = False
    stack: bool = False

    def __init__(self, gpu_id: int | str | None = None) -> None:
        self.model: Any = None
        self.gpu_id = gpu_id
        self.set_gpu_id(gpu_id)

    @staticmethod
    def set_gpu_id(gpu_id: int | str | None = None) -> None:
        """Show this process the given device only; no effect for None.

        In a worker it is so already, before your first import: this call matters only to code that
        builds a model by hand. There numbers are those of the driver, whatever list was set before.
        ``"cpu"`` hides every GPU.
        """
        if gpu_id is None or gpu_id == shown_device:
            return
        show_only(gpu_id)

    @classmethod
    def _variant(cls, *args: Any, **kwargs: Any) -> type[ManagedModel]:  # noqa: ARG003
        """The class to build with these arguments of ``init_model``. Asked in the worker."""
        return cls

    @abstractmethod
    def init_model(self, *args: Any, **kwargs: Any) -> None:
        """Load the model. Called once in the worker with ``model_init_args`` and ``_kwargs``.

        Whatever it raises reaches ``wait_ready()`` and every caller as ``WorkerStartError``.
        """

    def init_preprocess(self, *args: Any, **kwargs: Any) -> None:  # noqa: B027 - may do nothing
        """Load what ``preprocess`` needs, such as a tokenizer. Without a definition: nothing.

        Called with the arguments of ``init_model``: once in the worker, before ``init_model``, and
        once in each process of ``preprocess_workers``, which has no GPU. Only for a model with
        stages. What it raises is reported like what ``init_model`` raises.
        """

    def describe(self) -> Mapping[str, Any] | None:
        """What a web service over Redis shows of the model. Called once, after ``init_model``.

        Plain data, as JSON has it: the fields of ``pipelines.PipelineModel.description``. A model
        that pads batches to a few sizes names them as ``"batch_sizes"``, ascending: the scheduler
        avoids batches that are a little larger. None, as here, shows nothing. What it raises is
        logged, and the model is served without.
        """
        return None

    def predict(self, batch: Any) -> Any:
        """Compute one result per item, in the order of the items.

        Without a definition of yours: its stages, one after the other.

        Args:
            batch: a list of 1 to ``batch_size`` items of any number of callers; with ``stack`` an
                array.
                Leave it as it is: after an out-of-memory error its items come again.

        Returns:
            A sequence (list, tuple, array, ...) of exactly ``len(batch)`` results.
        """
        return self.postprocess(self.forward(self.preprocess(batch)))

    def preprocess(self, items: Any) -> Any:
        """Prepare a batch for ``forward``, without the GPU. Without a definition: as it is.

        Args:
            items: as for ``predict``. Leave them as they are: after an out-of-memory error they are
                preprocessed again, in smaller parts.

        Raises:
            InvalidItems: to have some items fail and the others computed.
        """
        return items

    def collate(self, parts: list[Any]) -> Any:
        """Join the parts of a batch that several processes have preprocessed.

        Called in the worker, and only with ``preprocess_workers``. Without a definition: arrays and
        tensors are concatenated along their first dimension, lists one after the other. Tuples are
        joined element by element, mappings value by value. Other values have to be equal. A single
        part is the batch.

        Args:
            parts: what ``preprocess`` returned for each part, in the order of the items.

        Returns:
            What ``preprocess`` would have returned for all the items.

        Raises:
            TypeError, ValueError: the parts cannot be joined so; the class has to define it.
        """
        return parts[0] if len(parts) == 1 else _joined(parts, type(self).__qualname__)

    def forward(self, batch: Any) -> Any:
        """Compute a batch; to be defined where ``predict`` is not.

        Args:
            batch: what ``preprocess`` returned. Leave it as it is.

        Returns:
            What ``postprocess`` gets. It may look at it while the next call computes: so not memory
            that the next call writes to.

        Raises:
            NotImplementedError: it is not defined.
        """
        raise NotImplementedError(f"{type(self).__qualname__} defines no forward")

    def start(self, items: list[Any]) -> Sequence[Any]:
        """Of a model of steps: begin with these items.

        States that run wait meanwhile. So work that takes many steps' time is better done in
        ``step``, in parts, with None for output.

        Args:
            items: 1 to ``batch_size`` of them. Leave them as they are: after an error ``start`` is
                called with fewer of them, to find the item at fault.

        Returns:
            One state for each, of any kind. It is the worker's until it is given to ``release``.

        Raises:
            InvalidItems: to have some items fail and the others begin.
            NotImplementedError: it is not defined.
        """
        raise NotImplementedError(f"{type(self).__qualname__} defines no start")

    def step(self, states: list[Any]) -> Sequence[tuple[Any, bool] | Exception]:
        """Of a model of steps: take one step with each state.

        If it raises, it is called again at once with fewer of the states, to find the one at fault,
        or to need less memory. So it must leave all states as they were when it raises. A step that
        cannot do that returns an exception in place of a pair.

        Args:
            states: 1 to ``batch_size`` of them, others at each step.

        Returns:
            For each state its output, or None for none this time, and whether it is done. Outputs
            must not be memory that a later step writes to. In place of a pair an exception: the
            item fails with it, and the others go on.

        Raises:
            InvalidItems: to have some items fail, and the step taken again with the others.
            NotImplementedError: it is not defined.
        """
        raise NotImplementedError(f"{type(self).__qualname__} defines no step")

    def release(self, state: Any) -> None:  # noqa: B027 - may do nothing
        """Of a model of steps: the state is over; free what it holds.

        Called once for each, whether it is done, has failed, is given up for lack of memory, or
        its caller has gone. Not called when the worker dies. What it raises is only
        logged. Without a definition: nothing.
        """

    def cost(self, state: Any) -> float:  # noqa: ARG002
        """Of a model of steps: the memory of a state now, in any unit, such as tokens; else 1.

        Asked before each step. Items start while all states together stay below ``max_batch_cost``.
        If they grow beyond it, the youngest is given up and starts again later, if it can; one
        state alone may have more.
        """
        return 1.0

    def join_outputs(self, outputs: list[Any]) -> Any:
        """Of a model of steps: make the result of ``predict`` and ``submit`` of all outputs.

        Without a definition: the list.
        """
        return outputs

    def postprocess(self, outputs: Any) -> Any:
        """Make results of what ``forward`` returned. Without a definition: as they are.

        Returns:
            As for ``predict``.
        """
        return outputs


def has_stages(model: type[ManagedModel]) -> bool:
    """Whether the class defines stages in place of ``predict``."""
    return model.predict is ManagedModel.predict and model.forward is not ManagedModel.forward


def has_steps(model: type[ManagedModel]) -> bool:
    """Whether the class defines steps in place of ``predict`` and stages."""
    is_other = model.predict is not ManagedModel.predict or has_stages(model)
    return not is_other and model.step is not ManagedModel.step


def find_length(model: type, name: str = "length") -> object | None:
    """What a class defines to say what items cost, as it stands there; None if it does not.

    The name is a common one: a class attribute that is no method is something else.
    """
    found: object = inspect.getattr_static(model, name, None)
    is_method = isinstance(found, (staticmethod, classmethod)) or callable(found)
    return found if is_method else None


#: Values that the parts of a batch may have in common.
_PLAIN = (str, bytes, int, float, type(None))


def _joined(parts: list[Any], owner: str, where: str = "") -> Any:
    """See ``ManagedModel.collate``. ``where`` is the place in what ``preprocess`` returned."""
    first = parts[0]
    kinds = {type(part) for part in parts}
    differ = ""
    if len(kinds) == 1:
        module = array_module(first)
        if module is not None and first.shape:
            try:
                return module.concatenate(parts)
            except (RuntimeError, ValueError) as error:
                shapes = ", ".join(str(tuple(part.shape)) for part in parts)
                raise ValueError(
                    f"the parts of a batch, which preprocess returned in several processes, have "
                    f"shapes that cannot be joined{where}: {shapes}; define "
                    f"{owner}.collate(parts), which may pad them"
                ) from error
        if isinstance(first, Mapping) and all(part.keys() == first.keys() for part in parts):
            joined = {
                key: _joined([part[key] for part in parts], owner, f"{where or ' at '}[{key!r}]")
                for key in first
            }
            # Such as what transformers' tokenizers return, which has methods of its own.
            return type(first)(joined) if isinstance(first, UserDict) else joined
        if isinstance(first, list):
            return [each for part in parts for each in part]
        if isinstance(first, tuple) and len({len(part) for part in parts}) == 1:
            columns = [
                _joined(list(column), owner, f"{where or ' at '}[{position}]")
                for position, column in enumerate(zip(*parts, strict=True))
            ]
            return type(first)(*columns) if hasattr(first, "_fields") else tuple(columns)
        if isinstance(first, _PLAIN):
            if all(part == first for part in parts):
                return first
            differ = ": they differ"
    names = " and ".join(sorted(kind.__qualname__ for kind in kinds))
    raise TypeError(
        "the parts of a batch, which preprocess returned in several processes, cannot be joined"
        f"{where} (type {names}{differ}); define {owner}.collate(parts)"
    )


def array_module(value: Any) -> Any:
    """numpy for an array, torch for a tensor; else None."""
    for name, kind in (("numpy", "ndarray"), ("torch", "Tensor")):
        module = sys.modules.get(name)  # not loaded: the value is not of this module
        if isinstance(value, getattr(module, kind, ())):
            return module
    return None


#: In a worker, the device that its environment shows already; None elsewhere. Its number is one of
#: the parent's, who may see a part of the GPUs: it must not be set as it is.
shown_device: int | str | None = None
