"""The streamer whose workers are actors of a Ray cluster."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from ..engine.build import Length, Model, assemble, check_wanted, make_lengths, make_spec
from ..engine.engine import Engine
from ..options.checks import Workers
from ..options.table import RayStreamerOptions
from ..streamer import _LIBRARY_TIMEOUT, ScaledStreamer, _Default
from .cluster import Cluster, WorkerResources, connected_address
from .ray_transport import RayByValue, RayTransport

_Timeout = float | Literal["auto"] | None


class RayStreamer(ScaledStreamer):
    """Batches for models on a Ray cluster: each worker is an actor, wherever Ray has a place.

    This process has the queue and the scheduler, and workers get whole batches. They end with it.
    Ray's nodes need this package in the same version, and what the model imports.

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
        num_gpus: GPUs of each worker; 0 for a model on the CPU, 0.5 for half of one.
        num_cpus: Cores that each worker holds of its node.
        resources: Other resources that each worker holds, by name.
        runtime_env: What Ray brings to the node before the worker starts, such as packages.
        scheduling_strategy: Which node a worker goes to: "SPREAD", or an object of Ray's, such as a
            PlacementGroupSchedulingStrategy.
        address: Address of the Ray cluster.
        model_init_args: Positional arguments of init_model.
        model_init_kwargs: Keyword arguments of init_model.
        wait_for_worker_ready: Whether the constructor returns only when every worker has loaded its
            model.
        worker_timeout: How long predict and apredict wait for results, in seconds.
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
        ImportError, AttributeError: ``length`` cannot be imported; or ``cache_size`` needs a
            package that is not installed.
        ConnectionError: there is no Ray cluster at ``address``.
        RuntimeError: this process is connected to another Ray cluster, or as a client, or the
            cluster has another version of Ray or Python.
        WorkerStartError: with ``wait_for_worker_ready``, a model could not be loaded.
    """

    def __init__(
        self,
        predict_function_or_model: Model,
        batch_size: int = 64,
        max_latency: float = 0.1,
        worker_num: Workers = 1,
        *,
        num_gpus: float = 1,
        num_cpus: float = 1,
        resources: Mapping[str, float] | None = None,
        runtime_env: Mapping[str, Any] | None = None,
        scheduling_strategy: Any = None,
        address: str | None = None,
        model_init_args: Sequence[Any] | None = None,
        model_init_kwargs: Mapping[str, Any] | None = None,
        wait_for_worker_ready: bool = False,
        worker_timeout: float | _Default | None = _LIBRARY_TIMEOUT,
        max_pending: int | None = None,
        retry: bool = True,
        max_attempts: int = 3,
        isolate_errors: bool = True,
        batch_timeout: _Timeout = "auto",
        start_timeout: _Timeout = "auto",
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
        options = RayStreamerOptions.select(given, worker_timeout=self._worker_timeout)
        if options.shared is None:
            self._run(options, lambda: _build_engine(predict_function_or_model, options))
        else:
            from ..pool.shared_pool import pool_clients
            from .pooled import pool_transport

            clients = pool_clients(
                options.shared,
                predict_function_or_model,
                options,
                # The pool is another process, and would find another cluster. That is no option:
                # others who want the same pool may not be connected.
                transport=functools.partial(pool_transport, otherwise=connected_address()),
                by_value=RayByValue(),
            )
            self._join(options, clients)
        if wait_for_worker_ready:
            self._wait_or_close()


def _build_engine(model: Model, options: RayStreamerOptions) -> Engine:
    """An engine with its workers, which has not been started. Raises as ``build_engine``."""
    check_wanted(model, options)
    lengths = make_lengths(options.length, model)
    spec = make_spec(model, options, has_lengths=lengths is not None)
    cluster = Cluster(options.address, options.runtime_env)
    transport = RayTransport(cluster, spec, WorkerResources.of(options))
    return assemble(transport, options, lengths)
