"""The Open Inference Protocol over HTTP: ``service-streamer serve`` and the clients of others."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cases import long_cases
from serve_process import Client, Serving, started, table
from served_here import ServingHere, Whole
from service_streamer.pipelines import TASKS, SteppedPipeline
from tensor_clients import run_clients
from test_serve_clients import fuzz
from tiny_models import folder

pytestmark = pytest.mark.xdist_group("transformers")

TWICE = "tensor_models:twice"
INFER = f"/v2/models/{TWICE}/infer"
PREDICTING = {"inputs": [{"name": "x", "shape": [1], "datatype": "INT8", "data": [2]}]}


service = started(TWICE, "--max-body", "1M", "--max-pending", "64")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """Models that declare their tensors."""
    config = tmp_path_factory.mktemp("models") / "service.toml"
    names = ("Rows", "Lying")
    config.write_text(
        "".join(table(name, f"tensor_models:{name}", "batch-size = 8\n") for name in names)
    )
    with Serving("--config", str(config)) as service:
        yield service


def told(response: Any, status: int) -> str:
    """The text of an error."""
    assert response.status_code == status, response.text
    body: dict[str, str] = response.json()
    assert [*body] == ["error"]
    return body["error"]


def test_tritons_clients_and_their_compressed_bodies(service: Serving) -> None:
    address = service.url.removeprefix("http://")
    run_clients(*((name, address, TWICE) for name in ("http", "http_aio")))


def test_kserves_client_sends_the_models_name_in_the_body(service: Serving) -> None:
    """As kserve 0.21 has it: a copy of the bytes, since its client brings 30 packages."""
    output = {"name": "output", "parameters": {"binary_data": False}}
    response = post_array(service, TWICE, [1, 2], id="1", model_name=TWICE, outputs=[output])
    assert response.json()["id"] == "1"
    assert response.json()["outputs"][0]["data"] == [2.0, 2.0]
    assert service.client.get("/v2/health/live").json()["live"] is True
    assert service.client.get("/v2/health/ready").json()["ready"] is True
    assert service.client.get(f"/v2/models/{TWICE}/ready").is_success


@pytest.mark.parametrize(
    "path",
    [
        INFER,
        "/v2/models/tensor_models%3Atwice/infer",
        "/v2/models/tensor%5Fmodels%3Atwice/infer",
        f"/v2/models/{TWICE}/versions/1/infer",
        f"/v2/models/{TWICE}/infer?a=b",
    ],
)
def test_names_of_a_model(service: Serving, path: str) -> None:
    response = service.post(path, PREDICTING)
    assert response.json() == {
        "model_name": TWICE,
        "model_version": "1",
        "outputs": [{"name": "output", "datatype": "INT8", "shape": [1], "data": [4]}],
    }


@pytest.mark.parametrize(
    ("path", "status", "text"),
    [
        ("/v2/models/other/infer", 404, "'other'"),
        (f"/v2/models/{TWICE}x/infer", 404, "twicex"),
        (f"/v2/models/{TWICE}/versions/2/infer", 404, "'2'"),
        (f"/v2/models/{TWICE}/versions/10/infer", 404, "'10'"),
        (f"/v2/models/{TWICE}/infers", 404, "infers"),
        (f"/v2/models/{TWICE}", 405, "POST"),
        (f"/v2/models/{TWICE}/config", 405, "POST"),
        ("/v2/models/{model}/infer", 404, "{model}"),
        ("/v2", 405, "POST"),
    ],
)
def test_a_path_to_no_model_is_refused(service: Serving, path: str, status: int, text: str) -> None:
    assert text in told(service.post(path, PREDICTING), status)


@pytest.mark.parametrize("path", [INFER, f"/v2/models/{TWICE}", "/v2", "/", "/predict"])
def test_methods_that_are_not_allowed(service: Serving, path: str) -> None:
    """An answer with 405 names those that are: no more, and no fewer."""
    ways = ("GET", "HEAD", "POST", "PUT", "DELETE", "PROPFIND")
    answers = {way: service.client.request(way, path, json={}) for way in ways}
    allowed = {way for way, answer in answers.items() if answer.status_code != 405}
    for way in {*ways} - allowed:
        assert {*answers[way].headers["allow"].split(", ")} == allowed
        assert way == "HEAD" or way in answers[way].text
    assert "/metrics" in told(service.client.get("/v2/models/stats"), 404)


def test_errors_have_the_protocols_form(service: Serving) -> None:
    many = {"inputs": [{"name": "x", "shape": [65], "datatype": "INT8", "data": [1] * 65}]}
    for body, status, text in (
        (b"", 400, "JSON"),
        (b"[]", 400, "array"),
        ({}, 400, "`inputs`"),
        (many, 413, "64"),
        (b" " * (2 << 20), 413, "1048576"),
        (PREDICTING | {"parameters": {"top_k": 1}}, 400, "parameters"),
    ):
        assert text in told(service.post(INFER, body), status)


@pytest.mark.parametrize("length", ["0", "-1", "1e3", "99999", "9" * 30, "x"])
def test_a_wrong_length_of_the_json_is_refused(service: Serving, length: str) -> None:
    response = service.post(INFER, PREDICTING, inference_header_content_length=length)
    assert "Inference-Header-Content-Length" in told(response, 400)


def test_an_error_of_a_model_is_shown_in_the_log_only(models: Serving) -> None:
    response = models.post("/v2/models/Lying/infer", PREDICTING)
    assert "shape" not in told(response, 500)
    assert "declared with shape [-1, 2], but the results have shape [1, 3]" in models.log()


def test_a_model_is_described_by_its_declaration(models: Serving) -> None:
    about = models.client.get("/v2/models/Rows").json()
    assert about["inputs"] == [{"name": "x", "datatype": "FP32", "shape": [-1, 3, -1]}]
    assert [each["name"] for each in about["outputs"]] == ["rows", "sum"]
    config = models.client.get("/v2/models/Rows/config").json()
    assert config == {
        "name": "Rows", "platform": "python", "backend": "python", "max_batch_size": 8,
        "input": [{"name": "x", "data_type": "TYPE_FP32", "dims": [3, -1]}],
        "output": [
            {"name": each["name"], "data_type": f"TYPE_{each['datatype']}",
             "dims": each["shape"][1:]}
            for each in about["outputs"]
        ],
    }  # fmt: skip
    assert models.client.get("/v2/models/Rows/versions/1/config").json() == config
    wrong = {"inputs": [{"name": "x", "shape": [1, 2, 1], "datatype": "FP32", "data": [1, 2]}]}
    assert "[-1, 3, -1]" in told(models.post("/v2/models/Rows/infer", wrong), 400)


def post_array(service: Client, model: str, shape: list[int], **more: Any) -> Any:
    """Send an array of ones as binary data; ``more`` has further fields of the body."""
    tensor = {"name": "x", "shape": shape, "datatype": "FP32"}
    return post_binary(service, model, tensor, np.ones(shape, "f4").tobytes(), **more)


def post_binary(
    service: Client, model: str, tensor: dict[str, Any], data: bytes, **more: Any
) -> Any:
    sent = {**tensor, "parameters": {"binary_data_size": len(data)}}
    header = json.dumps({"inputs": [sent], **more}).encode()
    return service.post(
        f"/v2/models/{model}/infer", header + data, content_type="application/octet-stream",
        inference_header_content_length=str(len(header)),
    )  # fmt: skip


def test_a_batch_that_is_one_array_may_be_larger_than_the_models(models: Serving) -> None:
    response = post_array(models, "Rows", [20, 3, 4000])
    outputs = {each["name"]: each["data"] for each in response.json()["outputs"]}
    assert outputs["sum"] == [12000.0] * 20
    assert len(outputs["rows"]) == 20
    assert max(outputs["rows"]) == 8


def test_the_deadline_of_a_request(service: Serving) -> None:
    asked = PREDICTING | {"parameters": {"timeout": 1}}
    assert "timeout of 1e-06 s, set by --timeout" in told(service.post(INFER, asked), 504)


def test_metrics_count_a_request(service: Serving) -> None:
    service.post(INFER, PREDICTING)
    assert 'path="/v2/models/{model}/infer"' in service.client.get("/metrics").text


def test_a_web_process_without_numpy_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "numpy.py").write_text(
        "raise ModuleNotFoundError('No module named numpy', name='numpy')"
    )
    path = f"{tmp_path}:{Path(__file__).parent}"
    with Serving(
        "served_models:double", PYTHONPATH=f"{path}:{Path(__file__).parent.parent}"
    ) as one:
        response = one.post("/v2/models/served_models:double/infer", PREDICTING)
        assert "pip install numpy" in told(response, 501)


#: A tiny model for each kind of inputs and outputs, and one of steps; "" is the shipped one.
MODELS = {
    "fill-mask": "", "feature-extraction": "features", "zero-shot-classification": "entailment",
    "text-generation": "gpt2", "image-classification": "pictures", "audio-classification": "sounds",
}  # fmt: skip
PARAMETERS: dict[str, dict[str, Any]] = {
    "zero-shot-classification": {"candidate_labels": ["a", "b"]},
    "text-generation": {"do_sample": False},
}


@pytest.fixture(scope="module")
def tiny(request: pytest.FixtureRequest) -> Iterator[ServingHere]:
    """A service of this task. Of the module: transformers leaves a thread."""
    task = request.param
    kind = SteppedPipeline if task == "text-generation" else Whole
    with ServingHere(str(folder(MODELS[task])), "--task", task, kind=kind) as service:
        yield service


@pytest.mark.parametrize("tiny", [*MODELS][:4], indirect=True)
def test_texts_are_answered_as_predict_does(tiny: ServingHere) -> None:
    info = tiny.client.get("/info").json()
    name, task = info["model"], info["task"]
    text = "happy birthday to [MASK]" if task == "fill-mask" else "a film"
    parameters = PARAMETERS.get(task, {})
    assert tiny.client.get(f"/v2/models/{name}").json()["inputs"][0]["name"] == "text"
    config = tiny.client.get(f"/v2/models/{name}/config").json()
    assert config["input"] == [{"name": "text", "data_type": "TYPE_STRING", "dims": []}]
    body = {
        "inputs": [{"name": "text", "shape": [1], "datatype": "BYTES", "data": [text]}],
        "parameters": parameters,
    }
    answer = tiny.post(f"/v2/models/{name}/infer", body).json()
    [output] = answer["outputs"]
    said = tiny.post("/predict", {"inputs": [text], "parameters": parameters}).json()
    if task == "feature-extraction":
        assert output["datatype"] == "FP64"
        assert output["data"] == np.array(said).reshape(-1).tolist()
    else:
        assert [json.loads(each) for each in output["data"]] == said


@pytest.mark.parametrize("tiny", [*MODELS][4:], indirect=True)
def test_files_are_answered_as_predict_does(tiny: ServingHere) -> None:
    from pipeline_cases import image, saved, sound  # which import torch

    info = tiny.client.get("/info").json()
    kind = info["task"].partition("-")[0]
    file = base64.b64decode(saved(image(32, 32)) if kind == "image" else sound(16_000))
    tensor = {"name": kind, "shape": [1], "datatype": "BYTES"}
    response = post_binary(tiny, info["model"], tensor, len(file).to_bytes(4, "little") + file)
    assert response.status_code == 200, response.text
    [output] = response.json()["outputs"]
    said = tiny.client.post("/predict", content=file, headers={"content-type": f"{kind}/x"})
    assert json.loads(output["data"][0]) == said.json()


def test_a_sound_that_the_model_cannot_cut_gets_413() -> None:
    from pipeline_cases import sound

    file, tensor = (
        base64.b64decode(sound(16_001)),
        {"name": "audio", "shape": [1], "datatype": "BYTES"},
    )
    with ServingHere(str(folder("sounds")), "--max-batch-seconds", "1") as service:
        name = service.client.get("/info").json()["model"]
        answers = [
            service.client.post("/predict", content=file, headers={"content-type": "audio/wav"}),
            post_binary(service, name, tensor, len(file).to_bytes(4, "little") + file),
        ]
    for answer in answers:
        assert "--max-batch-seconds" in str(told(answer, 413))


def test_every_kind_of_input_is_tried() -> None:
    assert {TASKS[each].takes for each in MODELS} == {each.takes for each in TASKS.values()}


@pytest.mark.parametrize("model", long_cases("echo", "Rows", "Added"))
def test_nothing_that_the_schema_allows_or_not_brings_it_down(model: str) -> None:
    with Serving(f"tensor_models:{model}") as service:
        fuzz(service, {}, path_regex="^/v2")
