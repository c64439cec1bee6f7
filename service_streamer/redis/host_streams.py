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
from typing import Any, NamedTuple

from ..errors import WorkerLost
from ..remote.open_calls import OutputRun
from ..workers.protocol import Failure
from .claims import StreamClaim
from .host_state import HostState
from .link import Link, LinkError
from .scripts import OUTPUTS

#: Seconds between two looks for orders while no outputs come.
LOOK = 0.1

#: Replies that a client may leave unread, and bytes of outputs in them; then streams of it wait.
_MOST_UNREAD = 1000
_MOST_BYTES_UNREAD = 16 << 20

#: Maximum bytes of a client's message with outputs.
_MOST_OF_CLIENT = 1 << 20


class _Sent(NamedTuple):
    """What is sent to a client: runs of outputs, and those of which nothing was sent before."""

    client: str
    runs: list[tuple[StreamClaim, list[bytes]]]
    begun: list[StreamClaim]


class HostStreams:
    """What is sent of the streams of one host. For one thread at a time."""

    def __init__(self, state: HostState) -> None:
        self._state = state
        self._flows = state.flows
        self._keys = state.keys
        self._most_of_client = min(_MOST_OF_CLIENT, state.wire.max_bytes // 2)
        self._look_at = -math.inf
        self._looks_once_more = False  # for orders about the last calls
        self._followed: list[bytes] = []  # orders, which Redis may forget
        #: What is being sent, or its answer is not read: by client.
        self._sent: list[_Sent] | None = None

    @property
    def is_ready(self) -> bool:
        """Whether there are outputs to send."""
        return self._flows.is_ready

    @property
    def is_under_way(self) -> bool:
        """Whether a request is sent and its answer not read."""
        return self._sent is not None

    def wait(self, now: float) -> float:
        """Seconds until ``send`` has something to do; infinity if nothing is held."""
        with self._state.lock:
            if len(self._state.claims):
                self._looks_once_more = True
            elif not self._followed and not self._looks_once_more:
                return math.inf
            return 0.0 if self._flows.is_ready else max(0.0, self._look_at - now)

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
        state = self._state
        with state.lock:
            runs = dict(self._flows.next(most_bytes, self._most_of_client))
            clients = self._flows.clients()
            self._looks_once_more = len(state.claims) > 0
        self._look_at = now + LOOK
        keys = [self._keys.calls, self._keys.orders_of(state.name)]
        arguments: list[Any] = [state.name, state.reply_life, _MOST_UNREAD, _MOST_BYTES_UNREAD]
        arguments += [len(self._followed), *self._followed]
        for client in clients:
            of_client = runs.get(client, [])
            names = self._keys
            keys += (names.client(client), names.replies(client), names.unread(client))
            message = self._message(client, of_client) if of_client else b""
            first = [claim.id for claim, _ in of_client if not claim.written]
            later = [claim.id for claim, _ in of_client if claim.written]
            arguments += (message, len(first), len(later), *first, *later)
            begun = [claim for claim, _ in of_client if not claim.has_begun]
            for claim in begun:
                claim.has_begun = True
            sent.append(_Sent(client, of_client, begun))
        try:
            link.send(OUTPUTS, keys, *arguments)
        except LinkError:
            self._sent = None
            raise
        return True

    def _message(self, client: str, runs: list[tuple[StreamClaim, list[bytes]]]) -> bytes:
        return self._state.wire.outputs(
            client,
            [
                OutputRun(claim.number, claim.written, outputs, b"" if claim.written else claim.id)
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
                for claim in begun:
                    claim.has_begun = False
            if isinstance(answer, list):
                self._state.forget(answer)
            elif answer == 0:
                gone = WorkerLost("the client of this stream is gone")
                self._state.fail_streams(client, Failure(gone))
            elif answer < 0:
                self._flows.mark_full(client)
            else:
                self._flows.mark_free(client)
                for claim, outputs in runs:
                    self._state.written(claim, len(outputs))
        self._followed = [id_ for id_, _ in orders]
        for _, (what, id_) in orders:  # one may come again after a lost connection
            if what == b"drop":
                self._state.forget([id_])
            else:
                self._state.pause(id_, is_held=what == b"hold")
        self._sent = None

    def fail(self, failure: Failure) -> None:
        """End the streams whose outputs were being sent with an error of ours."""
        sent, self._sent = self._sent, None
        for client in self._flows.clients() if sent is not None else ():
            self._state.fail_streams(client, failure)
