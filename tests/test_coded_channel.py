"""A worker's end of a connection: items are decoded, and results encoded, each by itself."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from service_streamer.observe.record import BatchReport
from service_streamer.workers.coded_channel import CodedChannel
from service_streamer.workers.memory.payload import LARGE_IN_BATCH
from service_streamer.workers.payload_channel import Encoder


class Counting:
    """An encoder that knows what came to it."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self._encoder = Encoder(None, "results")

    def encode(self, value: Any) -> Any:
        self.values.append(value)
        return self._encoder.encode(value)


@pytest.fixture
def encoder() -> Counting:
    return Counting()


@pytest.fixture
def channel(encoder: Counting) -> CodedChannel:
    class Channel(CodedChannel):
        def receive(self) -> None: ...

        def send_raw(self, message: tuple[Any, ...]) -> None: ...

    return Channel(encoder)


def encoded(channel: CodedChannel, *outputs: Any) -> BatchReport:
    report = BatchReport(0, [*outputs])
    channel.encode(report, is_device_done=True)
    return report


def test_an_item_that_cannot_be_unpickled_fails_alone(channel: CodedChannel) -> None:
    payloads = [pickle.dumps(1), b"none", pickle.dumps(3)]
    batch_id, items, failures = channel.decode((7, payloads))
    assert (batch_id, items) == (7, [1, 3])
    assert [*failures] == [1]
    assert "cannot be unpickled in the worker" in failures[1].text


def test_small_results_without_parts_need_no_encoder(
    channel: CodedChannel, encoder: Counting
) -> None:
    outputs = [1, 2.5, True, None, "text", -(10**40), "\ud800"]
    for each in (outputs, *([output] for output in outputs)):
        report = encoded(channel, *each)
        assert [pickle.loads(payload) for payload in report.outputs] == each
        assert not report.failures
    assert not encoder.values


@pytest.mark.parametrize("other", [b"bytes", [1], "x" * LARGE_IN_BATCH])
def test_others_are_encoded_one_by_one(
    channel: CodedChannel, encoder: Counting, other: Any
) -> None:
    report = encoded(channel, 1, other)
    assert [pickle.loads(payload) for payload in report.outputs] == [1, other]
    assert encoder.values == [1, other]


def test_a_result_that_cannot_travel_fails_alone(channel: CodedChannel) -> None:
    report = encoded(channel, 1, lambda: None, 3)
    assert [*report.failures] == [1]
    assert [pickle.loads(report.outputs[n]) for n in (0, 2)] == [1, 3]
