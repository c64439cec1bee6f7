"""The manifest for KubeRay is valid, its parts fit each other, and its commands are ours."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from command_line import launched
from object_shapes import ANY, COUNT, FLAG, METADATA, TEXT, TEXTS, closed
from serve_process import python

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "kuberay"
DOCUMENTS: list[dict[str, Any]] = list(yaml.safe_load_all((FOLDER / "service.yaml").read_text()))
KINDS = {each["kind"]: each for each in DOCUMENTS}
CLUSTER = KINDS["RayCluster"]
SPEC = CLUSTER["spec"]
GROUPS = {each["groupName"]: each for each in SPEC["workerGroupSpecs"]}
TEMPLATES = {
    "head": SPEC["headGroupSpec"]["template"],
    **{name: group["template"] for name, group in GROUPS.items()},
}
WEB = TEMPLATES["web"]["spec"]["containers"][0]


#: What a RayCluster may have, by the API reference of KubeRay 1.7 (ray.io/v1), as far as it is of
#: use here. The pods in it are checked apart, by the schema of Kubernetes.
RAY_CLUSTER = closed(
    "apiVersion", "kind", "metadata", "spec",
    apiVersion={"const": "ray.io/v1"},
    kind={"const": "RayCluster"},
    metadata=METADATA,
    spec=closed(
        "headGroupSpec", "rayVersion",
        rayVersion=TEXT,
        suspend=FLAG,
        authOptions=closed(
            mode={"enum": ["disabled", "token"]}, secretName=TEXT, enableK8sTokenAuth=FLAG
        ),
        enableInTreeAutoscaling=FLAG,
        autoscalerOptions=closed(
            version={"enum": ["v1", "v2"]},
            upscalingMode={"enum": ["Default", "Aggressive", "Conservative"]},
            idleTimeoutSeconds=COUNT, image=TEXT, imagePullPolicy=TEXT, resources=ANY,
        ),
        headGroupSpec=closed(
            "template", rayStartParams=TEXTS, serviceType=TEXT, labels=TEXTS, resources=TEXTS,
            template=ANY,
        ),
        workerGroupSpecs={
            "type": "array",
            "items": closed(
                "groupName", "minReplicas", "maxReplicas", "template",
                groupName=TEXT, replicas=COUNT, minReplicas=COUNT, maxReplicas=COUNT,
                idleTimeoutSeconds=COUNT, numOfHosts=COUNT, suspend=FLAG, rayStartParams=TEXTS,
                labels=TEXTS, resources=TEXTS, template=ANY,
            ),
        },
    ),
)  # fmt: skip


def command() -> list[str]:
    """``serve`` with its arguments, as the shell of the web pod has them."""
    [script] = WEB["args"]
    return shlex.split(script.partition("exec service-streamer ")[2])


def test_the_cluster_has_what_kuberay_knows() -> None:
    jsonschema.validate(CLUSTER, RAY_CLUSTER)
    assert not {*KINDS} - {"RayCluster", "Service", "NetworkPolicy"}


@pytest.mark.parametrize("kind", ["Service", "NetworkPolicy"])
def test_the_other_objects_have_what_kubernetes_knows(kind: str) -> None:
    assert kubernetes_validate.validate(KINDS[kind], "1.30", strict=True) == "1.30"


@pytest.mark.parametrize("group", TEMPLATES)
def test_the_pods_have_what_kubernetes_knows(group: str) -> None:
    template = TEMPLATES[group]
    pod = {
        "apiVersion": "v1", "kind": "Pod", "spec": template["spec"],
        "metadata": {"name": group, **template.get("metadata", {})},
    }  # fmt: skip
    assert kubernetes_validate.validate(pod, "1.30", strict=True) == "1.30"


def test_rays_autoscaler_reads_the_groups_as_they_are_meant() -> None:
    metadata = {"namespace": "default", **CLUSTER["metadata"]}
    # In a process of its own: importing it has everybody's log written.
    program = """
import json, sys
from ray.autoscaler._private.kuberay.autoscaling_config import (
    _derive_autoscaling_config_from_ray_cr as derived,
)
json.dump(derived(json.load(sys.stdin))["available_node_types"], sys.stdout)
"""
    done = python("-c", program, given=json.dumps({**CLUSTER, "metadata": metadata}))
    nodes = json.loads(done.stdout)
    # Workers ask for a core each, so none goes to the head, or beside the web process.
    assert {name: each["resources"]["CPU"] for name, each in nodes.items()} == {
        "headgroup": 0, "web": 0, "gpu": 4,
    }  # fmt: skip
    assert nodes["gpu"]["resources"]["GPU"] == 1
    assert (nodes["web"]["min_workers"], nodes["web"]["max_workers"]) == (1, 1)
    assert nodes["gpu"]["min_workers"] <= GROUPS["gpu"]["replicas"] <= nodes["gpu"]["max_workers"]


def test_traffic_finds_the_web_process() -> None:
    # KubeRay gives these labels to each pod of a group.
    labels = {"ray.io/cluster": CLUSTER["metadata"]["name"], "ray.io/group": "web"}
    service, policy = KINDS["Service"]["spec"], KINDS["NetworkPolicy"]["spec"]
    assert service["selector"] == labels
    [port] = WEB["ports"]
    assert [each["targetPort"] for each in service["ports"]] == [port["name"]]
    assert {
        probe["httpGet"]["port"] for probe in (WEB["readinessProbe"], WEB["livenessProbe"])
    } == {port["name"]}
    own = {"matchLabels": {"ray.io/cluster": labels["ray.io/cluster"]}}
    assert policy["podSelector"] == own
    assert policy["ingress"] == [
        {"from": [{"podSelector": own}]},
        {"ports": [{"port": port["name"], "protocol": "TCP"}]},
    ]


def test_the_command_serves_on_all_gpus_of_the_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    options = launched(monkeypatch, *command()).options
    assert options.ray == "auto"
    group = GROUPS["gpu"]
    assert options.worker_num == (group["minReplicas"], group["maxReplicas"])
    assert (options.host, options.port) == ("0.0.0.0", WEB["ports"][0]["containerPort"])
    grace = TEMPLATES["web"]["spec"]["terminationGracePeriodSeconds"]
    assert grace > options.timeout


def test_every_pod_has_the_same_image_and_ray() -> None:
    images = {each["spec"]["containers"][0]["image"] for each in TEMPLATES.values()}
    assert images == {"service-streamer"}
    [pinned] = re.findall(r"^ray==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    [base] = re.findall(
        r"^FROM rayproject/ray:([\d.]+)-", (FOLDER / "Dockerfile").read_text(), re.M
    )
    assert base == SPEC["rayVersion"] == pinned
