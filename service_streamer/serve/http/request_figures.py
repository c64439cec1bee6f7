"""Counts and durations of requests: those of one web process, and of all of a service.

Each process counts its own (``RequestMetrics``), tells the others (``RequestFigures``), and adds up
what all of them say (``Requests``). They talk over sockets in a private folder (``Siblings``): a
request for /metrics or /stats reaches one of them, and its answer has to be complete.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from ...observe.metrics import SECONDS, Histogram

#: Bucket bounds in seconds, about 25 % apart: percentiles are precise to about 10 %.
LATENCIES = tuple(
    round(start * 10.0**power, 6)
    for power in range(-4, 2)
    for start in (1, 1.25, 1.6, 2, 2.5, 3.2, 4, 5, 6.3, 8)
)

#: Requests that are counted together, for a quarter of what each by itself costs.
_TOGETHER = 256


class RequestMetrics:
    """Totals of a model in this process. Belongs to one event loop.

    Attributes:
        rejections: number of refusals by reason.
        disconnects: number of clients that disconnected before the answer.
        open: number of requests in progress.
        streams: number of streams that were begun.
        outputs: number of outputs that were sent in streams.
    """

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._answers: collections.Counter[tuple[str, int]] = collections.Counter()
        self._latency = Histogram(LATENCIES)
        self._latencies: dict[str, Histogram] = {}
        self._served: dict[str, list[float]] = {}  # not counted yet
        self.rejections: collections.Counter[str] = collections.Counter()
        self.disconnects = 0
        self.open = 0
        self.streams = 0
        self.outputs = 0

    def served(self, path: str, seconds: float) -> None:
        """Count a request with a result."""
        served = self._served.get(path)
        if served is None:
            served = self._served[path] = []
        served.append(seconds)
        if len(served) == _TOGETHER:
            self._count()

    def refused(self, path: str, status: int, reason: str) -> None:
        """Count a refused request."""
        self._answers[path, status] += 1
        self.rejections[reason] += 1

    def _count(self) -> None:
        for path, served in self._served.items():
            if served:
                self._answers[path, 200] += len(served)
                histogram = self._latencies.get(path)
                if histogram is None:
                    histogram = self._latencies[path] = Histogram(SECONDS)
                histogram.add_all(served)
                self._latency.add_all(served)
                served.clear()

    @property
    def answers(self) -> collections.Counter[tuple[str, int]]:
        """Number of answers by path and status."""
        self._count()
        return self._answers

    @property
    def latency(self) -> Histogram:
        """Seconds of requests with a result."""
        self._count()
        return self._latency

    @property
    def latencies(self) -> dict[str, Histogram]:
        """The same by path, in Prometheus's coarser buckets."""
        self._count()
        return self._latencies

    def figures(self, open_streams: int) -> RequestFigures:
        """What the other processes are told."""
        answers: collections.Counter[int] = collections.Counter()
        for (_, status), count in self.answers.items():
            answers[status] += count
        return RequestFigures(
            pid=os.getpid(),
            uptime=time.monotonic() - self._began,
            answers=answers,
            rejections=dict(self.rejections),
            disconnects=self.disconnects,
            open_streams=open_streams,
            streams=self.streams,
            latencies=[*self.latency.counts],
            seconds=self.latency.total,
        )


class RequestFigures(msgspec.Struct, array_like=True, frozen=True):
    """Totals of a model in one web process, since its start there.

    Attributes:
        pid: of the process: another one begins anew.
        uptime: seconds since that start.
        answers: by status.
        rejections: by reason.
        disconnects: clients that disconnected before the answer.
        open_streams, streams: those that are open, and that were begun.
        latencies: counts by bucket of ``LATENCIES``, of requests with a result.
        seconds: sum of their latencies.
    """

    pid: int
    uptime: float
    answers: dict[int, int]
    rejections: dict[str, int]
    disconnects: int
    open_streams: int
    streams: int
    latencies: list[int]
    seconds: float

    def encoded(self) -> bytes:
        """For ``decode_figures``."""
        return msgspec.msgpack.encode(self)

    @property
    def answered(self) -> int:
        return sum(self.answers.values())


def decode_figures(answers: Mapping[int, bytes]) -> dict[int, RequestFigures]:
    """What the other processes answered, without those that died while they did."""
    found = {}
    for number, answer in answers.items():
        try:
            found[number] = msgspec.msgpack.decode(answer, type=RequestFigures)
        except msgspec.DecodeError:
            continue
    return found


class Requests:
    """Requests of a service at one time.

    Args:
        time: seconds of a monotonic clock.
        processes: the figures of each web process, by number.
        answering: how many processes have said theirs now; the others have earlier.
    """

    def __init__(
        self, time: float, processes: Mapping[int, RequestFigures], answering: int | None = None
    ) -> None:
        self.time = time
        self.processes = processes
        self.answering = len(processes) if answering is None else answering

    @property
    def uptime(self) -> float:
        """Seconds, of the oldest process."""
        return max(each.uptime for each in self.processes.values())

    def total(self, status: int | None = None) -> int:
        """How many were answered, with this status or at all."""
        return sum(
            each.answered if status is None else each.answers.get(status, 0)
            for each in self.processes.values()
        )

    def rejected(self, reason: str) -> int:
        return sum(each.rejections.get(reason, 0) for each in self.processes.values())

    @property
    def disconnects(self) -> int:
        return sum(each.disconnects for each in self.processes.values())

    @property
    def streams(self) -> dict[str, int]:
        """Those that are open, and that were begun."""
        all_ = self.processes.values()
        return {
            "open": sum(each.open_streams for each in all_),
            "total": sum(each.streams for each in all_),
        }

    def rate(self, before: Requests | None) -> float:
        """Answers per second since ``before``; None for the start."""
        if before is None:
            seconds, answers = self.uptime, self.total()
        else:
            seconds = self.time - before.time
            answers = sum(
                each.answered - (0 if earlier is None else earlier.answered)
                for each, earlier in self._pairs(before)
            )
        return answers / seconds if seconds > 0 else 0.0

    def latencies(self, before: Requests | None) -> Histogram:
        """Of the requests that were answered since ``before``; None for the start."""
        found = Histogram(LATENCIES)
        for each, earlier in self._pairs(before):
            _add(found, each, 1)
            if earlier is not None:
                _add(found, earlier, -1)
        return found

    def _pairs(self, before: Requests | None) -> list[tuple[RequestFigures, RequestFigures | None]]:
        """Of each process what it says now and said then.

        None if it has begun anew: it is another process, or its model was replaced.
        """
        earlier = {} if before is None else before.processes
        pairs: list[tuple[RequestFigures, RequestFigures | None]] = []
        for number, now in self.processes.items():
            then = earlier.get(number)
            if then is not None and (then.pid != now.pid or then.uptime > now.uptime):
                then = None
            pairs.append((now, then))
        return pairs


def _add(histogram: Histogram, figures: RequestFigures, sign: int) -> None:
    for bucket, count in enumerate(figures.latencies):
        histogram.counts[bucket] += sign * count
    histogram.total += sign * figures.seconds


#: The question for all metrics of a process; and, before the name of a model, for its requests.
ALL_METRICS = b"metrics"
_REQUESTS = b"requests "

#: Seconds to wait for a process's answer, and its maximum size in bytes.
_PATIENCE = 1.0
_MOST_BYTES = 16 << 20


def question_of(model: str) -> bytes:
    """The question for a model's requests. Names have no line ends."""
    return _REQUESTS + model.encode()


class Siblings:
    """The service's web processes, seen from one of them. Belongs to one event loop.

    Args:
        folder: private folder of the service.
        number: number of this process.
        count: number of web processes.
    """

    def __init__(self, folder: Path, number: int, count: int) -> None:
        self._folder = folder
        self.number = number
        self._count = count
        self._server: asyncio.Server | None = None

    async def listen(self, metrics: Callable[[], bytes], requests: Callable[[str], bytes]) -> None:
        """Answer the others from now on.

        Args:
            metrics: all of this process.
            requests: those of a model, by its name; empty if there is no such model.

        Raises:
            OSError: the folder is gone, or its path is too long for a socket.
        """

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                with contextlib.suppress(OSError, ValueError):
                    question = (await reader.readline()).rstrip()
                    if question == ALL_METRICS:
                        writer.write(metrics())
                    elif question.startswith(_REQUESTS):
                        name = question.removeprefix(_REQUESTS).decode("utf-8", "replace")
                        writer.write(requests(name))
                    await writer.drain()
            finally:
                writer.close()

        path = self._path(self.number)
        with contextlib.suppress(FileExistsError):
            self._folder.mkdir(
                0o700
            )  # it is deleted with the last process, and may be needed again
        if self._folder.stat().st_uid != os.geteuid():
            raise PermissionError(f"{self._folder} belongs to another user")
        path.unlink(missing_ok=True)  # left by a dead process of the same number
        self._server = await asyncio.start_unix_server(answer, path)

    async def others(self, question: bytes) -> dict[int, bytes]:
        """The others' answers by number, without those that did not answer in time."""
        numbers = [number for number in range(self._count) if number != self.number]
        answers = await asyncio.gather(*(self._ask(number, question) for number in numbers))
        return {number: each for number, each in zip(numbers, answers, strict=True) if each}

    def close(self) -> None:
        """Stop answering. The last process deletes the folder."""
        if self._server is not None:
            self._server.close()
        with contextlib.suppress(OSError):
            self._path(self.number).unlink(missing_ok=True)
            os.rmdir(self._folder)

    def _path(self, number: int) -> Path:
        return self._folder / str(number)

    async def _ask(self, number: int, question: bytes) -> bytes:
        writer: asyncio.StreamWriter | None = None
        try:
            async with asyncio.timeout(_PATIENCE):
                reader, writer = await asyncio.open_unix_connection(
                    self._path(number), limit=_MOST_BYTES
                )
                writer.write(question + b"\n")
                return await reader.read()
        except (OSError, TimeoutError):
            return b""
        finally:
            if writer is not None:
                writer.close()
