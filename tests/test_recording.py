"""``trace=``: what is written down of the calls of every kind of streamer, and what is not."""

from __future__ import annotations

import concurrent.futures
import gc
import json
import logging
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import models
from service_streamer import Overloaded, RedisStreamer, Streamer, ThreadedStreamer
from service_streamer.engine.backend import Backend, PassThrough, Reply
from service_streamer.engine.trace_file import Recording
from service_streamer.observe.record import Call
from service_streamer.simulate import Replay, read_trace, simulate
from service_streamer.simulate.model_cost import CostModel
from service_streamer.testing import ManualClock
from service_streamer.workers.protocol import Failure


class Accepting(PassThrough):
    """The end of a chain of backends: accepts calls and answers none, or refuses them."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.submitted = 0
        self.is_closed = False

    def submit(self, call: Call) -> None:
        if self.error is not None:
            raise self.error
        self.submitted += 1

    def close(self, *, drain: bool, timeout: float | None) -> None:
        self.is_closed = True


class NoReply:
    """Nobody waits."""

    call: Any = None

    def complete(self, outputs: list[Any]) -> None:
        """Nobody is told."""

    def fail(self, failure: Failure) -> None:
        """Nobody is told."""


REPLY: Reply = NoReply()


def recording(path: Path, inner: Backend | None = None, **options: Any) -> Recording:
    return Recording(inner or Accepting(), path, **options)


def close(backend: Backend) -> None:
    backend.close(drain=True, timeout=None)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "trace.jsonl"


def weight(item: int) -> float:
    return item / 4


# -- of streamers


def test_of_threads(path: Path) -> None:
    with ThreadedStreamer(models.double, trace=path) as streamer:
        assert streamer.predict([1, 2]) == [2, 4]
        assert streamer.submit([3], priority=2, tenant='"a"').result() == [6]
        assert streamer.predict([]) == []
    first, second = read_trace(path)
    assert (first.items, second.items) == (2, 1)
    assert 0 <= first.at <= second.at
    assert second.precedence[:2] == (2, '"a"')
    assert first.lengths is None


def test_of_processes_with_lengths(path: Path) -> None:
    with Streamer(models.double, trace=str(path), length=weight) as streamer:
        for _ in range(20):
            assert streamer.predict([1, 2, 4]) == [2, 4, 8]
    assert [arrival.lengths for arrival in read_trace(path)] == [[0.25, 0.5, 1.0]] * 20


def test_over_redis(path: Path, client: Callable[..., RedisStreamer]) -> None:
    streamer = client(trace=path)
    future = streamer.submit([1, 2, 3])
    streamer.close(drain=False)
    assert future.exception() is not None
    assert [arrival.items for arrival in read_trace(path)] == [3]


def test_of_an_event_loop(path: Path) -> None:
    import asyncio

    async def call() -> None:
        with ThreadedStreamer(models.double, trace=path) as streamer:
            results = await asyncio.gather(*(streamer.apredict([n]) for n in range(30)))
            assert results == [[2 * n] for n in range(30)]

    asyncio.run(call())
    assert len(read_trace(path)) == 30


def test_of_many_threads(path: Path) -> None:
    with (
        ThreadedStreamer(models.double, trace=path, worker_timeout=None) as streamer,
        concurrent.futures.ThreadPoolExecutor(16) as pool,
    ):
        calls = [pool.submit(streamer.predict, [n] * (n % 7 + 1)) for n in range(3000)]
        for call in calls:
            call.result()
    sizes = sorted(arrival.items for arrival in read_trace(path))
    assert sizes == sorted(n % 7 + 1 for n in range(3000))


def test_what_was_recorded_can_be_simulated(path: Path) -> None:
    with ThreadedStreamer(models.double, trace=path) as streamer:
        for _ in range(50):
            streamer.predict([1])
    report = simulate(Replay(read_trace(path)), CostModel(1e-3), warm_up=0)
    assert report.calls == 50


def test_without_closing_it_is_written_when_the_streamer_is_forgotten(path: Path) -> None:
    streamer = ThreadedStreamer(models.double, trace=path)
    streamer.predict([1])
    del streamer
    gc.collect()
    assert len(read_trace(path)) == 1


def test_without_closing_it_is_written_at_exit(path: Path) -> None:
    script = (
        "import sys; from service_streamer import ThreadedStreamer\n"
        "streamer = ThreadedStreamer(lambda batch: batch, trace=sys.argv[1])\n"
        "streamer.predict([1, 2])\n"
    )
    subprocess.run([sys.executable, "-c", script, str(path)], check=True)
    assert [arrival.items for arrival in read_trace(path)] == [2]


@pytest.mark.parametrize("kind", [ThreadedStreamer, Streamer])
def test_bad_paths_are_refused_at_once(kind: Any, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="trace must be the path of a file"):
        kind(models.double, trace=7)
    with pytest.raises(ValueError, match=r"trace: there is no folder .*nowhere"):
        kind(models.double, trace=tmp_path / "nowhere" / "trace")
    with pytest.raises(ValueError, match="is a folder"):
        kind(models.double, trace=tmp_path)
    with pytest.raises(TypeError, match="trace must be the path of a file"):
        RedisStreamer(trace=b"")
    models.await_worker_threads()


# -- the wrapper itself


def test_times_are_since_the_start(path: Path) -> None:
    clock = ManualClock(1000.0)
    backend = recording(path, clock=clock)
    for seconds in (0.25, 0.0000014, 2):
        clock.advance(seconds)
        backend.submit(Call([0], REPLY))
    close(backend)
    assert [arrival.at for arrival in read_trace(path)] == [0.25, 0.250001, 2.250001]


def test_a_call_that_is_refused_is_not_recorded(path: Path) -> None:
    inner = Accepting()
    backend = recording(path, inner)
    backend.submit(Call([0], REPLY))
    inner.error = Overloaded("full")
    with pytest.raises(Overloaded):
        backend.submit(Call([0, 0], REPLY))
    close(backend)
    assert inner.is_closed
    assert [arrival.items for arrival in read_trace(path)] == [1]


def test_lengths_of_a_call_that_is_over_already(path: Path) -> None:
    backend = recording(path, lengths=lambda items: [float(item) for item in items])
    backend.submit(Call([3, 0.12345], REPLY))
    close(backend)
    assert read_trace(path)[0].lengths == [3.0, 0.12345]


def test_a_trace_is_made_anew(path: Path) -> None:
    path.write_text("of the last time\n" * 50)
    backend = recording(path)
    backend.submit(Call([0], REPLY))
    close(backend)
    assert len(read_trace(path)) == 1
    close(backend)
    assert len(read_trace(path)) == 1


def test_it_is_written_in_pieces(path: Path) -> None:
    backend = recording(path)
    for _ in range(10_000):
        backend.submit(Call([0], REPLY))
    written = len(read_trace(path))
    assert 9000 < written <= 10_000
    close(backend)
    assert len(read_trace(path)) == 10_000


def test_a_full_disk_fails_no_call(caplog: pytest.LogCaptureFixture) -> None:
    inner = Accepting()
    backend = recording(Path("/dev/full"), inner)
    with caplog.at_level(logging.WARNING):
        for _ in range(2000):
            backend.submit(Call([0], REPLY))
        close(backend)
    assert inner.submitted == 2000
    [warning] = caplog.messages
    assert warning.startswith("calls are not recorded any more in /dev/full: ")
    assert "No space left" in warning


def test_a_file_that_cannot_be_opened_fails_no_call(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "folder").mkdir()
    inner = Accepting()
    backend = recording(tmp_path / "folder", inner)
    backend.submit(Call([0], REPLY))
    close(backend)
    assert inner.submitted == 1
    assert len(caplog.messages) == 1


def test_two_streamers_do_not_write_into_one_file(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = recording(path), recording(path)
    for backend in (first, second):
        for _ in range(1000):
            backend.submit(Call([0], REPLY))
    close(first)
    close(second)
    assert len(read_trace(path)) == 1000
    [warning] = caplog.messages
    assert "put {pid} into the path" in warning


def test_a_finalizer_may_close_while_lines_are_written(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = recording(path)
    open_ = backend._writer._open

    def interrupted() -> Any:  # as the garbage collector may do, in this thread
        close(backend)
        backend.submit(Call([0], REPLY))
        return open_()

    monkeypatch.setattr(backend._writer, "_open", interrupted)
    for _ in range(1000):
        backend.submit(Call([0], REPLY))
    assert backend._writer.is_closed
    written = len(read_trace(path))
    assert 256 <= written <= 258
    close(backend)
    assert len(read_trace(path)) == written


@pytest.fixture
def forked() -> Callable[[Callable[[], None]], None]:
    """Runs something in a fork of this process."""

    def run(what: Callable[[], None]) -> None:
        process = multiprocessing.get_context("fork").Process(target=what)
        process.start()
        process.join()
        assert process.exitcode == 0

    return run


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_each_process_has_its_own_file(
    tmp_path: Path, forked: Callable[[Callable[[], None]], None]
) -> None:
    """As with a pre-fork server: built before the fork, called after it."""
    backend = recording(tmp_path / "trace-{pid}.jsonl")
    backend.submit(Call([0], REPLY))

    def call() -> None:
        backend.submit(Call([0, 0], REPLY))
        close(backend)

    forked(call)
    forked(lambda: close(backend))  # one that made no call
    close(backend)
    traces = sorted(tmp_path.iterdir(), key=lambda each: f"{os.getpid()}" not in each.name)
    assert [[arrival.items for arrival in read_trace(each)] for each in traces] == [[1], [2]]
    assert f"{os.getpid()}" in traces[0].name


def test_the_lines_are_json(path: Path) -> None:
    backend = recording(path)
    backend.submit(Call([0], REPLY))
    close(backend)
    assert json.loads(path.read_text()) == {"at": pytest.approx(0, abs=60), "items": 1}
