"""``make walk``: random walks for as long as you like.

python -m walk --seconds 600             all kinds, from a fresh seed
python -m walk --kind thread --seed 17 --times 50
python -m walk --kind orders             all orders of six events
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import random
import shutil
import sys
import tempfile
import time

from service_streamer.redis.local import LocalRedis, answers

from . import engine_walk, orders, public_walk

KINDS = ("orders", "interrupts", "engine", *public_walk.KINDS)


def main() -> int:
    parser = argparse.ArgumentParser(prog="walk", description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=60.0, help="how long (default 60)")
    parser.add_argument("--seed", type=int, help="the first seed (default: a fresh one)")
    parser.add_argument("--times", type=int, help="only this seed, so many times")
    parser.add_argument("--kind", choices=KINDS, action="append", help="only these kinds")
    given = parser.parse_args()
    kinds = given.kind or KINDS
    seed = random.randrange(10**9) if given.seed is None else given.seed
    print(f"seed {seed}", flush=True)
    logging.disable(logging.CRITICAL)
    logging.getLogger("service_streamer").addHandler(logging.NullHandler())
    walks = faults = 0
    with contextlib.ExitStack() as stack:
        url = ""
        if "redis" in kinds:
            url = os.environ.get("REDIS_URL", "")
            if not (url and answers(url)):
                url = stack.enter_context(LocalRedis()).url
        runtime = tempfile.mkdtemp(prefix="walk-")  # of shared pools; short, as sockets need it
        stack.callback(shutil.rmtree, runtime, ignore_errors=True)
        os.environ["XDG_RUNTIME_DIR"] = runtime
        began = time.monotonic()
        if "orders" in kinds:
            for name, plan in orders.PLANS.items():
                states, fault = orders.explore(plan)
                print(f"orders {name}: {states} states", flush=True)
                faults += _show(fault)
        if "interrupts" in kinds:
            for name in engine_walk.INTERRUPTED:
                places, fault = engine_walk.interrupt_everywhere(name)
                print(f"interrupts {name}: {places} places", flush=True)
                faults += _show(fault)
        random_kinds = [kind for kind in kinds if kind not in ("orders", "interrupts")]
        while random_kinds and (walks < (given.times or walks + 1)):
            if given.times is None and time.monotonic() - began > given.seconds:
                break
            for kind in random_kinds:
                # So many walks on an engine take about as long as one with processes.
                for _ in range(100 if kind == "engine" and given.times is None else 1):
                    if kind == "engine":
                        fault = engine_walk.walk(seed)
                    else:
                        fault = public_walk.walk(kind, seed, redis=url)
                    walks += 1
                    if fault is not None:
                        print(f"repeat it: python -m walk --kind {kind} --seed {seed} --times 20")
                    faults += _show(fault)
                    seed += given.times is None
    print(f"{walks} walks, {faults} faults; the next seed is {seed}")
    return 1 if faults else 0


def _show(fault: str | None) -> int:
    if fault is not None:
        print(f"FAULT: {fault}", flush=True)
    return fault is not None


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # a streamer that is broken would hold the end up
