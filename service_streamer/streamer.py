"""What users build: a streamer in this process's threads, or one over many worker processes."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import logging
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, ParamSpec

from .base_streamer import LIBRARY_TIMEOUT, BaseStreamer, DefaultTimeout
from .engine.build import Length, Model, build_engine
from .engine.engine import Engine
from .observe.explain import Finding, explain
from .observe.metrics import BatchMetrics, StreamerStats, WorkerStats
from .options import kinds
from .options.checks import Devices, Workers
from .options.kinds import PATIENCE, documented, options_of
from .options.table import StreamerOptions
from .single_flight import make_cache
from .supervision.health import Timeout
from .supervision.supervisor import Overlap
from .workers.transport import ThreadTransport

if TYPE_CHECKING:  # where it is used: most streamers share no pool
    from .pool.pool_client import PoolClient

logger = logging.getLogger(__name__)


class PoolStreamer(BaseStreamer):
    """A streamer over workers: its own, or those of a pool that processes share."""

    _engine: Engine | PoolClient
    _options: StreamerOptions
    _is_local = False  # whether the model runs in a thread of this process

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
        deduplicated, cached = self.share_counts
        return dataclasses.replace(self._engine.stats(), deduplicated=deduplicated, cached=cached)

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
        return explain(self._engine.summary(), self._options, is_local=self._is_local)

    def workers(self) -> list[WorkerStats]:
        """What each worker is doing, by number; none when the streamer is closed."""
        return self._engine.workers()

    def _run(self, options: StreamerOptions, make: Callable[[], Engine | PoolClient]) -> None:
        """Have an engine of its own, or a client of a pool, and start that.

        Args:
            make: makes it; a client of the pool also after each fork.
        """
        self._options = options
        self._connect(make)
        if self.pool_client is not None:
            self._make = make  # not that of an engine, which holds the model
            _sharing.add(self)
        if options.wait_for_worker_ready:
            try:
                self.wait_ready()
            except BaseException:
                self.close(drain=False)
                raise

    def _connect(self, make: Callable[[], Engine | PoolClient], *, starts: bool = True) -> None:
        """Have a new one; a client that is not started connects with its first call."""
        cache = make_cache(self._options)  # first, since it may raise
        engine = self._engine = make()
        self._use(engine, self._options, cache, copies=self._is_local)
        if starts:  # last: whatever interrupts it, the finalizer ends it
            engine.start()

    def _connect_again(self) -> None:
        """In a forked child: what the parent has is the parent's."""
        self._finalizer.detach()
        if self.pool_client is not None and not self.pool_client.is_closing:
            self._connect(self._make, starts=False)


_P = ParamSpec("_P")


def _without_processes(init: Callable[_P, None]) -> Callable[_P, None]:
    """A constructor that says of options for worker processes that it has none, and what does."""
    others = {each.name for each in options_of(StreamerOptions)}
    others -= inspect.signature(init).parameters.keys()

    @functools.wraps(init)
    def checked(*args: _P.args, **kwargs: _P.kwargs) -> None:
        for name in filter(others.__contains__, kwargs):
            raise TypeError(
                f"ThreadedStreamer has no {name}, which is for worker processes; leave it out, or "
                "use a Streamer"
            )
        init(*args, **kwargs)

    return checked


@documented(StreamerOptions)
class ThreadedStreamer(PoolStreamer):
    """Batches for a model in a thread of this process: three lines, and a model is faster.

    docs/reference/options.md says more about each option.

    Args:
        predict_function: Function that takes a list of 1 to ``batch_size`` items and returns a
            sequence of as many results. It runs in one thread only.

    Raises:
        TypeError, ValueError: an argument is of the wrong type or out of range.
        ImportError: ``cache_size`` needs a package that is not installed.
    """

    _is_local = True

    @_without_processes
    def __init__(
        self,
        predict_function: Model,
        batch_size: int = 64,
        max_latency: float = 0.1,
        worker_timeout: float | DefaultTimeout | None = LIBRARY_TIMEOUT,
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
            options,
            lambda: build_engine(predict_function, options, lambda spec, _: ThreadTransport(spec)),
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
                PATIENCE.check("timeout", timeout), kinds.FLAG_OR_AUTO.check("overlap", overlap)
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
        self._engine.scale(kinds.WORKERS.check("worker_num", worker_num))


@documented(StreamerOptions)
class Streamer(ScaledStreamer):
    """Batches for models in worker processes, on one or many GPUs.

    docs/reference/options.md says more about each option.

    Args:
        predict_function_or_model: A ManagedModel subclass, which each worker builds and loads; a
            function or bound method, which is copied to the workers with all that it holds; or an
            import string ``"package.module:Name"`` for either, imported in the workers only.

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
        worker_timeout: float | DefaultTimeout | None = LIBRARY_TIMEOUT,
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
            from .pool.pool_client import pool_clients  # most streamers share no pool

            name = options.shared
            self._run(options, pool_clients(name, predict_function_or_model, options))


#: Those that share a pool, for the fork hook below: it has to find them by itself.
_sharing: weakref.WeakSet[PoolStreamer] = weakref.WeakSet()


def _connect_all_again() -> None:
    for streamer in list(_sharing):
        try:
            streamer._connect_again()
        except Exception as error:  # as with too many files open; its calls fail
            logger.error("a streamer cannot be used in this forked process: %r", error)


os.register_at_fork(after_in_child=_connect_all_again)
