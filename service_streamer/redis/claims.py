"""Bookkeeping of a worker host's claims, and of their outputs on their way to Redis. No I/O."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

#: Seconds to claim ahead: an answer, a claim, and a busy interpreter in between.
_CLAIMING_TIME = 0.01
#: Batches to claim ahead for an instant model; measured, more did not help.
_MOST_AHEAD = 7

#: Bytes that an output, and a run of outputs, add to a message at the most.
_PER_OUTPUT, _PER_RUN = 5, 64


class Claim:
    """A call that a worker host has claimed.

    Attributes:
        id: id of its entry in Redis.
        client: name of the client; empty if unreadable, unverified if ``is_unread``.
        number: the client's number for it.
        size: number of items.
        call: the engine's call, until it is over; opaque here.
        is_open: whether it is still to be computed.
        is_submitted: whether the engine has it, which may be asked to drop it only then.
        is_set_aside: whether its message is in the stream of malformed ones.
        is_unread: whether this host could not read its message.
    """

    __slots__ = (
        "call", "client", "id", "is_open", "is_set_aside", "is_submitted", "is_unread", "number",
        "size",
    )  # fmt: skip

    def __init__(self, id: bytes, client: str, number: int, size: int) -> None:
        self.id = id
        self.client = client
        self.number = number
        self.size = size
        self.call: Any = None
        self.is_open = True
        self.is_set_aside = self.is_submitted = self.is_unread = False


class StreamClaim(Claim):
    """A claimed stream, with the outputs that are not in Redis yet.

    Attributes:
        waiting: these, encoded.
        bytes_waiting: the size of them.
        written: how many outputs Redis has taken so far.
        has_begun: whether some were sent, so that Redis may have them.
        is_held: the client wants the item to rest.
        is_behind: Redis takes them too slowly, so it rests as well.
        outcome: of the call, if it waits for these to be written; opaque here.
    """

    __slots__ = (
        "bytes_waiting", "has_begun", "is_behind", "is_held", "outcome", "waiting", "written",
    )  # fmt: skip

    def __init__(self, id: bytes, client: str, number: int, size: int) -> None:
        super().__init__(id, client, number, size)
        self.waiting: list[bytes] = []
        self.bytes_waiting = self.written = 0
        self.has_begun = self.is_held = self.is_behind = False
        self.outcome: Any = None

    def clear(self) -> None:
        """Drop what waits."""
        self.waiting.clear()
        self.bytes_waiting = 0

    @property
    def is_paused(self) -> bool:
        """Whether the stream is paused."""
        return self.is_held or self.is_behind


class Claims:
    """A worker host's claims in progress, and how much more it should claim.

    It claims as many items as its workers compute at once, and enough further batches to keep them
    busy during a request to Redis: one, if a batch takes longer. No more, since other hosts cannot
    compute what this host has claimed.

    Attributes:
        open_items: items that are claimed and not computed yet. Of a call at most a batch: a larger
            one takes turns with those that come after it, so it must not keep them from being
            claimed.
    """

    def __init__(self, batch_size: int) -> None:
        self._batch_size = batch_size
        self._claims: dict[bytes, Claim] = {}
        self._mean_size = 1.0
        self._is_full = False
        self.open_items = 0

    def __len__(self) -> int:
        return len(self._claims)

    def __iter__(self) -> Iterator[Claim]:
        return iter(self._claims.values())

    def get(self, id_: bytes) -> Claim | None:
        return self._claims.get(id_)

    def room(
        self, workers: int, batch_duration: float, held: int = 2, *, is_stepping: bool = False
    ) -> int:
        """How many calls to claim.

        Args:
            workers: how many serve.
            batch_duration: seconds between two batches of a worker.
            held: the most batches that a worker holds.
            is_stepping: whether the model is one of steps: a batch is one item then, and those that
                a worker holds beyond its places are enough to claim ahead.

        Once full, 0 until there is room for half a batch, so that few requests claim many calls.
        """
        ahead = _CLAIMING_TIME / batch_duration if batch_duration > 0 else _MOST_AHEAD
        batches = held - 1 + min(max(1, math.ceil(ahead)), _MOST_AHEAD)
        most = (held if is_stepping else batches * self._batch_size) * workers
        items = most - self.open_items
        is_little = items < self._batch_size // 2 and not is_stepping
        self._is_full = items <= 0 or (self._is_full and is_little)
        if self._is_full:
            return 0
        return max(1, math.floor(items / self._mean_size))

    def add(self, claim: Claim) -> bool:
        """Add a claim; false if it is known: after a lost connection claims may come twice."""
        if claim.id in self._claims:
            return False
        self._claims[claim.id] = claim
        size = min(claim.size, self._batch_size)
        self.open_items += size
        # A moving average over about thirty calls.
        self._mean_size += (size - self._mean_size) / 32
        return True

    def close(self, claim: Claim) -> bool:
        """Note that there is an outcome; false if there was one already."""
        if not claim.is_open:
            return False
        claim.is_open = False
        claim.call = None
        self.open_items -= min(claim.size, self._batch_size)
        return True

    def remove(self, claims: Iterable[Claim]) -> None:
        """Forget claims: Redis has the outcome, or another host has claimed the call."""
        for claim in claims:
            self._claims.pop(claim.id, None)

    def take_away(self, ids: Iterable[bytes]) -> list[Any]:
        """Forget claims that other hosts took; returns the engine's calls to withdraw."""
        claims = [self._claims[id_] for id_ in ids if id_ in self._claims]
        self.remove(claims)
        calls = [claim.call for claim in claims if claim.is_open and claim.is_submitted]
        for claim in claims:
            self.close(claim)
        return calls


class Outflows:
    """The outputs of all streams of a host. For one thread at a time.

    Outputs that come while Redis takes others go together, those of one client in one message. They
    are kept until Redis has them: after a lost connection they go again, and the client knows by
    their numbers which of them it has.
    """

    def __init__(self) -> None:
        self._streams: dict[str, dict[bytes, StreamClaim]] = {}  # by client
        #: Those with something to write, by client; the client that waits longest is first.
        self._ready: dict[str, dict[bytes, StreamClaim]] = {}
        self._full: set[str] = set()  # clients that have too much unread

    def __len__(self) -> int:
        return sum(map(len, self._streams.values()))

    def clients(self) -> list[str]:
        """Those with open streams."""
        return [*self._streams]

    def of(self, client: str) -> list[StreamClaim]:
        """The open streams of a client."""
        return [*self._streams.get(client, {}).values()]

    @property
    def is_ready(self) -> bool:
        """Whether there is something to write that Redis may take."""
        return bool(self._ready.keys() - self._full)

    def open(self, claim: StreamClaim) -> None:
        """A host has claimed a stream."""
        self._streams.setdefault(claim.client, {})[claim.id] = claim

    def close(self, claim: Claim) -> None:
        """Nothing more of it goes from here. It may be unknown, or no stream."""
        for streams in (self._streams, self._ready):
            of_client = streams.get(claim.client)
            if of_client is not None:
                of_client.pop(claim.id, None)
                if not of_client:
                    del streams[claim.client]
        if claim.client not in self._streams:
            self._full.discard(claim.client)

    def put(self, claim: StreamClaim, output: bytes) -> int:
        """An output has come; returns how many of its stream wait."""
        claim.waiting.append(output)
        claim.bytes_waiting += len(output)
        self._ready.setdefault(claim.client, {})[claim.id] = claim
        return len(claim.waiting)

    def next(
        self, most_bytes: int, most_per_client: int
    ) -> Iterator[tuple[str, list[tuple[StreamClaim, list[bytes]]]]]:
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
            runs: list[tuple[StreamClaim, list[bytes]]] = []
            for claim in claims.values():
                outputs: list[bytes] = []
                for output in claim.waiting:
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

    def written(self, claim: StreamClaim, count: int) -> None:
        """Redis has taken its first outputs that waited."""
        claim.written += count
        claim.bytes_waiting -= sum(map(len, claim.waiting[:count]))
        del claim.waiting[:count]
        if not claim.waiting:
            of_client = self._ready.get(claim.client)
            if of_client is not None:
                of_client.pop(claim.id, None)
                if not of_client:
                    del self._ready[claim.client]

    def mark_full(self, client: str) -> None:
        """Redis takes no more for the client, which has not read what is there."""
        if client in self._streams:
            self._full.add(client)

    def mark_free(self, client: str) -> None:
        """Redis takes more for the client."""
        self._full.discard(client)
