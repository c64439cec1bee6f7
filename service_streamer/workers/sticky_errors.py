"""Finds errors of a GPU after which no call to it can succeed, until the process ends.

CUDA calls them sticky: after an illegal memory access or a device-side assert "any further CUDA
work will return the same error. To continue using CUDA, the process must be terminated and
relaunched." A worker that goes on all the same fails every batch, and at once, so that it is sent
more of them than any other.

    the error                                          what follows
    ---------                                          ------------
    torch's own class, with one of the texts below     it is known
    its text, or that of a cause, is about a GPU       a probe decides
    another, the third one in a row or later           a probe decides
    another                                            nothing

A text alone never decides: models quote their inputs, and no input may end a worker by its words.
https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__TYPES.html
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

from .protocol import summary

logger = logging.getLogger(__name__)

#: What CUDA and ROCm say of the errors that are documented as above.
_STICKY = re.compile(
    "illegal memory access|device-side assert|(unspecified )?launch failure|launch timed out"
    "|uncorrectable ECC|uncorrectable NVLink|misaligned address|illegal instruction"
    "|invalid program counter|hardware stack error"
    "|operation not supported on global/shared address space|external device",
    re.IGNORECASE,
)

#: What is about a GPU, perhaps: a probe costs less than a millisecond.
_SUSPICIOUS = re.compile(
    f"cuda|hiperror|hip error|gpu|cublas|cudnn|cufft|cusolver|cusparse|nccl|rocm|{_STICKY.pattern}",
    re.IGNORECASE,
)

_OUT_OF_MEMORY = re.compile("out of memory|alloc_failed|memoryallocation", re.IGNORECASE)

#: So many batches in a row that fail are reason enough to look, whatever they fail with.
_ROW = 3

#: Errors in a chain of causes, and characters of each, that are looked at: a bound for odd ones.
_MOST_CAUSES = 20
_LONGEST_TEXT = 2_000

#: Characters of the traceback that goes into the log.
_LONGEST_REPORT = 10_000

#: From cuda.h: CUDA_ERROR_OUT_OF_MEMORY.
_CUDA_OUT_OF_MEMORY = 2


class DeviceFailed(BaseException):
    """The GPU is of no use to this process any more, which has to end.

    Not an ``Exception``, so that no handler takes it for an error of one batch.

    Attributes:
        fault: what the GPU said, without anything of the model's or its inputs.
        error: what the model raised, with its traceback, for the log.
        batch_id: the batch that it was raised for, where that is known.
    """

    def __init__(self, fault: str, error: str) -> None:
        super().__init__(fault)
        self.fault = fault
        self.error = error
        self.batch_id = -1


def probe() -> str | None:
    """What is wrong with the GPU that this process uses, in its own words.

    None if nothing is, if its memory is full, or if the process uses none: then it is not
    touched, since the first touch would take some hundred MB of its memory.
    """
    return _first_of_two(_torch_fault) or _first_of_two(_driver_fault)


def _first_of_two(look: Callable[[], str | None]) -> str | None:
    # An error that is reported once belongs to an earlier call; one that stays is reported again.
    return look() and look()


def _torch_fault() -> str | None:
    torch: Any = sys.modules.get("torch")
    devices: list[int] = []
    with contextlib.suppress(Exception):  # torch is not there, or not loaded to its end
        if torch.cuda.is_initialized():
            devices = _devices_in_use(torch)
    try:
        for device in devices:
            torch.zeros(1, device=f"cuda:{device}").add_(1)  # a tiny kernel
            torch.cuda.synchronize(device)
    except Exception as error:
        text = summary(error).partition("\n")[0]
        return None if _OUT_OF_MEMORY.search(text) else text
    return None


def _devices_in_use(torch: Any) -> list[int]:
    """Those on which this process has a context."""
    has_context = getattr(torch._C, "_cuda_hasPrimaryContext", None)
    if has_context is None:
        return [torch.cuda.current_device()]
    return [device for device in range(torch.cuda.device_count()) if has_context(device)]


def _driver_fault() -> str | None:
    """The same for CuPy, JAX, ONNX Runtime, ...: of the CUDA context of this thread, if any."""
    with contextlib.suppress(Exception):  # no driver is loaded in this process
        import ctypes  # in the rare case only: it takes workers some milliseconds to import

        driver = ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD)
        context = ctypes.c_void_p()
        if driver.cuCtxGetCurrent(ctypes.byref(context)) or not context:
            return None
        error = driver.cuCtxSynchronize()
        if error and error != _CUDA_OUT_OF_MEMORY:
            name = ctypes.c_char_p()
            driver.cuGetErrorName(error, ctypes.byref(name))
            return f"CUDA error {error}: {(name.value or b'unknown').decode(errors='replace')}"
    return None


class Guard:
    """Looks at what a model raises. Belongs to the thread that runs the model.

    Args:
        may_end: whether this process may end for it: a worker process may. In a thread the fault
            can only be logged, once for each process.
        probe: see ``probe``.

    Attributes:
        row: batches in a row that failed; whoever computes one sets it to 0.
        may_end, probe: as given.
        logged: faults that this process has logged.
    """

    __slots__ = ("may_end", "probe", "row")

    logged: ClassVar[set[str]] = set()

    def __init__(self, *, may_end: bool = False, probe: Callable[[], str | None] = probe) -> None:
        self.row = 0
        self.may_end = may_end
        self.probe = probe

    def look(self, error: BaseException) -> None:
        """Look at an error while it still has its causes.

        Raises:
            DeviceFailed: it is one of those after which this process has to end.
        """
        self.row += 1
        fault = _known(error)
        if fault is None and (self.row >= _ROW or _is_suspicious(error)):
            fault = self.probe()
        if fault is None:
            return
        if self.may_end:
            raise DeviceFailed(fault, _formatted(error)) from None
        if not self.logged:
            self.logged.add(fault)
            _log(fault)


def _known(error: BaseException) -> str | None:
    """What torch's own class says, which no model words."""
    ours = getattr(sys.modules.get("torch"), "AcceleratorError", None)
    if isinstance(ours, type):
        for each in _chain(error):
            found = _STICKY.search(_text(each)) if type(each) is ours else None
            if found is not None:
                return f"CUDA error: {found.group()}"
    return None


def _is_suspicious(error: BaseException) -> bool:
    return any(
        _SUSPICIOUS.search(f"{type(each).__name__}: {_text(each)}") for each in _chain(error)
    )


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error, and what it was raised for: models wrap errors, also those of a group."""
    seen: set[int] = set()
    todo: list[BaseException | None] = [error]
    while todo and len(seen) < _MOST_CAUSES:
        each = todo.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        yield each
        todo += [each.__context__, each.__cause__]
        if isinstance(each, BaseExceptionGroup):
            todo += each.exceptions[:_MOST_CAUSES]


def _text(error: BaseException) -> str:
    return summary(error)[:_LONGEST_TEXT]


def _formatted(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))[-_LONGEST_REPORT:]


def _log(fault: str) -> None:
    with contextlib.suppress(Exception):  # raised by a user's filter or handler
        logger.critical(
            "every call to the GPU fails in this process from now on (%s), and so does every batch "
            "until the process is restarted. Use a Streamer: its workers are processes, which it "
            "restarts", fault,
        )  # fmt: skip
