"""The models of one of several web processes: it follows the plans of its parent.

The messages that they send each other stand here, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import signal
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import NamedTuple

from ..options.table import StreamerOptions
from .command_options import ServeOptions
from .configuration import NamedModel, default_name
from .hosted_model import HostedModel, OpenedModel
from .http.background import start_task
from .http.models import Models
from .opening import make_redis_streamer, pool_of_service, service_options, streamer_of
from .pool_owner import owned
from .replacing import Replacer, last_model, not_loaded


class PlannedModel(NamedTuple):
    """A model of the web processes.

    Attributes:
        pool: the model, and the options of its pool; None with an external Redis. They are made
            once: a model on the hub may have another commit a moment later. The pool's name is
            another one each time that the model is loaded.
    """

    named: NamedModel
    pool: tuple[str, StreamerOptions] | None

    @classmethod
    def of(cls, named: NamedModel) -> PlannedModel:
        """Raises as ``pool_options`` does."""
        if named.options.redis_broker is not None:
            return cls(named, None)
        target, pool = pool_of_service(named.options)
        return cls(named, (target, owned(pool)))

    def opened(self) -> OpenedModel:
        """In a web process. Raises as the streamer's constructor does."""
        options = service_options(self.named)
        if self.pool is None:
            return OpenedModel(make_redis_streamer(self.named.options), options)
        return OpenedModel(streamer_of(*self.pool, self.named.name), options)


class Plan(NamedTuple):
    """What web processes are made of.

    Attributes:
        options: of the service.
        models: those that serve, in order.
        configured: the names of these, and of others that could be loaded.
        are_named: whether requests that name a model must name one of these.
        default_name: the model of requests that name none.
        number: grows with each change.
        directory: of the pools' files, which is chosen once: with another, a web process that is
            restarted after XDG_RUNTIME_DIR was removed would start a second pool.
        rpc_address: where all of them answer gRPC; None for nowhere.
    """

    options: ServeOptions
    models: tuple[PlannedModel, ...]
    configured: tuple[str, ...]
    are_named: bool
    default_name: str
    number: int = 0
    directory: str | None = None
    rpc_address: tuple[str, int] | None = None

    @property
    def processes(self) -> int:
        """The number of web processes."""
        count = self.options.web_workers
        assert count != "auto"
        return count

    def find(self, name: str) -> PlannedModel | None:
        return next((each for each in self.models if each.named.name == name), None)

    def changed(self, models: dict[str, PlannedModel], configured: tuple[str, ...]) -> Plan:
        """The next plan, with these models. Pure."""
        places = {name: place for place, name in enumerate(configured)}
        ordered = sorted(models.values(), key=lambda each: places.get(each.named.name, len(places)))
        return self._replace(
            models=tuple(ordered),
            configured=configured,
            default_name=default_name(self.default_name, configured, models),
            number=self.number + 1,
        )


class PlanDone(NamedTuple):
    """From a web process: it serves by the plan of this number, and what was before has ended."""

    number: int


class Wish(NamedTuple):
    """From a web process: ``does`` "load" or "unload"."""

    ticket: int
    does: str
    name: str


class WishAnswer(NamedTuple):
    """To a web process.

    Attributes:
        kind: that of ``CannotChange``; empty if the wish was granted.
    """

    ticket: int
    kind: str = ""
    text: str = ""


logger = logging.getLogger(__name__)


class FollowedModels:
    """A ``Repository``. Belongs to the event loop of the web process.

    Args:
        models: those that serve.
        hosted: the same, with their streamers; kept up to date.
        plan: by which they were made.
        link: to the parent.
    """

    def __init__(
        self, models: Models, hosted: list[HostedModel], plan: Plan, link: Connection
    ) -> None:
        self._models = models
        self._plan = plan
        self._link = link
        self._replacer = Replacer(models, hosted)
        self._lock = asyncio.Lock()
        self._tickets = itertools.count()
        self._wishes: dict[int, asyncio.Future[WishAnswer]] = {}
        self._following: set[asyncio.Task[None]] = set()
        models.default_name = plan.default_name
        asyncio.get_running_loop().add_reader(link.fileno(), self._readable)
        os.set_blocking(link.fileno(), True)  # uvloop has changed that: half a message would raise

    def names(self) -> Mapping[str, str]:
        states = dict.fromkeys(self._plan.configured, "unloaded")
        return states | {each.model: each.standing()[0] for each in self._models}

    async def load(self, name: str) -> None:
        await self._wish("load", name)

    async def unload(self, name: str) -> None:
        await self._wish("unload", name)

    async def _wish(self, does: str, name: str) -> None:
        ticket = next(self._tickets)
        answer = self._wishes[ticket] = asyncio.get_running_loop().create_future()
        try:
            self._link.send(Wish(ticket, does, name))
            found = await answer
        except OSError:
            raise not_loaded("the service is stopping") from None
        finally:
            del self._wishes[ticket]
        match found.kind:
            case "unknown":
                raise self._models.unknown(name)
            case "last":
                raise last_model(name)
            case "failed":
                raise not_loaded(found.text)

    def _readable(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            message = self._link.recv()
        except (EOFError, OSError):  # the parent has ended, and so does this process
            loop.remove_reader(self._link.fileno())
            for ticket, wish in self._wishes.items():
                if not wish.done():
                    wish.set_result(WishAnswer(ticket, "failed", "the service is stopping"))
            return
        if isinstance(message, WishAnswer):
            answer = self._wishes.get(message.ticket)
            if answer is not None and not answer.done():
                answer.set_result(message)
        else:
            task = start_task(self._follow(message), "following a change of the models failed")
            self._following.add(task)  # the loop alone would let it be collected
            task.add_done_callback(self._following.discard)

    async def _follow(self, plan: Plan) -> None:
        async with self._lock:
            if plan.number > self._plan.number:
                try:
                    await self._change(plan)
                except Exception:
                    if self._models.first.is_draining:
                        return
                    # The parent starts another one, which serves by the plan.
                    logger.exception("this web process cannot serve by the new plan, and ends")
                    os.kill(os.getpid(), signal.SIGTERM)
                    return
            await self._replacer.finished()
            with contextlib.suppress(OSError):  # the parent has ended, and so does this process
                self._link.send(PlanDone(self._plan.number))

    async def _change(self, plan: Plan) -> None:
        for planned in plan.models:
            name = planned.named.name
            if planned != self._plan.find(name):
                await self._replacer.load(name, planned.opened)
        for service in [*self._models]:
            if plan.find(service.model) is None:
                self._replacer.unload(service)
        self._models.arrange(plan.configured, plan.default_name)
        self._plan = plan
