"""Figures of a service: of several web processes that add up, of a shared pool, for viewers."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import httpx
import msgspec
import pytest

import models
from command_line import have_cores, launched
from conftest import PATIENCE
from http_in_process import await_that, settled
from service_streamer import PredictTimeout, Streamer, ThreadedStreamer
from web_application import WebApplication

# -- how many web processes there are


@pytest.mark.parametrize(
    ("cores", "arguments", "count"),
    [
        (2, ("--devices", "0"), 1),
        (4, ("--devices", "0"), 2),
        (16, ("--devices", "0", "--workers", "8"), 7),
        (64, ("--devices", "0", "--workers", "8"), 8),
        (8, ("--devices", "0", "--workers", "8"), 1),
        (64, ("--devices", "cpu", "--workers", "4"), 1),
        (64, ("--devices", "0,1", "--workers", "1:2"), 8),
        (1, ("--redis", "redis://a"), 1),
        (4, ("--redis", "redis://a"), 4),
        (64, ("--redis", "redis://a"), 8),
    ],
)
def test_auto_is_as_many_web_processes_as_the_cores_allow(
    monkeypatch: pytest.MonkeyPatch, cores: int, arguments: tuple[str, ...], count: int
) -> None:
    have_cores(monkeypatch, cores)
    service = launched(monkeypatch, "serve", "--web-workers", "auto", *arguments)
    assert service.options.web_workers == count
    assert [each.options.web_workers for each in service.models] == [count]


def test_auto_counts_workers_of_all_models(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    have_cores(monkeypatch, 8)
    path = tmp_path / "service.toml"
    here = "".join(
        f'[[model]]\nname = "{name}"\ndevices = "0"\nworkers = 2\n' for name in ("a", "b")
    )
    path.write_text(
        f'[serve]\nweb-workers = "auto"\n{here}[[model]]\nname = "c"\nredis = "redis://a"\n'
    )
    service = launched(monkeypatch, "serve", "--config", str(path))
    assert service.options.web_workers == 3


# -- their figures


class Others:
    """Other web processes, which answer as the test says."""

    number = 0

    def __init__(self, answer: Callable[[bytes], dict[int, bytes]]) -> None:
        self._answer = answer
        self.questions = 0

    async def others(self, question: bytes) -> dict[int, bytes]:
        self.questions += 1
        return self._answer(question)


def requests(pid: int, answered: int, failed: int = 0, uptime: float | None = None) -> bytes:
    """What a web process tells the others of its requests."""
    up = 1e6 * pid if uptime is None else uptime
    answers = {200: answered, 500: failed}
    figures = [pid, up, answers, {"invalid": failed}, 1, 2, 3, [answered], 0.01 * answered]
    return msgspec.msgpack.encode(figures)


def test_requests_of_all_processes_add_up_without_half_an_answer() -> None:
    told = {1: requests(1, 10, 1), 2: requests(2, 30), 3: requests(3, 1)[:-3], 4: b""}
    with WebApplication(siblings=Others(lambda _: told)) as application:
        stats = application.get("/stats").json()
    totals = stats["totals"]
    assert (totals["requests"], totals["answered"], totals["failed"]) == (43, 40, 1)
    assert (totals["disconnected"], totals["rejected"]["invalid"]) == (2, 1)
    assert stats["uptime"] == 2e6
    assert stats["rate"] == 41 / 2e6
    assert stats["streams"] == {"open": 4, "total": 6}
    assert stats["web_processes"] == 3


def test_a_process_that_misses_an_answer_is_counted_as_it_was() -> None:
    answers = iter([{1: requests(2, 1000)}, {}, {1: requests(2, 1010)}])
    with WebApplication(siblings=Others(lambda _: next(answers))) as application:
        seen = [application.get("/stats").json() for _ in range(3)]
    assert [each["totals"]["answered"] for each in seen] == [1000, 1000, 1010]
    assert [each["web_processes"] for each in seen] == [2, 1, 2]


def test_range_of_workers_is_on_the_page_and_in_scrapes() -> None:
    def scaled(_: Any) -> Streamer:
        return Streamer(models.echo, worker_num=(1, 3), worker_timeout=PATIENCE)

    with WebApplication(kind=scaled) as application:
        stats = application.get("/stats").json()
        lines = application.get("/metrics").text.splitlines()
    assert stats["scaling"] == {"wanted": 1, "least": 1, "most": 3}
    values = {line.partition("{")[0].partition(" ")[0]: line.rpartition(" ")[2] for line in lines}
    assert float(values["service_streamer_workers_wanted"]) == 1
    assert float(values["service_streamer_workers_most"]) == 3


class Viewing(WebApplication):
    """Has viewers of its live figures."""

    def view(self, count: int, others: Others) -> tuple[list[list[dict[str, Any]]], httpx.Response]:
        """The snapshots that they see until the service ends, and the answer to one more viewer."""

        async def main() -> tuple[list[Any], Any]:
            viewers = [asyncio.create_task(self.client.get("/events")) for _ in range(count)]
            await await_that(lambda: others.questions)
            await settled()
            one_more = asyncio.create_task(self.client.get("/events"))
            await settled()
            self.service.stop()
            return await asyncio.gather(*viewers), await one_more

        seen, one_more = self.run(main())
        return [
            [json.loads(line[6:]) for line in each.text.splitlines() if line.startswith("data: ")]
            for each in seen
        ], one_more


def test_viewers_that_come_at_once_share_the_snapshots() -> None:
    others = Others(lambda _: {})
    with Viewing(siblings=others) as application:
        (first, *rest), _ = application.view(8, others)
    assert others.questions == 2, "at once, and when the service ends"
    assert len(first) == 2
    assert all(each == first for each in rest)


def test_viewers_are_only_so_many() -> None:
    others = Others(lambda _: {})
    with Viewing(siblings=others) as application:
        _, refused = application.view(64, others)
    assert refused.status_code == 503
    assert "retry-after" in refused.headers
    assert "live figures" in refused.json()["error"]["message"]


def test_viewers_get_the_next_snapshot_when_one_fails() -> None:
    def answer(_: bytes) -> dict[int, bytes]:
        if others.questions == 1:
            raise ValueError("it failed")
        return {}

    others = Others(answer)
    with Viewing(siblings=others) as application:
        [[only]], _ = application.view(1, others)
    assert only["web_processes"] == 1


@pytest.mark.parametrize(
    "again",
    [requests(3, 6), requests(2, 6, uptime=0.5)],
    ids=["another process", "another model in it"],
)
def test_a_process_that_begins_anew_counts_from_nothing(again: bytes) -> None:
    def answer(_: bytes) -> dict[int, bytes]:
        is_first = others.questions == 1
        return {1: requests(1, 10 if is_first else 14), 2: requests(2, 1000) if is_first else again}

    others = Others(answer)
    with Viewing(siblings=others) as application:
        [[before, now]], _ = application.view(1, others)
    assert (before["totals"]["answered"], now["totals"]["answered"]) == (1010, 20)
    assert now["rate"] > 0, "the 1000 of before are not taken away"


# -- metrics


def family(value: float, name: str = "a") -> bytes:
    """What a web process tells the others of its metrics."""
    samples = [
        (f"{name}_total", {"path": "/"}, value),
        (f"{name}_total", {"path": "\n"}, float("nan")),
    ]
    return msgspec.msgpack.encode([(name, "What it counts", "counter", samples)])


def test_metrics_of_all_processes_are_merged_by_name_without_half_an_answer() -> None:
    broken = dict(enumerate((b"", b"\xc1", b"\x91", family(1)[:-3]), 3))
    told = {2: family(2), 1: family(float("inf")), **broken}
    with WebApplication(siblings=Others(lambda _: told)) as application:
        lines = application.get("/metrics").text.splitlines()
    at = lines.index("# HELP a_total What it counts")
    assert lines[at : at + 6] == [
        "# HELP a_total What it counts",
        "# TYPE a_total counter",
        'a_total{path="/",process="1"} +Inf',
        'a_total{path="\\n",process="1"} NaN',
        'a_total{path="/",process="2"} 2.0',
        'a_total{path="\\n",process="2"} NaN',
    ]
    assert not any('process="3"' in line for line in lines)


def test_a_metric_of_a_process_and_of_the_pool_is_there_once() -> None:
    """Models of worker hosts and of a shared pool have some of the same ones."""
    name = "service_streamer_ready"
    told = msgspec.msgpack.encode([(name, "Whether", "gauge", [(name, {"model": "m"}, 1.0)])])
    with WebApplication(siblings=Others(lambda _: {1: told})) as application:
        lines = application.get("/metrics").text.splitlines()
    assert lines.count(f"# TYPE {name} gauge") == 1
    assert [line for line in lines if line.startswith(f"{name}{{")][1:] == [
        f'{name}{{model="m",process="1"}} 1.0'
    ]


# -- a shared pool


class Sharing(ThreadedStreamer):
    """Seems to share a pool, and counts the questions to it; they wait for ``may_answer``."""

    pool_client: Any = None  # a property otherwise

    def __init__(self, model: Any) -> None:
        self.pool_client = SimpleNamespace(pool_pid=1)
        self.questions = 0
        self.error: Exception | None = None
        self.may_answer = threading.Event()
        self.may_answer.set()
        super().__init__(model)

    def stats(self) -> Any:
        self.questions += 1
        self.may_answer.wait()
        if self.error is not None:
            raise self.error
        return super().stats()


def test_a_pool_is_asked_once_for_all_who_look_at_it() -> None:
    async def main() -> None:
        sharing = application.streamer
        sharing.may_answer.clear()
        before = sharing.questions
        looks = [application.client.get("/health/ready") for _ in range(8)]
        looking = asyncio.gather(*looks)
        await await_that(lambda: sharing.questions > before)
        await settled()
        sharing.may_answer.set()
        assert {each.status_code for each in await looking} == {200}
        assert sharing.questions == before + 1

    with WebApplication(kind=Sharing) as application:
        application.run(main())


def test_a_pool_is_asked_again_after_some_time() -> None:
    with WebApplication(kind=Sharing) as application:
        sharing = application.streamer
        before = sharing.questions
        while sharing.questions < before + 2:
            assert application.get("/health/ready").status_code == 200


def test_a_pool_that_did_not_answer_is_asked_again_at_once() -> None:
    with WebApplication(kind=Sharing) as application:
        sharing = application.streamer
        sharing.error = PredictTimeout("no answer")
        while application.get("/health/ready").status_code == 200:
            """What it said some time ago may still be used."""
        before = sharing.questions
        sharing.error = None
        assert application.get("/health/ready").status_code == 200
        assert sharing.questions == before + 1


def test_a_pool_that_is_not_there_is_not_waited_for() -> None:
    """A question waits for the next pool, which takes longer than a probe waits."""
    with WebApplication(kind=Sharing) as application:
        sharing = application.streamer
        before = sharing.questions
        sharing.pool_client.pool_pid = None
        assert application.get("/health/ready").status_code == 503
        assert sharing.questions == before
