"""Requests of all web processes of a service: each tells the others of its own, and they add up."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping

import msgspec

from ...observe.metrics import Histogram
from .request_metrics import LATENCIES
from .service import Service

#: The question to the other web processes, before the name of a model.
_REQUESTS = b"requests "


def question_of(service: Service) -> bytes:
    """The question to the other web processes for a model's requests. Names have no line ends."""
    return _REQUESTS + service.model.encode()


def model_asked_for(question: bytes) -> str | None:
    """The model that a question is about; None if it is another question."""
    is_it = question.startswith(_REQUESTS)
    return question.removeprefix(_REQUESTS).decode("utf-8", "replace") if is_it else None


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
        """For ``decoded``."""
        return msgspec.msgpack.encode(self)

    @property
    def answered(self) -> int:
        return sum(self.answers.values())


def requests_of(service: Service) -> RequestFigures:
    """Those of this process."""
    requests = service.requests
    answers: dict[int, int] = {}
    for (_, status), count in requests.answers.items():
        answers[status] = answers.get(status, 0) + count
    return RequestFigures(
        pid=os.getpid(),
        uptime=time.monotonic() - service.started_at,
        answers=answers,
        rejections=dict(requests.rejections),
        disconnects=requests.disconnects,
        open_streams=len(service.streams),
        streams=requests.streams,
        latencies=[*requests.latency.counts],
        seconds=requests.latency.total,
    )


def decoded(answers: Mapping[int, bytes]) -> dict[int, RequestFigures]:
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
