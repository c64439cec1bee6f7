"""The data type that a model runs in, and how its weights are quantized.

With "auto" a checkpoint in float32 runs in float16 on a GPU, as with vLLM and
text-embeddings-inference: tensor cores compute float16 many times faster than float32, and the
weights need half the memory. On a CPU every model runs as it was saved.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Collection
from typing import Any, NamedTuple

DTYPES = ("auto", "float32", "float16", "bfloat16")

#: Model types whose activations exceed the range of float16, so that answers become NaN. The list
#: is vLLM's.
_BEYOND_FLOAT16 = frozenset(("gemma2", "gemma3", "gemma3_text", "glm4", "plamo2"))


class Precision(NamedTuple):
    """The data type that a model runs in.

    Attributes:
        dtype: its name, such as "float16"; "auto" leaves it to transformers.
        reason: why, for users.
    """

    dtype: str
    reason: str


def choose_precision(
    wanted: str,
    *,
    saved: Collection[str],
    model_type: str,
    device: str,
    has_bfloat16: bool,
) -> Precision:
    """The data type of a model.

    Args:
        wanted: one of ``DTYPES``.
        saved: data types that the checkpoint names, that of the whole model first; empty if it
            names none.
        model_type: the config's, such as "bert".
        device: "cuda" or "cpu".
        has_bfloat16: whether the device computes bfloat16 itself.

    Raises:
        ValueError: the model gives no right answers in the wanted type; or the type is unknown.
    """
    if wanted not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}; not {wanted!r}")
    is_beyond = model_type in _BEYOND_FLOAT16
    if wanted != "auto":
        if is_beyond and wanted == "float16":
            raise ValueError(
                f"models of the type {model_type} cannot run in float16: their numbers exceed its "
                "range; use bfloat16 or float32"
            )
        return Precision(wanted, "as requested")
    first = next(iter(saved), "float32")
    if device != "cuda":
        return Precision("auto", "as saved")
    if is_beyond and first != "bfloat16":
        return _wide(f"models of the type {model_type} exceed float16", has_bfloat16)
    if first in ("float32", "float64"):
        if "bfloat16" in saved:
            return _wide("a part of the model was trained in bfloat16", has_bfloat16)
        return Precision("float16", f"saved in {first}, which a GPU computes more slowly")
    if first == "bfloat16" and not has_bfloat16:
        if is_beyond:
            return _wide(f"models of the type {model_type} exceed float16", has_bfloat16)
        return Precision("float16", "saved in bfloat16, which this GPU does not compute")
    return Precision("auto", "as saved")


def _wide(why: str, has_bfloat16: bool) -> Precision:
    """A type with the range of float32."""
    if has_bfloat16:
        return Precision("bfloat16", why)
    return Precision("float32", f"{why}, and this GPU does not compute bfloat16")


# -- weights that are quantized while they are loaded, by packages that transformers supports


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
