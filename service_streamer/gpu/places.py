"""Which GPUs each worker of a streamer sees.

GPUs are numbered as CUDA and ROCm number them in this process: ``CUDA_VISIBLE_DEVICES=4,5`` shows
two GPUs, 0 and 1. A worker on number 1 gets ``CUDA_VISIBLE_DEVICES=5``.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ..options.checks import Device, Devices, device_names
from .accelerators import (
    CUDA,
    TORCH_KINDS,
    Accelerator,
    Gpu,
    find_gpus,
    hidden_variables,
    kind_of,
)

logger = logging.getLogger(__name__)


class Place(NamedTuple):
    """Where a worker runs."""

    device: Device | None  # number or name of its GPU; None if it sees what its parent sees
    gpu_id: Device | None  # the model's; None if the user named no device
    variables: Mapping[str, str | None]  # of the environment, to set; None removes one
    shown: tuple[str, ...] | None = None  # values of the GPUs that it sees; None as for ``device``
    problem: str = ""  # why the device is unavailable; empty if it is available
    expects_gpu: bool = False  # whether a worker without a device should see a GPU
    sharers: tuple[int, ...] = ()  # how many workers compute on each GPU that it sees

    @property
    def needs_gpu(self) -> bool:
        return self.expects_gpu or (self.device is not None and str(self.device) != "cpu")


#: For a worker that sees what its parent sees.
UNPLACED = Place(None, None, {})


@dataclasses.dataclass(frozen=True)
class VisibleGpus:
    """The GPUs that a process sees."""

    kind: Accelerator
    gpus: Sequence[Gpu] | None  # in the order of their numbers; None if unknown
    lists: str  # the environment variables that select some, such as "CUDA_VISIBLE_DEVICES=4,5"

    @property
    def count(self) -> int | None:
        """How many; None if unknown."""
        return None if self.gpus is None else len(self.gpus)

    def describe(self) -> str:
        """A sentence for messages."""
        if self.gpus is None:
            return "the number of GPUs is unknown"
        among = f" with {self.lists}" if self.lists else ""
        names = (f"{number} ({gpu.name or gpu.value})" for number, gpu in enumerate(self.gpus))
        if not self.gpus:
            return f"no GPU is visible{among}"
        return f"these GPUs are visible{among}: {', '.join(names)}"


#: Where no worker needs a GPU, the drivers are not asked.
UNKNOWN_GPUS = VisibleGpus(CUDA, None, "")


def visible_gpus(
    environment: Mapping[str, str] = os.environ,
    machine: tuple[Accelerator, Sequence[Gpu] | None] | None = None,
) -> VisibleGpus:
    """The GPUs that a process with this environment sees. To look for them takes milliseconds."""
    kind, gpus = machine or find_gpus()
    lists = [f"{name}={environment[name]}" for name in kind.variables if name in environment]
    return VisibleGpus(kind, kind.visible(gpus, environment), " and ".join(lists))


def show_only(device: Device) -> None:
    """Show this process one device, by its number of the driver or its name."""
    kind = kind_of(os.environ)
    place = _place(device, VisibleGpus(kind, None, ""))
    set_environment(dict.fromkeys(kind.variables) | dict(place.variables))


def set_environment(variables: Mapping[str, str | None]) -> None:
    """Set variables of this process; None removes one."""
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def places(
    devices: Devices, worker_num: int, visible: VisibleGpus, per_worker: int = 1
) -> list[Place]:
    """Where workers run: worker i at ``places[i % len(places)]``. Pure.

    With "auto" the workers get in turn the GPUs that their parent sees; a single worker sees all of
    them, since its model may use several.

    Raises:
        ImportError: a package that would count the GPUs is missing.
        ValueError: the visible GPUs cannot be divided so.
    """
    if devices is None:
        return [UNPLACED]
    named: Sequence[Device] = range(visible.count or 0) if isinstance(devices, str) else devices
    if isinstance(devices, str):
        if visible.gpus is None and max(worker_num, per_worker) > 1:
            visible.kind.require_count()
        if per_worker > 1 and (not named or len(named) % per_worker):
            raise ValueError(
                f"devices_per_worker={per_worker} must divide the number of visible GPUs, and "
                f"{visible.describe()}; name the devices to use in cuda_devices, or lower it"
            )
    if per_worker > 1:
        names = device_names(named)
        starts = range(0, len(names), per_worker)
        named = [",".join(names[start : start + per_worker]) for start in starts]
    found = [_place(device, visible) for device in named]
    if isinstance(devices, str):
        found = [place._replace(gpu_id=None) for place in found]  # the user has named none of them
        if worker_num == per_worker == 1 and found:
            # A single worker sees all GPUs, and expects some: they may be lost when it restarts.
            found[0] = UNPLACED._replace(expects_gpu=True)
    return found or [UNPLACED]


def _place(device: Device, visible: VisibleGpus) -> Place:
    if str(device) == "cpu":
        return Place(device, device, hidden_variables(), ())
    gpus = [_find(name, visible) for name in device_names([device])]
    problem = _problem(f"device {device} was requested", gpus, visible)
    if problem:
        return Place(device, device, hidden_variables(), (), problem)
    shown = tuple(gpu.value for gpu in gpus if gpu is not None)
    return Place(device, device, visible.kind.variables_to_show(",".join(shown)), shown)


def _find(name: str, visible: VisibleGpus) -> Gpu | None:
    """The GPU that a user names by its number or UUID; None if it is missing."""
    if name.isdecimal() and visible.gpus is not None:
        return dict(enumerate(visible.gpus)).get(int(name))
    # A UUID that is not known here the driver may know.
    found = (gpu for gpu in visible.gpus or () if gpu.uuid.startswith(name))
    return next(found, Gpu(name))


def _problem(wish: str, gpus: Sequence[Gpu | None], visible: VisibleGpus) -> str:
    """Why these GPUs cannot be used; empty if they can."""
    if not gpus or None in gpus:
        return f"{wish}, but {visible.describe()}"
    problem = next((gpu.problem for gpu in gpus if gpu and gpu.problem), "")
    return problem and f"{wish}, but it cannot be used: {problem}"


def missing_gpu(place: Place, visible: VisibleGpus) -> str:
    """In a worker, why its GPU is missing; empty if it is there, or if that is unknown. Pure."""
    if place.problem or not place.needs_gpu or visible.gpus is None:
        return place.problem
    if place.device is None:
        wish, wanted = "a GPU was visible when the streamer was built", 1
    else:
        wish, wanted = f"device {place.device} was requested", len(device_names([place.device]))
    lost = [None] * (wanted - len(visible.gpus))
    return _problem(wish, [*visible.gpus, *lost], visible)


def check_torch(place: Place) -> None:
    """After the model is loaded, check that torch can use the worker's GPU.

    Raises RuntimeError: torch is built for GPUs, but the user's GPU is missing.
    """
    torch: Any = sys.modules.get("torch")
    if not place.needs_gpu or torch is None:
        return
    try:
        if any(kind.is_available() for kind in TORCH_KINDS.values()):
            return
        version = torch.__version__
        is_for_gpus = any(kind.is_built() for kind in TORCH_KINDS.values())
    except AttributeError:  # half loaded, or another module of that name
        return
    if place.gpu_id is not None and is_for_gpus:
        raise RuntimeError(
            f"device {place.device} was requested, but torch {version} sees no GPU in the worker: "
            "perhaps its driver is too old, or the device is lost; see nvidia-smi"
        )
    logger.warning(
        "torch %s in the worker cannot use %s: if the model uses torch, it runs on the CPU",
        version, "any GPU" if place.device is None else f"device {place.device}",
    )  # fmt: skip


def sharers(
    found: Sequence[Place], visible: VisibleGpus, number: int, worker_num: int
) -> tuple[int, ...]:
    """How many workers compute on each GPU that worker ``number`` sees; empty if unknown. Pure."""
    # Of several GPUs the model chooses.
    only = tuple(gpu.value for gpu in visible.gpus or ()) if visible.count == 1 else ()

    def seen(worker: int) -> tuple[str, ...]:
        shown = found[worker % len(found)].shown
        return only if shown is None else shown

    all_seen = [seen(worker) for worker in range(worker_num)]
    return tuple(sum(value in each for each in all_seen) for value in seen(number))
