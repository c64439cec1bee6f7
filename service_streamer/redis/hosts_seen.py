"""What a client knows of the worker hosts, as Redis said when it was last asked."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

from ..errors import BadMessage
from .wire import Wire


class HostsSeen:
    """For any thread; the sender changes it.

    Attributes:
        count: how many hosts are alive; None while that is not known.
        queued: number of calls of all clients; None while that is not known.
        models: the models of the hosts.
        is_awaited: the description is wanted soon.
        on_change: called, in any thread, whenever Redis was asked.
    """

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self.count: int | None = None
        self.queued: int | None = None
        self.models: tuple[str, ...] = ()
        self.is_awaited = False
        self.on_change: Callable[[], None] = lambda: None
        self._announced = b""  # the model's description, as the hosts announced it
        self._description: Mapping[str, Any] | None = None
        self._was_described = False  # a description was read

    def description(self) -> Mapping[str, Any] | None:
        """That of the model; None while no host has announced one that can be read."""
        if self.count and self._description is not None:
            return self._description
        if not self._was_described:  # else the next time is soon enough
            self.is_awaited = True
        return None

    def take_in(self, models: list[bytes], queued: int, announced: bytes) -> None:
        """Redis has answered."""
        self.queued = queued
        if announced != self._announced:
            description: Mapping[str, Any] | None = None
            with contextlib.suppress(BadMessage):  # the answer to a call says why
                description = self._wire.read_announcement(announced)
                self._was_described = True
            self._announced, self._description = announced, description
        self.count = len(models)
        self.models = tuple(sorted({each.decode(errors="replace") for each in models if each}))
        self.is_awaited = False
        self.on_change()
