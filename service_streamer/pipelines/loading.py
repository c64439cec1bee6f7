"""Load a transformers pipeline in a worker: find the model, infer its task, explain errors."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from .hub import HubModel, explain
from .tasks import ALIASES, TASKS

__all__ = ["DEFAULT_MODEL", "DTYPES", "load_pipeline", "locate_model", "read_json", "shown_name"]

DEFAULT_MODEL = Path(__file__).parent.parent / "models" / "text_infilling"

DTYPES = ("auto", "float32", "float16", "bfloat16")

_HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")

#: transformers' tables of model classes per task, in order of preference: some classes are in
#: several tables.
_CLASSES_OF = {
    "fill-mask": ("MASKED_LM",),
    "zero-shot-classification": ("SEQUENCE_CLASSIFICATION",),
    "text-classification": ("SEQUENCE_CLASSIFICATION",),
    "token-classification": ("TOKEN_CLASSIFICATION",),
    "text-generation": ("CAUSAL_LM",),
    "image-classification": ("IMAGE_CLASSIFICATION",),
    "object-detection": ("OBJECT_DETECTION",),
    "automatic-speech-recognition": ("CTC", "SPEECH_SEQ_2_SEQ"),
    "audio-classification": ("AUDIO_CLASSIFICATION",),
    "image-feature-extraction": ("IMAGE",),
    "feature-extraction": ("TEXT_ENCODING",),
}

#: Weights that a checkpoint may lack: no result depends on them.
_UNUSED_WEIGHTS = re.compile(r"pooler\.|masked_spec_embed")

#: Never run code that comes with a model; unset, transformers would ask on the terminal.
_OWN_CODE: dict[str, Any] = {"trust_remote_code": False}

_T = TypeVar("_T")


def locate_model(model: str | os.PathLike[str] | None) -> str:
    """The folder or the hub name that ``model`` means; None is the shipped model.

    A mistyped folder is not looked up on the hub: the error would be about a repository.

    Raises:
        FileNotFoundError: it is neither.
    """
    if model is None:
        return str(DEFAULT_MODEL)
    path = Path(model).expanduser()
    if os.fspath(model) and path.is_dir():  # Path("") would be the current folder
        return str(path)
    name = model.partition("@")[0] if isinstance(model, str) else ""
    if path.exists() or not _HUB_NAME.fullmatch(name):
        raise FileNotFoundError(
            f"there is no model folder {os.fspath(model)!r}; give a folder that save_pretrained "
            "wrote, or a hub name such as 'bert-base-uncased'"
        )
    return os.fspath(model)


def shown_name(source: str) -> str:
    """The model's name for users, without the server's folders."""
    return Path(source).resolve().name if os.path.isdir(source) else source


def load_pipeline(
    source: str, task: str | None, dtype: str, device: Any, hub: HubModel | None = None
) -> Any:
    """A pipeline of transformers for a folder or a hub name, as ``locate_model`` returned it.

    Args:
        hub: for a hub name, the commit to load and where from.

    Raises:
        FileNotFoundError: a file is missing there, or the hub has no such model.
        ImportError: transformers, torch or another package that the task needs is missing.
        ValueError: the task is unknown or unsupported by this model; or a file is damaged.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}; not {dtype!r}")
    checked = None if task is None else _checked_task(task)
    try:
        import torch
        import transformers
    except ImportError as error:
        raise ImportError(
            f"serving a pipeline needs torch and transformers: pip install torch transformers "
            f"({error})",
            name=error.name,
        ) from error
    _silence(transformers)
    config = _config(source, hub)
    checked = checked or _inferred_task(source, config, hub)
    _check_class(source, checked, config)
    if TASKS[checked].takes == "image":
        _need("PIL", checked, "pillow")
    try:
        model = _model(source, checked, config, dtype, hub)
        parts = _parts(source, checked, hub)
        _check_parts(source, checked, parts, hub)
        if checked == "zero-shot-classification":
            _check_labels(source, model.config)
        build: Any = transformers.pipeline  # typed as one overload per task
        built = build(checked, model=model, device=torch.device(device), **parts)
    except ImportError as error:
        raise ImportError(
            f"the model {source!r} needs a package that is not installed: {_first_line(error)}",
            name=error.name,
        ) from error
    return built


def read_json(source: str, file: str, hub: HubModel | None = None) -> Any:
    """Read a JSON file of the model; None if there is no such file."""
    import json

    from transformers.utils.hub import cached_file

    path = cached_file(
        source, file,
        _raise_exceptions_for_gated_repo=False,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
        **_options(hub),
    )  # fmt: skip
    return None if path is None else json.loads(Path(path).read_text("utf-8"))


def _options(hub: HubModel | None) -> dict[str, Any]:
    return {} if hub is None else hub.options


def _checked_task(task: str) -> str:
    task = ALIASES.get(task, task)
    if task not in TASKS:
        raise ValueError(f"unknown task {task!r}; must be one of {', '.join(sorted(TASKS))}")
    return task


def _silence(transformers: Any) -> None:
    """Keep progress bars and advice out of the service's log."""
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    warnings.filterwarnings("ignore", module=r"transformers\.")


def _need(module: str, task: str, package: str) -> None:
    import importlib.util

    if importlib.util.find_spec(module) is None:
        raise ImportError(f"{task} needs {package}: pip install {package}", name=module)


def _config(source: str, hub: HubModel | None) -> Any:
    from transformers import AutoConfig

    if os.path.isdir(source) and not (Path(source) / "config.json").is_file():
        hint = (
            "it holds an adapter: merge it into its model and save that"
            if (Path(source) / "adapter_config.json").is_file()
            else "give a folder that save_pretrained wrote"
        )
        raise FileNotFoundError(f"the model folder {source!r} has no config.json; {hint}")
    load = partial(AutoConfig.from_pretrained, source, **_OWN_CODE, **_options(hub))
    return _loaded(source, "config", load, hub)


def _inferred_task(source: str, config: Any, hub: HubModel | None) -> str:
    """The task from the hub, or else from the model's class."""
    named = (hub and hub.task) or ""
    if ALIASES.get(named, named) in TASKS:
        return ALIASES.get(named, named)
    name = _class_of(config)
    for task in _tasks_of(name):
        if task != "zero-shot-classification":
            return task
    from transformers.models.auto import modeling_auto

    if name in _names(modeling_auto.MODEL_MAPPING_NAMES):
        return "feature-extraction"
    raise ValueError(
        f"the task of the model {source!r}, which is {name}, is unknown; set task to one of "
        f"{', '.join(sorted(TASKS))}"
    )


def _class_of(config: Any) -> str:
    names = getattr(config, "architectures", None) or [type(config).__name__]
    return str(names[0])


def _check_class(source: str, task: str, config: Any) -> None:
    """Refuse a model that was made for another task.

    Its weights may fit all the same, as with text and token classifiers. Every model can give
    features.
    """
    name = _class_of(config)
    others = _tasks_of(name)
    if others and task not in (*others, "feature-extraction", "image-feature-extraction"):
        raise ValueError(
            f"the model {source!r}, which is {name}, cannot do {task}: it is for "
            f"{' or '.join(others)}; name another task or model"
        )


def _tasks_of(name: str) -> list[str]:
    return [task for task in _CLASSES_OF if name in _classes(task)]


def _classes(task: str) -> set[str]:
    from transformers.models.auto import modeling_auto

    return {
        name
        for table in _CLASSES_OF[task]
        for name in _names(getattr(modeling_auto, f"MODEL_FOR_{table}_MAPPING_NAMES"))
    }


def _names(table: Any) -> set[str]:
    entries = ((each,) if isinstance(each, str) else each for each in table.values())
    return {name for names in entries for name in names}


def _model(source: str, task: str, config: Any, dtype: str, hub: HubModel | None) -> Any:
    """The model with all of its weights.

    transformers fills in random weights for missing ones and only logs it, which suits training.
    A served model would return nonsense with scores.
    """
    from transformers.pipelines import check_task

    wrong: Exception | None = None
    for auto in check_task(task)[1]["pt"]:
        try:
            model, report = auto.from_pretrained(
                source, config=config, dtype=dtype, output_loading_info=True, **_OWN_CODE,
                **_options(hub),
            )  # fmt: skip
        except ImportError:
            raise
        except Exception as error:
            wrong = error  # try the next class: speech recognition has three
            continue
        missing = [name for name in report["missing_keys"] if not _UNUSED_WEIGHTS.search(name)]
        if not missing:
            return model
        wrong = ValueError(
            f"its weights lack {min(missing)!r}"
            + (f" and {len(missing) - 1} more" if len(missing) > 1 else "")
        )
    if wrong is not None and _is_damage(wrong):
        raise ValueError(_damaged(source, "weights", wrong)) from wrong
    if isinstance(wrong, OSError):
        why = _refused(wrong, hub)
        raise FileNotFoundError(
            why or f"the weights of the model {source!r} cannot be loaded: {_first_line(wrong)}"
        ) from wrong
    is_other = "Unrecognized configuration class" in str(wrong)
    why = "" if is_other or wrong is None else f" ({_first_line(wrong)})"
    raise ValueError(
        f"the model {source!r}, which is {_class_of(config)}, cannot do {task}{why}; name another "
        "task or model"
    ) from wrong


def _parts(source: str, task: str, hub: HubModel | None) -> dict[str, Any]:
    """The pipeline's other parts: tokenizer, image processor, ..."""
    import transformers

    takes = TASKS[task].takes
    classes: dict[str, Any] = {}
    if takes == "image":
        classes["image_processor"] = transformers.AutoImageProcessor
    if takes == "audio":
        classes["feature_extractor"] = transformers.AutoFeatureExtractor
    if takes == "text" or task == "automatic-speech-recognition":
        classes["tokenizer"] = transformers.AutoTokenizer
    return {
        name: _loaded(
            source,
            name.replace("_", " "),
            partial(auto.from_pretrained, source, **_OWN_CODE, **_options(hub)),
            hub,
        )
        for name, auto in classes.items()
    }


def _check_labels(source: str, config: Any) -> None:
    if not config.label2id and config.id2label:  # some models are saved with only one of them
        config.label2id = {label: number for number, label in config.id2label.items()}
    if not any(str(label).lower().startswith("entail") for label in config.label2id or ()):
        raise ValueError(
            f"the model {source!r} cannot do zero-shot-classification: it has no label "
            "'entailment'; use a model trained on natural language inference"
        )


def _check_parts(source: str, task: str, parts: dict[str, Any], hub: HubModel | None) -> None:
    tokenizer = parts.get("tokenizer")
    if tokenizer is None:
        return
    if len(tokenizer) <= len(
        tokenizer.all_special_tokens
    ):  # transformers made it up: there were no files
        raise FileNotFoundError(_no_part(source, "tokenizer", hub))
    if task == "fill-mask" and tokenizer.mask_token_id is None:
        raise ValueError(
            f"the model {source!r} cannot do fill-mask: its tokenizer has no mask token"
        )


def _loaded(source: str, part: str, load: Callable[[], _T], hub: HubModel | None) -> _T:
    try:
        return load()
    except ImportError:
        raise
    except Exception as error:  # OSError, ValueError, TypeError, KeyError, ... for the same causes
        if os.path.isdir(source) and _is_damage(error):
            raise ValueError(_damaged(source, part, error)) from error
        why = _refused(error, hub) or f"{_no_part(source, part, hub)} ({_first_line(error)})"
        raise FileNotFoundError(why) from error


def _is_damage(error: Exception) -> bool:
    """Whether a file of a model is cut off or corrupt."""
    return (
        type(error).__name__ in ("SafetensorError", "UnpicklingError", "JSONDecodeError")
        or isinstance(error, EOFError)
        or any(each in str(error) for each in ("PytorchStreamReader", "not a valid JSON"))
    )


def _damaged(source: str, part: str, error: Exception) -> str:
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
        f"({_first_line(error)}); {again}"
    )


def _pointer(source: str) -> str | None:
    """The name of a Git LFS pointer in the folder, if there is one."""
    for path in sorted(Path(source).iterdir()) if os.path.isdir(source) else ():
        is_small = path.is_file() and path.stat().st_size < 1024
        if is_small and path.read_bytes().startswith(b"version https://git-lfs"):
            return path.name
    return None


def _refused(error: BaseException, hub: HubModel | None) -> str:
    return "" if hub is None else explain(error, hub.name, hub.revision)


def _endpoint() -> str:
    from huggingface_hub import constants

    return str(constants.ENDPOINT)


def _no_part(source: str, part: str, hub: HubModel | None) -> str:
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


def _first_line(error: BaseException) -> str:
    line = next(filter(None, map(str.strip, str(error).splitlines())), type(error).__name__)
    return line if len(line) <= 200 else line[:197] + "..."
