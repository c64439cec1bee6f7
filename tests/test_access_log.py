"""The access log: one line for each request, and nothing in it that a client could forge."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import re
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from serve_process import Serving, until
from service_streamer.serve.http.access_log import AccessLog, Line
from service_streamer.serve.http.exchange import Disconnected
from service_streamer.serve.logs import formatter
from stub_exchange import StubClient

pytestmark = pytest.mark.no_gevent

COUNTING = "served_models:Counting"


async def settled() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def answered(exchange: Any) -> None:
    """Answer with the path's last word: whole, or in parts, or never."""
    body = exchange.take()
    while not exchange.is_read:
        body += await exchange.more()
    exchange.key, exchange.model = "alice", "a model"
    if exchange.target.startswith(b"/parts"):
        exchange.start(200, ())
        await exchange.write(b"one")
        await exchange.end(b"two")
    elif exchange.target.startswith(b"/never"):
        gone = asyncio.Event()
        exchange.on_gone = gone.set
        await gone.wait()
        raise Disconnected
    elif exchange.target.startswith(b"/bug"):
        raise ValueError("a bug")
    else:
        exchange.answer(418, (), body)


def lines(*sent: bytes, leaves: bool = False) -> list[Line]:
    """What is logged when a client sends this."""
    found: list[Line] = []

    async def run() -> None:
        client = StubClient(answered, access_log=AccessLog(found.append))
        for part in sent:
            client.send(part)
            await settled()
        if leaves:
            client.leave()
            await settled()
        before = [*found]
        client.leave()
        await settled()
        assert found == before, "a request is logged once"

    asyncio.run(run())
    return found


def request(target: bytes = b"/a", body: bytes = b"hello", method: bytes = b"POST") -> bytes:
    return b"%b %b HTTP/1.1\r\nhost: a\r\nx-request-id: mine\r\ncontent-length: %d\r\n\r\n%b" % (
        method, target, len(body), body,
    )  # fmt: skip


def test_a_line() -> None:
    [line] = lines(request())
    seconds = line.pop("seconds")
    assert 0 <= seconds < 60
    assert line == {
        "method": "POST", "path": "/a", "status": 418, "bytes": 5, "request_id": "mine",
        "key": "alice", "model": "a%20model",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        ([request(), request(b"/parts")], [("/a", 418, 5), ("/parts", 200, 6)]),
        ([request() + request(b"/b", b"")], [("/a", 418, 5), ("/b", 418, 0)]),
        ([request(method=b"HEAD")], [("/a", 418, 0)]),
        ([request(b"/bug")], [("/bug", 500, 21)]),
        ([b"nonsense\r\n\r\n"], [("-", 400, 30)]),
        (
            [b"POST /c HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n"],
            [("/c", 400, 30)],
        ),
        ([], []),
    ],
)
def test_one_line_for_each_request(sent: list[bytes], expected: list[tuple[str, int, int]]) -> None:
    assert [(each["path"], each["status"], each["bytes"]) for each in lines(*sent)] == expected


@pytest.mark.parametrize(
    "sent",
    [
        [request(b"/never")],
        [request(body=b"12345")[:-1]],
    ],
)
def test_clients_that_disconnect(sent: list[bytes]) -> None:
    [line] = lines(*sent, leaves=True)
    assert line["status"] == 499


def test_requests_behind_one_that_is_left() -> None:
    found = lines(request(b"/never") + request(b"/b"), leaves=True)
    assert [(each["path"], each["status"]) for each in found] == [("/never", 499), ("/b", 499)]


@pytest.mark.parametrize(
    ("target", "path"),
    [
        (b"/a?key=secret", "/a"),
        (b"/a#secret", "/a"),
        (b"/a%20b%0Astatus=200", "/a%20b%0Astatus=200"),
        (b'/a"b\\c', "/a%22b%5Cc"),
        (b"http://host/a?b", "http://host/a"),
        (b"/" + b"x" * 5000, "/" + "x" * 2047),
    ],
)
def test_what_a_path_may_hold(target: bytes, path: str) -> None:
    [line] = lines(request(target))
    assert line["path"] == path
    assert re.fullmatch(r"[!-~ ]+", str(line))


def record(line: Line) -> logging.LogRecord:
    return logging.LogRecord("service_streamer.access", logging.INFO, "", 0, line, (), None)


def test_the_form_of_a_line() -> None:
    line = Line(method="GET", path="/", status=200, bytes=3, key="a")
    assert formatter("text").format(record(line)).endswith(" INFO GET / 200 bytes=3 key=a")
    logged = json.loads(formatter("json").format(record(line)))
    assert logged.items() >= dict(line).items()
    assert {"time", "level", "logger"} <= {*logged}


# -- the service


def access(service: Serving) -> list[dict[str, Any]]:
    records = [json.loads(line) for line in service.log().splitlines() if line.startswith("{")]
    return [each for each in records if each["logger"] == "service_streamer.access"]


def table(name: str, key: str, scopes: str, more: str = "") -> str:
    digest = hashlib.sha256(key.encode()).hexdigest()
    return f'[{name}]\nhash = "sha256:{digest}"\nscopes = [{scopes}]\n{more}'


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    path = tmp_path_factory.mktemp("keys") / "keys.toml"
    path.write_text(
        table("alice", "opensesame", '"compute", "metrics"')
        + table("bob", "b", '"compute"')
        + table("watcher", "w", '"metrics"')
        + table("old", "o", '"compute"', "expires = 2020-01-01T00:00:00Z\n")
    )
    arguments = ("--access-log", "--log-format", "json", "--api-key-file", str(path))
    with Serving("served_models:Obedient", *arguments) as service:
        yield service


@pytest.mark.parametrize(
    ("ask", "expected"),
    [
        (
            lambda service: service.predict("private text", x_api_key="opensesame"),
            ("POST", "/predict", 200, "alice", "served_models:Obedient"),
        ),
        (
            lambda service: service.predict("a", x_api_key="notthis"),
            ("POST", "/predict", 401, None, "served_models:Obedient"),
        ),
        (
            lambda service: service.predict("raise", x_api_key="opensesame"),
            ("POST", "/predict", 500, "alice", "served_models:Obedient"),
        ),
        (
            lambda service: service.client.get("/stats", headers={"x-api-key": "opensesame"}),
            ("GET", "/stats", 200, "alice", None),
        ),
        (  # whose key was refused
            lambda service: service.client.get("/stats", headers={"x-api-key": "b"}),
            ("GET", "/stats", 403, "bob", None),
        ),
        (
            lambda service: service.predict("a", x_api_key="w"),
            ("POST", "/predict", 403, "watcher", "served_models:Obedient"),
        ),
        (
            lambda service: service.predict("a", x_api_key="o"),
            ("POST", "/predict", 401, "old", "served_models:Obedient"),
        ),
        (lambda service: service.client.get("/nothing"), ("GET", "/nothing", 404, None, None)),
    ],
)
def test_requests_of_a_service(
    service: Serving, ask: Callable[[Serving], httpx.Response], expected: tuple[Any, ...]
) -> None:
    response = ask(service)
    id_ = response.headers["x-request-id"]
    until(lambda: any(each["request_id"] == id_ for each in access(service)))
    [line] = [each for each in access(service) if each["request_id"] == id_]
    named = ("method", "path", "status", "key", "model")
    assert tuple(line.get(name) for name in named) == expected
    assert line["bytes"] == len(response.content)
    assert line["client"] == "127.0.0.1"
    for secret in ("opensesame", "notthis", "private text"):
        assert secret not in service.log()


def test_a_stream_that_is_left(tmp_path: Path) -> None:
    with Serving(COUNTING, "--access-log", "--log-format", "json") as service:
        url = httpx.URL(service.url)
        assert url.port is not None
        with socket.create_connection((url.host, url.port)) as sock:
            sock.sendall(request(b"/predict", b'{"inputs": {"n": 1000000}, "stream": true}'))
            assert sock.recv(100)
        until(lambda: access(service))
        [line] = access(service)
        assert (line["status"], line["request_id"]) == (499, "mine")
        assert line["bytes"] > 0


def test_it_is_off_by_default() -> None:
    with Serving("served_models:kinds", "--opentelemetry", "--access-log") as traced:
        assert traced.predict(1).json() == "int 1"
        until(lambda: "POST /predict 200" in traced.log())
        assert "model=served_models:kinds" in traced.log()
    with Serving("served_models:kinds") as service:
        assert service.predict(1).json() == "int 1"
        service.terminate()
        assert "/predict" not in service.log()
