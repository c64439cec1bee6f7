"""Worker processes of whichever service_streamer this interpreter has, until they are killed.

``python redis_hosts.py MODEL WORKERS HOST:PORT PREFIX``; ``redis_driver.py`` runs it.
"""

from __future__ import annotations

import sys

import simulated
from service_streamer import run_redis_workers_forever

if __name__ == "__main__":
    name, workers, broker, prefix = sys.argv[1:]
    run_redis_workers_forever(
        getattr(simulated, name), 64, worker_num=int(workers), redis_broker=broker, prefix=prefix
    )
