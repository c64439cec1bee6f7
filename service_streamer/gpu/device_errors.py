"""What an error of a model says about its device: memory too short for the batch, or a broken GPU.

**Out of memory.** torch has a class for running out. The CUDA runtime, cuBLAS, cuDNN, the driver,
ROCm, XLA and CuPy have other classes, which are recognized by the beginning of a line of their
text. An exception that merely quotes such a text from an item does not count.

**Sticky errors**, as CUDA calls them: after an illegal memory access or a device-side assert every
further call returns the same error, until the process ends. A worker that goes on all the same
fails every batch, and at once, so that it is sent more of them than any other. The GPU itself is
asked, by a tiny kernel. The text of an error only decides whether to ask: models quote their
inputs, and no input may end a worker by its words.
https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__TYPES.html
"""

from __future__ import annotations

import logging
import re
import sys
import traceback
from collections.abc import Callable
from typing import Any, TypeGuard

from ..reporting import quiet_log
from .accelerators import KINDS, fault_in_use

_log_once = quiet_log(__name__, once=True)

#: A model's own out-of-memory errors: exception classes, and parts of an exception's text.
Named = tuple[type[BaseException] | str, ...]

#: Maximum length of a chain of causes. Arbitrary: wrappers are seldom more than two deep.
_MOST_CAUSES = 8

#: Characters of a text that are searched; some libraries append megabytes.
_MOST_TEXT = 4096

#: Only exceptions from native code count: RuntimeError and its subclasses, or classes of these
#: libraries.
_LIBRARIES = frozenset(
    ("cupy", "cupy_backends", "cuda", "jax", "jaxlib", "numba", "onnxruntime", "paddle",
     "tensorflow", "tensorrt", "torch", "tritonclient", "pycuda")
)  # fmt: skip


def _of_kinds(name: str) -> str:
    """An attribute of all kinds, as one regular expression."""
    return "|".join(part for kind in KINDS if (part := getattr(kind, name)))


_CODES = _of_kinds("error_codes")
_TEXTS = re.compile(
    rf"""^\s*(?:
        # "RuntimeError: " stands first in the text of an error from TorchScript or from a thread.
        (?:[\w.]*(?:RuntimeError|AcceleratorError):\s*)?
        (?:
            (?:{_of_kinds("error_names")}|MPS\ backend)\ out\ of\ memory
          | (?:{_of_kinds("error_names")})\ (?:error|failure)\b[\s\d:]*(?:out\ of\ memory|{_CODES})
          | (?:{_of_kinds("libraries")})\ (?:error|failure)[\s\d:]*\w*ALLOC\w*FAILED
          | (?:{_CODES})\b
          | \[\d+\]\ Call\ to\ \w+\ results\ in\ (?:UNKNOWN_)?(?:{_CODES})
          | RESOURCE_EXHAUSTED:
          | Out\ of\ memory\ (?:allocating|while\ trying\ to\ allocate|error\ on\ GPU)
          | (?:Graph\ execution\ error:\s)?OOM\ when\ allocating\ tensor
          | \[enforce\ fail\ at\ [^\]]*\][^\n]*can't\ allocate\ memory
          | DefaultCPUAllocator:\ (?:can't\ allocate|not\ enough)\ memory
          | \[ONNXRuntimeError\]\ :\ \d+\ :\ \w+\ :[^\n]*
            Failed\ to\ allocate\ memory\ for\ requested\ buffer
        )
    )""",
    re.VERBOSE | re.MULTILINE | re.IGNORECASE,
)

#: Words of errors that may be about a device, also as the cause of the model's error.
_SUSPICIOUS = re.compile(
    f"{_of_kinds('words')}|gpu|accelerator|memory access|device-side assert|launch failure"
    "|launch timed out|uncorrectable|misaligned address|illegal instruction|program counter"
    "|hardware stack|shared address space",
    re.IGNORECASE,
)

#: So many batches in a row that fail are reason enough to ask, whatever they fail with.
_ROW = 3

#: Characters of the traceback that are read, and go into the log.
_LONGEST_REPORT = 10_000


def is_out_of_memory(error: BaseException, named: Named = ()) -> bool:
    """Whether a smaller batch may avoid this error.

    Errors raised ``from`` such an error count too: models wrap libraries' errors.
    """
    classes = tuple(each for each in named if not isinstance(each, str)) + _torch_classes()
    texts = tuple(each for each in named if isinstance(each, str))
    cause: BaseException | None = error
    for _ in range(_MOST_CAUSES):
        if cause is None:
            return False
        if isinstance(cause, classes) or (isinstance(cause, Exception) and _says_so(cause, texts)):
            return True
        cause = cause.__cause__
    return False


def check_named(named: object, owner: str) -> Named:
    """Raises TypeError: it is not a tuple of exception classes and texts."""
    # Every text contains the empty one.
    if isinstance(named, tuple) and all(
        bool(each.strip()) if isinstance(each, str) else is_exception_class(each) for each in named
    ):
        return named
    raise TypeError(
        f"{owner} must be a tuple of exception classes and texts, such as (MemoryError,) or "
        f'("arena exhausted",); not {named!r}'
    )


def is_exception_class(value: object) -> TypeGuard[type[BaseException]]:
    return isinstance(value, type) and issubclass(value, BaseException)


def _torch_classes() -> tuple[type[BaseException], ...]:
    """torch's class, which older versions have in ``torch.cuda`` only.

    Looked up for each exception: a model may import torch late or never.
    """
    torch: Any = sys.modules.get("torch")
    modules = (torch, getattr(torch, "cuda", None))
    found = (getattr(module, "OutOfMemoryError", None) for module in modules)
    return tuple(each for each in found if is_exception_class(each))


def _says_so(error: Exception, texts: tuple[str, ...]) -> bool:
    library = str(type(error).__module__).partition(".")[0]
    is_native = isinstance(error, RuntimeError) or library in _LIBRARIES
    try:
        text = str(error)
    except (Exception, SystemExit):  # raised by the user's class
        return False
    is_known = is_native and _TEXTS.search(text[:_MOST_TEXT]) is not None
    return is_known or any(each in text for each in texts)


class DeviceFailed(BaseException):
    """The GPU is of no use to this process any more, which has to end.

    Not an ``Exception``, so that no handler takes it for an error of one batch.
    """

    def __init__(self, fault: str, error: str, batch_id: int) -> None:
        super().__init__(fault)
        self.fault = fault  # what the GPU said, without anything of the model's or its inputs
        self.error = error  # what the model raised, with its traceback, for the log
        self.batch_ids = {batch_id}  # that the GPU may have failed at, as far as is known


def _report(error: BaseException, frames: int | None = None) -> str:
    """The texts of an error and of its causes, with so many frames of each traceback."""
    return "".join(traceback.format_exception(error, limit=frames))[-_LONGEST_REPORT:]


class Guard:
    """Looks at what a model raises. Belongs to the thread that runs the model.

    With ``may_end`` it ends this process for it, as in a worker process. In a thread the fault can
    only be logged, once for each process.
    """

    def __init__(self) -> None:
        self.row = 0  # batches in a row that failed; the code that computes a batch sets it to 0
        self.may_end = False
        self.probe: Callable[[], str | None] = fault_in_use

    def look(self, error: BaseException, batch_id: int) -> None:
        """Look at an error of a batch while it still has its causes. Raises DeviceFailed."""
        self.row += 1
        fault = self.probe() if self.row >= _ROW or _SUSPICIOUS.search(_report(error, 0)) else None
        if fault is None:
            return
        if self.may_end:
            raise DeviceFailed(fault, _report(error), batch_id) from None
        _log_once(
            logging.CRITICAL,
            "every call to the GPU fails in this process from now on (%s), and so does every "
            "batch until the process is restarted. Use a Streamer: its workers are processes, "
            "which it restarts", fault,
        )  # fmt: skip
