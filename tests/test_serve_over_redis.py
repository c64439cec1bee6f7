"""``serve --redis`` and ``worker`` that are not set up alike: readiness says what is wrong."""

from __future__ import annotations

import httpx
import pytest

from serve_process import Serving, until
from service_streamer.redis.local import LocalRedis

SECRET = "a secret of sixteen bytes"


def refusal(service: Serving) -> httpx.Response | None:
    """Why it is not ready, as soon as it knows."""
    if "could not read this call" not in service.log():
        return None
    answer = service.client.get("/health/ready")
    return answer if answer.json()["status"] == "failing" else None


@pytest.mark.long
def test_another_secret_is_told_by_readiness_and_heals() -> None:
    port = str(LocalRedis().port)  # one that is free
    with (
        LocalRedis() as server,
        Serving("--redis", server.url, "--secret", SECRET, "--port", port, ready=False) as service,
    ):
        service.url = f"http://127.0.0.1:{port}"
        redis = ("served_models:double", "--redis", server.url)
        with Serving(*redis, "--secret", SECRET[::-1], role="worker") as stranger:
            answer = until(lambda: refusal(service))
            assert answer.status_code == 503
            assert answer.json() == {
                "status": "failing",
                "detail": "a worker host could not read this call: the signature is wrong; give "
                "clients and worker hosts the same secret",
            }
            assert stranger.terminate() == 0
        with Serving(*redis, "--secret", SECRET, role="worker"):
            until(lambda: service.ready() == 200)
            assert service.predict([1]).json() == [2]
