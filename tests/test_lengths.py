"""What items cost: where it is said, that it is checked, and whom it fails if it is wrong."""

from __future__ import annotations

import fractions
import functools
import logging
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import models
from conftest import ERROR_TYPES, AnyStreamer, await_that
from contract.calls import Lengths, two
from service_streamer import ManagedModel, RedisStreamer, RedisWorker, Streamer, ThreadedStreamer
from service_streamer.options.table import BrokerOptions, StreamerOptions
from service_streamer.redis.wire import Wire

if TYPE_CHECKING:
    import redis

Build = Callable[..., AnyStreamer]


class Counting(ManagedModel):
    """Answers how many items its batches have."""

    def init_model(self) -> None:
        """Nothing to load."""

    def predict(self, batch: list[Any]) -> list[int]:
        return count(batch)


def count(batch: list[Any]) -> list[int]:
    return [len(batch)] * len(batch)


class Static(Counting):
    @staticmethod
    def length(item: str) -> int:
        return len(item)


class OfClass(Counting):
    factor = 2

    @classmethod
    def length(cls, item: str) -> int:
        return cls.factor * len(item)


class Plain(Counting):
    factor = 3

    def length(self, item: str) -> int:
        return self.factor * len(item)


class Inherits(Plain):
    """Says nothing itself."""


class BuiltIn(Counting):
    length = len


class Needy(Counting):
    def init_model(self) -> None:
        self.tokenizer = str.split

    def length(self, item: str) -> int:
        return len(self.tokenizer(item))


class Rude(Counting):
    def __new__(cls, gpu_id: int | str | None) -> Rude:
        return super().__new__(cls)

    def length(self, item: str) -> int:
        return len(item)


class SomethingElse(Counting):
    """The name is taken for other things."""

    length = 512


# -- where it is said


#: Of two items of the lengths of "a" and "abc": twice that of the longer one.
COSTS: list[tuple[Any, Any, float]] = [
    (None, Static, 6),
    (None, OfClass, 12),
    (None, Plain, 18),
    (None, Inherits, 18),
    (None, BuiltIn, 6),
    (len, Plain, 6),
    (functools.partial(str.count, "caba"), Static, 4),
    ("builtins:len", Plain, 6),
    ("test_lengths:Static.length", count, 6),
    ("test_lengths:OfClass.length", "test_lengths:Plain", 12),
    ("test_lengths:Plain.length", "test_lengths:count", 18),
    # Without lengths each item counts one.
    (None, Counting, 2),
    (None, SomethingElse, 2),
    (None, count, 2),
    (None, "test_lengths:Static", 2),
]


@pytest.mark.parametrize(("length", "model", "cost"), COSTS)
def test_lengths_are_those_of_the_argument_or_else_of_the_class(
    length: Any, model: Any, cost: float
) -> None:
    for bound, items in ((cost, 2), (cost - 0.5, 1)):
        with ThreadedStreamer(model, 2, length=length, max_batch_cost=bound) as streamer:
            assert streamer.predict(["a", "abc"]) == [items] * 2


@pytest.mark.parametrize(
    ("length", "error", "word"),
    [
        (3, TypeError, "length"),
        *((text, ValueError, f"'{text}'") for text in ("", "builtins.len", "builtins:", ":len")),
        ("not.there:length", ModuleNotFoundError, "not"),
        ("builtins:lenght", AttributeError, "lenght"),
        ("test_lengths:ERROR_TYPES", TypeError, "ERROR_TYPES"),
        ("test_lengths:SomethingElse.length", TypeError, "SomethingElse"),
    ],
)
def test_streamer_refuses_a_length_that_is_no_function(
    length: Any, error: type[Exception], word: str
) -> None:
    for build in (ThreadedStreamer, Streamer):
        with pytest.raises(error, match=word):
            build(models.echo, length=length)


def test_length_method_that_needs_an_instance_is_refused_by_name() -> None:
    with ThreadedStreamer(Needy) as streamer, pytest.raises(TypeError, match=r"Needy\.length"):
        streamer.submit(["a b"])
    with pytest.raises(TypeError, match=r"Rude\.length"):
        ThreadedStreamer(Rude)


def test_attribute_error_of_a_length_function_is_raised_as_it_is() -> None:
    with (
        ThreadedStreamer(count, length=lambda item: item.size) as streamer,
        pytest.raises(AttributeError, match="size"),
    ):
        streamer.submit(["a"])


def test_a_worker_says_that_the_length_of_its_model_is_not_used(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with ThreadedStreamer("test_lengths:Static") as streamer:
        assert streamer.predict(["a"]) == [1]
    [record] = [each for each in caplog.records if each.levelno == logging.WARNING]
    assert 'length="test_lengths:Static.length"' in record.getMessage()
    caplog.clear()
    with ThreadedStreamer("test_lengths:Static", length="test_lengths:Static.length") as streamer:
        assert streamer.predict(["a"]) == [1]
    assert [each for each in caplog.records if each.levelno == logging.WARNING] == []


# -- what it may be


GOOD = [0, 0.0, 7, 2.5, 1e15, np.float32(2), np.int64(3), np.float64(4), fractions.Fraction(2)]
BAD: list[tuple[Any, type[Exception]]] = [
    *((value, ValueError) for value in (-1, -0.5, math.inf, -math.inf, math.nan)),
    *((value, ValueError) for value in (1e16, 10**400)),
    *((value, ValueError) for value in (np.float64("nan"), np.float32("inf"), np.int64(-1))),
    *((value, TypeError) for value in (None, "7", True, False, [1], 1j, np.bool_(True))),
]


def test_bad_length_is_refused_with_the_place_of_its_item() -> None:
    with ThreadedStreamer(models.echo, length=lambda item: item) as streamer:
        assert streamer.predict(GOOD) == GOOD
        for value, error in BAD:
            with pytest.raises(error, match="item 2"):
                streamer.submit([0, 0, value])


@pytest.mark.parametrize(
    ("option", "value", "word"),
    [
        *(("max_batch_cost", value, "max_batch_cost")
          for value in (0, -1, math.inf, math.nan, "1", True)),
        ("tenant_weights", [("a", 1)], "tenant_weights"),
        ("tenant_weights", {"a": 0}, "'a'"),
        ("tenant_weights", {1: 2}, "tenant"),
        ("tenant_weights", {"a" * 257: 2}, "257"),
    ],
)  # fmt: skip
def test_streamer_refuses_a_bad_cost_or_weight(option: str, value: Any, word: str) -> None:
    with pytest.raises((TypeError, ValueError), match=word):
        ThreadedStreamer(models.echo, **{option: value})
    assert StreamerOptions(batch_size=1, max_latency=0).tenant_weights == {}


# -- in a streamer


class TestLengths(Lengths):
    """With workers of every kind."""


def test_call_that_its_length_function_refuses_is_not_enqueued() -> None:
    with Streamer(models.double, length=two) as streamer:
        with pytest.raises(ZeroDivisionError):
            streamer.submit([0])
        with pytest.raises(ValueError, match="two"):
            streamer.submit([1, -2])
        assert streamer.stats().pending == 0
        assert streamer.stats().accepted == 0


def test_worker_host_decodes_items_for_a_length_method(
    host: Callable[..., RedisWorker], client: Callable[..., RedisStreamer]
) -> None:
    host(Static)
    streamer = client(error_types=ERROR_TYPES)
    assert len(streamer.predict(["a", "bc"])) == 2
    with pytest.raises(TypeError, match="len") as caught:
        streamer.predict(["a", 5])
    assert "in length" in str(caught.value.__cause__), "where it was raised"
    assert streamer.predict(["d"]) == [1]


def test_a_call_whose_items_cannot_be_decoded_harms_no_host_with_lengths(
    host: Callable[..., RedisWorker],
    client: Callable[..., RedisStreamer],
    ask: redis.Redis,
    keys: Any,
    prefix: str,
) -> None:
    worker = host(Static)
    wire = Wire(BrokerOptions(prefix=prefix))
    for number, payload in enumerate((b"\xc1", b"")):
        message = wire.call("stranger", number, [wire.codec.encode("abc"), payload])
        ask.xadd(keys.calls, {"m": message})
    await_that(lambda: worker.stats().set_aside == 2)
    assert client().predict(["bc"]) == [1]
    ask.delete(keys.dead)
