"""What clients and proxies send beside the inputs: ids of requests, hosts, offers of protocols."""

from __future__ import annotations

import json
import re
import socket
import subprocess
from collections.abc import Iterator
from http.client import parse_headers
from typing import Any

import httpx
import openai
import pytest

from serve_process import Serving, run, until
from service_streamer.serve.http.headers import is_allowed_host
from service_streamer.serve.http.http_exchange import find_request_id
from service_streamer.serve.http.refusals import undecodable

KINDS = "served_models:kinds"


@pytest.fixture(scope="module")
def service() -> Iterator[Serving]:
    with Serving("served_models:Obedient", "--max-body", "64k", "--log-format", "json") as service:
        yield service


# -- X-Request-ID


def test_an_id_is_in_every_answer(service: Serving) -> None:
    named = {"x-request-id": "a-1"}
    asked = [
        service.predict("a", x_request_id="a-1"),
        service.predict("invalid", x_request_id="a-1"),
        service.predict("raise", x_request_id="a-1"),
        service.predict("x" * (64 << 10), x_request_id="a-1"),
        service.post("/v1/completions", {}, x_request_id="a-1"),
        service.client.get("/health/live", headers=named),
        service.client.get("/nothing", headers=named),
        service.client.put("/predict", headers=named),
        service.client.get("/", headers=named),
    ]
    assert [each.status_code for each in asked] == [200, 422, 500, 413, 404, 200, 404, 405, 200]
    assert [each.headers.get_list("x-request-id") for each in asked] == [["a-1"]] * len(asked)


def test_a_failure_is_logged_under_the_id(service: Serving) -> None:
    response = service.predict("raise", x_request_id="mine/7")
    assert response.json()["error"]["id"] == "mine/7"
    until(lambda: "request mine/7 failed" in service.log())
    record = next(
        json.loads(line) for line in service.log().splitlines() if "request mine/7 failed" in line
    )
    assert record["request_id"] == "mine/7"
    unnamed = service.predict("raise")
    assert unnamed.headers["x-request-id"] == unnamed.json()["error"]["id"]


def test_an_id_is_made_for_a_request_without_one(service: Serving) -> None:
    asked = [
        service.predict("a"),
        service.predict("invalid"),
        service.client.get("/health/live"),
        service.client.get("/nothing"),
    ]
    made = [each.headers["x-request-id"] for each in asked]
    assert len({*made}) == 4
    assert all(re.fullmatch(r"[0-9a-f]{12}-[0-9a-f]+", each) for each in made)


@pytest.mark.parametrize("value", [b"", b"a b", b"\xff", b"a\tb", b"x" * 129])
def test_an_id_that_may_not_be_repeated_is_ignored(service: Serving, value: bytes) -> None:
    headers = [(b"x-request-id", value)]
    assert find_request_id(headers) is None
    for response in (
        service.client.post("/predict", content=b'{"inputs": 1}', headers=headers),
        service.client.get("/health/live", headers=headers),
    ):
        assert response.status_code == 200
        assert response.headers["x-request-id"].encode() != value


# -- hosts


@pytest.mark.parametrize(
    ("host", "is_allowed"),
    [
        ("api.test", True),
        ("API.Test:8000", True),
        ("api.test.", True),
        ("a.b.test", True),
        ("b.test", False),
        ("xb.test", False),
        ("api.test.evil", False),
        ("[::1]:80", True),
        ("127.0.0.1:1", True),
        ("", False),
        (":80", False),
        ("api.test@evil", False),
    ],
)
def test_hosts(host: str, is_allowed: bool) -> None:
    allowed = ("api.test", "*.b.test", "::1", "127.0.0.1")
    headers = [(b"accept", b"*/*"), (b"host", host.encode())]
    assert is_allowed_host(allowed, headers) is is_allowed
    assert not is_allowed_host(allowed, headers[:1])
    assert not is_allowed_host(allowed, [*headers, headers[1]])


def test_other_hosts_are_refused() -> None:
    with Serving(KINDS, "--allowed-host", "api.test", "--allowed-host", "*.b.test") as service:
        asked = [
            service.predict(1, host="evil.test"),
            service.client.get("/", headers={"host": "evil.test"}),
            service.client.get("/metrics", headers={"host": "evil.test", "x-request-id": "1"}),
        ]
        for response in asked:
            assert response.status_code == 400
            assert response.json()["error"]["code"] == "host_not_allowed"
        assert asked[2].headers["x-request-id"] == "1"
        assert service.predict(1, host="api.test:80").json() == "int 1"
        assert service.predict(1, host="a.b.test").json() == "int 1"
        assert service.ready() == 200, "a probe names an address"
        assert service.client.get("/v2/health/ready").status_code == 200
        assert service.client.get("/v2").status_code == 400


@pytest.mark.parametrize("host", ["", "http://a", "a:80", "*", "*.", "a b"])
def test_what_is_no_host(host: str) -> None:
    done = run("serve", KINDS, "--port", "0", "--allowed-host", host)
    assert done.returncode == 2
    assert "must be a host name without scheme and port" in done.stderr


@pytest.mark.parametrize("value", ["", " "])
def test_an_unset_variable_does_not_allow_any_host(value: str) -> None:
    done = run("serve", KINDS, "--port", "0", SERVICE_STREAMER_ALLOWED_HOST=value)
    assert (done.returncode, "--allowed-host is empty" in done.stderr) == (2, True)


def test_hosts_from_the_environment() -> None:
    with Serving(KINDS, SERVICE_STREAMER_ALLOWED_HOST="a.test *.b.test") as service:
        assert service.predict(1, host="x.b.test").status_code == 200
        assert service.predict(1, host="127.0.0.1").status_code == 400


# -- offers of another protocol


H2C = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABk\r\n"


def connection(service: Serving) -> socket.socket:
    url = httpx.URL(service.url)
    return socket.create_connection((url.host, url.port))


def answer(sock: socket.socket) -> bytes:
    """All of it: the connection ends behind."""
    return b"".join(iter(lambda: sock.recv(1 << 16), b""))


@pytest.mark.parametrize("size", [10, 60_000])
def test_curl_with_http2(service: Serving, size: int) -> None:
    body = json.dumps({"inputs": "x" * size}).encode()
    done = subprocess.run(
        ["curl", "-s", "--http2", "--data-binary", "@-", f"{service.url}/predict"],
        input=body, capture_output=True, check=True,
    )  # fmt: skip
    assert json.loads(done.stdout) == "x" * size


def test_a_body_behind_an_offer_wherever_it_is_cut(service: Serving) -> None:
    head = b"POST /predict HTTP/1.1\r\nhost: a\r\n" + H2C
    chunks = (
        b'transfer-encoding: chunked\r\n\r\n5\r\n{"inp\r\n9\r\nuts": "a"\r\n1\r\n}\r\n0\r\n\r\n'
    )
    behind = b"POST /predict HTTP/1.1\r\nhost: a\r\ncontent-length: 3\r\n\r\nxyz"
    sent = head + chunks + behind
    for cut in range(0, len(sent), 5):
        with connection(service) as sock:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.sendall(sent[:cut])
            sock.sendall(sent[cut:])
            told = answer(sock)
        assert told.startswith(b"HTTP/1.1 200 ")
        assert told.endswith(b'\r\n\r\n"a"')


CHUNKED = b"POST /predict HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n"


@pytest.mark.parametrize(
    "head",
    [
        b"POST /predict HTTP/1.1\r\nhost: a\r\nx-a: ",
        b"POST /predict HTTP/1.1\r\nhost: a\r\nx-a",
        CHUNKED + b"\r\n0\r\nx-a: ",
        CHUNKED + b"\r\n1;",
        CHUNKED + H2C + b"\r\n0\r\nx-a: ",
        CHUNKED.replace(b"predict", b"nothing") + b"\r\n0\r\nx-a: ",
    ],
    ids=["value", "name", "trailer", "extension", "trailer behind an offer", "of no page"],
)
def test_a_header_without_an_end_is_cut_off(service: Serving, head: bytes) -> None:
    """What has no end must not be kept: the next part of it would be copied with all before."""
    with connection(service) as sock:
        sock.sendall(head)
        with pytest.raises(ConnectionError):
            sock.sendall(b"x" * (64 << 20))
    assert service.predict("a").json() == "a"


def test_a_body_that_nobody_reads_is_no_header(service: Serving) -> None:
    """Its sender gets the answer, and may go on with the connection."""
    size = 8 << 20
    with connection(service) as sock:
        sock.sendall(b"POST /nothing HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n" % size)
        with sock.makefile("rb") as reader:  # head and body may come apart
            assert reader.readline().startswith(b"HTTP/1.1 404 ")
            headers = parse_headers(reader)
            assert json.loads(reader.read(int(headers["content-length"])))["error"]
        sock.sendall(b"x" * size)
        sock.sendall(b"GET /health/live HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n")
        assert answer(sock).startswith(b"HTTP/1.1 200 ")


def test_an_offer_without_a_body(service: Serving) -> None:
    for offer in (H2C, b"connection: upgrade\r\nupgrade: websocket\r\n"):
        with connection(service) as sock:
            sock.sendall(b"GET /health/live HTTP/1.1\r\nhost: a\r\n" + offer + b"\r\n")
            assert answer(sock).endswith(b'{"status":"live"}')


def test_an_offer_with_a_body_that_is_too_large_or_broken(service: Serving) -> None:
    head = b"POST /predict HTTP/1.1\r\nhost: a\r\n" + H2C
    with connection(service) as sock:
        sock.sendall(head + b"content-length: 70000\r\n\r\n" + b" " * 70_000)
        assert answer(sock).startswith(b"HTTP/1.1 413 ")
    with connection(service) as sock:
        sock.sendall(head + b"transfer-encoding: chunked\r\n\r\nxx\r\n")
        assert answer(sock).startswith(b"HTTP/1.1 400 ")
    assert service.predict("a").json() == "a"


# -- OpenAI's


def test_models() -> None:
    with (
        Serving("served_models:kinds", "--api-key", "right") as service,
        openai.OpenAI(base_url=f"{service.url}/v1", api_key="right") as client,
    ):
        [model] = client.models.list().data
        assert client.models.retrieve(model.id) == model
        with pytest.raises(openai.NotFoundError) as caught:
            client.models.retrieve("org/other")
        assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
        assert "model: no model 'org/other'" in caught.value.message
        with pytest.raises(openai.AuthenticationError) as wrong:
            client.with_options(api_key="wrong").models.retrieve("org/other")
        assert wrong.value.code == "invalid_api_key"
        metrics = client.get("/../metrics", cast_to=httpx.Response).text
        assert 'path="/v1/models/{model}",status="401"' in metrics
        assert "org" not in metrics


# -- words


@pytest.mark.parametrize(
    ("sent", "code", "says"),
    [
        (
            {"input": "a"},
            "unknown_parameter",
            "unknown field `input`; did you mean `inputs`?",
        ),
        ({"inputs": "a", "zzz": 1}, "unknown_parameter", "unknown field `zzz`"),
        ({}, "missing_required_parameter", "missing field `inputs`"),
        ({"inputs": 1, "parameters": 1}, "invalid_type", "parameters: expected object, got int"),
        ([], "invalid_type", "the body: expected object, got array"),
    ],
)
def test_codes_of_wrong_bodies(service: Serving, sent: Any, code: str, says: str) -> None:
    error = service.post("/predict", sent).json()["error"]
    assert (error["code"], error["message"]) == (code, says)


def test_every_other_error_has_a_code(service: Serving) -> None:
    assert undecodable(UnicodeDecodeError("utf-8", b"", 0, 1, "")).body.count(b'"invalid_json"')
    for response, code in (
        (service.post("/predict", b"{"), "invalid_json"),
        (service.post("/predict", b""), "invalid_json"),
        (service.predict("invalid"), "invalid_value"),
        (service.predict("raise"), "model_failed"),
        (service.predict(["a"] * 2000), "too_many_inputs"),
        (service.predict("x" * (64 << 10)), "request_too_large"),
        (service.predict("a", x_request_timeout="x"), "invalid_value"),
        (service.post("/generate", {"text": "a"}), "unsupported_operation"),
        (service.client.get("/nothing"), "not_found"),
        (service.client.get("/predict"), "method_not_allowed"),
    ):
        assert response.json()["error"]["code"] == code
