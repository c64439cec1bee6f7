"""The way to the GPU and back, and how long a stage takes there, on a GPU made of nothing."""

from __future__ import annotations

import collections
import dataclasses
import gc
import sys
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from cuda_stub import Gpu, Tensor
from models import NothingToLoad
from service_streamer import ManagedModel, OnHost, to_device, to_host, to_pinned
from service_streamer.workers.runner import DeviceFailed
from service_streamer.workers.transport import BatchReport
from worker_loop import Batches, loaded, served, with_guard


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Gpu:
    gpu = Gpu(**getattr(request, "param", {}))
    monkeypatch.setitem(sys.modules, "torch", gpu.torch)
    return gpu


# -- how long a stage takes


class Works(NothingToLoad):
    """Items are what is done in ``forward``; or a pair of that and of what is done before."""

    def preprocess(self, items: list[Any]) -> list[Any]:
        for item in items:
            if isinstance(item, tuple):
                item[1]()
        return [item[0] if isinstance(item, tuple) else item for item in items]

    def forward(self, batch: list[Callable[[], None]]) -> list[None]:
        for work in batch:
            work()
        return [None] * len(batch)


def forward_seconds(gpu: Gpu, *works: Any, together: bool = False) -> list[float]:
    """What ``forward`` took of batches that do this, as their reports say."""
    channel = Batches(*([work] for work in works), together=together)
    reports = channel.serve(loaded(Works), lambda: gpu.now)
    return [report.stages[1] for report in reports if report.stages is not None]


def launch(gpu: Gpu, *seconds: float, takes: float = 0.001) -> Callable[[], None]:
    """Have each GPU compute so long; to launch that takes the thread some time as well."""

    def work() -> None:
        for device, each in enumerate(seconds):
            gpu.compute(each, device)
        gpu.now += takes

    return work


@pytest.mark.parametrize("together", [True, False])
def test_a_batch_takes_what_the_gpu_takes_for_it(gpu: Gpu, together: bool) -> None:
    works = [launch(gpu, seconds) for seconds in (0.5, 0.25, 9.0, 0.5)]
    taken = forward_seconds(gpu, *works, together=together)
    assert taken == pytest.approx([0.5, 0.25, 9.0, 0.5], abs=0.01)


@pytest.mark.parametrize("gpu", [{"count": 2}], indirect=True)
def test_the_slowest_of_several_devices_counts_or_the_thread_that_waits_for_it(gpu: Gpu) -> None:
    assert forward_seconds(gpu, launch(gpu, 0.25, 0.5)) == [0.5]
    assert forward_seconds(gpu, launch(gpu, 0.25, 0.5, takes=0.75)) == [0.75]


@pytest.mark.parametrize("gpu", [{"is_initialized": False}], indirect=True)
def test_a_process_without_a_context_gets_none(gpu: Gpu) -> None:
    def work() -> None:
        gpu.now += 0.5
        gpu.is_initialized = True  # by the model's first batch

    assert forward_seconds(gpu, work) == [0.5]


@pytest.mark.parametrize("torch", [None, SimpleNamespace(), SimpleNamespace(cuda=object())])
def test_the_thread_s_time_counts_without_torch(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch, torch: Any
) -> None:
    monkeypatch.setitem(sys.modules, "torch", torch)
    assert forward_seconds(gpu, launch(gpu, takes=0.5)) == [0.5]


@pytest.mark.parametrize("when", ["before", "in between"])
def test_the_thread_s_time_counts_where_the_gpu_failed(gpu: Gpu, when: str) -> None:
    def fail() -> None:
        gpu.error = RuntimeError(FAULT)
        gpu.now += 0.5

    work = launch(gpu, takes=0.5)
    assert forward_seconds(gpu, (work, fail) if when == "before" else fail) == [0.5]


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
def test_batches_go_there_and_back_while_the_gpu_computes(gpu: Gpu, is_pinned_before: bool) -> None:
    gpu.copy_seconds = 1.0
    assert in_stages(gpu, 6, is_pinned_before=is_pinned_before) == [0, 2, 4, 6, 8, 10]
    assert gpu.synchronizations == 0
    assert max(stream.now for stream in gpu.streams) == 1 + 6 + 1


@BOTH
def test_memory_that_still_computes_or_is_copied_is_not_given_to_the_next_copy(gpu: Gpu) -> None:
    batch = to_device(gpu.on_host("first"), "cuda")
    outputs = gpu.computed(batch)
    del batch
    to_device(gpu.on_host("second"), "cuda")
    gpu.run_copies()
    assert to_host(outputs).wait().value == "first"
    outputs = gpu.computed(to_device(gpu.on_host("first"), "cuda"))
    on_its_way = to_host(outputs)
    del outputs
    gpu.computed(to_device(gpu.on_host("second"), "cuda"))
    gpu.streams[0].run()
    assert on_its_way.wait().value == "first"


@BOTH
def test_a_conjugated_tensor_is_converted_before_it_goes_to_the_host(gpu: Gpu) -> None:
    tensor = gpu.computed(to_device(gpu.on_host("there"), "cuda"))
    tensor.is_conj = True
    on_its_way = to_host(tensor)
    assert gpu.is_eager or any(stream.work for stream in gpu.streams), "nothing has waited yet"
    assert on_its_way.wait().value == on_its_way.wait().value == "there"


def test_pinned_memory_is_copied_from_directly(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_on_the_cpu_nothing_moves_and_no_context_is_made(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensor = gpu.on_host("here")
    assert to_pinned(tensor) is tensor
    assert to_device(tensor, "cpu").value == "here"
    assert to_host([tensor]).wait()[0].value == "here"
    monkeypatch.delitem(sys.modules, "torch")
    batch = [1, "two"]
    assert to_pinned(batch) is to_device(batch, "cuda") is to_host(batch).wait() is batch


def test_an_error_of_the_gpu_is_raised_by_wait(gpu: Gpu) -> None:
    on_its_way = to_host(gpu.computed(to_device(gpu.on_host(1), "cuda")))
    gpu.error = RuntimeError("CUDA error: device-side assert triggered")
    with pytest.raises(RuntimeError, match="device-side assert"):
        on_its_way.wait()


class Returns(ManagedModel):
    """Returns what it was given to return."""

    def init_model(self, results: Any) -> None:
        self.results = results

    def forward(self, batch: list[Any]) -> Any:
        return self.results


def sent(results: Any, count: int) -> list[Any]:
    """What a worker process sends of such results."""
    model = loaded(Returns, results)
    model.moves_to_cpu = True
    (report,) = served(model, [None] * count)
    assert report.failure is None
    outputs: list[Any] = report.outputs
    return outputs


@pytest.mark.parametrize("kind", ["tensors", "dicts", "tuples", "on their way"])
def test_results_on_a_gpu_are_copied_together(gpu: Gpu, kind: str) -> None:
    tensors = [gpu.computed(to_device(gpu.on_host(each), "cuda")) for each in range(3)]
    results: Any = {
        "tensors": tensors,
        "dicts": [{"value": each, "name": "as it is"} for each in tensors],
        "tuples": [([each], "as it is") for each in tensors],
        "on their way": to_host(tensors),
    }[kind]
    found = sent(results, 3)
    if kind == "dicts":
        assert found[0]["name"] == "as it is"
        found = [each["value"] for each in found]
    if kind == "tuples":
        found = [each for (each,), _ in found]
    assert [(each.value, each.device.type) for each in found] == [(n, "cpu") for n in range(3)]
    assert gpu.synchronizations == 0


def test_other_results_stay_as_they_are_and_are_waited_for_if_no_stage_does(gpu: Gpu) -> None:
    results: list[Any] = [[], {}, "text", {"score": 1.0}]
    found = sent(results, 4)
    assert all(one is other for one, other in zip(found, results, strict=True))
    assert served(loaded(Returns, to_host([2, 4])), [None] * 2)[0].outputs == [2, 4]


# -- which batches a GPU may have failed at

FAULT = "CUDA error: device-side assert triggered"


class OnStub(ManagedModel):
    """Fails at the item "fail", as a kernel does: long after it was launched."""

    def init_model(self, gpu: Gpu) -> None:
        self.gpu = gpu

    def preprocess(self, items: list[str]) -> Tensor:
        self.gpu.now += 0.001
        return self.gpu.on_host(items)

    def forward(self, batch: Tensor) -> OnHost[Tensor]:
        self.gpu.now += 0.001
        return to_host(self.gpu.computed(to_device(batch, "cuda"), of=self._kernel))

    def postprocess(self, outputs: OnHost[Tensor]) -> list[str]:
        return list(outputs.wait().value)

    def _kernel(self, items: list[str]) -> list[str]:
        if "fail" in items:
            self.gpu.error = RuntimeError(FAULT)
        return items


def on_stub(gpu: Gpu, *items: str, together: bool = False) -> list[BatchReport]:
    """Have a worker compute batches of one item."""
    model = with_guard(loaded(OnStub, gpu), FAULT)
    return Batches(*([item] for item in items), together=together).serve(model, lambda: gpu.now)


@pytest.mark.parametrize("at", range(5))
@pytest.mark.parametrize("together", [True, False])
def test_the_batch_at_which_a_gpu_failed_is_a_suspect(gpu: Gpu, at: int, together: bool) -> None:
    """Whichever batch's call to the GPU is the first to raise the error."""
    items = ["good"] * 5
    items[at] = "fail"
    with pytest.raises(DeviceFailed) as caught:
        on_stub(gpu, *items, together=together)
    assert at in caught.value.batch_ids
    assert len(caught.value.batch_ids) <= (4 if together else 1)


def timers() -> int:
    gc.collect()
    return sum(type(each).__name__ == "StageTimer" for each in gc.get_objects())


@pytest.mark.parametrize("together", [True, False])
def test_batches_that_were_answered_are_forgotten(gpu: Gpu, together: bool) -> None:
    before = timers()
    reports = on_stub(gpu, *map(str, range(9)), together=together)
    assert [report.outputs for report in reports] == [[str(number)] for number in range(9)]
    assert timers() == before
