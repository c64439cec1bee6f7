"""A served model: its streamer, its description, its state, and its request metrics."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from collections.abc import Callable, Mapping
from typing import Any, TypeGuard

from ...base_streamer import BaseStreamer
from ...engine.backend import Mailbox
from ...errors import (
    BadMessage,
    BrokerError,
    InternalError,
    Overloaded,
    PoolMismatch,
    RemoteTraceback,
    StreamerBroken,
    StreamerClosed,
    StreamerError,
    WorkerStartError,
)
from ...observe.metrics import StreamerStats
from ...streamer import PoolStreamer
from .admission import Admission, ServiceOptions, make_budgets
from .background import start_task
from .exchange import Headers
from .keyring import ANYBODY, KeyHolder, Keyring
from .pool_view import PoolView
from .request_figures import RequestFigures, RequestMetrics, Siblings
from .streaming import EventStream

logger = logging.getLogger(__name__)

#: Seconds until an unreachable model is asked again for its description.
_ASK_AGAIN = 1.0

#: While requests are refused, so many results are sent until new requests are read. To send a batch
#: of 64 takes 0.6 ms, which a request would wait that is only to be refused. At other times that
#: would make batches smaller: who is answered first calls again before the others are answered.
_AT_ONCE = 16

#: Seconds without a refusal until that ends.
_CALM = 1.0

#: A model's description, see ``pipelines.PipelineModel``; empty for models without one.
Description = Mapping[str, Any]

#: After these errors the model never answers.
_ENDS = (PoolMismatch, StreamerBroken, StreamerClosed, WorkerStartError)

_RENEWING = "reading its new description failed"

_DESCRIBE: dict[str, Any] = {"do": "describe", "inputs": None, "parameters": {}}


def _is_ours(description: object) -> TypeGuard[Description]:
    """Whether it is the description of a model, as ``ManagedModel.describe`` of ours returns it."""
    return isinstance(description, dict) and "operations" in description


class Service:
    """State shared by the routes of one web process. Belongs to one event loop.

    Args:
        streamer: streamer of the model; its creator closes it.
        on_ready: called when the description is known.
        on_failure: called with the reason when it never will.

    Attributes:
        backend: the streamer's backend.
        pool: the workers; None if they are behind a broker.
        keyring: checks API keys; None to let everybody in.
        budgets: of all models' requests.
        description: the model's description; empty until it is known, or if it has none.
        is_draining: whether the service is about to end.
        is_retired: whether the model gets no new requests, since another one has taken its place.
        siblings: the service's other web processes; None if there are none.
        streams: those that are open.
    """

    def __init__(
        self,
        streamer: BaseStreamer,
        options: ServiceOptions,
        *,
        on_ready: Callable[[], None] = lambda: None,
        on_failure: Callable[[Exception], None] = lambda _: None,
    ) -> None:
        self.streamer = streamer
        self.keyring: Keyring | None = None
        self.budgets = make_budgets()
        self.backend = streamer.backend
        #: None if the workers are behind a broker.
        self.pool = PoolView(streamer) if isinstance(streamer, PoolStreamer) else None
        self.options = options
        self.description: Description = {}
        self.requests = RequestMetrics()
        self.admission = Admission(options)
        self.is_draining = self.is_retired = False
        self.siblings: Siblings | None = None
        self.streams: set[EventStream] = set()
        self._on_ready = on_ready
        self._on_failure = on_failure
        self._loop: tuple[asyncio.AbstractEventLoop, Mailbox] | None = None
        self._overloaded_at = 0.0
        self._is_known = False
        self._is_announced = False  # by the workers, and not asked for with a call
        self._mismatch: str | None = None  # settings of client and hosts differ
        self._failure: Exception | None = None
        self._obstacle = ""  # why the model did not answer
        self._ended = asyncio.Event()
        self._idle = asyncio.Event()
        self._asking: asyncio.Task[None] | None = None
        self._renewing: asyncio.Task[None] | None = None

    @property
    def loop(self) -> tuple[asyncio.AbstractEventLoop, Mailbox]:
        """The event loop that the service belongs to, and what gets the results in it."""
        if self._loop is None:
            loop = asyncio.get_running_loop()
            self._loop = loop, Mailbox(loop)
        return self._loop

    @property
    def model(self) -> str:
        """The model's name for users."""
        return self.options.model or self.description.get("model") or "model"

    def figures(self) -> RequestFigures:
        """Of its requests in this process."""
        return self.requests.figures(len(self.streams))

    def authorize(self, headers: Headers, scope: str | None) -> KeyHolder:
        """Who has sent a request, as ``Keyring.authorize``; anybody if no key is needed."""
        return ANYBODY if self.keyring is None else self.keyring.authorize(headers, scope)

    def overloaded(self) -> None:
        """The queue is full. From now on, refusals do not wait until a batch of results is sent."""
        loop, mailbox = self.loop
        self._overloaded_at = loop.time()
        if mailbox.at_once != _AT_ONCE:
            mailbox.at_once = _AT_ONCE
            loop.call_later(_CALM, self._calm_down)

    def _calm_down(self) -> None:
        loop, mailbox = self.loop
        left = self._overloaded_at + _CALM - loop.time()
        if left > 0:
            loop.call_later(left, self._calm_down)
        else:
            mailbox.at_once = sys.maxsize

    # -- state of the model

    def start(self) -> None:
        """Read the model's description, as soon as a worker has loaded it."""
        self._asking = start_task(self._ask(), f"model {self.model}: reading what it is failed")

    async def _ask(self) -> None:
        loop, backend = asyncio.get_running_loop(), self.backend
        changed = asyncio.Event()

        def workers_changed() -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(self._renew if self._is_announced else changed.set)

        backend.when_workers_change(workers_changed)
        while True:
            changed.clear()
            try:
                description = await self._described()
                if self.pool is not None:
                    self._obstacle = ""
                if description is None:
                    if not self._has_silent_hosts():
                        await changed.wait()
                        continue
                    [description] = await self.streamer.apredict([_DESCRIBE], timeout=None)
                else:
                    self._is_announced = True
            except Exception as error:
                is_models = isinstance(error.__cause__, RemoteTraceback)  # its own exception
                if self._is_for_owner(error):
                    if str(error) != self._obstacle and not isinstance(error, _ENDS):
                        logger.warning("the workers cannot be asked for the model: %s", error)
                    self._obstacle = str(error)
                    await self.pause(_ASK_AGAIN)
                    continue
                if isinstance(error, _ENDS) and not is_models:
                    self._failure = error
                    if not self.is_draining:
                        self._on_failure(error)
                    return
                if isinstance(error, (BrokerError, InternalError, Overloaded)) and not is_models:
                    if str(error) != self._obstacle:
                        logger.warning("the worker hosts do not answer: %s", error)
                    self._obstacle = str(error)
                    # It stays so until both sides have the same settings.
                    self._mismatch = str(error) if isinstance(error, BadMessage) else None
                    await self.pause(_ASK_AGAIN)
                    continue
                description = {}  # a model that does not know "describe"
            break
        self.description = description if _is_ours(description) else {}
        self._is_known = True
        self._on_ready()

    def _has_silent_hosts(self) -> bool:
        """Whether hosts have another secret, serializer or version: a call's error says which."""
        return self.pool is None and self._broker_standing()[1] > 0

    async def _described(self) -> Mapping[str, Any] | None:
        if self.pool is not None:
            return await self.pool.description()
        return self.backend.model_description()

    def _is_for_owner(self, error: Exception) -> bool:
        """Whether the parent of the web processes acts on an error.

        It ends the service if the model of their pool cannot be loaded. A pool that has refused
        this process serves the others.
        """
        if self.pool is None or not self.pool.is_shared or self.is_draining:
            return False
        return isinstance(error, StreamerError) and not isinstance(error, PoolMismatch)

    def _renew(self) -> None:
        """Take over the description that the workers announce now.

        After a restart over Redis that is some seconds later than ``refresh``.
        """
        if self.pool is not None and self.pool.is_shared:
            if not self.is_draining:
                self._renewing = start_task(self._take_over(), f"model {self.model}: {_RENEWING}")
            return
        with contextlib.suppress(StreamerError):  # none of them can be asked
            self._describe_as(self.backend.model_description())

    async def _take_over(self) -> None:
        with contextlib.suppress(StreamerError):
            self._describe_as(await self._described())

    def _describe_as(self, description: Mapping[str, Any] | None) -> None:
        if _is_ours(description):
            self.description = description

    def refresh(self) -> None:
        """Read the description again: the workers may have loaded another model."""
        if self._is_known and not self.is_draining:
            self._asking = start_task(self._ask_again(), f"model {self.model}: {_RENEWING}")

    async def _ask_again(self) -> None:
        try:
            description = await self._described()
            if description is None:
                timeout = self.options.timeout
                [description] = await self.streamer.apredict([_DESCRIBE], timeout=timeout)
        except Exception:  # no description, or none now
            return
        if _is_ours(description):
            self.description = description

    def stop(self) -> None:
        """Refuse new requests from now on."""
        self.is_draining = True
        self._ended.set()
        for task in (self._asking, self._renewing):
            if task is not None:
                task.cancel()

    def fail(self, error: Exception) -> None:
        """Its streamer computes nothing any more; others' models go on."""
        self._failure = error
        if self._asking is not None:
            self._asking.cancel()

    @property
    def failure(self) -> Exception | None:
        """Why the model never answers again; None if it may."""
        return self._failure

    async def drained(self, timeout: float) -> bool:
        """Wait until no request is open; returns false after ``timeout``.

        After ``stop``, or after the model is retired.
        """
        if not self.requests.open:
            return True
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), timeout)
        return not self.requests.open

    async def cut_streams(self, why: Exception) -> None:
        """End all open streams with an error, when the time to drain is over."""
        for stream in [*self.streams]:
            await stream.cut(why)

    def request_over(self) -> None:
        """Count a request as no longer open."""
        self.requests.open -= 1
        if not self.requests.open and (self.is_draining or self.is_retired):
            self._idle.set()

    async def look(self) -> tuple[str, str]:
        """As ``standing``, of a shared pool as it is now."""
        if self.pool is not None:
            await self.pool.look()
        return self.standing()

    async def renew(self) -> None:
        """Have all figures of a shared pool as they are now."""
        if self.pool is not None:
            await self.pool.renew()

    def standing(self) -> tuple[str, str]:
        """ "ready", "starting", "failing", "draining" or "broken", and a sentence about it.

        Of a shared pool as it was when it was looked at last.
        """
        if self.is_draining:
            return "draining", "the service is stopping"
        if self._failure is not None:
            return "broken", self._with_cause("the model is not running", self._failure)
        if not self._is_known:
            if self._mismatch is not None:
                return "failing", self._mismatch
            return "starting", self._why_unknown()
        if self.pool is not None:
            return _standing(self.pool.stats())
        state, hosts = self._broker_standing()
        if state != "connected":
            return "starting", "Redis cannot be reached"
        if not hosts:
            return "starting", "there is no worker host"
        return "ready", "the model answers"

    def _why_unknown(self) -> str:
        if self.pool is not None:
            if self._obstacle:
                return self._with_cause("the workers cannot be asked for the model", self._obstacle)
            return "the model is loading"
        state, hosts = self._broker_standing()
        if state == "disconnected":
            return "Redis cannot be reached"
        if self._obstacle:
            return self._with_cause("the worker hosts do not answer", self._obstacle)
        if not hosts:
            return "there is no worker host"
        are = "worker host has" if hosts == 1 else "worker hosts have"
        return (
            f"{hosts} {are} not answered yet: the model is loading, or their --secret differs "
            "from this service's"
        )

    def _with_cause(self, text: str, cause: object) -> str:
        """Anybody may read it, and the exception of a model that cannot be loaded may say a lot."""
        return f"{text}: {cause}" if self.options.debug else f"{text}; the service's log says why"

    def _broker_standing(self) -> tuple[str, int]:
        stats: Any = self.streamer.stats()  # type: ignore[attr-defined]
        return stats.state, stats.hosts or 0

    @property
    def has_steps(self) -> bool:
        """Whether the model is known to be one of steps: its description says so."""
        known = None if self.pool is None else self.pool.has_steps
        return bool(self.description.get("steps")) if known is None else known

    def offers(self, does: str) -> bool:
        """Whether the model supports an operation."""
        return does in self.description.get("operations", ("predict",))

    async def pause(self, seconds: float) -> None:
        """Sleep, at most until the service drains."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._ended.wait(), seconds)

    @property
    def is_known(self) -> bool:
        """Whether the model has been ready once; requests are accepted from then on."""
        return self._is_known


def _standing(stats: StreamerStats | None) -> tuple[str, str]:
    """Of a service whose workers stand so; None if their pool does not answer."""
    if stats is None:
        return "starting", "the process of the workers does not answer; a dead one is replaced"
    if stats.state in ("broken", "closed"):
        return "broken", (
            "the model's processes died, and new ones could not be started; the service "
            "retries at least once a minute"
        )
    if not stats.workers["idle"] + stats.workers["busy"]:
        return "starting", "no worker is ready; a worker is being restarted"
    if stats.trouble is not None:
        return "failing", stats.trouble
    return "ready", "the model answers"
