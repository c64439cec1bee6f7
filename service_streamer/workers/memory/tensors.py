"""How torch's tensors travel: as plain data, on the CPU.

torch's own pickling puts the whole storage of a tensor into the stream, also for one row of it. The
rule here is the same for tensors of any size, anywhere in an item or a result:

    it arrives on the CPU, with the same dtype and shape, contiguous, without its graph and its
    attributes; ``requires_grad`` is False, but of a ``Parameter``, which arrives as one.

Sparse, quantized, nested and subclassed tensors are pickled by torch, the first three after they
were moved to the CPU. Imported only where torch is loaded.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from typing import Any

__all__ = ["on_cpu", "reducers"]


def reducers(torch: Any) -> dict[type, Callable[[Any], Any]]:
    """By class, for a pickler's ``dispatch_table``. AttributeError: it is not loaded yet."""
    return {torch.Tensor: _reduce, torch.nn.Parameter: _reduce_parameter}


def on_cpu(outputs: Any) -> Any:
    """The tensor of all results of a batch at once on the CPU; anything else as it is."""
    torch: Any = sys.modules.get("torch")
    tensor = getattr(torch, "Tensor", None)
    if tensor is not None and type(outputs) is tensor and outputs.device.type != "cpu":
        return outputs.detach().cpu()
    return outputs


def _reduce(tensor: Any) -> Any:
    import torch

    if tensor.is_meta:  # it has no data
        return tensor.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
    tensor = tensor.detach().cpu()
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        return tensor.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
    tensor = tensor.resolve_conj().resolve_neg().contiguous()
    try:
        data = tensor.reshape(-1).view(torch.uint8).numpy()
    except RuntimeError:  # there is no numpy
        return tensor.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
    name = str(tensor.dtype).removeprefix("torch.")
    return _tensor, (pickle.PickleBuffer(data), name, tuple(tensor.shape))


def _reduce_parameter(parameter: Any) -> Any:
    return _parameter, (parameter.data, parameter.requires_grad)


def _parameter(data: Any, requires_grad: bool) -> Any:
    import torch

    return torch.nn.Parameter(data, requires_grad)


def _tensor(data: Any, dtype: str, shape: tuple[int, ...]) -> Any:
    import torch

    kind = getattr(torch, dtype)
    if 0 in shape:
        return torch.empty(shape, dtype=kind)
    return torch.frombuffer(data, dtype=torch.uint8).view(kind).reshape(shape)
