"""What clients and proxies send beside the inputs: ids of requests, hosts, offers of protocols."""

from __future__ import annotations

import json
import re
import socket
import subprocess

import pytest

from command_line import error_of
from serve_process import Serving, started, until

pytestmark = pytest.mark.xdist_group("serve-requests")

KINDS = "served_models:kinds"


service = started("served_models:Obedient", "--max-body", "64k", "--log-format", "json")


def test_request_id_is_in_every_answer(service: Serving) -> None:
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


def test_failure_is_logged_with_the_request_id(service: Serving) -> None:
    response = service.predict("raise", x_request_id="mine/7")
    assert response.json()["error"]["id"] == "mine/7"
    until(lambda: "request mine/7 failed" in service.log())
    record = next(
        json.loads(line) for line in service.log().splitlines() if "request mine/7 failed" in line
    )
    assert record["request_id"] == "mine/7"
    unnamed = service.predict("raise")
    assert unnamed.headers["x-request-id"] == unnamed.json()["error"]["id"]


def test_request_id_is_made_when_the_request_has_none(service: Serving) -> None:
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
def test_request_id_is_ignored_when_it_is_unsafe_to_repeat(service: Serving, value: bytes) -> None:
    headers = [(b"x-request-id", value)]
    for response in (
        service.client.post("/predict", content=b'{"inputs": 1}', headers=headers),
        service.client.get("/health/live", headers=headers),
    ):
        assert response.status_code == 200
        assert response.headers["x-request-id"].encode() != value


#: Answers some hosts only: they come from the environment.
guarded = started(KINDS, SERVICE_STREAMER_ALLOWED_HOST="api.test *.b.test ::1")


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("api.test", 200),
        ("API.Test:8000", 200),
        ("api.test.", 200),
        ("a.b.test", 200),
        ("b.test", 400),
        ("xb.test", 400),
        ("api.test.evil", 400),
        ("[::1]:80", 200),
        ("127.0.0.1:1", 400),
        ("", 400),
        (":80", 400),
        ("api.test@evil", 400),
    ],
)
def test_request_is_answered_when_its_host_is_allowed(
    guarded: Serving, host: str, status: int
) -> None:
    assert guarded.predict(1, host=host).status_code == status
    assert guarded.client.get("/info", headers={"host": host}).status_code == status


@pytest.mark.parametrize("lines", [b"", b"host: api.test\r\nhost: api.test\r\n"])
def test_request_without_one_host_is_refused(guarded: Serving, lines: bytes) -> None:
    with guarded.connect() as sock:
        sock.sendall(b"GET /info HTTP/1.1\r\n%bconnection: close\r\n\r\n" % lines)
        assert answer(sock).startswith(b"HTTP/1.1 400 ")


def test_refusal_of_a_host_has_a_code_and_probes_are_answered(guarded: Serving) -> None:
    asked = [
        guarded.predict(1, host="evil.test"),
        guarded.client.get("/metrics", headers={"host": "evil.test", "x-request-id": "1"}),
    ]
    assert [each.json()["error"]["code"] for each in asked] == ["host_not_allowed"] * 2
    assert asked[1].headers["x-request-id"] == "1"
    assert guarded.ready() == 200, "a probe names an address"
    assert guarded.client.get("/v2/health/ready").status_code == 200
    assert guarded.client.get("/v2").status_code == 400


@pytest.mark.parametrize("host", ["", "http://a", "a:80", "*", "*.", "a b"])
def test_value_that_is_no_host_is_refused(host: str) -> None:
    assert "host name without scheme and port" in error_of("serve", "--allowed-host", host)


@pytest.mark.parametrize("value", ["", " "])
def test_unset_variable_does_not_allow_any_host(value: str) -> None:
    assert "--allowed-host is empty" in error_of("serve", ALLOWED_HOST=value)


def answer(sock: socket.socket) -> bytes:
    """All of it: the connection ends behind."""
    return b"".join(iter(lambda: sock.recv(1 << 16), b""))


def test_curl_with_http2(service: Serving) -> None:
    text = "x" * 60_000
    done = subprocess.run(
        ["curl", "-s", "--http2", "--data-binary", "@-", f"{service.url}/predict"],
        input=json.dumps({"inputs": text}).encode(), capture_output=True, check=True,
    )  # fmt: skip
    assert json.loads(done.stdout) == text
