"""What a worker host does on signals, as they come to the thread that listens for them."""

from __future__ import annotations

import os
import signal
import threading

import pytest

import models
from conftest import await_that
from service_streamer import RedisWorker, run_redis_workers_forever


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
