"""A client's reply side: what has come goes to the callers, once, and each stream in order."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable

from ..engine.backend import Mailbox
from ..errors import Overloaded
from ..reporting import quiet_log
from .open_calls import Inflow, OpenCalls, OutputRun, RemoteAnswer, RemoteCall, answer

log = quiet_log(__name__)

#: A stream fails of which so many outputs wait for the consumer: it is of a model that cannot rest.
_MOST_BEHIND = 100_000


class Deliveries:
    """For one thread that receives; ``pass_on`` is for any.

    What comes twice, as after an outage, is delivered once.

    Attributes:
        outputs: how many outputs of streams have come.
    """

    def __init__(self, calls: OpenCalls) -> None:
        self._calls = calls
        self._passing_lock = threading.RLock()  # guards what passes on outputs
        self.outputs = 0

    def deliver(self, answers: Iterable[RemoteAnswer]) -> None:
        """Replies have come."""
        open_calls = self._calls
        with open_calls.lock:
            answers = [each for each in answers if self._is_next(each)]
            calls = [open_calls.answered(each.number) for each in answers]
            if open_calls.is_closing:
                open_calls.changed.notify_all()
        for call, reply in zip(calls, answers, strict=True):
            if call is not None and call.inflow is not None:
                call.inflow.add(reply.outputs)
                call.inflow.end = ([], reply.failure)
                _post(self._pass_on(call, call.inflow))
            elif call is not None:
                answer(call, call.reply, reply.outputs, reply.failure)
        if open_calls.is_abandoned:
            open_calls.doorbell.ring()

    def _is_next(self, reply: RemoteAnswer) -> bool:
        """Whether a reply can be delivered: no output before those of it is missing. Locked.

        Of a stream, outputs that have come before are removed.
        """
        call = None if reply.first is None else self._calls.stream(reply.number)
        if call is None or call.inflow is None or reply.first is None:
            return True
        if reply.first > call.inflow.handed_out:
            self._is_missing(call, call.inflow, reply.first)
            return False
        del reply.outputs[: call.inflow.handed_out - reply.first]
        return True

    def _is_missing(self, call: RemoteCall, inflow: Inflow, first: int) -> None:
        """Outputs of a stream are missing that come before the ``first``. Locked."""
        raise NotImplementedError

    def hand_out(self, runs: Iterable[OutputRun]) -> None:
        """Outputs of streams have come."""
        mailboxes: set[Mailbox | None] = set()  # each loop is woken once
        for run in runs:
            call = self._take_over(run)
            if call is not None and call.inflow is not None:
                mailboxes.add(self._pass_on(call, call.inflow))
        for mailbox in mailboxes:
            _post(mailbox)

    def _take_over(self, run: OutputRun) -> RemoteCall | None:
        """Note the outputs of a run that have not come before; the call if they are to go on."""
        open_calls = self._calls
        with open_calls.lock:
            call = open_calls.stream(run.number, run.id)
            if call is None or call.inflow is None:
                return None
            inflow = call.inflow
            if run.first > inflow.handed_out:
                self._is_missing(call, inflow, run.first)
                return None
            outputs = run.outputs[inflow.handed_out - run.first :]
            inflow.add(outputs)
            self.outputs += len(outputs)
            waiting = len(inflow.backlog)
            if open_calls.is_closing:
                open_calls.changed.notify_all()
        if waiting > _MOST_BEHIND:
            text = f"{waiting} outputs of the stream wait for their consumer"
            open_calls.fail(call, Overloaded(text))
        return call

    def pass_on(self, call: RemoteCall) -> None:
        """The consumer of a stream takes more."""
        assert call.inflow is not None
        _post(self._pass_on(call, call.inflow))

    def _pass_on(self, call: RemoteCall, inflow: Inflow) -> Mailbox | None:
        """Give the consumer of a stream what it takes for now. In any thread.

        More may come at once than it takes before the host that computes it learns of it.

        Returns:
            The mailbox that is to deliver, to wake its task.
        """
        mailbox: Mailbox | None = None
        with self._passing_lock:
            if inflow.is_passing:  # the consumer lets it go on while it is given an output
                return None
            inflow.is_passing = True
            try:
                while (reply := call.reply) is not None and not inflow.is_held and inflow.backlog:
                    mailbox = reply.put_part(inflow.backlog.popleft()) or mailbox
                if reply is not None and inflow.end is not None and not inflow.backlog:
                    (outputs, failure), inflow.end = inflow.end, None
                    answer(call, reply, outputs, failure)
            except BaseException:  # as of a callback
                log(logging.ERROR, "the consumer of a stream raised", exc_info=True)
            finally:
                inflow.is_passing = False
        return mailbox


def _post(mailbox: Mailbox | None) -> None:
    if mailbox is not None:
        mailbox.deliver_soon()
