"""Streams over HTTP: a closed loop of 128 clients on the simulated model of steps.

``python -m adapters.streaming_http '{"port": 8080, "seconds": 10}'`` asks a service that runs, and
prints one row. ``rate``: outputs per second. ``share``, ``to_end``, ``first_steps``: see
``streaming``, at the client. ``wait_p50``, ``wait_p99``: of the clients' longest waits for a first
output; one that still waits counts with its time until then. ``starved``: clients that waited all
the time. ``errors``: requests with another number of outputs than they asked for, or another
status.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import statistics
import sys
import time
from collections.abc import AsyncIterator

from adapters.steps import BASE, CALLERS, PER_ITEM, PLACES, lengths, refilled, to_the_end

#: Until the queue is as long as it stays.
WARM_UP = 6.0
#: An output in a line of ours, {"output": ...} as an event, or of LitServe's.
OUTPUT = re.compile(rb'(?:data: \{"output":)?([0-9.]+)\}?\n+')


class Client:
    """One connection, kept alive."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def outputs(self, item: int) -> AsyncIterator[float]:
        """Of a request, as they come. Raises ConnectionError for anything but a 200."""
        if self._reader is None:
            streams = await asyncio.open_connection("127.0.0.1", self._port)
            self._reader, self._writer = streams
        reader, writer = self._reader, self._writer
        assert writer is not None
        body = json.dumps({"inputs": item, "stream": True}).encode()
        writer.write(
            b"POST /predict HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\n\r\n%b" % (len(body), body)
        )
        head = await reader.readuntil(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 200"):
            self.close()
            raise ConnectionError(head.decode())
        while size := int(await reader.readline(), 16):
            chunk = await reader.readexactly(size + 2)
            for output in OUTPUT.findall(chunk):
                yield float(output)
        await reader.readline()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
        self._reader = self._writer = None


async def closed_loop(port: int, seconds: float) -> dict[str, float]:
    work = lengths(4000)
    items = itertools.cycle(work)
    outputs, errors, step = 0, 0, BASE + PER_ITEM * PLACES
    firsts = list[float]()
    waits: dict[Client, float] = {}  # the longest for a first output
    waiting: dict[Client, float] = {}  # since when

    async def caller() -> None:
        nonlocal outputs, errors
        client = Client(port)
        while True:
            item, count, asked = next(items), 0, time.monotonic()
            waiting[client] = asked
            try:
                async for began in client.outputs(item):
                    if not count:
                        del waiting[client]
                        now = time.monotonic()
                        firsts.append(now - began)
                        waits[client] = max(waits.get(client, 0.0), now - asked)
                    count += 1
                    outputs += 1
            except (OSError, EOFError):
                client.close()
            errors += count != item

    callers = [asyncio.create_task(caller()) for _ in range(CALLERS)]
    await asyncio.sleep(WARM_UP)
    firsts.clear()
    waits.clear()
    before, began = outputs, time.monotonic()
    await asyncio.sleep(seconds)
    ended, counted = time.monotonic(), errors
    rate = (outputs - before) / (ended - began)
    starved = sum(since < began for since in waiting.values())
    for client, since in waiting.items():
        waits[client] = max(waits.get(client, 0.0), ended - since)
    for task in callers:
        task.cancel()
    await asyncio.gather(*callers, return_exceptions=True)
    found = {
        "rate": rate,
        "share": rate / refilled(work, PLACES, 20_000),
        "to_end": rate / to_the_end(work, PLACES),
        "wait_p50": statistics.median(waits.values()),
        "wait_p99": statistics.quantiles(waits.values(), n=100)[-1],
        "starved": starved,
        "errors": counted,
    }
    if len(firsts) > 1:
        found["first_steps"] = statistics.quantiles(firsts, n=100)[-1] / step
    return found


def main() -> None:
    options = json.loads(sys.argv[1])
    found = asyncio.run(closed_loop(options["port"], options.get("seconds", 10.0)))
    print(json.dumps({"point": {}, "figures": found}), flush=True)
    print(json.dumps({"ended": True}), flush=True)


if __name__ == "__main__":
    main()
