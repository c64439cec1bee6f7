"""What tests of pipelines share: tiny models, loaded once in a process, and how to drive them."""

from __future__ import annotations

import base64
import contextlib
import functools
import io
import json
import math
import random
import shutil
import struct
import wave
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import quiet_torch  # noqa: F401
from service_streamer import InvalidInput, InvalidItems, ManagedModel
from service_streamer.pipelines import PipelineModel, SteppedPipeline
from tiny_models import folder

transformers.utils.logging.disable_progress_bar()

SHORT = "the quick fox"
LONG = "once upon a time there was a king who had three daughters, and a garden."


def variant(name: str, target: Path, **config: Any) -> Path:
    """A copy of a tiny model whose config.json has these values, too."""
    shutil.copytree(folder(name), target, dirs_exist_ok=True)
    file = target / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **config}))
    return target


def loaded(source: Path | str | None, task: str | None = None, **options: Any) -> PipelineModel:
    model = PipelineModel("cpu")
    model.init_model(source, task, **options)
    return model


def served(name: str, task: str | None = None) -> PipelineModel:
    """A loaded tiny model; what a test changes in it must be undone."""
    model = _served(name, None)
    return model if task in (None, model.task) else _served(name, task)


@cache
def _served(name: str, task: str | None) -> PipelineModel:
    return loaded(folder(name), task)


@cache
def stepped(name: str) -> SteppedPipeline:
    """A loaded tiny model that generates by steps; what a test changes in it must be undone."""
    model = SteppedPipeline("cpu")
    model.init_model(folder(name))
    return model


def reference(source: Path, task: str) -> Any:
    """transformers' own pipeline, to compare with."""
    build: Any = transformers.pipeline
    return build(task, model=str(source), device="cpu")


def item(inputs: Any, do: str = "predict", **parameters: Any) -> dict[str, Any]:
    return {"do": do, "inputs": inputs, "parameters": parameters}


def refusal(model: PipelineModel, wrong: Any) -> str:
    """The message that the caller of an invalid item gets."""
    with pytest.raises(InvalidItems) as caught:
        model.predict([wrong])
    [error] = caught.value.errors.values()
    assert type(error) is InvalidInput
    assert len(str(error)) < 300
    str(error).encode()  # the message can be sent
    return str(error)


def plain(answer: Any) -> Any:
    """An answer of transformers as JSON data."""
    return json.loads(json.dumps(answer, default=lambda array: array.tolist()))


def assert_close(got: Any, wanted: Any, tolerance: float = 2e-5) -> None:
    """The same data, but for the last digits of floats."""
    if isinstance(wanted, float):
        assert got == pytest.approx(wanted, abs=tolerance, rel=1e-4)
    elif isinstance(wanted, (list, tuple)):
        assert len(got) == len(wanted)
        for pair in zip(got, wanted, strict=True):
            assert_close(*pair, tolerance)
    elif isinstance(wanted, dict):
        assert got.keys() == wanted.keys()
        for key in wanted:
            assert_close(got[key], wanted[key], tolerance)
    else:
        assert got == wanted


def in_threads(model: ManagedModel, items: list[Any]) -> list[Any]:
    """The results of a batch with each stage in a thread of its own, as a worker runs them."""
    with contextlib.ExitStack() as stack:
        ahead, middle, behind = (stack.enter_context(ThreadPoolExecutor(1)) for _ in range(3))
        batch = ahead.submit(model.preprocess, items).result()
        outputs = middle.submit(model.forward, batch).result()
        results: list[Any] = behind.submit(model.postprocess, outputs).result()
        return results


def count_calls(patch: pytest.MonkeyPatch, owner: Any, name: str) -> list[int]:
    """Counts calls: a list with the size of each one's first tensor."""
    function, calls = getattr(owner, name), []

    @functools.wraps(function)
    def counting(*args: Any, **kwargs: Any) -> Any:
        tensors = [each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor)]
        calls.append(len(tensors[0]))
        return function(*args, **kwargs)

    patch.setattr(owner, name, counting)
    return calls


def compiles_to_itself(patch: pytest.MonkeyPatch) -> None:
    """Compiled models are padded to their shapes, and are else what they were."""
    patch.setattr(torch.nn.Module, "compile", lambda _module, **_: None)


def image(width: int, height: int, mode: str = "RGB") -> Any:
    from PIL import Image

    noise = np.random.default_rng(width).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(noise).convert(mode)


def saved(image: Any, kind: str = "PNG", **options: Any) -> str:
    """An image as it is sent."""
    file = io.BytesIO()
    image.save(file, kind, **options)
    return base64.b64encode(file.getvalue()).decode()


def samples(count: int) -> list[float]:
    return [0.5 * math.sin(at * at / 900) for at in range(count)]


def sound(count: int, rate: int = 16_000, channels: int = 1, width: int = 2) -> str:
    """A sound as it is sent."""
    file = io.BytesIO()
    top = 2 ** (8 * width - 1) - 1
    with wave.open(file, "wb") as writer:
        writer.setparams((channels, width, rate, 0, "NONE", ""))
        for sample in samples(count):
            value = round(top * sample) + (128 if width == 1 else 0)
            writer.writeframes(value.to_bytes(width, "little", signed=width > 1) * channels)
    return base64.b64encode(file.getvalue()).decode()


def extensible(content: bytes, kind: int = 1) -> bytes:
    """A WAV file of ``wave`` with the longer header of other programs; 1 is PCM, and 3 is float."""
    guid = struct.pack("<H", kind) + bytes.fromhex("000000001000800000aa00389b71")
    head = b"WAVEfmt " + struct.pack("<IH", 40, 0xFFFE) + content[22:36]
    head += struct.pack("<HHI", 22, 16, 4) + guid
    return b"RIFF" + struct.pack("<I", len(head) + len(content) - 36) + head + content[36:]


@cache
def noise(seconds: float, seed: int = 0) -> bytes:
    """A WAV file of random samples."""
    source, count, file = random.Random(seed), int(16_000 * seconds), io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setparams((1, 2, 16_000, 0, "NONE", ""))
        values = (source.randrange(-9000, 9000) for _ in range(count))
        writer.writeframes(struct.pack(f"<{count}h", *values))
    return file.getvalue()


# Steps


def outputs_of(model: SteppedPipeline, items: list[Any], seed: int | None = None) -> list[Any]:
    """The outputs of each item. With a seed they begin at random steps, a few at a time."""
    source = random.Random(seed)
    waiting = list(enumerate(items))
    running: dict[int, Any] = {}
    outputs: list[list[Any]] = [[] for _ in items]
    while waiting or running:
        count = len(waiting) if seed is None else source.randrange(3)
        if begun := waiting[:count]:
            states = model.start([each for _, each in begun])
            running |= {at: state for (at, _), state in zip(begun, states, strict=True)}
            del waiting[:count]
        if not running:
            continue
        order = list(running)
        source.shuffle(order)
        steps = model.step([running[at] for at in order])
        assert len(steps) == len(order)
        for at, (output, is_done) in zip(order, steps, strict=True):
            if output is not None:
                outputs[at].append(output)
            if is_done:
                model.release(running.pop(at))
    assert not caches_of(model)
    return outputs


def results_of(model: SteppedPipeline, items: list[Any], seed: int | None = None) -> list[Any]:
    return [model.join_outputs(outputs) for outputs in outputs_of(model, items, seed)]


def caches_of(model: SteppedPipeline) -> list[Any]:
    """What its loop keeps of rows that are not over; nothing if it has none, or keeps pages."""
    return list(getattr(model.loop, "homes", ()))
