"""Writes deploy/grafana/dashboard.json.

    python scripts/grafana_dashboard.py

Each query adds up over pods and web processes. With several models in a service there is a line for
each, by the label ``model``.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

FILE = Path(__file__).parent.parent / "deploy" / "grafana" / "dashboard.json"

_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
_SERIES = 'namespace=~"$namespace",job=~"$job",model=~"$model"'
_COLUMNS, _WIDTH, _HEIGHT = 24, 8, 8


class Panel(NamedTuple):
    """Lines over time.

    Attributes:
        lines: a legend and a query each. ``<name>`` stands for the series of a metric, ``[]`` for
            the rate's window.
        unit: one of Grafana's.
        stacked: whether the lines add up.
    """

    title: str
    about: str
    lines: Sequence[tuple[str, str]]
    unit: str = "short"
    stacked: bool = False


def _quantiles(metric: str) -> list[tuple[str, str]]:
    query = "histogram_quantile({}, sum by (le, model) (rate(<{}_bucket>[])))"
    return [(f"p{100 * q:.0f} {{{{model}}}}", query.format(q, metric)) for q in (0.5, 0.95, 0.99)]


def _mean(metric: str) -> str:
    return f"sum by (model) (rate(<{metric}_sum>[])) / sum by (model) (rate(<{metric}_count>[]))"


ROWS: dict[str, list[Panel]] = {
    "Requests": [
        Panel(
            "Requests", "Answered requests by status.",
            [("{{status}} {{model}}", "sum by (status, model) (rate(<requests_total>[]))")],
            "reqps", stacked=True,
        ),
        Panel(
            "Errors", "Share of the requests that the service could not answer (5xx).",
            [(
                "{{model}}",
                '(sum by (model) (rate(<requests_total|status=~"5..">[])) or '
                "0 * sum by (model) (rate(<requests_total>[])))"
                " / sum by (model) (rate(<requests_total>[]))",
            )],
            "percentunit",
        ),
        Panel(
            "Refusals", "Requests answered with an error, by reason.",
            [("{{reason}} {{model}}", "sum by (reason, model) (rate(<rejections_total>[]))")],
            "reqps", stacked=True,
        ),
        Panel(
            "Latency", "From the head of a request to its result.",
            _quantiles("request_duration_seconds"), "s",
        ),
        Panel(
            "Requests in progress", "Requests, and streams of them, and clients that left.",
            [
                ("requests", "sum(<open_requests>)"),
                ("streams", "sum(<open_streams>)"),
                ("disconnects per second", "sum(rate(<disconnects_total>[]))"),
            ],
        ),
        Panel(
            "Ready", "Pods that can compute requests.",
            [("{{model}}", "sum by (model) (<ready>)")],
        ),
    ],
    "Queue and batches": [
        Panel(
            "Queue seconds",
            "How long a call waits for its batch. Above the time of a full batch, callers wait for "
            "more workers: this adds pods.",
            [("mean {{model}}", _mean("queue_duration_seconds")),
             *_quantiles("queue_duration_seconds")],
            "s",
        ),
        Panel(
            "Batch size", "Items of a batch.",
            [("mean {{model}}", _mean("batch_size")), *_quantiles("batch_size")],
        ),
        Panel(
            "Queue", "Items that wait, and items that workers hold.",
            [
                ("waiting {{model}}", "sum by (model) (<pending>)"),
                ("in work {{model}}", "sum by (model) (<in_flight>)"),
            ],
        ),
        Panel(
            "Where the time goes", "Means: the wait in the queue, the batch, the model in it.",
            [
                ("queue {{model}}", _mean("queue_duration_seconds")),
                ("batch {{model}}", _mean("batch_duration_seconds")),
                ("model {{model}}", _mean("inference_duration_seconds")),
            ],
            "s",
        ),
        Panel(
            "Why batches are no larger", "Batches by the reason for their size.",
            [("{{reason}} {{model}}",
              "sum by (reason, model) (rate(<batches_cut_total>[])) > 0")],
            "ops", stacked=True,
        ),
        Panel(
            "Padding", "Mean share of padding in a batch.",
            [("{{model}}", _mean("padding_ratio"))], "percentunit",
        ),
    ],
    "Workers": [
        Panel(
            "Utilization",
            "Share of the time in which the workers compute. If it is low, a pod can go.",
            [(
                "{{model}}",
                "sum by (model) (rate(<inference_duration_seconds_sum>[]))"
                ' / (sum by (model) (<workers|state=~"idle|busy">) > 0)',
            )],
            "percentunit",
        ),
        Panel(
            "Workers", "Workers by state.",
            [("{{state}} {{model}}", "sum by (state, model) (<workers>)")], stacked=True,
        ),
        Panel(
            "Restarts", "Restarted workers, and items that were computed again.",
            [
                ("workers {{model}}", "sum by (model) (increase(<worker_restarts_total>[]))"),
                ("items {{model}}", "sum by (model) (increase(<retries_total>[]))"),
            ],
        ),
        Panel(
            "Stages", "Workers that are in each stage of the model.",
            [("{{stage}} {{model}}", "sum by (stage, model) (rate(<stage_seconds_total>[]))")],
            stacked=True,
        ),
        Panel(
            "Workers wanted", "With --workers LEAST:MOST.",
            [
                ("wanted {{model}}", "sum by (model) (<workers_wanted>)"),
                ("most {{model}}", "sum by (model) (<workers_most>)"),
            ],
        ),
        Panel(
            "Calls without a result", "Calls that timed out, were cancelled, or failed alone.",
            [
                ("timed out {{model}}", "sum by (model) (rate(<expired_total>[]))"),
                ("cancelled {{model}}", "sum by (model) (rate(<cancelled_total>[]))"),
                ("failed alone {{model}}", "sum by (model) (rate(<isolated_total>[]))"),
            ],
            "ops",
        ),
    ],
    "Streams of models of steps": [
        Panel(
            "First output", "From the call to the first output of a stream.",
            _quantiles("first_output_seconds"), "s",
        ),
        Panel(
            "Between outputs", "From one output of a stream to the next.",
            _quantiles("between_outputs_seconds"), "s",
        ),
        Panel(
            "Outputs", "Outputs per second of streams that are over.",
            [("{{model}}", "sum by (model) (rate(<stream_outputs_total>[]))")], "ops",
        ),
    ],
}  # fmt: skip


def _query(text: str) -> str:
    """PromQL of a panel's short form."""
    parts = []
    for part in text.split("<"):
        inside, end, after = part.partition(">")
        name, _, more = inside.partition("|")
        is_series = bool(end) and name.isidentifier()
        series = f"service_streamer_{name}{{{','.join(filter(None, (_SERIES, more)))}}}"
        parts.append(series + after if is_series else part)
    return "".join(parts).replace("[]", "[$__rate_interval]")


def _panel(panel: Panel, number: int, place: int, top: int) -> dict[str, Any]:
    stacking = {"mode": "normal" if panel.stacked else "none"}
    return {
        "id": number,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.about,
        "datasource": _SOURCE,
        "gridPos": {
            "h": _HEIGHT, "w": _WIDTH,
            "x": place * _WIDTH % _COLUMNS, "y": top + place * _WIDTH // _COLUMNS * _HEIGHT,
        },
        "fieldConfig": {
            "defaults": {
                "unit": panel.unit, "min": 0,
                "custom": {"fillOpacity": 20 if panel.stacked else 0, "stacking": stacking},
            },
            "overrides": [],
        },
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
        "targets": [
            {
                "refId": chr(ord("A") + place), "datasource": _SOURCE,
                "expr": _query(query), "legendFormat": legend,
            }
            for place, (legend, query) in enumerate(panel.lines)
        ],
    }  # fmt: skip


def _variable(name: str, metric: str, label: str) -> dict[str, Any]:
    """A label's values; All also matches series without the label."""
    query = f"label_values(service_streamer_{metric}, {label})"
    return {
        "name": name, "label": name, "type": "query", "datasource": _SOURCE,
        "definition": query, "query": {"query": query, "refId": name},
        "includeAll": True, "allValue": ".*", "multi": True, "refresh": 2, "sort": 1,
        "current": {"text": "All", "value": "$__all"},
    }  # fmt: skip


def dashboard() -> dict[str, Any]:
    panels: list[dict[str, Any]] = []
    top = 0
    for title, row in ROWS.items():
        place = {"h": 1, "w": _COLUMNS, "x": 0, "y": top}
        panels.append(
            {"id": len(panels) + 1, "type": "row", "title": title, "gridPos": place, "panels": []}
        )
        top += 1
        for number, panel in enumerate(row):
            panels.append(_panel(panel, len(panels) + 1, number, top))
        top += -(-len(row) * _WIDTH // _COLUMNS) * _HEIGHT
    return {
        "title": "service-streamer",
        "uid": "service-streamer",
        "tags": ["service-streamer"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {
            "list": [
                {"name": "datasource", "label": "datasource", "type": "datasource",
                 "query": "prometheus"},
                _variable("namespace", "info", "namespace"),
                _variable("job", "info", "job"),
                _variable("model", "queue_duration_seconds_count", "model"),
            ]
        },
        "panels": panels,
    }  # fmt: skip


def text() -> str:
    """The file."""
    return json.dumps(dashboard(), indent=1) + "\n"


if __name__ == "__main__":
    FILE.write_text(text())
