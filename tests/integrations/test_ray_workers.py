"""Workers on Ray that are lost, refused and late, with a Ray of which the test says what it does.

test_ray_faults.py has the same on a real cluster, as far as a real one can be brought to do it.
"""

from __future__ import annotations

import itertools
import math
import pickle
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from sticky_models import Gpu, make_error

import models
from conftest import PATIENCE, await_that
from ray_stub import RayStub, StubActor, died, error_of_ray
from service_streamer import RayStreamer, WorkerLost, WorkerStartError
from service_streamer.ray.clock import RemoteClock
from service_streamer.ray.times import times
from stream_models import Countdown, LongNumbers

Build = Callable[..., RayStreamer]


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> RayStub:
    stub = RayStub()
    stub.replace_ray(monkeypatch)
    return stub


@pytest.fixture
def build(stub: RayStub, monkeypatch: pytest.MonkeyPatch) -> Iterator[Build]:
    built: list[RayStreamer] = []

    def build(model: Any, *args: Any, **options: Any) -> RayStreamer:
        options = {"worker_timeout": PATIENCE, "num_gpus": 0, **options}
        built.append(RayStreamer(model, *args, **options))
        return built[-1]

    yield build
    monkeypatch.setattr(times, "last_calls", 0.0)  # of actors without a place
    for each in built:
        each.close(drain=False)
    for actor in stub.actors:
        actor.die(died())
    models.await_worker_threads()


def dies(error: Exception) -> Callable[[StubActor, Any], Any]:
    """The actor dies before it answers."""
    return lambda actor, answer: actor.die(error)


# -- how a worker was lost

PROCESS = "The actor is dead because its worker process has died. Worker exit type: "
CAUSES = "the process was killed by the OOM killer due to high memory usage"
GROUP = f"{PROCESS}Destroying worker since its placement group was removed."
REMOVED = "its node has died.\n\tthe actor's node was terminated expectedly: received SIGTERM"
FAILED = "its node has died.\n\tthe actor's node was terminated unexpectedly: health check"


#: The class of Ray's error, its text and attributes; what is told, and whether it is an outage.
LOSSES: list[tuple[str, str, dict[str, bool], str, bool]] = [
    ("NodeDiedError", "", {}, "its node died", True),
    ("LocalRayletDiedError", "", {}, "the raylet of its node died", True),
    ("OwnerDiedError", "", {}, "an object of the call was lost", True),
    ("ActorPlacementGroupRemoved", "", {}, "its placement group was removed", True),
    ("ActorDiedError", "the actor's node was preempted", {}, "its node was preempted", True),
    ("ActorDiedError", "any", {"preempted": True}, "its node was preempted", True),
    ("ActorDiedError", "its node has died.", {}, "its node died", True),
    ("ActorDiedError", REMOVED, {}, "its node was removed", True),
    ("ActorDiedError", FAILED, {}, "its node died", True),
    ("ActorDiedError", "killed by `ray.kill`.", {}, "it was killed by ray.kill", True),
    ("ActorDiedError", GROUP, {}, "its placement group was removed", True),
    ("ActorDiedError", f"{PROCESS}{CAUSES}", {}, "its process died", False),
    ("OutOfMemoryError", "its node ran out", {}, "Ray killed it, since its node ran", False),
    ("ActorUnavailableError", "Socket closed", {}, "it cannot be reached", False),
    ("ObjectStoreFullError", "", {}, "Ray's object store is full", False),
    ("OutOfDiskError", "", {}, "the disk is full to which Ray's object store spills", False),
    ("RayTaskError(ValueError)", "its node has died", {}, "a call to it failed", False),
    ("NobodyKnowsError", "what", {}, "NobodyKnowsError: what", False),
]


@pytest.mark.parametrize(
    ("kind", "text", "flags", "end", "is_outage"),
    LOSSES,
    ids=[f"{kind}, {end}" for kind, _, _, end, _ in LOSSES],
)
def test_a_lost_worker_is_told_with_its_end_and_counts_unless_its_items_are_no_reason(
    build: Build, stub: RayStub, kind: str, text: str, flags: dict[str, bool], end: str,
    is_outage: bool,
) -> None:  # fmt: skip
    error = error_of_ray(kind, text, **flags)
    stub.changes["compute"] += [dies(error)] * 3
    with pytest.raises(WorkerLost) as lost:
        build(models.double, retry=False).predict([1])
    assert end in str(lost.value)
    assert str(error) in str(lost.value.__cause__)
    streamer = build(models.double, max_attempts=2)  # of which an outage is none
    if is_outage:
        assert streamer.predict([1]) == [2]
    else:
        with pytest.raises(WorkerLost):
            streamer.predict([1])


@pytest.mark.parametrize(
    ("kind", "flags", "is_final"),
    [
        ("RuntimeEnvSetupError", {}, True),
        ("ActorUnschedulableError", {}, True),
        ("ActorDiedError", {"actor_init_failed": True}, True),
        ("ActorDiedError", {}, False),
    ],
)
def test_a_worker_that_is_lost_before_it_is_ready_starts_again_if_it_may_pass(
    build: Build, stub: RayStub, kind: str, flags: dict[str, bool], is_final: bool
) -> None:
    stub.has_places = False
    streamer = build(models.double)
    await_that(lambda: stub.actors)
    stub.has_places = True
    stub.actors[0].die(error_of_ray(kind, "pip failed", **flags))
    if is_final:
        with pytest.raises(WorkerStartError, match="was lost before it had loaded its model"):
            streamer.wait_ready()
    else:
        assert streamer.predict([1]) == [2]


def end_with(batch: list[Any]) -> Any:
    raise SystemExit(batch[0])


def test_a_model_that_ends_its_worker_is_told_with_the_code(build: Build) -> None:
    for code, expected in ((5, 5), ("in words", 1), (256 + 3, 3), (-1, 255)):
        with pytest.raises(WorkerLost, match=f"exited with code {expected}\\b"):
            build(end_with, max_attempts=1).predict([code])


STUB = Gpu()


def fail_device(batch: list[Any]) -> list[Any]:
    if batch == ["fail"]:
        STUB.error = make_error("assert")
        STUB.call()
    return batch


def test_a_device_that_fails_is_the_reason_of_the_end(
    build: Build, stub: RayStub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(STUB, "error", None)
    monkeypatch.setitem(sys.modules, "torch", STUB.module())
    streamer = build(fail_device, max_attempts=1)
    with pytest.raises(WorkerLost, match="device-side assert"):
        streamer.predict(["fail"])
    assert streamer.predict(["fine"]) == ["fine"]
    assert len(stub.actors) == 2


def with_one_more(answer: bytes) -> bytes:
    said, report = pickle.loads(answer)
    [outputs] = (part for part in report if isinstance(part, list))
    outputs.append(outputs[0])
    return pickle.dumps((said, report))


def test_a_worker_that_answers_nonsense_is_ended(build: Build, stub: RayStub) -> None:
    streamer = build(models.double, retry=False)
    for number, (nonsense, why) in enumerate([
        (lambda _: b"nonsense", "broke the protocol"),
        (lambda _: pickle.dumps((0.0, (4, "no such kind"))), "broke the protocol"),
        (with_one_more, "a batch of 1 with 2 results"),
    ]):  # fmt: skip
        stub.changes["compute"].append(lambda actor, answer, made=nonsense: made(answer))
        with pytest.raises(WorkerLost, match=why):
            streamer.predict([1])
        assert stub.actors[number].kills > 0
        assert streamer.predict([2]) == [4]


# -- calls to it


def test_an_answer_counts_that_comes_after_the_end_of_the_worker(
    build: Build, stub: RayStub
) -> None:
    computed, may_answer = threading.Event(), threading.Event()

    def late(actor: StubActor, answer: Any) -> Any:
        computed.set()
        may_answer.wait()
        return answer

    stub.changes["compute"].append(late)
    ended = threading.Event()
    stub.changes["watch"].append(lambda actor, code: (ended.set(), code)[1])
    streamer = build(models.double, retry=False)
    future = streamer.submit([1])
    computed.wait()
    stub.actors[0].end()
    ended.wait()
    may_answer.set()
    assert future.result() == [2]
    assert streamer.predict([2]) == [4]
    assert len(stub.actors) == 2


@pytest.mark.parametrize("kind", ["ObjectStoreFullError", "OutOfDiskError"])
def test_a_batch_for_which_ray_has_no_room_fails_alone(
    build: Build, stub: RayStub, kind: str
) -> None:
    stub.refusals["compute"].append(error_of_ray(kind, "full"))
    streamer = build(models.double, 1)
    with pytest.raises(WorkerLost, match=r"could not be sent to .*full") as refused:
        streamer.predict([1])
    assert type(refused.value.__cause__).__name__ == kind
    assert streamer.predict([2]) == [4]
    assert [actor.kills for actor in stub.actors] == [0]


@pytest.mark.parametrize("of_batch", [True, False])
def test_a_model_of_steps_that_misses_a_message_is_replaced(
    build: Build, stub: RayStub, of_batch: bool
) -> None:
    """It would wait for that message for ever, with all that come later."""
    streamer = build(Countdown, 4)
    full = error_of_ray("ObjectStoreFullError", "full")
    if of_batch:
        stub.refusals["take"].append(full)
        assert [*streamer.stream(3)] == [1, 2, 3]
    else:
        stream = streamer.stream(10**9, timeout=None)
        assert next(stream) == 1
        stub.refusals["take"] += [full]
        stream.close()
        await_that(lambda: len(stub.actors) == 2)
        assert [*streamer.stream(3)] == [1, 2, 3]
    assert [bool(actor.kills) for actor in stub.actors] == [True, False]


def test_messages_to_a_model_of_steps_are_taken_in_order_however_ray_brings_them(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    first_has_come, second_was_taken = threading.Event(), threading.Event()
    run = StubActor.run

    def late(actor: StubActor, future: Any, method: str, arguments: Any) -> None:
        number = arguments[0] if method == "take" else None
        if number == 0:
            first_has_come.set()
            second_was_taken.wait()
        run(actor, future, method, arguments)
        if number == 1:
            second_was_taken.set()

    monkeypatch.setattr(StubActor, "run", late)
    streamer = build(Countdown, 1)
    stream = streamer.stream(10**9, timeout=None)
    first_has_come.wait()
    stream.close()  # which would come before the stream
    assert [*streamer.stream(3)] == [1, 2, 3]


def test_a_stream_of_long_outputs_goes_on_after_its_worker_died(
    build: Build, stub: RayStub
) -> None:
    streamer = build(LongNumbers, 1)
    stream = streamer.stream({"n": 500}, max_buffered=2)
    got = [next(stream), next(stream)]
    stub.actors[0].die(died())
    assert [*map(int, [*got, *stream])] == [*range(1, 501)]
    assert len(stub.actors) == 2


def test_an_item_may_be_changed_as_soon_as_it_was_submitted(build: Build) -> None:
    array = np.arange(100_000)
    future = build(models.echo).submit([array])
    array[:] = -1
    [result] = future.result()
    assert np.array_equal(result, np.arange(100_000))


# -- killing it


def test_a_kill_does_not_wait_for_the_head(
    build: Build, stub: RayStub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(times, "last_calls", 0.0)
    stub.may_kill.clear()
    stub.changes["compute"].append(lambda actor, answer: b"nonsense")
    streamer = build(models.double, retry=False)
    with pytest.raises(WorkerLost):
        streamer.predict([1])
    assert streamer.predict([2]) == [4]
    assert stub.actors[0].kills == 0
    stub.may_kill.set()


@pytest.mark.parametrize("is_made", [True, False])
def test_an_actor_that_is_being_made_is_killed_when_it_is_there_or_takes_too_long(
    build: Build, stub: RayStub, monkeypatch: pytest.MonkeyPatch, is_made: bool
) -> None:
    """Ray may lose its CPU for ever if it is killed before."""
    monkeypatch.setattr(times, "making", 1e6 if is_made else 0.01)
    monkeypatch.setattr(times, "last_calls", 0.0)
    stub.has_places = False
    streamer = build(models.double)
    await_that(lambda: stub.actors)
    [actor] = stub.actors
    streamer.close(drain=False)
    if is_made:
        assert actor.kills == 0
        actor.place.set()
    await_that(lambda: actor.kills)


def test_an_actor_that_comes_after_the_close_is_killed(build: Build, stub: RayStub) -> None:
    stub.has_head.clear()
    build(models.double).close(drain=False)
    stub.has_head.set()
    await_that(lambda: stub.actors and stub.actors[0].kills)


@pytest.fixture
def no_threads(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """From its call on no thread for Ray can be started, or not the next ones.

    As at exit in Python 3.12, or at the user's limit.
    """
    start = threading.Thread.start

    def no_threads(count: int | None = None) -> None:
        left = itertools.count() if count is None else iter(range(count))

        def refuse(thread: threading.Thread) -> None:
            if thread.name.startswith("service_streamer Ray") and next(left, None) is not None:
                raise RuntimeError("can't create new thread at interpreter shutdown")
            start(thread)

        monkeypatch.setattr(threading.Thread, "start", refuse)

    return no_threads


def test_without_threads_no_worker_starts(
    build: Build, stub: RayStub, no_threads: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    streamer = build(models.double)
    streamer.wait_ready()
    no_threads()
    streamer.scale(2)
    await_that(lambda: "can't create new thread" in caplog.text)
    assert streamer.predict([1]) == [2]


def test_without_threads_a_close_waits_for_no_kill(
    build: Build, stub: RayStub, no_threads: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(times, "last_calls", 1e6)
    stub.has_places = False
    streamer = build(models.double)
    await_that(lambda: stub.actors)
    no_threads()
    streamer.close(drain=False)
    assert stub.actors[0].kills == 0


def test_an_actor_that_cannot_be_killed_now_is_killed_later(
    build: Build, stub: RayStub, no_threads: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would hold its place for as long as this process lives."""
    monkeypatch.setattr(times, "last_calls", 0.0)
    streamer = build(models.double, retry=False)
    streamer.wait_ready()

    def fail(actor: StubActor, answer: Any) -> Any:
        raise error_of_ray("ActorUnavailableError", "closed")

    stub.changes["compute"].append(fail)
    no_threads(1)
    with pytest.raises(WorkerLost):
        streamer.predict([1])
    await_that(lambda: stub.actors[0].kills == 1)


# -- its place


GPU = {"num_cpus": 1, "num_gpus": 1}
PLAIN = {"plain": {"CPU": 4.0}}
WITH_GPU = {"gpu": {"CPU": 4.0, "GPU": 2.0}}


@pytest.mark.parametrize(
    ("wanted", "nodes", "free", "why"),
    [
        (GPU, {}, {}, "it asks for 1 CPU, 1 GPU, and the cluster has no node"),
        (GPU, PLAIN, {"CPU": 3.0},
         "has too little GPU (free on 1 node: CPU 3 of 4, GPU 0 of 0)"),
        ({"num_cpus": 5, "num_gpus": 3}, PLAIN, {"CPU": 4.0}, "has too little CPU and GPU"),
        (GPU, PLAIN | {"bare": {"GPU": 2.0}}, {"CPU": 4.0, "GPU": 2.0},
         "no node has all of that (free on 2 nodes: CPU 4 of 4, GPU 2 of 2)"),
        ({"num_cpus": 8}, PLAIN | WITH_GPU, {"CPU": 8.0}, "no node has all of that"),
        (GPU, WITH_GPU, {"CPU": 4.0, "GPU": 0.5},
         "others hold its GPU (free on 1 node: CPU 4 of 4, GPU 0.5 of 2)"),
        # Ray leaves out what is used up.
        (GPU, WITH_GPU, {"GPU": 2.0}, "others hold its CPU (free on 1 node: CPU 0 of 4,"),
        ({"num_cpus": 0.25}, PLAIN, {"CPU": 4.0},
         "it asks for 0.25 CPU, and its process is being started, or its scheduling_strategy"),
        ({"num_cpus": 0}, PLAIN, {"CPU": 4.0}, "free on 1 node: nothing it asks for"),
        ({"resources": {"seat": 1}, "num_cpus": 0}, PLAIN, {}, "too little seat"),
    ],
)  # fmt: skip
def test_a_worker_without_a_place_says_what_is_missing_and_starts_when_it_has_one(
    build: Build, stub: RayStub, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
    wanted: dict[str, Any], nodes: dict[str, dict[str, float]], free: dict[str, float], why: str,
) -> None:  # fmt: skip
    monkeypatch.setattr(times, "placing", 0.0)
    stub.has_places, stub.nodes, stub.free = False, nodes, free
    streamer = build(models.double, **wanted)
    await_that(lambda: "has no place on the cluster yet: " in caplog.text)
    assert why in caplog.text
    stub.actors[0].place.set()
    assert streamer.predict([1]) == [2]


def test_nothing_is_said_of_places_after_the_close(
    build: Build, stub: RayStub, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(times, "placing", 0.0)
    monkeypatch.setattr(times, "last_calls", 0.0)
    stub.has_places = False
    stub.knows_nodes.clear()
    streamer = build(models.double)
    await_that(lambda: stub.actors)
    streamer.close(drain=False)
    stub.knows_nodes.set()
    assert not caplog.records


@pytest.mark.parametrize(("is_room", "looks"), [(False, 1), (True, 6)])
def test_a_worker_that_replaces_another_gets_time_if_there_is_room_for_both(
    build: Build, stub: RayStub, monkeypatch: pytest.MonkeyPatch, is_room: bool, looks: int
) -> None:
    """A busy host takes long to start a process; without room the other one must go first."""
    streamer = build(models.double)
    streamer.wait_ready()
    monkeypatch.setattr(times, "placing", 0.0)
    stub.nodes, stub.free = {"only": {"CPU": 2.0}}, {"CPU": float(is_room)}
    stub.has_places = False
    with pytest.raises(WorkerStartError, match="has no place beside the one that it replaces"):
        streamer.restart_workers()
    assert stub.looks == looks
    assert streamer.predict([1]) == [2]


def test_gpus_of_a_node_are_shared_as_ray_places_workers_and_hidden_from_others(
    build: Build, stub: RayStub
) -> None:
    for number, (num_gpus, shown, sharers) in enumerate([
        (0, "", ()), (0.5, None, (2,)), (1 / 3, None, (3,)), (0.6, None, (1,)),
        (0.4, None, (2,)), (1, None, ()), (2, None, ()),
    ]):  # fmt: skip
        stub.has_places = False
        build(models.double, num_gpus=num_gpus)
        await_that(lambda number=number: len(stub.actors) > number)
        boot = stub.actors[-1].boot
        place = boot.place
        assert (place.variables.get("CUDA_VISIBLE_DEVICES"), place.sharers) == (shown, sharers)


# -- the clock of another host, as this process learns it


def test_a_clock_is_learned_from_the_fastest_message() -> None:
    for ahead in (-5000.0, 7.0):
        clock = RemoteClock()
        for delay in (0.4, 0.002, 0.3):
            clock.learn(sent=ahead + 10.0, received=10.0 + delay)
        assert clock.local(ahead + 9.0) == pytest.approx(9.002, abs=1e-4)
        assert clock.local(-math.inf) == -math.inf
    clock = RemoteClock()
    clock.learn(sent=100.0, received=100.004)
    assert clock.local(99.5) == 99.5, "clocks of one host are one"


def test_a_clock_that_was_learned_long_ago_counts_less() -> None:
    """Clocks run apart, and a fast message of yesterday would be believed for ever."""
    clock = RemoteClock()
    clock.learn(sent=1000.0, received=0.0)
    drifted = 3600.0 * 5e-5
    clock.learn(sent=4600.0 - drifted, received=3600.0)
    assert clock.local(4600.0 - drifted) == pytest.approx(3600.0, abs=1e-6)
