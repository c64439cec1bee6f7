"""A shared pool that is told to end by a signal, as by systemd, while its clients still call."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fault_processes import GONE, Watch, descendants

import models
from conftest import await_that
from service_streamer import Streamer, StreamerClosed
from service_streamer.errors import StreamerBroken
from service_streamer.pool import pool_process, pool_server
from service_streamer.pool.visits import ask_pool, await_end, pool_names
from service_streamer.testing import Gate
from stream_models import Countdown

Shared = Callable[..., Streamer]


def pid_of(name: str) -> int:
    status: dict[str, Any] = ask_pool(name, "status")
    return int(status["pid"])


def has_its_name(name: str, pid: int) -> bool:
    try:
        return pid_of(name) == pid
    except StreamerBroken:
        return False


def test_a_service_that_is_told_to_end_finishes_what_it_has(shared: Shared) -> None:
    streamer = shared(Countdown, 4, shared="a", retry=False, linger=60)
    stream = streamer.stream(500, timeout=None, max_buffered=16)
    assert next(stream) == 1
    pid = pid_of("a")
    with Watch({pid, *descendants(pid)}) as family:
        os.killpg(os.getpgid(pid), signal.SIGTERM)  # its workers get it, too
        await_that(lambda: not has_its_name("a", pid))
        assert [*stream] == [*range(2, 501)]
        assert [*streamer.stream(3)] == [1, 2, 3]  # its requests may need more
        assert streamer.backend.pool_pid == pid  # type: ignore[attr-defined]
        other = shared(models.double, shared="a")  # of the service's next processes
        assert other.predict([1]) == [2]
        assert pid_of("a") != pid
        streamer.close()
        assert family.alive_after(GONE) == []  # at once, though it was to linger
    assert other.predict([2]) == [4]


@pytest.mark.parametrize("last", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_a_pool_at_once(shared: Shared, gate: Gate, last: int) -> None:
    streamer = shared(models.gated(gate), shared="a")
    future = streamer.submit([1])
    gate.await_arrival()
    pid = pid_of("a")
    os.kill(pid, signal.SIGTERM)
    await_that(lambda: not has_its_name("a", pid))
    assert not future.done()
    os.kill(pid, last)
    assert isinstance(future.exception(), StreamerClosed)
    assert await_end(pid, GONE)


#: Begins late, as on a host that is busy; and would wait for its first client for ever.
LATE = """
from service_streamer.pool import linger
linger.FIRST = 1e6
open({path!r}).read()
run_pool(file)
"""


def test_a_pool_ends_if_its_only_client_has_ended_before_it_began(
    shared: Shared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "may begin"
    os.mkfifo(path)
    late = pool_process._PROGRAM.replace("\nrun_pool(file)\n", LATE.format(path=str(path)))
    monkeypatch.setattr(pool_process, "_PROGRAM", late)
    streamer = shared(models.double, shared="a")
    await_that(lambda: pool_names() == ["a"])
    streamer.close()
    path.write_text("now")
    await_that(lambda: not pool_names())


def be_impatient() -> None:
    pool_server._TERM_GRACE = 0.01


def test_clients_that_stay_go_on_with_another_pool(
    shared: Shared, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_process, "preparation", be_impatient)
    streamer = shared(models.gated(gate), shared="a", retry=False)
    future = streamer.submit([1])
    gate.await_arrival()
    pid = pid_of("a")
    os.kill(pid, signal.SIGTERM)
    await_that(lambda: streamer._backend._calls.read is not None)  # type: ignore[attr-defined]
    late = streamer.submit([2])
    gate.let_through(20)
    future.result()
    late.result()
    assert await_end(pid, GONE)
    assert pid_of("a") != pid


def be_very_impatient() -> None:
    pool_server._TERM_GRACE = pool_server._TERM_DRAIN = 0.01


def test_a_call_without_end_does_not_keep_a_pool(
    shared: Shared, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_process, "preparation", be_very_impatient)
    streamer = shared(Countdown, 4, shared="a")
    stream = streamer.stream(10**9, timeout=None)
    assert next(stream) == 1
    pid = pid_of("a")
    os.kill(pid, signal.SIGTERM)
    with pytest.raises(StreamerClosed):
        for _ in stream:
            pass
    assert await_end(pid, GONE)
