"""What the batcher moves about: calls, their spans, and the record of each batch. No decisions.

A batch has one record from its cut on. The worker's report is put into it when that comes back, and
metrics, ``explain``, spans and ``Future.timing`` read it there. A new field of a batch needs a line
in ``BatchReport``, if the worker knows it, or in ``BatchRecord``; a line where it is filled in; and
a line where it is read.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

from ..options.checks import check_priority, check_tenant


class Timing(NamedTuple):
    """Where the time of a call went, in seconds; of its last batch, if it took several.

    Attributes:
        queued: it waited for a worker, or for expected calls.
        sent: on its way to the model, and behind the batch before, if there was one.
        computed: in the model.
        returned: on its way back.
        first_output: of a model of steps, from when the call was accepted to its first output: in
            the model, or of a stream in this process. None for other models, and without outputs.
        between_outputs: from one output to the next, the mean; None for less than two.
        longest_between: the longest of these times; likewise.
    """

    queued: float
    sent: float
    computed: float
    returned: float
    first_output: float | None = None
    between_outputs: float | None = None
    longest_between: float | None = None

    @property
    def total(self) -> float:
        """From when it was accepted to when its result went out to its caller."""
        return self.queued + self.sent + self.computed + self.returned


class CallOptions(NamedTuple):
    """What a caller wants of one call, beside its items and their time. Never changed.

    It is made where the call is, and goes with it to the queue, also over Redis and in a shared
    pool. A new option needs a field and its check here, and a line where it is used. Calls share a
    computation that waits only if it is alike in both, unless ``serves`` compares it. A host behind
    Redis has it from when it claims the call: seconds count from then.
    """

    priority: int = 0  # the higher goes first
    tenant: str = ""  # whose call it is; tenants share the workers by their weights
    #: Whether its time was given with the call, and not by a default that all have: then it goes
    #: before all whose time ends later, whatever their priority.
    has_deadline: bool = False
    stream: bool = False  # whether the outputs of its one item are wanted as they come

    def checked(self) -> CallOptions:
        """These, of values from outside. Raises TypeError, ValueError."""
        if type(self.has_deadline) is not bool or type(self.stream) is not bool:
            raise TypeError("has_deadline and stream must be True or False")
        return CallOptions(check_priority(self.priority), check_tenant(self.tenant), *self[2:])

    def serves(self, other: CallOptions) -> bool:
        """Whether an item that waits with these goes no later than with ``other``.

        The deadlines themselves are for the caller to compare: the nearer one goes first. Options
        that are not compared here have to be equal.
        """
        if self is other:
            return True
        if self != other._replace(priority=self.priority, has_deadline=self.has_deadline):
            return False
        return self.has_deadline or (not other.has_deadline and self.priority >= other.priority)


#: Of nearly all calls: compared by identity.
ORDINARY = CallOptions()


class Reason(enum.Enum):
    """Why a batch was cut when it was, and with no more items than it has."""

    __hash__ = object.__hash__  # that of ``Enum`` is in Python, and each batch is counted by it

    FULL = "it had batch_size items"
    PLACE = "a place was free"
    COST = "one more item would have exceeded max_batch_cost"
    PAYS = "a larger batch would have been slower for each item"
    TRIED = "little was known yet of the cost of larger batches"
    PADDING = "the lengths of the other items were too different"
    LONG = "a larger batch would have taken longer, and hardly less for each item"
    TURN = "small calls were expected, and not to wait for more of the large ones"
    SHARE = "the other items were left to the other workers"
    ALONE = "no more calls were expected soon"
    COMPANY = "the expected calls had arrived"
    LATE = "the expected calls did not arrive in time"
    MAX_LATENCY = "the oldest item had waited for max_latency"
    DEADLINE = "the deadline of an item was near"
    STAGE = "the slowest stage of its worker was about to be free"
    AGAIN = "its items were run again after a failure"


class CallState(enum.Enum):
    """Who holds a call. ``batching`` changes it, and the counts that follow from it.

    state      held by                               its items
    -----      -------                               ---------
    NEW        its caller                            count nowhere: it is not accepted
    WAITING    the queue                             some are not cut; others may be in batches
    RUNNING    batches, or parts to be run again     all are cut
    OVER       nobody: it was answered, it failed,   what is still in batches is ignored
               expired or was withdrawn
    """

    NEW = enum.auto()
    WAITING = enum.auto()
    RUNNING = enum.auto()
    OVER = enum.auto()


#: A member of an enum is looked up in Python, and every call asks for this one.
_OVER = CallState.OVER


@dataclass(slots=True, eq=False, repr=False)
class Call:
    """One ``predict``/``submit``: its items as payloads, and its outputs as they come in.

    A streamer, or whoever reads it from a message, makes it with all that its caller wants, and
    hands it to a backend.
    """

    payloads: Sequence[Any]  # the items; the engine replaces them by what it sends to a worker
    reply: Any = None  # where the outcome goes, set before it is submitted; opaque here
    timeout: float | None = None  # how long its caller waits, seconds; None for ever
    options: CallOptions = ORDINARY
    #: Whether the backend fails the call when its time ends. If not, its caller withdraws it.
    is_watched: bool = False
    more: bool = False  # whether calls follow at once, and then ``flush``, that share its batch
    size: int = field(init=False)  # its items
    state: CallState = field(default=CallState.NEW, init=False)  # who holds it
    arrived_at: float = field(default=0.0, init=False)
    deadline: float = field(default=math.inf, init=False)  # when its caller stops waiting
    lengths: Sequence[float] | None = field(default=None, init=False)  # None: each counts one
    context: Any = field(default=None, init=False)  # what an observer noted at the submission
    pending: int = field(init=False)  # items that are not cut into a batch yet
    group: Any = field(default=None, init=False)  # of ``batching.turns``, while it waits there
    unanswered: int = field(init=False)  # items without an output
    #: By position; empty until the first batch with items of it is back, and then ``NO_OUTPUT``
    #: where that one had no item.
    outputs: list[Any] = field(init=False)
    failure: Any = field(default=None, init=False)  # why it failed; opaque here
    #: The last batch with items of it that came back with results. Not there before the first.
    batch: BatchRecord = field(init=False)

    # Of streams:
    is_held: bool = field(default=False, init=False)  # its item rests: its consumer is behind
    #: Its outputs so far, if it can go on where they end.
    handed_out: list[Any] | None = field(default=None, init=False)
    part_at: float | None = field(default=None, init=False)  # when the last one was handed out
    # Not there before the first one: how many were handed out, and see ``Timing``.
    parts: int = field(init=False)
    first_output: float = field(init=False)
    longest_between: float = field(init=False)

    def __post_init__(self) -> None:
        self.size = self.pending = self.unanswered = len(self.payloads)
        self.outputs = NO_OUTPUTS

    @property
    def is_stream(self) -> bool:
        return self.options.stream

    @property
    def is_running(self) -> bool:
        """Whether a part of it has been cut into a batch."""
        return self.pending < self.size

    @property
    def is_over(self) -> bool:
        """Answered, failed, withdrawn or expired; never changes back."""
        return self.state is _OVER

    @property
    def timing(self) -> Timing | None:
        """Where its time went; None unless it was answered with results."""
        if self.unanswered or self.failure is not None:
            return None
        batch, report = self.batch, self.batch.report
        sent, computed, returned = batch.spent()
        queued = batch.cut_at - self.arrived_at
        first = between = longest = None
        if self.part_at is not None:
            first = self.first_output
            if self.parts > 1:
                between = (self.part_at - self.arrived_at - first) / (self.parts - 1)
                longest = self.longest_between
        elif report.output_times is not None:
            first, between, longest = report.output_times
            first += queued + sent
        return Timing(queued, sent, computed, returned, first, between, longest)

    def handed_out_at(self, now: float) -> float | None:
        """An output of a stream goes out; how long after the one before, None for the first."""
        before, self.part_at = self.part_at, now
        if before is None:
            self.first_output, self.parts, self.longest_between = now - self.arrived_at, 1, 0.0
            return None
        self.parts += 1
        between = now - before
        if between > self.longest_between:
            self.longest_between = between
        return between


#: Where an output has not come yet, of a call of which others have.
NO_OUTPUT: Any = object()

#: Never changed: a list of its own for each call is one thing more for the garbage collector.
NO_OUTPUTS: list[Any] = []

#: A call, and where its items that are in a batch start and stop. A plain tuple: one is made for
#: every call, and a NamedTuple takes five times as long.
Span: TypeAlias = tuple[Call, int, int]


#: Never changed, as ``NO_OUTPUTS``: in the place of what a report had when its batch came back.
_NO_FAILURES: dict[int, Any] = {}


#: The names of a worker's stages for users, who know the methods of their models. Decoding counts
#: as preprocess, encoding as postprocess, and ``predict`` as forward; see ``workers.runner``.
STAGES = ("preprocess", "forward", "postprocess")


@dataclass(slots=True)
class BatchReport:
    """What a worker reports of one batch. All fields but ``slot`` travel, in this order."""

    batch_id: int
    #: One for each item, as they are or encoded; empty when the batch failed.
    outputs: list[Any] = field(default_factory=list)
    #: By position, of the items that failed; opaque here. Those of one call may share one, and so
    #: may all that failed together.
    failures: dict[int, Any] = field(default_factory=dict)
    #: Of the batch as a whole, opaque here; None when items failed one by one, or none.
    failure: Any = None
    duration: float = 0.0  # what the model took, seconds; with stages, all of them together
    #: When the model began, by the worker's monotonic clock: on one host everybody's.
    started_at: float = -math.inf
    #: The most that the worker now computes at once, for lack of device memory: see
    #: ``StreamerStats``; 0 for no such limit.
    ceiling: float = 0
    padding: float | None = None  # see ``ManagedModel.padding``; None if it is not reported
    #: Blocks of shared memory that the worker no longer reads; None where none is used.
    released: list[tuple[int, int]] | None = None
    #: Seconds of each of ``STAGES``; None for a model without stages whose batches did not overlap.
    stages: tuple[float, float, float] | None = None
    #: Of a model of steps, seconds from ``started_at`` to the first output, and from one to the
    #: next the mean and the longest; None without outputs, and of streams.
    output_times: tuple[float, float | None, float | None] | None = None
    runs: int = 0  # more model calls that it took to find the calls on which the model raises
    slot: int = field(default=-1, kw_only=True)  # the worker's; set by the transport

    @property
    def has_failed(self) -> bool:
        """Whether no item has a result: the worker may be at fault."""
        return self.failure is not None or 0 < len(self.failures) == len(self.outputs)

    @property
    def pace(self) -> float:
        """Seconds between two batches like this one, back to back: those of the slowest stage."""
        return self.duration if self.stages is None else max(self.stages)


@dataclass(slots=True)
class StepReport:
    """What a worker reports of one step of its model. All fields up to ``slot`` travel.

    Of a model of steps a batch is one item: it has a place in its worker until it is over.
    """

    #: Of streams, by batch: those of this step, as they are or encoded.
    outputs: dict[int, Any] = field(default_factory=dict)
    #: The batches that are over, with the joined outputs, or why there are none. Those of streams
    #: have the output None, since theirs have been sent.
    done: list[BatchReport] = field(default_factory=list)
    size: int = 0  # states that the model stepped; 0 if there was only something to report
    duration: float = 0.0  # what ``step`` took, seconds
    started: int = 0  # items that began before it
    starting: float = 0.0  # what ``start`` took for these, seconds
    evicted: int = 0  # states that were given up for lack of memory, and begin again
    released: list[tuple[int, int]] | None = None  # as in ``BatchReport``
    slot: int = field(default=-1, kw_only=True)  # the worker's; set by the transport
    at: float = field(default=0.0, init=False)  # when it came, by the engine's clock
    pending: int = field(default=0, init=False)  # items that waited for a worker then

    def events(self) -> Sequence[StepReport | BatchReport]:
        """It, and then the reports of the batches that are over by it."""
        for report in self.done:
            report.slot = self.slot
        return [self, *self.done]

    @property
    def is_sign_of_life(self) -> bool:
        """Whether it says only that the worker has not hung: it runs parts of a batch or step."""
        return not (self.size or self.outputs or self.done or self.started or self.evicted)


@dataclass(slots=True, eq=False, repr=False)
class BatchRecord:
    """One batch, which is one model invocation. Times are those of the engine's clock.

    It is made when the batch is cut. Its report, and what follows that, are there when it is back.
    """

    id: int
    slot: int  # of its worker
    spans: Sequence[Span]  # in order; those of a call stand together. Empty after ``release``.
    payloads: list[Any]  # of the items, until they are sent
    search: Any = None  # what it was split off for, opaque here; None for a batch of new items
    losses: int = 0  # workers that died while they held its items. If any, it is computed alone.
    outages: int = 0  # workers that were lost with their host while they held its items
    cut_at: float = field(default=0.0, init=False)
    size: int = field(init=False)
    cost: float = field(init=False)  # what the model pays for: its size times its longest item
    reason: Reason = field(default=Reason.AGAIN, init=False)  # why it has no more items
    calls: int = field(init=False)  # those that have items in it
    arrived: int = field(default=0, init=False)  # items that had arrived when it was cut, in total

    report: BatchReport = field(init=False)  # of the worker
    back_at: float = field(init=False)
    pending: int = field(init=False)  # items that waited for a worker when it came back
    queued: float = field(init=False)  # how long all calls had waited until then, seconds, in total
    answered: int = field(init=False)  # calls until then, in total; so are the next three
    failed: int = field(init=False)
    expired: int = field(init=False)
    rejected: int = field(init=False)
    worker: int = field(init=False)  # its number; only if the batches are watched

    def __post_init__(self) -> None:
        self.size = len(self.payloads)
        self.cost = float(self.size)
        self.calls = len(self.spans)  # unless one has several

    @property
    def is_rerun(self) -> bool:
        """Whether its items have been in a batch before."""
        return self.reason is Reason.AGAIN

    def spent(self) -> tuple[float, float, float]:
        """Of its time, once it is back: on the way to the model, in it, and on the way back."""
        report, took = self.report, self.back_at - self.cut_at
        # The worker's clock may be another one, be it that of a test.
        computed = report.duration if report.duration < took else took
        sent = report.started_at - self.cut_at
        if not 0.0 <= sent <= took - computed:
            sent = took - computed
        return sent, computed, took - computed - sent

    def items_by_call(self) -> int | list[int]:
        """How many items each call has in it, in order; 1 if each has one."""
        if self.calls == self.size:
            return 1
        counts: dict[Call, int] = {}
        for call, start, stop in self.spans:
            counts[call] = counts.get(call, 0) + stop - start
        return [*counts.values()]

    def each_call(self) -> list[Call]:
        """The calls that have items in it, until ``release``."""
        calls = [call for call, _, _ in self.spans]
        return calls if len(calls) == self.calls else list(dict.fromkeys(calls))

    def release(self) -> None:
        """Let go of items, results and failures: they are the callers', and the record is kept."""
        self.spans = ()
        self.search = None
        report = self.report
        report.outputs, report.failures, report.failure = NO_OUTPUTS, _NO_FAILURES, None
