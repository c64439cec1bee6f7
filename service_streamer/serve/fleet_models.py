"""The models of several web processes, in their parent: which there are, and the pools of each.

    load      start the new pool ──▶ its workers are ready ──▶ send the plan to all web processes
              ──▶ each serves by it, and has answered what was open ──▶ end the old pool

Web processes hold a connection to their parent. Over it come plans, and go the wishes of their
users: to load a model, or to unload it.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Self

from ..engine.operator_signals import SignalSocket
from ..errors import StreamerClosed, StreamerError
from .command_options import ServeOptions
from .configuration import Configuration, changes
from .followed_models import Plan, PlanDone, PlannedModel, Wish, WishAnswer
from .launching import waits_for
from .pool_owner import PoolOwner
from .replacing import given_up, restart_all

logger = logging.getLogger(__name__)

#: Seconds that web processes get to follow a change, beyond twice the longest timeout of a request:
#: so long they wait for a worker host, and for requests of the old model.
_GRACE = 10.0


class CannotChange(Exception):
    """A model cannot be loaded or unloaded: why, for who has asked for it.

    Attributes:
        kind: "unknown", "last" or "failed".
    """

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


class ProcessLink:
    """The connection to a web process. A thread sends: the process may hang, and read nothing."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self._messages: queue.SimpleQueue[Any] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="web process link", daemon=True).start()

    def send(self, message: Any) -> None:
        """Send it soon. Does not block."""
        self._messages.put(message)

    def close(self) -> None:
        """The process has ended."""
        self._messages.put(None)

    def _run(self) -> None:
        with self.connection:  # open until ``close``: the main thread waits for what comes by it
            while (message := self._messages.get()) is not None:
                with contextlib.suppress(OSError):  # the process has died: its parent will notice
                    self.connection.send(message)


class FleetModels:
    """Thread-safe, but for the ``with`` block and ``heard``: these are for the main thread.

    Args:
        options: of the service.
        rpc_address: where the web processes answer gRPC; None for nowhere.
        wakeup: rung when a pool serves no more.

    Attributes:
        plan: the current one.
    """

    def __init__(
        self,
        configuration: Configuration,
        options: ServeOptions,
        rpc_address: tuple[str, int] | None,
        wakeup: SignalSocket,
    ) -> None:
        self._configuration = configuration
        self._wakeup = wakeup
        self._changing = threading.Lock()  # one change at a time
        self._changed = threading.Condition()  # guards what follows
        self._links: dict[int, ProcessLink] = {}
        self._done: dict[int, int] = {}  # the plans that web processes serve by
        self._owners: dict[str, PoolOwner] = {}
        self._passing: list[PoolOwner] = []  # of models that are being loaded, or replaced
        self._is_over = False
        self._loading: tuple[str, PoolOwner | None] = ("", None)  # the owner comes later
        self._is_given_up = False  # that load
        names = tuple(configuration.names)
        are_named = configuration.are_named
        self.plan = Plan(options, (), names, are_named, names[0], rpc_address=rpc_address)

    def __enter__(self) -> Self:
        """Raises as ``pool_options`` does."""
        try:
            models = []
            for named in self._configuration.models:
                planned = PlannedModel.of(named)
                models.append(planned)
                if planned.pool is not None:
                    self._owners[named.name] = self._owner(planned)
        except BaseException:
            self._close()
            raise
        directory = next((each.directory for each in self._owners.values()), None)
        self.plan = self.plan._replace(models=tuple(models), directory=directory)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._close()

    def _close(self) -> None:
        with self._changed:
            self._is_over = True
            self._changed.notify_all()
            owners = [*self._owners.values(), *self._passing]
        for owner in owners:
            owner.__exit__()

    def _owner(self, planned: PlannedModel) -> PoolOwner:
        assert planned.pool is not None
        name = planned.named.name
        owner = PoolOwner(*planned.pool, waits_for([planned.named]), self._wakeup, model=name)
        return owner.__enter__()

    @property
    def has_pools(self) -> bool:
        """Whether any model has workers here."""
        return bool(self._owners)

    @property
    def may_change(self) -> bool:
        """Whether ``renew`` has something to do."""
        return self.has_pools or self._configuration.read is not None

    @property
    def failure(self) -> Exception | None:
        """Why a pool serves no more."""
        failures = (each.failure for each in [*self._owners.values()])
        return next((each for each in failures if each is not None), None)

    # -- web processes

    def attach(self, number: int, link: Connection, known: int) -> None:
        """A web process has been started, with the plan ``known``."""
        with self._changed:
            self._links[number], self._done[number] = ProcessLink(link), known
            self._links[number].send(self.plan)

    def detach(self, number: int) -> None:
        """A web process has ended."""
        with self._changed:
            link = self._links.pop(number, None)
            self._done.pop(number, None)
            self._changed.notify_all()
        if link is not None:
            link.close()

    @property
    def links(self) -> dict[Connection, int]:
        """The connections to web processes, which may have messages for ``heard``."""
        return {link.connection: number for number, link in [*self._links.items()]}

    def heard(self, number: int) -> None:
        """Read what a web process has sent."""
        link = self._links[number]
        try:
            message = link.connection.recv()
        except (EOFError, OSError):  # it ends
            self.detach(number)
            return
        if isinstance(message, PlanDone):
            with self._changed:
                self._done[number] = message.number
                self._changed.notify_all()
            return
        # Not in this thread, which has to see to signals and deaths.
        threading.Thread(
            target=self._grant, args=(link, message), name="model change", daemon=True
        ).start()

    # -- changes; each blocks, and is for a thread of its own

    def _grant(self, link: ProcessLink, wish: Wish) -> None:
        answer = WishAnswer(wish.ticket)
        try:
            if wish.does == "load":
                with self._changing:
                    self._reload(wish.name)
            elif not self._give_up(wish.name):
                with self._changing:
                    self._unload(wish.name)
        except CannotChange as error:
            answer = answer._replace(kind=error.kind, text=str(error))
        except Exception as error:  # our bug; who has asked is to know
            logger.exception("model %s: the wish to %s it failed", wish.name, wish.does)
            answer = answer._replace(kind="failed", text=str(error))
        link.send(answer)

    def _give_up(self, name: str) -> bool:
        """As ``Replacer.give_up``."""
        with self._changed:
            loading, owner = self._loading
            if loading != name or (owner is not None and owner.settled.is_set()):
                return False
            self._is_given_up = True
            if owner is not None:
                owner.give_up(given_up())
            return True

    def renew(self) -> None:
        """As ``ModelRepository.renew``. Raises StreamerError: workers cannot be restarted."""
        with self._changing:
            try:
                self._configuration.reread()
            except ValueError as error:
                logger.error("SIGHUP: the models stay as they are: %s", error)
                return
            loaded = {each.named.name: each.named.options for each in self.plan.models}
            changed = changes(loaded, self._configuration.models)
            for name in changed.loaded:
                with contextlib.suppress(CannotChange):  # which was logged
                    self._load(name)
            for name in changed.removed:
                try:
                    self._unload(name)
                except CannotChange as error:
                    logger.error("SIGHUP: %s", error)
            # The order may be another one, too.
            self._spread({each.named.name: each for each in self.plan.models})
            kept = [(name, self._owners[name]) for name in changed.kept if name in self._owners]
        restart_all((name, owner.restart) for name, owner in kept)

    def _reload(self, name: str) -> None:
        try:
            self._configuration.reread()
        except ValueError as error:
            raise CannotChange("failed", str(error)) from None
        if self._configuration.find(name) is None:
            raise CannotChange("unknown", name)
        self._load(name)

    def _load(self, name: str) -> None:
        named = self._configuration.find(name)
        assert named is not None
        began = time.monotonic()
        with self._changed:
            self._loading, self._is_given_up = (name, None), False
        logger.info("loading model %s", name)
        try:
            planned = PlannedModel.of(named)
            owner = None if planned.pool is None else self._ready_owner(planned)
        except Exception as error:
            logger.error("model %s cannot be loaded: %s", name, error)
            raise CannotChange("failed", f"model {name!r} cannot be loaded: {error}") from error
        finally:
            with self._changed:
                self._loading = "", None
        models = {each.named.name: each for each in self.plan.models} | {name: planned}
        with self._changed:
            before = self._take_owner(name)
            if owner is not None:
                self._owners[name] = owner
                self._passing.remove(owner)
        self._spread(models)
        logger.info("model %s is loaded (%.1f s)", name, time.monotonic() - began)
        self._retire(before)

    def _ready_owner(self, planned: PlannedModel) -> PoolOwner:
        owner = self._owner(planned)
        with self._changed:
            self._passing.append(owner)
            self._loading = planned.named.name, owner
            if self._is_given_up:
                owner.give_up(given_up())
            is_late = self._is_over  # ``_close`` did not see it
        if not is_late:
            owner.settled.wait()
        failure = owner.failure
        if is_late or failure is not None:
            self._retire(owner, anyway=is_late)
        if failure is not None:
            raise failure
        if self._is_over:
            raise StreamerClosed("the service is stopping")
        return owner

    def _unload(self, name: str) -> None:
        models = {each.named.name: each for each in self.plan.models}
        if name not in models:
            raise CannotChange("unknown", name)
        if len(models) == 1:
            raise CannotChange("last", name)
        del models[name]
        with self._changed:
            before = self._take_owner(name)
        self._spread(models)
        logger.info("model %s is unloaded", name)
        self._retire(before)

    def _spread(self, models: dict[str, PlannedModel]) -> None:
        """Have all web processes serve these models; returns when they do.

        A web process that hangs is not waited for: the other changes, and the memory of the old
        model, must not depend on it.
        """
        with self._changed:
            before = self.plan
            self.plan = plan = before.changed(models, tuple(self._configuration.names))
            for link in self._links.values():
                link.send(plan)
            longest = max(each.named.options.timeout for each in (*before.models, *plan.models))
            patience = min(2 * longest + _GRACE, threading.TIMEOUT_MAX)
            if not self._changed.wait_for(lambda: self._is_over or not self._late(plan), patience):
                late = ", ".join(map(str, self._late(plan)))
                logger.warning(
                    "web process %s has not followed a change of the models in %.0f s, and is not "
                    "waited for; if it hangs, kill it, and it is restarted",
                    late, patience,
                )  # fmt: skip

    def _late(self, plan: Plan) -> list[int]:
        """The web processes that do not serve by a plan yet."""
        return [number for number, done in self._done.items() if done < plan.number]

    def _take_owner(self, name: str) -> PoolOwner | None:
        """The owner of a pool that is to end. At the end of the service ``_close`` ends it."""
        owner = self._owners.pop(name, None)
        if owner is not None:
            self._passing.append(owner)
        return owner

    def _retire(self, owner: PoolOwner | None, *, anyway: bool = False) -> None:
        if owner is None:
            return
        with self._changed:
            if self._is_over and not anyway:
                return  # ``_close`` ends it
            self._passing.remove(owner)
        owner.retire()

    def report(self, log: Callable[[list[str]], None]) -> None:
        """Write to the log how the pools stand."""
        for name, owner in [*self._owners.items()]:
            try:
                lines = owner.report()
            except StreamerError as error:
                lines = [f"the process of the workers does not answer: {error}"]
            if len(self.plan.models) > 1:
                lines[0] = f"{name}: {lines[0]}"
            log(lines)
