"""The models of one of several web processes: it follows the plans of its parent."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import signal
from collections.abc import Mapping
from multiprocessing.connection import Connection

from .hosted_model import HostedModel
from .http.background import start_task
from .http.models import Models
from .plans import Plan, PlanDone, Wish, WishAnswer
from .replacing import Replacer, last_model, not_loaded

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
