"""Kills the only worker of a Streamer again and again; prints where the time went, kill by kill.

``python -m adapters.killing WORKLOAD KILLS``. Imports little, since every worker imports it too.
"""
# mypy: ignore-errors

from __future__ import annotations

import json
import os
import signal
import sys
import time
from multiprocessing.context import SpawnProcess

from service_streamer import Streamer

MODELS = {"gpu": "adapters.timed:Gpu", "infilling": "adapters.timed:Infilling"}
ITEM = "twinkle twinkle [MASK] star."

started_at = 0.0


def note_starts() -> None:
    """Set ``started_at`` whenever a worker's process is started."""
    start = SpawnProcess.start

    def noted(process: SpawnProcess) -> None:
        global started_at
        started_at = time.monotonic()
        start(process)

    SpawnProcess.start = noted


def recovery(streamer: Streamer) -> dict[str, float]:
    """Kill the worker; the seconds of each phase until the next result."""
    (before,) = streamer.predict([ITEM])
    killed_at = time.monotonic()
    os.kill(before.pid, signal.SIGKILL)
    loading = before
    while loading.pid == before.pid:  # an answer that it had written before counts still
        (loading,) = streamer.predict([ITEM])
    answered_at = time.monotonic()
    return {
        "noticing": started_at - killed_at,
        "spawn": loading.import_began - started_at,
        "import": loading.init_began - loading.import_began,
        "init": loading.init_ended - loading.init_began,
        "first_batch": answered_at - loading.init_ended,
        "total": answered_at - killed_at,
    }


def main() -> None:
    workload, kills = sys.argv[1:]
    note_starts()
    with Streamer(MODELS[workload], worker_timeout=60) as streamer:
        streamer.wait_ready()
        for _ in range(int(kills)):
            print(json.dumps(recovery(streamer)), flush=True)
    print(json.dumps({"ended": True}), flush=True)


if __name__ == "__main__":
    main()
