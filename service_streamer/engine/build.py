"""From options to an engine: for threads of this process, or for worker processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..batching.batcher import build_batcher
from ..errors import PredictTimeout, SharedBatchError, WorkerLost
from ..managed_model import ManagedModel
from ..options.checks import IMPORT_STRING
from ..options.table import StreamerOptions
from ..supervision.health import BatchBound
from ..supervision.supervisor import RestartPolicy, Supervisor
from ..workers.child import refuse_unguarded_main
from ..workers.process import ProcessTransport
from ..workers.protocol import Failure
from ..workers.runner import ItemCodec, ModelSpec, check_model
from ..workers.transport import ThreadTransport, Transport
from .engine import Engine
from .item_lengths import make_lengths, make_measure

__all__ = ["EXPIRED_SUSPECT", "Model", "build_engine", "not_blamed", "of_shared_call"]

#: A function of a batch, a ManagedModel subclass, or where to import either: "package.module:Name".
Model = Callable[[list[Any]], Any] | type[ManagedModel] | str

#: Of calls whose time ends before they are computed.
EXPIRED = Failure(PredictTimeout("the call could not be computed in its time"))

#: The same after a worker died with them.
EXPIRED_SUSPECT = Failure(
    PredictTimeout(
        "a worker died while it held this call, and the call's time ended before the item at fault "
        "was found; the log says what the worker died of"
    )
)


def build_engine(
    model: Model,
    options: StreamerOptions,
    *,
    is_local: bool = False,
    codec: ItemCodec | None = None,
    round_trip: float = 0.0,
) -> Engine:
    """An engine with its workers, which has not been started.

    Args:
        is_local: whether the model runs in a thread of this process.
        codec: what items come encoded with; None if they come as they are.
        round_trip: how long results take to callers, and their next calls back, seconds.

    Raises:
        TypeError, ValueError, ImportError, AttributeError: the model or ``length`` cannot be used.
    """
    if not isinstance(model, str):
        check_model(model)
    elif not IMPORT_STRING.fullmatch(model):
        raise ValueError(f'an import string must look like "package.module:Name", not {model!r}')
    if not isinstance(model, (type, str)) and (
        options.model_init_args or options.model_init_kwargs
    ):
        raise TypeError("model_init_args and model_init_kwargs are for a ManagedModel class")
    if not is_local:
        refuse_unguarded_main()
    lengths = make_lengths(options.length, model, codec)
    spec = ModelSpec(
        model,
        options.model_init_args or (),
        options.model_init_kwargs,
        may_rerun=options.retry,
        codec=codec,
        has_lengths=lengths is not None,
        measure=make_measure(options.length),
    )
    transport: Transport = ThreadTransport(spec) if is_local else ProcessTransport(spec, options)
    batcher = build_batcher(
        options,
        has_lengths=lengths is not None,
        round_trip=round_trip,
        batch_timeout=_batch_bound(options, ends=not is_local),
        expired=EXPIRED,
        expired_suspect=EXPIRED_SUSPECT,
        shared=not_blamed,
    )
    policy = RestartPolicy(
        max_restarts=options.max_restarts,
        window=options.restart_window,
        start_timeout=None if is_local else options.start_timeout,
    )
    return Engine(
        transport,
        batcher,
        Supervisor(options.worker_num, policy),
        max_pending=options.max_pending,
        hang=_why_hung(options, is_local=is_local),
        slow_start="it had not loaded its model within start_timeout of {:g} s",
        lengths=lengths,
    )


def _batch_bound(options: StreamerOptions, *, ends: bool) -> BatchBound:
    timeout = options.batch_timeout
    if timeout is None or timeout == "auto":  # without a bound a slow batch is reported, too
        return BatchBound(options.worker_timeout, ends=ends and timeout is not None)
    return BatchBound(fixed=timeout)


def _why_hung(options: StreamerOptions, *, is_local: bool) -> str:
    """Why a worker is ended whose batch takes too long, or why it is not."""
    if is_local:
        return "a thread cannot be ended by force; calls wait until their time ends"
    if options.batch_timeout is None:
        return "batch_timeout is None"
    auto = ' ("auto")' if options.batch_timeout == "auto" else ""
    return "it was at one batch for more than batch_timeout of {:g} s" + auto


# What calls fail with when it is not known whose item was at fault. Our words, and not those of the
# model's exception: its text may quote the item, and goes only to the call whose item that is.


def not_blamed(failure: Failure, is_loss: bool) -> Failure:
    """For the calls of a batch that failed, if it is not known which of them it was.

    Args:
        failure: of the batch.
        is_loss: whether workers died of it, so many that the search was ended; otherwise the model
            raised, and nothing may be computed again.
    """
    kind, _, text = failure.text.partition(": ")
    if is_loss:
        lost = WorkerLost(
            f"{text}; after too many deaths of workers the search for the items at fault in this "
            "batch was ended, so this call may not be to blame"
        )
        return Failure(lost, failure.remote_traceback)
    return Failure(
        SharedBatchError(
            f"the model raised {kind} on a batch that this call shared with other calls, and the "
            "call at fault is not known; with isolate_errors=True and retry=True only that call "
            "fails. The log has the exception"
        )
    )


def of_shared_call(failure: Failure) -> Failure:
    """For a call that shared only some of its items with the one that failed."""
    kind = failure.text.partition(": ")[0]
    return Failure(
        SharedBatchError(
            f"a call that shared items with this one failed with {kind}, and with "
            "retry=False those items are not computed again"
        )
    )
