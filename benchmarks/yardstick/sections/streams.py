"""Models of steps: what is lost to batches that are refilled at every step, and by whom.

The first table's model sleeps, so it holds no processor. The second one's is a small Llama on the
CPU. Everything of a row is measured in one process after the other, so its ratios are of one run.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from adapters.steps import PLACES
from yardstick.environments import python
from yardstick.plan import Scale, Section, Settings, System
from yardstick.processes import json_lines
from yardstick.record import Row
from yardstick.servers import free_port, started

__all__ = ["SECTIONS"]

_SECONDS, _SECONDS_QUICK = 12.0, 4.0
_TIMEOUT = 400.0


def _measure(system: System, _: Settings, scale: Scale) -> Iterator[Row]:
    options = {"seconds": _SECONDS_QUICK if scale.is_quick else _SECONDS}
    for module in ("streaming", "generating"):
        command = [python(system.project), "-m", f"adapters.{module}", json.dumps(options)]
        for line in json_lines(command, _TIMEOUT):
            yield Row(line["point"], line["figures"])


def _http(system: System, _: Settings, scale: Scale) -> Iterator[Row]:
    """The first of these questions over HTTP, where others can be asked it, too."""
    port = free_port()
    places = ("--batch-size", str(PLACES))
    words = {
        "serve": ("service_streamer", "serve", "adapters.streaming:Steps", *places),
        "litserve": ("adapters.litserve_streams",),
    }[system.key]
    timeout = ("--timeout", "600") if system.key == "serve" else ()
    command = [python(system.project), "-m", *words, "--port", str(port), *timeout]
    seconds = _SECONDS_QUICK if scale.is_quick else _SECONDS
    with started(command, port, 0, item=1, answer=None):
        options = json.dumps({"port": port, "seconds": 2 * seconds})
        client = [python("this"), "-m", "adapters.streaming_http", options]
        for line in json_lines(client, _TIMEOUT):
            yield Row(line["point"], line["figures"])


SECTIONS = (
    Section("streams", "Models of steps", ("streamer",), _measure, rounds=2),
    Section("streams-http", "Models of steps, over HTTP", ("serve", "litserve"), _http, rounds=2),
)
