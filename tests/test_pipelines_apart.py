"""A pipeline's preprocessing in processes of its own: what travels, and that answers stay equal."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tiny_models
from service_streamer import InvalidInput, Streamer
from service_streamer.pipelines import PipelineModel
from test_image_pipelines import image, one_thread, saved  # noqa: F401  # a fixture
from test_pipelines import assert_close, item, sound

NAMES = ("pictures", "detector", "sounds", "speech", "classifier")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {name: tiny_models.build(name, root / name) for name in NAMES}


def apart(folder: Path) -> PipelineModel:
    """A model as a preprocess process has it."""
    model = PipelineModel("cpu")
    model.preprocesses_only = True
    model.init_preprocess(folder)
    return model


PICTURES = [item(saved(image(40, side))) for side in (30, 50, 70)]
SOUNDS = [item(sound(samples)) for samples in (8000, 8000, 11200)]


@pytest.mark.parametrize(
    ("name", "items"),
    [("pictures", PICTURES), ("detector", PICTURES), ("sounds", SOUNDS), ("speech", SOUNDS)],
)
def test_answers_are_those_of_one_process(
    name: str, items: list[Any], folders: dict[str, Path]
) -> None:
    folder = folders[name]
    whole, without_weights = PipelineModel("cpu"), apart(folder)
    whole.init_model(folder)
    items = [*items, item(None, "describe")]
    assert {each.device.type for each in without_weights.model.model.parameters()} == {"meta"}
    parts = [without_weights.preprocess(part) for part in (items[:1], items[1:])]
    batch = whole.collate(pickle.loads(pickle.dumps(parts)))
    assert whole.postprocess(whole.forward(batch)) == whole.predict(items)


def test_invalid_items_are_found_there(folders: dict[str, Path]) -> None:
    with pytest.raises(InvalidInput, match="inputs"):
        apart(folders["pictures"]).preprocess([*PICTURES, item("no image")])


def test_texts_are_refused(folders: dict[str, Path], wording: Callable[..., None]) -> None:
    with pytest.raises(ValueError, match="leave preprocess_workers out") as raised:
        apart(folders["classifier"])
    wording(raised.value)


@pytest.mark.long
def test_images_are_decoded_in_other_processes(folders: dict[str, Path]) -> None:
    folder = folders["pictures"]
    model = PipelineModel("cpu")
    model.init_model(folder)
    with Streamer(
        PipelineModel, model_init_args=(folder,), preprocess_workers=2, worker_timeout=None
    ) as streamer:
        assert_close(streamer.predict(PICTURES), model.predict(PICTURES))
