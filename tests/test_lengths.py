"""What items cost: where it is said, that it is checked, and whom it fails if it is wrong."""

from __future__ import annotations

import fractions
import functools
import logging
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import models
from conftest import ERROR_TYPES, AnyStreamer
from service_streamer import ManagedModel, RedisStreamer, RedisWorker, Streamer, ThreadedStreamer
from service_streamer.engine.build import make_lengths
from service_streamer.options.table import BatchingOptions
from service_streamer.redis.codec import MsgpackCodec

Build = Callable[..., AnyStreamer]


class Echo(ManagedModel):
    def init_model(self) -> None:
        """Nothing to load."""

    def predict(self, batch: list[Any]) -> list[Any]:
        return batch


class Static(Echo):
    @staticmethod
    def length(item: str) -> int:
        return len(item)


class OfClass(Echo):
    factor = 2

    @classmethod
    def length(cls, item: str) -> int:
        return cls.factor * len(item)


class Plain(Echo):
    factor = 3

    def length(self, item: str) -> int:
        return self.factor * len(item)


class Inherits(Plain):
    """Says nothing itself."""


class BuiltIn(Echo):
    length = len


class Needy(Echo):
    def init_model(self) -> None:
        self.tokenizer = str.split

    def length(self, item: str) -> int:
        return len(self.tokenizer(item))


class Rude(Echo):
    def __new__(cls, gpu_id: int | str | None) -> Rude:
        return super().__new__(cls)

    def length(self, item: str) -> int:
        return len(item)


class SomethingElse(Echo):
    """The name is taken for other things."""

    length = 512


def two(item: Any) -> float:
    """Fails on the item 0."""
    return 2 / item


# -- where it is said


@pytest.mark.parametrize(
    ("length", "model", "found"),
    [
        (None, Static, [1, 3]),
        (None, OfClass, [2, 6]),
        (None, Plain, [3, 9]),
        (None, Inherits, [3, 9]),
        (None, BuiltIn, [1, 3]),
        (len, Plain, [1, 3]),
        (functools.partial(str.count, "caba"), Static, [2, 0]),
        ("builtins:len", Plain, [1, 3]),
        ("test_lengths:Static.length", models.echo, [1, 3]),
        ("test_lengths:OfClass.length", "some.where:Model", [2, 6]),
        ("test_lengths:Plain.length", "some.where:Model", [3, 9]),
    ],
)
def test_lengths_are_those_of_the_argument_or_else_of_the_class(
    length: Any, model: Any, found: list[float]
) -> None:
    lengths = make_lengths(length, model)
    assert lengths is not None
    assert lengths(["a", "abc"]) == found


@pytest.mark.parametrize("model", [Echo, SomethingElse, models.echo, "not.there:Model"])
def test_nobody_has_said_it(model: Any) -> None:
    assert make_lengths(None, model) is None


@pytest.mark.parametrize(
    "length",
    [
        *(3, "", "builtins.len", "builtins:", ":len", "not.there:length", "builtins:lenght"),
        *("test_lengths:ERROR_TYPES", "test_lengths:SomethingElse.length"),
    ],
)
def test_what_is_no_function_is_refused_at_once(length: Any, wording: Callable[..., None]) -> None:
    for build in (ThreadedStreamer, Streamer):
        with pytest.raises((TypeError, ValueError, ImportError, AttributeError)) as caught:
            build(models.echo, length=length)
        wording(caught.value, hide={r"but \(.*": "but (...)"})


def test_a_method_that_needs_a_model_is_told_what_to_do() -> None:
    lengths = make_lengths(None, Needy)
    assert lengths is not None
    with pytest.raises(TypeError, match=r"Needy\.length needs .*@staticmethod .*self\.tokenizer"):
        lengths(["a b"])
    with pytest.raises(TypeError, match=r"Rude\.length needs an instance"):
        make_lengths(None, Rude)


def test_an_attribute_that_an_item_has_not_got_is_another_matter() -> None:
    lengths = make_lengths(lambda item: item.size, models.echo)
    assert lengths is not None
    with pytest.raises(AttributeError, match="'str' object has no attribute 'size'"):
        lengths(["a"])


def test_a_worker_says_that_the_length_of_its_model_is_not_used(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with ThreadedStreamer("test_lengths:Static") as streamer:
        assert streamer.predict(["a"]) == ["a"]
    [record] = [each for each in caplog.records if each.levelno == logging.WARNING]
    assert 'length="test_lengths:Static.length"' in record.getMessage()
    caplog.clear()
    with ThreadedStreamer("test_lengths:Static", length="test_lengths:Static.length") as streamer:
        assert streamer.predict(["a"]) == ["a"]
    assert [each for each in caplog.records if each.levelno == logging.WARNING] == []


# -- what it may be


@pytest.mark.parametrize(
    "value",
    [0, 0.0, 7, 2.5, 1e15, np.float32(2), np.int64(3), np.float64(4), fractions.Fraction(2)],
)
def test_numbers_of_all_kinds_will_do(value: Any) -> None:
    lengths = make_lengths(lambda _: value, models.echo)
    assert lengths is not None
    assert lengths([None]) == [float(value)]
    assert type(lengths([None])[0]) in (int, float, np.float64)


@pytest.mark.parametrize(
    ("value", "error"),
    [
        *((value, ValueError) for value in (-1, -0.5, math.inf, -math.inf, math.nan)),
        *((value, ValueError) for value in (1e16, 10**400)),
        *((value, ValueError) for value in (np.float64("nan"), np.float32("inf"), np.int64(-1))),
        *((value, TypeError) for value in (None, "7", True, False, [1], 1j, np.bool_(True))),
    ],
)  # fmt: skip
def test_what_is_no_length_is_refused_with_the_place(value: Any, error: Any) -> None:
    lengths = make_lengths(lambda item: value if item else 1, models.echo)
    assert lengths is not None
    with pytest.raises(error, match=r"<lambda> must return a finite number .* item 2 of the call"):
        lengths([0, 0, 1])


@pytest.mark.parametrize("value", [0, -1, math.inf, math.nan, "1", True])
def test_the_bound_of_cost_is_checked(value: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="max_batch_cost must be a finite number"):
        ThreadedStreamer(models.echo, max_batch_cost=value)


@pytest.mark.parametrize(
    "weights",
    [
        [("a", 1)],
        {"a": 0},
        {1: 2},
        {"a" * 257: 2},
    ],
    ids=lambda value: str(value)[:40],
)
def test_the_weights_of_tenants_are_checked(weights: Any, wording: Callable[..., None]) -> None:
    with pytest.raises((TypeError, ValueError)) as caught:
        Streamer(models.echo, tenant_weights=weights)
    wording(caught.value)
    assert BatchingOptions(batch_size=1, max_latency=0).tenant_weights == {}


@pytest.mark.parametrize(
    ("said", "error", "match"),
    [
        ({"priority": 1.5}, TypeError, "priority must be a whole number"),
        ({"priority": True}, TypeError, "priority must be a whole number"),
        ({"priority": 10**9 + 1}, ValueError, "priority must be at most 1000000000 from 0"),
        ({"tenant": 7}, TypeError, "tenant must be a string"),
        ({"tenant": "x" * 257}, ValueError, "at most 256 characters; not 257"),
    ],
)
def test_who_goes_first_is_checked_where_it_is_said(
    build: Build, said: Any, error: Any, match: str
) -> None:
    streamer: Any = build(models.double)
    with pytest.raises(error, match=match):
        streamer.predict([1], **said)
    with pytest.raises(error, match=match):
        streamer.submit([1], **said)
    assert streamer.predict([1], priority=-(10**9), tenant="\ud83d" * 256, timeout=600) == [2]


# -- in a streamer


@pytest.mark.parametrize("bound", [None, 10])
def test_a_streamer_computes_the_same_with_lengths(build: Build, bound: float | None) -> None:
    streamer: Any = build(
        models.double, 4, length=len, max_batch_cost=bound, tenant_weights={"paying": 3}
    )
    items = ["x" * (number * 7 % 23) for number in range(50)]
    assert streamer.predict(items) == [2 * item for item in items]
    assert streamer.predict(items, tenant="paying", priority=2) == [2 * item for item in items]


def test_what_it_raises_goes_to_its_caller_alone(build: Build) -> None:
    streamer: Any = build(models.double, length=two)
    future = streamer.submit([1, 2])
    for call in (streamer.predict, lambda items: streamer.submit(items).result()):
        with pytest.raises(ZeroDivisionError, match="division by zero"):
            call([1, 0])
    assert future.result() == [2, 4]
    assert streamer.predict([3]) == [6]


def test_nothing_is_enqueued_of_what_it_refuses() -> None:
    with Streamer(models.double, length=two) as streamer:
        with pytest.raises(ZeroDivisionError):
            streamer.submit([0])
        with pytest.raises(ValueError, match=r"models\.two|test_lengths\.two"):
            streamer.submit([1, -2])
        assert streamer.stats().pending == 0
        assert streamer.stats().accepted == 0


def test_a_worker_host_decodes_items_for_it(
    host: Callable[..., RedisWorker], client: Callable[..., RedisStreamer]
) -> None:
    host(Static)
    streamer = client(error_types=ERROR_TYPES)
    assert streamer.predict(["a", "bc"]) == ["a", "bc"]
    with pytest.raises(TypeError, match="has no len") as caught:
        streamer.predict(["a", 5])
    assert "in length" in str(caught.value.__cause__), "where it was raised"
    assert streamer.predict(["d"]) == ["d"]


def test_what_cannot_be_decoded_is_the_workers_to_refuse() -> None:
    codec = MsgpackCodec()
    lengths = make_lengths(len, models.echo, codec)
    assert lengths is not None
    assert lengths([codec.encode("abc"), b"\xc1", b"", codec.encode("a")]) == [3, 0, 0, 1]
