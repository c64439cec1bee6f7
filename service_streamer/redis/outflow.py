"""Outputs of a worker host's streams on their way to Redis: what waits, what may go now. No I/O.

Those that come while Redis takes others go together, those of one client in one message. They are
kept until Redis has them: after a lost connection they go again, and the client knows by their
numbers which of them it has.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # it imports this module
    from .claims import Claim

#: Bytes that an output, and a run of outputs, add to a message at the most.
_PER_OUTPUT, _PER_RUN = 5, 64


class Outflow:
    """The outputs of a stream that are not in Redis yet.

    Attributes:
        waiting: encoded.
        size: bytes of them.
        written: how many outputs Redis has taken so far.
        has_begun: whether some were sent, so that Redis may have them.
        is_held: the client wants the item to rest.
        is_behind: Redis takes them too slowly, so it rests as well.
        outcome: of the call, if it waits for these to be written; opaque here.
    """

    __slots__ = (
        "has_begun", "is_behind", "is_held", "outcome", "size", "waiting", "written",
    )  # fmt: skip

    def __init__(self) -> None:
        self.waiting: list[bytes] = []
        self.size = self.written = 0
        self.has_begun = self.is_held = self.is_behind = False
        self.outcome: Any = None

    def clear(self) -> None:
        """Drop what waits."""
        self.waiting.clear()
        self.size = 0

    @property
    def rests(self) -> bool:
        """Whether the stream is paused."""
        return self.is_held or self.is_behind


class Outflows:
    """Those of all streams of a host. For one thread at a time."""

    def __init__(self) -> None:
        self._streams: dict[str, dict[bytes, Claim]] = {}  # by client
        #: Those with something to write, by client; the client that waits longest is first.
        self._ready: dict[str, dict[bytes, Claim]] = {}
        self._full: set[str] = set()  # clients that have too much unread

    def __len__(self) -> int:
        return sum(map(len, self._streams.values()))

    def clients(self) -> list[str]:
        """Those with open streams."""
        return [*self._streams]

    def of(self, client: str) -> list[Claim]:
        """The open streams of a client."""
        return [*self._streams.get(client, {}).values()]

    @property
    def is_ready(self) -> bool:
        """Whether there is something to write that Redis may take."""
        return bool(self._ready.keys() - self._full)

    def open(self, claim: Claim) -> None:
        """A host has claimed a stream."""
        claim.outflow = Outflow()
        self._streams.setdefault(claim.client, {})[claim.id] = claim

    def close(self, claim: Claim) -> None:
        """Nothing more of it goes from here. It may be unknown."""
        for streams in (self._streams, self._ready):
            of_client = streams.get(claim.client)
            if of_client is not None:
                of_client.pop(claim.id, None)
                if not of_client:
                    del streams[claim.client]
        if claim.client not in self._streams:
            self._full.discard(claim.client)

    def put(self, claim: Claim, output: bytes) -> int:
        """An output has come; returns how many of its stream wait."""
        flow = claim.outflow
        assert flow is not None
        flow.waiting.append(output)
        flow.size += len(output)
        self._ready.setdefault(claim.client, {})[claim.id] = claim
        return len(flow.waiting)

    def next(
        self, most_bytes: int, most_per_client: int
    ) -> Iterator[tuple[str, list[tuple[Claim, list[bytes]]]]]:
        """What to write now: by client, some outputs of its streams, each in order.

        Args:
            most_bytes: of all; one client's message may exceed it.
            most_per_client: of a message; a single output may exceed it.
        """
        for client, claims in [*self._ready.items()]:
            if client in self._full:
                continue
            if most_bytes <= 0:
                return
            size = 0
            runs: list[tuple[Claim, list[bytes]]] = []
            for claim in claims.values():
                assert claim.outflow is not None
                outputs: list[bytes] = []
                for output in claim.outflow.waiting:
                    more = len(output) + _PER_OUTPUT + (0 if outputs else _PER_RUN)
                    if size and size + more > most_per_client:
                        break
                    size += more
                    outputs.append(output)
                if not outputs:
                    break
                runs.append((claim, outputs))
            most_bytes -= size
            yield client, runs
            # Whoever had its turn is last, and so are those of its streams.
            self._ready[client] = self._ready.pop(client)
            for claim, _ in runs:
                self._ready[client][claim.id] = self._ready[client].pop(claim.id)

    def written(self, claim: Claim, count: int) -> None:
        """Redis has taken its first outputs that waited."""
        flow = claim.outflow
        assert flow is not None
        flow.written += count
        flow.size -= sum(map(len, flow.waiting[:count]))
        del flow.waiting[:count]
        if not flow.waiting:
            of_client = self._ready.get(claim.client)
            if of_client is not None:
                of_client.pop(claim.id, None)
                if not of_client:
                    del self._ready[claim.client]

    def is_full(self, client: str) -> None:
        """Redis takes no more for the client, which has not read what is there."""
        if client in self._streams:
            self._full.add(client)

    def has_room(self, client: str) -> None:
        """Redis takes more for the client."""
        self._full.discard(client)
