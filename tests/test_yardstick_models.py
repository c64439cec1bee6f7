"""The yardstick's sections of real models and of the original's tables: what is pure, tiny runs."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from typing import Any

import pytest

from adapters import workloads
from yardstick.environments import PROJECTS
from yardstick.plan import QUICK, Scale, Section, Settings, System
from yardstick.processes import RunFailed
from yardstick.published import PUBLISHED, PUBLISHED_LATENCY
from yardstick.record import Row
from yardstick.sections import models, original_tables, pipelines, stages
from yardstick.systems import SYSTEMS

SECTIONS = {
    each.key: each
    for module in (models, original_tables, stages, pipelines)
    for each in module.SECTIONS
}
#: Of a system that is measured in turn with batches by hand.
SHARE = {"rate_by_hand", "by-hand", "by-hand_turns"}
TINY = Scale(rounds=1, seconds=0.2, is_quick=True)


@pytest.mark.parametrize("section", SECTIONS.values(), ids=list(SECTIONS))
def test_sections_name_systems_that_there_are(section: Section) -> None:
    assert {SYSTEMS[key].project for key in section.systems} <= set(PROJECTS)
    assert set(section.quick or ()) <= set(section.systems)


def test_quick_sections_need_no_environment_that_takes_long_to_install() -> None:
    projects = {SYSTEMS[key].project for each in SECTIONS.values() for key in each.quick or ()}
    assert projects <= {"this", "original"}


def test_what_the_original_published_is_of_systems_that_are_measured() -> None:
    for published in (PUBLISHED, PUBLISHED_LATENCY):
        for section, by_workers in published.items():
            for rates in by_workers.values():
                assert set(rates) <= set(SECTIONS[section].systems)


def test_what_the_original_published_agrees_with_its_simulated_device() -> None:
    alone = PUBLISHED["original-flask"][1]["naive"]
    batched = PUBLISHED["original-futures"][1]["by-hand"]
    assert alone == pytest.approx(workloads.capacity("titan-xp", 1), rel=2e-3)
    assert batched == pytest.approx(workloads.capacity("titan-xp"), rel=2e-3)


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


def test_the_original_has_its_own_settings_in_its_own_tables(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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
def test_everybody_computes_the_same_sentences(
    monkeypatch: pytest.MonkeyPatch, key: str, driver: str
) -> None:
    scale = Scale(rounds=1, seconds=2.0, is_quick=False)
    (spec,) = asked(monkeypatch, key, "minilm", {}, scale)
    assert (spec["driver"], spec["count"]) == (driver, 512)


def test_a_window_without_an_answer_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    def rows(*_: Any, **__: Any) -> Iterator[Row]:
        yield Row({"bytes": 1}, {"rate": 0.0, "p50": None})

    monkeypatch.setattr(models, "rows", rows)
    with pytest.raises(RunFailed, match=r"nothing was answered in time at \{'bytes': 1\}"):
        list(SECTIONS["arrays"].measure(SYSTEMS["streamer"], {}, QUICK))


def test_infilling_is_measured_in_turn_with_batches_by_hand(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scale = Scale(rounds=1, seconds=2.0, is_quick=False)
    points = [{"callers": 64}, {"callers": 128}, {"callers": 256}]
    for key in SECTIONS["infilling"].systems:
        (spec,) = asked(monkeypatch, key, "infilling", {}, scale)
        assert (spec["driver"], spec["points"]) == ("beside-hand", points)


def test_the_slowest_stage_is_what_is_possible_at_best() -> None:
    assert workloads.cost("even-stages", 64) == 20e-3
    assert workloads.capacity("gpu-stages") == workloads.capacity("gpu")


@pytest.mark.parametrize("name", workloads.STAGES)
def test_a_model_with_stages_computes_what_the_one_with_predict_only_does(name: str) -> None:
    from adapters.managed import MODELS, STAGED
    from service_streamer.managed_model import has_stages

    assert has_stages(STAGED[name])
    assert not has_stages(MODELS[name])
    answers = []
    for model in (STAGED[name](), MODELS[name]()):
        model.init_model()
        answers.append(model.predict([1, 2, 3]))
    assert answers == [[1, 2, 3], [1, 2, 3]]


def test_a_sentence_is_about_as_long_as_its_tokens_are_many() -> None:
    """Batches by length have little padding only if the length says what the model pads."""
    sentences = workloads.items("infilling", 500)
    from bert_model import ManagedBertModel, SentenceEncoder

    encoder = SentenceEncoder()
    tokens = [len(encoder.encode(sentence)) for sentence in sentences]
    lengths = [workloads.Infilling.length(sentence) for sentence in sentences]
    assert lengths == [ManagedBertModel.length(sentence) for sentence in sentences]
    assert statistics.correlation(tokens, lengths) > 0.98
    assert ManagedBertModel.length("我爱北[MASK]") > ManagedBertModel.length("我爱[MASK]")


def test_times_of_pipelines_are_kept_in_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    line = {"point": {"task": "embed"}, "figures": {"preprocess_ms": 1.5, "besides_ms": 2.0}}
    monkeypatch.setattr(pipelines, "json_lines", lambda *_: iter([line]))
    (row,) = SECTIONS["pipelines"].measure(SYSTEMS["streamer"], {}, TINY)
    assert row == Row({"task": "embed"}, {"preprocess": 0.0015, "besides": 0.002})


@pytest.mark.long
@pytest.mark.parametrize("key", ["streamer", "streamer-serial", "threaded"])
def test_tiny_runs_of_stages(key: str) -> None:
    rows = list(SECTIONS["stages"].measure(SYSTEMS[key], {}, Scale(1, 0.5, is_quick=True)))
    assert [row.point for row in rows] == [
        {"workload": "even-stages", "callers": 512},
        {"workload": "gpu-stages", "callers": 128},
        {"workload": "gpu-stages", "callers": 1},
    ]
    for row in rows[:2]:
        assert row.figures["batch"] == pytest.approx(64 / row.figures["rate"])
        assert 0 < row.figures["share"] < 1.1
    assert set(rows[2].figures) == {"over", "over_loop", "ratio"}


@pytest.mark.long
@pytest.mark.parametrize(
    ("section", "point", "figures"),
    [
        ("infilling", {"callers": 128}, {"rate", "p50", "p99", *SHARE}),
        ("minilm", {}, {"rate"}),
        ("arrays", {"bytes": 602_112}, {"rate", "p50", "p99", "gb_per_s"}),
    ],
)
def test_tiny_runs_of_models(section: str, point: dict[str, Any], figures: set[str]) -> None:
    # As quick, with windows in which one call at least is answered however slow the machine is.
    scale = Scale(rounds=1, seconds=3.0 if section == "infilling" else 0.5, is_quick=True)
    (row,) = SECTIONS[section].measure(SYSTEMS["streamer"], {}, scale)
    assert row.point == point
    assert set(row.figures) == figures
    assert row.figures["rate"] > 0


@pytest.mark.long
@pytest.mark.parametrize(
    ("section", "workers", "figures"),
    [
        ("original-flask", [None], {"rate", "latency", "errors"}),
        ("original-gevent", [1, 2], {"rate", "latency", "errors"}),
        ("original-futures", [1, 2], {"rate"}),
    ],
)
def test_tiny_runs_of_the_originals_tables(
    section: str, workers: list[int | None], figures: set[str]
) -> None:
    if section != "original-futures":
        pytest.importorskip("gevent")
        if not original_tables.shutil.which("wrk"):
            pytest.skip("there is no wrk")
    rows = list(SECTIONS[section].measure(SYSTEMS["streamer"], {}, TINY))
    assert [row.point.get("workers") for row in rows] == workers
    for row in rows:
        assert row.point["workload"] == "titan-xp"
        assert set(row.figures) == figures
        assert row.figures["rate"] > 0
