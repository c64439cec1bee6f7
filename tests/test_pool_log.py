"""The log of a shared pool: where it goes, and that nobody waits for who reads it."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import models
from conftest import await_that
from pools import folder, pool_pid
from service_streamer import Streamer, StreamerBroken
from service_streamer.pool.pool_protocol import times

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
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.connect(str(folder() / f"{name}.sock"))
        connection.settimeout(20)
        connection.sendall(b"x" * 100)
        with contextlib.suppress(ConnectionResetError):
            while connection.recv(100):  # until the pool has logged it, and closed it
                pass


def test_a_log_that_nobody_reads_holds_up_nobody_and_has_what_workers_print(
    shared: Shared, unread: tuple[int, int]
) -> None:
    reader, writer = unread
    stderr = os.dup(2)
    os.dup2(writer, 2)  # where the log of a pool goes that starts now
    streamer = shared(models.loud, shared="a")
    streamer.wait_ready()
    os.dup2(stderr, 2)
    os.close(stderr)
    send_nonsense("a")
    assert streamer.predict([300_000], timeout=60) == [300_000]
    assert streamer.predict([10], timeout=60) == [10]
    found = read_until(reader, b"." * 300_000 + b"\nworker" + b"." * 10 + b"\n")
    assert b"sent a message that cannot be read" in found
    assert streamer.predict([5_000_000], timeout=60) == [5_000_000]  # more than is kept
    found = read_until(reader, b" log lines were dropped: the log's reader was too slow\n")
    assert re.search(rb"\D[1-9]\d* log lines were dropped", found)


def test_a_file_has_the_log_and_what_workers_print(shared: Shared, tmp_path: Path) -> None:
    path = tmp_path / "pool.log"
    path.write_text("what was there\n")
    streamer = shared(models.loud, shared="a", pool_log=path)
    streamer.predict([3])
    await_that(lambda: path.read_text() == "what was there\nworker...\n")  # another thread writes
    send_nonsense("a")
    await_that(lambda: "sent a message that cannot be read" in path.read_text())
    assert re.search(r"^\S+ \S+ pool a: WARNING: ", path.read_text(), re.MULTILINE)


def test_a_file_that_was_renamed_is_begun_again(shared: Shared, tmp_path: Path) -> None:
    path, old = tmp_path / "pool.log", tmp_path / "pool.log.1"
    streamer = shared(models.loud, shared="a", pool_log=str(path))
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
    raise FileNotFoundError("no room for the model")


def test_the_log_has_what_the_process_of_a_pool_prints_at_its_end(
    shared: Shared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service_streamer.pool.pool_protocol.preparation", fail)
    monkeypatch.setattr(times, "last_log", 600.0)  # the machine may be busy
    path = tmp_path / "pool.log"
    streamer = shared(models.double, shared="a", pool_log=path)
    with pytest.raises(StreamerBroken, match="no room for the model"):
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
    os.kill(pool_pid(), signal.SIGKILL)
    with pytest.raises(StreamerBroken, match=r"the pool has no log: .* see pool_log"):
        streamer.predict([3])
    folder.mkdir()
    assert streamer.predict([4]) == [8]
