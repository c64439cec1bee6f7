"""Images and sounds on tensors: answers as transformers' pipelines give them, and what travels."""

from __future__ import annotations

import base64
import io
import pickle
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image

from pipeline_cases import (
    assert_close,
    count_calls,
    folder,
    image,
    in_threads,
    item,
    loaded,
    plain,
    reference,
    refusal,
    samples,
    saved,
    served,
    sound,
    variant,
)
from service_streamer import InvalidInput, InvalidItems
from service_streamer.pipelines import PipelineModel

pytestmark = pytest.mark.xdist_group("transformers")

SIZES = ((40, 30), (30, 40), (64, 64), (300, 200), (9, 80))


@pytest.fixture
def model() -> PipelineModel:
    return served("pictures")


@pytest.fixture
def detector() -> PipelineModel:
    return served("detector")


@pytest.fixture
def sounds() -> PipelineModel:
    return served("sounds")


def with_one_label(name: str, target: Path, label: str) -> Path:
    """A tiny classifier whose last layer gives one label only."""
    config: Any = transformers.AutoConfig.from_pretrained(folder(name))
    config.id2label, config.label2id = {0: label}, {label: 0}
    kind = getattr(transformers, config.architectures[0])
    kind.from_pretrained(folder(name), config=config, ignore_mismatched_sizes=True).save_pretrained(
        target
    )
    (target / "preprocessor_config.json").write_bytes(
        (folder(name) / "preprocessor_config.json").read_bytes()
    )
    return target


@pytest.mark.parametrize("kind", ["single_label", "multi_label", "regression", "one label"])
def test_labels_are_those_of_the_pipeline(tmp_path: Path, kind: str) -> None:
    if kind == "one label":
        source = with_one_label("pictures", tmp_path, "cat")
    else:
        named = kind if kind == "regression" else f"{kind}_classification"
        source = variant("pictures", tmp_path, problem_type=named)
    model, alone = loaded(source), reference(source, "image-classification")
    functions = [{"function_to_apply": name, "top_k": 2} for name in ("softmax", "sigmoid", "none")]
    images = [image(*size) for size in SIZES]
    for parameters in ({}, {"top_k": 1}, {"top_k": 3}, {"top_k": 99}, *functions):
        wanted = [plain(alone(each, **parameters)) for each in images]
        items = [item(saved(each), **parameters) for each in images]
        assert_close(in_threads(model, items), wanted)


def test_images_of_all_sizes_and_parameters_share_a_forward_pass(
    model: PipelineModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    items = [item(saved(image(*size)), top_k=at) for at, size in enumerate(SIZES, 1)]
    items.append(item(items[0]["inputs"], function_to_apply="sigmoid"))
    wanted = [model.predict([each])[0] for each in items]
    calls = count_calls(monkeypatch, model.model.model, "forward")
    assert_close(model.predict(items), wanted)
    assert calls == [len(items)]


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
def test_image_processors_of_every_kind_give_their_own_pixels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    options = {"size": {"height": 32, "width": 32}, **PROCESSORS[case]}
    processor = getattr(transformers, f"{options.pop('name')}ImageProcessor")(**options)
    processor.save_pretrained(variant("pictures", tmp_path))
    task = "image-feature-extraction"
    model, alone = loaded(tmp_path, task), reference(tmp_path, task)
    images = [image(*size) for size in SIZES]
    wanted = [plain(alone(each)) for each in images]
    calls = count_calls(monkeypatch, model.model.model, "forward")
    assert_close(in_threads(model, [saved(each) for each in images]), wanted, 1e-4)
    assert calls == [len(SIZES)]


def test_a_processor_that_does_something_else_makes_its_own_pixels(
    model: PipelineModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    processor = type(model.model.image_processor)
    usual = processor.normalize
    monkeypatch.setattr(processor, "normalize", lambda *args: usual(*args) ** 2)
    other = loaded(folder("pictures"))
    wanted = plain(other.model(image(40, 30)))
    assert_close(in_threads(other, [saved(image(40, 30))]), [wanted])


def test_colours_are_those_of_the_pipeline(model: PipelineModel) -> None:
    for mode in ("RGB", "L", "LA", "RGBA", "P", "CMYK", "1"):
        sent = saved(image(40, 30, mode), "JPEG" if mode == "CMYK" else "PNG")
        decoded = Image.open(io.BytesIO(base64.b64decode(sent)))
        assert_close(model.predict([sent]), [plain(model.model(decoded))])


def test_images_are_turned_as_their_camera_says(
    model: PipelineModel, detector: PipelineModel
) -> None:
    notes = Image.Exif()
    notes[0x112], notes[0x11A] = 6, 72.0
    turned = image(40, 64)
    sent = saved(turned, exif=notes)
    decoded = Image.open(io.BytesIO(base64.b64decode(sent)))
    for each in (model, detector):
        assert_close(each.predict([sent]), [plain(each.model(decoded))])
    upright = saved(turned.transpose(Image.Transpose.ROTATE_270))
    assert_close(model.predict([sent]), model.predict([upright]))
    # Other notes may be broken.
    broken = notes.tobytes().replace(b"\x01\x1a\0\x05", b"\x01\x1a\0\x01")  # a wrong type
    files = [saved(turned, "JPEG", exif=each) for each in (broken, notes, b"Exif\0\0no notes")]
    first, second, third = model.predict(files)
    assert_close(first, second)
    assert len(third) == 3


def test_objects_are_those_of_the_pipeline(detector: PipelineModel) -> None:
    images = [image(*size) for size in ((40, 40), (40, 64), (40, 40), (64, 40))]
    for parameters in ({}, {"threshold": 0.1}, {"threshold": 0}):
        wanted = [plain(detector.model(each, **parameters)) for each in images]
        assert any(wanted)
        items = [item(saved(each), **parameters) for each in images]
        assert_close(in_threads(detector, items), wanted)


def test_images_are_decoded_in_as_many_threads_as_torch_may_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    model = loaded(folder("pictures"))
    sent = [saved(image(*size)) for size in SIZES[:4]]
    wanted = model.predict(sent)
    meet = threading.Barrier(2, timeout=60)  # two at once, or it breaks
    usual = Image.open

    def open_image(*args: Any, **options: Any) -> Any:
        meet.wait()
        return usual(*args, **options)

    monkeypatch.setattr(Image, "open", open_image)
    assert_close(model.predict(sent), wanted)
    monkeypatch.undo()
    with pytest.raises(InvalidInput, match="'first' is not base64"):
        model.predict([sent[0], "first", sent[1], "second"])


def test_sounds_are_those_of_the_pipeline_and_share_a_pass_if_as_long(
    sounds: PipelineModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = [sound(1600), sound(2400), sound(1600)]
    raw = [np.array(samples(count), np.float32) for count in (1600, 2400, 1600)]
    for parameters in ({}, {"top_k": 1}, {"function_to_apply": "none"}):
        wanted = [plain(sounds.model(each, **parameters)) for each in raw]
        with monkeypatch.context() as patch:
            calls = count_calls(patch, sounds.model.model, "forward")
            items = [item(each, **parameters) for each in sent]
            assert_close(in_threads(sounds, items), wanted, 1e-3)
        assert calls == [2, 1]


def test_samples_of_every_width_are_heard_as_they_are(sounds: PipelineModel) -> None:
    raw = {"sampling_rate": 16_000, "raw": samples(1600)}
    for sent in (*(sound(1600, width=width) for width in (1, 2, 3, 4)), sound(1600, channels=2)):
        assert_close(sounds.predict([sent]), sounds.predict([raw]), 0.02)
        [[group], [other]] = sounds.preprocess([sent]), sounds.preprocess([raw])
        [heard], [wanted] = ([*each.batch[0].values()] for each in (group, other))
        assert torch.allclose(heard, wanted, atol=0.05)


def test_the_one_label_of_a_sound_is_certain(tmp_path: Path) -> None:
    """Unlike that of an image or a text."""
    source = with_one_label("sounds", tmp_path, "yes")
    [answer] = loaded(source).predict([sound(1600)])
    assert answer == [{"score": 1.0, "label": "yes"}]
    alone = reference(source, "audio-classification")
    assert answer == plain(alone(np.array(samples(1600), np.float32)))


#: A forward pass takes one second of sound.
SECOND = 16_000


@pytest.mark.parametrize("name", ["sounds", "speech"])
def test_a_batch_of_sounds_is_computed_in_parts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = [sound(SECOND // 2)] * 3 + [sound(SECOND)]
    wanted = served(name).predict(sent)
    model = loaded(folder(name), max_batch_seconds=1)
    calls = count_calls(monkeypatch, model.model.model, "forward")
    assert_close(model.predict(sent), wanted, 1e-3)
    assert sorted(calls) == [1, 1, 2]


def test_a_sound_is_refused_if_it_cannot_be_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    short, long = sound(SECOND), sound(SECOND + 1)
    model = loaded(folder("sounds"), max_batch_seconds=1)
    assert "max_batch_seconds" in refusal(model, long)
    with pytest.raises(InvalidItems) as caught:
        model.predict([short, long, long])
    assert [*caught.value.errors] == [1, 2]
    with pytest.raises(InvalidItems, match="max_batch_seconds"):
        model.collate([apart("sounds").preprocess([long])])
    monkeypatch.delattr(transformers.Wav2Vec2Config, "inputs_to_logits_ratio")
    assert "max_batch_seconds" in refusal(loaded(folder("speech"), max_batch_seconds=1), long)


@pytest.mark.parametrize(
    ("name", "most"), [("sounds", 60), ("spectrograms", None), ("speech", None), ("whisper", None)]
)
def test_the_longest_sound_is_known_if_a_model_cannot_cut_it(name: str, most: int | None) -> None:
    model = loaded(folder(name), max_batch_seconds=1)
    assert served(name).describe()["max_sound_seconds"] == most
    assert model.describe()["max_sound_seconds"] == (most and 1)
    if most is None:
        assert model.predict([sound(3 * SECOND)])


def test_a_long_sound_is_recognized_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    model, whole = loaded(folder("speech"), max_batch_seconds=1), served("speech")
    usual, lengths = model.model.model.forward, []

    def forward(*args: Any, **inputs: Any) -> Any:
        lengths.append(inputs["input_values"].shape[1])
        return usual(*args, **inputs)

    monkeypatch.setattr(model.model.model, "forward", forward)
    for count, parameters in ((SECOND, {}), (40_000, {}), (40_000, {"return_timestamps": "word"})):
        lengths.clear()
        sent = {"raw": samples(count), "sampling_rate": SECOND}
        options = {"chunk_length_s": 1.0, **parameters} if count > SECOND else parameters
        [answer] = model.predict([item(sent, **parameters)])
        assert max(lengths) == SECOND
        assert answer == plain(whole.model(np.array(sent["raw"], np.float32), **options))
    assert len(lengths) == 4, "each piece has a sixth of context on both sides"


def apart(name: str) -> PipelineModel:
    """A model as a preprocess process has it."""
    model = PipelineModel("cpu")
    model.preprocesses_only = True
    model.init_preprocess(folder(name))
    return model


PICTURES = [item(saved(image(40, side))) for side in (30, 50, 70)]
SOUNDS = [item(sound(samples)) for samples in (8000, 8000, 11200)]


@pytest.mark.parametrize("name", ["pictures", "detector", "sounds", "speech", "whisper"])
def test_answers_are_those_of_one_process(name: str) -> None:
    whole, without_weights = served(name), apart(name)
    items = PICTURES if name in ("pictures", "detector") else SOUNDS
    items = [*items, item(None, "describe")]
    assert {each.device.type for each in without_weights.model.model.parameters()} == {"meta"}
    parts = [without_weights.preprocess(part) for part in (items[:1], items[1:])]
    batch = whole.collate(pickle.loads(pickle.dumps(parts)))
    assert whole.postprocess(whole.forward(batch)) == whole.predict(items)


def test_invalid_items_are_found_where_they_are_decoded_and_texts_are_not() -> None:
    with pytest.raises(InvalidInput, match="inputs"):
        apart("pictures").preprocess([*PICTURES, item("no image")])
    with pytest.raises(ValueError, match="preprocess_workers"):
        apart("classifier")
