"""Kills the only worker of a streamer again and again; prints where the time went, as JSON.

``python killing.py MODEL KILLS``; ``recovery.py`` runs it. Imports little, since every worker
imports it too.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from multiprocessing.context import SpawnProcess
from typing import Any

from service_streamer import Streamer

ITEM = "twinkle twinkle [MASK] star."

started_at = 0.0


def note_starts() -> None:
    """Set ``started_at`` whenever a worker's process is started."""
    start = SpawnProcess.start

    def noted(process: SpawnProcess) -> None:
        global started_at
        started_at = time.monotonic()
        start(process)

    setattr(SpawnProcess, "start", noted)  # noqa: B010


def recovery(streamer: Streamer) -> dict[str, float]:
    """Kill the worker; the seconds of each phase until the next result."""
    (before,) = streamer.predict([ITEM])
    killed_at = time.monotonic()
    os.kill(before.pid, signal.SIGKILL)
    loading: Any = before
    while loading.pid == before.pid:  # an answer that it had written before counts still
        (loading,) = streamer.predict([ITEM])
    answered_at = time.monotonic()
    return {
        "noticing": started_at - killed_at,
        "spawn": loading.import_began - started_at,
        "import": loading.init_began - loading.import_began,
        "init": loading.init_ended - loading.init_began,
        "first batch": answered_at - loading.init_ended,
        "total": answered_at - killed_at,
    }


def main() -> None:
    note_starts()
    with Streamer(f"timed:{sys.argv[1]}", worker_timeout=60) as streamer:
        streamer.wait_ready()
        recoveries = [recovery(streamer) for _ in range(int(sys.argv[2]))]
    print(json.dumps(recoveries))


if __name__ == "__main__":
    main()
