"""The load decides on the number of workers on a real cluster, which has room for two of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from test_ray_streamer import build, cluster, nothing_is_left  # noqa: F401 - fixtures

import models
from conftest import await_that
from service_streamer import RayStreamer
from service_streamer.testing import Gate

pytestmark = pytest.mark.long


def test_the_load_has_actors_started_and_ended(
    build: Callable[..., RayStreamer],  # noqa: F811
    gate: Gate,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    autoscaling = "service_streamer.supervision.autoscaling"
    monkeypatch.setattr(f"{autoscaling}.LEAST_DELAY", 0.2)
    monkeypatch.setattr(f"{autoscaling}.DELAY_OF_START", 0.01)
    streamer = build(
        models.Gated, 1, worker_num=(1, 4), target_wait=0.05, resources={"seat": 1},
        model_init_args=(gate,),
    )  # fmt: skip
    first = streamer.submit([0])
    gate.await_arrival()
    gate.let_through()
    assert first.result() == [1]
    rest = streamer.submit(range(2_000))
    gate.await_arrival()
    gate.await_arrival()  # two workers compute at the same time
    stats = streamer.stats()
    assert (stats.wanted, stats.workers["busy"], stats.workers["starting"]) == (4, 2, 2)
    gate.let_through(2_000)
    assert len(rest.result()) == 2_000
    await_that(lambda: len(streamer.workers()) == 1)
    gate.let_through()
    assert streamer.predict([0]) == [1]
    assert streamer.stats().restarts == 0
