"""Workers on Ray as the engine sees them, with actors of which the test says what they answer."""

from __future__ import annotations

import math
import pickle
import signal
import socket
import threading
import types
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

import models
from service_streamer import RayStreamer, UnpicklableItem, WorkerLost, WorkerStartError
from service_streamer.pool import shared_pool
from service_streamer.pool.wishes import wishes_of
from service_streamer.ray import addresses, known_actor, leaving, pooled, ray_transport
from service_streamer.ray import cluster as ray_cluster
from service_streamer.ray.apart import frame, unframed
from service_streamer.ray.cluster import Actor, Done, NotSent, WorkerResources
from service_streamer.ray.placing import Node
from service_streamer.ray.ray_transport import RayTransport
from service_streamer.supervision.supervisor import Loss
from service_streamer.workers.model_spec import ModelSpec
from service_streamer.workers.protocol import (
    DROP,
    BatchReport,
    DeviceFailure,
    Failure,
    FromWorker,
    StartFailure,
    StepReport,
    WorkerStarted,
    encode,
)
from service_streamer.workers.transport import WorkerDied, WorkerReady, WorkerWaits

WHERE = ("host", 7, "3")


class ObjectStoreFullError(Exception):
    """As Ray's."""


class OutOfDiskError(Exception):
    """As Ray's."""


class ActorDiedError(Exception):
    """As Ray's."""


class OutOfMemoryError(Exception):
    """As Ray's."""


class ActorUnavailableError(Exception):
    """As Ray's."""


class FakeActor:
    """Keeps the calls that are open; the test answers them.

    Attributes:
        open: ``(method, arguments, done)`` of each, in their order.
    """

    def __init__(self) -> None:
        self.open: list[tuple[str, tuple[Any, ...], Done]] = []
        self.kills = 0
        self.can_be_killed = True
        self.has_place = False

    def call(self, done: Done, method: str, *arguments: Any, group: str = "") -> None:
        assert group in ("", "control", "intake")
        self.open.append((method, arguments, done))

    def kill(self, *, is_made: bool) -> bool:
        assert is_made == self.has_place
        self.kills += 1
        return self.can_be_killed

    def answer(self, method: str, result: Any = None, error: BaseException | None = None) -> Any:
        """Answer the first open call of a method; what it was called with."""
        at = [name for name, _, _ in self.open].index(method)
        _, arguments, done = self.open.pop(at)
        self.has_place |= method in ("where", "start") and error is None
        done(result, error)
        return arguments

    def die(self, error: BaseException) -> None:
        while self.open:
            self.open.pop()[2](None, error)


class FakeCluster:
    def __init__(self) -> None:
        self.actors: list[FakeActor] = []
        self.boot: Any = None
        self.has_head = threading.Event()
        self.has_head.set()
        self.knows_nodes = threading.Event()
        self.leave: Callable[[], None] = lambda: None

    def put(self, value: bytes) -> Any:
        return value

    def workers(self, request: WorkerResources) -> Callable[[Any, Any], FakeActor]:
        def start(boot: Any, spec: Any) -> FakeActor:
            self.has_head.wait()
            self.boot = boot
            self.actors.append(FakeActor())
            return self.actors[-1]

        return start

    def when_left(self, then: Callable[[], None]) -> Callable[[], None]:
        self.leave = then
        return lambda: None

    def nodes(self) -> tuple[list[Node], dict[str, float]]:
        self.knows_nodes.wait()
        return [Node("only", {"CPU": 1.0})], {}


class Ends:
    """A transport with one worker, and its actor."""

    def __init__(self, num_gpus: float = 1) -> None:
        cluster: Any = FakeCluster()
        request = WorkerResources(1, num_gpus, {}, None)
        self.transport = RayTransport(cluster, ModelSpec(models.echo, (), None), request)
        self.transport.start(0, 0, 1)
        self.cluster: FakeCluster = cluster
        while not (cluster.actors and cluster.actors[0].open):  # it is asked for in a thread
            assert self.transport.wait(None) == [], "and nothing is known of its place before"
        cluster.knows_nodes.set()
        self.actor: FakeActor = cluster.actors[0]

    def events(self) -> list[Any]:
        return self.transport.wait(0)

    def ready(self, places: int = 0) -> Ends:
        self.actor.answer("where", WHERE)
        self.actor.answer("start", (WHERE, message(WorkerStarted(places=places))))
        [event] = self.events()
        assert isinstance(event, WorkerReady)
        return self

    def send(self, batch_id: int, *items: Any) -> None:
        self.transport.send(0, batch_id, [*self.transport.encode(items)])


def not_sent() -> NotSent:
    """What is told of a call for which Ray has no room."""
    refusal = NotSent("Ray's object store is full")
    refusal.__cause__ = ObjectStoreFullError("full")
    return refusal


def message(said: FromWorker, sent: float = 0.0) -> Any:
    return frame((sent, encode(said)))


def report(batch_id: int, *outputs: Any) -> BatchReport:
    return BatchReport(batch_id, [pickle.dumps(each) for each in outputs])


@pytest.fixture
def ends() -> Ends:
    return Ends()


def test_a_worker_starts_answers_and_ends(ends: Ends) -> None:
    ends.ready()
    assert ends.transport.device(0) == "host:3"
    ends.send(5, "a", "b")
    [sent] = ends.actor.answer("compute", message(report(5, 1, 2)))
    assert unframed(sent) == (5, [pickle.dumps("a", 5), pickle.dumps("b", 5)])
    [event] = ends.events()
    assert (event.batch_id, event.slot) == (5, 0)
    assert ends.transport.decode(event.outputs) == [1, 2]
    ends.transport.stop(0)
    ends.actor.answer("stop")
    ends.actor.answer("watch", 0)
    [died] = ends.events()
    assert isinstance(died, WorkerDied)
    assert ends.transport.device(0) is None
    ends.send(6, "too late")
    assert ends.events() == []


def test_it_is_over_when_the_last_call_has_come_back(ends: Ends) -> None:
    """Ray may tell of the end before it brings the last answer."""
    ends.ready()
    ends.send(5, "a")
    ends.actor.answer("watch", 0)
    assert ends.events() == []
    ends.actor.answer("compute", message(report(5, 1)))
    [answered, died] = ends.events()
    assert answered.batch_id == 5
    assert isinstance(died, WorkerDied)


def test_a_start_is_told_where_even_if_that_call_comes_later(ends: Ends) -> None:
    failed = StartFailure(Failure(ValueError("no weights")), False)
    ends.actor.answer("start", (WHERE, message(failed)))
    [died] = ends.events()
    assert died.loss is Loss.START_FAILED
    assert "Ray worker 0 (pid 7 on host) could not load the model" in died.failure.text
    assert ends.actor.kills
    ends.actor.die(ActorDiedError("killed"))
    assert ends.events() == []


def test_a_worker_that_dies_takes_its_batches_along(ends: Ends) -> None:
    ends.ready()
    ends.send(5, "a")
    ends.actor.die(ActorDiedError("it has died, since its node has died"))
    [died] = ends.events()
    assert (died.slot, died.loss) == (0, Loss.OUTAGE)
    assert isinstance(died.failure.exception(), WorkerLost)
    assert "its node died" in died.failure.text
    assert "its node has died" in str(died.failure.exception().__cause__)


def test_one_that_ray_kills_for_lack_of_memory_has_crashed(ends: Ends) -> None:
    """What it computed may be the reason, so it counts as an attempt."""
    ends.ready()
    ends.send(5, "a")
    ends.actor.die(OutOfMemoryError("Task was killed due to the node running low on memory"))
    [died] = ends.events()
    assert (died.slot, died.loss) == (0, Loss.CRASHED)
    assert "Ray killed it, since its node ran out of memory" in died.failure.text
    assert isinstance(died.failure.exception().__cause__, OutOfMemoryError)


def test_a_call_that_completed_though_its_error_came_goes_with_its_worker(ends: Ends) -> None:
    """Its answer was lost with the connection, and nobody knows whether it was computed."""
    ends.ready()
    ends.send(5, "a")
    ends.send(6, "b")
    ends.actor.answer("compute", None, ActorUnavailableError("Socket closed"))
    assert ends.events() == []
    assert ends.actor.kills
    ends.actor.answer("compute", message(report(6, 1)))
    [answered] = ends.events()
    assert answered.batch_id == 6, "and what still comes counts"
    ends.actor.die(ActorDiedError("killed"))
    [died] = ends.events()
    assert died.loss is Loss.CRASHED
    assert "it cannot be reached" in died.failure.text


def test_one_that_dies_before_it_is_ready_did_not_start(ends: Ends) -> None:
    ends.actor.die(ActorDiedError("killed"))
    [died] = ends.events()
    assert died.loss is Loss.DIED_STARTING
    assert isinstance(died.failure.exception(), WorkerStartError)


def test_a_batch_that_ray_refuses_fails_alone(ends: Ends) -> None:
    ends.ready()
    ends.send(5, "a")
    ends.send(6, "b")
    ends.actor.answer("compute", None, not_sent())
    ends.actor.answer("compute", message(report(6, 1)))
    [refused, answered] = ends.events()
    assert "Ray's object store is full" in refused.failure.text
    assert isinstance(refused.failure.exception().__cause__, ObjectStoreFullError)
    assert (refused.batch_id, answered.batch_id) == (5, 6)
    assert ends.actor.kills == 0


def test_what_has_failed_after_it_was_sent_gives_the_worker_up(ends: Ends) -> None:
    ends.ready()
    ends.send(5, "a")
    ends.actor.answer("compute", None, OutOfDiskError("of its node"))
    assert ends.events() == []
    assert ends.actor.kills
    ends.actor.die(ActorDiedError("killed"))
    [died] = ends.events()
    assert (died.loss, died.slot) == (Loss.CRASHED, 0)
    assert "the disk is full to which Ray's object store spills" in died.failure.text


@pytest.mark.parametrize("of_batch", [True, False])
def test_a_refused_message_to_a_model_of_steps_gives_the_worker_up(
    ends: Ends, of_batch: bool
) -> None:
    """It would wait for the number that is missing, with all that come later."""
    ends.ready(places=4)
    if of_batch:
        ends.send(5, "a")
    else:
        ends.transport.tell(0, DROP, [5])
    ends.actor.answer("take", None, not_sent())
    assert ends.events() == []
    assert ends.actor.kills
    ends.actor.die(ActorDiedError("killed"))
    [died] = ends.events()
    assert died.loss is Loss.CRASHED
    assert "Ray's object store is full" in died.failure.text


@pytest.mark.parametrize(
    ("error", "kind"), [(ObjectStoreFullError("full"), NotSent), (ValueError("no"), ValueError)]
)
def test_an_actor_says_whether_a_call_was_not_sent(
    monkeypatch: pytest.MonkeyPatch, error: Exception, kind: type[Exception]
) -> None:
    def remote() -> None:
        raise error

    monkeypatch.setattr(ray_cluster.ray, "is_initialized", lambda: True)
    handle = types.SimpleNamespace(watch=types.SimpleNamespace(remote=remote))
    told: list[Any] = []
    Actor(handle).call(lambda *said: told.append(said), "watch")
    [(result, said)] = told
    assert (result, type(said)) == (None, kind)


def test_a_kill_does_not_wait_for_the_head(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, has_head, ended = threading.Event(), threading.Event(), threading.Event()

    def kill(_: Any, *, no_restart: bool) -> None:
        assert no_restart
        begun.set()
        has_head.wait()
        ended.set()

    monkeypatch.setattr(ray_cluster.ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray_cluster.ray, "kill", kill)
    assert Actor(None).kill(is_made=True)
    begun.wait()
    assert not ended.is_set()
    has_head.set()
    ended.wait()


def test_one_that_is_being_made_is_killed_when_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray may lose its CPU for ever otherwise."""
    asked, killed = threading.Event(), threading.Event()
    is_there: Future[bool] = Future()

    class Handle:
        def __getattr__(self, name: str) -> Any:
            assert name == "__ray_ready__"
            asked.set()
            sent = types.SimpleNamespace(future=lambda: is_there)
            return types.SimpleNamespace(remote=lambda: sent)

    monkeypatch.setattr(ray_cluster.ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray_cluster.ray, "kill", lambda *_, **__: killed.set())
    assert Actor(Handle()).kill(is_made=False)
    asked.wait()
    assert not killed.is_set()
    is_there.set_result(True)
    killed.wait()


def test_one_that_is_never_made_is_killed_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    killed = threading.Event()
    monkeypatch.setattr(ray_cluster.ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray_cluster.ray, "kill", lambda *_, **__: killed.set())
    monkeypatch.setattr(ray_cluster, "_MAKING", 0.01)
    monkeypatch.setattr(Actor, "call", lambda *_: None)  # Ray has no place for it
    assert Actor(None).kill(is_made=False)
    killed.wait()


@pytest.fixture
def no_threads(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From its call on none can be started: as at exit in Python 3.12, or at the user's limit."""

    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    return lambda: monkeypatch.setattr(threading.Thread, "start", start)


def test_without_a_thread_there_is_no_kill(no_threads: Callable[[], None]) -> None:
    no_threads()
    assert Actor(None).kill(is_made=True) is False


def test_without_a_thread_no_worker_starts(ends: Ends, no_threads: Callable[[], None]) -> None:
    no_threads()
    ends.transport.start(1, 1, 2)
    [died] = ends.events()
    assert (died.slot, died.loss) == (1, Loss.START_FAILED)
    assert "can't create new thread" in died.failure.text


def test_a_close_does_not_wait_for_one_that_cannot_be_killed(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray ends it with this process, and nothing comes of it before."""
    ends.actor.can_be_killed = False
    monkeypatch.setattr(ends.transport, "wait", lambda _: pytest.fail("it waits"))
    ends.transport.close(0.0)


def test_one_that_cannot_be_killed_now_is_killed_again(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would hold its place for as long as this process lives."""
    monkeypatch.setattr(ray_transport, "_LAST_CALLS", 0.0)
    ends.ready()
    ends.actor.can_be_killed = False
    ends.send(5, "a")
    ends.actor.answer("compute", None, ActorUnavailableError("Socket closed"))
    [died] = ends.events()
    assert died.loss is Loss.CRASHED
    assert ends.actor.kills == 2


def test_nothing_is_said_of_places_once_it_closes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ray_transport, "_PLACING", 0.0)
    monkeypatch.setattr(ray_transport, "_LAST_CALLS", 0.0)
    ends = Ends()
    for thread in threading.enumerate():
        if thread.name == "service_streamer Ray question":
            thread.join()
    ends.transport.close(0.0)
    assert not caplog.records


def test_one_without_a_place_says_so_and_when_it_has_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ray_transport, "_PLACING", 0.0)
    ends = Ends()
    [waits] = await_events(ends)
    assert waits == WorkerWaits(0)
    ends.actor.answer("where", WHERE)
    [placed] = ends.events()
    assert placed == WorkerWaits(0, has_place=True)
    ends.actor.answer("start", (WHERE, message(WorkerStarted())))
    [ready] = ends.events()
    assert isinstance(ready, WorkerReady), "and nothing of its place again"


@pytest.mark.parametrize("is_room", [False, True])
def test_one_that_replaces_another_gets_time_if_there_is_room(
    ends: Ends, monkeypatch: pytest.MonkeyPatch, is_room: bool
) -> None:
    """A busy host takes long to start a process; without room the other one must go first."""
    looks = 0

    def look() -> Any:
        nonlocal looks
        looks += 1
        return [Node("only", {"CPU": 2.0, "GPU": 2.0})], {"CPU": 1.0, "GPU": float(is_room)}

    monkeypatch.setattr(ray_transport, "_PLACING", 0.0)
    monkeypatch.setattr(ends.cluster, "nodes", look)
    ends.ready()
    ends.transport.start(1, 0, 1)
    [died] = await_events(ends)
    assert (died.slot, died.loss) == (1, Loss.NO_MEMORY)
    assert "has no place beside the one that it replaces: " in str(died.failure.exception())
    assert looks == (ray_transport._LOOKS if is_room else 1)


def await_events(ends: Ends) -> list[Any]:
    """What is told next, which another thread finds out."""
    while not (events := ends.transport.wait(None)):
        pass
    return events


def test_an_actor_that_comes_after_the_close_is_killed(ends: Ends) -> None:
    ends.cluster.has_head.clear()
    before = {*threading.enumerate()}
    ends.transport.start(1, 1, 2)
    [start] = {*threading.enumerate()} - before
    ends.actor.die(ActorDiedError("killed"))
    ends.transport.close(0.0)
    ends.cluster.has_head.set()
    start.join()
    [_, late] = ends.cluster.actors
    assert late.kills == 1


@pytest.mark.parametrize(("num_gpus", "shown"), [(0, ""), (0.5, None), (1, None), (2, None)])
def test_a_worker_without_a_gpu_hides_those_of_its_node(num_gpus: float, shown: str | None) -> None:
    assert Ends(num_gpus).cluster.boot.variables.get("CUDA_VISIBLE_DEVICES") == shown


@pytest.mark.parametrize(
    ("num_gpus", "sharers"),
    [(0, ()), (0.5, (2,)), (1 / 3, (3,)), (0.6, (1,)), (0.4, (2,)), (1, ())],
)
def test_as_many_workers_share_a_gpu_as_ray_places_there(
    num_gpus: float, sharers: tuple[int, ...]
) -> None:
    assert Ends(num_gpus).cluster.boot.sharers == sharers


def test_an_answer_that_is_none_ends_the_worker(ends: Ends) -> None:
    ends.ready()
    ends.actor.answer("watch", 5)
    [died] = ends.events()
    assert "exited with code 5" in died.failure.text


@pytest.mark.parametrize("said", [b"nonsense", frame((0.0, (4, "no such kind")))])
def test_nonsense_ends_the_worker(ends: Ends, said: Any) -> None:
    ends.ready()
    ends.send(5, "a")
    ends.actor.answer("compute", said)
    assert ends.events() == []
    assert ends.actor.kills
    ends.actor.die(ActorDiedError("killed"))
    [died] = ends.events()
    assert "broke the protocol" in died.failure.text


def test_another_number_of_results_than_items_breaks_the_protocol(ends: Ends) -> None:
    ends.ready()
    ends.send(5, "a")
    ends.actor.answer("compute", message(report(5, 1, 2)))
    ends.events()
    ends.actor.die(ActorDiedError("killed"))
    [died] = ends.events()
    assert "a batch of 1 with 2 results" in died.failure.text


def test_one_that_hangs_says_where_before_it_is_killed(ends: Ends) -> None:
    ends.ready()
    ends.transport.kill(0, "it hangs")
    ends.transport.kill(0, "it still hangs")
    assert ends.actor.kills == 0
    ends.actor.answer("stacks", "in predict")
    ends.events()
    assert ends.actor.kills == 1
    ends.actor.die(ActorDiedError("killed"))
    [died] = ends.events()
    assert "it hangs" in died.failure.text
    assert died.failure.remote_traceback == "in predict"


def test_a_failed_device_is_the_reason_of_the_end(ends: Ends) -> None:
    ends.ready()
    ends.send(5, "a")
    ends.actor.answer("compute", message(DeviceFailure(5, "device-side assert", "its text")))
    ends.actor.answer("watch", 3)
    ends.events()
    ends.actor.die(ActorDiedError("killed"))
    [died] = ends.events()
    assert (died.loss, died.batch_id, died.report) == (Loss.DEVICE_FAILED, 5, "its text")


def test_a_model_of_steps_gets_numbered_messages_and_reports(ends: Ends) -> None:
    ends.ready(places=4)
    ends.send(5, "a")
    ends.transport.tell(0, DROP, [5])
    number, sent = ends.actor.answer("take")
    assert (number, unframed(sent)[0]) == (0, 5)
    number, sent = ends.actor.answer("take")
    assert (number, unframed(sent)) == (1, (DROP, [5]))
    step = StepReport({}, [report(5, 1)])
    ends.actor.answer("reports", [message(step)])
    [event] = ends.events()
    assert [each.batch_id for each in event.done] == [5]
    assert "reports" in [method for method, _, _ in ends.actor.open], "the next are asked for"


def test_times_are_those_of_this_host(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    ends.ready()
    ends.send(5, "a")
    monkeypatch.setattr(known_actor, "time", types.SimpleNamespace(monotonic=lambda: 100.0))
    begun = report(5, 1)
    begun.started_at = 9_000.0 - 2.0
    ends.actor.answer("compute", message(begun, sent=9_000.0))
    [event] = ends.events()
    assert event.started_at == pytest.approx(98.0)
    assert math.isfinite(event.started_at)


def test_an_unpicklable_item_is_refused(ends: Ends) -> None:
    with pytest.raises(UnpicklableItem, match="item 1 of the batch, of type generator"):
        ends.transport.encode([1, (i for i in ())])


def test_closing_ends_all_and_says_nothing(ends: Ends) -> None:
    ends.transport.kill(0, "it has no place")
    ends.transport.close(0.0)
    ends.transport.close(0.0)
    assert ends.actor.kills
    assert ends.transport.wait(0) == []


def test_whoever_leaves_the_cluster_loses_all_and_can_start_no_more(ends: Ends) -> None:
    """Ray forgets the open calls then: none of them comes back."""
    ends.ready()
    ends.send(5, "a")
    ends.cluster.leave()
    [died] = ends.events()
    assert died.loss is Loss.OUTAGE
    assert "this process has left its Ray cluster" in died.failure.text
    ends.transport.start(1, 0, 1)
    [refused] = ends.events()
    assert (refused.slot, refused.loss) == (1, Loss.NEVER_AGAIN)
    assert "build a new RayStreamer after ray.shutdown()" in refused.failure.text
    ends.transport.close(0)


def test_at_exit_all_are_closed_though_one_cannot_be(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(leaving, "_last", [])
    wanted: set[Callable[[], None]] = {lambda: None}
    monkeypatch.setattr(leaving, "_wanted", {threading.current_thread(): wanted})
    closed: list[str] = []

    def fail() -> None:
        raise OSError("no room")

    leaving.when_exiting(lambda: closed.append("first"))
    leaving.when_exiting(fail)
    leaving.when_exiting(lambda: closed.append("last"))
    leaving._exit()
    assert closed == ["first", "last"]
    assert "OSError: no room" in caplog.text
    assert not wanted


def not_connected(monkeypatch: pytest.MonkeyPatch, init: Callable[..., None]) -> None:
    """As if this process had no cluster; ``init`` instead of ``ray.init``."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", "/nowhere")
    monkeypatch.setattr(ray_cluster.ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray_cluster.ray, "init", init)
    monkeypatch.setattr(ray_cluster, "_session", lambda: "1")


NAMES = {"localhost": "127.0.0.1", "head": "192.0.2.7"}


@pytest.mark.parametrize(
    ("address", "other", "expected"),
    [
        ("127.0.0.1:5", "127.0.0.1:5", True),
        ("localhost:5", "127.0.0.1:5", True),
        ("127.0.0.1:5", "127.0.0.2:5", True),  # both are this machine's
        ("localhost:6", "127.0.0.1:5", False),
        ("head:5", "192.0.2.7:5", True),
        ("192.0.2.7:5", "head:5", True),
        ("head:5", "192.0.2.8:5", False),
        ("127.0.0.1:5", "head:5", False),
        ("nobody:5", "127.0.0.1:5", False),
        ("nobody:5", "nobody:5", True),
        ("head", "192.0.2.7:5", False),
        ("192.0.2.7:", "192.0.2.7:5", False),
    ],
)
def test_addresses_of_one_head_are_the_same(
    monkeypatch: pytest.MonkeyPatch, address: str, other: str, expected: bool
) -> None:
    def getaddrinfo(host: str, port: None, **_: Any) -> Any:
        assert port is None
        ip = NAMES.get(host, host)
        if not ip[0].isdecimal():
            raise socket.gaierror
        return [(socket.AF_INET, socket.SOCK_DGRAM, 0, "", (ip, 0))]

    def anywhere(self: socket.socket, _: Any) -> None:
        """As a kernel with net.ipv4.ip_nonlocal_bind."""

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    monkeypatch.setattr(socket.socket, "bind", anywhere)
    assert addresses.is_same(address, other) is expected


def test_all_addresses_of_this_machine_are_one() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.200", 9))  # which sends nothing
        except OSError:
            pytest.skip("this machine has no network")
        own = probe.getsockname()[0]
    assert addresses.is_same(f"{own}:5", "127.0.0.1:5")


def connected(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    """As if this process were connected there."""
    context = types.SimpleNamespace(gcs_address=address, get_job_id=lambda: "1")
    monkeypatch.setattr(ray_cluster.ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray_cluster.ray, "get_runtime_context", lambda: context)


def test_another_name_of_its_cluster_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    connected(monkeypatch, "127.0.0.1:5")
    ray_cluster.Cluster("127.0.0.2:5")
    with pytest.raises(RuntimeError, match="connected to another Ray cluster than"):
        ray_cluster.Cluster("127.0.0.1:6")


def test_a_shared_pool_goes_to_the_cluster_of_this_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """But processes want the same pool, whether they are connected or not."""
    taken: list[str | None] = []
    wanted: list[dict[str, str]] = []

    def pool_clients(_: str, model: Any, options: Any, *, transport: Any, **__: Any) -> Any:
        pickle.loads(pickle.dumps(transport))(b"", options, None)
        wanted.append(wishes_of(model, options, "1"))
        raise InterruptedError

    def cluster(address: str | None, _: Any) -> Any:
        taken.append(address)

    monkeypatch.setattr(pooled, "Cluster", cluster)
    monkeypatch.setattr(pooled, "PooledRayTransport", lambda *_: None)

    monkeypatch.setattr(shared_pool, "pool_clients", pool_clients)
    for address in (None, "10.0.0.2:6379"):
        connected(monkeypatch, "10.0.0.1:6379")
        with pytest.raises(InterruptedError):
            RayStreamer(models.echo, shared="a", address=address)
    not_connected(monkeypatch, lambda **_: None)
    with pytest.raises(InterruptedError):
        RayStreamer(models.echo, shared="a")
    assert taken == ["10.0.0.1:6379", "10.0.0.2:6379", None]
    assert wanted[0] == wanted[2] != wanted[1]


@pytest.mark.parametrize("address", [None, "auto"])
@pytest.mark.parametrize("is_there", [True, False])
def test_a_cluster_that_has_ended_is_not_connected_to(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, address: str | None, is_there: bool
) -> None:
    """Ray would look for the last one that was started here, for more than a minute."""
    inits: list[Any] = []
    not_connected(monkeypatch, lambda **given: inits.append(given["address"]))
    running(monkeypatch)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    (tmp_path / "ray").mkdir()
    with socket.socket() as head:  # its port is nobody else's
        head.bind(("127.0.0.1", 0))
        if is_there:
            head.listen()
        file = tmp_path / "ray" / "ray_current_cluster"
        file.write_text(f"127.0.0.1:{head.getsockname()[1]}\n")
        if is_there:
            ray_cluster.Cluster(address)
        else:
            with pytest.raises(ConnectionError, match=rf"ray stop or delete {file}"):
                ray_cluster.Cluster(address)
            ray_cluster.Cluster("local")
    assert inits == ([address] if is_there else ["local"])


def running(monkeypatch: pytest.MonkeyPatch, *addresses: str) -> None:
    """As if the heads of these clusters ran on this machine, and no others."""
    services = ray_cluster.ray._private.services
    monkeypatch.setattr(services, "find_gcs_addresses", lambda: frozenset(addresses))


def test_of_two_clusters_that_were_started_here_the_one_that_runs_is_taken(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    inits: list[Any] = []
    not_connected(monkeypatch, lambda **given: inits.append(given["address"]))
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    (tmp_path / "ray").mkdir()
    with socket.socket() as head:
        head.bind(("127.0.0.1", 0))  # and does not listen: it is not there any more
        (tmp_path / "ray" / "ray_current_cluster").write_text(f"127.0.0.1:{head.getsockname()[1]}")
        running(monkeypatch, "192.0.2.7:6379")
        ray_cluster.Cluster("auto")
        running(monkeypatch, "192.0.2.7:6379", "192.0.2.8:6379")  # of several, Ray takes the last
        with pytest.raises(ConnectionError, match="it was the last one"):
            ray_cluster.Cluster("auto")
    assert inits == ["auto"]


@pytest.mark.parametrize("address", [None, "auto"])
def test_the_address_of_the_environment_is_looked_for(
    monkeypatch: pytest.MonkeyPatch, address: str | None
) -> None:
    not_connected(monkeypatch, lambda **_: None)
    with socket.socket() as head:
        head.bind(("127.0.0.1", 0))
        monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{head.getsockname()[1]}")
        with pytest.raises(ConnectionError, match="there is no Ray cluster at"):
            ray_cluster.Cluster(address)
    monkeypatch.setenv("RAY_ADDRESS", "ray://127.0.0.1:10001")
    with pytest.raises(RuntimeError, match="does not work over Ray Client"):
        ray_cluster.Cluster(address)


def test_what_the_program_does_on_sigterm_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    def own(*_: object) -> None:
        """The program's handler."""

    def init(**_: Any) -> None:
        signal.signal(signal.SIGTERM, lambda *_: None)

    before = signal.signal(signal.SIGTERM, own)
    try:
        not_connected(monkeypatch, init)
        ray_cluster.Cluster(None)
        assert signal.getsignal(signal.SIGTERM) is own
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_cluster_of_another_version_cannot_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**_: Any) -> None:
        raise RuntimeError("Version mismatch")

    not_connected(monkeypatch, init)
    with pytest.raises(ray_cluster.UnusableCluster, match="Version mismatch"):
        ray_cluster.Cluster("local")


def test_a_cluster_that_refuses_the_token_cannot_be_connected_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def init(**_: Any) -> None:
        raise ray_cluster.ray.exceptions.AuthenticationError("wrong token")

    not_connected(monkeypatch, init)
    with pytest.raises(ConnectionError, match="wrong token"):
        ray_cluster.Cluster(None)
