"""Which GPU a worker sees: spread, mapped through the parent's list, and missing."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fault_processes import outcome

import models
import serve_process
from command_line import launched
from device_models import GB, STUB_AT_IMPORT, CudaMemory, MemoryLimits
from service_streamer import Streamer, WorkerStartError
from service_streamer.options.table import WorkerOptions
from service_streamer.workers.device_memory import (
    allocator_variables,
    limit_device_memory,
    share_of_memory,
)
from service_streamer.workers.placement import (
    COUNT,
    Placement,
    check_loaded_torch,
    find_gpus,
    gpus_by_kfd,
)
from service_streamer.workers.visibility import (
    Gpu,
    Inventory,
    Place,
    missing,
    places,
    sharers,
    visible,
)

CUDA, HIP, ROCR = "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"

NVIDIA = Inventory(
    tuple(Gpu(i, f"GPU-{i}{i}{i}{i}", f"NVIDIA H100 no. {i}") for i in range(8)), "nvidia"
)
AMD = Inventory(tuple(Gpu(i, f"GPU-{i:016x}", f"AMD gfx942 no. {i}") for i in range(4)), "amd")
MIG = Inventory(
    (
        Gpu(0, "MIG-00", "MIG of NVIDIA H100", "GPU-0000"),
        Gpu(0, "MIG-01", "MIG of NVIDIA H100", "GPU-0000"),
        Gpu(1, "GPU-1111", "NVIDIA H100"),
    ),
    "nvidia",
)
NAMELESS = Inventory((Gpu(0), Gpu(1)))
UNKNOWN = Inventory(None)
NONE = Inventory((), why="this machine has no NVIDIA or AMD driver")


# -- what a process sees


@pytest.mark.parametrize(
    ("inventory", "environment", "values"),
    [
        (NVIDIA, {}, ["0", "1", "2", "3", "4", "5", "6", "7"]),
        (NVIDIA, {CUDA: "4,5"}, ["4", "5"]), (NVIDIA, {CUDA: " 5 , 4 "}, ["5", "4"]),
        (NVIDIA, {CUDA: "0,-1,1"}, ["0"]), (NVIDIA, {CUDA: "0,0"}, []),
        (NVIDIA, {CUDA: "1gpu,2"}, ["1", "2"]), (NVIDIA, {CUDA: ""}, []),
        (NVIDIA, {CUDA: "GPU-4,GPU-5555"}, ["GPU-4", "GPU-5555"]),
        (NVIDIA, {CUDA: "GPU-4,GPU-4444"}, []), (NVIDIA, {CUDA: "GPU-4,5"}, ["GPU-4"]),
        (NVIDIA, {CUDA: "GPU-,GPU-4"}, []),  # of which of them?
        (NVIDIA, {HIP: "0", ROCR: "1"}, ["0", "1", "2", "3", "4", "5", "6", "7"]),
        (MIG, {CUDA: "0"}, ["0"]), (MIG, {CUDA: "GPU-0000"}, ["GPU-0000"]),
        (MIG, {CUDA: "MIG-GPU-0000/1/0"}, ["MIG-GPU-0000/1/0"]),
        (NAMELESS, {CUDA: "GPU-4"}, ["GPU-4"]), (UNKNOWN, {}, None), (UNKNOWN, {HIP: "1"}, ["1"]),
        (NONE, {}, []), (AMD, {HIP: "2,3", CUDA: "0"}, ["2", "3"]),
        (AMD, {HIP: "", CUDA: ""}, ["0", "1", "2", "3"]),
        (AMD, {ROCR: "2,3"}, ["0", "1"]),
        (AMD, {ROCR: "GPU-0000000000000002,3"}, ["0"]),  # CUDA's rule: one kind of names
        (AMD, {ROCR: "2,3", HIP: "1"}, ["1"]),
    ],
)  # fmt: skip
def test_the_gpus_that_a_process_sees(
    inventory: Inventory, environment: dict[str, str], values: list[str] | None
) -> None:
    entries = visible(inventory, environment)
    assert (None if entries is None else [entry.value for entry in entries]) == values


# -- what a worker is shown


@pytest.mark.parametrize(
    ("device", "inventory", "inherited", "shown"),
    [
        (1, NVIDIA, {CUDA: "4,5"}, "5"), ("cuda:1", NVIDIA, {CUDA: "4,5"}, "5"),
        ("0,1", NVIDIA, {CUDA: "4,5"}, "4,5"),
        ("GPU-5", NVIDIA, {CUDA: "GPU-4,GPU-5555"}, "GPU-5555"),
        ("GPU-5", NVIDIA, {CUDA: "4,5"}, "5"), (1, MIG, {}, "MIG-01"),
        ("GPU-0000", MIG, {}, "MIG-00"),
        ("MIG-GPU-0000/1/0", MIG, {}, "MIG-GPU-0000/1/0"),
        (3, UNKNOWN, {}, "3"),
        ("GPU-5", UNKNOWN, {CUDA: "GPU-5555"}, "GPU-5555"),
        ("GPU-5", UNKNOWN, {CUDA: "4,5"}, "GPU-5"), ("GPU-5", NAMELESS, {}, "GPU-5"),
    ],
)  # fmt: skip
def test_a_worker_is_shown_a_gpu_of_its_parent_s_list(
    device: int | str, inventory: Inventory, inherited: dict[str, str], shown: str
) -> None:
    (place,) = places([device], 1, inventory, inherited)
    assert place == Place(device, device, {CUDA: shown, HIP: None, ROCR: None})


def test_a_worker_on_amd_is_shown_one_below_rocr_s_list_and_one_on_the_cpu_none() -> None:
    cases: list[tuple[int | str, dict[str, str], str]] = [
        (1, {HIP: "2,3"}, "3"),
        (0, {ROCR: "2,3", HIP: "1"}, "1"),
        ("GPU-0000000000000003", {ROCR: "2,3"}, "1"),
    ]
    for device, inherited, shown in cases:
        (place,) = places([device], 1, AMD, inherited)
        assert place == Place(device, device, {CUDA: shown, HIP: shown})
    (place,) = places(["cpu"], 1, NONE, {CUDA: "4,5"})
    assert place == Place("cpu", "cpu", {CUDA: "", HIP: "-1"})
    assert not place.needs_gpu


@pytest.mark.parametrize(
    ("device", "inventory", "inherited", "problem"),
    [
        (
            "GPU-0000", NVIDIA, {CUDA: "4,5"},
            "device GPU-0000 was requested, but 2 GPUs of 8 are visible with "
            "CUDA_VISIBLE_DEVICES=4,5: 0 (NVIDIA H100 no. 4), 1 (NVIDIA H100 no. 5)",
        ),
        (
            0, NVIDIA, {CUDA: ""},
            "device 0 was requested, but no GPU is visible: CUDA_VISIBLE_DEVICES= leaves none",
        ),
        ("0,2", NAMELESS, {}, "device 2 was requested, but 2 GPUs are visible: 0, 1"),
        (
            2, UNKNOWN, {CUDA: "GPU-4,GPU-5"},
            "device 2 was requested, but 2 GPUs are visible with CUDA_VISIBLE_DEVICES=GPU-4,GPU-5: "
            "0 (GPU-4), 1 (GPU-5)",
        ),
        (
            0, Inventory((Gpu(0, problem="NVML says 'GPU is lost'"),), "nvidia"), {},
            "device 0 was requested, but it cannot be used: NVML says 'GPU is lost'",
        ),
        (
            1, AMD, {ROCR: "2"},
            "device 1 was requested, but 1 GPU of 4 is visible with ROCR_VISIBLE_DEVICES=2: "
            "0 (AMD gfx942 no. 2)",
        ),
    ],
)  # fmt: skip
def test_a_missing_gpu_is_reported_with_those_that_are_visible(
    device: int | str, inventory: Inventory, inherited: dict[str, str], problem: str
) -> None:
    (place,) = places([device], 1, inventory, inherited)
    assert place.problem == problem
    assert place.variables[CUDA] == "", "until it ends it must not take another's"


@pytest.mark.parametrize(
    ("worker_num", "inventory", "inherited", "shown"),
    [
        (2, NVIDIA, {CUDA: "4,5,6"}, ["4", "5", "6"]), (1, NVIDIA, {CUDA: "4,5"}, [None, "5"]),
        (2, NONE, {}, [None]), (2, UNKNOWN, {}, [None]), (2, AMD, {HIP: "3,1"}, ["3", "1"]),
    ],
)  # fmt: skip
def test_auto_is_all_gpus_that_are_visible(
    worker_num: int, inventory: Inventory, inherited: dict[str, str], shown: list[str | None]
) -> None:
    found = places("auto", worker_num, inventory, inherited)
    assert [place.variables.get(CUDA) for place in found] == shown
    assert all(place.gpu_id is None for place in found), "the user has named none"
    assert all(place.needs_gpu == bool(visible(inventory, inherited)) for place in found)
    assert all(place.device in (number, None) for number, place in enumerate(found))


@pytest.mark.parametrize(
    ("devices", "inventory", "inherited", "shown"),
    [
        ("auto", NVIDIA, {CUDA: "4,5,2,3"}, ["4,5", "2,3"]),
        ("auto", AMD, {HIP: "3,1"}, ["3,1"]),
        ([3, 0, "1", "cuda:2"], NVIDIA, {}, ["3,0", "1,2"]),
        ([0, 1], UNKNOWN, {}, ["0,1"]),
    ],
)
def test_a_worker_gets_several_devices(
    devices: Any, inventory: Inventory, inherited: dict[str, str], shown: list[str]
) -> None:
    options = WorkerOptions(cuda_devices=devices, devices_per_worker=2)
    found = places(options.cuda_devices, 4, inventory, inherited, 2)
    assert [place.variables.get(CUDA) for place in found] == shown
    assert all(place.needs_gpu and not place.problem for place in found)
    named = [None] if devices == "auto" else [str(place.device) for place in found]
    assert {place.gpu_id for place in found} == {*named}


@pytest.mark.parametrize(
    ("devices", "per_worker", "inventory", "inherited", "problem"),
    [
        (None, 2, NVIDIA, {}, 'needs cuda_devices; name the devices, or give "auto"'),
        ([0, "cpu"], 2, NVIDIA, {}, "is for GPUs, and the devices include the cpu"),
        ([0, 1, 2], 2, NVIDIA, {}, "must divide the number of devices, which is 3"),
        ("auto", 2, NVIDIA, {CUDA: ""}, "visible: CUDA_VISIBLE_DEVICES= leaves none; leave it out"),
        ("auto", 3, NVIDIA, {CUDA: "4,5"}, "leave it out, or lower it"),
        ("auto", 2, NVIDIA, {CUDA: "4,5,6"}, "divide the number of GPUs, and 3 GPUs of 8 are vis"),
        ("auto", 2, UNKNOWN, {}, "it is unknown; name the devices to use in cuda_devices"),
    ],
)
def test_devices_that_cannot_be_divided_among_workers_are_refused(
    devices: Any, per_worker: int, inventory: Inventory, inherited: dict[str, str], problem: str
) -> None:
    def placed() -> None:
        WorkerOptions(cuda_devices=devices, devices_per_worker=per_worker)
        places(devices, 4, inventory, inherited, per_worker)

    with pytest.raises(ValueError, match=re.escape(problem)) as refused:
        placed()
    assert f"devices_per_worker={per_worker} " in str(refused.value)


@pytest.mark.parametrize(
    ("device", "inventory", "environment", "problem"),
    [
        ("0,1", NVIDIA, {CUDA: "4,5"}, ""),
        (
            "0,1", Inventory((NVIDIA.gpus or ())[:1], "nvidia"), {CUDA: "0,1"},
            "device 0,1 was requested, but 1 GPU of 1 is visible with CUDA_VISIBLE_DEVICES=0,1: "
            "0 (NVIDIA H100 no. 0)",
        ),
        (1, UNKNOWN, {CUDA: "5"}, ""),
        (1, UNKNOWN, {}, ""),
        (
            1, Inventory(NVIDIA.gpus[:2] if NVIDIA.gpus else (), "nvidia"), {CUDA: "5"},
            "device 1 was requested, but no GPU is visible: CUDA_VISIBLE_DEVICES=5 leaves none; "
            "this machine has 2 GPUs: 0 (NVIDIA H100 no. 0), 1 (NVIDIA H100 no. 1)",
        ),
        (
            1, Inventory((), "nvidia", "the NVIDIA driver is not loaded"), {CUDA: "5"},
            "device 1 was requested, but no GPU is visible: the NVIDIA driver is not loaded",
        ),
        (
            1, Inventory((Gpu(5, problem="NVML says 'GPU is lost'"),), "nvidia"), {CUDA: "5"},
            "device 1 was requested, but it cannot be used: NVML says 'GPU is lost'",
        ),
    ],
)  # fmt: skip
def test_a_worker_finds_out_that_its_gpu_is_gone(
    device: int | str, inventory: Inventory, environment: dict[str, str], problem: str
) -> None:
    assert missing(device, inventory, environment) == problem


# -- finding GPUs: a library with NVML's functions in place of the driver's

STUB_0, STUB_1 = (Gpu(i, f"GPU-{i}{i}{i}{i}", f"NVIDIA Stub {i}") for i in range(2))
STUB_PARTS = [Gpu(0, f"MIG-0{i}", "MIG of NVIDIA Stub 0", "GPU-0000") for i in range(2)]
LOST = Gpu(1, problem="NVML says 'GPU is lost'")


@pytest.fixture
def stub(nvml: Path, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in (CUDA, HIP, ROCR, COUNT):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("service_streamer.workers.placement._NVML", str(nvml / "libnvidia-ml.so.1"))
    return monkeypatch


@pytest.mark.parametrize(
    ("stubbed", "gpus"),
    [
        ({"GPUS": "2"}, (STUB_0, STUB_1)),
        ({"GPUS": "2", "PARTS": "2"}, (*STUB_PARTS, STUB_1)),
        ({"GPUS": "2", "LOST": "1"}, (STUB_0, LOST)), ({"GPUS": "2", "DENIED": "0"}, (STUB_1,)),
        ({"GPUS": "0"}, ()), ({"INIT": "9"}, ()), ({"INIT": "999"}, None),
    ],
)  # fmt: skip
def test_nvml_says_which_gpus_there_are(
    stub: pytest.MonkeyPatch, stubbed: dict[str, str], gpus: tuple[Gpu, ...] | None
) -> None:
    for name, value in stubbed.items():
        stub.setenv(f"NVML_STUB_{name}", value)
    found = find_gpus()
    assert (found.gpus, found.vendor) == (gpus, "nvidia")
    assert found.why or gpus is None
    stub.setenv(COUNT, "2")  # set in the environment, it counts
    assert find_gpus().gpus == (Gpu(0), Gpu(1))
    stub.setenv(COUNT, "0")
    assert find_gpus().gpus == ()


def test_amd_s_gpus_are_read_from_the_kernel_s_files(tmp_path: Path) -> None:
    for node, (gpu_id, unique) in enumerate([("0", "0"), ("51", "255"), ("52", "0")]):
        folder = tmp_path / str(node)
        folder.mkdir()
        (folder / "gpu_id").write_text(f"{gpu_id}\n")
        (folder / "properties").write_text(f"cpu_cores_count 0\nunique_id {unique}\n")
        (folder / "name").write_text("gfx942\n")
    (tmp_path / "3").mkdir()  # of another container's: its files cannot be read
    assert gpus_by_kfd(tmp_path) == [
        Gpu(0, "GPU-00000000000000ff", "AMD gfx942"), Gpu(1, "", "AMD gfx942")
    ]  # fmt: skip
    assert gpus_by_kfd(tmp_path / "none") == []


# -- with workers


@pytest.mark.usefixtures("no_forkserver_is_left", "eight_gpus")
@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_a_managed_model_sees_the_device_of_its_parent_s_list(
    monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """Its constructor sets CUDA_VISIBLE_DEVICES, to what the parent's list makes of its number."""
    monkeypatch.setenv(CUDA, "4,5")
    monkeypatch.setenv(HIP, "0")
    with Streamer(
        "device_models:Environment", cuda_devices=(1,), mp_start_method=method
    ) as streamer:
        assert streamer.predict([CUDA, HIP, "gpu_id"]) == ["5", None, 1]
        if method == "spawn":
            monkeypatch.setenv(CUDA, "")  # to keep this process itself off the GPUs, say
            streamer.restart_workers()
            assert streamer.predict([CUDA]) == ["5"], "it keeps its device"


@pytest.mark.usefixtures("eight_gpus")
def test_auto_spreads_the_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CUDA, "4,5")
    with Streamer("device_models:Environment", 1, worker_num=3, cuda_devices="auto") as streamer:
        streamer.wait_ready()
        assert [worker.device for worker in streamer.workers()] == [0, 1, 0]
        seen = set()
        while len(seen) < 2:
            seen.add(streamer.predict([CUDA])[0])
        assert seen == {"4", "5"}
        assert streamer.predict(["gpu_id"]) == [None]


@pytest.mark.usefixtures("eight_gpus")
@pytest.mark.parametrize(
    ("options", "is_warned"),
    [
        ({"worker_num": 2}, True),
        ({"worker_num": 1}, False),
        ({"worker_num": 2, "cuda_devices": "auto"}, False),
        ({"worker_num": 2, "cuda_devices": ["cpu"]}, False),
    ],
)
def test_workers_that_share_a_gpu_by_accident_are_reported(
    caplog: pytest.LogCaptureFixture, options: dict[str, Any], is_warned: bool
) -> None:
    Placement(WorkerOptions(**options))
    assert ('cuda_devices="auto" spreads them' in caplog.text) == is_warned
    caplog.clear()


@pytest.mark.usefixtures("eight_gpus")
@pytest.mark.parametrize(
    ("devices", "left", "why"),
    [
        ((1,), "1", "CUDA_VISIBLE_DEVICES=1 leaves none; this mach"),
        ("auto", "0", "a GPU was visible when the streamer was built"),
    ],
)
def test_a_gpu_that_is_lost_fails_the_restart(
    devices: Any, left: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Streamer(models.double, cuda_devices=devices) as streamer:
        assert streamer.predict([1]) == [2]
        monkeypatch.setenv(COUNT, left)
        with pytest.raises(WorkerStartError, match=why):
            streamer.restart_workers()
        assert streamer.predict([2]) == [4], "the old one goes on, and not on the CPU"


SCRIPT = """
from service_streamer import Streamer

if __name__ == "__main__":
    with Streamer("device_models:Environment", 1, worker_num=2, cuda_devices="auto") as streamer:
        streamer.wait_ready()
        seen = set()
        for _ in range(50):
            seen.update(streamer.predict(["CUDA_VISIBLE_DEVICES"]))
        print(sorted(seen))
"""


def test_workers_see_the_gpus_that_the_driver_s_library_finds(
    nvml: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", str(nvml))
    monkeypatch.setenv("NVML_STUB_GPUS", "2")
    monkeypatch.setenv("NVML_STUB_PARTS", "1")
    assert outcome(SCRIPT, tmp_path)[1] == "['GPU-1111', 'MIG-00']\n"


# -- torch has the last word


def torch_stub(*, is_available: bool, is_built: bool = True) -> Any:
    cuda = SimpleNamespace(is_available=lambda: is_available)
    backends = SimpleNamespace(cuda=SimpleNamespace(is_built=lambda: is_built))
    return SimpleNamespace(__version__="2.9.0+cu128", cuda=cuda, backends=backends)


NAMED = Place(0, 0, {})
CHOSEN = Place(0, None, {})
SEES_ALL = torch_stub(is_available=True)
SEES_NONE = torch_stub(is_available=False)
FOR_THE_CPU = torch_stub(is_available=False, is_built=False)


@pytest.mark.parametrize(
    ("place", "torch", "refused", "logged"),
    [
        *(
            (place, torch, "", "")
            for place in (NAMED, Place("cpu", "cpu", {}), Place(None, None, {}))
            for torch in (SEES_ALL, SimpleNamespace(), None)
        ),
        (NAMED, SEES_NONE, "torch 2.9.0+cu128 sees no GPU in the worker", ""),
        (CHOSEN, SEES_NONE, "", "runs on the CPU"),
        # The model may use the GPU by another library.
        (NAMED, FOR_THE_CPU, "", "torch 2.9.0+cu128 in the worker cannot use device 0"),
    ],
)
def test_a_loaded_torch_that_cannot_use_the_gpu_is_refused_or_reported(
    place: Place, torch: Any, refused: str, logged: str, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.setitem(sys.modules, "torch", torch)
    if refused:
        with pytest.raises(RuntimeError, match=re.escape(refused)):
            check_loaded_torch(place)
    else:
        check_loaded_torch(place)
    assert logged in caplog.text
    assert bool(caplog.records) == bool(logged)
    caplog.clear()


# -- the command line


def test_serve_with_a_gpu_that_cannot_be_used_ends_with_3_and_says_so() -> None:
    arguments = ("serve", "served_models:double", "--devices", "0", "--port", "0")
    done = serve_process.run(*arguments, SERVICE_STREAMER_GPU_COUNT="0")
    assert done.returncode == 3
    assert "device 0 was requested, but no GPU is visible" in done.stderr


def test_serve_spreads_its_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    served = launched(monkeypatch, "serve", "device_models:Environment", "--workers", "3")
    assert served.models[0].options.cuda_devices == "auto"


# -- how torch takes memory: growing segments

Load = Callable[[CudaMemory], CudaMemory]


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
    version: str, name: str, models: list[str], inherited: dict[str, str], is_set: bool,
    tmp_path: Path,
) -> None:  # fmt: skip
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


@pytest.mark.parametrize(
    ("devices", "worker_num", "shown", "expected"),
    [
        ([0], 3, "4,5", [(3,), (3,), (3,)]), (["0,1", 1], 2, "4,5", [(1, 2), (2,)]),
        (["cpu", 0], 4, "4,5", [(), (2,), (), (2,)]),
        ([7], 2, "4,5", [(), ()]),  # is not there
        ("auto", 3, "4,5", [(2,), (1,), (2,)]),
        ("auto", 1, "4,5", [()]), (None, 2, "4", [(2,), (2,)]),
        (None, 2, "4,5", [(), ()]),  # the model may spread itself
    ],
)  # fmt: skip
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
    cuda = loaded(CudaMemory())
    cuda.initialize()
    assert limit_device_memory((2,))
    assert cuda.limits == {0: 3.5 / 8}, "a context of the model's is limited at once"


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


def test_a_single_worker_has_no_limit_and_a_gpu_that_fails_does_not_fail_the_start(
    loaded: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = loaded(CudaMemory())
    assert limit_device_memory((1,))
    assert limit_device_memory(())
    assert cuda.queued == []
    cuda.get_device_properties = lambda _: 1 / 0  # type: ignore[assignment]
    limit_device_memory((2,))
    cuda.initialize()
    limit_device_memory((2,))
    assert cuda.limits == {0: 1.0}
    monkeypatch.setitem(sys.modules, "torch", None)
    assert not limit_device_memory((2,))
    assert sys.modules["torch"] is None


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
