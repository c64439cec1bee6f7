"""Several web processes as one service: how many there are, and figures that add up."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from service_streamer.observe.metrics import Histogram
from service_streamer.options.table import ServeOptions
from service_streamer.serve import web_processes as module
from service_streamer.serve.configuration import NamedModel
from service_streamer.serve.http.request_figures import RequestFigures, Requests, decoded
from service_streamer.serve.http.request_metrics import LATENCIES
from service_streamer.serve.web_processes import chosen_count, with_count


@pytest.mark.parametrize(
    ("cores", "workers", "is_on_cpu", "count"),
    [
        (2, 1, False, 1),
        (4, 1, False, 2),
        (16, 8, False, 7),
        (64, 8, False, 8),
        (8, 8, False, 1),
        (64, 4, True, 1),
        (1, None, False, 1),
        (4, None, False, 4),
        (64, None, False, 8),
    ],
)
def test_as_many_as_the_cores_allow(
    cores: int, workers: int | None, is_on_cpu: bool, count: int
) -> None:
    assert chosen_count(cores, workers, is_on_cpu=is_on_cpu)[0] == count


@pytest.mark.parametrize(
    ("given", "count"),
    [
        ({"cuda_devices": [0, 1], "worker_num": 2}, 8),
        ({"cuda_devices": ["cpu"]}, 1),
        ({"cuda_devices": ["cpu"], "web_workers": 3}, 3),
        ({"redis_broker": "redis://a"}, 8),
    ],
)
def test_auto_looks_at_the_devices(
    given: dict[str, Any], count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "available_cores", lambda: 64)
    options = ServeOptions(**{"web_workers": "auto", "redis_broker": None, **given})
    options, models = with_count(options, [NamedModel("a", options)])
    assert options.web_workers == models[0].options.web_workers == count


def test_auto_counts_the_workers_of_all_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "available_cores", lambda: 8)
    options = ServeOptions(web_workers="auto", cuda_devices=[0], worker_num=2, redis_broker=None)
    away = dataclasses.replace(options, redis_broker="redis://a", worker_num=99)
    models = [NamedModel("a", options), NamedModel("b", options), NamedModel("c", away)]
    assert with_count(options, models)[0].web_workers == 3


def figures(pid: int, answered: int, failed: int = 0) -> RequestFigures:
    latencies = Histogram(LATENCIES)
    latencies.add(0.01, answered)
    return RequestFigures(
        pid=pid,
        uptime=10.0 * pid,
        answers={200: answered, 500: failed},
        rejections={"invalid": failed},
        disconnects=1,
        open_streams=2,
        streams=3,
        latencies=latencies.counts,
        seconds=latencies.total,
    )


def test_requests_of_all_processes_add_up() -> None:
    now = Requests(5.0, {0: figures(1, 10, 1), 1: figures(2, 30)})
    assert (now.total(), now.total(200), now.total(500), now.uptime) == (41, 40, 1, 20.0)
    assert (now.rejected("invalid"), now.disconnects) == (1, 2)
    assert now.streams == {"open": 4, "total": 6}
    assert now.rate(None) == 41 / 20
    assert now.latencies(None).count == 40


def test_a_process_that_was_started_again_counts_from_nothing() -> None:
    before = Requests(1.0, {0: figures(1, 10), 1: figures(2, 1000)})
    now = Requests(3.0, {0: figures(1, 14), 1: figures(3, 6)})
    assert now.rate(before) == (4 + 6) / 2
    assert now.latencies(before).count == 10
    assert min(now.latencies(before).counts) == 0


def test_half_an_answer_is_left_out() -> None:
    whole = figures(1, 1)
    assert decoded({0: whole.encoded(), 1: whole.encoded()[:-3], 2: b""}) == {0: whole}
