"""Starts ``adapters.library`` for a system, within whose process it is asked."""

from __future__ import annotations

import atexit
import functools
import json
from collections.abc import Iterator
from typing import Any

from service_streamer.redis.local import LocalRedis
from yardstick.environments import python
from yardstick.plan import Settings, System
from yardstick.processes import json_lines
from yardstick.record import Row

__all__ = ["broker", "rows"]


def rows(system: System, settings: Settings, timeout: float, **spec: Any) -> Iterator[Row]:
    """What its driver measures, row by row.

    Args:
        settings: of the system, besides what its ``launch`` has.
        timeout: seconds for all of it.
        spec: see ``adapters/library.py`` and ``adapters/drivers.py``.

    Raises:
        RunFailed: it did not start, an answer was wrong, or it did not end in time.
    """
    options = {**system.launch, **settings}
    adapter = options.pop("adapter")
    if options.get("mode") == "redis":
        options["broker"] = broker()
    whole = {"adapter": adapter, "settings": options, **spec}
    command = [python(system.project), "-m", "adapters.library", json.dumps(whole)]
    for said in json_lines(command, timeout):
        yield Row(said["point"], said["figures"])


@functools.cache
def broker() -> str:
    """``host:port`` of a Redis of this run, which ends with it.

    Raises:
        FileNotFoundError: there is no redis-server.
    """
    server = LocalRedis().start()
    atexit.register(server.stop)
    return f"127.0.0.1:{server.port}"
