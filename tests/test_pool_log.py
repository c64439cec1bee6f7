"""The log of a shared pool: where it goes, and that nobody waits for who reads it."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import models
from conftest import await_that
from service_streamer import Streamer
from service_streamer.errors import StreamerBroken
from service_streamer.pool.directory import paths_of, private_directory
from service_streamer.pool.visits import ask_pool

Shared = Callable[..., Streamer]


@pytest.fixture
def unread() -> Iterator[tuple[int, int]]:
    """A pipe that is full."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writer, bytes(4096))
    os.set_blocking(writer, True)
    yield reader, writer
    os.close(reader)
    os.close(writer)


def read_until(reader: int, what: bytes) -> bytes:
    found = b""
    while what not in found:
        found += os.read(reader, 1 << 16)
    return found


def send_nonsense(name: str) -> None:
    """Have the pool log a line."""
    paths = paths_of(name, private_directory(os.environ, os.geteuid()))
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.connect(paths.socket)
        connection.settimeout(20)
        connection.sendall(b"x" * 100)
        with contextlib.suppress(ConnectionResetError):
            while connection.recv(100):  # until the pool has logged it, and closed it
                pass


def test_a_log_that_nobody_reads_holds_up_nobody(
    shared: Shared, unread: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    from service_streamer.pool import pool_process

    reader, writer = unread
    monkeypatch.setattr(pool_process, "_log_descriptor", lambda: writer)
    streamer = shared(models.double, shared="a")
    streamer.predict([1])
    send_nonsense("a")
    assert streamer.predict([2], timeout=20) == [4]
    read_until(reader, b"sent a message that cannot be read")


def test_lines_without_room_are_counted(unread: tuple[int, int]) -> None:
    from service_streamer.pool.pool_log import PoolLog

    reader, writer = unread
    log = PoolLog(writer, "%(message)s")
    for n in range(1010):  # the thread has taken one of them, or has not yet
        log.handle(logging.makeLogRecord({"msg": f"line {n}"}))
    found = read_until(reader, b"line 999\n")
    assert re.search(rb"line 0\n(9|10) log lines were dropped", found)
    log.end(60)


def loud(batch: list[int]) -> list[int]:
    """Prints so many bytes, which is more than a pipe holds."""
    for size in batch:
        print("worker" + "." * size, flush=True)  # noqa: T201 - what is tested
    return batch


def test_what_a_worker_prints_holds_up_nobody_and_is_in_the_log(
    shared: Shared, unread: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    from service_streamer.pool import pool_process

    reader, writer = unread
    monkeypatch.setattr(pool_process, "_log_descriptor", lambda: writer)
    streamer = shared(loud, shared="a")
    assert streamer.predict([300_000], timeout=60) == [300_000]
    assert streamer.predict([10], timeout=60) == [10]
    read_until(reader, b"." * 300_000 + b"\nworker" + b"." * 10 + b"\n")


def test_a_file_has_the_log_and_what_workers_print(shared: Shared, tmp_path: Path) -> None:
    path = tmp_path / "pool.log"
    path.write_text("what was there\n")
    streamer = shared(loud, shared="a", pool_log=path)
    streamer.predict([3])
    await_that(lambda: path.read_text() == "what was there\nworker...\n")  # another thread writes
    send_nonsense("a")
    await_that(lambda: "sent a message that cannot be read" in path.read_text())
    assert re.search(r"^\S+ \S+ pool a: WARNING: ", path.read_text(), re.MULTILINE)


def test_a_file_that_was_renamed_is_begun_again(shared: Shared, tmp_path: Path) -> None:
    path, old = tmp_path / "pool.log", tmp_path / "pool.log.1"
    streamer = shared(loud, shared="a", pool_log=str(path))
    streamer.predict([3])
    await_that(lambda: path.read_text() == "worker...\n")
    path.rename(old)
    streamer.predict([5])
    await_that(lambda: path.exists() and path.read_text() == "worker.....\n")
    path.unlink()
    streamer.predict([7])
    await_that(lambda: path.exists() and path.read_text() == "worker.......\n")
    assert old.read_text() == "worker...\n"


def fail() -> None:
    """In the pool's process."""
    from service_streamer.pool import pool_process

    pool_process._LOG_GRACE = 600.0  # or its last words were lost on a busy machine
    raise FileNotFoundError("no room for the model")


def test_what_a_process_prints_at_its_end_is_in_its_log(
    shared: Shared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from service_streamer.pool import client_loop, pool_process

    monkeypatch.setattr(client_loop, "_FAILING", 0.0)
    monkeypatch.setattr(client_loop, "_MOST_FAILURES", 1)
    monkeypatch.setattr(pool_process, "preparation", fail)
    path = tmp_path / "pool.log"
    streamer = shared(models.double, shared="a", pool_log=path)
    with pytest.raises(StreamerBroken):
        streamer.predict([1])
    await_that(lambda: "FileNotFoundError: no room for the model\n" in path.read_text())


def test_a_file_that_cannot_be_written_is_refused(shared: Shared, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="pool_log: there is no folder"):
        shared(models.double, pool_log=tmp_path / "none" / "pool.log")
    path = tmp_path / "pool.log"
    path.symlink_to(tmp_path / "none" / "pool.log")
    with pytest.raises(ValueError, match=r"pool_log: .*pool\.log cannot be written to: No such"):
        shared(models.double, pool_log=path)


def test_a_file_that_can_be_written_no_more_is_said_to_be(shared: Shared, tmp_path: Path) -> None:
    folder = tmp_path / "log"
    folder.mkdir()
    streamer = shared(models.double, shared="a", pool_log=folder / "pool.log")
    streamer.predict([1])
    (folder / "pool.log").unlink()
    folder.rmdir()
    send_nonsense("a")
    assert streamer.predict([2]) == [4]
    os.kill(ask_pool("a", "status")["pid"], signal.SIGKILL)
    with pytest.raises(StreamerBroken, match=r"the pool has no log: .* see pool_log"):
        streamer.predict([3])
    folder.mkdir()
    assert streamer.predict([4]) == [8]
