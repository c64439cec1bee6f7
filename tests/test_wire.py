"""The messages over Redis: what is sent comes back, and nothing else is believed.

``faults/test_redis_hostile.py`` has what strangers may send in place of a call.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import redis_peers
from models import DetailedError, FrozenError, OddError, WordedError
from service_streamer import (
    BadMessage,
    BadModelOutput,
    InvalidInput,
    InvalidItems,
    ModelError,
    PredictTimeout,
    WorkerLost,
)
from service_streamer.redis.wire import CallOptions, OutputRun, RemoteAnswer, Wire
from test_codec import CHANGES, FUZZ, Changes, changed

SECRET = b"sixteen bytes or more"


def wire(secret: bytes | None = None, **options: Any) -> Wire:
    return redis_peers.wire(secret=secret, **{"max_message_bytes": 10_000, **options})


def test_a_message_of_another_format_says_what_to_install() -> None:
    message = msgpack.packb([1, "msgpack", "web", 7, [b"a"]])
    with pytest.raises(BadMessage, match="install the same version of service_streamer") as caught:
        wire().read_call(message)
    assert caught.value.reason == "format"


@pytest.mark.parametrize("secret", [None, SECRET])
@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        CallOptions(10**9), CallOptions(-(10**9), "Zoë", True), CallOptions(0, "\ud83d" * 256),
        CallOptions(has_deadline=True),
    ],
)  # fmt: skip
def test_the_headers_of_a_call_come_as_they_were_sent(
    secret: bytes | None, options: CallOptions, is_stream: bool
) -> None:
    both = wire(secret)
    options = CallOptions(*options[:3], is_stream)
    message = both.call("web", 7, [b"a", b""], options)
    assert both.read_call(message) == ("web", 7, [b"a", b""], options)


MESSAGES = [
    wire().call("web", 7, [b"a", b"bc"], CallOptions(-3, "Zoë", True, True)),
    wire().results("web", 7, [b"x"]),
    wire().failure("web", 7, FileNotFoundError(2, "No such file", "x")),
    wire().stream_end("web", 7, 5, [b"x"], WorkerLost("died")),
    wire().outputs("web", [OutputRun(7, 0, [b"a", b""], b"1-0")]),
]


@settings(FUZZ, max_examples=200)
@given(st.sampled_from(MESSAGES), CHANGES)
def test_mutated_messages_are_read_or_refused(message: bytes, changes: Changes) -> None:
    reader = wire()
    reads: list[Callable[[bytes], object]] = [
        reader.read_call,
        lambda message: reader.read_reply(message, "web"),
        lambda message: reader.read_outputs(message, "web"),
    ]
    for read in reads:
        with contextlib.suppress(BadMessage):
            read(changed(message, changes))


def test_malformed_replies_and_outputs_are_refused() -> None:
    for told in (
        *(7, [], ["a"], [1, b"", "text", None, None]),
        ["builtins.ValueError", b"", 3, None, None],
        # the end of a stream
        *({}, {"first": 0}, {"first": -1, "outputs": []}, {"first": 0, "outputs": "ab"}),
    ):
        with pytest.raises(BadMessage):
            wire().read_reply(msgpack.packb([2, "msgpack", "web", 7, told]), "web")
    for content in (
        *(None, [7], [[7, 0, [b"a"]]], [[7, 0, [b"a"], b"1-0", 1]], [[True, 0, [b"a"], b""]]),
        *([[7, -1, [b"a"], b""]], [[7, 0, ["a"], b""]], [[7, 0, b"a", b""]]),
    ):
        with pytest.raises(BadMessage):
            wire().read_outputs(msgpack.packb([2, "msgpack", "web", 0, content]), "web")


def test_outputs_of_streams_and_their_ends_come_as_they_were_sent() -> None:
    both = wire(SECRET)
    runs = [OutputRun(7, 0, [b"a", b""], b"1-0"), OutputRun(9, 300, [b"b"], b"")]
    assert both.read_outputs(both.outputs("web", runs), "web") == runs
    with pytest.raises(BadMessage, match="another client"):
        both.read_outputs(both.outputs("web", runs), "other")
    with pytest.raises(BadMessage, match="another client"):
        both.read_reply(both.stream_end("web", 7, 5, []), "other")
    for rest in ([], [b"x", b"y"]):
        end = both.read_reply(both.stream_end("web", 7, 5, rest), "web")
        assert end == RemoteAnswer(7, rest, None, 5)
    failed = both.read_reply(both.stream_end("web", 7, 5, [b"x"], WorkerLost("died")), "web")
    assert failed.outputs == [b"x"]
    assert failed.failure is not None
    assert isinstance(failed.failure.exception(), WorkerLost)


def travelled(error: BaseException, error_types: Any = (), **options: Any) -> BaseException:
    """The exception, as a client would raise it."""
    sender, receiver = wire(**options), wire(**options, error_types=error_types)
    failure = receiver.read_reply(sender.failure("web", 7, error), "web").failure
    assert failure is not None
    return failure.exception()


@pytest.mark.parametrize(
    "error",
    [
        ValueError("why"), ValueError(), ValueError("\ud800"), KeyError("a"),
        FileNotFoundError(2, "No such file", "x"),
        Exception("why"), StopIteration(3), PredictTimeout("late"), WorkerLost("it died"),
        BadModelOutput("two, not three"),
    ],
)  # fmt: skip
def test_errors_of_python_and_of_this_package_arrive_as_themselves(error: Exception) -> None:
    arrived = travelled(error)
    assert type(arrived) is type(error)
    assert str(arrived) == str(error)


class Missing(KeyError):
    """Quotes its argument, as its base does."""


def test_a_kind_of_key_error_arrives_with_its_text() -> None:
    assert repr(travelled(Missing("a"), (Missing,))) == repr(Missing("a"))


def test_an_error_that_needs_more_than_a_text_arrives_as_one_of_its_kind() -> None:
    error = UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")
    assert repr(travelled(error)) == repr(UnicodeError(str(error)))
    refused = InvalidItems({0: ValueError("why")})
    assert repr(travelled(refused)) == repr(InvalidInput(str(refused)))


def test_another_error_arrives_as_itself_if_it_is_named_and_else_by_its_text() -> None:
    arrived = travelled(DetailedError("why", 3), [DetailedError])
    assert isinstance(arrived, DetailedError)
    assert (str(arrived), vars(arrived)) == ("('why', 3)", {})
    worded = travelled(WordedError(3), [WordedError])
    assert (type(worded), str(worded)) == (WordedError, "error 3")
    odd = travelled(OddError("a", "b"), [OddError])
    assert (type(odd), odd.args) == (OddError, ("ab",))
    for unknown in (DetailedError("why", 3), FrozenError(5)):
        arrived = travelled(unknown)
        assert type(arrived) is ModelError
        assert type(unknown).__qualname__ in str(arrived)
    options = {"secret": SECRET, "serializer": "pickle"}  # with which any error arrives as itself
    arrived = travelled(DetailedError("why", 3), **options)
    assert isinstance(arrived, DetailedError)
    odd = travelled(OddError("a", "b"), **options)
    assert (type(odd), str(odd)) == (OddError, "ab")


def test_the_traceback_and_the_causes_come_along() -> None:
    told = ["builtins.ValueError", None, "why", "Traceback: there", None]
    failure = wire().read_reply(msgpack.packb([2, "msgpack", "web", 7, told]), "web").failure
    assert failure is not None
    error = failure.exception()
    assert "Traceback: there" in str(error.__cause__)
    assert "Traceback: there" in str(travelled(error).__cause__)

    lost = WorkerLost("it died")
    lost.__cause__ = error
    arrived = travelled(lost).__cause__
    assert isinstance(arrived, ValueError)
    assert "Traceback: there" in str(arrived.__cause__)


def test_message_that_is_too_long_becomes_an_error_that_says_so() -> None:
    short = wire(max_message_bytes=1024)
    with pytest.raises(ValueError, match="max_message_bytes is 1024"):
        short.call("web", 7, [b"x" * 1000])
    for reply, text in (
        (short.results("web", 7, [b"x" * 1000]), "too large"),
        (short.failure("web", 7, ValueError("x" * 1000)), "too long"),
    ):
        failure = short.read_reply(reply, "web").failure
        assert failure is not None
        assert text in failure.text
