"""A client's thread: finds the pool or starts it, and stays with it; then with the next one."""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Callable
from typing import Any

from ..engine.threads import Doorbell, rest_if_copied
from ..errors import PoolMismatch, StreamerBroken, StreamerError, WorkerLost
from ..remote.deliveries import Deliveries
from ..remote.open_calls import OutputRun, RemoteAnswer, answer
from ..reporting import counted, quiet_log
from ..workers.protocol import Failure
from .pool_calls import PoolCall, PoolCalls
from .pool_link import Connector, PoolLink
from .pool_protocol import ANSWER, FREED, PARTING, RELEASED, WORKERS, own_fault, times

log = quiet_log(__name__)

#: From more open calls than these on, what is sent waits for more. Measured: a thread that submits
#: 20 000 calls has up to twice the rate, and 64 callers cost the pool a sixth less.
_MANY = 8

#: How often in a row a pool may end before it has said a word; for ``times.failing`` at the least.
#: Somebody who kills pools may hit some of them early; one that cannot start never says a word.
_MAX_FAILURES = 5

#: So often a client that no pool has served yet tries if what a pool said may pass; else once. The
#: tries are so far apart that it serves with what comes up within two seconds.
_MAX_PASSING_FAILURES = 3

#: Seconds between two attempts, from the first to the longest while no pool has ended.
_FIRST_DELAY, _MAX_DELAY = 0.005, 0.1


class ClientLoop(Doorbell):
    """Connects, sends what is open, and takes in answers. In the client's thread.

    For any thread: ``ring`` and ``fail_all``.

    Args:
        connector: finds the pool, or starts it.
        calls: the client's open ones.
        deliveries: of what has come.
        is_done: whether the client has ended.
        may_rerun: whether a call may be computed twice.

    Attributes:
        link: while connected.
        on_workers: called when the workers of the pool, or the connection to it, have changed.
    """

    def __init__(
        self,
        connector: Connector,
        calls: PoolCalls,
        deliveries: Deliveries,
        is_done: Callable[[], bool],
        *,
        may_rerun: bool,
    ) -> None:
        super().__init__()
        self._connector = connector
        self._calls = calls
        self.link: PoolLink | None = None
        self._deliveries = deliveries
        self.on_workers: Callable[[], None] = lambda: None
        self._is_done = is_done
        self._may_rerun = may_rerun
        self._has_served = False  # any pool
        self._pid = 0  # of the process that runs it, which may be a fork of this one

    def ring(self) -> None:
        """Send what was put: in this thread, or in the client's if many calls are open."""
        link = self.link
        if link is not None:
            try:
                if len(self._calls) > _MANY:
                    link.write_soon()
                else:
                    link.write()
            except BaseException:  # of a signal handler, or a bug of ours
                link.cut()
                raise
        if link is None or self._calls.is_abandoned:  # then it may have been the last call
            self._connector.wake()

    def run(self) -> None:
        """What the thread does: one pool after the other."""
        self._pid = os.getpid()
        while True:
            try:
                if self._is_done():
                    return
                with self._connector.open():
                    while not self._is_done():
                        self._serve()
            except BaseException as error:  # callers must not wait for a dead thread
                rest_if_copied(self._pid)
                if isinstance(error, OSError):  # no descriptors: callers are told, until there are
                    self._fail_unreached(error)
                else:
                    self.fail_all(own_fault(error))
                time.sleep(_MAX_DELAY)

    def _serve(self) -> None:
        """Until no pool can be had, or this client ends."""
        connector = self._connector
        failures, delay, served = 0, _FIRST_DELAY, time.monotonic()
        try:
            while not self._is_done():
                elections = connector.elections
                link = connector.connect()
                if link is not None or connector.elections > elections:
                    connector.failure = None  # that was another pool's
                if link is None:  # somebody else is about to listen, or about to end
                    failures += connector.elections - elections
                elif self._visit(link):
                    failures, delay, served = 0, _FIRST_DELAY, time.monotonic()
                    self._has_served = True
                    # It was told to end, or what it sends makes us fail: until it is wanted.
                    if self._calls.read is not None or link.has_failed:
                        self._rest_until_called()
                    continue
                else:
                    failures += 1
                is_failing = (
                    failures >= _MAX_FAILURES and time.monotonic() - served >= times.failing
                )
                may_pass = connector.failure is not None and connector.failure.may_pass
                # One that has served may do so again soon: what it needs may just be restarted.
                if connector.failure is not None and not self._has_served:
                    is_failing |= failures >= (_MAX_PASSING_FAILURES if may_pass else 1)
                if is_failing and not self._is_done():
                    raise self._broken(failures)
                self._pause(times.between_failures if may_pass else delay)
                longest = times.between_failures if failures else _MAX_DELAY
                delay = min(2 * delay, longest)
        except StreamerError as error:
            self.fail_all(Failure(error))
        except OSError as error:
            self._fail_unreached(error)
        self._rest_until_called()  # which tries again

    def _broken(self, failures: int) -> StreamerBroken:
        why = f"its log says why: {self._connector.log}"
        if self._connector.failure is not None:
            why = self._connector.failure.why
        often = f"{failures} times " if failures > 1 else ""
        return StreamerBroken(
            f"the process of pool {self._connector.name!r} has ended {often}before it could serve; "
            f"{why}"
        )

    def _fail_unreached(self, error: OSError) -> None:
        why = f"the pool can be neither reached nor started: {error}"
        if error.errno == errno.EMFILE:
            why += "; raise the limit (ulimit -n), or build fewer streamers"
        self.fail_all(Failure(StreamerBroken(why)))

    def _visit(self, link: PoolLink) -> bool:
        """Stay with a pool until it is gone, or this client ends; whether it has served.

        Raises:
            PoolMismatch: see ``PoolLink.welcome``.
        """
        messages: list[Any] | None = []
        try:
            messages = link.welcome(self._is_done)
            if messages is None:
                return False
            self._connected(link)
            while messages is not None and not self._is_done():
                self._take_in(link, messages)
                messages = []  # or the last results would live until the next ones come
                messages = link.read()
        except PoolMismatch:
            raise
        except Exception as error:
            rest_if_copied(self._pid)
            link.has_failed = True
            self._fail_touched(messages or [], own_fault(error))
        finally:
            self._disconnected(link)
        return True

    def _fail_touched(self, messages: list[Any], failure: Failure) -> None:
        """Fail the calls of these messages; if they name no open call, fail all."""
        with self._calls.lock:
            calls = [call for each in messages if (call := self._calls.get(each[0])) is not None]
            calls = [call for call in calls if self._calls.end(call)]
            self._calls.changed.notify_all()
        self._calls.fail_soon(calls, failure)
        self._calls.answer_failed()
        if not calls:
            self.fail_all(failure)

    def _take_in(self, link: PoolLink, messages: list[Any]) -> None:
        answers: list[tuple[Any, ...]] = []
        for message in messages:
            if message[0] > 0:
                answers.append(message)
                continue
            if answers:  # they came first
                self._deliver(link, answers)
                answers = []
            self._handle(*message)
        if answers:
            self._deliver(link, answers)

    def _handle(self, kind: int, number: Any, *values: Any) -> None:
        if kind == ANSWER:
            (value,) = values
            question = self._calls.questions.pop(number, None)
            if question is not None:  # else whoever has asked has gone
                question.reply.set_result(value)
        elif kind == FREED:
            with self._calls.lock:
                self._calls.free(number)
        elif kind == PARTING:
            self._calls.read = number
        elif kind == WORKERS:
            self.on_workers()

    def _deliver(self, link: PoolLink, answers: list[tuple[Any, ...]]) -> None:
        """Hand out what has come at a time, outputs of a stream before its end."""
        ends: list[RemoteAnswer] = []
        runs: dict[int, OutputRun] = {}
        calls, results = self._calls, link.results
        for message in answers:
            number, outcome = message[0], message[1]
            outputs = outcome if type(outcome) is list else [outcome]
            if results is not None and type(outcome) is not bytes:
                results.receive(outputs)
            call = calls.get(number)
            if call is None:
                continue
            if len(message) == 2:  # an output of a stream
                if number not in runs and call.inflow is not None:
                    runs[number] = OutputRun(number, call.inflow.handed_out, [], b"")
                runs[number].outputs.extend(outputs)
            elif isinstance(outcome, Failure):
                ends.append(RemoteAnswer(number, [], outcome))
            else:
                call.spent = message[2:] if len(message) == 4 else message[2]
                ends.append(RemoteAnswer(number, outputs))
        if runs:
            self._deliveries.hand_out(runs.values())
            self._calls.answer_failed()  # streams whose consumers are too far behind
        if ends:
            self._deliveries.deliver(ends)
        if results is not None and (released := results.pop_ended()):
            link.put((RELEASED, 0, released))
            if not len(calls):  # else it goes with what is sent next, or comes here again
                link.write()

    def _pause(self, seconds: float) -> None:
        """Wait so long, though callers ring meanwhile; or until this client ends."""
        until = time.monotonic() + seconds
        while not self._is_done() and (left := until - time.monotonic()) > 0:
            self._connector.rest(left)

    def _rest_until_called(self) -> None:
        while not (self._is_done() or len(self._calls) or self._calls.questions):
            self._connector.rest(None)

    def _connected(self, link: PoolLink) -> None:
        """The pool has said its first word: send what is open."""
        with self._calls.lock:
            self.link = link
            self._calls.connected(link)
        link.write()
        self.on_workers()

    def _disconnected(self, link: PoolLink) -> None:
        """The pool is gone: what it may not compute again fails."""
        lost: list[PoolCall] = []
        link.close()  # first: no thread sends any more
        with self._calls.lock:
            was_connected = self.link is link
            if was_connected:
                self.link = None
                lost = self._calls.disconnected(may_rerun=self._may_rerun)
                replies = [(call, call.reply) for call in lost]
                self._calls.changed.notify_all()
        if not was_connected:
            return
        self.on_workers()
        if lost:
            log(
                logging.WARNING, "pool %s is gone with %s that may not be computed again",
                self._connector.name, counted(len(lost), "call"),
            )  # fmt: skip
            text = "the pool died, or the connection to it, while it held this call, and "
            why = "outputs of it were handed out" if self._may_rerun else "retry is False"
            for call, reply in replies:
                answer(call, reply, failure=Failure(WorkerLost(text + why)))

    def fail_all(self, failure: Failure) -> None:
        """No pool can be had: nothing that is open will be computed."""
        open_calls = self._calls
        with open_calls.lock:
            calls = open_calls.end_all()
            replies = [(call, call.reply) for call in calls]
            questions, open_calls.questions = open_calls.questions, {}
            open_calls.changed.notify_all()
        for call, reply in replies:
            answer(call, reply, failure=failure)
        for question in questions.values():
            question.reply.set_result(failure)
