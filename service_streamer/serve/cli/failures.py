"""What the command line says when a model cannot be loaded, or its name means nothing."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from importlib.machinery import PathFinder
from pathlib import Path

from ...errors import RemoteTraceback
from ...options.checks import IMPORT_STRING

_NAME = r"[^\W\d]\w*"
_DOTTED = re.compile(rf"{_NAME}(\.{_NAME})+")

_FRAME = re.compile(r'  File "(.*?)", line \d+')
_OURS = (
    f"{Path(__file__).parents[2]}{os.sep}",
    f"{Path(importlib.util.__file__).parent}{os.sep}",
    "<frozen ",
)

#: What our loaders raise, with texts that say all: they are read without a traceback.
_EXPECTED = ("FileNotFoundError", "ImportError", "ValueError")


def explain_name(model: str) -> str | None:
    """What is wrong with the name of a model that is no folder; None if nothing is seen.

    A module is looked for without importing it.
    """
    if model.endswith(".py"):
        module = model[:-3].strip("./").replace("/", ".")
        return f"{model!r} is not a model folder; for a class in that file write {module}:Class"
    if ":" in model and not IMPORT_STRING.fullmatch(model):
        before, _, name = model.partition(":")
        module = before.removesuffix(".py").strip("./").replace("/", ".")
        if IMPORT_STRING.fullmatch(f"{module}:{name}"):
            return f"{model!r} is not module:Class; did you mean {module}:{name}?"
        return f"{model!r} is not module:Class; write it such as my_module:MyModel"
    if ":" in model:
        module, _, name = model.partition(":")
        if module.endswith(".py") and Path(module).is_file():
            return f"{model!r} names a file; write the module: {module[:-3]}:{name}"
        return None
    module, _, name = model.rpartition(".")
    if _DOTTED.fullmatch(model) and (name[0].isupper() or _is_module(module)):
        return (
            f"there is no model folder {model!r}; for {name} in the module {module} write "
            f"{module}:{name}, with a colon"
        )
    return None


def _is_module(module: str) -> bool:
    """Whether the package that a module is in, or the module itself, can be found."""
    return PathFinder.find_spec(module.partition(".")[0], [os.getcwd(), *sys.path]) is not None


def reason(error: BaseException) -> str:
    """An error and its cause in a line."""
    texts = [str(error) or type(error).__name__]
    cause = error.__cause__
    if isinstance(cause, RemoteTraceback):
        cause = None
    if cause is not None and str(cause) and str(cause) not in texts[0]:
        texts.append(str(cause).strip().splitlines()[0])
    return ": ".join(texts)


def users_traceback(error: BaseException, *, is_own: bool) -> str:
    """The worker's traceback from the first frame that is none of ours; empty if there is none.

    Args:
        is_own: whether the model is the user's own. Of a pipeline what is expected to fail is
            explained by the error alone.
    """
    raised, seen = error, {id(error)}
    while not isinstance(raised.__cause__, RemoteTraceback):
        if raised.__cause__ is None or id(raised.__cause__) in seen:
            return ""
        raised = raised.__cause__
        seen.add(id(raised))
    if not is_own and any(type(raised).__name__ == name for name in _EXPECTED):
        return ""
    head, *frames = re.split(r'(?m)^(?=  File ")', raised.__cause__.text)
    while len(frames) > 1 and _is_ours(frames[0]):
        frames.pop(0)
    return head + "".join(frames) if frames and not _is_ours(frames[0]) else ""


def _is_ours(frame: str) -> bool:
    found = _FRAME.match(frame)
    return found is not None and found[1].startswith(_OURS)
