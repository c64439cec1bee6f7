"""``preprocess_workers``: a worker's preprocessing in processes of its own."""

from __future__ import annotations

import contextlib
import errno
import os
import pickle
import select
import signal
import threading
from collections import UserDict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import preprocess_models
from models import NothingToLoad
from serve_process import until
from service_streamer import ModelError, Streamer, WorkerLost, WorkerStartError
from service_streamer.options.table import WorkerOptions
from service_streamer.pipelines import CustomModel
from service_streamer.workers.model_spec import ModelSpec
from service_streamer.workers.preprocessing import PreprocessPool

pytestmark = pytest.mark.xdist_group("preprocess-workers")


def streamer_of(model: Any, *args: Any, **options: Any) -> Streamer:
    given: dict[str, Any] = {"preprocess_workers": 2, "worker_timeout": None, **options}
    return Streamer(model, model_init_args=args, **given)


@pytest.fixture(scope="module")
def shared() -> Iterator[Streamer]:
    """With two preprocess processes, which both live again when a test is over."""
    with streamer_of(preprocess_models.Where, 0) as streamer:
        yield streamer


def await_both(streamer: Streamer) -> None:
    until(lambda: len({pid for _, pid, _ in streamer.predict([5, 6])}) == 2)


def pool_of(count: int) -> PreprocessPool:
    """The processes of a worker, which is this one."""
    options = WorkerOptions(worker_num=count, cuda_devices=("cpu",))
    return PreprocessPool(pickle.dumps(ModelSpec(preprocess_models.Where, (0,))), options)


def test_a_batch_is_split_among_the_processes(shared: Streamer) -> None:
    results = shared.predict([0, 1, 2, 3, 4])
    assert [value for value, _, _ in results] == [0, 1, 2, 3, 4]
    preprocessing = [pid for _, pid, _ in results]
    computing = {pid for _, _, pid in results}
    assert len(set(preprocessing)) == 2, "each has a part"
    assert preprocessing == sorted(preprocessing, key=preprocessing.index), "of adjacent items"
    assert not computing & {*preprocessing, os.getpid()}
    (device,) = shared.predict(["device"])
    assert device[0] == ("", "1"), "no GPU, and one thread"
    ((is_loaded, *_),) = shared.predict(["loaded"])
    assert not is_loaded, "the model is only in the worker"


def test_rows_of_arrays_are_split_and_joined() -> None:
    rng = np.random.default_rng(0)
    images = list(rng.integers(0, 255, (7, 100, 100), np.uint8))  # of 10 kB; prepared, of 40 kB
    with streamer_of(preprocess_models.Images) as streamer:
        for _ in range(3):  # so that blocks are released, and used again
            sums = streamer.predict(images)
            assert sums == [2 * image.astype(np.float32).sum() for image in images]


def test_preprocess_error_fails_its_call_only(shared: Streamer) -> None:
    calls = [shared.submit([item]) for item in (1, "raise", 3, "lock", "opens")]
    assert calls[0].result()[0][0] == 1
    assert calls[2].result()[0][0] == 3
    with pytest.raises(ValueError, match="no such image") as raised:
        calls[1].result()
    assert "prepared_item" in str(raised.value.__cause__), "where it was raised"
    with pytest.raises(ModelError, match="sent to the worker"):
        calls[3].result()
    with pytest.raises(ModelError, match="unpickled in the worker"):
        calls[4].result()


def test_a_model_of_ones_own_behind_the_web_service() -> None:
    with streamer_of(CustomModel, "preprocess_models:Pads", ("-",)) as streamer:
        description = {"do": "describe", "inputs": None, "parameters": {}}
        *results, described = streamer.predict(["a", "bcd", description])
        assert [text for text, _ in results] == ["a--", "bcd"], "joined by its own collate"
        assert os.getpid() != results[0][1] != results[1][1], "each part in a process of its own"
        assert described["task"] == "custom"
        assert streamer.predict([description]) == [described]


def test_crash_in_preprocess_does_not_end_the_worker(shared: Streamer) -> None:
    ((_, _, worker),) = shared.predict([0])
    calls = [shared.submit([item]) for item in (1, "crash", 3, 4)]
    with pytest.raises(WorkerLost, match=r"preprocess.*SIGSEGV") as raised:
        calls[1].result()
    assert "prepared_item" in str(raised.value.__cause__), "the stack of the crash"
    for call, value in ((calls[0], 1), (calls[2], 3), (calls[3], 4)):
        ((result, _, pid),) = call.result()
        assert (result, pid) == (value, worker), "the model stays loaded"
    assert shared.stats().restarts == 0
    await_both(shared)  # a new process has taken the place


def test_a_process_that_dies_idle_costs_no_call(shared: Streamer) -> None:
    ((_, first, worker),) = shared.predict([0])
    death = os.pidfd_open(first)
    os.kill(first, signal.SIGKILL)
    select.select([death], [], [])  # what the worker sees as well
    os.close(death)
    ((value, second, still),) = shared.predict([1])
    assert (value, still) == (1, worker)
    assert second != first
    await_both(shared)


def test_a_batch_that_was_sent_in_part_leaves_nothing_to_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with contextlib.closing(pool_of(2)) as pool:
        pool.start()
        send = pool.transport.send

        def send_one(slot: int, batch_id: int, payloads: list[Any]) -> None:
            if slot:
                raise MemoryError
            send(slot, batch_id, payloads)

        pool.wait_ready()
        monkeypatch.setattr(pool.transport, "send", send_one)
        with pytest.raises(MemoryError):
            pool([1, 2])
        monkeypatch.undo()
        assert [prepared[0] for prepared, *_ in pool([3, 4])] == [3, 4]


@pytest.mark.parametrize("lacks", ["processes", "threads"])
def test_while_no_process_can_be_started_the_others_do_the_work(
    lacks: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_process(*_: object) -> None:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    def no_thread(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    with contextlib.closing(pool_of(2)) as pool:
        pool.start()
        pool.wait_ready()
        with monkeypatch.context() as patch:
            patch.setattr(pool.transport, "start", no_process)
            if lacks == "threads":
                patch.setattr(threading.Thread, "start", no_thread)
            with pytest.raises(WorkerLost, match="SIGSEGV"):
                pool(["crash"])
            for _ in range(3):
                ((first, second),) = pool([1, 2])
                assert (first[0], second[0]) == (1, 2)
            assert sum("cannot be started again" in each.message for each in caplog.records) == 1
        pool.may_start_at = 0.0
        until(lambda: len(pool([1, 2])) == 2)
        monkeypatch.setattr(pool.transport, "start", no_process)
        with pytest.raises(WorkerLost):
            pool(["crash", 1])
        with pytest.raises(SystemExit):
            pool(["crash"])


def test_a_new_process_outlives_the_thread_that_needed_it() -> None:
    with contextlib.closing(pool_of(1)) as pool:
        pool.start()
        pool.wait_ready()

        def replaced() -> tuple[int, int]:
            with pytest.raises(WorkerLost):
                pool(["crash"])
            return pool([1])[0][0][2], threading.get_native_id()

        with ThreadPoolExecutor(1) as intake:  # a worker ends such a thread when batches are few
            first, thread = intake.submit(replaced).result()
        until(lambda: not os.path.exists(f"/proc/self/task/{thread}"))
        assert pool([2])[0][0][2] == first


def test_a_hanging_preprocess_ends_with_its_worker(tmp_path: Path) -> None:
    options: dict[str, Any] = {"batch_timeout": 1.0, "preprocess_workers": 1, "max_attempts": 1}
    with streamer_of(preprocess_models.Where, 0, tmp_path, **options) as streamer:
        ((_, hanging, worker),) = streamer.predict([0])
        with pytest.raises(WorkerLost, match="batch_timeout"):
            streamer.predict(["hang"])
        # It holds the interpreter's lock, so none of its own threads could end it.
        until(lambda: not os.path.exists(f"/proc/{hanging}"))
        ((value, _, new),) = streamer.predict([1])
        assert value == 1
        assert new != worker


def test_init_preprocess_is_called_in_the_worker_too() -> None:
    with streamer_of(preprocess_models.Where, 7, preprocess_workers=0) as streamer:
        ((value, preprocessing, computing),) = streamer.predict([1])
        assert value == 8
        assert preprocessing == computing


def test_a_forked_process_is_replaced_with_its_worker() -> None:
    options: dict[str, Any] = {"mp_start_method": "fork", "max_attempts": 1}
    with streamer_of(preprocess_models.Where, 0, **options) as streamer:
        ((thread, first, worker), (_, second, _)) = streamer.predict(["thread", 1])
        assert len({os.getpid(), worker, first, second}) == 4
        assert thread == "MainThread", "a fork of another thread cannot end normally"
        with pytest.raises(WorkerLost):
            streamer.predict(["crash"])
        ((value, _, new),) = streamer.predict([1])
        assert value == 1
        assert new != worker


def test_worker_reports_why_a_preprocess_process_cannot_start(tmp_path: Path) -> None:
    options: dict[str, Any] = {"preprocess_workers": 1}
    with streamer_of(preprocess_models.LosesFile, 0, tmp_path, **options) as streamer:
        with pytest.raises(WorkerStartError, match="vocabulary"):
            streamer.wait_ready()
        streamer.close(drain=False)


def test_a_process_whose_worker_has_ended_already_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: -1)  # of a worker that is not its parent
        pool = pool_of(1)
    with contextlib.closing(pool):
        pool.start()
        with pytest.raises(WorkerStartError):
            pool.wait_ready()


def test_a_process_that_cannot_start_again_leaves_the_work_to_the_others(tmp_path: Path) -> None:
    (tmp_path / "vocabulary").touch()
    with streamer_of(preprocess_models.LosesFile, 0, tmp_path) as streamer:
        ((_, _, worker),) = streamer.predict([0])
        (tmp_path / "vocabulary").unlink()
        with pytest.raises(WorkerLost):
            streamer.predict(["crash"])
        for _ in range(3):
            results = streamer.predict([1, 2])
            assert [(value, pid) for value, _, pid in results] == [(1, worker), (2, worker)]


def test_items_of_a_batch_that_ran_out_of_memory_are_preprocessed_again() -> None:
    with streamer_of(preprocess_models.SmallMemory, 0, preprocess_workers=1) as streamer:
        assert [value for value, _, _ in streamer.predict([1, 2, 3, 4, 5])] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("model", "args"),
    [(preprocess_models.Forgetful, ()), (CustomModel, ("preprocess_models:Forgetful",))],
)
def test_missing_attribute_in_preprocess_names_init_preprocess(
    model: Any, args: tuple[Any, ...]
) -> None:
    with streamer_of(model, *args, preprocess_workers=1) as streamer:
        with pytest.raises(AttributeError, match="vocabulary") as raised:
            streamer.predict(["a"])
        assert "init_preprocess" in str(raised.value.__cause__)


def test_a_model_without_stages_is_refused_or_its_worker_if_it_is_named() -> None:
    for model in (preprocess_models.OnlyPredict, len):
        with pytest.raises(TypeError, match=model.__name__):
            Streamer(model, preprocess_workers=1)
    for name in ("Multiplier", "double"):
        custom = CustomModel()
        custom.preprocesses_only = True
        with pytest.raises(TypeError, match=name):
            custom.init_preprocess(f"models:{name}")
    with streamer_of("preprocess_models:OnlyPredict", preprocess_workers=1) as streamer:
        with pytest.raises(WorkerStartError, match=r"^worker 0 [^:]+: TypeError: .*OnlyP"):
            streamer.wait_ready()
        streamer.close(drain=False)


# -- joining


class Staged(NothingToLoad):
    def forward(self, batch: Any) -> Any:
        return batch


class Pair(NamedTuple):
    tokens: Any
    size: int


@pytest.mark.parametrize(
    ("parts", "whole"),
    [
        ([[1, 2], [3]], [1, 2, 3]),
        ([([1], "x"), ([2], "x")], ([1, 2], "x")),
        ([Pair([1], 5), Pair([2], 5)], Pair([1, 2], 5)),
        ([{"a": [1], "b": None}, {"a": [2], "b": None}], {"a": [1, 2], "b": None}),
        ([UserDict(a=[1]), UserDict(a=[2])], UserDict(a=[1, 2])),
    ],
    ids=repr,
)
def test_parts_are_joined(parts: list[Any], whole: Any) -> None:
    joined = Staged().collate(parts)
    assert joined == whole
    assert type(joined) is type(whole)


def test_tensors_are_joined() -> None:
    torch = pytest.importorskip("torch")
    joined = Staged().collate(
        [(torch.zeros(2, 3), np.ones((2, 1))), (torch.ones(1, 3), np.ones((1, 1)))]
    )
    assert [tuple(part.shape) for part in joined] == [(3, 3), (3, 1)]
    assert joined[0].tolist() == [[0] * 3] * 2 + [[1] * 3]


@pytest.mark.parametrize(
    ("parts", "error", "word"),
    [
        ([np.ones((2, 3)), np.ones((2, 4))], ValueError, r"\(2, 4\)"),
        ([np.array(1.0), np.array(1.0)], TypeError, "ndarray"),
        ([{"a": 1}, {"b": 1}], TypeError, "dict"), ([{1}, {2}], TypeError, "set"),
        (["a", "b"], TypeError, "str"), ([[1], (1,)], TypeError, "tuple"),
        ([({"ids": [1], "width": 2},), ({"ids": [1], "width": 3},)], TypeError, "width"),
        ([{"ids": np.ones((1, 2))}, {"ids": np.ones((1, 3))}], ValueError, "ids"),
    ],
    ids=["shapes", "scalars", "keys", "sets", "unequal", "types", "inside", "shapes inside"],
)  # fmt: skip
def test_collate_refuses_parts_that_cannot_be_joined(
    parts: list[Any], error: type[Exception], word: str
) -> None:
    with pytest.raises(error, match=word):
        Staged().collate(parts)
