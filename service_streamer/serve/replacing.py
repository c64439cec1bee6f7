"""Models that come, go and are replaced in one web process while it serves.

    load      open its workers ──▶ wait until it answers ──▶ it takes the place of the old one
    retire    no new requests ──▶ those that are open are answered ──▶ its workers end

A model that cannot be loaded changes nothing: the old one goes on. So for a moment both are in
memory. Where there is no room for that, ``SIGHUP`` replaces the workers one at a time.

``ModelRepository`` changes the models of a service with one web process: by its file, and over
HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping
from concurrent.futures import CancelledError
from typing import Any

from ..errors import StreamerClosed, StreamerError
from .configuration import Configuration, NamedModel, changes, default_name
from .hosted_model import HostedModel, OpenedModel
from .http.background import start_task
from .http.models import Models
from .http.refusals import Refusal, stopping
from .http.service import Service

logger = logging.getLogger(__name__)


class Replacer:
    """Belongs to one event loop.

    Args:
        models: those that serve.
        hosted: the same, with their streamers; kept up to date.
    """

    def __init__(self, models: Models, hosted: list[HostedModel]) -> None:
        self._models = models
        self._hosted = hosted
        self._work: set[asyncio.Task[None]] = set()
        self._loading: dict[str, Callable[[Exception | None], None]] = {}  # each ends a wait

    async def load(self, name: str, open_: Callable[[], OpenedModel]) -> None:
        """Have a model serve, in the place of the one of its name, if there is one.

        Args:
            open_: begins to load it; it may block.

        Raises:
            Refusal: it cannot be loaded.
        """
        began = time.monotonic()
        settled: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()

        def settle(error: Exception | None = None) -> None:
            if not settled.done():
                settled.set_result(error)
            elif error is not None:
                logger.error("model %s is not served: %s", name, error)
            else:  # it serves already, since it was not waited for any longer
                self._models.on_change()

        self._loading[name] = settle
        logger.info("loading model %s", name)
        try:
            opened = await asyncio.to_thread(open_)
        except BaseException as error:
            del self._loading[name]
            if not isinstance(error, Exception):
                raise
            raise cannot_load(name, error) from error
        hosted = HostedModel(opened, settle, settle)
        try:
            hosted.start()
            failure = await self._settled(hosted, settled)
            if failure is not None:
                raise cannot_load(name, failure) from failure
            if self._models.first.is_draining:  # it would be ready again
                raise stopping()
        except BaseException:
            hosted.service.stop()
            self._later(asyncio.to_thread(hosted.close))
            raise
        finally:
            del self._loading[name]
        before = self._models.put(hosted.service)
        self._hosted.append(hosted)
        logger.info("model %s is loaded (%.1f s)", name, time.monotonic() - began)
        if before is not None:
            self._retire(before)

    def give_up(self, name: str) -> bool:
        """End the load of a model, which may hang; returns whether there was one."""
        settle = self._loading.get(name)
        if settle is not None:
            settle(given_up())
        return settle is not None

    async def _settled(
        self, hosted: HostedModel, settled: asyncio.Future[Exception | None]
    ) -> Exception | None:
        """Wait until a model answers, or never will; then returns why.

        For worker hosts only as long as a request does: they may never come, and no other change
        can be made meanwhile.
        """
        service = hosted.service
        patience = None if service.pool is not None else service.options.timeout
        await asyncio.wait((settled,), timeout=patience)
        if not settled.done():
            why = service.standing()[1]
            logger.warning("model %s serves before it has answered: %s", service.model, why)
            settled.set_result(None)
        return settled.result()

    def unload(self, service: Service) -> None:
        """Have a model serve no more. Raises Refusal: it is the last one."""
        if len(self._models) == 1:
            raise last_model(service.model)
        self._models.remove(service)
        logger.info("model %s is unloaded", service.model)
        self._retire(service)

    async def finished(self) -> None:
        """Wait until all that were retired have ended."""
        while self._work:
            await asyncio.wait(self._work)

    def _retire(self, service: Service) -> None:
        """End a model that gets no new requests, once those that are open are answered."""
        [hosted] = [each for each in self._hosted if each.service is service]

        async def retire() -> None:
            timeout = service.options.timeout + 1
            if not await service.drained(timeout):
                logger.warning("the old model %s has requests after %.0f s", service.model, timeout)
            service.stop()
            await service.cut_streams(stopping("the model was replaced"))
            await asyncio.to_thread(hosted.close)
            self._hosted.remove(hosted)

        self._later(retire())

    def _later(self, work: Coroutine[Any, Any, None]) -> None:
        task = start_task(work, "ending an old model failed")
        self._work.add(task)  # the loop alone would let it be collected
        task.add_done_callback(self._work.discard)


def restart_all(restarts: Iterable[tuple[str, Callable[[], None]]]) -> None:
    """Replace the workers of several models. Blocks.

    A model whose restart fails, or that is unloaded meanwhile, keeps no other one from it.

    Args:
        restarts: for each model its name, and what replaces its workers.

    Raises:
        StreamerError: all restarts have failed, this one last.
    """
    named = [*restarts]
    failures: list[tuple[str, StreamerError]] = []
    for name, restart in named:
        try:
            restart()
        except StreamerError as error:
            failures.append((name, error))
    if failures and len(failures) == len(named):
        raise failures[-1][1]
    for name, failure in failures:
        if not isinstance(failure, StreamerClosed):  # it was replaced, or unloaded
            logger.error("model %s: the restart failed; its workers go on: %s", name, failure)


def cannot_load(name: str, error: Exception) -> Refusal:
    """Log why a model cannot be loaded; returns the answer to who has asked for it."""
    logger.error("model %s cannot be loaded: %s", name, error)
    return not_loaded(f"model {name!r} cannot be loaded: {error}")


def given_up() -> Exception:
    """Why a load ends that somebody has given up."""
    return StreamerClosed("it was unloaded while it was being loaded")


def not_loaded(text: str) -> Refusal:
    return Refusal(422, text, param="model", code="model_not_loaded")


def last_model(name: str) -> Refusal:
    return Refusal(
        409,
        f"{name!r} is the last model of this service; stop the service instead",
        param="model",
        code="last_model",
    )


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
