"""A pipeline's preprocessing in processes of its own: what travels, and that answers stay equal."""

from __future__ import annotations

import pickle

import pytest

from pipeline_cases import folder, image, item, saved, served, sound
from service_streamer import InvalidInput
from service_streamer.pipelines import PipelineModel

pytestmark = pytest.mark.xdist_group("pipelines-apart")


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
