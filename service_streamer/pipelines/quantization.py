"""Quantize weights while they are loaded, by the packages that transformers supports."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any, NamedTuple


class _Quantization(NamedTuple):
    """What a kind of quantization needs.

    Attributes:
        needs: packages by the names of their modules, with those for pip.
        on_cpu: whether it computes on a CPU, too.
    """

    needs: dict[str, str]
    on_cpu: bool


_BITSANDBYTES = {"bitsandbytes": "bitsandbytes", "accelerate": "accelerate"}
_TORCHAO = {"torchao": "torchao"}
_QUANTO = {"optimum.quanto": "optimum-quanto", "accelerate": "accelerate"}

_KINDS = {
    "bitsandbytes-8bit": _Quantization(_BITSANDBYTES, on_cpu=False),
    "bitsandbytes-4bit": _Quantization(_BITSANDBYTES, on_cpu=False),
    "torchao-int8": _Quantization(_TORCHAO, on_cpu=True),
    "torchao-float8": _Quantization(_TORCHAO, on_cpu=False),
    "quanto-int8": _Quantization(_QUANTO, on_cpu=True),
    "quanto-int4": _Quantization(_QUANTO, on_cpu=True),
}

QUANTIZATIONS = tuple(_KINDS)


def quantization_config(name: str, device: str, dtype: str = "float16") -> Any:
    """The object that ``from_pretrained`` takes as ``quantization_config``.

    Args:
        name: one of ``QUANTIZATIONS``.
        device: "cuda" or "cpu".
        dtype: what 4-bit weights are computed in.

    Raises:
        ImportError: its package is missing.
        ValueError: the name is unknown, or it does not compute on this device.
    """
    check_quantization(name, device)
    transformers: Any = importlib.import_module("transformers")
    library, _, bits = name.partition("-")
    if library == "bitsandbytes":
        if bits == "8bit":
            return transformers.BitsAndBytesConfig(load_in_8bit=True)
        # By default it computes in float32, which is slow.
        return transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=dtype)
    if library == "quanto":
        return transformers.QuantoConfig(weights=bits)
    quantization: Any = importlib.import_module("torchao.quantization")
    kinds = {"int8": "Int8WeightOnlyConfig", "float8": "Float8WeightOnlyConfig"}
    return transformers.TorchAoConfig(getattr(quantization, kinds[bits])())


def check_quantization(name: str, device: str | None) -> None:
    """Refuse a quantization that cannot be had here, without importing its package.

    Args:
        name: one of ``QUANTIZATIONS``.
        device: "cuda" or "cpu"; None if it is unknown.

    Raises:
        ImportError: its package is missing.
        ValueError: the name is unknown, or it does not compute on this device.
    """
    kind = _KINDS.get(name)
    if kind is None:
        raise ValueError(f"quantization must be one of {', '.join(_KINDS)}; not {name!r}")
    if device == "cpu" and not kind.on_cpu:
        others = ", ".join(each for each, other in _KINDS.items() if other.on_cpu)
        raise ValueError(f"quantization {name!r} needs a GPU; on a CPU there are {others}")
    lacking = [package for module, package in kind.needs.items() if not is_installed(module)]
    if lacking:
        raise ImportError(
            f"quantization {name!r} needs {' and '.join(lacking)}: pip install {' '.join(lacking)}",
            name=lacking[0],
        )


def is_installed(module: str) -> bool:
    """Whether a module can be imported, without importing it; of a part its package is."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of the package that the module is in
        return False
