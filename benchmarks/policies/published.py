"""Published policies, as their papers and their code have them. All know what a batch takes.

None waits for the result of a job whose deadline has passed: it is dropped when a batch is cut, as
it is by our scheduler. Their settings, which the papers leave open, are swept: see ``rivals``.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Sequence

from policies.service import Batch, Duration, Job

__all__ = [
    "Aimd",
    "Deferred",
    "EarlyDrop",
    "FixedWait",
    "Queueing",
    "Tabulated",
    "TokenBudget",
]

#: What Clipper's backoff leaves of the batch size (Crankshaw et al., NSDI 2017, section 4.3.1:
#: "reducing the batch size by 10%").
BACKOFF = 0.9
#: What Nexus leaves for a batch, as a share of the deadline: a job that just missed a batch waits
#: for that one and for its own (Shen et al., SOSP 2019, section 4.1).
NEXUS_SHARE = 0.5


class Queueing:
    """A queue in the order of arrival, and workers that are free. Subclasses say what to cut.

    Args:
        workers: how many there are.
        duration: of a batch.
        batch_size: the most items of one.

    Attributes:
        wake_at: see ``Scheduler``.
    """

    def __init__(self, workers: int, duration: Duration, batch_size: int) -> None:
        self.wake_at = math.inf
        self._duration = duration
        self._batch_size = batch_size
        self._queue: deque[Job] = deque()
        self._idle = deque(range(workers))

    def arrived(self, job: Job, now: float) -> Sequence[Batch]:
        self._queue.append(job)
        return self._cut(now) if self._idle else ()

    def returned(self, batch: Batch, took: float, now: float) -> Sequence[Batch]:  # noqa: ARG002
        self._idle.append(batch.worker)
        return self._cut(now)

    def passed(self, now: float) -> Sequence[Batch]:
        return self._cut(now)

    def _cut(self, now: float) -> Sequence[Batch]:
        batches = []
        self.wake_at = math.inf
        queue = self._queue
        while self._idle:
            while queue and queue[0].deadline < now:
                queue.popleft()
            size = self._size(now) if queue else 0
            if not size:
                break
            jobs = [queue.popleft() for _ in range(size)]
            batches.append(Batch(self._idle.popleft(), jobs))
        return batches

    def _size(self, now: float) -> int:
        """How many jobs to cut from the head of the queue, which is not empty.

        With 0, ``wake_at`` is when to ask again. It may drop jobs.
        """
        raise NotImplementedError

    def _fits(self, seconds: float, most: int) -> tuple[int, float]:
        """How many jobs from the head a worker computes in so many seconds, and their longest."""
        longest = fitting = 0.0
        size = 0
        for size, job in enumerate(itertools.islice(self._queue, most)):
            longest = max(fitting, job.length)
            if self._duration(size + 1, longest) > seconds:
                return size, fitting
            fitting = longest
        return size + 1, fitting


class FixedWait(Queueing):
    """A full batch, or what there is when the oldest job has waited for so long.

    As TF-Serving's ``max_batch_size`` and ``batch_timeout_micros``, Triton's
    ``max_queue_delay_microseconds``, and most others.
    """

    def __init__(self, workers: int, duration: Duration, size: int, wait: float) -> None:
        super().__init__(workers, duration, size)
        self._wait = wait

    def _size(self, now: float) -> int:
        waiting = len(self._queue)
        if waiting >= self._batch_size:
            return self._batch_size
        self.wake_at = self._queue[0].arrived + self._wait
        if self.wake_at > now:
            return 0
        self.wake_at = math.inf
        return waiting


class Aimd(Queueing):
    """Clipper: the most items grow by a constant until a batch takes longer than the objective.

    Args:
        objective: for a batch, seconds.
        step: by which the size grows after a full batch in time.
    """

    def __init__(
        self, workers: int, duration: Duration, batch_size: int, objective: float, step: int
    ) -> None:
        super().__init__(workers, duration, batch_size)
        self._objective = objective
        self._step = step
        self._most = 1.0

    def returned(self, batch: Batch, took: float, now: float) -> Sequence[Batch]:
        if took > self._objective:
            self._most = max(1.0, self._most * BACKOFF)
        elif len(batch.jobs) >= int(self._most):
            self._most = min(self._most + self._step, self._batch_size)
        return super().returned(batch, took, now)

    def _size(self, now: float) -> int:  # noqa: ARG002
        return min(len(self._queue), int(self._most))


class TokenBudget(Queueing):
    """text-embeddings-inference: at once what fits into a budget of padded tokens.

    As ``queue_blocking_task`` in ``core/src/queue.rs`` does for a model that pads.
    """

    def __init__(self, workers: int, duration: Duration, batch_size: int, budget: float) -> None:
        super().__init__(workers, duration, batch_size)
        self._budget = budget

    def _size(self, now: float) -> int:  # noqa: ARG002
        longest = 0.0
        size = 0
        for size, job in enumerate(itertools.islice(self._queue, self._batch_size)):
            longest = max(longest, job.length)
            if longest * (size + 1) > self._budget:
                return max(1, size)
        return size + 1


class Deferred(Queueing):
    """Symphony (arXiv 2308.07470): a batch waits as long as one more job could join it in time.

    With d the first deadline and l(b) the duration of the largest batch that is in time, the batch
    goes between d - l(b + 1) and d - l(b), to the worker that is free then.
    """

    def _size(self, now: float) -> int:
        queue = self._queue
        while queue:
            left = queue[0].deadline - now + 1e-12
            size, longest = self._fits(left, self._batch_size)
            if size:
                if size < len(queue) or size == self._batch_size:
                    return size  # no other can join
                from_ = queue[0].deadline - self._duration(size + 1, longest)
                if from_ <= now:
                    return size
                self.wake_at = from_
                return 0
            queue.popleft()
        return 0


class EarlyDrop(Queueing):
    """Nexus: at once a window of jobs; those that could not wait for all of it are dropped.

    The window slides over the queue to the first job that is in time with all behind it in the
    window (Shen et al., SOSP 2019, section 6.3; ``ModelExecutor::GetBatchTask``).
    """

    def _size(self, now: float) -> int:
        queue = self._queue
        while queue:
            size = min(len(queue), self._batch_size)
            longest = max(job.length for job in itertools.islice(queue, size))
            if now + self._duration(size, longest) <= queue[0].deadline + 1e-12:
                return size
            queue.popleft()
        return 0


class Tabulated(Queueing):
    """Cuts by the number of jobs that wait: a policy that was computed beforehand.

    Args:
        sizes: how many to cut, by how many wait; 0 to wait for the next. The last one for more.
    """

    def __init__(self, workers: int, duration: Duration, sizes: Sequence[int]) -> None:
        super().__init__(workers, duration, max(sizes))
        self._sizes = sizes

    def _size(self, now: float) -> int:  # noqa: ARG002
        return self._sizes[min(len(self._queue), len(self._sizes) - 1)]
