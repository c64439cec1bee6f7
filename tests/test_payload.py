"""How items and results become bytes and buffers: what comes out of them is what went in."""

from __future__ import annotations

import array
import contextlib
import copyreg
import ctypes
import dataclasses
import gc
import itertools
import math
import pickle
import subprocess
import sys
import threading
import tracemalloc
import types
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from service_streamer import UnpicklableItem
from service_streamer.workers.codec import Codec
from walk.interrupts import interrupted_everywhere

#: Values of so many bytes use other memory than the message's.
LARGE = 16 << 10


CODEC, WHOLE = Codec(lambda parts: parts), Codec()  # one puts nowhere what is large: to look at


def dump(item: Any, large: float = LARGE) -> Any:
    CODEC.large = large
    return CODEC.encode(item)


def dump_whole(item: Any) -> Any:
    return WHOLE.encode(item)


def load(dumped: Any) -> Any:
    """Read it as the other side does, which finds all in memory of its own."""
    if isinstance(dumped, bytes):
        return pickle.loads(dumped)
    return pickle.loads(b"".join(dumped.stream), buffers=[bytearray(b) for b in dumped.buffers])


def trips(item: Any) -> list[Any]:
    """What arrives of it: in its usual way, all in buffers, and all in the stream."""
    whole = dump_whole(item)
    assert type(whole) is bytes
    return [load(dump(item)), load(dump(item, 1)), load(whole)]


def parts(item: Any, large: float = LARGE) -> Any:
    dumped = dump(item, large)
    assert type(dumped) is not bytes
    return dumped


@pytest.fixture(autouse=True)
def as_it_is_by_default() -> Iterator[None]:
    """A test of a training script may have asked torch to fill new tensors; not all can be."""
    import torch

    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(False)
    yield
    torch.use_deterministic_algorithms(before)


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Only what nothing refers to is freed, and at once."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


# -- what arrives

#: More than LARGE for one byte each.
WIDE = LARGE + 1
SHAPES = [(), (0,), (3, 0), (7,), (2, 3, 4), (50, 700)]

DTYPES = [
    *"?bBhHiIlLqQefdgFDG",
    *("<i4", ">i4", ">f8", ">c16", "<U5", ">U5", "S3", "M8[ns]", "M8[D]", ">M8[s]", "m8[ms]"),
    *("i4,f8", "(2,3)f4,S4", ">i2,>U2", "O", "i4,O", "V7"),
]

TORCH_DTYPES = [
    *("bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64"),
    *("float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"),
]


def numbered(dtype: str, *shape: int) -> np.ndarray[Any, Any]:
    """An array whose elements are not all the same."""
    count = math.prod(shape)
    kind = np.dtype(dtype)
    if kind.hasobject:
        made = np.zeros(count, kind)
        values: list[Any] = [{"n": n} for n in range(count)]
        made[:] = values if kind.names is None else [(n, value) for n, value in enumerate(values)]
        return made.reshape(shape)
    size = count * kind.itemsize
    data = bytes(size) if kind.kind in "U" else bytes(n % 251 % 100 for n in range(size))
    if kind.char == "?":
        data = bytes(n % 2 for n in range(size))
    return np.frombuffer(bytearray(data), kind, count).reshape(shape)


def tensor_of(name: str, *shape: int) -> Any:
    import torch

    dtype = getattr(torch, name)
    size = math.prod(shape) * torch.empty((), dtype=dtype).element_size()
    data = torch.arange(size) % (2 if dtype is torch.bool else 100)
    if not size:
        return torch.empty(shape, dtype=dtype)
    return data.to(torch.uint8).view(dtype).reshape(shape)


def raw(tensor: Any) -> bytes:
    import torch

    data: bytes = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return data


def check(sent: Any, got: Any) -> None:
    """It is the same, or for arrays and tensors what it is without its surroundings."""
    if isinstance(sent, np.ndarray):
        check_array(sent, got)
    elif hasattr(sent, "data_ptr"):
        check_tensor(sent, got)
    elif isinstance(sent, memoryview):
        assert type(got) is memoryview
        assert (got.shape, got.format, got.tolist()) == (sent.shape, sent.format, sent.tolist())
        assert got.readonly is sent.readonly
        assert got.c_contiguous
    else:
        assert type(got) is type(sent)
        assert got == sent


def check_array(sent: Any, got: Any) -> None:
    """It is what plain pickling makes of it."""
    expected = pickle.loads(pickle.dumps(sent, 5))
    assert type(got) is type(expected)
    assert got.dtype == expected.dtype
    assert got.dtype.byteorder == expected.dtype.byteorder
    assert got.dtype.metadata == sent.dtype.metadata
    assert got.shape == sent.shape
    assert got.flags.writeable is expected.flags.writeable
    assert got.flags.aligned
    assert got.flags.f_contiguous == expected.flags.f_contiguous
    if got.dtype.hasobject:
        assert got.tolist() == sent.tolist()
    else:
        assert got.tobytes() == expected.tobytes()
    assert not np.shares_memory(got, sent)


def check_tensor(sent: Any, got: Any) -> None:
    import torch

    is_parameter = type(sent) is torch.nn.Parameter
    assert type(got) is (torch.nn.Parameter if is_parameter else torch.Tensor)
    assert got.dtype is sent.dtype
    assert got.shape == sent.shape
    assert got.device.type == "cpu"
    assert got.is_contiguous()
    assert got.requires_grad is is_parameter
    assert not got.is_conj()
    assert not got.is_neg()
    sent = sent.detach().resolve_conj().resolve_neg()
    assert raw(got) == raw(sent)
    assert got.numel() == 0 or got.data_ptr() != sent.data_ptr()


class OwnBytes(bytes):
    pass


class Word(str):
    pass


def arrays() -> Iterator[Any]:
    for dtype, shape in itertools.product(DTYPES, SHAPES):
        is_huge = math.prod(shape) > 10_000 and dtype in ("O", "i4,O")
        sent = numbered(dtype, *((50, 20) if is_huge else shape))
        for is_writeable in (True, False) if sent.size else (True,):
            sent.flags.writeable = is_writeable
            yield sent
    # h5py, say, marks enumerations so.
    yield np.zeros(3, np.dtype("i4", metadata={"enum": {"red": 1}}))


def arrays_in_memory_as_it_likes() -> Iterator[Any]:
    for made in (numbered("b", 15, 1000), numbered("b", 15, 60_000)):
        yield from (made[:, ::2], made[::-1], made[:, 5:500], made.T, made[1])
        yield np.asfortranarray(made)
        yield made.reshape(3, 5, -1).transpose(1, 2, 0)
        yield np.broadcast_to(made[0], (3, *made[0].shape))
        yield made.view([("a", "i1"), ("b", "i1")])["b"]
        yield made.reshape(-1)[1:-7].view("f8")  # unaligned


def tensors() -> Iterator[Any]:
    for dtype, shape in itertools.product(TORCH_DTYPES, SHAPES):
        yield tensor_of(dtype, *shape)


def tensors_in_memory_as_it_likes() -> Iterator[Any]:
    import torch

    for columns in (20, 20_000):

        def made(columns: int = columns) -> Any:
            return torch.arange(15.0 * columns).reshape(15, columns)

        yield made().requires_grad_()
        yield made().requires_grad_() * 2
        yield torch.nn.Parameter(made())
        yield torch.nn.Buffer(made())
        yield from (made().T, made()[:1].expand(5, -1), made()[:, ::2], made().flip(0), made()[1])
        channels = made().reshape(3, 5, 10, -1)
        yield channels.contiguous(memory_format=torch.channels_last)
        yield torch.view_as_complex(made().reshape(-1, 2)).conj()
        yield torch.view_as_complex(made().reshape(-1, 2)).conj().imag
        yield torch.from_numpy(made().numpy()[1:])
        with torch.inference_mode():
            yield made()


def bytes_of_all_sizes() -> Iterator[Any]:
    for size in (0, 1, 100, LARGE - 1, LARGE, 65_535, 65_536, 70_000, 1 << 20):
        for kind in (bytes, bytearray):
            sent = kind(n % 251 for n in range(size))
            yield sent
            yield "before", sent, "after"


def objects() -> Iterator[Any]:
    for size in (3, 100_000):
        yield from (OwnBytes(size), Word("x" * size))
    yield from (np.float32(1.5), np.int64(-3), np.datetime64("2020-02-29"), np.str_("x"))
    for kind, count in itertools.product("bBuhHiIlLqQfd", (0, 3, 50_000)):
        yield array.array(kind, "x" * count if kind == "u" else [n % 100 for n in range(count)])


def view(of: Any) -> Any:
    return memoryview(of)


def memoryviews() -> Iterator[Any]:
    short = b"abcdef"
    yield from map(view, (b"abc", bytearray(b"abc"), b"", bytearray(range(250)) * 400))
    yield view(bytes(range(250)) * 400)
    yield view(bytearray(b"abc")).toreadonly()
    yield from (view(short)[1:4], view(short)[::2], view(bytearray(short))[::2])
    yield view(bytearray(short))[::-1].toreadonly()
    yield view(bytes(range(250)) * 800)[::2]
    yield view(array.array("d", [1.5, -2]))
    yield view(np.arange(6, dtype="i4").reshape(2, 3))
    yield view(np.arange(60_000, dtype="i8").reshape(2, 3, -1))
    yield view(np.array([True, False]))
    yield view(b"abc").cast("c")
    yield view(np.array(5.5))
    yield view(np.asfortranarray(np.arange(6.0).reshape(2, 3))).toreadonly()


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize(
    "items",
    [
        arrays, arrays_in_memory_as_it_likes, tensors, tensors_in_memory_as_it_likes,
        bytes_of_all_sizes, objects, memoryviews,
    ],
)  # fmt: skip
def test_an_item_arrives_as_it_is(items: Callable[[], Iterator[Any]]) -> None:
    for sent in items():
        for got in trips(sent):
            check(sent, got)


@pytest.mark.parametrize("count", [3, 40_000])
def test_an_array_of_a_subclass_arrives_as_one(tmp_path: Path, count: int) -> None:
    masked: Any = np.ma.masked_array(np.arange(count), np.arange(count) % 2 == 0)
    for got in trips(masked):
        assert type(got) is np.ma.MaskedArray
        assert got.data.tolist() == masked.data.tolist()
        assert got.mask.tolist() == masked.mask.tolist()
    mapped: Any = np.memmap(tmp_path / "numbers", "i4", "w+", shape=(count,))
    mapped[:] = np.arange(count)
    for got in trips(mapped):
        check_array(mapped, got)


@pytest.mark.parametrize("kind", ["array", "tensor"])
def test_one_row_of_many_sends_only_its_own_bytes_and_is_not_copied(kind: str) -> None:
    many = np.zeros((100, 20_000), "f4") if kind == "array" else tensor_of("float32", 100, 20_000)
    row = many[3]
    dumped = parts(row)
    [buffer] = dumped.buffers
    assert buffer.nbytes == 80_000
    assert sum(map(len, dumped.stream)) < 500
    assert len(dump_whole(row)) < 80_500
    assert len(dump_whole(row[:5])) < 500
    row[0] = 1
    assert bytes(buffer[:4]) == np.float32(1).tobytes()


def other_tensors() -> Iterator[tuple[Any, Callable[[Any], list[Any]]]]:
    """Tensors that torch pickles, and what has to be the same of them."""
    import torch

    class Marked(torch.Tensor):
        """A subclass."""

    globals()["Marked"] = Marked  # where pickle finds it
    Marked.__qualname__ = "Marked"
    for size in (3, 3000):
        dense = torch.eye(size)
        for sparse in (
            *(dense.to_sparse(), dense.to_sparse_csr(), dense.to_sparse_csc()),
            dense.to_sparse().requires_grad_(),
        ):
            yield sparse, lambda of: [of.layout, of.shape, of.values().tolist()]
        yield torch.arange(10.0 * size).as_subclass(Marked), lambda of: of.tolist()
    with contextlib.suppress(RuntimeError, AttributeError):  # this torch has none any more
        quantized = torch.quantize_per_tensor(torch.arange(50_000.0), 0.5, 3, torch.quint8)
        yield quantized, lambda of: [of.is_quantized, of.dequantize().tolist()]
    nested = torch.nested.nested_tensor([torch.ones(2), torch.zeros(3)])
    yield nested, lambda of: [of.is_nested, *(part.tolist() for part in of.unbind())]
    yield torch.empty(3, 4, device="meta"), lambda of: [of.device.type, of.shape]


@pytest.mark.filterwarnings("ignore")  # torch's own pickling of them uses what is deprecated
def test_a_tensor_of_another_kind_arrives_as_one() -> None:
    for sent, parts_of in other_tensors():
        for got in trips(sent):
            assert type(got) is type(sent)
            assert got.dtype is sent.dtype
            assert parts_of(got) == parts_of(sent)


FIRST = """
import sys, threading, types
import numpy
from service_streamer.workers.codec import Codec

dump = Codec().encode
found = []

class Watched(types.ModuleType):
    def __getattr__(self, name):
        if name == "ndarray" and not found:  # another thread has an array, too
            found.append(None)
            other = threading.Thread(target=lambda: found.append(dump(sent)))
            other.start()
            other.join()
        return getattr(numpy, name)

sent = numpy.ones(3)
sys.modules["numpy"] = Watched("numpy")
first = dump(sent)
assert found == [None, first], found
sys.modules["numpy"] = numpy
assert dump(sent) == first
"""


def test_the_first_arrays_of_two_threads_are_pickled_alike() -> None:
    subprocess.run([sys.executable, "-c", FIRST], check=True)


def test_a_package_that_is_half_loaded_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    sent, complete = tensor_of("float32", 3), sys.modules["torch"]
    usual = dump(sent)
    monkeypatch.setitem(copyreg.dispatch_table, Kept, Kept.__reduce__)  # so all are asked again
    monkeypatch.setitem(sys.modules, "torch", types.ModuleType("torch"))
    load(dump(3.5))
    monkeypatch.setitem(sys.modules, "torch", complete)
    assert dump(sent) == usual


# -- bytes and the like


@pytest.mark.parametrize("kind", [bytes, bytearray])
def test_large_bytes_are_passed_on_as_they_are(kind: Any) -> None:
    sent = kind(100_000)
    for item in (sent, ("a", [sent]), {"b": {"c": sent}}):
        dumped = parts(item)
        assert dumped.buffers == []
        assert [chunk for chunk in dumped.stream if chunk is sent] == [sent]
        assert len(dumped) < 100_200


def test_a_memoryview_that_can_be_sent_can_be_read() -> None:
    """These cannot be made anew, but perhaps with another numpy."""
    for of in (
        *(np.zeros((0, 3)), np.zeros((3, 0)), (ctypes.c_int * 4)(1, 2, 3, 4)),
        *(np.arange(4, dtype=">i4"), np.ones(4, np.float16), np.ones(4, complex)),
        *(np.ones(4, np.longdouble), np.ones(4, "i4,f8"), array.array("u", "abc")),
    ):
        sent = view(of)
        try:
            dump(sent)
        except (pickle.PicklingError, TypeError):  # said where the item is made, which will do
            continue
        for got in trips(sent):
            assert (got.shape, got.format) == (sent.shape, sent.format)
            assert got.tobytes() == sent.tobytes()


class Offers:
    """Has a buffer, and arrives as its bytes."""

    def __init__(self, buffer: Any) -> None:
        self.buffer = buffer

    def __reduce_ex__(self, protocol: Any) -> Any:
        return bytes, (pickle.PickleBuffer(self.buffer),)


@pytest.mark.parametrize("large", [1, LARGE, 1 << 20, 1 << 30, math.inf])
@pytest.mark.parametrize("count", [10, 200, 1000])
def test_any_object_can_offer_a_buffer(count: int, large: float) -> None:
    sent = bytearray(range(100)) * count
    fortran = np.asfortranarray(np.arange(40.0 * count).reshape(20, -1))
    for each in (sent, bytes(sent), fortran):
        expected = pickle.loads(pickle.dumps(Offers(each), 5))
        assert load(dump(Offers(each), large)) == expected


# -- what is small and what is large


def test_plain_and_small_things_are_pickled_as_always() -> None:
    plain: list[Any] = ["", "abc", "ß" * 20_000, 0, -1, 1 << 9_000, None, True, 1.5]
    small: list[Any] = [
        *((), [], {}, {"a": [1, 2.5, "b"]}, [("x", n) for n in range(1000)]),
        *({1, 2}, frozenset("a"), print),
    ]
    for item in plain + small:
        whole = dump_whole(item)
        assert whole == pickle.dumps(item, 5)
        assert load(dump(item)) == item
        if len(whole) < LARGE:
            assert dump(item) == whole


@pytest.mark.parametrize("nbytes", [LARGE - 1, LARGE, LARGE + 1])
def test_from_so_many_bytes_on_a_buffer_is_large(nbytes: int) -> None:
    for item in (np.zeros(nbytes, "u1"), tensor_of("uint8", nbytes)):
        [buffer] = parts([item, item]).buffers if nbytes >= LARGE else [None]
        assert buffer is None or (buffer.nbytes, buffer.format, buffer.ndim) == (nbytes, "B", 1)


@pytest.mark.parametrize(
    "wrap", [lambda item: item, lambda item: [item]], ids=["bare", "in a list"]
)
def test_from_so_many_bytes_on_a_stream_is_large(wrap: Callable[[Any], Any]) -> None:
    for text in ("x", b"x"):
        over = len(pickle.dumps(wrap(text * 20_000), 5)) - 20_000
        small = wrap(text * (LARGE - over - 1))
        assert dump(small) == pickle.dumps(small, 5)
        assert len(dump_whole(small)) == LARGE - 1
        large = parts(wrap(text * (LARGE - over)))
        assert large.buffers == []
        assert len(large) == LARGE
        assert load(large) == wrap(text * (LARGE - over))


@pytest.mark.parametrize(
    ("sizes", "large"),
    [
        ([10, WIDE, 0, LARGE - 1, LARGE, 5, 3 * WIDE], [WIDE, LARGE, 3 * WIDE]),
        ([LARGE // 2] * 5, []),  # together one large stream
    ],
)
def test_small_and_large_buffers_keep_their_places(sizes: list[int], large: list[int]) -> None:
    sent = [numbered("u1", size) for size in sizes]
    dumped = parts(sent)
    assert [buffer.nbytes for buffer in dumped.buffers] == large
    for got, expected in zip(load(dumped), sent, strict=True):
        check_array(expected, got)
    assert type(dump_whole(sent)) is bytes


# -- nested


@dataclasses.dataclass
class Sample:
    name: str
    image: Any
    more: dict[str, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    image: Any


@pytest.mark.parametrize("size", [10, WIDE])
def test_several_of_several_kinds_arrive_in_one_item(size: int) -> None:
    image, tensor = numbered("i2", size), tensor_of("bfloat16", size)
    data, text = bytes(range(250)) * (size // 100 + 1), "ü" * size
    sent = Sample("a", image, {"t": (tensor, [data, {"slotted": Slotted(image[::-1])}]), "x": text})
    for got in trips(sent):
        assert type(got) is Sample
        check_array(image, got.image)
        check_tensor(tensor, got.more["t"][0])
        assert got.more["t"][1][0] == data
        check_array(image[::-1], got.more["t"][1][1]["slotted"].image)
        assert got.more["x"] == text


@pytest.mark.parametrize("size", [10, WIDE])
@pytest.mark.parametrize("kind", ["array", "tensor", "bytearray", "list"])
def test_one_object_in_two_places_of_an_item_arrives_as_one(kind: str, size: int) -> None:
    makers: dict[str, Callable[[], Any]] = {
        "array": lambda: np.zeros(size),
        "tensor": lambda: tensor_of("float64", size) * 0,
        "bytearray": lambda: bytearray(size),
        "list": lambda: [0] * size,
    }
    shared = makers[kind]()
    for got in trips({"one": shared, "two": (shared, makers[kind]())}):
        assert got["one"] is got["two"][0]
        assert got["one"] is not got["two"][1]
        got["one"][0] = 1
        assert got["two"][1][0] == 0


def test_an_object_in_two_items_arrives_as_two() -> None:
    """Each is loaded on its own, so nothing of one may be remembered for the next."""
    for state in (np.zeros(WIDE), np.zeros(3)):
        first, second = dump([state, "name"]), dump([state, "name"])
        assert np.array_equal(load(second)[0], state)
        assert np.array_equal(load(first)[0], state)


# -- picklers, used again and again


class Fails:
    def __reduce__(self) -> Any:
        raise ZeroDivisionError


@pytest.mark.parametrize(
    "before", [[], [b"x" * 100_000], [np.zeros(WIDE)], [np.zeros(3), "a"]], ids=len
)
def test_an_item_is_pickled_rightly_after_one_that_failed(before: list[Any]) -> None:
    for bad in (Fails(), threading.Lock(), lambda: None):
        for send in (dump, dump_whole):
            with pytest.raises((ArithmeticError, TypeError, AttributeError, pickle.PicklingError)):
                send([*before, bad])
        assert dump([1, "a"]) == pickle.dumps([1, "a"], 5)
        assert [buffer.nbytes for buffer in parts(np.zeros(LARGE, "u1")).buffers] == [LARGE]
        assert load(dump_whole(before)).__len__() == len(before)


def test_an_item_is_pickled_rightly_after_a_signal_handler_raised() -> None:
    for _ in interrupted_everywhere(lambda: dump([np.ones(WIDE), "a"])):
        assert not load(dump(np.zeros(WIDE))).any()


class Dumps:
    """Dumps something while it is itself dumped: a message within a message, say."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __reduce__(self) -> Any:
        dumped = dump(self.inner)
        return _loaded, (dumped if isinstance(dumped, bytes) else dump_whole(self.inner),)


def _loaded(dumped: bytes) -> Any:
    return load(dumped)


class DumpsAndFails:
    def __reduce__(self) -> Any:
        with contextlib.suppress(ZeroDivisionError):
            dump([bytes(100_000), Fails()])
        return int, (5,)


def test_an_item_may_be_pickled_while_another_one_is() -> None:
    for size in (3, WIDE):
        within = [Dumps(Dumps([np.ones(size)])), bytes(size), Dumps("text"), DumpsAndFails()]
        for got in trips([np.arange(size), *within]):
            assert got[0].tolist() == list(range(size))
            assert got[1][0].tolist() == [1] * size
            assert got[2:] == [bytes(size), "text", 5]


class Registered:
    def __init__(self, value: Any) -> None:
        self.value = value
        self.lock = threading.Lock()


def _reduce_registered(one: Registered) -> Any:
    return Registered, (one.value,)


def test_reducers_of_copyreg_take_precedence(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TypeError):
        dump(Registered(3))
    monkeypatch.setattr(copyreg, "dispatch_table", dict(copyreg.dispatch_table))
    copyreg.dispatch_table[Registered] = _reduce_registered
    for got in trips([Registered(3), Registered(np.zeros(WIDE))]):
        assert got[0].value == 3
        assert got[1].value.tolist() == [0] * WIDE
    del copyreg.dispatch_table[Registered]
    with pytest.raises(TypeError):
        dump(Registered(3))


# -- lifetimes


class Kept:
    """Can be looked at from afar."""

    def __init__(self, value: Any = None) -> None:
        self.value = value


def test_nothing_of_an_item_is_held_after_it_was_dumped(no_collector: None) -> None:
    for size in (3, WIDE):
        sent, image = Kept(np.zeros(size)), tensor_of("float64", size)
        seen = [weakref.ref(sent), weakref.ref(sent.value), weakref.ref(image)]
        with pytest.raises(ZeroDivisionError):  # a pickler that is given up is in a circle
            dump([sent, Fails()])
        dumped = dump([sent, image, bytes(size)])
        del sent, image
        if size == 3:
            assert all(each() is None for each in seen), "the bytes are a copy"
        del dumped
        assert all(each() is None for each in seen)


# A pickler's memo never shrinks, and is gone through each time that it is cleared.
def test_a_huge_item_leaves_no_pickler_that_is_as_huge() -> None:
    sent = [(n, str(n)) for n in range(100_000)]
    tracemalloc.start()
    try:
        dump(sent)
        kept, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept < 1 << 20 < most


def test_a_buffer_is_let_go_of_with_the_parts() -> None:
    sent = bytearray(WIDE)
    dumped = parts([memoryview(sent), Offers(sent)])
    with pytest.raises(BufferError):
        sent.append(1)
    del dumped
    sent.append(1)


class Late(list[int]):
    """Raises when all items have been taken, as a signal handler may."""

    def __iter__(self) -> Iterator[int]:
        yield from super().__iter__()
        raise TimeoutError("the time is over")


def test_an_error_behind_the_last_item_blames_none_of_them() -> None:
    with pytest.raises(UnpicklableItem, match=r"^an item of the batch cannot .*time is over"):
        Codec().encode_items(Late([1, 2]))
