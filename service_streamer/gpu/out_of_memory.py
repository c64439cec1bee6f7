"""Which errors mean that a batch was too large for the memory of the device.

torch has a class for running out. The CUDA runtime, cuBLAS, cuDNN, the driver, ROCm, XLA and CuPy
have other classes, which are recognized by the beginning of a line of their text. An exception that
merely quotes such a text from an item does not count.
"""

from __future__ import annotations

import re
import sys
from typing import Any, TypeGuard

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

_TEXTS = re.compile(
    r"""^\s*(?:
        # "RuntimeError: " stands first in the text of an error from TorchScript or from a thread.
        (?:[\w.]*(?:RuntimeError|AcceleratorError):\s*)?
        (?:
            (?:CUDA|HIP|XPU|MPS\ backend)\ out\ of\ memory
          | (?:CUDA|HIP|CUDA\ driver|CUDA\ runtime|XPU)\ (?:error|failure)\b[\s\d:]*
            (?:out\ of\ memory|(?:CU|HIP)\w+_STATUS_ALLOC_FAILED|CUFFT_ALLOC_FAILED
               |CUDA_ERROR_OUT_OF_MEMORY|cudaErrorMemoryAllocation|hipErrorOutOfMemory)
          | (?:cuDNN|cuBLAS|cuBLASLt|cuSPARSE|cuSOLVER|cuFFT|cuRAND|MIOpen|hipBLAS|rocBLAS)\s
            (?:error|failure)[\s\d:]*\w*ALLOC\w*FAILED
          | (?:CUDNN|CUBLAS|CUSPARSE|CUSOLVER|HIPBLAS)_STATUS_ALLOC_FAILED
          | (?:cudaErrorMemoryAllocation|CUDA_ERROR_OUT_OF_MEMORY|hipErrorOutOfMemory)\b
          | \[\d+\]\ Call\ to\ \w+\ results\ in\ (?:UNKNOWN_)?CUDA_ERROR_OUT_OF_MEMORY
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


def is_out_of_memory(error: BaseException, named: Named = ()) -> bool:
    """Whether a smaller batch may avoid this error.

    Errors raised ``from`` such an error count too: models wrap libraries' errors.

    Args:
        named: the model's own classes and texts.
    """
    classes = tuple(each for each in named if not isinstance(each, str)) + _torch_classes()
    texts = tuple(each for each in named if isinstance(each, str))
    cause: BaseException | None = error
    for _ in range(_MOST_CAUSES):
        if cause is None:
            return False
        if isinstance(cause, classes):
            return True
        if isinstance(cause, Exception) and _says_so(cause, texts):
            return True
        cause = cause.__cause__
    return False


def check_named(named: object, owner: str) -> Named:
    """Check a model's own classes and texts.

    Raises:
        TypeError: it is not a tuple of exception classes and texts.
    """
    if isinstance(named, tuple) and all(map(_may_be_named, named)):
        return named
    raise TypeError(
        f"{owner} must be a tuple of exception classes and texts, such as (MemoryError,) or "
        f'("arena exhausted",); not {named!r}'
    )


def is_exception_class(value: object) -> TypeGuard[type[BaseException]]:
    return isinstance(value, type) and issubclass(value, BaseException)


def _may_be_named(value: object) -> bool:
    # Every text contains the empty one.
    return bool(value.strip()) if isinstance(value, str) else is_exception_class(value)


def _torch_classes() -> tuple[type[BaseException], ...]:
    """torch's class, which older versions have in ``torch.cuda`` only.

    Looked up for each exception: a model may import torch late or never.
    """
    torch: Any = sys.modules.get("torch")
    modules = (torch, getattr(torch, "cuda", None))
    found = (getattr(module, "OutOfMemoryError", None) for module in modules)
    return tuple(each for each in found if is_exception_class(each))


def _says_so(error: Exception, texts: tuple[str, ...]) -> bool:
    is_native = isinstance(error, RuntimeError) or _library_of(error) in _LIBRARIES
    if not (is_native or texts):
        return False
    try:
        text = str(error)
    except (Exception, SystemExit):  # raised by the user's class
        return False
    if any(each in text for each in texts):
        return True
    return is_native and _TEXTS.search(text[:_MOST_TEXT]) is not None


def _library_of(error: Exception) -> str:
    return str(type(error).__module__).partition(".")[0]
