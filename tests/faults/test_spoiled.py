"""A worker that fails everything while others do not is replaced, whatever it fails with."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest
from sticky_models import Spoiled

from cases import long_cases
from http_in_process import serving
from service_streamer import Streamer


@pytest.mark.parametrize("batch_size", [16, *long_cases(1)])
def test_one_of_four_workers_that_fails_everything_is_replaced(
    batch_size: int, caplog: pytest.LogCaptureFixture
) -> None:
    with Streamer(Spoiled, batch_size, worker_num=4, worker_timeout=None) as streamer:
        streamer.wait_ready()
        streamer.predict(["spoil"])

        def call(caller: int) -> int:
            failed = 0
            for _ in range(100):
                try:
                    assert streamer.predict([caller]) == [2 * caller]
                except OSError:
                    failed += 1
            return failed

        with ThreadPoolExecutor(16) as callers:
            failed = sum(callers.map(call, range(16)))
        # Nothing is said of it before the fourth batch in a row: the first ones may be bad items.
        assert failed < 200
        stats = streamer.stats()
        assert (stats.restarts, stats.failed, stats.trouble) == (1, failed, None)
        streamer.wait_ready()
    assert "is replaced: it failed batch after batch" in caplog.text
    assert "its last error was OSError" in caplog.text


#: Batches that fail in a row until a streamer says that it is in trouble.
TROUBLE_ROW = 10


@pytest.mark.no_gevent
def test_service_is_not_ready_while_no_worker_answers() -> None:
    async def main() -> None:
        async with serving(streamer) as application:
            service = application.service
            await streamer.apredict(["spoil"])
            assert service.standing() == ("ready", "the model answers")
            for _ in range(TROUBLE_ROW):
                with pytest.raises(OSError, match="too many open files"):
                    await streamer.apredict([1])
            trouble = streamer.stats().trouble
            assert service.standing() == ("failing", trouble)
            assert trouble is not None
            assert f" {TROUBLE_ROW} " in trouble
            assert "OSError" in trouble
            await asyncio.to_thread(streamer.restart_workers)
            assert service.standing()[0] == "failing", "it has not answered yet"
            assert await streamer.apredict([1]) == [2]
            assert service.standing()[0] == "ready"

    with Streamer(Spoiled, 1, worker_timeout=None) as streamer:
        asyncio.run(main())
