"""A service under load from four processes, one process of which is killed again and again."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import statistics
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from adapters.client_processes import Client, asked, clients
from adapters.leftovers import awaited
from yardstick.environments import environment
from yardstick.plan import Settings, System
from yardstick.processes import RunFailed
from yardstick.record import Row
from yardstick.servers import Running, running

__all__ = ["faults", "processor_by_role"]

#: As ``pool_faults`` has them.
PROCESSES, CALLERS, LOADED = 4, 8, 0.2
#: mosec ends with the last of its workers, so every service has two, of which one is killed.
WORKERS = 2
#: Seconds after which a request counts as one that hangs.
PATIENCE = 4.0
#: Seconds that a service has to answer again, and to have all its workers again.
RECOVERS_WITHIN = 10.0
#: Seconds after which nothing more is killed: requests that hang take their time.
LONGEST = 75.0
#: Seconds that a client waits after a request that failed.
PAUSE = 0.05
_LOOK = 0.05
#: Of a connection, in /proc/net/tcp.
_ESTABLISHED = "01"


def faults(
    system: System, settings: Settings, killed: str, count: int, workload: str = "gpu"
) -> Row:
    """Kill one of a kind ``count`` times, or until the service does not come back.

    Args:
        killed: "worker"; "web", one of several that speak HTTP; or "pool", the process that has the
            requests which wait: of others than this project, that which speaks HTTP.

    Raises:
        RunFailed: it did not start, or there is nobody of that kind.
    """
    is_shared = "web_workers" in system.launch
    find = {"worker": worker, "web": speaker, "pool": pool if is_shared else speaker}[killed]
    speaking = system.launch["web_workers"] if is_shared else 1
    with running(system, workload, settings, WORKERS) as service:
        spec = {
            "port": service.port,
            "protocol": service.protocol,
            "timeout": PATIENCE,
            "pause": PAUSE,
        }
        with clients(PROCESSES, spec, environment()) as started:
            if not _is_whole(service, speaking):
                raise RunFailed("it is not ready")
            return Row({"killed": killed}, _killed(service, started, find, count, speaking))


def _killed(
    service: Running,
    started: list[Client],
    find: Callable[[Running], int],
    count: int,
    speaking: int,
) -> dict[str, Any]:
    outcomes: Counter[str] = Counter()
    recoveries: list[float] = []
    before = len(service.family())
    is_back, kills = True, 0
    until = time.monotonic() + LONGEST
    while is_back and kills < count and time.monotonic() < until:
        asked(started, load=CALLERS, start=kills * 10_000_000)
        time.sleep(LOADED)
        os.kill(find(service), signal.SIGKILL)
        kills += 1
        probed = [each["seconds"] for each in asked(started, probe=RECOVERS_WITHIN)]
        is_back = None not in probed
        if is_back:
            recoveries.append(max(probed))
        for told in asked(started, last=PATIENCE + 1):
            outcomes.update(told["outcomes"])
            outcomes["hung"] += told["hung"]
        is_back = is_back and _is_whole(service, speaking)
    # Of a service that is no use any more, all of its processes are left behind.
    left = awaited(lambda: max(0, len(service.family()) - (before if is_back else 0)))
    return {
        "kills": kills,
        "sent": outcomes.total(),
        "failed": outcomes.total() - outcomes["answered"] - outcomes["hung"],
        "hung": outcomes["hung"],
        "left": left,
        # Of one that was not always back there is none: it is worse than any.
        "recovered": statistics.median(recoveries) if is_back else None,
        "recovered_worst": max(recoveries) if is_back else None,
    }


def _is_whole(service: Running, speaking: int) -> bool:
    """Wait until all workers have loaded their model again, and so many processes speak HTTP.

    Connections are opened meanwhile, of which each of these processes gets some when it is ready.
    """
    until = time.monotonic() + RECOVERS_WITHIN
    with contextlib.ExitStack() as stack:
        while time.monotonic() < until:
            with contextlib.suppress(OSError):
                address = ("127.0.0.1", service.port)
                stack.enter_context(socket.create_connection(address, timeout=1))
            time.sleep(_LOOK)
            if len(workers(service)) >= WORKERS and len(_speakers(service)) >= speaking:
                return True
    return False


def workers(service: Running) -> list[int]:
    family = service.family()
    return [pid for file in service.pids.iterdir() if (pid := int(file.name)) in family]


def worker(service: Running) -> int:
    return _one(workers(service), "worker")


def speaker(service: Running) -> int:
    return _one(_speakers(service), "process that speaks HTTP")


def _speakers(service: Running) -> list[int]:
    """Those that have connections of clients."""
    wanted = set()
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == _ESTABLISHED and int(fields[1].rpartition(":")[2], 16) == service.port:
            wanted.add(f"socket:[{fields[9]}]")
    return [pid for pid in service.family() if wanted & _files(pid)]


def pool(service: Running) -> int:
    return _one([pid for pid in service.family() if _is_pool(pid)], "pool")


def processor_by_role(service: Running) -> dict[str, float]:
    """Processor seconds so far of the web processes, of the workers, and of the pool if any."""
    spent: dict[str, float] = {"web": 0.0, "worker": 0.0}
    working = workers(service)
    for pid, seconds in service.used().items():
        role = "worker" if pid in working else "pool" if _is_pool(pid) else "web"
        spent[role] = spent.get(role, 0.0) + seconds
    return spent


def _is_pool(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"service-streamer pool ")
    return False


def _files(pid: int) -> set[str]:
    found = set()
    with contextlib.suppress(OSError):
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                found.add(os.readlink(link))
    return found


def _one(pids: list[int], what: str) -> int:
    if not pids:
        raise RunFailed(f"there is no {what} that can be killed")
    return min(pids)
