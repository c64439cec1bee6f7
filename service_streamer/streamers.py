"""What users build: a streamer in this process's threads, or one over many worker processes."""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, Self

from .engine import Engine
from .futures import Future
from .managed_model import ManagedModel
from .options import BatchingOptions, Device, WorkerOptions, check_batch, check_seconds
from .scheduling.batcher import Batcher
from .waiting import predict_blocking, predict_in_loop
from .workers.child import refuse_unguarded_main
from .workers.process import ProcessTransport
from .workers.thread import ThreadTransport
from .workers.transport import Transport
from .workers.worker import ModelSpec, check_model

__all__ = ["Model", "Streamer", "ThreadedStreamer"]

#: A function of a batch, a ManagedModel subclass, or where to import either: "package.module:Name".
Model = Callable[[list[Any]], Any] | type[ManagedModel] | str

_IMPORT_STRING = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")


class _BaseStreamer:
    """The calls that every streamer has. All of them may be made from any thread at any time."""

    _engine: Engine
    _finalizer: weakref.finalize[Any, Any]

    def __init__(self, worker_timeout: float | None) -> None:
        self._worker_timeout = check_seconds("worker_timeout", worker_timeout, none=True)

    def predict(self, batch: Sequence[Any]) -> list[Any]:
        """Compute a batch together with other callers' and wait for it.

        Args:
            batch: any number of items; more than ``batch_size`` become several batches.

        Returns:
            One result per item, in their order.

        Raises:
            PredictTimeout: ``worker_timeout`` seconds have passed; the call is withdrawn.
            WorkerStartError: the model could not be loaded.
            WorkerLost: a worker died while it held a part of this call.
            StreamerClosed, StreamerBroken, StreamerForked: this streamer cannot serve calls.
            UnpicklableItem: an item cannot be sent to a worker process.
            Exception: whatever the model raised, with the worker's traceback as its cause.
        """
        return predict_blocking(self._engine, check_batch(batch), self._worker_timeout)

    def submit(self, batch: Sequence[Any]) -> Future:
        """Like ``predict``, without waiting: the future has the results, or the error.

        Raises:
            StreamerClosed, StreamerBroken, StreamerForked, WorkerStartError: it was not accepted.
        """
        future = Future(self._engine)
        self._engine.submit(check_batch(batch), future)
        return future

    async def apredict(self, batch: Sequence[Any]) -> list[Any]:
        """``predict`` for asyncio, on any event loop; cancelling the task withdraws the call."""
        return await predict_in_loop(self._engine, check_batch(batch), self._worker_timeout)

    def wait_ready(self, timeout: float | None = None) -> None:
        """Block until every worker has loaded its model.

        Args:
            timeout: seconds; None waits for as long as loading takes.

        Raises:
            WorkerStartError: a worker could not; its cause has the worker's traceback.
            WorkerStartTimeout: the time ended first; they go on loading.
        """
        self._engine.wait_ready(check_seconds("timeout", timeout, zero=True, none=True))

    def close(self, drain: bool = True, timeout: float | None = None) -> None:
        """End the workers and release everything. May be called again, and by several threads.

        Args:
            drain: finish the accepted calls first; otherwise they fail with StreamerClosed.
            timeout: the longest to drain, seconds; what is left then fails with StreamerClosed.
        """
        timeout = check_seconds("timeout", timeout, zero=True, none=True)
        self._engine.close(drain=drain, timeout=timeout)

    def destroy_workers(self) -> None:
        """The old name of ``close``: drains for at most ``worker_timeout`` seconds."""
        self.close(timeout=self._worker_timeout)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close; after an error in the block without finishing what nobody waits for any more."""
        self.close(drain=kind is None)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._engine.describe()}>"

    def _wait_for_worker_ready(self, timeout: float | None = None) -> None:
        """The old name of ``wait_ready``, private but called in the original's examples."""
        self.wait_ready(timeout)

    def _start(self, transport: Transport, batching: BatchingOptions, worker_num: int) -> None:
        batcher = Batcher(
            batch_size=batching.batch_size, max_latency=batching.max_latency, slots=worker_num
        )
        self._engine = Engine(transport, batcher, worker_num=worker_num)
        self._engine.start()
        # The engine's thread holds the engine and not this object, so a streamer that was
        # forgotten is collected, and then drains and ends.
        self._finalizer = weakref.finalize(self, self._engine.abandon)
        self._finalizer.atexit = False


class ThreadedStreamer(_BaseStreamer):
    """Batches for a model in a thread of this process: three lines, and a model is faster.

    Args:
        predict_function: takes a list of 1 to ``batch_size`` items and returns a sequence of as
            many results. Called in one thread only.
        batch_size: the most items of one batch.
        max_latency: the longest that an item may wait for company while the model is free,
            seconds. A bound, not a wait: a lone caller never waits.
        worker_timeout: how long ``predict`` waits for its results, seconds; None for ever.

    Raises:
        TypeError, ValueError: an argument is of the wrong type or out of range.
    """

    def __init__(
        self,
        predict_function: Model,
        batch_size: int = 64,
        max_latency: float = 0.1,
        worker_timeout: float | None = 20,
    ) -> None:
        super().__init__(worker_timeout)
        batching = BatchingOptions(batch_size, max_latency)
        _check_model(predict_function)
        self._start(ThreadTransport(ModelSpec(predict_function)), batching, 1)


class Streamer(_BaseStreamer):
    """Batches for models in worker processes, on one or many GPUs.

    Args:
        predict_function_or_model: a ManagedModel subclass, which each worker builds and loads; a
            function or bound method, which is copied to the workers with all that it holds; or an
            import string ``"package.module:Name"`` for either, imported in the workers only.
        batch_size: the most items of one batch.
        max_latency: the longest that an item may wait for company while a worker is free, seconds.
            A bound, not a wait: a lone caller never waits.
        worker_num: the number of worker processes.
        cuda_devices: worker i gets ``cuda_devices[i % len(cuda_devices)]``: numbers, strings, UUIDs
            or ``"cpu"``. None leaves CUDA_VISIBLE_DEVICES as it is.
        model_init_args: positional arguments of ``init_model``.
        model_init_kwargs: keyword arguments of ``init_model``.
        wait_for_worker_ready: return only when every worker has loaded its model.
        mp_start_method: "spawn", "forkserver" or "fork". With "fork" nothing needs to be
            picklable, but CUDA and threads must not have been used before. With "forkserver" the
            main module is imported before the worker's environment is set.
        worker_timeout: how long ``predict`` waits for its results, seconds; None for ever.
        cpu_threads: numeric threads (OpenMP, MKL, OpenBLAS, NumExpr, torch) of each worker;
            "auto" divides the cores among them and respects variables that you set; None changes
            nothing.

    Raises:
        TypeError, ValueError: an argument is of the wrong type or out of range.
        WorkerStartError: with ``wait_for_worker_ready``, a model could not be loaded.
    """

    def __init__(
        self,
        predict_function_or_model: Model,
        batch_size: int = 64,
        max_latency: float = 0.1,
        worker_num: int = 1,
        cuda_devices: Sequence[Device] | None = None,
        model_init_args: Sequence[Any] | None = None,
        model_init_kwargs: Mapping[str, Any] | None = None,
        wait_for_worker_ready: bool = False,
        mp_start_method: str = "spawn",
        worker_timeout: float | None = 20,
        *,
        cpu_threads: int | Literal["auto"] | None = "auto",
    ) -> None:
        super().__init__(worker_timeout)
        batching = BatchingOptions(batch_size, max_latency)
        options = WorkerOptions(
            worker_num=worker_num,
            cuda_devices=cuda_devices,
            model_init_args=model_init_args,
            model_init_kwargs=model_init_kwargs,
            mp_start_method=mp_start_method,
            cpu_threads=cpu_threads,
        )
        _check_model(predict_function_or_model)
        if (model_init_args or model_init_kwargs) and not isinstance(
            predict_function_or_model, (type, str)
        ):
            raise TypeError("model_init_args and model_init_kwargs are for a ManagedModel class")
        refuse_unguarded_main()
        spec = ModelSpec(predict_function_or_model, model_init_args or (), model_init_kwargs)
        self._start(ProcessTransport(spec, options), batching, worker_num)
        if wait_for_worker_ready:
            try:
                self.wait_ready()
            except BaseException:
                self.close(drain=False)
                raise


def _check_model(model: object) -> None:
    if not isinstance(model, str):
        check_model(model)
    elif not _IMPORT_STRING.fullmatch(model):
        raise ValueError(f'an import string must look like "package.module:Name", not {model!r}')
