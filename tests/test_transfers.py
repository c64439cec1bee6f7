"""The way to the GPU and back, and how long a stage takes there, on a GPU made of nothing."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from cuda_stub import Gpu
from service_streamer.workers import device
from service_streamer.workers.device import stage_clock


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Gpu:
    gpu = Gpu(**getattr(request, "param", {}))
    monkeypatch.setitem(sys.modules, "torch", gpu.torch)
    monkeypatch.setattr(device, "time", SimpleNamespace(monotonic=lambda: gpu.now))
    return gpu


# -- how long a stage takes


def test_a_batch_takes_what_the_gpu_takes_for_it(gpu: Gpu) -> None:
    clock = stage_clock()
    first = clock.begin()
    gpu.compute(0.5)
    gpu.now += 0.001  # it is launched only
    first.end()
    second = clock.begin()  # while the first one computes
    gpu.compute(0.25)
    gpu.now += 0.001
    second.end()
    gpu.compute(9.0)  # of the batch after them
    assert second.seconds() == pytest.approx(0.25)
    assert first.seconds() == first.seconds() == pytest.approx(0.5)


def test_a_stage_that_waits_for_the_gpu_takes_its_own_time(gpu: Gpu) -> None:
    mark = stage_clock().begin()
    gpu.compute(0.5)
    gpu.now += 0.75
    mark.end()
    gpu.now += 5.0
    assert mark.seconds() == 0.75


@pytest.mark.parametrize("gpu", [{"count": 2}], indirect=True)
def test_the_slowest_of_several_devices_counts(gpu: Gpu) -> None:
    mark = stage_clock().begin()
    gpu.compute(0.25, device=0)
    gpu.compute(0.5, device=1)
    mark.end()
    assert mark.seconds() == 0.5


@pytest.mark.parametrize("gpu", [{"is_initialized": False}], indirect=True)
def test_a_process_without_a_context_gets_none(gpu: Gpu) -> None:
    mark = stage_clock().begin()
    gpu.now += 0.5
    gpu.is_initialized = True  # by the model's first batch
    mark.end()
    assert mark.seconds() == 0.5


@pytest.mark.parametrize("torch", [None, SimpleNamespace(), SimpleNamespace(cuda=object())])
def test_without_torch_the_thread_s_time_counts(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch, torch: Any
) -> None:
    monkeypatch.setitem(sys.modules, "torch", torch)
    mark = stage_clock().begin()
    gpu.now += 0.5
    assert mark.seconds() == 0.5


@pytest.mark.parametrize("when", ["before", "in between", "after"])
def test_a_gpu_that_failed_leaves_the_thread_s_time(gpu: Gpu, when: str) -> None:
    def fail(now: str) -> None:
        if when == now:
            gpu.error = RuntimeError("CUDA error: device-side assert triggered")

    fail("before")
    mark = stage_clock().begin()
    fail("in between")
    gpu.now += 0.5
    mark.end()
    fail("after")
    assert mark.seconds() == 0.5
