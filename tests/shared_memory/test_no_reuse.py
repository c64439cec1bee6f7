"""Nothing is reused while anything looks at it."""

from __future__ import annotations

import dataclasses
import itertools
import random
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from ends import LARGE, PAGE, SIZE, Link, decode, filled, is_shared

pytestmark = pytest.mark.usefixtures("nothing_is_mapped")


@dataclasses.dataclass
class Held:
    """Something that was received, and what it has to be until it is dropped."""

    view: Any
    value: int

    def check(self) -> None:
        data = bytes(self.view.numpy() if hasattr(self.view, "numpy") else self.view)
        assert data == bytes([self.value]) * len(data)


class Chaos:
    """Sends, holds, writes, drops and sends again, in an order that a number decides."""

    MOST_HELD = 12

    def __init__(self, link: Link, seed: int, *, private: bool, with_tensors: bool) -> None:
        self.link = link
        self.private = private
        self.random = random.Random(seed)
        self.kinds: list[Callable[[Any], Any]] = [np.asarray, memoryview, bytes]
        if with_tensors:
            import torch

            self.kinds.append(torch.from_numpy)
        self.held: list[Held] = []
        self.payloads: list[tuple[Any, int]] = []
        self.numbers = itertools.cycle(range(1, 251))
        self.full = 0
        self.placed = 0

    def step(self) -> None:
        action = self.random.choices(
            [
                self.send, self.drop, self.write, self.resend, self.link.settle, self.change_rows,
                self.cut,
            ],
            [8, 8, 4, 4 if self.private else 0, 3, 1, 1],
        )[0]  # fmt: skip
        action()
        while len(self.held) > self.MOST_HELD:
            self.drop()

    def send(self) -> None:
        sent = []
        sizes = self.random.choices(
            [SIZE, 9 * PAGE, self.random.randrange(LARGE, 40 * PAGE)], [4, 1, 2]
        )
        for size in sizes * self.random.randrange(1, 5):
            value = next(self.numbers)
            item = self.random.choice(self.kinds)(filled(value, size))
            if self.random.random() < 0.2:
                item = [item, filled(value, LARGE)]
            payload = self.link.encode(item)
            self.full += not is_shared(payload)
            self.placed += is_shared(payload)
            sent.append((payload, value))
        self.receive(sent, self.random.randrange(len(self.link.readers)))
        if self.private and self.random.random() < 0.3:
            self.payloads += sent
            del self.payloads[:-4]

    def resend(self) -> None:
        """As after the death of a worker: what a reader has written may not be seen."""
        if self.payloads:
            some = self.random.sample(
                self.payloads, self.random.randrange(1, len(self.payloads) + 1)
            )
            self.receive(some, self.random.randrange(len(self.link.readers)))

    def receive(self, sent: list[tuple[Any, int]], reader: int) -> None:
        items = self.link.send(*(payload for payload, _ in sent), to=reader)
        for item, (_, value) in zip(items, sent, strict=True):
            for one in item if isinstance(item, list) else [item]:
                held = Held(one, value)
                held.check()
                if self.random.random() < 0.3 and not isinstance(one, bytes):
                    held.view = one[3:-5]
                if self.random.random() < 0.8:
                    self.held.append(held)

    def drop(self) -> None:
        if self.held:
            self.held.pop(self.random.randrange(len(self.held))).check()

    def write(self) -> None:
        if self.held:
            held = self.random.choice(self.held)
            if not isinstance(held.view, bytes):
                held.value = next(self.numbers)
                if isinstance(held.view, memoryview):
                    held.view[:] = bytes([held.value]) * len(held.view)
                else:
                    held.view[:] = held.value

    def change_rows(self) -> None:
        self.link.arena.rows = self.random.choice([0, 2, 3, 8])

    def cut(self) -> None:
        """As if it were time to look whether anything is to be cut off."""
        for _ in range(600):
            self.link.encode(filled(0, PAGE + LARGE))

    def end(self) -> None:
        for held in self.held:
            held.check()
        del held
        self.held.clear()
        self.payloads.clear()
        self.link.close_rows()
        assert self.link.used == 0
        whole = self.link.encode(filled(0, self.link.arena.memory.size // PAGE * PAGE))
        assert is_shared(whole), "all of it is one piece again"
        del whole
        assert self.link.used == 0


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("how", ["private", "shared", "no pagemap", "no mapping"])
def test_nothing_is_reused_while_it_is_looked_at(
    how: str, seed: int, request: pytest.FixtureRequest
) -> None:
    if how.startswith("no "):
        request.getfixturevalue("without_" + how[3:])
    private = how != "shared"
    readers = 2 if private else 1  # only what one alone reads may be written to by all
    link = Link(160 * PAGE, private=private, readers=readers)
    chaos = Chaos(link, seed, private=private, with_tensors=seed % 2 == 0)
    for _ in range(400):
        chaos.step()
    chaos.end()
    assert chaos.placed > 100
    if how != "no mapping":
        assert chaos.full > 10, "it was full now and then"


def test_many_threads_put_down_and_read_at_once() -> None:
    link = Link(200 * PAGE, private=False)
    [writer], [reader] = link.writers, link.readers

    def work(number: int) -> int:
        chance, shared = random.Random(number), 0
        held: list[tuple[Any, int]] = []
        for turn in range(60):
            value = (number * 60 + turn) % 251
            payloads = [link.encode(filled(value, chance.randrange(LARGE, 20 * PAGE)))]
            shared += is_shared(payloads[0])
            writer.lend(payloads)
            received = payloads
            reader.receive(received)
            held.append((decode(received.pop()), value))
            if len(held) > 2:
                got, value = held.pop(chance.randrange(3))
                assert got.tobytes() == bytes([value]) * len(got)
                del got
            writer.release(reader.lend([]))
        for got, value in held:
            assert got.tobytes() == bytes([value]) * len(got)
        return shared

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(6) as threads:
            shared = list(threads.map(work, range(6)))
    finally:
        sys.setswitchinterval(interval)
    assert sum(shared) > 50
    assert link.used == 0


def test_many_threads_load_one_result_at_once() -> None:
    link = Link(private=False)
    received = link.receive(link.encode([filled(7), filled(8)]))
    with ThreadPoolExecutor(4) as threads:
        loads = list(threads.map(lambda _: received[0].load(), range(50)))
    assert all((a[0], b[-1]) == (7, 8) for a, b in loads)
    received.clear()
    assert link.used > 0
    loads.clear()
    assert link.used == 0
