"""Pipelines of transformers as served models: as one by one, checked, and closed to strangers."""

from __future__ import annotations

import base64
import contextlib
import functools
import io
import json
import math
import re
import shutil
import struct
import subprocess
import sys
import threading
import wave
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import minilm
import tiny_models
from service_streamer import (
    BadModelOutput,
    InvalidInput,
    InvalidItems,
    ManagedModel,
    Streamer,
    WorkerStartError,
)
from service_streamer.engine.build import make_lengths
from service_streamer.pipelines import TASKS, CustomModel, PipelineModel, parameter_schemas
from service_streamer.pipelines.loading import DEFAULT_MODEL, locate_model
from service_streamer.pipelines.requests import plain
from service_streamer.pipelines.sizes import item_length, length_of_inputs
from service_streamer.workers.model_spec import ModelSpec


@pytest.fixture(scope="module", autouse=True)
def no_monitor_threads() -> Iterator[None]:
    """What shows progress bars, or could, leaves a thread that never ends."""
    from tqdm import tqdm

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tqdm, "monitor_interval", 0)
        yield


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Two threads that wait for each other are many times slower on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a tiny model, by its name; "" is the shipped one."""

    @functools.cache
    def folder(name: str) -> Path:
        if not name:
            return DEFAULT_MODEL
        if name in ("pictures", "detector"):
            pytest.importorskip("PIL")
        return tiny_models.build(name, tmp_path_factory.mktemp("models") / name)

    return folder


@pytest.fixture(scope="session")
def served(folder: Callable[[str], Path]) -> Callable[..., PipelineModel]:
    """A loaded model, by its name and task."""

    @functools.cache
    def served(name: str, task: str | None = None) -> PipelineModel:
        model = PipelineModel()
        model.init_model(folder(name), task)
        return model

    return served


@pytest.fixture(scope="session")
def reference(folder: Callable[[str], Path]) -> Callable[..., Any]:
    """transformers' own pipeline, to compare with."""
    import transformers

    @functools.cache
    def reference(name: str, task: str) -> Any:
        build: Any = transformers.pipeline
        return build(task, model=str(folder(name)), device="cpu")

    return reference


def item(inputs: Any, do: str = "predict", **parameters: Any) -> dict[str, Any]:
    return {"do": do, "inputs": inputs, "parameters": parameters}


def of_caller(invalid: InvalidItems) -> Exception:
    """What the caller of the only item gets."""
    (error,) = invalid.errors.values()
    return error


def assert_close(got: Any, wanted: Any) -> None:
    """The same data, but for the last digits of floats."""
    if isinstance(wanted, float):
        assert got == pytest.approx(wanted, abs=2e-5, rel=1e-4)
    elif isinstance(wanted, (list, tuple)):
        assert len(got) == len(wanted)
        for pair in zip(got, wanted, strict=True):
            assert_close(*pair)
    elif isinstance(wanted, dict):
        assert got.keys() == wanted.keys()
        for key in wanted:
            assert_close(got[key], wanted[key])
    else:
        assert got == wanted


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


def picture(width: int, height: int, shift: int = 0, kind: str = "PNG") -> str:
    from PIL import Image

    numbers = np.arange(width * height * 3, dtype=np.int64) * 7 + shift
    image = Image.fromarray((numbers % 256).astype(np.uint8).reshape(height, width, 3))
    file = io.BytesIO()
    image.save(file, kind)
    return base64.b64encode(file.getvalue()).decode()


def sound(samples: int, rate: int = 16_000, channels: int = 1, width: int = 2) -> str:
    file = io.BytesIO()
    top = 2 ** (8 * width - 1) - 1
    with wave.open(file, "wb") as writer:
        writer.setparams((channels, width, rate, 0, "NONE", ""))
        for at in range(samples):
            value = round(top * 0.5 * math.sin(at * at / 900)) + (128 if width == 1 else 0)
            writer.writeframes(value.to_bytes(width, "little", signed=width > 1) * channels)
    return base64.b64encode(file.getvalue()).decode()


# What it answers: as the pipeline does to one input, whatever else is in the batch

SHORT, LONG = "the fox", "once upon a time there was a king who had three daughters, and a garden."
MASKED = ["Happy birthday to [MASK].", "[MASK] [MASK] little star, how I [MASK] what you are"]

SAME: list[tuple[str, str, list[Any], dict[str, Any]]] = [
    ("", "fill-mask", [*MASKED, "the [MASK]"], {}),
    ("", "fill-mask", MASKED, {"top_k": 2}),
    ("", "fill-mask", MASKED, {"targets": ["you", "star", "wonder"]}),
    ("roberta", "fill-mask", ["the quick <mask> fox", "a <mask>", "it <mask> the <mask>"], {}),
    ("", "fill-mask", ["[MASK] " + "star " * 70, "the [MASK]"], {"truncation": True}),
    ("classifier", "text-classification", [SHORT, LONG, "it"], {}),
    ("classifier", "text-classification", [SHORT, {"text": LONG, "text_pair": SHORT}], {}),
    ("classifier", "text-classification", [SHORT, {"text": LONG}], {"top_k": 1}),
    ("classifier", "text-classification", [LONG, SHORT], {"top_k": None}),
    ("classifier", "text-classification", [LONG, SHORT], {"function_to_apply": "none", "top_k": 2}),
    ("classifier", "text-classification", [3 * LONG, SHORT], {"truncation": True}),
    ("last_token", "text-classification", [SHORT, LONG[:40], "it"], {"top_k": None}),
    ("tagger", "token-classification", [LONG, SHORT, "it was"], {}),
    ("tagger", "token-classification", [LONG, SHORT], {"aggregation_strategy": "simple"}),
    ("tagger", "token-classification", [3 * LONG, SHORT], {"truncation": True}),
    ("tagger", "token-classification", [LONG, SHORT], {"aggregation_strategy": "first"}),
    ("tagger", "token-classification", [LONG, SHORT], {"aggregation_strategy": "max"}),
    ("tagger", "token-classification", [LONG, SHORT], {"aggregation_strategy": "average"}),
    ("tagger", "token-classification", [LONG, SHORT], {"ignore_labels": ["B-PER", "I-LOC"]}),
    ("features", "feature-extraction", [SHORT, LONG, "it"], {}),
    ("features", "feature-extraction", [3 * LONG, SHORT], {"truncation": True}),
    ("gpt2", "feature-extraction", [SHORT, LONG[:40], "it"], {}),
    (
        "entailment", "zero-shot-classification", [SHORT, LONG, "it"],
        {"candidate_labels": ["a king", "foxes", "gardens with apples"]},
    ),
    (
        "entailment", "zero-shot-classification", [SHORT, LONG],
        {"candidate_labels": "king, fox", "multi_label": True, "hypothesis_template": "It is {}!"},
    ),
    (
        "entailment", "zero-shot-classification", [3 * LONG, SHORT],
        {"candidate_labels": "king, fox", "truncation": True},
    ),
    ("chat", "text-generation", [SHORT, LONG, "it"], {"do_sample": False, "max_new_tokens": 9}),
    ("bare", "text-generation", [SHORT, "it"], {"do_sample": False, "max_new_tokens": 9}),
    (
        "gpt2", "text-generation", [SHORT, LONG[:40], "it"],
        {"do_sample": False, "max_new_tokens": 12, "return_full_text": False},
    ),
    (
        "gpt2", "text-generation", [SHORT, LONG[:40], "it"],
        {"do_sample": False, "max_new_tokens": 12, "repetition_penalty": 1.8},
    ),
    ("chat", "text-generation", [
        [{"role": "user", "content": "hello"}],
        [{"role": "user", "content": "who is it?"}, {"role": "assistant", "content": "the k"}],
    ], {"do_sample": False, "max_new_tokens": 9}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "task", "inputs", "parameters"), SAME)
def test_as_one_by_one(
    served: Callable[..., PipelineModel],
    reference: Callable[..., Any],
    name: str,
    task: str,
    inputs: list[Any],
    parameters: dict[str, Any],
) -> None:
    model, alone = served(name, task), reference(name, task)
    wanted = [plain(alone(each, **_for_transformers(task, parameters))) for each in inputs]
    items = [item(each, **parameters) for each in inputs]
    together = model.predict(items)
    assert_close(together, wanted)
    assert_close([model.predict([each])[0] for each in items], wanted)
    assert_close(model.predict(items[::-1])[::-1], wanted)
    assert_close(in_threads(model, items), wanted)
    json.dumps(together, allow_nan=False)


def _for_transformers(task: str, parameters: dict[str, Any]) -> dict[str, Any]:
    if task == "fill-mask" and "truncation" in parameters:
        return {"tokenizer_kwargs": {"truncation": True, "max_length": 64}}
    if task in ("token-classification", "zero-shot-classification"):  # which always truncate
        return {name: value for name, value in parameters.items() if name != "truncation"}
    return parameters


def test_an_item_without_parameters_is_an_input(served: Callable[..., PipelineModel]) -> None:
    model = served("")
    assert model.predict(MASKED) == model.predict([item(each) for each in MASKED])
    with pytest.raises(InvalidInput, match="inputs: must be a string"):
        model.predict([{"inputs": "the [MASK]"}])
    assert model.predict([]) == []


@pytest.mark.parametrize(
    ("name", "task", "inputs", "parameters"),
    [
        ("", "fill-mask", MASKED, {}),
        ("classifier", "text-classification", [SHORT, LONG, "it"], {}),
        ("tagger", "token-classification", [SHORT, LONG, "it"], {}),
        ("features", "feature-extraction", [SHORT, LONG, "it"], {}),
        ("entailment", "zero-shot-classification", [SHORT, LONG], {"candidate_labels": "a,b,c"}),
    ],
)
def test_a_group_is_one_forward_pass(
    served: Callable[..., PipelineModel],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    task: str,
    inputs: list[Any],
    parameters: dict[str, Any],
) -> None:
    model = served(name, task)
    calls = count_calls(monkeypatch, model.model.model, "forward")
    model.predict([item(each, **parameters) for each in inputs])
    assert calls == [len(inputs) * len(parameters.get("candidate_labels", "a").split(","))]


def test_an_operation_is_one_forward_pass_whatever_its_parameters(
    served: Callable[..., PipelineModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = served("features")
    calls = count_calls(monkeypatch, model.model.model, "forward")
    items = [
        item(SHORT), item(SHORT, "embed"), item(LONG, truncation=False), item(None, "describe"),
        item(LONG, "embed"), item(SHORT, truncation=True), item("it", "embed", truncation=True),
    ]  # fmt: skip
    outputs = model.predict(items)
    assert calls == [3, 3]
    for one, output in zip(items, outputs, strict=True):
        assert_close(output, model.predict([one])[0])


def test_many_labels_are_computed_in_parts(
    folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = PipelineModel()
    model.init_model(folder("entailment"), "zero-shot-classification", batch_size=4)
    calls = count_calls(monkeypatch, model.model.model, "forward")
    model.predict([item(SHORT, candidate_labels=["a", "b", "c"]) for _ in range(3)])
    assert calls == [4, 4, 1]


# Images and sounds


def test_images(served: Callable[..., PipelineModel], monkeypatch: pytest.MonkeyPatch) -> None:
    model = served("pictures")
    from PIL import Image

    sent = [picture(40, 30), picture(64, 64, 9), picture(16, 48, 5)]
    images = [Image.open(io.BytesIO(base64.b64decode(each))) for each in sent]
    wanted = [plain(model.model(image)) for image in images]
    forms = [sent[0], f"data:image/png;base64,{sent[1]}", base64.b64decode(sent[2])]
    calls = count_calls(monkeypatch, model.model.model, "forward")
    assert_close(model.predict(forms), wanted)
    assert calls == [3]
    assert_close(model.predict([item(forms[0], top_k=1)]), [wanted[0][:1]])
    assert {row["label"] for row in wanted[0]} == {"cat", "dog", "house"}
    for kind in ("JPEG", "GIF", "BMP", "WEBP"):
        assert len(model.predict([picture(40, 30, kind=kind)])[0]) == 3


def test_images_of_one_size_share_a_batch_where_sizes_matter(
    served: Callable[..., PipelineModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = served("detector")
    items = [item(picture(*size), threshold=0.1) for size in ((40, 40), (40, 64), (40, 40))]
    wanted = [model.predict([each])[0] for each in items]
    assert any(wanted)
    calls = count_calls(monkeypatch, model.model.model, "forward")
    assert_close(model.predict(items), wanted)
    assert calls == [2, 1]


def test_image_features(served: Callable[..., PipelineModel]) -> None:
    model = served("pictures", "image-feature-extraction")
    [[rows]] = model.predict([picture(20, 20)])
    assert (len(rows), len(rows[0])) == (17, 16)


def test_sounds(served: Callable[..., PipelineModel], monkeypatch: pytest.MonkeyPatch) -> None:
    model = served("sounds")
    items = [sound(1600), f"data:audio/wav;base64,{sound(2400)}", sound(1600, channels=2)]
    wanted = [model.predict([each])[0] for each in items]
    calls = count_calls(monkeypatch, model.model.model, "forward")
    assert_close(model.predict(items), wanted)
    assert_close(wanted[2], wanted[0])
    assert calls == [2, 1]


@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_samples_of_every_width(width: int) -> None:
    from service_streamer.pipelines.inputs import read_audio

    samples = read_audio(sound(400, width=width), 16_000)
    wanted = [0.5 * math.sin(at * at / 900) for at in range(400)]
    assert samples.dtype == np.float32
    assert np.allclose(samples, wanted, atol=0.01)


def test_speech(served: Callable[..., PipelineModel]) -> None:
    model = served("speech")
    raw = [0.3 * math.sin(at * at / 900) for at in range(1600)]
    outputs = model.predict(
        [
            sound(1600),
            {"sampling_rate": 16_000, "raw": raw},
            item(sound(2400), return_timestamps="word"),
        ]
    )
    assert [sorted(output) for output in outputs] == [["text"], ["text"], ["chunks", "text"]]
    assert all(output["text"] for output in outputs)
    json.dumps(outputs)


SECRET = "the secret of this server"


@pytest.mark.parametrize("name", ["pictures", "detector", "sounds", "speech"])
@pytest.mark.parametrize(
    "address",
    [
        "http://127.0.0.1:{port}/x.png", "https://127.0.0.1:{port}/x", "HTTP://127.0.0.1:{port}/x",
        " http://127.0.0.1:{port}/", "file://{path}", "ftp://127.0.0.1:{port}/x", "{path}",
        "{path}.", "./x.wav", "data:text/plain,{path}", "data:image/png;base64,{path}",
    ],
)  # fmt: skip
def test_nothing_is_opened_or_fetched(
    served: Callable[..., PipelineModel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    name: str, address: str,
) -> None:  # fmt: skip
    import socket

    model = served(name)
    file = tmp_path / "x.wav"
    good = sound(1600) if name in ("sounds", "speech") else picture(8, 8)
    file.write_bytes(base64.b64decode(good))  # which would be answered, if it were opened
    opened: list[Any] = []
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr("builtins.open", lambda *args, **_: opened.append(args))
        monkeypatch.setattr(subprocess, "Popen", lambda *args, **_: opened.append(args))
        sent = address.format(port=listener.getsockname()[1], path=file)
        for inputs in (sent, {"path": sent, "sampling_rate": 16_000}, [sent]):
            with pytest.raises(InvalidInput, match=r"^inputs: "):
                model.predict([inputs])
        monkeypatch.undo()
        listener.setblocking(False)
        with pytest.raises(BlockingIOError):
            listener.accept()
    assert opened == []


def test_a_chat_may_name_no_files(served: Callable[..., PipelineModel]) -> None:
    image = [{"type": "image", "url": "http://127.0.0.1/x.png"}]
    with pytest.raises(InvalidInput, match=r"^inputs\[0\]\.content: must be a string"):
        served("chat").predict([[{"role": "user", "content": image}]])


@pytest.mark.parametrize(
    "sent",
    [
        "x y",
        base64.b64encode(b"%!PS-Adobe-3.0 EPSF-3.0").decode(),
        b"",
        7,
        None,
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_bad_image(
    served: Callable[..., PipelineModel], sent: Any, wording: Callable[..., None]
) -> None:
    with pytest.raises(InvalidItems) as error:
        served("pictures").predict([sent])
    wording(of_caller(error.value))


def test_a_small_file_of_a_huge_image(served: Callable[..., PipelineModel]) -> None:
    content = base64.b64decode(picture(1, 1))
    for side in (8_100, 20_000):  # beyond ours, and beyond Pillow's own limit
        head = content[12:16] + struct.pack(">II", side, side) + content[24:29]
        huge = content[:12] + head + struct.pack(">I", zlib.crc32(head)) + content[33:]
        with pytest.raises(InvalidInput, match="too large; send one of at most 64,000,000 pixels"):
            served("pictures").predict([huge])


@pytest.mark.parametrize(
    "sent",
    [
        sound(800, rate=8000),
        sound(0),
        sound(4),
        base64.b64encode(b"#EXTM3U\nfile:///etc/passwd").decode(),
        base64.b64encode(base64.b64decode(sound(9))[:30]).decode(),
        {"raw": [0.1], "sampling_rate": 16_000, "path": "x"},
        {"raw": ["x"], "sampling_rate": 16_000},
        {"raw": [math.nan], "sampling_rate": 16_000},
        {"raw": "xx", "sampling_rate": 16_000},
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_bad_sound(
    served: Callable[..., PipelineModel], sent: Any, wording: Callable[..., None]
) -> None:
    with pytest.raises(InvalidItems) as error:
        served("sounds").predict([sent])
    wording(of_caller(error.value))


# Generation


def test_generated_texts_are_as_one_by_one(
    served: Callable[..., PipelineModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = served("gpt2")
    prompts = [SHORT, LONG[:40], "it", "once upon"]
    items = [item(each, "generate", max_new_tokens=12, temperature=0) for each in prompts]
    wanted = [model.predict([each])[0] for each in items]
    calls = count_calls(monkeypatch, model.model.model, "generate")
    assert model.predict(items) == wanted
    assert calls == [4]
    pipeline = model.predict(
        [item(each, max_new_tokens=12, do_sample=False, return_full_text=False) for each in prompts]
    )
    assert [rows[0]["generated_text"] for rows in pipeline] == [rows[0]["text"] for rows in wanted]
    for prompt, [row] in zip(prompts, wanted, strict=True):
        assert row.keys() == {"text", "finish_reason", "prompt_tokens", "completion_tokens"}
        assert row["prompt_tokens"] == len(model.model.tokenizer(prompt)["input_ids"])
        assert (row["completion_tokens"], row["finish_reason"]) == (12, "length")


def test_a_text_ends_with_the_end_token(
    served: Callable[..., PipelineModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = served("gpt2")
    [[row]] = model.predict([item(SHORT, "generate", max_new_tokens=8, temperature=0)])
    tokens = model.model.tokenizer(row["text"])["input_ids"]
    pipe = model.model
    prompt = pipe.tokenizer(SHORT, return_tensors="pt")
    ids = pipe.model.generate(**prompt, max_new_tokens=8, do_sample=False)[0].tolist()
    ids = ids[prompt["input_ids"].shape[1] :]
    assert tokens
    monkeypatch.setattr(pipe.model.generation_config, "eos_token_id", [0, ids[3]])
    outputs = model.predict(
        [item(each, "generate", max_new_tokens=8, temperature=0) for each in (SHORT, LONG[:40])]
    )
    at = ids.index(ids[3])
    assert outputs[0][0]["finish_reason"] == "stop"
    assert outputs[0][0]["completion_tokens"] == at + 1
    assert outputs[0][0]["text"] == pipe.tokenizer.decode(ids[:at])


def test_stop_strings(served: Callable[..., PipelineModel]) -> None:
    model = served("gpt2")
    settings = {"max_new_tokens": 24, "temperature": 0}
    prompts = [SHORT, "it"]
    whole = [model.predict([item(each, "generate", **settings)])[0][0] for each in prompts]
    stop = whole[0]["text"][5:8]
    items = [item(each, "generate", **settings, stop=[stop, "never this"]) for each in prompts]
    for row, all_of_it in zip(model.predict(items), whole, strict=True):
        text, found, _ = all_of_it["text"].partition(stop)
        assert row[0]["text"] == text
        assert row[0]["finish_reason"] == ("stop" if found else "length")
        if found:
            assert row[0]["completion_tokens"] < all_of_it["completion_tokens"]
    in_form = item(SHORT, **settings, stop=stop)
    without_prompt = item(SHORT, **settings, stop=stop, return_full_text=False)
    [[full], [new]] = model.predict([in_form, without_prompt])
    assert new["generated_text"] == whole[0]["text"].partition(stop)[0]
    assert full["generated_text"] == SHORT + new["generated_text"]
    # What the prompt has of it is no stop.
    [[row]] = model.predict([item(SHORT + stop, max_new_tokens=1, temperature=0, stop=stop)])
    assert row["generated_text"].startswith(SHORT + stop)


def test_seeds(served: Callable[..., PipelineModel]) -> None:
    model = served("gpt2")
    seeded = item(SHORT, "generate", max_new_tokens=10, temperature=1.5, seed=7)
    other = item(SHORT, "generate", max_new_tokens=10, temperature=1.5)
    state = torch.get_rng_state()
    [alone] = model.predict([seeded])
    first, _, again, second = model.predict([seeded, other, seeded, {**other}])
    assert alone == first == again
    assert second != first
    different = model.predict([item(SHORT, "generate", max_new_tokens=10, seed=8, temperature=1.5)])
    assert different != [alone]
    assert torch.equal(torch.get_rng_state(), state)  # nobody else's numbers were drawn
    in_form = item(SHORT, max_new_tokens=10, temperature=1.5, seed=7, return_full_text=False)
    [[record]] = model.predict([in_form])
    assert model.predict([other, in_form])[1] == [record]


def test_several_sequences(served: Callable[..., PipelineModel]) -> None:
    model = served("gpt2")
    settings = {
        "max_new_tokens": 6,
        "num_return_sequences": 3,
        "do_sample": True,
        "temperature": 2.0,
    }
    outputs = model.predict([item(each, "generate", **settings) for each in (SHORT, "it")])
    assert [len(rows) for rows in outputs] == [3, 3]
    assert len({row["text"] for row in outputs[0]}) > 1
    assert [len(rows) for rows in model.predict([item(SHORT, **settings), "it"])] == [3, 1]
    for do in ("generate", "predict"):
        with pytest.raises(
            InvalidInput, match=r"^parameters\.num_return_sequences: must be 1 without sampl"
        ):
            model.predict([item(SHORT, do, num_return_sequences=2, temperature=0)])


def test_the_context_is_never_left(served: Callable[..., PipelineModel]) -> None:
    model = served("gpt2")
    ids = model.model.tokenizer(3 * LONG)["input_ids"][:47]
    prompts = [model.model.tokenizer.decode(ids[:length]) for length in (3, 40, 46)]
    lengths = [len(model.model.tokenizer(each)["input_ids"]) for each in prompts]
    for rows, length in zip(
        model.predict([item(each, "generate") for each in prompts]), lengths, strict=True
    ):
        assert rows[0]["completion_tokens"] <= 48 - length
    with pytest.raises(InvalidInput, match=r"^parameters\.max_new_tokens: the text has \d+ tokens"):
        model.predict([item(prompts[1], "generate", max_new_tokens=40)])
    with pytest.raises(InvalidInput, match="the limit is 48 including generated tokens"):
        model.predict([item(3 * LONG)])


def test_chats(served: Callable[..., PipelineModel]) -> None:
    model = served("chat")
    chat = [{"role": "user", "content": "hello"}]
    settings = {"do_sample": False, "max_new_tokens": 5}
    outputs = model.predict([item(chat, **settings), item("hello", **settings)])
    assert outputs[0][0]["generated_text"][-1]["role"] == "assistant"
    assert isinstance(outputs[1][0]["generated_text"], str)
    for bad, message in (
        ([{"role": "king", "content": "x"}], "refuses the chat: there is no role king"),
        ([{"role": "user"}], 'must be {"role": ..., "content": ...}'),
        ([], "a chat must have 1 to 256 messages"),
    ):
        with pytest.raises(InvalidInput, match=re.escape(message)):
            model.predict([item(bad)])
    with pytest.raises(InvalidInput, match="does not support chats; send a string"):
        served("gpt2").predict([item(chat)])
    with pytest.raises(InvalidInput, match="does not support chats; send a string"):
        served("gpt2").predict([item(chat, "generate")])
    generated = model.predict([item(chat, "generate", **settings), item("hello", **settings)])[0]
    assert generated[0]["text"] == outputs[0][0]["generated_text"][-1]["content"]
    assert generated[0]["prompt_tokens"] == len(
        model.model.tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
    )


# Embeddings


def test_embeddings_by_hand(served: Callable[..., PipelineModel]) -> None:
    model = served("features")
    texts = [SHORT, LONG, "it"]
    outputs = model.predict([item(each, "embed") for each in texts])
    for text, output in zip(texts, outputs, strict=True):
        [rows] = model.predict([text])[0]
        mean = np.mean(rows, axis=0)
        assert np.allclose(output["embedding"], mean / np.linalg.norm(mean), atol=1e-5)
        assert output["tokens"] == len(rows)


@pytest.mark.parametrize(
    ("mode", "pick"),
    [("cls_token", lambda rows: rows[0]), ("lasttoken", lambda rows: rows[-1]),
     ("max_tokens", lambda rows: np.max(rows, axis=0))],
)  # fmt: skip
def test_embeddings_are_pooled_as_the_files_say(
    folder: Callable[[str], Path], tmp_path: Path, mode: str, pick: Callable[[Any], Any]
) -> None:
    own = _with_modules(folder("features"), tmp_path, f"pooling_mode_{mode}")
    model = PipelineModel()
    model.init_model(own)
    outputs = model.predict([item(each, "embed") for each in (SHORT, LONG)])
    for text, output in zip((SHORT, LONG), outputs, strict=True):
        wanted = pick(np.array(model.predict([text])[0][0]))
        assert np.allclose(output["embedding"], wanted / np.linalg.norm(wanted), atol=1e-5)


def test_embeddings_that_would_be_others_are_not_offered(
    folder: Callable[[str], Path], tmp_path: Path
) -> None:
    own = _with_modules(folder("features"), tmp_path, "pooling_mode_mean_tokens", "Dense")
    model = PipelineModel()
    model.init_model(own)
    assert "embed" not in model.description["operations"]
    with pytest.raises(InvalidInput, match=r"cannot embed, since it has modules of .* Dense"):
        model.predict([item(SHORT, "embed")])


def _with_modules(source: Path, target: Path, mode: str, *more: str) -> Path:
    """A copy with the files of sentence-transformers."""
    own = target / "sentences"
    shutil.copytree(source, own)
    (own / "1_Pooling").mkdir()
    (own / "1_Pooling" / "config.json").write_text(json.dumps({mode: True, "other": False}))
    modules = [
        {"type": f"sentence_transformers.models.{kind}", "path": f"{at}_{kind}" if at else ""}
        for at, kind in enumerate(["Transformer", "Pooling", *more])
    ]
    (own / "modules.json").write_text(json.dumps(modules))
    (own / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 20}))
    return own


def test_embeddings_of_sentence_transformers() -> None:
    import sentence_transformers

    path = minilm.find()
    model = PipelineModel()
    model.init_model(path)
    assert model.description["task"] == "feature-extraction"
    assert model.description["max_tokens"] == 256
    texts = [SHORT, LONG, "it", 30 * LONG, "Ähnliche Sätze, 相似的句子!"]
    wanted = sentence_transformers.SentenceTransformer(str(path), device="cpu").encode(
        texts, normalize_embeddings=True, show_progress_bar=False
    )
    outputs = model.predict([item(text, "embed", truncation=True) for text in texts])
    assert np.allclose([output["embedding"] for output in outputs], wanted, atol=1e-4)
    assert outputs[3]["tokens"] == 256
    with pytest.raises(
        InvalidInput, match=r"^inputs: the text has \d+ tokens, and the limit is 256"
    ):
        model.predict([item(texts[3], "embed")])


# What it refuses


@pytest.mark.parametrize(
    ("name", "task", "inputs"),
    [
        ("", None, 7),
        ("", None, None),
        ("", None, ["the [MASK]"]),
        ("", None, ""),
        ("", None, " \n"),
        ("", None, "the [MASK] \ud83d"),
        ("", None, "the [mask]"),
        ("", None, "star " * 70 + "[MASK]"),
        ("roberta", None, "the [MASK]"),
        ("roberta", None, "<mask> " + "q " * 40),
        ("classifier", None, {"text": 7}),
        ("classifier", None, {"text": "x", "url": "y"}),
        ("classifier", None, {"text_pair": "x"}),
        ("classifier", None, 4 * LONG),
        ("tagger", None, 4 * LONG),
        ("features", None, 4 * LONG),
        ("entailment", "zero-shot-classification", 2 * LONG),
        ("gpt2", None, ""),
        ("gpt2", None, {"text": "x"}),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_bad_input(
    served: Callable[..., PipelineModel],
    name: str,
    task: str | None,
    inputs: Any,
    wording: Callable[..., None],
) -> None:
    model = served(name, task)
    parameters = {"candidate_labels": ["a"]} if task else {}
    with pytest.raises(InvalidItems) as error:
        model.predict([item(inputs, **parameters)])
    wording(of_caller(error.value))
    assert len(str(error.value)) < 300
    str(error.value).encode()  # the message can be sent


def test_a_bad_item_is_found_before_anything_is_computed(
    served: Callable[..., PipelineModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = served("")
    calls = count_calls(monkeypatch, model.model.model, "forward")
    with pytest.raises(InvalidInput, match=r"no \[MASK\]"):
        model.predict([*MASKED, "no mask", item("x", "describe")])
    assert calls == []


def test_a_mask_that_would_be_cut_off(served: Callable[..., PipelineModel]) -> None:
    with pytest.raises(InvalidInput, match=r"no \[MASK\] before the cut"):
        served("").predict([item("star " * 70 + "[MASK]", truncation=True)])
    [rows] = served("").predict([item("[MASK] " + "star " * 70, truncation=True)])
    assert len(rows) == 5


@pytest.mark.parametrize(
    ('name', 'parameters'),
    [
        ("", {"top_k": "3"}),
        ("", {"top_k": 0}),
        ("", {"top_k": 1001}),
        ("", {"top_k": True}),
        ("", {"top_k": 2.0}),
        ("roberta", {"top_k": 900}),
        ("", {"targets": []}),
        ("", {"targets": ["a", 7]}),
        ("", {"targets": ["\ud83d"]}),
        ("", {"model": "x"}),
        ("", {"tokenizer": "x"}),
        ("", {"device": 1}),
        ("", {"batch_size": 1}),
        ("", {"tokenizer_kwargs": {}}),
        ("gpt2", {"prefix": "x"}),
        ("gpt2", {"assistant_model": "x/y"}),
        ("gpt2", {"max_new_tokens": 5000}),
        ("gpt2", {"temperature": -1}),
        ("gpt2", {"temperature": math.nan}),
        ("gpt2", {"temperature": 10**400}),
        ("gpt2", {"top_p": 0}),
        ("gpt2", {"num_return_sequences": 17}),
        ("gpt2", {"seed": -1}),
        ("gpt2", {"stop": [""]}),
        ("gpt2", {"do_sample": "yes"}),
        ("tagger", {"aggregation_strategy": "all"}),
        ("classifier", {"function_to_apply": 7}),
        ("entailment", {}),
        ("entailment", {"candidate_labels": " , "}),
        ("entailment", {"candidate_labels": [LONG * 9]}),
    ], ids=lambda value: str(value)[:40],
)  # fmt: skip
def test_a_bad_parameter(
    served: Callable[..., PipelineModel],
    name: str,
    parameters: dict[str, Any],
    wording: Callable[..., None],
) -> None:
    model = served(name, "zero-shot-classification" if name == "entailment" else None)
    inputs = {"": "the [MASK]", "roberta": "the <mask>"}.get(name, SHORT)
    parameters = {"truncation": True, **parameters} if name == "entailment" else parameters
    with pytest.raises(InvalidItems) as error:
        model.predict([item(inputs, **parameters)])
    wording(of_caller(error.value))


def test_all_invalid_items_of_a_batch_are_named(served: Callable[..., PipelineModel]) -> None:
    batch = [item("a [MASK]"), item("none"), item(7), item("b [MASK]"), item("c [MASK]", top_k=-1)]
    with pytest.raises(InvalidItems) as error:
        served("").predict(batch)
    assert {position: str(each)[:20] for position, each in error.value.errors.items()} == {
        1: "inputs: the text has",
        2: "inputs: must be a st",
        4: "parameters.top_k: mu",
    }


@pytest.mark.parametrize(
    "template",
    ["no place", "{} and {}", "{0}", "{:>9999999999}", "{.__class__} {}", "{{}} {}", "{"],
)
def test_a_template_is_no_program(served: Callable[..., PipelineModel], template: str) -> None:
    model = served("entailment", "zero-shot-classification")
    with pytest.raises(
        InvalidInput, match=r"^parameters\.hypothesis_template: must have \{\} once"
    ):
        model.predict([item(SHORT, candidate_labels="a,b", hypothesis_template=template)])


def test_null_is_a_parameter_left_out(served: Callable[..., PipelineModel]) -> None:
    model = served("")
    with_null = item(MASKED[0], top_k=None, targets=None, truncation=None)
    assert model.predict([with_null]) == model.predict([item(MASKED[0])])
    assert model.predict([{**with_null, "parameters": None}]) == model.predict([MASKED[0]])
    with pytest.raises(InvalidInput, match="parameters: must be an object; not 7"):
        model.predict([{**with_null, "parameters": 7}])


def test_an_operation_that_it_cannot_do(served: Callable[..., PipelineModel]) -> None:
    with pytest.raises(InvalidInput, match="of the task fill-mask, cannot 'embed'; it can predict"):
        served("").predict([item(SHORT, "embed")])


def test_the_tables_are_schemas() -> None:
    for task, known in TASKS.items():
        for do in ("predict", *known.operations):
            for name, schema in parameter_schemas(task, do).items():
                assert schema["description"].endswith("."), name
                assert "type" in schema or "anyOf" in schema
    assert parameter_schemas("ner") == parameter_schemas("token-classification")
    assert parameter_schemas("fill-mask", "embed") == parameter_schemas("custom") == {}
    assert parameter_schemas("text-generation")["top_p"] == {
        "type": ["number", "null"], "maximum": 1, "exclusiveMinimum": 0,
        "description": "Sample from the most likely tokens whose probabilities add up to this.",
    }  # fmt: skip


def test_a_transformers_error_does_not_cross(
    served: Callable[..., PipelineModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.pipelines.base import PipelineException

    class StrangeError(Exception):
        pass

    model = served("")
    for raised, wanted, text in (
        (PipelineException("fill-mask", "bert", "odd"), InvalidInput, "inputs: odd"),
        (StrangeError("odd"), RuntimeError, "StrangeError: odd"),
        (KeyError("odd"), KeyError, "odd"),
        (torch.OutOfMemoryError("full"), torch.OutOfMemoryError, "full"),
    ):

        def fail(*args: Any, _error: Exception = raised, **kwargs: Any) -> Any:
            raise _error

        monkeypatch.setattr(model.model.model, "forward", fail)
        with pytest.raises(wanted, match=text) as error:
            model.predict([MASKED[0]])
        assert type(error.value) is wanted


# What it says of itself


def test_it_describes_itself(served: Callable[..., PipelineModel]) -> None:
    [said] = served("").predict([item(None, "describe")])
    assert said == {
        "task": "fill-mask", "model": "text_infilling", "mask_token": "[MASK]",
        "operations": ["predict", "tokenize", "decode"], "takes_parameters": True, "labels": None,
        "candidate_labels_required": False, "max_tokens": 64, "device": "cpu", "dtype": "float32",
        "dtype_reason": "as saved", "attention": "sdpa", "quantization": None, "compiled": False,
        "batch_sizes": None, "chats": False,
        "example": "Happy birthday to [MASK].", "revision": None,
    }  # fmt: skip
    [said] = served("gpt2").predict([item(None, "describe")])
    operations = ["predict", "generate", "score", "tokenize", "decode"]
    assert (said["operations"], said["max_tokens"]) == (operations, 48)
    [said] = served("tagger").predict([item(None, "describe")])
    assert said["labels"] == ["O", "B-PER", "I-PER", "B-LOC", "I-LOC"]
    [said] = served("entailment", "zero-shot-classification").predict([item(None, "describe")])
    assert said["candidate_labels_required"] is True


@pytest.mark.parametrize("name", ["", *tiny_models.MODELS])
def test_the_example_can_be_tried(served: Callable[..., PipelineModel], name: str) -> None:
    model = served(name)
    assert json.loads(json.dumps(model.description)) == model.description
    assert model.predict([model.description["example"]])[0] is not None


# Loading


@pytest.mark.parametrize(
    ("name", "task"),
    [
        ("roberta", "fill-mask"), ("classifier", "text-classification"),
        ("tagger", "token-classification"), ("features", "feature-extraction"),
        ("gpt2", "text-generation"), ("chat", "text-generation"),
        ("pictures", "image-classification"), ("detector", "object-detection"),
        ("sounds", "audio-classification"), ("speech", "automatic-speech-recognition"),
    ],
)  # fmt: skip
def test_the_task_is_inferred(served: Callable[..., PipelineModel], name: str, task: str) -> None:
    assert served(name).task == task


@pytest.mark.parametrize(
    "path",
    ["./no/such", "no/such/folder", "/no/such", "../x", "~/nope", "", Path("nope"), __file__],
)
def test_a_wrong_path(path: str | Path) -> None:
    with pytest.raises(FileNotFoundError, match="there is no model folder") as error:
        PipelineModel().init_model(path)
    assert str(path) in str(error.value)


def test_names_of_models() -> None:
    assert locate_model(None) == str(DEFAULT_MODEL)
    assert locate_model("bert-base-uncased") == "bert-base-uncased"
    assert locate_model("someone/bert.v2") == "someone/bert.v2"


def test_a_wrong_task(folder: Callable[[str], Path]) -> None:
    for task in ("no-such-task", "depth-estimation", "question-answering", ""):
        with pytest.raises(ValueError, match=f"unknown task '{task}'; must be one of audio"):
            PipelineModel().init_model(folder(""), task)
    with pytest.raises(
        ValueError, match="dtype must be one of auto, float32, float16, bfloat16; n"
    ):
        PipelineModel().init_model(folder(""), dtype="int8")


@pytest.mark.parametrize(
    ("name", "task"),
    [
        ("", "text-classification"),
        ("features", "fill-mask"),
        ("classifier", "zero-shot-classification"),
        ("classifier", "token-classification"),
        ("gpt2", "fill-mask"),
        ("gpt2", "automatic-speech-recognition"),
    ],
)
def test_a_task_that_the_model_cannot_do(
    folder: Callable[[str], Path], name: str, task: str, wording: Callable[..., None]
) -> None:
    with pytest.raises(ValueError, match=r"cannot do|no label") as error:
        PipelineModel().init_model(folder(name), task)
    assert "\n" not in str(error.value)
    wording(error.value, hide={r"[^ ']*/models\d*/": "MODELS/"})


def test_a_folder_without_its_files(folder: Callable[[str], Path], tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"has no config\.json; give a folder that save"):
        PipelineModel().init_model(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(FileNotFoundError, match=r"has no config\.json; it holds an adapter"):
        PipelineModel().init_model(tmp_path)
    own = tmp_path / "own"
    shutil.copytree(folder("classifier"), own)
    for file in own.glob("tokenizer*"):
        file.unlink()
    (own / "vocab.txt").unlink(missing_ok=True)
    with pytest.raises(FileNotFoundError, match="has no tokenizer that transformers can load; sa"):
        PipelineModel().init_model(own)
    (own / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"weights of the model .* cannot be loaded: "):
        PipelineModel().init_model(own)
    (own / "config.json").write_text('{"model_type": "no-such-type"}')
    with pytest.raises(FileNotFoundError, match="has no config that transformers can load"):
        PipelineModel().init_model(own)


def test_weights_that_are_missing(folder: Callable[[str], Path], tmp_path: Path) -> None:
    own = tmp_path / "own"
    shutil.copytree(folder("features"), own)
    config = json.loads((own / "config.json").read_text())
    (own / "config.json").write_text(json.dumps({**config, "architectures": None}))
    with pytest.raises(
        ValueError, match=r"its weights lack 'classifier.bias' and 1 more\); name a"
    ):
        PipelineModel().init_model(own, "text-classification")
    with pytest.raises(ValueError, match="which is BertConfig, is unknown; set task"):
        PipelineModel().init_model(own)


def test_an_unreachable_hub_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    for task in (None, "fill-mask"):
        with pytest.raises(FileNotFoundError) as error:
            PipelineModel().init_model("nobody/nothing", task)
        text = str(error.value)
        assert text.startswith("the model 'nobody/nothing' cannot be loaded: the hub https://")
        assert "cannot be reached (HF_HUB_OFFLINE is set)" in text
        assert "\n" not in text


def test_code_of_a_model_is_not_run(folder: Callable[[str], Path], tmp_path: Path) -> None:
    own = tmp_path / "own"
    shutil.copytree(folder("features"), own)
    (own / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    code = {"AutoConfig": "evil.Config", "AutoModel": "evil.Model"}
    (own / "config.json").write_text(json.dumps({"model_type": "evil", "auto_map": code}))
    with pytest.raises(FileNotFoundError, match="has no config that transformers can load"):
        PipelineModel().init_model(own)
    assert not (tmp_path / "ran").exists()


def test_a_model_that_cannot_be_run(
    folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import BertForMaskedLM

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise ZeroDivisionError("odd weights")

    monkeypatch.setattr(BertForMaskedLM, "forward", fail)
    with pytest.raises(
        RuntimeError, match="loaded, but its first 'predict' of 1 failed: ZeroDivis"
    ):
        PipelineModel().init_model()


@pytest.mark.parametrize(("dtype", "wanted"), [("bfloat16", "bfloat16"), ("auto", "float32")])
def test_dtypes(folder: Callable[[str], Path], dtype: str, wanted: str) -> None:
    for name in ("", "classifier", "gpt2", "features"):
        model = PipelineModel()
        model.init_model(folder(name), dtype=dtype)
        assert model.description["dtype"] == wanted
        json.dumps(model.predict([model.description["example"]] * 2))


def test_every_operation_is_warmed_up(
    folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import BertModel

    calls = count_calls(monkeypatch, BertModel, "forward")
    PipelineModel().init_model(folder("features"))
    assert calls == [1, 1]


# In a worker


def run_python(code: str, **environment: str) -> str:
    import os

    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=280, check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **environment},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


def test_importing_loads_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, service_streamer.pipelines as pipelines\n"
        "pipelines.parameter_schemas('fill-mask')\n"
        "print(sorted({'torch', 'transformers', 'numpy', 'PIL'} & set(sys.modules)))\n"
    )
    assert run_python(code).strip() == "[]"


def test_through_a_streamer(capfd: pytest.CaptureFixture[str]) -> None:
    with Streamer(PipelineModel, batch_size=8, max_latency=0.01, cuda_devices=("cpu",)) as streamer:
        streamer.wait_ready(100)
        good = streamer.predict([item(MASKED[0], top_k=1), item(None, "describe"), "the [MASK]"])
        assert good[0][0]["token_str"] == "you"
        assert good[1]["task"] == "fill-mask"
        calls = [
            streamer.submit([each]) for each in ("no mask", MASKED[0], item("x", top_k=7, z=1))
        ]
        with pytest.raises(InvalidInput, match=r"^inputs: the text has no \[MASK\]"):
            calls[0].result()
        assert calls[1].result()[0][0]["token_str"] == "you"
        with pytest.raises(InvalidInput, match=r"^parameters\.z: unknown parameter"):
            calls[2].result()
    said = capfd.readouterr()
    assert (said.out, said.err) == ("", "")  # no bars, no advice


def test_a_load_error_through_a_streamer() -> None:
    options: dict[str, Any] = {"model_init_kwargs": {"model": "no/such/folder"}}
    with (
        Streamer(PipelineModel, cuda_devices=("cpu",), **options) as streamer,
        pytest.raises(WorkerStartError, match="there is no model folder"),
    ):
        streamer.wait_ready(100)


# What items cost


TEXT = "x" * 100


@pytest.mark.parametrize(
    ("value", "length"),
    [
        (TEXT, 100),
        ("", 1),
        ("天气很好", 12),
        ("\ud83d", 3),
        ({"text": "abc", "text_pair": "de"}, 5),
        ([{"role": "user", "content": TEXT}, {"role": "user", "content": "abc"}], 103),
        (item(TEXT), 100),
        (item(TEXT, "embed"), 100),
        (item(50 * TEXT, truncation=True), 2048),
        (item(TEXT, candidate_labels=["a", "b", "c"]), 300),
        (item(TEXT, candidate_labels="a,b"), 200),
        (item(TEXT, "generate"), 100 + 40 * 256),
        (item(TEXT, "generate", max_new_tokens=2), 100 + 40 * 2),
        (item(TEXT, max_new_tokens=1, num_return_sequences=3), 3 * 140),
        (item(None, "describe"), 1),
        (picture(64, 48), 1),
        (picture(64, 48, kind="JPEG"), 1),
        (picture(64, 48, kind="BMP"), 1),
        (picture(64, 48, kind="GIF"), 1),
        (picture(64, 48, kind="WEBP"), 1),
        ("data:image/png;base64," + picture(64, 48), 1),
        (item(picture(64, 48)), 1),
        (base64.b64decode(picture(64, 48)), 1),
        ({"sampling_rate": 16_000, "raw": [0.0] * 500}, 500),
        ([5, 6, 7], 12),
        (item([5, 6, 7], "generate", max_new_tokens=1), 12 + 40),
        (item(TEXT, "score"), 100),
        (item({"text": TEXT, "text_pair": TEXT}, "rerank"), 200),
        (item(TEXT, "tokenize"), 1),
        (item([5, 6, 7], "decode"), 1),
    ],
)
def test_what_an_item_costs(value: Any, length: float) -> None:
    assert item_length(value) == length
    assert PipelineModel.length(value) == length


@pytest.mark.parametrize("wrap", [str, "data:audio/wav;base64,{}".format, base64.b64decode, item])
def test_a_sound_costs_what_it_has_samples(wrap: Callable[[str], Any]) -> None:
    assert item_length(wrap(sound(4000))) == pytest.approx(4000, rel=0.01)


@pytest.mark.parametrize(
    "value",
    [
        None, 3, 2.5, [], [None], ["a"], {}, {"raw": 3}, {"text": None}, b"", [[]],
        {"do": None, "inputs": None, "parameters": None},
        {"do": "generate", "inputs": {}, "parameters": 3},
        {"do": 10**5000, "inputs": "a", "parameters": {}},
        item("a", max_new_tokens="many", num_return_sequences=-3, candidate_labels=[]),
        item("a", num_return_sequences=True),
    ],
)  # fmt: skip
def test_what_is_odd_costs_little_and_is_refused_later(value: Any) -> None:
    assert item_length(value) == 1


def test_no_item_costs_more_than_is_allowed() -> None:
    value = item(TEXT, max_new_tokens=10**30, num_return_sequences=10**30)
    lengths = make_lengths(item_length, PipelineModel)
    assert lengths is not None
    assert lengths([value]) == [256 * (100 + 40 * 4096)]


def test_costs_are_known_without_torch() -> None:
    program = (
        "import sys; from service_streamer.engine.build import make_lengths; "
        "lengths = make_lengths('service_streamer.pipelines.sizes:item_length', 'some:Model'); "
        "print(lengths(['abc']), {'torch', 'transformers', 'numpy', 'PIL'} & sys.modules.keys())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "[3] set()\n", done.stderr


def test_costs_of_ones_own_are_those_of_the_inputs() -> None:
    length = length_of_inputs(len)
    assert [length("ab"), length(item([1, 2, 3])), length(item(None, "describe"))] == [2, 3, 1]


# One's own model


def test_a_function_of_ones_own() -> None:
    model = CustomModel()
    model.init_model("models:double")
    items = [item([1]), "x", item(None, "describe"), item(2)]
    outputs = model.predict(items)
    assert [outputs[0], outputs[1], outputs[3]] == [[1, 1], "xx", 4]
    assert outputs[2]["task"] == "custom"
    assert outputs[2]["model"] == "models:double"
    assert outputs[2]["takes_parameters"] is False
    assert model.predict([item(None, "describe")]) == [outputs[2]]
    with pytest.raises(InvalidInput, match=r"^parameters: this model takes none"):
        model.predict([item(1, top_k=3)])
    with pytest.raises(InvalidInput, match="cannot 'generate'; it can predict"):
        model.predict([item(1, "generate")])


def test_a_class_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # which models for "cpu" set, in this process
    model = CustomModel("cpu")
    model.init_model("models:Multiplier", (3,))
    assert model.predict([item(2), 5]) == [6, 15]
    full = CustomModel("cpu")
    full.init_model("models:Fitting")
    assert full.out_of_memory_errors == full.model.out_of_memory_errors != ()


class Staged(ManagedModel):
    """Each stage says which thread it was called in."""

    def init_model(self) -> None:
        self.threads: list[int] = []

    def preprocess(self, items: list[int]) -> list[int]:
        self.threads.append(threading.get_ident())
        return [item + 1 for item in items]

    def forward(self, batch: list[int]) -> list[int]:
        self.threads.append(threading.get_ident())
        return [item * 10 for item in batch]

    def postprocess(self, outputs: list[int]) -> np.ndarray[Any, Any]:
        self.threads.append(threading.get_ident())
        return np.array(outputs)


def in_threads(model: ManagedModel, items: list[Any]) -> list[Any]:
    """The results of a model with each stage in a thread of its own, as a worker has them."""
    with contextlib.ExitStack() as stack:
        ahead, behind = (stack.enter_context(ThreadPoolExecutor(1)) for _ in range(2))
        outputs = model.forward(ahead.submit(model.preprocess, items).result())
        results: list[Any] = behind.submit(model.postprocess, outputs).result()
        return results


def test_stages_of_ones_own() -> None:
    model = CustomModel()
    model.init_model("test_pipelines:Staged")
    items = [item(None, "describe"), item(1), 2]
    assert in_threads(model, items) == [model.description, 20, 30] == model.predict(items)
    assert len(set(model.model.threads[:3])) == 3
    assert model.predict([item(None, "describe")]) == [model.description]
    with pytest.raises(InvalidInput, match=r"^parameters: this model takes none"):
        model.preprocess([item(1, top_k=3)])


def test_steps_of_ones_own() -> None:
    """The worker steps with the model itself, and the service shows it as any other."""
    loaded = ModelSpec(CustomModel, ("stream_models:Countdown",), batch_size=4).load(None)
    assert type(loaded.managed).__name__ == "Countdown"
    assert loaded.places == 4
    assert loaded.description is not None
    assert (loaded.description["task"], loaded.description["bare_items"]) == ("custom", True)
    other = ModelSpec(CustomModel, ("models:double",), batch_size=4).load(None)
    assert isinstance(other.managed, CustomModel)
    assert other.places == 0


def test_errors_of_ones_own() -> None:
    model = CustomModel()
    with pytest.raises(ValueError, match=r"must be .package\.module:Name.; not 'models'"):
        model.init_model("models")
    with pytest.raises(ModuleNotFoundError):
        model.init_model("no_such_module:x")
    with pytest.raises(TypeError, match="is a function: init arguments are for a ManagedModel"):
        model.init_model("models:double", kwargs={"x": 1})
    model.init_model("test_pipelines:fails")
    with pytest.raises(ZeroDivisionError):
        model.predict([item(1)])
    model.init_model("test_pipelines:forgets")
    with pytest.raises(BadModelOutput, match=r"must return a sequence of 2 results, .* list of 1"):
        model.predict([item(1), item(2)])


def fails(batch: list[Any]) -> list[Any]:
    return [1 / 0 for _ in batch]


def forgets(batch: list[Any]) -> list[Any]:
    return batch[1:]


def test_results_are_plain() -> None:
    results = [
        np.float32(0.5),
        np.float64(1.5),
        torch.tensor([1, 2]),
        np.int64(3),
        (1, np.bool_(True)),
    ]
    got = plain({"a": results, "b": None, 3: "x"})
    assert got == {"a": [0.5, 1.5, [1, 2], 3, [1, True]], "b": None, 3: "x"}
    assert json.loads(json.dumps(got))["a"] == got["a"]


def test_padding_is_told(tmp_path: Path) -> None:
    """To the longest text of those that are computed together."""
    model = PipelineModel()
    model.init_model()
    model.predict(["a [MASK]", "a [MASK]"])
    assert model.padding == 0
    model.predict(["[MASK] a a a a a", "[MASK]"])  # 8 tokens, and 3, with [CLS] and [SEP]
    assert model.padding == pytest.approx(5 / 16)
