"""Programs of 0.1.2 run unchanged, or docs/upgrading.md says what is new; it is complete."""

from __future__ import annotations

import inspect
import re
import sys
import threading
import types
from pathlib import Path
from typing import Any

import pytest

import models
import service_streamer
from serve_process import python
from service_streamer import (
    ManagedModel,
    PredictTimeout,
    RedisStreamer,
    RedisWorker,
    ThreadedStreamer,
    run_redis_workers_forever,
)
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
            if name == "run_redis_workers_forever":  # it takes two orders, see below
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


@pytest.fixture(autouse=True)
def _as_in_applications() -> None:
    """With the timeout of the library, and not with that of its tests."""
    service_streamer.service_streamer.WORKER_TIMEOUT = 20


def test_the_module_has_the_names_of_the_old_one() -> None:
    from service_streamer import service_streamer as old
    from service_streamer.service_streamer import ManagedModel, Streamer, ThreadedStreamer

    assert (Streamer, ThreadedStreamer) == (
        service_streamer.Streamer,
        service_streamer.ThreadedStreamer,
    )
    assert ManagedModel is service_streamer.ManagedModel
    assert old.run_redis_workers_forever is run_redis_workers_forever
    assert old.Future is service_streamer.Future
    assert (old.TIMEOUT, old.TIME_SLEEP, old.WORKER_TIMEOUT) == (1, 0.001, 20)
    assert set(old.__all__) <= set(dir(old))


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("ThreadedWorker", "ThreadedStreamer"),
        ("_RedisClient", "public names"),
        ("mp", "mp_start"),
        ("nothing", r"has no attribute 'nothing'$"),
    ],
)
def test_what_was_internal_says_what_to_use(name: str, instead: str) -> None:
    with pytest.raises(AttributeError, match=instead):
        getattr(service_streamer.service_streamer, name)


def test_importing_the_package_is_enough_to_reach_the_module() -> None:
    program = (
        "import service_streamer\n"
        "service_streamer.service_streamer.WORKER_TIMEOUT = 7200\n"
        "from service_streamer.service_streamer import WORKER_TIMEOUT\n"
        "print(WORKER_TIMEOUT)\n"
    )
    done = python("-c", program)
    assert (done.stdout, done.stderr) == ("7200.0\n", "")


@pytest.mark.parametrize("is_first", [True, False], ids=["set, then built", "built, then set"])
def test_worker_timeout_is_how_long_predict_waits(is_first: bool) -> None:
    module = service_streamer.service_streamer
    may_go_on = threading.Event()

    def model(batch: list[int]) -> list[int]:
        may_go_on.wait()
        return batch

    if is_first:
        module.WORKER_TIMEOUT = 0.01
    with ThreadedStreamer(model) as streamer:
        module.WORKER_TIMEOUT = 0.01
        with pytest.raises(PredictTimeout, match=r"no result within 0\.01 s"):
            streamer.predict([1])
        may_go_on.set()


def test_a_streamers_own_timeout_counts_more() -> None:
    def slow(batch: list[int]) -> list[int]:
        threading.Event().wait(0.05)
        return batch

    service_streamer.service_streamer.WORKER_TIMEOUT = 0.01
    for timeout in (600, None):
        with ThreadedStreamer(slow, worker_timeout=timeout) as streamer:
            assert streamer.predict([1]) == [1]


def test_redis_streamers_have_the_timeout_of_the_module_too(redis_server: str, prefix: str) -> None:
    service_streamer.service_streamer.WORKER_TIMEOUT = 0.01
    with (
        RedisStreamer(redis_server, prefix) as streamer,
        pytest.raises(PredictTimeout, match=r"0\.01"),
    ):
        streamer.predict([1])


@pytest.mark.parametrize("wrong", ["7200", -1, 0, float("nan")])
def test_a_wrong_one_is_refused_where_it_is_set(wrong: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="WORKER_TIMEOUT must be"):
        service_streamer.service_streamer.WORKER_TIMEOUT = wrong


@pytest.mark.parametrize(
    "arguments",
    [
        {"model_class": models.Multiplier, "model_init_args": [3], "model_init_kwargs": {"x": 1}},
        (models.Multiplier, 64, 0.1, 1, None, "localhost:6379", "", [3], {"x": 1}),
        (models.Multiplier, 64, 0.1, 1, None, "localhost:6379", "", "spawn", [3], {"x": 1}),
    ],
    ids=["by name", "in the order of 0.1.2", "in the order of its last commit"],
)
def test_arguments_of_run_redis_workers(arguments: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[dict[str, Any]] = []
    signature = inspect.signature(RedisWorker)

    def record(_: RedisWorker, *args: Any, **kwargs: Any) -> None:
        made.append({**signature.bind(*args, **kwargs).arguments})

    monkeypatch.setattr(RedisWorker, "__init__", record)
    monkeypatch.setattr(RedisWorker, "run_forever", lambda _, __=None: None)
    if isinstance(arguments, dict):
        run_redis_workers_forever(**arguments)
    else:
        run_redis_workers_forever(*arguments)
    (host,) = made
    assert host["model_class"] is models.Multiplier
    assert (host["model_init_args"], host["model_init_kwargs"]) == ([3], {"x": 1})
    assert host.get("mp_start_method", "spawn") == "spawn"
