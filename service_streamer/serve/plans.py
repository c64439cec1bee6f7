"""What several web processes are made of, and what they and their parent send each other."""

from __future__ import annotations

from typing import NamedTuple

from ..options.table import StreamerOptions
from .command_options import ServeOptions
from .configuration import NamedModel, default_name
from .hosted_model import OpenedModel
from .opening import make_redis_streamer, pool_of_service, service_options, streamer_of
from .pool_owner import owned


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
