"""Somebody's own model or function, so that it takes the items of the web service."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import BadModelOutput, InvalidInput
from ..managed_model import ManagedModel, find_length
from ..options.checks import is_sequence
from ..workers.runner import Predict, describe, import_model
from .requests import plain
from .tasks import parse_item

__all__ = ["CustomModel"]

logger = logging.getLogger(__name__)


class CustomModel(ManagedModel):
    """Wraps a ManagedModel class or a function of a batch: it answers "predict" and "describe".

    What it raises stays as it is, and what is out of memory for it is so for this one.
    """

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
            target: where it is, "package.module:Name".
            args, kwargs: of its ``init_model``; a function takes none.
            has_lengths: whether it is known what inputs cost; see ``length_of_inputs``.

        Raises:
            TypeError: it is neither a ManagedModel subclass nor a function of a batch.
            Exception: whatever importing and loading it raise.
        """
        module, _, name = target.partition(":")
        if not module or not name:
            raise ValueError(f'the model must be "package.module:Name"; not {target!r}')
        model = import_model(target)
        self._inner: Predict
        if isinstance(model, type):
            if not has_lengths and find_length(model) is not None:
                logger.warning(
                    "%s.length is not used, since models are imported by their workers only; with "
                    "--length %s.length it is",
                    describe(model), target,
                )  # fmt: skip
            self.model = model(self.gpu_id)
            self.model.init_model(*args, **dict(kwargs or {}))
            self.out_of_memory_errors = self.model.out_of_memory_errors
            self._inner = self.model.predict
        elif args or kwargs:
            raise TypeError(
                f"{describe(model)} is a function: init arguments are for a ManagedModel"
            )
        else:
            self._inner = model
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
            "dtype": None,
            "example": None,
        }

    def describe(self) -> dict[str, Any]:
        return self.description

    def predict(self, batch: list[Any]) -> list[Any]:
        """Compute one result per item, in order; the model sees the inputs alone.

        Raises:
            InvalidInput: an item asks for more than "predict" without parameters.
            Exception: whatever the model raises.
        """
        requests = [parse_item(item) for item in batch]
        for do, _, parameters in requests:
            if do not in ("predict", "describe"):
                raise InvalidInput(f"do: this model cannot {do[:60]!a}; it can predict")
            if parameters:
                raise InvalidInput("parameters: this model takes none; leave them out")
        inputs = [value for do, value, _ in requests if do == "predict"]
        outputs = iter(self._computed(inputs) if inputs else ())
        self.padding = getattr(self.model, "padding", None)
        return [
            self.description if do == "describe" else plain(next(outputs)) for do, _, _ in requests
        ]

    def _computed(self, inputs: list[Any]) -> Any:
        outputs = self._inner(inputs)
        got = type(outputs).__qualname__
        if is_sequence(outputs) and len(outputs) == len(inputs):
            return outputs
        raise BadModelOutput(
            f"{describe(self._inner)} must return a sequence of {len(inputs)} results, one per "
            f"item; it returned {got}" + (f" of {len(outputs)}" if is_sequence(outputs) else "")
        )
