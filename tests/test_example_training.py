"""The scripts that train the models of the examples."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

import quiet_torch  # noqa: F401
import train_text_generation
import train_text_infilling
import train_vision
from bert_model import TextInfillingModel
from flask_vision_example import SAMPLE
from generation_model import TextGenerationModel
from vision_model import VisionModel, read_config

pytestmark = pytest.mark.xdist_group("example-training")


@pytest.mark.long
@pytest.mark.parametrize(
    "training",
    [train_text_infilling, train_text_generation, train_vision],
    ids=lambda m: m.__name__,
)
def test_training_from_end_to_end(
    training: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    text, output = tmp_path / "text.txt", tmp_path / "model"
    text.write_text("# a comment\n\nRed fish swim fast.\nBlue birds fly high.\n", "utf-8")
    monkeypatch.setattr(train_vision, "HELD_OUT", 10)
    flags = ["--text", str(text), "--epochs", "2"]
    if training is train_vision:
        flags = ["--drawings", "40", "--epochs", "1"]
    flags += ["--output", str(output)]

    assert training.main([*flags, "--bar", "1.1"]) == 1
    assert "below" in capsys.readouterr().err
    assert not output.exists()

    weights = []
    for _ in range(2):
        assert training.main([*flags, "--bar", "0"]) == 0
        assert capsys.readouterr().out
        weights.append((output / "model.safetensors").read_bytes())
    assert weights[0] == weights[1]
    if training is train_vision:
        assert read_config(output) == read_config()
        assert VisionModel(output, device="cpu").predict([SAMPLE.read_bytes()])
    elif training is train_text_infilling:
        model = TextInfillingModel(model_path=output, device="cpu")
        assert model.predict(["red fish swim [MASK]."])
    else:
        assert TextGenerationModel(model_path=output, device="cpu").predict(["Red fish"])
