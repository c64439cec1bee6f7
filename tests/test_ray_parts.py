"""The decisions of workers on a Ray cluster, without Ray."""

from __future__ import annotations

import math
import pickle
from typing import Any

import numpy as np
import pytest

from service_streamer.ray.apart import Apart, ApartEncoder, frame, unframed
from service_streamer.ray.clock import RemoteClock
from service_streamer.ray.losses import Verdict, judge
from service_streamer.ray.placing import Node, why_not_placed
from service_streamer.workers.memory.payload import LARGE

# -- why a worker has no place

GPU = {"CPU": 1.0, "GPU": 1.0}
PLAIN = Node("plain", {"CPU": 4.0})
WITH_GPU = Node("gpu", {"CPU": 4.0, "GPU": 2.0})
ONLY_GPU = Node("bare", {"GPU": 2.0})


@pytest.mark.parametrize(
    ("wanted", "nodes", "free", "why"),
    [
        (GPU, [], {}, "it asks for 1 CPU, 1 GPU, and the cluster has no node"),
        (
            GPU,
            [PLAIN],
            {"CPU": 3.0},
            "it asks for 1 CPU, 1 GPU, and the cluster has too little GPU "
            "(free on 1 node: CPU 3 of 4, GPU 0 of 0)",
        ),
        (
            {"CPU": 5.0, "GPU": 3.0},
            [PLAIN],
            {"CPU": 4.0},
            "it asks for 5 CPU, 3 GPU, and the cluster has too little CPU and GPU "
            "(free on 1 node: CPU 4 of 4, GPU 0 of 0)",
        ),
        (
            GPU,
            [PLAIN, ONLY_GPU],
            {"CPU": 4.0, "GPU": 2.0},
            "it asks for 1 CPU, 1 GPU, and no node has all of that "
            "(free on 2 nodes: CPU 4 of 4, GPU 2 of 2)",
        ),
        (
            {"CPU": 8.0},
            [PLAIN, WITH_GPU],
            {"CPU": 8.0},
            "it asks for 8 CPU, and no node has all of that (free on 2 nodes: CPU 8 of 8)",
        ),
        (
            GPU,
            [WITH_GPU],
            {"CPU": 4.0, "GPU": 0.5},
            "it asks for 1 CPU, 1 GPU, and others hold its GPU "
            "(free on 1 node: CPU 4 of 4, GPU 0.5 of 2)",
        ),
        (
            GPU,
            [WITH_GPU],
            {"GPU": 2.0},  # Ray leaves out what is used up
            "it asks for 1 CPU, 1 GPU, and others hold its CPU "
            "(free on 1 node: CPU 0 of 4, GPU 2 of 2)",
        ),
        (
            {"CPU": 0.25},
            [PLAIN],
            {"CPU": 4.0},
            "it asks for 0.25 CPU, and its process is being started, or its scheduling_strategy "
            "allows no node that has that free (free on 1 node: CPU 4 of 4)",
        ),
        (
            {},
            [PLAIN],
            {"CPU": 4.0},
            "it asks for nothing, and its process is being started, or its scheduling_strategy "
            "allows no node that has that free (free on 1 node: nothing it asks for)",
        ),
    ],
)
def test_it_says_what_is_missing(
    wanted: dict[str, float], nodes: list[Node], free: dict[str, float], why: str
) -> None:
    found = why_not_placed(wanted, nodes, free)
    assert found == (why, "is being started" in why)


# -- what an error means


@pytest.mark.parametrize(
    ("kind", "text", "flags", "expected"),
    [
        ("NotSent", "full", {}, (False, True, False)),
        ("ObjectStoreFullError", "", {}, (True, False, False)),
        ("OutOfDiskError", "", {}, (True, False, False)),
        ("ActorDiedError", "killed", {}, (True, False, False)),
        ("ActorDiedError", "x", {"failed_to_start": True}, (True, False, True)),
        ("ActorDiedError", "x", {"preempted": True}, (True, False, False)),
        ("ActorUnavailableError", "", {}, (True, False, False)),
        ("RuntimeEnvSetupError", "pip failed", {}, (True, False, True)),
        ("RayTaskError(ValueError)", "a\nValueError: b", {}, (True, False, False)),
        ("NobodyKnowsError", "what", {}, (True, False, False)),
    ],
)
def test_an_error_of_ray_is_a_loss_or_a_refusal(
    kind: str, text: str, flags: dict[str, bool], expected: tuple[bool, bool, bool]
) -> None:
    verdict = judge(kind, text, **flags)
    assert (verdict.is_gone, verdict.is_refused, verdict.is_final) == expected
    assert isinstance(verdict, Verdict)
    assert verdict.end


# -- the clock of another host


def test_clocks_of_one_host_are_one() -> None:
    clock = RemoteClock()
    clock.learn(sent=100.0, received=100.004)
    assert clock.local(99.5) == 99.5


def test_a_clock_that_is_ahead_or_behind_is_learned_from_the_fastest_message() -> None:
    for ahead in (-5000.0, 7.0):
        clock = RemoteClock()
        for delay in (0.4, 0.002, 0.3):
            clock.learn(sent=ahead + 10.0, received=10.0 + delay)
        assert clock.local(ahead + 9.0) == pytest.approx(9.002, abs=1e-4)


def test_what_was_learned_long_ago_counts_less() -> None:
    """Clocks run apart, and a fast message of yesterday would be believed for ever."""
    clock = RemoteClock()
    clock.learn(sent=1000.0, received=0.0)
    drifted = 3600.0 * 5e-5
    clock.learn(sent=4600.0 - drifted, received=3600.0)
    assert clock.local(4600.0 - drifted) == pytest.approx(3600.0, abs=1e-6)


def test_a_time_that_was_never_stays_never() -> None:
    clock = RemoteClock()
    clock.learn(sent=1000.0, received=0.0)
    assert clock.local(-math.inf) == -math.inf


# -- what goes beside the pickle

LARGE_ARRAY = np.arange(LARGE, dtype=np.int64)


def across(message: Any) -> Any:
    """Through Ray's store: a reader gets views of what is in it, which nobody may write to."""
    sent = frame(message)
    if isinstance(sent, tuple):
        pickled, buffers = sent
        sent = pickled, [memoryview(bytes(each.raw())).toreadonly() for each in buffers]
    return unframed(sent)


@pytest.mark.parametrize(
    "value", [None, True, 3, 2.5, "text", b"bytes", [1, {"a": (2,)}], np.arange(3)]
)
def test_small_payloads_are_bytes_and_all_come_back(value: Any) -> None:
    encoded = ApartEncoder().encode(value)
    assert isinstance(encoded, bytes)
    assert np.array_equal(pickle.loads(encoded), value)
    assert isinstance(frame((1, [encoded])), bytes), "one pickle, and nothing beside it"


def test_large_buffers_go_beside_the_pickle() -> None:
    encoded = ApartEncoder().encode({"a": LARGE_ARRAY, "small": 1})
    sent = frame((7, [encoded, encoded]))
    assert isinstance(sent, tuple)
    pickled, buffers = sent
    assert len(pickled) < 2000, "what is large is not in it"
    assert len(buffers) >= 1
    batch_id, (first, second) = across((7, [encoded, encoded]))
    assert batch_id == 7
    for each in (first, second):
        assert isinstance(each, Apart)
        assert np.array_equal(each.view()["a"], LARGE_ARRAY)


def test_an_item_may_be_changed_as_soon_as_it_is_encoded() -> None:
    array = LARGE_ARRAY.copy()
    encoded = ApartEncoder().encode(array)
    array[:] = -1
    (received,) = across([encoded])
    assert np.array_equal(received.view(), LARGE_ARRAY)


def test_items_are_views_that_nobody_may_write_to_and_results_are_the_caller_s_own() -> None:
    (received,) = across([ApartEncoder().encode(LARGE_ARRAY)])
    item = received.view()
    assert not item.flags.writeable
    result, another = received.load(), received.load()
    result[:] = 0
    assert np.array_equal(another, LARGE_ARRAY)
    assert np.array_equal(received.view(), LARGE_ARRAY)


def test_an_array_that_is_not_contiguous_arrives_whole() -> None:
    for value in (LARGE_ARRAY.reshape(2, -1).T, LARGE_ARRAY[::2], np.asfortranarray(LARGE_ARRAY)):
        encoded = ApartEncoder().encode(value)
        (received,) = across([encoded])
        found = pickle.loads(received) if isinstance(received, bytes) else received.load()
        assert np.array_equal(found, value)


def test_what_cannot_be_pickled_raises() -> None:
    with pytest.raises(TypeError, match="pickle"):
        ApartEncoder().encode(i for i in ())


_DEAD = "The actor is dead because its worker process has died. Worker exit type: "
_CAUSES = "the process was killed by the OOM killer due to high memory usage"


@pytest.mark.parametrize(
    ("kind", "text", "is_outage"),
    [
        ("NodeDiedError", "", True),
        ("LocalRayletDiedError", "", True),
        ("OwnerDiedError", "", True),
        ("ActorPlacementGroupRemoved", "", True),
        ("LeftCluster", "", True),
        ("ActorDiedError", "the actor's node was preempted", True),
        ("ActorDiedError", "its node has died.", True),
        ("ActorDiedError", "it was killed by `ray.kill`.", True),
        ("ActorDiedError", f"{_DEAD}{_CAUSES}", False),
        ("OutOfMemoryError", "its node ran out of memory", False),
        ("ActorUnavailableError", "Socket closed", False),
        ("ObjectStoreFullError", "", False),
        ("RayTaskError(ValueError)", "its node has died", False),
    ],
)
def test_what_has_nothing_to_do_with_the_items_is_an_outage(
    kind: str, text: str, is_outage: bool
) -> None:
    assert judge(kind, text).is_outage is is_outage
    assert judge(kind, text, preempted=True).is_outage
    assert not judge(kind, text, failed_to_start=True).is_outage


@pytest.mark.parametrize(
    ("kind", "text", "end"),
    [
        (
            "ActorDiedError",
            f"{_DEAD}SYSTEM_ERROR Worker exit detail: {_CAUSES}",
            "its process died",
        ),
        ("ActorDiedError", "it was killed by `ray.kill`.", "it was killed by ray.kill"),
        (
            "ActorDiedError",
            f"{_DEAD}Destroying worker since its placement group was removed.",
            "its placement group was removed",
        ),
        (
            "ActorDiedError",
            "its node has died.\n\tthe actor's node was terminated expectedly: received SIGTERM",
            "its node was removed",
        ),
        (
            "ActorDiedError",
            "its node has died.\n\tthe actor's node was terminated unexpectedly: health check",
            "its node died",
        ),
        ("OutOfMemoryError", "", "Ray killed it, since its node ran out of memory"),
        ("ActorUnavailableError", "Socket closed", "it cannot be reached"),
    ],
)
def test_the_words_of_ray_2_60_say_how_a_worker_ended(kind: str, text: str, end: str) -> None:
    assert judge(kind, text).end == end
