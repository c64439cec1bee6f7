"""Which models a service is to have: from its command line, or from its file, read again."""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from .command_options import ServeOptions

if TYPE_CHECKING:
    from .hosted_model import OpenedModel


class NamedModel(NamedTuple):
    """A model as it is configured.

    Attributes:
        name: of requests that name their model.
        options: of the service, with those of this model in place of the common ones.
    """

    name: str
    options: ServeOptions


class Changes(NamedTuple):
    """What is to be done about models, by name."""

    removed: list[str]
    loaded: list[str]  # new ones, and those with other options
    kept: list[str]


def changes(
    before: Mapping[str, ServeOptions],
    models: Iterable[NamedModel],
    failed: Collection[str] = (),
) -> Changes:
    """What makes these models of those that were loaded, given with their options. Pure.

    Args:
        failed: those of the latter that do not serve any more.
    """
    after = {each.name: each.options for each in models}
    kept = [
        name for name, options in after.items()
        if before.get(name) == options and name not in failed
    ]  # fmt: skip
    return Changes(
        [name for name in before if name not in after],
        [name for name in after if name not in kept],
        kept,
    )


def default_name(before: str, configured: Sequence[str], serving: Container[str]) -> str:
    """The model of requests that name none: the first one of the configuration. Pure.

    If the first configured model is not loaded, the default stays as it was, even if that model is
    unloaded: another model would give other answers.
    """
    first = configured[0]
    return first if first in serving or before not in configured else before


@dataclass
class Configuration:
    """Where the models of a service come from.

    Attributes:
        models: as they were configured when that was read last.
        open: starts the workers of a model. It may block, and raises what ``pool_options`` does.
        read: reads the configuration again. Raises ValueError: it cannot be read, or is wrong.
        are_named: whether requests that name a model must name one of these.
    """

    models: Sequence[NamedModel]
    open: Callable[[NamedModel], OpenedModel]
    read: Callable[[], Sequence[NamedModel]] | None = None
    are_named: bool = False

    def reread(self) -> None:
        """Read it again. Raises ValueError, and then keeps what it has."""
        if self.read is not None:
            self.models = self.read()

    def find(self, name: str) -> NamedModel | None:
        """The model of a name; None if there is none."""
        return next((each for each in self.models if each.name == name), None)

    @property
    def names(self) -> list[str]:
        """Of all models, in order."""
        return [each.name for each in self.models]
