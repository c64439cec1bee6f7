"""An open loop over HTTP: calls come by the clock, whether or not others have been answered.

``python -m yardstick.open_client JSON`` makes the calls of one run, see ``Plan``, and prints JSON
lines: {"started": when on the monotonic clock, which all processes share}, then {"calls": ...} as
``judging.Calls`` has them, {"statuses": how often each came}, and {"wrong": results that do not
belong to their calls}. A process of its own, so that it shares an interpreter with nobody.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import resource
import sys
import time
from array import array
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import httptools

from yardstick.judging import EXPIRED, FAILED, REJECTED, SERVED, UNANSWERED
from yardstick.processes import ENDED
from yardstick.stats import poisson

__all__ = ["Plan", "Run"]

_OUTCOMES = {200: SERVED, 429: REJECTED, 503: REJECTED, 408: EXPIRED, 504: EXPIRED}
#: Until the first call, seconds: what is imported and made until then disturbs none.
_DELAY = 0.05
#: Between two looks at the clock, seconds: looking all the time would take a core of the service's.
_TICK = 1e-3


@dataclass(frozen=True)
class Plan:
    """What one run does.

    Attributes:
        port: of this machine, where the service listens.
        path: where it is asked, with {"inputs": number}; it answers the number.
        rate: calls per second, on average.
        seconds: for which they come.
        wait: for answers after that, seconds; what has none by then never gets one.
        connections: at most so many; calls beyond wait for one, which counts.
        headers: of every request.
    """

    port: int
    path: str
    rate: float
    seconds: float
    wait: float
    connections: int = 4096
    headers: Mapping[str, str] = field(default_factory=dict)


class Run:
    """One run of a plan. What became of each call lies in flat arrays, by its number.

    Attributes:
        due, made, ended: seconds from the start.
        outcomes: see ``judging``.
        statuses: how often each came; "error" counts broken and refused connections.
        wrong: answers with 200 that do not belong to their calls; they count as failed.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.due = array("d", poisson(plan.rate, plan.seconds))
        # Flat, so that the garbage collector has nothing to look through.
        self.made = array("d", bytes(8 * len(self.due)))
        self.ended = array("d", bytes(8 * len(self.due)))
        self.outcomes = bytearray(len(self.due))
        self.statuses: Counter[str] = Counter()
        self.wrong = 0
        self._left = len(self.due)
        self._all_ended = asyncio.Event()
        self._idle: dict[_Connection, None] = {}
        self._open = 0
        self._waiting: deque[int] = deque()
        self._connecting: set[asyncio.Task[None]] = set()
        self._start = 0.0
        self._is_over = False
        more = "".join(f"{name}: {value}\r\n" for name, value in plan.headers.items())
        self._head = (
            f"POST {plan.path} HTTP/1.1\r\nHost: 127.0.0.1:{plan.port}\r\n{more}"
            "Content-Type: application/json\r\nContent-Length: "
        ).encode()

    async def make(self, start: float) -> None:
        """Make all calls from ``start`` on the monotonic clock, and wait for their answers."""
        self._start = start
        number = 0
        while number < len(self.due):
            now = time.monotonic() - start
            while number < len(self.due) and self.due[number] <= now:
                self.made[number] = time.monotonic() - start
                self.assign(number)
                number += 1
            if number < len(self.due):
                await asyncio.sleep(max(_TICK, start + self.due[number] - time.monotonic()))
        ends = start + self.plan.seconds + self.plan.wait
        with contextlib.suppress(TimeoutError):  # what is left counts as unanswered
            async with asyncio.timeout(max(0.0, ends - time.monotonic())):
                await self._all_ended.wait()
        self._is_over = True

    def assign(self, number: int) -> None:
        """To the connection that was used last, or to a new one, or to whichever is free next."""
        if self._idle:
            self._idle.popitem()[0].ask(number)
        elif self._open < self.plan.connections:
            self._open += 1
            task = asyncio.get_running_loop().create_task(self._connect(number))
            self._connecting.add(task)
            task.add_done_callback(self._connecting.discard)
        else:
            self._waiting.append(number)

    async def _connect(self, number: int) -> None:
        loop = asyncio.get_running_loop()
        try:
            _, connection = await loop.create_connection(
                lambda: _Connection(self), "127.0.0.1", self.plan.port
            )
        except OSError:
            self.lost(number)
        else:
            connection.ask(number)

    def request(self, number: int) -> bytes:
        body = b'{"inputs": %d}' % number
        return b"%b%d\r\n\r\n%b" % (self._head, len(body), body)

    # -- told by connections

    def answered(self, number: int, status: int, body: bytes) -> None:
        outcome = _OUTCOMES.get(status, FAILED)
        if outcome == SERVED and body.strip() != b"%d" % number:
            self.wrong += not self._is_over
            outcome = FAILED
        self._end(number, outcome, str(status))

    def free(self, connection: _Connection) -> None:
        """It can be asked again."""
        if self._waiting:
            connection.ask(self._waiting.popleft())
        else:
            self._idle[connection] = None

    def lost(self, number: int | None, connection: _Connection | None = None) -> None:
        """A connection has ended, and with it the call that it had."""
        self._open -= 1
        if connection is not None:
            self._idle.pop(connection, None)
        if number is not None:
            self._end(number, FAILED, "error")
        if self._waiting:
            self.assign(self._waiting.popleft())

    def _end(self, number: int, outcome: int, status: str) -> None:
        assert self.outcomes[number] == UNANSWERED
        if self._is_over:
            return
        self.statuses[status] += 1
        self.ended[number] = time.monotonic() - self._start
        self.outcomes[number] = outcome
        self._left -= 1
        if not self._left:
            self._all_ended.set()


class _Connection(asyncio.Protocol):
    """Is kept open, and has one call at a time."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._number: int | None = None
        self._parser: Any = None
        self._body = b""
        self._transport: asyncio.Transport | None = None

    def ask(self, number: int) -> None:
        assert self._transport is not None
        self._number = number
        self._body = b""
        self._parser = httptools.HttpResponseParser(self)
        self._transport.write(self._run.request(number))

    # -- called by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        assert self._transport is not None
        try:
            if self._number is not None:
                self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        number, self._number = self._number, None
        self._run.lost(number, self)

    # -- called by the parser

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        assert self._transport is not None
        assert self._number is not None
        number, self._number = self._number, None
        self._run.answered(number, self._parser.get_status_code(), self._body)
        if self._parser.should_keep_alive():
            self._run.free(self)
        else:
            self._transport.close()


def main() -> None:
    import uvloop

    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    run = uvloop.run(_run(Plan(**json.loads(sys.argv[1]))))
    calls = {name: list(getattr(run, name)) for name in ("due", "made", "ended", "outcomes")}
    # Through a buffer, which PYTHONUNBUFFERED takes from stdout: without it a pipe that is full
    # takes a part of a long line only.
    with open(1, "w", closefd=False) as output:
        for line in ({"calls": calls}, {"statuses": run.statuses}, {"wrong": run.wrong}, ENDED):
            print(json.dumps(line), file=output)


async def _run(plan: Plan) -> Run:
    run = Run(plan)
    gc.freeze()
    start = time.monotonic() + _DELAY
    print(json.dumps({"started": start}), flush=True)
    await asyncio.sleep(_DELAY)
    await run.make(start)
    return run


if __name__ == "__main__":
    main()
