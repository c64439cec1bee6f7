"""What a worker host reckons with, as tables: docs/redis.md, "How much a host claims"."""

from __future__ import annotations

import itertools
import math

import pytest

from service_streamer.redis.claims import Claim, Claims
from service_streamer.redis.redis_clock import RedisClock
from service_streamer.redis.sent_calls import SentCalls
from service_streamer.remote.open_calls import RemoteCall

#: Seconds that a claim takes: a model that is faster would wait for Redis.
CLAIMING_TIME = 0.01


def claim(number: int, size: int = 1) -> Claim:
    return Claim(b"%d-0" % number, "client", number, size)


#: So long for a batch that Redis is quicker, as it is taken to be before the first one is known.
SLOW = math.inf


@pytest.mark.parametrize(
    ("duration", "batches"),
    [
        (math.inf, 2), (100, 2), (CLAIMING_TIME, 2),
        # A model that is faster would wait for Redis.
        (CLAIMING_TIME / 2, 3),
        (CLAIMING_TIME / 2.5, 4),
        # There is an end to it, since what is claimed here no other host can compute.
        (CLAIMING_TIME / 1e6, 8),
        (0, 8),
    ],
)  # fmt: skip
def test_host_claims_as_many_batches_as_keep_a_worker_busy(duration: float, batches: int) -> None:
    assert Claims(8).room(1, duration) == 8 * batches
    assert Claims(8).room(3, duration) == 24 * batches
    assert Claims(1).room(1, duration) == batches


@pytest.mark.parametrize(
    ("batch_size", "workers", "held", "room"),
    [
        # as much as the workers compute at once, and as much again
        (64, 1, 0, 128),
        (64, 4, 0, 512), (1, 1, 0, 2), (1, 3, 0, 6),
        # no worker, no room
        (64, 0, 0, 0),
        # what is held counts
        (1, 1, 1, 1),
        (1, 1, 2, 0), (64, 1, 64, 64), (64, 1, 96, 32), (64, 1, 127, 1), (64, 1, 128, 0),
        (64, 1, 500, 0),
        # workers that went away
        (64, 1, 256, 0),
    ],
)  # fmt: skip
def test_host_claims_two_batches_for_each_worker(
    batch_size: int, workers: int, held: int, room: int
) -> None:
    claims = Claims(batch_size)
    for number in range(held):
        claims.claimed(claim(number))
    assert claims.open_items == held
    assert claims.room(workers, SLOW) == room


def test_host_that_was_full_claims_again_when_there_is_room_for_half_a_batch() -> None:
    claims = Claims(8)
    held = [claim(number) for number in range(16)]
    rooms = []
    for each in held:
        claims.claimed(each)
        rooms.append(claims.room(1, SLOW))
    assert rooms == [*range(15, -1, -1)], "until it is full"
    rooms = []
    for each in held[:5]:
        claims.computed(each)
        rooms.append(claims.room(1, SLOW))
    assert rooms == [0, 0, 0, 4, 5], "then not each one by itself"


@pytest.mark.parametrize(
    ("batch_size", "size", "meanwhile", "room"), [(8, 64, 1, 2), (64, 4, None, 32)]
)
def test_host_learns_how_large_calls_are_and_claims_another_beside_a_large_one(
    batch_size: int, size: int, meanwhile: int | None, room: int
) -> None:
    claims = Claims(batch_size)
    for number in range(200):
        held = claim(number, size=size)
        claims.claimed(held)
        if number > 100 and meanwhile is not None:
            assert claims.room(1, SLOW) == meanwhile
        claims.computed(held)
        claims.finished([held])
    assert claims.room(1, SLOW) == room


def test_computed_call_makes_room_before_redis_has_the_outcome() -> None:
    claims = Claims(1)
    first, second = claim(1), claim(2)
    claims.claimed(first)
    claims.claimed(second)
    assert claims.room(1, SLOW) == 0
    assert claims.computed(first)
    assert claims.room(1, SLOW) == 1
    assert len(claims) == 2, "it is held until Redis knows the outcome"
    assert [each.id for each in claims] == [b"1-0", b"2-0"]


# -- when a call without a deadline has made no progress for too long


LIMIT = 600.0


class Queue:
    """A client's calls, and how far hosts are."""

    def __init__(self) -> None:
        self.calls = SentCalls()
        self.ids = itertools.count(1)

    def send(self, *, deadline: float = math.inf, is_stream: bool = False) -> RemoteCall:
        number = next(self.ids)
        call = RemoteCall(number, b"", None, deadline, None, is_stream=is_stream)
        self.calls.add(call)
        assert self.calls.batch(9, 9) == [call]
        self.calls.put_in([b"%d-0" % number])
        return call

    def silent(self, now: float, delivered: int = 0) -> list[int]:
        self.calls.delivered = b"%d-0" % delivered if delivered else b""
        return [call.number for call in self.calls.silent(now, LIMIT)]


def test_calls_of_a_queue_that_stands_still_are_silent_but_those_with_deadlines() -> None:
    queue = Queue()
    queue.send()
    queue.send(deadline=1e9)
    assert queue.silent(0) == []
    queue.send()  # after that look
    assert queue.silent(LIMIT - 10) == []
    assert queue.silent(LIMIT) == [1]
    assert queue.silent(2 * LIMIT) == [1, 3]


def test_no_call_is_silent_that_hosts_come_nearer_to() -> None:
    queue = Queue()
    for _ in range(100):
        queue.send()
    for minute in range(50):
        assert queue.silent(60.0 * minute, 1 + minute) == [*range(1, minute - 8)]


def test_a_stream_is_silent_if_no_outputs_come_and_its_consumer_is_not_behind() -> None:
    queue = Queue()
    inflow = queue.send(is_stream=True).inflow
    assert inflow is not None
    for minute in range(100):
        inflow.add([b""])
        assert queue.silent(60.0 * minute, 1) == []
    inflow.is_held = True
    for minute in range(100, 200):
        assert queue.silent(60.0 * minute, 1) == []
    inflow.is_held = False
    assert queue.silent(60.0 * 209, 1) == [1]


# -- Redis's clock, which may be set while calls wait: when a deadline has passed


#: Our monotonic clock, and what Redis's says then.
NOW, REDIS = 1000.0, 1_700_000_000.0


@pytest.fixture
def clock() -> RedisClock:
    clock = RedisClock()
    assert clock.read(REDIS, NOW, NOW) == 0
    return clock


def test_a_deadline_is_as_far_as_the_clock_says(clock: RedisClock) -> None:
    assert clock.left(REDIS + 5, NOW) == 5
    assert clock.left(REDIS + 5, NOW + 7) == -2
    assert clock.expected(NOW + 2) == REDIS + 2
    assert not RedisClock().was_read_since(NOW)
    assert clock.was_read_since(NOW)
    assert not clock.was_read_since(NOW + 0.1)


@pytest.mark.parametrize("early", [0.0, 0.5, 3.0])
@pytest.mark.parametrize("late", [0.0, 0.5, 30.0])
def test_a_slow_question_or_answer_is_no_step(clock: RedisClock, early: float, late: float) -> None:
    assert clock.read(REDIS + 10, NOW + 10 - early, NOW + 10 + late) == 0
    assert clock.left(REDIS + 15, NOW + 10) == pytest.approx(5)


@pytest.mark.parametrize("off", [-0.9, 0.9])
def test_a_clock_that_drifts_is_followed(clock: RedisClock, off: float) -> None:
    for beat in range(1, 5):
        now = NOW + 10 * beat
        assert clock.read(REDIS + (10 + off) * beat, now, now) == 0
        assert clock.expected(now) == pytest.approx(REDIS + (10 + off) * beat)


@pytest.mark.parametrize("step", [-600.0, -30.0, -1.5, 1.5, 30.0, 600.0])
def test_no_call_loses_time_by_a_step(clock: RedisClock, step: float) -> None:
    before = REDIS + 20  # the deadline of a call that was put in before, and of one that was after
    after = REDIS + 10 + step + 20
    assert clock.read(REDIS + 10 + step, NOW + 10, NOW + 10) == pytest.approx(step)
    assert clock.left(before, NOW + 10) >= 10
    assert clock.left(after, NOW + 10) >= 20
    assert clock.expected(NOW + 11) == pytest.approx(REDIS + 11 + step)
    # Of several steps the one counts that leaves most time.
    clock.read(REDIS + 12, NOW + 12, NOW + 12)
    assert clock.left(before, NOW + 12) >= 8
    assert clock.left(after, NOW + 12) >= 18


@pytest.mark.parametrize("step", [-600.0, 600.0])
def test_a_step_is_forgotten_when_calls_of_before_cannot_wait_any_more(
    clock: RedisClock, step: float
) -> None:
    clock.read(REDIS + 10 + step, NOW + 10, NOW + 10)
    later = 1000.0
    assert clock.read(REDIS + step + later, NOW + later, NOW + later) == 0
    assert clock.left(REDIS + step + later + 5, NOW + later) == pytest.approx(5)
