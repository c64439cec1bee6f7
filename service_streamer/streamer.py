"""What users build: a streamer in this process's threads, or one over many worker processes."""

from __future__ import annotations

import enum
import functools
import logging
import os
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, Self, TypeVar

from .engine.backend import Backend, predict_blocking, predict_in_loop
from .engine.build import Length, Model, build_engine
from .engine.engine import Engine
from .engine.streams import AsyncStream, Stream
from .engine.trace_file import Recording
from .future import Future
from .observe.explain import Finding, explain
from .observe.metrics import BatchMetrics, StreamerStats, WorkerStats
from .observe.record import ORDINARY, Call, Precedence
from .options.checks import (
    Devices,
    Workers,
    check_batch,
    check_count,
    check_overlap,
    check_priority,
    check_seconds,
    check_tenant,
    check_timeout,
    check_workers,
)
from .options.declare import STREAMER, THREADED, options_of
from .options.table import StreamerOptions
from .share.single_flight import SingleFlight, make_share
from .supervision.health import Timeout
from .supervision.supervisor import Overlap

if TYPE_CHECKING:  # where it is used: most streamers share no pool
    from .pool.pool_client import PoolClient

logger = logging.getLogger(__name__)

_StreamKind = TypeVar("_StreamKind", Stream, AsyncStream)


class _Default(enum.Enum):
    """What stands for a default in a signature."""

    WORKER_TIMEOUT = "worker_timeout"  # of predict: that of its streamer
    LIBRARY_TIMEOUT = "WORKER_TIMEOUT"  # of a streamer: ``defaults.worker_timeout``

    def __repr__(self) -> str:
        return self.value


_WORKER_TIMEOUT: Literal[_Default.WORKER_TIMEOUT] = _Default.WORKER_TIMEOUT
_LIBRARY_TIMEOUT: Literal[_Default.LIBRARY_TIMEOUT] = _Default.LIBRARY_TIMEOUT


class Defaults:
    """What an application may set for all streamers of its process, at any time.

    Attributes:
        worker_timeout: of streamers that were built without one, seconds; None for ever. The module
            ``service_streamer.service_streamer`` sets it, as applications of version 0.1.2 want it.
    """

    __slots__ = ("worker_timeout",)

    def __init__(self) -> None:
        self.worker_timeout: float | None = 20.0


defaults = Defaults()


class BaseStreamer:
    """The calls that every streamer has. All of them may be made from any thread at any time."""

    _backend: Backend
    _finalizers: tuple[weakref.finalize[Any, Any], ...] = ()
    _single_flight: SingleFlight | None = None

    def __init__(self, worker_timeout: float | _Default | None) -> None:
        if worker_timeout is not _LIBRARY_TIMEOUT:
            worker_timeout = check_seconds("worker_timeout", worker_timeout, none=True)
        self._given_timeout = worker_timeout

    @property
    def backend(self) -> Backend:
        """What accepts the calls. For this package; users call ``submit``."""
        return self._backend

    @property
    def _worker_timeout(self) -> float | None:
        return self._timeout(_WORKER_TIMEOUT)

    def predict(
        self,
        batch: Iterable[Any],
        timeout: float | _Default | None = _WORKER_TIMEOUT,
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
        precedence = ORDINARY
        if priority or tenant or not (timeout is _WORKER_TIMEOUT or timeout is None):
            precedence = _precedence(timeout, priority, tenant)
        return predict_blocking(self._backend, _items(batch), self._timeout(timeout), precedence)

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
        precedence = ORDINARY
        if timeout is not None:
            check_timeout(timeout)
        if timeout is not None or priority or tenant:
            precedence = _precedence(timeout, priority, tenant)
        items = batch if type(batch) is list else check_batch(batch)  # nearly all are lists
        backend = self._backend
        future = Future(backend)
        backend.submit(Call(items, future, timeout, precedence, True))  # is_watched
        return future

    async def apredict(
        self,
        batch: Iterable[Any],
        timeout: float | _Default | None = _WORKER_TIMEOUT,
        *,
        priority: int = 0,
        tenant: str = "",
    ) -> list[Any]:
        """``predict`` for asyncio, on any event loop; cancelling the task withdraws the call.

        Calls that are made in one pass of the event loop are sent when it ends, so that they share
        batches: what goes on in the same pass without awaiting anything delays them, and
        ``max_latency`` counts from its end.
        """
        precedence = _precedence(timeout, priority, tenant)
        timeout = self._timeout(timeout)
        return await predict_in_loop(self._backend, _items(batch), timeout, precedence)

    def stream(
        self,
        item: Any,
        timeout: float | _Default | None = _WORKER_TIMEOUT,
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
                half of them have been: it keeps its place and its memory, and its time goes on. A
                model that keeps its batch together (``join``) cannot let one rest: its stream fails
                with Overloaded when some thousands more have come.
            fails_behind: whether the stream fails with Overloaded at ``max_buffered`` instead.

        Returns:
            An iterator. To leave it frees the item's place in the worker before the next step.

        Raises:
            Overloaded, PredictTimeout, StreamerClosed, StreamerBroken, StreamerForked,
            WorkerStartError: it was not accepted, as in ``submit``. What happens later is raised by
                the iterator, after the outputs that had come by then: see ``Stream``.
            UnpicklableItem: the item cannot be sent to a worker process; by the iterator.
        """
        return self._open(Stream, item, timeout, priority, tenant, max_buffered, fails_behind)

    def astream(
        self,
        item: Any,
        timeout: float | _Default | None = _WORKER_TIMEOUT,
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
        return self._open(AsyncStream, item, timeout, priority, tenant, max_buffered, fails_behind)

    def _open(
        self,
        kind: type[_StreamKind],
        item: Any,
        timeout: float | _Default | None,
        priority: int,
        tenant: str,
        max_buffered: int,
        fails_behind: bool,
    ) -> _StreamKind:
        check_count("max_buffered", max_buffered)
        precedence = _precedence(timeout, priority, tenant)
        return kind(
            self._backend, item, self._timeout(timeout), precedence, max_buffered, fails_behind
        )

    def _timeout(self, timeout: float | _Default | None) -> float | None:
        if timeout is not _WORKER_TIMEOUT:
            return check_timeout(timeout)
        given = self._given_timeout
        return defaults.worker_timeout if isinstance(given, _Default) else given

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
        self._backend.wait_ready(check_seconds("timeout", timeout, zero=True, none=True))

    def close(self, drain: bool = True, timeout: float | None = None) -> None:
        """End the workers and release everything. May be called again, and by several threads.

        Args:
            drain: finish the accepted calls first; otherwise they fail with StreamerClosed.
            timeout: the longest to drain, seconds; what is left then fails with StreamerClosed.
        """
        timeout = check_seconds("timeout", timeout, zero=True, none=True)
        self._backend.close(drain=drain, timeout=timeout)
        self._forget_finalizers()  # they hold the backend, and whatever that calls back

    def destroy_workers(self) -> None:
        """The old name of ``close``: drains for at most ``worker_timeout`` seconds."""
        self.close(timeout=self._worker_timeout)

    def _abandon_when_forgotten(self, backend: Any) -> None:
        """Have a backend drain and end when this object is collected without ``close``."""
        parts = (backend, self._single_flight)
        self._finalizers = tuple(
            weakref.finalize(self, each.abandon) for each in parts if each is not None
        )
        for each in self._finalizers:
            each.atexit = False

    def _forget_finalizers(self) -> None:
        for each in self._finalizers:
            each.detach()

    def clear_cache(self) -> None:
        """Forget the results that are kept for later callers, if any are: see ``cache_size``."""
        if self._single_flight is not None:
            self._single_flight.forget()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close; after an error in the block, calls that wait are dropped."""
        self.close(drain=kind is None)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._backend.describe()}>"

    def _wait_for_worker_ready(self, timeout: float | None = None) -> None:
        """The old name of ``wait_ready``, private but called in the original's examples."""
        self.wait_ready(timeout)


class PoolStreamer(BaseStreamer):
    """A streamer over workers: its own, or those of a pool that processes share."""

    _engine: Engine | PoolClient
    _options: StreamerOptions
    _is_local: bool

    @property
    def engine(self) -> Engine:
        """What batches the calls, unless a pool is shared. For this package."""
        assert isinstance(self._engine, Engine)
        return self._engine

    @property
    def pool_client(self) -> PoolClient | None:
        """The client of the pool that is shared; None with workers of its own. For this package."""
        return None if isinstance(self._engine, Engine) else self._engine

    def stats(self) -> StreamerStats:
        """What goes on now, and how often what happened so far; ``repr`` shows the gist."""
        stats = self._engine.stats()
        return stats if self._single_flight is None else self._single_flight.with_counts(stats)

    @property
    def metrics(self) -> BatchMetrics:
        """Histograms of sizes and durations of the batches so far: a copy, as they are now."""
        return self._engine.metrics()

    def explain(self) -> str:
        """What limits throughput and latency now, and what to do about it, in plain sentences.

        Of the last batches: 256 at the most, of those of the last minute if there are any. One
        finding in each line, the most important first; the numbers in them are measured.
        """
        return "\n".join(map(str, self.findings()))

    def findings(self) -> list[Finding]:
        """What ``explain`` says, one by one. For this package."""
        return explain(self._engine.summary(self._options, is_local=self._is_local))

    def workers(self) -> list[WorkerStats]:
        """What each worker is doing, by number; none when the streamer is closed."""
        return self._engine.workers()

    def _run(
        self, options: StreamerOptions, build: Callable[[], Engine], *, is_local: bool = False
    ) -> None:
        """Have an engine of its own, and start that.

        Args:
            build: makes it.
            is_local: whether the model runs in a thread of this process.
        """
        share = make_share(options)
        self._options = options
        self._is_local = is_local
        engine = build()
        self._backend = self._engine = engine
        if options.trace is not None:
            self._backend = Recording(engine, options.trace, engine.lengths)
        if share is not None:  # what is recorded is what is computed
            self._backend = self._single_flight = share(
                self._backend,
                copies=is_local,
                extend=engine.extend,
                may_rerun=options.retry,
            )
        engine.start()
        # The engine's thread holds the engine and not this object, so a streamer that was
        # forgotten is collected, and then drains and ends.
        self._abandon_when_forgotten(engine)

    def _wait_or_close(self) -> None:
        """``wait_ready``, for a constructor."""
        try:
            self.wait_ready()
        except BaseException:
            self.close(drain=False)
            raise


_P = ParamSpec("_P")


def _without_processes(init: Callable[_P, None]) -> Callable[_P, None]:
    """A constructor that says of options for worker processes that it has none, and what does."""
    own = {each.name for each in options_of(StreamerOptions, THREADED)}
    others = {each.name for each in options_of(StreamerOptions, STREAMER)} - own

    @functools.wraps(init)
    def checked(*args: _P.args, **kwargs: _P.kwargs) -> None:
        for name in filter(others.__contains__, kwargs):
            raise TypeError(
                f"ThreadedStreamer has no {name}, which is for worker processes; leave it out, or "
                "use a Streamer"
            )
        init(*args, **kwargs)

    return checked


class ThreadedStreamer(PoolStreamer):
    """Batches for a model in a thread of this process: three lines, and a model is faster.

    docs/reference/options.md says more about each option.

    Args:
        predict_function: Function that takes a list of 1 to ``batch_size`` items and returns a
            sequence of as many results. It runs in one thread only.
        batch_size: Upper bound on the items of a batch.
        max_latency: Upper bound on the time that an item waits for other items while a worker is
            free, in seconds.
        worker_timeout: How long predict and apredict wait for results, in seconds.
        max_pending: Upper bound on the items that wait; calls beyond it fail at once with
            Overloaded.
        retry: Whether an item may be computed twice.
        isolate_errors: Whether a batch on which the model raises is run again in smaller parts, to
            find the items that it raises on.
        length: Function that returns the cost of an item, in any unit, or where to import it:
            "package.module:function".
        max_batch_cost: Upper bound on items × longest item.
        tenant_weights: Relative weight per tenant (default 1).
        trace: File that records when calls arrive, for the simulator.
        deduplicate: Whether identical items that are in flight at the same time are computed once.
        cache_size: Number of items whose results are kept for later callers.
        cache_ttl: How long results are kept, in seconds.

    Raises:
        TypeError, ValueError: an argument is of the wrong type or out of range.
        ImportError: ``cache_size`` needs a package that is not installed.
    """

    @_without_processes
    def __init__(
        self,
        predict_function: Model,
        batch_size: int = 64,
        max_latency: float = 0.1,
        worker_timeout: float | _Default | None = _LIBRARY_TIMEOUT,
        *,
        max_pending: int | None = None,
        retry: bool = True,
        isolate_errors: bool = True,
        length: Length | None = None,
        max_batch_cost: float | None = None,
        tenant_weights: Mapping[str, float] | None = None,
        trace: str | os.PathLike[str] | None = None,
        deduplicate: bool = False,
        cache_size: int = 0,
        cache_ttl: float | None = None,
    ) -> None:
        given = locals()  # the table of options knows their names
        super().__init__(worker_timeout)
        options = StreamerOptions.select(given, worker_timeout=self._worker_timeout)
        self._run(
            options, lambda: build_engine(predict_function, options, is_local=True), is_local=True
        )


class ScaledStreamer(PoolStreamer):
    """A streamer whose workers can be replaced, and whose number can be changed."""

    def restart_workers(self, timeout: float | None = None, *, overlap: Overlap = "auto") -> None:
        """Replace every worker by a new one, one at a time, as for new weights. No call fails.

        Blocks until all is done. Workers that could not be started, also those of a broken
        streamer, are tried again at once.

        Args:
            timeout: the longest to block, seconds; None for as long as it takes.
            overlap: True starts a new worker before the old one ends, which needs memory for one
                worker more. False ends the old one first, when it has finished what it holds: the
                other workers compute meanwhile, and with one worker calls wait until the new one
                has loaded its model. "auto" starts the new one first; if it cannot load for lack of
                memory, and there are other workers, the rest of the restart goes on as with False.
                If restarts that differ in this are under way at once, a worker that all of them
                replace is replaced as False wants, else as "auto" does.

        Raises:
            WorkerStartError: a new one could not load its model; the old ones that are left go on.
                Where the old one has ended already, its place is tried again and again.
            WorkerStartTimeout: the time ended first; the restart goes on.
            StreamerClosed: the streamer is closed, or was meanwhile.
        """
        try:
            self._engine.restart_workers(
                check_seconds("timeout", timeout, zero=True, none=True), check_overlap(overlap)
            )
        finally:
            self.clear_cache()  # of the old weights' results

    def scale(self, worker_num: Workers) -> None:
        """Have another number of workers. Does not block: ``wait_ready`` does.

        New ones take batches as soon as they have loaded their model; those that are too many
        finish what they hold, and end.

        Args:
            worker_num: as that of the constructor, which it replaces. A number, at least 1, is
                kept, whatever the load. With the least and the most, such as ``(1, 16)``, the load
                decides from now on.

        Raises:
            StreamerClosed: the streamer is closed.
            TypeError, ValueError: it is no such number or pair.
        """
        self._engine.scale(check_workers("worker_num", worker_num))

    def _join(self, options: StreamerOptions, make_client: Callable[[], PoolClient]) -> None:
        """Share the workers of a pool with other processes.

        Args:
            make_client: makes a client of the pool; one for each process after a fork.
        """
        self._options = options
        self._is_local = False
        self._make_client = make_client
        client = self._connect()
        _sharing.add(self)
        client.start()

    def _connect(self) -> PoolClient:
        """Have a client of this process; it connects with its first call."""
        options = self._options
        share = make_share(options)
        client = self._make_client()
        self._backend = self._engine = client
        if options.trace is not None:
            self._backend = Recording(client, options.trace, client.lengths)
        if share is not None:
            self._backend = self._single_flight = share(
                self._backend, slack=_SLACK, may_rerun=options.retry
            )
        self._abandon_when_forgotten(client)
        return client

    def _connect_again(self) -> None:
        """In a forked child: what the parent has is the parent's."""
        self._forget_finalizers()
        if self.pool_client is not None and not self.pool_client.is_closing:
            self._connect()

    @property
    def share_counts(self) -> tuple[int, int]:
        """As ``stats().deduplicated`` and ``.cached``, without asking the pool. Likewise."""
        return (0, 0) if self._single_flight is None else self._single_flight.counts


class Streamer(ScaledStreamer):
    """Batches for models in worker processes, on one or many GPUs.

    docs/reference/options.md says more about each option.

    Args:
        predict_function_or_model: A ManagedModel subclass, which each worker builds and loads; a
            function or bound method, which is copied to the workers with all that it holds; or an
            import string ``"package.module:Name"`` for either, imported in the workers only.
        batch_size: Upper bound on the items of a batch.
        max_latency: Upper bound on the time that an item waits for other items while a worker is
            free, in seconds.
        worker_num: Number of workers, which are processes that hold the model; or the least and the
            most.
        cuda_devices: Devices of the workers in turn: GPU numbers, strings, UUIDs or cpu.
        model_init_args: Positional arguments of init_model.
        model_init_kwargs: Keyword arguments of init_model.
        wait_for_worker_ready: Whether the constructor returns only when every worker has loaded its
            model.
        mp_start_method: How worker processes are started.
        worker_timeout: How long predict and apredict wait for results, in seconds.
        devices_per_worker: Number of devices that each worker gets.
        cpu_threads: Threads of each worker for numeric libraries on the CPU (OpenMP, MKL, OpenBLAS,
            torch, tokenizers).
        preprocess_workers: Number of processes of each worker that run the model's preprocess; 0
            runs it in the worker itself.
        shared_memory_limit: Upper bound on the shared memory for large items and results, in bytes.
        max_pending: Upper bound on the items that wait; calls beyond it fail at once with
            Overloaded.
        retry: Whether an item may be computed twice.
        max_attempts: Worker crashes that an item may be involved in before it fails.
        isolate_errors: Whether a batch on which the model raises is run again in smaller parts, to
            find the items that it raises on.
        batch_timeout: How long a worker may compute one batch, in seconds; then it is killed and
            replaced.
        start_timeout: How long a worker may load its model, in seconds; then it is killed and
            replaced.
        length: Function that returns the cost of an item, in any unit, or where to import it:
            "package.module:function".
        max_batch_cost: Upper bound on items × longest item.
        tenant_weights: Relative weight per tenant (default 1).
        trace: File that records when calls arrive, for the simulator.
        deduplicate: Whether identical items that are in flight at the same time are computed once.
        cache_size: Number of items whose results are kept for later callers.
        cache_ttl: How long results are kept, in seconds.
        shared: Name of the pool that all processes of this user on this host share; the first
            starts it.
        linger: How long the pool stays after its last process has left, in seconds.
        pool_log: File to which the pool appends its log, and what its workers print.

    Raises:
        TypeError, ValueError: an argument is of the wrong type or out of range.
        PermissionError: the directory of shared pools is not this user's own.
        ImportError, AttributeError: ``length`` cannot be imported; or ``cache_size`` needs a
            package that is not installed.
        WorkerStartError: with ``wait_for_worker_ready``, a model could not be loaded.
    """

    def __init__(
        self,
        predict_function_or_model: Model,
        batch_size: int = 64,
        max_latency: float = 0.1,
        worker_num: Workers = 1,
        cuda_devices: Devices = None,
        model_init_args: Sequence[Any] | None = None,
        model_init_kwargs: Mapping[str, Any] | None = None,
        wait_for_worker_ready: bool = False,
        mp_start_method: str = "spawn",
        worker_timeout: float | _Default | None = _LIBRARY_TIMEOUT,
        *,
        devices_per_worker: int = 1,
        cpu_threads: int | Literal["auto"] | None = "auto",
        preprocess_workers: int = 0,
        shared_memory_limit: int | None = None,
        max_pending: int | None = None,
        retry: bool = True,
        max_attempts: int = 3,
        isolate_errors: bool = True,
        batch_timeout: Timeout = "auto",
        start_timeout: Timeout = "auto",
        length: Length | None = None,
        max_batch_cost: float | None = None,
        tenant_weights: Mapping[str, float] | None = None,
        trace: str | os.PathLike[str] | None = None,
        deduplicate: bool = False,
        cache_size: int = 0,
        cache_ttl: float | None = None,
        shared: str | None = None,
        linger: float = 10.0,
        pool_log: str | os.PathLike[str] | None = None,
    ) -> None:
        given = locals()  # the table of options knows their names
        super().__init__(worker_timeout)
        options = StreamerOptions.select(given, worker_timeout=self._worker_timeout)
        if options.shared is None:
            self._run(options, lambda: build_engine(predict_function_or_model, options))
        else:
            from .pool.shared_pool import pool_clients  # most streamers share no pool

            name = options.shared
            self._join(options, pool_clients(name, predict_function_or_model, options))
        if wait_for_worker_ready:
            self._wait_or_close()


#: A computation of a shared pool may take this many times its caller's timeout: later callers may
#: join it. It is withdrawn when no caller waits.
_SLACK = 2.0

#: Those that share a pool, for the fork hook below: it has to find them by itself.
_sharing: weakref.WeakSet[ScaledStreamer] = weakref.WeakSet()


def _connect_all_again() -> None:
    for streamer in list(_sharing):
        try:
            streamer._connect_again()
        except Exception as error:  # as with too many files open; its calls fail
            logger.error("a streamer cannot be used in this forked process: %r", error)


os.register_at_fork(after_in_child=_connect_all_again)


def _precedence(timeout: object, priority: int, tenant: str) -> Precedence:
    has_deadline = timeout is not None and timeout is not _WORKER_TIMEOUT
    if not (priority or tenant or has_deadline):
        return ORDINARY
    return Precedence(check_priority(priority), check_tenant(tenant), has_deadline)


def _items(batch: Any) -> Sequence[Any]:
    return batch if type(batch) is list else check_batch(batch)  # nearly all are lists
