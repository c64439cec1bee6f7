"""The GPUs that a process sees, and the environment that shows a worker one of them. Pure.

GPUs are numbered as CUDA and ROCm number them in this process: ``CUDA_VISIBLE_DEVICES=4,5`` shows
two GPUs, 0 and 1. A worker on number 1 gets ``CUDA_VISIBLE_DEVICES=5``.

CUDA reads its list up to the first invalid entry; a repeated entry hides all GPUs. ROCm first
applies ``ROCR_VISIBLE_DEVICES``, and to the rest ``HIP_VISIBLE_DEVICES``, or if that is not set
``CUDA_VISIBLE_DEVICES``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from ..options.checks import Device, Devices, device_names
from .diagnosis import counted

CUDA = "CUDA_VISIBLE_DEVICES"
_HIP = "HIP_VISIBLE_DEVICES"
_ROCR = "ROCR_VISIBLE_DEVICES"

_NUMBER = re.compile(r"[+-]?\d+")


class Gpu(NamedTuple):
    """A GPU of this machine, or a MIG instance of one.

    Attributes:
        number: the driver's number.
        uuid: such as "GPU-8a2f..." or "MIG-1b3c..."; empty if unknown.
        name: such as "NVIDIA H100 80GB HBM3"; empty if unknown.
        parent: uuid of a MIG instance's GPU.
        problem: the driver's reason why it cannot be used; empty if it can.
    """

    number: int
    uuid: str = ""
    name: str = ""
    parent: str = ""
    problem: str = ""


class Inventory(NamedTuple):
    """The GPUs of this machine.

    Attributes:
        gpus: all GPUs, also hidden ones; None if unknown.
        vendor: their vendor; empty if unknown.
        why: the reason if there are none.
    """

    gpus: tuple[Gpu, ...] | None
    vendor: Literal["nvidia", "amd", ""] = ""
    why: str = ""


class Entry(NamedTuple):
    """A GPU that a process sees.

    Attributes:
        value: value of the variable that shows only this GPU.
        gpu: the GPU, if known.
    """

    value: str
    gpu: Gpu | None


class Place(NamedTuple):
    """Where a worker runs.

    Attributes:
        device: number or name of its GPU; None if it sees what its parent sees.
        gpu_id: the model's ``gpu_id``; None if the user named no device.
        variables: environment variables to set; None removes one.
        problem: why the device is unavailable; empty if it is available.
        expects_gpu: whether a worker without a device should see a GPU.
    """

    device: Device | None
    gpu_id: Device | None
    variables: Mapping[str, str | None]
    problem: str = ""
    expects_gpu: bool = False

    @property
    def needs_gpu(self) -> bool:
        return self.expects_gpu or (self.device is not None and str(self.device) != "cpu")


#: For a worker that sees what its parent sees.
UNPLACED = Place(None, None, {})


def places(
    devices: Devices,
    worker_num: int,
    inventory: Inventory,
    inherited: Mapping[str, str],
    per_worker: int = 1,
) -> list[Place]:
    """Where workers run: worker i at ``places[i % len(places)]``.

    Args:
        devices: as for ``Streamer``. With "auto" the workers get the visible GPUs in turn; a single
            worker sees all of them, since its model may use several.
        inherited: the parent's environment.
        per_worker: number of devices of each worker.

    Raises:
        ValueError: the visible GPUs cannot be divided so.
    """
    if devices is None:
        return [UNPLACED]
    if not isinstance(devices, str):
        if per_worker > 1:
            names = device_names(devices)
            devices = [
                ",".join(names[at : at + per_worker]) for at in range(0, len(names), per_worker)
            ]
        return [_named(device, inventory, inherited) for device in devices]
    entries = visible(inventory, inherited)
    if per_worker > 1:
        if not entries or len(entries) % per_worker:
            raise ValueError(_undivided(per_worker, entries, inventory, inherited))
        numbers = range(0, len(entries), per_worker)
        devices = [",".join(map(str, range(at, at + per_worker))) for at in numbers]
        # The user has named none of them.
        return [_named(each, inventory, inherited)._replace(gpu_id=None) for each in devices]
    if not entries:
        return [UNPLACED]
    is_amd = _is_amd(inventory, inherited)
    found = [
        Place(number, None, _showing(entry.value, is_amd=is_amd))
        for number, entry in enumerate(entries)
    ]
    # A single worker sees all GPUs, and expects some: they may be lost when it restarts.
    return [UNPLACED._replace(expects_gpu=True), *found[1:]] if worker_num == 1 else found


def _undivided(
    per_worker: int,
    entries: Sequence[Entry] | None,
    inventory: Inventory,
    inherited: Mapping[str, str],
) -> str:
    """Why the visible GPUs cannot be divided among workers, and what to do."""
    option = f"devices_per_worker={per_worker}"
    if entries is None:
        return (
            f"{option} must divide the number of GPUs, and it is unknown; name the devices to use "
            "in cuda_devices"
        )
    seen = explain_visible(inventory, inherited)
    if len(entries) < per_worker:
        return f"{option} needs {per_worker} GPUs for each worker, and {seen}; leave it out" + (
            ", or lower it" if len(entries) > 1 else ""
        )
    return (
        f"{option} must divide the number of GPUs, and {seen}; name the devices to use in "
        "cuda_devices"
    )


def sharers(
    found: Sequence[Place], entries: Sequence[Entry], number: int, worker_num: int
) -> tuple[int, ...]:
    """How many workers compute on each GPU that worker ``number`` sees; empty if unknown.

    Args:
        found: where the workers run: see ``places``.
        entries: the GPUs that the parent sees.
    """

    def seen(worker: int) -> list[str]:
        shown = found[worker % len(found)].variables.get(CUDA)
        if shown is not None:
            return shown.split(",") if shown else []
        # Of several GPUs the model chooses.
        return [entry.value for entry in entries] if len(entries) == 1 else []

    all_seen = [seen(worker) for worker in range(worker_num)]
    return tuple(sum(value in each for each in all_seen) for value in seen(number))


def visible(inventory: Inventory, environment: Mapping[str, str]) -> list[Entry] | None:
    """The GPUs that a process with this environment sees; None if unknown."""
    if not _is_amd(inventory, environment):
        return _listed(inventory.gpus, environment.get(CUDA))
    below = _listed(inventory.gpus, environment.get(_ROCR))
    gpus = None
    if below is not None:
        # ROCR renumbers the rest.
        gpus = tuple(
            (entry.gpu or Gpu(number))._replace(number=number) for number, entry in enumerate(below)
        )
    return _listed(gpus, environment.get(_HIP) or environment.get(CUDA) or None)


def missing(device: Device | None, inventory: Inventory, environment: Mapping[str, str]) -> str:
    """In a worker, why its GPU is missing; empty if it is there, or if unknown.

    Args:
        device: its GPU; None for any.
    """
    wish = f"device {device} was requested"
    if device is None:
        wish = "a GPU was visible when the streamer was built"
    entries = visible(inventory, environment)
    if entries is None:
        return ""
    if not entries:
        why = explain_visible(inventory, environment)
        if inventory.gpus:
            there = ", ".join(map(_described, range(len(inventory.gpus)), inventory.gpus))
            why += f"; this machine has {counted(len(inventory.gpus), 'GPU')}: {there}"
        return f"{wish}, but {why}"
    for _, gpu in entries:
        if gpu is not None and gpu.problem:
            return f"{wish}, but it cannot be used: {gpu.problem}"
    if device is not None and len(entries) < len(device_names([device])):
        return f"{wish}, but {explain_visible(inventory, environment)}"
    return ""


def explain_visible(inventory: Inventory, environment: Mapping[str, str]) -> str:
    """A sentence on the GPUs that a process with this environment sees."""
    entries = visible(inventory, environment)
    names = (_ROCR, _HIP, CUDA) if _is_amd(inventory, environment) else (CUDA,)
    lists = " and ".join(f"{name}={environment[name]}" for name in names if name in environment)
    if not entries:
        if not lists or inventory.gpus == ():
            return f"no GPU is visible: {inventory.why or 'none was found'}"
        return f"no GPU is visible: {lists} leaves none"
    shown = ", ".join(
        _described(number, entry.gpu or entry.value) for number, entry in enumerate(entries)
    )
    among = f" of {len(inventory.gpus)}" if lists and inventory.gpus else ""
    verb = "is" if len(entries) == 1 else "are"
    return (
        f"{counted(len(entries), 'GPU')}{among} {verb} visible"
        + (f" with {lists}" if lists else "")
        + f": {shown}"
    )


def _described(number: int, gpu: Gpu | str) -> str:
    name = gpu if isinstance(gpu, str) else gpu.name or gpu.uuid
    return f"{number} ({name})" if name and name != str(number) else str(number)


def _named(device: Device, inventory: Inventory, inherited: Mapping[str, str]) -> Place:
    is_amd = _is_amd(inventory, inherited)
    name = str(device)
    if name == "cpu":
        return Place(device, device, _hiding())
    entries = visible(inventory, inherited)
    values: list[str] = []
    for part in name.removeprefix("cuda:").split(","):
        entry = _find(part, entries, inventory)
        if entry is None or (entry.gpu is not None and entry.gpu.problem):
            why = f"device {part} was requested, but " + (
                explain_visible(inventory, inherited)
                if entry is None or entry.gpu is None
                else f"it cannot be used: {entry.gpu.problem}"
            )
            return Place(device, device, _hiding(), why)
        values.append(entry.value)
    return Place(device, device, _showing(",".join(values), is_amd=is_amd))


def _find(part: str, entries: Sequence[Entry] | None, inventory: Inventory) -> Entry | None:
    """The visible GPU with a number or UUID; None if there is none."""
    if part.isdecimal():
        number = int(part)
        if entries is None:
            return Entry(part, None)
        return entries[number] if number < len(entries) else None
    if entries is None or (inventory.gpus and not any(gpu.uuid for gpu in inventory.gpus)):
        return Entry(part, None)  # only CUDA can check UUIDs
    if inventory.gpus is None and all(entry.value.isdecimal() for entry in entries):
        return Entry(part, None)
    found = [entry for entry in entries if _is_called(part, entry.value, entry.gpu)]
    if not found and "/" in part:  # the old form of MIG names
        return Entry(part, None)
    # Of several MIG instances of the named GPU, CUDA takes the first.
    return found[0] if found else None


def _is_called(name: str, value: str, gpu: Gpu | None) -> bool:
    if gpu is None:
        return value.startswith(name) or name.startswith(value)
    return gpu.uuid.startswith(name) or bool(gpu.parent and gpu.parent.startswith(name))


def _listed(gpus: Sequence[Gpu] | None, listed: str | None) -> list[Entry] | None:
    """The GPUs in a list such as CUDA_VISIBLE_DEVICES; all without a list, None if unknown."""
    if listed is None:
        if gpus is None:
            return None
        # A number shows only the first MIG instance of a GPU.
        has_parts = any(gpu.parent for gpu in gpus)
        return [Entry(gpu.uuid if has_parts else str(gpu.number), gpu) for gpu in gpus]
    names = [each.strip() for each in listed.split(",")]
    prefix = names[0][:4] if names[0].startswith(("GPU-", "MIG-")) else ""
    entries: list[Entry] = []
    for name in names:
        entry = _entry_by_uuid(name, gpus) if prefix else _entry_by_number(name, gpus)
        if entry is None or not name.startswith(prefix):
            break
        is_repeated = any(
            entry.value == other.value or (entry.gpu is not None and entry.gpu == other.gpu)
            for other in entries
        )
        if is_repeated:
            return []
        entries.append(entry)
    return entries


def _entry_by_number(name: str, gpus: Sequence[Gpu] | None) -> Entry | None:
    # CUDA reads a leading number: "1gpu" is 1.
    match = _NUMBER.match(name)
    if match is None or int(match[0]) < 0:
        return None
    number = int(match[0])
    if gpus is None:
        return Entry(str(number), None)
    return next((Entry(str(number), gpu) for gpu in gpus if gpu.number == number), None)


def _entry_by_uuid(name: str, gpus: Sequence[Gpu] | None) -> Entry | None:
    if gpus is None or not any(gpu.uuid for gpu in gpus) or "/" in name:
        return Entry(name, None)
    found = [gpu for gpu in gpus if gpu.uuid.startswith(name)]
    if len(found) == 1:
        return Entry(name, found[0])
    parts = [gpu for gpu in gpus if gpu.parent and gpu.parent.startswith(name)]
    return Entry(name, parts[0]) if parts and not found else None  # an ambiguous name is invalid


def _is_amd(inventory: Inventory, environment: Mapping[str, str]) -> bool:
    if inventory.vendor:
        return inventory.vendor == "amd"
    return inventory.gpus is None and bool({_HIP, _ROCR} & environment.keys())


def _showing(value: str, *, is_amd: bool) -> dict[str, str | None]:
    if is_amd:  # ROCR's list stays: HIP's numbers refer to it
        return {CUDA: value, _HIP: value}
    return {CUDA: value, _HIP: None, _ROCR: None}


def _hiding() -> dict[str, str | None]:
    # ROCm ignores an empty list.
    return {CUDA: "", _HIP: "-1"}
