"""A Ray cluster of three nodes, of which something fails while calls are under way."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import shutil
import signal
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fault_processes import GONE, Watch, running
from node_models import Noting

from conftest import PATIENCE, await_that
from service_streamer import (
    PredictTimeout,
    RayStreamer,
    StreamerBroken,
    StreamerClosed,
    StreamerError,
    WorkerLost,
    WorkerStartError,
)
from service_streamer.ray.times import times
from service_streamer.testing import Gate

pytestmark = pytest.mark.xdist_group("ray-faults")

Build = Callable[..., RayStreamer]

ROOT = Path(__file__).parents[2]
NODE: dict[str, Any] = {"num_cpus": 1, "num_gpus": 0, "object_store_memory": 80_000_000}


class Callers:
    """Threads that call with one number after the other until they are told to end.

    Attributes:
        errors: what calls raised, by item.
    """

    def __init__(self, streamer: RayStreamer, threads: int = 6) -> None:
        self._streamer = streamer
        self.errors: dict[int, BaseException] = {}
        self._is_over = threading.Event()
        self._ended = threading.Semaphore(0)
        self._threads = [
            threading.Thread(target=self._call, args=[n, threads]) for n in range(threads)
        ]

    def __enter__(self) -> Callers:
        for thread in self._threads:
            thread.start()
        self.await_more(30)
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join()

    def _call(self, thread: int, step: int) -> None:
        for item in itertools.count(thread, step):
            try:
                assert self._streamer.predict([item, item]) == [2 * item, 2 * item]
            except BaseException as error:
                self.errors[item] = error
            self._ended.release()
            if self._is_over.is_set():
                return

    def await_more(self, count: int) -> None:
        """Block until so many more calls have ended."""
        while self._ended.acquire(blocking=False):
            """Those before do not count."""
        for _ in range(count):
            self._ended.acquire()


def counts(folder: Path) -> Counter[str]:
    """How many times each item was given to a model."""
    found: Counter[str] = Counter()
    for file in folder.iterdir():
        found.update(file.read_text().split())
    return found


@pytest.fixture(scope="module")
def nodes() -> Iterator[Any]:
    """A head that takes no worker, and two nodes that take one each."""
    pytest.importorskip("ray")
    with pytest.MonkeyPatch.context() as patch:
        folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # short: the path of a socket
        patch.setenv("RAY_TMPDIR", folder)
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_agent_register_timeout_ms", "100000")  # on a busy machine
        patch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        patch.setenv("PYTHONPATH", f"{ROOT}:{ROOT}/tests:{ROOT}/tests/faults")
        import ray
        from ray.cluster_utils import Cluster

        head = {**NODE, "num_cpus": 0, "include_dashboard": False}
        cluster = Cluster(initialize_head=True, head_node_args=head)
        try:
            for _ in range(2):
                cluster.add_node(**NODE)
            yield cluster
        finally:
            ray.shutdown()
            cluster.shutdown()
            shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def cluster(nodes: Any) -> Any:
    """The same, with as many nodes as at first, and this process connected to it."""
    import ray

    for _ in range(3 - len(nodes.list_all_nodes())):
        nodes.add_node(**NODE)
    if not ray.is_initialized():
        ray.init(address=nodes.address, log_to_driver=False)
    return nodes


@pytest.fixture
def nothing_is_left() -> None:
    """Ray keeps threads and connections for as long as this process has its cluster."""


@pytest.fixture
def build(cluster: Any, tmp_path: Path) -> Iterator[Build]:
    """Builds a streamer with two workers, one on each node, and closes it after the test."""
    built: list[RayStreamer] = []
    folder = tmp_path / "notes"
    folder.mkdir()

    def build(model: Any = Noting, gate: Gate | None = None, **options: Any) -> RayStreamer:
        options = {
            "batch_size": 8, "worker_num": 2, "num_gpus": 0, "max_latency": 0.001,
            "worker_timeout": PATIENCE, "wait_for_worker_ready": True,
        } | options  # fmt: skip
        built.append(RayStreamer(model, model_init_args=[folder, gate], **options))
        return built[-1]

    yield build
    for streamer in reversed(built):
        streamer.close(drain=False)


@pytest.fixture
def notes(tmp_path: Path) -> Path:
    return tmp_path / "notes"


def pids(notes: Path) -> set[int]:
    """Of the workers that live."""
    found = (int(file.name) for file in notes.iterdir())
    return {pid for pid in found if Path(f"/proc/{pid}").exists()}


def kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # one killed before, gone since it was listed
        os.kill(pid, signal.SIGKILL)


def ready(streamer: RayStreamer) -> int:
    workers = streamer.stats().workers
    return workers["idle"] + workers["busy"]


def await_workers(streamer: RayStreamer, count: int) -> None:
    await_that(lambda: ready(streamer) == count)


def test_a_worker_that_is_killed_loses_no_call(build: Build, notes: Path) -> None:
    streamer = build()
    with Callers(streamer) as callers:
        for _ in range(2):
            kill(min(pids(notes)))
            callers.await_more(100)
        for pid in pids(notes):
            kill(pid)
        callers.await_more(100)
    assert callers.errors == {}
    await_workers(streamer, 2)


def test_a_lost_worker_has_the_words_of_ray_as_its_cause(build: Build, gate: Gate) -> None:
    import ray

    streamer = build(gate=gate, worker_num=1, retry=False)
    for end in ("its process died", "it was killed by ray.kill"):
        (pid,) = streamer.predict(["pid"])
        call = streamer.submit(["gate"])
        gate.await_arrival()
        if "ray.kill" in end:
            for actor in gc.get_objects():
                if isinstance(actor, ray.actor.ActorHandle):
                    ray.kill(actor)
        else:
            os.kill(pid, signal.SIGKILL)
        with pytest.raises(WorkerLost, match=rf"Ray worker 0 \(pid {pid} on .*\) .*{end}") as lost:
            call.result()
        assert "The actor is dead because" in str(lost.value.__cause__)


def test_a_worker_that_hangs_is_ended_with_its_stacks(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(times, "stacks", PATIENCE)
    streamer = build(worker_num=1, batch_timeout=1, max_attempts=1)
    with pytest.raises(WorkerLost, match=r"was killed: .* more than batch_timeout of 1 s") as lost:
        streamer.predict(["hang"])
    assert "in _result" in str(lost.value.__cause__)
    assert streamer.predict([1]) == [2]


def test_close_ends_a_worker_that_hangs(build: Build, notes: Path) -> None:
    streamer = build(worker_num=1)
    (pid,) = streamer.predict(["pid"])
    call = streamer.submit(["hang"])
    await_that(lambda: "hang" in counts(notes))
    with Watch({pid}) as worker:
        streamer.close(drain=False)
        assert worker.alive_after(GONE) == []
    with pytest.raises(StreamerClosed):
        call.result()


def test_a_lost_node_loses_no_call_and_the_next_one_is_used(
    build: Build, cluster: Any, notes: Path
) -> None:
    streamer = build()
    with Callers(streamer) as callers:
        cluster.remove_node(cluster.list_all_nodes()[-1], allow_graceful=False)
        await_that(lambda: ready(streamer) < 2)
        callers.await_more(100)
        cluster.add_node(**NODE)
        await_workers(streamer, 2)
        callers.await_more(100)
    assert callers.errors == {}


@pytest.mark.long
def test_calls_go_on_while_the_head_does_not_answer(
    build: Build, cluster: Any, notes: Path
) -> None:
    """Also those of a worker that dies meanwhile; its successor starts when the head is back."""
    streamer = build()
    head = cluster.head_node.all_processes["gcs_server"][0].process.pid
    with Callers(streamer) as callers:
        os.kill(head, signal.SIGSTOP)
        try:
            callers.await_more(200)
            os.kill(min(pids(notes)), signal.SIGKILL)
            await_that(lambda: ready(streamer) < 2)
            callers.await_more(200)
        finally:
            os.kill(head, signal.SIGCONT)
        await_workers(streamer, 2)
        streamer.scale(1)
        await_workers(streamer, 1)
        streamer.scale(2)
        await_workers(streamer, 2)
        callers.await_more(100)
    assert callers.errors == {}


def test_the_bound_of_a_start_says_what_is_missing(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(times, "last_calls", PATIENCE)  # for the cluster to answer
    streamer = build(
        worker_num=1, resources={"missing": 1}, start_timeout=1, wait_for_worker_ready=False,
    )  # fmt: skip
    with pytest.raises(WorkerStartError) as refused:
        streamer.wait_ready()
    assert "for lack of a place: it asks for 1 CPU, 1 missing, and the cluster has too little " in (
        str(refused.value)
    )


def test_a_placement_group_is_removed(build: Build) -> None:
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    group = placement_group([{"CPU": 1}])
    ray.get(group.ready())
    strategy = PlacementGroupSchedulingStrategy(group)
    streamer = build(worker_num=1, retry=False, scheduling_strategy=strategy)
    call = streamer.submit(["hang"])
    remove_placement_group(group)
    with pytest.raises(StreamerError) as lost:
        call.result()
    assert "its placement group was removed" in str(lost.value)
    with pytest.raises(PredictTimeout):  # the next worker waits for a place
        streamer.predict([1], timeout=1)


def test_calls_fail_when_this_process_leaves_the_cluster(build: Build, notes: Path) -> None:
    import ray

    streamer = build()
    under_way = streamer.submit(["hang"])
    await_that(lambda: "hang" in counts(notes))
    ray.shutdown()
    with pytest.raises(StreamerBroken) as broken:
        under_way.result()
    assert "build a new RayStreamer after ray.shutdown()" in str(broken.value.__cause__)
    with pytest.raises(StreamerBroken):
        streamer.predict([1])
    assert not ray.is_initialized()
    streamer.close()


PROGRAM = """
    import pathlib, sys
    import ray
    from service_streamer import RayStreamer
    from node_models import Noting

    if __name__ == "__main__":
        ray.init(address=sys.argv[1], log_to_driver=False)
        streamer = RayStreamer(
            Noting, num_gpus=0, model_init_args=[pathlib.Path(sys.argv[2])], batch_size=1
        )
        print(*streamer.predict(["pid"]), flush=True)
        streamer.submit(["hang"])
        if sys.argv[3] == "killed":
            sys.stdin.readline()
"""


@pytest.mark.long
@pytest.mark.parametrize("end", ["ended", "killed"])
def test_no_worker_outlives_its_driver(cluster: Any, tmp_path: Path, end: str) -> None:
    with running(PROGRAM, tmp_path, cluster.address, str(tmp_path), end) as program:
        assert program.stdout is not None
        # Ray prints there too, of the nodes that earlier tests have ended.
        pid = next(int(line) for line in program.stdout if line.strip().isdecimal())
        with Watch({pid}) as worker:
            if end == "killed":
                program.kill()
            assert program.wait() == (-signal.SIGKILL if end == "killed" else 0)
            assert worker.alive_after(GONE) == []
    with contextlib.suppress(ValueError):
        assert program.stderr is not None
        assert "Traceback" not in program.stderr.read()
