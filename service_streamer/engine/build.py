"""From options to an engine: its workers, and the lengths that its items have.

A length is a number in any unit, such as tokens, characters or pixels; the batcher learns what it
is worth in seconds. It is asked for in the web process, so nothing here builds or imports a model.
"""

from __future__ import annotations

import math
import pkgutil
import reprlib
from collections.abc import Callable, Sequence
from typing import Any

from ..batching.batcher import Batcher, CallFailures
from ..errors import PredictTimeout, SharedBatchError, WorkerLost
from ..managed_model import ManagedModel, find_length
from ..options import kinds
from ..options.checks import IMPORT_STRING
from ..options.table import StreamerOptions, WorkerOptions
from ..supervision.health import BatchBound
from ..workers.codec import Codec
from ..workers.model_spec import ModelSpec, check_model, check_preprocess, describe
from ..workers.process import ProcessTransport
from ..workers.protocol import Failure
from ..workers.starting import refuse_unguarded_main
from ..workers.transport import ThreadTransport, Transport
from .backend import Lengths
from .engine import Engine
from .fleet import Fleet

#: A function of an item, or where to import it: "package.module:function".
Length = Callable[[Any], float] | str

#: What an item may have. Longer is none: the model of costs squares n times this, and has to stay
#: finite.
_LONGEST = 1e15
_LENGTH = kinds.number(zero=True, most=_LONGEST)


def find_function(place: str) -> Callable[[Any], object]:
    """Import a function of an item, or a method of a model's that needs no model.

    Raises:
        TypeError, ValueError: it is none, or no place to import from.
        ImportError, AttributeError: there is none at that place.
    """
    if not IMPORT_STRING.fullmatch(place):
        raise ValueError(f'length must look like "package.module:function", not {place!r}')
    module, _, names = place.partition(":")
    outer, _, name = names.rpartition(".")
    owner: Any = pkgutil.resolve_name(f"{module}:{outer}")
    if isinstance(owner, type) and issubclass(owner, ManagedModel):
        return _of_class(owner, name)
    function: Any = getattr(owner, name)
    if not callable(function):
        raise TypeError(f"length={place!r} is not a function, but a {type(function).__name__}")
    return function  # type: ignore[no-any-return]


def _of_class(model: Any, name: str) -> Callable[[Any], object]:
    """A method of a model's, which is called without a model."""
    found = find_length(model, name)
    if found is None:
        raise TypeError(f"{describe(model)} has no method {name!r} of an item")
    if isinstance(found, (staticmethod, classmethod)) or not hasattr(type(found), "__get__"):
        return getattr(model, name)  # type: ignore[no-any-return]
    why = (
        f"{describe(model)}.{name} needs an instance, and the web process builds none; make it a "
        "@staticmethod (or a @classmethod), or pass length="
    )
    try:
        bare = model.__new__(model)
    except Exception as error:
        raise TypeError(why) from error
    method = getattr(bare, name)

    def length(item: Any) -> object:
        try:
            return method(item)
        except AttributeError as error:
            if error.obj is not bare:
                raise
            raise TypeError(f"{why} (it asked for self.{error.name})") from error

    return length


def _measuring(function: Callable[[Any], object], name: str, codec: Codec | None) -> Lengths:
    def lengths(items: Sequence[Any]) -> list[float]:
        found: list[float] = []
        for item in items:
            if codec is not None:
                try:
                    item = codec.decode(item)
                except (Exception, SystemExit):  # it fails in the worker, which says why
                    found.append(0)
                    continue
            number = function(item)
            # What nearly all return is looked at once.
            if (type(number) is int or type(number) is float) and 0 <= number <= _LONGEST:
                found.append(number)
                continue
            try:
                found.append(_LENGTH.convert(number))
            except (TypeError, ValueError) as error:
                raise type(error)(
                    f"{name} must return {_LENGTH.words}, and at most {_LONGEST:.0e}; for item "
                    f"{len(found)} of the call it returned {reprlib.repr(number)}"
                ) from None
        return found

    return lengths


#: A function of a batch, a ManagedModel subclass, or where to import either: "package.module:Name".
Model = Callable[[list[Any]], Any] | type[ManagedModel] | str


def build_engine(
    model: Model,
    options: StreamerOptions,
    make_transport: Callable[[ModelSpec, StreamerOptions], Transport] = ProcessTransport,
    *,
    codec: Codec | None = None,
    round_trip: float = 0.0,
) -> Engine:
    """An engine with its workers, which has not been started.

    Args:
        codec: what items come encoded with; None if they come as they are.
        round_trip: how long results take to callers, and their next calls back, seconds.

    Raises:
        TypeError, ValueError, ImportError, AttributeError: the model or ``length`` cannot be used.
    """
    spec, lengths = make_spec(model, options, codec)
    if make_transport is ProcessTransport:
        refuse_unguarded_main()
    return assemble(make_transport(spec, options), options, lengths, round_trip=round_trip)


def make_spec(
    model: Model, options: StreamerOptions, codec: Codec | None = None
) -> tuple[ModelSpec, Lengths | None]:
    """What workers load, and what says here how long items are, if that is known.

    A model that is named by a string stays unknown here.

    Raises:
        TypeError, ValueError: the model cannot be used, or not with these options.
        ImportError, AttributeError: ``length`` cannot be imported.
    """
    if not isinstance(model, str):
        check_model(model)
    elif not IMPORT_STRING.fullmatch(model):
        raise ValueError(f'an import string must look like "package.module:Name", not {model!r}')
    if not isinstance(model, (type, str)) and (
        options.model_init_args or options.model_init_kwargs
    ):
        raise TypeError("model_init_args and model_init_kwargs are for a ManagedModel class")
    if options.preprocess_workers:
        check_preprocess(model)
    place = options.length
    length = find_function(place) if isinstance(place, str) else place
    lengths = None
    if length is not None:
        lengths = _measuring(length, describe(place), codec)
    elif isinstance(model, type) and find_length(model) is not None:
        lengths = _measuring(_of_class(model, "length"), f"{describe(model)}.length", codec)
    spec = ModelSpec(
        model,
        options.model_init_args or (),
        options.model_init_kwargs,
        may_rerun=options.retry,
        codec=codec,
        has_lengths=lengths is not None,
        measure=length,
        preprocess_options=_preprocess_options(options),
        batch_size=options.batch_size,
        max_batch_cost=math.inf if options.max_batch_cost is None else options.max_batch_cost,
    )
    return spec, lengths


def assemble(
    transport: Transport,
    options: StreamerOptions,
    lengths: Lengths | None,
    *,
    round_trip: float = 0.0,
) -> Engine:
    """An engine around a transport; neither has been started."""
    is_local = isinstance(transport, ThreadTransport)
    bound, hang = _hang_rule(options, is_local=is_local)
    batcher = Batcher(
        options,
        batch_bound=bound,
        call_failures=CALL_FAILURES,
        has_lengths=lengths is not None,
        round_trip=round_trip,
    )
    least, most = options.worker_range
    return Engine(
        transport,
        Fleet(batcher, least, most, None if is_local else options.start_timeout),
        hang=hang,
        lengths=lengths,
    )


def _preprocess_options(options: StreamerOptions) -> WorkerOptions | None:
    """For the preprocess processes of each worker; None if there are none to be."""
    if not options.preprocess_workers:
        return None
    method = options.mp_start_method
    return WorkerOptions(
        worker_num=options.preprocess_workers,
        cuda_devices=("cpu",),
        cpu_threads=1,  # they are the threads
        mp_start_method="fork" if method == "fork" else "spawn",
        shared_memory_limit=options.shared_memory_limit,
    )


def _hang_rule(options: StreamerOptions, *, is_local: bool) -> tuple[BatchBound, str]:
    """How long a worker may be at one batch; and why it is ended then, or why it is not."""
    timeout = options.batch_timeout
    auto = ' ("auto")' if timeout == "auto" else ""
    why = "it was at one batch for more than batch_timeout of {:g} s" + auto
    if is_local:
        why = "a thread cannot be ended by force; calls wait until their time ends"
    elif timeout is None:
        why = "batch_timeout is None"
    if timeout is None or timeout == "auto":  # without a bound a slow batch is reported, too
        ends = not is_local and timeout is not None
        return BatchBound(options.worker_timeout, ends=ends), why
    return BatchBound(fixed=timeout), why


# What calls fail with when it is not known whose item was at fault. Our words, and not those of the
# model's exception: its text may quote the item, and goes only to the call whose item that is.


def _not_blamed(failure: Failure, is_loss: bool) -> Failure:
    """For the calls of a batch that failed, if it is not known which of them it was.

    Workers died of it, so many that the search was ended, or the model raised and nothing may be
    computed again.
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


CALL_FAILURES = CallFailures(
    expired=Failure(PredictTimeout("the call could not be computed in its time")),
    expired_suspect=Failure(
        PredictTimeout(
            "a worker died while it held this call, and the call's time ended before the item at "
            "fault was found; the log says what the worker died of"
        )
    ),
    shared=_not_blamed,
)
