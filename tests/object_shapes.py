"""Schemas of objects that extend Kubernetes, as far as the manifests use them.

A server drops an unknown field without a word, so objects have no other keys than these.
"""

from __future__ import annotations

from typing import Any


def closed(*required: str, **properties: Any) -> dict[str, Any]:
    """The schema of an object without other keys."""
    return {
        "type": "object", "properties": properties, "required": list(required),
        "additionalProperties": False,
    }  # fmt: skip


TEXT, COUNT, FLAG = {"type": "string"}, {"type": "integer", "minimum": 0}, {"type": "boolean"}
TEXTS = {"type": "object", "additionalProperties": TEXT}
ANY = {"type": "object"}
METADATA = closed("name", name=TEXT, namespace=TEXT, labels=TEXTS, annotations=TEXTS)

_SELECTOR = closed("matchLabels", matchLabels=TEXTS)
_KEY = closed("name", "key", name=TEXT, key=TEXT)

#: By the definition of the Prometheus operator 0.93.
SERVICE_MONITOR = closed(
    "apiVersion", "kind", "metadata", "spec",
    apiVersion={"const": "monitoring.coreos.com/v1"},
    kind={"const": "ServiceMonitor"},
    metadata=METADATA,
    spec=closed(
        "endpoints", "selector",
        selector=_SELECTOR,
        endpoints={
            "type": "array",
            "items": closed(
                port=TEXT, path=TEXT, scheme={"enum": ["http", "https", "HTTP", "HTTPS"]},
                interval={**TEXT, "pattern": "^([0-9]+(ms|s|m|h))+$"},
                authorization=closed(type=TEXT, credentials=_KEY),
                tlsConfig=closed(
                    serverName=TEXT, insecureSkipVerify=FLAG, keySecret=_KEY,
                    ca=closed(secret=_KEY), cert=closed(secret=_KEY),
                ),
            ),
        },
    ),
)  # fmt: skip

#: By the definition of KEDA 2.20, and its reference of the trigger `prometheus`, whose metadata are
#: all texts.
SCALED_OBJECT = closed(
    "apiVersion", "kind", "metadata", "spec", apiVersion={"const": "keda.sh/v1alpha1"},
    kind={"const": "ScaledObject"}, metadata=METADATA,
    spec=closed(
        "scaleTargetRef", "triggers",
        scaleTargetRef=closed("name", name=TEXT, kind=TEXT, apiVersion=TEXT),
        minReplicaCount=COUNT, maxReplicaCount=COUNT, pollingInterval=COUNT, cooldownPeriod=COUNT,
        triggers={
            "type": "array",
            "items": closed(
                "type", "metadata", type={"const": "prometheus"}, name=TEXT,
                metricType={"enum": ["AverageValue", "Value"]},
                metadata=closed(
                    "serverAddress", "query", "threshold",
                    serverAddress=TEXT, query=TEXT, threshold=TEXT, activationThreshold=TEXT,
                    namespace=TEXT, ignoreNullValues={"enum": ["true", "false"]},
                ),
            ),
        },
        advanced=closed(horizontalPodAutoscalerConfig=closed(behavior=ANY)),
    ),
)  # fmt: skip
