"""Large answers and bodies over HTTP: read and written in pieces, within a bound."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from typing import Any

import msgspec
import numpy as np
import pytest

from http_in_process import (
    StubClient,
    StubStreamer,
    asking,
    await_that,
    in_event_loop,
    in_still_time,
    pass_time,
    post,
    serving,
)
from web_application import WebApplication

#: More than is written at once, as a worker sends it.
MANY = b" " * (1 << 20)

FEATURES = {"operations": ["predict", "embed"], "task": "feature-extraction", "vector_size": 100}


class Record(msgspec.Struct, omit_defaults=True):
    number: float
    text: str | None = None


class LargeResults(StubStreamer):
    """A streamer whose results are large.

    Args:
        result: of each item.
        description: of the model.
    """

    def __init__(self, result: Any, description: dict[str, Any] | None = None) -> None:
        super().__init__()
        self._result = result
        self._description = description or {}

    def flush(self) -> None:
        self.told.append("flush")
        while self.open and not self.is_held:
            call = self.open.pop()
            call.reply.end([MANY] * len(call.payloads))

    def decode(self, outputs: list[Any]) -> list[Any]:
        return [self._result] * len(outputs)

    def model_description(self) -> dict[str, Any]:
        return self._description


def parts_of(body: bytes) -> list[bytes]:
    """The parts of a chunked body, which has ended."""
    parts = []
    while body:
        length, _, body = body.partition(b"\r\n")
        size = int(length, 16)
        parts.append(body[:size])
        body = body[size:].removeprefix(b"\r\n")
    assert parts.pop() == b"", "its end"
    return parts


async def answer_of(client: StubClient) -> tuple[bytes, bytes]:
    """The head and the body of a chunked answer."""
    await await_that(lambda: client.received.endswith(b"\r\n0\r\n\r\n"))
    head, _, body = client.received.partition(b"\r\n\r\n")
    return head, body


PREDICT = post(b'{"inputs": ["x", "y"]}', path=b"/predict")

NUMBERS = [number / 7 for number in range(20_000)]


@pytest.mark.parametrize(
    ("result", "plain"),
    [
        (NUMBERS, NUMBERS),
        (np.array(NUMBERS), NUMBERS),
        (np.array(NUMBERS).reshape(4, 5, 1000), np.array(NUMBERS).reshape(4, 5, 1000).tolist()),
        (np.array(NUMBERS).reshape(-1, 1), [[number] for number in NUMBERS]),
        ([[NUMBERS], [], [np.array(NUMBERS)]], [[NUMBERS], [], [NUMBERS]]),
        ({"a": NUMBERS, "b": {}, "c": [{"d": None}] * 9},) * 2,
        ({1: NUMBERS}, {"1": NUMBERS}),
        ([*map(Record, NUMBERS), "é\""], [*({"number": number} for number in NUMBERS), "é\""]),
        (["a" * 400_000, 1, None, True], ["a" * 400_000, 1, None, True]),
    ],
    ids=["list", "array", "tensor", "column", "nested", "dict", "keys", "structs", "texts"],
)  # fmt: skip
@in_event_loop
async def test_a_large_answer_is_sent_in_pieces(result: Any, plain: Any) -> None:
    """Each has about a megabyte; what is beyond the first is made when that is written."""
    inputs = [str(number) for number in range(8)]
    request = post(json.dumps({"inputs": inputs}).encode(), path=b"/predict")
    async with serving(LargeResults(result)) as served:
        client = await asking(served.site, request)
        head, body = await answer_of(client)
        assert b"transfer-encoding: chunked" in head
        assert b"content-type: application/json" in head
        parts = parts_of(body)
        assert json.loads(b"".join(parts)) == [plain] * 8
        assert len(parts) > 1
        assert all(len(part) < 1_500_000 for part in parts)
        assert served.service.budgets.answers.size == 0
        status, small = await client.ask(post(b'{"inputs": []}', path=b"/predict"))
        assert (status, small) == (200, b"[]"), "the connection goes on"


@in_event_loop
async def test_a_text_is_not_held_beside_its_json() -> None:
    """A client that does not read left both."""
    text = "a" * (2 << 20)
    async with serving(LargeResults(text)) as served:
        before = sys.getrefcount(text)
        client = StubClient(served.site)
        client.send(post(b'{"inputs": "x"}', path=b"/predict"))
        client.stop_reading()
        await await_that(lambda: client.received)
        assert sys.getrefcount(text) == before


@in_event_loop
async def test_an_answer_of_few_bytes_says_how_long_it_is() -> None:
    async with serving(LargeResults([1.5] * 9)) as served:
        client = await asking(served.site, PREDICT)
        await await_that(lambda: client.received)
        head, _, body = client.received.partition(b"\r\n\r\n")
        assert b"content-length: %d" % len(body) in head
        assert json.loads(body) == [[1.5] * 9] * 2


@in_event_loop
async def test_what_is_no_json_closes_the_connection_of_a_large_answer(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with serving(LargeResults([*[NUMBERS] * 8, {1, 2, object}])) as served:
        client = await asking(served.site, PREDICT)
        await await_that(lambda: client.is_closed)
        assert client.received.startswith(b"HTTP/1.1 200")
        assert not client.received.endswith(b"\r\n0\r\n\r\n")
        assert served.service.budgets.answers.size == 0
        assert [record.levelname for record in caplog.records] == ["ERROR"]
    async with serving(LargeResults({object})) as served:
        client = await asking(served.site, PREDICT)
        await await_that(lambda: client.received)
        assert client.received.startswith(b"HTTP/1.1 500"), "nothing was sent yet"


def features(count: int, length: int) -> bytes:
    """A request for the features of so many texts, of so many tokens each."""
    body = {"inputs": ["word" * (length - 2)] * count}
    return post(json.dumps(body).encode(), path=b"/predict")


@in_event_loop
async def test_the_answers_of_all_requests_have_a_bound() -> None:
    """A vector has 400 bytes."""
    streamer = LargeResults([0.5], FEATURES)
    async with serving(streamer, max_answers=4_000_000) as served:
        client = await asking(served.site, features(101, 100))
        head, _, body = client.received.partition(b"\r\n\r\n")
        assert b" 413 " in head
        assert b"--max-answers" in body
        assert not streamer.calls
        streamer.is_held = True
        first = await asking(served.site, features(90, 100), beside=client)
        assert not first.received
        assert streamer.calls[-1].payloads[0]["arrays"], "in a tenth of the memory of lists"
        assert served.service.budgets.answers.size == 3_600_000
        second = await asking(served.site, features(11, 100), beside=client)
        assert b" 503 " in second.received
        assert b"retry-after: 1" in second.received
        third = await asking(served.site, features(10, 100), beside=client)
        assert not third.received
        first.leave()
        await await_that(lambda: served.service.budgets.answers.size == 400_000)
        embeds = post(json.dumps({"inputs": ["word" * 98] * 2_000}).encode(), path=b"/embed")
        fourth = await asking(served.site, embeds, beside=client)
        assert not fourth.received, "one vector each"


@in_event_loop
async def test_an_answer_beyond_the_bound_is_not_sent() -> None:
    """How large it is may be known only when it is there."""
    async with serving(LargeResults([0.5]), max_answers=2_000_000) as served:
        client = await asking(served.site, PREDICT)
        await await_that(lambda: client.received)
        assert b" 413 " in client.received
        assert served.service.budgets.answers.size == 0


@in_still_time
async def test_a_slow_reader_gives_way_when_there_is_no_room() -> None:
    streamer = LargeResults(NUMBERS, FEATURES)
    async with serving(streamer, max_answers=12_000_000) as served:
        budget = served.service.budgets.answers
        slow = StubClient(served.site)
        slow.send(features(10, 100))
        await await_that(lambda: slow.received)
        slow.stop_reading()  # after the first of four pieces
        assert budget.size == 10 * len(MANY)
        streamer.is_held = True
        for wait in (10.0, 21.0):
            await pass_time(wait)
            large = await asking(served.site, features(99, 100), beside=slow)
            assert large.received.startswith(b"HTTP/1.1 503")
        await await_that(lambda: slow.is_aborted)
        assert budget.size == 0
        large = await asking(served.site, features(99, 100), beside=slow)
        assert not large.received
        assert budget.size == 99 * 100 * 400


@in_event_loop
async def test_a_call_is_withdrawn_whose_request_ends_while_it_is_pickled() -> None:
    class Pickling(StubStreamer):
        begun, goes_on = threading.Event(), threading.Event()

        def submit(self, call: Any) -> None:
            self.begun.set()
            assert self.goes_on.wait(60)
            super().submit(call)

    streamer = Pickling()
    streamer.is_held = True
    body = json.dumps({"inputs": ["x" * (1 << 21)]}).encode()
    async with serving(streamer) as served:
        before = asyncio.all_tasks()
        await asking(served.site, post(body, path=b"/predict"))
        await await_that(streamer.begun.is_set)
        tasks = asyncio.all_tasks() - before
        [request] = [each for each in tasks if "Connection" in repr(each.get_coro())]
        request.cancel()
        streamer.goes_on.set()
        await asyncio.wait([request])
        assert len(streamer.calls) == 1
        assert not streamer.open


# -- bodies


@pytest.mark.parametrize(
    "value",
    [
        [[[number, number + 0.5] for number in range(70_000)]],
        [list(range(300_000)), "x", None],
        [[{"a": [1, {"b": "é\n" * 9}]}] * 60_000],
        ["a" * 1_100_000, [[[]], {}], [-1, 1e300, True]],
        [[1], [["b" * 600_000], ["c" * 600_000]], *[2] * 100_000],
    ],
    ids=["pairs", "numbers", "dicts", "texts", "uneven"],
)
def test_a_large_body_is_read_as_a_small_one(value: list[Any]) -> None:
    with WebApplication() as site:
        body = json.dumps({"inputs": value}, indent=1).encode()
        assert len(body) > 1 << 20
        assert site.post("/predict", body).json() == value


@pytest.mark.parametrize(
    "ending",
    [
        '], "parameters": 3}', '], "parameters": {', "]", '], "other": 1}', ', {"a" 1}]}',
        ', "\\ud800x"], "stream": 1}', ", nul]}", '], "inputs": 1, "stream": "yes"}', "]} 1",
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_large_body_is_said_as_of_a_small_one(ending: str) -> None:
    with WebApplication() as site:
        answers = []
        for blank in (10, 1 << 20):
            body = '{"inputs": [' + " " * blank + "1" + ending
            answers.append(site.post("/predict", body.encode()))
        small, large = answers
        assert small.status_code == large.status_code
        told = [answer.json()["error"] for answer in answers]
        for each in told:
            each["message"] = each["message"].partition("(byte")[0]
        assert told[0] == told[1]
