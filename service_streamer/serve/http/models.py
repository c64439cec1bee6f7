"""The models of one web process, and which of them a request is for.

/models/NAME/predict     the model of that name; any path of a service may follow
/predict                 the default model, which is the first one that is configured
/v1/completions          the one that the body names in ``model``, if the models are named
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Protocol
from urllib.parse import quote

from .admission import make_budgets
from .keyring import Keyring
from .refusals import Refusal
from .request_figures import Siblings
from .service import Service

#: Characters of an unknown name in an error, and names that the error lists.
_LONGEST_NAME, _MOST_NAMES = 100, 20


class Repository(Protocol):
    """Loads models, and takes them away, while others serve."""

    def names(self) -> Mapping[str, str]:
        """All models that are there or could be loaded, and the state of each, in words."""

    async def load(self, name: str) -> None:
        """Load a model, or load it anew. Raises Refusal: there is none, or it cannot be loaded."""

    async def unload(self, name: str) -> None:
        """Take a model away. Raises Refusal: there is none, or it is the last one."""


class Models:
    """The services of one web process, one for each model. Belongs to one event loop.

    Args:
        services: at least one; the first is the default model.
        are_named: whether OpenAI's requests must name one of the models. A service of one model
            that was given on the command line answers any name, since clients have their own.
        keyring: checks API keys; None to let everybody in.

    Attributes:
        default_name: the model of requests that name none, if the models are named. It may be
            unloaded: no other one answers in its place.
        number: of the last change; it grows.
        on_change: called when a model has come or gone, or answers at last.
        repository: loads models, and takes them away; None if that is not possible.
        siblings: the service's other web processes; None if there are none.
    """

    def __init__(
        self,
        services: Iterable[Service],
        *,
        are_named: bool = False,
        keyring: Keyring | None = None,
    ) -> None:
        self._services = [*services]
        self._keyring = keyring
        self._budgets = make_budgets()
        self.are_named = are_named
        self.default_name = self.first.model
        self.siblings: Siblings | None = None
        for service in self._services:
            service.keyring, service.budgets = keyring, self._budgets
        self.number = 0
        self.on_change: Callable[[], None] = lambda: None
        self.repository: Repository | None = None

    @property
    def first(self) -> Service:
        """Any loaded model: for options that all models share."""
        return self._services[0]

    @property
    def default(self) -> Service | None:
        """The model of requests that name none; None while it is not there."""
        return self.find(self.default_name) if self.are_named else self.first

    def __iter__(self) -> Iterator[Service]:
        return iter(self._services)

    def __len__(self) -> int:
        return len(self._services)

    def find(self, name: str) -> Service | None:
        """The model of a name; None if there is none."""
        return next((each for each in self._services if each.model == name), None)

    def get(self, name: str) -> Service:
        """The model of a name. Raises Refusal: there is none."""
        service = self.find(name)
        if service is None:
            raise self.unknown(name)
        return service

    def unknown(self, name: str) -> Refusal:
        """The answer to a request for a model that is not there."""
        shown = name if len(name) <= _LONGEST_NAME else f"{name[: _LONGEST_NAME - 3]}..."
        return self._not_found(f"no model {shown!r}")

    def without_default(self, path: str) -> Refusal:
        """The answer to a request at a path of the default model, while that is not there."""
        return self._not_found(f"{path} is for the model {self.default_name!r}, which is unloaded")

    def _not_found(self, text: str) -> Refusal:
        names = [repr(each.model) for each in self._services]
        if len(names) > _MOST_NAMES:
            names = [*names[:_MOST_NAMES], "others"]
        return Refusal(
            404,
            f"model: {text}; this service runs {', '.join(names)}",
            param="model",
            code="model_not_found",
        )

    def split(self, place: str) -> tuple[Service, str] | None:
        """The model that a place begins with, and the rest: "" or a path.

        Args:
            place: what follows a prefix such as /models/. Names may have slashes, as those of the
                Hugging Face hub have, and these may be quoted.
        """
        found: tuple[Service, str] | None = None
        for service in self._services:
            for name in (service.model, quote(service.model, safe="")):
                rest = place[len(name) :]
                is_it = place.startswith(name) and (not rest or rest[0] in "/?")
                if is_it and (found is None or len(rest) < len(found[1])):
                    found = service, rest
        return found

    # -- changes

    def put(self, service: Service) -> Service | None:
        """Have a model serve, in the place of the one of its name; returns that one.

        Its open requests go on. It is told that it gets no new ones.
        """
        service.siblings, service.keyring = self.siblings, self._keyring
        service.budgets = self._budgets
        before = self.find(service.model)
        if before is None:
            self._services.append(service)
        else:
            self._services[self._services.index(before)] = service
            before.is_retired = True
        self.number += 1
        self.on_change()
        return before

    def remove(self, service: Service) -> None:
        """Have a model serve no more. Its open requests go on. Not for the last one."""
        assert len(self._services) > 1
        self._services.remove(service)
        service.is_retired = True
        self.number += 1
        self.on_change()

    def arrange(self, names: Iterable[str], default_name: str) -> None:
        """Put the models in this order, and have requests that name none go to this model."""
        places = {name: place for place, name in enumerate(names)}
        self._services.sort(key=lambda each: places.get(each.model, len(places)))
        self.default_name = default_name
        self.number += 1

    # -- how they stand

    @property
    def loading(self) -> list[str]:
        """The models that are waited for. Those of worker hosts are not: they may never come."""
        return [
            each.model
            for each in self._services
            if not each.is_known and each.failure is None and each.pool is not None
        ]

    async def look(self) -> tuple[str, str]:
        """As ``Service.look``, of all models together."""
        await asyncio.gather(*(each.look() for each in self._services))
        return self.standing()

    def standing(self) -> tuple[str, str]:
        """As ``Service.standing``, of all models together.

        At the start the models are waited for, but not those of worker hosts: whether and when
        these come is not in the hands of this service.
        """
        loading = self.loading
        if loading and len(self._services) > 1 and not self.first.is_draining:
            return "starting", f"loading {', '.join(loading)}"
        return combined({each.model: each.standing() for each in self._services})


#: A service stands as the first of these in which one of its models is, unless one is ready.
_WORST = ("draining", "starting", "failing", "broken")


def combined(standings: Mapping[str, tuple[str, str]]) -> tuple[str, str]:
    """How a service stands, by the standings of its models. Pure.

    It is ready as long as one of them is: if it were not, whoever sends it requests would send none
    for the others either.
    """
    if len(standings) == 1:
        return next(iter(standings.values()))
    states = [state for state, _ in standings.values()]
    ready = states.count("ready")
    others = [f"{name}: {text}" for name, (state, text) in standings.items() if state != "ready"]
    if ready == len(states):
        return "ready", f"{ready} models answer"
    if ready:
        return "ready", f"{ready} of {len(states)} models answer; {'; '.join(others)}"
    return min(states, key=_WORST.index), "; ".join(others)
