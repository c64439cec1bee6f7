"""A web process, as one of several: ``python -m adapters.sharing_client JSON``; lines in and out.

It builds a streamer of the options given, or finds the service at a port, and says so. Each line
that it reads is a question in JSON, and is answered by one line:

- ``{"callers": n, "warm_up": s, "seconds": s}``: threads in a closed loop. How many calls ended in
  the window, and what processor time this process took for one.
- ``{"stats": true}``: the mean size of the batches so far, and how many there were.
- ``{"memory": true}``: by how much this process has grown since it began, and whether it has torch.
- ``{"load": n, "start": k}``: as many threads call, with items from k on, until ``last`` is asked.
- ``{"probe": s}``: how long it takes until a call is answered; None if none is within s seconds.
- ``{"last": s}``: ends the load; what became of its calls, which may take s seconds more.
- ``{"end": true}``: the end.
"""

from __future__ import annotations

import collections
import http.client
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from adapters.http_protocols import PROTOCOLS


def resident() -> int:
    """Bytes of memory that this process has in use."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def questions() -> Iterator[dict[str, Any]]:
    for line in sys.stdin:
        yield json.loads(line)


def say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


def closed_loop(
    streamer: Any, workload: str, callers: int, warm_up: float, seconds: float
) -> dict[str, Any]:
    from adapters import closed_loop
    from adapters.workloads import items

    class Called:
        def predict(self, item: Any) -> Any:
            return streamer.predict([item])[0]

    spent, began = time.process_time(), time.perf_counter()
    work = items(workload, callers)
    called, begin, end = closed_loop.window(Called(), workload, work, warm_up, seconds)  # type: ignore[arg-type]
    rate = closed_loop.rate_in_part(called, begin, end)
    # Of all calls, those of the warm-up too: they cost the same.
    spent, took = time.process_time() - spent, time.perf_counter() - began
    made = sum(len(each.ended) for each in called)
    return {"rate": rate, "us": 1e6 * spent / max(1, made), "made": made, "took": took}


class OverHttp:
    """Calls a service as a streamer is called; each thread keeps a connection.

    A call raises OSError or HTTPException where the connection breaks or no answer comes in time,
    and Refused for any other status than 200.
    """

    def __init__(self, port: int, protocol: str, timeout: float) -> None:
        self._port = port
        self._protocol = PROTOCOLS[protocol]
        self._timeout = timeout
        self._own = threading.local()
        self._connections: list[http.client.HTTPConnection] = []

    def predict(self, items: list[Any]) -> list[Any]:
        (item,) = items
        connection = getattr(self._own, "connection", None)
        if connection is None:
            connection = self._own.connection = http.client.HTTPConnection(
                "127.0.0.1", self._port, timeout=self._timeout
            )
            self._connections.append(connection)
        try:
            headers = {"Content-Type": "application/json"}
            connection.request("POST", self._protocol.path, self._protocol.body(item), headers)
            response = connection.getresponse()
            text = response.read()
        except BaseException:
            connection.close()
            raise
        if response.status != 200:
            raise Refused(f"{response.status}: {text[:200]!r}")
        return [self._protocol.answer(json.loads(text))]

    def close(self, *, drain: bool) -> None:  # noqa: ARG002 - as of a streamer
        """When nobody calls any more."""
        for each in self._connections:
            each.close()


class Refused(Exception):
    """A service has answered without a result."""


class Load:
    """Threads that call without end, and note what became of each call.

    Args:
        large: the last thread calls with this instead of a number; None for numbers.
        pause: seconds after a call that failed: who is refused at once should not call at once.
    """

    def __init__(
        self, streamer: Any, threads: int, start: int, large: Any = None, pause: float = 0.0
    ) -> None:
        self._streamer = streamer
        self._large = large
        self._pause = pause
        self._is_over = threading.Event()
        self._outcomes: collections.Counter[str] = collections.Counter()
        self._lock = threading.Lock()
        self._next = start
        self._threads = [
            threading.Thread(target=self._call, args=[n == threads - 1], daemon=True)
            for n in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def _call(self, is_large: bool) -> None:
        while not self._is_over.is_set():
            outcome = self.outcome(is_large and self._large is not None)
            with self._lock:
                self._outcomes[outcome] += 1
            if outcome not in ("answered", "wrong"):
                self._is_over.wait(self._pause)

    def outcome(self, is_large: bool) -> str:
        """What becomes of one call."""
        with self._lock:
            number = self._next = self._next + 1
        try:
            if is_large:
                (answer,) = self._streamer.predict([self._large])
                is_right = bool((answer == self._large).all())
            else:
                is_right = self._streamer.predict([number]) == [number]
        except TimeoutError:
            return "hung"
        except Exception as error:
            return type(error).__name__
        return "answered" if is_right else "wrong"

    def end(self, patience: float) -> dict[str, Any]:
        self._is_over.set()
        ends = time.monotonic() + patience
        for thread in self._threads:
            thread.join(max(0.0, ends - time.monotonic()))
        outcomes = collections.Counter(self._outcomes)
        hung = outcomes.pop("hung", 0) + sum(thread.is_alive() for thread in self._threads)
        return {"outcomes": dict(outcomes), "hung": hung}


def probed(streamer: Any, patience: float) -> float | None:
    """Seconds until a call is answered; those that fail are made again."""
    began = time.monotonic()
    while time.monotonic() - began < patience:
        try:
            assert streamer.predict([-1]) == [-1]
        except Exception:
            time.sleep(0.005)  # a port that nobody listens at refuses at once
        else:
            return time.monotonic() - began
    return None


def built(spec: dict[str, Any]) -> Any:
    """What is called; ready."""
    if "port" in spec:
        return OverHttp(spec["port"], spec["protocol"], spec["timeout"])
    from service_streamer import Streamer

    streamer = Streamer(f"adapters.managed:{spec['class']}", 64, **spec["options"])
    streamer.wait_ready(60)
    return streamer


def main() -> None:
    spec = json.loads(sys.argv[1])
    before = resident()
    if "port" not in spec:
        import service_streamer  # noqa: F401 - what that takes is no growth of a client's
    imported = resident()
    streamer = built(spec)
    say(ready=True, pid=os.getpid())
    load: Load | None = None
    for question in questions():
        if "callers" in question:
            say(**closed_loop(streamer, spec["workload"], **question))
        elif "stats" in question:
            sizes = streamer.metrics.sizes
            say(total=sizes.total, batches=sizes.count)
        elif "memory" in question:
            say(bytes=resident() - before, joined=resident() - imported,
                torch="torch" in sys.modules)  # fmt: skip
        elif "load" in question:
            # Other items than those of other processes.
            start = question["start"] + (os.getpid() << 32)
            large = bytes_in_array(spec["large"]) if spec.get("large") else None
            load = Load(streamer, question["load"], start, large, spec.get("pause", 0.0))
            say(loaded=True)
        elif "probe" in question:
            say(seconds=probed(streamer, question["probe"]))
        elif "last" in question:
            assert load is not None
            say(**load.end(question["last"]))
        else:
            break
    streamer.close(drain=False)


def bytes_in_array(size: int) -> Any:
    """What uses shared memory."""
    import numpy as np

    return np.arange(size, dtype=np.uint8)


if __name__ == "__main__":
    main()
