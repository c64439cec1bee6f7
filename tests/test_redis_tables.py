"""What a worker host reckons with, as tables: docs/redis.md, "How much a host claims"."""

from __future__ import annotations

import itertools
import math

import pytest

from service_streamer.observe.record import Call, CallOptions
from service_streamer.redis.claims import Claim, Claims
from service_streamer.redis.sent_calls import RemoteCall, SentCalls

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
        claims.add(claim(number))
    assert claims.open_items == held
    assert claims.room(workers, SLOW) == room


def test_host_that_was_full_claims_again_when_there_is_room_for_half_a_batch() -> None:
    claims = Claims(8)
    held = [claim(number) for number in range(16)]
    rooms = []
    for each in held:
        claims.add(each)
        rooms.append(claims.room(1, SLOW))
    assert rooms == [*range(15, -1, -1)], "until it is full"
    rooms = []
    for each in held[:5]:
        claims.close(each)
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
        claims.add(held)
        if number > 100 and meanwhile is not None:
            assert claims.room(1, SLOW) == meanwhile
        claims.close(held)
        claims.remove([held])
    assert claims.room(1, SLOW) == room


def test_computed_call_makes_room_before_redis_has_the_outcome() -> None:
    claims = Claims(1)
    first, second = claim(1), claim(2)
    claims.add(first)
    claims.add(second)
    assert claims.room(1, SLOW) == 0
    assert claims.close(first)
    assert claims.room(1, SLOW) == 1
    assert len(claims) == 2, "it is held until Redis knows the outcome"
    assert [each.id for each in claims] == [b"1-0", b"2-0"]


# -- when a call without a deadline has made no progress for too long


LIMIT = 600.0


class Queue:
    """A client's calls, and how far hosts are."""

    def __init__(self) -> None:
        self.calls = SentCalls(9)
        self.ids = itertools.count(1)
        self.looked_at = 0.0

    def send(self, *, deadline: float = math.inf, is_stream: bool = False) -> RemoteCall:
        number = next(self.ids)
        made = Call([], None, None, CallOptions(stream=is_stream))
        call = RemoteCall(made, number, b"", deadline)
        self.calls.add(call)
        assert self.calls.batch(9, 9) == [call]
        self.calls.put_in([b"%d-0" % number])
        return call

    def silent(self, now: float, delivered: int = 0) -> list[int]:
        self.calls.delivered = b"%d-0" % delivered if delivered else b""
        for at in range(int(self.looked_at) + 60, int(now), 60):  # as the client does
            self.calls.silent(at, LIMIT)
        self.looked_at = now
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


def test_after_a_stop_of_the_process_the_time_begins_anew_but_not_twice_in_a_row() -> None:
    queue = Queue()
    call = queue.send()
    assert queue.calls.silent(0, LIMIT) == []
    assert queue.calls.silent(5 * LIMIT, LIMIT) == [], "its answer may lie in Redis"
    assert queue.calls.silent(10 * LIMIT, LIMIT) == [call], "Redis hangs"


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
