"""What the models of the examples share: where a model is, and how its user is quoted."""

from __future__ import annotations

import os
import re
from pathlib import Path

_HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")


def locate(model_path: str | os.PathLike[str], such_as: str) -> str:
    """Returns the folder or the hub name that ``model_path`` means.

    A mistyped folder must not be looked up on the hub: the user would read about a repository
    that cannot be reached, and not about the folder that is not there.

    Args:
        such_as: a hub name that would do, for the error's text.

    Raises:
        FileNotFoundError: it is neither.
    """
    path = Path(model_path).expanduser()
    if os.fspath(model_path) and path.is_dir():  # Path("") would be the current folder
        return str(path)
    if path.exists() or not isinstance(model_path, str) or not _HUB_NAME.fullmatch(model_path):
        raise FileNotFoundError(
            f"there is no model folder {os.fspath(model_path)!r}; give a folder with config.json, "
            f"model.safetensors and tokenizer.json, or a hub name such as {such_as!r}"
        )
    return model_path


def quote(value: object) -> str:
    """Quotes what the user sent, shortened so that an error message stays readable."""
    text = value if isinstance(value, str) else repr(value)
    return repr(text if len(text) <= 60 else text[:57] + "...")
