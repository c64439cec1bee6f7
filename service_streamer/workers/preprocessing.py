"""What a preprocess process runs: the ``preprocess`` of a worker's model, without its model.

To the transport it is a worker like any other. Its items are parts of batches, and its results are
what ``preprocess`` made of them.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pickle
import signal
from collections.abc import Callable
from typing import Any, NamedTuple

from ..errors import InvalidItems
from ..managed_model import ManagedModel
from .model_spec import LoadedModel, ModelSpec, describe, import_model
from .protocol import EXIT_START_FAILED, Failure

#: Of Linux's prctl.
_PR_SET_PDEATHSIG = 1


class InvalidPart(NamedTuple):
    """In place of what ``preprocess`` returned: it called items of the part invalid.

    Attributes:
        failures: by position in the part.
    """

    failures: dict[int, Failure]

    def errors(self) -> dict[int, Exception]:
        """Those that it named, by position in the part."""
        copies = ((position, each.exception()) for position, each in self.failures.items())
        return {position: error for position, error in copies if isinstance(error, Exception)}


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


class PreprocessSpec(ModelSpec):
    """What a preprocess process loads.

    Args:
        spec: the worker's; as it was pickled, if this process is not forked.
    """

    cannot_send = "what preprocess returned, of type {kind}, cannot be sent to the worker"
    cannot_load = "what preprocess returned cannot be unpickled in the worker"

    def __init__(self, spec: ModelSpec | bytes) -> None:
        super().__init__(spec)
        self._worker = os.getpid()

    def load(
        self,
        gpu_id: int | str | None,
        *,
        attach: Callable[[ManagedModel], None] | None = None,  # noqa: ARG002 - nothing stands in
    ) -> LoadedModel:
        """The function of a list of parts. Raises whatever importing and loading raise."""
        _end_with(self._worker)
        spec: ModelSpec = pickle.loads(self.model) if isinstance(self.model, bytes) else self.model
        model = import_model(spec.model) if isinstance(spec.model, str) else spec.model
        check_preprocess(model)
        managed: ManagedModel = model(gpu_id)
        managed.preprocesses_only = True
        managed.init_preprocess(*spec.args, **spec.kwargs or {})

        def prepared(part: list[Any]) -> Any:
            try:
                return managed.preprocess(part)
            except InvalidItems as error:
                return InvalidPart({i: Failure.caught(each) for i, each in error.errors.items()})

        def preprocess(parts: list[Any]) -> list[Any]:
            try:
                return [prepared(part) for part in parts]
            except AttributeError as error:
                # The usual mistake. The second is None, or a model of a user's that is wrapped.
                if error.obj is managed or error.obj is managed.model:
                    error.add_note(
                        "A preprocess process calls init_preprocess, and not init_model: load "
                        "there what preprocess needs."
                    )
                raise

        return LoadedModel(self, preprocess)


def _end_with(worker: int) -> None:
    """Have the kernel end this process with its worker, also when it hangs in native code.

    The worker is killed because of such a hang; the thread that watches for its end may not get to
    run then.

    Raises:
        SystemExit: it has ended already, and there is no one left to tell.
    """
    with contextlib.suppress(AttributeError, OSError):  # not Linux
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != worker:
        raise SystemExit(EXIT_START_FAILED)
