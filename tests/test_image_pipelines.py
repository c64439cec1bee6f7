"""Images and sounds on tensors: answers as transformers' pipelines give them, and what travels."""

from __future__ import annotations

import base64
import io
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import tiny_models
from service_streamer import InvalidInput
from service_streamer.pipelines import PipelineModel
from service_streamer.pipelines.buckets import make_buckets
from service_streamer.pipelines.inputs import read_audio
from service_streamer.pipelines.labels import rank
from service_streamer.pipelines.requests import plain
from test_pipelines import assert_close, count_calls, item, sound

SIZES = ((40, 30), (30, 40), (64, 64), (300, 200), (9, 80))


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Two threads that wait for each other are many times slower on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.build("pictures", tmp_path_factory.mktemp("models") / "pictures")


def loaded(folder: Path, task: str | None = None) -> PipelineModel:
    model = PipelineModel("cpu")
    model.init_model(folder, task)
    return model


@pytest.fixture(scope="module")
def model(folder: Path) -> PipelineModel:
    return loaded(folder)


@pytest.fixture(scope="module")
def detector(tmp_path_factory: pytest.TempPathFactory) -> PipelineModel:
    return loaded(tiny_models.build("detector", tmp_path_factory.mktemp("models") / "detector"))


@pytest.fixture(scope="module")
def sounds(tmp_path_factory: pytest.TempPathFactory) -> PipelineModel:
    return loaded(tiny_models.build("sounds", tmp_path_factory.mktemp("models") / "sounds"))


def image(width: int, height: int, mode: str = "RGB") -> Image.Image:
    noise = np.random.default_rng(width).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(noise).convert(mode)


def saved(image: Image.Image, kind: str = "PNG", **options: Any) -> str:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return base64.b64encode(file.getvalue()).decode()


def in_threads(model: PipelineModel, items: list[Any]) -> list[Any]:
    """Results of the stages, each in a thread of its own, as a worker runs them."""
    batch: Any = items
    for stage in (model.preprocess, model.forward, model.postprocess):
        with ThreadPoolExecutor(1) as thread:
            batch = thread.submit(stage, batch).result()
    results: list[Any] = batch
    return results


@pytest.mark.parametrize("kind", ["single_label", "multi_label", "regression", "one label"])
@pytest.mark.parametrize(
    "parameters",
    [{}, {"top_k": 1}, {"top_k": 3}, {"top_k": 99}]
    + [{"function_to_apply": name, "top_k": 2} for name in ("softmax", "sigmoid", "none")],
    ids=str,
)
def test_labels_are_those_of_the_pipeline(
    model: PipelineModel, monkeypatch: pytest.MonkeyPatch, kind: str, parameters: dict[str, Any]
) -> None:
    from service_streamer.pipelines.images import ImageClassifier

    pipeline = model.model
    config = pipeline.model.config
    if kind == "one label":
        monkeypatch.setitem(pipeline.model._modules, "classifier", torch.nn.Linear(16, 1))
        monkeypatch.setattr(config, "id2label", {0: "cat"})
    else:
        named = kind if kind == "regression" else f"{kind}_classification"
        monkeypatch.setattr(config, "problem_type", named)
    monkeypatch.setitem(model.handlers, "predict", ImageClassifier(pipeline))
    images = [image(*size) for size in SIZES]
    wanted = [plain(pipeline(each, **parameters)) for each in images]
    assert_close(in_threads(model, [item(saved(each), **parameters) for each in images]), wanted)


def test_of_equal_scores_the_first_label_is_first() -> None:
    """float32 has no score between 0 and its smallest: many labels of a sure model have 0."""
    logits = torch.full((1, 200), -1000.0).index_fill(1, torch.tensor([150]), 0)
    for scores in (logits, -logits * 0):
        _, numbers = rank(scores, ["softmax"], None)
        rest = [number for number in numbers[0].tolist() if number != 150]
        assert rest == sorted(rest)


def test_images_of_all_sizes_and_parameters_share_a_forward_pass(
    model: PipelineModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    items = [item(saved(image(*size)), top_k=at) for at, size in enumerate(SIZES, 1)]
    wanted = [model.predict([each])[0] for each in items]
    calls = count_calls(monkeypatch, model.model.model, "forward")
    assert_close(model.predict(items), wanted)
    assert calls == [len(SIZES)]
    other = item(items[0]["inputs"], function_to_apply="sigmoid")
    wanted += model.predict([other])
    assert_close(model.predict([*items, other]), wanted)
    assert calls[1:] == [1, len(SIZES) + 1]


def test_pixels_go_to_the_device_as_bytes_and_answers_come_back(model: PipelineModel) -> None:
    items = [item(saved(image(*size)), top_k=2) for size in SIZES]
    [group] = batch = model.preprocess(items)
    pixels = group.batch[0]["pixel_values"]
    assert (pixels.dtype, pixels.shape) == (torch.uint8, (len(SIZES), 3, 32, 32))
    assert [request.encoded for request in group.requests] == [None] * len(SIZES)
    [(_, ranked)] = model.forward(batch)
    assert [tensor.shape for tensor in ranked.wait()] == [(len(SIZES), 2)] * 2


PROCESSORS: dict[str, dict[str, Any]] = {
    "crop": {"name": "CLIP", "size": {"shortest_edge": 40}, "crop_size": 32},
    "crop of more": {"name": "CLIP", "size": {"shortest_edge": 20}, "crop_size": 32},
    "part": {"name": "ConvNext", "size": {"shortest_edge": 32}},
    "other means": {"name": "ViT", "image_mean": [0.4, 0.5, 0.6], "image_std": [0.2, 0.3, 0.1]},
    "not normalised": {"name": "ViT", "do_normalize": False},
    "not scaled": {"name": "ViT", "do_rescale": False, "image_mean": [9, 8, 7]},
    "twice": {"name": "ViT", "rescale_factor": 1 / 127.5},
    "padded": {"name": "ViT", "do_pad": True, "pad_size": {"height": 32, "width": 32}},
}


@pytest.mark.parametrize("case", PROCESSORS)
def test_image_processors_of_every_kind(
    model: PipelineModel, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    import transformers

    from service_streamer.pipelines.images import ImageFeatures

    options = {"size": {"height": 32, "width": 32}, **PROCESSORS[case]}
    processor = getattr(transformers, f"{options.pop('name')}ImageProcessor")(**options)
    monkeypatch.setattr(model.model, "image_processor", processor)
    handler = ImageFeatures(model.model)
    assert (handler.arithmetic is None) == (case == "padded")
    images = [image(*size) for size in SIZES]
    from service_streamer.pipelines.requests import Request

    requests = [Request("predict", saved(each), {}) for each in images]
    handler.encode(requests)
    assert len({request.key for request in requests}) == 1
    outputs = handler.forward(handler.collate(requests)).wait()
    with torch.inference_mode():
        pixels = [processor(images=each, return_tensors="pt") for each in images]
        wanted = torch.cat([model.model.model(**each)[0] for each in pixels])
    assert torch.allclose(outputs, wanted, atol=1e-4)


def test_a_processor_that_does_something_else_makes_its_own_pixels(
    model: PipelineModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    from service_streamer.pipelines.images import ImageClassifier

    processor = type(model.model.image_processor)
    usual = processor.normalize
    monkeypatch.setattr(processor, "normalize", lambda *args: usual(*args) ** 2)
    handler = ImageClassifier(model.model)
    assert handler.arithmetic is None
    monkeypatch.setitem(model.handlers, "predict", handler)
    wanted = plain(model.model(image(40, 30)))
    assert_close(in_threads(model, [saved(image(40, 30))]), [wanted])


@pytest.mark.parametrize("mode", ["RGB", "L", "LA", "RGBA", "P", "CMYK", "1"])
def test_colours_are_those_of_the_pipeline(model: PipelineModel, mode: str) -> None:
    colours = image(40, 30, mode)
    kind = "TIFF" if mode == "CMYK" else "PNG"
    sent = saved(colours, "JPEG" if mode == "CMYK" else kind)
    decoded = Image.open(io.BytesIO(base64.b64decode(sent)))
    assert_close(model.predict([sent]), [plain(model.model(decoded))])


def test_images_are_turned_as_their_camera_says(
    model: PipelineModel, detector: PipelineModel
) -> None:
    notes = Image.Exif()
    notes[0x112] = 6
    turned = image(40, 64)
    sent = saved(turned, exif=notes)
    decoded = Image.open(io.BytesIO(base64.b64decode(sent)))
    for each in (model, detector):
        assert_close(each.predict([sent]), [plain(each.model(decoded))])
    upright = saved(turned.transpose(Image.Transpose.ROTATE_270))
    assert_close(model.predict([sent]), model.predict([upright]))


def test_other_broken_notes_of_a_camera_do_not_matter(model: PipelineModel) -> None:
    notes = Image.Exif()
    notes[0x112], notes[0x11A] = 6, 72.0
    broken = notes.tobytes().replace(b"\x01\x1a\0\x05", b"\x01\x1a\0\x01")  # a wrong type
    assert_close(
        model.predict([saved(image(40, 64), "JPEG", exif=broken)]),
        model.predict([saved(image(40, 64), "JPEG", exif=notes)]),
    )
    assert len(model.predict([saved(image(40, 64), "JPEG", exif=b"Exif\0\0no notes")])[0]) == 3


@pytest.mark.parametrize("parameters", [{}, {"threshold": 0.1}, {"threshold": 0}], ids=str)
def test_objects_are_those_of_the_pipeline(
    detector: PipelineModel, parameters: dict[str, Any]
) -> None:
    images = [image(*size) for size in ((40, 40), (40, 64), (40, 40), (64, 40))]
    wanted = [plain(detector.model(each, **parameters)) for each in images]
    assert any(wanted)
    items = [item(saved(each), **parameters) for each in images]
    assert_close(in_threads(detector, items), wanted)


def test_features_are_those_of_the_pipeline(folder: Path) -> None:
    model = loaded(folder, "image-feature-extraction")
    images = [image(*size) for size in SIZES]
    wanted = [plain(model.model(each)) for each in images]
    assert_close(in_threads(model, [saved(each) for each in images]), wanted)


def test_images_are_decoded_in_as_many_threads_as_torch_may_use(
    model: PipelineModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    from service_streamer.pipelines import images

    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    handler = images.ImageClassifier(model.model)
    monkeypatch.setitem(model.handlers, "predict", handler)
    meet = threading.Barrier(2, timeout=60)  # two at once, or it breaks
    usual = images.read_image

    def read(value: object) -> Any:
        meet.wait()
        return usual(value)

    sent = [saved(image(*size)) for size in SIZES[:4]]
    wanted = model.predict(sent)
    monkeypatch.setattr(images, "read_image", read)
    assert_close(model.predict(sent), wanted)
    with pytest.raises(InvalidInput, match="'first' is not base64"):
        model.predict([sent[0], "first", sent[1], "second"])


@pytest.mark.parametrize("parameters", [{}, {"top_k": 1}, {"function_to_apply": "none"}], ids=str)
def test_sounds_are_those_of_the_pipeline(
    sounds: PipelineModel, parameters: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = [sound(1600), sound(2400), sound(1600, width=1)]
    wanted = [plain(sounds.model(read_audio(each, 16_000), **parameters)) for each in sent]
    calls = count_calls(monkeypatch, sounds.model.model, "forward")
    assert_close(in_threads(sounds, [item(each, **parameters) for each in sent]), wanted)
    assert calls == [2, 1]


def test_the_one_label_of_a_sound(sounds: PipelineModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unlike that of an image or a text it is certain."""
    from service_streamer.pipelines.sounds import SoundClassifier

    network = sounds.model.model
    size = network.classifier.in_features
    monkeypatch.setitem(network._modules, "classifier", torch.nn.Linear(size, 1))
    monkeypatch.setattr(network.config, "id2label", {0: "yes"})
    monkeypatch.setitem(sounds.handlers, "predict", SoundClassifier(sounds.model))
    wanted = plain(sounds.model(read_audio(sound(1600), 16_000)))
    assert sounds.predict([sound(1600)]) == [wanted] == [[{"score": 1.0, "label": "yes"}]]


def test_a_batch_is_padded_to_the_rows_that_a_model_is_compiled_for(
    model: PipelineModel, detector: PipelineModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    handler = model.handlers["predict"]
    assert handler.has_buckets
    assert not detector.handlers["predict"].has_buckets  # each form is a shape of its own
    items = [saved(image(*size)) for size in SIZES[:3]]
    wanted = model.predict(items)
    monkeypatch.setattr(handler, "buckets", make_buckets(8, 0))
    calls = count_calls(monkeypatch, model.model.model, "forward")
    assert_close(model.predict(items), wanted)
    assert calls == [4]


def test_half_precision(folder: Path) -> None:
    model = PipelineModel("cpu")
    model.init_model(folder, dtype="bfloat16")
    [answer] = in_threads(model, [saved(image(40, 30))])
    [wanted] = [plain(model.model(image(40, 30)))]
    assert [each["label"] for each in answer] == [each["label"] for each in wanted]
    scores = [each["score"] for each in answer]
    assert scores == pytest.approx([each["score"] for each in wanted], abs=0.02)
