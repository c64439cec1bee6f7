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
from service_streamer import ManagedModel, RedisStreamer, ThreadedStreamer
from service_streamer.service_streamer import _GONE

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "upgrading.md").read_text()

#: Lines of a name and its arguments.
OLD_NAMES = [
    line.split()
    for line in (ROOT / "tests" / "golden" / "names_of_0.1.2.txt").read_text().splitlines()
    if not line.startswith("#")
]
NAMES = PAGE.partition("## Names")[2].partition("## Behaviour")[0]
#: Of the table: what was, with its arguments, and what is now.
ROWS = [
    (re.findall(r"`([\w./]+)(?:\(([^`)]*)\))?`", old), now)
    for old, now in re.findall(r"^\| (`.*?) \| (.*?) \| .*\|$", NAMES, re.MULTILINE)
    if "`" in old and now
]
NOW = {
    name: (arguments.replace(",", "").split(), now) for old, now in ROWS for name, arguments in old
}


class Model(ManagedModel):
    def init_model(self) -> None: ...


def found(name: str) -> Any:
    """What has this name today: of the package, or of the module that 0.1.2 had. An instance of a
    model has more attributes than its class."""
    first, _, attribute = name.partition(".")
    module = sys.modules["service_streamer.service_streamer"]
    value = Model() if name in ("ManagedModel.model", "ManagedModel.gpu_id") else None
    if value is None:
        value = getattr(module, first, None) or getattr(service_streamer, first)
    return getattr(value, attribute) if attribute else value


@pytest.mark.parametrize("line", OLD_NAMES, ids=lambda line: line[0])
def test_every_old_name_is_in_the_table(line: list[str]) -> None:
    name, *arguments = line
    written, now = NOW[name]
    assert written == arguments
    if now != "the same":
        return
    if "/" in name:
        assert (ROOT / name).exists()
    else:
        value = found(name)
        if arguments:
            names = [each for each in inspect.signature(value).parameters if each != "self"]
            if name == "run_redis_workers_forever":  # test_old_names.py has its orders
                names.remove("mp_start_method")
            assert names[: len(arguments)] == arguments


def test_the_table_has_no_other_names() -> None:
    assert NOW.keys() == {name for name, *_ in OLD_NAMES}


@pytest.mark.parametrize("now", sorted({now for _, now in NOW.values()} - {"the same", "gone"}))
def test_what_is_named_in_place_of_an_old_name_exists(now: str) -> None:
    name, arguments = re.fullmatch(r"`([\w.]+)(?:\((.*)\))?`", now).groups()  # type: ignore[union-attr]
    if name == "logging.getLogger":
        assert arguments == f'"{service_streamer.__name__}"'
        return
    value = found(name)
    assert not arguments or arguments in inspect.signature(value).parameters


@pytest.mark.parametrize("name", [name for name, (_, now) in NOW.items() if now == "gone"])
def test_what_is_gone_is_gone(name: str) -> None:
    assert not hasattr(found(name.partition(".")[0]), name.partition(".")[2])


def test_what_is_gone_is_on_the_page() -> None:
    for name, instead in _GONE.items():
        assert re.search(rf"\b{name}\b", PAGE)
        assert instead.split()[-1] in PAGE


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
