"""Text generation as a model of steps: its results are those of ``PipelineModel``."""

from __future__ import annotations

import json
import pickle
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from pipeline_cases import (
    LONG,
    SHORT,
    count_calls,
    folder,
    item,
    outputs_of,
    results_of,
    served,
    stepped,
    variant,
)
from service_streamer import InvalidInput, InvalidItems
from service_streamer.pipelines import SteppedPipeline
from test_text_pieces import pieces_with_spaces

pytestmark = pytest.mark.xdist_group("transformers")

CHAT = [{"role": "user", "content": "hello"}]
GREEDY = {"max_new_tokens": 12, "do_sample": False}


@pytest.fixture
def model() -> SteppedPipeline:
    return stepped("gpt2")


@pytest.fixture
def defaults(model: SteppedPipeline) -> Any:
    """What the model's generation_config.json asks for."""
    return model.model.model.generation_config


def generate(text: Any, count: int = 12, **more: Any) -> dict[str, Any]:
    """An item of "generate" that takes the likeliest tokens, or what ``more`` says."""
    return item(text, "generate", **{"max_new_tokens": count, "do_sample": False, **more})


ITEMS = [
    generate(SHORT),
    item(LONG[:20], "generate", max_new_tokens=25, temperature=0),
    generate("it", 1), generate(SHORT, repetition_penalty=1.5),
    generate(SHORT, 20, stop=["e", "zz"]), item(LONG[:9], **GREEDY),
    item(SHORT, **GREEDY, return_full_text=False), item("it", **GREEDY, stop="a"),
    item(SHORT, **{**GREEDY, "max_new_tokens": 1}, stop=SHORT[2:5]),  # the prompt has it
    generate("once", 20, do_sample=True, top_k=1), item("the", "describe"),
]  # fmt: skip
CHATS = [generate(CHAT), item(CHAT, **GREEDY),
         item([*CHAT, {"role": "assistant", "content": "a"}], **GREEDY)]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "items"), [("gpt2", ITEMS), ("chat", ITEMS + CHATS), ("bare", ITEMS)]
)
def test_results_are_those_of_whole_texts(name: str, items: list[Any]) -> None:
    model = stepped(name)
    wanted = [model.whole.predict([each])[0] for each in items]
    assert results_of(model, items) == wanted
    assert results_of(model, items, seed=3) == wanted


def test_pieces_joined_are_the_text(
    model: SteppedPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    items = [generate(text, 30) for text in ("a", "to", "x")]
    calls = count_calls(monkeypatch, model.whole.model.model, "generate")
    [[whole], _, _] = model.whole.predict(items)
    assert calls == [3], "whole texts are generated together"
    items.append(generate("a", 30, stop=whole["text"][4:7]))
    for each, outputs in zip(items, outputs_of(model, items, seed=1), strict=True):
        [row] = model.whole.predict([each])[0]
        assert "".join(output["text"] for output in outputs) == row["text"]
        assert sum(output["tokens"] for output in outputs) == row["completion_tokens"]
        assert all(output["text"] for output in outputs[:-1])
        assert outputs[-1]["finish_reason"] == row["finish_reason"]
        assert not any("finish_reason" in output for output in outputs[:-1])
    assert len(outputs_of(model, items[:1])[0]) > 5


@pytest.mark.parametrize(
    ("kind", "beginning"), [("Metaspace", " "), ("ByteFallback", " "), ("WordPiece", "ed")]
)
def test_a_text_goes_on_as_the_tokenizer_writes_it_behind_the_prompt(
    tmp_path: Path, kind: str, beginning: str
) -> None:
    """By itself its first token would lose its blank, or be written as "##ing"."""
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder(""))
    if kind != "WordPiece":
        tokenizer = pieces_with_spaces(kind, *(f"▁{number}" for number in range(200)))
    tokenizer.save_pretrained(tmp_path)
    config = transformers.GPT2Config.from_pretrained(folder("gpt2"), vocab_size=len(tokenizer))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path)
    model = SteppedPipeline("cpu")
    model.init_model(tmp_path)
    texts = []
    for prompt in ([*tokenizer("the end")["input_ids"], token] for token in range(5, 60, 5)):
        [outputs] = outputs_of(model, [generate(prompt, 3)])
        new = [token for output in outputs for token in output["ids"]]
        before, whole = tokenizer.batch_decode([prompt, [*prompt, *new]], skip_special_tokens=True)
        text = "".join(output["text"] for output in outputs)
        assert before + text == whole
        [[row]] = model.whole.predict([generate(prompt, 3, stop=["##"])])
        assert row["text"] == text
        texts.append(text)
        if text:
            stopped = generate(prompt, 3, stop=[text[:2]])
            [[row]] = results = model.whole.predict([stopped])
            assert row["text"] == ""
            assert results_of(model, [stopped]) == results
    assert any(text.startswith(beginning) for text in texts)


@pytest.mark.parametrize("place", [0, 5])
def test_the_end_token(
    model: SteppedPipeline, defaults: Any, monkeypatch: pytest.MonkeyPatch, place: int
) -> None:
    [outputs] = outputs_of(model, [generate(SHORT)])
    ids = [token for output in outputs for token in output["ids"]]
    monkeypatch.setattr(defaults, "eos_token_id", [0, ids[place]])
    items = [generate(SHORT), item(SHORT, **GREEDY)]
    [[row], _] = found = results_of(model, items)
    assert found == model.whole.predict(items)
    assert row["finish_reason"] == "stop"
    if not place:  # a text that ends at once
        assert (row["text"], row["completion_tokens"]) == ("", 1)
        assert len(outputs_of(model, items[:1])[0]) == 1


@pytest.mark.parametrize("how", ["by steps", "as a whole"])
def test_seeds_and_several_texts(model: SteppedPipeline, how: str) -> None:
    def predict(items: list[Any]) -> list[Any]:
        if how == "by steps":
            return results_of(model, items, seed=5 if len(items) > 1 else None)
        results: list[Any] = model.whole.predict(items)
        return results

    state = torch.get_rng_state()
    options: dict[str, Any] = {"max_new_tokens": 10, "temperature": 1.5}
    seeded = item(SHORT, "generate", **options, seed=7)
    several = item("it", "generate", **options, seed=7, num_return_sequences=3)
    alone = predict([seeded])[0]
    others = [item(SHORT, "generate", **options), item("a b", "generate", **options, seed=8)]
    first, one, two, again, rows = predict([seeded, *others, seeded, several])
    assert first == again == alone
    assert alone not in (one, two)
    assert len({row["text"] for row in rows}) == 3
    assert rows == predict([several])[0]
    assert len({row["prompt_tokens"] for row in rows}) == 1
    records = predict([item("it", **options, num_return_sequences=2)])[0]
    assert [record.keys() for record in records] == [{"generated_text"}] * 2
    assert torch.equal(torch.get_rng_state(), state), "nobody else's numbers were drawn"
    outputs = outputs_of(model, [several])[0]
    lasts = [each for output in outputs for each in output["choices"] if "finish_reason" in each]
    assert sorted(each["index"] for each in lasts) == [0, 1, 2]  # each text ends once


def test_log_probabilities(model: SteppedPipeline) -> None:
    [[row]] = results_of(model, [generate(SHORT, logprobs=2)])
    [plain_row] = results_of(model, [generate(SHORT)])[0]
    logprobs = row.pop("logprobs")
    assert row == plain_row
    assert len(logprobs) == row["completion_tokens"]
    assert all(each["top"][0]["id"] == each["id"] and len(each["top"]) == 2 for each in logprobs)
    [[record]] = results_of(model, [item(SHORT, **GREEDY, logprobs=2)])
    assert record["generated_text"] == SHORT + row["text"], "in the pipeline's own form, too"
    assert (record["logprobs"], record["finish_reason"]) == (logprobs, row["finish_reason"])


def test_whole_texts_take_no_parameters_of_steps() -> None:
    model = served("gpt2")
    for name, value, nothing in (
        ("frequency_penalty", 1, 0), ("presence_penalty", 1, 0), ("logit_bias", {"5": 1}, {}),
        ("logprobs", 2, None), ("ignore_eos", True, False), ("min_new_tokens", 1, 0),
    ):  # fmt: skip
        with pytest.raises(InvalidInput, match=f"^parameters.{name}: this worker generates whole"):
            model.predict([item(SHORT, "generate", **{name: value})])
        assert model.predict([generate(SHORT, **{name: nothing})])


@pytest.mark.parametrize(
    "parameters",
    [
        {"do_sample": False},
        {"temperature": 1.5, "seed": 3},
        {"temperature": 1.5, "seed": 3, "num_return_sequences": 2, "stop": ["e "]},
    ],
)
@pytest.mark.parametrize("do", ["generate", "predict"])
def test_it_goes_on_where_a_worker_died(
    model: SteppedPipeline, do: str, parameters: dict[str, Any]
) -> None:
    asked = item(SHORT, do, max_new_tokens=16, **parameters)
    [whole] = outputs_of(model, [asked])
    for count in (0, 1, len(whole) // 2, len(whole) - 1):
        handed_out = whole[:count]
        begun_again = pickle.loads(pickle.dumps(model.resume(asked, handed_out)))
        if not count:
            assert begun_again == asked
        [rest] = outputs_of(model, [begun_again, *ITEMS[:2]])[:1]
        # Of several texts one may have been held back, and is a step behind then.
        assert model.join_outputs([*handed_out, *rest]) == model.join_outputs(whole)
        if "num_return_sequences" not in parameters:
            assert [*handed_out, *rest] == whole
        first = [*handed_out, *rest[:1]]
        if len(rest) > 1:
            [last] = outputs_of(model, [model.resume(begun_again, first)])
            assert model.join_outputs([*first, *last]) == model.join_outputs(whole)


def test_what_only_generate_can_do(
    model: SteppedPipeline, defaults: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(defaults, "num_beams", 2)
    items = [generate(SHORT), generate("it")]
    assert results_of(model, items) == model.whole.predict(items)
    for [output], [row] in zip(outputs_of(model, items), results_of(model, items), strict=True):
        # As of others, so that services can send it in their forms.
        assert output == {**row, "tokens": row["completion_tokens"], "ids": []}
    several = generate(SHORT, 3, do_sample=True, num_return_sequences=2)
    [[output]] = outputs_of(model, [several])
    assert [each["index"] for each in output["choices"]] == [0, 1]
    with pytest.raises(InvalidItems, match=r"parameters\.logprobs: this model's generation_config"):
        model.start([generate(SHORT, logprobs=1)])
    prefixed = SteppedPipeline("cpu")
    prefixed.init_model(variant("gpt2", tmp_path, prefix="once"))
    with pytest.raises(InvalidItems, match=r"logprobs: this model's prompts have a text"):
        prefixed.start([generate(SHORT, logprobs=1)])


@pytest.mark.parametrize(
    ("option", "value", "is_whole"),
    [
        ("prompt_lookup_num_tokens", 2, True),  # takes one prompt at a time
        ("stop_strings", ["e"], True),
        ("max_time", 60.0, True), ("guidance_scale", 1.5, True),
        ("bad_words_ids", [[5], [7, 9]], False), ("no_repeat_ngram_size", 2, False),
        ("min_new_tokens", 5, False),
    ],
)  # fmt: skip
def test_texts_are_as_generation_config_asks(
    model: SteppedPipeline, defaults: Any, monkeypatch: pytest.MonkeyPatch, option: str,
    value: Any, is_whole: bool,
) -> None:  # fmt: skip
    monkeypatch.setattr(defaults, option, value)
    items = [generate(SHORT), generate("it"), item("x", **GREEDY)]
    outputs = outputs_of(model, items)
    wanted = [model.whole.predict([each])[0] for each in items]
    assert [model.join_outputs(each) for each in outputs] == wanted
    assert all(len(each) == 1 for each in outputs) == is_whole


@pytest.mark.parametrize("paged", [None, True])
def test_texts_of_one_answer_take_one_place(paged: bool | None) -> None:
    """Rows beyond the pages' places wait for the others."""
    model = SteppedPipeline("cpu")
    model.init_model(folder("gpt2"), batch_size=2, paged=paged)
    assert type(model.loop).__name__ == ("PagedLoop" if paged else "StepLoop")
    several = generate("the", 9, do_sample=True, seed=1, num_return_sequences=9)
    rows, row = results_of(model, [several, generate("a b")])
    assert [each["completion_tokens"] for each in rows] == [9] * 9
    assert [row] == model.whole.predict([generate("a b")])


@pytest.mark.parametrize(
    ("inputs", "parameters", "message"),
    [
        ("a", {"max_new_tokens": 0}, "parameters.max_new_tokens: .* 1"),
        ("a", {"max_new_tokens": 10**6}, "parameters.max_new_tokens: .* 1"),
        ("a", {"max_new_tokens": 48}, "parameters.max_new_tokens: .* leaves"),
        ("a", {"num_return_sequences": 17}, "parameters.num_return_sequences: "),
        ("a", {"assistant_model": "x"}, "parameters.assistant_model: unknown"),
        ("a", {"constraints": []}, "parameters.constraints: unknown"),
        ("", {}, "inputs: '' is empty"),
        ("the " * 50, {}, "inputs: .* 48 including generated"),
        ("a" * 10**5, {}, "inputs: .* 100,000 characters"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_request_that_no_text_can_answer_is_refused_alone(
    model: SteppedPipeline, inputs: str, parameters: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidItems, match=f"^{message}") as caught:
        model.start([item("it", "generate"), item(inputs, "generate", **parameters)])
    assert list(caught.value.errors) == [1]
    with pytest.raises(InvalidItems) as caught:
        model.start([SHORT, 5, item("it", "generate", min_p=2), item(CHAT)])
    assert sorted(caught.value.errors) == [1, 2, 3], "all that are invalid are named"


def test_other_tasks_and_models_without_steps_take_one_step(
    model: SteppedPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model, "loop", None)
    items = [generate(SHORT), item("it", **GREEDY)]
    assert results_of(model, items) == model.whole.predict(items)
    assert [len(outputs) for outputs in outputs_of(model, items)] == [1, 1]
    other = SteppedPipeline("cpu")
    other.init_model(folder("classifier"))
    assert results_of(other, [SHORT, LONG]) == other.whole.predict([SHORT, LONG])


# Texts of a given form

SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["ada", "grace"]}, "age": {"type": "integer", "maximum": 9}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("name", ["gpt2", "bare"])  # with and without a token that ends texts
def test_texts_have_the_form_that_is_asked_for(name: str) -> None:
    pytest.importorskip("llguidance")
    model = stepped(name)
    options: dict[str, Any] = {"max_new_tokens": 30, "temperature": 2.0, "seed": 1}
    asked = [
        item("a", "generate", **options, regex="[0-9]{3}-(yes|no)", num_return_sequences=3),
        item("b", "generate", **options, json_schema=SCHEMA),
        item("c", "generate", max_new_tokens=20, temperature=0, regex="(ab)+c"),
        item("d", "generate", **options, min_new_tokens=30),
        item("e", "generate", **options, logprobs=0, regex="yes|no"),
    ]
    pairs, [made], [greedy], [free], [short] = results_of(model, asked, seed=4)
    assert len({row["text"] for row in pairs}) > 1
    assert all(re.fullmatch("[0-9]{3}-(yes|no)", row["text"]) for row in pairs)
    assert {row["finish_reason"] for row in (*pairs, made, short)} == {"stop"}
    value = json.loads(made["text"])
    assert value["name"] in ("ada", "grace")
    assert value["age"] <= 9
    assert re.match("(ab)*a?b?c?$", greedy["text"])
    assert short["text"] in ("yes", "no")
    assert free == results_of(model, asked[3:4])[0][0]
    assert free["completion_tokens"] == 30
    [whole] = outputs_of(model, asked[:1])
    again = model.resume(asked[0], whole[:2])
    [rest] = outputs_of(model, [again])
    assert model.join_outputs([*whole[:2], *rest]) == pairs


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"regex": "(a"}, "parameters.regex: .*"),
        ({"json_schema": {"type": "strange"}}, "parameters.json_schema: .*"),
        ({"json_schema": "object"}, "parameters.json_schema: .* not 'object'"),
        ({"json_schema": {"a": "b" * 20_000}}, "parameters.json_schema: "),
        ({"json_schema": {}, "regex": "a"}, "parameters.regex: .* json_schema"),
    ],
)
def test_a_form_that_cannot_be_made(
    model: SteppedPipeline, monkeypatch: pytest.MonkeyPatch, parameters: dict[str, Any],
    message: str,
) -> None:  # fmt: skip
    pytest.importorskip("llguidance")
    with pytest.raises(InvalidItems, match=message) as caught:
        model.start(["it", item("it", "generate", **parameters)])
    assert list(caught.value.errors) == [1]
    monkeypatch.setitem(sys.modules, "llguidance", None)
    needs = r"regex: this service needs llguidance: pip install ll.*structured"
    with pytest.raises(InvalidItems, match=needs):
        model.start([item("it", "generate", regex="a")])


NAME = {"type": "string", "pattern": "[a-z]+"}
PROPERTIES: dict[str, Any] = {
    "price": {"type": "number", "multipleOf": 0.01}, "lot": {"multipleOf": 1000}, "n": {"enum": [3]}
}  # fmt: skip
PRIMES = (7, 11, 13, 17, 19, 23, 29)
VALUES = {"default": {"multipleOf": 99_991}, "examples": [{"multipleOf": 99_991}]}

BOMBS: dict[str, Any] = {
    "remainders": {"type": "integer", "multipleOf": 999_983},
    "primes": {"allOf": [{"multipleOf": each} for each in PRIMES]},
    "fractions": {"allOf": [{"multipleOf": each} for each in (0.0007, 0.11, 13)]},
    "tiny": {"multipleOf": 1e-300},
    "members": {"allOf": [{"properties": {"a": {"multipleOf": each}}} for each in PRIMES]},
    "referred": {
        "examples": [{"multipleOf": 97}],
        "properties": {"a": {"$ref": "#/examples/0", "multipleOf": 997}},
    },
    "anchors": {"$ref": "#a", "default": {"$anchor": "a", "multipleOf": 99_991}},
    "many": {"properties": {f"p{at}": {"multipleOf": 9000 + at} for at in range(20)}},
    "repeated": {"type": "string", "pattern": "(a{1000}){1000}"},
    "repeated names": {"patternProperties": {"(a{1000}){1000}": {}}},
    "patterns": {"allOf": [{"type": "string", "pattern": f".*{c}.*"} for c in "abcdefghijkl"]},
    "a property": {"properties": {"default": {"multipleOf": 99_991}}},
    "chained": {
        "$defs": {
            f"d{at}": {"$ref": f"#/$defs/d{at + 1}", "pattern": f".*{at}.*"} for at in range(30)
        } | {"d30": {"type": "string"}},
        "$ref": "#/$defs/d0",
    },
}  # fmt: skip


GOOD: list[dict[str, Any]] = [
    {"type": "object", "properties": PROPERTIES, **VALUES},
    {"$defs": {"Order": {"properties": PROPERTIES}}, "$ref": "#/$defs/Order"},
    {"anyOf": [{"multipleOf": 0.01}, {"multipleOf": 1000}]},
    {
        "$defs": {"name": NAME},
        "type": "object",
        "properties": {
            f"p{at}": each for at, each in enumerate([PROPERTIES["price"], NAME, SCHEMA] * 20)
        }
        | {"allOf": {"allOf": [{"$ref": "#/$defs/name"}]}, "multipleOf": {"multipleOf": 5}},
        "required": ["multipleOf", "allOf"],
    },
]

SMALL = [
    r"\d{4}-\d{2}-\d{2}(T\d{2}:\d{2}(:\d{2}(\.\d{1,9})?)?)?",
    "([0-9a-f]{1,4}:){7,7}[0-9a-f]{1,4}", r"(\(a{1000}\)){3}[{1000}]{3}\{1000}{3}",
    "(a{1000}|b{1000})+(c{1000})*", ".{0,4000}", r"\(?x\)?[(?x]",
]  # fmt: skip
LARGE = [
    "(a{1000}){1000}", "((a{50}){50}){50}", "(a{200}){0,}{200}", "a{1000}{1000}",
    r"([\]]{1000}){1000}", "([^]a-z(]{1000}){1000}", r"(\p{Lu}{1000}){1000}",
    "(?x) (a { 1000 }) # (\n {1000}", "(" + "a" * 100 + "){1000}", "a{4000000000}",
    "a{" + "9" * 5000 + "}",
]  # fmt: skip


@pytest.mark.parametrize(
    ("form", "is_taken"),
    [
        *(({"json_schema": schema}, False) for schema in BOMBS.values()),
        *(({"json_schema": schema}, True) for schema in GOOD),
        *(({"regex": pattern}, False) for pattern in LARGE),
        *(({"regex": pattern}, True) for pattern in SMALL),
    ],
    ids=lambda value: str(value)[:60],
)
def test_a_form_that_takes_gigabytes_is_refused_before_it_is_compiled(
    model: SteppedPipeline, monkeypatch: pytest.MonkeyPatch, form: dict[str, Any], is_taken: bool
) -> None:
    """Numbers are multiplied only where they are for one value."""
    llguidance = pytest.importorskip("llguidance")

    class Compiler:
        """A stand-in, since a bomb would take the memory of this machine."""

        @staticmethod
        def write(_form: str, **_options: Any) -> None:
            raise ValueError("it was compiled")

        grammar_from_json_schema = grammar_from_regex = write

    monkeypatch.setattr(llguidance, "LLMatcher", Compiler)
    with pytest.raises(InvalidItems, match=f"^parameters.{next(iter(form))}: ") as caught:
        model.start([item("it", "generate", **form)])
    assert ("it was compiled" in str(caught.value)) == is_taken


def test_a_form_that_cannot_go_on_fails_alone(
    model: SteppedPipeline, defaults: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others of the step have taken their tokens, and must not take them again."""
    pytest.importorskip("llguidance")
    [q] = model.model.tokenizer("q")["input_ids"]
    monkeypatch.setattr(defaults, "bad_words_ids", [[q]])
    options: dict[str, Any] = {"max_new_tokens": 30, "temperature": 2.0, "seed": 1}
    good = item("b", "generate", **options, regex="[0-9]{9}-(yes|no)")
    [alone] = results_of(model, [good])
    bad = item("a", "generate", **options, regex="q", logprobs=0)
    states = model.start([good, bad])
    [(first, _), (nothing, is_done)] = model.step(states)
    assert (nothing, is_done) == (None, False)
    with pytest.raises(InvalidItems, match=r"parameters\.regex: the text cannot go on: ") as caught:
        model.step(states)
    assert list(caught.value.errors) == [1]
    outputs = [first]
    model.release(states[1])
    for _ in range(30):
        [(output, is_done)] = model.step(states[:1])
        outputs.append(output)
        if is_done:
            break
    assert model.join_outputs([each for each in outputs if each is not None]) == alone
