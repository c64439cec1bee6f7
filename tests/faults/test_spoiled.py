"""A worker that fails everything while others do not is replaced, whatever it fails with."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from sticky_models import Spoiled

from service_streamer import InvalidInput, Streamer
from service_streamer.serve.http.admission import ServiceOptions
from service_streamer.serve.http.service import Service
from service_streamer.supervision.health import TROUBLE_ROW


@pytest.mark.short_cases("16")
@pytest.mark.parametrize("batch_size", [1, 16])
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
        # Nothing is said of it before the second batch in a row: the first one may be a bad item.
        assert failed <= batch_size
        stats = streamer.stats()
        assert (stats.restarts, stats.failed, stats.trouble) == (1, failed, None)
        streamer.wait_ready()
    assert "is replaced: it failed batch after batch" in caplog.text
    assert "its last error was OSError" in caplog.text


def test_what_is_never_run_twice_is_not_and_the_worker_is_replaced_all_the_same() -> None:
    with Streamer(Spoiled, 1, worker_num=3, worker_timeout=None, retry=False) as streamer:
        streamer.wait_ready()
        streamer.predict(["spoil"])
        failed = 0
        while not streamer.stats().restarts:
            failed += type(streamer.submit([1]).exception()) is OSError
        assert failed == 4, "two before it is held back, and one before each other time"
        streamer.wait_ready()
        assert [streamer.predict([1]) for _ in range(9)] == [[2]] * 9


@pytest.mark.parametrize("worker_num", [1, 2])
def test_bad_items_replace_no_worker_and_it_is_said_that_none_answers(worker_num: int) -> None:
    with Streamer(Spoiled, 1, worker_num=worker_num, worker_timeout=None) as streamer:
        streamer.wait_ready()
        workers = {streamer.predict(["who"])[0] for _ in range(4)}
        assert len(workers) == worker_num
        for count in range(3 * TROUBLE_ROW):
            assert (streamer.stats().trouble is None) == (count < TROUBLE_ROW)
            with pytest.raises(ValueError, match=r"^bad$"):
                streamer.predict(["bad"])
        trouble = f"the last {3 * TROUBLE_ROW} batches failed, and none was computed since; "
        assert streamer.stats().trouble == trouble + "the last error was ValueError"
        assert {streamer.predict(["who"])[0] for _ in range(4)} == workers
        assert streamer.stats().trouble is None
        assert streamer.stats().restarts == 0


def test_inputs_that_are_refused_are_no_trouble() -> None:
    with Streamer(Spoiled, 1, worker_timeout=None) as streamer:
        for _ in range(2 * TROUBLE_ROW):
            with pytest.raises(InvalidInput):
                streamer.predict(["invalid"])
        assert streamer.stats().trouble is None


def test_a_service_is_not_ready_while_no_worker_answers() -> None:
    with Streamer(Spoiled, 1, worker_timeout=None) as streamer:
        service = Service(streamer, ServiceOptions(model="spoiled"))
        service._is_known = True  # as when it has asked the model what it is
        streamer.predict(["spoil"])
        assert service.standing() == ("ready", "the model answers")
        for _ in range(TROUBLE_ROW):
            with pytest.raises(OSError, match="too many open files"):
                streamer.predict([1])
        state, why = service.standing()
        assert (state, why) == ("failing", streamer.stats().trouble)
        streamer.restart_workers()
        assert service.standing()[0] == "failing", "it has not answered yet"
        assert streamer.predict([1]) == [2]
        assert service.standing()[0] == "ready"
