"""What docs/redis.md says of users, TLS and secrets, tried on a real server."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme

import models
from conftest import PATIENCE, await_that
from service_streamer import BrokerUnavailable, RedisStreamer, RedisWorker
from service_streamer.redis.local import LocalRedis

DOCS = (Path(__file__).parent.parent / "docs" / "redis.md").read_text()


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[LocalRedis]:
    """A server with the users of the documentation, and none else."""
    users = re.findall(r"^user .*$", DOCS, re.MULTILINE)
    assert len(users) == 2
    (tmp_path / "users.acl").write_text("\n".join(["user default off", *users, ""]))
    with LocalRedis(options=("--aclfile", str(tmp_path / "users.acl"))) as server:
        yield server


def test_the_users_of_the_documentation_may_do_what_they_need(guarded: LocalRedis) -> None:
    def url(user: str) -> str:
        return f"redis://{user}:{user.upper()}_PASSWORD@127.0.0.1:{guarded.port}"

    with RedisWorker(models.double, redis_broker=url("worker"), prefix="acl") as worker:
        streamer = RedisStreamer(url("web"), "acl", PATIENCE)
        streamer.wait_ready()
        assert streamer.predict([1, 2]) == [2, 4]
        streamer.submit([3]).cancel()  # perhaps withdrawn
        streamer.close()
        assert worker.stats().outages == 0
        assert streamer.stats().outages == 0


def test_tls_with_a_certificate_of_ones_own(tmp_path: Path) -> None:
    authority = trustme.CA()
    issued = authority.issue_cert("localhost", "127.0.0.1")
    certificate, trusted = tmp_path / "redis.pem", tmp_path / "authority.pem"
    issued.private_key_and_cert_chain_pem.write_to_path(certificate)
    authority.cert_pem.write_to_path(trusted)
    with LocalRedis() as probe:  # a port that is free; nobody else binds it in between
        port = probe.port
    options = ("--tls-port", str(port), "--tls-auth-clients", "no")
    options += ("--tls-cert-file", str(certificate), "--tls-key-file", str(certificate))
    options += ("--tls-ca-cert-file", str(trusted))
    try:
        server = LocalRedis(options=options).start()
    except RuntimeError as error:
        if "tls" not in str(error):
            raise
        pytest.skip("this redis-server was built without TLS")
    try:
        url = f"rediss://localhost:{port}/0"
        good = f"{url}?ssl_ca_certs={trusted}"
        with (
            RedisWorker(models.double, redis_broker=good),
            RedisStreamer(good, worker_timeout=PATIENCE) as streamer,
        ):
            assert streamer.predict([1]) == [2]
        with RedisStreamer(url, worker_timeout=0.01) as streamer:
            with pytest.raises(BrokerUnavailable, match="certificate verify failed"):
                streamer.wait_ready(0)
            await_that(lambda: "disconnected" in repr(streamer))
            with pytest.raises(BrokerUnavailable, match="certificate verify failed"):
                streamer.predict([1])
    finally:
        server.stop()
