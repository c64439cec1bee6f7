"""Models with an encoder by steps: their texts are those of ``generate``."""

from __future__ import annotations

import pickle
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from pipeline_cases import (
    folder,
    image,
    item,
    loaded,
    noise,
    outputs_of,
    results_of,
    saved,
    stepped,
)
from service_streamer import InvalidItems
from service_streamer.pipelines import PipelineModel, SteppedPipeline
from service_streamer.workers.model_spec import ModelSpec

pytestmark = pytest.mark.xdist_group("transformers")

TEXTS = ["the fox", "once upon a time there was a king", "a", "it was the best of times"]


def texts(**more: Any) -> list[dict[str, Any]]:
    return [
        item(text, do, max_new_tokens=count, **more)
        for text, do, count in zip(TEXTS, ["generate", "predict"] * 2, [5, 14, 25, 1], strict=True)
    ]


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
        item(saved(image(40 + at, 30)), max_new_tokens=count, do_sample=False)
        for at, count in enumerate([3, 12, 1, 20])
    ],
    "sounds": [
        item(noise(1.1), num_beams=1),
        item(noise(0.3, 1), num_beams=1, language="fr"),
        item(noise(2.0, 2), num_beams=1, language="english", task="translate"),
        item(noise(0.3, 3)), item(noise(4.5, 4), num_beams=1), item(noise(0.7, 5), num_beams=1),
    ],
}  # fmt: skip


@pytest.fixture
def without_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a trained model has it: tokens of times come only if it is asked for them."""
    model = stepped("whisper").model.model
    defaults = model.generation_config
    times = range(defaults.no_timestamps_token_id + 1, model.config.vocab_size)
    monkeypatch.setattr(defaults, "suppress_tokens", [*defaults.suppress_tokens, *times])


@pytest.mark.parametrize(
    ("name", "kind", "way"),
    [("t5", "texts", "padded"), ("whisper", "sounds", "padded"),
     pytest.param("bart", "texts", "shifted", marks=pytest.mark.long),
     pytest.param("captions", "images", "padded", marks=pytest.mark.long)],
)  # fmt: skip
@pytest.mark.usefixtures("without_times")
def test_results_are_those_of_whole_texts(name: str, kind: str, way: str) -> None:
    model, requests = stepped(name), REQUESTS[kind]
    assert model.loop.way == way
    wanted = [model.whole.predict([each])[0] for each in requests]
    assert results_of(model, requests) == wanted
    assert results_of(model, requests, seed=3) == wanted
    assert len({str(each) for each in wanted}) > 2
    outputs = outputs_of(model, requests[:2] + requests[3:4])
    assert max(map(len, outputs)) > 2
    for each in outputs:
        if pieces := "".join(output.get("text", "") for output in each):  # none of beams
            result = model.join_outputs(each)
            whole = result if isinstance(result, dict) else result[0]
            assert pieces == whole.get("text", whole.get("generated_text"))


@pytest.mark.parametrize("name", ["t5", "bart"])
def test_results_are_those_of_generate(name: str) -> None:
    """Not only those of the same handler."""
    model, asked = stepped(name), texts(do_sample=False)[::2]
    tokenizer, network = model.model.tokenizer, model.model.model
    for request, [row] in zip(asked, results_of(model, asked), strict=True):
        ids = tokenizer(request["inputs"], return_tensors="pt")["input_ids"]
        count = request["parameters"]["max_new_tokens"]
        [found] = network.generate(ids, max_new_tokens=count, do_sample=False)
        assert row["text"] == tokenizer.decode(found[1:], skip_special_tokens=True)
        assert row["prompt_tokens"] == ids.shape[1]


def test_a_sound_whose_text_has_times_is_computed_as_a_whole() -> None:
    """A model that gives times unasked goes on behind the last one, as ``generate`` does."""
    model = stepped("whisper")
    requests = [item(noise(seconds, 7), num_beams=1) for seconds in (0.4, 1.0, 1.3, 1.9)]
    times = model.model.model.generation_config.no_timestamps_token_id
    outputs = outputs_of(model, requests)
    assert any(token > times for each in outputs for output in each for token in output["ids"])
    wanted = [model.whole.predict([each])[0] for each in requests]
    assert [model.join_outputs(each) for each in outputs] == wanted


def test_what_whisper_cannot_do_by_steps_is_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    model = stepped("whisper")
    requests = [item(noise(0.3)), item(noise(2.5), num_beams=1), item(noise(4))]
    for outputs in outputs_of(model, requests):
        [output] = outputs
        assert output["result"].keys() == {"text"}
    calls: list[None] = []
    usual = torch.nn.functional.scaled_dot_product_attention

    def attend(*args: Any, **options: Any) -> Any:
        calls.append(None)
        return usual(*args, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", attend)
    results_of(model, [item(noise(0.3), num_beams=1)])
    assert calls, "times of words need another attention, which is for them only"


SOUND = noise(0.3)
INVALID: dict[str, list[tuple[Any, str]]] = {
    "whisper": [
        (item(SOUND, return_timestamps="char"), "parameters.return_timestamps: .*words"),
        (item(SOUND, language="xx"), "parameters.language: .*'xx'"),
        (item(SOUND, language="german"), "parameters.language: .*'german'"),
        (item(SOUND, task="sing"), "parameters.task: .*'transcribe', 'translate'"),
        (item(SOUND, num_beams=0), "parameters.num_beams: "),
    ],
    "bart": [
        (item("the " * 60), "inputs: .*48"),
        (item([{"role": "user", "content": "a"}]), "inputs: .*chats"),
        (item("a", max_new_tokens=48), "parameters.max_new_tokens: .*47"),
        (item(""), "inputs: '' is empty"),
        (item("a", num_return_sequences=2, do_sample=False), ".*num_return_sequences: must be 1"),
        (item("a", num_return_sequences=3, num_beams=2, do_sample=True), ".*num_return_seq.* 2,"),
        (item("a", num_beams=2, logprobs=1), "parameters.logprobs: num_beams"),
    ],
}


@pytest.mark.parametrize(
    ("name", "wrong", "message"),
    [(name, *case) for name, cases in INVALID.items() for case in cases],
    ids=lambda value: str(value)[-60:],
)
def test_an_invalid_request_is_refused_alone(name: str, wrong: Any, message: str) -> None:
    good = item(SOUND, num_beams=1) if name == "whisper" else item("the fox", max_new_tokens=2)
    with pytest.raises(InvalidItems, match=f"^{message}") as caught:
        stepped(name).start([good, wrong])
    assert list(caught.value.errors) == [1]


def test_only_whisper_of_several_languages_takes_their_parameters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = stepped("whisper")
    monkeypatch.delattr(model.model.model.generation_config, "lang_to_id")
    with pytest.raises(InvalidItems, match="language: this model is for one language"):
        model.start([item(SOUND, language="en")])
    with pytest.raises(InvalidItems, match=r"num_beams: .*Whisper"):
        stepped("speech").start([item(SOUND, num_beams=1)])
    assert stepped("speech").loop is None


def test_a_search_is_bounded_since_all_others_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """At most 8,192 tokens: of all beams of all texts."""
    model = stepped("bart")
    for count, most in ((16, 32), (12, 42)):
        searched = {"num_beams": 16, "num_return_sequences": count, "do_sample": True}
        model.start([item("a", **searched, max_new_tokens=most)])
        with pytest.raises(InvalidItems, match=f"max_new_tokens: .*at most {most}"):
            model.start([item("a", **searched, max_new_tokens=most + 1)])
    kind = type(model.model.tokenizer)
    monkeypatch.setattr(kind, "__call__", lambda *_, **__: {"input_ids": []})
    with pytest.raises(InvalidItems) as caught:
        model.start([item("x" * 60 + "y" * 40)])
    assert str(caught.value.errors[0]) == f"inputs: '{'x' * 57}...' has no tokens; send a text"


def test_forms_and_resumed_texts_are_those_of_one_run() -> None:
    model = stepped("bart")
    options: dict[str, Any] = {"max_new_tokens": 12, "temperature": 2.0, "seed": 5}
    asked = item(TEXTS[1], "generate", **options, num_return_sequences=3)
    others = [item(TEXTS[0], "generate", **{**options, "seed": 6}), *texts(do_sample=False)]
    [whole] = outputs_of(model, [asked])
    again = pickle.loads(pickle.dumps(model.resume(asked, whole[:4])))
    [rest, *_] = outputs_of(model, [again, *others])
    assert model.join_outputs([*whole[:4], *rest]) == model.join_outputs(whole)
    pytest.importorskip("llguidance")
    [[made]] = results_of(model, [item("a", "generate", max_new_tokens=20, regex="(ab|c){4}")])
    assert made["text"].strip("abc") == ""
    assert made["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("name", "request_", "encoded"),
    [
        ("bart", item("the fox", max_new_tokens=5, num_return_sequences=2, temperature=1.0), 4),
        ("whisper", item(noise(0.3), num_beams=1), 100),
        ("captions", item(saved(image(41, 30)), max_new_tokens=5, do_sample=False), 17),
        ("gpt2", item("it", max_new_tokens=5, num_return_sequences=2, temperature=1.0), 0),
    ],
)
def test_the_cost_has_what_the_encoder_has_given(name: str, request_: Any, encoded: int) -> None:
    model = stepped(name)
    [state] = model.start([request_])
    model.step([state])
    rows = state.rows
    assert model.cost(state) == sum(len(row.tokens) + encoded for row in rows)
    model.release(state)


@pytest.mark.parametrize(
    ("name", "has_steps"),
    [("t5", True), ("captions", True), ("whisper", True), ("speech", False), ("gpt2", True)],
)
def test_models_that_generate_run_by_steps(
    caplog: pytest.LogCaptureFixture, name: str, has_steps: bool
) -> None:
    """Only the others want lengths."""
    model = ModelSpec("service_streamer.pipelines:PipelineModel", (folder(name),)).load("cpu")
    assert type(model.managed) is (SteppedPipeline if has_steps else PipelineModel)
    assert ("PipelineModel.length is not used" in caplog.text) != has_steps


def test_each_name_of_the_task_means_it() -> None:
    for task in ("summarization", "translation", "text2text-generation"):
        model = loaded(folder("t5"), task)
        assert model.task == "text2text-generation"
        assert model.describe()["operations"] == ["predict", "generate", "tokenize", "decode"]


def test_two_models_in_one_process() -> None:
    """Each in a thread of its own. What is replaced in a model for a step is that model's."""
    models = [stepped("bart"), stepped("t5")]
    requests = [each for each in REQUESTS["texts"] if each["parameters"].get("temperature") is None]
    wanted = [results_of(model, requests) for model in models]
    with ThreadPoolExecutor(2) as threads:
        assert [*threads.map(lambda model: results_of(model, requests), models)] == wanted


@pytest.mark.parametrize("name", ["t5", "bart", "gpt2"])
def test_texts_in_half_precision_come_by_steps(name: str) -> None:
    """What is compared there may differ more."""
    model = SteppedPipeline("cpu")
    model.init_model(folder(name), dtype="bfloat16")
    assert model.loop is not None
    [[row]] = results_of(model, [item("the fox", "generate", max_new_tokens=5)])
    assert row["completion_tokens"] == 5
