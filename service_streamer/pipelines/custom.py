"""A user's own model or function behind the web service's items."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from ..errors import InvalidInput
from ..managed_model import ManagedModel, has_stages, has_steps
from ..workers.mending import at_positions
from ..workers.model_spec import (
    ModelSpec,
    View,
    Wrapper,
    check_outputs,
    check_preprocess,
    import_model,
    stacks,
)
from .requests import has_arrays, plain, with_arrays
from .tasks import parse_item

#: Stands for "predict" where the result keeps its arrays.
_INFER = "infer"

#: Of inputs that are no rows of an array.
_OTHERS = (str, bytes, int, float, list, dict, type(None))


class CustomModel(Wrapper):
    """Wraps a ManagedModel class or a function of a batch: it answers "predict" and "describe".

    Its exceptions, and what it calls out of memory, stay as they are. A model of steps is called
    itself, with the inputs as items.

    The result of an input that is an array, or a dict with arrays, keeps its own arrays. Other
    results become plain data.
    """

    view: View | None = None

    def init_preprocess(
        self,
        target: str,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        **_: Any,
    ) -> None:
        """In a process of ``preprocess_workers``, build the model without loading it.

        Args:
            target, args, kwargs: as for ``init_model``, which does this in the worker.

        Raises:
            TypeError: the model has no ``preprocess``.
            Exception: whatever importing it and its ``init_preprocess`` raise.
        """
        if not self.preprocesses_only:
            return
        model = import_model(target)
        check_preprocess(model)
        self.model = model(self.gpu_id)
        self.model.preprocesses_only = self._has_stages = True
        self.model.init_preprocess(*args, **kwargs or {})

    def init_model(
        self,
        target: str,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        has_lengths: bool = False,
    ) -> None:
        """Import and load the model.

        Args:
            target: import path, "package.module:Name".
            args, kwargs: arguments of its ``init_model``; a function takes none.
            has_lengths: whether the web process knows item lengths; see ``length_of_inputs``.

        Raises:
            ValueError: ``target`` is not an import path.
            TypeError: it is neither a ManagedModel subclass nor a function of a batch.
            TypeError, ValueError: it declares inputs or outputs that are none.
            Exception: whatever importing and loading it raise.
        """
        module, _, name = target.partition(":")
        if not module or not name:
            raise ValueError(f'the model must be "package.module:Name"; not {target!r}')
        self._loaded = ModelSpec(target, args, kwargs, has_lengths=has_lengths).load(self.gpu_id)
        self.model = self._loaded.managed
        self._has_stages = self.model is not None and has_stages(type(self.model))
        self.wants_rows = self._loaded.stack and not self._has_stages
        self.out_of_memory_errors = self._loaded.out_of_memory_errors
        declares = self._loaded.predict if self.model is None else type(self.model)
        self.description = {
            "task": "custom",
            "model": target,
            "revision": None,
            "mask_token": None,
            "operations": ["predict"],
            "takes_parameters": False,
            "labels": None,
            "candidate_labels_required": False,
            "max_tokens": None,
            "device": None if self.gpu_id is None else str(self.gpu_id),
            "attention": None,
            "compiled": False,
            "batch_sizes": None,
            "dtype": None,
            "dtype_reason": None,
            "quantization": None,
            "example": None,
            # Whether an item is an input, whatever that is: there is no other operation.
            "bare_items": self.model is not None and has_steps(type(self.model)),
            "inputs": declared_tensors(declares, "inputs"),
            "outputs": declared_tensors(declares, "outputs"),
        }

    def unwrapped(self) -> ManagedModel:
        model = self.model
        if model is None or not has_steps(type(model)):
            return self
        model.describe = self.describe  # the service shows the same of every model
        return model  # type: ignore[no-any-return]

    def describe(self) -> dict[str, Any]:
        return self.description

    def preprocess(self, items: list[Any]) -> tuple[list[str], Any]:
        """The operations, and the batch for the model, which sees the inputs alone.

        Raises:
            InvalidInput: an item asks for another operation, or has parameters.
            Exception: whatever the model raises.
        """
        requests = [parse_item(item) for item in items]
        for do, _, parameters in requests:
            if do not in ("predict", "describe"):
                raise InvalidInput(f"do: this model cannot {do[:60]!a}; it can predict")
            if parameters:
                raise InvalidInput("parameters: this model takes none; leave them out")
        inputs = [value for do, value, _ in requests if do == "predict"]
        operations = [_INFER if has_arrays(value) else do for do, value, _ in requests]
        if inputs and self._has_stages:
            return operations, self.model.preprocess(inputs)
        return operations, inputs

    def collate(self, parts: list[tuple[list[str], Any]]) -> tuple[list[str], Any]:
        """Join parts that ``preprocess`` made. Raises whatever the model's ``collate`` raises."""
        operations = [do for part, _ in parts for do in part]
        inputs = [found for part, found in parts if _computed(part)]
        return operations, self.model.collate(inputs) if inputs else []

    def forward(self, batch: tuple[list[str], Any]) -> tuple[list[str], Any]:
        """Compute the batch. Raises whatever the model raises."""
        operations, inputs = batch
        if not _computed(operations):
            return operations, []
        if self.wants_rows and _INFER in operations:
            return operations, self._by_rows(inputs)
        compute = self.model.forward if self._has_stages else self._loaded.predict
        return operations, compute(inputs)

    def _by_rows(self, inputs: list[Any]) -> list[Any]:
        """Compute arrays as the rows of one array for each shape, and other inputs as a list."""
        arrays = [place for place, each in enumerate(inputs) if not isinstance(each, _OTHERS)]
        others = [place for place, each in enumerate(inputs) if isinstance(each, _OTHERS)]
        parts: list[tuple[Sequence[int], Any]] = [
            ([arrays[row] for row in stack.positions], stack.batch)
            for stack in stacks([inputs[place] for place in arrays], self.view)
        ]
        if others:
            parts.append((others, [inputs[place] for place in others]))
        results: list[Any] = [None] * len(inputs)
        for places, batch in parts:
            with at_positions(places):
                found = self._loaded.predict(batch)
            for place, result in zip(
                places, check_outputs(self._loaded, found, len(places)), strict=True
            ):
                results[place] = result
        return results

    def postprocess(self, outputs: tuple[list[str], Any]) -> list[Any]:
        """One result per item, in order.

        Raises:
            BadModelOutput: the model did not return one result per item.
            Exception: whatever the model raises.
        """
        operations, found = outputs
        model, count = self._loaded, _computed(operations)
        if count and self._has_stages:
            found = self.model.postprocess(found)
        results = iter(check_outputs(model, found, count) if count else ())
        self.padding = model.padding
        return [
            self.description
            if do == "describe"
            else with_arrays(next(results))
            if do == _INFER
            else plain(next(results))
            for do in operations
        ]


def _computed(operations: Sequence[str]) -> int:
    """How many of the items the model computes."""
    return len(operations) - operations.count("describe")


# -- what a model says of its inputs and outputs, for clients that send tensors


#: Names of the types of elements in the Open Inference Protocol.
DATATYPES = (
    "BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64",
    "FP16", "FP32", "FP64", "BF16", "BYTES",
)  # fmt: skip


class TensorSpec(TypedDict):
    """An input or output, in the form of the protocol's metadata.

    Attributes:
        shape: -1 for any size; the first dimension is the batch.
    """

    name: str
    datatype: str
    shape: list[int]


def declared_tensors(model: object, attribute: str) -> list[TensorSpec]:
    """The tensors that a model's class or function declares; empty if it declares none.

    Args:
        attribute: "inputs" or "outputs": a list of (name, datatype, shape).

    Raises:
        TypeError, ValueError: the attribute is there, and is no such list.
    """
    value = getattr(model, attribute, None)
    if value is None:
        return []
    where = f"{getattr(model, '__qualname__', model)}.{attribute}"
    if not isinstance(value, (list, tuple)):
        raise TypeError(
            f"{where} must be a list of (name, datatype, shape), such as "
            f'[("x", "FP32", (-1, 3))]; not {value!r:.100}'
        )
    specs = [_spec(each, f"{where}[{number}]") for number, each in enumerate(value)]
    names = [each["name"] for each in specs]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"{where} has two tensors of the name {name!r}")
    return specs


def _spec(value: object, where: str) -> TensorSpec:
    if not isinstance(value, Sequence) or isinstance(value, str) or len(value) != 3:
        raise TypeError(f"{where} must be (name, datatype, shape); not {value!r:.100}")
    name, datatype, shape = value
    if not isinstance(name, str) or not name:
        raise TypeError(f"{where}: the name must be a text; not {name!r:.100}")
    if datatype not in DATATYPES:
        raise ValueError(
            f"{where}: the datatype must be one of {', '.join(DATATYPES)}; not {datatype!r:.100}"
        )
    return {"name": name, "datatype": datatype, "shape": _shape(shape, where)}


def _shape(shape: Any, where: str) -> list[int]:
    is_shape = isinstance(shape, (list, tuple)) and all(
        type(size) is int and (size == -1 or size > 0) for size in shape
    )
    if not is_shape or not shape or shape[0] != -1:
        raise ValueError(
            f"{where}: the shape must be a list of sizes, or -1 for any size, of which the first, "
            f"that of the batch, is -1; not {shape!r:.100}"
        )
    return [*shape]
