"""Run ``python example/redis_worker_example.py``: models for web servers that put calls in Redis.

Start as many as you like, on as many machines: they share the work, and if one dies others do its
part. SIGTERM and Ctrl-C finish what it has claimed. A web server is in redis_streamer_gunicorn.py.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys

from bert_model import ManagedBertModel
from service_streamer import StreamerError, run_redis_workers_forever


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Models that serve the calls in a Redis.")
    parser.add_argument(
        "--redis",
        default=os.environ.get("REDIS_URL") or "localhost:6379",
        help="host:port or URL ($REDIS_URL, else localhost:6379)",
    )
    parser.add_argument(
        "--prefix",
        default=os.environ.get("REDIS_PREFIX", ""),
        help="that of the web servers, if a Redis has several models ($REDIS_PREFIX, else none)",
    )
    parser.add_argument("--workers", type=int, help="processes (8; without a GPU one per core)")
    parser.add_argument("--devices", help="such as 0,1,2,3 (the default) or cpu")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--max-latency", type=float, default=0.1, help="seconds")
    parser.add_argument("--model", help="another ManagedModel, as package.module:Name")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()

    from flask_multigpu_example import place_workers  # here, or every worker would load Flask

    # What happens to the worker host and to its workers.
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%Y-%m-%d %H:%M:%S"
    )
    workers, devices = place_workers(args)
    sys.stdout.flush()
    try:
        run_redis_workers_forever(
            args.model or ManagedBertModel,
            args.batch_size,
            args.max_latency,
            worker_num=workers,
            cuda_devices=devices,
            redis_broker=args.redis,
            prefix=args.prefix,
        )
    except (StreamerError, ValueError) as error:
        sys.exit(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
