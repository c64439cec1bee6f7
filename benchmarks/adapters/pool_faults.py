"""A pool under load from four processes, of which something is killed again and again.

``python -m adapters.pool_faults '{"faults": 20}'`` prints one row for each of ``KILLED``: what
became of the calls, how long it took until the next was answered, and what was left behind; and one
for ``retry=False``: how many items were computed twice while pools and workers were killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from adapters.client_processes import PATIENCE, Client, asked, clients
from adapters.leftovers import alive_with, awaited, growth, holdings
from adapters.sharing import pids_in, shared, spec
from service_streamer.pool.control import ask_pool

__all__ = ["KILLED"]

PROCESSES = 4
#: Of each process. One of them sends arrays of so many bytes, which use shared memory.
CALLERS, LARGE = 8, 150_000
#: Seconds under load before each kill.
LOADED = 0.2
KILLED = ("pool", "worker", "client", "all")


def faults(killed: str, count: int) -> dict[str, Any]:
    """Kill one of a kind ``count`` times while four processes call."""
    outcomes: Counter[str] = Counter()
    recoveries: list[float] = []
    options = {**shared("faults"), "worker_timeout": PATIENCE}
    called = {**spec("gpu", **options), "large": LARGE}
    held: list[dict[int, int]] = []
    with tempfile.TemporaryDirectory() as folder, pids_in(folder):
        with clients(PROCESSES, called) as started:
            for number in range(count):
                asked(started, load=CALLERS, start=number * 10_000_000)
                time.sleep(LOADED)
                victims = victims_of(killed, folder, started)
                for pid in victims:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                survivors = [each for each in started if each.process.pid not in victims]
                # Each has made a call after the fault when this is answered.
                recoveries += [slowest(asked(survivors, probe=PATIENCE))]
                for told in asked(survivors, last=PATIENCE):
                    outcomes.update(told["outcomes"])
                    outcomes["hung"] += told["hung"]
                if survivors != started:
                    started[0].process.wait()
                    started[0] = Client(called)
                    started[0].hear()
                held.append(
                    holdings([ask_pool("faults", "status")["pid"], *map(pid_of, survivors)])
                )
        left = left_behind(folder)
    return {
        "kills": count,
        "sent": outcomes.total(),
        "failed": outcomes.total() - outcomes["answered"] - outcomes["hung"],
        "hung": outcomes["hung"],
        "left": left + growth(held),
        "recovered": statistics.median(recoveries),
        "recovered_worst": max(recoveries),
    }


def once(count: int) -> dict[str, Any]:
    """With retry=False: how many items were computed twice while pool and worker were killed."""
    options = {**shared("once"), "retry": False, "worker_timeout": PATIENCE}
    outcomes: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        called = spec("counted", **options, model_init_args=[folder])
        with tempfile.TemporaryDirectory() as pids, pids_in(pids):
            with clients(PROCESSES, called) as started:
                for number in range(count):
                    asked(started, load=CALLERS, start=number * 10_000_000)
                    time.sleep(LOADED)
                    for pid in victims_of(("worker", "pool")[number % 2], pids, started):
                        os.kill(pid, signal.SIGKILL)
                    slowest(asked(started, probe=PATIENCE))
                    for told in asked(started, last=PATIENCE):
                        outcomes.update(told["outcomes"])
                        outcomes["hung"] += told["hung"]
            left = left_behind(pids)
        counts: Counter[str] = Counter()
        for file in Path(folder).iterdir():
            counts.update(file.read_text().split())
    return {
        "kills": count,
        "sent": outcomes.total(),
        "failed": outcomes.total() - outcomes["answered"] - outcomes["hung"],
        "hung": outcomes["hung"],
        "twice": sum(each > 1 for each in counts.values()),
        "left": left,
    }


def victims_of(killed: str, folder: str, started: Sequence[Client]) -> list[int]:
    found: list[int] = []
    if killed in ("pool", "all"):
        found.append(ask_pool(only_pool(), "status")["pid"])
    if killed in ("worker", "all"):
        found += workers_in(folder)
    if killed in ("client", "all"):
        found.append(pid_of(started[0]))
    return found


def only_pool() -> str:
    (file,) = pool_folder().glob("*.sock")
    return file.stem


def pool_folder() -> Path:
    return Path(os.environ["XDG_RUNTIME_DIR"]) / "service-streamer"


def pid_of(client: Client) -> int:
    return client.process.pid


def slowest(probed: Sequence[dict[str, Any]]) -> float:
    """Raises TypeError: a client had no answer."""
    return max(float(each["seconds"]) for each in probed)


def workers_in(folder: str) -> list[int]:
    """Workers that have left word of themselves there, and are still alive."""
    pids = (int(file.name) for file in Path(folder).iterdir())
    return [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def left_behind(folder: str) -> int:
    """How many processes of this run, and files of pools, are there after a while."""
    return awaited(
        lambda: len(alive_with("YARDSTICK_PIDS", folder)) + len([*pool_folder().glob("*")])
    )


def main() -> None:
    options = json.loads(sys.argv[1]) if len(sys.argv) > 1 else {}
    count = options.get("faults", 20)
    # Pools of this run only; a short path, since that of a socket has a limit.
    with tempfile.TemporaryDirectory(prefix="pools-", dir="/tmp") as runtime:
        os.environ["XDG_RUNTIME_DIR"] = runtime
        for killed in options.get("killed", KILLED):
            print_row({"killed": killed}, faults(killed, count))
        print_row({"killed": "any, with retry=False"}, once(count))
    print(json.dumps({"ended": True}), flush=True)


def print_row(point: dict[str, Any], figures: dict[str, Any]) -> None:
    print(json.dumps({"point": point, "figures": figures}), flush=True)


if __name__ == "__main__":
    main()
