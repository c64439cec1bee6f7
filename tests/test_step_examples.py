"""The example of steps without text: the diffusion of points, driven by hand, and its training."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import diffusion_model
import quiet_torch  # noqa: F401
import train_diffusion as training
from diffusion_model import SHAPES, ManagedDiffusionModel, Picture, draw
from service_streamer import InvalidInput, InvalidItems

pytestmark = pytest.mark.xdist_group("step-examples")


@pytest.fixture(scope="module")
def model() -> ManagedDiffusionModel:
    model = ManagedDiffusionModel()
    model.init_model()
    return model


def alone(model: ManagedDiffusionModel, item: dict[str, Any]) -> list[np.ndarray]:
    """All pictures of an item that has every batch for itself."""
    [state] = model.start([item])
    pictures, ends = [], False
    while not ends:
        [(picture, ends)] = model.step([state])
        pictures.append(picture)
    return pictures


ITEMS: list[dict[str, Any]] = [
    {"shape": shape, "steps": steps, "seed": seed, "points": points}
    for seed, (shape, steps, points) in enumerate(
        [("heart", 9, 300), ("star", 1, 64), ("spiral", 12, 1), ("smile", 5, 65), ("star", 9, 500)]
    )
]


def test_each_has_its_own_number_of_steps_and_points(model: ManagedDiffusionModel) -> None:
    for item in ITEMS:
        pictures = alone(model, item)
        assert [picture.shape for picture in pictures] == item["steps"] * [(item["points"], 2)]
        assert model.join_outputs(pictures) is pictures[-1]


@pytest.mark.parametrize("seed", range(5))
def test_a_picture_depends_on_nobody_in_the_batch(model: ManagedDiffusionModel, seed: int) -> None:
    """They come and go at random steps, in any order, and are equal to the last bit."""
    expected = [alone(model, item) for item in ITEMS]
    shuffle = random.Random(seed)
    waiting = list(enumerate(ITEMS))
    shuffle.shuffle(waiting)
    running: list[tuple[int, Picture]] = []
    got: list[list[np.ndarray]] = [[] for _ in ITEMS]
    while waiting or running:
        new = [waiting.pop() for _ in range(shuffle.randint(not running, len(waiting)))]
        if new:
            states = model.start([item for _, item in new])
            running += zip([number for number, _ in new], states, strict=True)
        shuffle.shuffle(running)
        outputs = model.step([state for _, state in running])
        for (number, _), (picture, _) in zip(running, outputs, strict=True):
            got[number].append(picture)
        running = [each for each, (_, ends) in zip(running, outputs, strict=True) if not ends]
    for pictures, others in zip(expected, got, strict=True):
        assert all(map(np.array_equal, pictures, others))


def test_outputs_are_not_the_memory_of_the_state(model: ManagedDiffusionModel) -> None:
    [state] = model.start([{"shape": "star", "steps": 2}])
    [(first, _)] = model.step([state])
    kept = first.copy()
    first[:] = 0  # a caller may do so
    [(last, _)] = model.step([state])
    assert np.array_equal(alone(model, {"shape": "star", "steps": 2})[0], kept)
    assert np.array_equal(alone(model, {"shape": "star", "steps": 2})[1], last)


def test_a_step_that_raised_may_be_repeated(
    model: ManagedDiffusionModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    item = {"shape": "spiral", "steps": 3}
    states = model.start([item, item])
    with monkeypatch.context() as patch:
        patch.setattr(diffusion_model, "velocity", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model.step(states)
    for expected in alone(model, item):
        assert np.array_equal(model.step(states)[1][0], expected)


def test_the_cost_is_the_memory_of_all_its_points(model: ManagedDiffusionModel) -> None:
    states = model.start([{"shape": "heart", "points": count} for count in (1, 64, 65, 4096)])
    assert [model.cost(state) for state in states] == [64, 64, 128, 4096]


@pytest.mark.parametrize(
    ("item", "word"),
    [
        ("heart", "'heart'"),
        ({}, "shape"),
        ({"shape": "cube"}, "'cube'"),
        ({"shape": "heart", "text": "a"}, "'text'"),
        ({"shape": "heart", "steps": 0}, "steps"),
        ({"shape": "heart", "seed": True}, "seed"),
        ({"shape": "heart", "points": 4097}, "points"),
    ],
    ids=str,
)
def test_diffusion_refuses_a_bad_item(model: ManagedDiffusionModel, item: Any, word: str) -> None:
    with pytest.raises(InvalidItems) as error:
        model.start([{"shape": "heart"}, item, {"shape": "star"}])
    assert list(error.value.errors) == [1]
    assert type(error.value.errors[1]) is InvalidInput
    assert word in str(error.value.errors[1])


@pytest.mark.parametrize("shape", SHAPES)
def test_it_draws_what_it_was_asked_for(model: ManagedDiffusionModel, shape: str) -> None:
    assert training.on_shape(model, shape) > 0.85
    others = [training.on_shape(model, shape, of=other) for other in SHAPES if other != shape]
    assert max(others) < 0.6


def test_a_drawing_for_the_terminal() -> None:
    lines = draw(np.array([[0.0, 0.0], [-2.49, 2.49], [99.0, 0.0]], np.float32), width=4).split(
        "\n"
    )
    assert lines == ["\u2801\u2800\u2800\u2800", "\u2800\u2800\u2801\u2800"]


def test_the_program(model: ManagedDiffusionModel, capsys: pytest.CaptureFixture[str]) -> None:
    diffusion_model.main(["star", "--steps", "3"])
    shown = capsys.readouterr().out.strip("\n").split("\n\n")
    assert len(shown) == 3
    [*_, last] = alone(model, {"shape": "star", "steps": 3, "points": 1024})
    assert shown[-1] == draw(last)


@pytest.mark.long
def test_training_from_end_to_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest
) -> None:
    request.addfinalizer(lambda: torch.use_deterministic_algorithms(False))
    output = tmp_path / "model"
    flags = ["--output", str(output), "--steps", "3"]
    assert training.main([*flags, "--bar", "1.1"]) == 1
    assert "below the bar: nothing was written" in capsys.readouterr().err
    assert not output.exists()
    assert training.main([*flags, "--bar", "0"]) == 0
    assert "points on the shape: heart" in capsys.readouterr().out
    model = ManagedDiffusionModel()
    model.init_model(output)
    assert len(alone(model, {"shape": "heart", "steps": 2})) == 2
