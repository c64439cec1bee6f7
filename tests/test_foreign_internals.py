"""Private parts of other packages that this one relies on: which one has changed.

If a test fails after an upgrade, adapt the module that it names, and raise the upper bound of the
version in ``setup.cfg``.
"""

from __future__ import annotations

import configparser
import importlib
import multiprocessing.process
import re
from functools import reduce
from pathlib import Path
from typing import Any

import pytest

#: Packages whose internals are patched or called: a new version may break them silently.
BOUNDED = {"httptools", "pytest", "ray", "redis", "transformers"}


#: What is called or replaced there, and by which module.
CALLED = {
    "httptools:HttpRequestParser": "serve/http/connection.py",
    "redis:exceptions.NoScriptError": "redis/link.py",
    "concurrent.futures:_base._Waiter.add_cancelled": "future.py",
    "concurrent.futures:_base._Waiter.add_exception": "future.py",
    "concurrent.futures:_base._Waiter.add_result": "future.py",
    "concurrent.futures:_base.Future._invoke_callbacks": "future.py",
    "multiprocessing.reduction:DupFd": "workers/memory/shared_memory.py",
    "multiprocessing.spawn:get_executable": "workers/starting.py",
    "transformers:Pipeline.device_placement": "pipelines/generation.py",
    "transformers.pipelines.base:PipelineException": "pipelines/portable_errors.py",
    **{
        f"transformers.generation.utils:{name}": "pipelines/row_sampling.py"
        for name in (
            "GenerationMixin._prepare_generation_config",
            "GenerationMixin._prepare_special_tokens",
            "GenerationMixin._supports_logits_to_keep",
        )
    },
    **{
        f"transformers.generation.continuous_batching.continuous_api:{name}": "pipelines/paged.py"
        for name in (
            "ContinuousBatchingManager._create_batch_processor",
            "ContinuousBatchProcessor.prepare_next_batch",
            "ContinuousBatchProcessor._generation_step",
            "ContinuousBatchProcessor.update_batch",
            "ContinuousBatchProcessor.reset",
        )
    },
}  # fmt: skip


def found(place: str) -> Any:
    """What a "package.module:name" names."""
    module, _, names = place.partition(":")
    return reduce(getattr, names.split("."), importlib.import_module(module))


@pytest.mark.parametrize("place", CALLED)
def test_what_is_called_is_there(place: str) -> None:
    assert callable(found(place)), f"adapt service_streamer/{CALLED[place]}"


def test_versions_have_upper_bounds() -> None:
    config = configparser.ConfigParser()
    config.read(Path(__file__).parent.parent / "setup.cfg")
    lines = "\n".join(config["options.extras_require"].values()).splitlines()
    bounded = {re.split(r"[<>=]", line)[0] for line in lines if "<" in line}
    assert bounded == BOUNDED


def test_multiprocessing() -> None:
    """workers/starting.py, workers/memory/shared_memory.py and the engine's end."""
    process: Any = multiprocessing.process
    assert isinstance(found("multiprocessing.process:_current_process._config"), dict)
    assert issubclass(process.AuthenticationString, bytes)
    assert isinstance(process.ORIGINAL_DIR, str)
