"""The examples, each run as its users run it, and the parts of them that need no model."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from flask.testing import FlaskClient

import flask_multigpu_example
from cases import long_cases
from example_programs import BIRTHDAY, TWINKLE, Program, answer_of, ask, run, send, why_it_ended
from flask_example import create_app
from service_streamer import (
    BrokerUnavailable,
    InvalidInput,
    ModelError,
    Overloaded,
    PredictTimeout,
    StreamerBroken,
    StreamerClosed,
    WorkerLost,
    WorkerStartError,
    WorkerStartTimeout,
)
from service_streamer.testing import Gate

pytestmark = pytest.mark.xdist_group("examples")

LONG = "happy " * 20 + "[MASK]"
BAD_FIELDS = {
    "no s": ({"t": BIRTHDAY}, "no field s"),
    "empty": ({"s": ""}, "empty"),
    "no mask": ({"s": "Happy birthday"}, "no [MASK]"),
    "too long": ({"s": LONG}, "tokens"),
    "one of two": ({"s": [BIRTHDAY, "Happy birthday"]}, "no [MASK]"),
}


OBEDIENT = "served_models:Obedient"
COMMANDS = {
    "threaded": ("example/flask_example.py", "--port", "0"),
    "streamer": ("example/flask_example.py", "--port", "0", "--streamer"),
    "multigpu": ("example/flask_multigpu_example.py", "--port", "0", "--workers", "2"),
}


#: The application is the same in each of them.
MODES = ["streamer", *long_cases("threaded", "multigpu")]


@pytest.fixture(scope="module", params=MODES)
def mode(request: pytest.FixtureRequest) -> str:
    mode: str = request.param
    return mode


@pytest.fixture(scope="module")
def service(mode: str) -> Iterator[Program]:
    with Program(*COMMANDS[mode]) as service:
        yield service


def test_services_say_what_to_try(service: Program, mode: str) -> None:
    url = f"http://127.0.0.1:{service.port}/stream"
    assert service.curl == f"curl -X POST {url} -d 's={BIRTHDAY}'"
    assert ("no GPU here: running on the CPU\n" in service.output) == (mode == "multigpu")
    with service.connect() as connection:
        connection.request("GET", "/")
        hint = connection.getresponse().read().decode()
    assert service.curl in hint


def test_stream_answers(service: Program) -> None:
    for method in ("GET", "POST"):
        assert service.ask(method, "/stream", s=BIRTHDAY) == (200, ["you"])
        assert service.ask(method, "/stream", s=[TWINKLE, BIRTHDAY]) == (200, ["little", "you"])


def test_only_naive_loads_torch(service: Program, mode: str) -> None:
    assert service.ask("POST", "/stream", s=BIRTHDAY) == (200, ["you"])
    assert service.has_torch() == (mode == "threaded")
    if mode == "multigpu":
        assert service.ask("POST", "/naive", s=BIRTHDAY)[0] == 404
        return
    with ThreadPoolExecutor(4) as threads:  # one of whom loads the model
        asked = [
            threads.submit(service.ask, "POST", "/naive", s=[TWINKLE, BIRTHDAY]) for _ in range(4)
        ]
    assert [each.result() for each in asked] == [(200, ["little", "you"])] * 4
    assert service.has_torch()


@pytest.mark.parametrize("case", BAD_FIELDS)
def test_bad_input_is_refused(service: Program, mode: str, case: str) -> None:
    fields, text = BAD_FIELDS[case]
    for path in ["/stream"] if mode == "multigpu" else ["/stream", "/naive"]:
        for method in ("GET", "POST"):
            status, answer = service.ask(method, path, **fields)
            assert (status, list(answer)) == (400, ["error"])
            assert text in answer["error"]


def test_connections_are_kept_and_errors_of_flask_are_json(service: Program) -> None:
    with service.connect() as connection:
        assert ask(connection, "POST", "/stream", s=BIRTHDAY) == (200, ["you"])
        kept = connection.sock
        assert kept is not None
        assert ask(connection, "GET", "/stream", s=TWINKLE) == (200, ["little"])
        assert connection.sock is kept
        # A body that nobody reads is not taken for the next request.
        status, answer = ask(connection, "POST", "/nothing", s=BIRTHDAY)
        assert (status, list(answer)) == (404, ["error"])
        assert ask(connection, "POST", "/stream", s=BIRTHDAY) == (200, ["you"])
    status, answer = service.ask("DELETE", "/stream")
    assert (status, list(answer)) == (405, ["error"])


@pytest.mark.parametrize("number", [signal.SIGTERM, *long_cases(signal.SIGINT)])
def test_a_stopped_service_finishes_what_it_accepted(gate: Gate, number: signal.Signals) -> None:
    command = (*COMMANDS["multigpu"], "--model", OBEDIENT, "--max-latency", "0")
    with (
        Program(*command, TEST_GATE=str(gate.__getstate__())) as service,
        service.connect() as idle,
        service.connect() as busy,
    ):
        assert ask(idle, "GET", "/stream")[0] == 400  # only the presence of s is checked
        send(busy, "POST", "/stream", s=["any", ""])
        gate.await_arrival()
        service.process.send_signal(number)
        assert idle.sock is not None
        assert idle.sock.recv(1) == b""  # it has begun to stop
        gate.let_through(2)  # each of the two may go to a worker of its own
        assert answer_of(busy) == (200, ["any", ""])
        service.check_end()


def test_an_overloaded_service_refuses_and_answers_what_it_accepted(gate: Gate) -> None:
    command = (*COMMANDS["multigpu"], "--model", OBEDIENT, "--workers", "1")
    options = ("--batch-size", "1", "--max-pending", "1")
    with (
        Program(*command, *options, TEST_GATE=str(gate.__getstate__())) as service,
        contextlib.ExitStack() as stack,
    ):
        accepted = [stack.enter_context(service.connect()) for _ in range(3)]
        send(accepted[0], "POST", "/stream", s=["computed"])
        gate.await_arrival()
        for connection, text in zip(accepted[1:], ("sent ahead", "waits"), strict=True):
            send(connection, "POST", "/stream", s=[text])
        status, text = service.ask("POST", "/stream", s=["one", "too many"])
        assert (status, list(text)) == (503, ["error"])
        assert "too many requests are waiting" in text["error"]
        gate.let_through(3)
        assert [connection.getresponse().status for connection in accepted] == [200] * 3


@pytest.mark.parametrize(
    "command",
    [
        (*COMMANDS["multigpu"], "--model", OBEDIENT),
        *long_cases(COMMANDS["streamer"], ("scripts/demo_redis.py",)),
    ],
)
def test_a_port_in_use_is_said_in_a_line(command: tuple[str, ...]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert "in use" in why_it_ended(*command, "--port", port)


@pytest.mark.parametrize(
    ("code", "imported"),
    [
        ("from bert_model import *; SentenceEncoder().check(['It is [MASK].'])", []),
        ("import generation_model", []),
        ("import flask_vision_example", []),
        ("from flask_vision_example import *; decode_image(SAMPLE.read_bytes())", ["PIL", "numpy"]),
    ],
)
def test_the_web_process_imports_only_what_it_needs(code: str, imported: list[str]) -> None:
    found = "import sys; print(sorted({'PIL', 'numpy', 'torch', 'transformers'} & {*sys.modules}))"
    done = run("-c", f"{code}\n{found}")
    assert done.stdout == f"{imported}\n", done.stderr


@pytest.mark.long
def test_future_example() -> None:
    done = run("example/future_example.py", "--sentences", "64", "--workers", "1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("no GPU here")
    rows = re.findall(r"^(\S.*?) +([\d,]+) +([\d.]+)x$", done.stdout, re.MULTILINE)
    names = ["one by one", "batches of 64", "ThreadedStreamer", "Streamer, 1 worker"]
    assert [row[0] for row in rows] == names
    assert rows[0][2] == "1.0"


class Stub:
    """A streamer that answers what it was asked, or raises."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error

    def predict(self, batch: list[str]) -> list[str]:
        if self.error:
            raise self.error
        return batch


def client(error: Exception | None = None) -> FlaskClient:
    return create_app(Stub(error)).test_client()  # type: ignore[arg-type]


#: What all examples make of an error.
with_errors = pytest.mark.parametrize(
    ("error", "status"),
    [
        (InvalidInput("told"), 422),
        (Overloaded("secret"), 503),
        (PredictTimeout("secret"), 504),
        (StreamerClosed("secret"), 503),
        (StreamerBroken("secret"), 503),
        (BrokerUnavailable("secret"), 503),
        (WorkerStartError("secret"), 503),
        (WorkerStartTimeout("secret"), 503),
        (WorkerLost("secret"), 500),
        (ModelError("secret"), 500),
        (ValueError("secret"), 500),
        (TimeoutError("secret"), 500),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else str(value),
)


@with_errors
def test_errors_have_a_status(
    error: Exception, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    response = client(error).post("/stream", data={"s": "any"})
    assert response.status_code == status
    assert list(response.get_json()) == ["error"]
    assert "secret" not in response.text
    assert ("told" in response.text) == (status == 422)
    assert ("Retry-After" in response.headers) == (status == 503)
    assert (str(error) in caplog.text) == (status != 422)
    assert ("Traceback" in caplog.text) == (status == 500)
    if type(error) in (ValueError, TimeoutError):
        assert response.get_json() == {"error": "internal error"}


def test_wrong_methods_say_which_are_right() -> None:
    assert "POST" in client().delete("/stream").headers["Allow"]


@pytest.mark.parametrize(
    ("chosen", "there", "gpus"),
    [
        (None, ["nvidia0", "nvidia1"], ["0", "1"]),
        ("", ["nvidia0"], []),
        ("-1", ["nvidia0"], []),
        ("3, 1", ["nvidia0", "nvidia1"], ["0", "1"]),
        ("GPU-1a", ["nvidia0", "nvidia1"], ["0"]),
        (None, ["nvidia-smi"], ["0"]),
        (None, [], []),
        ("0", [], []),  # set for another machine
    ],
)
def test_gpus_are_found_by_their_files_or_by_nvidia_smi(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    chosen: str | None,
    there: list[str],
    gpus: list[str],
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if chosen is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
    for name in ("nvidiactl", *there):
        (tmp_path / name).write_text("#!/bin/sh\necho 'GPU 0: NVIDIA (UUID: GPU-1a)'\n")
        (tmp_path / name).chmod(0o755)
    assert flask_multigpu_example.visible_gpus(tmp_path) == gpus


@pytest.mark.parametrize(
    ("arguments", "gpus", "placed", "note"),
    [
        ([], ["0", "1", "2", "3", "4"], (8, ["0", "1", "2", "3"]), ""),
        ([], ["5"], (8, ["5"]), ""),
        (["--devices", "1,2", "--workers", "2"], ["0"], (2, ["1", "2"]), ""),
        ([], [], (2, ["cpu"]), "no GPU here: running on the CPU, with 2 workers for its cores"),
        (["--workers", "3"], [], (3, ["cpu"]), "no GPU here: running on the CPU\n"),
    ],
)
def test_workers_are_placed(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    gpus: list[str],
    placed: tuple[int, list[str]],
    note: str,
) -> None:
    monkeypatch.setattr(sys, "argv", ["flask_multigpu_example.py", *arguments])
    monkeypatch.setattr(flask_multigpu_example, "visible_gpus", lambda: gpus)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    args = flask_multigpu_example.parse_arguments()
    assert flask_multigpu_example.place_workers(args) == placed
    assert capsys.readouterr().out.startswith(note)
