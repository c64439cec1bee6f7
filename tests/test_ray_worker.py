"""A worker on Ray, without Ray: its methods are called by threads of the test."""

from __future__ import annotations

import pickle
import sys
import threading
import types
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import models
import stream_models
from service_streamer.ray import actor
from service_streamer.ray.apart import ApartEncoder, frame, unframed
from service_streamer.testing import Gate
from service_streamer.workers.diagnosis import EXIT_DEVICE_FAILED, EXIT_START_FAILED
from service_streamer.workers.item_pickling import pickled_spec
from service_streamer.workers.model_spec import ModelSpec
from service_streamer.workers.protocol import (
    DROP,
    BatchReport,
    DeviceFailure,
    StartFailure,
    StepReport,
    WorkerStarted,
    decode,
)
from service_streamer.workers.serving import Boot
from service_streamer.workers.starting import ByValue
from service_streamer.workers.visibility import UNPLACED


@pytest.fixture(autouse=True)
def no_worker_is_left() -> Iterator[None]:
    yield
    models.await_worker_threads()


def worker_of(model: Any, *arguments: Any, batch_size: int = 8) -> actor.RayWorker:
    spec = ModelSpec(model, arguments, None, batch_size=batch_size)
    return actor.RayWorker(Boot(None, UNPLACED, {}), pickled_spec(spec, ByValue()))


def batch(number: int, *items: Any, is_stream: bool = False) -> Any:
    payloads = [ApartEncoder().encode(item) for item in items]
    return frame((number, payloads, None, True) if is_stream else (number, payloads))


def said(answer: Any) -> Any:
    _, message = unframed(answer)
    return decode(message)


def started(worker: actor.RayWorker) -> Any:
    where, answer = worker.start()
    assert where == worker.where()
    return said(answer)


def outputs(report: BatchReport) -> list[Any]:
    return [pickle.loads(each) if type(each) is bytes else each.load() for each in report.outputs]


def test_it_starts_computes_and_ends() -> None:
    worker = worker_of(models.double)
    assert isinstance(started(worker), WorkerStarted)
    report = said(worker.compute(batch(4, 1, 2)))
    assert (report.batch_id, outputs(report)) == (4, [2, 4])
    worker.stop()
    assert worker.watch() == 0


def test_each_call_gets_one_answer_perhaps_that_of_another(gate: Gate) -> None:
    worker = worker_of(models.Gated, gate)
    started(worker)
    with ThreadPoolExecutor(3) as pool:
        calls = [pool.submit(worker.compute, batch(number, "x")) for number in range(3)]
        gate.let_through(3)
        answered = [said(call.result()).batch_id for call in calls]
    assert sorted(answered) == [0, 1, 2]
    worker.stop()
    assert worker.watch() == 0


def test_what_has_come_is_answered_before_it_ends(gate: Gate) -> None:
    worker = worker_of(models.Gated, gate)
    started(worker)
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(worker.compute, batch(0, "x"))
        gate.await_arrival()
        worker.stop()
        gate.let_through()
        assert said(call.result()).batch_id == 0
    assert worker.watch() == 0
    assert worker.compute(batch(1, "too late")) is None


@pytest.mark.parametrize("model", [models.BrokenInit, "no_such_module:Model"])
def test_a_model_that_cannot_be_loaded(model: Any) -> None:
    worker = worker_of(model)
    assert isinstance(started(worker), StartFailure)
    assert worker.watch() == EXIT_START_FAILED


def test_a_spec_that_does_not_unpickle_says_what_to_do() -> None:
    worker = actor.RayWorker(Boot(None, UNPLACED, {}), b"cno_such_module\nModel\n.")
    failure = started(worker)
    assert isinstance(failure, StartFailure)
    assert "runtime_env" in failure.failure.text
    assert worker.watch() == EXIT_START_FAILED


def end_with(batch: list[Any]) -> Any:
    raise SystemExit(batch[0])


@pytest.mark.parametrize(
    ("code", "expected"), [(5, 5), (None, 0), ("in words", 1), (256 + 3, 3), (-1, 255)]
)
def test_a_model_that_ends_the_worker(code: object, expected: int) -> None:
    worker = worker_of(end_with)
    started(worker)
    assert worker.compute(batch(0, code)) is None
    assert worker.watch() == expected


class AcceleratorError(RuntimeError):
    """As torch's."""


def fail_device(batch: list[Any]) -> list[Any]:
    raise AcceleratorError("CUDA error: device-side assert triggered")


def test_a_device_that_fails_is_told_before_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = types.ModuleType("torch")
    torch.AcceleratorError = AcceleratorError  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch", torch)
    worker = worker_of(fail_device)
    started(worker)
    message = said(worker.compute(batch(3, "x")))
    assert isinstance(message, DeviceFailure)
    assert message.batch_id == 3
    assert worker.watch() == EXIT_DEVICE_FAILED


def test_its_stacks_say_where_it_hangs(gate: Gate) -> None:
    worker = worker_of(models.Gated, gate)
    started(worker)
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(worker.compute, batch(0, "x"))
        gate.await_arrival()
        assert "in go_through" in worker.stacks()
        gate.let_through()
        call.result()
    worker.stop()
    worker.watch()


def test_messages_to_a_model_of_steps_come_in_their_order() -> None:
    """Ray calls the methods in any order."""
    worker = worker_of(stream_models.Countdown)
    assert started(worker).places == 8
    worker.take(1, batch(11, 2))
    worker.take(2, frame((DROP, [10])))
    worker.take(0, batch(10, 5))
    done: dict[int, BatchReport] = {}
    while len(done) < 2:
        reports = worker.reports()
        assert reports
        for each in map(said, reports):
            assert isinstance(each, StepReport)
            done |= {report.batch_id: report for report in each.done}
    assert done.keys() == {10, 11}
    worker.stop()
    while worker.reports() is not None:
        pass
    assert worker.watch() == 0


def test_all_who_wait_for_answers_are_woken_at_the_end() -> None:
    worker = worker_of(stream_models.Countdown)
    started(worker)
    found: list[Any] = []
    waiting = [threading.Thread(target=lambda: found.append(worker.reports())) for _ in range(3)]
    for thread in waiting:
        thread.start()
    worker.stop()
    for thread in waiting:
        thread.join()
    assert found == [None] * 3
