"""How a process comes to a connection with a pool, and leaves it."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import signal
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import models
from service_streamer import Streamer
from service_streamer.errors import StreamerBroken, StreamerError
from service_streamer.pool import pool_link, visits
from service_streamer.pool.directory import PoolPaths, paths_of, private_directory
from service_streamer.pool.election import elected, is_led, listening
from service_streamer.pool.pool_link import Connector, PoolLink
from service_streamer.pool.visits import ask_pool
from service_streamer.workers.progress import StageProgress

Shared = Callable[..., Streamer]

US = os.geteuid()


def connector(paths: PoolPaths, user: int = US) -> Connector:
    """One that may only use a pool that runs."""
    unused: Any = None
    return Connector("a", paths, unused, unused, None, user)


def test_who_has_become_another_user_is_told_both(tmp_path: Path) -> None:
    paths = paths_of("a", str(tmp_path))
    found = connector(paths, US + 1)
    with listening(paths), found.opened() as opened:
        text = f"built as user {US + 1}, .* become user {US}, .* {re.escape(str(tmp_path))};"
        with pytest.raises(StreamerError, match=text):
            found.connect(opened)


def test_a_socket_of_another_user_is_closed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = paths_of("a", str(tmp_path))
    found = connector(paths)
    monkeypatch.setattr(pool_link, "user_of", lambda connection: (1, US + 1))
    with listening(paths) as listener, found.opened() as opened:
        watched = len(opened.selector.get_map())
        with pytest.raises(StreamerError, match=rf"that of another user \({US + 1}\)"):
            found.connect(opened)
        assert len(opened.selector.get_map()) == watched
        with listener.accept()[0] as ours:
            ours.setblocking(False)
            assert ours.recv(1) == b""


def test_no_process_is_forked_while_a_connection_is_half_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, pool = socket.socketpair()
    may_fork: list[bool] = []

    def try_to_fork() -> None:
        may_fork.append(pool_link._gate.acquire(blocking=False))

    with pool, connector(paths_of("a", str(tmp_path))).opened() as opened:
        link = PoolLink("a", ours, opened)

        def half_closed() -> None:
            other = threading.Thread(target=try_to_fork)
            other.start()
            other.join()

        monkeypatch.setattr(link._outbox, "close", half_closed)
        link.close()
    assert may_fork == [False]


@contextlib.contextmanager
def blocked(number: int) -> Any:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {number})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def test_signals_that_a_client_blocks_reach_the_pool_and_its_workers(shared: Shared) -> None:
    with blocked(signal.SIGTERM):
        streamer = shared(models.process_ids, shared="a", worker_num=1)
        [worker] = streamer.predict([1])
        for pid in (ask_pool("a", "status")["pid"], worker):
            for thread in Path(f"/proc/{pid}/task").iterdir():
                try:
                    status = thread.joinpath("status").read_text()
                except (FileNotFoundError, ProcessLookupError):  # it answered a question, and ended
                    continue
                found = re.search(r"SigBlk:\s*(\w+)", status)
                assert found is not None
                assert not int(found[1], 16) >> (signal.SIGTERM - 1) & 1, (pid, thread)


def test_a_pool_has_its_name_without_its_lock_file(tmp_path: Path) -> None:
    paths = paths_of("a", str(tmp_path))
    lock = elected(paths)
    assert lock is not None
    with listening(paths):
        os.unlink(paths.lock)
        assert is_led(paths)
        Path(paths.lock).touch()  # which no process has locked
        assert is_led(paths)
        assert os.path.exists(paths.socket)
    os.close(lock)
    assert not is_led(paths)
    assert os.listdir(tmp_path) == []


def test_a_pool_of_another_user_is_asked_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(visits, "user_of", lambda connection: (1, US + 1))
    with listening(paths_of("a", private_directory(os.environ, US))) as listener:
        with pytest.raises(StreamerBroken, match=rf"that of another user \({US + 1}\)"):
            ask_pool("a", "status")
        with listener.accept()[0] as ours:
            ours.setblocking(False)
            assert ours.recv(1) == b""


def test_options_of_the_application_s_own_types_are_plain_in_the_pool(shared: Shared) -> None:
    class Own(str):
        """The pool cannot import it: it is local to a function."""

    streamer = shared(
        models.double, shared="a", tenant_weights={Own("paying"): 2}, cuda_devices=[Own("cpu")]
    )
    assert streamer.predict([1], tenant="paying") == [2]


def test_progress_is_not_known_without_a_free_descriptor() -> None:
    progress = StageProgress()
    progress.for_worker()[0] = 5
    assert progress.begun() == {4}
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, before[1]))
    try:
        begun = progress.begun()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert begun == frozenset()
