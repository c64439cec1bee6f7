"""Processes of a host that share workers on Ray."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray
from test_ray_streamer import cluster  # noqa: F401 - a fixture

import models
from conftest import PATIENCE, await_that
from pools import pool_pid
from ray_nodes import printed
from service_streamer import PoolMismatch, RayStreamer
from service_streamer.testing import Gate

pytestmark = [pytest.mark.long, pytest.mark.xdist_group("ray-pool")]

Shared = Callable[..., RayStreamer]


@pytest.fixture(scope="module")
def address(cluster: None) -> str:  # noqa: F811
    """That of a cluster of this machine."""
    found: str = ray.get_runtime_context().gcs_address
    return found


@pytest.fixture
def nothing_is_left() -> None:
    """Instead of that for all tests: Ray has threads and connections of its own."""


@pytest.fixture
def on_ray(shared: Callable[..., Any], address: str) -> Shared:
    """As ``shared``, with workers on Ray."""

    def on_ray(model: Any, *args: Any, **options: Any) -> RayStreamer:
        options = {"address": address, "num_gpus": 0} | options
        streamer: RayStreamer = shared(model, *args, kind=RayStreamer, **options)
        return streamer

    return on_ray


def test_processes_share_workers_on_ray(on_ray: Shared, address: str) -> None:
    streamer = on_ray(models.process_ids, shared="a", worker_num=2)
    streamer.wait_ready(PATIENCE)
    mine = {streamer.predict([1])[0] for _ in range(100)}
    program = f"""
        import models
        from service_streamer import RayStreamer

        if __name__ == "__main__":
            with RayStreamer(
                models.process_ids, shared="a", worker_num=2, num_gpus=0, address="{address}",
                worker_timeout={PATIENCE},
            ) as streamer:
                print({{streamer.predict([1])[0] for _ in range(100)}})
        """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        cwd=Path(__file__).parents[1], capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert mine | set(map(int, printed(done.stdout).strip()[1:-1].split(","))) == mine
    assert streamer.stats().answered == 200


def test_the_pool_goes_to_the_cluster_of_its_client_and_its_workers_end_with_it(
    on_ray: Shared,
) -> None:
    streamer = on_ray(models.double, shared="a", address=None)
    assert streamer.predict([1]) == [2]
    assert ray.available_resources()["CPU"] == 3
    other = on_ray(models.double, shared="a", num_cpus=0.5)
    with pytest.raises(PoolMismatch, match=r"num_cpus is 1\.0 there and 0\.5 here"):
        other.predict([1])
    streamer.close()
    await_that(lambda: ray.available_resources().get("CPU") == 4)


def test_the_next_pool_computes_what_a_killed_one_had(on_ray: Shared, tmp_path: Path) -> None:
    gate = Gate(tmp_path / "gate")
    streamer = on_ray(models.gated(gate), shared="a")
    future = streamer.submit([1])
    gate.await_arrival()
    os.kill(pool_pid(), signal.SIGKILL)
    gate.await_arrival()  # in a worker of the next pool: Ray ends those of a driver that is gone
    gate.let_through(2)
    assert future.result() == [1]
    gate.close()
    await_that(lambda: ray.available_resources().get("CPU") == 3)
