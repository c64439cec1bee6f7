"""The Open Inference Protocol without a network: requests, items, results and answers as tables."""

from __future__ import annotations

import json
import struct
from typing import Any

import msgspec
import numpy as np
import pytest

from service_streamer import BadModelOutput, InvalidInput, ManagedModel
from service_streamer.pipelines.custom import CustomModel
from service_streamer.pipelines.declared_tensors import DATATYPES, declared_tensors
from service_streamer.serve.v2.infer_answer import (
    binary_of,
    check_wanted,
    chosen,
    encode_answer,
    output_tensors,
)
from service_streamer.serve.v2.infer_request import (
    InferenceHeader,
    InferRequest,
    InputTensor,
    WantedOutput,
    calling,
    parse_header,
)
from service_streamer.serve.v2.model_metadata import (
    inputs_of,
    model_metadata,
    outputs_of,
    wanted_of,
)
from service_streamer.serve.v2.tensor_items import check_tensors, count_of, items_of

TEXTS = {"task": "fill-mask"}
IMAGES = {"task": "image-classification"}


def parsed(binary: bytes = b"", **header: Any) -> InferRequest:
    decoded = msgspec.json.decode(json.dumps(header).encode(), type=InferenceHeader)
    return parse_header(decoded, memoryview(binary))


def tensor(
    datatype: str, shape: list[int], data: Any = None, name: str = "x", **more: Any
) -> dict[str, Any]:
    found = {"name": name, "datatype": datatype, "shape": shape, **more}
    return found if data is None else {**found, "data": data}


def binary(datatype: str, shape: list[int], size: int, name: str = "x") -> dict[str, Any]:
    return tensor(datatype, shape, name=name, parameters={"binary_data_size": size})


def texts(*elements: bytes) -> bytes:
    return b"".join(struct.pack("<I", len(each)) + each for each in elements)


NUMPY = {
    "BOOL": "?", "UINT8": "u1", "UINT16": "u2", "UINT32": "u4", "UINT64": "u8", "INT8": "i1",
    "INT16": "i2", "INT32": "i4", "INT64": "i8", "FP16": "f2", "FP32": "f4", "FP64": "f8",
}  # fmt: skip


# -- from requests


@pytest.mark.parametrize("datatype", NUMPY)
def test_numbers_in_json_and_in_binary_are_the_same(datatype: str) -> None:
    array = np.array([[0, 1, 1], [1, 0, 1]], NUMPY[datatype])
    data = array.tobytes()
    for request in (
        parsed(inputs=[tensor(datatype, [2, 3], array.tolist())]),
        parsed(inputs=[tensor(datatype, [2, 3], array.reshape(-1).tolist())]),
        parsed(data, inputs=[binary(datatype, [2, 3], len(data))]),
    ):
        found = request.inputs[0].values
        assert found.dtype == array.dtype
        assert found.tolist() == array.tolist()


def test_binary_data_is_not_copied() -> None:
    data = b"..." + np.arange(6, dtype="f4").tobytes()  # at no multiple of its size
    request = parse_header(
        msgspec.convert({"inputs": [binary("FP32", [2, 3], 24)]}, InferenceHeader),
        memoryview(data)[3:],
    )
    items = items_of(request, {})
    assert [item.tolist() for item in items] == [[0, 1, 2], [3, 4, 5]]
    assert all(np.shares_memory(item, np.frombuffer(data, "u1")) for item in items)


def test_bf16_arrives_as_float32_and_goes_as_it_came() -> None:
    values = np.array([1.0, -2.5, 3e38], "f4")
    data = (values.view("u4") >> 16).astype("u2").tobytes()
    request = parsed(data, inputs=[binary("BF16", [3], 6)])
    found = request.inputs[0].values
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, values, rtol=2**-7)
    specs: Any = [{"name": "y", "datatype": "BF16", "shape": [-1]}]
    [answer] = output_tensors([*found], specs)
    assert binary_of(answer) == data


def test_texts() -> None:
    for request in (
        parsed(inputs=[tensor("BYTES", [2], ["a", "ü"])]),
        parsed(inputs=[tensor("BYTES", [2, 1], [["a"], ["ü"]])]),
        parsed(texts(b"a", "ü".encode()), inputs=[binary("BYTES", [2], 11)]),
    ):
        assert items_of(request, TEXTS) == ["a", "ü"]


def test_several_inputs_in_one_body() -> None:
    data = texts(b"one", b"") + np.array([5, 6], "u2").tobytes()
    request = parsed(
        data,
        inputs=[
            binary("BYTES", [2], 11, "a"),
            tensor("INT8", [2, 1], [1, 2], "b"),
            binary("UINT16", [2], 4, "c"),
        ],
    )
    assert count_of(request.inputs) == 2
    first, second = items_of(request, {})
    assert [*first] == ["a", "b", "c"]
    assert (first["a"], first["b"].tolist(), first["c"].tolist()) == ("one", [1], 5)
    assert (second["a"], second["b"].tolist(), second["c"].tolist()) == ("", [2], 6)


@pytest.mark.parametrize(
    ("each", "data", "text"),
    [
        (tensor("FLOAT", [1], [1]), b"", "inputs[0].datatype: must be one of BOOL, UINT8"),
        (tensor("FP32", [], [1]), b"", "inputs[0].shape: must have a dimension"),
        (tensor("FP32", [0], []), b"", "each size must be at least 1; not 0"),
        (tensor("FP32", [-1], [1]), b"", "each size must be at least 1; not -1"),
        (tensor("FP32", [1 << 63], [1]), b"", "each size must be at most 9223372036854775807"),
        (tensor("BYTES", [10**4000] * 2, ["a"]), b"", "each size must be at most"),
        (tensor("BYTES", [(1 << 63) - 1] * 32, ["a"]), b"", "of which a tensor may have 262144"),
        (tensor("FP32", [1] * 33, [1]), b"", "more than 32 dimensions"),
        (tensor("FP32", [2], [1]), b"", "its 1 elements are not the 2 of shape [2]"),
        (tensor("FP32", [1], ["1"]), b"", "data: expected `float`, got `str`"),
        (tensor("FP32", [1], 1), b"", "data: expected `array`, got `int`"),
        (tensor("FP32", [2, 1], [[1], 2]), b"", "the lists within it differ in length"),
        (tensor("FP32", [3, 1], [[1, 2], [3]]), b"", "the lists within it differ in length"),
        (tensor("FP32", [2], [[1], [2]]), b"", "nested 2 deep, but the shape has 1 dimension"),
        (tensor("INT32", [1], [1.5]), b"", "data: expected `int`, got `float`"),
        (tensor("INT32", [1], [True]), b"", "data: expected `int`, got `bool`"),
        (tensor("BOOL", [1], [1]), b"", "data: expected `bool`, got `int`"),
        (tensor("UINT8", [1], [-1]), b"", "a number is out of the range of UINT8"),
        (tensor("FP16", [1], [1e5]), b"", "a number is out of the range of FP16"),
        (tensor("FP32", [1], [1e39]), b"", "a number is out of the range of FP32"),
        (tensor("INT64", [1], [2**63]), b"", "a number is out of the range of INT64"),
        (tensor("BF16", [1], [1.0]), b"", "BF16 has no form in JSON"),
        (tensor("BYTES", [1], [1]), b"", "data must be a list of texts"),
        (tensor("BYTES", [2, 1], [["a"], "b"]), b"", "the lists within it differ in length"),
        (tensor("BYTES", [2, 1], [["a"], [1]]), b"", "or of lists of one depth"),
        (tensor("BYTES", [1], "a"), b"", "data must be a list of texts"),
        (tensor("BYTES", [2], ["a"]), b"", "its 1 elements are not the 2"),
        (tensor("BYTES", [1 << 19], ["a"]), b"", "of which a tensor may have 262144"),
        (tensor("FP32", [1]), b"", "must have either data or the parameter binary_data_size"),
        (binary("FP32", [1], 4) | {"data": [1]}, b"1234", "must have either data or the parameter"),
        (binary("FP32", [1], 4), b"123", "4 bytes are more than the 3 that follow"),
        (binary("FP32", [1], 4), b"12345", "1 bytes of binary data belong to no input"),
        (binary("FP32", [2], 4), b"1234", "its 4 bytes are not the 8 of shape [2]"),
        (binary("FP32", [1 << 60, 1 << 60], 4), b"1234", "its 4 bytes are not the"),
        (binary("FP32", [1], -1), b"", "binary_data_size: must be a number of bytes"),
        (binary("BYTES", [1], 3), b"123", "an element is cut off"),
        (binary("BYTES", [1], 5), b"\2\0\0\0a", "an element of 2 bytes is cut off"),
        (binary("BYTES", [1], 5), b"\xff\xff\xff\xffa", "is cut off"),
        (binary("BYTES", [1], 8), texts(b"", b""), "its 1 or more elements are not the 1"),
        (binary("BYTES", [3], 8), texts(b"", b""), "its 2 elements are not the 3"),
        (
            tensor("FP32", [1], parameters={"shared_memory_region": "a"}),
            b"",
            "'shared_memory_region' is not supported",
        ),
    ],
)
def test_what_is_wrong_is_said(each: dict[str, Any], data: bytes, text: str) -> None:
    with pytest.raises(InvalidInput) as raised:
        parsed(data, inputs=[each])
    assert text in str(raised.value)
    assert str(raised.value).startswith("inputs")


@pytest.mark.parametrize(
    ("inputs", "description", "text"),
    [
        ([], {}, "inputs: must have a tensor"),
        ([tensor("INT8", [1], [1]), tensor("INT8", [1], [1])], {}, "two inputs 'x'"),
        (
            [tensor("INT8", [1], [1]), tensor("INT8", [2], [1, 2], "y")],
            {},
            "inputs[1].shape: the first size, that of the batch, must be that of the other",
        ),
        ([tensor("INT8", [1], [1])], TEXTS, "must be BYTES, a tensor of texts; not INT8"),
        ([tensor("INT8", [1], [1])], IMAGES, "must be BYTES, a tensor of images, as files"),
        ([tensor("BYTES", [1, 2], ["a", "b"])], TEXTS, "must be [1], an element for each input"),
        (
            [tensor("BYTES", [1], ["a"]), tensor("BYTES", [1], ["a"], "y")],
            TEXTS,
            "the model takes one tensor, of texts; not 2",
        ),
    ],
)
def test_tensors_that_make_no_items(inputs: Any, description: Any, text: str) -> None:
    request = parsed(inputs=inputs)
    with pytest.raises(InvalidInput) as raised:
        count_of(request.inputs) and items_of(request, description)
    assert text in str(raised.value)


def test_many_inputs_are_not_compared_with_each_other() -> None:
    compared = 0

    class Name(str):
        __slots__ = ()
        __hash__ = str.__hash__

        def __eq__(self, other: object) -> bool:
            nonlocal compared
            compared += 1
            return str.__eq__(self, other)

    inputs = [InputTensor(Name(number), "INT8", [1], None) for number in range(300)]
    assert count_of(inputs) == 1
    assert compared < 300


def test_a_text_that_is_none() -> None:
    request = parsed(texts(b"a", b"\xff"), inputs=[binary("BYTES", [2], 10)])
    with pytest.raises(InvalidInput, match=r"inputs\[0\]: element 1 is not valid UTF-8"):
        items_of(request, TEXTS)
    assert items_of(request, IMAGES) == [b"a", b"\xff"]
    assert items_of(request, {}) == [b"a", b"\xff"], "one that is no text: none is"


def test_bytes_of_a_model_that_declares_them() -> None:
    specs = [{"name": "x", "datatype": "BYTES", "shape": [-1]}]
    request = parsed(inputs=[tensor("BYTES", [1], ["a"])])
    assert items_of(request, {}) == ["a"]
    assert items_of(request, {"inputs": specs}) == [b"a"]


def test_texts_of_several_dimensions() -> None:
    request = parsed(inputs=[tensor("BYTES", [2, 2], [["a", "b"], ["c", "d"]])])
    assert items_of(request, {}) == [["a", "b"], ["c", "d"]]


SPECS: Any = [
    {"name": "x", "datatype": "FP32", "shape": [-1, 3, -1]},
    {"name": "n", "datatype": "INT64", "shape": [-1]},
]


def given(name: str, datatype: str, shape: list[int]) -> InputTensor:
    return InputTensor(name, datatype, shape, None)


@pytest.mark.parametrize(
    ("inputs", "text"),
    [
        ([given("x", "FP32", [2, 3, 5]), given("n", "INT64", [2])], ""),
        ([given("n", "INT64", [2]), given("x", "FP32", [2, 3, 1])], ""),
        ([given("x", "FP32", [2, 3, 5])], "inputs: 'n' must be there too"),
        ([given("y", "FP32", [2, 3, 5])], "the model has no input 'y'; it has 'x', 'n'"),
        ([given("x", "FP64", [2, 3, 5])], "inputs[0].datatype: must be FP32; not FP64"),
        ([given("x", "FP32", [2, 4, 5])], "must be [-1, 3, -1], where -1 is any size"),
        ([given("x", "FP32", [2, 3])], "not [2, 3]"),
    ],
)
def test_what_a_model_declares_is_compared(inputs: list[InputTensor], text: str) -> None:
    check_tensors(inputs, [])
    if not text:
        check_tensors(inputs, SPECS)
        return
    with pytest.raises(InvalidInput) as raised:
        check_tensors(inputs, SPECS)
    assert text in str(raised.value)


@pytest.mark.parametrize(
    ("parameters", "timeout", "priority", "rest"),
    [
        ({}, None, 0, {}),
        ({"timeout": 1_500_000}, 1.5, 0, {}),
        ({"timeout": 0, "priority": 0}, None, 0, {}),
        ({"priority": 2, "top_k": 3}, None, -2, {"top_k": 3}),
        ({"sequence_id": 0, "sequence_start": False}, None, 0, {}),
    ],
)
def test_parameters_of_a_call(
    parameters: dict[str, Any], timeout: float | None, priority: int, rest: dict[str, Any]
) -> None:
    assert calling(parameters) == (timeout, priority, rest)


@pytest.mark.parametrize(
    "parameters",
    [{"timeout": -1}, {"timeout": 1.5}, {"priority": "1"}, {"priority": True}, {"sequence_id": 7}],
)
def test_parameters_that_are_wrong(parameters: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput, match=r"parameters"):
        calling(parameters)


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
def test_results_become_tensors(results: list[Any], expected: list[Any]) -> None:
    request = InferRequest("", {}, [], None, False)
    answer, parts = encode_answer("m", request, chosen(output_tensors(results, []), request))
    assert not parts
    assert json.loads(answer) == {
        "model_name": "m",
        "model_version": "1",
        "outputs": [
            {"name": name, "datatype": datatype, "shape": shape, "data": data}
            for name, datatype, shape, data in expected
        ],
    }


def test_some_outputs_as_binary_data() -> None:
    tensors = output_tensors([{"a": 1, "b": np.ones(2, "f4")}], [])
    request = InferRequest("7", {}, [], [WantedOutput("b", True), WantedOutput("a", False)], False)
    answer, parts = encode_answer("m", request, chosen(tensors, request))
    assert json.loads(answer)["id"] == "7"
    assert json.loads(answer)["outputs"] == [
        {
            "name": "b",
            "datatype": "FP32",
            "shape": [1, 2],
            "parameters": {"binary_data_size": 8},
        },
        {"name": "a", "datatype": "INT64", "shape": [1], "data": [1]},
    ]
    assert [bytes(part) for part in parts] == [np.ones(2, "f4").tobytes()]


def test_bytes_that_are_no_text() -> None:
    [output] = output_tensors([b"\xff", b""], [])
    assert binary_of(output) == texts(b"\xff", b"")
    request = InferRequest("", {}, [], None, False)
    with pytest.raises(InvalidInput, match="ask for it with the parameter binary_data"):
        encode_answer("m", request, chosen([output], request))


def test_outputs_that_are_not_there() -> None:
    with pytest.raises(InvalidInput, match=r"outputs\[0\].name: the model has no output 'b'"):
        check_wanted([WantedOutput("b", True)], ["a"])
    with pytest.raises(InvalidInput, match=r"outputs\[1\].name: 'a' is asked for twice"):
        check_wanted([WantedOutput("a", True)] * 2, ["a"])


def spec(name: str, datatype: str, *shape: int) -> Any:
    return {"name": name, "datatype": datatype, "shape": [*shape]}


@pytest.mark.parametrize(
    ("results", "specs", "expected"),
    [
        ([1.5, 2], [spec("y", "FP32", -1)], "FP32"),
        ([1, 2], [spec("y", "UINT8", -1)], "UINT8"),
        ([np.ones(2)], [spec("y", "FP32", -1, 2)], "FP32"),
        ([{"y": np.ones(2, "i8")}], [spec("y", "FP32", -1, -1)], "FP32"),
        ([{"y": "a"}, {"y": {"b": 1}}], [spec("y", "BYTES", -1)], "BYTES"),
    ],
)
def test_declared_outputs(results: list[Any], specs: Any, expected: str) -> None:
    [output] = output_tensors(results, specs)
    assert (output.name, output.datatype) == ("y", expected)


def test_the_dicts_of_a_task_are_json() -> None:
    results = [{"labels": ["a"], "scores": [1.0]}]
    [output] = output_tensors(results, wanted_of({"task": "zero-shot-classification"}))
    assert output.values == ['{"labels":["a"],"scores":[1.0]}']
    [output] = output_tensors([{"score": 1.0}], wanted_of({"task": "fill-mask"}))
    assert output.values == ['{"score":1.0}']


@pytest.mark.parametrize(
    ("results", "specs", "text"),
    [
        ([1.5], [spec("y", "INT32", -1)], "declared as INT32, but the model returned float64"),
        (["a"], [spec("y", "FP32", -1)], "the results are no numbers"),
        ([np.ones(3)], [spec("y", "FP64", -1, 2)], r"shape \[-1, 2\], but the results have shape"),
        ([{"z": 1}], [spec("y", "INT32", -1)], r"not a dict that has it; it is \['z'\]"),
        ([1], [spec("y", "INT8", -1), spec("z", "INT8", -1)], "it is 'int'"),
    ],
)
def test_results_that_are_not_what_is_declared(results: list[Any], specs: Any, text: str) -> None:
    with pytest.raises(BadModelOutput, match=text):
        output_tensors(results, specs)


# -- what models say


def test_metadata_of_tasks_and_of_others() -> None:
    assert inputs_of(TEXTS) == [spec("text", "BYTES", -1)]
    assert inputs_of(IMAGES) == [spec("image", "BYTES", -1)]
    assert outputs_of(IMAGES) == [spec("output", "BYTES", -1)]
    assert wanted_of(TEXTS) == [spec("output", "BYTES", -1)]
    assert wanted_of({"task": "feature-extraction"}) == []
    assert outputs_of({"task": "feature-extraction"}) == [spec("output", "FP64", -1, -1, -1)]
    assert model_metadata("m", {}) == {
        "name": "m", "versions": ["1"], "platform": "python", "inputs": [], "outputs": [],
    }  # fmt: skip


@pytest.mark.parametrize(
    "value",
    [
        "x",
        {"x": 1},
        ["x"],
        [("x", "FP32")],
        [("", "FP32", (-1,))],
        [("x", "float32", (-1,))],
        [("x", "FP32", -1)],
        [("x", "FP32", ())],
        [("x", "FP32", (1, 3))],
        [("x", "FP32", (-1, 0))],
        [("x", "FP32", (-1, 2.0))],
        [("x", "FP32", (-1,)), ("x", "FP32", (-1,))],
    ],
)
def test_declarations_that_are_none(value: Any) -> None:
    class Model(ManagedModel):
        inputs = value

        def init_model(self) -> None: ...

    with pytest.raises((TypeError, ValueError), match=r"Model\.inputs"):
        declared_tensors(Model, "inputs")


def test_every_datatype_can_be_declared() -> None:
    class Model(ManagedModel):
        outputs = tuple((name, name, (-1, 2)) for name in DATATYPES)

        def init_model(self) -> None: ...

    assert declared_tensors(Model, "inputs") == []
    assert [each["datatype"] for each in declared_tensors(Model, "outputs")] == [*DATATYPES]


# -- in the worker


def custom(target: str) -> CustomModel:
    model = CustomModel()
    model.init_model(target)
    return model


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
