"""Writes deploy/kubernetes/: the manifests of the Helm chart for a release, without Helm's labels.

    python scripts/kubernetes_manifests.py

Needs the extra ``test``, which has Helm as a library.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import helm_python

ROOT = Path(__file__).parent.parent
CHART = ROOT / "deploy" / "helm" / "service-streamer"
FOLDER = ROOT / "deploy" / "kubernetes"

#: The name of the release, and so of all objects.
NAME = "service-streamer"

_WRITTEN = "# Written by scripts/kubernetes_manifests.py from the chart in deploy/helm.\n"

#: By file: what to say of it, the values of the chart, and the templates that it has.
FILES: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "service.yaml": (
        "The service. Set its image to that of your registry, and then:\n# kubectl apply -f "
        "deploy/kubernetes/service.yaml",
        {},
        ("configmap", "deployment", "service", "poddisruptionbudget"),
    ),
    "servicemonitor.yaml": (
        "Has the Prometheus operator scrape the pods.",
        {"serviceMonitor": {"enabled": True}},
        ("servicemonitor",),
    ),
    "hpa.yaml": (
        "Scales the service by Prometheus' metrics. Needs deploy/prometheus/adapter.yaml. "
        "Remove\n# `replicas` from the Deployment first.",
        {"autoscaling": {"kind": "hpa"}},
        ("horizontalpodautoscaler",),
    ),
    "keda.yaml": (
        "Scales the service by Prometheus' metrics. Needs KEDA. Change the address of "
        "Prometheus, and\n# the namespace in the queries. Remove `replicas` from the Deployment "
        "first.",
        {"autoscaling": {"kind": "keda"}},
        ("scaledobject",),
    ),
    "networkpolicy.yaml": (
        "Only the ports of the service can be reached.",
        {"networkPolicy": {"enabled": True}},
        ("networkpolicy",),
    ),
}


def rendered(values: dict[str, Any], **options: Any) -> dict[str, str]:
    """The chart's manifests by template, without those that are empty."""
    with helm_python.Chart.load(CHART) as chart:
        chart.validate_schema(values)
        texts = chart.render(values, **{"name": NAME, "namespace": "default", **options})
    found = {Path(path).stem: text.strip() for path, text in texts.items()}
    return {name: text for name, text in found.items() if text and name != "NOTES"}


def manifests() -> dict[str, str]:
    """The files by name."""
    files = {}
    for name, (about, values, templates) in FILES.items():
        texts = rendered(values)
        parts = [_plain(texts[template]) for template in templates]
        files[name] = f"# {about}\n{_WRITTEN}" + "---\n".join(parts)
    return files


def _plain(text: str) -> str:
    """Without what only Helm needs, and for any namespace."""
    for line in (
        r"app\.kubernetes\.io/managed-by: .*",
        r"helm\.sh/chart: .*",
        r"namespace: default",
    ):
        text = re.sub(rf"^ *{line}\n", "", text, flags=re.MULTILINE)
    text = re.sub(r"^ *annotations:\n *#.*\n *checksum/config: .*\n", "", text, flags=re.MULTILINE)
    return text + "\n"


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name, text in manifests().items():
        (FOLDER / name).write_text(text)


if __name__ == "__main__":
    main()
