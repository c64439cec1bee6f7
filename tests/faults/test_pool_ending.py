"""A shared pool that is told to end by a signal, as by systemd, while its clients still call."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from fault_processes import GONE, Watch, descendants

import models
from conftest import await_that
from pools import await_end, pool_names, pool_pid
from serve_process import until
from service_streamer import Streamer, StreamerClosed
from service_streamer.pool.pool_protocol import times
from service_streamer.testing import Gate
from stream_models import Countdown

Shared = Callable[..., Streamer]


def has_its_name(name: str, pid: int) -> bool:
    try:
        return pool_pid(name) == pid
    except (OSError, EOFError):
        return False


def test_a_service_that_is_told_to_end_finishes_what_it_has(shared: Shared) -> None:
    streamer = shared(Countdown, 4, shared="a", retry=False, linger=60)
    stream = streamer.stream(500, timeout=None, max_buffered=16)
    assert next(stream) == 1
    pid = pool_pid("a")
    with Watch({pid, *descendants(pid)}) as family:
        os.killpg(os.getpgid(pid), signal.SIGTERM)  # its workers get it, too
        await_that(lambda: not has_its_name("a", pid))
        assert [*stream] == [*range(2, 501)]
        assert [*streamer.stream(3)] == [1, 2, 3]  # its requests may need more
        assert streamer.pool_client.pool_pid == pid  # type: ignore[union-attr]
        other = shared(models.double, shared="a")  # of the service's next processes
        assert other.predict([1]) == [2]
        assert pool_pid("a") != pid
        streamer.close()
        assert family.alive_after(GONE) == []  # at once, though it was to linger
    assert other.predict([2]) == [4]


@pytest.mark.parametrize("last", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_a_pool_at_once(shared: Shared, gate: Gate, last: int) -> None:
    streamer = shared(models.gated(gate), shared="a")
    future = streamer.submit([1])
    gate.await_arrival()
    pid = pool_pid("a")
    os.kill(pid, signal.SIGTERM)
    await_that(lambda: not has_its_name("a", pid))
    assert not future.done()
    os.kill(pid, last)
    assert isinstance(future.exception(), StreamerClosed)
    assert await_end(pid, GONE)


def test_a_pool_ends_if_its_only_client_has_ended_before_it_began(
    shared: Shared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "may begin"
    os.mkfifo(path)
    # It begins late, as on a host that is busy; and would wait for its first client for ever.
    monkeypatch.setattr("service_streamer.pool.pool_protocol.preparation", path.read_bytes)
    monkeypatch.setattr(times, "first_client", 1e6)
    monkeypatch.setattr(times, "visit", 0.01)  # it does not answer before it begins
    streamer = shared(models.double, shared="a")
    await_that(lambda: pool_names() == ["a"])
    streamer.close()
    path.write_text("now")
    until(lambda: not pool_names())


def test_clients_that_stay_go_on_with_another_pool(
    shared: Shared, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(times, "term_grace", 0.01)
    streamer = shared(models.gated(gate), shared="a", retry=False)
    future = streamer.submit([1])
    gate.await_arrival()
    pid = pool_pid("a")
    os.kill(pid, signal.SIGTERM)
    await_that(lambda: not has_its_name("a", pid))
    late = streamer.submit([2])
    gate.let_through(20)
    future.result()
    late.result()
    assert await_end(pid, GONE)
    assert streamer.predict([3])
    assert pool_pid("a") != pid


def test_a_call_without_end_does_not_keep_a_pool(
    shared: Shared, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(times, "term_grace", 0.01)
    monkeypatch.setattr(times, "term_drain", 0.01)
    streamer = shared(Countdown, 4, shared="a")
    stream = streamer.stream(10**9, timeout=None)
    assert next(stream) == 1
    pid = pool_pid("a")
    os.kill(pid, signal.SIGTERM)
    with pytest.raises(StreamerClosed):
        for _ in stream:
            pass
    assert await_end(pid, GONE)
