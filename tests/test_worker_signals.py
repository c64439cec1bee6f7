"""What a worker host does on signals, as they come to the thread that listens for them."""

from __future__ import annotations

import signal
import socket

import pytest

from service_streamer import RedisWorker
from service_streamer.engine.operator_signals import SignalSocket
from service_streamer.redis import redis_worker as worker_module


class Troubled(RedisWorker):
    """Cannot say how it stands."""

    def explain(self) -> str:
        raise ZeroDivisionError


def test_a_host_that_cannot_say_how_it_stands_still_ends(
    caplog: pytest.LogCaptureFixture,
) -> None:
    worker = Troubled(len)
    signals = SignalSocket()
    signals.ours, theirs = socket.socketpair()
    with signals.ours, theirs:
        theirs.send(bytes([signal.SIGUSR1, signal.SIGTERM]))
        theirs.shutdown(socket.SHUT_WR)
        worker_module._listen(worker, signals)
    assert worker._wishes.get_nowait() is True
    assert "could not be logged" in caplog.text
