"""The Open Inference Protocol in one process: requests, results and answers as tables."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import struct
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from service_streamer.pipelines import CustomModel
from web_application import WebApplication

INFER = "/v2/models/m/infer"
TEXTS = {"task": "fill-mask"}
IMAGES = {"task": "image-classification"}


def tensor(
    datatype: str, shape: list[int], data: Any = None, name: str = "x", **more: Any
) -> dict[str, Any]:
    found = {"name": name, "datatype": datatype, "shape": shape, **more}
    return found if data is None else {**found, "data": data}


def binary(datatype: str, shape: list[int], size: int, name: str = "x") -> dict[str, Any]:
    return tensor(datatype, shape, name=name, parameters={"binary_data_size": size})


def texts(*elements: bytes) -> bytes:
    return b"".join(struct.pack("<I", len(each)) + each for each in elements)


def spec(name: str, datatype: str, *shape: int) -> Any:
    return {"name": name, "datatype": datatype, "shape": [*shape]}


class Tensors(WebApplication):
    """A model that returns its items, or the results that the test sets.

    Attributes:
        items: of all batches so far.
        results: of the next request; None for its items.
    """

    def __init__(self, **description: Any) -> None:
        self.items: list[Any] = []
        self.results: list[Any] | None = None
        super().__init__(self._predict, description, debug=True)

    def _predict(self, batch: list[Any]) -> list[Any]:
        self.items += batch
        return batch if self.results is None else self.results

    def ask(self, data: bytes = b"", **header: Any) -> httpx.Response:
        """Send a request with binary data behind its header."""
        body = json.dumps(header).encode()
        return self.post(INFER, body + data, inference_header_content_length=str(len(body)))

    def items_of(self, data: bytes = b"", **header: Any) -> list[Any]:
        """What the model gets of a request."""
        self.items.clear()
        parameters = {"binary_data_output": True, **header.pop("parameters", {})}
        response = self.ask(data, parameters=parameters, **header)
        assert response.status_code == 200, response.text
        return [*self.items]

    def outputs_of(self, results: list[Any], **header: Any) -> httpx.Response:
        """Ask for so many items as there are results."""
        self.results = results
        try:
            return self.ask(inputs=[tensor("INT8", [len(results)], [0] * len(results))], **header)
        finally:
            self.results = None


@pytest.fixture(scope="module")
def plain() -> Iterator[Tensors]:
    """It declares nothing."""
    with Tensors() as application:
        yield application


def refused(response: httpx.Response, status: int = 400) -> str:
    assert response.status_code == status, response.text
    return str(response.json()["error"])


# -- from requests

NUMPY = {
    "BOOL": "?", "UINT8": "u1", "UINT16": "u2", "UINT32": "u4", "UINT64": "u8", "INT8": "i1",
    "INT16": "i2", "INT32": "i4", "INT64": "i8", "FP16": "f2", "FP32": "f4", "FP64": "f8",
}  # fmt: skip


def test_numbers_are_the_same_as_json_and_as_binary_data(plain: Tensors) -> None:
    for datatype, kind in NUMPY.items():
        array = np.array([[0, 1, 1], [1, 0, 1]], kind)
        data = array.tobytes()
        for request, sent in (
            (tensor(datatype, [2, 3], array.tolist()), b""),
            (tensor(datatype, [2, 3], array.reshape(-1).tolist()), b""),
            (binary(datatype, [2, 3], len(data)), data),
        ):
            items = plain.items_of(sent, inputs=[request])
            assert {each.dtype for each in items} == {array.dtype}, datatype
            assert [each.tolist() for each in items] == array.tolist()
            # Binary data is not copied: the items are views of the request.
            assert not sent or not any(each.flags.writeable for each in items)


def test_bf16_arrives_as_float32_and_goes_as_it_came() -> None:
    values = np.array([1.0, -2.5, 3e38], "f4")
    data = (values.view("u4") >> 16).astype("u2").tobytes()
    with Tensors(outputs=[spec("y", "BF16", -1)]) as model:
        wanted = {"binary_data_output": True}
        response = model.ask(data, inputs=[binary("BF16", [3], 6)], parameters=wanted)
        assert {item.dtype for item in model.items} == {np.dtype(np.float32)}
        np.testing.assert_allclose(model.items, values, rtol=2**-7)
    assert response.content.endswith(data)


@pytest.mark.parametrize(
    ("request_", "data", "items"),
    [
        (tensor("BYTES", [2], ["a", "ü"]), b"", ["a", "ü"]),
        (tensor("BYTES", [2, 1], [["a"], ["ü"]]), b"", [["a"], ["ü"]]),
        (tensor("BYTES", [2, 2], [["a", "b"], ["c", "d"]]), b"", [["a", "b"], ["c", "d"]]),
        (binary("BYTES", [2], 11), texts(b"a", "ü".encode()), ["a", "ü"]),
        # If one is no text, none is.
        (binary("BYTES", [2], 10), texts(b"a", b"\xff"), [b"a", b"\xff"]),
        (tensor("INT32", [2, 1], [[1], [2]]), b"", [[1], [2]]),
        (tensor("INT32", [1, 1, 1], [[[1]]]), b"", [[[1]]]),
    ],
)
def test_a_row_of_a_tensor_is_an_item(
    plain: Tensors, request_: Any, data: bytes, items: list[Any]
) -> None:
    found = plain.items_of(data, inputs=[request_])
    assert [getattr(each, "tolist", lambda each=each: each)() for each in found] == items


@given(st.lists(st.text('[]",\\a\n\0é'), min_size=6, max_size=6), st.sampled_from([None, 1]))
def test_texts_keep_their_brackets(plain: Tensors, words: list[str], indent: int | None) -> None:
    for shape, nested in (
        ([6], words), ([6, 1], [[each] for each in words]), ([2, 3], [words[:3], words[3:]]),
    ):  # fmt: skip
        header = json.dumps({"inputs": [tensor("BYTES", shape, nested)]}, indent=indent)
        plain.items.clear()
        assert plain.post(INFER, header.encode()).status_code == 200
        assert plain.items == nested


def test_rows_of_several_tensors_are_dicts(plain: Tensors) -> None:
    data = texts(b"one", b"") + np.array([5, 6], "u2").tobytes()
    inputs = [
        binary("BYTES", [2], 11, "a"),
        tensor("INT8", [2, 1], [1, 2], "b"),
        binary("UINT16", [2], 4, "c"),
    ]
    first, second = (item["inputs"] for item in plain.items_of(data, inputs=inputs))
    assert [*first] == ["a", "b", "c"]
    assert (first["a"], first["b"].tolist(), first["c"].tolist()) == ("one", [1], 5)
    assert (second["a"], second["b"].tolist(), second["c"].tolist()) == ("", [2], 6)


@pytest.mark.parametrize(
    ("each", "data", "text"),
    [
        (tensor("FLOAT", [1], [1]), b"", "datatype"), (tensor("FP32", [], [1]), b"", "shape"),
        (tensor("FP32", [0], []), b"", "at least 1"),
        (tensor("FP32", [1 << 63], [1]), b"", "9223372036854775807"),
        (tensor("BYTES", [(1 << 63) - 1] * 32, ["a"]), b"", "262144"),
        (tensor("FP32", [1] * 33, [1]), b"", "32"),
        (tensor("FP32", [2], [1]), b"", "its 1 elements"),
        (tensor("FP32", [1], ["1"]), b"", "`str`"),
        (tensor("FP32", [2, 1], [[1], 2]), b"", "differ in length"),
        (tensor("FP32", [2, 2], [1, [2]]), b"", "differ in length"),
        (tensor("FP32", [2, 2], [[1], [[2]]]), b"", "differ in length"),
        (tensor("FP32", [2, 2], {"a": 1, "b": [[2]]}), b"", "differ in length"),
        (tensor("FP32", [3, 1], [[1, 2], [3]]), b"", "differ in length"),
        (tensor("FP32", [2, 1], [[1], ["]"]]), b"", "differ in length"),
        (tensor("FP32", [2], [[1], [2]]), b"", "nested 2 deep"),
        (tensor("FP32", [2, 1], [[], [1]]), b"", "not empty"),
        (tensor("FP32", [1], [1, 2, 3]), b"", "its 3 elements"),
        (tensor("FP32", [2], []), b"", "its 0 elements"),
        (tensor("FP32", [2, 1], [[1], [None]]), b"", "`null`"),
        (tensor("INT32", [1], [1.5]), b"", "`float`"),
        (tensor("INT32", [1], [True]), b"", "`bool`"), (tensor("BOOL", [1], [1]), b"", "`int`"),
        (tensor("UINT8", [1], [-1]), b"", "UINT8"), (tensor("FP16", [1], [1e5]), b"", "FP16"),
        (tensor("FP32", [1], [1e39]), b"", "FP32"), (tensor("INT64", [1], [2**63]), b"", "INT64"),
        (tensor("BF16", [1], [1.0]), b"", "BF16"), (tensor("BYTES", [1], [1]), b"", "texts"),
        (tensor("BYTES", [2, 1], [["a"], "b"]), b"", "differ in length"),
        (tensor("BYTES", [1, 1], [[["a"]]]), b"", "nested 3 deep"),
        (tensor("BYTES", [2, 1], [["a"], [1]]), b"", "texts"),
        (tensor("BYTES", [2], ["a"]), b"", "its 1 elements"),
        (tensor("BYTES", [1], ["a", "b"]), b"", "its 2 elements"),
        (tensor("FP32", [1]), b"", "binary_data_size"),
        (binary("FP32", [1], 4) | {"data": [1]}, b"1234", "binary_data_size"),
        (binary("FP32", [1], 4), b"123", "3 that follow"),
        (binary("FP32", [1], 4), b"12345", "1 bytes"),
        (binary("FP32", [2], 4), b"1234", "its 4 bytes"),
        (binary("FP32", [1 << 60, 1 << 60], 4), b"1234", "its 4 bytes"),
        (binary("FP32", [1], -1), b"", "binary_data_size"),
        (binary("BYTES", [1], 3), b"123", "cut off"),
        (binary("BYTES", [1], 5), b"\2\0\0\0a", "cut off"),
        (binary("BYTES", [1], 5), b"\xff\xff\xff\xffa", "cut off"),
        (binary("BYTES", [1], 8), texts(b"", b""), "its 1 or more elements"),
        (binary("BYTES", [3], 8), texts(b"", b""), "its 2 elements"),
        (tensor("FP32", [1], parameters={"shared_memory_region": "a"}), b"", "'shared_memory"),
    ],
)  # fmt: skip
def test_a_tensor_is_refused_with_what_is_wrong_with_it(
    plain: Tensors, each: dict[str, Any], data: bytes, text: str
) -> None:
    said = refused(plain.ask(data, inputs=[each]))
    assert said.startswith("inputs")
    assert text in said


def test_very_deep_lists_and_a_size_that_no_computer_prints_are_refused(plain: Tensors) -> None:
    header = json.dumps({"inputs": [tensor("FP32", [1], "HERE")]}).encode()
    nested = b"[" * 500 + b"]" * 500
    assert "nested 500 deep" in refused(plain.post(INFER, header.replace(b'"HERE"', nested)))
    huge = header.replace(b"[1]", b"[1%b]" % (b"0" * 4000), 1)
    assert "at most" in refused(plain.post(INFER, huge))


@pytest.fixture(scope="module")
def models() -> Iterator[dict[str, Tensors]]:
    """By what they describe themselves as."""
    described: dict[str, Any] = {
        "texts": TEXTS, "images": IMAGES, "bytes": {"inputs": [spec("x", "BYTES", -1)]},
        "two": {"inputs": [spec("x", "FP32", -1, 3, -1), spec("n", "INT64", -1)]}, "any": {},
    }  # fmt: skip
    with contextlib.ExitStack() as stack:
        yield {name: stack.enter_context(Tensors(**each)) for name, each in described.items()}


X, N = tensor("FP32", [2, 3, 1], [1.0] * 6), tensor("INT64", [2], [1, 2], "n")


@pytest.mark.parametrize(
    ("model", "inputs", "data", "text"),
    [
        ("any", [], b"", "empty"),
        ("any", [tensor("INT8", [1], [1])] * 2, b"", "'x'"),
        ("any", [tensor("INT8", [1], [1]), tensor("INT8", [2], [1, 2], "y")], b"",
         "inputs[1].shape"),
        ("texts", [tensor("INT8", [1], [1])], b"", "not INT8"),
        ("images", [tensor("INT8", [1], [1])], b"", "images"),
        ("texts", [tensor("BYTES", [1, 2], ["a", "b"])], b"", "[1]"),
        ("texts", [tensor("BYTES", [1], ["a"]), tensor("BYTES", [1], ["a"], "y")], b"", "not 2"),
        ("texts", [binary("BYTES", [2], 10)], texts(b"a", b"\xff"), "element 1"),
        ("two", [X], b"", "'n'"),
        ("two", [tensor("FP32", [2, 3, 1], [1.0] * 6, "y")], b"", "'y'"),
        ("two", [tensor("FP64", [2, 3, 1], [1.0] * 6)], b"", "inputs[0].datatype"),
        ("two", [tensor("FP32", [2, 4, 1], [1.0] * 8)], b"", "[-1, 3, -1]"),
        ("two", [tensor("FP32", [2, 3], [1.0] * 6)], b"", "not [2, 3]"),
    ],
)  # fmt: skip
def test_tensors_are_refused_when_the_model_takes_others(
    models: dict[str, Tensors], model: str, inputs: Any, data: bytes, text: str
) -> None:
    assert text in refused(models[model].ask(data, inputs=inputs))


def test_items_are_what_the_model_takes(models: dict[str, Tensors]) -> None:
    for inputs in ([X, N], [N, X]):
        assert len(models["two"].items_of(inputs=inputs)) == 2
    word = [tensor("BYTES", [1], ["a"])]
    assert models["bytes"].items_of(inputs=word) == [b"a"]
    assert models["any"].items_of(inputs=word) == ["a"]
    files = texts(b"a", b"\xff")
    found = models["images"].items_of(files, inputs=[binary("BYTES", [2], 10)])
    assert found == [b"a", b"\xff"]


def test_a_request_is_refused_when_it_has_too_many_parts(plain: Tensors) -> None:
    many = [tensor("INT8", [1], [1], str(number)) for number in range(1025)]
    wanted = [{"name": each["name"]} for each in many]
    for name, body in (
        ("inputs", {"inputs": many}),
        ("outputs", {"inputs": many[:1], "outputs": wanted}),
        ("parameters", {"inputs": many[:1], "parameters": {each["name"]: 1 for each in many}}),
    ):
        said = refused(plain.ask(**body))
        assert said.startswith(name)
        assert "1024" in said


@pytest.mark.parametrize(
    "parameters",
    [{"timeout": -1}, {"timeout": 1.5}, {"priority": "1"}, {"priority": True}, {"sequence_id": 7}],
)
def test_a_wrong_parameter_is_refused_with_its_name(
    plain: Tensors, parameters: dict[str, Any]
) -> None:
    inputs = [tensor("INT8", [1], [1])]
    [name] = parameters
    said = refused(plain.ask(inputs=inputs, parameters=parameters))
    assert said.startswith("parameters")
    assert name in said


def test_parameters_of_the_call_are_not_the_models(plain: Tensors) -> None:
    inputs = [tensor("INT8", [1], [1], parameters=None)]
    assert plain.ask(inputs=inputs, parameters=None).status_code == 200
    for parameters in (
        {"timeout": 0, "priority": 0},
        {"timeout": 60_000_000, "priority": 2},
        {"sequence_id": 0, "sequence_start": False},
        {"triton_enable_empty_final_response": True},
    ):
        assert plain.items_of(inputs=inputs, parameters=parameters) == [1]
    with Tensors(takes_parameters=True) as model:
        [item] = model.items_of(inputs=inputs, parameters={"priority": 2, "top_k": 3})
        assert item["parameters"] == {"top_k": 3}


# -- to answers


@pytest.mark.parametrize(
    ("results", "expected"),
    [
        ([1, 2], [("output", "INT64", [2], [1, 2])]),
        ([1.5, 2], [("output", "FP64", [2], [1.5, 2.0])]),
        ([True, False], [("output", "BOOL", [2], [True, False])]),
        ([np.float32(1.5)], [("output", "FP32", [1], [1.5])]),
        ([[1.0, 2.0], [3.0, 4.0]], [("output", "FP64", [2, 2], [1, 2, 3, 4])]),
        ([np.ones(2, "f2")] * 2, [("output", "FP16", [2, 2], [1, 1, 1, 1])]),
        ([np.ones(2, ">i4")], [("output", "INT32", [1, 2], [1, 1])]),
        ([np.ones((0, 2), "u1")], [("output", "UINT8", [1, 0, 2], [])]),
        (["a", "b"], [("output", "BYTES", [2], ["a", "b"])]),
        ([b"a"], [("output", "BYTES", [1], ["a"])]),
        (["a", 1], [("output", "BYTES", [2], ['"a"', "1"])]),
        ([1, True], [("output", "BYTES", [2], ["1", "true"])]),
        ([1, None], [("output", "BYTES", [2], ["1", "null"])]),
        ([2**64], [("output", "BYTES", [1], ["18446744073709551616"])]),
        ([[1.0], [1.0, 2.0]], [("output", "BYTES", [2], ["[1.0]", "[1.0,2.0]"])]),
        ([np.ones(1), np.ones(2)], [("output", "BYTES", [2], ["[1.0]", "[1.0,1.0]"])]),
        ([[{"a": 1}]], [("output", "BYTES", [1], ['[{"a":1}]'])]),
        ([{"a": 1, "b": "c"}], [("output", "BYTES", [1], ['{"a":1,"b":"c"}'])]),
        ([{"a": 1}, {"b": 1}], [("output", "BYTES", [2], ['{"a":1}', '{"b":1}'])]),
        ([[], []], [("output", "BYTES", [2], ["[]", "[]"])]),
        ([{}], [("output", "BYTES", [1], ["{}"])]),
        (
            [{"a": 1, "b": np.ones(2)}, {"a": 2, "b": np.ones(2)}],
            [("a", "INT64", [2], [1, 2]), ("b", "FP64", [2, 2], [1, 1, 1, 1])],
        ),
        ([np.array(["a"])], [("output", "BYTES", [1], ['["a"]'])]),
    ],
)
def test_results_become_tensors(plain: Tensors, results: list[Any], expected: list[Any]) -> None:
    assert plain.outputs_of(results).json() == {
        "model_name": "m",
        "model_version": "1",
        "outputs": [
            {"name": name, "datatype": datatype, "shape": shape, "data": data}
            for name, datatype, shape, data in expected
        ],
    }


def test_outputs_are_binary_data_where_the_request_wants_it(plain: Tensors) -> None:
    wanted = [{"name": "b", "parameters": {"binary_data": True}}, {"name": "a"}]
    response = plain.outputs_of([{"a": 1, "b": np.ones(2, "f4")}], id="7", outputs=wanted)
    size = int(response.headers["inference-header-content-length"])
    header = json.loads(response.content[:size])
    assert header["id"] == "7"
    assert header["outputs"] == [
        {
            "name": "b", "datatype": "FP32", "shape": [1, 2], "parameters": {"binary_data_size": 8},
        },
        {"name": "a", "datatype": "INT64", "shape": [1], "data": [1]},
    ]  # fmt: skip
    assert response.content[size:] == np.ones(2, "f4").tobytes()


def test_bytes_that_are_no_text_go_as_binary_data_only(plain: Tensors) -> None:
    results = [b"\xff", b""]
    assert "binary_data" in refused(plain.outputs_of(results))
    response = plain.outputs_of(results, parameters={"binary_data_output": True})
    assert response.content.endswith(texts(*results))


@pytest.mark.parametrize(
    ("names", "text"), [(["b"], "outputs[0].name"), (["output", "output"], "outputs[1].name")]
)
def test_an_output_is_refused_when_it_is_unknown_or_named_twice(
    plain: Tensors, names: list[str], text: str
) -> None:
    said = refused(plain.outputs_of([1], outputs=[{"name": name} for name in names]))
    assert said.startswith(text)


@pytest.mark.parametrize(
    ("results", "output", "text"),
    [
        ([1.5, 2], spec("y", "FP32", -1), ""), ([1, 2], spec("y", "UINT8", -1), ""),
        ([np.ones(2)], spec("y", "FP32", -1, 2), ""),
        ([{"y": np.ones(2, "i8")}], spec("y", "FP32", -1, -1), ""),
        ([{"y": "a"}, {"y": {"b": 1}}], spec("y", "BYTES", -1), ""),
        ([["a", b"b"], ("c", 1)], spec("y", "BYTES", -1, 2), ["a", "b", "c", "1"]),
        ([{"y": np.array([["a"], ["b"]])}], spec("y", "BYTES", -1, 2, -1), ["a", "b"]),
        ([np.str_("a")], spec("y", "BYTES", -1), ["a"]),
        (["a"], spec("y", "BYTES", -1, 1), "[-1, 1]"),
        ([["a"], ["b", "c"]], spec("y", "BYTES", -1, -1), "[-1, -1]"),
        ([["a"]], spec("y", "BYTES", -1, 2), "[-1, 2]"),
        ([np.longdouble(1)], [], "longdouble, which is not JSON"),
        ([1.5], spec("y", "INT32", -1), "float64"), (["a"], spec("y", "FP32", -1), "no numbers"),
        ([np.ones(3)], spec("y", "FP64", -1, 2), "[-1, 2]"),
        ([{"z": 1}], spec("y", "INT32", -1), "['z']"),
        ([1], [spec("y", "INT8", -1), spec("z", "INT8", -1)], "'int'"),  # it must have all
    ],
)  # fmt: skip
def test_results_are_compared_with_the_declared_output(
    results: list[Any], output: Any, text: str | list[str]
) -> None:
    with Tensors(outputs=output if isinstance(output, list) else [output]) as model:
        response = model.outputs_of(results)
    if text and isinstance(text, str):
        assert text in refused(response, 500)
    else:
        [found] = response.json()["outputs"]
        assert (found["name"], found["datatype"]) == ("y", output["datatype"])
        assert len(found["shape"]) == len(output["shape"])
        assert math.prod(found["shape"]) == len(found["data"])
        assert not text or found["data"] == text


def test_a_task_declares_its_tensors() -> None:
    for description, inputs, outputs in (
        (TEXTS, [spec("text", "BYTES", -1)], [spec("output", "BYTES", -1)]),
        (IMAGES, [spec("image", "BYTES", -1)], [spec("output", "BYTES", -1)]),
        ({"task": "feature-extraction"}, [spec("text", "BYTES", -1)],
         [spec("output", "FP64", -1, -1, -1)]),
        ({}, [], []),
    ):  # fmt: skip
        with Tensors(**description) as model:
            about = model.get("/v2/models/m").json()
        assert (about["inputs"], about["outputs"]) == (inputs, outputs)
        assert about["platform"] == ("transformers" if description else "python")


# -- large requests


@pytest.mark.parametrize(
    ("datatype", "shape"),
    [("INT32", (40_000,)), ("FP32", (200, 200)), ("BOOL", (4, 10_000, 1))],
)
def test_a_large_array_is_the_same_in_pieces(datatype: str, shape: tuple[int, ...]) -> None:
    """More than 64 kB of JSON, and more than 16,384 numbers."""
    values = np.arange(math.prod(shape)).reshape(shape)
    if datatype == "BOOL":
        values = values % 3 == 0
    whole = tensor(datatype, [1, *shape], [values.tolist()])
    with Tensors() as model:  # it uses a thread, which ends with it
        answer = model.ask(inputs=[whole]).json()["outputs"][0]
    assert answer["shape"] == whole["shape"]
    assert answer["data"] == values.reshape(-1).tolist()


def test_a_wrong_number_behind_many_is_refused_without_a_wrong_place(plain: Tensors) -> None:
    said = refused(plain.ask(inputs=[tensor("INT32", [40_000], [1] * 39_999 + ["9"])]))
    assert said == "inputs[0]: data: expected `int`, got `str`"


class Held(ThreadPoolExecutor):
    """An executor that begins nothing before it may."""

    def __init__(self) -> None:
        super().__init__(1)
        self.held: list[tuple[Any, Any, Future[Any]]] = []

    def submit(self, function: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.held.append((function, args, future))
        return future

    def let_go(self) -> None:
        for function, args, future in self.held:
            future.set_result(function(*args))
        self.held.clear()


@pytest.mark.parametrize(
    ("body", "wanted", "is_read_apart"),
    [
        (tensor("INT32", [1, 150_000], [7] * 150_000), True, True),
        (binary("INT32", [1, 150_000], 600_000), False, False),
    ],
    ids=["reading", "writing"],
)
def test_others_are_answered_while_a_large_request_is_read_or_its_answer_written(
    body: dict[str, Any], wanted: bool, is_read_apart: bool
) -> None:
    data = b"" if is_read_apart else np.full(150_000, 7, "i4").tobytes()
    header = json.dumps({"inputs": [body], "parameters": {"binary_data_output": wanted}}).encode()
    small = {"inputs": [tensor("INT32", [1], [7])]}

    async def main() -> None:
        executor = Held()
        asyncio.get_running_loop().set_default_executor(executor)
        large = asyncio.create_task(
            model.send(INFER, header + data, inference_header_content_length=str(len(header)))
        )
        while not (executor.held or large.done()):
            await asyncio.sleep(0)
        assert len(executor.held) == 1
        assert bool(model.items) != is_read_apart
        assert (await model.send(INFER, small)).json()["outputs"][0]["data"] == [7]
        assert len(executor.held) == 1, "a small one is read in the event loop"
        while not large.done():  # what was read, or is to be written, and what was computed
            executor.let_go()
            await asyncio.sleep(0)
        response = await large
        assert response.status_code == 200
        assert len(response.content) > 300_000
        executor.shutdown()

    with Tensors() as model:
        model.run(main())


# -- in the worker


def custom(target: str) -> CustomModel:
    model = CustomModel()
    model.init_model(target)
    return model


@pytest.mark.parametrize(
    "value",
    [
        "x", {"x": 1}, ["x"], [("x", "FP32")], [("", "FP32", (-1,))], [("x", "float32", (-1,))],
        [("x", "FP32", -1)], [("x", "FP32", ())], [("x", "FP32", (1, 3))], [("x", "FP32", (-1, 0))],
        [("x", "FP32", (-1, 2.0))], [("x", "FP32", (-1,)), ("x", "FP32", (-1,))],
    ],
)  # fmt: skip
def test_a_wrong_declaration_is_refused(value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tensor_models.Added.inputs", value)
    with pytest.raises((TypeError, ValueError), match=r"Added\.inputs"):
        custom("tensor_models:Added")


def test_every_datatype_can_be_declared(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [*NUMPY, "BF16", "BYTES"]
    monkeypatch.setattr(
        "tensor_models.Added.outputs", tuple((name, name, (-1, 2)) for name in names)
    )
    described = custom("tensor_models:Added").describe()
    assert [each["datatype"] for each in described["outputs"]] == names


def test_results_of_arrays_stay_arrays_and_others_become_plain() -> None:
    model = custom("tensor_models:twice")
    array, plain = model.predict([np.ones(2), {"do": "predict", "inputs": 2, "parameters": {}}])
    assert array.tolist() == [2, 2]
    assert isinstance(array, np.ndarray)
    assert plain == 4


def test_torch_is_not_needed_to_read_a_result() -> None:
    import torch

    tensor = torch.ones(2, dtype=torch.bfloat16, requires_grad=True)
    model = custom("tensor_models:echo")
    [result] = model.predict([{"a": np.ones(1), "b": tensor}])
    assert isinstance(result["b"], np.ndarray)
    assert result["b"].dtype == np.float32


def test_a_model_of_rows_gets_one_array_for_each_shape() -> None:
    model = custom("tensor_models:Rows")
    assert model.wants_rows
    items: list[Any] = [np.full((3, size), size, "f4") for size in (1, 2, 1)]
    describe = {"do": "describe", "inputs": None, "parameters": {}}
    first, about, second, third = model.predict([items[0], describe, *items[1:]])
    assert (first["rows"], first["sum"]) == (2, 3)
    assert (second["rows"], second["sum"]) == (1, 12)
    assert (third["rows"], third["sum"]) == (2, 3)
    assert about["inputs"] == [{"name": "x", "datatype": "FP32", "shape": [-1, 3, -1]}]
