"""The calls that every streamer has, whatever computes them."""

from __future__ import annotations

import enum
import weakref
from collections.abc import Iterable
from typing import Any, Literal, Self, cast

from .engine.backend import Backend, predict_blocking, predict_in_loop
from .engine.streams import AsyncStream, Stream
from .engine.trace_file import Recording
from .future import Future
from .observe.record import ORDINARY, Call, CallOptions
from .options import kinds
from .options.checks import check_batch, check_timeout
from .options.kinds import PATIENCE
from .options.table import RedisStreamerOptions, StreamerOptions
from .single_flight import Cache, SingleFlight


class DefaultTimeout(enum.Enum):
    """Stands for a default time limit in a signature."""

    WORKER_TIMEOUT = "worker_timeout"  # of predict: that of its streamer
    LIBRARY_TIMEOUT = "WORKER_TIMEOUT"  # of a streamer: ``BaseStreamer.library_timeout``

    def __repr__(self) -> str:
        return self.value


_WORKER_TIMEOUT: Literal[DefaultTimeout.WORKER_TIMEOUT] = DefaultTimeout.WORKER_TIMEOUT
LIBRARY_TIMEOUT: Literal[DefaultTimeout.LIBRARY_TIMEOUT] = DefaultTimeout.LIBRARY_TIMEOUT

#: Of nearly all streams.
_STREAM = CallOptions(stream=True)


class BaseStreamer:
    """The calls that every streamer has. All of them may be made from any thread at any time."""

    #: Of streamers that were built without one, seconds; None for ever. For this package: the
    #: module ``service_streamer.service_streamer`` sets it, as applications of 0.1.2 want it.
    library_timeout: float | None = 20.0
    #: What accepts the calls. For this package; users call ``submit``.
    backend: Backend
    _finalizer: weakref.finalize[[], Any]
    _single_flight: SingleFlight | None = None

    def __init__(self, worker_timeout: float | DefaultTimeout | None) -> None:
        if worker_timeout is not LIBRARY_TIMEOUT:
            worker_timeout = kinds.TIME_LIMIT.check("worker_timeout", worker_timeout)
        self._given_timeout = worker_timeout

    @property
    def _worker_timeout(self) -> float | None:
        given = self._given_timeout
        return BaseStreamer.library_timeout if isinstance(given, DefaultTimeout) else given

    def predict(
        self,
        batch: Iterable[Any],
        timeout: float | DefaultTimeout | None = _WORKER_TIMEOUT,
        *,
        priority: int = 0,
        tenant: str = "",
    ) -> list[Any]:
        """Compute a batch together with other callers' and wait for it.

        Args:
            batch: any number of items, in a list, tuple, array, set, generator, ...; more than
                ``batch_size`` become several batches. A string, bytes or a dict is refused: as a
                single item it belongs into a list.
            timeout: how long to wait for the results, seconds; None for ever. What is not with a
                worker by then is never computed. The default is the streamer's ``worker_timeout``.
                A timeout that is given here is also a deadline: the nearest deadline goes first,
                and calls without one go last. A call that has waited for half of
                ``worker_timeout`` is ordered by that as its deadline. Every eighth turn goes to
                the call that has waited longest, whatever its kind.
            priority: among calls without a deadline, and among equal deadlines, the higher goes
                first.
            tenant: whose call it is. Tenants share the workers by their weights (see
                ``tenant_weights``), so that a flood of one does not hold up the others. Deadlines
                and priorities order the calls within each tenant.

        Returns:
            One result per item, in their order.

        Raises:
            PredictTimeout: the time has ended.
            TooLate: a PredictTimeout; the call cannot be computed in its time.
            Overloaded: ``max_pending`` items wait already; nothing was accepted.
            WorkerStartError: the model could not be loaded.
            WorkerLost: a worker died of this call, or the search for the cause was ended.
            StreamerClosed, StreamerBroken, StreamerForked: this streamer cannot serve calls.
            TypeError: the batch is a single item, such as a string.
            UnpicklableItem: an item cannot be sent to a worker process.
            SharedBatchError: the model raised on a batch that this call shared with others; only
                with ``isolate_errors=False`` or ``retry=False``.
            Exception: whatever the model raised, with the worker's traceback as its cause.
        """
        return predict_blocking(self.backend, self._new_call(batch, timeout, priority, tenant))

    def submit(
        self,
        batch: Iterable[Any],
        timeout: float | None = None,
        *,
        priority: int = 0,
        tenant: str = "",
    ) -> Future:
        """Like ``predict``, without waiting: the future has the results, or the error.

        Args:
            timeout: when it ends, in seconds from now, the future fails with PredictTimeout; None
                for never. Also its deadline, as in ``predict``.
            priority, tenant: as in ``predict``.

        Raises:
            Overloaded: ``max_pending`` items wait already; nothing was accepted.
            PredictTimeout: there was no time left from the start.
            TooLate: a PredictTimeout; the call cannot be computed in its time.
            StreamerClosed, StreamerBroken, StreamerForked, WorkerStartError: it was not accepted.
        """
        call = self._new_call(batch, timeout, priority, tenant)
        call.is_watched = True
        backend = self.backend
        future = call.reply = Future(backend)
        backend.submit(call)
        return future

    async def apredict(
        self,
        batch: Iterable[Any],
        timeout: float | DefaultTimeout | None = _WORKER_TIMEOUT,
        *,
        priority: int = 0,
        tenant: str = "",
    ) -> list[Any]:
        """``predict`` for asyncio, on any event loop; cancelling the task withdraws the call.

        Calls that are made in one pass of the event loop are sent when it ends, so that they share
        batches: what goes on in the same pass without awaiting anything delays them, and
        ``max_latency`` counts from its end.
        """
        # Not a local of this frame: see the end of ``predict_in_loop``.
        return await predict_in_loop(self.backend, self._new_call(batch, timeout, priority, tenant))

    def stream(
        self,
        item: Any,
        timeout: float | DefaultTimeout | None = _WORKER_TIMEOUT,
        *,
        priority: int = 0,
        tenant: str = "",
        max_buffered: int = 1024,
        fails_behind: bool = False,
    ) -> Stream:
        """The outputs of one item as a model of steps makes them; one, of any other model.

        Args:
            item: a single one, not a batch.
            timeout: when all outputs have to be there, in seconds from now; None for ever. The
                default is the streamer's ``worker_timeout``.
            priority, tenant: as in ``predict``.
            max_buffered: how many outputs may wait to be asked for. Beyond it the item rests until
                half of them have been: it keeps its place and its memory, and its time goes on.
            fails_behind: whether the stream fails with Overloaded at ``max_buffered`` instead.

        Returns:
            An iterator. To leave it frees the item's place in the worker before the next step.

        Raises:
            Overloaded, PredictTimeout, StreamerClosed, StreamerBroken, StreamerForked,
            WorkerStartError: it was not accepted, as in ``submit``. What happens later is raised by
                the iterator, after the outputs that had come by then: see ``Stream``.
            UnpicklableItem: the item cannot be sent to a worker process; by the iterator.
        """
        kinds.count().check("max_buffered", max_buffered)
        call = self._new_call([item], timeout, priority, tenant, True)
        return Stream(self.backend, call, max_buffered, fails_behind=fails_behind)

    def astream(
        self,
        item: Any,
        timeout: float | DefaultTimeout | None = _WORKER_TIMEOUT,
        *,
        priority: int = 0,
        tenant: str = "",
        max_buffered: int = 1024,
        fails_behind: bool = False,
    ) -> AsyncStream:
        """``stream`` for asyncio, on any event loop: an async iterator.

        Cancelling the task that waits for it frees the item's place, as leaving it does; another
        task that then asks for an output gets a StreamerError. If only the wait for an output is
        cancelled, as by ``asyncio.wait_for(anext(stream), ...)``, the stream goes on.
        """
        kinds.count().check("max_buffered", max_buffered)
        call = self._new_call([item], timeout, priority, tenant, True)
        return AsyncStream(self.backend, call, max_buffered, fails_behind=fails_behind)

    def _new_call(
        self,
        batch: Iterable[Any],
        timeout: float | DefaultTimeout | None,
        priority: int,
        tenant: str,
        stream: bool = False,
    ) -> Call:
        """A call with all that its caller wants, checked, for whoever waits for its outcome."""
        options, has_deadline = ORDINARY, False
        if timeout is _WORKER_TIMEOUT:
            timeout = self._worker_timeout
        elif timeout is not None:
            timeout, has_deadline = check_timeout(timeout), True
        if has_deadline or priority or tenant:
            options = CallOptions(priority, tenant, has_deadline, stream).checked()
        elif stream:
            options = _STREAM
        items = batch if type(batch) is list else check_batch(batch)  # nearly all are lists
        return Call(items, None, timeout, options)

    def wait_ready(self, timeout: float | None = None) -> None:
        """Block until every worker has loaded its model.

        Args:
            timeout: seconds; None waits for as long as loading takes.

        Raises:
            WorkerStartError: a worker could not; its cause has the worker's traceback.
            WorkerLost: a worker died again and again. Like one that could not load its model it is
                tried again at least once a minute.
            WorkerStartTimeout: the time ended first; they go on loading.
            StreamerClosed: the streamer was closed meanwhile.
        """
        self.backend.wait_ready(PATIENCE.check("timeout", timeout))

    def close(self, drain: bool = True, timeout: float | None = None) -> None:
        """End the workers and release everything. May be called again, and by several threads.

        Args:
            drain: finish the accepted calls first; otherwise they fail with StreamerClosed.
            timeout: the longest to drain, seconds; what is left then fails with StreamerClosed.
        """
        timeout = PATIENCE.check("timeout", timeout)
        self.backend.close(drain=drain, timeout=timeout)
        self._finalizer.detach()  # it holds the backend, and whatever that calls back

    def destroy_workers(self) -> None:
        """The old name of ``close``: drains for at most ``worker_timeout`` seconds."""
        self.close(timeout=self._worker_timeout)

    def _use(
        self,
        backend: Backend,
        options: StreamerOptions | RedisStreamerOptions,
        cache: Cache | None,
        *,
        copies: bool = False,
    ) -> None:
        """Have a backend compute the calls, recorded and shared as the options say.

        Its threads hold it and not this object, so it drains and ends when this is collected
        without ``close``.
        """
        if options.trace is not None:
            backend = cast("Backend", Recording(backend, options.trace))
        if options.deduplicates:  # what is recorded is what is computed
            may_rerun = options.retry if isinstance(options, StreamerOptions) else True
            flight = SingleFlight(backend, copies=copies, may_rerun=may_rerun, cache=cache)
            self._single_flight, backend = flight, cast("Backend", flight)
        self.backend = backend
        self._finalizer = weakref.finalize(self, backend.abandon)
        self._finalizer.atexit = False

    @property
    def share_counts(self) -> tuple[int, int]:
        """``stats().deduplicated`` and ``.cached``, without asking a pool. For this package."""
        flight = self._single_flight
        return (0, 0) if flight is None else (flight.deduplicated, flight.cached)

    def clear_cache(self) -> None:
        """Forget the results that are kept for later callers, if any are: see ``cache_size``."""
        if self._single_flight is not None:
            self._single_flight.forget()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Close; after an error in the block, calls that wait are dropped."""
        self.close(drain=kind is None)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.backend.describe()}>"

    def _wait_for_worker_ready(self, timeout: float | None = None) -> None:
        """The old name of ``wait_ready``, private but called in the original's examples."""
        self.wait_ready(timeout)
