"""The class of a kind of accelerator, such as CUDA: everything that differs between kinds.

Nothing here imports torch, or makes a context on a device in a process that has none: a context
takes about 0.5 GB of the device's memory.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

#: An error that says this is not about a broken device.
_OUT_OF_MEMORY = re.compile("out of memory|alloc_failed|memoryallocation", re.IGNORECASE)


class Gpu(NamedTuple):
    """A GPU, or a part of one that is used like a GPU (MIG)."""

    value: str  # of the environment variable that shows a process this GPU only
    name: str = ""  # such as "NVIDIA H100 80GB HBM3"; empty if unknown
    uuid: str = ""  # such as "GPU-8a2f..." or "MIG-1b3c..."; empty if unknown
    problem: str = ""  # the driver's reason why it cannot be used; empty if it can


class Accelerator:
    """A kind of accelerator. Has no state. Any thread.

    To add a kind, write a subclass in a module of its own, and list it in ``accelerators.py``.

    Attributes:
        variables: environment variables that each show a process a part of the devices.
        hidden: environment variables that hide all of them.
        torch_name: name of torch's module for the kind, and of its devices in torch.
    """

    variables: ClassVar[tuple[str, ...]] = ()
    hidden: ClassVar[Mapping[str, str]] = {}
    torch_name: ClassVar[str] = ""

    # -- in any process, without torch

    def find(self) -> Sequence[Gpu] | None:
        """All GPUs, including those that the environment hides; None if they cannot be counted."""
        raise NotImplementedError

    def require_count(self) -> None:
        """Called if the GPUs have to be counted and ``find`` could not.

        Raises:
            ImportError: a missing package would count them.
        """

    def visible(
        self, gpus: Sequence[Gpu] | None, environment: Mapping[str, str]
    ) -> Sequence[Gpu] | None:
        """Those of the GPUs that a process with this environment sees, in its order."""
        (variable,) = self.variables
        return listed(gpus, environment.get(variable))

    def showing(self, value: str) -> dict[str, str | None]:
        """Environment variables that show a worker some GPUs only; None removes one.

        Args:
            value: values of the GPUs, with commas between.
        """
        (variable,) = self.variables
        return {variable: value}

    def allocator_variables(self) -> dict[str, str]:
        """Environment variables of torch's allocator that suit the GPUs of this machine."""
        return {}

    # -- in a process that may have loaded torch

    @property
    def torch(self) -> Any:
        """torch's module for the kind; None if torch is not loaded."""
        return getattr(sys.modules.get("torch"), self.torch_name, None)

    def is_in_use(self) -> bool:
        """Whether torch has a context on such a device in this process."""
        try:
            return bool(self.torch.is_initialized())
        except AttributeError:  # torch is not loaded, half loaded, or another module of that name
            return False

    def is_available(self) -> bool:
        """Whether torch can use such a device."""
        return self.torch is not None and bool(self.torch.is_available())

    def is_built(self) -> bool:
        """Whether torch was built for the kind. Raises AttributeError: torch is half loaded."""
        raise NotImplementedError

    def devices_in_use(self) -> list[int]:
        """The devices on which torch has a context, once the kind is in use."""
        return [self.torch.current_device()]

    def event(self, *, timing: bool = False) -> Any:
        """An event to record on a stream; a thread that waits for it sleeps if possible."""
        return self.torch.Event(enable_timing=timing)

    def fault(self) -> str | None:
        """What is wrong with the devices that this process uses, in the driver's words.

        None if nothing is, if their memory is full, or if this process uses none.
        """
        return reported_twice(self._torch_fault)

    def _torch_fault(self) -> str | None:
        devices: list[int] = []
        with contextlib.suppress(Exception):  # torch is half loaded
            if self.is_in_use():
                devices = self.devices_in_use()
        try:
            for device in devices:
                sys.modules["torch"].zeros(1, device=f"{self.torch_name}:{device}").add_(1)
                self.torch.synchronize(device)
        except Exception as error:
            text = str(error).partition("\n")[0] or type(error).__qualname__
            return None if _OUT_OF_MEMORY.search(text) else text
        return None


def torch_version() -> str:
    """The version of the installed torch, which is not imported; empty if there is none."""
    from importlib.metadata import version  # only here: it takes some milliseconds to import

    with contextlib.suppress(Exception):
        return str(version("torch"))
    return ""


def reported_twice(look: Callable[[], str | None]) -> str | None:
    """What ``look`` finds, unless it goes away: then it belonged to an earlier call."""
    return look() and look()


def listed(gpus: Sequence[Gpu] | None, names: str | None) -> Sequence[Gpu] | None:
    """The GPUs in a list such as that of CUDA_VISIBLE_DEVICES; all of them without a list."""
    if names is None or (gpus is not None and not gpus):
        return gpus
    known = {gpu.value: gpu for gpu in gpus or ()}
    # Of GPUs that are named by UUID only the driver knows the numbers.
    has_numbers = gpus is not None and all(value.isdecimal() for value in known)
    found: list[Gpu] = []
    for name in map(str.strip, names.split(",")):
        is_missing = name not in known and name.isdecimal() and has_numbers
        if not name or name.startswith("-") or is_missing:
            break  # drivers ignore what follows an entry that they cannot use
        found.append(known.get(name, Gpu(name)))
    return found
