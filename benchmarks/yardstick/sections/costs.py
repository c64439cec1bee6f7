"""What a request costs of the processor on each of this project's hot paths."""

from __future__ import annotations

import json
from collections.abc import Iterator

from yardstick.environments import python
from yardstick.plan import Scale, Section, Settings, System
from yardstick.processes import RunFailed, json_lines
from yardstick.record import Row
from yardstick.servers import Running, free_port, running, started

__all__ = ["SECTIONS"]

_CONNECTIONS = 128
#: Of ``adapters.http_stages``, each with what it adds.
_STAGES = {
    "server": "HTTP: the connection alone",
    "exchange": "HTTP: + headers, timer, counters",
    "json": "HTTP: + JSON and its checks",
    "engine": "HTTP: + the engine, batches in a thread",
}
_SERVE = System("serve", "serve", "this", {"service": "serve"})


def _measure(system: System, _: Settings, scale: Scale) -> Iterator[Row]:
    options = {"seconds": scale.seconds / 2, "count": 10_000 if scale.is_quick else 40_000}
    command = [python(system.project), "-m", "adapters.costs", json.dumps(options)]
    for line in json_lines(command, timeout=120):
        yield Row(line["point"], line["figures"])
    if scale.is_quick:
        return
    for stage, title in _STAGES.items():
        port = free_port()
        words = [python(system.project), "-m", "adapters.http_stages", stage, str(port)]
        with started(words, port, workers=0) as service:
            yield _row(title, service, scale)
    with running(_SERVE, "echo", {}) as service:
        yield _row("HTTP: + a worker process, all of serve", service, scale)


def _row(path: str, service: Running, scale: Scale) -> Row:
    service.load(_CONNECTIONS, 1)
    load = service.load(_CONNECTIONS, max(1, round(scale.seconds)))
    if load.errors or load.web is None:
        raise RunFailed(f"{path}: {load.errors} requests were not answered with 2xx")
    return Row({"path": path}, {"us": 1e6 * load.web})


SECTIONS = (Section("costs", "Processor time per request", ("streamer",), _measure, rounds=2),)
