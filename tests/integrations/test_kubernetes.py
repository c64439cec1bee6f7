"""The Helm chart renders, its manifests are valid and fit each other, and its commands are ours."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

import service_streamer
from command_line import END_SECONDS, launched
from object_shapes import SCALED_OBJECT, SERVICE_MONITOR
from service_streamer.serve.cli.main import serve

helm_python = pytest.importorskip("helm_python", reason="helm-python-sdk has no wheel for this")

from kubernetes_manifests import CHART, FILES, FOLDER, manifests, rendered  # noqa: E402

DEFAULTS: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())

#: Values with which everything that the chart can do is done.
VALUES: dict[str, dict[str, Any]] = {
    "default": {},
    "all": {
        "model": "my_module:MyModel",
        "args": ["--deduplicate"],
        "env": [{"name": "HF_HUB_OFFLINE", "value": "1"}],
        "envFrom": [{"secretRef": {"name": "hub"}}],
        "imagePullSecrets": [{"name": "pull"}],
        "gpu": {"count": 2},
        "cache": {"existingClaim": "models"},
        "volumes": [{"name": "code", "configMap": {"name": "code"}}],
        "volumeMounts": [{"name": "code", "mountPath": "/app"}],
        "service": {"annotations": {"a": "b"}},
        "serviceMonitor": {
            "enabled": True,
            "labels": {"release": "prometheus"},
            "endpoint": {"authorization": {"credentials": {"name": "scrape", "key": "key"}}},
        },
        "autoscaling": {"kind": "hpa"},
        "networkPolicy": {"enabled": True, "from": [{"podSelector": {}}]},
        "podLabels": {"a": "b"},
        "podAnnotations": {"a": "b"},
        "nodeSelector": {"a": "b"},
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
        "affinity": {"podAntiAffinity": {}},
        "topologySpreadConstraints": [
            {
                "maxSkew": 1,
                "topologyKey": "kubernetes.io/hostname",
                "whenUnsatisfiable": "ScheduleAnyway",
                "labelSelector": {"matchLabels": {"app.kubernetes.io/name": "service-streamer"}},
            }
        ],
        "priorityClassName": "high",
        "runtimeClassName": "nvidia",
    },
    "keda": {"autoscaling": {"kind": "keda"}},
    "keys": {"apiKeys": {"secretName": "keys"}},
    "tls": {"tls": {"secretName": "tls"}, "serviceMonitor": {"enabled": True}},
    "client certificates": {"tls": {"secretName": "tls", "clientCA": True}},
    "grpc": {"grpc": {"enabled": True}, "networkPolicy": {"enabled": True}},
}
OWN = {"ServiceMonitor": SERVICE_MONITOR, "ScaledObject": SCALED_OBJECT}


def objects(values: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """What the chart makes, by kind."""
    loaded = map(yaml.safe_load, rendered(values).values())
    return {each["kind"]: each for each in loaded}


def check(made: dict[str, Any], version: str = "1.30") -> None:
    """It has only fields that Kubernetes of this version, or the operator that reads it, knows."""
    if made["kind"] in OWN:
        validator = jsonschema.Draft202012Validator(OWN[made["kind"]])
        assert [*validator.iter_errors(made)] == []
    else:
        assert kubernetes_validate.validate(made, version, strict=True) == version


def pod(values: dict[str, Any]) -> dict[str, Any]:
    spec: dict[str, Any] = objects(values)["Deployment"]["spec"]["template"]["spec"]
    return spec


def container(values: dict[str, Any]) -> dict[str, Any]:
    [only] = pod(values)["containers"]
    assert isinstance(only, dict)
    return only


@pytest.mark.parametrize("name", VALUES)
def test_helm_has_nothing_to_say(name: str) -> None:
    told = helm_python.lint(CHART, VALUES[name], strict=True, kube_version="v1.30.0")
    assert not told["errors"]
    assert [each["error"] for each in told["messages"] if each["severity"] > 1] == []


@pytest.mark.parametrize("version", ["1.30", "1.34"])
@pytest.mark.parametrize("name", VALUES)
def test_the_objects_have_what_kubernetes_knows(name: str, version: str) -> None:
    for each in objects(VALUES[name]).values():
        check(each, version)


def test_the_plain_manifests_are_those_of_the_chart() -> None:
    written = {path.name: path.read_text() for path in FOLDER.iterdir()}
    assert written == manifests(), "run scripts/kubernetes_manifests.py"


@pytest.mark.parametrize("name", FILES)
def test_the_plain_manifests_have_what_kubernetes_knows(name: str) -> None:
    for each in yaml.safe_load_all((FOLDER / name).read_text()):
        check(each)


def test_every_value_is_in_the_schema() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    jsonschema.Draft7Validator.check_schema(schema)
    assert {*schema["properties"]} == {*DEFAULTS, "global"}
    for name, value in DEFAULTS.items():
        parts = schema["properties"][name].get("properties")
        if isinstance(value, dict) and parts:
            assert {*value} <= {*parts}


@pytest.mark.parametrize(
    "values",
    [
        {"replica": 1},
        {"image": {"tag": ""}},
        {"timeout": "30"},
        {"timeout": 0},
        {"autoscaling": {"kind": "vpa"}},
        {"autoscaling": {"utilization": 80}},
        {"tls": {"clientCA": True}},
        {"cache": {"sizeLimit": "20 GB"}},
        {"apiKeys": {"keys": ["secret"]}},
    ],
    ids=str,
)
def test_mistyped_values_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(helm_python.HelmValuesError):
        rendered(values)


def test_a_timeout_in_the_file_is_refused() -> None:
    # The arguments win over the file, and the pod's grace period goes by the value.
    with pytest.raises(helm_python.HelmError, match="set timeout as a value of the chart"):
        rendered({"config": "[serve]\n  timeout = 60\n"})
    rendered({"config": "[serve]\nstart-timeout = 60\n"})


@pytest.mark.parametrize("name", ["default", "all"])
def test_serve_takes_the_arguments_and_the_file(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("service_streamer.serve.cli.main.explain_name", lambda _: None)
    values = VALUES[name]
    file = tmp_path / "service.toml"
    file.write_text(objects(values)["ConfigMap"]["data"]["service.toml"])
    assert tomllib.loads(file.read_text())
    mount = {each["name"]: each["mountPath"] for each in container(values)["volumeMounts"]}
    args = container(values)["args"]
    assert f"--config={mount['config']}/service.toml" in args
    found = [arg.replace(mount["config"], str(tmp_path)) for arg in args]
    options = launched(monkeypatch, *found).options
    [port] = container(values)["ports"]
    assert (options.host, options.port) == ("0.0.0.0", port["containerPort"])
    assert options.model == values.get("model")
    assert options.timeout == DEFAULTS["timeout"]
    assert options.log_format == "json"


@pytest.mark.parametrize("timeout", [30, 0.5, 600])
def test_the_pod_lives_until_the_service_has_drained(timeout: float) -> None:
    spec = pod({"timeout": timeout, "preStopSeconds": 7})
    [of] = spec["containers"]
    assert of["lifecycle"]["preStop"] == {"sleep": {"seconds": 7}}
    assert f"--timeout={timeout}" in of["args"]
    left = spec["terminationGracePeriodSeconds"] - 7 - timeout
    assert left >= END_SECONDS


def test_the_pod_has_no_rights() -> None:
    spec = pod({})
    assert spec["enableServiceLinks"] is False
    assert spec["automountServiceAccountToken"] is False
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container({})["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def test_the_user_and_the_folders_are_those_of_the_image() -> None:
    dockerfile = (CHART.parent.parent / "docker" / "Dockerfile").read_text()
    user = pod({})["securityContext"]
    assert f"USER {user['runAsUser']}:{user['runAsGroup']}\n" in dockerfile
    assert user["fsGroup"] == user["runAsGroup"]
    paths = {each["mountPath"] for each in container({})["volumeMounts"]}
    assert {"/tmp", "/dev/shm", re.findall(r"HF_HOME=(\S+)", dockerfile)[0]} <= paths


@pytest.mark.parametrize("name", VALUES)
def test_the_parts_fit_each_other_and_serve(name: str) -> None:
    made, of = objects(VALUES[name]), container(VALUES[name])
    given = {arg.partition("=")[0] for arg in of["args"] if "--" in arg}
    assert given <= {flag for option in serve.params for flag in option.opts}
    mounted = {each["name"] for each in of["volumeMounts"]}
    assert mounted == {each["name"] for each in pod(VALUES[name])["volumes"]}
    labels = made["Deployment"]["spec"]["template"]["metadata"]["labels"]
    ports = {each["name"] for each in of["ports"]}
    assert made["Service"]["spec"]["selector"].items() <= labels.items()
    assert {each["targetPort"] for each in made["Service"]["spec"]["ports"]} == ports
    selector = made["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"]
    assert selector.items() <= labels.items()
    if "NetworkPolicy" in made:
        [rule] = made["NetworkPolicy"]["spec"]["ingress"]
        assert {each["port"] for each in rule["ports"]} == ports
    if "ServiceMonitor" in made:
        monitor = made["ServiceMonitor"]["spec"]
        chosen = monitor["selector"]["matchLabels"]
        assert chosen.items() <= made["Service"]["metadata"]["labels"].items()
        assert [each["port"] for each in monitor["endpoints"]] == ["http"]


@pytest.mark.parametrize(
    ("name", "scheme"), [("default", None), ("tls", "HTTPS"), ("client certificates", "TCP")]
)
def test_probes_know_how_the_service_listens(name: str, scheme: str | None) -> None:
    of = container(VALUES[name])
    probes = [of[f"{each}Probe"] for each in ("startup", "readiness", "liveness")]
    if scheme == "TCP":
        assert all(each["tcpSocket"] == {"port": "http"} for each in probes)
        return
    paths = ["/health/live", "/health/ready", "/health/live"]
    assert [each["httpGet"]["path"] for each in probes] == paths
    assert {each["httpGet"].get("scheme") for each in probes} == {scheme}


def test_a_pod_gets_its_gpus() -> None:
    limits = container({"gpu": {"count": 2}})["resources"]["limits"]
    assert limits == {"nvidia.com/gpu": 2, "memory": "4Gi"}
    assert container({})["resources"] == DEFAULTS["resources"]


@pytest.mark.parametrize(("kind", "made"), [("hpa", "HorizontalPodAutoscaler"),
                                            ("keda", "ScaledObject")])  # fmt: skip
def test_the_autoscaler_decides_alone(kind: str, made: str) -> None:
    found = objects({"autoscaling": {"kind": kind}})
    assert "replicas" not in found["Deployment"]["spec"]  # an upgrade would reset their number
    target = found[made]["spec"]["scaleTargetRef"]["name"]
    assert target == found["Deployment"]["metadata"]["name"]


def test_the_chart_is_of_this_version() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["appVersion"] == service_streamer.__version__


def test_the_values_on_the_page_are_right() -> None:
    page = (CHART.parent.parent.parent / "docs" / "howto" / "deploy.md").read_text()
    [shown] = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    made = objects(yaml.safe_load(shown))
    assert {"ServiceMonitor", "ScaledObject"} <= {*made}
