"""A service of several models, as its users and its operator see it."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import re
import signal
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

import minilm
from serve_process import Serving, run, until
from service_streamer.testing import Gate
from tensor_clients import run_client

#: May do everything.
KEY = {"authorization": "Bearer secret"}
HASHED = f"""
[operator]
hash = "sha256:{hashlib.sha256(b"secret").hexdigest()}"
scopes = ["compute", "metrics", "admin"]
"""

FLEET = ("--web-workers", "2")

TABLE = """
[[model]]
name = "{name}"
model = "{target}"
devices = "cpu"
"""


def table(name: str, target: str = "served_models:Obedient", more: str = "") -> str:
    return TABLE.format(name=name, target=target) + more


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "service.toml"


def keys_beside(path: Path) -> str:
    keys = path.parent / "keys.toml"
    keys.write_text(HASHED)
    keys.chmod(0o600)
    return str(keys)


@pytest.fixture
def serve(path: Path) -> Iterator[Callable[..., Serving]]:
    """Starts services of a file with these tables."""
    with contextlib.ExitStack() as stack:

        def start(
            *tables: str, arguments: tuple[str, ...] = (), keys: bool = False, **env: str
        ) -> Serving:
            path.write_text("".join(tables))
            if keys:
                env["SERVICE_STREAMER_API_KEY_FILE"] = keys_beside(path)
            service = Serving("--config", str(path), *arguments, **env)
            stack.enter_context(service)
            if arguments == FLEET:  # the first one is there
                until(lambda: "web process 1 is ready" in service.log())
            return service

        yield start


def of(model: str, path: str = "/predict") -> str:
    return f"/models/{model}{path}"


def asked(service: Serving, model: str, item: Any) -> tuple[int, Any]:
    answer = service.post(of(model), {"inputs": item})
    return answer.status_code, answer.json()


def code(answer: httpx.Response) -> str:
    return str(answer.json()["error"]["code"])


def test_each_model_has_the_paths_of_a_service_of_its_own(serve: Callable[..., Serving]) -> None:
    service = serve(
        table("a"), table("org/double", "served_models:double", "batch-size = 7\n"),
        '[[model]]\nname = "fill"\ndevices = "cpu"\n',
    )  # fmt: skip
    client = service.client
    assert service.predict("x").json() == "x"
    assert asked(service, "a", "x") == (200, "x")
    assert asked(service, "org/double", 21) == (200, 42)
    assert asked(service, "org%2Fdouble", 21) == (200, 42)
    ready = client.get("/health/ready").json()
    assert ready["detail"] == "3 models answer"
    assert ready["models"] == dict.fromkeys(("a", "org/double", "fill"), "ready")
    assert client.get(of("fill", "/health/ready")).json()["detail"] == "the model answers"
    info = client.get(of("org/double", "/info")).json()
    assert (info["model"], info["batch_size"]) == ("org/double", 7)
    assert info["models"] == ["a", "org/double", "fill"]
    assert client.get("/info").json()["model"] == "a"
    assert client.get(of("fill", "/openapi.json")).json()["info"]["title"] == "fill"
    assert client.get(of("fill", "/stats")).json()["totals"]["requests"] == 0
    assert client.get(of("a", "/stats")).json()["totals"]["requests"] == 2
    moved = client.get(of("fill", ""))
    assert (moved.status_code, moved.headers["location"]) == (307, "fill/")
    assert client.get(of("org/double", "/")).headers["content-type"].startswith("text/html")
    assert client.get(of("org/double", "/static/app.js")).status_code == 200
    metrics = client.get("/metrics").text
    for name in ("a", "org/double", "fill"):
        assert f'service_streamer_ready{{model="{name}"}} 1.0' in metrics
        assert re.search(rf'service_streamer_workers{{model="{name}",state="idle"}} 1\.0', metrics)


@pytest.mark.parametrize("arguments", [(), FLEET])
def test_lines_about_workers_name_their_model(
    serve: Callable[..., Serving], arguments: tuple[str, ...]
) -> None:
    service = serve(table("a"), table("org/b"), arguments=arguments)
    until(lambda: service.log().count("worker 0 is ready") == 2)
    [line] = re.findall("INFO .*/b: worker.*", service.log())
    assert line == "INFO model org/b: worker 0 is ready"
    assert service.terminate() == 0
    until(lambda: service.log().count("the workers have ended") == 2)
    for name in ("a", "org/b"):
        assert f" INFO model {name}: worker 0 is ready\n" in service.log()
        assert f" INFO model {name}: the workers have ended\n" in service.log()
        assert not arguments or f" model {name}: the web processes share pool " in service.log()


@pytest.mark.parametrize("arguments", [(), ("--web-workers", "2")])
def test_as_json_they_have_its_name_in_a_field(
    serve: Callable[..., Serving], arguments: tuple[str, ...]
) -> None:
    service = serve(table("a"), arguments=(*arguments, "--log-format", "json"))
    until(lambda: "worker 0 is ready" in service.log())
    models = {
        each["message"]: each.get("model") for each in map(json.loads, service.log().splitlines())
    }
    assert models["worker 0 is ready"] == "a"
    assert [each for each in models if each.startswith("waiting for") and models[each]] == []


@pytest.mark.parametrize("arguments", [(), FLEET])
def test_lines_of_the_only_model_do_not_name_it(arguments: tuple[str, ...]) -> None:
    with Serving("served_models:Obedient", *arguments) as service:
        until(lambda: " INFO worker 0 is ready\n" in service.log())


def test_an_unknown_model_is_404_wherever_it_is_named(serve: Callable[..., Serving]) -> None:
    service = serve(table("a"), table("b"))
    for path in (of("nope"), of("nope", "/v1/embeddings"), of("ab", "/"), "/models//predict"):
        answer = service.post(path, {"inputs": "x"})
        assert (answer.status_code, code(answer)) == (404, "model_not_found"), path
    assert code(service.client.get(of("nope", "/info"))) == "model_not_found"
    assert code(service.client.get("/v1/models/nope")) == "model_not_found"
    assert code(service.client.get(of("a", "/nowhere"))) == "not_found"
    assert code(service.client.get(of("a"))) == "method_not_allowed"
    assert service.client.get("/v1/models/b").json()["id"] == "b"
    unknown = service.post("/v1/completions", {"model": "nope", "prompt": "x"})
    assert (unknown.status_code, code(unknown)) == (404, "model_not_found")
    unnamed = service.post("/v1/completions", {"prompt": "x"})
    assert (unnamed.status_code, code(unnamed)) == (400, "missing_required_parameter")
    other = service.post("/v1/completions", {"model": "b", "prompt": "x"})
    assert (other.status_code, code(other)) == (404, "unsupported_operation")


def test_openais_client_chooses_by_name(serve: Callable[..., Serving]) -> None:
    service = serve(
        table("a"), f'[[model]]\nname = "embed"\nmodel = "{minilm.find()}"\ndevices = "cpu"\n',
        keys=True,
    )  # fmt: skip
    with openai.OpenAI(base_url=f"{service.url}/v1", api_key="secret", max_retries=0) as client:
        assert {each.id for each in client.models.list()} == {"a", "embed"}
        answer = client.embeddings.create(model="embed", input="a text")
        assert (answer.model, len(answer.data[0].embedding)) == ("embed", 384)
        with pytest.raises(openai.NotFoundError, match="no model 'nope'"):
            client.embeddings.create(model="nope", input="a text")
    text = service.client.get("/metrics", headers=KEY).text
    assert 'requests_total{model="embed",path="/v1/embeddings",status="200"} 1.0' in text
    assert 'requests_total{model="a",path="/v1/embeddings",status="404"} 1.0' in text
    assert 'open_requests{model="a"} 0.0' in text


def test_a_model_that_cannot_be_loaded_takes_nobody_with_it(serve: Callable[..., Serving]) -> None:
    service = serve(table("a"), table("bad", "served_models:NoSuch"))
    assert "serving 1 of 2 models" in service.line
    assert asked(service, "a", "x") == (200, "x")
    status, answer = asked(service, "bad", "x")
    assert (status, answer["error"]["code"]) == (503, "unavailable")
    ready = service.client.get("/health/ready")
    assert ready.status_code == 200
    assert ready.json()["models"] == {"a": "ready", "bad": "broken"}
    assert "NoSuch" in ready.json()["detail"]
    assert service.client.get(of("bad", "/health/ready")).status_code == 503
    assert "model bad is not served: " in service.log()


def test_without_any_model_the_service_ends(path: Path) -> None:
    path.write_text(table("a", "served_models:NoSuch") + table("b", "served_models:NoSuch"))
    done = run("serve", "--config", str(path), "--port", "0")
    assert done.returncode == 3
    assert "the model could not be loaded" in done.stderr


def control(service: Serving, what: str, body: Any = None, **headers: str) -> httpx.Response:
    return service.post(f"/v2/repository/{what}", {} if body is None else body, **headers or KEY)


def states(service: Serving) -> dict[str, str]:
    return {each["name"]: each["state"] for each in control(service, "index").json()}


def test_models_are_loaded_and_unloaded_by_who_has_a_key(
    serve: Callable[..., Serving], path: Path
) -> None:
    service = serve(table("a"), table("b"), keys=True)
    assert states(service) == {"a": "READY", "b": "READY"}
    for what in ("index", "models/a/load", "models/a/unload"):
        answer = control(service, what, authorization="Bearer wrong")
        assert (answer.status_code, answer.json()["error"]) == (
            401, "wrong API key; send the service's key in the header Authorization: Bearer KEY"
        )  # fmt: skip
    assert control(service, "models/b/unload").status_code == 200
    assert states(service) == {"a": "READY", "b": "UNAVAILABLE"}
    assert [each["name"] for each in control(service, "index", {"ready": True}).json()] == ["a"]
    assert service.post(of("b"), {"inputs": 1}, **KEY).status_code == 404
    last = control(service, "models/a/unload")
    assert (last.status_code, "stop the service instead" in last.json()["error"]) == (409, True)
    assert control(service, "models/b/load").status_code == 200
    path.write_text(path.read_text() + table("c", "served_models:double"))
    assert control(service, "models/c/load", b"").status_code == 200
    assert service.post(of("c"), {"inputs": 4}, **KEY).json() == 8
    assert states(service) == dict.fromkeys("abc", "READY")


def test_tritons_client_loads_and_unloads(serve: Callable[..., Serving]) -> None:
    service = serve(table("a"), table("b"), keys=True)
    address = service.url.removeprefix("http://")
    assert run_client("repository", address, "secret") == "a b\na False\na b True\n"


@pytest.mark.parametrize(
    ("what", "body", "status", "text"),
    [
        ("models/nope/load", {}, 404, "no model 'nope'"),
        ("models/nope/unload", {}, 404, "no model 'nope'"),
        ("models/a/load", b"{", 400, "not valid JSON"),
        ("models/a/load", b" " * 70_000, 413, "exceeds 65536 bytes"),
        ("models/a/load", {"parameters": {"config": "{}"}}, 400, "'config' is not supported"),
        ("models/a/load", {"what": 1}, 400, "unknown field `what`"),
        ("index", {"ready": "yes"}, 400, "ready: expected bool"),
    ],
)
def test_what_cannot_be_done_is_refused_in_tritons_form(
    one: Serving, what: str, body: Any, status: int, text: str
) -> None:
    answer = control(one, what, body)
    assert (answer.status_code, list(answer.json())) == (status, ["error"])
    assert text in answer.json()["error"]


def test_who_leaves_within_a_request_is_no_bug_of_ours(one: Serving) -> None:
    def left() -> int:
        return int(one.client.get("/stats", headers=KEY).json()["totals"]["disconnected"])

    before = left()
    url = httpx.URL(one.url)
    with socket.create_connection((url.host, url.port)) as connection:
        connection.sendall(
            b"POST /v2/repository/index HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\n"
            b"Authorization: Bearer secret\r\nContent-Length: 9\r\n\r\n"
        )
        assert connection.recv(100).startswith(b"HTTP/1.1 100"), "it is waited for"
    until(lambda: left() == before + 1)
    assert "Traceback" not in one.log()


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    path = tmp_path_factory.mktemp("one") / "service.toml"
    path.write_text(table("a"))
    keys = keys_beside(path)
    with Serving("--config", str(path), SERVICE_STREAMER_API_KEY_FILE=keys) as service:
        yield service


def test_a_key_without_the_scope_neither_loads_nor_unloads(serve: Callable[..., Serving]) -> None:
    service = serve(table("a"), table("b"), SERVICE_STREAMER_API_KEY="secret")
    answer = control(service, "models/b/unload")
    assert (answer.status_code, "scope" in answer.json()["error"]) == (403, True)
    assert service.post(of("b"), {"inputs": 1}, **KEY).json() == 1


def test_without_keys_nobody_loads_or_unloads(serve: Callable[..., Serving]) -> None:
    service = serve(table("a"), table("b"))
    answer = control(service, "models/b/unload")
    assert answer.status_code == 403
    assert "change the file of --config and send SIGHUP" in answer.json()["error"]
    assert asked(service, "b", 1) == (200, 1)


def test_a_load_that_fails_leaves_the_old_model(serve: Callable[..., Serving], path: Path) -> None:
    service = serve(table("a"), table("b"), keys=True)
    path.write_text(table("a", "served_models:NoSuch") + table("b"))
    failed = control(service, "models/a/load")
    assert failed.status_code == 400
    assert "model 'a' cannot be loaded: " in failed.json()["error"]
    assert "NoSuch" in failed.json()["error"]
    path.write_text("[[model]")
    unreadable = control(service, "models/a/load")
    assert (unreadable.status_code, "cannot be read" in unreadable.json()["error"]) == (400, True)
    assert service.post(of("a"), {"inputs": 1}, **KEY).json() == 1


def test_open_requests_of_a_replaced_model_are_answered(
    serve: Callable[..., Serving], tmp_path: Path
) -> None:
    with contextlib.closing(Gate(tmp_path / "gate")) as gate:
        service = serve(
            table("a"),
            table("b"),
            keys=True,
            TEST_GATE=str(tmp_path / "gate"),
        )
        answers: list[int] = []

        def ask() -> None:
            answers.append(service.post(of("a"), {"inputs": 1}, **KEY).status_code)

        waits = threading.Thread(target=ask)
        waits.start()
        gate.await_arrival()
        assert control(service, "models/a/load").status_code == 200
        assert control(service, "models/b/unload").status_code == 200
        gate.let_through(2)
        waits.join()
        assert answers == [200]
        assert service.post(of("a"), {"inputs": 1}, **KEY).status_code == 200
        until(lambda: len(service.children()) <= 2)  # a worker, and the resource tracker


@pytest.mark.parametrize("arguments", [(), FLEET])
def test_a_load_that_hangs_is_given_up(
    serve: Callable[..., Serving], path: Path, tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    with contextlib.closing(Gate(tmp_path / "gate")) as gate:
        service = serve(
            table("a", "served_models:double"), arguments=arguments, keys=True,
            TEST_GATE=str(tmp_path / "gate"),
        )  # fmt: skip
        path.write_text(path.read_text() + table("late", "served_models:Late") + table("c"))
        failed: list[httpx.Response] = []
        hangs = threading.Thread(target=lambda: failed.append(control(service, "models/late/load")))
        hangs.start()
        until(lambda: "loading model late" in service.log())
        until(lambda: control(service, "models/late/unload").status_code == 200)
        hangs.join()
        assert failed[0].status_code == 400
        assert "it was unloaded while it was being loaded" in failed[0].json()["error"]
        assert control(service, "models/c/load").status_code == 200
        gate.let_through(9)


@pytest.mark.parametrize("arguments", [(), FLEET])
def test_a_model_that_hangs_at_the_start_is_not_waited_for_once_it_is_unloaded(
    path: Path, tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    first, last = (table(name, "served_models:double") for name in "ac")
    path.write_text(first + table("late", "served_models:Late") + last)
    with (
        contextlib.closing(Gate(tmp_path / "gate")) as gate,
        Serving(
            "--config", str(path), *arguments, ready=False, TEST_GATE=str(tmp_path / "gate")
        ) as service,
    ):
        gate.await_arrival()
        until(lambda: service.log().count("worker 0 is ready") == 2)
        path.write_text(first + last)
        service.process.send_signal(signal.SIGHUP)
        service.url = service.await_line()
        assert "serving 2 of 2 models" in service.line
        assert service.client.get("/health/ready").json()["detail"] == "2 models answer"
        assert asked(service, "c", 4) == (200, 8)


def test_sighup_follows_the_file(serve: Callable[..., Serving], path: Path) -> None:
    service = serve(table("a"), table("b"), table("c", "served_models:NoSuch"))
    path.write_text(
        table("d", "served_models:double") + table("a", more="batch-size = 3\n") + table("e", "x:Y")
    )
    service.process.send_signal(signal.SIGHUP)
    until(lambda: asked(service, "b", 1)[0] == 404)
    assert asked(service, "d", 4) == (200, 8)
    assert service.predict(4).json() == 8  # the first one of the file
    assert service.client.get(of("a", "/info")).json()["batch_size"] == 3
    assert service.client.get("/info").json()["models"] == ["d", "a"]
    assert "model e cannot be loaded: " in service.log()
    path.write_text("[serve]\nport = 1\n")
    service.process.send_signal(signal.SIGHUP)
    until(lambda: "SIGHUP: the models stay as they are: " in service.log())
    assert asked(service, "a", 1) == (200, 1)


def test_web_processes_share_the_workers_of_each_model(serve: Callable[..., Serving]) -> None:
    service = serve(table("a"), table("b", "served_models:double"), arguments=FLEET)
    for _ in range(20):
        assert asked(service, "b", 3) == (200, 6)
        assert asked(service, "a", 3) == (200, 3)

    def counted() -> float:
        counts = re.findall(
            r'service_streamer_requests_total\{model="b",path="/predict",process="\d",'
            r'status="200"\} (\S+)', service.client.get("/metrics").text,
        )  # fmt: skip
        return sum(map(float, counts))

    until(lambda: counted() == 20)
    assert service.client.get(of("b", "/stats")).json()["totals"]["answered"] == 20


def test_all_web_processes_follow_a_change(serve: Callable[..., Serving], path: Path) -> None:
    service = serve(table("a"), table("b"), arguments=FLEET, keys=True)

    def by_all(model: str, item: Any) -> set[Any]:
        answers = [service.post(of(model), {"inputs": item}, **KEY) for _ in range(20)]
        return {each.json() if each.status_code == 200 else each.status_code for each in answers}

    first = service.pool()
    assert len(first) == 2
    path.write_text(table("a", "served_models:double") + table("b") + table("c", "x:Y"))
    assert control(service, "models/a/load").status_code == 200
    assert by_all("a", 4) == {8}
    assert control(service, "models/b/unload").status_code == 200
    assert by_all("b", 4) == {404}
    assert states(service) == {"a": "READY", "b": "UNAVAILABLE", "c": "UNAVAILABLE"}
    assert set(service.pool()).isdisjoint(first)
    assert len(service.pool()) == 1
    failed = control(service, "models/c/load")
    assert (failed.status_code, "model 'c' cannot be loaded" in failed.text) == (400, True)
    assert control(service, "models/nope/load").status_code == 404
    assert control(service, "models/a/unload").status_code == 409
    path.write_text(table("b", "served_models:double") + table("a"))
    service.process.send_signal(signal.SIGHUP)
    until(lambda: "every worker has been replaced" in service.log())
    assert (by_all("a", 4), by_all("b", 4)) == ({4}, {8})
    assert service.post("/predict", {"inputs": 4}, **KEY).json() == 8  # b is the first one now
    assert len(service.pool()) == 2
    assert service.terminate() == 0


def test_a_web_process_that_is_restarted_has_the_models_of_now(
    serve: Callable[..., Serving], path: Path
) -> None:
    service = serve(table("a"), table("b"), arguments=FLEET, keys=True)
    path.write_text(path.read_text() + table("c", "served_models:double"))
    assert control(service, "models/c/load").status_code == 200
    [victim] = re.findall(r"web process 0 runs \(pid (\d+)\)", service.log())
    os.kill(int(victim), signal.SIGKILL)
    until(lambda: service.log().count("web process 0 is ready") == 2)
    for _ in range(20):
        assert service.post(of("c"), {"inputs": 4}, **KEY).json() == 8


# -- under load


class Load:
    """Callers of one model, each of whom asks again and again; within the block."""

    def __init__(self, service: Serving, model: str, callers: int = 4) -> None:
        self._service, self._model = service, model
        self._is_over = threading.Event()
        self._threads = [threading.Thread(target=self._run) for _ in range(callers)]
        self.answers: Counter[int | str] = Counter()

    def _run(self) -> None:
        number = 0
        with httpx.Client(base_url=self._service.url, timeout=240, headers=KEY) as client:
            while not self._is_over.is_set():
                number += 1
                answer = client.post(of(self._model), json={"inputs": number})
                is_right = answer.status_code == 200 and answer.json() == number
                self.answers["right" if is_right else answer.text] += 1

    def __enter__(self) -> Load:
        for each in self._threads:
            each.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        for each in self._threads:
            each.join()


def workers_of(service: Serving, model: str) -> list[int]:
    """The processes in which a model has run; the last one is the youngest."""
    return [int(pid) for pid in re.findall(rf"{model} runs in process (\d+)", service.log())]


@pytest.mark.parametrize(
    ("processes", "rounds"),
    [(1, 2), (2, 2), *(pytest.param(count, 20, marks=pytest.mark.long) for count in (1, 2))],
)
def test_one_is_replaced_and_one_killed_and_no_request_fails(
    serve: Callable[..., Serving], processes: int, rounds: int
) -> None:
    names = ("Calm", "Replaced", "Killed")
    service = serve(
        *(table(name, f"several_models:{name}") for name in names),
        arguments=FLEET if processes == 2 else (),
        keys=True,
    )
    with contextlib.ExitStack() as stack:
        loads = {name: stack.enter_context(Load(service, name)) for name in names}

        def have_answered(times: int) -> bool:
            return all(each.answers.total() >= times for each in loads.values())

        for number in range(1, rounds + 1):
            until(functools.partial(have_answered, 20 * number))
            victim = workers_of(service, "Killed")[-1]
            os.kill(victim, signal.SIGKILL)
            assert control(service, "models/Replaced/load").status_code == 200
            until(lambda gone=victim: workers_of(service, "Killed")[-1] != gone)
        until(lambda: have_answered(20 * rounds + 20))
    assert {name: {*each.answers} for name, each in loads.items()} == {
        name: {"right"} for name in names
    }
    assert len(workers_of(service, "Replaced")) == rounds + 1
    assert len(workers_of(service, "Calm")) == 1


# -- at the end, and when a part hangs


def test_a_service_ends_while_the_workers_of_a_replaced_model_end(
    serve: Callable[..., Serving], tmp_path: Path
) -> None:
    """SIGTERM comes when the old model has an open request: its pool has an owner to end, too."""
    with contextlib.closing(Gate(tmp_path / "gate")) as gate:
        service = serve(
            table("a"), table("b"), arguments=FLEET,
            keys=True, TEST_GATE=str(tmp_path / "gate"),
        )  # fmt: skip
        answers: list[int] = []

        def ask() -> None:
            answers.append(service.post(of("a"), {"inputs": 1}, **KEY).status_code)

        def load() -> None:
            with contextlib.suppress(httpx.HTTPError):
                control(service, "models/a/load")

        threads = [threading.Thread(target=ask), threading.Thread(target=load)]
        threads[0].start()
        gate.await_arrival()
        threads[1].start()
        until(lambda: service.log().count("model a is loaded") == 2)  # by the web processes
        service.process.send_signal(signal.SIGTERM)
        until(lambda: "still open" in service.log())
        gate.let_through(1)
        assert service.process.wait() == 0
        for each in threads:
            each.join()
        assert answers == [200]
        assert service.pool() == []


def test_a_load_that_is_cut_off_by_the_end_is_answered(
    serve: Callable[..., Serving], path: Path, tmp_path: Path
) -> None:
    with contextlib.closing(Gate(tmp_path / "gate")) as gate:
        service = serve(table("a"), keys=True, TEST_GATE=str(tmp_path / "gate"))
        path.write_text(table("a") + table("late", "served_models:Late"))
        answers: list[httpx.Response] = []
        loads = threading.Thread(
            target=lambda: answers.append(control(service, "models/late/load"))
        )
        loads.start()
        gate.await_arrival()
        assert service.terminate() == 0
        loads.join()
        assert [(each.status_code, each.json()) for each in answers] == [
            (503, {"error": "the service is stopping"})
        ]


def test_a_change_by_sighup_that_is_cut_off_by_the_end_is_no_failure(
    serve: Callable[..., Serving], path: Path, tmp_path: Path
) -> None:
    with contextlib.closing(Gate(tmp_path / "gate")) as gate:
        service = serve(table("a"), TEST_GATE=str(tmp_path / "gate"))
        path.write_text(table("a") + table("late", "served_models:Late"))
        service.process.send_signal(signal.SIGHUP)
        gate.await_arrival()
        assert service.terminate() == 0
        assert "Traceback" not in service.log()


@pytest.mark.parametrize("arguments", [(), FLEET])
def test_sighup_follows_the_order_of_the_file(
    serve: Callable[..., Serving], path: Path, arguments: tuple[str, ...]
) -> None:
    a, double = table("a"), table("double", "served_models:double")
    service = serve(a, double, arguments=arguments)
    assert service.predict(4).json() == 4
    path.write_text(double + a)
    service.process.send_signal(signal.SIGHUP)
    until(lambda: "every worker has been replaced" in service.log())
    assert {service.predict(4).json() for _ in range(20)} == {8}
    assert service.client.get("/info").json()["models"] == ["double", "a"]
    assert service.log().count("loading model") == 0


@pytest.mark.parametrize("arguments", [(), FLEET])
def test_models_of_worker_hosts_follow_the_file_too(
    serve: Callable[..., Serving], path: Path, redis_server: str, arguments: tuple[str, ...]
) -> None:
    """No host is there. At the start they are not waited for, later only for a while."""

    def away(name: str) -> str:
        lines = (f'name = "{name}"', f'redis = "{redis_server}"', f'prefix = "{name}"')
        return "\n".join(("[[model]]", *lines, "timeout = 0.1\n"))

    service = serve(away("a"), table("here"), arguments=arguments)
    assert asked(service, "here", 1) == (200, 1)
    path.write_text(away("a") + away("b") + table("here"))
    service.process.send_signal(signal.SIGHUP)
    until(lambda: "every worker has been replaced" in service.log())
    assert service.client.get("/info").json()["models"] == ["a", "b", "here"]
    path.write_text(away("a") + away("b"))
    service.process.send_signal(signal.SIGHUP)
    until(lambda: service.log().count("every worker has been replaced") == 2)
    path.write_text(away("b"))
    service.process.send_signal(signal.SIGHUP)
    until(lambda: service.client.get("/info").json()["models"] == ["b"])
    assert service.terminate() == 0
