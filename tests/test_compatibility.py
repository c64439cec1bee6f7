"""Programs written for the original service_streamer, by its README and examples, run unchanged."""

from __future__ import annotations

from typing import Any

import pytest

import models
from service_streamer import Streamer, ThreadedStreamer


class Model:
    def predict(self, batch: list[Any]) -> list[Any]:
        return [len(item) for item in batch]


BATCH = [["How", "are", "you", "?"], ["Fine", "."], ["Thank", "you", "."]]


@pytest.mark.parametrize("kind", [ThreadedStreamer, Streamer])
def test_future_api(kind: type[ThreadedStreamer] | type[Streamer]) -> None:
    streamer = kind(Model().predict, 64, 0.1)
    xs = []
    for _ in range(200):
        future = streamer.submit(BATCH)
        xs.append(future)
    for future in xs:
        assert future.result() == [4, 2, 3]
    for future in xs:
        assert future.result(timeout=1) == [4, 2, 3]
        assert future.done() is True
    streamer.destroy_workers()


def test_arguments_of_the_later_git_head() -> None:
    streamer = Streamer(
        models.Multiplier, 64, 0.1, 2, ("cpu",), [3], {"offset": 1}, True, "spawn", 20
    )
    streamer._wait_for_worker_ready()
    assert streamer.predict([1]) == [4]
    streamer.destroy_workers()
    with pytest.raises(TypeError, match="positional"):
        Streamer(models.echo, 8, 0.01, 1, None, None, None, False, "spawn", 20, 1)  # type: ignore[misc]
    threaded = ThreadedStreamer(models.echo, 64, 0.1, 20)
    assert threaded.predict([1]) == [1]
    threaded.destroy_workers()
