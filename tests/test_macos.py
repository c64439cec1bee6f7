"""What runs without the calls that only Linux has: in processes that do not find them.

``tests/stubs/macos/sitecustomize.py`` takes them away. It has no native code of macOS, so this is
no replacement for a run there.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from command_line import have_cores, launched
from serve_process import ROOT, Serving, command

MODELS = """
import os
import sys

from service_streamer import ManagedModel


class Length(ManagedModel):
    def init_model(self):
        assert sys.platform == "darwin"  # in the worker, too

    def predict(self, batch):
        if "die" in batch:
            os._exit(3)
        return [len(item) for item in batch]


class Staged(ManagedModel):
    def init_model(self):
        pass

    def preprocess(self, batch):
        return [item * 2 for item in batch]

    def forward(self, batch):
        return batch

    def postprocess(self, batch):
        return [len(item) for item in batch]
"""

PROGRAM = """
import threading

from models_of_macos import Length, Staged
from service_streamer import RedisStreamer, RedisWorker, Streamer, ThreadedStreamer, WorkerLost
from service_streamer.redis.local import LocalRedis

if __name__ == "__main__":
    with Streamer(Length, worker_num=2) as streamer:
        print(streamer.predict(["a", "b" * 1_000_000]))
        try:
            streamer.predict(["die"])
        except WorkerLost as error:
            print(type(error).__name__)
        print(streamer.predict(["abc"]))
    with Streamer(Staged, preprocess_workers=2) as streamer:
        print(streamer.predict(["a", "b" * 1_000_000]))
    with ThreadedStreamer(lambda batch: batch) as streamer:
        print(streamer.predict([1]))
    with LocalRedis() as redis, RedisWorker(Length, redis_broker=redis.url) as worker:
        host = threading.Thread(target=worker.run_forever)
        host.start()
        with RedisStreamer(redis.url) as streamer:
            streamer.wait_ready()
            print(streamer.predict(["a", "b" * 1_000_000]))
        worker.stop()
        host.join()
    try:
        Streamer(Length, shared="macos")
    except ValueError as error:
        print(error)
"""


@pytest.fixture
def path(tmp_path: Path) -> str:
    (tmp_path / "models_of_macos.py").write_text(MODELS)
    stub = ROOT / "tests" / "stubs" / "macos"
    return os.pathsep.join(map(str, (stub, ROOT, tmp_path)))


def run(command: list[str], path: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": path}
    return subprocess.run(command, capture_output=True, text=True, env=env)


@pytest.mark.long
def test_streamers(tmp_path: Path, path: str) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    ended = run([sys.executable, str(program)], path)
    assert ended.returncode == 0, ended.stderr
    *lines, refusal = ended.stdout.splitlines()
    assert lines == [
        "[1, 1000000]", "WorkerLost", "[3]", "[2, 2000000]", "[1]", "[1, 1000000]"
    ]  # fmt: skip
    assert refusal.startswith("a shared pool needs Linux: this system has no memfd_create, ")
    assert "large items and results go through pipes" in ended.stderr


def test_serve(path: str) -> None:
    with Serving("models_of_macos:Length", PYTHONPATH=path) as service:
        assert service.predict(["abc"]).json() == [3]
        assert service.client.get("/metrics").status_code == 200
        assert service.ready() == 200
        assert service.terminate() == 0


def test_several_web_processes_are_refused(path: str) -> None:
    serve = ("serve", "models_of_macos:Length", "--port", "0", "--web-workers", "2")
    ended = run(command(*serve), path)
    assert ended.returncode == 2
    assert ended.stderr.startswith("service-streamer: a shared pool needs Linux: ")
    assert "--web-workers 1" in ended.stderr


@pytest.mark.parametrize(("more", "count"), [((), 1), (("--redis", "redis://a"), 8)])
def test_auto_is_one_web_process_where_no_pool_can_be_shared(
    more: tuple[str, ...], count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    have_cores(monkeypatch, 64)
    monkeypatch.setenv("SERVICE_STREAMER_GPU_COUNT", "2")
    on_linux = launched(monkeypatch, "serve", "--web-workers", "auto", *more)
    assert on_linux.options.web_workers == 8
    monkeypatch.delattr(socket, "SO_PEERCRED")
    elsewhere = launched(monkeypatch, "serve", "--web-workers", "auto", *more)
    assert elsewhere.options.web_workers == count
