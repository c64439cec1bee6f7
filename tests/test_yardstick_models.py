"""What the yardstick asks of real models, and how it reads what wrk says."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from yardstick.plan import QUICK, Scale, Settings, System
from yardstick.processes import RunFailed
from yardstick.record import Row
from yardstick.sections import models, original_tables, pipelines, stages
from yardstick.systems import SYSTEMS

SECTIONS = {
    each.key: each
    for module in (models, original_tables, stages, pipelines)
    for each in module.SECTIONS
}


def told(**more: float) -> dict[str, float]:
    return {"requests": 40, "seconds": 4.0, "not_2xx": 0, "sockets": 0, "timeouts": 0, **more}


def test_latency_is_that_of_littles_law() -> None:
    found = original_tables.figures(told(), 128)
    assert found == {"rate": 10.0, "latency": 12.8, "errors": 0}


def test_what_is_not_answered_with_2xx_is_an_error_and_no_answer() -> None:
    found = original_tables.figures(told(not_2xx=10, sockets=2, timeouts=1), 15)
    assert found == {"rate": 7.5, "latency": 2.0, "errors": 13}


@pytest.mark.parametrize("requests", [0, 3])
def test_without_an_answer_it_has_failed(requests: int) -> None:
    with pytest.raises(RunFailed, match="no answer at 128 connections"):
        original_tables.figures(told(requests=requests, not_2xx=requests), 128)


def asked(
    monkeypatch: pytest.MonkeyPatch, key: str, section: str, settings: Settings, scale: Scale
) -> list[dict[str, Any]]:
    """What a section asks of a system, without asking it."""
    specs: list[dict[str, Any]] = []

    def rows(_: System, given: Settings, __: float, **spec: Any) -> Iterator[Row]:
        specs.append({"settings": given, **spec})
        yield Row({}, {"rate": 1.0})

    for module in (models, original_tables):
        monkeypatch.setattr(module, "rows", rows)
    assert all(SECTIONS[section].measure(SYSTEMS[key], settings, scale))
    return specs


def test_the_original_has_its_settings_in_its_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    swept = {"max_latency": 0.001}
    scale = Scale(rounds=1, seconds=2.0, is_quick=False)
    specs = asked(monkeypatch, "original-streamer", "original-futures", swept, scale)
    assert {json.dumps(each["settings"]) for each in specs} == {"{}"}
    asked_for = [(each["workload"], each["workers"]) for each in specs]
    assert asked_for == [("titan-xp", 1), ("titan-xp", 2), ("titan-xp", 4), ("infilling", 1)]


@pytest.mark.parametrize(
    ("key", "driver"),
    [("by-hand-one", "by-hand"), ("streamer", "until-empty"), ("infinity", "until-empty")],
)
def test_all_compute_the_same(monkeypatch: pytest.MonkeyPatch, key: str, driver: str) -> None:
    scale = Scale(rounds=1, seconds=2.0, is_quick=False)
    (spec,) = asked(monkeypatch, key, "minilm", {}, scale)
    assert (spec["driver"], spec["count"]) == (driver, 512)


def test_a_window_without_an_answer_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    def rows(*_: Any, **__: Any) -> Iterator[Row]:
        yield Row({"bytes": 1}, {"rate": 0.0, "p50": None})

    monkeypatch.setattr(models, "rows", rows)
    with pytest.raises(RunFailed, match=r"nothing was answered in time at \{'bytes': 1\}"):
        list(SECTIONS["arrays"].measure(SYSTEMS["streamer"], {}, QUICK))
