"""Workers on a Ray cluster of three nodes under load, of which something fails again and again.

``python -m adapters.ray_faults '{"rounds": 20}'``, with an interpreter that has Ray and finds this
package, prints one row for each of ``FAULTS``: what became of the calls, how long it took until
every caller had an answer again and until both workers were ready again, and what was left behind;
and one for ``retry=False``: how many items were computed twice.
"""

from __future__ import annotations

import contextlib
import itertools
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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from adapters.leftovers import alive_with, awaited, growth
from service_streamer import ManagedModel, RayStreamer
from service_streamer.errors import WorkerLost

__all__ = ["ANY", "FAULTS", "Load", "is_named"]

CALLERS, WORKERS = 16, 2
#: Seconds after which a call counts as one that hangs.
PATIENCE = 60.0
#: Seconds for both workers to be ready again.
WHOLE_WITHIN = 120.0
#: The head is away for so long at least, seconds.
AWAY = 2.0
_LOOK = 0.05
#: By its name: of the main module it would need cloudpickle.
MODEL = "adapters.ray_faults:Noted"
NODE: dict[str, Any] = {"num_cpus": 1, "num_gpus": 0, "object_store_memory": 80_000_000}
ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_agent_register_timeout_ms": "100000",  # on a busy machine
    # After five of these Ray knows that a node is dead; until then it may choose it for the next
    # worker. That is 15 s by default, and no call waits for it: but each of these rounds does.
    "RAY_health_check_period_ms": "500",
}


class Noted(ManagedModel):
    """Doubles numbers in 5 ms; a file of its process has the items."""

    def init_model(self, folder: str) -> None:
        self.file = (Path(folder) / str(os.getpid())).open("a", buffering=1)

    def predict(self, batch: list[int]) -> list[int]:
        self.file.write("".join(f"{item}\n" for item in batch))
        time.sleep(0.005)
        return [2 * item for item in batch]


# -- the calls


class Load:
    """Threads that call, each with numbers of its own, until told to end.

    Attributes:
        sent: calls that were made, counted before each.
        outcomes: calls that have ended, by what became of them: "answered", "late" after more than
            PATIENCE, "wrong", or the class of the error.
        unnamed: errors that do not say what was lost; see ``is_named``.
    """

    def __init__(self, predict: Callable[[list[int]], list[int]], callers: int = CALLERS) -> None:
        self._predict = predict
        self._is_over = threading.Event()
        self.sent = self.unnamed = 0
        self.outcomes: Counter[str] = Counter()
        # Guards what is above, and of each caller, how long after the fault it had an answer.
        self._changed = threading.Condition()
        self._fault = 0.0
        self._first: dict[int, float] = {}
        self._threads = [
            threading.Thread(target=self._call, args=[n, callers], daemon=True)
            for n in range(callers)
        ]
        for each in self._threads:
            each.start()

    def _call(self, caller: int, step: int) -> None:
        for item in itertools.count(caller, step):
            if self._is_over.is_set():
                return
            with self._changed:
                self.sent += 1
            made, failure = time.monotonic(), None
            try:
                outcome = "answered" if self._predict([item]) == [2 * item] else "wrong"
            except BaseException as error:  # or this thread would end without a word
                outcome, failure = type(error).__name__, error
            if time.monotonic() - made > PATIENCE:
                outcome = "late"
            with self._changed:
                self.outcomes[outcome] += 1
                if failure is not None and not is_named(failure):
                    self.unnamed += 1
                    if self.unnamed <= 10:
                        print(f"unnamed: {failure!r}, of {failure.__cause__!r}", file=sys.stderr)
                if outcome == "answered" and made >= self._fault:
                    self._first.setdefault(caller, time.monotonic() - self._fault)
                    self._changed.notify_all()

    @property
    def hung(self) -> int:
        """Calls of which nothing came in time."""
        with self._changed:
            return self.sent - self.outcomes.total() + self.outcomes["late"]

    @property
    def failed(self) -> int:
        with self._changed:
            outcomes = self.outcomes
            return outcomes.total() - outcomes["answered"] - outcomes["late"]

    def fault(self) -> None:
        """Something fails now: ``recovered`` counts from here."""
        with self._changed:
            self._fault = time.monotonic()
            self._first.clear()

    def since_fault(self) -> float:
        return time.monotonic() - self._fault

    def recovered(self, patience: float = PATIENCE) -> float | None:
        """Wait until each caller has an answer to a call that it has made after the fault.

        A caller makes that when it has the answer to the call before, so calls that were under way
        count too.

        Returns:
            Seconds from the fault until the last of them had it; None if one has none.
        """
        with self._changed:
            everyone = len(self._threads)
            is_back = self._changed.wait_for(lambda: len(self._first) == everyone, patience)
            return max(self._first.values()) if is_back else None

    def end(self, patience: float = PATIENCE) -> None:
        self._is_over.set()
        until = time.monotonic() + patience
        for each in self._threads:
            each.join(max(0.0, until - time.monotonic()))


def is_named(error: BaseException) -> bool:
    """Whether it says which worker was lost, with what Ray says of that as its cause."""
    return (
        type(error) is WorkerLost
        and str(error).startswith("Ray worker ")
        and error.__cause__ is not None
    )


# -- the cluster


class Nodes:
    """A head that takes no worker, and two nodes that take one each; this process is connected.

    Args:
        folder: all of their processes have it in the environment, and nothing else has. Short,
            since the path of a socket has a limit.
        notes: where each worker has a file.
    """

    def __init__(self, folder: str, notes: Path) -> None:
        import ray
        from ray.cluster_utils import Cluster

        self._folder, self._notes = folder, notes
        head = {**NODE, "num_cpus": 0, "include_dashboard": False}
        self._cluster: Any = Cluster(initialize_head=True, head_node_args=head)
        self.mend()
        ray.init(address=self._cluster.address, log_to_driver=False)

    def close(self) -> None:
        import ray

        ray.shutdown()
        self._cluster.shutdown()

    @property
    def head(self) -> int:
        """The pid of what answers for the cluster."""
        pid: int = self._cluster.head_node.all_processes["gcs_server"][0].process.pid
        return pid

    def workers(self) -> set[int]:
        """The pids of those that have loaded the model and live."""
        loaded = {int(file.name) for file in self._notes.iterdir()}
        return loaded & alive_with("RAY_TMPDIR", self._folder)

    def actors(self) -> int:
        """How many there are on the cluster, or are to be as soon as there is room."""
        from ray._private import state

        return sum(each["State"] != "DEAD" for each in state.actors().values())

    def some_node(self) -> Any:
        """One that has a worker, as both have."""
        return min(self._cluster.worker_nodes, key=lambda node: node.node_id)

    def add(self) -> None:
        self._cluster.add_node(**NODE)

    def remove(self, node: Any, *, is_asked: bool) -> None:
        """End a node: by SIGKILL, or by a signal that asks it to."""
        self._cluster.remove_node(node, allow_graceful=is_asked)

    def mend(self) -> None:
        while len(self._cluster.worker_nodes) < WORKERS:
            self.add()


# -- what fails; each ends a worker


def kill_worker(nodes: Nodes, load: Load) -> None:
    load.fault()
    os.kill(min(nodes.workers()), signal.SIGKILL)


def kill_raylet(nodes: Nodes, load: Load) -> None:
    node = nodes.some_node()
    load.fault()
    nodes.remove(node, is_asked=False)


def change_nodes(nodes: Nodes, load: Load) -> None:
    node = nodes.some_node()
    nodes.add()
    load.fault()
    nodes.remove(node, is_asked=True)


def stop_head(nodes: Nodes, load: Load) -> None:
    """The calls go on without it, also those of a worker that dies meanwhile."""
    head = nodes.head
    os.kill(head, signal.SIGSTOP)
    try:
        load.fault()
        os.kill(min(nodes.workers()), signal.SIGKILL)
        if load.recovered() is not None:
            time.sleep(max(0.0, AWAY - load.since_fault()))
    finally:
        os.kill(head, signal.SIGCONT)


FAULTS: dict[str, Callable[[Nodes, Load], None]] = {
    "worker killed": kill_worker,
    "raylet killed": kill_raylet,
    "node added, another removed": change_nodes,
    "head away, worker killed": stop_head,
}
ANY = "any, with retry=False"


def mended(nodes: Nodes, streamer: RayStreamer, before: set[int], load: Load) -> float | None:
    """Bring back what there was, and wait until both workers are ready.

    Returns:
        Seconds from the fault until they were; None if they were not, or nothing had failed.
    """
    nodes.mend()
    while load.since_fault() < WHOLE_WITHIN:
        if ready(streamer) == WORKERS == len(now := nodes.workers()) and now != before:
            return load.since_fault()
        time.sleep(_LOOK)
    return None


def ready(streamer: RayStreamer) -> int:
    workers = streamer.stats().workers
    return workers["idle"] + workers["busy"]


def faults(kinds: Sequence[str], rounds: int, *, retry: bool = True) -> dict[str, Any]:
    """Have one of these fail, in turn, so many times, or until the workers do not come back."""
    recoveries: list[float | None] = []
    wholes: list[float | None] = []
    held: list[dict[int, int]] = []
    items: Counter[str] = Counter()
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
    os.environ["RAY_TMPDIR"] = folder
    with tempfile.TemporaryDirectory() as notes:
        nodes = Nodes(folder, Path(notes))
        with contextlib.closing(nodes):
            streamer = RayStreamer(
                MODEL, 16, worker_num=WORKERS, num_gpus=0, model_init_args=[notes], retry=retry,
                worker_timeout=WHOLE_WITHIN, wait_for_worker_ready=True,
            )  # fmt: skip
            load = Load(streamer.predict)
            for kind in itertools.islice(itertools.cycle(kinds), rounds):
                load.fault()
                load.recovered()  # all are calling
                before = nodes.workers()
                FAULTS[kind](nodes, load)
                recoveries.append(load.recovered())
                wholes.append(mended(nodes, streamer, before, load))
                # Python's only: Ray keeps a thread of its own for each node that there ever was.
                held.append({os.getpid(): threading.active_count()})
                if None in (recoveries[-1], wholes[-1]):
                    print(f"not back: {streamer.stats().gist}", file=sys.stderr)
                    break
            load.end()
            streamer.close(drain=not load.hung)
            left = growth(held) + awaited(lambda: len(nodes.workers()) + nodes.actors())
        for file in Path(notes).iterdir():
            items.update(file.read_text().split())
    left += awaited(lambda: len(alive_with("RAY_TMPDIR", folder)))
    shutil.rmtree(folder, ignore_errors=True)
    answered = load.outcomes["answered"]
    if len(items) < answered:
        raise AssertionError(f"{answered} were answered, but {len(items)} were noted")
    figures = {
        "rounds": len(wholes), "sent": load.sent, "failed": load.failed,
        "hung": load.hung, "unnamed": load.unnamed, "left": left,
        "recovered": median(recoveries), "recovered_worst": worst(recoveries),
        "whole": median(wholes), "whole_worst": worst(wholes),
    }  # fmt: skip
    return figures if retry else {**figures, "twice": sum(each > 1 for each in items.values())}


def median(times: Sequence[float | None]) -> float | None:
    """None where one is: that is worse than any."""
    return statistics.median(known) if (known := _known(times)) else None


def worst(times: Sequence[float | None]) -> float | None:
    return max(known) if (known := _known(times)) else None


def _known(times: Sequence[float | None]) -> list[float]:
    known = [each for each in times if each is not None]
    return known if len(known) == len(times) else []


def main() -> None:
    options = json.loads(sys.argv[1]) if len(sys.argv) > 1 else {}
    rounds = options.get("rounds", 20)
    # The workers find the model there.
    os.environ.update(ENVIRONMENT, PYTHONPATH=os.pathsep.join(sys.path))
    out = sys.stdout
    # Ray's threads print there too, and would break a row into two.
    with contextlib.redirect_stdout(sys.stderr):
        for kind in options.get("only", [*FAULTS, ANY]):
            kinds = [*FAULTS] if kind == ANY else [kind]
            figures = faults(kinds, rounds, retry=kind != ANY)
            print(json.dumps({"point": {"fault": kind}, "figures": figures}), file=out, flush=True)
    print(json.dumps({"ended": True}), file=out, flush=True)


if __name__ == "__main__":
    main()
