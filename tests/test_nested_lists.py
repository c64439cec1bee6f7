"""Tensors in JSON: what is refused before anything is made of it, and who is answered meanwhile."""

from __future__ import annotations

import asyncio
import json
import math
import threading
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from service_streamer.errors import InvalidInput
from service_streamer.serve.http import tensor_inference
from service_streamer.serve.v2 import arrays, infer_request, nested_lists
from service_streamer.serve.v2.infer_request import InferenceHeader, parse_header
from service_streamer.serve.v2.nested_lists import flat_numbers, flat_texts, pieces


@pytest.mark.parametrize(
    ("data", "dimensions", "expected"),
    [
        ("[1,2]", 1, "[1,2]"),
        ("[ 1 , 2 ]", 1, "[ 1 , 2 ]"),
        ("[[1,2],[3,4]]", 2, "[1,2,3,4]"),
        ("[[1],[2]]", 3, "[1,2]"),
        ("[[[1,2],[3,4]],\n [[5,6],[7,8]]]", 3, "[1,2,3,4,\n 5,6,7,8]"),
        ("[[[1]]]", 3, "[1]"),
        ("[]", 1, "[]"),
        ("5", 1, "5"),
    ],
)
def test_lists_of_numbers_become_flat(data: str, dimensions: int, expected: str) -> None:
    assert flat_numbers(data.encode(), 8, dimensions).decode() == expected


@pytest.mark.parametrize(
    ("data", "why"),
    [
        ("[[[1]]]", "its lists are nested 3 deep, but the shape has 2 dimensions"),
        ("[" * 500 + "]" * 500, "nested 500 deep"),
        ("[[1],[2,3]]", "differ in length"),
        ("[[1,2],[3]]", "differ in length"),
        ("[[1],2]", "differ in length"),
        ("[1,[2]]", "differ in length"),
        ("[[1],[[2]]]", "differ in length"),
        ('{"a":1,"b":[[2]]}', "differ in length"),
        ("[1,2,3,4,5]", "its 5 elements are not the 4 of its shape"),
    ],
)
def test_what_is_no_tensor_is_refused_by_its_brackets(data: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        flat_numbers(data.encode(), 4, 2)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        ('[[["a"]]]', "nested 3 deep"),
        ('[["a"],["b","c"]]', "differ in length"),
        ('[["a"],{"b":"c"}]', "a list of texts"),
        ('[["a"],[1]]', "a list of texts"),
        ('["a","b","c","d","e"]', "its 5 elements are not the 4"),
    ],
)
def test_texts_are_refused_in_the_same_way(data: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        flat_texts(data.encode(), 4, 2)


@given(st.lists(st.text('[]",\\a\n\0é'), min_size=6, max_size=6), st.sampled_from([None, 1]))
def test_texts_keep_their_brackets(texts: list[str], indent: int | None) -> None:
    for nested in (texts, [texts[:3], texts[3:]], [[[each] for each in texts]]):
        data = json.dumps(nested, indent=indent).encode()
        assert json.loads(flat_texts(data, 6, 3)) == texts


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nested_lists, "_PIECE", 10)
    monkeypatch.setattr(arrays, "_PIECE", 3)


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("shape", [(1,), (50,), (5, 10), (10, 5, 1), (1, 2, 25)])
@pytest.mark.parametrize("datatype", ["INT32", "FP32", "BOOL"])
def test_an_array_in_pieces_is_the_same(shape: tuple[int, ...], datatype: str) -> None:
    values = np.arange(math.prod(shape)).reshape(shape)
    if datatype == "BOOL":
        values = values % 3 == 0
    data = msgspec.Raw(json.dumps(values.tolist()).encode())
    got = arrays.array_of_json(datatype, shape, data)
    assert got.shape == shape
    assert (got == values).all()
    assert json.loads(bytes(arrays.json_of(got))) == values.reshape(-1).tolist()


@pytest.mark.usefixtures("small_pieces")
def test_all_pieces_are_lists() -> None:
    flat = json.dumps([*range(20)]).encode()
    found = [json.loads(each) for each in pieces(flat)]
    assert len(found) > 5
    assert [each for piece in found for each in piece] == [*range(20)]
    with pytest.raises(ValueError, match=r"^data: expected `int`, got `str`$"):  # no wrong place
        arrays.array_of_json("INT8", [9], msgspec.Raw(b'[1,2,3,4,5,6,7,8,"9"]'))


@pytest.mark.parametrize(
    ("data", "why"),
    [
        ("[[],[1]]", "must be numbers, in lists that are not empty"),
        ("[[1],[]]", "must be numbers, in lists that are not empty"),
        ("[[1],[null]]", "expected `int`, got `null`"),
        ('{"a":[[1]],"b":2}', "differ in length"),
        ('[[1],["]"]]', "differ in length"),
        ("[[1]]", "its 1 elements are not the 2 of shape"),
        ("[]", "its 0 elements are not the 2 of shape"),
        ("[300,1]", "out of the range of INT8"),
    ],
)
def test_what_is_no_array_says_why(data: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        arrays.array_of_json("INT8", [2, 1], msgspec.Raw(data.encode()))


def test_a_request_has_not_too_many_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(infer_request, "_MOST_TENSORS", 1)
    with pytest.raises(InvalidInput, match="has 2 tensors, of which a request may have 1"):
        parse_header(header("x", "y"), memoryview(b""))


def header(*names: str) -> InferenceHeader:
    return msgspec.json.decode(body(*names), type=InferenceHeader)


def body(*names: str, size: int = 1) -> bytes:
    tensor = {"shape": [1, size], "datatype": "INT32", "data": [7] * size}
    return json.dumps({"inputs": [{"name": each, **tensor} for each in names]}).encode()


class Doubling:
    """A context of a model that doubles its items."""

    model = "twice"

    def __init__(self) -> None:
        self.description: dict[str, Any] = {}

    def header(self, name: bytes) -> bytes:
        return b""

    def hasten(self, timeout: float | None, priority: int) -> None:
        """Nothing to do."""

    def check_count(self, count: int) -> None:
        """Any number."""

    async def compute(self, items: list[Any]) -> list[Any]:
        return [2 * each for each in items]


@pytest.mark.parametrize("part", ["parse_header", "encode_answer"])
def test_a_large_request_is_read_and_answered_while_others_are(
    monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    monkeypatch.setattr(tensor_inference, "_AT_ONCE", 1000)
    monkeypatch.setattr(tensor_inference, "_NUMBERS_AT_ONCE", 500)
    real, others_are_done, threads = getattr(tensor_inference, part), threading.Event(), []

    def gated(*arguments: Any) -> Any:
        threads.append(threading.current_thread())
        if threads[-1] is not threading.main_thread():
            others_are_done.wait()
        return real(*arguments)

    monkeypatch.setattr(tensor_inference, part, gated)

    async def ask(size: int) -> list[int]:
        context: Any = Doubling()
        answer: Any = await tensor_inference.infer_tensors(body("x", size=size), context)
        found: list[int] = json.loads(answer)["outputs"][0]["data"]
        return found

    async def main() -> None:
        large = asyncio.create_task(ask(1000))
        assert await ask(1) == [14]
        others_are_done.set()
        assert await large == [14] * 1000

    asyncio.run(main())
    assert {each is threading.main_thread() for each in threads} == {True, False}
    assert len(threads) == 2, "a small one gets no thread"
