"""A worker host that can be probed and scraped (``worker --port``), and what it does on signals."""

from __future__ import annotations

import dataclasses
import os
import re
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import models
from conftest import PATIENCE, await_that
from serve_process import Serving, figures_in, run, until
from service_streamer import RedisStreamer, RedisWorker, RedisWorkerStats, run_redis_workers_forever
from service_streamer.redis.local import LocalRedis
from service_streamer.serve.http.hosting import standing
from service_streamer.testing import Gate


def watched(*arguments: str, **env: str) -> Serving:
    """A worker host with a port of its own; returns when that answers."""
    host = Serving(*arguments, "--port", "0", role="worker", **env)
    found = until(lambda: re.search(r" are at (127\.0\.0\.1:\d+)", host.log()))
    host.url = f"http://{found[1]}"
    return host


@pytest.fixture
def server() -> Iterator[LocalRedis]:
    with LocalRedis() as server:
        yield server


def told(host: Serving) -> tuple[int, str, str]:
    answer = host.client.get("/health/ready")
    return answer.status_code, answer.json()["status"], answer.json()["detail"]


def test_a_host_is_ready_when_it_serves_and_not_while_redis_is_away(
    server: LocalRedis, gate: Gate
) -> None:
    redis, folder = ("--redis", server.url), str(gate.__getstate__())
    with watched("served_models:Late", *redis, TEST_GATE=folder) as host:
        assert host.client.get("/health/live").json() == {"status": "live"}
        until(lambda: told(host) == (503, "starting", "the model is loading"))
        gate.let_through()
        until(lambda: told(host) == (200, "ready", "the worker host is serving"))
        with RedisStreamer(server.url, worker_timeout=PATIENCE) as streamer:
            assert streamer.predict([1, 2]) == [1, 2]
            until(lambda: streamer.stats().models == ("served_models:Late",))
        metrics = until(lambda: metrics_of(host, claimed_total=1.0))
        assert metrics["ready"] == metrics["redis_connected"] == 1
        assert metrics["batch_size_sum"] == 2
        assert metrics['info{version=""}'] == 1
        assert host.client.get("/stats").json()["claimed"] == 1
        server.kill()
        until(lambda: told(host) == (503, "failing", "Redis cannot be reached"))
        assert metrics_of(host)["redis_connected"] == 0
        assert host.client.get("/health/live").status_code == 200
        server.start()
        until(lambda: told(host)[0] == 200)
        assert host.client.get("/nothing").status_code == 404
        assert host.client.post("/stats").status_code == 405
        assert host.terminate() == 0


def metrics_of(host: Serving, **expected: float) -> dict[str, float]:
    """By their names without our prefix; empty if these are not as expected."""
    text = host.client.get("/metrics").text
    found = figures_in(text)
    found |= {re.sub(r'version="[^"]*"', 'version=""', name): v for name, v in found.items()}
    return found if all(found.get(name) == value for name, value in expected.items()) else {}


def test_nothing_listens_without_a_port(server: LocalRedis) -> None:
    with Serving("served_models:double", "--redis", server.url, role="worker") as host:
        with RedisStreamer(server.url, worker_timeout=PATIENCE) as streamer:
            assert streamer.predict([1]) == [2]
        sockets = listening(host.process.pid)
        assert sockets == []
        assert host.terminate() == 0


def listening(pid: int) -> list[str]:
    inodes = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        inodes |= set(re.findall(r"socket:\[(\d+)\]", str(descriptor.readlink())))
    rows = [line.split() for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]]
    return [row[1] for row in rows if row[3] == "0A" and row[9] in inodes]


def test_a_model_that_cannot_be_loaded_ends_the_host_and_its_port(server: LocalRedis) -> None:
    done = run("worker", "served_models:Failing", "--port", "0", "--redis", server.url)
    assert done.returncode == 3
    assert "the worker host cannot serve" in done.stderr
    with socket.create_server(("127.0.0.1", 0)) as taken:  # so does a port that is taken
        port = str(taken.getsockname()[1])
        done = run("worker", "served_models:double", "--port", port)
    assert done.returncode == 4
    assert f"cannot listen at 127.0.0.1:{port}" in done.stderr


@pytest.mark.long
def test_the_exit_code_tells_of_calls_left_behind_where_redis_hangs(
    server: LocalRedis, gate: Gate
) -> None:
    folder = str(gate.__getstate__())
    with (
        watched("served_models:Obedient", "--redis", server.url, TEST_GATE=folder) as host,
        RedisStreamer(server.url, drain_timeout=0.1) as streamer,
    ):
        future = streamer.submit([1])
        gate.await_arrival()
        server.pause()
        host.process.send_signal(signal.SIGTERM)
        until(lambda: told(host)[1] == "draining")
        gate.let_through()
        assert host.process.wait(20) == 6, "it took 26 s before"
        assert "1 call claimed by this worker host could not be answered" in host.log()
        server.resume()
        assert not future.done()


STATES = [
    ({}, "ready", "is serving"),
    ({"state": "failed"}, "broken", "see its log"),
    ({"state": "leaving"}, "draining", "stopping"),
    ({"state": "disconnected"}, "failing", "Redis"),
    ({"state": "starting"}, "starting", "is waiting to join"),
    ({"state": "starting", "idle": 0}, "starting", "loading"),
    ({"idle": 0}, "starting", "being restarted"),
    ({"idle": 0, "busy": 1}, "ready", "is serving"),
    ({"pool": "broken"}, "broken", "keeps retrying"),
    ({"state": "failed", "pool": "broken"}, "broken", "keeps retrying"),
    ({"trouble": "every worker hangs"}, "failing", "every worker hangs"),
]


@pytest.mark.parametrize(("given", "state", "text"), STATES)
def test_how_a_host_stands(given: dict[str, Any], state: str, text: str) -> None:
    pool: Any = SimpleNamespace(
        state=given.get("pool", "running"),
        workers={"idle": given.get("idle", 1), "busy": given.get("busy", 0)},
        trouble=given.get("trouble"),
    )
    zeros = dict.fromkeys((each.name for each in dataclasses.fields(RedisWorkerStats)), 0)
    stats = RedisWorkerStats(
        **{**zeros, "pool": pool, "state": given.get("state", "serving")}  # type: ignore[arg-type]
    )
    found, detail = standing(stats)
    assert found == state
    assert text in detail
    assert standing(None)[0] == "starting"


def test_a_host_that_cannot_say_how_it_stands_still_ends(
    redis_server: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(worker: RedisWorker) -> str:
        raise ZeroDivisionError

    def send_signals() -> None:
        await_that(lambda: signal.getsignal(signal.SIGTERM) is not before)
        os.kill(os.getpid(), signal.SIGUSR1)
        await_that(lambda: "could not be logged" in caplog.text)
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(RedisWorker, "explain", fail)
    before = signal.getsignal(signal.SIGTERM)
    sender = threading.Thread(target=send_signals)
    sender.start()
    run_redis_workers_forever(
        models.double, redis_broker=redis_server, prefix="signals", mp_start_method="fork"
    )
    sender.join()
    assert signal.getsignal(signal.SIGTERM) is before
