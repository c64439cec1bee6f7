"""The client's side of a shared pool: sends calls, receives answers, and starts the next pool.

     caller threads                   this client's thread              the pool's process
     --------------                   --------------------              ------------------
                                      connect; if nobody listens:
                                      elect, start the process
     submit(call)                     say hello, send what is open
       pickle, note, write ───────────────────────────────────────────▶ engine
                                      read ◀─────────────────────────── answers
     ◀─────────────────────────────── reply.end, reply.put_part
       unpickle, in the caller's      the pool is gone: the same from
       thread again                   the start

No call is lost: it is kept until its answer has come. What is not about pools is in ``remote/``.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .. import __version__
from ..engine.backend import Lengths
from ..engine.build import Model, make_spec
from ..errors import (
    PredictTimeout,
    StreamerClosed,
    StreamerError,
    StreamerForked,
    WorkerStartTimeout,
)
from ..observe.metrics import BatchMetrics, StreamerStats, Summary, WorkerStats
from ..observe.record import ORDINARY, Call
from ..options.checks import Workers
from ..options.table import StreamerOptions
from ..remote.deliveries import Deliveries
from ..remote.open_calls import RemoteCall
from ..remote.remote_client import RemoteClient
from ..reporting import counted, quiet_log
from ..supervision.supervisor import Overlap
from ..workers.arena import Placed
from ..workers.codec import ByValue, Codec, encode_spec
from ..workers.memory_link import SharedMemory
from ..workers.process import ProcessTransport
from ..workers.protocol import Failure
from ..workers.starting import refuse_unguarded_main
from . import pool_protocol
from .client_loop import ClientLoop
from .directory import own_directory, paths_of, why_unsupported
from .fingerprint import fingerprint_of
from .pool_calls import PoolCall, PoolCalls, Question
from .pool_link import Connector
from .pool_process import main_module, open_log
from .pool_protocol import PROTOCOL, Hello, MakeTransport, PoolBoot, pack, times

log = quiet_log(__name__)

#: Instead of the seconds that a question may wait for the workers: the pool answers it at once.
_AT_ONCE = -1.0


class PoolClient(RemoteClient[PoolCalls]):
    """Accepts calls from any thread; the pool computes them; each is answered exactly once.

    Args:
        connector: finds the pool, or starts it.
        codec: of items and results; closed with the client.
        memory: what that writes to; closed, too.
        lengths: of items; None if each counts one.
        calls: its open ones.
        may_rerun: whether a call may be computed twice.
    """

    def __init__(
        self,
        connector: Connector,
        codec: Codec,
        memory: SharedMemory,
        lengths: Lengths | None,
        calls: PoolCalls,
        *,
        may_rerun: bool,
    ) -> None:
        deliveries = Deliveries(calls)
        super().__init__(pack, codec.decode_outputs, calls, deliveries, None)
        self._connector = connector
        self._codec = codec
        self._memory = memory
        self.lengths = lengths
        self._made_in = os.getpid()
        self._loop = calls.doorbell = ClientLoop(
            connector, calls, deliveries, self._is_done, may_rerun=may_rerun
        )

    # -- calls

    def _encode_items(self, items: Sequence[Any]) -> Any:
        return self._codec.encode_items(items)

    def decode(self, outputs: list[Any]) -> list[Any]:
        return self._codec.decode_outputs(outputs)

    def _encode_call(self, call: Call, number: int, payloads: Any, deadline: float) -> RemoteCall:
        lengths = call.lengths
        options = None if call.options is ORDINARY else (*call.options,)
        until = None if deadline == math.inf else deadline
        # They stay where they are until the answer has come: another pool may have to read them.
        leases = [each for each in payloads if type(each) is Placed]
        if leases:
            payloads = [each.wire if type(each) is Placed else each for each in payloads]
        size = sum(map(len, payloads))
        sent: tuple[Any, ...]
        if len(payloads) == 1 and options is lengths is None:
            sent = (number, payloads[0], until)
        else:
            sent = (number, payloads, until, options, lengths)
        return PoolCall(call, number, sent, size, deadline, leases)

    def submit(self, call: Call) -> None:
        if self.lengths is not None:
            call.lengths = self.lengths(call.payloads)
        super().submit(call)

    def _send_now(self, call: RemoteCall) -> None:
        """It was put when it was opened, and goes with the ring of the bell."""

    def _interrupted(self) -> None:
        link = self._loop.link
        if link is not None:
            link.cut()
        self._connector.wake()

    def late(self, timeout: float | None) -> StreamerError:
        return PredictTimeout(f"no result within {timeout} s ({self.describe()})")

    # -- state

    def check_process(self) -> None:
        if self._made_in != os.getpid():
            if self.is_closing:
                raise StreamerClosed("the streamer is closed")
            raise StreamerForked(
                f"this call was made in process {self._made_in}, and came to process "
                f"{os.getpid()} by fork: make it again here. uWSGI needs "
                "--py-call-osafterfork, or --lazy-apps"
            )

    @property
    def is_closing(self) -> bool:
        """Whether new calls are refused."""
        return self._calls.is_closing

    def describe(self) -> str:
        if self._made_in != os.getpid():
            return f"of process {self._made_in}"
        calls = counted(len(self._calls), "open call")
        return f"pool {self._connector.name!r} | {self._state()} | {calls} of this process"

    def _state(self) -> str:
        if self._is_ending.is_set():
            return "closed"
        if self._calls.is_closing:
            return "draining"
        if not self._threads:
            return "new"
        return "connecting" if self._loop.link is None else "connected"

    def when_workers_change(self, callback: Callable[[], None]) -> None:
        """As the engine's. Also called when the connection to the pool changes."""
        self._loop.on_workers = callback

    @property
    def pool_pid(self) -> int | None:
        """The process of the pool; None while there is no connection to one."""
        link = self._loop.link
        return None if link is None else link.pid

    # -- questions

    def _ask(self, method: str, *arguments: Any, patience: float | None = _AT_ONCE) -> Any:
        """The pool's answer.

        Args:
            patience: seconds that the pool may wait for its workers; None for any time.

        Raises:
            PredictTimeout: the pool did not answer in time.
            Exception: whatever the pool raised.
        """
        self._start()
        self.check_not_in_callback()
        if patience is None:
            longest = None
        elif patience == _AT_ONCE:
            longest = times.answer_at_start if self._loop.link is None else times.answer
        else:
            longest = patience + 1.0  # the pool watches the time, too, and knows more
        number = next(self._numbers)
        question = Question(number, method, arguments)
        with self._calls.lock:
            if self._calls.is_closing:  # by another thread: nobody would answer it
                raise StreamerClosed("the streamer is closed")
            self._calls.ask(number, question)
        self._loop.ring()
        try:
            value = question.reply.result(longest)
        except TimeoutError:
            raise PredictTimeout(
                f"the pool did not answer within {longest:g} s; is its process stopped? "
                f"({self.describe()})"
            ) from None
        finally:
            if not question.reply.done():
                with self._calls.lock:
                    self._calls.withdraw_question(number)
                self._loop.ring()
        if isinstance(value, Failure):
            raise value.exception()
        return value

    def stats(self) -> StreamerStats:
        stats: StreamerStats = self._ask("stats")
        return stats

    def metrics(self) -> BatchMetrics:
        metrics: BatchMetrics = self._ask("metrics")
        return metrics

    def workers(self) -> list[WorkerStats]:
        workers: list[WorkerStats] = self._ask("workers")
        return workers

    def summary(self) -> Summary:
        summary: Summary = self._ask("summary")
        return summary

    def model_description(self) -> Mapping[str, Any] | None:
        """As the engine's."""
        description: Mapping[str, Any] | None = self._ask("model_description")
        return description

    def wait_ready(self, timeout: float | None) -> None:
        """Block until every worker of the pool has loaded its model.

        Raises:
            WorkerStartError, WorkerLost, WorkerStartTimeout, StreamerClosed: as the engine's.
            PoolMismatch: the pool has another model, other options or other code.
        """
        try:
            self._ask("wait_ready", timeout, patience=timeout)
        except PredictTimeout as error:
            raise WorkerStartTimeout(str(error)) from None
        except WorkerStartTimeout:
            text = f"not every worker has loaded its model in {timeout} s"
            raise WorkerStartTimeout(text) from None

    def restart_workers(self, timeout: float | None, overlap: Overlap = "auto") -> None:
        """Replace the workers of the pool, for all clients."""
        try:
            self._ask("restart_workers", timeout, overlap, patience=timeout)
        except WorkerStartTimeout:
            text = f"not every worker has been replaced in {timeout} s; the restart goes on"
            raise WorkerStartTimeout(text) from None

    def scale(self, worker_num: Workers) -> None:
        """Have another number of workers, for all clients."""
        self._ask("scale", worker_num)

    def try_start_once(self) -> None:
        """As the engine's, of the pool that is there now."""
        self._ask("try_start_once")

    # -- the link

    def start(self) -> None:
        """Find or start the pool; does not wait for it. uWSGI's processes do so with a call."""
        if not _is_about_to_fork():
            self._start()

    def _start_threads(self) -> None:
        self._start_thread("pool client", self._loop.run)

    def _is_done(self) -> bool:
        if self._calls.is_abandoned and not self._is_ending.is_set() and not len(self._calls):
            self.close(drain=False, timeout=None)
        return self._is_ending.is_set()

    # -- the end

    def abandon(self) -> None:
        if self._made_in == os.getpid():
            super().abandon()
            self._connector.wake()

    def close(self, *, drain: bool, timeout: float | None) -> None:
        if self._made_in != os.getpid():  # a fork's copy
            return
        super().close(drain=drain, timeout=timeout)

    def _part(self) -> None:
        self._connector.wake()
        self._loop.fail_all(Failure(StreamerClosed("the streamer is closed")))
        for thread in self._threads.values():
            if thread is not threading.current_thread():
                thread.join()
        # What still looks at it, or writes there, can.
        self._connector.memory = None
        self._memory.close()
        self._codec.close()

    def _why_cut_off(self) -> str:
        return ": the pool could not be reached" if self._loop.link is None else ""


def _is_about_to_fork() -> bool:
    """Whether this is uWSGI's master, which has loaded the application for its workers.

    It forks without the hooks of ``os.register_at_fork`` that come before a fork. In the midst of
    an election its children would get the lock of the pool, and keep it.
    """
    uwsgi: Any = sys.modules.get("uwsgi")
    return uwsgi is not None and uwsgi.worker_id() == 0


#: A pool may have been scaled to so many workers, or to more if it began with more. Arbitrary.
_MAX_WORKERS = 16


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
    spec, lengths = make_spec(model, options)
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
    by_value = by_value or ByValue()
    pickled = encode_spec(spec, by_value)
    fingerprint = fingerprint_of(model, options, __version__)
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
    max_in_flight = 2 * options.batch_size * max(options.most_workers, _MAX_WORKERS)

    def client() -> PoolClient:
        hello = Hello(PROTOCOL, fingerprint, options.linger)
        memory = SharedMemory(options.shared_memory_limit)
        arena = memory.arena
        own_memory = None if arena is None else arena.memory
        return PoolClient(
            Connector(name, paths, hello, boot, own_memory, user, log),
            Codec(arena.put if arena else None, by_value),
            memory,
            lengths,
            PoolCalls(options.max_pending, max_in_flight),
            may_rerun=options.retry,
        )

    return client


def _check_log(path: str) -> None:
    """Raises ValueError: it cannot be written to."""
    try:
        os.close(open_log(path))
    except OSError as error:
        raise ValueError(f"pool_log: {path} cannot be written to: {error.strerror}") from None
