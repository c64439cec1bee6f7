"""Load a model's weights: in which data type, quantized or not, on which devices."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from .hub import HubModel, explain
from .precision import Precision, choose_precision, is_installed, quantization_config
from .tasks import TASKS

logger = logging.getLogger(__name__)

#: Weights that a checkpoint may lack: no result depends on them.
_UNUSED_WEIGHTS = ("pooler.", "masked_spec_embed")

#: Never run code that comes with a model; unset, transformers would ask on the terminal.
OWN_CODE: dict[str, Any] = {"trust_remote_code": False}

_FLASH = "flash_attention_2"

#: Data types by their names in safetensors.
_SAVED = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


class Loading(NamedTuple):
    """How a user wants a model to run.

    Attributes:
        dtype: "auto", or the data type of the weights.
        attention: "sdpa", "flash_attention_2" or "eager"; None for what transformers prefers.
        quantization: a name of ``QUANTIZATIONS``; None for none.
        device: such as "cuda:0" or "cpu"; "meta" for a model without weights, which cannot compute.
        devices: number of GPUs that the weights are spread over.
    """

    dtype: str = "auto"
    attention: str | None = None
    quantization: str | None = None
    device: str = "cpu"
    devices: int = 1

    @property
    def kind(self) -> str:
        """The kind of device: "cuda" or "cpu"."""
        return self.device.partition(":")[0]


def load_weights(
    source: str, task: str, config: Any, loading: Loading, hub: HubModel | None
) -> tuple[Any, Precision]:
    """The model with all of its weights, and the data type that it runs in.

    transformers fills in random weights for missing ones and only logs it, which suits training.
    A served model would return nonsense with scores.

    Raises:
        FileNotFoundError: the weights are missing.
        ImportError: a package for attention, quantization or several devices is missing.
        ValueError: the model cannot do the task, or cannot run as wanted; or a file is damaged.
    """
    import torch

    precision = _precision(source, config, loading, hub)
    more = _options(source, config, loading, precision)
    wrong: Exception | None = None
    for auto in _auto_classes(task):
        try:
            if loading.device == "meta":
                with torch.device("meta"):
                    return auto.from_config(config, **OWN_CODE), precision
            model, report = auto.from_pretrained(
                source, config=config, dtype=precision.dtype, output_loading_info=True, **more,
                **OWN_CODE, **options_of_hub(hub),
            )  # fmt: skip
        except ImportError:
            raise
        except Exception as error:
            wrong = error  # try the next class: speech recognition has three
            continue
        missing = [
            name for name in report["missing_keys"]
            if not any(each in name for each in _UNUSED_WEIGHTS)
        ]  # fmt: skip
        if not missing:
            return model, precision._replace(dtype=str(model.dtype).removeprefix("torch."))
        wrong = ValueError(
            f"its weights lack {min(missing)!r}"
            + (f" and {len(missing) - 1} more" if len(missing) > 1 else "")
        )
    raise _explained(source, task, config, loading, hub, wrong) from wrong


def _auto_classes(task: str) -> Sequence[Any]:
    import transformers
    from transformers.pipelines import check_task

    if TASKS[task].loads:
        return (getattr(transformers, TASKS[task].loads),)
    classes: Sequence[Any] = check_task(task)[1]["pt"]
    return classes


def _explained(
    source: str,
    task: str,
    config: Any,
    loading: Loading,
    hub: HubModel | None,
    wrong: Exception | None,
) -> Exception:
    if wrong is not None and is_damage(wrong):
        return ValueError(damaged(source, "weights", wrong))
    if isinstance(wrong, OSError):
        why = refused(wrong, hub)
        return FileNotFoundError(
            why or f"the weights of the model {source!r} cannot be loaded: {first_line(wrong)}"
        )
    if loading.attention is not None and "does not support" in str(wrong):
        return ValueError(
            f"the model {source!r}, which is {class_of(config)}, does not support attention "
            f"{loading.attention!r}; leave it out, or use 'eager'"
        )
    is_other = "Unrecognized configuration class" in str(wrong)
    why = "" if is_other or wrong is None else f" ({first_line(wrong)})"
    return ValueError(
        f"the model {source!r}, which is {class_of(config)}, cannot do {task}{why}; name another "
        "task or model"
    )


def class_of(config: Any) -> str:
    """The class of a model by its config."""
    names = getattr(config, "architectures", None) or [type(config).__name__]
    return str(names[0])


def options_of_hub(hub: HubModel | None) -> dict[str, Any]:
    """Keywords of ``from_pretrained`` that name the commit; none for a folder."""
    return {} if hub is None else hub.options


def _precision(source: str, config: Any, loading: Loading, hub: HubModel | None) -> Precision:
    import torch

    on_gpu = loading.kind == "cuda"
    saved: Sequence[str] = ()
    if on_gpu and loading.dtype == "auto":
        saved = _named_dtypes(config) or _stored_dtype(source, hub)
    precision = choose_precision(
        loading.dtype,
        saved=saved,
        model_type=str(getattr(config, "model_type", "")),
        device=loading.kind,
        has_bfloat16=on_gpu and torch.cuda.is_bf16_supported(including_emulation=False),
    )
    if on_gpu and precision.dtype == "float32":
        # Products of matrices on tensor cores. Convolutions use them by default.
        torch.set_float32_matmul_precision("high")
        precision = precision._replace(reason=f"{precision.reason}; matrix products use TF32")
    return precision


def _named_dtypes(config: Any) -> list[str]:
    """The data types that a config names, that of the whole model first."""
    parts = [config, *(getattr(config, name, None) for name in getattr(config, "sub_configs", {}))]
    named = [getattr(part, "dtype", None) for part in parts]
    return [str(dtype).removeprefix("torch.") for dtype in named if dtype is not None]


def _stored_dtype(source: str, hub: HubModel | None) -> list[str]:
    """The data type of the first weights in a file; empty if it cannot be read without loading.

    Many older checkpoints name no type in their config.
    """
    import json

    from safetensors import safe_open
    from transformers.utils.hub import cached_file

    def found(file: str) -> str | None:
        path: str | None = cached_file(
            source, file,
            _raise_exceptions_for_gated_repo=False,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
            **options_of_hub(hub),
        )  # fmt: skip
        return path

    try:
        path = found("model.safetensors")
        if path is None:
            index = found("model.safetensors.index.json")
            if index is None:
                return []
            with open(index, encoding="utf-8") as file:
                path = found(next(iter(json.load(file)["weight_map"].values())))
        with safe_open(os.fspath(path or ""), framework="pt") as weights:
            kinds = (weights.get_slice(name).get_dtype() for name in weights.keys())  # noqa: SIM118
            return [_SAVED[next(kind for kind in kinds if kind in _SAVED)]]
    except Exception as error:  # loading says it better
        logger.debug("the data type of %s is unknown: %s", source, error)
        return []


def _options(source: str, config: Any, loading: Loading, precision: Precision) -> dict[str, Any]:
    """Keywords of ``from_pretrained`` for attention, quantization and devices."""
    options: dict[str, Any] = {}
    if loading.attention is not None:
        is_wide = loading.kind == "cuda" and precision.dtype == "float32"
        if loading.attention == _FLASH and is_wide:
            raise ValueError(
                f"attention {_FLASH!r} needs float16 or bfloat16, and the model {source!r} runs in "
                f"float32 ({precision.reason}); use 'sdpa', or another dtype"
            )
        check_attention(loading.attention, loading.kind)
        options["attn_implementation"] = loading.attention
    if loading.quantization is not None:
        if getattr(config, "quantization_config", None) is not None:
            raise ValueError(
                f"the model {source!r} was saved quantized; leave quantization out, since its own "
                "is used"
            )
        dtype = precision.dtype
        if dtype == "auto":
            dtype = next(iter(_named_dtypes(config)), "float16")
        options["quantization_config"] = quantization_config(
            loading.quantization, loading.kind, dtype
        )
        options["device_map"] = {"": loading.device}
    if loading.devices > 1:
        _check_devices(loading)
        options["device_map"] = "auto"
    return options


def check_attention(attention: str, device: str | None) -> None:
    """Refuse an attention that cannot be had here.

    Args:
        device: "cuda" or "cpu"; None if it is unknown.

    Raises:
        ImportError: its package is missing.
        ValueError: it does not compute on this device.
    """
    if attention != _FLASH:
        return
    if device == "cpu":
        raise ValueError(f"attention {_FLASH!r} needs a GPU; use 'sdpa' or leave it out")
    if not (is_installed("flash_attn") or is_installed("kernels")):
        raise ImportError(
            f"attention {_FLASH!r} needs flash-attn: pip install flash-attn, or use 'sdpa'",
            name="flash_attn",
        )


def _check_devices(loading: Loading) -> None:
    import torch

    devices = loading.devices
    seen = torch.cuda.device_count() if loading.kind == "cuda" else 0
    if seen < devices:
        backend: Any = torch.backends.cuda
        todo = (
            "set devices_per_worker to a number of GPUs that each worker gets"
            if backend.is_built()
            else "it is built for the CPU; install a build for your GPUs"
        )
        raise ValueError(
            f"the model is to be spread over {devices} GPUs, and torch sees {seen} in its worker: "
            f"{todo}"
        )
    check_accelerate(devices)


def check_accelerate(devices: int) -> None:
    """Refuse several devices for a model without the package. Raises ImportError."""
    if not is_installed("accelerate"):
        raise ImportError(
            f"a model on {devices} devices needs accelerate: pip install accelerate",
            name="accelerate",
        )


# -- errors of model files: what is missing or damaged, and what to do


_T = TypeVar("_T")


def loaded(source: str, part: str, load: Callable[[], _T], hub: HubModel | None) -> _T:
    try:
        return load()
    except ImportError:
        raise
    except Exception as error:  # OSError, ValueError, TypeError, KeyError, ... for the same causes
        if os.path.isdir(source) and is_damage(error):
            raise ValueError(damaged(source, part, error)) from error
        why = refused(error, hub) or f"{no_part(source, part, hub)} ({first_line(error)})"
        raise FileNotFoundError(why) from error


def is_damage(error: Exception) -> bool:
    """Whether a file of a model is cut off or corrupt."""
    return (
        type(error).__name__ in ("SafetensorError", "UnpicklingError", "JSONDecodeError")
        or isinstance(error, EOFError)
        or any(each in str(error) for each in ("PytorchStreamReader", "not a valid JSON"))
    )


def damaged(source: str, part: str, error: Exception) -> str:
    pointer = _pointer(source)
    if pointer is not None:
        return (
            f"{pointer!r} in the model folder {source!r} is a Git LFS pointer, not the file "
            "itself; run 'git lfs pull' there"
        )
    again = (
        "copy them there again"
        if os.path.isdir(source)
        else "delete the model from the hub's cache, so that it is downloaded again"
    )
    return (
        f"the files of the model {source!r} are damaged or incomplete: its {part} cannot be read "
        f"({first_line(error)}); {again}"
    )


def _pointer(source: str) -> str | None:
    """The name of a Git LFS pointer in the folder, if there is one."""
    for path in sorted(Path(source).iterdir()) if os.path.isdir(source) else ():
        is_small = path.is_file() and path.stat().st_size < 1024
        if is_small and path.read_bytes().startswith(b"version https://git-lfs"):
            return path.name
    return None


def refused(error: BaseException, hub: HubModel | None) -> str:
    return "" if hub is None else explain(error, hub.name, hub.revision)


def _endpoint() -> str:
    from huggingface_hub import constants

    return str(constants.ENDPOINT)


def no_part(source: str, part: str, hub: HubModel | None) -> str:
    if hub is None:
        return (
            f"the model folder {source!r} has no {part} that transformers can load; save it there "
            "with save_pretrained"
        )
    if hub.away:
        return (
            f"the model {source!r} has no {part} in the cache that transformers can load, and the "
            f"hub {_endpoint()} cannot be reached ({hub.away})"
        )
    return (
        f"there is no folder {source!r}, and the model hub {_endpoint()} has no {part} of that name"
    )


def first_line(error: BaseException) -> str:
    line = next(filter(None, map(str.strip, str(error).splitlines())), type(error).__name__)
    return line if len(line) <= 200 else line[:197] + "..."
