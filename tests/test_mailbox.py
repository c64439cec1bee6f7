"""The mailbox of an event loop: whoever is interrupted where, all is delivered once."""

from __future__ import annotations

import asyncio
import functools
import itertools
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any

import pytest

import service_streamer.engine.backend as backend
from service_streamer.engine.backend import Mailbox


class Loop:
    """Keeps what it is to call, in order."""

    def __init__(self) -> None:
        self.callbacks: list[Callable[[], None]] = []
        self.is_closed = False

    def call_soon_threadsafe(self, callback: Callable[[], None]) -> None:
        if self.is_closed:
            raise RuntimeError("Event loop is closed")
        self.callbacks.append(callback)

    def call_soon(self, callback: Callable[[], None]) -> None:
        self.callbacks.append(callback)

    def run(self) -> int:
        """Call what is there, and what comes by that; how many calls that were."""
        count = 0
        while self.callbacks:
            self.callbacks.pop(0)()
            count += 1
        return count


class Named:
    """A future, in the place of asyncio's."""

    def __init__(self, name: str, seen: list[str]) -> None:
        self.name, self.seen = name, seen

    def done(self) -> bool:
        return False

    def set_result(self, _: Any) -> None:
        self.seen.append(self.name)


class World:
    """A mailbox, and the names of the futures that have got their results."""

    def __init__(self, at_once: int = sys.maxsize) -> None:
        self.loop = Loop()
        self.mailbox = Mailbox(self.loop, at_once)  # type: ignore[arg-type]
        self.seen: list[str] = []
        self.names: list[str] = []

    def put(self, name: str) -> None:
        self.names.append(name)
        self.mailbox.put(Named(name, self.seen), None)  # type: ignore[arg-type]

    def post(self, *names: str) -> None:
        for name in names:
            self.put(name)
        self.mailbox.deliver_soon()


def test_what_comes_at_one_time_is_delivered_at_once() -> None:
    world = World()
    world.post("a", "b")
    world.post("c")
    assert world.loop.run() == 1
    assert world.seen == ["a", "b", "c"]
    world.put("d")
    world.post("e")
    assert world.loop.run() == 1
    assert world.seen[3:] == ["d", "e"]


def test_between_some_outcomes_and_the_next_the_loop_may_do_something_else() -> None:
    world = World(at_once=2)
    for name in "abcde":
        world.post(name)
    assert len(world.loop.callbacks) == 1
    for seen in ("ab", "abcd", "abcde"):
        world.loop.callbacks.append(lambda: None)
        world.loop.callbacks.pop(0)()
        assert world.seen == [*seen]
        assert len(world.loop.callbacks) == (1 if seen == "abcde" else 2), "behind the other one"
        world.loop.callbacks.pop(0)()
    assert world.loop.run() == 0
    world.post("f")
    assert world.loop.run() == 1


def test_a_loop_that_is_closed_keeps_nothing() -> None:
    world = World()
    world.loop.is_closed = True
    kept = Named("a", world.seen)
    forgotten = weakref.ref(kept)
    world.mailbox.put(kept, None)  # type: ignore[arg-type]
    world.mailbox.deliver_soon()
    del kept
    assert forgotten() is None
    world.loop.is_closed = False
    world.post("c")
    assert world.loop.run() == 1
    assert world.seen == ["c"]


def test_a_future_that_is_done_is_left_alone() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        mailbox, cancelled, other = Mailbox(loop), loop.create_future(), loop.create_future()
        mailbox.put(cancelled, ([1], None))
        mailbox.put(other, ([2], None))
        mailbox.deliver_soon()
        cancelled.cancel()
        assert await other == ([2], None)

    asyncio.run(main())


# -- two threads, of which each may be interrupted after every line


class Actor:
    """A thread that executes one line of the mailbox when it is told to."""

    def __init__(self, function: Callable[[], object]) -> None:
        self._may, self._has = threading.Semaphore(0), threading.Semaphore(0)
        self._function = function
        self.is_over = False
        self.lines = 0
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        self._has.acquire()

    def _run(self) -> None:
        sys.settrace(self._trace)
        try:
            self._function()
        finally:
            sys.settrace(None)
            self.is_over = True
            self._has.release()

    def _trace(self, frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code.co_filename != backend.__file__:
            return None
        if event == "line":
            self._has.release()
            self._may.acquire()
            self.lines += 1
        return self._trace

    def step(self) -> None:
        if not self.is_over:
            self._may.release()
            self._has.acquire()

    def finish(self) -> None:
        while not self.is_over:
            self.step()
        self._thread.join()


def orders(*lines: int) -> Iterator[list[int]]:
    """All in which two actors may execute so many lines."""
    count = sum(lines)
    for first in itertools.combinations(range(count), lines[0]):
        chosen = set(first)
        yield [0 if i in chosen else 1 for i in range(count)]


def run(world: World, order: Iterable[int], *doings: Callable[[World], Any]) -> list[int]:
    """How many lines each has executed."""
    actors = [Actor(functools.partial(doing, world)) for doing in doings]
    for number in order:
        actors[number].step()
    for actor in actors:
        actor.finish()
    return [actor.lines for actor in actors]


Doing = Callable[[World], Any]


@pytest.mark.parametrize(
    ("has_begun", "first", "second"),
    [
        pytest.param(True, lambda w: w.post("a"), lambda w: w.loop.run(), marks=pytest.mark.long),
        (True, lambda w: w.post("a"), lambda w: w.post("b")),
        (False, lambda w: w.post("a"), lambda w: w.post("b")),
    ],
    ids=["thread and delivery", "two threads", "two threads, nothing under way"],
)
def test_in_any_order_of_their_lines_each_is_delivered_once(
    has_begun: bool, first: Doing, second: Doing
) -> None:
    def begun() -> World:
        world = World(at_once=1)
        if has_begun:
            world.post("before")
        return world

    lines = run(begun(), [], first, second)
    tried = 0
    for order in orders(*lines):
        world = begun()
        run(world, order, first, second)
        world.loop.run()
        assert sorted(world.seen) == sorted(world.names), order
        world.post("later")
        world.loop.run()
        assert world.seen[-1] == "later", "or nothing would be delivered any more"
        tried += 1
    assert tried >= 6
