"""A worker host's side: claims calls, lets the pool compute them, and answers them.

     Redis      claimer                    the pool                finisher
     -----      -------                    --------                --------
     calls ───▶ XREADGROUP, while
                there is room
                verify, read
                engine.submit ───────────▶ batches, retries,
                                           isolation
                                           reply.end ────────────▶ FINISH, all outcomes
     replies ◀──────────────────────────────────────────────────── since the last one; and
                                           reply.put_part ───────▶ OUTPUTS of streams
     calls ◀─────────────────────────────────────────────────────▶ KEEP, every third of
                                                                   claim_timeout

Redis takes only the first reply of a call, whichever hosts have claimed it. Each of the two threads
has its own connection, and reconnects when it is lost.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import time
from collections.abc import Callable

from ..engine.engine import Engine
from ..engine.threads import start_thread
from ..errors import BrokerUnavailable, StreamerError, WorkerStartError
from ..options.table import RedisWorkerOptions
from ..reporting import counted
from .claimer import Claimer
from .finisher import Finisher
from .host_state import HostState
from .link import Address, Link, LinkError, Outages, log
from .redis_stats import RedisWorkerStats
from .scripts import LEAVE
from .wire import Wire

#: Seconds that the end may take if Redis does not answer: in total, and to send outcomes.
_LAST_GRACE = 6.0
_LAST_OUTCOMES = 3.0
_LAST_MOMENT = 0.5


class Host:
    """Serves the calls of one prefix with an engine, whose items come encoded. Any thread.

    Args:
        engine: started; owned by whoever made it.
        name: unique among the hosts of a Redis.
        predecessor: the one that served with this engine before, and is closed: its totals go on.
    """

    def __init__(
        self,
        address: Address,
        wire: Wire,
        engine: Engine,
        options: RedisWorkerOptions,
        name: str,
        predecessor: Host | None = None,
    ) -> None:
        state = HostState(address, wire, engine, options, name)
        self._state = state
        self._finisher = Finisher(state, on_failure=self._fail)
        self._claimer = Claimer(state, self._finisher, on_failure=self._fail)
        self._parting = Link(address)
        self._is_handed_back = False
        #: Called when this host fails, with the reason in ``failure``.
        self.on_failure: Callable[[], None] = lambda: None
        self.failure: BaseException | None = None
        #: Why calls were neither answered nor handed back at the end, if any.
        self.left_behind: BrokerUnavailable | None = None
        self._outages = Outages((self._claimer.link, self._finisher.link), "this worker host waits")
        if predecessor is not None:
            state.counts = predecessor._state.counts
            self._outages.count = predecessor._outages.count
        self._claiming = threading.Thread(
            target=lambda: self._claimer.run(self._outages),
            name="service_streamer claimer",
            daemon=True,
        )
        self._finishing = threading.Thread(
            target=lambda: self._finisher.run(self._outages, lambda: self.failure is not None),
            name="service_streamer finisher",
            daemon=True,
        )

    def start(self) -> None:
        engine = self._state.engine
        engine.on_answered = self._finisher.finish_now
        engine.when_ended(self._engine_ended)
        self._claiming.start()
        self._finishing.start()

    def stats(self) -> RedisWorkerStats:
        return RedisWorkerStats(
            state=self._state_name(),
            pool=self._state.engine.stats(),
            held=len(self._state),
            outages=self._outages.count,
            **self._state.counts,
        )

    def _state_name(self) -> str:
        if self.failure is not None:
            return "failed"
        if self._state.is_leaving.is_set():
            return "leaving"
        if self._outages.is_on:
            return "disconnected"
        return "serving" if self._state.has_joined else "starting"

    # -- the end

    def _engine_ended(self) -> None:
        """In the engine's thread: it was closed, or it failed."""
        if not self._state.is_leaving.is_set():
            try:
                self._state.engine.wait_serving(0)
            except StreamerError as error:
                self._fail(error)
            self.leave()  # or the claimer would claim further calls

    def _fail(self, error: BaseException) -> None:
        if self.failure is not None:  # keep the first reason
            return
        self.failure = error
        # The log already says why the model could not be loaded.
        why = "its model could not be loaded" if isinstance(error, WorkerStartError) else error
        log(logging.ERROR, "worker host %s has stopped serving: %s", self._state.name, why)
        self.on_failure()

    def leave(self) -> None:
        """Claim no more calls. Does not wait for Redis."""
        if self._finisher.has_drained:  # it has left already
            return
        self._state.is_leaving.set()
        self._state.has_room.ring()
        start_thread(self._wake_claimer, "leaving")

    def _wake_claimer(self) -> None:
        """Wake the claimer from a blocked read; if this fails, the read ends by itself."""
        link = Link(self._state.address)
        with contextlib.suppress(LinkError):
            link.call("XADD", self._state.inbox, "NOMKSTREAM", "*", "end", "")
        link.close()

    def close(self) -> None:
        """Send the last outcomes, hand back the other claims. Call after ``leave``.

        If Redis does not answer within seconds, ``left_behind`` says what stays there.
        """
        if self._finisher.has_drained:
            return
        self._finisher.give_up_at = time.monotonic() + _LAST_OUTCOMES
        self._finisher.has_drained = True
        self._state.has_work.ring()
        parting = start_thread(self._part, "parting")
        parting.join(_LAST_GRACE)
        self._parting.close()  # ends blocked reads, like the next two
        self._claimer.link.close()
        self._finisher.link.close()
        for thread in (parting, self._claiming, self._finishing):
            thread.join(_LAST_MOMENT)
        left = len(self._state)
        if self._is_handed_back or not left:
            return
        failure = self._parting.failure or self._finisher.link.failure or self._claimer.link.failure
        self.left_behind = BrokerUnavailable(
            f"{failure or f'{self._state.address} does not answer'}; {counted(left, 'call')} "
            "claimed by this worker host could not be answered or handed back: other hosts claim "
            f"them {self._state.options.claim_timeout} s after its last sign of life"
        )
        log(logging.WARNING, "%s", self.left_behind)

    def _part(self) -> None:
        """Leave, over its own connection: those of the other threads may be dead."""
        self._claiming.join(2 * _LAST_MOMENT)
        self._finishing.join(_LAST_OUTCOMES - _LAST_MOMENT)
        self._finisher.link.close()  # frees a connection: a user's client may allow only two
        keys = self._state.keys
        with self._state.lock:
            clients = [(claim.id, keys.client(claim.client)) for claim in self._state.claims]
        try:
            self._state.counts["handed_back"] += self._parting.run(
                LEAVE,
                (keys.calls, self._state.inbox, keys.model, keys.orders_of(self._state.name)),
                self._state.name, keys.inboxes,
                *itertools.chain.from_iterable(clients),
            )  # fmt: skip
            self._is_handed_back = True
        except LinkError as error:
            log(
                logging.WARNING, "%s; this worker host leaves without handing back its calls", error
            )
        finally:
            self._parting.close()
