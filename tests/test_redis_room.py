"""How many calls a worker host claims, as tables: docs/redis.md, "How much a host claims"."""

from __future__ import annotations

import math

import pytest

from service_streamer.redis.claims import Claim, Claims

#: Seconds that a claim takes: a model that is faster would wait for Redis.
CLAIMING_TIME = 0.01


def claim(number: int, size: int = 1) -> Claim:
    return Claim(b"%d-0" % number, "client", number, size)


#: So long for a batch that Redis is quicker, as it is taken to be before the first one is known.
SLOW = math.inf


@pytest.mark.parametrize(
    ("duration", "batches"),
    [
        (math.inf, 2),
        (100, 2),
        (CLAIMING_TIME, 2),
        # A model that is faster would wait for Redis.
        (CLAIMING_TIME / 2, 3),
        (CLAIMING_TIME / 2.5, 4),
        # There is an end to it, since what is claimed here no other host can compute.
        (CLAIMING_TIME / 1e6, 8),
        (0, 8),
    ],
)
def test_host_claims_as_many_batches_as_keep_a_worker_busy(duration: float, batches: int) -> None:
    assert Claims(8).room(1, duration) == 8 * batches
    assert Claims(8).room(3, duration) == 24 * batches
    assert Claims(1).room(1, duration) == batches


@pytest.mark.parametrize(
    ("batch_size", "workers", "held", "room"),
    [
        # as much as the workers compute at once, and as much again
        (64, 1, 0, 128),
        (64, 4, 0, 512),
        (1, 1, 0, 2),
        (1, 3, 0, 6),
        # no worker, no room
        (64, 0, 0, 0),
        # what is held counts
        (1, 1, 1, 1),
        (1, 1, 2, 0),
        (64, 1, 64, 64),
        (64, 1, 96, 32),
        (64, 1, 127, 1),
        (64, 1, 128, 0),
        (64, 1, 500, 0),
        # workers that went away
        (64, 1, 256, 0),
    ],
)
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


def test_host_claims_large_calls_one_by_one() -> None:
    claims = Claims(8)
    for number in range(200):
        held = claim(number, size=64)
        claims.claimed(held)
        assert claims.room(1, SLOW) == 0
        claims.computed(held)
        claims.finished([held])
    assert claims.room(1, SLOW) == 1


def test_host_learns_how_large_calls_are() -> None:
    claims = Claims(64)
    before = claims.room(1, SLOW)
    for number in range(200):
        held = claim(number, size=4)
        claims.claimed(held)
        claims.computed(held)
        claims.finished([held])
    assert before == 128
    assert claims.room(1, SLOW) == 32


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
