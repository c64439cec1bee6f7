"""What is read in shared memory, and how long it is held."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from ends import SIZE, Link, filled, read_only

from service_streamer.workers.memory.payload import LARGE
from test_payload import check

pytestmark = pytest.mark.usefixtures("nothing_is_mapped")

# -- there and back

ITEMS: dict[str, Callable[[], Any]] = {
    "an array": lambda: np.arange(60_000),
    "an array of Fortran's": lambda: np.asfortranarray(np.arange(60_000.0).reshape(200, 300)),
    "a read-only array": lambda: read_only(np.arange(60_000)),
    "bytes": lambda: bytes(range(250)) * 1000,
    "a bytearray": lambda: bytearray(range(250)) * 1000,
    "a memoryview": lambda: memoryview(bytearray(range(250)) * 1000),
    "text": lambda: "äb" * 100_000,
    "many numbers": lambda: [float(n) for n in range(20_000)],
    "exactly LARGE": lambda: np.arange(LARGE, dtype="u1"),
    "dates": lambda: np.arange(60_000).astype("M8[s]"),
    "objects": lambda: np.array([{"n": n} for n in range(20_000)], object),
}


@pytest.mark.parametrize("is_mapped", [True, False])
@pytest.mark.parametrize("kind", ITEMS)
def test_a_shared_item_arrives_as_it_is(
    kind: str, is_mapped: bool, private: bool, request: pytest.FixtureRequest
) -> None:
    if not is_mapped:
        request.getfixturevalue("without_mapping")
    item = ITEMS[kind]()
    link = Link(private=private)
    [got, again] = link.share(item, item)
    check(item, got)
    del again
    if not is_mapped or kind in ("bytes", "a bytearray", "text", "dates"):
        assert link.used == 0, "they are copies, and hold nothing"
        check(item, got)
    del got
    assert link.used == 0


def test_tensors_are_read_without_a_copy(private: bool) -> None:
    torch = pytest.importorskip("torch")
    link = Link(private=private)
    for dtype in (torch.float32, torch.bfloat16, torch.uint8, torch.bool, torch.complex64):
        sent = torch.arange(100_000).reshape(100, 1000).remainder(2).to(dtype)
        [got] = link.share(sent)
        assert got.dtype is dtype
        assert torch.equal(got, sent)
        assert got.data_ptr() % 64 == 0
        row = got[3]
        del got
        assert link.used > 0
        assert torch.equal(row, sent[3])
        del row
        assert link.used == 0


@pytest.mark.parametrize("lengths", [(1, 1, 1), (64, 64), (65, 1), (0, 5, 0), (LARGE + 1, 3)])
def test_the_parts_of_an_item_are_aligned(lengths: tuple[int, ...], private: bool) -> None:
    large = np.arange(LARGE)
    sent = [large, *(filled(n, length) for n, length in enumerate(lengths)), large]
    [got] = Link(private=private).share(sent)
    for one, other in zip(sent, got, strict=True):
        assert one.tobytes() == other.tobytes()
    assert [each.ctypes.data % 64 for each in (got[0], got[-1])] == [0, 0]


class Holds:
    """An object of a user's that has an array somewhere."""

    def __init__(self, value: Any) -> None:
        self.value = value


HOLDERS: dict[str, Callable[[Any], Any]] = {
    "itself": lambda got: got, "a slice": lambda got: got[5:9],
    "a slice of a slice": lambda got: got[::2][3:],
    "one of another shape": lambda got: got[: SIZE // 2 * 2].reshape(2, -1).T,
    "one of another type": lambda got: got[:SIZE // 4 * 4].view("f4"),
    "a memoryview": memoryview,
    "a part of a memoryview": lambda got: memoryview(got)[3:5],
    "what shares its memory": lambda got: np.frombuffer(got, "u1", 10),
    "a tensor": lambda got: _tensor(got),
    "a row of a tensor": lambda got: _tensor(got)[5:9].view(2, 2),
    "an object": Holds, "a closure": lambda got: lambda: got[0],
}  # fmt: skip


def _tensor(of: Any) -> Any:
    return pytest.importorskip("torch").from_numpy(of)


@pytest.mark.parametrize("holder", HOLDERS)
def test_room_is_given_back_when_the_last_view_is_dropped(holder: str, private: bool) -> None:
    link = Link(private=private)
    [got] = link.share(filled(7))
    held = HOLDERS[holder](got)
    del got
    before = link.used
    assert before >= SIZE
    [other] = link.share(filled(9))
    assert other[0] == 9
    del other
    assert link.used == before
    del held
    assert link.used == 0


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_the_last_part_of_an_item_holds_all_of_it(order: tuple[int, ...]) -> None:
    link = Link()
    [got] = link.share([filled(1), (filled(2), memoryview(filled(3)))])
    views: list[Any] = [got[0], *got[1]]
    del got
    before = link.used
    for number in order:
        assert link.used == before
        assert views[number][SIZE - 1] == number + 1
        views[number] = None
    assert link.used == 0


def test_the_payload_holds_it_without_any_reader() -> None:
    """It may be sent again, to another worker."""
    link = Link(readers=2)
    payload = link.encode(filled(7))
    for reader in (0, 1, 0):
        [got] = link.send(payload, to=reader)
        assert got[0] == 7
        got[:] = 8
        del got
        assert link.used > 0
    del payload
    assert link.used == 0


def test_an_item_outlives_both_ends(private: bool) -> None:
    link = Link(private=private)
    [got] = link.share(filled(7))
    del link
    gc.collect()
    assert got.tobytes() == bytes([7]) * SIZE
    got[:] = 8
    assert got.tobytes() == bytes([8]) * SIZE


class Breaks:
    def __reduce__(self) -> Any:
        return int, ("no number",)


def test_an_item_that_cannot_be_loaded_holds_nothing() -> None:
    link = Link()
    payload = link.encode([filled(7), Breaks()])
    for _ in range(3):
        with pytest.raises(ValueError, match="no number"):
            link.send(payload)
    del payload
    assert link.used == 0


class Keeps:
    """Is dropped in a circle, and hands its view on to others then."""

    survivors: list[Any] = []  # noqa: RUF012

    def __init__(self, view: Any) -> None:
        self.view = view
        self.me = self

    def __del__(self) -> None:
        self.survivors.append(self.view)


@pytest.mark.parametrize("kind", ["array", "memoryview"])
def test_a_view_that_a_finalizer_saves_is_still_held(kind: str, private: bool) -> None:
    """The collector runs all finalizers of a circle: also that of what holds the view's memory."""
    link = Link(private=private)
    [got] = link.share(filled(7) if kind == "array" else memoryview(filled(7)))
    holder = Keeps(got)
    del got, holder
    gc.collect()
    is_held = link.used > 0
    link.share(filled(9))
    value = Keeps.survivors.pop()[0]
    assert (is_held, value) == (True, 7)
