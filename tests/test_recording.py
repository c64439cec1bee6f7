"""``trace=``: what is written down of the calls of every kind of streamer, and what is not."""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import io
import json
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import models
from conftest import await_that
from service_streamer import Overloaded, RedisStreamer, Streamer, StreamerClosed, ThreadedStreamer
from service_streamer.simulate import CostModel, Replay, read_trace, simulate
from service_streamer.testing import Gate


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
    assert second.options[:2] == (2, '"a"')
    assert first.lengths is None
    assert json.loads(path.read_text().splitlines()[0]) == {"at": first.at, "items": 2}
    assert simulate(Replay([first, second]), CostModel(1e-3), warm_up=0).calls == 2


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


def test_of_many_threads_and_of_an_event_loop(path: Path) -> None:
    async def call(streamer: ThreadedStreamer) -> None:
        await asyncio.gather(*(streamer.apredict([n] * 8) for n in range(30)))

    with (
        ThreadedStreamer(models.double, trace=path, worker_timeout=None) as streamer,
        concurrent.futures.ThreadPoolExecutor(16) as pool,
    ):
        calls = [pool.submit(streamer.predict, [n] * (n % 7 + 1)) for n in range(3000)]
        for each in calls:
            each.result()
        asyncio.run(call(streamer))
    sizes = sorted(arrival.items for arrival in read_trace(path))
    assert sizes == [*sorted(n % 7 + 1 for n in range(3000)), *[8] * 30]


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
    with pytest.raises(ValueError, match=r"trace .*nowhere"):
        kind(models.double, trace=tmp_path / "nowhere" / "trace")
    with pytest.raises(ValueError, match="is a folder"):
        kind(models.double, trace=tmp_path)
    with pytest.raises(TypeError, match="trace must be the path of a file"):
        RedisStreamer(trace=b"")
    models.await_worker_threads()


# -- what is written, and what is not


def test_call_that_is_refused_is_not_recorded(path: Path, gate: Gate) -> None:
    with ThreadedStreamer(models.gated(gate), max_pending=1, trace=path) as streamer:
        streamer.submit([0])
        gate.await_arrival()
        with pytest.raises(Overloaded):
            streamer.submit([0, 0])
        gate.let_through()
    assert [arrival.items for arrival in read_trace(path)] == [1]


def test_trace_is_made_anew_and_written_once(path: Path) -> None:
    path.write_text("of the last time\n" * 50)
    streamer = ThreadedStreamer(models.echo, trace=path)
    streamer.predict([0])
    for _ in range(2):
        streamer.close()
        assert len(read_trace(path)) == 1


def test_trace_is_written_in_pieces(path: Path) -> None:
    with ThreadedStreamer(models.echo, trace=path) as streamer:
        for _ in range(2_000):
            streamer.submit([0])
        assert 1_000 < len(read_trace(path)) <= 2_000
    assert len(read_trace(path)) == 2_000


@pytest.mark.parametrize("where", ["/dev/full", "folder"])
def test_trace_that_cannot_be_written_fails_no_call(
    where: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with ThreadedStreamer(models.echo, trace=tmp_path / where) as streamer:
        if where == "folder":  # in place of the file, before that is opened
            (tmp_path / where).mkdir()
        futures = [streamer.submit([0]) for _ in range(1_000)]
    assert all(future.result() == [0] for future in futures)
    [warning] = caplog.messages
    assert str(tmp_path / where) in warning


def test_two_streamers_do_not_write_into_one_file(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for_both = [ThreadedStreamer(models.echo, trace=path) for _ in range(2)]
    for streamer in for_both:
        for _ in range(500):
            streamer.submit([0])
    for streamer in for_both:
        streamer.close()
    assert len(read_trace(path)) == 500
    [warning] = caplog.messages
    assert "{pid}" in warning


def test_finalizer_may_close_while_lines_are_written(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    streamer = ThreadedStreamer(models.echo, trace=path)
    open_file = io.FileIO

    def interrupted(*arguments: Any) -> io.FileIO:  # as by the garbage collector, in this thread
        streamer.close()
        return open_file(*arguments)

    def submit(count: int) -> None:
        for _ in range(count):
            streamer.submit([0])

    monkeypatch.setattr(io, "FileIO", interrupted)
    with pytest.raises(StreamerClosed):
        submit(1_000)
    monkeypatch.undo()
    assert 256 <= len(read_trace(path)) <= 258


def test_slow_file_holds_up_one_caller_and_gets_all_lines(
    path: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Slow(io.FileIO):
        def write(self, data: Any) -> int:
            gate.go_through()
            return super().write(data)

    monkeypatch.setattr(io, "FileIO", Slow)
    streamer = ThreadedStreamer(models.echo, trace=path)

    def call(count: int) -> None:
        for _ in range(count):
            streamer.submit([0])

    with concurrent.futures.ThreadPoolExecutor(3) as threads:
        held_up = threads.submit(call, 256)
        try:
            gate.await_arrival()
            threads.submit(call, 600).result(timeout=30)
            closing = threads.submit(streamer.close)
            await_that(lambda: streamer.stats().state == "closed")
        finally:
            gate.let_through(10)
        held_up.result()
        closing.result()
    assert len(read_trace(path)) == 856


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_fork_of_a_process_leaves_its_trace_alone(tmp_path: Path) -> None:
    with ThreadedStreamer(models.echo, trace=tmp_path / "trace-{pid}") as streamer:
        streamer.predict([0])
        process = multiprocessing.get_context("fork").Process(target=streamer.close)
        process.start()
        process.join()
        streamer.predict([0, 0])
    [path] = tmp_path.iterdir()
    assert path.name == f"trace-{os.getpid()}"
    assert [arrival.items for arrival in read_trace(path)] == [1, 2]
