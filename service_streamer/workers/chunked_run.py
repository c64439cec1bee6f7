"""Computes a batch in parts when the device's memory is short, and says what errors mean."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import InvalidItems
from ..gpu.faults import DeviceFailed
from ..gpu.out_of_memory import is_out_of_memory
from ..gpu.torch_process import release_memory
from .batch_ceiling import Chunk
from .bisection import OutOfMemory
from .model_spec import LoadedModel
from .protocol import Failure
from .stage_calls import StageCalls, at_positions

if TYPE_CHECKING:  # it imports this module
    from .stages import Job


class StagedChunk(NamedTuple):
    """The items ``start`` to ``stop`` of a batch, and what the last stage made of them."""

    start: int
    stop: int
    data: Any


def caught(error: BaseException, model: LoadedModel, batch_id: int) -> Failure | OutOfMemory:
    """What a model's error means; raises it again if it is no error of a batch."""
    if isinstance(error, InvalidItems):  # where they could not be dropped
        error = next(iter(error.errors.values()))
    too_large = is_out_of_memory(error, model.out_of_memory_errors)
    if not too_large:
        if not isinstance(error, Exception):
            raise error
        try:
            model.guard.look(error)  # before it loses its causes
        except DeviceFailed as end:
            end.batch_ids.add(batch_id)
            raise
    failure = Failure.caught(error)
    return OutOfMemory(failure) if too_large else failure


def prepared_chunks(items: list[Any], model: LoadedModel, calls: StageCalls) -> list[StagedChunk]:
    """The chunks in which the items will probably be computed. Raises what the model raises."""
    prepare = calls.prepare
    assert prepare is not None
    lengths = model.lengths(items)  # first: where it knows none any more, the ceiling is a new one
    chunks: list[StagedChunk] = []
    for start, stop in model.ceiling.planned(len(items), lengths):
        with at_positions(range(start, stop)):
            chunks.append(StagedChunk(start, stop, prepare(items[start:stop])))
    return chunks


def compute_in_chunks(job: Job, model: LoadedModel, calls: StageCalls) -> None:
    """Compute a batch in as many runs as it takes."""
    items = job.items
    chunks: list[StagedChunk] = []
    ready: dict[tuple[int, int], Any] = {}
    whole, job.ran_out, job.too_large = job.ran_out, None, None
    if whole is not None:
        # Only now: where the error was raised, its frames still held the model's tensors.
        release_memory()
    elif job.chunks is None:
        ready[0, len(items)] = job.data
    else:
        ready = {(start, stop): data for start, stop, data in job.chunks}
    job.data = job.chunks = None
    too_large: dict[int, Failure] = {}
    lengths = model.lengths(items)  # as above
    for chunk in model.ceiling.chunks(len(items), lengths, may_rerun=model.may_rerun):
        is_part = chunk.stop - chunk.start < len(items)
        if whole is not None and is_part and model.may_rerun:
            whole = None  # which of the parts ran out is not known: each of them will tell
        ran = whole or _run(chunk, job, ready, model, calls)
        if isinstance(ran, StagedChunk):
            chunks.append(ran)
            continue
        if isinstance(ran, Failure):
            job.fail(ran)
            return
        # Where nothing is computed again all parts fail, and the first stands for them.
        chunk.has_run_out = ran is not whole or not chunk.start
        if chunk.is_last_try:
            too_large |= dict.fromkeys(range(chunk.start, chunk.stop), ran.failure)
        if model.may_rerun:
            whole = None
    job.chunks = chunks
    if too_large:
        size = len(items) + len(job.failures)
        positions = [i for i in range(size) if i not in job.failures]
        job.too_large = {positions[i]: failure for i, failure in too_large.items()}


def _run(
    chunk: Chunk,
    job: Job,
    ready: dict[tuple[int, int], Any],
    model: LoadedModel,
    calls: StageCalls,
) -> StagedChunk | Failure | OutOfMemory:
    """Compute one chunk, of what is ready of it or of its items."""
    start, stop = chunk.start, chunk.stop
    data: Any
    try:
        if (start, stop) in ready:
            data = ready.pop((start, stop))
        else:
            data = job.items[start:stop]
            if calls.prepare is not None:
                data = calls.prepare(data)
        data = calls.compute(data)
        if job.is_redone:  # its last stage may run out as well, and has to be tried here
            data = calls.finish(data, stop - start)
        return StagedChunk(start, stop, data)
    except BaseException as error:
        ran = caught(error, model, job.batch_id)
    data = None
    if isinstance(ran, OutOfMemory):
        release_memory()
    return ran
