"""A GPU that fails for good in one process: that process ends, and nobody else's call fails."""

from __future__ import annotations

import ctypes
import logging
import os
import sys
from typing import Any

import pytest
from sticky_models import ASSERT, AcceleratorError, Gpu, OnGpu, in_thread, make_error

from service_streamer import ManagedModel, Streamer, ThreadedStreamer, WorkerLost
from service_streamer.testing import Gate
from service_streamer.workers.runner import DeviceFailed
from worker_loop import loaded, served


def test_a_fault_without_a_word_is_found_by_the_third_failure() -> None:
    with Streamer(OnGpu, 1, worker_timeout=None) as streamer:
        for _ in range(2):
            with pytest.raises(ValueError, match=r"^as any other$"):
                streamer.predict([("fail", "silent")])
        assert streamer.submit([4]).result() == [8]
        assert streamer.stats().restarts == 1


@pytest.mark.usefixtures("eight_gpus")
def test_calls_that_never_run_twice_fail_at_once_without_the_text_of_another(
    gate: Gate, caplog: pytest.LogCaptureFixture
) -> None:
    with Streamer(
        OnGpu, 8, worker_timeout=None, model_init_args=(gate,), retry=False, max_latency=10,
        cuda_devices=("7",),
    ) as streamer:  # fmt: skip
        futures = [streamer.submit([i]) for i in range(3)]
        futures.append(streamer.submit([("wrapped", "secret-of-user-7")]))
        gate.let_through(100)
        for future in futures:
            error = future.exception()
            assert type(error) is WorkerLost
            assert "on device 7 ended itself" in str(error)
            assert "secret" not in f"{error}{error.__cause__}"
        assert streamer.predict([1]) == [2]
        assert streamer.stats().restarts == 1
    assert "could not compute secret-of-user-7" in caplog.text, "the log says it"


def test_a_batch_that_its_worker_had_not_begun_is_not_blamed(gate: Gate) -> None:
    with Streamer(OnGpu, 2, worker_timeout=None, model_init_args=(gate,)) as streamer:
        culprit = streamer.submit([("fail", "assert"), 0])
        others = [streamer.submit([i, i]) for i in range(6)]  # one of them is sent ahead
        gate.let_through(100)
        assert type(culprit.exception()) is WorkerLost
        assert [future.result() for future in others] == [[2 * i, 2 * i] for i in range(6)]


# -- in a thread, which cannot end its process


def test_a_failed_gpu_is_logged_once_in_a_thread_and_calls_fail_with_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gpu = Gpu()
    gpu.error = make_error("assert")
    monkeypatch.setitem(sys.modules, "torch", gpu.module())
    with ThreadedStreamer(in_thread, 4, worker_timeout=None) as streamer:
        for _ in range(4):
            with pytest.raises(AcceleratorError):
                streamer.predict([1])
        assert streamer.stats().restarts == 0
    told = [record for record in caplog.records if record.levelno == logging.CRITICAL]
    assert len(told) == 1
    assert "every call to the GPU fails in this process from now on" in told[0].getMessage()


# -- when the GPU is asked


class Wrapper(Exception):
    pass


def wrapped(error: BaseException, how: str) -> BaseException:
    match how:
        case "cause":
            outer: BaseException = Wrapper("something failed")
            outer.__cause__ = error
        case "context":
            outer = Wrapper("something failed")
            outer.__context__ = error
        case "group":
            outer = ExceptionGroup("several", [ValueError("x"), error])  # type: ignore[list-item]
        case "circle":
            outer = Wrapper("something failed")
            outer.__cause__ = error
            error.__context__ = outer
        case _:
            return error
    return outer


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    gpu = Gpu()
    monkeypatch.setitem(sys.modules, "torch", gpu.module())
    return gpu


class Raises(ManagedModel):
    """Raises one error after the other; None is a batch that succeeds."""

    def init_model(self, *errors: BaseException | None) -> None:
        self.errors = list(errors)

    def predict(self, batch: list[Any]) -> list[Any]:
        error = self.errors.pop(0)
        if error is not None:
            raise error
        return batch


def fault_of(*errors: BaseException | None) -> str | None:
    """What the GPU said for which a worker process ended after such errors; None if it did not."""
    model = loaded(Raises, *errors)
    model.guard.may_end = True
    try:
        served(model, *([1] for _ in errors))
    except DeviceFailed as failed:
        return failed.fault
    return None


TEXT = "CUDA error: {}\nCUDA kernel errors might be ..."


@pytest.mark.parametrize("how", ["itself", "cause", "context", "group", "circle"])
@pytest.mark.parametrize(
    "error",
    [
        AcceleratorError(TEXT.format("an illegal memory access was encountered")),
        AcceleratorError(TEXT.format("no kernel image is available for execution on the device")),
        RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"),
        RuntimeError("HIP error: an illegal memory access was encountered"),
        ValueError("a text of a user's about a device-side assert"),
        type("CUDARuntimeError", (RuntimeError,), {})("x"),
    ],
    ids=lambda error: str(error)[:40],
)
@pytest.mark.parametrize("is_broken", [False, True])
def test_the_gpu_is_asked_after_an_error_that_may_be_its_own(
    error: Exception, how: str, is_broken: bool, gpu: Gpu
) -> None:
    gpu.error = make_error("without a name") if is_broken else None
    assert (fault_of(wrapped(error, how)) is not None) == is_broken
    assert gpu.probes or is_broken


class Odd(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


BAD = ValueError("bad")


@pytest.mark.parametrize(
    ("errors", "probes"),
    [
        ([BAD] * 2, 0),
        ([BAD] * 3, 1),
        ([BAD] * 4, 2),
        ([BAD, BAD, None, BAD, BAD], 0),  # one was computed
        ([Odd(), ValueError("x" * 64_000_000)], 0),
        ([RuntimeError("CUDA error: x")] * 2, 2),
    ],
    ids=["two", "three", "four", "interrupted", "odd texts", "suspicious"],
)
def test_the_gpu_is_looked_at_from_the_third_error_in_a_row_on(
    errors: list[Exception | None], probes: int, gpu: Gpu
) -> None:
    assert fault_of(*errors) is None
    assert gpu.probes == probes


ASSERTS = [RuntimeError(ASSERT)] * 5


def test_a_gpu_that_is_not_in_use_is_not_touched_and_a_full_memory_is_no_fault(gpu: Gpu) -> None:
    gpu.error = RuntimeError("CUDA out of memory. Tried to allocate 2.00 MiB")
    assert fault_of(*ASSERTS) is None
    probes, gpu.is_initialized = gpu.probes, False
    assert fault_of(*ASSERTS) is None
    assert gpu.probes == probes


def test_an_error_that_goes_away_is_no_fault(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    errors = [make_error("without a name")]
    monkeypatch.setattr(gpu, "call", lambda: (_ for _ in ()).throw(errors.pop()) if errors else 0)
    assert fault_of(RuntimeError("CUDA error: x")) is None
    assert errors == []


@pytest.mark.parametrize("torch", [None, object(), "no module"], ids=["none", "half", "odd"])
def test_errors_are_no_fault_without_torch(torch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", torch)
    assert fault_of(*ASSERTS) is None


def pointed(reference: Any, kind: Any) -> Any:
    return ctypes.cast(reference, ctypes.POINTER(kind)).contents


class Driver:
    """Of CUDA, as it is when another library than torch uses it."""

    def __init__(self, error: int, *, has_context: bool = True) -> None:
        self.error = error
        self.has_context = has_context
        self.asked: list[str] = []

    def cuCtxGetCurrent(self, context: Any) -> int:  # noqa: N802 - its name
        pointed(context, ctypes.c_void_p).value = 1 if self.has_context else None
        return 0

    def cuCtxSynchronize(self) -> int:  # noqa: N802 - its name
        assert self.has_context
        return self.error

    def cuGetErrorName(self, error: int, name: Any) -> int:  # noqa: N802 - its name
        pointed(name, ctypes.c_char_p).value = {700: b"CUDA_ERROR_ILLEGAL_ADDRESS"}[error]
        return 0


@pytest.mark.parametrize(
    ("driver", "fault"),
    [
        (Driver(700), "CUDA error 700: CUDA_ERROR_ILLEGAL_ADDRESS"),
        (Driver(0), None),
        (Driver(2), None),  # out of memory
        (Driver(700, has_context=False), None),
    ],
    ids=["failed", "works", "full", "not in use"],
)
def test_the_driver_is_asked_where_there_is_no_torch(
    driver: Driver, fault: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def loaded(name: str, mode: int) -> Driver:
        assert (name, mode) == ("libcuda.so.1", os.RTLD_NOLOAD)
        return driver

    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setattr(ctypes, "CDLL", loaded)
    assert fault_of(*ASSERTS) == fault
