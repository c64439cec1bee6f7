"""The data type that a model runs in. Pure.

With "auto" a checkpoint in float32 runs in float16 on a GPU, as with vLLM and
text-embeddings-inference: tensor cores compute float16 many times faster than float32, and the
weights need half the memory. On a CPU every model runs as it was saved.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

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
