"""Batches that are too large for the device: how far they are cut, and what is learned of it."""

from __future__ import annotations

import math
import pickle
import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import device_models
import models
from models import DeviceFullError
from service_streamer import BadModelOutput, ManagedModel, Streamer
from service_streamer.workers.model_spec import LoadedModel, ModelSpec
from worker_loop import Batches, loaded, model_of, raised, served, texts

# -- how far a batch is cut

#: After so many full chunks that fitted a larger one is tried; after a failure, twice as many.
FIRST_INTERVAL = 32
LONGEST_INTERVAL = 1024


class Item(NamedTuple):
    position: int
    length: float
    is_huge: bool


class Run(NamedTuple):
    """One call of the model.

    Attributes:
        cost: items times the longest of them.
        limit: of the worker, before it.
    """

    start: int
    stop: int
    cost: float
    fitted: bool
    limit: float

    @property
    def size(self) -> int:
        return self.stop - self.start

    @property
    def is_probe(self) -> bool:
        return self.size > 1 and self.cost > self.limit > 0


class Limited(ManagedModel):
    """Fits what costs up to ``room``, and no huge item. Keeps its runs."""

    out_of_memory_errors = (DeviceFullError,)

    def init_model(self, room: float | Callable[[], float]) -> None:
        self.room = room
        self.runs: list[Run] = []
        self.worker: LoadedModel | None = None

    @staticmethod
    def length(item: Item) -> float:
        return item.length

    def predict(self, batch: list[Item]) -> list[int]:
        assert self.worker is not None
        room = self.room if isinstance(self.room, int | float) else self.room()
        positions = [item.position for item in batch]
        assert positions == list(range(positions[0], positions[0] + len(batch)))
        cost = len(batch) * max(item.length for item in batch)
        fitted = cost <= room and not any(item.is_huge for item in batch)
        limit = self.worker.ceiling.limit
        self.runs.append(Run(positions[0], positions[-1] + 1, cost, fitted, limit))
        if not fitted:
            raise DeviceFullError(f"no room for {len(batch)}")
        return positions


class Device:
    """A worker with room for so much, and what it has learned."""

    def __init__(self, room: float | Callable[[], float], **options: Any) -> None:
        self._worker = loaded(Limited, room, **options)
        self._model = model_of(self._worker)
        self._model.worker = self._worker

    @property
    def limit(self) -> float:
        return self._worker.ceiling.limit

    def compute(
        self, batch: int | Sequence[float], room: float | None = None, huge: Iterable[int] = ()
    ) -> list[Run]:
        """The runs of a batch of so many items, or of items of such lengths."""
        if room is not None:
            self._model.room = room
        lengths = [1.0] * batch if isinstance(batch, int) else batch
        items = [Item(i, length, i in set(huge)) for i, length in enumerate(lengths)]
        self._model.runs = []
        (report,) = served(self._worker, items)
        assert report.failure is None
        failed = set(report.failures)
        assert report.outputs == [None if i in failed else i for i in range(len(items))]
        runs: list[Run] = self._model.runs
        fitted = [i for run in runs if run.fitted for i in range(run.start, run.stop)]
        assert sorted([*fitted, *failed]) == list(range(len(items))), "each is done once"
        return runs

    def sizes(self, batch: int | Sequence[float], room: float | None = None) -> list[int]:
        """Of each run; negative where it ran out."""
        return [run.size if run.fitted else -run.size for run in self.compute(batch, room)]

    def until_probe(self, size: int, room: float) -> tuple[int, Run]:
        """Compute batches until one has a probe: after how many full runs, and that run."""
        full = 0
        while True:
            for run in self.compute(size, room):
                if run.is_probe:
                    return full, run
                full += run.size == run.limit


def settled(limit: int, asked: int) -> Device:
    """Has found this limit with a batch of this size."""
    device = Device(limit)
    device.compute(asked)
    assert device.limit == limit
    return device


@pytest.mark.parametrize(
    ("size", "room", "expected", "limit"),
    [
        (64, 63, [-64, 32, 32], 32),
        (64, 32, [-64, 32, 32], 32),
        (64, 31, [-64, -32, 16, 16, 16, 16], 16),
        (7, 6, [-7, 4, 3], 4),
        (7, 2, [-7, -4, 2, 2, 2, 1], 2),
        (3, 1, [-3, -2, 1, 1, 1], 1),
        (2, 1, [-2, 1, 1], 1),
    ],
)
def test_a_batch_is_halved_until_it_fits(
    size: int, room: int, expected: list[int], limit: int
) -> None:
    device = Device(room)
    assert device.sizes(size) == expected
    assert device.limit == limit
    assert device.sizes(size) == [run for run in expected if run > 0]


def test_probes_that_run_out_cost_one_run_and_become_rare() -> None:
    device = settled(32, asked=64)
    device.until_probe(64, 32)
    waits = []
    for _ in range(8):
        assert device.limit == 32, "what is known to fit stays"
        full, probe = device.until_probe(64, 32)
        assert not probe.fitted
        waits.append(full)
    # The batch of the probe that ran out has the first two full chunks.
    assert waits == [min(FIRST_INTERVAL * 2**i, LONGEST_INTERVAL) - 2 for i in range(1, 9)]


def test_memory_that_is_free_again_ends_the_limit() -> None:
    device = settled(1, asked=64)
    limits = []
    while device.limit:
        limits.append(device.until_probe(64, 64)[1].limit)
    assert limits[:9] == [1, 2, 3, 4, 5, 6, 7, 8, 10]
    assert len(limits) == 18
    assert device.sizes(64) == [64]


def test_the_limit_stays_until_as_much_has_fitted_as_is_asked_for() -> None:
    device = settled(32, asked=64)
    for _ in range(10 * FIRST_INTERVAL):
        device.compute(40, 40)
    assert device.limit == 40
    assert device.sizes(64, 64) == [50, 14]
    for _ in range(10 * FIRST_INTERVAL):
        device.compute(64)
    assert device.limit == 0


@pytest.mark.parametrize("position", [0, 6, 15])
def test_a_huge_item_fails_alone_and_leaves_no_limit(position: int) -> None:
    device = Device(16)
    runs = device.compute(16, huge=[position])
    assert [run.start for run in runs if run.size == 1 and not run.fitted] == [position]
    assert sum(not run.fitted for run in runs) == 5
    assert len(runs) <= 2 * math.log2(16) + 6
    assert device.limit == 0
    device = settled(8, asked=16)
    device.compute(16, huge=[position])
    assert device.limit == 8


def test_a_huge_item_does_not_hide_that_the_others_are_too_many() -> None:
    device = Device(16)
    runs = device.compute(64, huge=[0])
    assert [run.size if run.fitted else -run.size for run in runs] == [
        -64, -32, -16, -8, -4, -2, -1, 1, 2, 4, 8, 16, -32, 16, 16
    ]  # fmt: skip
    assert device.limit == 16


def test_a_device_without_any_room_fails_each_item_and_is_tried_again() -> None:
    device = Device(0)
    assert len(device.compute(16)) == 4 + 16
    assert device.sizes(16, 16) == [16]


#: However long an example takes: on a busy machine that says nothing.
ANY_TIME = settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow])


@ANY_TIME
@given(
    batches=st.lists(st.integers(1, 200), min_size=1, max_size=40),
    room=st.integers(1, 220),
    pace=st.integers(1, 60),
    data=st.data(),
)
def test_every_batch_is_done_in_few_runs_while_the_room_changes(
    batches: list[int], room: int, pace: int, data: st.DataObject
) -> None:
    """What fits changes every ``pace`` runs; at least one item always does."""
    count = 0

    def changing() -> int:
        nonlocal room, count
        count += 1
        if count % pace == 0:
            room = data.draw(st.integers(1, 220))
        return room

    device = Device(changing)
    full: int | None = None  # that fitted since the last probe or cut
    for size in batches:
        runs = device.compute(size)
        fitted = sum(run.fitted for run in runs)
        halvings = math.ceil(math.log2(size)) + 1
        assert len(runs) - fitted <= halvings + fitted // FIRST_INTERVAL
        for run in runs:
            if run.size > run.limit > 0:
                assert full is None or full >= FIRST_INTERVAL
                full = 0
            elif not run.fitted:
                full = 0
            elif run.size == run.limit and full is not None:
                full += 1


# -- the limit in costs


def with_lengths(room: float) -> Device:
    return Device(room, has_lengths=True)


def test_a_limit_in_costs_does_not_hold_short_items_to_what_long_ones_allow() -> None:
    device = with_lengths(400)
    assert device.sizes([100.0] * 16) == [-16, -8, 4, 4, 4, 4]
    assert device.limit == 400
    assert device.sizes([5.0] * 64) == [64]
    assert device.sizes([10.0] * 64) == [40, 24]
    assert device.sizes([100.0, 100.0, 10.0, 10.0, 10.0]) == [4, 1]


def test_more_is_tried_when_enough_cost_has_fitted() -> None:
    device = with_lengths(400)
    device.compute([100.0] * 16)
    tries = 0
    while device.limit == 400:
        tries += 1
        assert device.sizes([10.0] * 64, 500) == ([40, 24] if device.limit == 400 else [50, 14])
    assert device.limit == 500
    assert tries == FIRST_INTERVAL - 4 + 1, "four chunks were full, then one in each batch"


def test_items_of_no_length_lower_the_limit_only_for_a_while() -> None:
    device = with_lengths(-1)  # nothing fits
    device.compute([0.0] * 8)
    for _ in range(3 * FIRST_INTERVAL):
        device.compute([100.0] * 4, 400)
    assert device.limit >= 200 or device.limit == 0


class Measured(device_models.Padding):
    """Its lengths are no lengths, or are known only for the first items."""

    def init_model(self, lengths: list[Any]) -> None:  # type: ignore[override]
        super().init_model()
        self.lengths = lengths

    def length(self, item: str) -> Any:  # type: ignore[override]
        found = self.lengths.pop(0) if self.lengths else OSError("not now")
        if isinstance(found, Exception):
            raise found
        return found


@pytest.mark.parametrize("length", [OSError("not now"), math.nan, -1, "text"])
def test_a_worker_counts_items_where_their_lengths_cannot_be_used(length: Any) -> None:
    model = loaded(Measured, [length] * 100, has_lengths=True)
    long, short = served(model, ["x" * 100] * 16, ["x" * 5] * 64)
    assert (long.outputs, long.ceiling) == ([4] * 16, 4)
    assert isinstance(long.ceiling, int)
    assert short.outputs == [4] * 64


def test_lengths_that_end_in_the_midst_do_not_mix_units() -> None:
    model = loaded(Measured, [100] * 20, has_lengths=True)
    first, second = served(model, ["x" * 100] * 16, ["x" * 100] * 16)
    assert (first.ceiling, second.ceiling) == (400.0, 4)
    assert second.outputs == [4] * 16


LARGE_TEXT = "x" * (1 << 20)


class CountsBytes:
    """A length function that drags much along."""

    def __init__(self, more: str = LARGE_TEXT) -> None:
        self.more = more

    def __call__(self, item: str) -> int:
        return len(item)


@pytest.mark.parametrize(
    ("length", "size"),
    [(len, 64), (lambda item: len(item), 4), (CountsBytes(), 4)],
    ids=["by its name", "no pickle", "too large"],
)
def test_a_length_function_goes_to_the_worker_if_it_is_light(length: Any, size: int) -> None:
    with Streamer(device_models.Padding, 64, max_latency=5.0, length=length) as streamer:
        assert streamer.predict(["x" * 100] * 16) == [4] * 16
        assert streamer.predict(["x" * 5] * 64) == [size] * 64


# -- which errors are a lack of memory


class Raises(ManagedModel):
    """Computes single items only."""

    def init_model(self, error: BaseException) -> None:
        self.error = error

    def predict(self, batch: list[Any]) -> list[Any]:
        if len(batch) > 1:
            raise self.error
        return batch


def is_out_of_memory(error: BaseException, named: Any = ()) -> bool:
    """Whether the worker computes a batch in parts after this error."""
    model = type("Named", (Raises,), {"out_of_memory_errors": named})
    (report,) = served(loaded(model, error), [1, 2])
    assert report.failure is None or raised(report).args == error.args
    return report.failure is None


NATIVE = [
    "CUDA error: out of memory",
    "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported",
    "CUDA out of memory. Tried to allocate 2.00 GiB (GPU 0; 15.78 GiB total capacity)",
    "HIP out of memory. Tried to allocate 16.00 MiB",
    "XPU out of memory. Tried to allocate 16.00 MiB",
    "MPS backend out of memory (MPS allocated: 17.89 GB, other allocations: 1.35 GB)",
    "HIP error: out of memory",
    "CUDA driver error: out of memory",
    "CUDA runtime error: cudaErrorMemoryAllocation",
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "HIP error: HIPBLAS_STATUS_ALLOC_FAILED when calling `hipblasCreate(handle)`",
    "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
    "cuDNN failure 2: CUDNN_STATUS_ALLOC_FAILED ; GPU=0",
    "CUDNN_STATUS_ALLOC_FAILED",
    "MIOpen Error: miopenStatusAllocFailed",
    "CUDA failure 2: out of memory ; GPU=0 ; hostname=gpu-3",
    "cudaErrorMemoryAllocation: out of memory",
    "CUDA_ERROR_OUT_OF_MEMORY: out of memory",
    "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 17179869184 bytes.",
    "[enforce fail at alloc_cpu.cpp:118] err == 0. DefaultCPUAllocator: can't allocate memory: "
    "you tried to allocate 4000000000000 bytes. Error code 12 (Cannot allocate memory)",
    "The following operation failed in the TorchScript interpreter.\n"
    "Traceback of TorchScript (most recent call last):\n"
    "RuntimeError: CUDA error: out of memory",
]
#: A share of a GPU is full.
SHARE = (
    "CUDA out of memory. Tried to allocate 76.00 MiB. GPU 0 has a total capacity of 8.00 GiB "
    "of which 6.97 GiB is free. 3.50 GiB allowed; Of the allocated memory ..."
)
LIBRARIES = {
    "jaxlib.xla_extension": "RESOURCE_EXHAUSTED: Out of memory allocating 96 bytes.",
    "cupy.cuda.memory": "Out of memory allocating 8,000,000,000 bytes (allocated so far: 0)",
    "cupy_backends.cuda.api.runtime": "cudaErrorMemoryAllocation: out of memory",
    "tensorflow.python.framework.errors_impl": "OOM when allocating tensor with shape[64]",
    "onnxruntime.capi.onnxruntime_pybind11_state": "[ONNXRuntimeError] : 6 : RUNTIME_EXCEPTION : "
    "Non-zero status code returned while running MatMul node. Failed to allocate memory for "
    "requested buffer of size 1024",
    "numba.cuda.cudadrv.driver": "[2] Call to cuMemAlloc results in CUDA_ERROR_OUT_OF_MEMORY",
    "torch": SHARE,
}


def library_error(module: str, text: str) -> Exception:
    return type("Error", (Exception,), {"__module__": module})(text)


def caused_by(error: BaseException) -> ValueError:
    outer = ValueError("the model failed")
    outer.__cause__ = error
    return outer


def circle() -> BaseException:
    inner = RuntimeError(NATIVE[0])
    inner.__cause__ = caused_by(inner)
    return inner


@pytest.mark.parametrize(
    "error",
    [
        *map(RuntimeError, NATIVE),
        *map(device_models.NativeError, NATIVE),  # AcceleratorError is such a class
        *(library_error(*each) for each in LIBRARIES.items()),
        caused_by(RuntimeError(NATIVE[0])),
        circle(),
    ],
    ids=lambda error: f"{type(error).__module__}: {error}"[:60],
)
def test_a_lack_of_memory_is_known_by_the_texts_of_native_code(error: Exception) -> None:
    assert is_out_of_memory(error)


def after(error: BaseException) -> ValueError:
    """The model went on after it, and failed at something else."""
    outer = ValueError("the model failed")
    outer.__context__ = error
    return outer


class Rude(Exception):
    def __str__(self) -> str:
        raise OSError("no text")


@pytest.mark.parametrize(
    "error",
    [
        ValueError("CUDA error: out of memory"),  # of an input
        KeyError("CUDA out of memory"),
        RuntimeError("cannot parse 'CUDA error: out of memory'"),
        RuntimeError("ValueError: bad input CUDA out of memory"),
        RuntimeError("CUDA error: device-side assert triggered"),
        RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm`"),
        RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR"),
        RuntimeError("the queue is out of memory slots"),
        MemoryError(),
        RuntimeError("x" * 1_000_000 + "\nCUDA error: out of memory"),
        *(library_error("my_package", text) for text in LIBRARIES.values()),  # anybody may say so
        after(RuntimeError(NATIVE[0])),
        Rude(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_another_error_is_no_lack_of_memory_whatever_it_quotes(error: Exception) -> None:
    assert not is_out_of_memory(error)


@pytest.mark.parametrize(
    ("error", "is_named"),
    [
        (MemoryError(), True),
        (ValueError("the arena exhausted: 64 rows"), True),
        (ValueError("the arena"), False),
    ],
)
def test_a_model_may_name_classes_and_texts_of_errors(error: Exception, is_named: bool) -> None:
    assert is_out_of_memory(error, (MemoryError, "arena exhausted")) == is_named


class Interruption(BaseException):
    pass


def test_more_than_an_exception_is_a_lack_of_memory_only_if_it_is_named() -> None:
    with pytest.raises(Interruption):
        is_out_of_memory(Interruption())
    assert is_out_of_memory(Interruption(), (Interruption,))


@pytest.mark.parametrize("name", ["OutOfMemoryError", "AcceleratorError", "cuda.OutOfMemoryError"])
def test_torch_s_own_classes_are_a_lack_of_memory(name: str) -> None:
    found: Any = pytest.importorskip("torch")
    for part in name.split("."):
        found = getattr(found, part, RuntimeError)
    assert is_out_of_memory(found("CUDA error: out of memory"))


@pytest.mark.parametrize(
    "named",
    [
        MemoryError, [MemoryError], None, "MemoryError", ("",), (" ",), (int,), (1,), ("text", 1),
    ],
)  # fmt: skip
def test_a_model_that_names_no_errors_is_refused(named: Any) -> None:
    with pytest.raises(TypeError, match="out_of_memory_errors"):
        is_out_of_memory(ValueError(), named)


def test_a_model_may_name_its_errors_when_it_is_loaded() -> None:
    class Late(Raises):
        def init_model(self, error: BaseException) -> None:
            super().init_model(error)
            self.out_of_memory_errors = (KeyError,)

    assert served(loaded(Late, KeyError("x")), [1, 2])[0].outputs == [1, 2]


# -- what becomes of the items


class Fits(ManagedModel):
    """Doubles at most ``room`` items at once, and "huge" never; keeps what it was given."""

    out_of_memory_errors = (DeviceFullError,)

    def init_model(self, room: int, error: type[BaseException] = DeviceFullError) -> None:
        self.room = room
        self.error = error
        self.batches: list[list[Any]] = []

    def predict(self, batch: list[Any]) -> list[Any]:
        self.batches.append(batch)
        if len(batch) > self.room or "huge" in batch:
            raise self.error(f"no room for {len(batch)}")
        return [2 * item for item in batch]


def test_an_item_that_is_too_large_fails_alone_with_its_own_error() -> None:
    missing = SimpleNamespace()
    (report,) = served(loaded(Fits, 10), [1, "huge", 4, "huge", 6], failures={0: missing})
    assert (report.failure, report.ceiling) == (None, 0)
    assert report.outputs == [None, 2, None, 8, None, 12]
    assert report.failures.pop(0) is missing, "it never arrived"
    assert texts(report) == {2: "no room for 1", 4: "no room for 1"}
    error = report.failures[4].exception()
    assert isinstance(error, DeviceFullError)
    assert "in predict" in str(error.__cause__)


def test_nothing_runs_twice_that_may_not() -> None:
    model = loaded(Fits, 2, may_rerun=False)
    reports = served(model, [1, 2, 3, 4], [1, 2, 3, "huge"], [1])
    assert [len(batch) for batch in model_of(model).batches] == [4, 2, 2, 1]
    assert [report.failure for report in reports] == [None] * 3
    assert texts(reports[0]) == dict.fromkeys(range(4), "no room for 4")
    assert reports[0].ceiling == 2
    assert reports[1].outputs[:2] == [2, 4]
    assert sorted(reports[1].failures) == [2, 3]
    assert reports[2].outputs == [2]


@pytest.mark.parametrize(
    ("finish", "error"),
    [(lambda batch: batch[1:], BadModelOutput), (lambda batch: [1 // 0], ZeroDivisionError)],
)
def test_another_error_in_a_part_is_that_of_the_batch(finish: Any, error: Any) -> None:
    class Other(Fits):
        def predict(self, batch: list[Any]) -> list[Any]:
            results = super().predict(batch)
            return finish(results) if 6 in batch else results

    failed, fine = served(loaded(Other, 2), [1, 2, 6, 4], [1, 1, 1])
    assert type(raised(failed)) is error
    assert (failed.outputs, failed.failures, failed.ceiling) == ([], {}, 2)
    assert fine.outputs == [2, 2, 2]


@pytest.mark.parametrize("may_rerun", [True, False])
def test_a_model_that_travels_keeps_whether_it_may_run_again(may_rerun: bool) -> None:
    for model in (models.Fitting, models.double, "models:Fitting"):
        spec: ModelSpec = pickle.loads(pickle.dumps(ModelSpec(model, may_rerun=may_rerun)))
        assert spec.load(None).may_rerun is may_rerun
    assert ModelSpec(models.double).may_rerun


# -- torch's memory


class FakeTorchError(RuntimeError):
    pass


class FakeCuda(SimpleNamespace):
    def __init__(self, *, is_initialized: bool = True, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.is_initialized = lambda: is_initialized
        self.emptied = 0

    def empty_cache(self) -> None:
        self.emptied += 1


Fake = Callable[..., Any]


@pytest.fixture
def fake_torch(monkeypatch: pytest.MonkeyPatch) -> Fake:
    def fake(**attributes: Any) -> Any:
        module = ModuleType("torch")
        vars(module).update(attributes)
        monkeypatch.setitem(sys.modules, "torch", module)
        return attributes.get("cuda")

    return fake


@pytest.mark.parametrize(
    ("of_torch", "of_cuda"),
    [
        ({"OutOfMemoryError": FakeTorchError}, {"OutOfMemoryError": FakeTorchError}),
        ({}, {"OutOfMemoryError": FakeTorchError}),
        ({"OutOfMemoryError": FakeTorchError}, {}),
    ],
)
def test_torch_s_error_counts_for_every_model_and_its_cache_is_emptied(
    fake_torch: Fake, of_torch: dict[str, Any], of_cuda: dict[str, Any]
) -> None:
    cuda = fake_torch(cuda=FakeCuda(**of_cuda), **of_torch)
    reports = served(loaded(Fits, 2, FakeTorchError), [1, 2, 3, 4], ["huge"])
    assert reports[0].outputs == [2, 4, 6, 8]
    assert texts(reports[1]) == {0: "no room for 1"}
    assert cuda.emptied == 2, "also after an item that failed alone"


def test_a_torch_that_comes_with_the_first_batch_counts(
    fake_torch: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)

    class Imports(Fits):
        def predict(self, batch: list[Any]) -> list[Any]:
            fake_torch(OutOfMemoryError=FakeTorchError)
            return super().predict(batch)

    assert served(loaded(Imports, 2, FakeTorchError), [1, 2, 3])[0].outputs == [2, 4, 6]


def no_cache() -> None:
    raise RuntimeError("device-side assert triggered")


@pytest.mark.parametrize(
    "attributes",
    [
        {},
        {"cuda": None},
        {"OutOfMemoryError": "no class", "cuda": SimpleNamespace()},
        {"cuda": SimpleNamespace(is_initialized=lambda: True, empty_cache=no_cache)},
        {"cuda": SimpleNamespace(is_initialized=lambda: False)},  # it would make a context
    ],
    ids=["empty", "no cuda", "half", "cannot be emptied", "not in use"],
)
def test_a_torch_that_cannot_help_does_no_harm(
    fake_torch: Fake, attributes: dict[str, Any]
) -> None:
    fake_torch(**attributes)
    fits, fails = served(loaded(Fits, 2), [1, 2, 3], [0, None])
    assert fits.outputs == [2, 4, 6]
    assert isinstance(raised(fails), TypeError)


class Tensor:
    pass


@pytest.mark.parametrize("is_cyclic", [False, True])
@pytest.mark.parametrize("batch", [[1, 2], ["huge"]])
def test_the_tensors_of_a_run_are_gone_before_the_cache_is_emptied(
    fake_torch: Fake, batch: list[Any], is_cyclic: bool
) -> None:
    tensors: list[weakref.ref[Tensor]] = []
    alive: list[bool] = []
    cuda = fake_torch(cuda=FakeCuda())
    cuda.empty_cache = lambda: alive.append(tensors[-1]() is not None)

    class Holds(Fits):
        def predict(self, batch: list[Any]) -> list[Any]:
            tensor = Tensor()
            tensors.append(weakref.ref(tensor))
            try:
                return super().predict(batch)
            except DeviceFullError as error:
                kept = error if is_cyclic else None  # its traceback holds this frame, and that it
                raise DeviceFullError(f"in other words: {kept}") from error

    Batches(batch).serve(loaded(Holds, 1))
    assert alive == [False]
