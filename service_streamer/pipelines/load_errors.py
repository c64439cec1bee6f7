"""Errors of model files: what is missing or damaged, and what to do."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from .hub import HubModel, explain

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
