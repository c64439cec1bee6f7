"""The examples for FastAPI, Starlette and Django: real servers, and real requests."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import fastapi_example
from cases import long_cases
from conftest import await_that
from http_errors import MAX_BODY
from pools import command as pool_command
from pools import pool_names
from test_examples import BIRTHDAY, ROOT, TIMEOUT, environment
from test_redis_examples import HOST, Program, children, command_line

pytestmark = pytest.mark.xdist_group("web-examples")

MARY = "Mary had a little"
MARYS = "Mary had a little lamb,\nIts fleece was white as snow,"
GUNICORN = ("-m", "gunicorn", "--chdir", "example", "--bind", "127.0.0.1:0", "--no-control-socket")
UVICORN_WORKER = ("-k", "uvicorn_worker.UvicornWorker")

#: How its users start each example, and what it has said when it is there.
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
ADDRESS = r"(?:serving on|running on|Listening at:) http://127\.0\.0\.1:(\d+) "

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


def start(name: str, url: str = "", **variables: str) -> Program:
    """Starts an example; it serves, but its model may not have been loaded yet."""
    program = Program(COMMANDS[name], ADDRESS, url, PYTHONUNBUFFERED="1", **variables)
    address = re.search(ADDRESS, program.output)
    assert address
    program.port = int(address[1])
    return program


def ask(program: Program, path: str, body: bytes | str | None = None) -> tuple[int, Any]:
    method = "GET" if body is None else "POST"
    content = body.encode() if isinstance(body, str) else body
    with program.connect() as connection:
        connection.request(method, path, content, {"Content-Type": "application/json"})
        response = connection.getresponse()
        text = response.read().decode()
        if response.status == 413:  # the framework's own words
            return 413, {"error": text}
        assert response.headers["Content-Type"] == "application/json", text
        return response.status, json.loads(text)


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

LONG = long_cases("starlette", "django")


@pytest.fixture(scope="module", params=["fastapi", *LONG])
def service(request: pytest.FixtureRequest) -> Iterator[Program]:
    program = start(request.param)
    program.name = request.param  # type: ignore[attr-defined]
    yield program
    program.stop()


@pytest.fixture
def name(service: Program) -> str:
    name: str = service.name  # type: ignore[attr-defined]
    return name


def test_service_says_what_to_try(service: Program) -> None:
    line = service.stdout.readline()
    assert line.startswith(f"curl http://127.0.0.1:{service.port}/"), line
    command = ["bash", "-c", line.strip() + " --silent --fail"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT)
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
    assert ask(service, "/nothing")[0] == 404
    with service.connect() as connection:
        connection.request("DELETE", QUESTIONS[name][0])
        response = connection.getresponse()
        response.read()
        assert response.status == 405
        assert "POST" in response.headers["Allow"]


def test_web_process_has_no_torch_and_survives_its_worker(service: Program, name: str) -> None:
    path, body, _ = QUESTIONS[name]
    with open(f"/proc/{service.process.pid}/maps") as maps:
        assert "libtorch" not in maps.read()
    assert ask(service, "/health") == (200, {"status": "ready"})
    (worker,) = workers(service.process.pid)
    os.kill(worker, signal.SIGKILL)
    await_that(lambda: worker not in (found := workers(service.process.pid)) and found)
    await_that(lambda: ask(service, "/health")[1] == {"status": "ready"})
    check_answer(name, *ask(service, path, body))


def workers(pid: int) -> list[int]:
    """The worker processes of a web process that are there."""
    found = []
    for child in children(pid):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            if b"spawn_main" in command_line(child):
                found.append(child)
    return found


def test_fastapi_documents_itself() -> None:
    schema = fastapi_example.app.openapi()
    assert {"InputPrompt", "GeneratedText"} <= schema["components"]["schemas"].keys()


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in COMMANDS if "," in name])
def test_web_servers_that_import_an_example(name: str) -> None:
    program = start(name)
    try:
        framework = name.partition(",")[0]
        path, body, _ = QUESTIONS[framework]
        check_answer(framework, *ask(program, path, body))
        assert ask(program, "/health") == (200, {"status": "ready"})
        if framework == "fastapi":
            check_stream(program, "/generate/stream")
        else:
            check_stream(program, "/draw/sync" if "wsgi" in name else "/draw")
    except BaseException:
        program.kill()
        raise
    # uvicorn's own command ends by SIGTERM when SIGTERM has ended it.
    program.stop(signal.SIGINT if "uvicorn" in name else signal.SIGTERM)


@pytest.mark.long
def test_processes_of_gunicorn_share_a_model_over_redis(redis_server: str, prefix: str) -> None:
    command = (*HOST, "--model", "generation_model:ManagedGenerationModel")
    host = Program(command, " is ready$", redis_server, REDIS_PREFIX=prefix)
    with contextlib.ExitStack() as stack:
        stack.callback(host.stop)
        web = start("fastapi, gunicorn", redis_server, REDIS_PREFIX=prefix, WEB_CONCURRENCY="2")
        stack.callback(web.stop)
        path, body, _ = QUESTIONS["fastapi"]
        for _ in range(8):
            check_answer("fastapi", *ask(web, path, body))
        assert ask(web, path, b'{"text": " "}')[0] == 422
        check_stream(web, "/generate/stream")
        # No models of their own; the last of them may not have been forked yet.
        await_that(lambda: [*map(children, children(web.process.pid))] == [[], []])


@pytest.mark.usefixtures("shared")
@pytest.mark.parametrize(
    "name", ["django, wsgi", *long_cases("fastapi, gunicorn", "django, gunicorn")]
)
def test_processes_of_gunicorn_share_a_model_by_the_name_of_a_pool(name: str) -> None:
    framework = name.partition(",")[0]
    web = start(name, POOL="web", WEB_CONCURRENCY="3")
    try:
        path, body, _ = QUESTIONS["django, sync" if "wsgi" in name else framework]
        for _ in range(8):
            check_answer(framework, *ask(web, path, body))
        # No models of their own; the last of them may not have been forked yet.
        await_that(lambda: [*map(children, children(web.process.pid))] == [[], [], []])
    except BaseException:
        web.kill()
        raise
    web.stop()
    for pool in pool_names():  # without its linger
        pool_command("stop", pool, "--now")


@pytest.mark.parametrize("example", ["fastapi", *long_cases("starlette", "django")])
def test_missing_model_is_named_in_a_line(example: str) -> None:
    command = [sys.executable, *COMMANDS[example], "--model", "no/such/folder"]
    run = subprocess.run(
        command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=TIMEOUT
    )
    assert run.returncode == 1, run
    assert run.stdout == ""
    assert "no/such/folder" in run.stderr.splitlines()[-1]
