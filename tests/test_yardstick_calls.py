"""What the yardstick makes of calls: over HTTP and in one's own process."""

from __future__ import annotations

import asyncio
import contextlib
import json
from array import array
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

from adapters import closed_loop, open_loop
from yardstick import judging
from yardstick.judging import EXPIRED, FAILED, REJECTED, SERVED, UNANSWERED, Calls
from yardstick.open_client import Plan, Run
from yardstick.stats import poisson

# -- judging


def calls(*rows: tuple[float, float, float, int]) -> Calls:
    """Each with when it was due, made and ended, and its outcome."""
    due, made, ended, outcomes = zip(*rows, strict=True)
    return Calls(due, made, ended, outcomes)


def test_load_counts_calls_that_were_due_in_the_window_from_then_on() -> None:
    made = calls(
        (0.5, 0.5, 9.0, SERVED),  # before the window
        (1.0, 1.2, 1.5, SERVED),  # made late, which counts
        (1.1, 1.1, 1.2, SERVED),
        (1.2, 1.2, 1.3, SERVED),
        (1.7, 1.7, 2.0, SERVED),  # ended after it
        (1.95, 1.95, 0.0, UNANSWERED),  # and so took for ever
        (1.96, 1.96, 1.97, FAILED),
        (2.0, 2.0, 2.1, SERVED),  # after it
    )
    figures = judging.load(made, 1.0, 2.0)
    assert figures["p50"] == pytest.approx(0.3)
    assert figures["p99"] is None
    assert figures["lag_p99"] == pytest.approx(0.2)
    assert (figures["offered"], figures["served"]) == (6, pytest.approx(4 / 6))
    # Who is not served in time has waited for all of it.
    assert judging.mean_latency(made, 1.0, 2.0, 0.4) == pytest.approx((0.1 + 0.1 + 0.3 + 1.2) / 6)
    figures = judging.load(calls((1.0, 1.0, 0.0, UNANSWERED)), 0.0, 2.0)
    assert (figures["p50"], figures["p99"], figures["served"]) == (None, None, 0)


def test_overload_counts_what_came_in_time_as_goodput() -> None:
    figures = judging.overload(
        calls(
            (0.5, 0.5, 1.25, SERVED),  # due before the window, delivered in it: goodput, no share
            (0.6, 0.6, 1.7, SERVED),  # the same, too late
            (1.0, 1.4, 1.5, SERVED),
            (1.1, 1.9, 2.2, SERVED),  # too late for anybody, though not from when it was made
            (1.2, 1.3, 1.4, REJECTED),
            (1.3, 1.3, 2.3, EXPIRED),
            (1.4, 1.4, 1.5, FAILED),
            (1.5, 1.5, 0.0, UNANSWERED),
            (1.9, 1.9, 2.4, SERVED),  # in time, but delivered after the window
            (2.0, 2.0, 2.1, FAILED),  # due after it
        ),
        first=1.0,
        end=2.0,
        deadline=1.0,
        capacity=4.0,
    )
    assert figures["goodput"] == 2 / 4
    shares = {name: round(7 * figures[name], 6) for name in ("served", "rejected", "failed")}
    assert shares == {"served": 2, "rejected": 1, "failed": 1}
    assert figures["expired"] == pytest.approx(3 / 7)  # 504, too late, and never
    assert figures["p50"] == pytest.approx(0.5)
    assert figures["rejection_p99"] == pytest.approx(0.1)  # from the call on
    assert figures["offered"] == 7


def steady(rate: int, *spans: tuple[float, float]) -> list[float]:
    """So many times per second, evenly, in these spans."""
    return [first + n / rate for first, end in spans for n in range(round((end - first) * rate))]


ALL = steady(100, (0, 6))


@pytest.mark.parametrize(
    ("due", "results", "expected"),
    [
        (ALL, ALL, 0.0),  # nobody noticed
        (ALL, steady(100, (0, 2), (3, 6)), 1.0),  # nothing for one second
        (ALL, steady(100, (0, 2), (2.5, 3), (4, 6)), 2.0),  # that was not back, but a burst
        (ALL, steady(100, (0, 2), (2.5, 4), (5, 6)), 0.5),  # and this was
        (ALL, steady(100, (0, 2)) + steady(50, (2, 6)), None),  # one of two is left
        (ALL, steady(100, (0, 2)), None),
        (ALL, [], None),  # there was no rate before
        # Where fewer calls come, fewer results are all that there can be.
        (steady(100, (0, 3)) + steady(50, (3, 6)), steady(100, (0, 3)) + steady(50, (3, 6)), 0.0),
    ],
)
def test_recovery(due: list[float], results: list[float], expected: float | None) -> None:
    found = judging.recovery(due, results, first=1.0, killed_at=2.0, end=6.0)
    assert found == (expected if expected is None else pytest.approx(expected, abs=0.1))


def test_a_kill_is_told_as_counts_and_as_a_time_line() -> None:
    figures = judging.killed(
        calls(
            (0.0, 0.0, 0.05, SERVED),
            (0.1, 0.1, 0.45, SERVED),
            (0.2, 0.25, 0.31, REJECTED),
            (0.25, 0.25, 0.32, FAILED),
            (0.3, 0.3, 0.0, UNANSWERED),
            (0.4, 0.4, 0.9, SERVED),  # after the end of the load: not in the time line
        ),
        first=0.0,
        killed_at=0.2,
        end=0.5,
    )
    counts = [figures[name] for name in ("sent", "answered", "failed", "lost")]
    assert counts == [6, 3, 2, 1]
    assert figures["worst"] == pytest.approx(0.5)
    assert figures["timeline_sent"] == [1, 1, 2, 1, 1]
    assert figures["timeline_answered"] == [1, 0, 0, 0, 1]
    assert figures["timeline_failed"] == [0, 0, 0, 2, 0]
    assert (figures["killed_at"], figures["before"]) == (0.2, 0.5)


# -- the client

#: Gets the number that was asked, and writes an answer or does whatever else.
Answer = Callable[[int, asyncio.StreamWriter], Awaitable[None]]


def respond(writer: asyncio.StreamWriter, body: object, status: int = 200) -> None:
    text = json.dumps(body)
    writer.write(f"HTTP/1.1 {status} Told\r\nContent-Length: {len(text)}\r\n\r\n{text}".encode())


async def run_against(answer: Answer, kind: type[Run] = Run, **plan: Any) -> Run:
    """What the client makes of a server that speaks as much HTTP as a test needs.

    There are as many calls as are due within the seconds of the plan.
    """
    tasks: set[asyncio.Task[None] | None] = set()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.add(asyncio.current_task())
        with contextlib.suppress(asyncio.IncompleteReadError, asyncio.CancelledError):
            while not writer.is_closing():
                headers = (await reader.readuntil(b"\r\n\r\n")).decode()
                assert "X-Given: here\r\n" in headers
                length = int(headers.lower().partition("content-length: ")[2].split()[0])
                await answer(json.loads(await reader.readexactly(length))["inputs"], writer)
        writer.close()

    async with await asyncio.start_server(accept, "127.0.0.1", 0) as server:
        usual: dict[str, Any] = {"rate": 1e3, "seconds": 0.02, "wait": 60}
        port = server.sockets[0].getsockname()[1]
        run = kind(Plan(port, "/predict", **usual | {"headers": {"X-Given": "here"}} | plan))
        await run.make(asyncio.get_running_loop().time())
        for task in filter(None, tasks):  # asyncio's streams would complain of those that go on
            task.cancel()
        await asyncio.gather(*filter(None, tasks), return_exceptions=True)
    assert len(run.outcomes) > 5
    return run


@pytest.mark.parametrize(
    ("status", "outcome"),
    [(503, REJECTED), (429, REJECTED), (504, EXPIRED), (408, EXPIRED), (500, FAILED)],
)
def test_each_call_has_the_outcome_of_its_own_answer(status: int, outcome: int) -> None:
    """The status, an answer of another call, a connection that is closed, or a result."""

    async def answer(number: int, writer: asyncio.StreamWriter) -> None:
        match number % 4:
            case 0:
                respond(writer, {"error": number}, status)
            case 1:
                respond(writer, number + 1)
            case 2:
                writer.close()
            case _:
                respond(writer, number)

    run = asyncio.run(run_against(answer))
    expected = [outcome, FAILED, FAILED, SERVED]
    assert list(run.outcomes) == [expected[n % 4] for n in range(len(run.due))]
    counts = [len(run.due[n::4]) for n in range(4)]
    assert run.wrong == counts[1]
    assert run.statuses == {
        str(status): counts[0], "200": counts[1] + counts[3], "error": counts[2]
    }  # fmt: skip


def test_calls_do_not_wait_for_one_another() -> None:
    all_there = asyncio.Event()
    there: list[int] = []

    async def answer(number: int, writer: asyncio.StreamWriter) -> None:
        there.append(number)
        if len(there) == 10:
            all_there.set()
        await all_there.wait()
        respond(writer, number)

    run = asyncio.run(run_against(answer, rate=1e4, seconds=0.0015))
    assert len(run.due) >= 10
    assert set(run.outcomes) == {SERVED}


def test_what_waits_for_a_connection_counts_from_when_it_was_due() -> None:
    """One connection only, and its first call is answered when all others have been made."""
    are_made = asyncio.Event()

    class Told(Run):
        def assign(self, number: int) -> None:
            super().assign(number)
            if number == len(self.due) - 1:
                are_made.set()

    async def answer(number: int, writer: asyncio.StreamWriter) -> None:
        await are_made.wait()
        respond(writer, number)

    run = asyncio.run(run_against(answer, Told, connections=1))
    assert set(run.outcomes) == {SERVED}
    assert all(due <= made for due, made in zip(run.due, run.made, strict=True))
    assert min(run.ended) >= max(run.made)


def test_what_is_never_answered_stays_unanswered() -> None:
    async def answer(number: int, writer: asyncio.StreamWriter) -> None:
        await asyncio.Event().wait()

    run = asyncio.run(run_against(answer, wait=0.0))
    assert set(run.outcomes) == {UNANSWERED}
    assert not any(run.ended)


# -- in one's own process


def test_poisson_has_its_rate_and_its_spread_and_is_the_same_for_all() -> None:
    due = list(poisson(1000.0, 20.0))
    assert due == list(poisson(1000.0, 20.0))
    assert due == sorted(due)
    assert due[-1] < 20
    assert len(due) == pytest.approx(20_000, rel=0.03)
    gaps = np.diff(due)
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.05)  # as an exponential has


@pytest.mark.parametrize("deadline", [1.0, None])
def test_what_a_system_kept_from_being_made_counts_as_not_answered(deadline: float | None) -> None:
    """The other rules are those for services."""
    calls = [
        (9.9, 9.9, 9.95, REJECTED),  # due before the window
        (11.0, 11.0, 11.5, SERVED),
        (12.0, 20.5, 20.6, SERVED),  # made long after it was due
        (13.0, 0.0, 0.0, UNANSWERED),  # never made: its user got nothing
    ]
    due, made, ended, outcomes = zip(*calls, strict=True)
    log = open_loop.Log(due, array("d", made), array("d", ended), bytearray(outcomes))
    figures = open_loop.judged(log, 10.0, 20.0, deadline, capacity=1.0)
    assert figures["offered"] == pytest.approx(0.1)
    assert figures["lag_p99"] == pytest.approx(8.5)
    if deadline is None:
        assert figures["served"] == pytest.approx(2 / 3)
        assert figures["p50"] == pytest.approx(8.6)
        assert figures["p99"] is None
    else:
        assert figures["served"] == pytest.approx(1 / 3)
        assert figures["expired"] == pytest.approx(2 / 3)
        assert figures["goodput"] == pytest.approx(0.1)


def test_a_call_counts_by_the_share_of_its_time_in_the_window() -> None:
    caller = closed_loop.Latencies()
    for started, ended in [(0.0, 1.0), (1.0, 3.0), (3.0, 5.0), (5.0, 6.0)]:
        caller.add(started, ended)
    assert closed_loop.rate_in_part([caller], 0.5, 4.0) == pytest.approx((0.5 + 1 + 0.5) / 3.5)
    assert closed_loop.rate_in_part([caller, caller], 1.5, 2.5) == pytest.approx(1.0)


class Wrong:
    """A system that mixes up its answers."""

    def predict(self, item: int) -> int:
        return item + 1

    async def apredict(self, item: int) -> int:
        return item + 1


@pytest.mark.parametrize(
    ("drive", "arguments"),
    [
        (closed_loop.threads, (0.0, 0.0)),
        (closed_loop.tasks, (0.0, 0.0)),
        (closed_loop.until_empty, (2,)),
    ],
)
def test_wrong_answers_are_found(drive: Any, arguments: tuple[Any, ...]) -> None:
    with pytest.raises(closed_loop.WrongAnswer, match="3 was answered with 4"):
        drive(Wrong(), "echo", [3], *arguments)
