"""Real workers whose model cannot be loaded for a while, or not beside another one."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from fault_models import AwayOnce, Exclusive, GatedLater

import models
import service_streamer.engine.engine as engine
from serve_process import until
from service_streamer import (
    RedisStreamer,
    RedisWorker,
    Streamer,
    StreamerBroken,
    WorkerStartError,
)
from service_streamer.testing import Gate

HostOf = Callable[[Any, Path], contextlib.AbstractContextManager[tuple[RedisWorker, Future[None]]]]


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is tried again after a second is so at once."""
    monkeypatch.setattr("service_streamer.supervision.supervisor.MAX_RETRY", 0.05)


def test_a_model_that_can_be_loaded_later_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    weights = tmp_path / "weights"
    with Streamer(models.NeedsFile, model_init_args=(weights,)) as streamer:
        for call in (streamer.wait_ready, lambda: streamer.predict([None])):
            with pytest.raises(WorkerStartError, match="FileNotFoundError"):
                call()
        assert streamer.stats().state == "broken"
        assert streamer.stats().workers["failed"] == 1
        weights.touch()
        until(lambda: streamer.stats().state == "running")
        assert len(streamer.predict([None])) == 1
        assert streamer.stats().workers["failed"] == 0
        streamer.wait_ready()
    assert caplog.text.count("Traceback") == 0
    assert "calls are accepted again" in caplog.text
    first, *others = [each.levelname for each in caplog.records if "tried again in" in each.message]
    assert first == "ERROR"
    assert set(others) <= {"WARNING"}


def test_closing_does_not_wait_for_a_worker_that_is_tried_again(
    gate: Gate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "_STOP_GRACE", 1e6)  # what an idle worker is given
    weights = tmp_path / "weights"
    streamer = Streamer(GatedLater, model_init_args=(weights, gate))
    with pytest.raises(WorkerStartError):
        streamer.wait_ready()
    weights.touch()
    gate.await_arrival()
    streamer.close()


@pytest.mark.parametrize(
    ("worker_num", "overlap"),
    [(1, False), *(pytest.param(2, each, marks=pytest.mark.long) for each in ("auto", False))],
    ids=str,
)
def test_new_weights_where_two_workers_do_not_fit(
    worker_num: int, overlap: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "version").write_text("old")
    with Streamer(
        Exclusive, 1, worker_num=worker_num, model_init_args=(tmp_path, worker_num),
        worker_timeout=None,
    ) as streamer:  # fmt: skip
        until(lambda: streamer.stats().workers["idle"] == worker_num)
        errors: list[BaseException] = []
        is_over = threading.Event()

        def call() -> None:
            while not is_over.is_set():
                try:
                    streamer.predict([None])
                except BaseException as error:
                    errors.append(error)

        caller = threading.Thread(target=call)
        caller.start()
        (tmp_path / "version").write_text("new")
        with caplog.at_level(logging.WARNING):
            streamer.restart_workers(overlap=overlap)
        is_over.set()
        caller.join()
        assert errors == []
        assert set(streamer.predict([None] * 20)) == {"new"}
        assert ("there is no memory for both" in caplog.text) == (overlap == "auto")


def test_overlap_has_three_values() -> None:
    with Streamer(models.echo) as streamer, pytest.raises(ValueError, match="overlap must be True"):
        streamer.restart_workers(overlap="maybe")  # type: ignore[arg-type]


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    weights = tmp_path / "weights"
    weights.touch()
    return weights


@pytest.fixture
def host_of(redis_server: str, prefix: str, no_quick_restarts: None) -> HostOf:
    """Runs a worker host in a thread: the host, and how that ends."""

    @contextlib.contextmanager
    def host_of(model: Any, path: Path) -> Iterator[tuple[RedisWorker, Future[None]]]:
        worker = RedisWorker(
            model, redis_broker=redis_server, prefix=prefix, model_init_args=(path,)
        )
        with ThreadPoolExecutor(1) as threads:
            ended = threads.submit(worker.run_forever)
            try:
                yield worker, ended
            finally:
                worker.stop()

    return host_of


@pytest.fixture
def streamer(redis_server: str, prefix: str) -> Iterator[RedisStreamer]:
    with RedisStreamer(redis_server, prefix, worker_timeout=None) as streamer:
        yield streamer


def lose(streamer: RedisStreamer, weights: Path) -> int:
    """Kill the worker, whose model cannot be loaded again."""
    [pid] = streamer.predict([None])
    weights.unlink()
    os.kill(pid, signal.SIGKILL)
    return int(pid)


def test_a_worker_host_hands_back_what_it_holds_and_serves_again(
    host_of: HostOf, streamer: RedisStreamer, weights: Path
) -> None:
    with host_of(models.NeedsFile, weights) as (worker, _):
        for _ in range(2):
            pid = lose(streamer, weights)
            until(lambda: worker.stats().pool.state == "broken")  # type: ignore[union-attr]
            waits = streamer.submit([None])
            until(lambda: streamer.stats().hosts == 0)
            weights.touch()
            assert waits.result() != [pid]
        assert worker.stats().claimed >= 4, "totals go on"  # type: ignore[union-attr]


def test_what_fails_with_a_pool_that_is_back_at_once_is_computed_all_the_same(
    host_of: HostOf, streamer: RedisStreamer, tmp_path: Path
) -> None:
    with host_of(AwayOnce, tmp_path / "state"):
        # The host reads for new calls while its pool breaks and is mended, so it sees neither.
        assert streamer.submit([1]).result(60) == [1]
        assert streamer.predict([2]) == [2]


@pytest.mark.long
def test_a_worker_host_whose_loop_fails_while_it_waits_for_a_worker_ends_with_an_error(
    host_of: HostOf, streamer: RedisStreamer, weights: Path
) -> None:
    with host_of(models.NeedsFile, weights) as (worker, ended):
        lose(streamer, weights)
        until(lambda: "service_streamer recovery" in [t.name for t in threading.enumerate()])
        assert worker._pool is not None
        worker._pool.engine.close(drain=False, timeout=None)
        assert isinstance(ended.exception(), StreamerBroken)


@pytest.mark.long
def test_a_worker_host_that_is_stopped_just_when_it_begins_to_wait_has_not_failed(
    host_of: HostOf, streamer: RedisStreamer, weights: Path
) -> None:
    has_begun, goes_on = threading.Event(), threading.Event()

    def hold(*_: object) -> None:
        # Not current_thread(), which makes one up for a thread that is about to begin or to end.
        names = {each.ident: each.name for each in threading.enumerate()}
        if names.get(threading.get_ident()) == "service_streamer recovery":
            has_begun.set()
            goes_on.wait()

    with host_of(models.NeedsFile, weights) as (worker, ended):
        threading.settrace(hold)  # of the threads that start from now on
        try:
            lose(streamer, weights)
            has_begun.wait()
            worker.stop()
            assert ended.exception() is None
        finally:
            threading.settrace(None)  # type: ignore[arg-type]
            goes_on.set()


def test_a_worker_host_that_never_could_serve_ends_with_the_reason(
    host_of: HostOf, tmp_path: Path
) -> None:
    with host_of(models.NeedsFile, tmp_path / "none") as (_, ended):
        assert isinstance(ended.exception(), WorkerStartError)
        assert "FileNotFoundError" in str(ended.exception())
