"""What a client reads from Redis: replies, outputs of streams, and notices."""

from __future__ import annotations

import logging
import math
import random
import threading
from collections.abc import Callable, Sequence

from ..errors import BadMessage, BrokerUnavailable
from ..options.table import RedisStreamerOptions
from ..remote.deliveries import Deliveries
from ..remote.open_calls import Inflow, RemoteAnswer, RemoteCall
from ..reporting import report_bug, summary
from ..workers.protocol import Failure
from .link import Address, Backoff, Link, LinkError, Outages, entries, log
from .scripts import TRIM, Keys
from .sent_calls import SentCalls
from .wire import REASONS, Wire

#: Read replies are deleted from Redis after this many entries or bytes.
_READ_ENTRIES = 64
_READ_BYTES = 4 << 20


class Receiver(Deliveries):
    """The reading side of one client, for a thread of its own.

    Args:
        on_bug: called with the failure of all open calls.

    Attributes:
        link: its own, whose reads block.
        name: the client's, once it was started.
        unreadable: how many calls failed since one side could not read the other's message.
        lost: how many streams failed since Redis had lost outputs.
    """

    def __init__(
        self,
        address: Address,
        wire: Wire,
        calls: SentCalls,
        options: RedisStreamerOptions,
        *,
        on_bug: Callable[[Failure], None],
    ) -> None:
        super().__init__(calls)
        self._address = address
        self._keys = Keys(options.prefix)
        self._wire = wire
        self._prefix = options.prefix
        self._life = math.ceil(1000 * options.reply_ttl)
        self._on_bug = on_bug
        self.link = Link(address, blocks=address.longest_block)
        self.name = ""
        self.unreadable = self.lost = 0
        self._warned: set[str] = set()  # texts of which a warning was logged
        self._reads_again = False  # outputs are missing: all replies that are there are read again
        self._rounds = 0  # how often that was done
        self._start_over()

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
                if self._reads_again:
                    self._reads_again = False
                    self._rounds += 1
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
                self._on_bug(Failure(report_bug("the streamer", bug)))
                self._entries_read = _READ_ENTRIES  # delete what it was reading, and go on after it
                is_ending.wait(backoff.failed())

    def _trim(self) -> None:
        """Delete what was read from Redis."""
        keys = (self._keys.replies(self.name), self._keys.unread(self.name))
        self.link.run(TRIM, keys, _after(self._last), self._outputs_read, self._life)
        self._start_over()

    def _read(self, fields: Sequence[bytes]) -> None:
        if not fields or fields[0] == b"r":
            self._read_replies(fields[1::2])
        elif fields[0] == b"p":
            self._outputs_read += len(fields[1])
            self._read_outputs(fields[1])
        elif fields[0] == b"n" and (notice := self._wire.read_notice(fields[1])) is not None:
            number, reason = notice
            self._fail_unreadable(number, "a worker host could not read this call", reason)

    def _read_replies(self, messages: Sequence[bytes]) -> None:
        replies: list[RemoteAnswer] = []
        for message in filter(None, messages):  # an empty one only wakes this thread
            try:
                replies.append(self._wire.read_reply(message, self.name))
            except Exception as error:  # of any kind: all callers rely on this thread
                log(logging.WARNING, "dropped a malformed reply in Redis: %.200s", summary(error))
                sender = self._wire.sender(message)
                if sender is not None and sender[0] == self.name:
                    reason = error.reason if isinstance(error, BadMessage) else "unreadable"
                    what = "this client could not read the reply to the call"
                    self._fail_unreadable(sender[1], what, reason)
        self.deliver(replies)

    def _fail_unreadable(self, number: int, what: str, reason: str) -> None:
        """Fail a call, on a word that is not signed: who can write it can delete calls, too."""
        with self._calls.lock:
            call = self._calls.get(number)
        text = f"{what}: {REASONS[reason]}"
        if call is None or not self._calls.fail(call, BadMessage(text, reason=reason)):
            return
        self.unreadable += 1
        if text not in self._warned:
            self._warned.add(text)
            log(logging.WARNING, "%s (prefix %r)", text, self._prefix)

    def _read_outputs(self, message: bytes) -> None:
        """Hand out outputs of streams that have not come before."""
        try:
            runs = self._wire.read_outputs(message, self.name)
        except Exception as error:  # as of a reply; what is missing is noticed by the numbers
            log(logging.WARNING, "dropped malformed outputs in Redis: %.200s", summary(error))
            return
        self.hand_out(runs)

    def _is_missing(self, call: RemoteCall, inflow: Inflow, first: int) -> None:
        """Redis may have restarted with an earlier clock: all that is there is read again, once.

        If what is missing is not found then, Redis has lost it.
        """
        missing, rounds = inflow.missing or (-1, 0)
        if missing != inflow.handed_out:
            inflow.missing = (inflow.handed_out, self._rounds)
            self._reads_again = True
        elif rounds < self._rounds:
            text = (
                f"Redis has lost the outputs of the stream from number {inflow.handed_out} to "
                f"{first - 1}"
            )
            self.lost += self._calls.fail(call, BrokerUnavailable(text))


def _after(id_: bytes) -> bytes:
    time_, _, number = id_.partition(b"-")
    return b"%b-%d" % (time_, int(number or b"0") + 1)
