"""The tables of the original's README, anew: its services under wrk, and its futures.

Its BERT on a Titan Xp is ``titan-xp``, a sleep of the time that one can read out of those tables;
that of this project's examples, on this processor, is ``infilling``. The original has the settings
of its own examples, which are its defaults: these are its tables.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from adapters.workloads import BATCH_SIZE, COSTS
from yardstick.environments import BENCHMARKS, python
from yardstick.libraries import broker, rows
from yardstick.plan import Scale, Section, Settings, System
from yardstick.processes import RunFailed
from yardstick.record import Row
from yardstick.servers import free_port, started

__all__ = ["MAX_LATENCY", "SECTIONS", "Wrk", "figures", "wrk"]

#: Of the original's examples, seconds.
MAX_LATENCY = 0.1
#: Of the original's script; each sentence a request of its own.
_SENTENCES = (
    "Happy birthday to [MASK].",
    "twinkle twinkle [MASK] star.",
    "the answer to life, the [MASK], and everything.",
    "[MASK] birthday to you.",
)
#: What the model says to the second of them.
_MISSING_WORD = "little"
#: Of the future interface, where they are computed and not slept.
_SENTENCES_INFILLING = 2_560
#: Seconds for one start of a system, asked through futures.
_TIMEOUT = 90.0
_SERVICES = (
    "naive", "threaded", "streamer", "redis",
    "original-naive", "original-threaded", "original-streamer", "original-redis",
)  # fmt: skip
_FUTURES = (
    "by-hand", "threaded", "streamer", "redis",
    "original-threaded", "original-streamer", "original-redis",
)  # fmt: skip
_QUICK = ("naive", "streamer", "original-streamer")
#: Modes that have several workers.
_SEVERAL = ("streamer", "redis")
#: wrk's, whole seconds: a batch of titan-xp takes 151 ms, and a window has to have many.
_WARM_UP, _SECONDS, _SECONDS_QUICK = 1, 4, 2


class Wrk(NamedTuple):
    """How wrk is started: threads and connections."""

    threads: int
    connections: int


#: As the original's README starts it in front of either.
_FLASK, _GEVENT = Wrk(4, 128), Wrk(8, 512)


def wrk(load: Wrk, seconds: int, port: int, sentences: Sequence[str]) -> dict[str, Any]:
    """Keep so many connections busy with forms; what ``form_post.lua`` tells. Raises RunFailed."""
    if not shutil.which("wrk"):
        raise RunFailed("there is no wrk, so HTTP is not measured: apt-get install wrk")
    command = [
        "wrk", f"-t{load.threads}", f"-c{load.connections}", f"-d{seconds}s", "--timeout=10s",
        "-s", str(BENCHMARKS / "yardstick" / "form_post.lua"),
        f"http://127.0.0.1:{port}/stream", "--", *sentences,
    ]  # fmt: skip
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=seconds + 30)
    except subprocess.TimeoutExpired:
        raise RunFailed(f"{' '.join(command)} did not end in time") from None
    if run.returncode:
        raise RunFailed(f"{' '.join(command)} failed:\n{run.stdout}{run.stderr}")
    told: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return told


def figures(told: Mapping[str, Any], connections: int) -> dict[str, float]:
    """Rate, mean latency and errors. Raises RunFailed if nothing was answered.

    The latency is that of Little's law: what has waited for longer than this run has not been
    answered in it, so a mean of answers would leave out the longest.
    """
    answered = told["requests"] - told["not_2xx"]
    if answered <= 0:
        raise RunFailed(f"no answer at {connections} connections: {told}")
    rate = answered / told["seconds"]
    errors = told["not_2xx"] + told["sockets"] + told["timeouts"]
    return {"rate": rate, "latency": connections / rate, "errors": errors}


def _flask(system: System, _: Settings, scale: Scale) -> Iterator[Row]:
    for workload in ("titan-xp",) if scale.is_quick else ("titan-xp", "infilling"):
        found = _served(system, _FLASK, scale, workload, "threads", 1)
        yield Row({"workload": workload}, found)


def _gevent(system: System, _: Settings, scale: Scale) -> Iterator[Row]:
    for workers in _worker_counts(system, scale):
        found = _served(system, _GEVENT, scale, "titan-xp", "gevent", workers)
        yield Row({"workload": "titan-xp", "workers": workers}, found)


def _served(
    system: System, load: Wrk, scale: Scale, workload: str, server: str, workers: int
) -> dict[str, float]:
    """One start of a service, and wrk in front of it."""
    mode, port = system.launch["mode"], free_port()
    options: dict[str, Any] = {
        "workload": workload,
        "port": port,
        "workers": workers,
        "server": server,
        "mode": mode,
        "max-latency": MAX_LATENCY,
    }
    loaded = workers if mode == "streamer" else 1
    if mode == "redis":
        options["redis"], loaded = broker(), 0  # it answers when all of its hosts' workers have
    given = [part for name, value in options.items() for part in (f"--{name}", str(value))]
    command = [python(system.project), "-m", "adapters.flask_service", *given]
    item = _SENTENCES[1]
    answer = item if workload in COSTS else _MISSING_WORD
    with started(command, port, loaded, item=item, answer=answer) as service:
        if mode != "naive":  # which would be busy with these requests for seconds after
            wrk(load, _WARM_UP, port, _SENTENCES)
            service.settle()
        seconds = _SECONDS_QUICK if scale.is_quick else _SECONDS
        return figures(wrk(load, seconds, port, _SENTENCES), load.connections)


def _futures(system: System, _: Settings, scale: Scale) -> Iterator[Row]:
    """A future for each sentence: all are submitted, and then awaited."""
    for workers in _worker_counts(system, scale):
        point = {"workload": "titan-xp", "workers": workers}
        yield from _awaited(system, point, (8 if scale.is_quick else 16) * BATCH_SIZE * workers)
    if not scale.is_quick:
        yield from _awaited(system, {"workload": "infilling", "workers": 1}, _SENTENCES_INFILLING)


def _awaited(system: System, point: Mapping[str, Any], count: int) -> Iterator[Row]:
    spec: Mapping[str, Any] = {"driver": "futures"}
    if system.key == "by-hand":
        spec = {"driver": "by-hand", "repeats": False, "seconds": 0.0, "points": [{}]}
    for row in rows(system, {}, _TIMEOUT, **point, **spec, count=count):
        yield Row(point, row.figures)


def _worker_counts(system: System, scale: Scale) -> Sequence[int]:
    if system.launch.get("mode") not in _SEVERAL:
        return (1,)
    return (1, 2) if scale.is_quick else (1, 2, 4)


SECTIONS = (
    Section(
        "original-flask",
        "The original's table of one GPU process: Flask's threaded server, wrk -t4 -c128",
        _SERVICES,
        _flask,
        quick=_QUICK,
        situation="examples",
        rounds=1,
    ),
    Section(
        "original-gevent",
        "The original's table of several GPU processes: Flask on gevent, wrk -t8 -c512",
        _SERVICES,
        _gevent,
        quick=("streamer", "original-streamer"),
        situation="examples",
        rounds=1,
    ),
    Section(
        "original-futures",
        "The original's table of its future interface",
        _FUTURES,
        _futures,
        quick=("streamer", "original-streamer"),
        situation="examples",
        rounds=1,
    ),
)
