"""Models with an encoder by steps: their texts are those of ``generate``."""

from __future__ import annotations

import base64
import io
import json
import pickle
import random
import struct
import wave
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import transformers

import tiny_models
from pipeline_stepping import item, outputs_of, results_of
from serve_process import Serving
from service_streamer import InvalidItems, Streamer
from service_streamer.pipelines import PipelineModel, SteppedPipeline, whole_texts
from service_streamer.workers.model_spec import ModelSpec

TEXTS = ["the fox", "once upon a time there was a king", "a", "it was the best of times"]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Two threads that wait for each other are many times slower on a busy machine."""
    transformers.utils.logging.disable_progress_bar()  # it starts a thread
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., SteppedPipeline]:
    @cache
    def served(name: str) -> SteppedPipeline:
        model = SteppedPipeline("cpu")
        model.init_model(tiny_models.build(name, tmp_path_factory.mktemp("pairs") / name))
        return model

    return served


def texts(**more: Any) -> list[dict[str, Any]]:
    return [
        item(text, do, max_new_tokens=count, **more)
        for text, do, count in zip(TEXTS, ["generate", "predict"] * 2, [5, 14, 25, 1], strict=True)
    ]


@cache
def image(seed: int) -> str:
    from PIL import Image

    file = io.BytesIO()
    noise = random.Random(seed).randbytes(3 * 40 * 30)
    Image.frombytes("RGB", (40, 30), noise).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


@cache
def sound(seconds: float, seed: int = 0) -> bytes:
    source, count = random.Random(seed), int(16000 * seconds)
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setparams((1, 2, 16000, 0, "NONE", ""))
        samples = (source.randrange(-9000, 9000) for _ in range(count))
        writer.writeframes(struct.pack(f"<{count}h", *samples))
    return file.getvalue()


REQUESTS: dict[str, list[Any]] = {
    "texts": [
        *texts(do_sample=False),
        item(TEXTS[1], "generate", max_new_tokens=20, do_sample=False, repetition_penalty=1.7),
        item(TEXTS[0], max_new_tokens=30, do_sample=False, stop=["e", "Z"]),
        item(TEXTS[3], "generate", max_new_tokens=9, temperature=2.0, top_k=1),
        item(TEXTS[1], "generate", max_new_tokens=7, do_sample=False, num_beams=3),
        item("x", "describe"),
    ],
    "images": [
        item(image(at), max_new_tokens=count, do_sample=False)
        for at, count in enumerate([3, 12, 1, 20])
    ],
    "sounds": [
        item(sound(1.1), num_beams=1),
        item(sound(0.3, 1), num_beams=1, language="fr"),
        item(sound(2.0, 2), num_beams=1, language="english", task="translate"),
        item(sound(0.3, 3)),
        item(sound(4.5, 4), num_beams=1),
        item(sound(0.7, 5), num_beams=1),
    ],
}  # fmt: skip


@pytest.fixture
def without_times(served: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """As a trained model has it: tokens of times come only if it is asked for them."""
    model = served("whisper").model.model
    defaults = model.generation_config
    times = range(defaults.no_timestamps_token_id + 1, model.config.vocab_size)
    monkeypatch.setattr(defaults, "suppress_tokens", [*defaults.suppress_tokens, *times])


@pytest.mark.parametrize(
    ("name", "kind", "way"),
    [
        ("t5", "texts", "padded"),
        ("bart", "texts", "shifted"),
        ("captions", "images", "padded"),
        ("whisper", "sounds", "padded"),
    ],
)
@pytest.mark.usefixtures("without_times")
def test_results_are_those_of_whole_texts(
    served: Callable[..., Any], name: str, kind: str, way: str
) -> None:
    model, requests = served(name), REQUESTS[kind]
    assert model.loop.way == way
    wanted = [model.whole.predict([each])[0] for each in requests]
    assert results_of(model, requests) == wanted
    assert results_of(model, requests, seed=3) == wanted
    assert len({str(each) for each in wanted}) > 2
    outputs = outputs_of(model, requests[:2] + requests[3:4])
    assert max(map(len, outputs)) > 2
    for each in outputs:
        pieces = "".join(output.get("text", "") for output in each)
        if not pieces:
            continue  # of beams
        result = model.join_outputs(each)
        whole = result if isinstance(result, dict) else result[0]
        assert pieces == whole.get("text", whole.get("generated_text"))


def test_results_are_those_of_generate(served: Callable[..., Any]) -> None:
    """Not only those of the same handler."""
    for name in ("t5", "bart"):
        model = served(name)
        tokenizer, network = model.model.tokenizer, model.model.model
        for request, [row] in zip(
            texts(do_sample=False)[::2], results_of(model, texts(do_sample=False))[::2], strict=True
        ):
            ids = tokenizer(request["inputs"], return_tensors="pt")["input_ids"]
            count = request["parameters"]["max_new_tokens"]
            [found] = network.generate(ids, max_new_tokens=count, do_sample=False)
            assert row["text"] == tokenizer.decode(found[1:], skip_special_tokens=True)
            assert row["prompt_tokens"] == ids.shape[1]


def test_a_sound_whose_text_has_times_is_computed_as_a_whole(served: Callable[..., Any]) -> None:
    """A model that gives times unasked goes on behind the last one, as ``generate`` does."""
    model = served("whisper")
    requests = [item(sound(seconds, 7), num_beams=1) for seconds in (0.4, 1.0, 1.3, 1.9)]
    times = model.model.model.generation_config.no_timestamps_token_id
    outputs = outputs_of(model, requests)
    assert any(token > times for each in outputs for output in each for token in output["ids"])
    wanted = [model.whole.predict([each])[0] for each in requests]
    assert [model.join_outputs(each) for each in outputs] == wanted


def test_what_whisper_cannot_do_by_steps_is_one_step(served: Callable[..., Any]) -> None:
    model = served("whisper")
    requests = [item(sound(0.3)), item(sound(2.5), num_beams=1), item(sound(4))]
    outputs = outputs_of(model, requests)
    assert [len(each) for each in outputs] == [1, 1, 1]
    assert all(output.keys() == {"text"} for each in outputs for output in [each[0]["result"]])
    assert model.model.model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"return_timestamps": "char"}, "return_timestamps: this model knows the times of words"),
        ({"language": "xx"}, "language: this model does not know 'xx'; send a code"),
        ({"language": "german"}, "language: this model does not know 'german'"),
        ({"task": "sing"}, "task: must be one of 'transcribe', 'translate'"),
        ({"num_beams": 0}, "num_beams: must be a whole number from 1"),
    ],
)
def test_invalid_parameters_of_sounds(
    served: Callable[..., Any], parameters: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidItems, match=f"^parameters.{message}") as caught:
        served("whisper").start([item(sound(0.3), num_beams=1), item(sound(0.3), **parameters)])
    assert list(caught.value.errors) == [1]


def test_a_model_of_one_language_takes_none(
    served: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = served("whisper")
    monkeypatch.delattr(model.model.model.generation_config, "lang_to_id")
    with pytest.raises(InvalidItems, match="language: this model is for one language"):
        model.start([item(sound(0.3), language="en")])


def test_only_whisper_takes_its_parameters(served: Callable[..., Any]) -> None:
    with pytest.raises(InvalidItems, match="num_beams: is for Whisper models; leave it out"):
        served("speech").start([item(sound(0.3), num_beams=1)])
    assert served("speech").loop is None


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (item("the " * 60), "inputs: the text has .* tokens, and the limit is 48; shorten it"),
        (item([{"role": "user", "content": "a"}]), "inputs: this model does not support chats"),
        (item("a", max_new_tokens=48), "max_new_tokens: the model's texts have at most 47 tokens"),
        (item(""), "inputs: '' is empty"),
        (item("a", num_return_sequences=2, do_sample=False), "num_return_sequences: must be 1"),
        (
            item("a", num_return_sequences=3, num_beams=2, do_sample=True),
            "num_return_sequences: must be at most 2, the number of beams; not 3",
        ),
        (item("a", num_beams=2, logprobs=1), "logprobs: num_beams asks for .*num_beams or logprob"),
    ],
)
def test_invalid_texts(served: Callable[..., Any], request_: Any, message: str) -> None:
    with pytest.raises(InvalidItems, match=message) as caught:
        served("bart").start([item("the fox", max_new_tokens=2), request_])
    assert list(caught.value.errors) == [1]


def test_a_search_is_bounded_since_all_others_wait_for_it(
    served: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(whole_texts, "_MOST_SEARCHED", 60)
    sampled = {"num_return_sequences": 2, "do_sample": True}
    good = [
        item("a", num_beams=2, max_new_tokens=30),
        item("a", num_beams=3, max_new_tokens=10, **sampled),
        item("a", num_beams=1, max_new_tokens=40, **sampled),
    ]
    served("bart").start(good)
    for wrong, most in ((good[0], 30), (good[1], 10)):
        more = {**wrong, "parameters": {**wrong["parameters"], "max_new_tokens": most + 1}}
        with pytest.raises(
            InvalidItems, match=f"max_new_tokens: must be at most {most} for .*31|11"
        ):
            served("bart").start([more])


def test_a_text_without_tokens_is_quoted_in_brief(
    served: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = served("bart")
    monkeypatch.setattr(model.whole.handlers["predict"], "_counter", lambda _: {"input_ids": []})
    with pytest.raises(InvalidItems) as caught:
        model.start([item("x" * 60 + "y" * 40)])
    assert str(caught.value.errors[0]) == f"inputs: '{'x' * 57}...' has no tokens; send a text"


def test_seeds_forms_and_what_goes_on(served: Callable[..., Any]) -> None:
    model = served("bart")
    options: dict[str, Any] = {"max_new_tokens": 12, "temperature": 2.0, "seed": 5}
    asked = item(TEXTS[1], "generate", **options, num_return_sequences=3)
    others = [item(TEXTS[0], "generate", **{**options, "seed": 6}), *texts(do_sample=False)]
    [alone] = results_of(model, [asked])
    assert results_of(model, [*others, asked], seed=1)[-1] == alone
    assert len({row["text"] for row in alone}) == 3
    [whole] = outputs_of(model, [asked])
    again = pickle.loads(pickle.dumps(model.resume(asked, whole[:4])))
    [rest, *_] = outputs_of(model, [again, *others])
    assert model.join_outputs([*whole[:4], *rest]) == alone
    pytest.importorskip("llguidance")
    [[made]] = results_of(model, [item("a", "generate", max_new_tokens=20, regex="(ab|c){4}")])
    assert made["text"].strip("abc") == ""
    assert made["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("name", "request_", "encoded"),
    [
        ("bart", item("the fox", max_new_tokens=5, num_return_sequences=2, temperature=1.0), 4),
        ("whisper", item(sound(0.3), num_beams=1), 100),
        ("captions", item(image(1), max_new_tokens=5, do_sample=False), 17),
    ],
)
def test_the_cost_has_what_the_encoder_has_given(
    served: Callable[..., Any], name: str, request_: Any, encoded: int
) -> None:
    model = served(name)
    [state] = model.start([request_])
    model.step([state])
    rows = state.rows
    assert model.cost(state) == sum(len(row.tokens) + encoded for row in rows)
    model.release(state)


@pytest.mark.parametrize(
    ("name", "has_steps"),
    [("t5", True), ("captions", True), ("whisper", True), ("speech", False), ("gpt2", True)],
)
def test_which_models_run_by_steps(
    tmp_path_factory: pytest.TempPathFactory, name: str, has_steps: bool
) -> None:
    folder = tiny_models.build(name, tmp_path_factory.mktemp("variants") / name)
    assert PipelineModel._variant(folder) is (SteppedPipeline if has_steps else PipelineModel)


@pytest.mark.parametrize("task", ["summarization", "translation", "text2text-generation"])
def test_names_of_the_task(tmp_path_factory: pytest.TempPathFactory, task: str) -> None:
    folder = tiny_models.build("t5", tmp_path_factory.mktemp("names"))
    model = PipelineModel("cpu")
    model.init_model(folder, task)
    assert model.task == "text2text-generation"
    assert model.describe()["operations"] == ["predict", "generate", "tokenize", "decode"]


@pytest.mark.long  # starts processes; what they run is tested above
def test_a_service_streams_texts_for_texts(tmp_path: Path) -> None:
    with Serving(str(tiny_models.build("t5", tmp_path / "t5"))) as service:
        plain = {"max_new_tokens": 6, "do_sample": False}
        [wanted] = service.post("/predict", {"inputs": "the fox", "parameters": plain}).json()
        asked = {"inputs": "the fox", "parameters": plain, "stream": True}
        *events, last, done = events_of(service.post("/predict", asked))
        assert len(events) > 2
        assert done == "[DONE]"
        assert json.loads(last)["output"]["result"] == [wanted]
        text = service.post("/generate", {"text": "the fox", "parameters": plain}).json()["text"]
        assert text == wanted["generated_text"]  # another text, and not one that goes on
        whole = {"inputs": "the fox", "parameters": {**plain, "return_full_text": True}}
        *_, last, done = events_of(service.post("/generate", {**whole, "stream": True}))
        assert json.loads(last)["generated_text"] == text
        assert service.post("/generate", whole).json()["generated_text"] == text
        for path, name in (("/generate", "text"), ("/", "inputs")):
            for more in ({}, {"num_beams": 2}):
                body = {name: "the fox", "parameters": {**plain, **more}, "stream": True}
                *events, last, done = events_of(service.post(path, body))
                assert json.loads(last)["generated_text"]
                assert (not events) == bool(more)


def events_of(response: httpx.Response) -> list[str]:
    assert response.status_code == 200, response.text
    return [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]


@pytest.mark.long
def test_preprocess_processes_decode_sounds(tmp_path: Path) -> None:
    """Such a worker computes whole texts: a model of steps has nothing to run in them."""
    folder = tiny_models.build("whisper", tmp_path / "whisper")
    sounds = [item(sound(0.3), language="fr"), item(sound(0.8))]
    found = []
    for options in ({"batch_size": 4}, {"preprocess_workers": 1}):
        with Streamer(
            "service_streamer.pipelines:PipelineModel",
            model_init_kwargs={"model": str(folder)},
            cuda_devices=("cpu",),
            worker_timeout=None,
            **options,
        ) as pool:
            pool.wait_ready()
            found.append(pool.predict(sounds))
    assert found[0] == found[1]


@pytest.mark.parametrize("name", ["gpt2", "classifier"])
def test_only_models_without_steps_want_lengths(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    folder = tiny_models.build(name, tmp_path / name)
    ModelSpec("service_streamer.pipelines:PipelineModel", (folder,)).load("cpu")
    assert ("PipelineModel.length is not used" in caplog.text) == (name == "classifier")


def test_two_models_in_one_process(served: Callable[..., Any]) -> None:
    """Each in a thread of its own. What is replaced in a model for a step is that model's."""
    models = [served("bart"), served("t5")]
    requests = [each for each in REQUESTS["texts"] if each["parameters"].get("temperature") is None]
    wanted = [results_of(model, requests) for model in models]
    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(lambda model: results_of(model, requests), models))
    assert found == wanted


def test_texts_in_half_precision(tmp_path: Path) -> None:
    """By steps, too: what is compared there may differ more."""
    for name in ("t5", "bart", "gpt2"):
        model = SteppedPipeline("cpu")
        model.init_model(tiny_models.build(name, tmp_path / name), dtype="bfloat16")
        assert model.loop is not None
        [[row]] = results_of(model, [item("the fox", "generate", max_new_tokens=5)])
        assert row["completion_tokens"] == 5
