"""Several processes with one pool, beside one process, a pool for each, and Redis.

``python -m adapters.sharing '{"seconds": 3}'`` prints one row for each question:

- ``alone``: what a lone caller waits beside the model, and the quotients to Streamer (``times``)
  and RedisStreamer; in turn, so that all meet the same moments of the machine.
- ``futures``: 20 000 calls of one thread, and the quotient to RedisStreamer.
- ``callers``: 128 threads in one process; in four that share a pool; in four with a pool each.
- ``costs``: processor of the pool's process, and of its clients, per item of an echo.
- ``memory``: how many of four clients' processes have torch or a model, and what they have grown.
- ``arrays``: 602 kB from four processes, and from one.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from adapters.client_processes import Client, asked, clients
from adapters.managed import MODELS
from adapters.service_streamer_adapter import Hosts
from adapters.workloads import BATCH_SIZE, WORKLOADS, ideal, items
from service_streamer import RedisStreamer, Streamer
from service_streamer.pool.control import ask_pool
from service_streamer.redis.local import LocalRedis

PROCESSES, CALLERS = 4, 128
CALLS, EARLY, FUTURES = 200, 20, 20_000
ARRAY_CALLERS, ARRAY_ROUNDS = 16, 3
#: For callers of the processor's costs: of each of four clients.
BUSY_CALLERS = 64

_TICK = os.sysconf("SC_CLK_TCK")


def processor(pid: int) -> float:
    """Seconds that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICK


def spec(workload: str, **options: Any) -> dict[str, Any]:
    """What a client process calls: a pool, or workers of its own."""
    return {"workload": workload, "class": MODELS[workload].__name__, "options": options}


def shared(name: str) -> dict[str, Any]:
    return {"shared": name, "linger": 0}


# -- one process


@contextlib.contextmanager
def kinds(workload: str, broker: str) -> Iterator[dict[str, Any]]:
    """The three ways to call, by name; ready."""
    with contextlib.ExitStack() as stack:
        model = MODELS[workload]
        hosts = Hosts(workload, 1, broker=broker, prefix=workload, options={})
        stack.callback(hosts.close)
        built = {
            "streamer": Streamer(model, BATCH_SIZE),
            "shared": Streamer(model, BATCH_SIZE, **shared(workload)),
            "redis": RedisStreamer(broker, workload),
        }
        for streamer in built.values():
            stack.callback(streamer.close, drain=False)
            streamer.predict(items(workload, BATCH_SIZE))
        yield built


def alone(broker: str) -> dict[str, dict[str, float]]:
    with kinds("gpu", broker) as built:
        model = WORKLOADS["gpu"]()
        ways = {"own": model.predict, **{name: each.predict for name, each in built.items()}}
        took: dict[str, list[float]] = {name: [] for name in ways}
        for number in range(CALLS):
            for name, predict in ways.items():
                began = time.perf_counter()
                assert predict([number]) == [number]
                took[name].append(time.perf_counter() - began)
    own, *over = (statistics.median(each[EARLY:]) for each in took.values())
    added = {name: each - own for name, each in zip(built, over, strict=True)}
    return {
        "streamer": {"over": added["streamer"]},
        "redis": {"over": added["redis"]},
        "shared": {
            "over": added["shared"],
            "to_streamer": added["shared"] / added["streamer"],
            "over_redis": added["shared"] / added["redis"],
        },
    }


def futures(broker: str) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {}
    with kinds("echo", broker) as built:
        rates: dict[str, list[float]] = {name: [] for name in built}
        for _ in range(3):
            for name, streamer in built.items():
                began = time.perf_counter()
                pending = [streamer.submit([number]) for number in range(FUTURES)]
                assert all(future.result(60) == [n] for n, future in enumerate(pending))
                rates[name].append(FUTURES / (time.perf_counter() - began))
        for name, each in rates.items():
            found[name] = {"rate": statistics.median(each)}
    found["shared"]["rate_redis"] = found["shared"]["rate"] / found["redis"]["rate"]
    return found


# -- several processes


def rate_of(of: Sequence[Client], callers: int, seconds: float) -> float:
    answers = asked(of, callers=callers // len(of), warm_up=1.0, seconds=seconds)
    return float(sum(answer["rate"] for answer in answers))


def there_and_back(ways: Iterable[str]) -> list[str]:
    """A machine that becomes slower meanwhile does so for all alike."""
    once = [*ways]
    return [*once, *reversed(once)]


def callers(seconds: float) -> dict[str, dict[str, float]]:
    ways: dict[str, tuple[int, dict[str, Any]]] = {
        "one process": (1, {}),
        "four, shared": (PROCESSES, shared("gpu")),
        "four, apart": (PROCESSES, {}),
    }
    rates: dict[str, list[float]] = {way: [] for way in ways}
    made, batches = Counter[str](), Counter[str]()
    for way in there_and_back(ways):
        count, options = ways[way]
        with clients(count, spec("gpu", **options)) as started:
            before = asked(started, stats=True)
            rates[way].append(rate_of(started, CALLERS, seconds))
            after = asked(started, stats=True)
        if options:  # they all tell of the same pool
            before, after = before[:1], after[:1]
        for counts, name in ((made, "total"), (batches, "batches")):
            counts[way] += sum(each[name] for each in after) - sum(each[name] for each in before)
    found = {
        way: {
            "rate": statistics.fmean(each),
            # Those apart have four workers, which compute four batches at a time.
            "share": statistics.fmean(each) / ideal("gpu", CALLERS),
            "mean_batch": made[way] / max(1, batches[way]),
        }
        for way, each in rates.items()
    }
    one = found["one process"]["mean_batch"]
    for way in ("four, shared", "four, apart"):
        found[way]["batch_to_one"] = found[way]["mean_batch"] / one
    return found


def costs(seconds: float) -> dict[str, float]:
    with clients(PROCESSES, spec("echo", **shared("echo"))) as started:
        pool = ask_pool("echo", "status")["pid"]
        asked(started, callers=BUSY_CALLERS, warm_up=0.5, seconds=0.5)
        before = processor(pool)
        answers = asked(started, callers=BUSY_CALLERS, warm_up=0.0, seconds=seconds)
        spent = processor(pool) - before
    made = sum(answer["made"] for answer in answers)
    return {
        "pool_us": 1e6 * spent / made,
        "us": statistics.fmean(answer["us"] for answer in answers),
        "rate": sum(answer["rate"] for answer in answers),
    }


def memory() -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder, pids_in(folder):
        with clients(PROCESSES, spec("echo", **shared("memory"))) as started:
            told = asked(started, memory=True)
        copies = len([*Path(folder).iterdir()])
    return {
        "copies": copies,
        "grown": max(each["bytes"] for each in told),
        "joined": max(each["joined"] for each in told),
        "torch": sum(each["torch"] for each in told),
    }


@contextlib.contextmanager
def pids_in(folder: str) -> Iterator[None]:
    """Each process that has loaded a model leaves a file there, named by its process id."""
    os.environ["YARDSTICK_PIDS"] = folder
    try:
        yield
    finally:
        del os.environ["YARDSTICK_PIDS"]


def arrays(seconds: float) -> dict[str, dict[str, float]]:
    rates: dict[str, list[float]] = {"one process": [], "four, shared": []}
    pool = shared("arrays")
    with (
        clients(1, spec("arrays")) as one,
        clients(PROCESSES, spec("arrays", **pool)) as four,
    ):
        # In turn, so that both meet the same moments of the machine.
        for _ in range(ARRAY_ROUNDS):
            for way, started in zip(rates, (one, four), strict=True):
                rates[way].append(rate_of(started, ARRAY_CALLERS, seconds))
    found = {way: {"rate": statistics.median(each)} for way, each in rates.items()}
    quotients = [many / single for single, many in zip(*rates.values(), strict=True)]
    found["four, shared"]["to_one"] = statistics.median(quotients)
    return found


def rows(seconds: float, only: Sequence[str]) -> Iterator[dict[str, Any]]:
    def by_way(question: str, found: dict[str, dict[str, float]]) -> Iterator[dict[str, Any]]:
        for way, figures in found.items():
            yield {"point": {"question": question, "way": way}, "figures": figures}

    def one(question: str, figures: dict[str, float], **more: str) -> dict[str, Any]:
        return {"point": {"question": question, **more}, "figures": figures}

    if {"alone", "futures"} & {*only}:
        with LocalRedis() as redis:
            if "alone" in only:
                yield from by_way("alone", alone(redis.url))
            if "futures" in only:
                yield from by_way("futures", futures(redis.url))
    if "callers" in only:
        yield from by_way("callers", callers(seconds))
    if "costs" in only:
        yield one("costs", costs(seconds))
    if "memory" in only:
        yield one("memory", memory())
    if "arrays" in only:
        yield from by_way("arrays", arrays(seconds))


QUESTIONS = ("alone", "futures", "callers", "costs", "memory", "arrays")


def main() -> None:
    options = json.loads(sys.argv[1]) if len(sys.argv) > 1 else {}
    # Pools of this run only; a short path, since that of a socket has a limit.
    with tempfile.TemporaryDirectory(prefix="pools-", dir="/tmp") as runtime:
        os.environ["XDG_RUNTIME_DIR"] = runtime
        only = options.get("only", QUESTIONS)
        for row in rows(options.get("seconds", 3.0), only):
            print(json.dumps(row), flush=True)
    print(json.dumps({"ended": True}), flush=True)


if __name__ == "__main__":
    main()
