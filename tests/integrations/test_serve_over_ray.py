"""``serve --ray``: its options, and a service whose workers are actors of a real Ray."""

from __future__ import annotations

import logging
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

import service_streamer.serve.opening as opening
from command_line import invoke, launched
from ray_nodes import RayNodes, printed
from ray_stub import RayStub
from serve_process import ROOT, Serving, python, run, until
from service_streamer.serve.cli.main import main


@pytest.fixture
def nodes() -> Iterator[RayNodes]:
    with RayNodes() as nodes:
        yield nodes


@pytest.mark.parametrize(
    ("arguments", "ray", "model"),
    [
        ((), None, None),
        (("--ray",), "any", None),
        (("my_module:MyModel", "--ray"), "any", "my_module:MyModel"),
        (("--ray", "--workers", "2"), "any", None),
        (("--ray", "auto", "my_module:MyModel"), "auto", "my_module:MyModel"),
        (("--ray", "10.0.0.1:6379"), "10.0.0.1:6379", None),
        (("--ray=[fe80::1]:6379",), "[fe80::1]:6379", None),
    ],
)
def test_the_address_may_be_left_out(
    monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], ray: str | None, model: str | None
) -> None:
    options = launched(monkeypatch, "serve", *arguments).options
    assert (options.ray, options.model) == (ray, model)


def test_a_file_says_what_workers_ask_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "service.toml"
    path.write_text(
        '[serve]\nray = "auto"\nray-num-gpus = 0.5\nray-num-cpus = 4\n'
        'ray-resources = "disk=1, accelerator_type:A100=0.001"\n'
        'ray-scheduling-strategy = "SPREAD"\n'
        'ray-runtime-env = \'{"working_dir": "."}\'\n'
    )
    options = launched(monkeypatch, "serve", "--config", str(path)).options
    assert (options.ray, options.num_gpus, options.num_cpus) == ("auto", 0.5, 4)
    assert options.resources == {"disk": 1, "accelerator_type:A100": 0.001}
    assert options.scheduling_strategy == "SPREAD"
    assert options.runtime_env == {"working_dir": "."}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("--ray my_module:MyModel", "not 'my_module:MyModel'; write MODEL before --ray"),
        ("--ray ./model", "must be host:port, auto, local or any; not './model'"),
        ("--ray ray://head:10001", "batches do not go through the Ray Client"),
        ("--ray --redis localhost:6379", "--redis and --ray exclude each other"),
        ("--ray --devices 0,1", "--devices has no effect with --ray"),
        ("--ray --devices-per-worker 2", "--devices-per-worker has no effect with --ray"),
        ("--ray --cpu-threads 2", "--cpu-threads has no effect with --ray"),
        ("--ray --preprocess-workers 2", "--preprocess-workers has no effect with --ray"),
        ("--ray --ray-num-gpus -1", "must be a finite number of at least 0"),
        ("--ray --ray-resources disk", "such as disk=1,accelerator_type:A100=0.001"),
        ("--ray --ray-resources a=1,a=2", "such as disk=1,accelerator_type:A100=0.001"),
        ("--ray --ray-scheduling-strategy PACK", "must be DEFAULT or SPREAD; not 'PACK'"),
        ("--ray --ray-runtime-env .", """must be JSON such as '{"working_dir": "."}'; not '.'"""),
        (
            "--ray --ray-runtime-env [1]",
            """must be JSON such as '{"working_dir": "."}'; not '[1]'""",
        ),
        ("--ray-num-gpus 1", "--ray-num-gpus has no effect without --ray"),
        ("--ray-num-cpus 1", "--ray-num-cpus has no effect without --ray"),
    ],
)
def test_options_of_ray_that_do_not_fit_are_refused(arguments: str, says: str) -> None:
    done = CliRunner().invoke(main, ["serve", *arguments.split()], terminal_width=1000)
    assert done.exit_code == 2, done.output
    assert says in click.unstyle(done.output)


@pytest.mark.parametrize(
    ("where", "says"),
    [
        ("127.0.0.1:1", "there is no Ray cluster at '127.0.0.1:1' ("),
        ("ray://127.0.0.1:1", "RayStreamer does not work over Ray Client (ray://); "),
    ],
)
def test_there_is_no_cluster_to_serve_on(nodes: RayNodes, where: str, says: str) -> None:
    variables = nodes.environment | {"RAY_ADDRESS": where}
    done = run("serve", "--port", "0", "--ray", "auto", **variables)
    assert done.returncode == 3
    assert f"\nservice-streamer: --ray auto: {says}" in f"\n{done.stderr}"
    assert "Traceback" not in done.stderr


def replace_ray(monkeypatch: pytest.MonkeyPatch, error: Exception, *, connects: bool) -> None:
    """A Ray that raises this, when a program connects or later."""

    def refuse(*_: object) -> None:
        raise error

    stub = RayStub()
    stub.is_connected, stub.when_connecting = not connects, refuse
    stub.replace_ray(monkeypatch)
    monkeypatch.setattr("ray.put", refuse)
    monkeypatch.setenv("RAY_TMPDIR", "/nowhere")


@pytest.mark.parametrize(
    ("error", "cause", "says"),
    [
        (RuntimeError("Version mismatch:\n  2.60 there\n  2.40 here"), None,
         "Version mismatch: 2.60 there 2.40 here"),
        (ConnectionError("Failed to connect"), RuntimeError("no GCS\nat all"),
         "Failed to connect: no GCS"),
    ],
)  # fmt: skip
def test_a_cluster_that_cannot_be_used_is_one_line(
    monkeypatch: pytest.MonkeyPatch, error: Exception, cause: Exception | None, says: str
) -> None:
    error.__cause__ = cause
    replace_ray(monkeypatch, error, connects=True)
    for name in ("basicConfig", "captureWarnings"):  # of the whole process
        monkeypatch.setattr(logging, name, lambda *_, **__: None)
    done = invoke("serve", "--ray", "--port", "0")
    assert done.exit_code == 3
    assert done.output.splitlines()[-1] == f"service-streamer: --ray any: {says}"


def test_an_error_of_a_users_code_is_not_the_clusters(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_ray(monkeypatch, RuntimeError("CUDA driver too old"), connects=False)
    target, pool = opening.pool_of_service(launched(monkeypatch, "serve", "--ray").options)
    with pytest.raises(RuntimeError, match="CUDA driver too old") as caught:
        opening.streamer_of(target, pool, "")
    assert not isinstance(caught.value, opening.ClusterUnavailable)


@pytest.mark.long
def test_a_service_on_a_ray_of_its_own(nodes: RayNodes) -> None:
    place = ("served_models:double", "--ray", "local", "--ray-num-gpus", "0")
    with Serving(*place, **nodes.environment) as service:
        assert service.predict([1, 2]).json() == [2, 4]
        assert service.ready() == 200
        [worker] = service.stats()["workers"]
        assert worker["state"] in ("idle", "busy")
        [actor] = [pid for pid in nodes.processes() if _is_worker(pid)]
        os.kill(actor, signal.SIGKILL)
        until(lambda: service.stats()["workers"][0]["restarts"] == 1)
        assert service.predict([3]).json() == [6]
        assert service.terminate() == 0
    until(lambda: not [*nodes.processes()])  # its Ray ends with it


def _is_worker(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().startswith("ray::RayWorker")
    except OSError:  # it has just ended
        return False


@pytest.mark.long
def test_several_web_processes_share_the_workers(nodes: RayNodes) -> None:
    place = ("served_models:double", "--ray", nodes.start_head(), "--ray-num-gpus", "0")
    with Serving(*place, "--web-workers", "2", **nodes.environment) as service:
        assert service.answer([1, 2]) == [2, 4]
        assert len([pid for pid in nodes.processes() if _is_worker(pid)]) == 1
        assert service.terminate() == 0


@pytest.mark.long
def test_the_command_of_the_web_pod_of_kuberay(nodes: RayNodes) -> None:
    from test_kuberay import WEB

    [script] = WEB["args"]
    for there, here in (
        ("serve --ray", "serve served_models:double --ray"),
        ("--ray-num-gpus 1 --workers 1:8", "--ray-num-gpus 0"),
        ("--host 0.0.0.0 --port 8000", "--host 127.0.0.1 --port 0"),
    ):
        assert there in script
        script = script.replace(there, here)
    address = nodes.start_head()
    joins = f"ray start --address={address} --num-cpus=0 --block --dashboard-agent-listen-port=0"
    with Serving(
        script, program=WEB["command"],
        KUBERAY_GEN_RAY_START_CMD=joins, **nodes.environment | {"RAY_ADDRESS": address},
    ) as service:  # fmt: skip
        assert service.predict([1, 2]).json() == [2, 4]
        assert service.terminate() == 0  # the shell is gone: the signal is for the web process


@pytest.mark.long
def test_the_example_brings_its_modules_to_the_workers(nodes: RayNodes) -> None:
    done = python("example/ray_example.py", cwd=ROOT, **nodes.environment)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"you\nworker 0 on .*: idle\n", printed(done.stdout))
