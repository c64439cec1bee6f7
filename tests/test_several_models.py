"""A service of several models, as its users and its operator see it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from cases import long_cases
from serve_process import GatedServing, Serving, key_table, run, table, until
from tensor_clients import run_client

pytestmark = pytest.mark.xdist_group("several-models")

#: May do everything.
KEY = {"authorization": "Bearer secret"}
FLEET = ("--web-workers", "2")

#: What two models are that a test may replace.
ECHO, DOUBLE = table("a", "tensor_models:echo"), table("b", "served_models:double")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "service.toml"


def keys_beside(path: Path) -> str:
    keys = path.parent / "keys.toml"
    operator = key_table("operator", "secret", scopes=["compute", "metrics", "admin"])
    keys.write_text(operator + key_table("user", "user"))
    keys.chmod(0o600)
    return str(keys)


@pytest.fixture
def serve(path: Path) -> Iterator[Callable[..., GatedServing]]:
    """Starts services of a file with these tables; models wait at the gate if it is asked for."""
    with contextlib.ExitStack() as stack:

        def start(
            *tables: str, arguments: tuple[str, ...] = (), keys: bool = False, gated: bool = False
        ) -> Any:
            path.write_text("".join(tables))
            env = {"SERVICE_STREAMER_API_KEY_FILE": keys_beside(path)} if keys else {}
            options = ("--config", str(path), *arguments)
            service = (
                GatedServing(path.parent, *options, **env) if gated else Serving(*options, **env)
            )
            stack.enter_context(service)
            if arguments == FLEET:
                service.await_web_processes(2)
            return service

        yield start


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """Three models, and keys."""
    path = tmp_path_factory.mktemp("several") / "service.toml"
    path.write_text(
        table("a")
        + table("org/double", "served_models:double", "batch-size = 7\n")
        + '[[model]]\nname = "embed"\ntask = "feature-extraction"\ndevices = "cpu"\n'
    )
    keys = keys_beside(path)
    with Serving("--config", str(path), SERVICE_STREAMER_API_KEY_FILE=keys) as service:
        yield service


@pytest.fixture(scope="module", params=[(), *long_cases(("--debug",))], ids=["", "debug"])
def partial(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Serving]:
    """One of its two models cannot be loaded."""
    path = tmp_path_factory.mktemp("partial") / "service.toml"
    path.write_text(table("a") + table("bad", "served_models:NoSuch"))
    with Serving("--config", str(path), *request.param) as service:
        yield service


@pytest.fixture(scope="module", params=[(), *long_cases(FLEET)], ids=["", "fleet"])
def started(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[GatedServing]:
    """A service whose log is JSON."""
    path = tmp_path_factory.mktemp("changing") / "service.toml"
    path.write_text(ECHO + DOUBLE)
    arguments = ("--config", str(path), *request.param, "--log-format", "json")
    keys = keys_beside(path)
    with GatedServing(path.parent, *arguments, SERVICE_STREAMER_API_KEY_FILE=keys) as service:
        if request.param == FLEET:
            service.await_web_processes(2)
        yield service


@pytest.fixture
def changing(started: GatedServing) -> Iterator[GatedServing]:
    """A service whose models, ECHO and DOUBLE, the test may change, and the file that has them."""
    yield started
    started.gate.let_through(100)
    changed = (started.folder / "service.toml").read_text()
    write(started, ECHO, DOUBLE)
    ready = {name for name, state in states(started).items() if state == "READY"}
    if changed.startswith(ECHO + DOUBLE) and {"a", "b"} <= ready:
        for name in ready - {"a", "b"}:
            control(started, f"models/{name}/unload")
    else:
        follow(started)
    started.empty_gate()


def write(service: GatedServing, *tables: str) -> None:
    """Change the file of ``changing``."""
    (service.folder / "service.toml").write_text("".join(tables))


in_one_process = pytest.mark.parametrize("started", [()], ids=[""], indirect=True, scope="module")
in_a_fleet = pytest.mark.parametrize(
    "started", long_cases(FLEET), ids=["fleet"], indirect=True, scope="module"
)


def follow(service: Serving) -> None:
    """Have the service read its file again, and wait until it has followed it."""
    before = service.log().count("every worker has been replaced")
    service.process.send_signal(signal.SIGHUP)
    until(lambda: service.log().count("every worker has been replaced") > before)


def restart_web_process(service: Serving) -> None:
    """Kill a web process of a fleet, and wait until another has taken its place."""
    before = service.log().count("web process 0 is ready")
    victim, other = (
        re.findall(rf"web process {each} runs \(pid (\d+)\)", service.log())[-1] for each in "01"
    )
    os.kill(int(victim), signal.SIGKILL)
    until(lambda: service.log().count("web process 0 is ready") > before)
    assert f"web process 0 (pid {victim}) died" in service.log()
    assert Path(f"/proc/{other}").exists()


def of(model: str, path: str = "/predict") -> str:
    return f"/models/{model}{path}"


def asked(service: Serving, model: str, item: Any) -> tuple[int, Any]:
    answer = service.post(of(model), {"inputs": item}, **KEY)
    return answer.status_code, answer.json()


def get(service: Serving, path: str) -> Any:
    return service.client.get(path, headers=KEY).json()


def code(answer: httpx.Response) -> str:
    return str(answer.json()["error"]["code"])


def message(answer: httpx.Response) -> str:
    """Of an error in Triton's form."""
    return str(answer.json()["error"])


def test_each_model_has_the_paths_of_a_service_of_its_own(service: Serving) -> None:
    def requests(model: str) -> int:
        return int(get(service, of(model, "/stats"))["totals"]["requests"])

    client, names = service.client, ["a", "org/double", "embed"]
    before = {name: requests(name) for name in names}
    assert service.predict("x", **KEY).json() == "x"
    assert asked(service, "a", "x") == (200, "x")
    assert {name: requests(name) for name in names} == before | {"a": before["a"] + 2}
    assert asked(service, "org/double", 21) == (200, 42)
    assert asked(service, "org%2Fdouble", 21) == (200, 42)
    ready = client.get("/health/ready").json()
    assert ready["detail"] == "3 models answer"
    assert ready["models"] == dict.fromkeys(names, "ready")
    assert client.get(of("embed", "/health/ready")).json()["detail"] == "the model answers"
    info = client.get(of("org/double", "/info")).json()
    assert (info["model"], info["batch_size"], info["models"]) == ("org/double", 7, names)
    assert client.get("/info").json()["model"] == "a"
    assert client.get(of("embed", "/openapi.json")).json()["info"]["title"] == "embed"
    moved = client.get(of("embed", ""))
    assert (moved.status_code, moved.headers["location"]) == (307, "./embed/")
    assert client.get(of("org/double", "/")).headers["content-type"].startswith("text/html")
    assert client.get(of("org/double", "/static/app.js")).status_code == 200
    metrics = client.get("/metrics", headers=KEY).text
    for name in names:
        assert f'service_streamer_ready{{model="{name}"}} 1.0' in metrics
        assert re.search(rf'service_streamer_workers{{model="{name}",state="idle"}} 1\.0', metrics)


def test_lines_as_json_have_the_model_in_a_field(changing: GatedServing) -> None:
    until(lambda: changing.log().count("worker 0 is ready") >= 2)
    lines = [*map(json.loads, changing.log().splitlines())]
    assert all({"time", "level", "logger"} <= line.keys() for line in lines)
    models = {(line["message"], line.get("model")) for line in lines}
    assert {("worker 0 is ready", "a"), ("worker 0 is ready", "b")} <= models
    assert {model for text, model in models if text.startswith("waiting for")} <= {None}


def test_an_unknown_model_is_404_wherever_it_is_named(service: Serving) -> None:
    """Names in paths of other models, and OpenAI's client, have tests of their own."""
    for path, expected in (
        (of("nope", "/info"), "model_not_found"),
        (of("a", "/nowhere"), "not_found"),
        (of("a"), "method_not_allowed"),
    ):
        assert get(service, path)["error"]["code"] == expected, path
    for body, status, expected in (
        ({}, 400, "missing_required_parameter"),
        ({"model": "org/double"}, 404, "unsupported_operation"),
    ):
        answer = service.post("/v1/completions", {"prompt": "x", **body}, **KEY)
        assert (answer.status_code, code(answer)) == (status, expected)


def test_openais_client_chooses_a_model_by_its_name(service: Serving) -> None:
    import openai  # takes a second

    def requests(model: str, status: int) -> float:
        series = f'requests_total{{model="{model}",path="/v1/embeddings",status="{status}"}} '
        _, _, rest = service.client.get("/metrics", headers=KEY).text.partition(series)
        return float(rest.partition("\n")[0] or 0)

    before = requests("embed", 200), requests("a", 404)
    with openai.OpenAI(base_url=f"{service.url}/v1", api_key="secret", max_retries=0) as client:
        assert {each.id for each in client.models.list()} == {"a", "org/double", "embed"}
        answer = client.embeddings.create(model="embed", input="a text")
        assert (answer.model, len(answer.data)) == ("embed", 1)
        assert client.models.retrieve("org/double").id == "org/double"
        with pytest.raises(openai.NotFoundError, match="'org/nope'"):
            client.models.retrieve("org/nope")
        with pytest.raises(openai.NotFoundError, match="'nope'"):
            client.embeddings.create(model="nope", input="a text")
    assert (requests("embed", 200), requests("a", 404)) == (before[0] + 1, before[1] + 1)
    text = service.client.get("/metrics", headers=KEY).text
    assert 'open_requests{model="a"} 0.0' in text


def test_a_broken_model_leaves_the_others(partial: Serving, request: pytest.FixtureRequest) -> None:
    assert "serving 1 of 2 models" in partial.line
    assert asked(partial, "a", "x") == (200, "x")
    status, answer = asked(partial, "bad", "x")
    assert (status, answer["error"]["code"]) == (503, "unavailable")
    ready = partial.client.get("/health/ready")
    assert ready.status_code == 200
    assert ready.json()["models"] == {"a": "ready", "bad": "broken"}
    assert partial.client.get(of("bad", "/health/ready")).status_code == 503
    assert re.search("model bad is not served: .*NoSuch", partial.log())
    places = ("/health/ready", "/stats", "/predict", "/v2/models/bad", "/v2/models/bad/ready")
    texts = [partial.client.get(of("bad", each) if each[1] != "v" else each) for each in places]
    texts += [ready, partial.post(of("bad"), {"inputs": "x"})]
    shown = {"NoSuch" in each.text for each in texts if each.status_code != 405}
    assert shown == {"debug" in request.node.name}, "only with --debug"
    partial.process.send_signal(signal.SIGUSR1)
    until(lambda: re.search("bad: broken: .*NoSuch", partial.log()))


def test_a_body_has_the_timeout_of_its_model(serve: Callable[..., Serving]) -> None:
    service = serve(table("a", more="timeout = 0.2\n"), table("b", more="timeout = 200\n"))

    def begin(path: bytes) -> socket.socket:
        """Send the head of a request, and wait until its body is waited for."""
        connection = stack.enter_context(service.connect())
        connection.sendall(
            b"POST %b HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nConnection: close\r\n"
            b"Content-Length: 28\r\n\r\n" % path
        )
        assert connection.recv(100).startswith(b"HTTP/1.1 100")
        return connection

    with contextlib.ExitStack() as stack:
        named, late = begin(b"/v1/completions"), begin(b"/models/a/predict")
        assert late.recv(1 << 16).startswith(b"HTTP/1.1 408"), "so the time of model a is over"
        named.sendall(b'{"model": "b", "prompt": ""}')
        answer = named.recv(1 << 16)
    assert answer.startswith(b"HTTP/1.1 404")
    assert b"unsupported_operation" in answer


def test_without_any_model_the_service_ends(path: Path) -> None:
    path.write_text(table("a", "served_models:NoSuch") + table("b", "served_models:NoSuch"))
    done = run("serve", "--config", str(path), "--port", "0")
    assert done.returncode == 3
    assert "the model could not be loaded" in done.stderr


def control(service: Serving, what: str, body: Any = None, **headers: str) -> httpx.Response:
    return service.post(f"/v2/repository/{what}", {} if body is None else body, **headers or KEY)


def states(service: Serving) -> dict[str, str]:
    return {each["name"]: each["state"] for each in control(service, "index").json()}


@in_one_process
def test_models_are_loaded_and_unloaded_with_a_key(changing: GatedServing) -> None:
    assert states(changing) == {"a": "READY", "b": "READY"}
    for key, status, says in (("wrong", 401, "wrong API key"), ("user", 403, "scope")):
        index = control(changing, "index", authorization=f"Bearer {key}")
        assert index.status_code == (200 if key == "user" else 401), "any key may read it"
        for what in ("models/a/load", "models/a/unload"):
            answer = control(changing, what, authorization=f"Bearer {key}")
            assert (answer.status_code, says in message(answer)) == (status, True)
    assert control(changing, "models/b/unload").status_code == 200
    assert states(changing) == {"a": "READY", "b": "UNAVAILABLE"}
    assert [each["name"] for each in control(changing, "index", {"ready": True}).json()] == ["a"]
    assert asked(changing, "b", 1)[0] == 404
    assert control(changing, "models/a/unload").status_code == 409, "the last one"
    assert control(changing, "models/b/load").status_code == 200
    write(changing, ECHO, DOUBLE, table("c", "served_models:double"))
    assert control(changing, "models/c/load", b"").status_code == 200
    assert asked(changing, "c", 4) == (200, 8)
    assert states(changing) == dict.fromkeys("abc", "READY")


@in_one_process
def test_tritons_client_loads_and_unloads(changing: GatedServing) -> None:
    address = changing.url.removeprefix("http://")
    assert run_client("repository", address, "secret") == "a b\na False\na b True\n"


@pytest.mark.parametrize(
    ("what", "body", "status", "text"),
    [
        ("models/nope/load", {}, 404, "'nope'"),
        ("models/nope/unload", {}, 404, "'nope'"),
        ("models/a/load", b"{", 400, "JSON"),
        ("models/a/load", b" " * 70_000, 413, "65536"),
        ("models/a/load", {"parameters": {"config": "{}"}}, 400, "'config'"),
        ("models/a/load", {"what": 1}, 400, "`what`"),
        ("index", {"ready": "yes"}, 400, "ready"),
    ],
)
def test_a_wrong_change_is_refused_in_tritons_form(
    service: Serving, what: str, body: Any, status: int, text: str
) -> None:
    answer = control(service, what, body)
    assert (answer.status_code, list(answer.json())) == (status, ["error"])
    assert text in message(answer)


def test_a_client_that_leaves_within_a_request_is_no_error(service: Serving) -> None:
    def left() -> int:
        return int(get(service, "/stats")["totals"]["disconnected"])

    before, logged = left(), len(service.log())
    with service.connect() as connection:
        connection.sendall(
            b"POST /v2/repository/index HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\n"
            b"Authorization: Bearer secret\r\nContent-Length: 9\r\n\r\n"
        )
        assert connection.recv(100).startswith(b"HTTP/1.1 100"), "it is waited for"
    until(lambda: left() == before + 1)
    assert "Traceback" not in service.log()[logged:]


@pytest.mark.parametrize("partial", [()], ids=[""], indirect=True, scope="module")
def test_a_service_without_keys_changes_no_model(partial: Serving) -> None:
    answer = control(partial, "models/a/unload")
    assert (answer.status_code, "SIGHUP" in message(answer)) == (403, True)
    assert "a" in states(partial)
    assert asked(partial, "a", 1) == (200, 1)


@in_one_process
def test_a_load_that_fails_leaves_the_old_model(changing: GatedServing) -> None:
    write(changing, table("a", "served_models:NoSuch"), DOUBLE)
    failed = control(changing, "models/a/load")
    assert (failed.status_code, "NoSuch" in message(failed)) == (400, True)
    write(changing, "[[model]")
    unreadable = control(changing, "models/a/load")
    assert (unreadable.status_code, "service.toml" in message(unreadable)) == (400, True)
    assert asked(changing, "a", 1) == (200, 1)


@in_one_process
def test_open_requests_of_a_replaced_model_are_answered(changing: GatedServing) -> None:
    write(changing, table("a"), DOUBLE)  # whose "a" waits at the gate
    assert control(changing, "models/a/load").status_code == 200
    with ThreadPoolExecutor(1) as threads:
        waits = threads.submit(asked, changing, "a", 1)
        changing.gate.await_arrival()
        assert control(changing, "models/a/load").status_code == 200
        assert control(changing, "models/b/unload").status_code == 200
        changing.gate.let_through(2)
        assert waits.result() == (200, 1)
    assert asked(changing, "a", 1) == (200, 1)
    until(lambda: len(changing.children()) <= 2)  # a worker, and the resource tracker


def test_a_load_that_hangs_is_given_up(changing: GatedServing) -> None:
    write(changing, ECHO, DOUBLE, table("late", "served_models:Late") + table("c"))
    logged = len(changing.log())
    with ThreadPoolExecutor(1) as threads:
        hangs = threads.submit(control, changing, "models/late/load")
        until(lambda: "loading model late" in changing.log()[logged:])
        until(lambda: control(changing, "models/late/unload").status_code == 200)
        failed = hangs.result()
    assert (failed.status_code, "unloaded" in message(failed)) == (400, True)
    assert control(changing, "models/c/load").status_code == 200


@pytest.mark.parametrize("arguments", [(), *long_cases(FLEET)])
def test_a_model_that_hangs_at_the_start_is_not_waited_for_once_it_is_unloaded(
    path: Path, arguments: tuple[str, ...]
) -> None:
    first, last = (table(name, "served_models:double") for name in "ac")
    path.write_text(first + table("late", "served_models:Late") + last)
    options = ("--config", str(path), *arguments)
    with GatedServing(path.parent, *options, ready=False) as service:
        service.gate.await_arrival()
        until(lambda: service.log().count("worker 0 is ready") == 2)
        path.write_text(first + last)
        service.process.send_signal(signal.SIGHUP)
        service.url = service.await_line()
        assert "serving 2 of 2 models" in service.line
        assert service.client.get("/health/ready").json()["detail"] == "2 models answer"
        assert asked(service, "c", 4) == (200, 8)


@in_one_process
def test_sighup_follows_the_file(changing: GatedServing) -> None:
    another = table("d", "served_models:double")
    tables = another, table("a", "tensor_models:echo", "batch-size = 3\n"), table("e", "x:Y")
    write(changing, *tables)
    follow(changing)
    assert asked(changing, "b", 1)[0] == 404
    assert asked(changing, "d", 4) == (200, 8)
    assert changing.predict(4, **KEY).json() == 8  # the first one of the file
    assert changing.client.get(of("a", "/info")).json()["batch_size"] == 3
    assert changing.client.get("/info").json()["models"] == ["d", "a"]
    failed = changing.log().count("model e cannot be loaded: ")
    assert failed
    write(changing, "[serve]\nport = 1\n")
    changing.process.send_signal(signal.SIGHUP)
    until(lambda: "SIGHUP: the models stay as they are: " in changing.log())
    assert asked(changing, "a", 1) == (200, 1)
    write(changing, *tables)
    follow(changing)
    assert changing.log().count("model e cannot be loaded: ") > failed, "it is tried again"
    write(changing, *tables[1::-1])
    logged = len(changing.log())
    follow(changing)
    assert changing.client.get("/info").json()["models"] == ["a", "d"]
    assert "loading model" not in changing.log()[logged:], "only their order has changed"


@in_a_fleet
def test_web_processes_share_the_workers_of_each_model(changing: GatedServing) -> None:
    def counted() -> tuple[float, int]:
        counts = re.findall(
            r'service_streamer_requests_total\{model="b",path="/predict",process="\d",'
            r'status="200"\} (\S+)', changing.client.get("/metrics", headers=KEY).text,
        )  # fmt: skip
        return sum(map(float, counts)), get(changing, of("b", "/stats"))["totals"]["answered"]

    requests, answered = counted()
    for _ in range(20):
        assert asked(changing, "b", 3) == (200, 6)
        assert asked(changing, "a", 3) == (200, 3)
    until(lambda: counted() == (requests + 20, answered + 20))


@in_a_fleet
def test_all_web_processes_follow_a_change(changing: GatedServing) -> None:
    def by_all(model: str, item: Any) -> set[Any]:
        answers = [asked(changing, model, item) for _ in range(20)]
        return {answer if status == 200 else status for status, answer in answers}

    until(lambda: len(changing.pool()) == 2)  # those of an earlier test may be ending
    first = changing.pool()
    write(changing, table("a", "served_models:double"), DOUBLE, table("c", "x:Y"))
    assert control(changing, "models/a/load").status_code == 200
    assert by_all("a", 4) == {8}
    assert control(changing, "models/b/unload").status_code == 200
    assert by_all("b", 4) == {404}
    assert states(changing) == {"a": "READY", "b": "UNAVAILABLE", "c": "UNAVAILABLE"}
    assert set(changing.pool()).isdisjoint(first)
    assert len(changing.pool()) == 1
    failed = control(changing, "models/c/load")
    assert (failed.status_code, "'c'" in message(failed)) == (400, True)
    assert control(changing, "models/nope/load").status_code == 404
    assert control(changing, "models/a/unload").status_code == 409
    write(changing, DOUBLE, ECHO)
    follow(changing)
    assert (by_all("a", 4), by_all("b", 4)) == ({4}, {8})
    assert changing.predict(4, **KEY).json() == 8  # b is the first one now
    assert len(changing.pool()) == 2


@in_a_fleet
def test_a_restarted_web_process_has_the_models_of_now_and_no_answer_to_an_older_wish(
    changing: GatedServing,
) -> None:
    """Its own wishes have the same numbers as those of the one before."""
    write(changing, ECHO, DOUBLE, table("c", "served_models:double"))
    assert control(changing, "models/c/load").status_code == 200
    write(changing, ECHO, DOUBLE, table("late", "served_models:Late"))
    stopped = int(re.findall(r"web process 1 runs \(pid (\d+)\)", changing.log())[-1])
    os.kill(stopped, signal.SIGSTOP)  # so web process 0 has the wishes
    try:
        with ThreadPoolExecutor(2) as threads:
            loads = threads.submit(control, changing, "models/late/load")
            changing.gate.await_arrival()
            restart_web_process(changing)
            unloads = threads.submit(control, changing, "models/nope/unload")
            os.kill(stopped, signal.SIGCONT)
            changing.gate.let_through(1)
            assert unloads.result().status_code == 404
            assert isinstance(loads.exception(), httpx.HTTPError)
    finally:
        os.kill(stopped, signal.SIGCONT)
    assert {asked(changing, "c", 4) for _ in range(20)} == {(200, 8)}


#: Paths of the root that are not those of one model.
SHARED = re.compile("/health|/metrics$|/v[12](/|$)")


def test_no_other_model_answers_for_the_first_one_while_that_is_unloaded(
    changing: GatedServing, request: pytest.FixtureRequest
) -> None:
    document = changing.client.get("/openapi.json").json()
    calls = [(way, place) for place, ways in document["paths"].items() for way in ways]
    of_one = [("get", "/"), ("get", "/docs"), ("get", "/openapi.json")]
    of_one += [(way, place) for way, place in calls if not SHARED.match(place)]
    assert {("post", "/predict"), ("post", "/"), ("get", "/info"), ("get", "/stats")} < {*of_one}

    def refuses(way: str, place: str) -> bool:
        answer = changing.client.request(way, place, json={"inputs": 4}, headers=KEY)
        return answer.status_code == 404 and f"{place} is for the model 'a'" in answer.text

    def answers() -> set[int]:
        return {changing.predict(4, **KEY).json() for _ in range(20)}

    assert control(changing, "models/a/unload").status_code == 200
    assert [each for each in of_one if not refuses(*each)] == []
    assert all(refuses("post", "/predict") for _ in range(20))
    assert asked(changing, "b", 4) == (200, 8)
    assert changing.client.get("/health/ready").status_code == 200
    named = changing.post("/v1/completions", {"model": "b", "prompt": "x"}, **KEY)
    assert code(named) == "unsupported_operation"
    write(changing, table("new", "x:Y"), ECHO, DOUBLE)
    assert control(changing, "models/new/load").status_code == 400
    assert control(changing, "models/b/load").status_code == 200
    assert refuses("post", "/predict"), "it is still the first one that was ever loaded"
    if "fleet" in request.node.name:
        restart_web_process(changing)
    assert all(refuses("post", "/predict") for _ in range(20))
    assert control(changing, "models/a/load").status_code == 200
    assert answers() == {4}
    write(changing, DOUBLE)
    follow(changing)
    assert answers() == {8}


@pytest.mark.long
def test_a_service_ends_while_a_replaced_model_ends(serve: Callable[..., GatedServing]) -> None:
    """SIGTERM comes when the old model has an open request: its pool has an owner to end, too."""
    service = serve(table("a"), table("b"), arguments=FLEET, keys=True, gated=True)
    with ThreadPoolExecutor(2) as threads:
        asks = threads.submit(asked, service, "a", 1)
        service.gate.await_arrival()
        loads = threads.submit(control, service, "models/a/load")
        until(lambda: service.log().count("model a is loaded") == 2)  # by the web processes
        service.process.send_signal(signal.SIGTERM)
        until(lambda: "still open" in service.log())
        service.gate.let_through(1)
        assert service.process.wait() == 0
        assert asks.result() == (200, 1)
        with contextlib.suppress(httpx.HTTPError):
            loads.result()
    assert service.pool() == []


@pytest.mark.parametrize("by_signal", [True, *long_cases(False)])
def test_a_change_that_is_cut_off_by_the_end_is_no_failure(
    serve: Callable[..., GatedServing], path: Path, by_signal: bool
) -> None:
    service = serve(table("a"), keys=True, gated=True)
    path.write_text(table("a") + table("late", "served_models:Late"))
    with ThreadPoolExecutor(1) as threads:
        if by_signal:
            service.process.send_signal(signal.SIGHUP)
        else:
            loads = threads.submit(control, service, "models/late/load")
        service.gate.await_arrival()
        assert service.terminate() == 0
        if not by_signal:
            answer = loads.result()
            assert (answer.status_code, "stopping" in message(answer)) == (503, True)
    assert "Traceback" not in service.log()


@pytest.mark.parametrize("arguments", [(), *long_cases(FLEET)])
def test_models_of_worker_hosts_follow_the_file_too(
    serve: Callable[..., Serving], path: Path, redis_server: str, arguments: tuple[str, ...]
) -> None:
    """No host is there. At the start they are not waited for, later only for a while."""

    def away(name: str) -> str:
        lines = (f'name = "{name}"', f'redis = "{redis_server}"', f'prefix = "{name}"')
        return "\n".join(("[[model]]", *lines, "timeout = 0.1\n"))

    service = serve(away("a"), table("org/here"), arguments=arguments)
    assert asked(service, "org/here", 1) == (200, 1)
    assert " INFO model org/here: worker 0 is ready\n" in service.log()
    assert not arguments or " model org/here: the web processes share pool " in service.log()
    path.write_text(away("a") + away("b") + table("org/here"))
    service.process.send_signal(signal.SIGHUP)
    until(lambda: "every worker has been replaced" in service.log())
    assert service.client.get("/info").json()["models"] == ["a", "b", "org/here"]
    path.write_text(away("a") + away("b"))
    service.process.send_signal(signal.SIGHUP)
    until(lambda: service.log().count("every worker has been replaced") == 2)
    path.write_text(away("b"))
    service.process.send_signal(signal.SIGHUP)
    until(lambda: service.client.get("/info").json()["models"] == ["b"])
    assert service.terminate() == 0
    assert " INFO model org/here: the workers have ended\n" in service.log()


@pytest.mark.parametrize("more", [(), *long_cases(FLEET)])
def test_lines_of_a_model_are_logged_as_those_of_the_service(
    serve: Callable[..., GatedServing], more: tuple[str, ...]
) -> None:
    pads = table("a", "preprocess_models:Pads", "preprocess-workers = 1\n")
    service = serve(pads, DOUBLE, arguments=("--log-format", "json", *more))
    assert service.of("a").predict(["b"]).status_code == 200
    assert service.terminate() == 0
    told = {each["message"]: each for each in map(json.loads, service.log().splitlines())}
    for message in ("loaded", "preprocessed"):
        del told[message]["time"]
        shown = {"level": "INFO", "logger": "preprocess_models", "model": "a", "message": message}
        assert told[message] == shown
