"""Errors of calls that may not be at fault: nothing of the other calls is in them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from service_streamer import ModelError, SharedBatchError, ThreadedStreamer
from service_streamer.testing import Gate
from web_application import WebApplication


def error_of_a_shared_batch(text: str, gate: Gate) -> Any:
    """Of a call in a batch on which the model raises, and that is not computed again."""

    def predict(batch: list[Any]) -> list[Any]:
        gate.go_through()
        if "busy" in batch:
            return batch
        raise ValueError(text)

    with ThreadedStreamer(predict, retry=False) as streamer:
        streamer.submit(["busy"])
        gate.await_arrival()
        futures = [streamer.submit([number]) for number in range(2)]
        gate.let_through(2)
        return futures[0].exception()


@pytest.mark.parametrize("text", ["", "secret", "secret: of : several", "secret\nlines"])
def test_error_tells_the_kind_of_the_exception_and_not_its_text(text: str, gate: Gate) -> None:
    error = error_of_a_shared_batch(text, gate)
    assert isinstance(error, SharedBatchError)
    assert isinstance(error, ModelError)
    assert "ValueError" in str(error)
    assert "secret" not in str(error)
    assert "lines" not in str(error)
    assert error.__cause__ is None
    assert error.__context__ is None


def test_innocent_request_is_asked_to_try_again() -> None:
    def predict(batch: list[Any]) -> list[Any]:
        raise ValueError(f"secret of {len(batch)}")

    def without_retries(model: Any) -> ThreadedStreamer:
        return ThreadedStreamer(model, retry=False)

    with WebApplication(predict, kind=without_retries) as application:

        async def ask_together() -> Any:
            return await asyncio.gather(
                *(application.send("/predict", {"inputs": n}) for n in "ab")
            )

        answers = application.run(ask_together())
    for told in answers:
        assert told.status_code == 503
        assert told.headers["retry-after"] == "1"
        assert "ValueError" not in told.text
