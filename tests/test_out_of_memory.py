"""Running out of device memory under its other names, and a ceiling that counts cost."""

from __future__ import annotations

import math
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import device_models
from service_streamer import ManagedModel, Streamer, ThreadedStreamer
from service_streamer.workers import runner
from service_streamer.workers.batch_ceiling import (
    FIRST_INTERVAL,
    Ceiling,
    Measure,
    is_out_of_memory,
)
from service_streamer.workers.model_spec import LoadedModel, ModelSpec
from service_streamer.workers.protocol import BatchReport, Failure
from service_streamer.workers.runner import serve


def library_error(module: str, name: str = "Error") -> type[Exception]:
    return type(name, (Exception,), {"__module__": module})


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


@pytest.mark.parametrize("text", NATIVE)
def test_it_is_known_by_the_texts_of_native_code(text: str) -> None:
    assert is_out_of_memory(RuntimeError(text))
    assert is_out_of_memory(device_models.NativeError(text)), "AcceleratorError is such a class"


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("jaxlib.xla_extension", "RESOURCE_EXHAUSTED: Out of memory allocating 96 bytes."),
        ("cupy.cuda.memory", "Out of memory allocating 8,000,000,000 bytes (allocated so far: 0)"),
        ("cupy_backends.cuda.api.runtime", "cudaErrorMemoryAllocation: out of memory"),
        ("tensorflow.python.framework.errors_impl", "OOM when allocating tensor with shape[64]"),
        (
            "onnxruntime.capi.onnxruntime_pybind11_state",
            "[ONNXRuntimeError] : 6 : RUNTIME_EXCEPTION : Non-zero status code returned while "
            "running MatMul node. Failed to allocate memory for requested buffer of size 1024",
        ),
        ("numba.cuda.cudadrv.driver",
         "[2] Call to cuMemAlloc results in CUDA_ERROR_OUT_OF_MEMORY"),
    ],
)  # fmt: skip
def test_it_is_known_from_other_libraries(module: str, text: str) -> None:
    assert is_out_of_memory(library_error(module)(text))
    assert not is_out_of_memory(library_error("my_package")(text)), "anybody may say so"


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
    ],
)
def test_other_errors_are_not(error: Exception) -> None:
    assert not is_out_of_memory(error)


def test_an_error_that_was_raised_from_one_is_one() -> None:
    inner = RuntimeError("CUDA error: out of memory")
    outer = ValueError("the model failed")
    outer.__context__ = inner
    assert not is_out_of_memory(outer), "the model went on after it and failed at something else"
    outer.__cause__ = inner
    assert is_out_of_memory(outer)
    inner.__cause__ = outer  # a circle ends
    assert is_out_of_memory(inner)
    outer.__cause__ = outer
    assert not is_out_of_memory(outer)


def test_a_model_may_name_classes_and_texts() -> None:
    named = (MemoryError, "arena exhausted")
    assert is_out_of_memory(MemoryError(), named)
    assert is_out_of_memory(ValueError("the arena exhausted: 64 rows"), named)
    assert not is_out_of_memory(ValueError("the arena"), named)

    class Rude(Exception):
        def __str__(self) -> str:
            raise OSError("no text")

    assert not is_out_of_memory(Rude(), named)


@pytest.mark.parametrize("named", [("",), (" ",), ("text", 1), "text", ["text"]])
def test_what_a_model_cannot_name_is_refused(named: Any) -> None:
    class Model(ManagedModel):
        out_of_memory_errors = named

        def init_model(self) -> None:
            pass

        def predict(self, batch: list[Any]) -> list[Any]:
            return batch

    with pytest.raises(TypeError, match=r"must be a tuple of exception classes and texts"):
        ModelSpec(Model).load(None)


def test_torch_s_real_accelerator_error_is_known() -> None:
    torch: Any = pytest.importorskip("torch")
    error = getattr(torch, "AcceleratorError", RuntimeError)("CUDA error: out of memory")
    assert is_out_of_memory(error)


# -- the ceiling in costs


class Run:
    def __init__(self, start: int, stop: int, cost: float, limit: float, *, fitted: bool) -> None:
        self.start, self.stop, self.cost, self.limit = start, stop, cost, limit
        self.fitted = fitted

    @property
    def size(self) -> int:
        return self.stop - self.start


def compute(
    ceiling: Ceiling, lengths: list[float], room: float, *, may_rerun: bool = True
) -> list[Run]:
    """The runs of a batch on a device that takes what costs up to ``room``."""
    runs: list[Run] = []
    done: list[int] = []
    for chunk in ceiling.chunks(len(lengths), lengths, may_rerun=may_rerun):
        part = lengths[chunk.start : chunk.stop]
        cost = len(part) * max(part)
        runs.append(Run(chunk.start, chunk.stop, cost, ceiling.limit, fitted=cost <= room))
        chunk.has_run_out = cost > room
        if cost <= room or chunk.is_last_try:
            done += range(chunk.start, chunk.stop)
    assert done == list(range(len(lengths))), "each item is done once, in order"
    return runs


def sizes(runs: list[Run]) -> list[int]:
    return [run.size if run.fitted else -run.size for run in runs]


def test_short_items_are_not_held_to_what_long_ones_allow() -> None:
    ceiling = Ceiling()
    assert sizes(compute(ceiling, [100.0] * 16, 400)) == [-16, -8, 4, 4, 4, 4]
    assert ceiling.limit == 400
    assert sizes(compute(ceiling, [5.0] * 64, 400)) == [64]
    assert sizes(compute(ceiling, [10.0] * 64, 400)) == [40, 24]
    assert sizes(compute(ceiling, [100.0, 100.0, 10.0, 10.0, 10.0], 400)) == [4, 1]


def test_without_costs_the_same_batches_run_out_again_and_again() -> None:
    """What the ceiling in items did: few long items were learned to be 4, many short ones too."""
    ceiling = Ceiling()
    for chunk in ceiling.chunks(16, may_rerun=True):
        chunk.has_run_out = chunk.stop - chunk.start > 4
    assert [chunk.stop - chunk.start for chunk in ceiling.chunks(64, may_rerun=True)] == [4] * 16


def test_an_item_beyond_the_limit_is_computed_alone_and_teaches_nothing() -> None:
    ceiling = Ceiling()
    compute(ceiling, [100.0] * 16, 400)
    assert sizes(compute(ceiling, [10.0, 10.0, 900.0, 10.0], 1000)) == [2, 1, 1]
    assert ceiling.limit == 400
    assert sizes(compute(ceiling, [900.0, 10.0], 400)) == [-1, 1]
    assert ceiling.limit == 400


def test_more_is_tried_when_enough_has_fitted() -> None:
    ceiling = Ceiling()
    compute(ceiling, [100.0] * 16, 400)
    tries = 0
    while ceiling.limit == 400:
        tries += 1
        runs = compute(ceiling, [10.0] * 64, 500)
        assert sizes(runs) == ([40, 24] if ceiling.limit == 400 else [50, 14])
    assert ceiling.limit == 500
    assert tries == FIRST_INTERVAL - 4 + 1, "four chunks were full, then one in each batch"


def test_items_of_no_length_do_not_stop_it() -> None:
    ceiling = Ceiling()
    chunks = ceiling.chunks(8, [0.0] * 8, may_rerun=True)
    for chunk in chunks:
        chunk.has_run_out = chunk.stop - chunk.start > 4
    assert 0 < ceiling.limit < 1e-6
    for _ in range(3 * FIRST_INTERVAL):
        compute(ceiling, [100.0] * 4, 400)
    assert ceiling.limit >= 200 or ceiling.limit == 0, "it recovers from what it cannot have meant"


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    batches=st.lists(
        st.lists(st.integers(1, 1000), min_size=1, max_size=64), min_size=1, max_size=20
    ),
    room=st.integers(1000, 70_000),
)
def test_every_batch_is_done_in_few_runs_whatever_its_lengths(
    batches: list[list[int]], room: int
) -> None:
    ceiling = Ceiling()
    failed = probes = 0
    for batch in batches:
        lengths = [float(each) for each in batch]
        for run in compute(ceiling, lengths, room):
            failed += not run.fitted
            probes += run.size > 1 and run.cost > run.limit > 0
            assert run.fitted or run.size > 1, "each of them fits alone"
    # A probe that fits may lift the limit; then it is found anew.
    assert failed <= math.ceil(math.log2(64 * 1000)) * (1 + probes)


# -- in a worker


class Channel(runner.Channel):
    def __init__(self, *batches: list[Any]) -> None:
        self._batches = list(batches)
        self.reports: list[BatchReport] = []

    def receive(self) -> tuple[int, list[Any], dict[int, Failure]] | None:
        return (len(self.reports), self._batches.pop(0), {}) if self._batches else None

    def send(self, report: BatchReport) -> None:
        self.reports.append(report)


def served(model: LoadedModel, *batches: list[Any]) -> list[BatchReport]:
    channel = Channel(*batches)
    serve(channel, model)
    return channel.reports


def test_the_worker_asks_the_model_what_items_cost() -> None:
    spec = ModelSpec(device_models.Padding, has_lengths=True)
    long, short = served(spec.load(None), ["x" * 100] * 16, ["x" * 5] * 64)
    assert (long.outputs, long.ceiling) == ([4] * 16, 400.0)
    assert isinstance(long.ceiling, float)
    assert short.outputs == [64] * 64


def test_the_worker_asks_the_function_that_the_streamer_was_given() -> None:
    spec: ModelSpec = ModelSpec(device_models.Padding, has_lengths=True, measure=Measure(len))
    for each in (spec, pickle.loads(pickle.dumps(spec))):
        outcome = served(each.load(None), ["x" * 100] * 16)[0]
        assert (outcome.outputs, outcome.ceiling) == ([4] * 16, 400.0)


def no_length(_: object) -> float:
    raise OSError("not now")


@pytest.mark.parametrize(
    "measure",
    [
        pickle.loads(pickle.dumps(Measure(lambda item: len(item)))),
        pickle.loads(pickle.dumps(Measure((b"x" * (1 << 20)).__contains__))),
        Measure(None, b"no pickle"),
        Measure(no_length),
        Measure(lambda _: math.nan),
        Measure(lambda _: -1),
    ],
)
def test_without_lengths_it_counts_items(measure: Measure) -> None:
    spec = ModelSpec(device_models.Padding, has_lengths=True, measure=measure)
    long, short = served(spec.load(None), ["x" * 100] * 16, ["x" * 5] * 64)
    assert (long.outputs, long.ceiling) == ([4] * 16, 4)
    assert isinstance(long.ceiling, int)
    assert short.outputs == [4] * 64


def test_lengths_that_end_in_the_midst_do_not_mix_units() -> None:
    asked: list[str] = []

    def length(item: str) -> int:
        asked.append(item)
        if len(asked) > 20:
            raise OSError("not now")
        return len(item)

    spec = ModelSpec(device_models.Padding, has_lengths=True, measure=Measure(length))
    first, second = served(spec.load(None), ["x" * 100] * 16, ["x" * 100] * 16)
    assert (first.ceiling, second.ceiling) == (400.0, 4)
    assert second.outputs == [4] * 16


@pytest.fixture(params=["thread", "process"])
def build(request: pytest.FixtureRequest) -> Iterator[Any]:
    streamers: list[Any] = []

    def make(model: Any, **options: Any) -> Any:
        kind = ThreadedStreamer if request.param == "thread" else Streamer
        streamers.append(kind(model, worker_timeout=None, max_latency=5.0, **options))
        return streamers[-1]

    yield make
    for streamer in streamers:
        streamer.close()


@pytest.mark.parametrize("options", [{}, {"length": len}, {"length": "builtins:len"}])
def test_many_short_items_are_computed_at_once_after_long_ones_ran_out(
    build: Any, options: dict[str, Any]
) -> None:
    if not options:
        streamer = build(device_models.Padding, batch_size=64)
    else:
        streamer = build(device_models.Padding, batch_size=64, **options)
    assert streamer.predict(["x" * 100] * 16) == [4] * 16
    assert streamer.stats().ceilings == {0: 400.0}
    assert max(streamer.predict(["x" * 5] * 64)) > 4
    assert "Set max_batch_cost to 400" in streamer.explain()


def test_texts_that_the_model_names_count_in_a_worker(build: Any) -> None:
    streamer = build(device_models.NamesTexts, batch_size=16)
    assert streamer.predict(list(range(16))) == [4] * 16
    assert streamer.stats().ceilings == {0: 4}
