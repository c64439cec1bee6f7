"""A Ray of this process: its actors are objects, whose calls run in threads of the test's own."""

from __future__ import annotations

import collections
import threading
import types
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest
import ray

ADDRESS = "127.0.0.1:5"


def error_of_ray(kind: str, text: str, **attributes: Any) -> Exception:
    """One of a class of this name."""
    error: Exception = type(kind, (Exception,), {})(text)
    vars(error).update(attributes)
    return error


def died(text: str = "it was killed by `ray.kill`.", **attributes: Any) -> Exception:
    return error_of_ray("ActorDiedError", text, **attributes)


class StubActor:
    """One actor, which is there when it has a place.

    Attributes:
        boot: what it was started with.
        place: set when it has one.
        kills: how often it was to be killed.
    """

    def __init__(self, stub: RayStub, kind: Any, boot: Any, spec: Any) -> None:
        self.boot = boot
        self.place = threading.Event()
        self.kills = 0
        self._stub = stub
        self._kind = kind
        self._spec = spec
        self._lock = threading.Lock()
        self._worker: Any = None
        self._open: set[Future[Any]] = set()
        self._end: Exception | None = None

    def __getattr__(self, method: str) -> Any:
        called = types.SimpleNamespace(remote=lambda *arguments: self._call(method, arguments))
        called.options = lambda **_: called
        return called

    def _call(self, method: str, arguments: tuple[Any, ...]) -> Any:
        if self._stub.refusals[method]:
            raise self._stub.refusals[method].popleft()
        future: Future[Any] = Future()
        with self._lock:
            self._open.add(future)
            end = self._end
        if end is not None:
            self.die(end)
        else:
            run = threading.Thread(target=self.run, args=(future, method, arguments))
            run.start()
        return types.SimpleNamespace(future=lambda: future)

    def run(self, future: Future[Any], method: str, arguments: tuple[Any, ...]) -> None:
        """Answer a call, in a thread of it."""
        self.place.wait()
        with self._lock:
            if self._worker is None and self._end is None:
                self._worker = self._kind(self.boot, self._spec)
        result, error = True, None
        try:
            if self._worker is not None and method != "__ray_ready__":
                result = getattr(self._worker, method)(*map(as_stored, arguments))
            if self._stub.changes[method]:
                change = self._stub.changes[method].popleft()
                result = change(self, as_stored(result))
        except Exception as raised:
            error = raised
        with self._lock:
            is_open = future in self._open
            self._open.discard(future)
        if is_open and error is not None:
            future.set_exception(error)
        elif is_open:
            future.set_result(as_stored(result))

    def die(self, error: Exception) -> None:
        """Its open calls fail, and all later ones."""
        with self._lock:
            self._end = error
            lost, self._open = self._open, set()
        self.place.set()
        if self._worker is not None:
            self._worker.stop()
        for future in lost:
            future.set_exception(error)

    def end(self) -> None:
        """Its worker ends when it has answered what it has."""
        self._worker.stop()


class RayStub:
    """Replaces the functions of Ray.

    Attributes:
        actors: all that were started.
        changes: by method, functions of actor and result that make another one of the next results,
            or raise.
        refusals: by method, what the next calls raise that are to be sent.
        has_head, may_kill: set while the head starts actors, and while it kills them.
        has_places: whether actors get one at once.
        nodes, free: what ``ray.nodes`` and ``ray.available_resources`` say.
        looks: how often these were asked.
        inits: the addresses that ``ray.init`` was called with.
        address: of the cluster that this process is connected to.
        when_connecting: called by ``ray.init``.
    """

    def __init__(self) -> None:
        self.actors: list[StubActor] = []
        self.changes: dict[str, Any] = collections.defaultdict(collections.deque)
        self.refusals: dict[str, Any] = collections.defaultdict(collections.deque)
        self.has_head = threading.Event()
        self.has_head.set()
        self.may_kill = threading.Event()
        self.may_kill.set()
        self.has_places = True
        self.nodes: dict[str, dict[str, float]] = {"only": {"CPU": 4.0}}
        self.free: dict[str, float] = {}
        self.knows_nodes = threading.Event()
        self.knows_nodes.set()
        self.looks = 0
        self.inits: list[str | None] = []
        self.address = ADDRESS
        self.is_connected = True
        self.when_connecting: Callable[[], None] = lambda: None

    def replace_ray(self, patch: pytest.MonkeyPatch) -> None:
        for name in ("init", "kill", "remote"):
            patch.setattr(ray, name, getattr(self, name))
        patch.setattr(ray, "is_initialized", lambda: self.is_connected)
        patch.setattr(ray, "put", lambda value: value)
        patch.setattr(ray, "nodes", self._nodes)
        patch.setattr(ray, "available_resources", lambda: self.free)
        patch.setattr(ray, "get_runtime_context", lambda: self)

    @property
    def gcs_address(self) -> str:
        return self.address

    def get_job_id(self) -> str:
        return "1"

    def init(self, *, address: str | None, runtime_env: Any) -> None:
        self.inits.append(address)
        self.when_connecting()
        self.is_connected = True

    def remote(self, **_: Any) -> Callable[[Any], Any]:
        return lambda kind: types.SimpleNamespace(
            remote=lambda boot, spec: self._start(kind, boot, spec)
        )

    def _start(self, kind: Any, boot: Any, spec: Any) -> StubActor:
        self.has_head.wait()
        self.actors.append(StubActor(self, kind, boot, spec))
        if self.has_places:
            self.actors[-1].place.set()
        return self.actors[-1]

    def kill(self, actor: StubActor, *, no_restart: bool) -> None:
        assert no_restart
        self.may_kill.wait()
        actor.kills += 1
        actor.die(died())

    def _nodes(self) -> list[dict[str, Any]]:
        self.knows_nodes.wait()
        self.looks += 1
        return [
            {"NodeManagerHostname": name, "Resources": resources, "Alive": True}
            for name, resources in self.nodes.items()
        ]


def as_stored(value: Any) -> Any:
    """What Ray's store makes of an object with buffers beside it: nobody may write to them."""
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], list):
        pickled, buffers = value
        return pickled, [memoryview(bytes(memoryview(each))).toreadonly() for each in buffers]
    return value
