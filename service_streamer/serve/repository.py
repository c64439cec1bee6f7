"""The models of a service with one web process: changed by its file, and over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import Mapping
from concurrent.futures import CancelledError

from .configuration import Configuration, NamedModel, changes, default_name
from .hosted_model import HostedModel
from .http.models import Models
from .http.refusals import Refusal
from .http.service import Service
from .replacing import Replacer, not_loaded, restart_all

logger = logging.getLogger(__name__)


class ModelRepository:
    """A ``Repository``. Belongs to the event loop of the web process.

    Args:
        models: those that serve.
        hosted: the same, with their streamers; kept up to date.
    """

    def __init__(
        self, models: Models, hosted: list[HostedModel], configuration: Configuration
    ) -> None:
        self._models = models
        self._hosted = hosted
        self._configuration = configuration
        self._replacer = Replacer(models, hosted)
        self._lock = asyncio.Lock()  # one change at a time
        # What those that serve were loaded with. A load that failed is thus tried again.
        self._loaded = {each.name: each.options for each in configuration.models}

    def names(self) -> Mapping[str, str]:
        states = {each.name: "unloaded" for each in self._configuration.models}
        return states | {each.model: each.standing()[0] for each in self._models}

    async def load(self, name: str) -> None:
        async with self._lock:
            try:
                await asyncio.to_thread(self._configuration.reread)
            except ValueError as error:
                raise not_loaded(str(error)) from None
            named = self._configuration.find(name)
            if named is None:
                raise self._models.unknown(name)
            await self._load(named)

    async def unload(self, name: str) -> None:
        if self._replacer.give_up(name):  # a load that hangs would hold up every other change
            return
        async with self._lock:
            self._replacer.unload(self._models.get(name))
            self._loaded.pop(name, None)

    def renew(self, loop: asyncio.AbstractEventLoop) -> None:
        """Do what the configuration says now, and replace all other workers one at a time.

        Blocks; not for the thread of the event loop. Raises as ``Streamer.restart_workers``.
        """
        try:
            kept = asyncio.run_coroutine_threadsafe(self._follow(), loop).result()
        except CancelledError:  # the service ends
            return
        restart_all((each.service.model, each.restart_workers) for each in kept)

    async def _follow(self) -> list[HostedModel]:
        """Follow the configuration; returns the models that stay, and have workers."""
        async with self._lock:
            try:
                await asyncio.to_thread(self._configuration.reread)
            except ValueError as error:
                logger.error("SIGHUP: the models stay as they are: %s", error)
                return []
            failed = {each.model for each in self._models if each.failure is not None}
            changed = changes(self._loaded, self._configuration.models, failed)
            for name in changed.loaded:
                named = self._configuration.find(name)
                assert named is not None
                with contextlib.suppress(Refusal):  # which was logged
                    await self._load(named)
            for name in changed.removed:
                service = self._models.find(name)
                if service is not None:
                    self._unload(service)
            self._arrange()
            kept = {*changed.kept}
            return [
                each for each in self._hosted if each.service.model in kept and each.has_workers
            ]

    def _unload(self, service: Service) -> None:
        try:
            self._replacer.unload(service)
            self._loaded.pop(service.model, None)
        except Refusal as error:
            logger.error("SIGHUP: %s", error)

    async def _load(self, named: NamedModel) -> None:
        configuration = self._configuration
        await self._replacer.load(named.name, functools.partial(configuration.open, named))
        self._arrange()
        self._loaded[named.name] = named.options

    def _arrange(self) -> None:
        models, names = self._models, self._configuration.names
        serving = [each.model for each in models]
        models.arrange(names, default_name(models.default_name, names, serving))
