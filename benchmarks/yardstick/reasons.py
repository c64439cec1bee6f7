"""Why others are ahead where they are: known from profiles and from their sources. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["REASONS", "Reason", "why"]


@dataclass(frozen=True)
class Reason:
    """Why a system is ahead in a section. Only shown where it is.

    Attributes:
        figures: of which it is true; none for all of the section.
        point: what a point must have for it to be true there.
    """

    section: str
    peer: str
    text: str
    figures: tuple[str, ...] = ()
    point: Mapping[str, Any] = field(default_factory=dict)

    def holds(self, section: str, peer: str, figure: str, point: Mapping[str, Any]) -> bool:
        return (
            (self.section, self.peer) == (section, peer)
            and (not self.figures or figure in self.figures)
            and self.point.items() <= point.items()
        )


_UNKNOWN = "not explained yet"
_RUST = (
    "its HTTP server is written in Rust, ours in Python, where uvicorn and the parsing of HTTP are "
    "half of what a request takes; a model that takes no time leaves nothing else to measure"
)

#: The first that holds is shown.
REASONS: tuple[Reason, ...] = (
    Reason("http", "mosec", _RUST, point={"workload": "echo"}),
    Reason("http", "mosec", _RUST, figures=("all", "web")),
)


def why(section: str, peer: str, figure: str, point: Mapping[str, Any]) -> str:
    """The reason that is known for one figure, or that none is."""
    holding = (each.text for each in REASONS if each.holds(section, peer, figure, point))
    return next(holding, _UNKNOWN)
