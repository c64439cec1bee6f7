"""The access log: one line for each request, and nothing in it that a client could forge."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from http_in_process import post
from serve_process import Serving, key_table, until

pytestmark = [pytest.mark.no_gevent, pytest.mark.xdist_group("access-log")]


def request(
    target: bytes = b"/predict", body: bytes = b'{"inputs": 1}', method: bytes = b"POST"
) -> bytes:
    """A request of alice's."""
    return post(body, b"x-api-key: opensesame\r\n", target).replace(b"POST", method, 1)


CHUNKED = (
    b"POST /predict HTTP/1.1\r\nhost: a\r\nx-api-key: opensesame\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)


def access(service: Serving) -> list[dict[str, Any]]:
    records = [json.loads(line) for line in service.log().splitlines() if line.startswith("{")]
    return [each for each in records if each["logger"] == "service_streamer.access"]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    path = tmp_path_factory.mktemp("keys") / "keys.toml"
    path.write_text(
        key_table("alice", "opensesame", scopes=["compute", "metrics"])
        + key_table("bob", "b")
        + key_table("watcher", "w", scopes=["metrics"])
        + key_table("old", "o", "expires = 2020-01-01T00:00:00Z")
    )
    arguments = ("--access-log", "--log-format", "json", "--api-key-file", str(path))
    with Serving("served_models:Obedient", *arguments) as service:
        yield service


@pytest.mark.parametrize(
    ("path", "key", "inputs", "status", "name"),
    [
        ("/predict", "opensesame", "private text", 200, "alice"),
        ("/predict", "notthis", "private text", 401, None),
        ("/predict", "opensesame", "raise", 500, "alice"),
        ("/predict", "w", "private text", 403, "watcher"),
        ("/predict", "o", "private text", 401, "old"),
        ("/stats", "opensesame", None, 200, "alice"),
        ("/stats", "b", None, 403, "bob"),
        ("/nothing", "", None, 404, None),
    ],
)
def test_line_has_the_key_and_the_model_but_no_secret(
    service: Serving, path: str, key: str, inputs: str | None, status: int, name: str | None
) -> None:
    if inputs is None:
        response = service.client.get(path, headers={"x-api-key": key})
        method, model = "GET", None
    else:
        response = service.predict(inputs, x_api_key=key)
        method, model = "POST", "served_models:Obedient"
    id_ = response.headers["x-request-id"]
    until(lambda: any(each.get("request_id") == id_ for each in access(service)))
    [line] = [each for each in access(service) if each.get("request_id") == id_]
    found = tuple(line.get(each) for each in ("method", "path", "status", "key", "model"))
    assert found == (method, path, status, name, model)
    assert line["bytes"] == len(response.content)
    assert line["client"] == "127.0.0.1"
    for secret in ("opensesame", "notthis", "private text"):
        assert secret not in service.log()


def logged_for(
    service: Serving, sent: bytes, count: int, leaves: Callable[[socket.socket], Any] | None = None
) -> list[Any]:
    """The lines of what a client sends on one connection.

    Args:
        leaves: given if the client leaves before the lines are there: what it does before.
    """
    before = len(access(service))
    with service.connect() as sock:
        sock.sendall(sent)
        if leaves is None:
            until(lambda: len(access(service)) >= before + count)
        else:
            leaves(sock)
    until(lambda: len(access(service)) >= before + count)
    assert service.predict("a", x_api_key="opensesame", x_request_id="last").status_code == 200
    until(lambda: access(service)[-1].get("request_id") == "last")
    return access(service)[before:-1]


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
def test_path_is_logged_escaped_without_query(service: Serving, target: bytes, path: str) -> None:
    [line] = logged_for(service, request(target), 1)
    assert line["path"] == path


def test_access_log_is_plain_text_with_opentelemetry() -> None:
    """Of several web processes none traces the batches of the pool, which it does not see."""
    arguments = ("--opentelemetry", "--access-log", "--web-workers", "2")
    with Serving("served_models:kinds", *arguments) as traced:
        assert traced.predict(1).json() == "int 1"
        until(lambda: "POST /predict 200" in traced.log())
        assert "model=served_models:kinds" in traced.log()
