"""``serve`` as Hugging Face's InferenceClient sees it, and bodies that are not JSON."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

import served_models
from pipeline_cases import image, noise, saved
from serve_process import Client
from served_here import served
from service_streamer.pipelines import SteppedPipeline
from web_application import WebApplication

pytestmark = pytest.mark.xdist_group("transformers")


classifier, tagger, features = map(served, ("classifier", "tagger", "features"))
pictures, detector, sounds, speech = map(served, ("pictures", "detector", "sounds", "speech"))
t5, captions, whisper = (
    served(name, kind=SteppedPipeline) for name in ("t5", "captions", "whisper")
)
entailment = served("entailment", "--task", "zero-shot-classification")


@pytest.fixture(autouse=True)
def session() -> Iterator[None]:
    """huggingface_hub keeps connections for all of its clients."""
    import huggingface_hub  # takes a second

    yield
    huggingface_hub.close_session()


@pytest.fixture(scope="module")
def own() -> Iterator[WebApplication]:
    """A model of its own, which answers each input with what it is."""
    with WebApplication(served_models.kinds, max_pending=64) as application:
        yield application


def post(own: WebApplication, path: str, **sent: Any) -> httpx.Response:
    return own.run(own.client.post(path, **sent))


def client(service: Client, **options: Any) -> Any:
    from huggingface_hub import InferenceClient

    return InferenceClient(model=service.url, **options)


def refusal(**more: Any) -> Any:
    """Within the block Hugging Face's client is refused; as ``pytest.raises``."""
    from huggingface_hub.errors import HfHubHTTPError

    return pytest.raises(HfHubHTTPError, **more)


def png(width: int = 8) -> bytes:
    return base64.b64decode(saved(image(width, 8)))


def wav() -> bytes:
    return noise(0.2)


# -- InferenceClient


def test_fill_mask(infilling: Client) -> None:
    words = client(infilling).fill_mask("Happy birthday to [MASK].", top_k=2)
    assert [words[0].token_str, len(words)] == ["you", 2]


def test_text_classification(classifier: Client) -> None:
    labels = client(classifier).text_classification("the quick brown fox", top_k=2)
    assert len(labels) == 2
    assert labels[0].score >= labels[1].score
    [label] = client(classifier).text_classification("the quick brown fox")
    assert label == labels[0]
    several = classifier.post("/", {"inputs": ["a king", "a tree"]}).json()
    assert [len(each) for each in several] == [1, 1]


def test_translation_and_summarization(t5: Client) -> None:
    [made] = t5.post("/", {"inputs": "the fox"}).json()
    assert made["generated_text"]
    assert client(t5).translation("the fox").translation_text == made["generated_text"]
    assert client(t5).summarization("the fox").summary_text == made["generated_text"]
    with refusal(match="src_lang: unknown parameter"):
        client(t5).translation("the fox", src_lang="en", tgt_lang="fr")


@pytest.mark.parametrize("more", [{}, {"num_beams": 2}])
def test_generated_text_of_a_model_with_an_encoder_does_not_begin_with_its_input(
    t5: Client, more: dict[str, Any]
) -> None:
    parameters = {"max_new_tokens": 6, "do_sample": False, **more}
    text = t5.post("/generate", {"text": "the fox", "parameters": parameters}).json()["text"]
    full = {"inputs": "the fox", "parameters": {**parameters, "return_full_text": True}}
    assert t5.post("/generate", full).json()["generated_text"] == text
    streamed = t5.post("/generate", {**full, "stream": True}).text.removesuffix("data: [DONE]\n\n")
    *events, last, _ = streamed.split("\n\n")
    assert json.loads(last.removeprefix("data: "))["generated_text"] == text
    assert (not events) == bool(more), "a search has no pieces"


def test_token_classification(tagger: Client) -> None:
    found = client(tagger).token_classification(
        "the king lived there", aggregation_strategy="simple"
    )
    assert all({"word", "score", "start", "end"} <= each.keys() for each in found)


def test_feature_extraction(features: Client) -> None:
    found = client(features).feature_extraction("the king")
    assert (found.ndim, found.shape[0], found.dtype) == (3, 1, np.float32)
    long = "the king " * 100
    with refusal(match="the limit is 32"):
        client(features).feature_extraction(long)
    assert client(features).feature_extraction(long, truncate=True).shape[1] == 32
    one = client(features).feature_extraction("the king", normalize=True)
    assert one.shape == (1, found.shape[2]), "one vector, as text-embeddings-inference has it"
    assert np.linalg.norm(one) == pytest.approx(1, abs=1e-5)
    short = client(features).feature_extraction(["the king", "a"], dimensions=4)
    assert short.shape == (2, 4)
    for more in ({"prompt_name": "passage"}, {"encoding_format": "base64"}, {"dimensions": 99}):
        [name] = more
        with refusal(match=f"{name}: "):
            client(features).feature_extraction("the king", **more)


def test_zero_shot_classification(entailment: Client) -> None:
    labels = client(entailment).zero_shot_classification(
        "the match ended", ["sports", "politics"], multi_label=True
    )
    assert {each.label for each in labels} == {"sports", "politics"}


def base64_of(content: bytes) -> dict[str, str]:
    return {"inputs": base64.b64encode(content).decode()}


def test_images(pictures: Client, tmp_path: Path) -> None:
    (tmp_path / "red.png").write_bytes(png())
    asked = client(pictures)
    first = asked.image_classification(png())
    assert first == asked.image_classification(str(tmp_path / "red.png"))
    assert first[:1] == asked.image_classification(png(), top_k=1)
    assert first[0].label == pictures.post("/predict", base64_of(png())).json()[0]["label"]


def test_objects(detector: Client) -> None:
    found = client(detector).object_detection(png(), threshold=0.0)
    assert all(each.box.xmax >= each.box.xmin for each in found)


@pytest.fixture(scope="module")
def of_files(request: pytest.FixtureRequest) -> Client:
    """The service of this name."""
    service: Client = request.getfixturevalue(request.param)
    return service


@pytest.mark.parametrize(
    ("of_files", "method", "content", "field"),
    [
        ("captions", "image_to_text", png, "generated_text"),
        ("sounds", "audio_classification", wav, "label"),
        ("speech", "automatic_speech_recognition", wav, "text"),
        ("whisper", "automatic_speech_recognition", wav, "text"),
    ],
    indirect=["of_files"],
)
def test_files_are_answered_as_predict_does(
    of_files: Client, method: str, content: Callable[[], bytes], field: str
) -> None:
    made = getattr(client(of_files), method)(content())
    wanted = of_files.post("/predict", base64_of(content())).json()
    made, wanted = (each if isinstance(each, list) else [each] for each in (made, wanted))
    assert [getattr(each, field) for each in made] == [each[field] for each in wanted]


def test_health_and_info(infilling: Client) -> None:
    asked = client(infilling, provider="hf-inference")
    assert asked.health_check()
    info = asked.get_endpoint_info()
    assert (info["model_id"], info["model_pipeline_tag"]) == ("text_infilling", "fill-mask")


TABLE = {"name": ["a", "b"], "size": ["1", "2"]}


@pytest.mark.parametrize(
    ("method", "arguments", "says"),
    [
        ("question_answering", {"question": "who?", "context": "Ada"}, "inputs: "),
        ("tabular_classification", {"table": TABLE}, "`table`"),
        ("visual_question_answering", {"image": b"\x89PNG", "question": "who?"}, "`question`"),
        ("zero_shot_image_classification", {"image": b"\x89PNG", "candidate_labels": ["a", "b"]},
         "candidate_labels: unknown parameter"),
        ("text_to_speech", {"text": "a king"}, "inputs: "),
    ],
)  # fmt: skip
def test_tasks_that_the_model_does_not_have(
    infilling: Client, method: str, arguments: dict[str, Any], says: str
) -> None:
    with refusal() as caught:
        getattr(client(infilling), method)(**arguments)
    assert caught.value.response.status_code == 422
    assert says in str(caught.value)


# -- files and forms


@pytest.mark.parametrize("path", ["/", "/predict"])
@pytest.mark.parametrize(
    "kind", ["image/png", "IMAGE/PNG; q=1", "audio/x-wav", "application/octet-stream", "video/mp4"]
)
def test_a_file_is_the_input(own: WebApplication, path: str, kind: str) -> None:
    response = post(own, path, content=b'{"\xff', headers={"content-type": kind})
    assert response.json() == "bytes b'{\"\\xff'"


@pytest.mark.parametrize("kind", [None, "application/x-www-form-urlencoded", "image/png"])
def test_an_image_without_a_fitting_type(pictures: Client, kind: str | None) -> None:
    headers = {} if kind is None else {"content-type": kind}
    response = pictures.client.post("/predict", content=png(), headers=headers)
    assert response.status_code == 200, response.text
    assert response.json() == pictures.post("/predict", base64_of(png())).json()
    body = json.dumps(base64_of(png())).encode()
    as_json = pictures.client.post("/predict", content=b"  " + body, headers=headers)
    assert as_json.json() == response.json()


def test_a_form_with_files(pictures: Client) -> None:
    alone = pictures.post("/predict", base64_of(png())).json()
    one = pictures.client.post("/predict", files={"file": ("a.png", png(), "image/png")})
    assert one.json() == alone
    several = pictures.client.post(
        "/predict",
        files=[("inputs", ("a.png", png())), ("inputs", ("b.png", png(9)))],
        data={"parameters": '{"top_k": 1}'},
    )
    [[first], [_]] = several.json()
    assert first["label"] == alone[0]["label"]


def test_a_form_with_texts(infilling: Client) -> None:
    text = "Happy birthday to [MASK]."
    fields = {"inputs": (None, text), "parameters": (None, '{"top_k": 1}')}
    assert infilling.client.post("/predict", files=fields).json()[0]["token_str"] == "you"
    file = {"file": ("text.txt", text.encode())}
    assert infilling.client.post("/predict", files=file).json()[0]["token_str"] == "you"


@pytest.mark.parametrize(
    ("kind", "body", "status", "param", "code"),
    [
        ("multipart/form-data", b"--a", 400, None, "invalid_form"),
        ("multipart/mixed; boundary=a", b"--a\r\n\r\n--a--", 400, None, "invalid_form"),
        ("multipart/form-data; boundary=a", b"", 400, None, "invalid_form"),
        ("multipart/form-data; boundary=a", b"--a\r\n", 400, None, "invalid_form"),
        ("multipart/form-data; boundary=a", b"--a\r\nx\r\n--a--", 400, None, "invalid_form"),
        ("multipart/form-data; boundary=a", b"--a--\r\n", 422, "inputs",
         "missing_required_parameter"),
        ("multipart/form-data; boundary=a",
         b'--a\r\nContent-Disposition: form-data; name="x"\r\n\r\n1\r\n--a--', 422, "x",
         "unknown_parameter"),
        ("multipart/form-data; boundary=a",
         b'--a\r\ncontent-disposition: form-data; name=inputs\r\n\r\na\r\n'
         b'--a\r\ncontent-disposition: form-data; name=parameters\r\n\r\n[\r\n--a--', 422,
         "parameters", "invalid_value"),
        ("multipart/form-data; boundary=a",
         b"--a\r\ncontent-disposition: form-data; name=inputs\r\n\r\nx\r\n" * 3000 + b"--a--",
         400, None, "invalid_form"),
        (f"multipart/form-data; boundary={'a' * 300}", b"--a--", 400, None, "invalid_form"),
        ("text/plain", b"hello", 400, None, "invalid_json"),
    ],
)  # fmt: skip
def test_forms_that_cannot_be_read(
    own: WebApplication, kind: str, body: bytes, status: int, param: str | None, code: str
) -> None:
    response = post(own, "/predict", content=body, headers={"content-type": kind})
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert (error["param"], error["code"]) == (param, code)


def test_more_files_than_may_wait(own: WebApplication) -> None:
    files = [("inputs", (str(number), b"x")) for number in range(65)]
    response = post(own, "/predict", files=files)
    assert (response.status_code, response.json()["error"]["code"]) == (413, "too_many_inputs")


def test_a_model_of_texts_takes_no_files(infilling: Client) -> None:
    response = infilling.client.post(
        "/predict", content=png(), headers={"content-type": "image/png"}
    )
    assert response.status_code == 415
    assert "this model takes text" in response.json()["error"]["message"]


def test_a_file_that_is_none_of_an_image(pictures: Client) -> None:
    response = pictures.client.post(
        "/", content=b"\x89PNG broken", headers={"content-type": "image/png"}
    )
    assert response.status_code == 422
    assert response.json()["error"]["param"] == "inputs"
