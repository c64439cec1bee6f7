"""The examples for FastAPI, Starlette and Django: real servers, and real requests."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import fastapi_example
from cases import long_cases
from conftest import await_that
from example_programs import ADDRESS, BIRTHDAY, Program, why_it_ended
from http_errors import MAX_BODY
from leavings import children
from pools import command as pool_command
from pools import pool_names
from serve_process import workers
from service_streamer import RedisStreamer

pytestmark = pytest.mark.xdist_group("web-examples")

MARY = "Mary had a little"
MARYS = "Mary had a little lamb,\nIts fleece was white as snow,"
GUNICORN = ("-m", "gunicorn", "--chdir", "example", "--bind", "127.0.0.1:0", "--no-control-socket")
UVICORN_WORKER = ("-k", "uvicorn_worker.UvicornWorker")

#: How its users start each example.
COMMANDS = {
    "fastapi": ("example/fastapi_example.py", "--port", "0"),
    "fastapi, uvicorn": (
        *("-m", "uvicorn", "--app-dir", "example", "--port", "0"),
        "fastapi_example:app",
    ),
    "fastapi, gunicorn": (*GUNICORN, *UVICORN_WORKER, "fastapi_example:app"),
    "starlette": ("example/starlette_example.py", "--port", "0"),
    "django": ("example/django_example.py", "--port", "0"),
    "django, gunicorn": (*GUNICORN, *UVICORN_WORKER, "django_example:asgi"),
    "django, wsgi": (*GUNICORN, "--threads", "8", "django_example:application"),
}

#: Of each framework: where to ask, what, and the answer.
QUESTIONS: dict[str, tuple[str, str, Any]] = {
    "fastapi": ("/generate", json.dumps({"text": MARY}), {"text": MARYS}),
    "starlette": ("/", BIRTHDAY, "you"),
    "django": ("/infill", json.dumps({"text": BIRTHDAY}), {"word": "you"}),
    "django, sync": ("/infill/sync", json.dumps({"text": BIRTHDAY}), {"word": "you"}),
}

#: What is wrong, with the status and a part of the text.
BAD_JSON: dict[str, tuple[bytes, int, str]] = {
    "no JSON": (b'{"text": ', 422, "JSON"),
    "no object": (b"[]", 422, ""),
    "no text": (b'{"prompt": "any"}', 422, "text: "),
    "a number": (b'{"text": 5}', 422, "text: "),
    "null": (b'{"text": null}', 422, "text: "),
    "empty": (b'{"text": ""}', 422, ""),
    "blank": (b'{"text": " \\n"}', 422, "empty"),
    "half a surrogate pair": (b'{"text": "\\ud83d"}', 422, ""),
    "too long": (json.dumps({"text": "word " * 500 + "[MASK]"}).encode(), 422, "tokens"),
    "too large": (json.dumps({"text": "x" * MAX_BODY}).encode(), 413, ""),
}
BAD_TEXTS: dict[str, tuple[bytes, int, str]] = {
    "nothing": (b"", 422, "empty"),
    "no mask": (b"Happy birthday", 422, "no [MASK]"),
    "no UTF-8": (b"\xff [MASK]", 400, "not UTF-8"),
    "too long": (b"word " * 500 + b"[MASK]", 422, "tokens"),
    "too large": (b"x" * (MAX_BODY + 1), 413, ""),
}


def start(name: str, **variables: str) -> Program:
    """Starts an example; it serves, but its model may not have been loaded yet."""
    return Program(*COMMANDS[name], ready=ADDRESS, PYTHONUNBUFFERED="1", **variables)


def ask(program: Program, path: str, body: bytes | str) -> tuple[int, Any]:
    return program.post(path, body, "application/json")


def check_stream(program: Program, path: str) -> None:
    item = {"shape": "star", "steps": 3, "points": 2}
    body = json.dumps({"text": MARY} if path == "/generate/stream" else item)
    with program.connect() as connection:
        connection.request("POST", path, body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        *events, done, end = response.read().split(b"\n\n")
    assert (response.status, done, end) == (200, b"data: [DONE]", b""), (response.status, done)
    outputs = [json.loads(event.removeprefix(b"data: "))["output"] for event in events]
    if path == "/generate/stream":
        assert len(outputs) > 5
        assert "".join(outputs) == MARYS
    else:
        assert [[len(point) for point in picture] for picture in outputs] == [[2, 2]] * 3


def check_answer(name: str, status: int, answer: Any) -> None:
    assert status == 200, answer
    right = QUESTIONS[name][2]
    if name == "starlette":
        assert answer[0] == {**answer[0], "token_str": right, "sequence": "Happy birthday to you."}
        assert [set(word) for word in answer] == [{"score", "sequence", "token", "token_str"}] * 5
        scores = [word["score"] for word in answer]
        assert scores == sorted(scores, reverse=True)
        assert 0.5 < scores[0] <= 1
    else:
        assert answer == right


# Real servers


@pytest.fixture(scope="module", params=long_cases("fastapi", "starlette", "django"))
def name(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def service(name: str) -> Iterator[Program]:
    with Program(*COMMANDS[name], PYTHONUNBUFFERED="1") as program:
        yield program


def test_service_says_what_to_try(service: Program) -> None:
    assert service.curl.startswith(f"curl http://127.0.0.1:{service.port}/")
    command = ["bash", "-c", f"{service.curl} --silent --fail"]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run
    assert "lamb" in run.stdout or "you" in run.stdout


def test_requests_at_the_same_time_are_answered_together(service: Program, name: str) -> None:
    for question in [each for each in QUESTIONS if each.startswith(name)]:
        path, body, _ = QUESTIONS[question]
        with ThreadPoolExecutor(16) as pool:
            for status, answer in pool.map(lambda _, p=path, b=body: ask(service, p, b), range(48)):
                check_answer(question, status, answer)


def test_bad_input_is_refused(service: Program, name: str) -> None:
    path = QUESTIONS[name][0]
    for case, (body, status, text) in (BAD_TEXTS if name == "starlette" else BAD_JSON).items():
        got, answer = ask(service, path, body)
        assert got == status, (case, answer)
        assert text in answer["error"], case
        assert "Traceback" not in json.dumps(answer)


def test_other_paths_and_methods_are_refused(service: Program, name: str) -> None:
    assert service.ask("GET", "/nothing")[0] == 404
    with service.connect() as connection:
        connection.request("DELETE", QUESTIONS[name][0])
        response = connection.getresponse()
        response.read()
        assert response.status == 405
        assert "POST" in response.headers["Allow"]


def test_web_process_has_no_torch_and_survives_its_worker(service: Program, name: str) -> None:
    path, body, _ = QUESTIONS[name]
    assert not service.has_torch()
    assert service.ask("GET", "/health") == (200, {"status": "ready"})
    (worker,) = workers(service.process.pid)
    os.kill(worker, signal.SIGKILL)
    await_that(lambda: worker not in (found := workers(service.process.pid)) and found)
    await_that(lambda: service.ask("GET", "/health")[1] == {"status": "ready"})
    check_answer(name, *ask(service, path, body))


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in COMMANDS if "," in name])
def test_web_servers_that_import_an_example(name: str) -> None:
    framework = name.partition(",")[0]
    path, body, _ = QUESTIONS[framework]
    with start(name) as program:
        check_answer(framework, *ask(program, path, body))
        assert program.ask("GET", "/health") == (200, {"status": "ready"})
        if framework == "fastapi":
            check_stream(program, "/generate/stream")
        else:
            check_stream(program, "/draw/sync" if "wsgi" in name else "/draw")
        if "uvicorn" in name:  # its own command ends by SIGTERM when SIGTERM has ended it
            program.ends_by = signal.SIGINT


def test_fastapi_asks_worker_hosts_over_redis_if_the_environment_names_one(
    redis_server: str, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REDIS_URL", redis_server)
    monkeypatch.setenv("REDIS_PREFIX", prefix)
    with fastapi_example.start_streamer() as streamer:
        assert isinstance(streamer, RedisStreamer)


@pytest.mark.usefixtures("shared")
@pytest.mark.parametrize(
    "name", long_cases("django, wsgi", "fastapi, gunicorn", "django, gunicorn")
)
def test_processes_of_gunicorn_share_a_model_by_the_name_of_a_pool(name: str) -> None:
    framework = name.partition(",")[0]
    with start(name, POOL="web", WEB_CONCURRENCY="3") as web:
        path, body, _ = QUESTIONS["django, sync" if "wsgi" in name else framework]
        for _ in range(8):
            check_answer(framework, *ask(web, path, body))
        # No models of their own; the last of them may not have been forked yet.
        await_that(lambda: [*map(children, children(web.process.pid))] == [[], [], []])
    for pool in pool_names():  # without its linger
        pool_command("stop", pool, "--now")


@pytest.mark.parametrize("example", long_cases("fastapi", "starlette", "django"))
def test_missing_model_is_named_in_a_line(example: str) -> None:
    said = why_it_ended(*COMMANDS[example], "--model", "no/such/folder")
    assert "no/such/folder" in said.splitlines()[-1]
