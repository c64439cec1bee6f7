"""How torch takes memory of a GPU in a worker: growing segments, and a share of a shared GPU."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from limited_models import STUB_AT_IMPORT, CudaMemory, MemoryLimits
from service_streamer import Streamer
from service_streamer.workers.device_memory import (
    allocator_variables,
    limit_device_memory,
    share_of_memory,
)
from service_streamer.workers.visibility import Gpu, Inventory, places, sharers, visible

GB = 1 << 30

Load = Callable[[CudaMemory], CudaMemory]


# -- growing segments


@pytest.mark.parametrize(
    ("version", "name"),
    [
        ("2.13.0+cu128", "PYTORCH_ALLOC_CONF"),
        ("2.9.1", "PYTORCH_CUDA_ALLOC_CONF"),
        ("main", "PYTORCH_CUDA_ALLOC_CONF"),
    ],
)
@pytest.mark.parametrize(
    ("models", "inherited", "is_set"),
    [
        (["NVIDIA H100 80GB HBM3"], {}, True),
        (["NVIDIA A100-PCIE-40GB"], {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:512"}, False),
        (["NVIDIA A100-PCIE-40GB"], {"PYTORCH_HIP_ALLOC_CONF": "max_split_size_mb:512"}, False),
        (["NVIDIA A100-PCIE-40GB"], {"PYTORCH_ALLOC_CONF": "max_split_size_mb:512"}, False),
        (["NVIDIA A100-PCIE-40GB", "NVIDIA A40-48C"], {}, False),  # a virtual GPU
        (["GRID V100D-32Q"], {}, False),
        (["NVIDIA A100-4-20C"], {}, False),
        ([], {}, False),
        (["Orin"], {}, False),  # a Jetson
    ],
)
def test_segments_grow_unless_the_user_or_the_gpu_says_otherwise(
    version: str,
    name: str,
    models: list[str],
    inherited: dict[str, str],
    is_set: bool,
    tmp_path: Path,
) -> None:
    gpus, jetson = tmp_path / "gpus", tmp_path / "nvhost-gpu"
    for number, model in enumerate(models):
        folder = gpus / f"0000:{number:02d}:00.0"
        folder.mkdir(parents=True)
        (folder / "information").write_text(f"Model: \t\t {model}\nIRQ:   \t\t 17\n")
    if models == ["Orin"]:
        jetson.touch()
    found = allocator_variables(inherited, gpus=gpus, jetson=jetson, torch_version=version)
    assert found == ({name: "expandable_segments:True"} if is_set else {})


# -- a share of a shared GPU


@pytest.mark.parametrize(
    ("total", "workers", "gigabytes"), [(80, 1, 80), (80, 2, 39.5), (24, 4, 5.5), (1, 2, 1)]
)
def test_a_share_is_an_equal_part_without_the_context(
    total: int, workers: int, gigabytes: float
) -> None:
    assert share_of_memory(total * GB, workers) * total == pytest.approx(gigabytes)


NVIDIA = Inventory(tuple(Gpu(i, f"GPU-{i}{i}{i}{i}") for i in range(8)), "nvidia")


@pytest.mark.parametrize(
    ("devices", "worker_num", "shown", "expected"),
    [
        ([0], 3, "4,5", [(3,), (3,), (3,)]),
        (["0,1", 1], 2, "4,5", [(1, 2), (2,)]),
        (["cpu", 0], 4, "4,5", [(), (2,), (), (2,)]),
        ([7], 2, "4,5", [(), ()]),  # is not there
        ("auto", 3, "4,5", [(2,), (1,), (2,)]),
        ("auto", 1, "4,5", [()]),
        (None, 2, "4", [(2,), (2,)]),
        (None, 2, "4,5", [(), ()]),  # the model may spread itself
    ],
)
def test_workers_that_share_a_gpu_are_counted(
    devices: Any, worker_num: int, shown: str, expected: list[tuple[int, ...]]
) -> None:
    inherited = {"CUDA_VISIBLE_DEVICES": shown}
    found = places(devices, worker_num, NVIDIA, inherited)
    entries = visible(NVIDIA, inherited) or []
    counted = [sharers(found, entries, number, worker_num) for number in range(worker_num)]
    assert counted == expected


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> Load:
    def load(cuda: CudaMemory) -> CudaMemory:
        monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
        return cuda

    return load


@pytest.mark.parametrize("is_old", [False, True])
def test_the_limit_waits_for_a_context(loaded: Load, is_old: bool) -> None:
    cuda = loaded(CudaMemory(is_old=is_old, count=2))
    assert limit_device_memory((2, 4))
    assert not cuda.is_initialized()
    cuda.initialize()
    assert cuda.limits == {0: 3.5 / 8, 1: 1.5 / 8}
    assert cuda.current == 0


def test_a_context_of_the_model_s_is_limited_at_once(loaded: Load) -> None:
    cuda = loaded(CudaMemory())
    cuda.initialize()
    assert limit_device_memory((2,))
    assert cuda.limits == {0: 3.5 / 8}


@pytest.mark.parametrize("is_old", [False, True])
def test_a_limit_of_the_user_s_stays(loaded: Load, is_old: bool) -> None:
    cuda = loaded(CudaMemory(is_old=is_old))
    cuda.set_per_process_memory_fraction(0.9)  # at the import of the model's module
    limit_device_memory((2,))
    assert cuda.limits == {0: 0.9}
    cuda = loaded(CudaMemory(is_old=is_old))
    limit_device_memory((2,))
    cuda.set_per_process_memory_fraction(1.0)  # in init_model
    assert cuda.limits == {0: 1.0}


def test_a_single_worker_has_no_limit(loaded: Load) -> None:
    cuda = loaded(CudaMemory())
    assert limit_device_memory((1,))
    assert limit_device_memory(())
    assert cuda.queued == []


def test_memory_is_not_limited_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert not limit_device_memory((2,))
    assert sys.modules["torch"] is None


def test_a_gpu_that_fails_does_not_fail_the_start(loaded: Load) -> None:
    cuda = loaded(CudaMemory())
    cuda.get_device_properties = lambda _: 1 / 0  # type: ignore[assignment]
    limit_device_memory((2,))
    cuda.initialize()
    limit_device_memory((2,))
    assert cuda.limits == {0: 1.0}


@pytest.mark.parametrize("is_old", [False, True])
def test_workers_of_one_gpu_are_limited(monkeypatch: pytest.MonkeyPatch, is_old: bool) -> None:
    """An old torch if it is imported by the model's module, a new one also by ``init_model``."""
    monkeypatch.setenv("SERVICE_STREAMER_GPU_COUNT", "2")
    if is_old:
        monkeypatch.setenv(STUB_AT_IMPORT, "1")
    with Streamer(MemoryLimits, 1, worker_num=3, cuda_devices=[0, 1]) as streamer:
        streamer.wait_ready()
        limits = {}
        while len(limits) < 2:
            device, limit = streamer.predict([None])[0]
            limits[device] = limit
    assert limits == {"0": 3.5 / 8, "1": 1.0}
