"""docs/upgrading.md is complete, and what it says is so."""

from __future__ import annotations

import inspect
import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest

import service_streamer
from service_streamer import RedisStreamer, ThreadedStreamer
from service_streamer.service_streamer import _GONE

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "upgrading.md").read_text()

#: Every public name of the package and its module in 0.1.2, of its classes, and of arguments.
OLD_NAMES = re.findall(
    r"\w+",
    """
ThreadedStreamer predict_function batch_size max_latency Streamer predict_function_or_model
worker_num cuda_devices model_init_args model_init_kwargs predict submit result done destroy_workers
ManagedModel init_model set_gpu_id gpu_id model RedisStreamer redis_broker prefix RedisWorker
model_class run_forever run_redis_workers_forever WORKER_TIMEOUT TIMEOUT TIME_SLEEP mp
ThreadedWorker StreamWorker
""",
)


@pytest.mark.parametrize("name", OLD_NAMES)
def test_every_old_name_is_on_the_page(name: str) -> None:
    assert re.search(rf"`[^`]*\b{name}\b[^`]*`", PAGE), name


def test_what_is_gone_is_on_the_page() -> None:
    for name, instead in _GONE.items():
        assert re.search(rf"\b{name}\b", PAGE)
        assert instead.split()[-1] in PAGE


@pytest.mark.parametrize(
    "signature", re.findall(r"^\| `(\w+)\(([^`)]+)\)` ", PAGE, re.MULTILINE), ids=lambda s: s[0]
)
def test_signatures_on_the_page_are_those_of_the_code(signature: tuple[str, str]) -> None:
    name, arguments = signature
    parameters = inspect.signature(getattr(service_streamer, name)).parameters
    assert set(arguments.split(", ")) <= set(parameters)


def test_the_snippets_run(monkeypatch: pytest.MonkeyPatch) -> None:
    snippets = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(snippets) == 3
    model = types.SimpleNamespace(predict=lambda batch: [len(item) for item in batch])
    for snippet in snippets:
        names: dict[str, Any] = {"model": model, "inputs": ["a", "bc"]}
        try:
            exec(snippet, names)
            streamer = names.get("streamer")
            if isinstance(streamer, ThreadedStreamer):
                assert names["outputs"] == [1, 2]
            assert streamer is None or isinstance(streamer, ThreadedStreamer | RedisStreamer)
        finally:
            sys.modules["service_streamer.service_streamer"].WORKER_TIMEOUT = 20
            if "streamer" in names:
                names["streamer"].close()


def test_readme_links_to_it() -> None:
    assert "(docs/upgrading.md)" in (ROOT / "README.md").read_text()
