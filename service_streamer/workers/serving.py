"""What a worker does from its model's loading to its end, whatever it runs in."""

from __future__ import annotations

import contextlib
import gc
import pickle
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from ..gpu.faults import DeviceFailed, Guard
from ..gpu.out_of_memory import is_out_of_memory
from ..gpu.places import Place, missing_gpu, visible_gpus
from ..gpu.torch_process import check_torch, limit_memory
from ..managed_model import is_shown
from .coded_channel import CodedChannel
from .diagnosis import EXIT_DEVICE_FAILED, EXIT_START_FAILED
from .environment import limit_loaded_torch
from .model_spec import LoadedModel, ModelSpec
from .payload_channel import Memories
from .progress import StageProgress
from .protocol import DeviceFailure, Failure, Frame, StartFailure, WorkerStarted
from .runner import serve

if TYPE_CHECKING:
    from .preprocess_pool import PreprocessPool


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
        channel.codec = spec.codec
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
    from .preprocess_pool import PreprocessPool  # others need neither it nor what it imports

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
