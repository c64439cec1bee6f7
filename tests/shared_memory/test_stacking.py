"""A batch as one array: what is copied for it and what is not, and which row is whose."""

from __future__ import annotations

import math
import os
import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from ends import LARGE, MB, PAGE, Link

from service_streamer import ManagedModel
from worker_loop import loaded, model_of, raised, served

#: Of a row, bytes: no multiple of a page.
SIZE = LARGE + 64


class Stack(NamedTuple):
    """An array that the model got.

    Attributes:
        positions: of its rows in the batch.
    """

    batch: Any
    positions: list[int]


class Rows(ManagedModel):
    """Keeps the arrays that it gets; a result says in which of them the item was, and where."""

    stack = True

    def init_model(self) -> None:
        self.batches: list[Any] = []

    def predict(self, batch: Any) -> list[tuple[int, int]]:
        self.batches.append(batch)
        return [(len(self.batches) - 1, row) for row in range(len(batch))]


def stacks(items: Sequence[Any], view: Any) -> list[Stack]:
    """What a worker makes of a batch. ``view`` says which memory is in one piece."""
    model = loaded(Rows)
    model.view = view
    (report,) = served(model, [*items])
    if report.failure is not None:
        raise raised(report)
    rows = model_of(model)
    found = [Stack(batch, []) for batch in rows.batches]
    rows.batches = []  # nothing else is to hold their memory
    for _, number, position in sorted(
        (row, number, position) for position, (number, row) in enumerate(report.outputs)
    ):
        found[number].positions.append(position)
    return found


class Block:
    """Memory of one piece, of which it is told only what lies in it."""

    def __init__(self, size: int) -> None:
        self.array: Any = np.zeros(size, "u1")
        self.asked: list[tuple[int, int]] = []

    def view(self, address: int, size: int) -> memoryview | None:
        self.asked.append((address, size))
        start = address - self.array.ctypes.data
        if start < 0 or start + size > len(self.array):
            return None
        return memoryview(self.array)[start : start + size]

    def arrays(self, dtype: Any, *shape: int, count: int, start: int = 0) -> list[Any]:
        """Arrays side by side; each is filled with its number."""
        size = math.prod(shape) * np.dtype(dtype).itemsize
        items = []
        for number in range(count):
            at = start + number * size
            item = self.array[at : at + size].view(dtype).reshape(shape)
            item[...] = number
            items.append(item)
        return items


def address(of: Any) -> int:
    return int(of.data_ptr() if isinstance(of, torch.Tensor) else of.ctypes.data)


def raw(of: Any) -> bytes:
    data: bytes = (of.view(torch.uint8).numpy() if isinstance(of, torch.Tensor) else of).tobytes()
    return data


def single(items: Sequence[Any], view: Any) -> Stack:
    [stack] = stacks(items, view)
    assert sorted(stack.positions) == list(range(len(items)))
    assert stack.batch.shape == (len(items), *items[0].shape)
    assert stack.batch.dtype == items[0].dtype
    for row, position in zip(stack.batch, stack.positions, strict=True):
        # As text, since parts of a structure may be arrays.
        assert str(row.tolist()) == str(items[position].tolist())
    return stack


# -- what is not copied


STRUCTURE = np.dtype([("a", "i1"), ("b", "f8")], align=True)
PACKED = np.dtype([("a", "i4"), ("b", "f8", (2,)), ("c", "S3")])


@pytest.mark.parametrize(
    "dtype",
    ["u1", "?", "f2", "f4", "<i8", ">i2", ">f4", "c16", "M8[s]", ">M8[s]", "S4", ">U2",
     STRUCTURE, PACKED],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize(
    ("shape", "count", "is_read_only"), [((), 7, False), ((2, 3), 7, True), ((2, 3), 1, False)]
)
def test_arrays_side_by_side_are_one_array(
    dtype: Any, shape: tuple[int, ...], count: int, is_read_only: bool
) -> None:
    block = Block(4096)
    items = block.arrays(dtype, *shape, count=count)
    for item in items:
        item.flags.writeable = not is_read_only
    stack = single(items, block.view)
    assert stack.positions == list(range(count))
    assert address(stack.batch) == address(block.array)
    assert np.shares_memory(stack.batch, block.array)
    assert stack.batch.flags.c_contiguous
    assert block.asked == [(address(items[0]), count * items[0].nbytes)]
    [copied] = stacks(items, None)  # numpy.stack would make it the machine's byte order
    assert copied.batch.dtype == items[0].dtype
    assert str(copied.batch.tolist()) == str(stack.batch.tolist())


TORCH_DTYPES = [
    "uint8", "bool", "int64", "float16", "bfloat16", "float32", "complex64", "uint16",
    "float8_e4m3fn",
]  # fmt: skip


@pytest.mark.parametrize("order", [(1, 0, 2, 3), (3, 2, 1, 0), (2, 0, 3, 1)])
@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_rows_may_lie_in_any_order(kind: str, order: tuple[int, ...]) -> None:
    block = Block(4096)
    rows: list[Any] = block.arrays("f4", 5, count=4)
    if kind == "torch":
        rows = [torch.from_numpy(row) for row in rows]
    stack = single([rows[number] for number in order], block.view)
    assert address(stack.batch) == address(block.array)
    assert [order[position] for position in stack.positions] == [0, 1, 2, 3]


# -- what is copied

Arrange = Callable[[Block], list[Any]]
COPIED: dict[str, Arrange] = {
    "no view": lambda block: block.arrays("f4", 5, count=4),
    "a gap": lambda block: [block.arrays("f4", 4, count=4)[n] for n in (0, 1, 3)],
    "the first one missing at the end": lambda block: [
        *block.arrays("f4", 4, count=2, start=16),
        *block.arrays("f4", 4, count=1, start=64),
    ],
    "one twice": lambda block: [block.arrays("f4", 4, count=2)[n] for n in (0, 1, 1)],
    "the same one": lambda block: block.arrays("f4", 4, count=1) * 3,
    "overlapping": lambda block: [block.arrays("f4", 12, count=1)[0][n : n + 4] for n in range(3)],
    "one elsewhere": lambda block: [*block.arrays("f4", 4, count=2), np.ones(4, "f4")],
    "all elsewhere": lambda block: [np.full(4, n, "f4") for n in range(3)],
    "columns": lambda block: list(block.arrays("f4", 4, 4, count=1)[0].T),
    "Fortran's order": lambda block: [each.T for each in block.arrays("f4", 3, 4, count=2)],
    "backwards": lambda block: [each[::-1] for each in block.arrays("f4", 4, count=2)],
    "repeated": lambda block: [np.broadcast_to(np.float32(n), (4,)) for n in range(2)],
}


@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize("how", COPIED)
def test_items_that_are_not_in_line_are_copied(how: str, kind: str) -> None:
    block = Block(4096)
    items = COPIED[how](block)
    if kind == "torch":
        if how == "backwards":
            pytest.skip("there are no such tensors")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # one is not writable
            items = [torch.from_numpy(item) for item in items]
    stack = single(items, None if how == "no view" else block.view)
    assert stack.positions == list(range(len(items)))
    start = address(block.array)
    assert not start <= address(stack.batch) < start + len(block.array)
    stack.batch[...] = 77
    assert not (block.array.view("f4") == 77).any()


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_items_without_bytes_are_stacked(kind: str) -> None:
    block = Block(64)
    for shape in ((0,), (3, 0), (0, 3)):
        item: Any = np.zeros(shape, "f4") if kind == "numpy" else torch.zeros(shape)
        single([item, item], block.view)
        single([item], block.view)
    assert block.asked == []


@pytest.mark.parametrize("dtype", ["O", "i4,O", "S0", "U0", "V0"])
def test_objects_and_what_has_no_bytes_are_never_taken_from_memory(dtype: str) -> None:
    block = Block(64)
    items = [np.zeros(3, dtype) for _ in range(2)]
    [stack] = stacks(items, block.view)
    assert stack.batch.dtype == items[0].dtype
    assert stack.batch.shape == (2, 3)
    assert block.asked == []


def test_conjugated_and_sparse_tensors_are_stacked_as_what_they_are() -> None:
    """Those that are pickled here never are conjugated."""
    for view in (Block(64).view, None):
        [sparse] = stacks([torch.eye(3).to_sparse() for _ in range(2)], view)
        assert sparse.batch.to_dense().tolist() == torch.stack([torch.eye(3)] * 2).tolist()
    block = Block(4096)
    items = [torch.from_numpy(each).conj() for each in block.arrays("c8", 4, count=2)]
    items[0].copy_(torch.full((4,), 3 + 4j))
    stack = single(items, block.view)
    assert stack.batch[0, 0] == 3 + 4j


def test_single_objects_are_stacked_as_what_they_are() -> None:
    for value in ([1, 2], {"a": 1}, "abc", None):
        item = np.empty((), object)
        item[()] = value
        [stack] = stacks([item, item], None)
        assert stack.batch.shape == (2,)
        assert type(stack.batch[0]) is type(value)
        assert stack.batch.tolist() == [value, value]


# numpy.stack would drop them without a word.
def test_masked_arrays_keep_their_masks() -> None:
    items: list[Any] = [np.ma.masked_array([1, n], [False, True]) for n in range(2)]
    try:
        [stack] = stacks(items, None)
    except TypeError:  # which would do
        return
    assert stack.batch.mask.tolist() == [[False, True]] * 2


# -- items that are not alike


def test_each_shape_and_dtype_is_an_array_of_its_own() -> None:
    items: list[Any] = [
        *(np.zeros(3, "f4"), np.zeros(4, "f4"), np.ones(3, "f4"), torch.zeros(3)),
        *(np.zeros(3, "f8"), np.zeros((3, 1), "f4"), torch.ones(3), np.zeros(3, "i4")),
        *(torch.zeros(3, dtype=torch.bfloat16), np.zeros(4, "f4")),
        torch.zeros((), dtype=torch.bfloat16),
    ]
    for view in (None, Block(64).view):
        made = stacks(items, view)
        assert [stack.positions for stack in made] == [
            *([0, 2], [1, 9], [3, 6], [4], [5], [7], [8], [10])
        ]
        for stack in made:
            first = items[stack.positions[0]]
            assert isinstance(stack.batch, torch.Tensor) is isinstance(first, torch.Tensor)
            assert stack.batch.shape == (len(stack.positions), *first.shape)
            assert stack.batch.dtype == first.dtype
        assert made[0].batch.tolist() == [[0] * 3, [1] * 3]


@pytest.mark.parametrize(
    ("item", "name"), [("a", "str"), (1.5, "float"), ([1], "list"), (np.float32(1), "float32")]
)
def test_an_item_that_is_no_array_is_refused(item: Any, name: str) -> None:
    for items in ([item], [np.zeros(3), item]):
        with pytest.raises(TypeError) as raised:
            stacks(items, None)
        assert str(raised.value) == (
            "a model with stack = True takes numpy arrays or torch tensors as items; "
            f"this item is a {name}"
        )


def test_torch_need_not_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch")
    single([np.zeros(3), np.ones(3)], None)
    with pytest.raises(TypeError, match="is a str"):
        stacks(["a"], None)
    monkeypatch.delitem(sys.modules, "numpy")
    with pytest.raises(TypeError, match="is a ndarray"):
        stacks([np.zeros(3)], None)


# -- in memory that is shared


def rows_of(name: str, count: int) -> list[Any]:
    if name in TORCH_DTYPES:
        dtype = getattr(torch, name)
        return [torch.full((SIZE // dtype.itemsize,), n + 1).to(dtype) for n in range(count)]
    return [np.full(SIZE // np.dtype(name).itemsize, n + 1, name) for n in range(count)]


@pytest.mark.parametrize("dtype", ["u1", "f4", ">f8", "i4,f4", *TORCH_DTYPES])
def test_rows_in_shared_memory_are_a_batch_already(dtype: str) -> None:
    link = Link(8 * MB, rows=4)
    sent = rows_of(dtype, 4)
    items = link.share(*sent)
    [stack] = stacks(items, link.readers[0].view)
    assert stack.positions == [0, 1, 2, 3]
    assert address(stack.batch) == address(items[0])
    assert stack.batch.dtype == sent[0].dtype
    for row, item in zip(stack.batch, sent, strict=True):
        assert raw(row) == raw(item)


def in_another_thread(work: Callable[[], None]) -> threading.Thread:
    """It has done the work, unless that has to wait for this thread."""
    thread = threading.Thread(target=work)
    thread.start()
    thread.join(0.2)
    return thread


def test_memory_that_is_given_back_takes_nothing_of_what_another_thread_reads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    link = Link(8 * MB, rows=8)
    payloads = [link.encode(row) for row in rows_of("u1", 4)]
    assert payloads[2].wire[3] % PAGE, "its first page is also that of the row before"
    first, second, threads = link.send(*payloads[:2]), [], []

    def write() -> None:
        second.extend(link.send(*payloads[2:]))
        second[0][:] = 77

    read = os.pread

    def look_at_pages(*args: int) -> bytes:
        threads.append(in_another_thread(write))
        return read(*args)

    first[1][:] = 99
    monkeypatch.setattr(os, "pread", look_at_pages)
    first.clear()
    link.settle()
    threads[0].join()
    assert set(second[0].tolist()) == {77}


def test_a_batch_is_found_in_memory_while_another_thread_reads() -> None:
    link = Link(8 * MB, rows=4)
    items = link.share(*rows_of("u1", 4))
    link.close_rows()
    others = [link.share(row) for row in rows_of("u2", 1)]
    link.close_rows()  # each is in a block of its own
    threads: list[threading.Thread] = []

    class Size(int):
        def __radd__(self, other: int) -> int:
            if not threads:
                threads.append(in_another_thread(lambda: others.append(link.share(*items[:1]))))
            return other + int(self)

    assert link.readers[0].view(address(others[0][0]), Size(SIZE)) is not None
    threads[0].join()
    assert len(others) == 2


def test_payloads_in_blocks_of_their_own_are_copied() -> None:
    link = Link(8 * MB, rows=0)
    items = link.share(*rows_of("u1", 3))
    stack = single(items, link.readers[0].view)
    assert address(stack.batch) not in map(address, items)
    [alone] = link.share(*rows_of("u1", 1))
    assert address(single([alone], link.readers[0].view).batch) == address(alone), (
        "one is a row, too"
    )
