"""RayStreamer beside Ray Serve: whose rows are whose, and a tiny run where both can be imported."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from yardstick import judging
from yardstick.environments import ROOT, environment, python
from yardstick.plan import Scale
from yardstick.record import Row, RowOf
from yardstick.sections import ray
from yardstick.systems import SYSTEMS

(SECTION,) = ray.SECTIONS
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
    assert SECTION.quick == ()


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
