"""Web processes that tell each other of their metrics."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from prometheus_client.core import CounterMetricFamily

from service_streamer.serve.http import siblings as module
from service_streamer.serve.http.prometheus import merged
from service_streamer.serve.http.siblings import Siblings


@pytest.fixture
def folder() -> Iterator[Path]:
    """One whose path is short enough for sockets."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder = Path(name) / "sockets"
        folder.mkdir()
        yield folder


def telling(answers: dict[bytes, Callable[[], bytes]]) -> Callable[[bytes], bytes]:
    return lambda question: answers[question]() if question in answers else b""


def always(told: bytes) -> Callable[[], bytes]:
    return lambda: told


def fails() -> bytes:
    raise ValueError("what it says is made of much")


def test_each_hears_all_that_answer(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PATIENCE", 600)

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda *_: None)
        all_ = [Siblings(folder, number, 4) for number in range(4)]
        long = b"long" * 100_000
        for each, tell in zip(all_, (always(b"0"), always(long), fails), strict=False):
            await each.listen(telling({b"metrics": tell, b"other": always(b"another")}))
        assert await all_[0].others(b"metrics") == {1: long}
        assert await all_[3].others(b"metrics") == {0: b"0", 1: long}
        assert await all_[0].others(b"other") == {1: b"another", 2: b"another"}
        assert await all_[0].others(b"unknown") == {}
        again = Siblings(folder, 1, 4)  # in place of one that has died
        await again.listen(telling({b"metrics": always(b"again")}))
        assert await all_[0].others(b"metrics") == {1: b"again"}
        for each in [*all_, again]:
            each.close()
        assert not folder.exists()

    asyncio.run(main())


def test_one_that_hangs_holds_up_nobody_for_long(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_PATIENCE", 0.01)

    async def main() -> None:
        hung = asyncio.Event()

        async def hang(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await hung.wait()
            writer.close()

        server = await asyncio.start_unix_server(hang, folder / "1")
        siblings = Siblings(folder, 0, 2)
        assert await siblings.others(b"metrics") == {}
        hung.set()
        server.close()
        await asyncio.sleep(0)
        siblings.close()

    asyncio.run(main())


def family(value: float) -> bytes:
    samples = [("a_total", {"path": "/"}, value), ("a_total", {"path": "\n"}, float("nan"))]
    return msgspec.msgpack.encode([("a", "What it counts", "counter", samples)])


def test_metrics_are_merged_by_name() -> None:
    text = merged({1: family(2), 0: family(float("inf"))}).decode()
    assert text.splitlines() == [
        "# HELP a_total What it counts",
        "# TYPE a_total counter",
        'a_total{path="/",process="0"} +Inf',
        'a_total{path="\\n",process="0"} NaN',
        'a_total{path="/",process="1"} 2.0',
        'a_total{path="\\n",process="1"} NaN',
    ]


def test_a_metric_of_all_processes_and_of_their_pool_is_there_once() -> None:
    """Models of worker hosts and of a shared pool have some of the same ones."""
    shared = CounterMetricFamily("a", "What it counts", labels=["model"])
    shared.add_metric(["m"], 3)
    text = merged({0: family(2)}, [shared]).decode()
    assert text.splitlines()[:3] == [
        "# HELP a_total What it counts",
        "# TYPE a_total counter",
        'a_total{path="/",process="0"} 2.0',
    ]
    assert text.splitlines()[4:] == ['a_total{model="m"} 3.0']


@pytest.mark.parametrize("told", [b"", b"\xc1", b"\x91", family(1)[:-3]])
def test_half_an_answer_is_left_out(told: bytes) -> None:
    assert merged({0: told, 1: family(1)}) == merged({1: family(1)})
