"""A stream's outputs, kept at the client: the next pool goes on where they end."""

from __future__ import annotations

from typing import Any

from ..remote.open_calls import Inflow
from .client_memory import inline

__all__ = ["ResumableInflow"]


class ResumableInflow(Inflow):
    """Keeps the outputs, but not the item, which is in the call's message until it is over.

    Those in shared memory are copied: it is the pool's, which needs it for others.
    """

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__()
        self.keep([])

    def keep(self, payloads: list[Any]) -> None:
        super().keep(inline(payloads))
