"""Workers on a Ray cluster of three nodes under load, of which something fails again and again.

``python -m adapters.ray_faults '{"faults": 20}'``, with an interpreter that has Ray and finds this
package, prints one row for each of ``KILLED``: what became of the calls, how long it took until
every caller had an answer again, and what was left behind; and one for ``retry=False``: how many
items were computed twice.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from adapters.leftovers import alive_with, awaited
from service_streamer import ManagedModel, RayStreamer

__all__ = ["KILLED"]

CALLERS, WORKERS, PATIENCE = 16, 2, 120.0
#: Seconds under load before each fault.
LOADED = 0.2
#: For so long the head does not answer, seconds.
AWAY = 2.0
#: ``node``: one is added, and another one asked to end. ``head``: the GCS does not answer, and a
#: worker is killed meanwhile.
KILLED = ("worker", "raylet", "node", "head")
NODE: dict[str, Any] = {"num_cpus": 1, "num_gpus": 0, "object_store_memory": 80_000_000}


class Noted(ManagedModel):
    """Doubles numbers in 5 ms; a file of its process has the items."""

    def init_model(self, folder: str) -> None:
        self.file = (Path(folder) / str(os.getpid())).open("a", buffering=1)

    def predict(self, batch: list[int]) -> list[int]:
        self.file.write("".join(f"{item}\n" for item in batch))
        time.sleep(0.005)
        return [2 * item for item in batch]


class Load:
    """Threads that call, each with numbers of its own, until told to end."""

    def __init__(self, streamer: RayStreamer) -> None:
        self._streamer = streamer
        self._is_over = threading.Event()
        self._answered = [0] * CALLERS
        self.outcomes: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._threads = [
            threading.Thread(target=self._call, args=[n], daemon=True) for n in range(CALLERS)
        ]
        for each in self._threads:
            each.start()

    def _call(self, caller: int) -> None:
        item = caller
        while not self._is_over.is_set():
            try:
                outcome = "answered" if self._streamer.predict([item]) == [2 * item] else "wrong"
            except Exception as error:
                outcome = type(error).__name__
            with self._lock:
                self.outcomes[outcome] += 1
            self._answered[caller] += outcome == "answered"
            item += CALLERS

    def recovered(self) -> float:
        """Seconds until each caller has made a call that was answered; inf after PATIENCE."""
        begun, before = time.monotonic(), [*self._answered]
        # One more may have been under way.
        while not all(now > then + 1 for now, then in zip(self._answered, before, strict=True)):
            if time.monotonic() - begun > PATIENCE:
                return PATIENCE
            time.sleep(0.001)
        return time.monotonic() - begun

    def end(self) -> None:
        self._is_over.set()
        until = time.monotonic() + PATIENCE
        for each in self._threads:
            each.join(max(0.0, until - time.monotonic()))
        self.outcomes["hung"] += sum(each.is_alive() for each in self._threads)


@contextlib.contextmanager
def three_nodes() -> Iterator[Any]:
    """A head that takes no worker, and two nodes that take one each; this process is connected."""
    import ray
    from ray.cluster_utils import Cluster

    head = {**NODE, "num_cpus": 0, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        for _ in range(WORKERS):
            cluster.add_node(**NODE)
        ray.init(address=cluster.address, log_to_driver=False)
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()  # type: ignore[no-untyped-call]


def fail(killed: str, cluster: Any, notes: str) -> None:
    """Have something fail; what is killed comes back in ``mend``."""
    if killed == "worker":
        os.kill(workers_in(notes)[0], signal.SIGKILL)
    elif killed == "raylet":
        cluster.remove_node(cluster.list_all_nodes()[-1], allow_graceful=False)
    elif killed == "node":
        cluster.add_node(**NODE)
        cluster.remove_node(cluster.list_all_nodes()[1], allow_graceful=True)
    else:
        head = cluster.head_node.all_processes["gcs_server"][0].process.pid
        os.kill(head, signal.SIGSTOP)
        try:
            os.kill(workers_in(notes)[0], signal.SIGKILL)
            time.sleep(AWAY)
        finally:
            os.kill(head, signal.SIGCONT)


def mend(cluster: Any, streamer: RayStreamer) -> None:
    """Bring back what there was, and wait until both workers are ready."""
    while len(cluster.list_all_nodes()) <= WORKERS:
        cluster.add_node(**NODE)
    until = time.monotonic() + PATIENCE
    while ready(streamer) < WORKERS:
        if time.monotonic() > until:
            raise TimeoutError(f"not all workers are back: {streamer.stats().gist}")
        time.sleep(0.01)


def ready(streamer: RayStreamer) -> int:
    workers = streamer.stats().workers
    return workers["idle"] + workers["busy"]


def workers_in(notes: str) -> list[int]:
    """Workers that have a file there, and are still alive."""
    pids = (int(file.name) for file in Path(notes).iterdir())
    return [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def faults(killed: tuple[str, ...], count: int, *, retry: bool = True) -> dict[str, Any]:
    """Have one of these fail ``count`` times, in turn, while 16 callers call."""
    recoveries: list[float] = []
    # A short path, since that of a socket has a limit. All of the cluster's processes have it.
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
    os.environ["RAY_TMPDIR"] = folder
    with tempfile.TemporaryDirectory() as notes:
        with three_nodes() as cluster:
            streamer = RayStreamer(
                Noted, 16, worker_num=WORKERS, num_gpus=0, model_init_args=[notes], retry=retry,
                worker_timeout=PATIENCE, wait_for_worker_ready=True,
            )  # fmt: skip
            load = Load(streamer)
            for number in range(count):
                time.sleep(LOADED)
                fail(killed[number % len(killed)], cluster, notes)
                recoveries.append(load.recovered())
                mend(cluster, streamer)
            load.end()
            streamer.close()
            left = awaited(lambda: len(workers_in(notes)))
        items: Counter[str] = Counter()
        for file in Path(notes).iterdir():
            items.update(file.read_text().split())
    left += awaited(lambda: len(alive_with("RAY_TMPDIR", folder) - {os.getpid()}))
    shutil.rmtree(folder, ignore_errors=True)
    outcomes = load.outcomes
    failed = outcomes.total() - outcomes["answered"] - outcomes["hung"]
    figures: dict[str, Any] = {
        "kills": count, "sent": outcomes.total(), "failed": failed, "hung": outcomes["hung"],
        "left": left, "recovered": statistics.median(recoveries),
        "recovered_worst": max(recoveries),
    }  # fmt: skip
    if not retry:
        # What the error of a call that was lost is has a name, and nothing else may come.
        figures["unnamed"] = failed - outcomes["WorkerLost"]
        figures["twice"] = sum(each > 1 for each in items.values())
    return figures


def main() -> None:
    options = json.loads(sys.argv[1]) if len(sys.argv) > 1 else {}
    count = options.get("faults", 20)
    os.environ.update(RAY_USAGE_STATS_ENABLED="0", RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO="0")
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)  # where the workers find the model
    for killed in options.get("killed", KILLED):
        print_row({"killed": killed}, faults((killed,), count))
    print_row({"killed": "any, with retry=False"}, faults(KILLED[:2], count, retry=False))
    print(json.dumps({"ended": True}), flush=True)


def print_row(point: dict[str, Any], figures: dict[str, Any]) -> None:
    print(json.dumps({"point": point, "figures": figures}), flush=True)


if __name__ == "__main__":
    main()
