"""Which GPU a worker sees: spread, mapped through the parent's list, and missing."""

from __future__ import annotations

import importlib.metadata
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
from service_streamer.gpu.accelerators import (
    CUDA,
    ROCM,
    XPU,
    Gpu,
    allocator_variables,
    find_gpus,
    limit_memory,
    share_of_memory,
)
from service_streamer.gpu.places import (
    Place,
    VisibleGpus,
    check_torch,
    missing_gpu,
    places,
    sharers,
    visible_gpus,
)
from service_streamer.options.table import WorkerOptions

GPU_COUNT = "SERVICE_STREAMER_GPU_COUNT"
SHOWN, HIP, ROCR = "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"
MASK = "ZE_AFFINITY_MASK"

#: A kind of GPU, and all that a machine has; None if they cannot be counted.
Machine = tuple[Any, "list[Gpu] | None"]

NVIDIA: Machine = (
    CUDA, [Gpu(str(i), f"NVIDIA H100 no. {i}", f"GPU-{i}{i}{i}{i}") for i in range(8)]
)  # fmt: skip
AMD: Machine = ROCM, [Gpu(str(i), f"AMD gfx942 no. {i}", f"GPU-{i:016x}") for i in range(4)]
PARTS: Machine = (
    CUDA,
    [
        Gpu("MIG-00", "MIG of NVIDIA H100", "MIG-00"),
        Gpu("MIG-01", "MIG of NVIDIA H100", "MIG-01"),
        Gpu("GPU-1111", "NVIDIA H100", "GPU-1111"),
    ],
)
NAMELESS: Machine = CUDA, [Gpu("0"), Gpu("1")]
LOST: Machine = CUDA, [Gpu("0", problem="NVML says 'GPU is lost'")]
UNKNOWN: Machine = CUDA, None
UNKNOWN_AMD: Machine = ROCM, None
INTEL: Machine = XPU, None
NONE: Machine = CUDA, []


def visible(machine: Machine, **environment: str) -> VisibleGpus:
    return visible_gpus(environment, machine)


# -- what a process sees


@pytest.mark.parametrize(
    ("machine", "environment", "values"),
    [
        (NVIDIA, {}, ["0", "1", "2", "3", "4", "5", "6", "7"]),
        (NVIDIA, {SHOWN: "4,5"}, ["4", "5"]), (NVIDIA, {SHOWN: " 5 , 4 "}, ["5", "4"]),
        (NVIDIA, {SHOWN: "0,-1,1"}, ["0"]), (NVIDIA, {SHOWN: "0,8,1"}, ["0"]),
        (NVIDIA, {SHOWN: ""}, []),
        (NVIDIA, {SHOWN: "GPU-4,GPU-5555"}, ["GPU-4", "GPU-5555"]),
        (NVIDIA, {HIP: "0", ROCR: "1"}, ["0", "1", "2", "3", "4", "5", "6", "7"]),
        (PARTS, {}, ["MIG-00", "MIG-01", "GPU-1111"]), (PARTS, {SHOWN: "0"}, ["0"]),
        (PARTS, {SHOWN: "GPU-0000"}, ["GPU-0000"]),
        (PARTS, {SHOWN: "MIG-GPU-0000/1/0"}, ["MIG-GPU-0000/1/0"]),
        (NAMELESS, {SHOWN: "GPU-4"}, ["GPU-4"]), (UNKNOWN, {}, None),
        (UNKNOWN_AMD, {HIP: "1"}, ["1"]), (NONE, {}, []), (NONE, {SHOWN: "GPU-4"}, []),
        (AMD, {HIP: "2,3", SHOWN: "0"}, ["2", "3"]),
        (AMD, {HIP: "", SHOWN: ""}, ["0", "1", "2", "3"]),
        (AMD, {ROCR: "2,3"}, ["0", "1"]), (AMD, {ROCR: "GPU-0000000000000002"}, ["0"]),
        (AMD, {ROCR: "2,3", HIP: "1"}, ["1"]),
        (INTEL, {}, None), (INTEL, {MASK: "2,3"}, ["2", "3"]),
    ],
)  # fmt: skip
def test_a_process_sees_the_gpus_that_its_environment_lists(
    machine: Machine, environment: dict[str, str], values: list[str] | None
) -> None:
    gpus = visible(machine, **environment).gpus
    assert (None if gpus is None else [gpu.value for gpu in gpus]) == values


# -- what a worker is shown


@pytest.mark.parametrize(
    ("device", "machine", "inherited", "shown"),
    [
        (1, NVIDIA, {SHOWN: "4,5"}, "5"), ("cuda:1", NVIDIA, {SHOWN: "4,5"}, "5"),
        ("0,1", NVIDIA, {SHOWN: "4,5"}, "4,5"),
        ("GPU-5", NVIDIA, {SHOWN: "4,5"}, "5"), (1, PARTS, {}, "MIG-01"),
        ("GPU-0000", PARTS, {}, "GPU-0000"),  # CUDA takes its first part
        ("MIG-GPU-0000/1/0", PARTS, {}, "MIG-GPU-0000/1/0"),
        (3, UNKNOWN, {}, "3"), ("GPU-5", NAMELESS, {}, "GPU-5"),
        ("GPU-5", UNKNOWN, {SHOWN: "4,5"}, "GPU-5"),  # only CUDA can check it
    ],
)  # fmt: skip
def test_a_worker_is_shown_a_gpu_of_its_parent_s_list(
    device: int | str, machine: Machine, inherited: dict[str, str], shown: str
) -> None:
    (place,) = places([device], 1, visible(machine, **inherited))
    variables = {SHOWN: shown, HIP: None, ROCR: None}
    assert place == Place(device, device, variables, tuple(shown.split(",")))


def test_workers_on_other_kinds_are_shown_one_by_their_variables_and_on_the_cpu_none() -> None:
    cases: list[tuple[Machine, int | str, dict[str, str], str]] = [
        (AMD, 1, {HIP: "2,3"}, "3"),
        (AMD, 0, {ROCR: "2,3", HIP: "1"}, "1"),
        (AMD, "GPU-0000000000000003", {ROCR: "2,3"}, "1"),
    ]
    for machine, device, inherited, shown in cases:
        (place,) = places([device], 1, visible(machine, **inherited))
        assert place.variables == {SHOWN: shown, HIP: shown}
    (place,) = places([1], 1, visible(INTEL, ZE_AFFINITY_MASK="2,3"))
    assert place.variables == {MASK: "3"}
    (place,) = places(["cpu"], 1, visible(NONE, CUDA_VISIBLE_DEVICES="4,5"))
    assert place == Place("cpu", "cpu", {SHOWN: "", HIP: "-1"}, ())
    assert not place.needs_gpu


@pytest.mark.parametrize(
    ("device", "machine", "inherited", "problem"),
    [
        (2, NVIDIA, {SHOWN: "4,5"}, "CUDA_VISIBLE_DEVICES=4,5: 0 (NVIDIA H100 no. 4), 1"),
        (0, NVIDIA, {SHOWN: ""}, "no GPU is visible with CUDA_VISIBLE_DEVICES="),
        ("0,2", NAMELESS, {}, "these GPUs are visible: 0 (0), 1 (1)"),
        (2, UNKNOWN, {SHOWN: "GPU-4,GPU-5"}, "0 (GPU-4), 1 (GPU-5)"),
        (0, LOST, {}, "it cannot be used: NVML says 'GPU is lost'"),
        (1, AMD, {ROCR: "2"}, "ROCR_VISIBLE_DEVICES=2: 0 (AMD gfx942 no. 2)"),
    ],
)  # fmt: skip
def test_a_missing_gpu_is_reported_with_those_that_are_visible(
    device: int | str, machine: Machine, inherited: dict[str, str], problem: str
) -> None:
    (place,) = places([device], 1, visible(machine, **inherited))
    assert place.problem.startswith(f"device {device} was requested, but ")
    assert problem in place.problem
    assert place.variables[SHOWN] == "", "until it ends it must not take another's"
    assert missing_gpu(place, visible(NVIDIA)) == place.problem


@pytest.mark.parametrize(
    ("worker_num", "machine", "inherited", "shown"),
    [
        (2, NVIDIA, {SHOWN: "4,5,6"}, ["4", "5", "6"]), (1, NVIDIA, {SHOWN: "4,5"}, [None, "5"]),
        (2, NONE, {}, [None]), (2, UNKNOWN, {}, [None]), (2, AMD, {HIP: "3,1"}, ["3", "1"]),
        (2, PARTS, {}, ["MIG-00", "MIG-01", "GPU-1111"]),
    ],
)  # fmt: skip
def test_auto_is_all_gpus_that_are_visible(
    worker_num: int, machine: Machine, inherited: dict[str, str], shown: list[str | None]
) -> None:
    seen = visible(machine, **inherited)
    found = places("auto", worker_num, seen)
    assert [place.variables.get(SHOWN) for place in found] == shown
    assert all(place.gpu_id is None for place in found), "the user has named none"
    assert all(place.needs_gpu == bool(seen.gpus) for place in found)
    assert all(place.device in (number, None) for number, place in enumerate(found))


@pytest.mark.parametrize(
    ("devices", "machine", "inherited", "shown"),
    [
        ("auto", NVIDIA, {SHOWN: "4,5,2,3"}, ["4,5", "2,3"]),
        ("auto", AMD, {HIP: "3,1"}, ["3,1"]),
        ([3, 0, "1", "cuda:2"], NVIDIA, {}, ["3,0", "1,2"]),
        ([0, 1], UNKNOWN, {}, ["0,1"]),
    ],
)
def test_a_worker_gets_several_devices(
    devices: Any, machine: Machine, inherited: dict[str, str], shown: list[str]
) -> None:
    options = WorkerOptions(cuda_devices=devices, devices_per_worker=2)
    found = places(options.cuda_devices, 4, visible(machine, **inherited), 2)
    assert [place.variables.get(SHOWN) for place in found] == shown
    assert all(place.needs_gpu and not place.problem for place in found)
    names = [None] if devices == "auto" else [str(place.device) for place in found]
    assert {place.gpu_id for place in found} == {*names}


@pytest.mark.parametrize(
    ("devices", "per_worker", "machine", "inherited", "problem"),
    [
        (None, 2, NVIDIA, {}, "needs cuda_devices"),
        ([0, "cpu"], 2, NVIDIA, {}, "is for GPUs, and the devices include the cpu"),
        ([0, 1, 2], 2, NVIDIA, {}, "must divide the number of devices, which is 3"),
        ("auto", 2, NVIDIA, {SHOWN: ""}, "no GPU is visible with CUDA_VISIBLE_DEVICES="),
        ("auto", 2, NVIDIA, {SHOWN: "4,5,6"}, "must divide the number of visible GPUs"),
        ("auto", 2, UNKNOWN, {}, "the number of GPUs is unknown"),
    ],
)
def test_devices_that_cannot_be_divided_among_workers_are_refused(
    devices: Any, per_worker: int, machine: Machine, inherited: dict[str, str], problem: str
) -> None:
    def placed() -> None:
        WorkerOptions(cuda_devices=devices, devices_per_worker=per_worker)
        places(devices, 4, visible(machine, **inherited), per_worker)

    with pytest.raises(ValueError, match=re.escape(problem)) as refused:
        placed()
    assert f"devices_per_worker={per_worker} " in str(refused.value)


ANY = Place(None, None, {}, expects_gpu=True)


@pytest.mark.parametrize(
    ("device", "machine", "environment", "problem"),
    [
        ("0,1", NVIDIA, {SHOWN: "4,5"}, ""), (1, UNKNOWN, {SHOWN: "5"}, ""), (1, UNKNOWN, {}, ""),
        (None, NVIDIA, {}, ""),
        ("0,1", (CUDA, NVIDIA[1][:1]), {SHOWN: "0,1"}, "device 0,1 was requested, but these GPUs"),
        (1, (CUDA, NVIDIA[1][:2]), {SHOWN: "5"}, "no GPU is visible with CUDA_VISIBLE_DEVICES=5"),
        ("GPU-5", NONE, {SHOWN: "GPU-5"}, "no GPU is visible"),
        (None, NONE, {}, "a GPU was visible when the streamer was built, but no GPU is visible"),
        (0, LOST, {SHOWN: "0"}, "device 0 was requested, but it cannot be used: NVML says"),
    ],
)  # fmt: skip
def test_a_worker_finds_out_that_its_gpu_is_gone(
    device: Any, machine: Machine, environment: dict[str, str], problem: str
) -> None:
    place = ANY if device is None else Place(device, device, {})
    found = missing_gpu(place, visible(machine, **environment))
    assert problem in found
    assert bool(found) == bool(problem)


# -- finding GPUs, with functions in place of NVIDIA's package


class NvmlError(Exception):
    pass


class Nvml(SimpleNamespace):
    """The used part of ``pynvml``, for a machine with two GPUs.

    Args:
        fails: by function, or function and number of the GPU, what it raises.
        parts: in how many MIG instances GPU 0 is divided; one more is possible.
    """

    def __init__(self, fails: dict[str, str] | None = None, parts: int = 0) -> None:
        super().__init__(NVMLError=NvmlError)
        for name in ("LibraryNotFound", "DriverNotLoaded", "NoPermission"):
            setattr(self, f"NVMLError_{name}", type(name, (NvmlError,), {}))
        answers: dict[str, Callable[..., Any]] = {
            "Init": lambda: None,
            "Shutdown": lambda: None,
            "DeviceGetCount": lambda: 2,
            "DeviceGetHandleByIndex": lambda number: number,
            "DeviceGetUUID": lambda handle: UUIDS[handle],
            "DeviceGetName": lambda handle: f"NVIDIA Stub {handle}",
            "DeviceGetMigMode": lambda handle: [int(parts > 0 and handle == 0), 0],
            "DeviceGetMaxMigDeviceCount": lambda _: parts + 1,
            "DeviceGetMigDeviceHandleByIndex": lambda _, part: ("empty", "a", "b")[part - parts],
        }
        for name, answer in answers.items():
            setattr(self, f"nvml{name}", self._failing(name, answer, fails or {}))

    def _failing(self, name: str, answer: Callable[..., Any], fails: dict[str, str]) -> Any:
        def call(*arguments: Any) -> Any:
            kind = fails.get(" ".join(map(str, (name, *arguments))))
            if kind is not None:
                raise getattr(self, f"NVMLError_{kind}", NvmlError)("GPU is lost")
            found = answer(*arguments)
            if found == "empty":
                raise NvmlError("Not Found")
            return found

        return call


UUIDS = {0: "GPU-0000", 1: "GPU-1111", "a": "MIG-00", "b": "MIG-01"}
STUB_0, STUB_1 = (Gpu(str(i), f"NVIDIA Stub {i}", UUIDS[i]) for i in range(2))
STUB_PARTS = [Gpu(f"MIG-0{i}", "MIG of NVIDIA Stub 0", f"MIG-0{i}") for i in range(2)]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """A machine without files of any driver."""
    for name in (SHOWN, HIP, ROCR, GPU_COUNT):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(type(CUDA), "driver", tmp_path / "nvidia")
    monkeypatch.setattr(type(ROCM), "nodes", tmp_path / "kfd")
    return monkeypatch


@pytest.mark.parametrize(
    ("nvml", "gpus"),
    [
        (Nvml(), [STUB_0, STUB_1]),
        (Nvml(parts=2), [*STUB_PARTS, Gpu("GPU-1111", "NVIDIA Stub 1", "GPU-1111")]),
        (
            Nvml({"DeviceGetHandleByIndex 1": "Unknown"}),
            [STUB_0, Gpu("1", problem="NVML says 'GPU is lost'")],
        ),
        (Nvml({"DeviceGetHandleByIndex 0": "NoPermission"}), [STUB_1]),
        (Nvml({"Init": "DriverNotLoaded"}), []),
        (Nvml({"Init": "Unknown"}), None),
        (Nvml({"DeviceGetCount": "Unknown"}), None),
    ],
)
def test_nvidia_s_gpus_are_found_by_its_package(
    machine: pytest.MonkeyPatch, nvml: Any, gpus: list[Gpu] | None
) -> None:
    machine.setitem(sys.modules, "pynvml", nvml)
    found = find_gpus()[1]
    assert (found if found is None else list(found)) == gpus
    machine.setenv(GPU_COUNT, "2")  # set in the environment, it counts
    assert list(find_gpus()[1] or ()) == [Gpu("0"), Gpu("1")]


@pytest.mark.parametrize("has_package", [False, True])
def test_gpus_that_are_divided_need_the_package_to_be_counted(
    machine: pytest.MonkeyPatch, tmp_path: Path, has_package: bool
) -> None:
    (tmp_path / "nvidia" / "capabilities" / "gpu0" / "mig" / "gi3").mkdir(parents=True)
    machine.setitem(sys.modules, "pynvml", Nvml(parts=2) if has_package else None)
    kind, gpus = find_gpus()
    (named,) = places(["MIG-01"], 1, visible((kind, gpus)))
    assert named.variables[SHOWN] == "MIG-01"
    if has_package:
        assert len(places("auto", 2, visible((kind, gpus)))) == 3
    else:
        with pytest.raises(ImportError, match="pip install nvidia-ml-py"):
            places("auto", 2, visible((kind, gpus)))


def test_amd_s_gpus_are_read_from_the_kernel_s_files(
    machine: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    machine.setitem(sys.modules, "pynvml", None)
    assert find_gpus()[1] == ()
    for node, (gpu_id, unique) in enumerate([("0", "0"), ("51", "255"), ("52", "0")]):
        folder = tmp_path / "kfd" / str(node)
        folder.mkdir(parents=True)
        (folder / "gpu_id").write_text(f"{gpu_id}\n")
        (folder / "properties").write_text(f"cpu_cores_count 0\nunique_id {unique}\n")
        (folder / "name").write_text("gfx942\n")
    (tmp_path / "kfd" / "3").mkdir()  # of another container's: its files cannot be read
    assert find_gpus() == (
        ROCM, [Gpu("0", "AMD gfx942", "GPU-00000000000000ff"), Gpu("1", "AMD gfx942")]
    )  # fmt: skip


# -- with workers


@pytest.mark.usefixtures("no_forkserver_is_left", "eight_gpus")
@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_a_managed_model_sees_the_device_of_its_parent_s_list(
    monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """Its constructor sets CUDA_VISIBLE_DEVICES, to what the parent's list makes of its number."""
    monkeypatch.setenv(SHOWN, "4,5")
    monkeypatch.setenv(HIP, "0")
    with Streamer(
        "device_models:Environment", cuda_devices=(1,), mp_start_method=method
    ) as streamer:
        assert streamer.predict([SHOWN, HIP, "gpu_id"]) == ["5", None, 1]
        if method == "spawn":
            monkeypatch.setenv(SHOWN, "")  # to keep this process itself off the GPUs, say
            streamer.restart_workers()
            assert streamer.predict([SHOWN]) == ["5"], "it keeps its device"


@pytest.mark.usefixtures("eight_gpus")
def test_auto_spreads_the_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SHOWN, "4,5")
    with Streamer("device_models:Environment", 1, worker_num=3, cuda_devices="auto") as streamer:
        streamer.wait_ready()
        assert [worker.device for worker in streamer.workers()] == [0, 1, 0]
        seen = set()
        while len(seen) < 2:
            seen.add(streamer.predict([SHOWN])[0])
        assert seen == {"4", "5"}
        assert streamer.predict(["gpu_id"]) == [None]


@pytest.mark.usefixtures("eight_gpus")
@pytest.mark.parametrize(
    ("options", "is_warned"),
    [
        ({"worker_num": 2}, True),
        ({"worker_num": 2, "cuda_devices": "auto"}, False),
    ],
)
def test_workers_that_share_a_gpu_by_accident_are_reported(
    caplog: pytest.LogCaptureFixture, options: dict[str, Any], is_warned: bool
) -> None:
    with Streamer(models.echo, **options):
        pass
    assert ('cuda_devices="auto" spreads them' in caplog.text) == is_warned
    caplog.clear()


@pytest.mark.usefixtures("eight_gpus")
@pytest.mark.parametrize(
    ("devices", "left", "why"),
    [
        ((1,), "1", "no GPU is visible with CUDA_VISIBLE_DEVICES=1"),
        ("auto", "0", "a GPU was visible when the streamer was built"),
    ],
)
def test_a_gpu_that_is_lost_fails_the_restart(
    devices: Any, left: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Streamer(models.double, cuda_devices=devices) as streamer:
        assert streamer.predict([1]) == [2]
        monkeypatch.setenv(GPU_COUNT, left)
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
    pytest.importorskip("pynvml")
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
            check_torch(place)
    else:
        check_torch(place)
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
    ],
)
def test_segments_grow_unless_the_user_or_the_gpu_says_otherwise(
    models: list[str], inherited: dict[str, str], is_set: bool,
    machine: pytest.MonkeyPatch, tmp_path: Path,
) -> None:  # fmt: skip
    for number, model in enumerate(models):
        folder = tmp_path / "nvidia" / "gpus" / f"0000:{number:02d}:00.0"
        folder.mkdir(parents=True)
        (folder / "information").write_text(f"Model: \t\t {model}\nIRQ:   \t\t 17\n")
    for version, name in (
        ("2.13.0+cu128", "PYTORCH_ALLOC_CONF"),
        ("2.9.1", "PYTORCH_CUDA_ALLOC_CONF"),
    ):
        machine.setattr(importlib.metadata, "version", lambda _, version=version: version)
        found = allocator_variables(inherited)
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
    seen = visible(NVIDIA, CUDA_VISIBLE_DEVICES=shown)
    found = places(devices, worker_num, seen)
    counted = [sharers(found, seen, number, worker_num) for number in range(worker_num)]
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
    assert limit_memory((2, 4))
    assert not cuda.is_initialized()
    cuda.initialize()
    assert cuda.limits == {0: 3.5 / 8, 1: 1.5 / 8}
    assert cuda.current == 0
    cuda = loaded(CudaMemory())
    cuda.initialize()
    assert limit_memory((2,))
    assert cuda.limits == {0: 3.5 / 8}, "a context of the model's is limited at once"


@pytest.mark.parametrize("is_old", [False, True])
def test_a_limit_of_the_user_s_stays(loaded: Load, is_old: bool) -> None:
    cuda = loaded(CudaMemory(is_old=is_old))
    cuda.set_per_process_memory_fraction(0.9)  # at the import of the model's module
    limit_memory((2,))
    assert cuda.limits == {0: 0.9}
    cuda = loaded(CudaMemory(is_old=is_old))
    limit_memory((2,))
    cuda.set_per_process_memory_fraction(1.0)  # in init_model
    assert cuda.limits == {0: 1.0}


def test_a_single_worker_has_no_limit_and_a_gpu_that_fails_does_not_fail_the_start(
    loaded: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = loaded(CudaMemory())
    assert limit_memory((1,))
    assert limit_memory(())
    assert cuda.queued == []
    cuda.get_device_properties = lambda _: 1 / 0  # type: ignore[assignment]
    limit_memory((2,))
    cuda.initialize()
    limit_memory((2,))
    assert cuda.limits == {0: 1.0}
    monkeypatch.setitem(sys.modules, "torch", None)
    assert not limit_memory((2,))
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
