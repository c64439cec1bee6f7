"""Streams over HTTP: the service in a process of its own, real requests; what a client is told."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from serve_process import Serving, figures_in, until
from service_streamer import ThreadedStreamer
from service_streamer.serve.http.events import OutputEvents
from service_streamer.serve.http.exchange import Disconnected
from service_streamer.serve.http.operations import encode
from service_streamer.serve.http.refusals import Refusal, refusal
from service_streamer.serve.http.streaming import EventStream
from service_streamer.testing import Gate
from stub_exchange import StubExchange
from test_streams import gated as gated_model

COUNTING = "served_models:Counting"
ENDLESS = 10**9
Gated = Callable[..., tuple[Serving, Gate]]


@pytest.fixture(scope="module")
def service() -> Iterator[Serving]:
    with Serving(COUNTING, "--batch-size", "8") as service:
        yield service


@pytest.fixture
def gated(tmp_path: Path) -> Iterator[Gated]:
    """Services whose model waits for the test before each step."""
    gate = Gate(tmp_path / "gate")
    made: list[Serving] = []

    def make(*arguments: str) -> tuple[Serving, Gate]:
        env = {"TEST_GATE": str(gate.__getstate__()), "TEST_RECORD": str(tmp_path / "record")}
        made.append(Serving(COUNTING, *arguments, **env))
        return made[-1], gate

    yield make
    for service in made:
        service.close()
    gate.close()


def steps(folder: Path) -> list[int]:
    """How many items each step of the model had."""
    record = folder / "record"
    return [int(line) for line in record.read_text().split()] if record.exists() else []


def ask(service: Serving, inputs: Any, **headers: str) -> httpx.Response:
    """Stream, and read all of it."""
    return service.post("/predict", {"inputs": inputs, "stream": True}, **headers)


class Events:
    """A stream that is open: its events, one at a time. Leaving the block disconnects."""

    def __init__(self, service: Serving, inputs: Any, **headers: str) -> None:
        self._client = httpx.Client(base_url=service.url, timeout=240, verify=False)
        body = {"inputs": inputs, "stream": True}
        self._opened = self._client.stream("POST", "/predict", json=body, headers=headers)

    def __enter__(self) -> Events:
        self._lines = self._opened.__enter__().iter_lines()
        return self

    def __exit__(self, *error: Any) -> None:
        self._opened.__exit__(*error)
        self._client.close()

    def next(self) -> Any:
        """What the next event has, or "[DONE]"; None at the end of the answer."""
        for line in self._lines:
            if line.startswith("data: "):
                data = line.removeprefix("data: ")
                return data if data == "[DONE]" else json.loads(data)
        return None

    def rest(self) -> list[Any]:
        return [*iter(self.next, None)]


def outputs(*values: Any) -> list[Any]:
    return [{"output": value} for value in values]


def refused(response: httpx.Response, status: int) -> dict[str, Any]:
    """An error that came before the first output."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    told: dict[str, Any] = response.json()["error"]
    assert {"message", "type", "param", "code"} <= told.keys()
    return told


# -- what comes, and when


def test_each_output_is_an_event() -> None:
    with Serving(COUNTING) as service:
        response = ask(service, 3, X_Request_ID="mine")
        assert response.text == (
            'data: {"output":1}\n\ndata: {"output":2}\n\ndata: {"output":3}\n\ndata: [DONE]\n\n'
        )
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert response.headers["cache-control"] == "no-cache"
        assert response.headers["x-accel-buffering"] == "no"
        assert response.headers["x-request-id"] == "mine"
        assert service.predict(3).json() == [1, 2, 3], "without a stream all at once"
        assert service.terminate() == 0


def test_an_output_is_sent_at_once(gated: Gated) -> None:
    service, gate = gated()
    gate.let_through(1)
    with Events(service, 3) as events:
        assert events.next() == {"output": 1}  # the next step waits for us
        gate.let_through(1)
        assert events.next() == {"output": 2}
        gate.let_through(1)
        assert events.rest() == [{"output": 3}, "[DONE]"]


def test_many_at_the_same_time(service: Serving) -> None:
    with ThreadPoolExecutor(12) as threads:
        answers = [*threads.map(lambda n: ask(service, n).text, range(1, 25))]
    assert [text.count("output") for text in answers] == [*range(1, 25)]
    assert all(text.endswith("data: [DONE]\n\n") for text in answers)


def test_a_model_without_steps_and_one_without_outputs(service: Serving) -> None:
    assert ask(service, {"n": 2, "every": 3}).text == "data: [DONE]\n\n"
    with Serving("served_models:double") as other:
        assert ask(other, "ab").text == 'data: {"output":"abab"}\n\ndata: [DONE]\n\n'
        assert other.client.get("/info").json()["streams"] is False


def test_over_redis_a_model_without_steps_has_one_event(redis_server: str, prefix: str) -> None:
    redis = ("--redis", redis_server, "--prefix", prefix)
    with Serving("served_models:double", *redis, role="worker") as host, Serving(*redis) as service:
        assert ask(service, 2).text == 'data: {"output":4}\n\ndata: [DONE]\n\n'
        assert service.terminate() == 0
        assert host.terminate() == 0


def test_over_redis_outputs_come_as_they_are_made(
    redis_server: str, prefix: str, tmp_path: Path
) -> None:
    redis = ("--redis", redis_server, "--prefix", prefix)
    gate = Gate(tmp_path / "gate")
    env = {"TEST_GATE": str(gate.__getstate__())}
    with Serving(COUNTING, *redis, role="worker", **env) as host, Serving(*redis) as service:
        gate.let_through(1)
        with Events(service, 3) as events:
            assert events.next() == {"output": 1}
            gate.let_through(1)
            assert events.next() == {"output": 2}
            gate.let_through(1)
            assert events.rest() == [{"output": 3}, "[DONE]"]
        assert service.client.get("/info").json()["streams"] is True
        assert service.terminate() == 0
        assert host.terminate() == 0
    gate.close()


# -- errors


def test_a_stream_is_of_one_input(service: Serving) -> None:
    told = refused(ask(service, [1, 2]), 422)
    assert told["param"] == "stream"
    assert "one input, not of 2" in told["message"]
    refused(ask(service, []), 422)
    assert ask(service, [2]).text.count("output") == 2, "an input that is a list may be in one"
    assert (
        refused(service.post("/predict", {"inputs": 1, "stream": "yes"}), 422)["param"] == "stream"
    )


def test_errors_before_the_first_output_have_their_status(gated: Gated) -> None:
    service, gate = gated("--batch-size", "1", "--max-pending", "1")
    gate.let_through(1)
    refused(ask(service, {"n": 2, "raise_at": 1}), 500)
    told = refused(ask(service, {"n": 1, "invalid": "inputs: too long"}), 422)
    assert (told["message"], told["param"]) == ("inputs: too long", "inputs")
    with ThreadPoolExecutor(3) as threads:
        running = [threads.submit(ask, service, 1) for _ in range(3)]
        until(lambda: service.stats()["queue"]["pending"] == 1)
        response = ask(service, 1)
        assert refused(response, 503)["code"] == "overloaded"
        assert int(response.headers["retry-after"]) >= 1
        gate.let_through(3)
        assert all(each.result().text.endswith("[DONE]\n\n") for each in running)
        last = threads.submit(ask, service, 1)
        for _ in range(5):  # it has the place, as the last of those that were computed
            gate.await_arrival()
        assert refused(ask(service, 1, X_Request_Timeout="0.05"), 504)["code"] == "timeout"
        gate.let_through(1)
        assert last.result().text.endswith("[DONE]\n\n")


def test_an_error_in_mid_stream_is_an_event(service: Serving) -> None:
    before = counters(service)
    with Events(service, {"n": 5, "raise_at": 3}, **{"X-Request-ID": "mine"}) as events:
        *made, told = events.rest()
    assert made == outputs(1, 2)
    assert told["error"]["code"] == "model_failed"
    assert {"message", "type", "param", "code"} <= told["error"].keys()
    assert "cannot make" not in json.dumps(told)
    assert "request mine failed" in service.log()
    after = counters(service)
    assert after['requests_total{path="/predict",status="500"}'] >= 1
    assert after["streams_total"] == before["streams_total"] + 1
    assert after["stream_outputs_total"] == before["stream_outputs_total"] + 2


def test_an_output_that_json_cannot_say(service: Serving) -> None:
    """It is found when its event is made; the item's place is freed."""
    refused(ask(service, {"n": ENDLESS, "odd_at": 1}), 500)
    with Events(service, {"n": ENDLESS, "odd_at": 2}) as events:
        *made, told = events.rest()
    assert made == outputs(1)
    assert told["error"]["code"] == "model_failed"
    until(lambda: service.stats()["queue"]["in_flight"] == 0)


def test_the_time_of_a_request_is_for_all_of_its_outputs(gated: Gated) -> None:
    service, gate = gated()
    for seconds in (1, 10, 100):  # until the first output comes in that time
        gate.let_through(1)
        with Events(service, ENDLESS, **{"X-Request-Timeout": f"{seconds}"}) as events:
            got = events.rest()
        if got:
            break
    else:
        pytest.fail("no output came in time")
    output, *_, told = got  # one more, if the one before came just too late
    assert output == {"output": 1}
    assert told["error"]["code"] == "timeout"
    gate.let_through(2)
    assert ask(service, 1).text.endswith("[DONE]\n\n"), "its place is free"


# -- clients that go, and the end of the service


def test_who_goes_away_has_no_place_one_step_later(gated: Gated, tmp_path: Path) -> None:
    service, gate = gated("--batch-size", "1", "--timeout", "200")
    gate.let_through(2)
    with Events(service, ENDLESS) as events:
        assert [events.next(), events.next()] == outputs(1, 2)
        for _ in range(3):  # the third step has begun
            gate.await_arrival()
    until(lambda: service.stats()["totals"]["disconnected"] == 1)
    gate.let_through(1)
    with ThreadPoolExecutor(1) as threads:
        other = threads.submit(ask, service, 2)
        gate.let_through(2)
        assert other.result().text.count("output") == 2
    assert steps(tmp_path) == [1] * 5, "two that were read, one that had begun, and the other's"
    assert service.stats()["streams"]["open"] == 0


def test_who_goes_away_before_the_first_output(gated: Gated, tmp_path: Path) -> None:
    service, gate = gated("--batch-size", "1", "--timeout", "200")
    gate.let_through(1)
    with Events(service, 2) as first:
        assert first.next() == {"output": 1}
        url = httpx.URL(service.url)
        body = b'{"inputs": 9, "stream": true}'
        with socket.create_connection((url.host, url.port)) as leaving:
            head = b"POST /predict HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n" % len(body)
            leaving.sendall(head + body)
            until(lambda: service.stats()["streams"]["open"] == 2)
        until(lambda: service.stats()["totals"]["disconnected"] == 1)
        gate.let_through(1)
        assert first.rest() == [{"output": 2}, "[DONE]"]
    gate.let_through(1)
    assert ask(service, 1).text.endswith("[DONE]\n\n")
    assert steps(tmp_path) == [1] * 3


def test_a_client_that_does_not_read_is_bounded_and_holds_up_nobody() -> None:
    """Its item rests: neither memory nor its outputs grow while others' do."""
    with Serving(COUNTING, "--batch-size", "4", "--timeout", "200") as service:
        url = httpx.URL(service.url)
        body = json.dumps({"inputs": {"n": ENDLESS, "size": 10_000}, "stream": True}).encode()
        with socket.create_connection((url.host, url.port)) as lazy:
            lazy.sendall(
                b"POST /predict HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n" % len(body)
            )
            lazy.sendall(body)
            until(lambda: service.stats()["streams"]["open"] == 1)
            made = until(lambda: resting(service))
            before = resident(service)
            for _ in range(20):
                assert ask(service, 200).text.count("output") == 200
            assert resting(service) == made + 49 + 20 * 199
            assert resident(service) < before + (8 << 20)
        until(lambda: service.stats()["streams"]["open"] == 0)


def resting(service: Serving) -> float:
    """How many outputs have come of a stream that alone is open; 0 if that number still grows."""
    counted = counters(service)["between_outputs_seconds_count"]
    ask(service, 50)
    return counted if counters(service)["between_outputs_seconds_count"] == counted + 49 else 0


def test_a_signal_lets_streams_end(gated: Gated) -> None:
    service, gate = gated()
    gate.let_through(1)
    with Events(service, 3) as events:
        assert events.next() == {"output": 1}
        os.kill(service.process.pid, signal.SIGTERM)
        until(lambda: service.ready() == 503)
        refused(ask(service, 1), 503)
        gate.let_through(2)
        assert events.rest() == [{"output": 2}, {"output": 3}, "[DONE]"]
    assert service.process.wait() == 0
    assert "Traceback" not in service.log()


def test_a_second_signal_ends_streams_with_an_error(gated: Gated) -> None:
    service, gate = gated("--timeout", "100")
    gate.let_through(1)
    with Events(service, ENDLESS) as events:
        assert events.next() == {"output": 1}
        os.kill(service.process.pid, signal.SIGTERM)
        until(lambda: service.ready() == 503)
        began = time.monotonic()
        until(lambda: time.monotonic() - began > 1.1)  # sooner, it would be the same wish
        os.kill(service.process.pid, signal.SIGTERM)
        [told] = events.rest()
        assert told["error"]["code"] == "unavailable"
    assert service.process.wait() == 0
    assert "Traceback" not in service.log()


@pytest.mark.long
def test_many_that_are_dropped_leave_nothing(service: Serving) -> None:
    for _ in range(30):
        drop(service)
    before = resident(service)
    for _ in range(300):
        drop(service)
    until(lambda: service.stats()["streams"]["open"] == 0)
    until(lambda: service.stats()["queue"]["in_flight"] == 0)  # the worker has let go, too
    assert resident(service) < before + (8 << 20)


def drop(service: Serving) -> None:
    with Events(service, ENDLESS) as events:
        assert events.next() == {"output": 1}


# -- what is told of them


def test_figures(service: Serving) -> None:
    ask(service, 3)
    figures = counters(service)
    assert figures["open_streams"] == 0
    assert figures["streams_total"] >= 1
    assert figures["first_output_seconds_count"] >= 1
    assert figures["between_outputs_seconds_count"] >= 2
    assert service.client.get("/info").json()["streams"] is True
    stats = service.stats()["streams"]
    assert stats["open"] == 0
    assert stats["total"] >= 1
    with Serving("served_models:double") as other:
        assert "first_output" not in other.client.get("/metrics").text
    predict = service.client.get("/openapi.json").json()["paths"]["/predict"]["post"]
    assert predict["responses"]["200"]["content"].keys() == {
        "application/json",
        "text/event-stream",
    }


def counters(service: Serving) -> dict[str, float]:
    return figures_in(service.client.get("/metrics").text)


def resident(service: Serving) -> int:
    pages = Path(f"/proc/{service.process.pid}/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGESIZE")


# -- the connection, without a server


def refuse(error: Exception) -> Refusal:
    return refusal(error, debug=False)


@pytest.mark.no_gevent
def test_while_nothing_comes_a_comment_does(gate: Gate) -> None:
    async def main(streamer: ThreadedStreamer) -> None:
        async def sent(parts: list[bytes]) -> None:
            if parts.count(b": keep-alive\n\n") == 2 and len(parts) == 3:
                gate.let_through(1)

        exchange = StubExchange(on_part=sent)
        gate.let_through(1)
        stream = EventStream(streamer.astream(2), OutputEvents(encode), exchange, quiet=0.01)
        await stream.begin()
        assert await stream.send_to(refuse) is None
        comment = b": keep-alive\n\n"
        assert exchange.parts[:3] == [b'data: {"output":1}\n\n', comment, comment]
        assert b"".join(exchange.parts[3:]).endswith(b'data: {"output":2}\n\ndata: [DONE]\n\n')

    with ThreadedStreamer(gated_model(gate)) as streamer:
        asyncio.run(main(streamer))


@pytest.mark.no_gevent
def test_outputs_that_are_there_are_sent_together(gate: Gate) -> None:
    async def main(streamer: ThreadedStreamer) -> None:
        async def sent(parts: list[bytes]) -> None:
            """A client that reads the first event only when the last one has been made."""
            if len(parts) == 1:
                gate.let_through(3)
                while not outputs._outputs.is_over:
                    await asyncio.sleep(0)

        gate.let_through(1)
        outputs = streamer.astream(4)
        exchange = StubExchange(on_part=sent)
        stream = EventStream(outputs, OutputEvents(encode), exchange)
        await stream.begin()
        await stream.send_to(refuse)
        rest = b"".join(b'data: {"output":%d}\n\n' % n for n in (2, 3, 4))
        assert exchange.parts == [b'data: {"output":1}\n\n', rest + b"data: [DONE]\n\n"]

    with ThreadedStreamer(gated_model(gate)) as streamer:
        asyncio.run(main(streamer))


@pytest.mark.no_gevent
def test_a_send_that_fails_frees_the_place(gate: Gate) -> None:
    closed: list[EventStream] = []

    async def main(streamer: ThreadedStreamer) -> None:
        exchange = StubExchange()
        gate.let_through(1)
        outputs = streamer.astream(ENDLESS)
        stream = EventStream(outputs, OutputEvents(encode), exchange, closed.append)
        await stream.begin()
        exchange.is_gone = True
        with pytest.raises(Disconnected):
            await stream.send_to(refuse)
        gate.let_through(2)
        with contextlib.suppress(StopAsyncIteration):
            assert await anext(streamer.astream(1)) == 1

    with ThreadedStreamer(gated_model(gate), batch_size=1) as streamer:
        asyncio.run(main(streamer))
    assert len(closed) == 1
