"""The examples over Redis, and ``make demo-redis``: real processes, and a real Redis."""

from __future__ import annotations

import contextlib
import re
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

import demo_redis
import flask_example
from cases import long_cases
from conftest import await_that
from example_programs import BIRTHDAY, Program, why_it_ended
from leavings import children
from service_streamer.redis.local import LocalRedis

pytestmark = pytest.mark.xdist_group("redis-examples")

DEMO = ("scripts/demo_redis.py", "--port", "0")
HOST = ("example/redis_worker_example.py", "--workers", "1", "--devices", "cpu")
WEB = ("-m", "gunicorn", "-c", "example/redis_streamer_gunicorn.py", "flask_example:app")


def is_gunicorn(pid: int) -> bool:
    return b"gunicorn" in Path(f"/proc/{pid}/cmdline").read_bytes()


def is_worker_host(pid: int) -> bool:
    """Whether it is one that handles SIGTERM by now; it goes on loading its models for long."""
    if b"redis_worker_example" not in Path(f"/proc/{pid}/cmdline").read_bytes():
        return False  # it is one in a moment
    status = Path(f"/proc/{pid}/status").read_text()
    [caught] = re.findall(r"^SigCgt:\s*(\w+)", status, re.MULTILINE)
    return bool(int(caught, 16) >> (signal.SIGTERM - 1) & 1)


@pytest.fixture(scope="module")
def redis_url() -> Iterator[str]:
    """Of a Redis in which all tests of this file together leave nothing."""
    with LocalRedis() as server:
        yield server.url
        with redis.Redis.from_url(server.url) as connection:
            assert connection.keys() == []


@pytest.fixture(scope="module")
def web(redis_url: str) -> Iterator[Program]:
    """The whole demo. It ends with code 0 only if its worker host and gunicorn have done so."""
    with Program(*DEMO, ready="^Ctrl-C", REDIS_URL=redis_url, REDIS_PREFIX="the demo") as demo:
        yield demo


@pytest.mark.long
def test_four_workers_import_the_application_and_none_loads_torch(web: Program) -> None:
    assert web.ask("POST", "/stream", s=BIRTHDAY) == (200, ["you"])
    (master,) = filter(is_gunicorn, children(web.process.pid))
    await_that(lambda: len(children(master)) == 4)  # the last of them may not have been forked yet
    for pid in children(master):
        while "hiredis" not in (loaded := Path(f"/proc/{pid}/maps").read_text()):
            time.sleep(0.01)  # it may have not booted yet
        assert "libtorch" not in loaded
    # What the master imports would be there before gevent patches in the workers.
    assert "hiredis" not in Path(f"/proc/{master}/maps").read_text()


@pytest.mark.parametrize("is_redis_there", long_cases(True, False))
def test_service_says_in_time_that_no_model_is_there(redis_url: str, is_redis_there: bool) -> None:
    with contextlib.closing(socket.socket()) as nobody:
        nobody.bind(("127.0.0.1", 0))
        url = redis_url if is_redis_there else f"redis://127.0.0.1:{nobody.getsockname()[1]}"
        place = {"REDIS_URL": url, "REDIS_PREFIX": "nobody"}
        with Program(*WEB, "--workers", "1", **place, PREDICT_TIMEOUT="0.5") as web:
            status, answer = web.ask("POST", "/stream", s=BIRTHDAY)
            while status == 504 and not is_redis_there:  # so slow that it does not know that yet
                status, answer = web.ask("POST", "/stream", s=BIRTHDAY)
            text = "took too long" if is_redis_there else "cannot be reached"
            assert (status, list(answer)) == (504 if is_redis_there else 503, ["error"])
            assert text in answer["error"]
    said = "PredictTimeout: no result within 0.5 s" if is_redis_there else "BrokerUnavailable: "
    assert said in web.output


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_demo_can_be_ended_while_models_load(redis_url: str, number: signal.Signals) -> None:
    loads, place = r"^\$ .*redis_worker_example", {"REDIS_URL": redis_url, "REDIS_PREFIX": "early"}
    with Program(*DEMO, ready=loads, **place) as demo:
        await_that(lambda: any(map(is_worker_host, children(demo.process.pid))))
        demo.ends_by = number
    assert "serving on" not in demo.output


@pytest.mark.parametrize(
    ("variable", "answering", "url"),
    [
        ("redis://here:1/2", ["redis://here:1/2", "redis://localhost:6379"], "redis://here:1/2"),
        ("here:1", ["redis://here:1"], "redis://here:1"),
        ("here:1", ["redis://localhost:6379"], "redis://localhost:6379"),
        ("", ["redis://localhost:6379"], "redis://localhost:6379"),
        ("", [], r"redis://127\.0\.0\.1:\d+/0"),
    ],
)
def test_the_demo_finds_a_redis(
    monkeypatch: pytest.MonkeyPatch, variable: str, answering: list[str], url: str
) -> None:
    monkeypatch.setenv("REDIS_URL", variable)
    monkeypatch.setattr(demo_redis, "answers", lambda url: url in answering)
    with contextlib.ExitStack() as stack:
        assert re.fullmatch(url, demo_redis.find_redis(stack))


def test_a_bad_option_of_the_worker_host_is_said_in_a_line() -> None:
    assert "redis_broker" in why_it_ended(*HOST, "--redis", "nonsense")


def test_the_application_needs_a_streamer(caplog: pytest.LogCaptureFixture) -> None:
    response = flask_example.app.test_client().post("/stream", data={"s": BIRTHDAY})
    assert response.status_code == 500
    assert "-c redis_streamer_gunicorn.py" in caplog.text
