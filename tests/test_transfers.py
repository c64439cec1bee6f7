"""The way to the GPU and back, and how long a stage takes there, on a GPU made of nothing."""

from __future__ import annotations

import collections
import dataclasses
import sys
from collections import deque
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from cuda_stub import GARBAGE, Gpu, Tensor
from service_streamer import ManagedModel
from service_streamer.workers import device, stage_mark
from service_streamer.workers.device import OnHost, results_on_host, to_device, to_host, to_pinned
from service_streamer.workers.model_spec import LoadedModel, ModelSpec
from service_streamer.workers.stage_mark import StageMark
from service_streamer.workers.stages import Job, Stages
from service_streamer.workers.sticky_errors import DeviceFailed, Guard


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Gpu:
    gpu = Gpu(**getattr(request, "param", {}))
    monkeypatch.setitem(sys.modules, "torch", gpu.torch)
    monkeypatch.setattr(device, "_streams", {})
    monkeypatch.setattr(stage_mark, "_notes", {})
    monkeypatch.setattr(stage_mark, "time", SimpleNamespace(monotonic=lambda: gpu.now))
    return gpu


# -- how long a stage takes


def test_a_batch_takes_what_the_gpu_takes_for_it(gpu: Gpu) -> None:
    first = StageMark()
    assert not first.is_reached
    gpu.compute(0.5)
    gpu.now += 0.001  # it is launched only
    first.end()
    second = StageMark()  # while the first one computes
    gpu.compute(0.25)
    gpu.now += 0.001
    second.end()
    gpu.compute(9.0)  # of the batch after them
    assert not first.is_reached
    assert not second.is_reached
    assert second.seconds() == pytest.approx(0.25)
    assert second.is_reached
    assert first.seconds() == first.seconds() == pytest.approx(0.5)


def test_a_stage_that_waits_for_the_gpu_takes_its_own_time(gpu: Gpu) -> None:
    mark = StageMark()
    gpu.compute(0.5)
    gpu.now += 0.75
    mark.end()
    gpu.now += 5.0
    assert mark.seconds() == 0.75


@pytest.mark.parametrize("gpu", [{"count": 2}], indirect=True)
def test_the_slowest_of_several_devices_counts(gpu: Gpu) -> None:
    mark = StageMark()
    gpu.compute(0.25, device=0)
    gpu.compute(0.5, device=1)
    mark.end()
    assert mark.seconds() == 0.5


@pytest.mark.parametrize("gpu", [{"is_initialized": False}], indirect=True)
def test_a_process_without_a_context_gets_none(gpu: Gpu) -> None:
    mark = StageMark()
    gpu.now += 0.5
    gpu.is_initialized = True  # by the model's first batch
    mark.end()
    assert mark.seconds() == 0.5


@pytest.mark.parametrize("torch", [None, SimpleNamespace(), SimpleNamespace(cuda=object())])
def test_without_torch_the_thread_s_time_counts(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch, torch: Any
) -> None:
    monkeypatch.setitem(sys.modules, "torch", torch)
    mark = StageMark()
    gpu.now += 0.5
    assert mark.seconds() == 0.5


@pytest.mark.parametrize("when", ["before", "in between", "after"])
def test_a_gpu_that_failed_leaves_the_thread_s_time(gpu: Gpu, when: str) -> None:
    def fail(now: str) -> None:
        if when == now:
            gpu.error = RuntimeError("CUDA error: device-side assert triggered")

    fail("before")
    mark = StageMark()
    fail("in between")
    gpu.now += 0.5
    mark.end()
    fail("after")
    assert mark.seconds() == 0.5


# -- there and back

#: Nothing is done before somebody waits, or copies overtake everything that does not stop them.
BOTH = pytest.mark.parametrize("gpu", [{"is_eager": False}, {"is_eager": True}], indirect=True)


def in_stages(gpu: Gpu, batches: int, *, is_pinned_before: bool = False) -> list[Any]:
    """Each batch is launched while the one before it computes, and its results are read later."""
    results: list[Any] = []
    on_their_way: deque[OnHost[dict[str, Tensor]]] = deque()
    for number in range(batches):
        batch: Any = {"ids": gpu.on_host(number)}
        if is_pinned_before:
            batch = to_pinned(batch)
        batch = to_device(batch, "cuda")
        on_their_way.append(to_host({"doubled": gpu.computed(batch["ids"], of=lambda n: 2 * n)}))
        del batch
        if len(on_their_way) == 3:
            results.append(on_their_way.popleft().wait()["doubled"].value)
    return results + [outputs.wait()["doubled"].value for outputs in on_their_way]


@BOTH
@pytest.mark.parametrize("is_pinned_before", [False, True])
def test_batches_go_there_and_back(gpu: Gpu, is_pinned_before: bool) -> None:
    assert in_stages(gpu, 6, is_pinned_before=is_pinned_before) == [0, 2, 4, 6, 8, 10]
    assert gpu.synchronizations == 0


@BOTH
def test_a_gpu_copies_both_ways_while_it_computes(gpu: Gpu) -> None:
    gpu.copy_seconds = 1.0
    in_stages(gpu, 6)
    assert max(stream.now for stream in gpu.streams) == 1 + 6 + 1


@BOTH
def test_memory_that_still_computes_is_not_given_to_the_next_copy(gpu: Gpu) -> None:
    batch = to_device(gpu.on_host("first"), "cuda")
    outputs = gpu.computed(batch)
    del batch
    to_device(gpu.on_host("second"), "cuda")
    gpu.run_copies()
    assert to_host(outputs).wait().value == "first"


@BOTH
def test_memory_that_is_still_copied_is_not_computed_into(gpu: Gpu) -> None:
    outputs = gpu.computed(to_device(gpu.on_host("first"), "cuda"))
    on_its_way = to_host(outputs)
    del outputs
    gpu.computed(to_device(gpu.on_host("second"), "cuda"))
    gpu.streams[0].run()
    assert on_its_way.wait().value == "first"


def test_outputs_are_read_once_they_are_there(gpu: Gpu) -> None:
    tensor = gpu.computed(to_device(gpu.on_host("there"), "cuda"))
    on_its_way = to_host(tensor)
    assert on_its_way._outputs.value == GARBAGE
    assert on_its_way.wait().value == on_its_way.wait().value == "there"


@BOTH
def test_what_torch_would_convert_on_the_host_is_converted_before(gpu: Gpu) -> None:
    tensor = gpu.computed(to_device(gpu.on_host("there"), "cuda"))
    tensor.is_conj = True
    assert to_host(tensor).wait().value == "there"


def test_pinned_memory_is_copied_from_directly(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """So is what the worker has registered with CUDA."""
    batch = to_pinned(gpu.on_host("there"))
    monkeypatch.setattr(Tensor, "pin_memory", None)
    assert to_host(to_device(batch, "cuda")).wait().value == "there"
    assert to_pinned(batch) is batch


@pytest.mark.parametrize("gpu", [{"count": 2}], indirect=True)
def test_each_device_has_its_streams(gpu: Gpu) -> None:
    both = {name: to_device(gpu.on_host(name), name) for name in ("cuda:0", "cuda:1")}
    assert [str(tensor.device) for tensor in both.values()] == list(both)
    assert {name: tensor.value for name, tensor in to_host(both).wait().items()} == {
        name: name for name in both
    }
    assert len(gpu.streams) == 6


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclasses.dataclass(frozen=True)
class Frozen:
    tensor: Any
    name: str


class Encoding(collections.UserDict[str, Any]):
    """As BatchEncoding of transformers."""


def test_tensors_are_found_in_what_holds_them(gpu: Gpu) -> None:
    def tensor() -> Any:
        return gpu.on_host("there")

    nested: Any = {
        "dict": Encoding(ids=tensor(), text="as it is"),
        "pair": Pair([tensor()], (tensor(), None)),
        "data": Frozen(tensor(), "name"),
    }
    there = to_device(nested, "cuda")
    back = to_host(there).wait()
    for each, kind in ((nested, "cpu"), (there, "cuda"), (back, "cpu")):
        assert type(each["dict"]) is Encoding
        assert each["dict"]["text"] == "as it is"
        assert type(each["pair"]) is Pair
        (listed,), (in_tuple, none) = each["pair"]
        assert none is None
        assert each["data"].name == "name"
        for found in (each["dict"]["ids"], listed, in_tuple, each["data"].tensor):
            assert found.device.type == kind
            assert kind != "cpu" or found.value == "there"


@pytest.mark.parametrize("gpu", [{"is_initialized": False}], indirect=True)
def test_on_the_cpu_nothing_moves_and_no_context_is_made(gpu: Gpu) -> None:
    tensor = gpu.on_host("here")
    assert to_pinned(tensor) is tensor
    assert to_device(tensor, "cpu").value == "here"
    assert to_host([tensor]).wait()[0].value == "here"


def test_without_torch_everything_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    batch = [1, "two"]
    assert to_pinned(batch) is to_device(batch, "cuda") is to_host(batch).wait() is batch


def test_what_the_gpu_raises_is_raised_to_who_waits(gpu: Gpu) -> None:
    on_its_way = to_host(gpu.computed(to_device(gpu.on_host(1), "cuda")))
    gpu.error = RuntimeError("CUDA error: device-side assert triggered")
    with pytest.raises(RuntimeError, match="device-side assert"):
        on_its_way.wait()


@pytest.mark.parametrize("kind", ["tensors", "dicts", "tuples", "on their way"])
def test_results_on_a_gpu_are_copied_together(gpu: Gpu, kind: str) -> None:
    tensors = [gpu.computed(to_device(gpu.on_host(each), "cuda")) for each in range(3)]
    results: Any = {
        "tensors": tensors,
        "dicts": [{"value": each, "name": "as it is"} for each in tensors],
        "tuples": [([each], "as it is") for each in tensors],
        "on their way": to_host(tensors),
    }[kind]
    found = results_on_host(results)
    if kind == "dicts":
        assert found[0]["name"] == "as it is"
        found = [each["value"] for each in found]
    if kind == "tuples":
        found = [each for (each,), _ in found]
    assert [each.value for each in found] == [0, 1, 2]
    assert gpu.synchronizations == 0


class WithoutPostprocess(ManagedModel):
    def init_model(self) -> None:
        pass

    def forward(self, batch: list[int]) -> OnHost[list[int]]:
        return to_host([2 * each for each in batch])


def test_the_worker_waits_for_results_if_no_stage_does() -> None:
    stages, job = Stages(ModelSpec(WithoutPostprocess).load(None)), Job(0, [1, 2], {})
    stages.take_in(job)
    stages.compute(job)
    stages.finish(job)
    assert job.data == [2, 4]


@pytest.mark.parametrize("results", [[], [[]], [{}], ["text"], [{"score": 1.0}]])
def test_other_results_stay_as_they_are(gpu: Gpu, results: list[Any]) -> None:
    assert results_on_host(results) is results


# -- which batch a GPU failed at

FAULT = "CUDA error: device-side assert triggered"


class OnStub(ManagedModel):
    """Fails at the item "fail", as a kernel does: long after it was launched."""

    def init_model(self, gpu: Gpu) -> None:
        self.gpu = gpu

    def preprocess(self, items: list[str]) -> Tensor:
        return self.gpu.on_host(items)

    def forward(self, batch: Tensor) -> OnHost[Tensor]:
        return to_host(self.gpu.computed(to_device(batch, "cuda"), of=self._kernel))

    def postprocess(self, outputs: OnHost[Tensor]) -> list[str]:
        return list(outputs.wait().value)

    def _kernel(self, items: list[str]) -> list[str]:
        if "fail" in items:
            self.gpu.error = RuntimeError(FAULT)
        return items


def on_stub(gpu: Gpu) -> Stages:
    model: LoadedModel = ModelSpec(OnStub, [gpu]).load(None)
    model.guard = Guard(may_end=True, probe=lambda: FAULT)
    return Stages(model)


@pytest.mark.parametrize("at", [0, 1, 2])
@pytest.mark.parametrize("raises", ["outlet of the first", "forward of the next"])
def test_the_batch_at_which_a_gpu_failed_is_named(gpu: Gpu, at: int, raises: str) -> None:
    """Whichever batch's call to the GPU is the first to raise the error."""
    stages = on_stub(gpu)
    jobs = [Job(7 + each, ["fail" if each == at else "good"], {}) for each in range(4)]
    for job in jobs[:3]:
        stages.take_in(job)
        stages.compute(job)
    stages.take_in(jobs[3])
    gpu.streams[0].run()
    call = stages.compute if raises == "forward of the next" else stages.finish
    with pytest.raises(DeviceFailed) as caught:
        call(jobs[3] if raises == "forward of the next" else jobs[0])
    assert stages.culprit(caught.value.batch_id) == 7 + at


def test_batches_that_were_answered_are_forgotten(gpu: Gpu) -> None:
    stages = on_stub(gpu)
    for number in range(3):
        job = Job(number, ["good"], {})
        stages.take_in(job)
        stages.compute(job)
        assert stages.culprit(-1) == number
        assert stages.finish(job, is_overlapped=True)
        assert not stages._unfinished
        assert job.data == ["good"]


def test_without_a_note_the_batch_of_the_error_is_named(gpu: Gpu) -> None:
    gpu.torch.cuda.Event = None
    stages = on_stub(gpu)
    for number in range(2):
        job = Job(number, ["good"], {})
        stages.take_in(job)
        stages.compute(job)
    assert stages.culprit(1) == 1
