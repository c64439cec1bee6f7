"""What a call gets, with workers of any kind."""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import io
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import models
from service_streamer import BadModelOutput, Future, PredictTimeout, StreamerClosed, UnpicklableItem

Build = Callable[..., Any]


class Record:
    """Iterates over its fields, as a model of pydantic does."""

    def __iter__(self) -> Iterator[tuple[str, int]]:
        return iter([("a", 1)])


def two(item: Any) -> float:
    """Fails on the item 0."""
    return 2 / item


class Calls:
    def test_a_call_larger_than_batch_size_is_split_and_comes_back_whole(
        self, build: Build
    ) -> None:
        streamer = build(models.batch_sizes, 4)
        sizes = streamer.predict(list(range(11)))
        assert len(sizes) == 11
        assert max(sizes) <= 4
        assert build(models.double, 4).predict(list(range(1000))) == list(range(0, 2000, 2))

    def test_an_exception_of_the_model_reaches_its_callers_as_itself(
        self, build: Build, kind: str
    ) -> None:
        streamer = build(models.misbehave)
        with pytest.raises(models.DetailedError, match="bad luck") as caught:
            streamer.predict(["raise"])
        if kind != "redis":  # over Redis only the class, the text and the traceback travel
            assert caught.value.code == 7
            assert caught.value.detail == {"why": "bad luck"}
        cause = str(caught.value.__cause__)
        assert "in misbehave" in cause
        assert 'raise DetailedError("bad luck", 7)' in cause
        future = streamer.submit(["raise timeout"])
        for read in (future.result, future.exception):
            try:
                error = read(60)
            except TimeoutError as raised:
                error = raised
            assert type(error) is TimeoutError, "it is not mistaken for ours"
            assert str(error) == "the model's own"
        assert streamer.predict(["fine"]) == ["fine"], "the worker goes on"

    def test_calls_that_share_batches_with_bad_ones_get_their_results(self, build: Build) -> None:
        streamer = build(models.double_positive)
        calls = {n: streamer.submit([-n if n % 10 == 0 else n]) for n in range(1, 101)}
        for n, call in calls.items():
            if n % 10:
                assert call.result() == [2 * n]
            else:
                assert isinstance(call.exception(), ValueError)

    def test_unusable_output_names_the_model_and_what_it_returned(self, build: Build) -> None:
        streamer = build(models.misbehave)
        returned = {
            "short": "list of 1",
            "long": "list of 3",
            "none": "NoneType",
            "generator": "generator",
            "dict": "dict",
            "text": "str",
        }
        for how, got in returned.items():
            with pytest.raises(BadModelOutput, match=f"misbehave.*{got}"):
                streamer.predict([how, "x"])
        assert streamer.predict(["tuple", "x"]) == ["tuple", "x"]

    def test_a_callback_runs_and_may_submit_again(self, build: Build) -> None:
        streamer = build(models.double)
        second: concurrent.futures.Future[list[int]] = concurrent.futures.Future()

        def go_on(first: concurrent.futures.Future[list[int]]) -> None:
            streamer.submit(first.result()).add_done_callback(
                lambda future: second.set_result(future.result())
            )

        streamer.submit([1]).add_done_callback(go_on)
        assert second.result() == [4]

    def test_close_answers_calls_that_their_loop_has_not_sent_yet(self, build: Build) -> None:
        """A call was made, and what flushes it comes in the next pass: closing does that, too."""
        streamer = build(models.double)

        async def run() -> None:
            call = asyncio.ensure_future(streamer.apredict([1]))
            await asyncio.sleep(0)
            streamer.close(timeout=60)
            assert await call == [2]

        streamer.wait_ready()
        asyncio.run(run())

    def test_close_may_be_called_again_and_by_several_threads(self, build: Build) -> None:
        streamer = build(models.echo)
        assert streamer.predict([1]) == [1]
        with concurrent.futures.ThreadPoolExecutor(4) as threads:
            for closing in [threads.submit(streamer.close) for _ in range(4)]:
                closing.result()
        streamer.close()
        streamer.destroy_workers()
        for use in (streamer.predict, streamer.submit):
            with pytest.raises(StreamerClosed):
                use([1])
        with pytest.raises(StreamerClosed):
            streamer.wait_ready()
        assert "closed" in repr(streamer)

    def test_close_in_a_callback_does_not_wait_for_itself(self, build: Build) -> None:
        streamer = build(models.echo)
        closed: queue.SimpleQueue[threading.Thread] = queue.SimpleQueue()

        def close(_: Any) -> None:
            streamer.close()
            closed.put(threading.current_thread())

        streamer.submit([1]).add_done_callback(close)
        thread = closed.get()
        streamer.close()
        if thread is not threading.current_thread():  # in which it is called if it is done by then
            thread.join()
        assert "closed" in repr(streamer)


class Forms:
    """What is done before workers have part in it, or after."""

    def test_an_empty_batch_returns_at_once_without_a_worker(self, build: Build) -> None:
        streamer = build(models.echo)
        assert streamer.predict([]) == []
        assert streamer.submit([]).done()
        streamer.close()
        models.await_worker_threads()

    def test_any_iterable_of_items_is_a_batch(self, build: Build) -> None:
        numpy = pytest.importorskip("numpy")
        streamer = build(models.double)
        assert streamer.predict((1, 2)) == [2, 4]
        assert streamer.predict(numpy.array([1, 2])) == [2, 4]
        assert streamer.predict(iter([1, 2])) == [2, 4]
        assert streamer.predict(i for i in (1, 2)) == [2, 4]
        assert streamer.predict({1: "a", 2: "b"}.keys()) == [2, 4]
        assert streamer.predict(collections.deque([1, 2])) == [2, 4]
        assert sorted(streamer.predict({1, 2})) == [2, 4]
        items = {5, 7, 11}
        assert streamer.submit(items).result() == [2 * item for item in items]
        assert streamer.predict(map(int, [])) == []

    def test_an_error_of_the_iterator_reaches_its_caller(self, build: Build) -> None:
        def items() -> Iterator[int]:
            yield 1
            raise KeyError("no more")

        with pytest.raises(KeyError, match="no more"):
            build(models.double).predict(items())

    def test_streamer_refuses_a_single_item_in_place_of_a_batch(self, build: Build) -> None:
        streamer = build(models.echo)
        buffers = (memoryview(b"ab"), io.BytesIO(b"a\nb"))
        for batch in ("text", b"bytes", {"a": 1}, 5, None, list, *buffers, Record()):
            with pytest.raises(TypeError, match=type(batch).__name__):
                streamer.predict(batch)
        streamer.close()
        models.await_worker_threads()

    def test_a_future_is_a_standard_one(self, build: Build) -> None:
        streamer = build(models.double)
        futures = [streamer.submit([i]) for i in range(20)]
        assert all(isinstance(future, Future) for future in futures)
        done, not_done = concurrent.futures.wait(futures)
        assert not not_done
        assert {future.result()[0] for future in concurrent.futures.as_completed(done)} == set(
            range(0, 40, 2)
        )


class AsyncCalls:
    def test_many_tasks_share_batches_and_get_their_own_results(self, build: Build) -> None:
        streamer = build(models.double, 16)

        async def main() -> list[list[int]]:
            return await asyncio.gather(*(streamer.apredict([i, i + 1]) for i in range(500)))

        assert asyncio.run(main()) == [[2 * i, 2 * i + 2] for i in range(500)]

    def test_a_streamer_serves_one_loop_after_another(self, build: Build) -> None:
        streamer = build(models.double)
        for i in range(3):
            assert asyncio.run(streamer.apredict([i])) == [2 * i]
        assert asyncio.run(streamer.apredict([])) == []

    def test_apredict_raises_the_errors_of_predict(self, build: Build, kind: str) -> None:
        streamer = build(models.misbehave)
        with pytest.raises(models.DetailedError):
            asyncio.run(streamer.apredict(["raise"]))
        with pytest.raises(TimeoutError, match="the model's own") as caught:
            asyncio.run(streamer.apredict(["raise timeout"]))
        assert not isinstance(caught.value, PredictTimeout)
        with pytest.raises(TypeError, match="a batch must be a list"):
            asyncio.run(streamer.apredict("text"))
        if kind != "thread":
            with pytest.raises(UnpicklableItem):
                asyncio.run(streamer.apredict([lambda: None]))
        streamer.close()
        with pytest.raises(StreamerClosed):
            asyncio.run(streamer.apredict([1]))


class Lengths:
    def test_call_refuses_a_bad_priority_or_tenant(self, build: Build) -> None:
        streamer = build(models.double)
        for option, value, error in (
            ("priority", 1.5, TypeError),
            ("priority", True, TypeError),
            ("priority", 10**9 + 1, ValueError),
            ("tenant", 7, TypeError),
            ("tenant", "x" * 257, ValueError),
        ):
            for use in (streamer.predict, streamer.submit):
                with pytest.raises(error, match=option):
                    use([1], **{option: value})
        assert streamer.predict([1], priority=-(10**9), tenant="\ud83d" * 256, timeout=600) == [2]

    @pytest.mark.parametrize("bound", [None, 10])
    def test_a_streamer_computes_the_same_with_lengths(
        self, build: Build, bound: float | None
    ) -> None:
        streamer: Any = build(
            models.double, 4, length=len, max_batch_cost=bound, tenant_weights={"paying": 3}
        )
        items = ["x" * (number * 7 % 23) for number in range(50)]
        assert streamer.predict(items) == [2 * item for item in items]
        assert streamer.predict(items, tenant="paying", priority=2) == [2 * item for item in items]

    def test_exception_of_a_length_function_reaches_its_caller_alone(self, build: Build) -> None:
        streamer: Any = build(models.double, length=two)
        future = streamer.submit([1, 2])
        for call in (streamer.predict, lambda items: streamer.submit(items).result()):
            with pytest.raises(ZeroDivisionError):
                call([1, 0])
        assert future.result() == [2, 4]
        assert streamer.predict([3]) == [6]
