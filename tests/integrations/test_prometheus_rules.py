"""Alerts, dashboard and autoscaling ask for metrics that a service has, in PromQL that is right."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

import grafana_dashboard
from serve_process import Serving

ROOT = Path(__file__).parents[2]
PROMETHEUS = ROOT / "deploy" / "prometheus"
ALERTS = PROMETHEUS / "alerts.yaml"
DASHBOARD: dict[str, Any] = json.loads(grafana_dashboard.FILE.read_text())

#: Labels that Prometheus adds, or that the queries' functions read.
ADDED = {"job", "namespace", "service", "model", "le"}


def promtool(*arguments: str | Path) -> None:
    found = shutil.which("promtool")
    if found is None:
        pytest.skip("there is no promtool (Debian's package prometheus has it)")
    done = subprocess.run([found, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def alerts() -> dict[str, str]:
    [group] = yaml.safe_load(ALERTS.read_text())["groups"]
    return {rule["alert"]: rule["expr"] for rule in group["rules"]}


def panels() -> dict[str, str]:
    """The dashboard's queries, as Grafana sends them with all variables at All."""
    found = {}
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", ()):
            query = target["expr"].replace("$__rate_interval", "5m")
            query = re.sub(r'"\$\w+"', '".*"', query)
            found[f"{panel['title']} {target['refId']}"] = query
    return found


def scaling(kind: str) -> dict[str, str]:
    """The queries of an autoscaler, for the service `a` in the namespace `default`."""
    if kind == "adapter":
        rules = yaml.safe_load((PROMETHEUS / "adapter.yaml").read_text())["rules"]["custom"]
        return {
            rule["name"]["as"]: rule["metricsQuery"]
            .replace("<<.LabelMatchers>>", 'namespace="default",service="a"')
            .replace("<<.GroupBy>>", "service")
            for rule in rules
        }
    keda = yaml.safe_load((ROOT / "deploy" / "kubernetes" / "keda.yaml").read_text())
    queries = [each["metadata"]["query"] for each in keda["spec"]["triggers"]]
    names = ["service_streamer_queue_seconds", "service_streamer_utilization"]
    return {
        name: query.replace('"service-streamer"', '"a"')
        for name, query in zip(names, queries, strict=True)
    }


EVERY = {
    **alerts(),
    **panels(),
    **{f"{kind} {name}": query for kind in ("adapter", "keda") for name, query in
       scaling(kind).items()},
}  # fmt: skip


def rules_of(queries: dict[str, str], folder: Path) -> Path:
    """A file of rules that records each query."""
    rules = [{"record": f"query_{i}", "expr": query} for i, query in enumerate(queries.values())]
    file = folder / "rules.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": rules}]}))
    return file


def test_the_alerts_are_right() -> None:
    promtool("check", "rules", ALERTS)
    promtool("test", "rules", PROMETHEUS / "alerts.test.yaml")


def test_every_alert_is_raised_in_a_test() -> None:
    tests = yaml.safe_load((PROMETHEUS / "alerts.test.yaml").read_text())["tests"]
    raised = {
        rule["alertname"]
        for test in tests
        for rule in test.get("alert_rule_test", ())
        if rule["exp_alerts"]
    }
    assert raised == {*alerts()}


def test_every_query_is_promql(tmp_path: Path) -> None:
    promtool("check", "rules", rules_of(EVERY, tmp_path))


@pytest.fixture(scope="module")
def exported() -> Iterator[dict[str, set[str]]]:
    """The series of a running service with all that a service can have, and their labels."""
    with Serving("stream_models:Countdown", "--workers", "1:2", "--web-workers", "2") as serving:
        serving.answer([2])
        assert serving.post("/predict", b"not JSON").status_code == 400
        labels: dict[str, set[str]] = {}
        for family in text_string_to_metric_families(serving.client.get("/metrics").text):
            for sample in family.samples:
                labels.setdefault(sample.name, set()).update(sample.labels)
        yield labels


@pytest.mark.xdist_group("prometheus-rules")
def test_every_metric_is_exported(exported: dict[str, set[str]]) -> None:
    named = {name: {*re.findall(r"service_streamer_\w+", query)} for name, query in EVERY.items()}
    assert all(named.values())
    missing = {name: metrics - {*exported} for name, metrics in named.items()}
    assert {name: metrics for name, metrics in missing.items() if metrics} == {}


@pytest.mark.xdist_group("prometheus-rules")
def test_every_label_is_exported(exported: dict[str, set[str]]) -> None:
    for name, query in EVERY.items():
        grouped: set[str] = set()
        for labels in re.findall(r"by \(([^)]*)\)", query):
            grouped |= {*re.split(r",\s*", labels)}
        for metric, matchers in re.findall(r"(service_streamer_\w+)(?:\{([^}]*)\})?", query):
            matched = {*re.findall(r"(\w+)=~?\"", matchers)}
            assert matched <= exported[metric] | ADDED, name
            grouped -= exported[metric]
        assert grouped <= ADDED, name


def samples(query: str, value: float, labels: str) -> dict[str, Any]:
    return {
        "expr": query, "eval_time": "10m",
        "exp_samples": [{"labels": labels, "value": value}],
    }  # fmt: skip


def series(name: str, labels: str, values: str) -> dict[str, str]:
    common = 'namespace="default",service="a"'
    return {"series": f"service_streamer_{name}{{{common}{labels}}}", "values": values}


def load(labels: str, *, calls: int, waited: int, computed: int, workers: int) -> list[Any]:
    """The series of a pod, with what is added to each in a minute."""
    return [
        series("queue_duration_seconds_sum", labels, f"0+{waited}x10"),
        series("queue_duration_seconds_count", labels, f"0+{calls}x10"),
        series("inference_duration_seconds_sum", labels, f"0+{computed}x10"),
        series("workers", f'{labels},state="busy"', f"{workers}x10"),
        series("workers", f'{labels},state="failed"', "8x10"),
    ]


POD = {"calls": 60, "waited": 15, "computed": 60, "workers": 2}

#: By name: the series, the queue seconds, and the utilization; None if there should be none.
LOADS: dict[str, tuple[list[Any], float, float | None]] = {
    "one pod": (load(',pod="1"', **POD), 0.25, 0.5),
    "two pods": (
        load(',pod="1"', **POD) + load(',pod="2"', **{**POD, "waited": 45, "computed": 0}),
        0.5, 0.25,
    ),
    "the slower of two models counts": (
        load(',pod="1",model="a"', **POD)
        + load(',pod="1",model="b"', calls=6, waited=12, computed=84, workers=2),
        2.0, 0.7,
    ),
    "without calls": (load(',pod="1"', calls=0, waited=0, computed=0, workers=2), 0.0, 0.0),
    "busy workers add no pods": (load(',pod="1"', **{**POD, "computed": 120}), 0.25, 0.8),
    "without a ready worker nothing is removed": (
        load(',pod="1"', calls=0, waited=0, computed=0, workers=0), 0.0, None,
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", ["adapter", "keda"])
def test_the_autoscalers_see_the_load(kind: str, tmp_path: Path) -> None:
    queries = scaling(kind)
    labels = '{service="a"}' if kind == "adapter" else "{}"
    tests = []
    for name, (input_series, *expected) in LOADS.items():
        found = [
            {"expr": query, "eval_time": "10m", "exp_samples": []}
            if value is None
            else samples(query, value, labels)
            for query, value in zip(queries.values(), expected, strict=True)
        ]
        tests.append(
            {
                "name": name, "interval": "1m", "input_series": input_series,
                "promql_expr_test": found,
            }
        )  # fmt: skip
    file = tmp_path / "test.yaml"
    rules = rules_of(queries, tmp_path).name
    file.write_text(yaml.safe_dump({"rule_files": [rules], "tests": tests}))
    promtool("test", "rules", file)


def test_the_targets_of_the_autoscaler_and_the_adapter_agree() -> None:
    hpa = yaml.safe_load((ROOT / "deploy" / "kubernetes" / "hpa.yaml").read_text())
    found = {
        each["object"]["metric"]["name"]: each["object"]["target"]["value"]
        for each in hpa["spec"]["metrics"]
    }
    queries = scaling("adapter")
    assert {*found} == {*queries}
    cut = re.findall(r", ([\d.]+)\)$", queries["service_streamer_utilization"])
    assert cut == [found["service_streamer_utilization"]]


def test_the_dashboard_is_as_written() -> None:
    assert grafana_dashboard.FILE.read_text() == grafana_dashboard.text(), (
        "run scripts/grafana_dashboard.py"
    )


def test_the_dashboard_can_be_imported() -> None:
    variables = {each["name"] for each in DASHBOARD["templating"]["list"]}
    assert variables == {"datasource", "namespace", "job", "model"}
    used = {*re.findall(r"\$\{?(\w+)", grafana_dashboard.text())} - {"__rate_interval", "__all"}
    assert used == variables
    numbers = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len({*numbers}) == len(numbers)
    places: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        taken = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert at["x"] + at["w"] <= 24
        assert not taken & places
        places |= taken


@pytest.mark.parametrize("label", ["namespace", "job", "model"])
def test_a_variable_at_all_takes_series_without_the_label(label: str) -> None:
    [variable] = [each for each in DASHBOARD["templating"]["list"] if each["name"] == label]
    assert variable["includeAll"]
    assert re.fullmatch(variable["allValue"], "")
