"""RayStreamer on a real cluster of this machine."""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

import models
import ray_models
from conftest import PATIENCE, await_that
from contract.calls import AsyncCalls, Calls, Forms, Lengths
from contract.figures import Figures
from contract.hazards import Hazards
from contract.single_flight import CallsThatShare, SharedComputations
from contract.streams import StreamForms, Streams
from ray_nodes import printed
from serve_process import python
from service_streamer import (
    ModelError,
    PoolMismatch,
    RayStreamer,
    UnpicklableItem,
    WorkerStartError,
)

pytestmark = pytest.mark.xdist_group("ray-streamer")

Build = Callable[..., RayStreamer]


@contextlib.contextmanager
def short_folder() -> Iterator[Path]:
    """Not in a deep one: the path of a socket has a limit."""
    folder = Path(tempfile.mkdtemp(prefix="ray-"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def start_cluster(folder: Path) -> None:
    for _ in range(3):
        # A node has 30 s to start, which are not enough for it on a machine that is very busy.
        with contextlib.suppress(Exception):
            ray.init(
                address="local", num_cpus=4, num_gpus=2, resources={"seat": 2},
                include_dashboard=False, object_store_memory=100_000_000, _temp_dir=str(folder),
                log_to_driver=False,
            )  # fmt: skip
            return
        ray.shutdown()
    pytest.fail("Ray does not start here")


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """Two GPUs that are not there: Ray only counts them."""
    with pytest.MonkeyPatch.context() as patch, short_folder() as folder:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_agent_register_timeout_ms", "100000")  # on a busy machine
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[1]), prepend=os.pathsep)
        start_cluster(folder)
        yield
        await_that(lambda: free("CPU") == 4 and free("GPU") == 2)  # no worker is left
        ray.shutdown()


def free(resource: str) -> float:
    return float(ray.available_resources().get(resource, 0))


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """Instead of that for all tests: Ray has threads and connections of its own."""
    yield
    await_that(lambda: gc.collect() >= 0 and not threads_of_ours())


def threads_of_ours() -> list[str]:
    """Without the one that lives as long as the connection."""
    names = [each.name for each in threading.enumerate() if "service_streamer" in each.name]
    return [name for name in names if not name.endswith("Ray connection")]


@pytest.fixture
def build(cluster: None) -> Iterator[Build]:
    built: list[RayStreamer] = []

    def build(model: Any, *args: Any, **options: Any) -> RayStreamer:
        options = {"worker_timeout": PATIENCE, "num_gpus": 0, **options}
        built.append(RayStreamer(model, *args, **options))
        return built[-1]

    yield build
    for each in reversed(built):
        each.close(drain=False)


@pytest.fixture
def kind() -> str:
    """The workers are in processes of their own."""
    return "process"


@pytest.mark.long
class TestCalls(
    Calls, Forms, AsyncCalls, Lengths, Figures, Hazards, SharedComputations, CallsThatShare
):
    """With workers on Ray."""


@pytest.mark.long
class TestStreams(Streams, StreamForms):
    """With workers on Ray."""


def test_streamers_of_several_threads_share_the_connection(build: Build) -> None:
    """One has a class with arguments, and the other one a method with its object."""
    first = build(models.Multiplier, model_init_args=[3], model_init_kwargs={"offset": 1})
    with ThreadPoolExecutor(1) as thread:
        second = thread.submit(build, models.Doubler(5).predict).result()
        assert thread.submit(second.predict, [4]).result() == [20]
        assert (first.predict([1, 2]), second.predict([1])) == ([4, 7], [5])
        first.close()
        assert second.predict([1]) == [5]
        thread.submit(second.close).result()


def test_a_model_that_cannot_be_loaded(build: Build) -> None:
    with pytest.raises(WorkerStartError, match="FileNotFoundError: no weights at") as caught:
        build(models.BrokenInit, wait_for_worker_ready=True)
    assert str(caught.value).startswith("Ray worker 0 (pid ")
    assert "Traceback" in str(caught.value.__cause__.__cause__)  # type: ignore[union-attr]


def test_a_model_that_the_node_does_not_have_says_what_to_do(
    build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "only_here.py").write_text("def model(batch):\n    return batch\n")
    monkeypatch.syspath_prepend(tmp_path)
    import only_here  # type: ignore[import-not-found]

    with pytest.raises(WorkerStartError, match=r"No module named 'only_here'.*working_dir"):
        build(only_here.model, wait_for_worker_ready=True)
    streamer = build(only_here.model, runtime_env={"env_vars": {"PYTHONPATH": str(tmp_path)}})
    assert streamer.predict([1]) == [1]


PROGRAM = """
import sys
from service_streamer import RayStreamer

class Own(Exception):
    pass

class Item:
    def __init__(self, n):
        self.n = n

def model(batch):
    if any(item.n < 0 for item in batch):
        raise Own("negative")
    return [Item(2 * item.n) for item in batch]

streamer = RayStreamer(model, num_gpus=0)
print(streamer.predict([Item(21)])[0].n)
try:
    streamer.predict([Item(-1)])
except Own as error:
    print("own", error)
"""


@pytest.mark.long
@pytest.mark.parametrize("how", ["file", "-c"])
def test_a_program_s_own_classes_travel_and_it_ends_without_closing(
    cluster: None, tmp_path: Path, how: str
) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    arguments = ["program.py"] if how == "file" else ["-c", PROGRAM]
    ended = python(*arguments, cwd=tmp_path, RAY_ADDRESS=ray.get_runtime_context().gcs_address)
    assert printed(ended.stdout) == "42\nown negative\n"
    assert ended.returncode == 0
    # A busy machine may not place it within the seconds after which that is said.
    usual = ("\tINFO worker.py", "authentication", "has no place on the cluster yet")
    said = ended.stderr.splitlines()
    assert [line for line in said if not any(each in line for each in usual)] == []


def test_an_item_or_a_result_that_cannot_be_pickled_fails_alone(build: Build) -> None:
    streamer = build(models.misbehave)
    with pytest.raises(UnpicklableItem, match="of type lock"):
        streamer.predict([1, threading.Lock()])
    with pytest.raises(ModelError, match="lock"):
        streamer.predict(["unpicklable result"])
    assert streamer.predict(["fine"]) == ["fine"]


def test_large_items_and_results_arrive_whole_and_a_model_may_not_change_them(build: Build) -> None:
    """They are in the memory of Ray's store."""
    streamer = build(models.double)
    image = np.arange(150_000, dtype=np.float32)
    batch = [image + i for i in range(4)]
    for item, result in zip(batch, streamer.predict(batch), strict=True):
        assert np.array_equal(result, np.add(item, item)) or np.array_equal(result, 2 * item)
        result[0] = 5  # it is the caller's
    [said] = build(ray_models.writes).predict([np.zeros(100_000)])
    assert "read-only" in said


@pytest.mark.parametrize("num_gpus", [1, 0.5])
def test_each_worker_sees_the_gpu_that_ray_gave_to_it(build: Build, num_gpus: float) -> None:
    count = int(2 / num_gpus)
    streamer = build(ray_models.Placed, num_gpus=num_gpus, num_cpus=0.5, worker_num=count)
    streamer.wait_ready()
    devices = sorted(str(worker.device) for worker in streamer.workers())
    host = socket.gethostname()
    assert devices == sorted([f"{host}:0", f"{host}:1"] * (count // 2))
    [(gpu_id, shown, _)] = streamer.predict([1])
    assert (gpu_id, shown in ("0", "1")) == (0, True)


def test_a_worker_without_a_gpu_sees_none(build: Build) -> None:
    of_its_node = {"env_vars": {"CUDA_VISIBLE_DEVICES": "0,1"}}
    streamer = build(ray_models.Placed, runtime_env=of_its_node)
    [(gpu_id, shown, _)] = streamer.predict([1])
    assert (gpu_id, shown) == (None, "")
    assert [worker.device for worker in streamer.workers()] == [None]


def test_resources_and_the_environment_are_what_was_asked_for(build: Build) -> None:
    streamer = build(
        models.environment, resources={"seat": 1}, num_cpus=0, scheduling_strategy="SPREAD",
        runtime_env={"env_vars": {"OF_THE_MODEL": "yes"}},
    )  # fmt: skip
    assert streamer.predict(["OF_THE_MODEL"]) == ["yes"]
    await_that(lambda: free("seat") == 1)
    streamer.close()
    await_that(lambda: free("seat") == 2)


def test_workers_are_replaced_and_their_number_changes(build: Build) -> None:
    streamer = build(models.process_ids, worker_num=1, wait_for_worker_ready=True)
    [old] = streamer.predict([None])
    streamer.restart_workers()
    [new] = streamer.predict([None])
    assert new != old
    streamer.scale(2)
    streamer.wait_ready()
    assert streamer.stats().workers["idle"] == 2
    streamer.scale(1)
    await_that(lambda: len(streamer.workers()) == 1)
    assert len(streamer.predict([None])) == 1


CONNECT = """
import sys
from service_streamer import RayStreamer
try:
    RayStreamer("models:echo", address=sys.argv[1])
except Exception as error:
    print(f"{type(error).__name__}: {error}")
"""


def test_an_address_that_is_none_is_refused_soon_and_without_ray_it_says_what_to_install() -> None:
    ended = python("-c", CONNECT, "nonsense")
    assert ended.stdout.startswith("ValueError: Invalid address format: nonsense")
    assert ended.stderr == ""
    program = "import sys; sys.modules['ray'] = None; from service_streamer import RayStreamer"
    ended = python("-c", program)
    assert "ImportError: RayStreamer needs ray: pip install cloudpickle ray" in ended.stderr


# -- a pool that processes of a host share


@pytest.fixture
def on_ray(cluster: None, shared: Callable[..., Any]) -> Build:
    """As ``shared``, with workers on the cluster of this machine."""

    def on_ray(model: Any, *args: Any, **options: Any) -> RayStreamer:
        options = {"address": ray.get_runtime_context().gcs_address, "num_gpus": 0} | options
        streamer: RayStreamer = shared(model, *args, kind=RayStreamer, **options)
        return streamer

    return on_ray


@pytest.mark.long
def test_the_pool_goes_to_the_cluster_of_its_client_and_its_workers_end_with_it(
    on_ray: Build,
) -> None:
    streamer = on_ray(models.double, shared="a", address=None)
    assert streamer.predict([1]) == [2]
    assert free("CPU") == 3
    other = on_ray(models.double, shared="a", num_cpus=0.5)
    with pytest.raises(PoolMismatch, match=r"num_cpus is 1\.0 there and 0\.5 here"):
        other.predict([1])
    streamer.close()
    await_that(lambda: free("CPU") == 4)
