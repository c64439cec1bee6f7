"""The loop of a worker, run in the test's own thread: batches in, reports out.

It is the same for threads, processes and Ray. What is tested here has no transport, so that a test
decides which batches are there at what time.
"""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

from service_streamer import ManagedModel
from service_streamer.workers.model_spec import LoadedModel, ModelSpec
from service_streamer.workers.protocol import Progress
from service_streamer.workers.runner import Channel, serve
from service_streamer.workers.transport import BatchReport, StepReport


class Clock:
    """Stands still unless a model moves it. In place of ``time.monotonic``."""

    def __init__(self, now: float = 100.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def ticking() -> Callable[[], float]:
    """A clock on which all that is measured takes a second, so that overlapping batches pays."""
    return itertools.count(100.0).__next__


class Batches(Channel):
    """Hands out batches, and keeps the answers.

    Args:
        together: whether the next batch is always there when one is answered.
        failures: of each batch, by position, why an item is missing.
        calls: items of each call, as in ``Transport.send``.
    """

    def __init__(
        self,
        *batches: list[Any],
        together: bool = False,
        failures: dict[int, Any] | None = None,
        calls: int | list[int] = 0,
    ) -> None:
        self._batches = list(enumerate(batches))
        self._together = together
        self._failures = failures or {}
        self._calls = calls
        self.reports: list[BatchReport] = []
        self.signs = 0  # that it has not hung

    def receive(self) -> tuple[Any, ...] | None:
        if not self._batches:
            return None
        number, items = self._batches.pop(0)
        return number, items, dict(self._failures), self._calls

    def is_waiting(self) -> bool:
        return self._together

    def send(self, report: BatchReport | StepReport) -> None:
        if isinstance(report, BatchReport):
            self.reports.append(report)
        else:
            self.signs += 1

    def interrupt(self) -> bool:
        return True  # but what was sent comes before

    @property
    def by_batch(self) -> list[BatchReport]:
        """The answers in the order of the batches, each of which has one."""
        assert len({report.batch_id for report in self.reports}) == len(self.reports)
        return sorted(self.reports, key=lambda report: report.batch_id)

    def serve(
        self, model: LoadedModel, clock: Callable[[], float] | None = None, **options: Any
    ) -> list[BatchReport]:
        """Have the model answer all batches. Without a clock real time counts."""
        run(self, model, clock, **options)
        return self.by_batch


def run(
    channel: Channel,
    model: LoadedModel,
    clock: Callable[[], float] | None = None,
    progress: Progress | None = None,
) -> None:
    """Have a worker serve the channel until that is empty."""
    clocked = mock.patch.object(time, "monotonic", clock or time.monotonic)
    # A worker freezes what it has loaded. Here that would be the garbage of the tests as well.
    with clocked, mock.patch.object(gc, "freeze"):
        serve(channel, model, progress or Progress())


def loaded(model: Any, *args: Any, **options: Any) -> LoadedModel:
    return ModelSpec(model, args, **options).load(None)


def served(
    model: LoadedModel | Callable[[Any], Any],
    *batches: list[Any],
    together: bool = False,
    failures: dict[int, Any] | None = None,
    calls: int | list[int] = 0,
) -> list[BatchReport]:
    """What the worker answers. It goes on with the state that it has.

    Args:
        together: whether batches overlap: each is there in time, and all stages take long.
        calls: items of each call, as in ``Transport.send``.
    """
    if not isinstance(model, LoadedModel):
        model = loaded(model)
    channel = Batches(*batches, together=together, failures=failures, calls=calls)
    return channel.serve(model, ticking() if together else None)


def with_guard(model: LoadedModel, fault: str) -> LoadedModel:
    """As in a process, whose GPU says this when it is looked at."""
    model.guard.may_end = True
    model.guard.probe = lambda: fault
    return model


def raised(report: BatchReport) -> BaseException:
    """Why the batch failed."""
    assert report.failure is not None
    error: BaseException = report.failure.exception()
    return error


def texts(report: BatchReport) -> dict[int, str]:
    """By position, why items failed."""
    return {position: str(each.exception()) for position, each in report.failures.items()}


def model_of(model: LoadedModel) -> Any:
    """The object that the test's class has made."""
    assert isinstance(model.managed, ManagedModel)
    return model.managed
