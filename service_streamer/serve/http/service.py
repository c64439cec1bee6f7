"""A model that is served: its streamer, what it says of itself, and whether it can be asked now."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from typing import Any

from ...errors import (
    BadMessage,
    BrokerError,
    Overloaded,
    RemoteTraceback,
    StreamerBroken,
    StreamerClosed,
    WorkerStartError,
)
from ...streamer import BaseStreamer, PoolStreamer
from .admission import Admission
from .operations import Description
from .request_counts import RequestMetrics
from .siblings import Siblings
from .web_options import ServiceOptions

__all__ = ["Service"]

logger = logging.getLogger(__name__)

#: Before a model that could not be asked is asked again, seconds.
_ASK_AGAIN = 1.0

#: After these a model never says what it is.
_ENDS = (StreamerBroken, StreamerClosed, WorkerStartError)

_DESCRIBE: dict[str, Any] = {"do": "describe", "inputs": None, "parameters": {}}


def _is_ours(description: object) -> bool:
    """Whether it is the description of a model, as ``ManagedModel.describe`` of ours returns it."""
    return isinstance(description, dict) and "operations" in description


class Service:
    """What the routes of one web process share. Of one event loop.

    Args:
        streamer: over the model; owned and closed by whoever made it.
        on_ready: called when the model has said what it is.
        on_failure: called when it never will, with the reason.

    Attributes:
        backend: what the streamer hands its calls to.
        description: what the model says of itself; empty before, and if it says nothing.
        is_draining: whether the service is about to end.
        siblings: the other web processes of the service; None if there are none.
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
        self.backend = streamer.backend
        self.options = options
        self.description: Description = {}
        self.requests = RequestMetrics()
        self.admission = Admission(options)
        self.started_at = time.monotonic()
        self.is_draining = False
        self.siblings: Siblings | None = None
        self._on_ready = on_ready
        self._on_failure = on_failure
        self._is_known = False
        self._misfit: str | None = None  # why the two sides of a Redis cannot read each other
        self._failure: Exception | None = None
        self._obstacle = ""  # why the model could not be asked
        self._ended = asyncio.Event()
        self._idle = asyncio.Event()
        self._asking: asyncio.Task[None] | None = None

    @property
    def model(self) -> str:
        """Its name, for users."""
        return self.options.model or self.description.get("model") or "model"

    # -- whether it can be asked

    def start(self) -> None:
        """Learn what the model is, as soon as a worker has loaded it."""
        self._asking = asyncio.create_task(self._ask())

    async def _ask(self) -> None:
        loop, backend = asyncio.get_running_loop(), self.backend
        changed = asyncio.Event()

        def workers_changed() -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(changed.set)

        backend.when_workers_change(workers_changed)
        while True:
            changed.clear()
            try:
                description = backend.model_description()
                if description is None:
                    if not self._has_silent_hosts():
                        await changed.wait()
                        continue
                    [description] = await self.streamer.apredict([_DESCRIBE], timeout=None)
            except Exception as error:
                is_models = isinstance(error.__cause__, RemoteTraceback)  # which may raise anything
                if isinstance(error, _ENDS) and not is_models:
                    self._failure = error
                    if not self.is_draining:
                        self._on_failure(error)
                    return
                if isinstance(error, (BrokerError, Overloaded)) and not is_models:
                    self._obstacle = str(error)
                    # Until somebody sets both sides up alike.
                    self._misfit = str(error) if isinstance(error, BadMessage) else None
                    await self.pause(_ASK_AGAIN)
                    continue
                description = {}  # a model on a worker host that does not know this question
            break
        self.description = description if _is_ours(description) else {}
        self._is_known = True
        self._on_ready()

    def _has_silent_hosts(self) -> bool:
        """Whether there are worker hosts, and none announces its model in a way that we can read.

        They have another secret or serializer, and what they answer to a call says so; or they are
        of an earlier version, which tells of its model when it is asked by a call.
        """
        return not isinstance(self.streamer, PoolStreamer) and self._broker_standing()[1] > 0

    def refresh(self) -> None:
        """Learn again what the model is: its workers may have loaded another one."""
        if self._is_known and not self.is_draining:
            self._asking = asyncio.create_task(self._ask_again())

    async def _ask_again(self) -> None:
        try:
            description = self.backend.model_description()
            if description is None:
                timeout = self.options.timeout
                [description] = await self.streamer.apredict([_DESCRIBE], timeout=timeout)
        except Exception:  # it says nothing of itself, or nothing now
            return
        if _is_ours(description):
            self.description = description

    def stop(self) -> None:
        """Nobody is to be served any more."""
        self.is_draining = True
        self._ended.set()
        if self._asking is not None:
            self._asking.cancel()

    async def drained(self, timeout: float) -> bool:
        """Wait until no request is open, after ``stop``; whether that was so in time."""
        if not self.requests.open:
            return True
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), timeout)
        return not self.requests.open

    def request_over(self) -> None:
        """One that was open is not any more."""
        self.requests.open -= 1
        if self.is_draining and not self.requests.open:
            self._idle.set()

    def standing(self) -> tuple[str, str]:
        """ "ready", "starting", "failing", "draining" or "broken", and a sentence about it."""
        if self.is_draining:
            return "draining", "the service is stopping"
        if self._failure is not None:
            return "broken", f"the model is not running: {self._failure}"
        if not self._is_known:
            if self._misfit is not None:
                return "failing", self._misfit
            return "starting", self._why_unknown()
        streamer = self.streamer
        if isinstance(streamer, PoolStreamer):
            stats = streamer.stats()
            if stats.state in ("broken", "closed"):
                return "broken", (
                    "the model's processes died, and new ones could not be started; starting them "
                    "is tried again at least once a minute"
                )
            if not stats.workers["idle"] + stats.workers["busy"]:
                return "starting", "no worker is ready; one is being started again"
            if stats.trouble is not None:
                return "failing", stats.trouble
        else:
            state, hosts = self._broker_standing()
            if state != "connected":
                return "starting", "Redis cannot be reached"
            host = self._own_host()
            if host is not None and host[0] != "ready":
                return host
            if host is None and not hosts:  # of our own we hear sooner than Redis counts
                return "starting", "no worker host is there"
        return "ready", "the model answers"

    def _why_unknown(self) -> str:
        if isinstance(self.streamer, PoolStreamer):
            return "the model is loading"
        state, hosts = self._broker_standing()
        if state == "disconnected":
            return "Redis cannot be reached"
        host = self._own_host()
        if host is not None and host[0] != "ready":
            return host[1]
        if self._obstacle:
            return f"the worker hosts do not answer: {self._obstacle}"
        if not hosts:
            return "no worker host is there"
        are = "worker host is" if hosts == 1 else "worker hosts are"
        return (
            f"{hosts} {are} there, and none has answered: either the model is loading, or their "
            "--secret differs from that of this service"
        )

    def _own_host(self) -> tuple[str, str] | None:
        """How the worker host that this service has started stands, if there is one."""
        return None if self.siblings is None else self.siblings.host()

    def _broker_standing(self) -> tuple[str, int]:
        stats: Any = self.streamer.stats()  # type: ignore[attr-defined]
        return stats.state, stats.hosts or 0

    def offers(self, does: str) -> bool:
        """Whether the model can do what an operation needs."""
        return does in self.description.get("operations", ("predict",))

    async def pause(self, seconds: float) -> None:
        """Until so much time has passed, or the service drains."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._ended.wait(), seconds)

    @property
    def is_known(self) -> bool:
        """Whether the model has been ready once: from then on requests are accepted."""
        return self._is_known
