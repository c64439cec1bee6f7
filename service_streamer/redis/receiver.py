"""What a client reads from Redis: replies, outputs of streams, and hints."""

from __future__ import annotations

import logging
import math
import random
import threading
from collections.abc import Sequence

from ..errors import BadMessage, BrokerUnavailable
from ..remote.call_book import CallBook
from ..remote.deliveries import Deliveries
from ..remote.open_calls import Inflow, RemoteAnswer, RemoteCall
from ..reporting import report_bug, summary
from ..workers.protocol import Failure
from .ledger import SentCalls
from .link import Address, Backoff, Link, LinkError, Outages, entries, log
from .lost_calls import LostCalls
from .scripts import TRIM, Keys
from .wire import Wire

#: Read replies are deleted from Redis after this many entries or bytes.
_READ_ENTRIES = 64
_READ_BYTES = 4 << 20


class RedisDeliveries(Deliveries):
    """Finds outputs that Redis may have lost.

    Redis may have restarted with an earlier clock, and what came then is found when all is read
    again. If it is not, Redis has lost it.

    Attributes:
        lost: how many streams failed so.
    """

    def __init__(self, book: CallBook[SentCalls]) -> None:
        super().__init__(book)
        self.lost = 0
        self._reads_again = False  # outputs are missing: all replies that are there are read again
        self._rounds = 0  # how often that was done

    def _is_missing(self, call: RemoteCall, inflow: Inflow, first: int) -> None:
        missing, rounds = inflow.missing or (-1, 0)
        if missing != inflow.handed_out:
            inflow.missing = (inflow.handed_out, self._rounds)
            self._reads_again = True
        elif rounds < self._rounds:
            text = (
                f"Redis has lost the outputs of the stream from number {inflow.handed_out} to "
                f"{first - 1}"
            )
            self.lost += self._book.fail(call, BrokerUnavailable(text))

    def begin_again(self) -> bool:
        """Whether to read all replies again, from the first one."""
        begins, self._reads_again = self._reads_again, False
        self._rounds += begins
        return begins


class Receiver:
    """The reading side of one client, for a thread of its own.

    Attributes:
        link: its own, whose reads block.
        name: the client's, once it was started.
    """

    def __init__(
        self,
        address: Address,
        keys: Keys,
        wire: Wire,
        deliveries: RedisDeliveries,
        lost: LostCalls,
        *,
        reply_ttl: float,
    ) -> None:
        self._address = address
        self._keys = keys
        self._wire = wire
        self._deliveries = deliveries
        self._lost = lost
        self._life = math.ceil(1000 * reply_ttl)
        self._start_over()
        self.link = Link(address, blocks=address.longest_block)
        self.name = ""

    def _start_over(self) -> None:
        """Read the first reply that Redis has next, and count from there."""
        self._last = b"0"  # id of the last one read
        self._entries_read = self._bytes_read = self._outputs_read = 0  # and not deleted

    def run(self, outages: Outages, is_ending: threading.Event) -> None:
        """Read until the end. Survives everything."""
        backoff = Backoff(random.random)
        key = self._keys.replies(self.name)
        block = round(1000 * self._address.longest_block)
        link = self.link
        while not is_ending.is_set():
            try:
                if link.failure is not None:  # to detect it before the next reply
                    link.call("PING")
                    outages.over(self._address)
                if self._entries_read >= _READ_ENTRIES or self._bytes_read >= _READ_BYTES:
                    self._trim()
                answer = link.call(
                    "XREAD", "COUNT", _READ_ENTRIES, "BLOCK", block, "STREAMS", key, self._last
                )
                for _, self._last, fields in entries(answer):
                    self._entries_read += 1
                    self._bytes_read += sum(map(len, fields))
                    self._read(fields)
                if self._deliveries.begin_again():
                    self._start_over()
                elif not answer and self._entries_read:
                    # Idle: drop what was read, and read from the start again, since Redis may have
                    # restarted with an earlier clock. A repeated reply is ignored.
                    self._trim()
                backoff.succeeded()
            except LinkError as error:
                self._start_over()  # Redis may have deleted what was read
                if not is_ending.is_set():
                    outages.lost(error)
                is_ending.wait(backoff.failed())
            except BaseException as bug:  # callers must not wait for a dead thread
                if is_ending.is_set():
                    return
                self._lost.fail_all(Failure(report_bug("the streamer", bug)))
                self._entries_read = _READ_ENTRIES  # delete what it was reading, and go on after it
                is_ending.wait(backoff.failed())

    def _trim(self) -> None:
        """Delete what was read from Redis."""
        keys = (self._keys.replies(self.name), self._keys.unread(self.name))
        self.link.run(TRIM, keys, _after(self._last), self._outputs_read, self._life)
        self._start_over()

    def _read(self, fields: Sequence[bytes]) -> None:
        if fields and fields[0] == b"p":
            self._outputs_read += len(fields[1])
            self.hand_out(fields[1])
        elif fields and fields[0] != b"r":
            self._read_other(fields)
        else:
            self._deliver(fields[1::2])

    def _deliver(self, messages: Sequence[bytes]) -> None:
        replies: list[RemoteAnswer] = []
        for message in filter(None, messages):  # an empty one only wakes this thread
            try:
                replies.append(self._wire.read_reply(message, self.name))
            except Exception as error:  # of any kind: all callers rely on this thread
                log(logging.WARNING, "dropped a malformed reply in Redis: %.200s", summary(error))
                sender = self._wire.sender(message)
                if sender is not None and sender[0] == self.name:
                    reason = error.reason if isinstance(error, BadMessage) else "unreadable"
                    self._lost.noticed(sender[1], f"reply {reason}")
        self._deliveries.deliver(replies)

    def hand_out(self, message: bytes) -> None:
        """Hand out outputs of streams that have not come before."""
        try:
            runs = self._wire.read_outputs(message, self.name)
        except Exception as error:  # as of a reply; what is missing is noticed by the numbers
            log(logging.WARNING, "dropped malformed outputs in Redis: %.200s", summary(error))
            return
        self._deliveries.hand_out(runs)

    def _read_other(self, fields: Sequence[bytes]) -> None:
        """Read a mark or a notice: unverified, so only a hint to check the call."""
        name, value = fields[:2]
        if name == b"c":
            self._lost.marked(value)
        elif name == b"n" and (notice := self._wire.read_notice(value)) is not None:
            self._lost.noticed(notice[0], f"call {notice[1]}")


def _after(id_: bytes) -> bytes:
    time_, _, number = id_.partition(b"-")
    return b"%b-%d" % (time_, int(number or b"0") + 1)
