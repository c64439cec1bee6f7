"""A worker host: a pool of workers that computes calls from Redis."""

from __future__ import annotations

import dataclasses
import logging
import os
import queue
import secrets
import socket
import threading
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, Self

from ..base_streamer import BaseStreamer
from ..engine.build import Length, Model, build_engine
from ..engine.fleet import EngineState
from ..engine.operator_signals import (
    SAME_SIGNAL,
    OperatorSignals,
    RollingRestart,
    SignalSocket,
    log_standing,
)
from ..engine.threads import start_thread
from ..errors import StreamerBroken, StreamerClosed, StreamerForked
from ..observe.explain import Finding
from ..observe.metrics import BatchMetrics
from ..options.checks import Device, Devices
from ..options.kinds import PATIENCE, documented
from ..options.table import RedisWorkerOptions, StreamerOptions
from ..streamer import Streamer
from ..supervision.health import Timeout
from .host import Host
from .link import Address, log
from .redis_stats import RedisWorkerStats
from .serializers import WireCodec
from .wire import Secret, Serializer, Wire

logger = logging.getLogger(__name__)


#: Seconds from a result to the caller's next call over Redis. Measured on one machine: 1.4 ms for a
#: lone caller, 2.4 ms for the last of eight. The rest is for a network. A larger value costs
#: little: the scheduler soon stops waiting for callers that do not call again.
_ROUND_TRIP = 4e-3


class _EncodedStreamer(Streamer):
    """A pool that takes encoded items, from callers behind Redis."""

    def __init__(self, model: Model, options: StreamerOptions, codec: WireCodec) -> None:
        BaseStreamer.__init__(self, options.worker_timeout)
        self._run(
            options, lambda: build_engine(model, options, codec=codec, round_trip=_ROUND_TRIP)
        )


@documented(RedisWorkerOptions)
class RedisWorker:
    """A worker host: claims calls from Redis and lets a pool of workers compute them.

    Any number of hosts may serve the same prefix. If a host dies, another one takes over its calls.
    With ``length`` the host decodes each item once more, which takes time.

    docs/reference/options.md says more about each option.

    Args:
        model_class: As the model of ``Streamer``.

    Raises:
        TypeError, ValueError: an argument has a wrong type or is out of range.
    """

    def __init__(
        self,
        model_class: Model,
        batch_size: int = 64,
        max_latency: float = 0.1,
        redis_broker: Any = "localhost:6379",
        prefix: str = "",
        model_init_args: Sequence[Any] | None = None,
        model_init_kwargs: Mapping[str, Any] | None = None,
        *,
        serializer: Serializer = "msgpack",
        secret: Secret | None = None,
        max_message_bytes: int = 32 << 20,
        reply_ttl: float = 120,
        claim_timeout: float = 5,
        retry: bool = True,
        model_name: str | None = None,
        worker_num: int = 1,
        cuda_devices: Devices = None,
        devices_per_worker: int = 1,
        mp_start_method: str = "spawn",
        cpu_threads: int | Literal["auto"] | None = "auto",
        preprocess_workers: int = 0,
        max_attempts: int = 3,
        isolate_errors: bool = True,
        batch_timeout: Timeout = "auto",
        start_timeout: Timeout = "auto",
        length: Length | None = None,
        max_batch_cost: float | None = None,
        tenant_weights: Mapping[str, float] | None = None,
    ) -> None:
        given = locals()  # the table of options knows their names
        options = self._options = RedisWorkerOptions.select(
            given,
            worker_timeout=None,
            model_name=_name_of(model_class) if model_name is None else model_name,
        )
        self._wire = Wire(options)
        self._address = Address(redis_broker)
        self._name = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
        self._model = model_class
        self._lock = threading.RLock()  # reentrant: a user's finalizer may run while it is held
        self._pool: Streamer | None = None
        self._host: Host | None = None
        self._is_closed = self._is_hurried = False
        self._stands_by = False  # all calls are handed back; waiting for a worker
        # Not an event: a signal handler could not take its lock if the signal comes while it is
        # held.
        self._wishes: queue.SimpleQueue[bool] = queue.SimpleQueue()

    def start(self, gpu_id: Device | None = None) -> None:
        """Start the workers, and claim calls once one has loaded its model. Does not block.

        If no worker of a serving host can be restarted for a while, the host hands back its calls
        to other hosts. It continues when a worker is ready.

        Args:
            gpu_id: device of all workers, instead of ``cuda_devices``.

        Raises:
            TypeError, ValueError: an option of the pool has a wrong type or is out of range.
            StreamerClosed: the host is closed.
        """
        with self._lock:
            if self._is_closed:
                raise StreamerClosed("the worker host is closed; build a new one")
            if self._host is not None:
                return
            options = self._options
            if gpu_id is not None:
                options = dataclasses.replace(options, cuda_devices=(gpu_id,))
            self._pool = _EncodedStreamer(self._model, options, self._wire.codec)
            self._pool.engine.try_start_once()  # a host that never served ends, see ``_replace``
            self._start_host(self._pool)

    def _start_host(self, pool: Streamer) -> None:
        self._stands_by = False
        host = Host(
            self._address,
            self._wire,
            pool.engine,
            self._options,
            self._name,
            self._host,
        )
        host.on_failure = lambda: self._host_failed(host)
        self._host = host
        host.start()

    def run_forever(self, gpu_id: Device | None = None) -> None:
        """Serve until ``stop``, finish the claimed calls, and end.

        Raises:
            WorkerStartError, StreamerBroken: no worker could be started, the pool failed, or there
                are hosts with another model. Claimed calls are handed back to other hosts.
            BrokerUnavailable: Redis did not answer at the end, so claimed calls could neither be
                answered nor handed back; the text says how many.
        """
        self.start(gpu_id)
        drain = True
        try:
            drain = self._wishes.get() and not self._is_hurried
        except BaseException:  # KeyboardInterrupt, if no handler is set
            drain = False
            raise
        finally:
            self.close(drain=drain)
        host = self._host
        if host is not None:
            # To be stopped while it waits for a worker is no failure; to leave calls behind is one.
            failure = (None if self._stands_by else host.failure) or host.left_behind
            if failure is not None:
                raise failure

    def _host_failed(self, host: Host) -> None:
        try:
            start_thread(lambda: self._replace(host), "recovery")
        except RuntimeError:  # there are too many threads
            self._wishes.put(True)

    def _may_recover(self, pool: Streamer, host: Host) -> bool:
        return isinstance(host.failure, StreamerBroken) and pool.engine.can_recover

    def _replace(self, host: Host) -> None:
        """Hand back a failed host's calls, and start another host once a worker is ready.

        If no worker will be, ``run_forever`` ends, if it is used.
        """
        with self._lock:
            pool = self._pool
            if pool is None or host is not self._host or self._stands_by:
                return
            engine = pool.engine
            if self._may_recover(pool, host) and not self._is_closed:
                host.leave()
                host.close()
                self._stands_by = True
        if self._stands_by:
            if engine.state is EngineState.BROKEN:
                logger.warning("worker host %s waits for a worker", self._name)
            engine.wait_recovered()
        with self._lock:
            if not self._is_closed:
                if self._stands_by and engine.can_recover:
                    self._start_host(pool)
                    return
                self._stands_by = False  # it has failed for good
        self._wishes.put(True)

    def stop(self, drain: bool = True) -> None:
        """End ``run_forever``. For any thread, and for signal handlers.

        Args:
            drain: finish the claimed calls; otherwise hand them back to other hosts.
        """
        if not drain:
            self._is_hurried = True
            if self._is_closed and self._pool is not None:
                self._pool.close(drain=False)  # it drains already
        self._wishes.put(drain)

    def close(self, drain: bool = True, timeout: float | None = None) -> None:
        """Claim no more calls, finish the claimed ones, end the workers. Idempotent.

        If Redis does not answer, it takes a few seconds more, and a WARNING says what is left.

        Args:
            drain: finish the claimed calls; otherwise hand them back to other hosts.
            timeout: seconds to finish them; the rest is handed back.
        """
        timeout = PATIENCE.check("timeout", timeout)
        with self._lock:
            is_first, self._is_closed = not self._is_closed, True
            pool, host = self._pool, self._host
            if pool is None or host is None or not is_first:
                return
            if self._may_recover(pool, host):
                self._stands_by = True  # it was about to: to stop it then is no failure either
            host.leave()
            pool.close(drain=drain and not self._is_hurried, timeout=timeout)
            host.close()
        logger.info("worker host %s has left", self._name)

    def wait_ready(self, timeout: float | None = None) -> None:
        """Start if needed, and block until every worker has loaded its model.

        Raises:
            WorkerStartError, WorkerLost, WorkerStartTimeout: see ``Streamer.wait_ready``.
        """
        self.start()
        pool = self._pool
        if pool is None:
            raise StreamerClosed("the worker host is closed")
        pool.wait_ready(timeout)

    def restart_workers(self, timeout: float | None = None) -> None:
        """Replace every worker of this host by a new one: see ``Streamer.restart_workers``.

        Raises:
            WorkerStartError, WorkerStartTimeout: see there.
            StreamerClosed: the host is closed, or was not started.
        """
        pool = self._pool
        if pool is None:
            raise StreamerClosed("the worker host has not been started")
        pool.restart_workers(timeout)

    @property
    def model_name(self) -> str:
        """The model's name, which all hosts of a prefix should share."""
        return self._options.model_name or ""

    def stats(self) -> RedisWorkerStats | None:
        """A snapshot of the host; None before ``start``.

        Raises:
            StreamerForked: in a forked child of the process that started it.
        """
        return None if self._host is None else self._host.stats()

    @property
    def metrics(self) -> BatchMetrics:
        """Histograms of all batches so far, as a copy."""
        return BatchMetrics() if self._pool is None else self._pool.metrics

    def findings(self) -> list[Finding]:
        """The findings of ``explain``; empty before ``start``. For this package."""
        return [] if self._pool is None else self._pool.findings()

    def explain(self) -> str:
        """What limits the throughput and latency of its workers: see ``Streamer.explain``."""
        if self._pool is None:
            return "The worker host has not been started."
        return self._pool.explain()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close; after an error in the block, claimed calls are handed back."""
        self.close(drain=kind is None)

    def __repr__(self) -> str:
        try:
            stats = self.stats()
            state = "new" if stats is None else stats.gist
        except StreamerForked:  # a repr does not raise
            state = "of another process"
        return f"<{type(self).__name__} {state}>"


def run_redis_workers_forever(
    model_class: Model,
    batch_size: int = 64,
    max_latency: float = 0.1,
    worker_num: int = 1,
    cuda_devices: Devices = None,
    redis_broker: Any = "localhost:6379",
    prefix: str = "",
    mp_start_method: str = "spawn",
    model_init_args: Sequence[Any] | None = None,
    model_init_kwargs: Mapping[str, Any] | None = None,
    **options: Any,
) -> None:
    """Run a worker host until SIGTERM or Ctrl-C, then finish the claimed calls.

    A second signal, at least one second later, hands them back instead. SIGHUP replaces the workers
    one at a time, such as for new weights. SIGUSR1 logs the state of the host.

    For the main thread of a program; elsewhere use ``RedisWorker``, which handles no signals.

    Args:
        options: other options of ``RedisWorker``, which also explains the first ones.

    Raises:
        TypeError, ValueError: an argument has a wrong type or is out of range.
        WorkerStartError, StreamerBroken: see ``RedisWorker.run_forever``.
        BrokerUnavailable: see ``RedisWorker.run_forever``.
    """
    method: Any = mp_start_method
    if method is None or isinstance(method, (list, tuple)):
        # Positional arguments as in 0.1.2, which had the arguments of init_model here.
        shifted: Any = model_init_args
        model_init_args, model_init_kwargs, method = method, shifted, "spawn"
    worker = RedisWorker(
        model_class,
        batch_size,
        max_latency,
        redis_broker,
        prefix,
        model_init_args,
        model_init_kwargs,
        worker_num=worker_num,
        cuda_devices=cuda_devices,
        mp_start_method=method,
        **options,
    )
    run_until_signalled(worker)


def run_until_signalled(worker: RedisWorker, same_signal: float = SAME_SIGNAL) -> None:
    """``run_forever`` until SIGTERM or Ctrl-C: see ``run_redis_workers_forever``."""
    if threading.current_thread() is not threading.main_thread():
        worker.run_forever()
        return
    with SignalSocket() as signals:
        listener = start_thread(lambda: _listen(worker, signals, same_signal), "signals")
        try:
            worker.run_forever()
        finally:
            signals.end()
            listener.join()


def _listen(worker: RedisWorker, signals: SignalSocket, same_signal: float) -> None:
    operator = OperatorSignals(
        end=worker.stop,
        hurry=lambda: worker.stop(drain=False),
        restart=RollingRestart(worker.restart_workers).begin,
        report=lambda: _log_standing(worker),
        same_signal=same_signal,
    )
    while numbers := signals.answer():
        for number in numbers:
            operator.heed(number)


def _name_of(model: Model) -> str:
    """Name without the module, which may be ``__main__``."""
    if isinstance(model, str):
        return model.rpartition(":")[2]
    return str(getattr(model, "__qualname__", type(model).__qualname__))


def _log_standing(worker: RedisWorker) -> None:
    try:
        stats = worker.stats()
        gist = ["starting"] if stats is None else [stats.gist]
        log_standing([*gist, *worker.explain().splitlines()])
    except Exception:  # our bug, or a user's log handler: later signals must be handled
        log(logging.ERROR, "SIGUSR1: the state of this host could not be logged", exc_info=True)
