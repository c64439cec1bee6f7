"""The messages over Redis: what is sent comes back, and nothing else is believed."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest

from models import DetailedError, FrozenError, OddError, WordedError
from service_streamer import BadMessage, BadModelOutput, ModelError, PredictTimeout, WorkerLost
from service_streamer.errors import RemoteTraceback
from service_streamer.observe.record import ORDINARY, Precedence
from service_streamer.redis.codec import MsgpackCodec, PickleCodec
from service_streamer.redis.wire import Wire
from service_streamer.remote.open_calls import Attempt, OutputRun, RemoteAnswer
from service_streamer.workers.protocol import Failure

SECRET = b"sixteen bytes or more"


def wire(secret: bytes | None = None, prefix: str = "", **options: Any) -> Wire:
    settings: dict[str, Any] = {"max_bytes": 10_000, **options}
    return Wire(settings.pop("codec", MsgpackCodec()), secret=secret, prefix=prefix, **settings)


@pytest.mark.parametrize("secret", [None, SECRET])
def test_calls_and_results_come_as_they_were_sent(secret: bytes | None) -> None:
    both = wire(secret)
    assert both.read_call(both.call("web", 7, [b"a", b""])) == ("web", 7, [b"a", b""])
    assert both.read_reply(both.results("web", 7, [b"x"]), "web") == RemoteAnswer(7, [b"x"])


def test_a_message_is_for_its_recipient_alone() -> None:
    both = wire(SECRET)
    with pytest.raises(BadMessage, match="another client"):
        both.read_reply(both.results("web", 7, [b"x"]), "other")


@pytest.mark.parametrize(
    ("reader", "match"),
    [
        (wire(), "cannot be decoded|is not a message"),
        (wire(b"another secret of some length"), "signature is wrong"),
        (wire(SECRET, "another"), "signature is wrong"),
        (wire(SECRET, codec=PickleCodec()), "serializer 'msgpack', but this side has 'pickle'"),
        (wire(SECRET, max_bytes=1), "max_message_bytes is 1"),
    ],
)
def test_another_party_reads_nothing(reader: Wire, match: str) -> None:
    message = wire(SECRET).call("web", 7, [b"a"])
    with pytest.raises(BadMessage, match=match):
        reader.read_call(message)


def test_a_call_is_no_reply_and_a_reply_is_no_call() -> None:
    both = wire(SECRET)
    with pytest.raises(BadMessage, match="signature"):
        both.read_reply(both.call("web", 7, [b"a"]), "web")
    with pytest.raises(BadMessage, match="signature"):
        both.read_call(both.results("web", 7, [b"a"]))


def test_every_byte_that_is_signed_counts() -> None:
    both = wire(SECRET)
    message = both.call("web", 7, [b"abc"])
    for position in range(len(message)):
        forged = bytearray(message)
        forged[position] ^= 1
        with pytest.raises(BadMessage, match="signature"):
            both.read_call(bytes(forged))


@pytest.mark.parametrize(
    "fields",
    [
        None,
        b"",
        {},
        [],
        [2, "msgpack", "web", 7, [b"a"]],
        [1, "msgpack", "web", 7],
        [1, "msgpack", "", 7, [b"a"]],
        [1, "msgpack", "x" * 65, 7, [b"a"]],
        [1, "msgpack", 3, 7, [b"a"]],
        [1, "msgpack", "web", "7", [b"a"]],
        [1, "msgpack", "web", True, [b"a"]],
        [1, "msgpack", "web", 7, []],
        [1, "msgpack", "web", 7, ["a"]],
        [1, "msgpack", "web", 7, [b"a", "b"]],
        [1, "msgpack", "web", 7, b"a"],
        [1, ["msgpack"], "web", 7, [b"a"]],
    ],
)
def test_what_is_no_call_is_refused(fields: Any) -> None:
    message = None if fields is None else msgpack.packb(fields)
    with pytest.raises(BadMessage):
        wire().read_call(message)


# -- the order of calls


@pytest.mark.parametrize("secret", [None, SECRET])
@pytest.mark.parametrize(
    "precedence",
    [
        ORDINARY,
        Precedence(10**9),
        Precedence(-(10**9), "Zoë", True),
        Precedence(0, "\ud83d" * 256),
        Precedence(has_deadline=True),
    ],
)
def test_the_order_of_a_call_comes_as_it_was_sent(
    secret: bytes | None, precedence: Precedence
) -> None:
    both = wire(secret)
    message = both.call("web", 7, [b"a"])
    order = both.order(precedence, message)
    assert (order == b"") == (precedence is ORDINARY), "of an ordinary call there is nothing to say"
    assert both.read_order(order, message) == precedence


def test_a_call_without_an_order_is_an_ordinary_one() -> None:
    assert wire().read_order(None, b"of an older version") is ORDINARY


def test_an_order_is_for_its_call_alone() -> None:
    both = wire(SECRET)
    one, other = both.call("web", 7, [b"a"]), both.call("web", 8, [b"a"])
    order = both.order(Precedence(1), one)
    for reader, message in (
        (both, other), (wire(SECRET, "another"), one), (wire(SECRET[::-1]), one)
    ):  # fmt: skip
        with pytest.raises(BadMessage, match="signature"):
            reader.read_order(order, message)


@pytest.mark.parametrize(
    "told",
    [
        7,
        [],
        "abc",
        [0, "", False, 1],
        [0, ""],
        {"0": 1, "": 2, "False": 3},
        ["0", "", False],
        [True, "", False],
        [1.0, "", False],
        [10**9 + 1, "", False],
        [0, b"", False],
        [0, None, False],
        [0, "x" * 257, False],
        [0, "", 0],
        [0, "", None],
    ],
)
def test_what_is_no_order_is_refused(told: Any) -> None:
    with pytest.raises(BadMessage, match=r"its precedence|cannot be decoded"):
        wire().read_order(msgpack.packb(told), b"")
    for rubbish in (b"\xc1", b"\x93\x00", "text", 3):
        with pytest.raises(BadMessage):
            wire().read_order(rubbish, b"")


# -- replies


@pytest.mark.parametrize(
    "told",
    [7, [], ["a"], [1, b"", "text", None, None], ["builtins.ValueError", b"", 3, None, None]],
)
def test_what_is_no_error_is_refused(told: Any) -> None:
    with pytest.raises(BadMessage):
        wire().read_reply(msgpack.packb([1, "msgpack", "web", 7, told]), "web")


# -- errors


def travelled(error: BaseException, error_types: Any = (), **options: Any) -> BaseException:
    """The exception, as a client would raise it."""
    sender, receiver = wire(**options), wire(**options, error_types=error_types)
    failure = receiver.read_reply(sender.failure("web", 7, error), "web").failure
    assert failure is not None
    return failure.exception()


@pytest.mark.parametrize(
    "error",
    [
        ValueError("why"),
        ValueError(),
        KeyError(("a", 1)),
        FileNotFoundError(2, "No such file", "x"),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"),
        StopIteration(3),
        PredictTimeout("late"),
        WorkerLost("it died"),
        BadModelOutput("two, not three"),
    ],
)
def test_errors_of_python_and_of_this_package_arrive_as_themselves(error: Exception) -> None:
    arrived = travelled(error)
    assert type(arrived) is type(error)
    assert arrived.args == error.args
    assert str(arrived) == str(error)


def test_a_named_error_arrives_as_itself_with_all_that_it_holds() -> None:
    arrived = travelled(DetailedError("why", 3), [DetailedError])
    assert isinstance(arrived, DetailedError)
    assert (arrived.args, arrived.code, arrived.detail) == (("why", 3), 3, {"why": "why"})
    worded = travelled(WordedError(3), [WordedError])
    assert (type(worded), str(worded)) == (WordedError, "error 3")
    odd = travelled(OddError("a", "b"), [OddError])
    assert (type(odd), odd.args) == (OddError, ("ab",))


@pytest.mark.parametrize("error", [DetailedError("why", 3), FrozenError(5)])
def test_another_error_arrives_as_a_stand_in_that_names_it(error: Exception) -> None:
    arrived = travelled(error)
    assert type(arrived) is ModelError
    assert type(error).__qualname__ in str(arrived)


def test_a_class_is_never_looked_up_by_its_name() -> None:
    for name in ("subprocess.CalledProcessError", "builtins.SystemExit", "builtins.eval", "os.x"):
        told = [name, MsgpackCodec().encode([[], {}]), "text", None, None]
        message = msgpack.packb([1, "msgpack", "web", 7, told])
        failure = wire().read_reply(message, "web").failure
        assert failure is not None
        assert type(failure.exception()) is ModelError


def test_an_error_that_holds_what_cannot_travel_arrives_by_its_text() -> None:
    arrived = travelled(ValueError(object))
    assert type(arrived) is ModelError
    assert "ValueError: <class 'object'>" in str(arrived)


def test_the_traceback_and_the_causes_come_along() -> None:
    error = Failure(ValueError("why"), "Traceback: there").exception()
    cause = travelled(error).__cause__
    assert isinstance(cause, RemoteTraceback)
    assert cause.text == "Traceback: there"

    error = WorkerLost("it died")
    error.__cause__ = Failure(KeyError("k"), "Stacks: here").exception()
    arrived = travelled(error).__cause__
    assert isinstance(arrived, KeyError)
    assert isinstance(arrived.__cause__, RemoteTraceback)


def test_what_is_too_long_becomes_an_error_that_says_so() -> None:
    short = wire(max_bytes=1000)
    with pytest.raises(ValueError, match="max_message_bytes is 1000"):
        short.call("web", 7, [b"x" * 1000])
    failure = short.read_reply(short.results("web", 7, [b"x" * 1000]), "web").failure
    assert failure is not None
    assert "too large" in failure.text
    failure = short.read_reply(short.failure("web", 7, ValueError("x" * 1000)), "web").failure
    assert failure is not None
    assert "too long" in failure.text


def test_half_characters_in_an_error_do_no_harm() -> None:
    assert str(travelled(ValueError("\ud800"))) == "\ud800"


def test_with_pickle_any_error_arrives_as_itself() -> None:
    options = {"secret": SECRET, "codec": PickleCodec()}
    arrived = travelled(DetailedError("why", 3), **options)
    assert isinstance(arrived, DetailedError)
    assert (arrived.args, arrived.detail) == (("why", 3), {"why": "why"})
    odd = travelled(OddError("a", "b"), **options)  # which does not unpickle
    assert (type(odd), "OddError: ab" in str(odd)) == (ModelError, True)


# -- streams


@pytest.mark.parametrize("secret", [None, SECRET])
def test_outputs_of_streams_and_their_ends_come_as_they_were_sent(secret: bytes | None) -> None:
    both = wire(secret)
    runs = [OutputRun(7, 0, [b"a", b""], b"1-0"), OutputRun(9, 300, [b"b"], b"")]
    assert both.read_outputs(both.outputs("web", runs), "web") == runs
    with pytest.raises(BadMessage, match="another client"):
        both.read_outputs(both.outputs("web", runs), "other")
    for rest in ([], [b"x", b"y"]):
        end = both.read_reply(both.stream_end("web", 7, 5, rest), "web")
        assert end == RemoteAnswer(7, rest, None, 5)
    failed = both.read_reply(both.stream_end("web", 7, 5, [b"x"], WorkerLost("died")), "web")
    assert failed.outputs == [b"x"]
    assert failed.failure is not None
    assert isinstance(failed.failure.exception(), WorkerLost)
    again = both.stream_end("web", 7, 5, [b"x"], WorkerLost("died"), Attempt(2, 1))
    assert both.read_reply(again, "web").again == Attempt(2, 1)


@pytest.mark.parametrize("secret", [None, SECRET])
def test_the_mark_of_a_stream_is_that_of_its_message(secret: bytes | None) -> None:
    both = wire(secret)
    message, other = both.call("web", 7, [b"a"]), both.call("web", 8, [b"a"])
    mark = both.stream_mark(message)
    assert both.read_stream_mark(mark, message) == Attempt(0, 0)
    later = both.stream_mark(message, Attempt(3, 1))
    assert both.read_stream_mark(later, message) == Attempt(3, 1)
    assert not both.read_stream_mark(None, message), "of most calls, and of older clients"
    with pytest.raises(BadMessage):
        both.read_stream_mark(b"\0", message)
    if secret:
        with pytest.raises(BadMessage, match="signature"):
            both.read_stream_mark(mark, other)


@pytest.mark.parametrize(
    "content",
    [
        None,
        [[7, 0, [b"a"]]],
        [[7, 0, [b"a"], b"1-0", 1]],
        [[True, 0, [b"a"], b""]],
        [[7, -1, [b"a"], b""]],
        [[7, 0, ["a"], b""]],
        [[7, 0, b"a", b""]],
        [7],
    ],
)
def test_what_are_no_outputs_is_refused(content: Any) -> None:
    with pytest.raises(BadMessage):
        wire().read_outputs(msgpack.packb([1, "msgpack", "web", 0, content]), "web")


@pytest.mark.parametrize(
    "content", [{}, {"first": 0}, {"first": -1, "outputs": []}, {"first": 0, "outputs": "ab"}]
)
def test_what_is_no_end_of_a_stream_is_refused(content: Any) -> None:
    with pytest.raises(BadMessage):
        wire().read_reply(msgpack.packb([1, "msgpack", "web", 7, content]), "web")
