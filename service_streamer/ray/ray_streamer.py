"""The streamer whose workers are actors of a Ray cluster."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from ..base_streamer import LIBRARY_TIMEOUT, DefaultTimeout
from ..engine.build import Length, Model, build_engine
from ..options.checks import Workers
from ..options.kinds import documented
from ..options.table import RayStreamerOptions, StreamerOptions
from ..streamer import ScaledStreamer
from ..workers.model_spec import ModelSpec
from .cluster import Cluster, connected_address
from .ray_transport import RayByValue, RayTransport

_Timeout = float | Literal["auto"] | None


@documented(RayStreamerOptions)
class RayStreamer(ScaledStreamer):
    """Batches for models on a Ray cluster: each worker is an actor, wherever Ray has a place.

    This process has the queue and the scheduler, and workers get whole batches. They end with it.
    Ray's nodes need this package in the same version, and what the model imports.

    docs/reference/options.md says more about each option.

    Args:
        predict_function_or_model: A ManagedModel subclass, which each worker builds and loads; a
            function or bound method, which is copied to the workers with all that it holds; or an
            import string ``"package.module:Name"`` for either, imported in the workers only.

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
        worker_timeout: float | DefaultTimeout | None = LIBRARY_TIMEOUT,
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
            self._run(
                options, lambda: build_engine(predict_function_or_model, options, _make_transport)
            )
        else:
            from ..pool.pool_client import pool_clients
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
            self._run(options, clients)


def _make_transport(spec: ModelSpec, options: StreamerOptions) -> RayTransport:
    assert isinstance(options, RayStreamerOptions)
    cluster = Cluster(options.address, options.runtime_env)
    return RayTransport(cluster, spec, options)
