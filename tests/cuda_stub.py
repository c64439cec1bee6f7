"""A ``torch`` whose GPU has streams, events and memory that fail as real ones do. No GPU is needed.

Work on a stream is done when the GPU gets to it, not when it is launched: a read before its event
sees garbage. A GPU with ``is_eager`` copies does the work of all streams but the default one as
soon as their order allows; the other kind does nothing before somebody waits for it. Code that
leaves out a wait, or a ``record_stream``, fails with one of them.
"""

from __future__ import annotations

import contextlib
import threading
import types
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

GARBAGE = "garbage"


class Event:
    """As torch.cuda.Event, with times in simulated seconds."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False) -> None:
        self.enable_timing = enable_timing
        self.blocking = blocking
        self.stream: Stream | None = None
        self.done_at: float | None = None

    @property
    def device(self) -> Device:
        assert self.stream is not None, "it was never recorded"
        return self.stream.device

    def record(self, stream: Stream) -> None:
        stream.gpu.check()
        self.stream, self.done_at = stream, None
        stream.launch(lambda: setattr(self, "done_at", stream.now))

    def wait(self, stream: Stream) -> None:
        stream.launch(None, after=self)

    def synchronize(self) -> None:
        if self.stream is not None:
            self.stream.gpu.check()
            self.stream.run(until=self)
            self.stream.gpu.check()

    def elapsed_time(self, end: Event) -> float:
        assert self.enable_timing
        assert end.enable_timing
        assert self.done_at is not None, "device not ready"
        assert end.done_at is not None, "device not ready"
        return (end.done_at - self.done_at) * 1000


class Stream:
    """As torch.cuda.Stream.

    Attributes:
        now: until when it has computed.
    """

    def __init__(self, gpu: Gpu, device: int = 0, *, is_default: bool = False) -> None:
        self.gpu = gpu
        self.device = Device("cuda", device)
        self.is_default = is_default
        self.now = 0.0
        self.work: deque[tuple[Callable[[], None] | None, Event | None, float, float]] = deque()

    def launch(
        self, run: Callable[[], None] | None, seconds: float = 0.0, after: Event | None = None
    ) -> None:
        self.gpu.check()
        self.work.append((run, after, seconds, self.gpu.now))
        if self.gpu.is_eager:
            self.gpu.run_copies()

    def run(self, until: Event | None = None, *, may_wait: bool = True) -> None:
        """Do the work that was launched, up to an event."""
        with self.gpu.lock:
            self._run(until, may_wait=may_wait)

    def _run(self, until: Event | None, *, may_wait: bool) -> None:
        while self.work and not self.gpu.error and (until is None or until.done_at is None):
            run, after, seconds, launched_at = self.work[0]
            if after is not None and after.stream is not None and after.done_at is None:
                if not may_wait:
                    return
                after.stream.run(until=after)
                continue
            self.work.popleft()
            began_at = max(self.now, launched_at, (after and after.done_at) or 0.0)
            self.now = began_at + seconds
            if run is not None:
                run()

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        event.wait(self)

    def wait_stream(self, stream: Stream) -> None:
        self.wait_event(stream.record_event())


class Device:
    """As torch.device."""

    def __init__(self, kind: str | Device, index: int | None = None) -> None:
        self.type, _, number = str(kind).partition(":")
        self.index = int(number) if number else index

    def __str__(self) -> str:
        return self.type if self.index is None else f"{self.type}:{self.index}"

    def __eq__(self, other: object) -> bool:
        return str(self) == str(other)

    def __hash__(self) -> int:
        return hash(str(self))


class Memory:
    """Some of it; what is in it outlives the tensors."""

    def __init__(self) -> None:
        self.content: Any = GARBAGE


class Storage:
    """What the tensors of some memory share. Without them the memory is given to the next ones.

    Attributes:
        pool: where it goes then, with the events before which nobody may get it.
        is_pinned: whether a GPU copies from it, or to it, by itself.
        streams: those that use it besides its own, as far as it was told.
    """

    def __init__(
        self, gpu: Gpu, pool: Any, *, is_pinned: bool = False, memory: Memory | None = None
    ) -> None:
        self.gpu = gpu
        self.pool = gpu.pools.setdefault(pool, [])
        self.is_pinned = is_pinned
        self.streams: set[Stream] = set()
        self.events: list[Event] = []
        self.memory = memory or self._taken()

    def _taken(self) -> Memory:
        for number, (memory, events) in enumerate(self.pool):
            if all(event.done_at is not None for event in events):
                del self.pool[number]
                return memory
        return Memory()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # the GPU has failed
            events = [stream.record_event() for stream in self.streams]
            self.pool.append((self.memory, self.events + events))


class Tensor:
    """As torch.Tensor; its value is one object."""

    layout = "strided"
    is_quantized = False
    shape, dtype = (1,), "float32"
    _base = None  # it is no view

    def __init__(self, storage: Storage, device: Device, *, is_conj: bool = False) -> None:
        self.storage = storage
        self.device = device
        self.is_conj = is_conj

    @property
    def value(self) -> Any:
        assert self.device.type == "cpu"
        return self.storage.memory.content

    def is_pinned(self) -> bool:
        return self.storage.is_pinned

    def pin_memory(self) -> Tensor:
        assert self.device.type == "cpu"
        tensor = self.storage.gpu.on_host(is_pinned=True)
        tensor.storage.memory.content = self.value
        return tensor

    def detach(self) -> Tensor:
        return Tensor(self.storage, self.device, is_conj=self.is_conj)

    contiguous = resolve_neg = detach

    def resolve_conj(self) -> Tensor:
        return self.storage.gpu.computed(self, 0.0) if self.is_conj else self

    def record_stream(self, stream: Stream) -> None:
        assert self.device.type == "cuda"
        self.storage.streams.add(stream)

    def to(self, device: Device, non_blocking: bool = False) -> Tensor:
        if device.type == "cpu":
            return self.cpu()
        if self.device.type != "cpu":
            return self
        return self.storage.gpu.on_device(device.index or 0).copy_(self, non_blocking=non_blocking)

    def cpu(self) -> Tensor:
        return self if self.device.type == "cpu" else self.storage.gpu.on_host().copy_(self)

    def copy_(self, source: Tensor, non_blocking: bool = False) -> Tensor:
        gpu, there, here = self.storage.gpu, self.storage, source.storage
        is_to_host = self.device.type == "cpu"
        host = there if is_to_host else here
        stream = gpu.stream_of(source if is_to_host else self)
        non_blocking = non_blocking and host.is_pinned
        # torch conjugates on the host, at once, what has not arrived.
        is_lost = source.is_conj and is_to_host and non_blocking
        to, of = there.memory, here.memory  # work on a stream keeps no tensor alive
        stream.launch(lambda: is_lost or setattr(to, "content", of.content), gpu.copy_seconds)
        if host.is_pinned:
            host.events.append(stream.record_event())
        if not non_blocking:
            gpu.synchronizations += 1
            stream.run()
        return self


class Gpu:
    """The GPUs of a process, and the ``torch`` that it sees.

    Args:
        count: devices.

    Attributes:
        now: the host's time, simulated seconds.
        copy_seconds: what each copy takes.
        synchronizations: how often the host waited for a whole stream.
        error: what every call raises; None while the GPU works.
        is_initialized: whether the process uses it.
        current: the current stream of each device.
    """

    def __init__(
        self, *, is_eager: bool = False, count: int = 1, is_initialized: bool = True
    ) -> None:
        self.now = self.copy_seconds = 0.0
        self.synchronizations = 0
        self.is_eager = is_eager
        self.is_initialized = is_initialized
        self.error: Exception | None = None
        self.lock = threading.RLock()  # two threads may wait at the same time
        self.pools: dict[Any, list[tuple[Memory, list[Event]]]] = {}
        self.streams = [Stream(self, device, is_default=True) for device in range(count)]
        self.current = list(self.streams)
        self.torch = self._torch()

    def check(self) -> None:
        assert self.is_initialized, "a context was made"
        if self.error is not None:
            raise self.error

    def compute(self, seconds: float, device: int = 0) -> None:
        """A kernel on the current stream."""
        self.current[device].launch(lambda: None, seconds)

    def computed(
        self, tensor: Tensor, seconds: float = 1.0, of: Callable[[Any], Any] = lambda value: value
    ) -> Tensor:
        """What a kernel on the current stream makes of a tensor."""
        result = self.on_device(tensor.device.index or 0)
        there, here = result.storage.memory, tensor.storage.memory
        stream = self.stream_of(tensor)
        stream.launch(lambda: setattr(there, "content", of(here.content)), seconds)
        return result

    def on_host(self, value: Any = GARBAGE, *, is_pinned: bool = False) -> Tensor:
        memory = None if is_pinned else Memory()
        pool = "pinned" if is_pinned else "pageable"
        tensor = Tensor(Storage(self, pool, is_pinned=is_pinned, memory=memory), Device("cpu"))
        if not is_pinned:
            tensor.storage.memory.content = value
        return tensor

    def on_device(self, device: int) -> Tensor:
        """A new tensor; the memory is the current stream's."""
        return Tensor(Storage(self, self.current[device]), Device("cuda", device))

    def stream_of(self, tensor: Tensor) -> Stream:
        return self.current[tensor.device.index or 0]

    def run_copies(self) -> None:
        for stream in self.streams:
            if not stream.is_default:
                stream.run(may_wait=False)

    def _torch(self) -> Any:
        gpu = self

        def stream_on(device: Any = 0) -> Stream:
            gpu.check()
            stream = Stream(gpu, index(device))
            gpu.streams.append(stream)
            return stream

        def index(device: Any) -> int:
            return int(getattr(device, "index", device) or 0)

        @contextlib.contextmanager
        def current(stream: Stream) -> Iterator[None]:
            number = index(stream.device)
            before, gpu.current[number] = gpu.current[number], stream
            try:
                yield
            finally:
                gpu.current[number] = before

        torch: Any = types.ModuleType("torch")
        torch.Tensor, torch.device, torch.strided = Tensor, Device, Tensor.layout
        torch.empty = lambda _, dtype, pin_memory: gpu.on_host(is_pinned=pin_memory)
        torch._C = types.SimpleNamespace(_cuda_hasPrimaryContext=lambda _: True)
        torch.cuda = types.ModuleType("torch.cuda")
        vars(torch.cuda).update(
            is_initialized=lambda: gpu.is_initialized,
            device_count=lambda: len([each for each in gpu.streams if each.is_default]),
            current_device=lambda: 0,
            current_stream=lambda device=0: gpu.current[index(device)],
            Stream=stream_on, Event=Event, stream=current,
        )  # fmt: skip
        return torch
