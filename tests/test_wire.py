"""The messages over Redis: what is sent comes back, and nothing else is believed."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest

import redis_peers
from models import DetailedError, FrozenError, OddError, WordedError
from service_streamer import BadMessage, BadModelOutput, ModelError, PredictTimeout, WorkerLost
from service_streamer.redis.wire import Attempt, OutputRun, Precedence, RemoteAnswer, Wire

SECRET = b"sixteen bytes or more"
ORDINARY = Precedence()
MSGPACK = redis_peers.wire().codec
PICKLE = redis_peers.wire(serializer="pickle", secret=SECRET).codec


def wire(secret: bytes | None = None, prefix: str = "", **options: Any) -> Wire:
    settings: dict[str, Any] = {"max_bytes": 10_000, **options}
    return Wire(settings.pop("codec", MSGPACK), secret=secret, prefix=prefix, **settings)


@pytest.mark.parametrize("secret", [None, SECRET])
def test_calls_and_results_come_as_they_were_sent(secret: bytes | None) -> None:
    both = wire(secret)
    call = both.read_call(both.call("web", 7, [b"a", b""]))
    assert call == ("web", 7, [b"a", b""], ORDINARY, None)
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
        (wire(SECRET, codec=PICKLE), "serializer 'msgpack', but this side has 'pickle'"),
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
        [1, "msgpack", "web", 7, [[b"a"], {}]],
        [2, "msgpack", "web", 7],
        [2, "msgpack", "", 7, [[b"a"], {}]],
        [2, "msgpack", "x" * 65, 7, [[b"a"], {}]],
        [2, "msgpack", 3, 7, [[b"a"], {}]],
        [2, "msgpack", "web", "7", [[b"a"], {}]],
        [2, "msgpack", "web", True, [[b"a"], {}]],
        [2, "msgpack", "web", 7, []],
        [2, "msgpack", "web", 7, ["a"]],
        [2, "msgpack", "web", 7, [b"a", "b"]],
        [2, "msgpack", "web", 7, b"a"],
        [1, ["msgpack"], "web", 7, [b"a"]],
    ],
)
def test_message_that_is_no_call_is_refused(fields: Any) -> None:
    message = None if fields is None else msgpack.packb(fields)
    with pytest.raises(BadMessage):
        wire().read_call(message)


def test_a_message_of_another_format_says_what_to_install() -> None:
    message = msgpack.packb([1, "msgpack", "web", 7, [b"a"]])
    with pytest.raises(BadMessage, match="install the same version of service_streamer") as caught:
        wire().read_call(message)
    assert caught.value.reason == "format"


# -- the headers of calls


@pytest.mark.parametrize("secret", [None, SECRET])
@pytest.mark.parametrize("attempt", [None, Attempt(0, 0), Attempt(3, 1)])
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
def test_the_headers_of_a_call_come_as_they_were_sent(
    secret: bytes | None, precedence: Precedence, attempt: Attempt | None
) -> None:
    both = wire(secret)
    message = both.call("web", 7, [b"a"], precedence, attempt)
    assert both.read_call(message) == ("web", 7, [b"a"], precedence, attempt)


@pytest.mark.parametrize(
    "headers",
    [
        7,
        [],
        "abc",
        None,
        {"priority": "0"},
        {"priority": True},
        {"priority": 1.0},
        {"priority": 10**9 + 1},
        {"tenant": b""},
        {"tenant": None},
        {"tenant": "x" * 257},
        {"has_deadline": 0},
        {"has_deadline": None},
        {"stream": True},
        {"stream": []},
        {"stream": [1]},
        {"stream": [0, "0"]},
        {"unknown": 1},
        {b"priority": 1},
    ],
)
def test_headers_that_are_none_are_refused(headers: Any) -> None:
    message = msgpack.packb([2, "msgpack", "web", 7, [[b"a"], headers]])
    with pytest.raises(BadMessage, match=r"its headers are malformed"):
        wire().read_call(message)


# -- replies


@pytest.mark.parametrize(
    "told",
    [7, [], ["a"], [1, b"", "text", None, None], ["builtins.ValueError", b"", 3, None, None]],
)
def test_reply_with_a_malformed_error_is_refused(told: Any) -> None:
    with pytest.raises(BadMessage):
        wire().read_reply(msgpack.packb([2, "msgpack", "web", 7, told]), "web")


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
        told = [name, MSGPACK.encode([[], {}]), "text", None, None]
        message = msgpack.packb([2, "msgpack", "web", 7, told])
        failure = wire().read_reply(message, "web").failure
        assert failure is not None
        assert type(failure.exception()) is ModelError


def test_an_error_that_holds_what_cannot_travel_arrives_by_its_text() -> None:
    arrived = travelled(ValueError(object))
    assert type(arrived) is ModelError
    assert "ValueError: <class 'object'>" in str(arrived)


def test_the_traceback_and_the_causes_come_along() -> None:
    told = ["builtins.ValueError", MSGPACK.encode([["why"], {}]), "", "Traceback: there", None]
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


def test_any_error_arrives_as_itself_with_pickle() -> None:
    options = {"secret": SECRET, "codec": PICKLE}
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
def test_malformed_outputs_are_refused(content: Any) -> None:
    with pytest.raises(BadMessage):
        wire().read_outputs(msgpack.packb([2, "msgpack", "web", 0, content]), "web")


@pytest.mark.parametrize(
    "content", [{}, {"first": 0}, {"first": -1, "outputs": []}, {"first": 0, "outputs": "ab"}]
)
def test_malformed_end_of_a_stream_is_refused(content: Any) -> None:
    with pytest.raises(BadMessage):
        wire().read_reply(msgpack.packb([2, "msgpack", "web", 7, content]), "web")
