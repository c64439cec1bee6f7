"""From a model and options to clients of a shared pool."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
from collections.abc import Callable

from .. import __version__
from ..engine.build import Model, check_wanted, make_lengths, make_spec
from ..options.table import StreamerOptions
from ..workers.child import refuse_unguarded_main
from ..workers.codec import Codec, encode_spec
from ..workers.memory.memory_link import SharedMemory
from ..workers.process import ProcessTransport
from ..workers.starting import ByValue, has_main
from . import pool_protocol
from .directory import own_directory, paths_of, why_unsupported
from .fingerprint import fingerprint_of
from .pool_calls import PoolBook
from .pool_client import PoolClient
from .pool_link import Connector
from .pool_process import main_module, open_log
from .pool_protocol import PROTOCOL, Hello, MakeTransport, PoolBoot

#: A pool may have been scaled to so many workers, or to more if it began with more. Arbitrary.
_MOST_WORKERS = 16


def pool_clients(
    name: str,
    model: Model,
    options: StreamerOptions,
    *,
    transport: MakeTransport = ProcessTransport,
    by_value: ByValue | None = None,
) -> Callable[[], PoolClient]:
    """Makes clients of the pool, all of which want the same: one for each process after a fork.

    Args:
        transport: what the pool reaches its workers by.
        by_value: sends what these cannot import, whose main module is not that of this process;
            None if it is.

    Raises:
        TypeError, ValueError, ImportError, AttributeError: the model, or an option, cannot be used
            here.
        PermissionError: the directory of the pools is not this user's own.
    """
    if missing := why_unsupported():
        raise ValueError(missing)
    check_wanted(model, options)
    refuse_unguarded_main()
    if options.mp_start_method != "spawn":
        raise ValueError(
            f'mp_start_method="{options.mp_start_method}" does not work with shared=: the workers '
            'are those of the pool\'s process, which has nothing of this one; use "spawn"'
        )
    prepare = pool_protocol.preparation
    directory = own_directory()
    paths = paths_of(name, directory)
    log: str | None = paths.log
    if options.pool_log is not None:
        log = os.path.abspath(options.pool_log)
        _check_log(log)
    elif prepare is not None:  # of a service, whose log has the lines of its pools
        log = None
    user = os.geteuid()  # a forked child may become another one
    lengths = make_lengths(options.length, model)
    has_this_main = by_value is None and has_main()
    by_value = by_value or ByValue()
    spec = make_spec(model, options, has_lengths=lengths is not None)
    cannot_load = spec.cannot_load
    pickled = encode_spec(spec, by_value)
    fingerprint = fingerprint_of(model, options, __version__)
    is_by_value = by_value.is_used or not has_this_main
    # Only what the pool itself needs: it imports nothing of the model's.
    for_pool = dataclasses.replace(
        options,
        length=None,
        model_init_args=None,
        model_init_kwargs=None,
        trace=None,
        deduplicate=False,
        cache_size=0,
        cache_ttl=None,
        # Of plain types: the pool could not import an enumeration of the application.
        cuda_devices=json.loads(json.dumps(options.cuda_devices)),
        tenant_weights=json.loads(json.dumps(dict(options.tenant_weights))),
    )

    def boot(lock: int, listener: int) -> PoolBoot:
        return PoolBoot(
            name=name,
            directory=directory,
            fingerprint=fingerprint,
            spec=pickled,
            options=for_pool,
            transport=transport,
            main=main_module(),
            has_lengths=lengths is not None,
            log_level=logging.getLogger("service_streamer").getEffectiveLevel(),
            log=log,
            prepare=prepare,
            times=pool_protocol.times,
            lock=lock,
            listener=listener,
        )

    # Each worker has a batch, and one that was sent ahead.
    most_in_flight = 2 * options.batch_size * max(options.most_workers, _MOST_WORKERS)

    def client() -> PoolClient:
        hello = Hello(PROTOCOL, fingerprint, options.linger)
        memory = SharedMemory(options.shared_memory_limit)
        arena = memory.arena
        own_memory = None if arena is None else arena.memory
        return PoolClient(
            Connector(name, paths, hello, boot, own_memory, user, log),
            Codec(arena, by_value if is_by_value else None, cannot_load),
            memory,
            lengths,
            PoolBook(options.max_pending, most_in_flight),
            may_rerun=options.retry,
        )

    return client


def _check_log(path: str) -> None:
    """Raises ValueError: it cannot be written to."""
    try:
        os.close(open_log(path))
    except OSError as error:
        raise ValueError(f"pool_log: {path} cannot be written to: {error.strerror}") from None
