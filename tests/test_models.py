"""Which of several models a request is for, and what a file says of them."""

from __future__ import annotations

import asyncio
import functools
import gc
import weakref
from collections.abc import Callable
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from click.testing import CliRunner

import served_models
from service_streamer import ThreadedStreamer
from service_streamer.errors import StreamerClosed, WorkerStartError
from service_streamer.options.table import ServeOptions
from service_streamer.serve import fleet_models, launching, logs, plans
from service_streamer.serve.cli import main as cli
from service_streamer.serve.cli import model_tables
from service_streamer.serve.configuration import Configuration, NamedModel, changes
from service_streamer.serve.followed_models import FollowedModels
from service_streamer.serve.hosted_model import HostedModel, OpenedModel
from service_streamer.serve.http.admission import ServiceOptions
from service_streamer.serve.http.app import create_site
from service_streamer.serve.http.endpoint import ServiceCycle
from service_streamer.serve.http.models import Models, combined
from service_streamer.serve.http.operations import OPERATIONS
from service_streamer.serve.http.pages import Pages
from service_streamer.serve.http.refusals import Refusal
from service_streamer.serve.replacing import Replacer, restart_all
from stub_exchange import StubExchange

READY = ("ready", "the model answers")


def served(name: str, **about: Any) -> Any:
    """A service, as far as ``Models`` sees it."""
    standing = about.pop("standing", READY)
    usual = {
        "is_known": True, "failure": None, "pool": object(), "siblings": None,
        "is_draining": False, "is_retired": False,
    }  # fmt: skip
    return SimpleNamespace(model=name, standing=lambda: standing, **usual | about)


def models(*names: str) -> Models:
    return Models([served(name) for name in names], are_named=True)


@pytest.mark.parametrize(
    ("place", "name", "rest"),
    [
        ("a", "a", ""),
        ("a/predict", "a", "/predict"),
        ("a?x=1", "a", "?x=1"),
        ("a/b", "a/b", ""),
        ("a/b/predict", "a/b", "/predict"),
        ("a%2Fb/predict", "a/b", "/predict"),
        ("a/bc", "a", "/bc"),
        ("bert-base/info", "bert-base", "/info"),
        ("bert/info", "bert", "/info"),
        ("ab/predict", None, ""),
        ("", None, ""),
        ("/a", None, ""),
        ("a b/predict", None, ""),
    ],
)
def test_a_place_begins_with_the_longest_name(place: str, name: str | None, rest: str) -> None:
    found = models("a", "a/b", "bert", "bert-base").split(place)
    assert (None if found is None else (found[0].model, found[1])) == (name and (name, rest))


def test_an_unknown_model_is_refused_with_the_names_of_those_that_are_there() -> None:
    with pytest.raises(Refusal, match="no model 'c'; this service runs 'a', 'b'") as caught:
        models("a", "b").get("c")
    assert caught.value.status == 404
    many = models(*(f"m{i}" for i in range(100))).unknown("x" * 1000)
    assert len(str(many)) < 400
    assert str(many).endswith("'m19', others")


def test_a_model_takes_the_place_of_another_of_its_name() -> None:
    both = models("a", "b")
    before, after, new = both.get("a"), served("a"), served("c")
    assert both.put(after) is before
    assert (before.is_retired, after.is_retired, both.default) == (True, False, after)
    assert both.put(new) is None
    both.arrange(["c", "a"])
    assert [each.model for each in both] == ["c", "a", "b"]
    both.remove(new)
    assert (new.is_retired, both.default, both.number) == (True, after, 4)


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
    found = combined(dict(zip("abc", standings, strict=False)))
    assert found[0] == state
    assert found[1].startswith(text)


def test_at_its_start_a_service_waits_for_all_models_but_those_of_worker_hosts() -> None:
    def standing(*services: Any) -> tuple[str, str]:
        return Models(services).standing()

    loading = served("b", is_known=False, standing=LOADING)
    assert standing(served("a"), loading) == ("starting", "loading b")
    away = served("b", is_known=False, standing=LOADING, pool=None)
    assert standing(served("a"), away)[0] == "ready"
    broken = served("b", is_known=False, standing=BROKEN, failure=ValueError())
    assert standing(served("a"), broken)[0] == "ready"
    ending = served("a", is_draining=True, standing=("draining", ""))
    assert standing(ending, loading)[0] == "draining"


def test_who_waits_for_the_models_is_told_of_each_that_comes_or_goes() -> None:
    loading, again = (served("b", is_known=False, standing=LOADING) for _ in range(2))
    away = served("c", is_known=False, standing=LOADING, pool=None)
    some = Models([served("a"), loading, away])
    told: list[list[str]] = []
    some.on_change = lambda: told.append(some.loading)
    some.put(again)
    some.put(served("b"))
    some.put(loading)
    some.remove(loading)
    assert told == [["b"], [], ["b"], []]


SMALL, LARGE = ServeOptions(batch_size=1), ServeOptions(batch_size=64)


@pytest.mark.parametrize(
    ("before", "after", "failed", "removed", "loaded", "kept"),
    [
        ({"a": SMALL}, {"a": SMALL}, "", "", "", "a"),
        ({"a": SMALL}, {"a": LARGE}, "", "", "a", ""),
        ({"a": SMALL}, {"a": SMALL, "b": SMALL}, "", "", "b", "a"),
        ({"a": SMALL, "b": SMALL}, {"b": LARGE, "c": SMALL}, "", "a", "bc", ""),
        ({"a": SMALL}, {}, "", "a", "", ""),
        ({"a": SMALL, "b": SMALL}, {"a": SMALL, "b": SMALL}, "b", "", "b", "a"),
        ({"a": SMALL, "b": SMALL}, {"a": SMALL}, "b", "b", "", "a"),
    ],
)
def test_what_makes_one_configuration_of_another(
    before: Any, after: Any, failed: str, removed: str, loaded: str, kept: str
) -> None:
    models = [NamedModel(name, options) for name, options in after.items()]
    assert changes(before, models, failed) == ([*removed], [*loaded], [*kept])


def test_a_configuration_that_cannot_be_read_stays_as_it_was() -> None:
    def fail() -> Any:
        raise ValueError("no such file")

    configuration = Configuration([NamedModel("a", SMALL)], None, fail)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no such file"):
        configuration.reread()
    assert configuration.find("a") == ("a", SMALL)
    assert configuration.find("b") is None


# -- the file


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "service.toml"


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Configuration, ServeOptions]]:
    """What a command line would serve."""
    taken: list[tuple[Configuration, ServeOptions]] = []
    monkeypatch.setattr(launching, "launch", lambda *given: taken.append(given))
    monkeypatch.setattr(logs, "configure_logging", lambda *_, **__: None)  # of the whole process
    monkeypatch.setattr(cli, "hold_signals", lambda: None)
    return taken


def serve(path: Path, text: str, *arguments: str) -> str:
    """Why the command line refuses a file; empty if it does not."""
    path.write_text(text)
    done = CliRunner().invoke(
        cli.main, ["serve", "--config", str(path), *arguments], terminal_width=1000
    )
    assert "Traceback" not in done.output
    assert done.exit_code in (0, 2), done.output
    return done.output.partition("Error: ")[2].strip()


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


def test_tables_of_models_have_what_serve_says_unless_they_say_else(
    path: Path, launched: list[tuple[Configuration, ServeOptions]]
) -> None:
    assert serve(path, TWO, "--max-latency", "0.5") == ""
    [(configuration, options)] = launched
    assert (options.port, options.model, configuration.are_named) == (5000, None, True)
    (name, a), (other, b) = configuration.models
    assert (name, a.model, a.timeout, a.batch_size, a.worker_num) == ("a", None, 5.0, 16, 1)
    assert (other, b.model, b.timeout) == ("org/b", "served_models:Obedient", 30.0)
    assert (b.batch_size, b.worker_num, b.max_pending, b.max_latency) == (4, 2, 99, 0.5)


def test_a_file_is_read_again_with_the_line_above_it(
    path: Path, launched: list[tuple[Configuration, ServeOptions]]
) -> None:
    assert serve(path, TWO, "--max-latency", "0.5") == ""
    [(configuration, _)] = launched
    before = {each.name: each.options for each in configuration.models}
    configuration.reread()
    assert changes(before, configuration.models) == ([], [], ["a", "org/b"])
    text = TWO.replace("batch-size = 16", "max-latency = 0.1").replace("workers = 2", "workers = 3")
    path.write_text(text + '[[model]]\nname = "c"\nbatch-size = 7\n')
    configuration.reread()
    assert changes(before, configuration.models) == ([], ["a", "org/b", "c"], [])
    a, b, c = (each.options for each in configuration.models)
    assert (a.batch_size, a.max_latency) == (ServeOptions().batch_size, 0.5)
    assert (b.worker_num, c.batch_size, c.max_pending) == (3, 7, 99)
    for wrong in ("[serve]\n", "[serve", '[serve]\nmodel = "x"\n', TWO.replace('"a"', '"a b"')):
        path.write_text(wrong)
        with pytest.raises(ValueError, match=r"service\.toml|model"):
            configuration.reread()
    assert [each.name for each in configuration.models] == ["a", "org/b", "c"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[model]\nname = 'a'", "write [[model]] in two brackets, once for each model"),
        ("[[models]]\nname = 'a'", "[[models]] is unknown; the table of one of several models is"),
        ("[[model]]\nworkers = 2", '1 has no name; add a line such as name = "sentiment"'),
        ("[[model]]\nname = 5", "1 name: must be a string; not a whole number (5)"),
        ("[[model]]\nname = 'a b'", "1 name: 'a b' must consist of letters, digits and . _ - /"),
        ("[[model]]\nname = '../a'", "1 name: '../a' must consist of"),
        ("[[model]]\nname = 'a//b'", "1 name: 'a//b' must consist of"),
        ("[[model]]\nname = 'a'\n[[model]]\nname = 'a'", "2 name: there are two models 'a'"),
        ("[[model]]\nname = 'a'\n[[model]]\nname = 'a/predict'", "2 name: the requests of model "
         "'a' at .../predict would be those of model 'a/predict'; rename one"),
        ("[[model]]\nname = 'a/v1/b'\n[[model]]\nname = 'a'", "requests of model 'a' at .../v1/b"),
        ("[[model]]\nname = 'a'\nport = 1", "1 has 'port', which is not an option of model; it is "
         "one of serve: write it below [serve]"),
        ("[[model]]\nname = 'a'\napi-key = 'x'", "it is one of serve: write it below [serve]"),
        ("[[model]]\nname = 'a'\nbatchsize = 1", "did you mean batch-size?"),
        ("[[model]]\nname = 'a'\nbatch-size = 0", "1 batch-size: "),
        ("[[model]]\nname = 'a'\nbatch_size = 1\nbatch-size = 1", "is set twice"),
        ("[[model]]\nname = 'a'\nmodel = './nowhere'", "a: there is no model folder './nowhere'"),
        ("[[model]]\nname = 'a'\nmodel = 'x:Y'\ntask = 'fill-mask'", "a: --task has no effect on a "
         "model of your own"),
        ("[[model]]\nname = 'a'\nprefix = 'x'", "a: --prefix has no effect without --redis"),
        ("[[model]]\nname = 'a'\ntask = 'no-such'", "a: "),
        ("[serve]\nmodel = 'x:Y'\n[[model]]\nname = 'a'", "MODEL and the [[model]] tables of"),
    ],
)  # fmt: skip
def test_a_wrong_table_is_refused_with_its_place(
    path: Path, launched: list[Any], text: str, expected: str
) -> None:
    said = serve(path, text)
    assert "service.toml" in said
    assert expected in said
    assert not launched


def test_no_name_hides_a_path_of_another_model() -> None:
    model: Any = served("a", requests=None, options=None)
    pages = Pages(Models([model]), model, is_root=False).routes()
    paths = [getattr(each, "path", "") for each in pages] + [each.path for each in OPERATIONS]
    assert {path.split("/")[1] for path in paths} - {""} == model_tables._PLACES


def test_other_commands_leave_the_tables_alone(path: Path) -> None:
    path.write_text(TWO + "[simulate]\nseconds = 1\n")
    done = CliRunner().invoke(cli.main, ["simulate", "--config", str(path), "--rate", "10"])
    assert done.exit_code == 0, done.output


# -- what the names mean to the command line


def test_options_that_belong_to_the_web_process_are_none_of_a_model() -> None:
    from service_streamer.serve.cli.model_tables import model_command

    known = {each.name for each in model_command(cli.main.commands["serve"]).params}
    assert {"name", "model", "workers", "devices", "redis", "timeout", "max_pending"} < known
    assert not known & {"host", "port", "api_key", "web_workers", "max_body", "config"}


# -- restarts of several models


class Restarts:
    """Of models by name; some fail."""

    def __init__(self, **failures: Exception) -> None:
        self._failures = failures
        self.done: list[str] = []

    def of(self, *names: str) -> list[tuple[str, Callable[[], None]]]:
        return [(name, functools.partial(self._restart, name)) for name in names]

    def _restart(self, name: str) -> None:
        if name in self._failures:
            raise self._failures[name]
        self.done.append(name)


def test_a_model_that_is_unloaded_or_fails_keeps_no_other_from_its_restart(
    caplog: pytest.LogCaptureFixture,
) -> None:
    restarts = Restarts(gone=StreamerClosed("closed"), bad=WorkerStartError("no file"))
    restart_all(restarts.of("gone", "a", "bad", "b"))
    assert restarts.done == ["a", "b"]
    assert caplog.messages == ["model bad: the restart failed; its workers go on: no file"]
    restart_all([])
    with pytest.raises(WorkerStartError, match="no file"):
        restart_all(restarts.of("bad"))
    with pytest.raises(StreamerClosed):
        restart_all(restarts.of("bad", "gone"))


# -- in an event loop


def opened(**options: Any) -> OpenedModel:
    return OpenedModel(
        ThreadedStreamer(served_models.double, cache_size=10), ServiceOptions(model="m", **options)
    )


async def hosted() -> HostedModel:
    """A model that answers."""
    is_ready = asyncio.Event()
    model = HostedModel(opened(), is_ready.set, lambda _: None)
    model.start()
    await is_ready.wait()
    return model


def test_nothing_holds_a_model_that_was_replaced() -> None:
    async def main() -> None:
        all_ = [await hosted()]
        models = Models([all_[0].service])
        site = create_site(models)
        replacer = Replacer(models, all_)
        old: list[weakref.ref[Any]] = []
        for _ in range(3):
            old += [weakref.ref(models.default), weakref.ref(models.default.streamer)]
            await replacer.load("m", opened, ["m"])
            await replacer.finished()
            exchange: Any = StubExchange(body=b'{"inputs": 1}')
            exchange.method, exchange.target = b"POST", b"/predict"
            await site(exchange)
            assert exchange.status == 200
        gc.collect()
        assert [each() for each in old] == [None] * 6
        models.default.stop()
        all_[0].close()

    asyncio.run(main())


def test_a_model_that_is_loaded_while_the_service_ends_does_not_serve() -> None:
    async def main() -> None:
        all_ = [await hosted()]
        models = Models([all_[0].service])
        replacer = Replacer(models, all_)
        models.default.stop()
        with pytest.raises(Refusal, match="the service is stopping"):
            await replacer.load("m", opened, ["m"])
        await replacer.finished()
        assert models.standing()[0] == "draining"
        assert models.number == 0
        all_[0].close()

    asyncio.run(main())


@pytest.mark.parametrize(("headers", "seconds"), [((), 60.0), (((b"x-request-timeout", b"7"),), 7)])
def test_a_request_that_names_its_model_has_the_timeout_of_that_one(
    headers: Any, seconds: float
) -> None:
    async def main() -> None:
        first, named = await hosted(), await hosted()
        named.service.options = ServiceOptions(model="n", timeout=60.0)
        cycle = ServiceCycle(first.service, StubExchange(headers))
        cycle.check()
        assert cycle.timeout == min(first.service.options.timeout, seconds)
        cycle.turn_to(named.service)
        assert cycle.timeout == seconds
        cycle.hasten(5.0, 0)  # as gRPC does for its clients' deadlines, before a message names one
        cycle.turn_to(named.service)
        assert cycle.timeout == 5.0
        for each in (first, named):
            each.service.stop()
            each.close()

    asyncio.run(main())


def test_a_web_process_that_hangs_holds_up_no_change(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(fleet_models, "_GRACE", 0)
    options = ServeOptions(redis_broker="redis://nowhere", timeout=0.01, web_workers=2)
    before, after = NamedModel("a", options), NamedModel("b", options)
    configuration = Configuration([before], None, lambda: [after, before])  # type: ignore[arg-type]
    sent: list[Any] = []
    link: Any = SimpleNamespace(send=sent.append, close=lambda: None)
    with fleet_models.FleetModels(configuration, options, None, None) as models:  # type: ignore[arg-type]
        models.attach(1, link, 0)
        models.renew()
    assert [each.named.name for each in models.plan.models] == ["b", "a"]
    assert sent[-1] == models.plan
    assert "web process 1 has not followed a change of the models" in caplog.text


def test_a_restarted_web_process_gets_no_answer_to_a_wish_of_the_one_before() -> None:
    """Its own wishes have the same numbers."""
    options = ServeOptions(redis_broker="redis://nowhere", web_workers=2)
    configuration = Configuration([NamedModel("a", options)], None)  # type: ignore[arg-type]
    sent: list[Any] = []
    dead: Any = SimpleNamespace(close=lambda: None, send=sent.append)
    link: Any = SimpleNamespace(close=lambda: None, send=sent.append)
    with fleet_models.FleetModels(configuration, options, None, None) as models:  # type: ignore[arg-type]
        models.attach(0, dead, 0)
        models.detach(0)
        models.attach(0, link, 0)
        sent.clear()
        models._grant(dead, plans.Wish(0, "unload", "a"))
        assert sent == []
        models._grant(link, plans.Wish(0, "unload", "a"))
    assert sent == [plans.WishAnswer(0, "last", "a")]


def test_a_web_process_whose_parent_is_gone_need_not_tell_it() -> None:
    async def follow() -> None:
        ours, parents = Pipe()
        with ours:
            plan = plans.Plan(cast("Any", None), (), (), are_named=False, number=1, directory="")
            followed = FollowedModels(cast("Any", None), [], plan, ours)
            parents.close()
            await followed._follow(plan)
            asyncio.get_running_loop().remove_reader(ours.fileno())

    asyncio.run(follow())
