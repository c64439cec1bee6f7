"""The access log: one line for each request, and nothing in it that a client could forge."""

from __future__ import annotations

import contextlib
import hashlib
import json
import socket
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from serve_process import Serving, until

pytestmark = pytest.mark.no_gevent


def request(
    target: bytes = b"/predict", body: bytes = b'{"inputs": 1}', method: bytes = b"POST"
) -> bytes:
    """A request of alice's."""
    head = b"%b %b HTTP/1.1\r\nhost: a\r\nx-api-key: opensesame\r\ncontent-length: %d\r\n\r\n"
    return head % (method, target, len(body)) + body


CHUNKED = (
    b"POST /predict HTTP/1.1\r\nhost: a\r\nx-api-key: opensesame\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)


def access(service: Serving) -> list[dict[str, Any]]:
    records = [json.loads(line) for line in service.log().splitlines() if line.startswith("{")]
    return [each for each in records if each["logger"] == "service_streamer.access"]


def key_table(name: str, key: str, scopes: str, more: str = "") -> str:
    digest = hashlib.sha256(key.encode()).hexdigest()
    return f'[{name}]\nhash = "sha256:{digest}"\nscopes = [{scopes}]\n{more}'


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    path = tmp_path_factory.mktemp("keys") / "keys.toml"
    path.write_text(
        key_table("alice", "opensesame", '"compute", "metrics"')
        + key_table("bob", "b", '"compute"')
        + key_table("watcher", "w", '"metrics"')
        + key_table("old", "o", '"compute"', "expires = 2020-01-01T00:00:00Z\n")
    )
    arguments = ("--access-log", "--log-format", "json", "--api-key-file", str(path))
    with Serving("served_models:Obedient", *arguments) as service:
        yield service


@pytest.mark.xdist_group("access-log")
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
def test_line_has_the_key_and_the_model_but_no_secret(
    service: Serving, ask: Callable[[Serving], httpx.Response], expected: tuple[Any, ...]
) -> None:
    response = ask(service)
    id_ = response.headers["x-request-id"]
    until(lambda: any(each.get("request_id") == id_ for each in access(service)))
    [line] = [each for each in access(service) if each.get("request_id") == id_]
    named = ("method", "path", "status", "key", "model")
    assert tuple(line.get(name) for name in named) == expected
    assert line["bytes"] == len(response.content)
    assert line["client"] == "127.0.0.1"
    for secret in ("opensesame", "notthis", "private text"):
        assert secret not in service.log()


@contextlib.contextmanager
def connection(service: Serving) -> Iterator[socket.socket]:
    url = httpx.URL(service.url)
    assert url.port is not None
    with socket.create_connection((url.host, url.port)) as sock:
        yield sock


def logged_for(
    service: Serving, sent: bytes, count: int, leaves: Callable[[socket.socket], Any] | None = None
) -> list[Any]:
    """The lines of what a client sends on one connection.

    Args:
        leaves: given if the client leaves before the lines are there: what it does before.
    """
    before = len(access(service))
    with connection(service) as sock:
        sock.sendall(sent)
        if leaves is None:
            until(lambda: len(access(service)) >= before + count)
        else:
            leaves(sock)
    until(lambda: len(access(service)) >= before + count)
    assert service.predict("a", x_api_key="opensesame", x_request_id="last").status_code == 200
    until(lambda: access(service)[-1].get("request_id") == "last")
    return access(service)[before:-1]


@pytest.mark.xdist_group("access-log")
@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        (request() + request(b"/decode"), [("/predict", 200, 1), ("/decode", 404, None)]),
        (request(b"/", b"", b"HEAD"), [("/", 200, 0)]),
        (b"nonsense\r\n\r\n", [("-", 400, 30)]),
        (CHUNKED + b"zz\r\n", [("/predict", 400, 30)]),
        (b"", []),
    ],
)  # fmt: skip
def test_access_log_has_one_line_for_each_request(
    service: Serving, sent: bytes, expected: list[tuple[str, int, int | None]]
) -> None:
    found = logged_for(service, sent, len(expected))
    assert [(each["path"], each["status"]) for each in found] == [each[:2] for each in expected]
    for line, (_, _, size) in zip(found, expected, strict=True):
        assert size is None or line["bytes"] == size
        assert 0 <= line.get("seconds", 0) < 300


@pytest.mark.xdist_group("access-log")
def test_requests_of_a_client_that_left_are_logged_as_499(service: Serving) -> None:
    [line] = logged_for(service, request()[:-1], 1, leaves=socket.socket.fileno)
    assert (line["path"], line["status"], line["bytes"]) == ("/predict", 499, 0)
    sent = request(b"/events", b"", b"GET") + request()
    found = logged_for(service, sent, 2, leaves=lambda sock: sock.recv(100))
    assert found[0]["bytes"] > 0
    assert [(each["path"], each["status"]) for each in found] == [
        ("/events", 499),
        ("/predict", 499),
    ]


@pytest.mark.xdist_group("access-log")
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
def test_path_is_logged_without_its_query_and_escaped(
    service: Serving, target: bytes, path: str
) -> None:
    [line] = logged_for(service, request(target), 1)
    assert line["path"] == path


def test_access_log_is_plain_text_with_opentelemetry() -> None:
    with Serving("served_models:kinds", "--opentelemetry", "--access-log") as traced:
        assert traced.predict(1).json() == "int 1"
        until(lambda: "POST /predict 200" in traced.log())
        assert "model=served_models:kinds" in traced.log()
