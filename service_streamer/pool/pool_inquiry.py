"""A client's questions to its pool: about its state, its workers and its model."""

from __future__ import annotations

import concurrent.futures
import contextlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from ..errors import PredictTimeout, WorkerStartTimeout
from ..observe.metrics import BatchMetrics, StreamerStats, WorkerStats
from ..observe.recent import Summary
from ..options.checks import Workers
from ..options.table import BatchingOptions
from ..supervision.supervisor import Overlap
from .pool_protocol import ASK, pack

__all__ = ["NOT_NAMED", "Inquirer", "OpenQuestions"]

#: Instead of the seconds that a question may wait.
NOT_NAMED = -1.0


class OpenQuestions:
    """Those that have no answer yet: the next pool gets them again.

    Guarded by the lock of the client's calls, except for ``answered`` and ``forget``.
    """

    def __init__(self) -> None:
        self._open: dict[int, tuple[tuple[Any, ...], concurrent.futures.Future[Any]]] = {}

    def __len__(self) -> int:
        return len(self._open)

    def add(
        self, number: int, method: str, arguments: tuple[Any, ...]
    ) -> tuple[tuple[Any, ...], concurrent.futures.Future[Any]]:
        """The message, and the future of the answer."""
        message = ASK, number, method, arguments
        pack(message)  # raises here, and not where it is sent with others
        asked = message, concurrent.futures.Future[Any]()
        self._open[number] = asked
        return asked

    def messages(self) -> list[tuple[Any, ...]]:
        """For the next pool."""
        return [message for message, _ in [*self._open.values()]]

    def answered(self, number: int, value: Any) -> None:
        """An answer has come; the asker may have gone."""
        asked = self._open.pop(number, None)
        if asked is not None:
            with contextlib.suppress(concurrent.futures.InvalidStateError):
                asked[1].set_result(value)

    def forget(self, number: int) -> None:
        """The asker has gone, or has its answer."""
        self._open.pop(number, None)

    def give_up_all(self) -> list[concurrent.futures.Future[Any]]:
        """Their futures, which the caller answers."""
        asked, self._open = self._open, {}
        return [reply for _, reply in asked.values()]


class Inquirer(ABC):
    """What can be asked of a pool, as of an engine in this process."""

    @abstractmethod
    def _ask(self, method: str, *arguments: Any, patience: float | None = NOT_NAMED) -> Any:
        """The pool's answer.

        Args:
            patience: seconds that the pool may take itself; None for any time.

        Raises:
            PredictTimeout: the pool did not answer in time.
            Exception: whatever the pool raised.
        """

    def stats(self) -> StreamerStats:
        stats: StreamerStats = self._ask("stats")
        return stats

    def metrics(self) -> BatchMetrics:
        metrics: BatchMetrics = self._ask("metrics")
        return metrics

    def workers(self) -> list[WorkerStats]:
        workers: list[WorkerStats] = self._ask("workers")
        return workers

    def summary(self, batching: BatchingOptions, *, is_local: bool) -> Summary:  # noqa: ARG002
        """As the engine's; of the pool's own options, which are the same."""
        summary: Summary = self._ask("summary")
        return summary

    def model_description(self) -> Mapping[str, Any] | None:
        """As the engine's."""
        description: Mapping[str, Any] | None = self._ask("model_description")
        return description

    def wait_ready(self, timeout: float | None) -> None:
        """Block until every worker of the pool has loaded its model.

        Raises:
            WorkerStartError, WorkerLost, WorkerStartTimeout, StreamerClosed: as the engine's.
            PoolMismatch: the pool has another model, other options or other code.
        """
        try:
            self._ask("wait_ready", timeout, patience=timeout)
        except PredictTimeout as error:
            raise WorkerStartTimeout(str(error)) from None

    def restart_workers(self, timeout: float | None, overlap: Overlap = "auto") -> None:
        """Replace the workers of the pool, for all clients."""
        self._ask("restart_workers", timeout, overlap, patience=timeout)

    def scale(self, worker_num: Workers) -> None:
        """Have another number of workers, for all clients."""
        self._ask("scale", worker_num)

    def try_start_once(self) -> None:
        """As the engine's, of the pool that is there now."""
        self._ask("try_start_once")
