"""A worker host's streams: outputs go to Redis as they come, and clients' orders are followed.

     engine's thread           here                            Redis
     ---------------           ----                            -----
     reply.put_part ─────────▶ waits, while a request
                               is under way
                               OUTPUTS, all that waits ──────▶ the client's replies
     engine.withdraw ◀──────── drop      ◀──────────────────── the host's orders
     engine.hold     ◀──────── hold, go

Each request also fetches the orders, also those about other calls, and asks whether clients that
had too much unread have read it: they are sent nothing before. While the host holds calls, but has
no outputs, there is a request every ``LOOK`` seconds.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ..errors import ModelError, Overloaded, WorkerLost
from ..remote.open_calls import OutputRun
from ..workers.protocol import Failure
from .claims import Claim, Claims
from .host_parts import HostParts
from .host_scripts import OUTPUTS
from .link import Link, LinkError
from .outflow import Outflow, Outflows

#: Seconds between two looks for orders while no outputs come.
LOOK = 0.1

#: The item of a stream rests from so many outputs on that Redis has not taken; beyond the other
#: number its stream fails, since it is of a model that cannot rest.
_MOST_WAITING = 1024
_FAR_TOO_MANY = 8 * _MOST_WAITING

#: The same of bytes.
_MOST_BYTES_WAITING = 8 << 20
_FAR_TOO_MUCH = 16 * _MOST_BYTES_WAITING

#: Replies that a client may leave unread, and bytes of outputs in them; then streams of it wait.
_MOST_UNREAD = 1000
_MOST_BYTES_UNREAD = 16 << 20

#: Maximum bytes of a client's message with outputs; and of those that go with the end of a stream.
_MOST_OF_CLIENT = 1 << 20
_MOST_AT_END = 1 << 16

#: Bytes of a message beside its outputs.
_OVERHEAD = 320


class _Sent(NamedTuple):
    """What is sent to a client: runs of outputs, and those of which nothing was sent before."""

    client: str
    runs: list[tuple[Claim, list[bytes]]]
    begun: list[Outflow]


class HostStreams:
    """Those of one host. ``send`` and ``receive`` are for one thread at a time.

    Args:
        claims: the host's, guarded by ``lock``.
        on_failed: called with a claim whose stream fails here, and why.
        on_outcome: called with an outcome that had to wait for outputs: it may go now. Locked.
        on_dropped: called with ids of claims that nobody wants any more.
    """

    def __init__(
        self,
        parts: HostParts,
        claims: Claims,
        lock: threading.RLock,
        *,
        on_failed: Callable[[Claim, Failure], None],
        on_outcome: Callable[[Any], None],
        on_dropped: Callable[[Sequence[bytes]], object],
    ) -> None:
        self._engine = parts.engine
        self._wire = wire = parts.wire
        self._keys = parts.keys
        self._name = parts.options.name
        self._reply_ttl = parts.options.reply_life
        self._claims = claims
        self._lock = lock
        self._on_failed = on_failed
        self._on_outcome = on_outcome
        self._on_dropped = on_dropped
        self._outflows = Outflows()
        self._most_of_client = min(_MOST_OF_CLIENT, wire.max_bytes // 2)
        self._most_at_end = min(_MOST_AT_END, wire.max_bytes // 2)
        self._resting_lock = threading.Lock()
        self._look_at = -math.inf
        self._looks_once_more = False  # for orders about the last calls
        self._followed: list[bytes] = []  # orders, which Redis may forget
        #: What is being sent, or its answer is not read: by client.
        self._sent: list[_Sent] | None = None

    def __len__(self) -> int:
        return len(self._outflows)

    def open(self, claim: Claim) -> None:
        """The host has claimed a stream, and submits it next."""
        with self._lock:
            self._outflows.open(claim)

    def close(self, claim: Claim) -> None:
        """It is over for this host. Locked."""
        if claim.outflow is not None:
            self._outflows.close(claim)

    def keeps(self, claim: Claim, outcome: Any) -> bool:
        """Whether an outcome has to wait for outputs, which are too many to go with it. Locked."""
        flow = claim.outflow
        if flow is None or self._can_end(flow):
            self.close(claim)
            return False
        flow.outcome = outcome
        return True

    def _can_end(self, flow: Outflow) -> bool:
        """Whether what waits may go with its end."""
        return flow.size <= self._most_at_end

    # -- in the engine's thread

    def put(self, claim: Claim, output: bytes) -> None:
        """An output has come."""
        flow = claim.outflow
        assert flow is not None
        if len(output) + _OVERHEAD > self._wire.max_bytes:
            text = f"{len(output)} bytes, but max_message_bytes is {self._wire.max_bytes}"
            error = ModelError(f"an output of the stream is too large: {text}")
            self._fail(claim, Failure(error))
            return
        with self._lock:
            if not claim.is_open:
                return
            call = claim.call
            waiting = self._outflows.put(claim, output)
            is_much = waiting >= _MOST_WAITING or flow.size >= _MOST_BYTES_WAITING
            flow.is_behind |= is_much
        if flow.rests and call is not None and not call.is_held:
            self._rest(claim, flow)
            # Else its worker is about to end, and lets nothing rest; or this was the last one.
            if call.is_held or call.is_over:
                return
        if waiting >= _FAR_TOO_MANY or flow.size >= _FAR_TOO_MUCH:
            text = f"{waiting} outputs of the stream wait for Redis, or its client reads none"
            self._fail(claim, Failure(Overloaded(text)))

    def _fail(self, claim: Claim, failure: Failure) -> None:
        with self._lock:
            call = claim.call if claim.is_submitted else None
        self._on_failed(claim, failure)
        if call is not None:
            self._engine.withdraw(call)

    def _rest(self, claim: Claim, flow: Outflow) -> None:
        """Have the item rest, or go on."""
        with self._resting_lock:  # the last one to come here finds how it is
            call = claim.call
            if call is not None:
                self._engine.hold(call, is_held=flow.rests)

    # -- to Redis

    @property
    def is_ready(self) -> bool:
        """Whether there are outputs to send."""
        return self._outflows.is_ready

    @property
    def is_under_way(self) -> bool:
        """Whether a request is sent and its answer not read."""
        return self._sent is not None

    def wait(self, now: float) -> float:
        """Seconds until ``send`` has something to do; infinity if nothing is held."""
        with self._lock:
            if len(self._claims):
                self._looks_once_more = True
            elif not self._followed and not self._looks_once_more:
                return math.inf
            return 0.0 if self._outflows.is_ready else max(0.0, self._look_at - now)

    def send(self, link: Link, now: float, most_bytes: int) -> bool:
        """Send the outputs that wait, or look for orders if it is time. Raises LinkError.

        Args:
            most_bytes: of outputs; the last client's message may exceed it.

        Returns:
            Whether something was sent: ``receive`` is next.
        """
        if self.wait(now) > 0:
            return False
        sent: list[_Sent] = []
        self._sent = sent
        with self._lock:
            runs = dict(self._outflows.next(most_bytes, self._most_of_client))
            clients = self._outflows.clients()
            self._looks_once_more = len(self._claims) > 0
        self._look_at = now + LOOK
        keys = [self._keys.calls, self._keys.orders_of(self._name)]
        arguments: list[Any] = [self._name, self._reply_ttl, _MOST_UNREAD, _MOST_BYTES_UNREAD]
        arguments += [len(self._followed), *self._followed]
        for client in clients:
            of_client = runs.get(client, [])
            names = self._keys
            keys += (names.client(client), names.replies(client), names.unread(client))
            message = self._message(client, of_client) if of_client else b""
            first = [claim.id for claim, _ in of_client if not has_written(claim)]
            later = [claim.id for claim, _ in of_client if has_written(claim)]
            arguments += (message, len(first), len(later), *first, *later)
            begun: list[Outflow] = []
            for claim, _ in of_client:
                assert claim.outflow is not None
                if not claim.outflow.has_begun:
                    claim.outflow.has_begun = True
                    begun.append(claim.outflow)
            sent.append(_Sent(client, of_client, begun))
        try:
            link.send(OUTPUTS, keys, *arguments)
        except LinkError:
            self._sent = None
            raise
        return True

    def _message(self, client: str, runs: list[tuple[Claim, list[bytes]]]) -> bytes:
        return self._wire.outputs(
            client,
            [
                OutputRun(
                    claim.number, written(claim), outputs, b"" if has_written(claim) else claim.id
                )
                for claim, outputs in runs
            ],
        )

    def receive(self, link: Link) -> None:
        """Take in the answer to what was sent. Raises LinkError: it is sent again."""
        sent = self._sent
        if sent is None:
            return
        try:
            orders, answers = link.receive()
        except LinkError:
            self._sent = None
            raise
        for (client, runs, begun), answer in zip(sent, answers, strict=True):
            if answer != 1:  # Redis has written nothing
                for flow in begun:
                    flow.has_begun = False
            if isinstance(answer, list):
                self._on_dropped(answer)
            elif answer == 0:
                gone = WorkerLost("the client of this stream is gone")
                self._end(client, Failure(gone))
            elif answer < 0:
                self._outflows.is_full(client)
            else:
                self._outflows.has_room(client)
                for claim, outputs in runs:
                    self._written(claim, len(outputs))
        self._followed = [id_ for id_, _ in orders]
        for _, (what, id_) in orders:
            self._follow(what, id_)
        self._sent = None

    def fail(self, failure: Failure) -> None:
        """End the streams whose outputs were being sent with an error of ours."""
        sent, self._sent = self._sent, None
        for client in self._outflows.clients() if sent is not None else ():
            self._end(client, failure)

    def _end(self, client: str, failure: Failure) -> None:
        """The streams of a client fail, and their outputs that wait go nowhere."""
        with self._lock:
            claims = self._outflows.of(client)
            for claim in claims:
                flow = claim.outflow
                assert flow is not None
                flow.clear()
                if flow.outcome is not None:
                    self._on_outcome(flow.outcome.failed(failure))
                self._outflows.close(claim)
        for claim in claims:
            self._fail(claim, failure)

    def _written(self, claim: Claim, count: int) -> None:
        flow = claim.outflow
        assert flow is not None
        with self._lock:
            self._outflows.written(claim, count)
            has_room = 2 * len(flow.waiting) <= _MOST_WAITING
            goes_on = flow.is_behind and has_room and 2 * flow.size <= _MOST_BYTES_WAITING
            if goes_on:
                flow.is_behind = False
            if flow.outcome is not None and self._can_end(flow):
                outcome, flow.outcome = flow.outcome, None
                self._outflows.close(claim)
                self._on_outcome(outcome)
        if goes_on:
            self._rest(claim, flow)

    def _follow(self, what: bytes, id_: bytes) -> None:
        """Do what a client has asked for. It may be asked for again after a lost connection."""
        if what == b"drop":
            self._on_dropped([id_])
            return
        with self._lock:
            claim = self._claims.get(id_)
        if claim is not None and claim.outflow is not None:
            claim.outflow.is_held = what == b"hold"
            self._rest(claim, claim.outflow)


def written(claim: Claim) -> int:
    """How many outputs of a stream Redis has taken."""
    assert claim.outflow is not None
    return claim.outflow.written


def has_written(claim: Claim) -> bool:
    """Whether some of them are of this host."""
    assert claim.outflow is not None
    return claim.outflow.written > 0
