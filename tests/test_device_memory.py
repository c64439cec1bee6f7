"""How torch takes memory of a GPU in a worker: growing segments, and a share of a shared GPU."""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from limited_models import STUB_AT_IMPORT, CudaMemory, MemoryLimits
from service_streamer import Streamer
from service_streamer.options.table import WorkerOptions
from service_streamer.workers import device_memory
from service_streamer.workers.batch_ceiling import is_out_of_memory
from service_streamer.workers.device_memory import limit_device_memory, share_of_memory
from service_streamer.workers.placement import COUNT, Placement
from service_streamer.workers.visibility import Gpu, Inventory, places, sharers, visible

GB = 1 << 30


# -- growing segments


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], Path]:
    """Names a GPU as the driver's files do."""
    monkeypatch.setattr(device_memory, "_GPUS", tmp_path)
    monkeypatch.setattr(device_memory, "_JETSON", tmp_path / "nvhost-gpu")
    device_memory._name.cache_clear()

    def add(model: str) -> Path:
        folder = tmp_path / f"0000:{len(list(tmp_path.iterdir())):02d}:00.0"
        folder.mkdir()
        (folder / "information").write_text(f"Model: \t\t {model}\nIRQ:   \t\t 17\n")
        return tmp_path

    return add


def set_variables(inherited: dict[str, str] | None = None) -> dict[str, Any]:
    placement = Placement(WorkerOptions(cpu_threads=None))
    return placement.variables(0, 1, cores=1, inherited=inherited or {})


@pytest.mark.parametrize(
    ("version", "name"),
    [
        ("2.13.0+cu128", "PYTORCH_ALLOC_CONF"),
        ("2.9.1", "PYTORCH_CUDA_ALLOC_CONF"),
        ("2.2.0", "PYTORCH_CUDA_ALLOC_CONF"),
        ("main", "PYTORCH_CUDA_ALLOC_CONF"),
    ],
)
def test_the_variable_is_the_one_that_torch_reads(
    monkeypatch: pytest.MonkeyPatch, driver: Callable[[str], Path], version: str, name: str
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _: version)
    driver("NVIDIA H100 80GB HBM3")
    assert set_variables() == {name: "expandable_segments:True"}


@pytest.mark.parametrize("name", device_memory._NAMES)
def test_what_the_user_has_set_stays(driver: Callable[[str], Path], name: str) -> None:
    driver("NVIDIA A100-SXM4-40GB")
    assert set_variables() != {}
    assert set_variables({name: "max_split_size_mb:512"}) == {}


@pytest.mark.parametrize("model", ["NVIDIA A40-48C", "GRID V100D-32Q", "NVIDIA A100-4-20C"])
def test_a_virtual_gpu_has_none(driver: Callable[[str], Path], model: str) -> None:
    driver("NVIDIA A100-PCIE-40GB")
    driver(model)
    assert set_variables() == {}


def test_nor_has_another_platform(driver: Callable[[str], Path]) -> None:
    assert set_variables() == {}
    (driver("Orin") / "nvhost-gpu").touch()
    assert set_variables() == {}


# -- a share of a shared GPU


@pytest.mark.parametrize(
    ("total", "workers", "gigabytes"),
    [(80, 1, 80), (80, 2, 39.5), (24, 4, 5.5), (1, 2, 1), (1, 4, 1)],
)
def test_a_share_is_an_equal_part_without_the_context(
    total: int, workers: int, gigabytes: float
) -> None:
    assert share_of_memory(total * GB, workers) * total == pytest.approx(gigabytes)


NVIDIA = Inventory(tuple(Gpu(i, f"GPU-{i}{i}{i}{i}") for i in range(8)), "nvidia")


@pytest.mark.parametrize(
    ("devices", "worker_num", "shown", "expected"),
    [
        ([0], 1, "4,5", [(1,)]),
        ([0], 3, "4,5", [(3,), (3,), (3,)]),
        ([0, 1], 3, "4,5", [(2,), (1,), (2,)]),
        ([0, "GPU-4444"], 2, "4,5", [(2,), (2,)]),
        (["0,1", 1], 2, "4,5", [(1, 2), (2,)]),
        (["cpu", 0], 4, "4,5", [(), (2,), (), (2,)]),
        (["cpu"], 2, "4,5", [(), ()]),
        ([7], 2, "4,5", [(), ()]),  # is not there
        ("auto", 3, "4,5", [(2,), (1,), (2,)]),
        ("auto", 1, "4,5", [()]),
        (None, 2, "4", [(2,), (2,)]),
        (None, 2, "4,5", [(), ()]),  # the model may spread itself
    ],
)
def test_those_that_share_a_gpu_are_counted(
    devices: Any, worker_num: int, shown: str, expected: list[tuple[int, ...]]
) -> None:
    inherited = {"CUDA_VISIBLE_DEVICES": shown}
    found = places(devices, worker_num, NVIDIA, inherited)
    entries = visible(NVIDIA, inherited) or []
    counted = [sharers(found, entries, number, worker_num) for number in range(worker_num)]
    assert counted == expected


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> Callable[[CudaMemory], CudaMemory]:
    def load(cuda: CudaMemory) -> CudaMemory:
        monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
        return cuda

    return load


@pytest.mark.parametrize("is_old", [False, True])
def test_the_limit_waits_for_a_context(
    loaded: Callable[[CudaMemory], CudaMemory], is_old: bool
) -> None:
    cuda = loaded(CudaMemory(is_old=is_old, count=2))
    assert limit_device_memory((2, 4))
    assert not cuda.is_initialized()
    cuda.initialize()
    assert cuda.limits == {0: 3.5 / 8, 1: 1.5 / 8}
    assert cuda.current == 0


def test_a_context_of_the_model_s_is_limited_at_once(
    loaded: Callable[[CudaMemory], CudaMemory],
) -> None:
    cuda = loaded(CudaMemory())
    cuda.initialize()
    assert limit_device_memory((2,))
    assert cuda.limits == {0: 3.5 / 8}


@pytest.mark.parametrize("is_old", [False, True])
def test_a_limit_of_the_user_s_stays(
    loaded: Callable[[CudaMemory], CudaMemory], is_old: bool
) -> None:
    cuda = loaded(CudaMemory(is_old=is_old))
    cuda.set_per_process_memory_fraction(0.9)  # at the import of the model's module
    limit_device_memory((2,))
    assert cuda.limits == {0: 0.9}
    cuda = loaded(CudaMemory(is_old=is_old))
    limit_device_memory((2,))
    cuda.set_per_process_memory_fraction(1.0)  # in init_model
    assert cuda.limits == {0: 1.0}


def test_a_single_worker_has_no_limit(loaded: Callable[[CudaMemory], CudaMemory]) -> None:
    cuda = loaded(CudaMemory())
    assert limit_device_memory((1,))
    assert limit_device_memory(())
    assert cuda.queued == []


def test_without_torch_there_is_nothing_to_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert not limit_device_memory((2,))
    assert sys.modules["torch"] is None


def test_a_gpu_that_fails_does_not_fail_the_start(
    loaded: Callable[[CudaMemory], CudaMemory],
) -> None:
    cuda = loaded(CudaMemory())
    cuda.get_device_properties = lambda _: 1 / 0  # type: ignore[assignment]
    limit_device_memory((2,))
    cuda.initialize()
    limit_device_memory((2,))
    assert cuda.limits == {0: 1.0}


def test_running_out_of_a_share_is_running_out_of_memory() -> None:
    text = (
        "CUDA out of memory. Tried to allocate 76.00 MiB. GPU 0 has a total capacity of 8.00 GiB "
        "of which 6.97 GiB is free. 3.50 GiB allowed; Of the allocated memory ..."
    )
    error: Any = type("OutOfMemoryError", (RuntimeError,), {"__module__": "torch"})(text)
    assert is_out_of_memory(error, ())


@pytest.mark.parametrize("is_old", [False, True])
def test_workers_of_one_gpu_are_limited(monkeypatch: pytest.MonkeyPatch, is_old: bool) -> None:
    """An old torch if it is imported by the model's module, a new one also by ``init_model``."""
    monkeypatch.setenv(COUNT, "2")
    if is_old:
        monkeypatch.setenv(STUB_AT_IMPORT, "1")
    with Streamer(MemoryLimits, 1, worker_num=3, cuda_devices=[0, 1]) as streamer:
        streamer.wait_ready()
        limits = {}
        while len(limits) < 2:
            device, limit = streamer.predict([None])[0]
            limits[device] = limit
    assert limits == {"0": 3.5 / 8, "1": 1.0}
