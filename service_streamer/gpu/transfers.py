"""The way to a GPU and back, and how long a stage takes there.

A kernel or a copy is launched and not waited for, so ``forward`` returns before the GPU has
computed. Only ``postprocess`` waits, in its own thread and for its own batch:

    stream     does                                        waits for
    ------     ----                                        ---------
    to GPU     copies batch k+1 from pinned memory         nothing
    current    computes batch k                            its copy
    to host    copies results k-1 to pinned memory         their computation

So what the GPU takes for a stage is read from two events, one before and one after its work.

Nothing here imports torch, and nothing makes a context on a device in a process that has none.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import sys
import time
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any, Generic, TypeVar, cast

from .accelerators import TORCH_KINDS, Accelerator, kind_in_use

T = TypeVar("T")

#: By torch's module, purpose and device: a GPU copies both ways at once.
_streams: dict[tuple[Any, str, int], Any] = {}


def to_pinned(batch: T) -> T:
    """A batch in pinned memory, which a GPU copies from by itself. For ``preprocess``.

    Without a GPU in use it stays where it is, and ``to_device`` does the rest.

    Args:
        batch: a tensor, or a dict, list, tuple or dataclass of tensors and other values, nested at
            will; the tensors on the CPU are replaced in a copy of it.
    """
    return batch if kind_in_use() is None else cast(T, _map_tensors(batch, _pin))


def to_device(batch: T, device: Any) -> T:
    """A batch on the device, for ``forward``. It does not wait for the copy; what computes does.

    To a GPU it copies through pinned memory, on a stream of its own: while the previous batch
    computes.

    Args:
        batch: as for ``to_pinned``.
        device: ``"cuda"``, ``"cuda:1"``, ``"cpu"``, a torch.device ...
    """
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return batch
    device = torch.device(device)
    kind = TORCH_KINDS.get(device.type)
    if kind is None:
        return cast(T, _map_tensors(batch, lambda tensor: tensor.to(device)))
    module = kind.torch
    number = module.current_device() if device.index is None else device.index
    current, copies = module.current_stream(number), stream_of(module, "to GPU", number)
    moved: list[Any] = []

    def move(tensor: Any) -> Any:
        if tensor.device.type != "cpu" or not _is_plain(tensor):
            return tensor.to(device, non_blocking=True)
        # Its memory is not reused before the copy is done: torch's allocator knows of it.
        pinned = _pin(tensor)
        with module.stream(copies):
            tensor = pinned.to(device, non_blocking=True)
        tensor.record_stream(current)  # or the next copy may get its memory, while this computes
        moved.append(tensor)
        return tensor

    batch = _map_tensors(batch, move)
    if moved:  # else it would wait for another thread's copies
        current.wait_stream(copies)
    return batch


class OnHost(Generic[T]):
    """Outputs on their way from the device to the host's memory. Any thread may wait for them."""

    def __init__(self, outputs: T, copied: list[Any]) -> None:
        self._outputs = outputs
        self._copied = copied

    def wait(self) -> T:
        """The outputs, with every tensor on the CPU, once all are there.

        Raises:
            Exception: what the GPU raised since, for this batch or for another.
        """
        for event in self._copied:
            event.synchronize()  # other threads may run meanwhile
        return self._outputs


def to_host(outputs: T) -> OnHost[T]:
    """Outputs on their way to the host, at the end of ``forward``. ``postprocess`` waits for them.

    From a GPU they are copied to pinned memory, on a stream of its own: the next batch may compute
    meanwhile.

    Args:
        outputs: as the batch of ``to_pinned``.
    """
    streams: dict[int, tuple[Accelerator, Any]] = {}

    def fetch(tensor: Any) -> Any:
        tensor = tensor.detach()
        kind = TORCH_KINDS.get(tensor.device.type)
        if kind is None or not _is_plain(tensor):
            return tensor.cpu()
        torch, number = sys.modules["torch"], tensor.device.index
        if number not in streams:
            streams[number] = kind, stream_of(kind.torch, "to host", number)
            streams[number][1].wait_stream(kind.torch.current_stream(number))
        stream = streams[number][1]
        with kind.torch.stream(stream):
            # What is not plain memory torch would convert on the CPU, before it has arrived.
            source = tensor.resolve_conj().resolve_neg().contiguous()
            there = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
            there.copy_(source, non_blocking=True)
        tensor.record_stream(stream)  # or what computes next may get its memory
        return there

    outputs = _map_tensors(outputs, fetch)
    return OnHost(outputs, [stream.record_event(kind.event()) for kind, stream in streams.values()])


def results_on_host(outputs: Any) -> Any:
    """A batch's results with their tensors on the CPU; all are copied before one is waited for.

    Args:
        outputs: what a model returned: ``OnHost``, a tensor of all results, or results. The first
            one says whether there are tensors of a GPU in them.
    """
    if type(outputs) is OnHost:
        return outputs.wait()
    first: Any = first_value(outputs)
    is_tensor = type(first) is getattr(sys.modules.get("torch"), "Tensor", None)
    return to_host(outputs).wait() if is_tensor and first.device.type != "cpu" else outputs


def first_value(outputs: Any) -> Any:
    """The first number, text, array or tensor in a model's outputs; None if they are empty."""
    first = outputs
    for _ in range(3):  # outputs, an output, its parts
        if isinstance(first, dict):
            first = next(iter(first.values()), None)
        elif isinstance(first, (list, tuple)):
            first = first[0] if first else None
        else:
            break
    return first


def stream_of(module: Any, purpose: str, device: int) -> Any:
    """A device's stream for one purpose, of torch's module, made at its first use."""
    key = module, purpose, device
    # Of two threads that make one, both get the first.
    return _streams.get(key) or _streams.setdefault(key, module.Stream(device))


def _pin(tensor: Any) -> Any:
    if tensor.device.type != "cpu" or not _is_plain(tensor) or tensor.is_pinned():
        return tensor
    return tensor.pin_memory()


def _is_plain(tensor: Any) -> bool:
    return tensor.layout is sys.modules["torch"].strided and not tensor.is_quantized


def _map_tensors(value: Any, move: Callable[[Any], Any]) -> Any:
    """A copy of a nested value in which ``move`` has replaced the tensors."""
    tensor = getattr(sys.modules.get("torch"), "Tensor", None)
    if tensor is None:
        return value
    if isinstance(value, tensor):
        return move(value)
    if isinstance(value, tuple):
        parts = [_map_tensors(each, move) for each in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if isinstance(value, list):
        return [_map_tensors(each, move) for each in value]
    if isinstance(value, MutableMapping):  # also transformers' BatchEncoding and ModelOutput
        clone: Any = copy.copy(value)
        for key, each in value.items():
            clone[key] = _map_tensors(each, move)
        return clone
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        clone = copy.copy(cast(Any, value))
        for field in dataclasses.fields(value):
            if hasattr(value, field.name):
                object.__setattr__(
                    clone, field.name, _map_tensors(getattr(value, field.name), move)
                )
        return clone
    return value


class StageTimer:
    """Times one batch in one stage, from the timer's making on.

    The thread of the stage makes and stops it. After that any one thread may ask for the seconds.
    """

    def __init__(self) -> None:
        self._seconds = 0.0
        #: Of each device that is in use: its number, and the events before and after the work.
        self._events: list[tuple[int, Any, Any]] = []
        self._began_at = time.monotonic()
        self._kind: Any = kind_in_use()
        if self._kind is not None:
            # A device that failed: the model's next call finds out, and says more about it.
            with contextlib.suppress(Exception):
                self._events = [self._start(device) for device in self._kind.devices_in_use()]

    def _start(self, device: int) -> tuple[int, Any, Any]:
        start, end = self._kind.event(timing=True), self._kind.event(timing=True)
        start.record(self._kind.torch.current_stream(device))
        return device, start, end

    def stop(self) -> None:
        """The stage has done its work for the batch, or launched it."""
        self._seconds = time.monotonic() - self._began_at
        try:
            for device, _, end in self._events:
                end.record(self._kind.torch.current_stream(device))
        except Exception:  # the device failed
            self._events = []

    @contextlib.contextmanager
    def following(self) -> Iterator[None]:
        """Have the GPU's work in the block follow the stage's work, and be done at its end.

        On a stream of its own. On the current one it would follow all that another thread has
        launched for the next batch meanwhile.
        """
        with contextlib.ExitStack() as streams:
            for device, _, end in self._events:
                stream = stream_of(self._kind.torch, "results", device)
                stream.wait_event(end)
                streams.enter_context(self._kind.torch.stream(stream))
                # What was computed there may be freed by this thread afterwards.
                streams.callback(stream.synchronize)
            yield

    def seconds(self) -> float:
        """What the batch took: the longer of the thread's time and the GPU's, in seconds.

        Blocks until the GPU has done the work that was launched before ``stop``. Raises nothing: if
        the GPU fails, this is the thread's time.
        """
        for _, start, end in self._events:
            with contextlib.suppress(Exception):
                end.synchronize()  # other threads may run meanwhile
                self._seconds = max(self._seconds, start.elapsed_time(end) / 1000)
        return self._seconds
