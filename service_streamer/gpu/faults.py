"""Finds errors of a GPU after which no call to it can succeed, until the process ends.

CUDA calls them sticky: after an illegal memory access or a device-side assert every further call
returns the same error. A worker that goes on all the same fails every batch, and at once, so that
it is sent more of them than any other.

The GPU itself is asked, by a tiny kernel. The text of an error only decides whether to ask: models
quote their inputs, and no input may end a worker by its words.
https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__TYPES.html
"""

from __future__ import annotations

import contextlib
import logging
import re
import traceback
from collections.abc import Callable
from typing import ClassVar

from .accelerators import TORCH_KINDS

logger = logging.getLogger(__name__)

#: Words of errors that may be about a GPU, also as the cause of the model's error.
_SUSPICIOUS = re.compile(
    "cuda|hip ?error|gpu|cublas|cudnn|cufft|cusolver|cusparse|nccl|rocm|xpu|sycl|level.zero"
    "|accelerator|memory access|device-side assert|launch failure|launch timed out|uncorrectable"
    "|misaligned address|illegal instruction|program counter|hardware stack|shared address space",
    re.IGNORECASE,
)

#: So many batches in a row that fail are reason enough to ask, whatever they fail with.
_ROW = 3

#: Characters of the traceback that are read, and go into the log.
_LONGEST_REPORT = 10_000


class DeviceFailed(BaseException):
    """The GPU is of no use to this process any more, which has to end.

    Not an ``Exception``, so that no handler takes it for an error of one batch.

    Attributes:
        fault: what the GPU said, without anything of the model's or its inputs.
        error: what the model raised, with its traceback, for the log.
        batch_ids: the batches that the GPU may have failed at, as far as is known.
    """

    def __init__(self, fault: str, error: str) -> None:
        super().__init__(fault)
        self.fault = fault
        self.error = error
        self.batch_ids: set[int] = set()


def probe() -> str | None:
    """What is wrong with the GPU that this process uses, in its own words; None if nothing is.

    None also if its memory is full, or if the process uses none.
    """
    faults = (kind.fault() for kind in TORCH_KINDS.values())
    return next(filter(None, faults), None)


def _report(error: BaseException, frames: int | None = None) -> str:
    """The texts of an error and of its causes, with so many frames of each traceback."""
    return "".join(traceback.format_exception(error, limit=frames))[-_LONGEST_REPORT:]


class Guard:
    """Looks at what a model raises. Belongs to the thread that runs the model.

    Args:
        may_end: whether this process may end for it: a worker process may. In a thread the fault
            can only be logged, once for each process.
        probe: see ``probe``.

    Attributes:
        row: batches in a row that failed; the code that computes a batch sets it to 0.
        has_logged: whether this process has logged a fault.
    """

    has_logged: ClassVar[bool] = False

    def __init__(self, *, may_end: bool = False, probe: Callable[[], str | None] = probe) -> None:
        self.row = 0
        self.may_end = may_end
        self.probe = probe

    def look(self, error: BaseException) -> None:
        """Look at an error while it still has its causes.

        Raises:
            DeviceFailed: the GPU is of no use to this process any more.
        """
        self.row += 1
        fault = self.probe() if self.row >= _ROW or _SUSPICIOUS.search(_report(error, 0)) else None
        if fault is None:
            return
        if self.may_end:
            raise DeviceFailed(fault, _report(error)) from None
        if not Guard.has_logged:
            Guard.has_logged = True
            with contextlib.suppress(Exception):  # raised by a user's filter or handler
                logger.critical(
                    "every call to the GPU fails in this process from now on (%s), and so does "
                    "every batch until the process is restarted. Use a Streamer: its workers are "
                    "processes, which it restarts", fault,
                )  # fmt: skip
