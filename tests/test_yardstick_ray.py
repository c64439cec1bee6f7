"""RayStreamer on the yardstick: whose rows are whose, how faults are counted, and tiny runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from adapters import ray_faults
from adapters.ray_faults import ANY, FAULTS, Load, is_named
from adapters.simulated_step import MODELS
from conftest import PATIENCE, await_that
from service_streamer.errors import WorkerLost, WorkerStartError
from yardstick import judging
from yardstick.bars import BARS
from yardstick.environments import ROOT, environment, python
from yardstick.plan import Scale
from yardstick.record import Row, RowOf
from yardstick.sections import ray
from yardstick.systems import SYSTEMS

SECTION, FAULTS_SECTION = ray.SECTIONS
FULL = Scale(rounds=1, seconds=2.0, is_quick=False)


def test_each_row_is_of_the_system_that_it_names(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"batch_wait_timeout_s": 0.0}

    def json_lines(*_: Any) -> Iterator[Any]:
        point = {"question": "alone"}
        for system, used in (("ray-streamer", {}), ("ray", settings)):
            yield {"system": system, "point": point, "figures": {"over": 1.0}, "settings": used}

    monkeypatch.setattr(ray, "json_lines", json_lines)
    ours, theirs = SECTION.measure(SYSTEMS["ray-streamer"], {}, FULL)
    assert type(ours) is Row
    assert isinstance(theirs, RowOf)
    assert (theirs.system, theirs.settings) == ("ray", settings)
    assert theirs.system in SECTION.beside


def test_the_interpreter_with_ray_serve_finds_this_package(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[list[str], Mapping[str, str]]] = []

    def json_lines(command: list[str], _: float, env: Mapping[str, str]) -> Iterator[Any]:
        asked.append((command, env))
        yield from ()

    monkeypatch.setattr(ray, "json_lines", json_lines)
    assert list(SECTION.measure(SYSTEMS["ray-streamer"], {}, FULL)) == []
    ((command, env),) = asked
    assert command[0] == python("ray")
    assert json.loads(command[-1]) == {"seconds": 2.0}
    assert str(ROOT) in env["PYTHONPATH"].split(os.pathsep)


def test_a_quick_run_installs_no_ray() -> None:
    assert SECTION.quick == FAULTS_SECTION.quick == ()


def test_autoscaling_has_its_bars_on_the_cluster_and_in_simulated_time() -> None:
    barred = {
        (bar.point.get("start", "cluster"), bar.figure, bar.limit)
        for bar in BARS
        if bar.section == "ray" and bar.point["question"] in ("autoscaling", "simulated")
    }
    places = ["cluster", *(f"{model.start:g} s" for model in MODELS)]
    assert barred == {
        ("cluster", "failed", 0.0),
        *((place, "to_target", 2.0) for place in places),
        *((place, "turns", 1.0) for place in places),
    }


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        # Ready and wanted, each second; the load rises at 2 and falls at 6.
        ([(1, 1), (1, 1), (1, 3), (2, 3), (3, 3), (3, 3), (3, 3), (3, 1), (1, 1)], (3, 2, 2, 1)),
        ([(1, 1), (1, 1), (1, 1), (1, 1), (1, 1), (1, 1), (1, 1), (1, 1)], (1, 0, 1, 0)),
        ([(1, 1), (1, 1), (1, 3), (3, 3), (3, 2), (2, 4), (4, 4), (4, 4)], (3, 1, None, 2)),
    ],
)
def test_what_became_of_the_number_of_workers(
    numbers: list[tuple[int, int]], expected: tuple[int, float, float | None, int]
) -> None:
    seen = [(float(at), ready, wanted) for at, (ready, wanted) in enumerate(numbers)]
    found = judging.scaled(seen, rise=2.0, fall=6.0)
    names = ("most_workers", "all_ready", "shrunk", "turns")
    assert found == dict(zip(names, expected, strict=True))


# -- faults


def test_each_fault_is_a_row_of_twenty_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def json_lines(command: list[str], *_: Any) -> Iterator[Any]:
        asked.append(command)
        yield {"point": {"fault": "worker killed"}, "figures": {"failed": 0}}

    monkeypatch.setattr(ray, "json_lines", json_lines)
    (row,) = FAULTS_SECTION.measure(SYSTEMS["ray-streamer"], {}, FULL)
    assert (row.point, row.figures) == ({"fault": "worker killed"}, {"failed": 0})
    ((interpreter, *_, module, options),) = asked
    assert (interpreter, module) == (python("ray"), "adapters.ray_faults")
    assert json.loads(options) == {"rounds": 20}


def test_each_fault_has_its_bars() -> None:
    barred: dict[str, set[str]] = {}
    for bar in BARS:
        if bar.section == "ray-faults":
            barred.setdefault(bar.point["fault"], set()).add(bar.figure)
            assert bar.limit == 0
    always = {"hung", "unnamed", "left"}
    assert barred == {
        **dict.fromkeys(FAULTS, always | {"failed"}),
        ANY: always | {"twice"},
    }


def lost(text: str, cause: str | None = "The actor is dead") -> WorkerLost:
    error = WorkerLost(text)
    error.__cause__ = None if cause is None else RuntimeError(cause)
    return error


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (lost("Ray worker 0 (pid 7 on host) was lost: its process died"), True),
        (lost("Ray worker 0 (pid 7 on host) was lost: its process died", cause=None), False),
        (lost("its process died"), False),
        (WorkerStartError("Ray worker 0 was lost before it had loaded its model"), False),
        (RuntimeError("Ray worker 0"), False),
    ],
)
def test_an_error_names_the_worker_and_has_a_cause(error: Exception, expected: bool) -> None:
    assert is_named(error) is expected


def test_every_call_is_counted_whatever_becomes_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    never = threading.Event()

    def predict(items: list[int]) -> list[int]:
        match items[0] % 5:
            case 0:
                return [2 * items[0]]
            case 1:
                return [-1]
            case 2:
                raise lost("Ray worker 0 was lost: its node died")
            case 3:
                raise SystemExit  # ends a thread without a word
            case _:
                never.wait()
                return [0]

    load = Load(predict, callers=5)
    await_that(lambda: load.outcomes.keys() == {"answered", "wrong", "WorkerLost", "SystemExit"})
    load.end(0.0)
    await_that(lambda: load.hung == 1)
    never.set()
    load.end()
    outcomes = load.outcomes
    assert load.hung == 0
    assert load.sent == outcomes.total() == load.failed + outcomes["answered"]
    assert load.unnamed == outcomes["SystemExit"]
    assert "unnamed: SystemExit()" in capsys.readouterr().err


def test_an_answer_that_comes_too_late_counts_as_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_faults, "PATIENCE", -1.0)
    load = Load(lambda items: [2 * items[0]], callers=1)
    await_that(lambda: load.hung > 0)
    load.end(PATIENCE)
    assert (load.hung, load.failed) == (load.sent, 0)


def test_only_an_answer_to_a_call_after_the_fault_is_a_recovery() -> None:
    arrived, answers = threading.Semaphore(0), threading.Semaphore(0)

    def predict(items: list[int]) -> list[int]:
        arrived.release()
        answers.acquire()
        return [2 * items[0]]

    load = Load(predict, callers=1)
    arrived.acquire()
    load.fault()
    answers.release()  # of the call that was under way
    arrived.acquire()
    assert load.outcomes["answered"] == 1
    assert load.recovered(0.0) is None
    answers.release()
    found = load.recovered()
    assert found is not None
    assert 0 <= found <= load.since_fault()
    load.end(0.0)
    answers.release()  # of the call that it makes now
    load.end()


@pytest.mark.parametrize(
    ("times", "expected"), [([1.0, 3.0, 2.0], (2.0, 3.0)), ([1.0, None], (None, None))]
)
def test_what_was_not_back_once_has_no_time(times: list[float | None], expected: Any) -> None:
    assert (ray_faults.median(times), ray_faults.worst(times)) == expected


# -- real clusters


@pytest.mark.long
def test_a_cluster_of_which_something_fails() -> None:
    pytest.importorskip("ray")
    options = json.dumps({"rounds": 1, "only": ["head away, worker killed", ANY]})
    words = [sys.executable, "-m", "adapters.ray_faults", options]
    env = environment(PYTHONPATH=os.pathsep.join(map(str, ray.FOLDERS)))
    run = subprocess.run(words, env=env, capture_output=True, text=True, timeout=240, check=True)
    retried, once, end = map(json.loads, run.stdout.splitlines())
    bad = ("failed", "hung", "unnamed", "left")
    assert [retried["figures"][each] for each in bad] == [0, 0, 0, 0], run.stderr
    assert retried["figures"]["whole"] > ray_faults.AWAY
    bad = ("twice", "hung", "unnamed", "left")
    assert [once["figures"][each] for each in bad] == [0, 0, 0, 0], run.stderr
    assert end == {"ended": True}


@pytest.mark.long
def test_a_tiny_run() -> None:
    folders = os.pathsep.join(map(str, ray.FOLDERS))
    options = json.dumps({"only": ["alone", "workers"], "seconds": 0.3, "trials": 1})
    command = [python("ray"), "-m", "adapters.ray_cluster", options]
    if not (ROOT / ".rivals" / "ray" / "complete").exists():
        pytest.skip("the yardstick has not installed Ray Serve: --only ray does")
    env = environment(PYTHONPATH=folders)
    run = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=True)
    *rows, last = (json.loads(line) for line in run.stdout.splitlines() if line.startswith("{"))
    assert last == {"ended": True}
    assert [(each["system"], each["point"]["question"]) for each in rows] == [
        ("ray-streamer", "alone"), ("ray", "alone"),
        ("ray-streamer", "workers"), ("ray-streamer", "workers"),
    ]  # fmt: skip
    assert rows[-1]["figures"].keys() == {"rate", "share", "to_one_worker"}
