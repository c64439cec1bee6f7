"""Which of several models a request is for, and what a file says of them; whom an error tells."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

import served_models
from command_line import Launched, error_of, invoke, launched
from http_in_process import StubClient, in_event_loop, post
from service_streamer import StreamerClosed, ThreadedStreamer, WorkerStartError
from service_streamer.pipelines import TASKS
from service_streamer.serve.cli.main import ServeOptions
from service_streamer.serve.hosted_model import HostedModel, OpenedModel
from service_streamer.serve.http.app import Models, create_site
from service_streamer.serve.http.service import ServiceOptions
from service_streamer.serve.replacing import Replacer, restart_all
from web_application import WebApplication


@pytest.fixture(scope="module")
def several() -> Iterator[WebApplication]:
    """Models some of whose names begin with that of another, and many more."""
    names = ("a", "a/b", "bert", "bert-base", *(f"m{number}" for number in range(20)))
    with WebApplication(names=names) as application:
        yield application


@pytest.mark.parametrize(
    ("place", "name"),
    [
        ("a/info", "a"),
        ("a/info?x=1", "a"),
        ("a/b/info", "a/b"),
        ("a%2Fb/info", "a/b"),
        ("bert-base/info", "bert-base"),
        ("bert/info", "bert"),
        ("a/bc/info", "not_found"),
        ("ab/info", "model_not_found"),
        ("/a/info", "model_not_found"),
        ("a b/info", "model_not_found"),
        ("", "model_not_found"),
    ],
)
def test_a_path_names_the_model_with_the_longest_fitting_name(
    several: WebApplication, place: str, name: str
) -> None:
    answer = several.get(f"/models/{place}").json()
    assert answer.get("model", answer.get("error", {}).get("code")) == name


def test_an_unknown_model_is_refused_with_names_of_others(several: WebApplication) -> None:
    for name in ("c", "x" * 1000):
        response = several.post(f"/models/{name}/predict", {"inputs": 1})
        message = response.json()["error"]["message"]
        assert response.status_code == 404
        assert f"'{name[:50]}" in message
        assert "'a', 'a/b', 'bert'" in message
        assert len(message) < 400


def test_a_name_that_is_a_path_is_refused(several: WebApplication, tmp_path: Path) -> None:
    """The requests of a model "a" at /predict would be those of a model "a/predict"."""
    path = tmp_path / "service.toml"
    documented = {place.split("/")[1] for place in several.get("/openapi.json").json()["paths"]}
    assert {"predict", "v1", "info"} < documented
    for place in documented - {""} | {"docs", "openapi.json", "static", "events"}:
        path.write_text("".join(f'[[model]]\nname = "{name}"\n' for name in ("a", f"a/{place}")))
        assert f"'a/{place}'" in error_of("serve", "--config", str(path))


READY = ("ready", "the model answers")
LOADING = ("starting", "the model is loading")
BROKEN = ("broken", "the model is not running: no file")


@pytest.mark.parametrize(
    ("standings", "state", "text"),
    [
        ([READY], "ready", "the model answers"),
        ([LOADING], *LOADING),
        ([READY, READY], "ready", "2 models answer"),
        ([READY, BROKEN], "ready", "1 of 2 models answer; b: the model is not running: no file"),
        ([LOADING, BROKEN], "starting", "a: the model is loading; b: the model is not running"),
        ([BROKEN, BROKEN], "broken", "a: the model is not running"),
        ([("draining", "it stops")] * 2, "draining", "a: it stops; b: it stops"),
        ([("failing", "no GPU"), BROKEN], "failing", "a: no GPU"),
    ],
)
def test_a_service_is_ready_as_long_as_one_of_its_models_is(
    standings: list[tuple[str, str]], state: str, text: str
) -> None:
    services: list[Any] = [
        SimpleNamespace(model=name, is_known=True, standing=lambda found=found: found)
        for name, found in zip("abc", standings, strict=False)
    ]
    found = Models(services).standing()
    assert found[0] == state
    assert found[1].startswith(text)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "service.toml"


TWO = """
[serve]
port = 5000
batch-size = 16
max-pending = 99

[[model]]
name = "a"
devices = "cpu"
timeout = 5

[[model]]
name = "org/b"
model = "served_models:Obedient"
workers = 2
batch-size = 4
"""


@pytest.fixture
def two(path: Path, monkeypatch: pytest.MonkeyPatch) -> Launched:
    """What is served by TWO, and a command line."""
    path.write_text(TWO)
    return launched(monkeypatch, "serve", "--config", str(path), "--max-latency", "0.5")


def test_tables_of_models_have_what_serve_says_unless_they_say_else(two: Launched) -> None:
    options = two.options
    assert (options.port, options.model, two.configuration.are_named) == (5000, None, True)
    (name, a), (other, b) = two.models
    assert (name, a.model, a.timeout, a.batch_size, a.worker_num) == ("a", None, 5.0, 16, 1)
    assert (other, b.model, b.timeout) == ("org/b", "served_models:Obedient", 30.0)
    assert (b.batch_size, b.worker_num, b.max_pending, b.max_latency) == (4, 2, 99, 0.5)


def test_a_file_is_read_again_with_the_command_line_above_it(two: Launched, path: Path) -> None:
    before = two.models
    two.configuration.reread()
    assert two.models == before
    text = TWO.replace("batch-size = 16", "max-latency = 0.1").replace("workers = 2", "workers = 3")
    path.write_text(text + '[[model]]\nname = "c"\nbatch-size = 7\n')
    two.configuration.reread()
    a, b, c = (each.options for each in two.models)
    assert (a.batch_size, a.max_latency) == (ServeOptions().batch_size, 0.5)
    assert (b.worker_num, c.batch_size, c.max_pending) == (3, 7, 99)
    for wrong in ("[serve]\n", "[serve", '[serve]\nmodel = "x"\n', TWO.replace('"a"', '"a b"')):
        path.write_text(wrong)
        with pytest.raises(ValueError, match=r"service\.toml|model"):
            two.configuration.reread()
    assert [each.name for each in two.models] == ["a", "org/b", "c"]


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("[model]\nname = 'a'", "[[model]]"),
        ("[[models]]\nname = 'a'", "[[models]]"),
        ("[[model]]\nworkers = 2", "1 has no name"),
        ("[[model]]\nname = 5", "1 name: must be a string"),
        ("[[model]]\nname = 'a b'", "'a b'"),
        ("[[model]]\nname = '../a'", "'../a'"),
        ("[[model]]\nname = 'a//b'", "'a//b'"),
        ("[[model]]\nname = 'a'\n[[model]]\nname = 'a'", "2 name: there are two models 'a'"),
        ("[[model]]\nname = 'a'\n[[model]]\nname = 'a/predict'", "'a/predict'"),
        ("[[model]]\nname = 'a/v1/b'\n[[model]]\nname = 'a'", "v1/b"),
        ("[[model]]\nname = 'a'\nport = 1", "[serve]"),
        ("[[model]]\nname = 'a'\napi-key = 'x'", "[serve]"),
        ("[[model]]\nname = 'a'\nbatchsize = 1", "batch-size?"),
        ("[[model]]\nname = 'a'\nbatch-size = 0", "1 batch-size"),
        ("[[model]]\nname = 'a'\nbatch_size = 1\nbatch-size = 1", "set twice"),
        ("[[model]]\nname = 'a'\nmodel = './nowhere'", "a: there is no model folder './nowhere'"),
        ("[[model]]\nname = 'a'\nmodel = 'x:Y'\ntask = 'fill-mask'", "--task"),
        ("[[model]]\nname = 'a'\nprefix = 'x'", "--prefix"),
        ("[[model]]\nname = 'a'\ntask = 'no-such'", "'no-such'"),
        ("[serve]\nmodel = 'x:Y'\n[[model]]\nname = 'a'", "MODEL"),
    ],
)
def test_a_wrong_table_is_refused_with_its_place(path: Path, text: str, word: str) -> None:
    path.write_text(text)
    error = error_of("serve", "--config", str(path))
    assert "service.toml" in error
    assert word in error


def test_other_commands_leave_the_tables_alone(path: Path) -> None:
    path.write_text(TWO + "[simulate]\nseconds = 1\n")
    assert invoke("simulate", "--config", str(path), "--rate", "10").exit_code == 0


def test_a_failing_model_keeps_no_other_from_restarts(caplog: pytest.LogCaptureFixture) -> None:
    gone = Mock(side_effect=StreamerClosed("closed"))
    bad = Mock(side_effect=WorkerStartError("no file"))
    a, b = Mock(), Mock()
    restart_all([("gone", gone), ("a", a), ("bad", bad), ("b", b)])
    assert (a.call_count, b.call_count) == (1, 1)
    [message] = caplog.messages
    assert "model bad" in message
    restart_all([])
    with pytest.raises(WorkerStartError, match="no file"):
        restart_all([("bad", bad)])
    with pytest.raises(StreamerClosed):
        restart_all([("bad", bad), ("gone", gone)])


def opened() -> OpenedModel:
    streamer = ThreadedStreamer(served_models.double, cache_size=10)
    return OpenedModel(streamer, ServiceOptions(model="m"))


async def replacing() -> tuple[Models, Replacer, list[HostedModel]]:
    """A model that answers, and may be replaced."""
    is_ready = asyncio.Event()
    hosted = [HostedModel(opened(), is_ready.set, lambda _: None)]
    hosted[0].start()
    await is_ready.wait()
    models = Models([hosted[0].service])
    return models, Replacer(models, hosted), hosted


@in_event_loop
async def test_nothing_holds_a_model_that_was_replaced() -> None:
    models, replacer, hosted = await replacing()
    site = create_site(models)
    old: list[weakref.ref[Any]] = []
    for _ in range(3):
        old += [weakref.ref(models.first), weakref.ref(models.first.streamer)]
        await replacer.load("m", opened)
        await replacer.finished()
        status, _ = await StubClient(site).ask(post(b'{"inputs": 1}', path=b"/predict"))
        assert status == 200
    gc.collect()
    assert [each() for each in old] == [None] * 6
    models.first.stop()
    hosted[0].close()


@in_event_loop
async def test_a_model_that_is_loaded_while_the_service_ends_does_not_serve() -> None:
    models, replacer, hosted = await replacing()
    models.first.stop()
    with pytest.raises(Exception, match="stopping"):
        await replacer.load("m", opened)
    await replacer.finished()
    assert (models.standing()[0], models.number) == ("draining", 0)
    hosted[0].close()


def test_document_is_made_anew_when_the_model_describes_itself_anew() -> None:
    def example() -> Any:
        post = application.get("/openapi.json").json()["paths"]["/predict"]["post"]
        return post["requestBody"]["content"]["application/json"].get("example")

    with WebApplication() as application:
        assert example() is None
        application.service.description = {"example": "x"}
        assert example() == {"inputs": "x"}


def objects_in(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        yield value
    for each in value.values() if isinstance(value, dict) else value:
        if isinstance(each, (dict, list)):
            yield from objects_in(each)


@pytest.mark.parametrize("task", TASKS)
def test_clients_can_be_generated_from_the_document(task: str) -> None:
    """Generators leave out what has an array of no type, and fail for "left" beside "Left"."""
    with WebApplication() as application:
        does = ["predict", "generate", "embed", "embed_all", "rerank", "tokenize", "decode"]
        application.service.description = {"task": task, "operations": does}
        document = application.get("/openapi.json").json()
    for each in objects_in(document):
        assert each.get("type") != "array" or "items" in each
        names = [name.lower() for name in each.get("enum", ()) if name is not None]
        assert len(names) == len({*names})
        for body in each.get("requestBody", {}).get("content", {}).values():
            assert "schema" in body


def test_innocent_request_is_asked_to_try_again() -> None:
    def predict(batch: list[Any]) -> list[Any]:
        raise ValueError(f"secret of {len(batch)}")

    def without_retries(model: Any) -> ThreadedStreamer:
        return ThreadedStreamer(model, retry=False)

    with WebApplication(predict, kind=without_retries) as application:

        async def ask_together() -> Any:
            return await asyncio.gather(
                *(application.send("/predict", {"inputs": n}) for n in "ab")
            )

        answers = application.run(ask_together())
    for told in answers:
        assert told.status_code == 503
        assert told.headers["retry-after"] == "1"
        assert "ValueError" not in told.text
