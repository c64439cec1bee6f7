"""Many bad items, in real services: no good call fails, and nobody reads of another's item."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from fault_models import Indiscreet, Small

from service_streamer import SharedBatchError, Streamer, ThreadedStreamer, WorkerLost
from service_streamer.testing import Gate

CALLERS = 64
EACH = 25


def text_of(error: BaseException) -> str:
    """All that a caller can read."""
    texts = []
    seen: BaseException | None = error
    while seen is not None:
        texts.append(repr(seen))
        seen = seen.__cause__ or seen.__context__
    return " ".join(texts)


def secret(caller: int, number: int) -> str:
    return f"<secret {caller} {number}>"


def assert_private(error: Any, own: str = "") -> None:
    assert "<secret" not in text_of(error).replace(own or "<no secret", "")


def assert_shared(futures: list[Any], kind: type[Exception] = SharedBatchError) -> list[Any]:
    """Each of the calls failed, with what tells nothing of the others; the errors."""
    errors = [future.exception() for future in futures]
    for error in errors:
        assert isinstance(error, kind)
        assert_private(error)
    return errors


@pytest.mark.parametrize(("worker_num", "percent"), [(1, 5), (2, 20)])
def test_no_good_call_fails_and_each_bad_one_with_its_own_error(
    worker_num: int, percent: int
) -> None:
    with Streamer(Indiscreet, worker_num=worker_num, worker_timeout=None) as streamer:
        streamer.wait_ready()
        bad = call_often(streamer, percent)
        stats = streamer.stats()
    assert bad == CALLERS * EACH * percent // 100
    assert (stats.answered, stats.failed) == (CALLERS * EACH - bad, bad)


def call_often(streamer: Any, percent: int) -> int:
    """Have many callers send bad items beside good ones; returns how many were bad."""

    def call(caller: int) -> int:
        bad = 0
        for number in range(EACH):
            # Spread evenly over callers and time, and the same in each run.
            is_bad = (caller * EACH + number) * percent % 100 < percent
            own = secret(caller, number)
            future = streamer.submit([own if is_bad else number])
            error = future.exception()
            assert is_bad == (error is not None), "a good call has failed, or a bad one not"
            if error is None:
                assert future.result() == [2 * number]
            else:
                assert own in str(error)
                assert_private(error, own)
                bad += 1
        return bad

    with ThreadPoolExecutor(CALLERS) as pool:
        return sum(pool.map(call, range(CALLERS)))


@pytest.mark.parametrize("options", [{"retry": False}, {"isolate_errors": False}])
def test_callers_do_not_read_of_others_where_nothing_is_isolated(
    gate: Gate, options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    def predict(batch: list[Any]) -> list[int]:
        gate.go_through()
        return Indiscreet().predict(batch)

    with ThreadedStreamer(predict, **options) as streamer:
        streamer.submit([1])
        gate.await_arrival()
        shared = [streamer.submit([item]) for item in (2, secret(1, 1), 3)]
        gate.let_through(2)
        errors = assert_shared(shared)
        gate.let_through(1)
        with pytest.raises(ValueError, match="secret 2 2"):
            streamer.predict([secret(2, 2)])
    assert len({id(error) for error in errors}) == 3
    assert secret(1, 1) in caplog.text, "the operator is told"


def test_a_batch_that_found_no_memory_and_may_not_run_again_is_nobodys_fault(gate: Gate) -> None:
    with Streamer(Small, model_init_args=[gate], retry=False) as streamer:
        futures = [streamer.submit([secret(n, n)]) for n in range(3)]
        gate.let_through(1)
        assert_shared(futures)


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, asyncio.CancelledError])
def test_the_text_that_ends_a_worker_thread_is_only_in_the_log(
    gate: Gate, kind: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    def predict(batch: list[Any]) -> list[Any]:
        gate.go_through()
        if any(isinstance(item, str) for item in batch):
            raise kind(f"no numbers: {batch}")
        return batch

    with ThreadedStreamer(predict, retry=False) as streamer:
        streamer.submit([1])
        gate.await_arrival()
        shared = [streamer.submit([item]) for item in (2, secret(1, 1), 3)]
        gate.let_through(3)
        for error in assert_shared(shared, WorkerLost):
            assert kind.__name__ in str(error)
        assert streamer.predict([4]) == [4], "another thread has taken its place"
    assert secret(1, 1) in caplog.text


def test_callers_do_not_read_of_others_when_the_search_is_ended(gate: Gate) -> None:
    def predict(batch: list[Any]) -> list[Any]:
        if batch == ["first"]:
            gate.go_through()
        elif batch[0]:
            raise SystemExit(f"no numbers: {batch}")
        return batch

    with ThreadedStreamer(predict, batch_size=16) as streamer:
        streamer.submit(["first"])
        gate.await_arrival()
        futures = [streamer.submit([secret(n, n)]) for n in range(16)]
        for _ in range(40 * 16):  # a thread that has computed a batch is replaced at once
            streamer.submit([0])
        gate.let_through(1)
        errors = assert_shared(futures, WorkerLost)
    assert any("may not be to blame" in str(error) for error in errors)
