"""Worker processes over Redis of whichever service_streamer this interpreter has.

``python -m adapters.redis_hosts JSON``, until it is killed; ``Hosts`` of
``service_streamer_adapter`` is its other side.
"""

from __future__ import annotations

import json
import sys

from adapters.managed import MODELS
from adapters.workloads import BATCH_SIZE
from service_streamer import run_redis_workers_forever

if __name__ == "__main__":
    spec = json.loads(sys.argv[1])
    run_redis_workers_forever(
        MODELS[spec["workload"]],
        BATCH_SIZE,
        worker_num=spec["workers"],
        redis_broker=spec["broker"],
        prefix=spec["prefix"],
        **spec["options"],
    )
