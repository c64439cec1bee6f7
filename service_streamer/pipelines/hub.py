"""Models on the Hugging Face hub: resolve a name to a commit, once and within a time limit.

A branch such as "main" moves. The commit is looked up once, and every worker loads it, including
workers that start later.

The hub's libraries ask the hub for each file, and wait up to a minute if it does not answer. So one
short request finds out whether the hub answers. If not, only the cache is used.
"""

from __future__ import annotations

import contextlib
import os
import queue
import re
import threading
from pathlib import Path
from typing import Any, NamedTuple

_COMMIT = re.compile(r"[0-9a-f]{40}")
_DEFAULT_REVISION = "main"


class HubModel(NamedTuple):
    """A model on the hub, at one commit.

    Attributes:
        name: such as "org/model".
        revision: the requested branch, tag or commit.
        commit: the commit of that revision; None if unknown.
        task: the model's task according to the hub; None if it has none.
        away: why the hub cannot be reached, so that only the cache is used; empty if it can.
    """

    name: str
    revision: str
    commit: str | None
    task: str | None = None
    away: str = ""

    @property
    def options(self) -> dict[str, Any]:
        """Keywords of transformers' ``from_pretrained``."""
        return {"revision": self.commit or self.revision, "local_files_only": bool(self.away)}


def name_and_revision(model: str, revision: str | None = None) -> tuple[str, str | None]:
    """Split "name@revision".

    Raises:
        ValueError: the name has a revision, and ``revision`` differs.
    """
    name, at, named = model.partition("@")
    if not at:
        return model, revision
    if not named or not name:
        raise ValueError(f"{model!r} must be name@revision, such as 'bert-base-uncased@main'")
    if revision not in (None, named):
        raise ValueError(f"{model!r} names a revision, but revision={revision!r}; give one")
    return name, named


def resolve(
    name: str,
    revision: str | None = None,
    commit: str | None = None,
    *,
    briefly: float = 3.0,
    patiently: float = 30.0,
) -> HubModel:
    """Find the commit of a model to load.

    Args:
        commit: the commit, if already known; then only the hub's availability is checked.
        briefly: seconds to wait for the hub if the model is in the cache.
        patiently: seconds to wait for it otherwise.

    Raises:
        FileNotFoundError: the hub has no such model or denies access; or the hub cannot be
            reached and the model is not in the cache.
    """
    wanted = revision or _DEFAULT_REVISION
    try:
        from huggingface_hub import constants
    except ImportError:  # load_pipeline says it better
        return HubModel(name, wanted, None)
    cached = _cached_commit(Path(constants.HF_HUB_CACHE), name, commit or wanted)
    if constants.HF_HUB_OFFLINE:
        away = "HF_HUB_OFFLINE is set"
    else:
        info = _asked(name, commit or revision, briefly if cached else patiently)
        if not isinstance(info, Exception):
            found = commit or info.sha or cached
            return HubModel(name, wanted, found, getattr(info, "pipeline_tag", None))
        if cached is None:
            refusal = explain(info, name, wanted)
            if refusal:
                raise FileNotFoundError(refusal) from info
        away = _one_line(info)
    if cached is not None:
        return HubModel(name, wanted, cached, away=away)
    raise FileNotFoundError(
        f"the model {name!r} cannot be loaded: the hub {constants.ENDPOINT} cannot be reached "
        f"({away}), and revision {wanted!r} is not in the cache {constants.HF_HUB_CACHE}; check "
        "the network and HF_ENDPOINT, or give a folder"
    )


def remember(model: HubModel) -> None:
    """Write the revision's commit to the cache, once all files are there.

    The hub's library does so only when a file is loaded by the revision's name, not by its commit.
    """
    if model.commit is None or model.away or _COMMIT.fullmatch(model.revision):
        return
    from huggingface_hub import constants

    with contextlib.suppress(OSError, ValueError):  # a read-only cache
        path = _reference(Path(constants.HF_HUB_CACHE), model.name, model.revision)
        if not path.is_file() or path.read_text().strip() != model.commit:
            path.parent.mkdir(parents=True, exist_ok=True)
            new = path.with_name(f".{path.name}.{os.getpid()}")
            new.write_text(model.commit)
            new.replace(path)


def explain(error: BaseException | None, name: str, revision: str | None) -> str:
    """Why the hub refused a model, and what to do; empty for other errors."""
    from huggingface_hub import constants

    endpoint = constants.ENDPOINT
    seen = 0
    while error is not None and seen < 8:
        match type(error).__name__:
            case "GatedRepoError":
                return (
                    f"the model {name!r} is gated: accept its licence at {endpoint}/{name}, and "
                    "set HF_TOKEN to a token of that account (or run 'hf auth login')"
                )
            case "RevisionNotFoundError":
                return f"the model {name!r} at {endpoint} has no revision {revision!r}"
            case "RepositoryNotFoundError":
                return (
                    f"there is no model {name!r} at {endpoint}, nor a folder of that name; if the "
                    "model is private, set HF_TOKEN to a token that may read it"
                )
            case "HFValidationError":
                return f"{name!r} cannot be the name of a model: {_one_line(error)}"
        error, seen = error.__cause__ or error.__context__, seen + 1
    return ""


def _asked(name: str, revision: str | None, seconds: float) -> Any:
    """The hub's information on a model, or the error. Returns within ``seconds``.

    In a thread: looking up a host name has no timeout.
    """
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def ask() -> None:
        try:
            from huggingface_hub import HfApi

            answers.put(HfApi().model_info(name, revision=revision, timeout=seconds))
        except Exception as error:
            answers.put(error)

    threading.Thread(target=ask, name="service_streamer hub", daemon=True).start()
    try:
        return answers.get(timeout=seconds)
    except queue.Empty:
        return TimeoutError(f"no answer within {seconds:g} s")


def _cached_commit(cache: Path, name: str, revision: str) -> str | None:
    try:
        commit = revision
        if not _COMMIT.fullmatch(revision):
            commit = _reference(cache, name, revision).read_text().strip()
        config = _folder(cache, name) / "snapshots" / commit / "config.json"
        return commit if config.is_file() else None
    except (OSError, ValueError):
        return None


def _folder(cache: Path, name: str) -> Path:
    return cache / ("models--" + name.replace("/", "--"))


def _reference(cache: Path, name: str, revision: str) -> Path:
    """The cache file with the commit of a branch or a tag."""
    if ".." in revision.split("/") or revision.startswith("/"):
        raise ValueError(f"invalid revision {revision!r}")
    return _folder(cache, name) / "refs" / revision


def _one_line(error: BaseException) -> str:
    line = next(filter(None, map(str.strip, str(error).splitlines())), "")
    text = f"{type(error).__name__}: {line}" if line else type(error).__name__
    return text if len(text) <= 200 else text[:197] + "..."
