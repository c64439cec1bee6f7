"""Cross-origin requests: preflights, and what browsers ask of every answer."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from serve_process import Serving, run
from service_streamer.options.kinds import Origin
from service_streamer.serve.http.cors import CrossOrigin
from stub_exchange import StubClient

pytestmark = pytest.mark.no_gevent

HOME = "https://app.test"
EXPOSED = "X-Request-ID, Server-Timing, Retry-After, Inference-Header-Content-Length"


def headers_of(origins: tuple[str, ...], request: bytes) -> dict[str, list[str]]:
    """Those of the answer, with its status as "status"."""

    async def site(exchange: Any) -> None:
        exchange.answer(200, (), b"")

    async def talk() -> bytes:
        client = StubClient(CrossOrigin(site, origins))
        client.send(request)
        for _ in range(10):
            await asyncio.sleep(0)
        client.leave()
        return client.received

    first, *rest = asyncio.run(talk()).partition(b"\r\n\r\n")[0].decode().split("\r\n")
    found: dict[str, list[str]] = {"status": [first.split()[1]]}
    for line in rest:
        name, _, value = line.partition(": ")
        found.setdefault(name, []).append(value)
    return found


def asked(origin: str | None = HOME, method: str = "GET", *more: str) -> bytes:
    lines = [f"{method} / HTTP/1.1", "host: a", *more]
    if origin is not None:
        lines.append(f"origin: {origin}")
    return "\r\n".join([*lines, "", ""]).encode()


WANTS = ("access-control-request-method: POST", "access-control-request-headers: authorization")


@pytest.mark.parametrize(
    ("origins", "origin", "allowed", "vary"),
    [
        ((HOME,), HOME, [HOME], ["Origin"]),
        ((HOME, "http://b.test:8000"), "http://b.test:8000", ["http://b.test:8000"], ["Origin"]),
        ((HOME,), "https://app.test.evil", None, ["Origin"]),
        ((HOME,), "https://app.test:444", None, ["Origin"]),
        ((HOME,), "http://app.test", None, ["Origin"]),
        ((HOME,), "null", None, ["Origin"]),
        ((HOME,), None, None, ["Origin"]),
        (("*",), "https://any.test", ["*"], None),
        (("*",), None, ["*"], None),
    ],
)
def test_answers(
    origins: tuple[str, ...], origin: str | None, allowed: Any, vary: list[str] | None
) -> None:
    found = headers_of(origins, asked(origin))
    assert found["status"] == ["200"]
    assert found.get("access-control-allow-origin") == allowed
    assert found.get("access-control-expose-headers") == (None if allowed is None else [EXPOSED])
    assert found.get("vary") == vary
    assert "access-control-allow-credentials" not in found


def test_a_preflight() -> None:
    found = headers_of((HOME,), asked(HOME, "OPTIONS", *WANTS))
    assert found["status"] == ["204"]
    assert found["access-control-allow-origin"] == [HOME]
    assert "POST" in found["access-control-allow-methods"][0]
    assert found["access-control-allow-headers"] == ["authorization"]
    assert found["access-control-max-age"] == ["3600"]
    assert any("Origin" in each for each in found["vary"])


def test_a_preflight_from_elsewhere() -> None:
    found = headers_of((HOME,), asked("https://evil.test", "OPTIONS", *WANTS))
    assert found["status"] == ["403"]
    assert "access-control-allow-origin" not in found


def test_names_that_are_no_headers_are_not_repeated() -> None:
    wants = (WANTS[0], 'access-control-request-headers: a"b')
    found = headers_of((HOME,), asked(HOME, "OPTIONS", *wants))
    assert "access-control-allow-headers" not in found


def test_options_of_another_kind_reach_the_site() -> None:
    assert headers_of((HOME,), asked(HOME, "OPTIONS"))["status"] == ["200"]


@pytest.mark.parametrize(
    "origin", ["*", "https://a.test", "http://localhost:3000", "http://[::1]:80", "HTTPS://A.test"]
)
def test_origins(origin: str) -> None:
    assert Origin().parse(origin) == origin.lower()


@pytest.mark.parametrize("origin", ["", "a.test", "https://a.test/", "https://*.a.test", "null"])
def test_what_is_no_origin(origin: str) -> None:
    done = run("serve", "served_models:kinds", "--port", "0", "--cors-origin", origin)
    assert done.returncode == 2
    assert "an origin without a path" in done.stderr


@pytest.fixture(scope="module")
def service() -> Iterator[Serving]:
    arguments = ("--cors-origin", HOME, "--api-key", "k", "--max-body", "1k")
    with Serving("served_models:Obedient", *arguments) as service:
        yield service


def test_a_browser_asks_the_service(service: Serving) -> None:
    origin = {"origin": HOME}
    wants = dict(line.split(": ") for line in WANTS)
    preflight = service.client.options("/predict", headers={**origin, **wants})
    assert preflight.status_code == 204, "without a key, which browsers do not send with it"
    answers: list[httpx.Response] = [
        preflight,
        service.predict(1, **origin, x_api_key="k"),
        service.predict(1, **origin),
        service.predict("invalid", **origin, x_api_key="k"),
        service.predict("x" * 2000, **origin, x_api_key="k"),
        service.post("/predict", {"inputs": 1, "stream": True}, **origin, x_api_key="k"),
        service.client.get("/health/live", headers=origin),
        service.client.get("/nothing", headers=origin),
    ]
    statuses = [204, 200, 401, 422, 413, 200, 200, 404]
    assert [each.status_code for each in answers] == statuses
    for answer in answers:
        assert answer.headers["access-control-allow-origin"] == HOME
        assert answer.headers["x-request-id"]
    assert "event-stream" in answers[5].headers["content-type"]
    elsewhere = service.client.get("/health/live", headers={"origin": "https://evil.test"})
    assert "access-control-allow-origin" not in elsewhere.headers
