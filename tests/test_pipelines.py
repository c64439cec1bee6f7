"""Pipelines of transformers as served models: as one by one, checked, and closed to strangers."""

from __future__ import annotations

import base64
import json
import math
import os
import re
import shutil
import struct
import subprocess
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import minilm
from pipeline_cases import (
    assert_close,
    compiles_to_itself,
    count_calls,
    extensible,
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
from serve_process import python
from service_streamer import BadModelOutput, InvalidInput, InvalidItems, Streamer
from service_streamer.pipelines import TASKS, CustomModel, PipelineModel, parameter_schemas

pytestmark = pytest.mark.xdist_group("transformers")


# What it answers: as the pipeline does to one input, whatever else is in the batch

SHORT, LONG = "the fox", "once upon a time there was a king who had three daughters, and a garden."
MASKED = ["Happy birthday to [MASK].", "[MASK] [MASK] little star, how I [MASK] what you are"]

THREE = [SHORT, LONG, "it"]
LABELS = {"candidate_labels": "king, fox"}
GREEDY = {"do_sample": False, "max_new_tokens": 9}
CHATS = [
    [{"role": "user", "content": "hello"}],
    [{"role": "user", "content": "who is it?"}, {"role": "assistant", "content": "the k"}],
]

#: Beside those of test_text_pipelines.py: other models, long labels, and generated texts.
SAME: list[tuple[str, str, list[Any], dict[str, Any]]] = [
    ("", "fill-mask", ["[MASK] " + "star " * 70, "the [MASK]"], {"truncation": True}),
    ("last_token", "text-classification", [SHORT, LONG[:40], "it"], {"top_k": None}),
    ("xlnet", "text-classification", THREE, {"top_k": None}),
    ("xlnet", "feature-extraction", THREE, {}),
    ("tagger", "token-classification", [3 * LONG, SHORT], {"truncation": True}),
    ("gpt2", "feature-extraction", [SHORT, LONG[:40], "it"], {}),
    (
        "entailment", "zero-shot-classification", THREE,
        {"candidate_labels": ["a king", "foxes", "gardens with apples", "foxes"]},
    ),
    (
        "entailment", "zero-shot-classification", [SHORT, LONG],
        {**LABELS, "multi_label": True, "hypothesis_template": "It is {}!"},
    ),
    (
        "entailment", "zero-shot-classification", [3 * LONG, SHORT],
        {**LABELS, "truncation": True},
    ),
    ("chat", "text-generation", THREE, GREEDY),
    ("chat", "text-generation", CHATS, GREEDY),
    ("bare", "text-generation", [SHORT, "it"], GREEDY),
    ("gpt2", "text-generation", [SHORT, LONG[:40]], {**GREEDY, "return_full_text": False}),
    ("gpt2", "text-generation", [SHORT, LONG[:40], "it"], {**GREEDY, "repetition_penalty": 1.8}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "task", "inputs", "parameters"), SAME)
def test_a_batch_is_answered_as_one_by_one(
    name: str, task: str, inputs: list[Any], parameters: dict[str, Any]
) -> None:
    model, alone = served(name, task), reference(folder(name), task)
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


def test_an_operation_is_one_forward_pass_whatever_its_parameters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("", "classifier", "tagger"):
        calls = count_calls(monkeypatch, served(name).model.model, "forward")
        served(name).predict([f"{text} [MASK]" for text in (SHORT, LONG, "it")])
        assert calls == [3]
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
    for size, expected in ((64, [9]), (4, [4, 4, 1])):  # many labels: together, and in parts
        model = loaded(folder("entailment"), "zero-shot-classification", batch_size=size)
        calls = count_calls(monkeypatch, model.model.model, "forward")
        model.predict([item(SHORT, candidate_labels=["a", "b", "c"]) for _ in range(3)])
        assert calls == expected


# Images and sounds

KINDS = ("PNG", "JPEG", "GIF", "BMP", "WEBP")


@pytest.mark.parametrize(
    ("name", "sent"),
    [
        ("pictures", [saved(image(40, 30), kind) for kind in KINDS]),
        ("sounds", [sound(1600)]),
    ],
)
def test_a_file_is_taken_in_every_form(name: str, sent: list[str]) -> None:
    for text in sent:
        content = base64.b64decode(text)
        lines = base64.encodebytes(content).decode()
        forms = [text, f"data:image/png;base64,{text}", content, lines, item(text)]
        [first, *others] = served(name).predict(forms)
        assert first
        assert others == [first] * 4


def test_a_sound_with_an_extensible_header_or_of_floats_is_the_same() -> None:
    def floats(kind: str, *values: float) -> bytes:
        frames = struct.pack(f"<{len(values)}{kind}", *values)
        size, header = struct.calcsize(kind), files[0][:40]
        return header[:32] + struct.pack("<HH4sI", size, 8 * size, b"data", len(frames)) + frames

    files = [base64.b64decode(sound(1600, width=width)) for width in (2, 3)]
    both = [floats(kind, *samples(1600)) for kind in "fd"]
    short = [each[:20] + b"\3" + each[21:] for each in both]  # the header of older programs
    first, *others = served("sounds").predict(
        [*files, *map(extensible, files), *(extensible(each, 3) for each in both), *short]
    )
    assert_close(others, [first] * 7, 1e-3)
    for wrong, says in (
        (extensible(files[0], 6), "WAV"), (extensible(floats("e", 0.5), 3), "2 bytes"),
        (extensible(floats("f", math.nan), 3), "range"), (files[0][:12] + b"fmt ", "WAV"),
    ):  # fmt: skip
        assert says in refusal(served("sounds"), wrong)


def test_speech_becomes_text_and_words_with_times() -> None:
    model = served("speech")
    raw = {"sampling_rate": 16_000, "raw": samples(1600)}
    outputs = model.predict([sound(1600), raw, item(sound(2400), return_timestamps="word")])
    assert [sorted(output) for output in outputs] == [["text"], ["text"], ["chunks", "text"]]
    assert all(output["text"] for output in outputs)
    json.dumps(outputs)


ADDRESSES = [
    "http://127.0.0.1:{port}/x.png", "https://127.0.0.1:{port}/x", "HTTP://127.0.0.1:{port}/x",
    " http://127.0.0.1:{port}/", "file://{path}", "ftp://127.0.0.1:{port}/x", "{path}",
    "{path}.", "./x.wav", "data:text/plain,{path}", "data:image/png;base64,{path}",
]  # fmt: skip


@pytest.mark.parametrize("name", ["pictures", "detector", "sounds", "speech"])
def test_nothing_is_opened_or_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    import socket

    model = served(name)
    file = tmp_path / "x.wav"
    good = sound(1600) if name in ("sounds", "speech") else saved(image(8, 8))
    file.write_bytes(base64.b64decode(good))  # which would be answered, if it were opened
    opened: list[Any] = []
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr("builtins.open", lambda *args, **_: opened.append(args))
        monkeypatch.setattr(subprocess, "Popen", lambda *args, **_: opened.append(args))
        for address in ADDRESSES:
            sent = address.format(port=listener.getsockname()[1], path=file)
            for inputs in (sent, {"path": sent, "sampling_rate": 16_000}, [sent]):
                with pytest.raises(InvalidInput, match=r"^inputs: "):
                    model.predict([inputs])
        monkeypatch.undo()
        listener.setblocking(False)
        with pytest.raises(BlockingIOError):
            listener.accept()
    assert opened == []


def test_huge_image_is_refused_when_its_file_is_small() -> None:
    content = base64.b64decode(saved(image(1, 1)))
    for side in (8_100, 20_000):  # beyond ours, and beyond Pillow's own limit
        head = content[12:16] + struct.pack(">II", side, side) + content[24:29]
        huge = content[:12] + head + struct.pack(">I", zlib.crc32(head)) + content[33:]
        with pytest.raises(InvalidInput, match="64,000,000"):
            served("pictures").predict([huge])


# Generation


def test_generation_never_leaves_the_context() -> None:
    model = served("gpt2")
    ids = model.model.tokenizer(3 * LONG)["input_ids"][:47]
    prompts = [model.model.tokenizer.decode(ids[:length]) for length in (3, 40, 46)]
    lengths = [len(model.model.tokenizer(each)["input_ids"]) for each in prompts]
    for rows, length in zip(
        model.predict([item(each, "generate") for each in prompts]), lengths, strict=True
    ):
        assert rows[0]["completion_tokens"] <= 48 - length


def test_a_chat_that_a_model_cannot_answer_is_refused() -> None:
    model = served("chat")
    image = [{"type": "image", "url": "http://127.0.0.1/x.png"}]  # which is never fetched
    for bad, word in (
        ([{"role": "king", "content": "x"}], "king"),
        ([{"role": "user"}], "content"),
        ([{"role": "user", "content": image}], "inputs[0].content: "),
        ([], "256"),
    ):
        assert word in refusal(model, bad)
    for do in ("predict", "generate"):
        assert "chats" in refusal(served("gpt2"), item(CHATS[0], do))


# Embeddings


@pytest.mark.parametrize(
    ("mode", "pick"),
    [("mean_tokens", lambda rows: np.mean(rows, axis=0)), ("cls_token", lambda rows: rows[0]),
     ("lasttoken", lambda rows: rows[-1]), ("max_tokens", lambda rows: np.max(rows, axis=0))],
)  # fmt: skip
def test_embeddings_are_pooled_as_the_files_say(
    tmp_path: Path, mode: str, pick: Callable[[Any], Any]
) -> None:
    model = loaded(_with_modules(tmp_path, f"pooling_mode_{mode}"))
    outputs = model.predict([item(each, "embed") for each in (SHORT, LONG)])
    for text, output in zip((SHORT, LONG), outputs, strict=True):
        rows = np.array(model.predict([text])[0][0])
        assert np.allclose(output["embedding"], pick(rows) / np.linalg.norm(pick(rows)), atol=1e-5)
        assert output["tokens"] == len(rows)


def _with_modules(target: Path, mode: str, *more: str) -> Path:
    """A copy with the files of sentence-transformers."""
    own = variant("features", target)
    (own / "1_Pooling").mkdir()
    (own / "1_Pooling" / "config.json").write_text(json.dumps({mode: True, "other": False}))
    modules = [
        {"type": f"sentence_transformers.models.{kind}", "path": f"{at}_{kind}" if at else ""}
        for at, kind in enumerate(["Transformer", "Pooling", *more])
    ]
    (own / "modules.json").write_text(json.dumps(modules))
    (own / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 20}))
    return own


@pytest.mark.parametrize(
    ("name", "task", "limit"),
    [("features", None, 8), ("entailment", "zero-shot-classification", 8), ("", None, 5),
     ("gpt2", None, 8)],
)  # fmt: skip
def test_a_model_with_a_small_limit_starts_and_its_example_fits(
    tmp_path: Path, name: str, task: str | None, limit: int
) -> None:
    own = variant(name, tmp_path)
    if name == "features":
        (own / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": limit}))
    else:
        file = own / "tokenizer_config.json"
        settings = {**json.loads(file.read_text()), "model_max_length": limit}
        file.write_text(json.dumps(settings))
    model = loaded(own, task)
    about = model.describe()
    assert about["max_tokens"] == limit
    more = {"candidate_labels": ["a"], "hypothesis_template": "{}"} if task else {}
    do = "embed" if name == "features" else "predict"
    assert model.predict([item(about["example"], do, **more)])


@pytest.mark.parametrize(
    ("file", "content", "word"),
    [
        ("modules.json", [{"type": "sentence_transformers.models.Dense"}], "Dense"),
        ("modules.json", [{"type": "own.Transformer", "path": ""}], "own.Transformer"),
        ("modules.json", [{"type": "sentence_transformers.Transformer", "path": "0_A"}], "0_A"),
        ("1_Pooling/config.json", {"pooling_mode": ["mean", "cls"]}, "mean and cls"),
        ("1_Pooling/config.json", {"pooling_mode_weightedmean_tokens": True}, "weightedmean"),
        ("config_sentence_transformers.json", {"model_type": "SparseEncoder"}, "SparseEncoder"),
        ("config_sentence_transformers.json", {"default_prompt_name": "a"}, "default_prompt_name"),
        ("config_sentence_transformers.json", {"truncate_dim": 64}, "64 numbers"),
        ("sentence_roberta_config.json", {"tokenizer_args": {"a": 1}}, "tokenizer_args"),
        ("sentence_bert_config.json", {"modality_config": {"message": {}}}, "chats"),
        ("sentence_bert_config.json",
         {"modality_config": {"text": {"method_output_name": "logits"}}}, "logits"),
    ],
)  # fmt: skip
def test_embeddings_are_not_offered_where_they_would_differ(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, file: str, content: Any, word: str
) -> None:
    own = _with_modules(tmp_path, "pooling_mode_mean_tokens")
    (own / "sentence_bert_config.json").unlink()
    (own / file).write_text(json.dumps(content))
    model = loaded(own)
    assert "embed" not in model.description["operations"]
    assert word in model.description["no_embeddings"]
    assert word in caplog.text
    with pytest.raises(InvalidInput, match=word):
        model.predict([item(SHORT, "embed")])


PROMPTS = {
    "query": "Find what says: ",
    "none": "",
    "document": "",
    "long": "Of all the texts that there are, ",
}


@pytest.mark.parametrize(
    ("mode", "includes"),
    [
        ("mean", True),
        *(pytest.param(mode, False, marks=pytest.mark.long) for mode in ("mean", "cls", "max")),
    ],
)
def test_embeddings_have_the_prompts_of_sentence_transformers(
    tmp_path: Path, mode: str, includes: bool
) -> None:
    import sentence_transformers

    own = tmp_path / "model"
    shutil.copytree(minilm.find(), own)
    pooling = {"embedding_dimension": 384, "pooling_mode": mode, "include_prompt": includes}
    (own / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    prompts = {"prompts": PROMPTS, "default_prompt_name": "query"}
    (own / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    model = loaded(own)
    reference = sentence_transformers.SentenceTransformer(str(own), device="cpu")
    texts = [SHORT, LONG, "it"]
    for name in (None, *PROMPTS):
        wanted = reference.encode(texts, prompt_name=name, show_progress_bar=False)
        more = {} if name is None else {"prompt_name": name}
        found = model.predict([item(text, "embed", **more) for text in texts])
        assert np.allclose([each["embedding"] for each in found], wanted, atol=1e-4)
    with pytest.raises(InvalidInput, match=r"parameters\.prompt_name: .*query"):
        model.predict([item(SHORT, "embed", prompt_name="passage")])
    tokens = [each["id"] for each in model.predict([item(SHORT, "tokenize")])[0]]
    found = model.predict([item(SHORT, "embed", prompt_name="document"), item(tokens, "embed")])
    assert np.allclose(*(each["embedding"] for each in found), atol=1e-4), "tokens are as they are"
    with pytest.raises(InvalidInput, match="list of tokens"):
        model.predict([item(tokens, "embed", prompt_name="query")])


def test_a_model_with_a_long_prompt_is_warmed_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its texts have fewer tokens than those of "predict", and the prompt has more than a text."""
    compiles_to_itself(monkeypatch)
    own = _with_modules(tmp_path, "pooling_mode_mean_tokens")
    prompts = {"prompts": {"a": 9 * LONG}, "default_prompt_name": "a"}
    (own / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    model = loaded(own, compile=True)
    assert model.predict([item([5, 6], "embed")])[0]["tokens"] == 2
    with pytest.raises(InvalidInput, match="limit is 20"):
        model.predict([item("a", "embed")])


def test_embeddings_are_those_of_sentence_transformers() -> None:
    import sentence_transformers

    path = minilm.find()
    model = loaded(path)
    assert model.description["task"] == "feature-extraction"
    assert model.description["max_tokens"] == 256
    texts = [SHORT, LONG, "it", 30 * LONG, "Ähnliche Sätze, 相似的句子!"]
    wanted = sentence_transformers.SentenceTransformer(str(path), device="cpu").encode(
        texts, normalize_embeddings=True, show_progress_bar=False
    )
    outputs = model.predict([item(text, "embed", truncation=True) for text in texts])
    assert np.allclose([output["embedding"] for output in outputs], wanted, atol=1e-4)
    assert outputs[3]["tokens"] == 256
    with pytest.raises(InvalidInput, match=r"^inputs: .*256"):
        model.predict([item(texts[3], "embed")])


# What it refuses


def base64_of(content: bytes) -> str:
    return base64.b64encode(content).decode()


@pytest.mark.parametrize(
    ("name", "inputs", "word"),
    [
        ("pictures", "x y", "'x y'"),
        ("pictures", base64_of(b"%!PS-Adobe-3.0 EPSF-3.0"), "PNG"),
        ("pictures", b"", "b''"), ("pictures", 7, "7"), ("sounds", sound(800, rate=8000), "16000"),
        ("sounds", sound(0), "empty"), ("sounds", sound(4), " 4 "),
        ("sounds", base64_of(b"#EXTM3U\nfile:///etc/passwd"), "WAV"),
        ("sounds", base64_of(base64.b64decode(sound(9))[:30]), "WAV"),
        ("sounds", {"raw": [0.1], "sampling_rate": 16_000, "path": "x"}, "'path'"),
        ("sounds", {"raw": ["x"], "sampling_rate": 16_000}, "numbers"),
        ("sounds", {"raw": [math.nan], "sampling_rate": 16_000}, "range"),
        ("sounds", {"raw": "xx", "sampling_rate": 16_000}, "numbers"),
        ("", 7, "7"), ("", None, "None"), ("", ["the [MASK]"], "['the [MASK]']"), ("", "", "empty"),
        ("", "the [MASK] \ud83d", "Unicode"), ("", "the [mask]", "[MASK]"),
        ("", "star " * 70 + "[MASK]", "64"), ("roberta", "the [MASK]", "<mask>"),
        ("roberta", "<mask> " + "q " * 40, "32"), ("classifier", {"text": 7}, "inputs.text"),
        ("classifier", {"text": "x", "url": "y"}, "'url'"),
        ("classifier", 4 * LONG, "32"), ("tagger", 4 * LONG, "32"), ("features", 4 * LONG, "32"),
        ("entailment", 2 * LONG, "32"), ("gpt2", "", "empty"), ("gpt2", {"text": "x"}, "'text'"),
    ],
    ids=lambda value: str(value)[:40],
)  # fmt: skip
def test_invalid_inputs_are_refused(name: str, inputs: Any, word: str) -> None:
    is_zero_shot = name == "entailment"
    model = served(name, "zero-shot-classification" if is_zero_shot else None)
    more = {"candidate_labels": ["a"]} if is_zero_shot else {}
    message = refusal(model, item(inputs, **more))
    assert re.match(r"inputs(\.text)?: ", message)
    assert word in message


def test_all_invalid_items_of_a_batch_are_named_before_anything_is_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = served("")
    calls = count_calls(monkeypatch, model.model.model, "forward")
    batch = [item("a [MASK]"), item("none"), item(7), item("b [MASK]"), item("c [MASK]", top_k=-1)]
    batch += [item("x", "describe"), item(SHORT, "embed")]
    with pytest.raises(InvalidItems) as error:
        model.predict(batch)
    fields = {at: str(each).partition(":")[0] for at, each in error.value.errors.items()}
    assert fields == {1: "inputs", 2: "inputs", 4: "parameters.top_k", 6: "do"}
    with pytest.raises(InvalidInput, match="cut"):  # off the mask
        model.predict([item("star " * 70 + "[MASK]", truncation=True)])
    assert calls == []


@pytest.mark.parametrize(
    ("name", "parameters", "word"),
    [
        ("", {"top_k": "3"}, "'3'"), ("", {"top_k": 0}, "1000"), ("", {"top_k": True}, "True"),
        ("roberta", {"top_k": 900}, "320"), ("", {"targets": []}, "256"),
        ("", {"targets": ["a", 7]}, "7"), ("", {"targets": ["\ud83d"]}, "Unicode"),
        ("", {"model": "x"}, "unknown"), ("", {"tokenizer_kwargs": {}}, "unknown"),
        ("gpt2", {"assistant_model": "x/y"}, "unknown"),
        ("gpt2", {"max_new_tokens": 5000}, "4096"), ("gpt2", {"temperature": -1}, "-1"),
        ("gpt2", {"temperature": math.nan}, "nan"), ("gpt2", {"temperature": 10**400}, "100"),
        ("gpt2", {"top_p": 0}, "1"), ("gpt2", {"num_return_sequences": 17}, "16"),
        ("gpt2", {"seed": -1}, "-1"), ("gpt2", {"stop": [""]}, "['']"),
        ("gpt2", {"do_sample": "yes"}, "'yes'"),
        ("tagger", {"aggregation_strategy": "all"}, "'all'"),
        ("classifier", {"function_to_apply": 7}, "'softmax'"),
        ("entailment", {}, "labels"),
        ("entailment", {"candidate_labels": " , "}, "labels"),
        ("entailment", {"candidate_labels": [LONG * 9]}, "32"),
    ], ids=lambda value: str(value)[:40],
)  # fmt: skip
def test_invalid_parameters_are_refused(name: str, parameters: dict[str, Any], word: str) -> None:
    is_zero_shot = name == "entailment"
    model = served(name, "zero-shot-classification" if is_zero_shot else None)
    inputs = {"": "the [MASK]", "roberta": "the <mask>"}.get(name, SHORT)
    more = {"truncation": True} if is_zero_shot else {}
    message = refusal(model, item(inputs, **more, **parameters))
    assert message.startswith(f"parameters.{next(iter(parameters), 'candidate_labels')}: ")
    assert word in message


def test_templates_are_no_programs() -> None:
    model = served("entailment", "zero-shot-classification")
    odd = ["no place", "{} and {}", "{0}", "{:>9999999999}", "{.__class__} {}", "{{}} {}", "{"]
    for template in odd:
        message = refusal(model, item(SHORT, **LABELS, hypothesis_template=template))
        assert message.startswith("parameters.hypothesis_template: ")


def test_null_is_a_parameter_left_out_and_a_bare_item_is_an_input() -> None:
    model = served("")
    with_null = item(MASKED[0], top_k=None, targets=None, truncation=None)
    [answer] = model.predict([MASKED[0]])
    items = [item(MASKED[0]), with_null, {**with_null, "parameters": None}]
    assert_close(model.predict(items), [answer] * 3)
    assert model.predict([]) == []
    with pytest.raises(InvalidInput, match=r"^parameters: .*7"):
        model.predict([{**with_null, "parameters": 7}])
    with pytest.raises(InvalidInput, match=r"^inputs: "):
        model.predict([{"inputs": "the [MASK]"}])


def test_the_tables_are_schemas() -> None:
    for task, known in TASKS.items():
        for do in ("predict", *known.operations):
            for name, schema in parameter_schemas(task, do).items():
                assert schema["description"].endswith("."), name
                assert "type" in schema or "anyOf" in schema
    assert parameter_schemas("ner") == parameter_schemas("token-classification")
    assert parameter_schemas("fill-mask", "embed") == parameter_schemas("custom") == {}
    top_p = {"type": ["number", "null"], "maximum": 1, "exclusiveMinimum": 0}
    assert top_p.items() <= parameter_schemas("text-generation")["top_p"].items()


def test_a_transformers_error_does_not_cross(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_it_describes_itself() -> None:
    [said] = served("").predict([item(None, "describe")])
    assert said == {
        "task": "fill-mask", "model": "text_infilling", "mask_token": "[MASK]",
        "operations": ["predict", "tokenize", "decode"], "takes_parameters": True, "labels": None,
        "candidate_labels_required": False, "max_tokens": 64, "max_sound_seconds": None,
        "device": "cpu", "dtype": "float32", "dtype_reason": "as saved",
        "attention": "sdpa", "quantization": None, "compiled": False,
        "batch_sizes": None, "chats": False, "vector_size": None, "no_embeddings": None,
        "example": "Happy birthday to [MASK].", "revision": None,
    }  # fmt: skip
    said = served("gpt2").description
    operations = ["predict", "generate", "score", "tokenize", "decode"]
    assert (said["operations"], said["max_tokens"]) == (operations, 48)
    assert served("tagger").description["labels"] == ["O", "B-PER", "I-PER", "B-LOC", "I-LOC"]
    said = served("entailment", "zero-shot-classification").description
    assert said["candidate_labels_required"] is True


def test_a_batch_may_end_before_each_call_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of chunks of a sound, of rows, or of tokens. A worker asks whether anybody waits."""
    model = loaded(folder("gpt2"))
    left = [True] * 3

    def raise_if_unwanted() -> None:
        if not left:
            raise InvalidInput("nobody waits")
        left.pop()

    monkeypatch.setattr(model, "raise_if_unwanted", raise_if_unwanted)
    with pytest.raises(InvalidInput, match="nobody waits"):
        model.predict([item("the king", max_new_tokens=9)])
    left.extend([True] * 99)
    model.predict([item("the king", max_new_tokens=9)])
    assert len(left) == 90


# Loading


@pytest.mark.parametrize(
    ("name", "task"),
    [
        ("roberta", "fill-mask"), ("classifier", "text-classification"),
        ("tagger", "token-classification"), ("features", "feature-extraction"),
        ("gpt2", "text-generation"), ("chat", "text-generation"),
        ("pictures", "image-classification"), ("detector", "object-detection"),
        ("sounds", "audio-classification"), ("speech", "automatic-speech-recognition"),
        ("captions", "image-to-text"), ("bart", "text2text-generation"),
        ("whisper", "automatic-speech-recognition"),
    ],
)  # fmt: skip
def test_the_task_is_inferred_and_its_example_can_be_tried(name: str, task: str) -> None:
    model = served(name)
    assert model.task == task
    assert json.loads(json.dumps(model.description)) == model.description
    assert model.predict([model.description["example"]])[0] is not None


def test_a_task_is_refused_that_is_unknown_or_that_the_model_cannot_do() -> None:
    for task in ("no-such-task", "depth-estimation", "question-answering", ""):
        with pytest.raises(ValueError, match=f"'{task}'"):
            loaded(folder(""), task)
    with pytest.raises(ValueError, match="int8"):
        loaded(folder(""), dtype="int8")
    for name, task, word in (
        ("", "text-classification", "fill-mask"),
        ("features", "fill-mask", "feature-extraction"),
        ("classifier", "zero-shot-classification", "'entailment'"),
        ("gpt2", "automatic-speech-recognition", "text-generation"),
    ):
        with pytest.raises(ValueError, match=task) as error:
            loaded(folder(name), task)
        assert word in str(error.value)
        assert str(folder(name)) in str(error.value)
        assert "\n" not in str(error.value)


def test_missing_folders_and_files_are_named(tmp_path: Path) -> None:
    missing = ["./no/such", "no/such/folder", "/no/such", "../x", "~/nope", "", __file__]
    for path in (*missing, Path("nope")):
        with pytest.raises(FileNotFoundError, match=re.escape(repr(str(path)))):
            loaded(path)
    own = tmp_path / "own"
    own.mkdir()
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        loaded(own)
    (own / "adapter_config.json").write_text("{}")
    with pytest.raises(FileNotFoundError, match="adapter"):
        loaded(own)
    for file in variant("classifier", own).glob("tokenizer*"):
        file.unlink()
    (own / "vocab.txt").unlink(missing_ok=True)
    with pytest.raises(FileNotFoundError, match="tokenizer"):
        loaded(own)
    (own / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="weights"):
        loaded(own)
    (own / "config.json").write_text('{"model_type": "no-such-type"}')
    with pytest.raises(FileNotFoundError, match="config"):
        loaded(own)


def test_a_gpu_that_torch_cannot_use_is_refused() -> None:
    said = r"device 0 .*; install a build for your GPU, or name \"cpu\"$"
    with pytest.raises(RuntimeError, match=said):
        PipelineModel("0").init_model(folder(""))


def test_damaged_file_is_called_damaged(tmp_path: Path) -> None:
    weights = variant("classifier", tmp_path) / "model.safetensors"
    os.truncate(weights, weights.stat().st_size // 2)
    with pytest.raises(ValueError, match="damaged or incomplete: its weights cannot be read"):
        loaded(tmp_path)


def test_missing_weights_are_named(tmp_path: Path) -> None:
    own = variant("features", tmp_path, architectures=None)
    with pytest.raises(ValueError, match=r"classifier\.bias"):
        loaded(own, "text-classification")
    with pytest.raises(ValueError, match="BertConfig"):
        loaded(own)


def test_code_of_a_model_is_not_run(tmp_path: Path) -> None:
    own = variant("features", tmp_path / "own")
    (own / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    code = {"AutoConfig": "evil.Config", "AutoModel": "evil.Model"}
    (own / "config.json").write_text(json.dumps({"model_type": "evil", "auto_map": code}))
    with pytest.raises(FileNotFoundError, match="config"):
        loaded(own)
    assert not (tmp_path / "ran").exists()


def test_every_operation_is_warmed_up_and_loading_fails_when_the_model_cannot_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from transformers import BertModel

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise ZeroDivisionError("odd weights")

    with monkeypatch.context() as patch:
        calls = count_calls(patch, BertModel, "forward")
        loaded(folder("features"))
        assert calls == [1, 1]
    monkeypatch.setattr(BertModel, "forward", fail)
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        loaded(folder("features"))


# In a worker


def test_lengths_are_known_without_torch() -> None:
    code = (
        "import sys, service_streamer.pipelines as pipelines\n"
        "pipelines.parameter_schemas('fill-mask')\n"
        "print(pipelines.PipelineModel.length('abc'))\n"
        "print(sorted({'torch', 'transformers', 'numpy', 'PIL'} & set(sys.modules)))\n"
    )
    done = python("-c", code)
    assert (done.stdout, done.stderr) == ("3\n[]\n", "")


@pytest.mark.long
def test_through_a_streamer(capfd: pytest.CaptureFixture[str]) -> None:
    with Streamer(PipelineModel, batch_size=8, max_latency=0.01, cuda_devices=("cpu",)) as streamer:
        streamer.wait_ready()
        good = streamer.predict([item(MASKED[0], top_k=1), item(None, "describe"), "the [MASK]"])
        assert good[0][0]["token_str"] == "you"
        assert good[1]["task"] == "fill-mask"
        wrong, right = streamer.submit(["no mask"]), streamer.submit([MASKED[0]])
        with pytest.raises(InvalidInput, match=r"^inputs: "):
            wrong.result()
        assert right.result()[0][0]["token_str"] == "you"
    said = capfd.readouterr()
    assert (said.out, said.err) == ("", "")  # no bars, no advice


# What items cost


TEXT = "x" * 100


@pytest.mark.parametrize(
    ("value", "length"),
    [
        (TEXT, 100), ("", 1), ("天气很好", 12), ("\ud83d", 3),
        ({"text": "abc", "text_pair": "de"}, 5),
        ([{"role": "user", "content": TEXT}, {"role": "user", "content": "abc"}], 103),
        (item(TEXT), 100), (item(TEXT, "embed"), 100), (item(50 * TEXT, truncation=True), 2048),
        (item(TEXT, candidate_labels=["a", "b", "c"]), 300),
        (item(TEXT, candidate_labels="a,b"), 200), (item(TEXT, "generate"), 100 + 40 * 256),
        (item(TEXT, "generate", max_new_tokens=2), 100 + 40 * 2),
        (item(TEXT, max_new_tokens=1, num_return_sequences=3), 3 * 140),
        (item(TEXT, max_new_tokens=10**30, num_return_sequences=10**30), 256 * (100 + 40 * 4096)),
        (item(None, "describe"), 1),
        ("data:image/png;base64," + saved(image(64, 48)), 1),
        (item(saved(image(64, 48))), 1), (base64.b64decode(saved(image(64, 48))), 1),
        ({"sampling_rate": 16_000, "raw": [0.0] * 500}, 500),
        ([5, 6, 7], 12),
        (item([5, 6, 7], "generate", max_new_tokens=1), 12 + 40),
        (item(TEXT, "score"), 100),
        (item({"text": TEXT, "text_pair": TEXT}, "rerank"), 200),
        (item(TEXT, "tokenize"), 1), (item([5, 6, 7], "decode"), 1),
        *((saved(image(64, 48), kind), 1) for kind in KINDS),
        *((wrap(sound(4000)), 4000) for wrap in (str, base64.b64decode, item)),
        ("data:audio/wav;base64," + sound(4000), 4000),
    ],
)  # fmt: skip
def test_an_item_costs_its_tokens_or_samples(value: Any, length: float) -> None:
    of_sound = pytest.approx(4000, rel=0.01)  # with its header
    assert PipelineModel.length(value) == (of_sound if length == 4000 else length)


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
def test_an_odd_item_costs_little_and_is_refused_later(value: Any) -> None:
    assert PipelineModel.length(value) == 1


# One's own model


def test_own_function_is_served() -> None:
    model = CustomModel()
    model.init_model("models:double")
    one, text, said, number = model.predict([item([1]), "x", item(None, "describe"), item(2)])
    assert (one, text, number) == ([1, 1], "xx", 4)
    assert (said["task"], said["model"]) == ("custom", "models:double")
    assert said["takes_parameters"] is False
    assert model.predict([item(None, "describe")]) == [said]
    with pytest.raises(InvalidInput, match=r"^parameters: "):
        model.predict([item(1, top_k=3)])
    with pytest.raises(InvalidInput, match="'generate'"):
        model.predict([item(1, "generate")])


def test_a_class_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # which models for "cpu" set, in this process
    model = CustomModel("cpu")
    model.init_model("models:Multiplier", (3,))
    assert model.predict([item(2), 5]) == [6, 15]
    full = CustomModel("cpu")
    full.init_model("models:Fitting")
    assert full.out_of_memory_errors == full.model.out_of_memory_errors != ()


def test_stages_of_ones_own() -> None:
    model = CustomModel()
    model.init_model("stage_models:Staged")
    asked = [(stage, "thread") for stage in ("preprocess", "forward", "postprocess")]
    described, *threads, four = in_threads(model, [item(None, "describe"), *asked, item(2)])
    assert (described, four) == (model.description, 4)
    assert len(set(threads)) == 3
    assert model.predict([item(None, "describe"), 2]) == [described, 4]
    with pytest.raises(InvalidInput, match=r"^parameters: "):
        model.preprocess([item(1, top_k=3)])


def test_steps_of_ones_own_are_those_of_the_worker() -> None:
    """The worker steps with the model itself, and the service shows it as any other."""
    model = CustomModel()
    model.init_model("stream_models:Countdown")
    own = model.unwrapped()
    assert type(own).__name__ == "Countdown"
    described = own.describe()
    assert (described["task"], described["bare_items"]) == ("custom", True)
    model.init_model("models:double")
    assert model.unwrapped() is model


def test_own_models_are_refused_when_they_are_wrong() -> None:
    model = CustomModel()
    with pytest.raises(ValueError, match="'models'"):
        model.init_model("models")
    with pytest.raises(ModuleNotFoundError):
        model.init_model("no_such_module:x")
    with pytest.raises(TypeError, match="function"):
        model.init_model("models:double", kwargs={"x": 1})
    model.init_model("test_pipelines:fails")
    with pytest.raises(ZeroDivisionError):
        model.predict([item(1)])
    model.init_model("test_pipelines:forgets")
    with pytest.raises(BadModelOutput, match="2"):
        model.predict([item(1), item(2)])
    model.init_model("test_pipelines:odd")
    [got] = model.predict(["a"])
    assert got == {"a": [0.5, 1.5, [1, 2], 3, [1, True]], "b": None, 3: "x"}
    assert json.loads(json.dumps(got))["a"] == got["a"], "results are plain"


def fails(batch: list[Any]) -> list[Any]:
    return [1 / 0 for _ in batch]


def forgets(batch: list[Any]) -> list[Any]:
    return batch[1:]


def odd(batch: list[Any]) -> list[Any]:
    numbers = [np.float32(0.5), np.float64(1.5), torch.tensor([1, 2]), np.int64(3)]
    return [{"a": [*numbers, (1, np.bool_(True))], "b": None, 3: "x"} for _ in batch]


def test_padding_is_to_the_longest_text_of_a_batch() -> None:
    model = served("")
    model.predict(["a [MASK]", "a [MASK]"])
    assert model.padding == 0
    model.predict(["[MASK] a a a a a", "[MASK]"])  # 8 tokens, and 3, with [CLS] and [SEP]
    assert model.padding == pytest.approx(5 / 16)
