"""The image example: decoding, the shipped model, its service, and what it was trained with."""

from __future__ import annotations

import io
import json
import struct
import subprocess
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import quiet_torch  # noqa: F401
import train_vision as training
from cases import long_cases
from example_programs import ROOT, Program
from flask_vision_example import MAX_BODY, SAMPLE, create_app
from service_streamer import InvalidInput, ManagedModel, Overloaded
from service_streamer.managed_model import has_stages
from vision_model import (
    DEFAULT_MODEL,
    ManagedPixelModel,
    ManagedVisionModel,
    VisionModel,
    decode_image,
)

pytestmark = pytest.mark.xdist_group("vision-example")

STAR = SAMPLE.read_bytes()


@pytest.fixture(scope="module")
def model() -> VisionModel:
    return VisionModel(device="cpu")


@pytest.fixture(scope="module")
def drawn() -> list[training.Drawing]:
    return list(training.drawings(100, "test"))


def saved(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def png_of_size(width: int, height: int) -> bytes:
    """A file of 60 bytes with so many pixels, if one believes its head."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b""))


#: What is wrong, and a part of what is said.
BAD: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "is empty"),
    "text": (b"no image at all", "neither a JPEG nor a PNG"),
    "GIF": (saved(Image.new("RGB", (9, 9)), "GIF"), "neither a JPEG nor a PNG"),
    "JPEG without its end": (STAR[: len(STAR) // 2], "truncated"),
    "PNG without its end": (saved(Image.open(SAMPLE))[:20_000], "cannot be decoded"),
    "head of a JPEG": (STAR[:20], "neither a JPEG nor a PNG"),
    "30 million pixels": (png_of_size(6000, 5000), "has 6000 x 5000 pixels, and the limit is"),
    "a bomb": (png_of_size(100_000, 100_000), "far too many pixels"),
}


# Decoding


def test_an_image_is_decoded_to_what_a_network_takes() -> None:
    pixels = decode_image(STAR)
    assert (pixels.shape, pixels.dtype, pixels.nbytes) == ((3, 224, 224), np.float32, 602_112)
    assert pixels.flags.c_contiguous
    assert -2 <= pixels.min() < pixels.max() <= 2
    yellow = decode_image(saved(Image.new("RGB", (3, 500), (255, 255, 0))))
    assert np.allclose(yellow, np.array([2, 2, -2])[:, None, None], atol=1e-5)


@pytest.mark.parametrize(
    ("colours", "kind"),
    [("L", "JPEG"), ("CMYK", "JPEG"), ("L", "PNG"), ("LA", "PNG"), ("RGBA", "PNG")],
)
def test_images_of_every_kind_are_decoded(colours: str, kind: str) -> None:
    with Image.open(SAMPLE) as star:
        image = star.convert(colours)
        same = star.convert("L" if "L" in colours else "RGB")
    assert abs(decode_image(saved(image, kind)) - decode_image(saved(same))).mean() < 0.1


def test_shades_of_16_bits_are_grey_and_transparency_is_white() -> None:
    shades = np.tile(np.linspace(0, 65535, 224), (224, 1)).astype(np.uint16)
    pixels = decode_image(saved(Image.fromarray(shades)))
    assert np.allclose(pixels[0, 0], np.linspace(-2, 2, 224), atol=0.02)
    image = Image.new("RGBA", (300, 300), (0, 0, 0, 0))
    image.paste("red", (0, 0, 300, 150))
    for colours in ("RGBA", "P"):
        pixels = decode_image(saved(image.convert(colours)))
        assert np.allclose(pixels[:, 200:], 2, atol=1e-5)
        assert np.allclose(pixels[:, 50].T, [2, -2, -2], atol=1e-5)


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_images_are_turned_as_their_camera_says(kind: str) -> None:
    image = Image.new("RGB", (300, 200), "white")
    image.paste("black", (0, 0, 150, 100))
    corners = [(0, 0), (0, -1), (-1, 0), (-1, -1)]
    for orientation, corner in ((1, (0, 0)), (3, (-1, -1)), (6, (0, -1)), (8, (-1, 0))):
        notes = Image.Exif()
        notes[0x112] = orientation
        red = decode_image(saved(image, kind, exif=notes))[0]
        assert [place for place in corners if red[place] < 0] == [corner], orientation


# What the model answers


def test_it_knows_new_drawings(model: VisionModel, drawn: list[training.Drawing]) -> None:
    assert {drawing.label for drawing in drawn} == set(model.config.labels)
    assert training.accuracy(model, drawn) >= 0.95


def test_an_answer_depends_on_no_batch(model: VisionModel, drawn: list[training.Drawing]) -> None:
    images = [drawing.data for drawing in drawn[:8]]
    alone = [answer for image in images for answer in model.predict([image])]
    check_alike(model.predict(images[::-1]), alone[::-1])
    assert model.predict([]) == []
    with pytest.raises(InvalidInput, match="is empty"):
        model.predict([images[0], b""])


def check_alike(answers: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    assert [answer["label"] for answer in answers] == [answer["label"] for answer in expected]
    for answer, right in zip(answers, expected, strict=True):
        assert answer == {"label": right["label"], "score": pytest.approx(right["score"], abs=0.01)}
        assert 0.1 <= answer["score"] <= 1


def test_a_missing_model_is_named_and_the_shipped_one_is_small() -> None:
    with pytest.raises(FileNotFoundError, match="no model in 'no/such/folder'"):
        VisionModel("no/such/folder")
    assert sum(file.stat().st_size for file in DEFAULT_MODEL.iterdir()) < 1_000_000


# In workers


def test_bad_images_fail_alone_in_a_worker(model: VisionModel) -> None:
    managed = ManagedVisionModel()
    managed.init_preprocess()
    managed.init_model()
    images = [image for data, _ in BAD.values() for image in (data, STAR)]
    answers = managed.predict(images)
    check_alike(answers[1::2], model.predict([STAR] * len(BAD)))
    for answer, (_, said) in zip(answers[::2], BAD.values(), strict=True):
        assert list(answer) == ["error"]
        assert said in answer["error"]
    assert list(managed.predict([b""])[0]) == ["error"]


@pytest.mark.parametrize("managed", [ManagedVisionModel, ManagedPixelModel])
def test_its_stages_share_nothing(managed: type[ManagedModel], model: VisionModel) -> None:
    """Two batches overlap: the second one is prepared before the first one is finished."""
    assert has_stages(managed)
    worker = managed()
    worker.init_preprocess()
    worker.init_model()
    batches: list[Any] = [[STAR] * 2, [drawing.data for drawing in training.drawings(5, "test")]]
    right = [model.predict(each) for each in batches]
    if managed is ManagedPixelModel:
        batches = [np.stack([decode_image(each) for each in batch]) for batch in batches]
    first = worker.forward(worker.preprocess(batches[0]))
    second = worker.preprocess(batches[1])
    check_alike(worker.postprocess(first), right[0])
    check_alike(worker.postprocess(worker.forward(second)), right[1])


# The service


@pytest.fixture(scope="module", params=long_cases("web", "worker"))
def service(request: pytest.FixtureRequest) -> Iterator[Program]:
    """Images are decoded in the web process, or in the worker."""
    command = ("example/flask_vision_example.py", "--port", "0", "--decode", request.param)
    with Program(*command) as service:
        yield service


def ask(service: Program, body: bytes, kind: str = "image/jpeg") -> tuple[int, Any]:
    return service.post("/predict", body, kind)


def test_a_service_says_what_to_try(service: Program) -> None:
    command = ["bash", "-c", service.curl + " --silent --fail"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert json.loads(run.stdout)["label"] == "star", run
    with service.connect() as connection:
        connection.request("GET", "/")
        assert service.curl in connection.getresponse().read().decode()


def test_forms_are_taken_too(service: Program) -> None:
    form = (
        b'--any\r\nContent-Disposition: form-data; name="%s"; filename="star.jpg"\r\n\r\n'
        + STAR
        + b"\r\n--any--\r\n"
    )
    kind = "multipart/form-data; boundary=any"
    status, answer = ask(service, form.replace(b"%s", b"image", 1), kind)
    assert (status, answer["label"]) == (200, "star")
    status, answer = ask(service, form.replace(b"%s", b"photo", 1), kind)
    assert status == 400
    assert "image" in answer["error"]


def test_bad_images_are_refused_and_their_neighbours_are_not(service: Program) -> None:
    bodies = [body for data, _ in BAD.values() for body in (data, STAR)]
    with ThreadPoolExecutor(len(bodies)) as pool:
        answers = list(pool.map(lambda body: ask(service, body), bodies))
    for (status, answer), (_, said) in zip(answers[::2], BAD.values(), strict=True):
        assert status == 400, answer
        assert said in answer["error"]
        assert answer["error"].startswith("image: ")
        assert "object at" not in answer["error"]
        assert len(answer["error"]) < 200
    assert {(status, answer.get("label")) for status, answer in answers[1::2]} == {(200, "star")}


def test_other_requests_are_refused(service: Program) -> None:
    for method, path, status in (("GET", "/predict", 405), ("POST", "/nothing", 404)):
        answer = service.ask(method, path)
        assert (answer[0], list(answer[1])) == (status, ["error"])


def test_the_message_of_invalid_input_is_told_and_other_errors_have_their_status() -> None:
    """flask_example.py maps errors in the same way: test_examples.py has all of them."""
    for error, status in ((InvalidInput("told"), 400), (Overloaded("secret"), 503)):

        def fail(batch: list[bytes], error: Exception = error) -> list[dict[str, Any]]:
            raise error

        response = create_app(fail).test_client().post("/predict", data=b"any")
        assert response.status_code == status
        assert "secret" not in response.text
        assert ("told" in response.text) == (status == 400)


@pytest.mark.parametrize("is_length_told", [True, False])
def test_what_is_too_large_is_not_read(is_length_told: bool) -> None:
    client = create_app(lambda batch: [{"size": len(batch[0])}]).test_client()
    for size, status in ((MAX_BODY, 200), (MAX_BODY + 1, 413), (MAX_BODY + 9, 413)):
        options: dict[str, Any] = {"data": b"x" * size}
        if not is_length_told:
            options = {
                "input_stream": io.BytesIO(b"x" * size),
                "environ_overrides": {"wsgi.input_terminated": True},
            }
        assert client.post("/predict", **options).status_code == status


# Training


def test_one_can_be_drawn_to_try(tmp_path: Path, model: VisionModel) -> None:
    file = tmp_path / "moon.jpg"
    assert training.main(["--draw", "moon", str(file)]) == 0
    assert model.predict([file.read_bytes()])[0]["label"] == "moon"
