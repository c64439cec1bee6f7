"""Errors of calls that may not be at fault: nothing of the other calls is in them."""

from __future__ import annotations

import asyncio
from typing import Any

from service_streamer import ThreadedStreamer
from web_application import WebApplication


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
