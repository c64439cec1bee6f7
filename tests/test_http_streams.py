"""Streams over HTTP: the service in a process of its own, real requests; what a client is told."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from http_in_process import (
    StubClient,
    asking,
    await_that,
    in_still_time,
    pass_time,
    post,
    serving,
)
from serve_process import IMPATIENT, GatedServing, Serving, error, figures_in, table, until
from service_streamer import ThreadedStreamer
from service_streamer.testing import Gate
from test_streams import gated as gated_model

pytestmark = pytest.mark.xdist_group("http-streams")

COUNTING = "served_models:Counting"
ENDLESS = 10**9


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """A model of steps, and a model "double" without."""
    config = tmp_path_factory.mktemp("streams") / "service.toml"
    counting = table("counting", COUNTING, "batch-size = 8\ntimeout = 200\n")
    config.write_text(counting + table("double", "served_models:double"))
    with Serving("--config", str(config)) as service:
        yield service


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatedServing]:
    arguments = ("--batch-size", "1", "--max-pending", "1", "--timeout", "200")
    with GatedServing(tmp_path_factory.mktemp("gated"), COUNTING, *arguments) as service:
        yield service


@pytest.fixture
def gated(narrow: GatedServing) -> GatedServing:
    """A service whose model waits at the gate before each step; it makes one at a time."""
    narrow.reset()
    return narrow


def ask(service: Serving, inputs: Any, **headers: str) -> httpx.Response:
    """Stream, and read all of it."""
    return service.post("/predict", {"inputs": inputs, "stream": True}, **headers)


@contextlib.contextmanager
def events_of(service: Serving, inputs: Any, **headers: str) -> Iterator[Iterator[Any]]:
    """What each event of a stream has, or "[DONE]". Leaving the block disconnects."""
    body = {"inputs": inputs, "stream": True}
    with (
        httpx.Client(base_url=service.url, timeout=240) as client,
        client.stream("POST", "/predict", json=body, headers=headers) as opened,
    ):
        lines = (line for line in opened.iter_lines() if line.startswith("data: "))
        data = (line.removeprefix("data: ") for line in lines)
        yield (each if each == "[DONE]" else json.loads(each) for each in data)


def outputs(*values: Any) -> list[Any]:
    return [{"output": value} for value in values]


def test_each_output_is_an_event(service: Serving) -> None:
    response = ask(service, 3, X_Request_ID="mine")
    assert response.text == (
        'data: {"output":1}\n\ndata: {"output":2}\n\ndata: {"output":3}\n\ndata: [DONE]\n\n'
    )
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"
    assert response.headers["x-request-id"] == "mine"
    assert service.predict(3).json() == [1, 2, 3], "without a stream all at once"


def test_output_is_sent_when_it_is_made(gated: GatedServing) -> None:
    gated.gate.let_through(1)
    with events_of(gated, 3) as events:
        assert next(events) == {"output": 1}  # the next step waits for us
        gated.gate.let_through(1)
        assert next(events) == {"output": 2}
        gated.gate.let_through(1)
        assert [*events] == [{"output": 3}, "[DONE]"]


def test_stream_has_one_event_when_the_model_has_no_steps(service: Serving) -> None:
    assert ask(service, {"n": 2, "every": 3}).text == "data: [DONE]\n\n"
    double = service.of("double")
    assert ask(double, "ab").text == 'data: {"output":"abab"}\n\ndata: [DONE]\n\n'
    assert double.client.get("/info").json()["streams"] is False


def test_stream_of_several_inputs_is_refused(service: Serving) -> None:
    told = error(ask(service, [1, 2]), 422)
    assert told["param"] == "stream"
    assert "2" in told["message"]
    error(ask(service, []), 422)
    assert ask(service, [2]).text.count("output") == 2, "an input that is a list may be in one"
    assert error(service.post("/predict", {"inputs": 1, "stream": "yes"}), 422)["param"] == "stream"


def test_errors_before_the_first_output_have_their_status(gated: GatedServing) -> None:
    gated.gate.let_through(1)
    error(ask(gated, {"n": 2, "raise_at": 1}), 500)
    told = error(ask(gated, {"n": 1, "invalid": "inputs: too long"}), 422)
    assert (told["message"], told["param"]) == ("inputs: too long", "inputs")
    with ThreadPoolExecutor(3) as threads:
        running = [threads.submit(ask, gated, 1) for _ in range(3)]
        until(lambda: gated.stats()["queue"]["pending"] == 1)
        response = ask(gated, 1)
        assert error(response, 503)["code"] == "overloaded"
        assert int(response.headers["retry-after"]) >= 1
        assert error(gated.predict(1), 503)["type"] == "overloaded"
        assert gated.ready() == 200, "it serves as much as it can"
        assert gated.stats()["totals"]["rejected"]["overloaded"] >= 2
        gated.gate.let_through(3)
        assert all(each.result().text.endswith("[DONE]\n\n") for each in running)
        last = threads.submit(ask, gated, 1)
        for _ in range(5):  # it has the place, as the last of those that were computed
            gated.gate.await_arrival()
        assert error(ask(gated, 1, X_Request_Timeout="0.05"), 504)["code"] == "timeout"
        gated.gate.let_through(1)
        assert last.result().text.endswith("[DONE]\n\n")


def test_error_in_mid_stream_is_an_event(service: Serving) -> None:
    before = counters(service)
    with events_of(service, {"n": 5, "raise_at": 3}, **{"X-Request-ID": "mine"}) as events:
        *made, told = events
    assert made == outputs(1, 2)
    assert told["error"]["code"] == "model_failed"
    assert {"message", "type", "param", "code"} <= told["error"].keys()
    assert "cannot make" not in json.dumps(told)
    assert "request mine failed" in service.log()
    after = counters(service)
    assert after['requests_total{path="/predict",status="500"}'] >= 1
    assert after["streams_total"] == before["streams_total"] + 1
    assert after["stream_outputs_total"] == before["stream_outputs_total"] + 2


def test_output_that_json_cannot_say_is_an_error_and_frees_its_place(service: Serving) -> None:
    """It is found when its event is made; the item's place is freed."""
    error(ask(service, {"n": ENDLESS, "odd_at": 1}), 500)
    with events_of(service, {"n": ENDLESS, "odd_at": 2}) as events:
        *made, told = events
    assert made == outputs(1)
    assert told["error"]["code"] == "model_failed"
    until(lambda: service.stats()["queue"]["in_flight"] == 0)


def test_stream_makes_no_more_steps_when_its_client_has_left(gated: GatedServing) -> None:
    before = gated.stats()["totals"]["disconnected"]
    gated.gate.let_through(2)
    with events_of(gated, ENDLESS) as events:
        assert [next(events), next(events)] == outputs(1, 2)
        for _ in range(3):  # the third step has begun
            gated.gate.await_arrival()
    until(lambda: gated.stats()["totals"]["disconnected"] == before + 1)
    gated.gate.let_through(1)
    with ThreadPoolExecutor(1) as threads:
        other = threads.submit(ask, gated, 2)
        gated.gate.let_through(2)
        assert other.result().text.count("output") == 2
    assert gated.computed() == [1] * 5, "two that were read, one that had begun, and the other's"
    assert gated.stats()["streams"]["open"] == 0


def test_stream_is_not_computed_when_its_client_leaves_before_it(gated: GatedServing) -> None:
    before = gated.stats()["totals"]["disconnected"]
    gated.gate.let_through(1)
    with events_of(gated, 2) as first:
        assert next(first) == {"output": 1}
        with gated.connect() as leaving:
            leaving.sendall(post(b'{"inputs": 9, "stream": true}', path=b"/predict"))
            until(lambda: gated.stats()["streams"]["open"] == 2)
        until(lambda: gated.stats()["totals"]["disconnected"] == before + 1)
        gated.gate.let_through(1)
        assert [*first] == [{"output": 2}, "[DONE]"]
    gated.gate.let_through(1)
    assert ask(gated, 1).text.endswith("[DONE]\n\n")
    assert gated.computed() == [1] * 3


def test_client_that_does_not_read_is_bounded_and_does_not_hold_up_others(service: Serving) -> None:
    """Its item rests: neither memory nor its outputs grow while others' do."""
    body = json.dumps({"inputs": {"n": ENDLESS, "size": 10_000}, "stream": True}).encode()
    with service.connect() as lazy:
        lazy.sendall(post(body, path=b"/predict"))
        until(lambda: service.stats()["streams"]["open"] == 1)
        made = until(lambda: resting(service))
        before = service.resident()
        for _ in range(20):
            assert ask(service, 200).text.count("output") == 200
        assert resting(service) == made + 49 + 20 * 199
        assert service.resident() < before + (8 << 20)
    until(lambda: service.stats()["streams"]["open"] == 0)


def resting(service: Serving) -> float:
    """How many outputs have come of a stream that alone is open; 0 if that number still grows."""
    counted = counters(service)["between_outputs_seconds_count"]
    ask(service, 50)
    return counted if counters(service)["between_outputs_seconds_count"] == counted + 49 else 0


def test_first_signal_lets_requests_and_streams_end(tmp_path: Path) -> None:
    with GatedServing(tmp_path, COUNTING) as service, ThreadPoolExecutor(2) as threads:
        service.gate.let_through(1)
        viewer = threads.submit(lambda: service.client.get("/events"))  # ends with the service
        with events_of(service, 3) as events:
            assert next(events) == {"output": 1}
            whole = threads.submit(service.predict, 1)
            until(lambda: service.queue()["in_flight"] == 2)
            os.kill(service.process.pid, signal.SIGTERM)
            until(lambda: service.ready() == 503)
            assert service.client.get("/health/ready").json()["status"] == "draining"
            for late in (ask(service, 1), service.predict(1), service.client.get("/health/live")):
                assert late.headers["connection"] == "close"
                assert late.is_success or error(late, 503)
            service.gate.let_through(3)
            assert [*events] == [{"output": 2}, {"output": 3}, "[DONE]"]
        assert whole.result().json() == [1]
        assert viewer.result().status_code == 200
        assert service.process.wait() == 0
        assert "Traceback" not in service.log()


def test_second_signal_ends_requests_and_streams_with_an_error(tmp_path: Path) -> None:
    with (
        GatedServing(tmp_path, COUNTING, "--timeout", "100", program=IMPATIENT) as service,
        ThreadPoolExecutor(1) as threads,
    ):
        service.gate.let_through(1)
        with events_of(service, ENDLESS) as events:
            assert next(events) == {"output": 1}
            whole = threads.submit(service.predict, ENDLESS)
            until(lambda: service.queue()["in_flight"] == 2)
            os.kill(service.process.pid, signal.SIGTERM)
            until(lambda: service.ready() == 503)
            os.kill(service.process.pid, signal.SIGINT)
            [told] = events
            assert told["error"]["code"] == "unavailable"
        error(whole.result(), 503)
        assert service.process.wait() == 0
        assert "Traceback" not in service.log()


def test_metrics_and_stats_count_streams(service: Serving) -> None:
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
    lines = service.client.get("/metrics").text.splitlines()
    assert not any("first_output" in line and 'model="double"' in line for line in lines)
    predict = service.client.get("/openapi.json").json()["paths"]["/predict"]["post"]
    assert predict["responses"]["200"]["content"].keys() == {
        "application/json",
        "text/event-stream",
    }


def counters(service: Serving) -> dict[str, float]:
    """Those of the model of steps."""
    lines = service.client.get("/metrics").text.splitlines()
    return figures_in("\n".join(line for line in lines if 'model="double"' not in line))


def of_outputs(*numbers: int) -> bytes:
    return b"".join(b'data: {"output":%d}\n\n' % number for number in numbers)


@contextlib.asynccontextmanager
async def counting(gate: Gate, n: int) -> AsyncIterator[tuple[StubClient, ThreadedStreamer]]:
    """A client that has the first output of ``n``. The next steps wait at the gate."""
    with ThreadedStreamer(gated_model(gate), batch_size=1) as streamer:
        async with serving(streamer) as application:
            request = post(b'{"inputs": %d, "stream": true}' % n, path=b"/predict")
            client = await asking(application.site, request)
            gate.let_through(1)
            await await_that(lambda: of_outputs(1) in client.received)
            yield client, streamer


@pytest.mark.no_gevent
@in_still_time
async def test_stream_has_a_comment_every_15_seconds_without_an_output(gate: Gate) -> None:
    comment = b": keep-alive\n\n"
    async with counting(gate, 2) as (client, _):
        await pass_time(14.9)
        assert comment not in client.received
        for number in (1, 2):
            await pass_time(15)
            assert client.received.count(comment) == number
        gate.let_through(1)
        await await_that(lambda: client.received.endswith(b"\r\n0\r\n\r\n"))
        assert of_outputs(2) in client.received
        assert b"data: [DONE]" in client.received  # in the same piece, or in one of its own


@pytest.mark.no_gevent
@in_still_time
async def test_outputs_are_sent_together_when_their_client_reads_late(gate: Gate) -> None:
    async with counting(gate, 4) as (client, streamer):
        client.stop_reading()
        gate.let_through(1)
        await await_that(lambda: of_outputs(2) in client.received)  # it fills the buffer
        gate.let_through(3)
        assert await anext(streamer.astream(1)) == 1  # so the outputs before it are there
        client.read_on()
        await await_that(lambda: client.received.endswith(b"\r\n0\r\n\r\n"))
        assert of_outputs(3, 4) in client.received  # [DONE] may be in a piece of its own
