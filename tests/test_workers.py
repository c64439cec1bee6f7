"""Worker processes: how models get there, where they are placed, how they fail to start and end."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import resource
import selectors
import signal
from pathlib import Path
from typing import Any

import pytest

import models
from cases import long_cases
from conftest import await_that
from service_streamer import ManagedModel, Streamer, ThreadedStreamer, WorkerLost, WorkerStartError
from service_streamer.testing import Gate

# -- what a model may be


@pytest.mark.parametrize(
    ("model", "options", "expected"),
    [
        (models.Multiplier, {"model_init_args": [3], "model_init_kwargs": {"offset": 1}}, [4, 7]),
        (models.Doubler(5).predict, {}, [5, 10]),
        ("models:Multiplier", {}, [2, 4]),
    ],
    ids=["a class with arguments", "a method with its object", "a name"],
)
def test_a_model_lives_in_the_worker(model: Any, options: Any, expected: list[int]) -> None:
    with Streamer(model, **options) as streamer:
        assert streamer.predict([1, 2]) == expected


def test_the_name_of_what_is_no_model_is_an_error() -> None:
    with Streamer("models:Multiplier.mro") as streamer, pytest.raises(Exception, match="mro"):
        streamer.predict([1])


def test_a_threaded_streamer_takes_the_same_models() -> None:
    for model in (models.Multiplier, "models:double", models.Doubler(2).predict):
        with ThreadedStreamer(model) as streamer:
            assert streamer.predict([1, 2]) == [2, 4]


def test_a_forked_worker_takes_what_cannot_be_pickled() -> None:
    factor = 3
    with Streamer(lambda batch: [factor * i for i in batch], mp_start_method="fork") as streamer:
        assert streamer.predict([1, 2]) == [3, 6]


def test_a_forked_worker_tells_its_stacks_though_a_library_has_taken_the_signal() -> None:
    def crash(batch: list[int]) -> list[int]:
        os.kill(os.getpid(), signal.SIGSEGV)
        return batch

    libc = ctypes.CDLL(None)
    libc.signal.restype = ctypes.c_void_p
    libc.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
    before = libc.signal(signal.SIGSEGV, None)  # as Ray takes it for a handler of its own
    try:
        with Streamer(crash, mp_start_method="fork", max_attempts=1) as streamer:
            with pytest.raises(WorkerLost) as lost:
                streamer.predict([1])
            assert "in crash" in str(lost.value.__cause__)
    finally:
        libc.signal(signal.SIGSEGV, before)


# -- failing to start


@pytest.mark.parametrize(
    ("model", "match"),
    [
        (models.BrokenInit, "FileNotFoundError: no weights at /nowhere"),
        ("models:Nothing", "AttributeError"),
        ("no_such_module:Model", "ModuleNotFoundError"),
        ("models:os", "TypeError"),
    ],
)
def test_a_thread_that_cannot_load_its_model_fails_every_call_with_its_error(
    model: type[ManagedModel] | str, match: str
) -> None:
    with ThreadedStreamer(model) as streamer:
        with pytest.raises(WorkerStartError, match=match):
            streamer.wait_ready()
        with pytest.raises(WorkerStartError, match=match):
            streamer.predict([1])
    models.await_worker_threads()


def test_the_constructor_raises_that_error_with_wait_for_worker_ready() -> None:
    with pytest.raises(WorkerStartError, match="no weights at /nowhere"):
        Streamer(models.BrokenInit, wait_for_worker_ready=True)


# -- dying


def test_a_broken_streamer_is_revived_or_stays_broken(tmp_path: Path) -> None:
    weights = tmp_path / "weights"
    with Streamer(
        models.NeedsFile, model_init_args=(weights,), worker_num=2, mp_start_method="fork"
    ) as streamer:
        with pytest.raises(WorkerStartError, match="FileNotFoundError"):
            streamer.predict([None])
        with pytest.raises(WorkerStartError, match="FileNotFoundError"):
            streamer.restart_workers()
        with pytest.raises(WorkerStartError, match="FileNotFoundError"):
            streamer.predict([None])
        weights.touch()
        streamer.restart_workers()
        assert streamer.predict([None])


@pytest.mark.usefixtures("no_quick_restarts")
def test_requests_that_kill_do_not_use_up_the_restarts() -> None:
    with Streamer(models.misbehave, mp_start_method="fork") as streamer:
        for _ in range(3):
            with pytest.raises(WorkerLost, match="SIGKILL"):
                streamer.predict(["kill"])
        assert streamer.predict(["fine"]) == ["fine"]


@pytest.mark.parametrize("method", ["fork", *long_cases("spawn")])
def test_a_thread_of_the_model_s_does_not_hide_the_end_of_its_worker(method: str) -> None:
    with Streamer(models.WithThread, mp_start_method=method, worker_timeout=None) as streamer:
        with pytest.raises(WorkerLost, match="exited with code 7"):
            streamer.predict(["exit"])
        with pytest.raises(WorkerLost, match="exited with code 1"):
            streamer.predict(["interrupt in silence"])
        assert streamer.predict(["fine"]) == ["fine"]


def test_a_death_is_told_though_no_descriptor_is_free(gate: Gate) -> None:
    """What the worker was at cannot be read then."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    with Streamer(
        models.Gated, model_init_args=(gate,), mp_start_method="fork", max_attempts=1
    ) as streamer:
        future = streamer.submit([1])
        gate.await_arrival()
        [worker] = multiprocessing.active_children()
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, before[1]))
        try:
            worker.kill()
            with pytest.raises(WorkerLost, match="SIGKILL"):
                future.result()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
        await_that(lambda: streamer.stats().state == "running")
        gate.let_through()
        assert streamer.predict([2]) == [1]


class EagerSelector(selectors.DefaultSelector):
    """Calls each pipe ready that does not block, also if it is empty."""

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(timeout)
        for key in [*self.get_map().values()]:
            if not os.get_blocking(key.fd) and all(key is not other for other, _ in ready):
                ready.append((key, selectors.EVENT_READ))
        return ready


def test_a_pipe_that_is_called_ready_and_is_empty_does_no_harm(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(selectors, "DefaultSelector", EagerSelector)
    with Streamer(models.misbehave, worker_num=2) as streamer:
        assert streamer.predict(["fine"]) == ["fine"]
        with pytest.raises(WorkerLost):
            streamer.predict(["exit"])
        assert streamer.predict(["fine"]) == ["fine"]


def test_a_thread_that_is_ended_by_its_model_is_started_again() -> None:
    with ThreadedStreamer(models.misbehave) as streamer:
        with pytest.raises(WorkerLost, match="SystemExit: 5"):
            streamer.predict(["exit"])
        assert streamer.predict(["fine"]) == ["fine"]
    models.await_worker_threads()


# -- placement


@pytest.mark.usefixtures("eight_gpus")
def test_the_environment_is_there_before_any_user_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "records_environment.py").write_text(
        "import os\nSEEN = dict(os.environ)\ndef seen(names): return [SEEN[each] for each in names]"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with Streamer("records_environment:seen", cuda_devices=(3,), cpu_threads=7) as streamer:
        names = ["CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "NUMEXPR_NUM_THREADS"]
        assert streamer.predict(names) == ["3", "7", "7"]


ALL_THREADS = {
    "OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS",
    "RAYON_NUM_THREADS",
}  # fmt: skip


NOT_MKL = ALL_THREADS - {"MKL_NUM_THREADS"}

#: OpenMP's threads that wait for each other sleep soon.
WAITS = {"GOMP_SPINCOUNT": "1000", "KMP_BLOCKTIME": "1"}


@pytest.mark.parametrize(
    ("worker_num", "cpu_threads", "inherited", "expected"),
    [
        (3, "auto", {}, {**WAITS, **dict.fromkeys(ALL_THREADS, "5")}),
        (2, "auto", {"OMP_NUM_THREADS": "9"}, WAITS),
        (1, "auto", {"MKL_NUM_THREADS": "9"}, {**WAITS, **dict.fromkeys(NOT_MKL, "16")}),
        (1, 2, {"OMP_NUM_THREADS": "9"}, {**WAITS, **dict.fromkeys(ALL_THREADS, "2")}),
        (1, 2, {"OMP_WAIT_POLICY": "ACTIVE"}, dict.fromkeys(ALL_THREADS, "2")),
        (2, "auto", {"OMP_NUM_THREADS": "9", "GOMP_SPINCOUNT": "7"}, {}),
        (2, "auto", {"OMP_NUM_THREADS": "9", "KMP_BLOCKTIME": "7"}, {}),
        (2, None, {}, {}),
    ],
)
def test_cores_are_divided_unless_the_user_said_otherwise(
    monkeypatch: pytest.MonkeyPatch,
    worker_num: int,
    cpu_threads: Any,
    inherited: dict[str, str],
    expected: dict[str, str],
) -> None:
    names = [*ALL_THREADS, *WAITS, "OMP_WAIT_POLICY"]
    for name in names:
        monkeypatch.delenv(name, raising=False)
    for name, value in inherited.items():
        monkeypatch.setenv(name, value)
    before = dict(os.environ)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    with Streamer(
        models.environment, worker_num=worker_num, cpu_threads=cpu_threads, mp_start_method="fork"
    ) as streamer:
        found = dict(zip(names, streamer.predict(names), strict=True))
        assert dict(os.environ) == before, "this process's own are restored"
    set_here = {name: value for name, value in found.items() if value is not None}
    assert set_here == {**inherited, **expected}


def test_a_model_built_by_hand_sets_its_device_and_without_one_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    model = models.Multiplier()
    assert (model.gpu_id, model.model) == (None, None)
    assert "CUDA_VISIBLE_DEVICES" not in os.environ
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    assert models.Multiplier(0).gpu_id == 0
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0"
    monkeypatch.setenv("ROCR_VISIBLE_DEVICES", "4,5")
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "1")
    models.Multiplier("cuda:1")
    assert "ROCR_VISIBLE_DEVICES" not in os.environ, "or numbers would be those of its list"
    assert os.environ["HIP_VISIBLE_DEVICES"] == os.environ["CUDA_VISIBLE_DEVICES"] == "1"
    models.Multiplier("cpu")
    assert os.environ["HIP_VISIBLE_DEVICES"] == "-1"
