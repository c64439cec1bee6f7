"""Measures RedisStreamer beside the original service_streamer 0.1.2; ``make bench-redis`` runs it.

Both use one Redis server, in turn, in processes of their own; the table has the medians.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

from bench import Case, compare
from harness import install_original, output_of, terminate_cleanly
from service_streamer.broker.local import LocalRedis


def cases(broker: str) -> list[Case]:
    def over_redis(case: str) -> Callable[[str], float]:
        return lambda python: float(output_of(python, "redis_driver.py", case, broker).split()[-1])

    return [
        Case("20 000 single-item futures, echo, per second", over_redis("futures"),
             "at least 8x the original", digits=0),
        Case("128 threads, 1 worker process, share of ideal", over_redis("closed_loop"),
             "at least 0.90", digits=3),
        Case("one caller, ms over the model's 5.1", over_redis("alone"), "at most 1.5 ms"),
        Case("1 worker process, larger model, share of ideal", over_redis("workers_1"), "",
             digits=3),
        Case("2 worker processes, larger model, share of ideal", over_redis("workers_2"),
             "at least 0.9", digits=3),
        Case("4 worker processes, larger model, share of ideal", over_redis("workers_4"),
             "at least 0.9", digits=3),
        Case("idle worker host, messages to Redis per second", over_redis("idle"), "blocks",
             digits=1),
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description="RedisStreamer beside the original.")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    args = parser.parse_args()
    terminate_cleanly()
    install_original()
    with LocalRedis() as server:
        broker = f"127.0.0.1:{server.port}"
        compare([case for case in cases(broker) if args.only in case.name], args.rounds)


if __name__ == "__main__":
    main()
