"""What is asked of Ray. The only module that imports it.

Nothing here waits for an answer: what an actor returns comes to a function, which Ray calls in a
thread of its own.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import ray as _ray
import ray.exceptions as _errors  # which a mere folder of the name ray has not

from ..options.table import ResourceOptions
from .actor import RayWorker
from .addresses import is_same, last_started, look_for
from .leaving import when_exiting, when_left
from .losses import FULL, Verdict, judge
from .placing import Node
from .times import times

ray: Any = _ray  # whose types are of no use here: options are made at run time

#: What Ray raises if its token is refused; versions without tokens raise none.
_REFUSED: Any = getattr(_errors, "AuthenticationError", ())

#: Calls of an actor that compute at the same time: so many batches are under way at the most.
_BATCHES = 16

#: Calls that may wait in it for something else: ``watch``, ``reports``, and those that do not.
_GROUPS = {"control": 6, "intake": 1}

#: What comes of a call: its result, or what was raised instead.
Done = Callable[[Any, BaseException | None], None]


class LeftCluster(RuntimeError):
    """This process has left its cluster, as by ``ray.shutdown``, and workers are gone with that."""

    def __init__(self) -> None:
        super().__init__(
            "this process is not connected to its Ray cluster any more: build a new RayStreamer "
            "after ray.shutdown()"
        )


class UnusableCluster(RuntimeError):
    """The cluster is there, but cannot be used from here, as that of another version of Ray."""


class NotSent(Exception):
    """Ray has no room for a call, which has not left this process. The cause is Ray's error."""


class Cluster:
    """The connection of this process to Ray. Any thread.

    Args:
        address: of the cluster, as for ``ray.init``; None for the one that this process is
            connected to, or else the one that runs here, or else a new one on this machine.
        runtime_env: what is to be there before a worker starts; as for ``ray.init``.

    Raises:
        ConnectionError: there is none at this address, or it refuses the token.
        UnusableCluster: this process is connected to another one, or as a client; or it has another
            version of Ray or Python.
        ValueError: it is no address.
    """

    def __init__(self, address: str | None, runtime_env: Mapping[str, Any] | None = None) -> None:
        _refuse_client(address)
        self._runtime_env = None if runtime_env is None else {**runtime_env}
        if not ray.is_initialized():
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
            _look_for(address)
            # Of the whole process: for a single actor Ray would take no folder of this machine.
            with _own_sigterm():
                try:
                    ray.init(address=address, runtime_env=self._runtime_env)
                except _REFUSED as error:  # whose text is told once
                    raise ConnectionError(str(error)) from None
                except RuntimeError as error:
                    raise UnusableCluster(str(error)) from None
            self._runtime_env = None
        elif address is not None and not _is_the_same(address):
            raise UnusableCluster(
                f"this process is connected to another Ray cluster than {address!r}; leave address "
                "out to use that one, or call ray.shutdown() first"
            )
        self._session = _session()

    def workers(self, request: ResourceOptions) -> Callable[[Any, Any], Actor]:
        """How to ask for an actor, which is there when Ray has found a place for it.

        Args:
            request: what each of them asks for.

        Returns:
            A function of the boot and the spec of a worker. It blocks while the head of the cluster
            does not answer, or files of the runtime_env are stored there. It raises LeftCluster
            when this process has left the cluster, and whatever Ray raises.

        Raises:
            Exception: Ray refuses what is asked for.
        """
        options: dict[str, Any] = {
            "num_cpus": request.num_cpus,
            "num_gpus": request.num_gpus,
            "resources": {**(request.resources or {})} or None,
            # Retries are the engine's: Ray would compute again what has killed the actor.
            "max_restarts": 0,
            "max_task_retries": 0,
            "max_concurrency": _BATCHES,
        }
        if self._runtime_env is not None:
            options["runtime_env"] = self._runtime_env
        if request.scheduling_strategy is not None:
            options["scheduling_strategy"] = request.scheduling_strategy
        remote: Any = ray.remote(concurrency_groups=_GROUPS, **options)(RayWorker)

        def start(boot: Any, spec: Any) -> Actor:
            self.check()
            return Actor(remote.remote(boot, spec))

        return start

    def put(self, value: bytes) -> Any:
        """Store a value once for all actors that get it."""
        self.check()
        return ray.put(value)

    def check(self) -> None:
        """Raises LeftCluster: this process is not connected any more."""
        if not ray.is_initialized() or _session() != self._session:
            raise LeftCluster

    def when_left(self, then: Callable[[], None]) -> Callable[[], None]:
        """See ``leaving.when_left``."""
        return when_left(then)

    def when_exiting(self, then: Callable[[], None]) -> Callable[[], None]:
        """See ``leaving.when_exiting``."""
        return when_exiting(then)

    def nodes(self) -> tuple[list[Node], dict[str, float]]:
        """The nodes that are alive, and what is free of all of them together. Blocks.

        Raises:
            Exception: the cluster cannot be asked.
        """
        nodes = [
            Node(each["NodeManagerHostname"], dict(each["Resources"]))
            for each in ray.nodes()
            if each["Alive"]
        ]
        return nodes, ray.available_resources()


class Actor:
    """One actor. Any thread."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    def call(self, done: Done, method: str, *arguments: Any, group: str = "") -> None:
        """Call a method. Whatever becomes of that, ``done`` is called once, in any thread.

        It gets NotSent, if Ray had no room for the call.
        """
        try:
            if not ray.is_initialized():  # or the call would connect this process again
                raise LeftCluster
            function = getattr(self._handle, method)
            if group:
                function = function.options(concurrency_group=group)
            future = function.remote(*arguments).future()
        except Exception as error:
            done(None, _not_sent(error))
            return
        future.add_done_callback(lambda future: _tell(done, future))

    def kill(self, *, is_made: bool) -> bool:
        """End it by force, if it is there. Does not block, as Ray does if its head is away.

        Args:
            is_made: whether it has answered a call. Ray 2.60 may lose the CPUs and GPUs of an actor
                for ever if it is killed in the moment in which it gets them. So another one is
                killed when it is there, or after ten seconds.

        Returns:
            Whether Ray is asked to: false if no thread can be started, as at exit in Python 3.12.
        """
        try:
            threading.Thread(
                target=self._end,
                args=(is_made,),
                name="service_streamer Ray kill",
                daemon=True,
            ).start()
        except RuntimeError:
            return False
        return True

    def _end(self, is_made: bool) -> None:
        if not is_made:
            made = threading.Event()
            self.call(lambda *_: made.set(), "__ray_ready__")
            made.wait(times.making)
        with contextlib.suppress(Exception):  # it has gone, or this process's connection
            if ray.is_initialized():
                ray.kill(self._handle, no_restart=True)


def _tell(done: Done, future: Any) -> None:
    error = future.exception()
    done(None if error is not None else future.result(), error)


def _not_sent(error: Exception) -> Exception:
    """What the caller is told of an error that was raised when a call was to be sent."""
    full = FULL.get(type(error).__name__)
    if full is None:
        return error
    refusal = NotSent(full)
    refusal.__cause__ = error.with_traceback(None)
    return refusal


@contextlib.contextmanager
def _own_sigterm() -> Iterator[None]:
    """What the program does on SIGTERM stays: ``ray.init`` replaces it in the main thread."""
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and handler not in (None, signal.SIG_DFL):
            signal.signal(signal.SIGTERM, handler)


def _session() -> str:
    return str(ray.get_runtime_context().get_job_id())


def _refuse_client(address: str | None) -> None:
    """Raises UnusableCluster: over Ray Client each call would pass through one more process."""
    given = _given(address)
    is_connected = ray.is_initialized()
    if _client_is_connected() or (not is_connected and (given or "").startswith("ray://")):
        raise UnusableCluster(
            "RayStreamer does not work over Ray Client (ray://); run this program on a node of the "
            'cluster, with address="auto" or the address of its head, such as "10.0.0.1:6379"'
        )


def _given(address: str | None) -> str | None:
    """The address that was given, or that is given in the environment in its place."""
    return os.environ.get("RAY_ADDRESS") or address if address in (None, "auto") else address


def _client_is_connected() -> bool:
    return bool(ray.util.client.ray.is_connected())


def _look_for(address: str | None) -> None:
    """Raises ConnectionError: nothing answers where Ray would connect to."""
    given = _given(address)
    if given not in (None, "auto"):
        look_for(given)
    elif given == "auto" and len(ray._private.services.find_gcs_addresses()) == 1:
        return  # it runs here, and Ray takes it
    elif (last := last_started()) is not None:
        look_for(
            last[0],
            advice=f"it was the last one that ray start has started here. If it has ended, "
            f"call ray stop or delete {last[1]}; for another one, give its address",
        )


def _is_the_same(address: str) -> bool:
    return address in ("auto", "local") or is_same(address, _connected_address())


def _connected_address() -> str:
    return str(ray.get_runtime_context().gcs_address)


def connected_address() -> str | None:
    """The address of the cluster that this process is connected to; None if it is to none.

    Raises:
        UnusableCluster: it is connected as a client.
    """
    _refuse_client(None)
    return _connected_address() if ray.is_initialized() else None


def verdict(error: BaseException) -> Verdict:
    """What an error of a call means for its actor."""
    return judge(
        type(error).__name__,
        str(error),
        failed_to_start=getattr(error, "actor_init_failed", False),
        preempted=getattr(error, "preempted", False),
    )
