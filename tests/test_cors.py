"""Cross-origin requests: preflights, and what browsers ask of every answer."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from command_line import error_of
from serve_process import Serving, started

pytestmark = [pytest.mark.no_gevent, pytest.mark.xdist_group("cors")]

HOME, OTHER = "https://app.test", "http://b.test:8000"
EXPOSED = "X-Request-ID, Server-Timing, Retry-After, Inference-Header-Content-Length"
WANTS = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}


service = started(
    "served_models:Obedient", "--cors-origin", HOME.upper(), "--cors-origin", OTHER,
    "--api-key", "k", "--max-body", "1k",
)  # fmt: skip


open_to_all = started("served_models:double", "--cors-origin", "*")


def asked(service: Serving, origin: str | None, method: str = "GET", **more: str) -> httpx.Response:
    headers = {name.replace("_", "-"): value for name, value in more.items()}
    if origin is not None:
        headers["origin"] = origin
    return service.client.request(method, "/health/live", headers=headers)


def check_allowed(response: httpx.Response, allowed: str | None) -> None:
    """Whether scripts of an origin may read the answer."""
    headers = response.headers
    exposed = None if allowed is None else EXPOSED
    assert headers.get("access-control-allow-origin") == allowed
    assert headers.get("access-control-expose-headers") == exposed
    assert "access-control-allow-credentials" not in headers


@pytest.mark.parametrize(
    ("origin", "is_allowed"),
    [
        (HOME, True),
        (OTHER, True),
        ("https://app.test.evil", False),
        ("https://app.test:444", False),
        ("http://app.test", False),
        ("null", False),
        (None, False),
    ],
)
def test_answer_names_its_origin(service: Serving, origin: str | None, is_allowed: bool) -> None:
    response = asked(service, origin)
    assert response.status_code == 200
    assert response.headers["vary"] == "Origin"
    check_allowed(response, origin if is_allowed else None)


@pytest.mark.parametrize("origin", ["https://any.test", None])
def test_answer_allows_any_origin_if_all_are(open_to_all: Serving, origin: str | None) -> None:
    response = asked(open_to_all, origin)
    assert "vary" not in response.headers
    check_allowed(response, "*")


def test_preflight_says_what_is_allowed(service: Serving) -> None:
    response = asked(service, HOME, "OPTIONS", **WANTS)
    assert response.status_code == 204, "without a key, which browsers do not send with it"
    assert response.headers["access-control-allow-origin"] == HOME
    assert response.headers["access-control-allow-methods"] == "GET, HEAD, POST"
    assert response.headers["access-control-allow-headers"] == "authorization"
    assert response.headers["access-control-max-age"] == "3600"
    assert "Origin" in response.headers.get_list("vary")
    stranger = asked(service, "https://evil.test", "OPTIONS", **WANTS)
    assert stranger.status_code == 403
    assert "access-control-allow-origin" not in stranger.headers
    wrong: Any = {**WANTS, "access-control-request-headers": 'a"b'}
    headers = asked(service, HOME, "OPTIONS", **wrong).headers
    assert "access-control-allow-headers" not in headers, "that is no header"
    assert asked(service, HOME, "OPTIONS").status_code == 405, "that is no preflight"


@pytest.mark.parametrize("origin", ["", "a.test", "https://a.test/", "https://*.a.test", "null"])
def test_value_that_is_no_origin_is_refused(origin: str) -> None:
    assert "an origin without a path" in error_of("serve", "--cors-origin", origin)


@pytest.mark.parametrize("origin", ["*", "http://localhost:3000", "http://[::1]:80"])
def test_origin_is_accepted(origin: str) -> None:
    """The next option is the wrong one."""
    assert "--timeout" in error_of("serve", "--cors-origin", origin, "--timeout", "0")


def test_all_answers_may_be_read_by_pages_of_an_allowed_origin(service: Serving) -> None:
    origin = {"origin": HOME}
    answers: list[httpx.Response] = [
        service.predict(1, **origin, x_api_key="k"),
        service.predict(1, **origin),
        service.predict("invalid", **origin, x_api_key="k"),
        service.predict("x" * 2000, **origin, x_api_key="k"),
        service.post("/predict", {"inputs": 1, "stream": True}, **origin, x_api_key="k"),
        service.client.get("/nothing", headers=origin),
    ]
    assert [each.status_code for each in answers] == [200, 401, 422, 413, 200, 404]
    for answer in answers:
        check_allowed(answer, HOME)
        assert answer.headers["x-request-id"]
    assert "event-stream" in answers[4].headers["content-type"]
