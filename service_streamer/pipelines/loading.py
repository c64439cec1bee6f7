"""Load a transformers pipeline in a worker: find the model, infer its task, explain errors."""

from __future__ import annotations

import os
import re
import warnings
from functools import partial
from pathlib import Path
from typing import Any

from .hub import HubModel, name_and_revision, resolve
from .precision import DTYPES, Precision
from .seq2seq import bare_pipeline
from .tasks import ALIASES, GENERATING, TASKS, Task, known_task
from .transcribing import WHISPER
from .weights import (
    OWN_CODE,
    Loading,
    class_of,
    first_line,
    load_weights,
    loaded,
    no_part,
    options_of_hub,
)

DEFAULT_MODEL = Path(__file__).parent.parent / "models" / "text_infilling"

_HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")

#: The first task that a class suits, if it is in tables of several: texts from texts, although
#: they can fill masks, too.
_FIRST = "text2text-generation"


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


def find_model(
    model: str | os.PathLike[str] | None, revision: str | None, commit: str | None
) -> tuple[str, HubModel | None]:
    """The folder or hub name that ``model`` means, and for a hub name the commit to load.

    Raises:
        FileNotFoundError: there is no such model.
        ValueError: a folder has no revision.
    """
    source = locate_model(model)
    if not os.path.isdir(source):
        hub = resolve(*name_and_revision(source, revision), commit)
        return hub.name, hub
    if revision is not None:
        raise ValueError(f"revision={revision!r} is for a model on the hub, not for a folder")
    return source, None


def shown_name(source: str) -> str:
    """The model's name for users, without the server's folders."""
    return Path(source).resolve().name if os.path.isdir(source) else source


def find_task(
    model: str | os.PathLike[str] | None,
    task: str | None,
    revision: str | None = None,
    commit: str | None = None,
) -> str:
    """The task of a model, before it is loaded. Raises as ``find_model`` and ``load_pipeline``."""
    if task is not None:
        return known_task(task)
    source, hub = find_model(model, revision, commit)
    return _inferred_task(source, _config(source, hub), hub)


def generates(
    model: str | os.PathLike[str] | None,
    task: str | None,
    revision: str | None = None,
    commit: str | None = None,
) -> bool:
    """Whether a model's answers are generated texts, before it is loaded.

    Raises as ``find_task``.
    """
    found = find_task(model, task, revision, commit)
    if found != "automatic-speech-recognition":
        return found in GENERATING
    source, hub = find_model(model, revision, commit)
    return class_of(_config(source, hub)) == WHISPER


def load_pipeline(
    source: str, task: str | None, loading: Loading, hub: HubModel | None = None
) -> tuple[Any, Precision]:
    """A pipeline of transformers for a folder or a hub name, as ``locate_model`` returned it.

    With it comes the data type that it runs in, and why.

    Args:
        hub: for a hub name, the commit to load and where from.

    Raises:
        FileNotFoundError: a file is missing there, or the hub has no such model.
        ImportError: transformers, torch or another package that the task needs is missing.
        ValueError: the task is unknown or unsupported by this model; or a file is damaged.
    """
    if loading.dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}; not {loading.dtype!r}")
    checked = None if task is None else known_task(task)
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
        model, precision = load_weights(source, checked, config, loading, hub)
        parts = _parts(source, checked, hub)
        _check_parts(source, checked, parts, hub)
        if checked == "zero-shot-classification":
            _check_labels(source, model.config)
        build: Any = transformers.pipeline  # typed as one overload per task
        # accelerate has moved the model already.
        is_placed = getattr(model, "hf_device_map", None) is not None
        device = None if is_placed else torch.device(loading.device)
        if TASKS[checked].loads:
            built = bare_pipeline(checked, model, device, parts)
        else:
            built = build(checked, model=model, device=device, **parts)
    except ImportError as error:
        raise ImportError(
            f"the model {source!r} needs a package that is not installed: {first_line(error)}",
            name=error.name,
        ) from error
    return built, precision


def read_json(source: str, file: str, hub: HubModel | None = None) -> Any:
    """Read a JSON file of the model; None if there is no such file."""
    import json

    from transformers.utils.hub import cached_file

    path = cached_file(
        source, file,
        _raise_exceptions_for_gated_repo=False,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
        **options_of_hub(hub),
    )  # fmt: skip
    return None if path is None else json.loads(Path(path).read_text("utf-8"))


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
    load = partial(AutoConfig.from_pretrained, source, **OWN_CODE, **options_of_hub(hub))
    return loaded(source, "config", load, hub)


def _inferred_task(source: str, config: Any, hub: HubModel | None) -> str:
    """The task from the hub, or else from the model's class."""
    named = (hub and hub.task) or ""
    if ALIASES.get(named, named) in TASKS:
        return ALIASES.get(named, named)
    name = class_of(config)
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


def _check_class(source: str, task: str, config: Any) -> None:
    """Refuse a model that was made for another task.

    Its weights may fit all the same, as with text and token classifiers. Every model can give
    features.
    """
    name = class_of(config)
    others = _tasks_of(name)
    if others and task not in (*others, "feature-extraction", "image-feature-extraction"):
        raise ValueError(
            f"the model {source!r}, which is {name}, cannot do {task}: it is for "
            f"{' or '.join(others)}; name another task or model"
        )


def _tasks_of(name: str) -> list[str]:
    return [task for task in dict.fromkeys((_FIRST, *TASKS)) if name in _classes(TASKS[task])]


def _classes(task: Task) -> set[str]:
    from transformers.models.auto import modeling_auto

    tables = (getattr(modeling_auto, f"MODEL_FOR_{each}_MAPPING_NAMES") for each in task.tables)
    return {*task.classes}.union(*map(_names, tables))


def _names(table: Any) -> set[str]:
    entries = ((each,) if isinstance(each, str) else each for each in table.values())
    return {name for names in entries for name in names}


def _parts(source: str, task: str, hub: HubModel | None) -> dict[str, Any]:
    """The pipeline's other parts: tokenizer, image processor, ..."""
    import transformers

    takes = TASKS[task].takes
    classes: dict[str, Any] = {}
    if takes == "image":
        classes["image_processor"] = transformers.AutoImageProcessor
    if takes == "audio":
        classes["feature_extractor"] = transformers.AutoFeatureExtractor
    if takes == "text" or task in ("automatic-speech-recognition", "image-to-text"):
        classes["tokenizer"] = transformers.AutoTokenizer
    return {
        name: loaded(
            source,
            name.replace("_", " "),
            partial(auto.from_pretrained, source, **OWN_CODE, **options_of_hub(hub)),
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
        raise FileNotFoundError(no_part(source, "tokenizer", hub))
    if task == "fill-mask" and tokenizer.mask_token_id is None:
        raise ValueError(
            f"the model {source!r} cannot do fill-mask: its tokenizer has no mask token"
        )
