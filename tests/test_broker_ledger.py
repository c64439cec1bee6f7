"""The ledgers of the two sides of a broker, as tables: what is owed to whom, after what."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from service_streamer.redis import claims as claims_module
from service_streamer.redis.claims import Claim, Claims
from service_streamer.redis.ledger import SentCalls
from service_streamer.remote.open_calls import Patience, RemoteCall


def call(number: int, message: bytes = b"message", deadline: float = math.inf) -> RemoteCall:
    return RemoteCall(number, message, None, deadline, f"reply {number}")


def numbers(calls: list[RemoteCall]) -> list[int]:
    return [call.number for call in calls]


@pytest.fixture
def orders() -> SentCalls:
    """With the calls 1 to 5, not sent yet."""
    orders = SentCalls()
    for number in range(1, 6):
        orders.add(call(number))
    return orders


def unsent(orders: SentCalls) -> list[RemoteCall]:
    return [*orders._unsent.values()]


class TestOrders:
    def test_a_new_one_owes_nothing(self) -> None:
        orders = SentCalls()
        assert len(orders) == 0
        assert not orders.is_known
        assert orders.batch(10, 1000) == []
        assert orders.first == 1
        assert orders.give_up_all() == orders.doubtful(9) == orders.to_tell == []

    @pytest.mark.parametrize(
        ("most_calls", "most_bytes", "batches"),
        [
            (9, 999, [[1, 2, 3, 4, 5]]),
            (2, 999, [[1, 2], [3, 4], [5]]),
            (1, 999, [[1], [2], [3], [4], [5]]),
            # of 7 bytes each: a batch is full when it has reached the limit
            (9, 14, [[1, 2], [3, 4], [5]]),
            (9, 15, [[1, 2, 3], [4, 5]]),
            # one that is larger goes alone, but it goes
            (9, 1, [[1], [2], [3], [4], [5]]),
        ],
    )
    def test_batches_are_in_order_and_bounded(
        self, orders: SentCalls, most_calls: int, most_bytes: int, batches: list[list[int]]
    ) -> None:
        seen, first = [], 1
        while batch := orders.batch(most_calls, most_bytes):
            assert orders.first == first
            assert all(call.is_taken for call in batch)
            seen.append(numbers(batch))
            first += len(batch)
            orders.put_in([b"id"] * len(batch))
        assert seen == batches
        assert orders.batch(9, 999) == []
        assert len(orders) == 5, "they are owed until they are answered"

    def test_a_batch_stays_the_same_until_it_is_put_in(self, orders: SentCalls) -> None:
        batch = orders.batch(2, 999)
        messages = [call.message for call in batch]
        orders.add(call(6))
        orders.give_up(batch[0])  # Redis may have it already, and then it is the first
        orders.answered(2)  # it has been computed, although nobody has heard that it was put in
        again = orders.batch(9, 999)
        assert numbers(again) == [1, 2]
        assert [call.message for call in again] == messages
        assert orders.first == 1

    def test_who_gives_up_before_it_is_sent_is_not_sent(self, orders: SentCalls) -> None:
        given_up = unsent(orders)[:2]
        assert [orders.give_up(call) for call in given_up] == [True, True]
        assert [call.message for call in given_up] == [b"", b""]
        assert numbers(orders.batch(9, 999)) == [3, 4, 5]
        assert orders.to_tell == [], "Redis has never heard of them"
        assert len(orders) == 3

    def test_who_gives_up_while_it_is_sent_is_withdrawn_afterwards(self, orders: SentCalls) -> None:
        batch = [*orders.batch(3, 999)]
        assert orders.give_up(batch[1])
        assert orders.to_tell == []
        orders.put_in([b"a", b"b", b"c"])
        assert orders.to_tell == [(b"b", b"drop")]
        assert [call.id for call in batch] == [b"a", b"b", b"c"]
        assert [call.message for call in batch] == [b"", b"", b""], "nobody needs it any more"

    def test_who_gives_up_later_is_withdrawn(self, orders: SentCalls) -> None:
        batch = [*orders.batch(9, 999)]
        orders.put_in([b"a", b"b", b"c", b"d", b"e"])
        assert orders.give_up(batch[2])
        assert orders.give_up(batch[0])
        assert orders.to_tell == [(b"c", b"drop"), (b"a", b"drop")]

    def test_one_that_came_before_has_no_id_and_is_not_withdrawn(self, orders: SentCalls) -> None:
        # Given an answer that was lost, so that Redis says of the second try: these I have
        batch = [*orders.batch(2, 999)]
        orders.give_up(batch[0])
        assert orders.put_in([b"", b""]) == []
        assert orders.give_up(batch[1])
        assert orders.to_tell == []
        assert orders.first == 3

    @pytest.mark.parametrize("taken", [0, 1, 2, 3])
    def test_what_redis_refuses_is_over(self, orders: SentCalls, taken: int) -> None:
        orders.batch(3, 999)
        refused = orders.put_in([b"id"] * taken)
        assert numbers(refused) == [1, 2, 3][taken:]
        assert all(call.is_over for call in refused)
        assert [call.reply for call in refused] == [f"reply {i}" for i in (1, 2, 3)[taken:]]
        assert len(orders) == 2 + taken
        assert orders.first == taken + 1, "what was refused has no number in Redis"
        assert numbers(orders.batch(9, 999)) == [4, 5]

    def test_what_is_refused_and_given_up_is_refused_to_nobody(self, orders: SentCalls) -> None:
        batch = [*orders.batch(3, 999)]
        orders.give_up(batch[2])
        assert numbers(orders.put_in([b"id"])) == [2]

    def test_each_is_answered_once(self, orders: SentCalls) -> None:
        batch = [*orders.batch(9, 999)]
        orders.put_in([b"id"] * 5)
        assert orders.answered(3) is batch[2]
        assert orders.answered(3) is None
        assert not orders.give_up(batch[2])
        assert orders.answered(99) is None
        assert orders.give_up(batch[3])
        assert orders.answered(4) is None
        assert not orders.give_up(batch[3])
        assert len(orders) == 3

    def test_when_redis_forgets_this_client_all_that_was_there_is_doubtful(
        self, orders: SentCalls
    ) -> None:
        orders.batch(2, 999)
        orders.put_in([b"1-0", b"2-0"])
        assert orders.is_known
        assert orders.count_put_in == 2
        orders.batch(1, 999)
        # What is on its way, or has yet to go, is put in again; what was there may be lost.
        assert numbers(orders.doubtful(9, all_sent=True)) == [1, 2]
        assert numbers(orders.batch(1, 999)) == [3]
        assert len(orders) == 5

    def test_what_waits_for_long_is_doubtful_in_turn(self, orders: SentCalls) -> None:
        orders.batch(4, 999)
        orders.put_in([b"1-0", b"2-0", b"3-0", b"4-0"])
        assert numbers(orders.doubtful(2)) == [], "it was put in only now"
        orders.add(call(6))
        assert numbers(orders.doubtful(2)) == [1, 2]
        assert numbers(orders.doubtful(2)) == [3, 4]
        orders.answered(1)
        assert numbers(orders.doubtful(2)) == [], "the end of a turn"
        assert numbers(orders.doubtful(2)) == [2, 3]
        assert numbers(orders.doubtful(2)) == [4]
        assert numbers(orders.doubtful(9)) == [2, 3, 4]

    def test_a_round_ends_however_many_have_notices(self, orders: SentCalls) -> None:
        orders.batch(4, 999)
        orders.put_in([b"1-0", b"2-0", b"3-0", b"4-0"])
        for number in (1, 2, 3):
            orders.noticed(number, "call secret")
        assert numbers(orders.doubtful(2, all_sent=True)) == [1, 2, 3]
        assert orders.has_more_doubts
        assert 4 in numbers(orders.doubtful(2, all_sent=True))
        assert numbers(orders.doubtful(2, all_sent=True)) == [1, 2, 3]
        assert not orders.has_more_doubts

    def test_what_notice_came_of_is_doubtful_at_once(self, orders: SentCalls) -> None:
        orders.batch(3, 999)
        orders.put_in([b"1-0", b"2-0", b"3-0"])
        assert orders.noticed(3, "reason")
        assert not orders.noticed(77, "reason")
        assert numbers(orders.doubtful(0)) == [3]
        assert numbers(orders.doubtful(2)) == [3]
        assert numbers(orders.doubtful(2)) == [3, 1, 2], "until it is over"
        orders.answered(3)
        assert numbers(orders.doubtful(0)) == []

    def test_what_is_gone_is_over_once_and_with_its_reason(self, orders: SentCalls) -> None:
        batch = [*orders.batch(3, 999)]
        orders.put_in([b"1-0", b"2-0", b"3-0"])
        orders.noticed(2, "reason")
        orders.noticed(3, "reason")
        orders.answered(3)
        found = [(call, call.id) for call in batch]
        assert orders.gone([(batch[0], b"0-9")]) == [], "it has been sent again since"
        assert orders.gone(found) == [(batch[0], ""), (batch[1], "reason")]
        assert orders.gone(found) == []
        assert len(orders) == 2

    @pytest.mark.parametrize(
        ("delivered", "progress"),
        [
            (b"", (5, (0, 0))),
            (b"3-1", (5, (3, 1))),
            (b"7-9", (5, (7, 9))),
            (b"7-10", (5, (7, 10))),
            (b"99-0", (5, (7, 10))),
        ],
    )
    def test_progress_is_that_of_hosts_up_to_the_last_call(
        self, orders: SentCalls, delivered: bytes, progress: Any
    ) -> None:
        orders.batch(2, 999)
        orders.put_in([b"7-9", b"7-10"])
        orders.delivered = delivered
        assert orders.progress() == progress

    def test_at_the_end_all_are_given_up(self, orders: SentCalls) -> None:
        orders.batch(2, 999)
        orders.put_in([b"a", b"b"])
        orders.answered(1)
        orders.batch(1, 999)
        assert numbers(orders.give_up_all()) == [2, 3, 4, 5]
        assert orders.give_up_all() == []
        assert orders.to_tell == [(b"b", b"drop")]
        assert len(orders) == 0
        assert numbers(orders.batch(9, 999)) == [3], "it may be there already"
        orders.put_in([b"c"])
        assert orders.to_tell == [(b"b", b"drop"), (b"c", b"drop")]
        assert orders.batch(9, 999) == []


def test_patience_ends_so_long_after_the_last_new_sign() -> None:
    patience = Patience(10, 100)
    assert patience.left("a", 100) == 10
    assert patience.left("a", 104) == 6
    assert patience.left("b", 109) == 10
    assert patience.left("b", 119) == 0
    assert Patience(math.inf, 0).left("a", 1e9) == math.inf


def claim(number: int, size: int = 1) -> Claim:
    return Claim(b"%d-0" % number, "client", number, size)


#: So long for a batch that Redis is quicker, as it is taken to be before the first one is known.
SLOW = math.inf


class TestRoom:
    @pytest.mark.parametrize(
        ("duration", "batches"),
        [
            (math.inf, 2),
            (100, 2),
            (claims_module._CLAIMING_TIME, 2),
            # A model that is faster would wait for Redis.
            (claims_module._CLAIMING_TIME / 2, 3),
            (claims_module._CLAIMING_TIME / 2.5, 4),
            # There is an end to it, since what is claimed here no other host can compute.
            (claims_module._CLAIMING_TIME / 1e6, 1 + claims_module._MOST_AHEAD),
            (0, 1 + claims_module._MOST_AHEAD),
        ],
    )
    def test_it_is_for_as_many_batches_as_keep_a_worker_busy(
        self, duration: float, batches: int
    ) -> None:
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
    def test_it_is_for_two_batches_of_each_worker(
        self, batch_size: int, workers: int, held: int, room: int
    ) -> None:
        claims = Claims(batch_size)
        for number in range(held):
            claims.claimed(claim(number))
        assert claims.open_items == held
        assert claims.room(workers, SLOW) == room

    def test_after_there_was_none_it_is_told_when_there_is_for_half_a_batch(self) -> None:
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

    def test_large_calls_are_claimed_one_by_one(self) -> None:
        claims = Claims(8)
        for number in range(200):
            held = claim(number, size=64)
            claims.claimed(held)
            assert claims.room(1, SLOW) == 0
            claims.computed(held)
            claims.finished([held])
        assert claims.room(1, SLOW) == 1

    def test_it_learns_how_large_calls_are(self) -> None:
        claims = Claims(64)
        before = claims.room(1, SLOW)
        for number in range(200):
            held = claim(number, size=4)
            claims.claimed(held)
            claims.computed(held)
            claims.finished([held])
        assert before == 128
        assert claims.room(1, SLOW) == 32

    def test_what_is_computed_makes_room_before_redis_knows(self) -> None:
        claims = Claims(1)
        first, second = claim(1), claim(2)
        claims.claimed(first)
        claims.claimed(second)
        assert claims.room(1, SLOW) == 0
        assert claims.computed(first)
        assert claims.room(1, SLOW) == 1
        assert len(claims) == 2, "it is held until Redis knows the outcome"
        assert [each.id for each in claims] == [b"1-0", b"2-0"]


class TestClaims:
    def test_what_is_told_twice_is_claimed_once(self) -> None:
        claims = Claims(4)
        assert claims.claimed(claim(1, size=3))
        assert not claims.claimed(claim(1, size=3))
        assert claims.open_items == 3
        assert len(claims) == 1

    def test_there_is_one_outcome(self) -> None:
        claims = Claims(4)
        held = claim(1, size=3)
        held.call = "the engine's"
        claims.claimed(held)
        assert claims.computed(held)
        assert not claims.computed(held)
        assert held.call is None
        assert claims.open_items == 0

    def test_another_may_be_claimed_when_it_is_finished(self) -> None:
        claims = Claims(4)
        held = claim(1)
        claims.claimed(held)
        claims.computed(held)
        claims.finished([held])
        claims.finished([held])
        assert len(claims) == 0
        assert claims.claimed(claim(1)), "it came back to this host"

    def test_what_others_have_claimed_need_not_be_computed(self) -> None:
        claims = Claims(4)
        computed, held, kept = claim(1), claim(2, size=3), claim(3)
        for each in (computed, held, kept):
            claims.claimed(each)
        claims.computed(computed)
        held.call, held.is_submitted = "the engine's", True
        kept.call = "on its way there"
        assert claims.gone([b"1-0", b"2-0", b"99-0"]) == ["the engine's"]
        assert [each.id for each in claims] == [kept.id]
        # They leave their room at once: the engine, which is told, never answers them.
        assert claims.open_items == 1
        assert not claims.computed(held)
        assert claims.open_items == 1
        assert claims.gone([kept.id]) == [], "the engine does not have it yet"


@pytest.mark.parametrize("make", [lambda: call(1), lambda: claim(1)], ids=["RemoteCall", "Claim"])
def test_there_are_many_of_them_so_they_are_small(make: Callable[[], Any]) -> None:
    assert not hasattr(make(), "__dict__")
