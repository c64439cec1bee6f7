"""Large items and results, by way of worker processes: what arrives, and who may write to it."""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import large_models
from cases import long_cases
from large_models import checksum, is_mapped
from models import echo, process_ids
from service_streamer import PredictTimeout, Streamer, ThreadedStreamer
from service_streamer.testing import Gate

Build = Callable[..., Streamer]

#: An item of so many bytes is shared.
LARGE = 16 << 10


@pytest.fixture
def streamer() -> Iterator[Build]:
    built: list[Streamer] = []

    def build(model: Any, batch_size: int = 64, **options: Any) -> Streamer:
        options.setdefault("worker_timeout", 600)
        built.append(Streamer(model, batch_size, **options))
        return built[-1]

    yield build
    for each in built:
        each.close(drain=False)


def held_by(streamer: Streamer) -> int:
    """Bytes of its items' memory, after those have been given back that can be."""
    transport: Any = streamer.engine.transport
    held: int = transport.memory.arena.reclaim()
    return held


# -- what arrives


def test_a_payload_uses_shared_memory_by_its_size(streamer: Build) -> None:
    made = streamer(large_models.are_mapped)
    for size, count, expected in [
        (LARGE, 1, True), (LARGE - 1000, 1, False), (LARGE, 8, True), (LARGE - 1000, 8, False),
    ]:  # fmt: skip
        results = made.predict([np.zeros(size, "u1") for _ in range(count)])
        assert [bool(each[0]) for each in results] == [expected] * count
        assert [is_mapped(each) for each in results] == [expected] * count


@pytest.mark.parametrize("method", ["fork", "forkserver"])
@pytest.mark.usefixtures("no_forkserver_is_left")
def test_large_items_come_back_however_the_workers_start(method: str, streamer: Build) -> None:
    many = streamer(echo, worker_num=2, mp_start_method=method)
    arrays = [np.full(100_000, i) for i in range(20)]
    for array, back in zip(arrays, many.predict(arrays), strict=True):
        np.testing.assert_array_equal(back, array)


# -- tensors


@pytest.mark.parametrize("size", long_cases(100_000, 10))
def test_a_tensor_arrives_as_data(size: int, streamer: Build) -> None:
    torch = pytest.importorskip("torch")
    dtypes = ["float32", "bfloat16", "bool", "int64", "complex64", "float8_e4m3fn"]
    tensors = streamer(large_models.tensors)
    results = tensors.predict([(dtype, (size, 2)) for dtype in dtypes])
    for dtype, result in zip(dtypes, results, strict=True):
        assert type(result) is torch.Tensor
        assert result.dtype is getattr(torch, dtype)
        assert result.shape == (size, 2)
        assert not result.requires_grad
        assert bool((result.to(torch.complex64) == 1).all())
    for number, row in enumerate(tensors.predict([0, 1, 2])):
        assert torch.equal(row, torch.arange(30_000.0) + 30_000 * number)
        assert row.untyped_storage().nbytes() == 120_000, "each row travels alone"


# -- who may write


def test_a_model_may_write_to_its_items(streamer: Build) -> None:
    arrays = [np.full(100_000, i, "f8") for i in range(1, 9)]
    results = streamer(large_models.negatives).predict(arrays)
    for number, (array, result) in enumerate(zip(arrays, results, strict=True), 1):
        assert (array == number).all()
        assert (result == -number).all()


def test_writes_of_a_failed_batch_and_of_a_dead_worker_are_hidden_from_the_next(
    streamer: Build, tmp_path: Path
) -> None:
    items = [np.full(20_000, float(i)) for i in range(8)]
    careless = streamer(large_models.Writes, model_init_args=[str(tmp_path / "died")])
    assert careless.predict(items) == [20_000.0 * i for i in range(8)]
    assert careless.stats().restarts == 1
    items[5][:] = -1
    futures = [careless.submit([item]) for item in items]
    with pytest.raises(ValueError, match="begins with -1"):
        futures[5].result()
    for number in {*range(8)} - {5}:
        assert futures[number].result() == [20_000.0 * number]


def test_a_model_may_go_on_with_what_it_gave(streamer: Build) -> None:
    same = streamer(large_models.GivesTheSame)
    results = [same.predict([None])[0] for _ in range(10)]
    assert [result[0] for result in results] == list(range(1, 11))


def test_callers_that_share_a_computation_share_no_memory(streamer: Build, gate: Gate) -> None:
    one = streamer(large_models.GatedEcho, model_init_args=[gate], cache_size=10)
    array = np.arange(100_000)
    futures = [one.submit([array]) for _ in range(3)]
    gate.await_arrival()
    gate.let_through()
    for future in futures:
        (back,) = future.result()
        np.testing.assert_array_equal(back, array)
        back[:] = -1
    (back,) = one.predict([array])  # from the cache
    np.testing.assert_array_equal(back, array)


# -- until when


def test_an_item_lives_until_the_worker_has_seen_it(streamer: Build, gate: Gate) -> None:
    """Also if nobody waits for its result any more."""
    historian = streamer(
        large_models.Historian, 1, model_init_args=[gate], shared_memory_limit=8 << 20
    )
    arrays = [np.full(100_000, i) for i in range(30)]
    first = historian.submit([arrays[0]])
    gate.await_arrival()  # it is with the worker
    with pytest.raises(PredictTimeout):
        historian.predict([arrays[1]], timeout=0.001)
    first.cancel()
    del first
    rest = [historian.submit([array]) for array in arrays[2:]]
    gate.let_through(40)
    seen = rest[-1].result()[0]
    assert seen[0] == checksum(arrays[0])
    assert seen[-28:] == [checksum(array) for array in arrays[2:]]


def test_a_caller_may_write_to_a_result_and_nothing_is_held_when_all_is_over(
    streamer: Build,
) -> None:
    echoing = streamer(echo, 8)
    array = np.arange(100_000)
    for _ in range(20):
        (back,) = echoing.predict([array])
        np.testing.assert_array_equal(back, array)
        back[:] = -1
    del back
    results = echoing.predict([np.arange(100_000) for _ in range(20)])
    assert held_by(echoing) == 0
    del results
    for _ in range(3):
        echoing.predict([np.arange(100_000)])
    assert held_by(echoing) == 0


def test_a_model_of_steps_holds_no_item_that_is_over(streamer: Build) -> None:
    sums = streamer(large_models.SumsInOneStep, 4)
    assert sums.predict([np.ones(100_000)]) == [[100_000.0]]
    assert held_by(sums) == 0


# -- without


@pytest.mark.parametrize(
    ("limit", "fails", "warns"),
    [
        (0, "", ""),
        (1 << 20, "", "shared_memory_limit"),  # less than one of them
        (None, "memfd_create", "no shared memory"),
        (None, "truncate", "no shared memory"),
    ],
)
def test_large_items_come_back_where_there_is_no_room_in_shared_memory(
    limit: int | None, fails: str, warns: str, streamer: Build, caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    def refuse(*_: object) -> int:
        raise OSError(38, "Function not implemented")

    if fails:
        monkeypatch.setattr(os, fails, refuse)
    array = np.arange(1_000_000)
    with caplog.at_level(logging.WARNING, "service_streamer"):
        without = streamer(echo, **({} if limit is None else {"shared_memory_limit": limit}))
        for back in without.predict([array] * 3):
            np.testing.assert_array_equal(back, array)
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == bool(warns), "once, if at all"
    assert all(warns in each for each in told)
    for bad, error in (("1 GB", TypeError), (-1, ValueError), (1.5, TypeError), (True, TypeError)):
        with pytest.raises(error, match="shared_memory_limit"):
            Streamer(echo, shared_memory_limit=bad)  # type: ignore[arg-type]


def test_workers_that_come_and_go_leave_no_memory(streamer: Build) -> None:
    few = streamer(process_ids)
    few.predict([np.arange(100_000)])
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(2):
        few.restart_workers()
        few.predict([np.arange(100_000)])
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


# -- as rows


def test_a_stacked_batch_is_one_array(streamer: Build, gate: Gate) -> None:
    stacked = streamer(large_models.TellsOfStack, model_init_args=[gate])
    arrays = [np.full((100, 200), i, "f4") for i in range(48)]
    gate.let_through(100)
    for start in (0, 1):  # that there are to be rows is known since the first batch went out
        results = stacked.predict(arrays[start::2])
        for array, result in zip(arrays[start::2], results, strict=True):
            kind, shape, is_copy, total = result
            assert kind == "ndarray"
            assert shape[1:] == (100, 200)
            assert total == float(array.sum())
            assert start == 0 or shape[0] == 1 or not is_copy
    futures = [stacked.submit([item]) for item in (np.ones(10), "text", np.ones(10))]
    with pytest.raises(TypeError, match=r"takes numpy arrays or torch tensors.* is a str"):
        futures[1].result()
    assert futures[0].result()[0][3] == futures[2].result()[0][3] == 10, "it fails alone"


def test_a_batch_is_stacked_in_a_thread_unless_stack_is_a_method_of_a_model_of_before() -> None:
    with ThreadedStreamer(large_models.StackIsAMethod) as before:
        assert before.predict([np.ones(3)]) == ["list"]
    with ThreadedStreamer(large_models.TellsOfStack) as stacked:
        assert stacked.predict([np.ones(3)])[0][:2] == ("ndarray", (1, 3))
