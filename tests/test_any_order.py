"""The batcher and the supervisor under whatever happens in whatever order."""

from __future__ import annotations

import math

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from service_streamer.batching.batcher import Actions, Batcher
from service_streamer.observe.record import BatchRecord, BatchReport, Call, CallOptions

BATCH_SIZE = 5
MAX_LATENCY = 0.05
#: Seconds of a batch in each stage of its worker: three alike, and one beside which the others
#: matter.
STAGES = [(0.01, 0.01, 0.01), (0.001, 0.01, 0.004)]


class AnyOrder(RuleBasedStateMachine):
    """Every call ends exactly once, with its own results or an error, and nothing is left."""

    has_lengths = False

    @initialize(
        max_attempts=st.integers(1, 4),
        isolate_errors=st.booleans(),
        batch_timeout=st.sampled_from([None, 0.5]),
        max_pending=st.sampled_from([None, 12]),
        max_batch_cost=st.sampled_from([None, 20.0]),
    )
    def build(
        self,
        max_attempts: int,
        isolate_errors: bool,
        batch_timeout: float | None,
        max_pending: int | None,
        max_batch_cost: float | None,
    ) -> None:
        self.batcher = Batcher(
            batch_size=BATCH_SIZE,
            max_latency=MAX_LATENCY,
            max_pending=max_pending,
            max_attempts=max_attempts,
            isolate_errors=isolate_errors,
            batch_timeout=batch_timeout,
            expired="expired",
            shared=lambda failure, _: ("of a shared batch", failure),
            has_lengths=self.has_lengths,
            max_batch_cost=max_batch_cost,
            tenant_weights={"a": 3.0},
        )
        self.max_batch_cost = math.inf if max_batch_cost is None else max_batch_cost
        self.max_attempts = max_attempts
        self.now = 0.0
        self.calls: list[Call] = []
        self.ended: dict[Call, str] = {}
        self.in_flight: list[BatchRecord] = []
        self.slots: list[int] = []
        self.retiring: set[int] = set()
        self.next_slot = 0
        self.runs: dict[tuple[int, int], int] = {}
        self.raised: dict[object, int] = {}  # how many calls had items in the batch

    def do(self, actions: Actions) -> None:
        # Before the batches are looked at: those that are to be replaced get none.
        self.retiring |= {*actions.condemned}
        for batch in actions.batches:
            assert batch.slot in self.slots
            assert batch.slot not in self.retiring
            self.in_flight.append(batch)
            for item in batch.payloads:
                self.runs[item] = self.runs.get(item, 0) + 1
                if self.max_attempts == 1:
                    assert self.runs[item] == 1 or batch.losses == 0
            if batch.search is None:
                assert batch.size == 1 or batch.cost <= self.max_batch_cost
                if self.has_lengths:
                    lengths = [
                        length
                        for call, start, stop in batch.spans
                        for length in (call.lengths or ())[start:stop]
                    ]
                    assert batch.cost == batch.size * max(lengths)
            # What a worker died with is alone with its worker when it is run again.
            if batch.losses:
                assert sum(other.slot == batch.slot for other in self.in_flight) == 1
            # Its next items may come too late, which is found when they are cut, too.
            assert not any(call.is_over and call not in actions.calls for call, _, _ in batch.spans)
            assert all(call.deadline > self.now for call, _, _ in batch.spans)
        for call in actions.calls:
            assert call not in self.ended, "answered twice"
            self.ended[call] = call.failure or "done"
            if call.failure in self.raised:
                assert self.raised[call.failure] == 1, "of another call, perhaps"
            if not call.failure:
                assert call.outputs == [("result", *item) for item in call.reply]
        for slot in actions.vacant:
            assert slot in self.retiring
            assert not any(batch.slot == slot for batch in self.in_flight)
            self.slots.remove(slot)
            self.do(self.batcher.worker_lost(slot, "ended", self.now))
        for slot in actions.hung:
            self.lose_slot(slot)
        for slot in actions.condemned:
            self.do(self.batcher.worker_retiring(slot, self.now))

    def lose_slot(
        self, slot: int, failed_at: int | None = None, begun: frozenset[int] | None = None
    ) -> None:
        self.slots.remove(slot)
        if begun is not None:  # what was in no stage has not been computed
            for batch in self.in_flight:
                if batch.slot == slot and batch.id not in begun:
                    for item in batch.payloads:
                        self.runs[item] -= 1
        self.in_flight = [batch for batch in self.in_flight if batch.slot != slot]
        self.do(self.batcher.worker_lost(slot, "died", self.now, failed_at, begun))

    @rule(
        lengths=st.lists(st.integers(0, 9), min_size=1, max_size=12),
        timeout=st.sampled_from([math.inf, 0.02, 2.0]),
        options=st.just(None)
        | st.builds(CallOptions, st.integers(-1, 1), st.sampled_from(["", "a"]), st.booleans()),
        more=st.booleans(),
    )
    def submit(
        self, lengths: list[int], timeout: float, options: CallOptions | None, more: bool
    ) -> None:
        size = len(lengths)
        if not self.batcher.has_room_for(size):
            return
        items = [(len(self.calls), i) for i in range(size)]
        call = Call(items, items, is_watched=len(self.calls) % 2 > 0, more=more)
        call.deadline = self.now + timeout
        if self.has_lengths:
            call.lengths = lengths
        if options is not None:
            call.options = options
        self.calls.append(call)
        self.do(self.batcher.call_submitted(call, self.now))
        if more:
            self.do(self.batcher.calls_submitted(self.now))

    @precondition(lambda self: len(self.slots) < 3)
    @rule()
    def ready(self) -> None:
        self.slots.append(self.next_slot)
        self.next_slot += 1
        self.do(self.batcher.worker_ready(self.slots[-1], self.now))

    @precondition(lambda self: self.in_flight)
    @rule(
        data=st.data(),
        outcome=st.sampled_from(["done", "done", "done", "failed", "partly", "all failed"]),
        stages=st.sampled_from([None, None, *STAGES]),
    )
    def come_back(
        self, data: st.DataObject, outcome: str, stages: tuple[float, float, float] | None
    ) -> None:
        batch = data.draw(st.sampled_from(self.in_flight))
        self.in_flight.remove(batch)
        if outcome == "failed":
            self.fail(batch)
            return
        outputs = [("result", *item) for item in batch.payloads]
        failures = {batch.size - 1: "lost on the way"} if outcome == "partly" else {}
        if outcome == "all failed":
            failures = {i: f"failed {batch.id} at {i}" for i in range(batch.size)}
        self.done(batch, outputs, failures, stages)

    def done(
        self,
        batch: BatchRecord,
        outputs: list[object],
        failures: dict[int, str],
        stages: tuple[float, float, float] | None = None,
    ) -> None:
        report = BatchReport(
            batch.id, outputs, failures, duration=0.01, stages=stages, slot=batch.slot
        )
        self.do(self.batcher.batch_returned(report, self.now))

    def fail(self, batch: BatchRecord) -> None:
        failure = f"failed {batch.id}"
        self.raised[failure] = len({call for call, _, _ in batch.spans})
        report = BatchReport(batch.id, failure=failure, slot=batch.slot)
        self.do(self.batcher.batch_returned(report, self.now))

    @precondition(lambda self: self.calls)
    @rule(data=st.data(), how=st.sampled_from(["withdrawn", "cancelled", "expired"]))
    def give_up(self, data: st.DataObject, how: str) -> None:
        call = data.draw(st.sampled_from(self.calls))
        if how == "cancelled" and call.is_running:
            return
        if self.batcher.call_withdrawn(call, has_expired=how == "expired"):
            assert call not in self.ended
            self.ended[call] = how
            # Nothing is sent ahead beside a near deadline. When that has gone, a worker is busy, so
            # something will happen soon, and is not waited for here.
            self.do(self.batcher.time_passed(self.now))

    @precondition(lambda self: self.slots)
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(self.slots))
        held = [batch.id for batch in self.in_flight if batch.slot == slot]
        begun = data.draw(st.none() | st.frozensets(st.sampled_from(held))) if held else None
        self.lose_slot(slot, None, begun)

    @precondition(lambda self: self.in_flight)
    @rule(data=st.data())
    def device_fails(self, data: st.DataObject) -> None:
        batch = data.draw(st.sampled_from(self.in_flight))
        self.lose_slot(batch.slot, batch.id)

    @precondition(lambda self: self.slots)
    @rule(data=st.data())
    def fail_all_that_it_holds(self, data: st.DataObject) -> None:
        """So that it is held back."""
        slot = data.draw(st.sampled_from(self.slots))
        for _ in range(4):
            for batch in [batch for batch in self.in_flight if batch.slot == slot]:
                self.in_flight.remove(batch)
                self.fail(batch)
                self.consistent()

    @precondition(lambda self: set(self.slots) - self.retiring)
    @rule(data=st.data())
    def retire(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(set(self.slots) - self.retiring)))
        self.retiring.add(slot)
        self.do(self.batcher.worker_retiring(slot, self.now))

    @precondition(lambda self: set(self.slots) & self.retiring)
    @rule(data=st.data())
    def keep(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(set(self.slots) & self.retiring)))
        self.retiring.remove(slot)
        self.do(self.batcher.worker_kept(slot, self.now))

    @rule(seconds=st.sampled_from([0.0, 0.0001, 0.01, 1.0, 60.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        if self.batcher.deadline <= self.now:
            self.do(self.batcher.time_passed(self.now))

    @rule()
    def close(self) -> None:
        """What is in flight still comes back."""
        self.do(Actions(calls=self.batcher.fail_all("closed")))
        assert set(self.ended) == set(self.calls), "a call was lost"
        assert self.batcher.is_answered
        assert self.batcher.pending_items == 0

    @invariant()
    def consistent(self) -> None:
        self.batcher.check_invariants()
        assert {call for call in self.calls if call.is_over} == set(self.ended)
        assert len(self.batcher.slots.in_flight()) == len(self.in_flight)
        self.nobody_waits_in_vain()

    def waiting(self) -> list[Call]:
        """Calls with items that no worker has had."""
        return [call for call in self.calls if call.pending and not call.is_over]

    def nobody_waits_in_vain(self) -> None:
        """While a worker is free less than a batch waits, and not for ever; nor many for one."""
        suspects = set(self.batcher.health.held_back)
        held = {slot: 0 for slot in self.slots if slot not in self.retiring | suspects}
        assert held or not suspects
        for batch in self.in_flight:
            if batch.slot in held:
                held[batch.slot] += 2 if batch.losses else 1
        waiting = self.batcher.pending_items
        if 0 in held.values() and waiting:
            assert waiting < BATCH_SIZE
            assert self.now <= self.batcher.deadline < math.inf
            oldest = min(call.arrived_at for call in self.waiting())
            assert self.batcher.deadline <= oldest + MAX_LATENCY + 1e-9
        elif 1 in held.values() and self.max_attempts > 1 and waiting == self.batcher.queue.items:
            # Full batches are sent ahead at the latest when there is one for each worker; but not
            # of calls with a near deadline, which may be late by then.
            is_timed = any(call.deadline < math.inf for call in self.waiting())
            assert is_timed or waiting < BATCH_SIZE * len(self.slots)

    def teardown(self) -> None:
        """Left alone with a worker that answers, or fails now and then, everything ends."""
        if not hasattr(self, "batcher"):
            return
        if not set(self.slots) - self.retiring:
            self.ready()
        for _ in range(1_000):
            if self.in_flight:
                batch = self.in_flight.pop(0)
                if batch.id % 2:
                    self.fail(batch)
                    continue
                outputs = [("result", *item) for item in batch.payloads]
                self.done(batch, outputs, {})
            elif self.batcher.deadline < math.inf:
                self.now = max(self.now, self.batcher.deadline)
                self.do(self.batcher.time_passed(self.now))
            else:
                break
        else:
            raise AssertionError("it never comes to rest")
        assert set(self.ended) == set(self.calls), "a call was lost"
        assert self.batcher.is_empty


class AnyOrderOfLengths(AnyOrder):
    """The same where items go with others of their length."""

    has_lengths = True


SETTINGS = settings(
    max_examples=60,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)

TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = SETTINGS

TestAnyOrderOfLengths = AnyOrderOfLengths.TestCase
TestAnyOrderOfLengths.settings = SETTINGS
