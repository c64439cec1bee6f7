"""The shipped text generation model, and the script that trains it."""

from __future__ import annotations

import random

import pytest
from jinja2 import TemplateError

import quiet_torch  # noqa: F401
import train_text_generation as training
from generation_model import DEFAULT_MODEL, ManagedGenerationModel, TextGenerationModel
from service_streamer import InvalidInput, ThreadedStreamer

pytestmark = pytest.mark.xdist_group("transformers")


@pytest.fixture(scope="module")
def model() -> TextGenerationModel:
    return TextGenerationModel(device="cpu")


@pytest.fixture(scope="module")
def examples() -> list[training.Example]:
    return training.examples(training.passages(training.read_sections()))


# What it answers


def test_it_goes_on_with_the_lines_of_its_text(
    model: TextGenerationModel, examples: list[training.Example]
) -> None:
    assert len(examples) == 200
    assert training.accuracy(model, examples) >= 0.95


def test_an_answer_does_not_depend_on_the_batch(
    model: TextGenerationModel, examples: list[training.Example]
) -> None:
    prompts = [example.prompt for example in examples[:11]] + ["Quite another text, 你好 🙂, and"]
    alone = [model.predict([prompt])[0] for prompt in prompts]
    assert model.predict(prompts) == alone
    assert model.predict(prompts[::-1]) == alone[::-1]


def test_an_answer_begins_with_the_text_and_is_bounded() -> None:
    model = TextGenerationModel(max_new_tokens=3, device="cpu")
    prompts = ["Twinkle, twinkle,", "<|pad|> and <|endoftext|> 🙂", "no\n\nsuch \ttext  "]
    for prompt, text in zip(prompts, model.predict(prompts), strict=True):
        assert text.startswith(prompt)
        spaces = len(prompt) - len(prompt.rstrip(" "))  # the model gets the prompt without them
        assert len(model.tokenizer(text)["input_ids"]) <= len(model.encode(prompt)) + spaces + 3
    assert model.predict([]) == []


@pytest.mark.parametrize(
    ("text", "word"),
    [
        (5, "int"),
        (None, "NoneType"),
        ("", "empty"),
        (" \n", "empty"),
        ("\ud83d", "Unicode"),
        ("word " * 500, "472"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_invalid_texts_are_refused(model: TextGenerationModel, text: str, word: str) -> None:
    with pytest.raises(InvalidInput, match=rf"^text: .*\b{word}\b") as error:
        model.predict(["Mary had a", text])
    assert len(str(error.value)) < 200


# Chats


def test_it_answers_a_line_with_the_lines_that_follow(model: TextGenerationModel) -> None:
    chats = training.clear_chats(training.exchanges(training.read_sections()), 128)
    assert training.chat_accuracy(model, [*chats, *training.SMALL_TALK]) >= 0.95


def test_a_chat_goes_on_with_what_was_said_last(model: TextGenerationModel) -> None:
    chat = [
        {"role": "system", "content": "You are a poet."},
        {"role": "user", "content": "Hello!"},
        {"role": "assistant", "content": "Hello! Say a line of a rhyme, and I go on with it."},
        {"role": "user", "content": "twinkle, twinkle, little star"},
    ]
    rows = [ids_of(model, chat), ids_of(model, [*chat, chat[2], chat[1]])]
    rhyme, hello = model.go_on(rows)
    assert rhyme.startswith("How I wonder what you are!\nUp above the world so high,\n")
    assert hello == chat[2]["content"]
    assert model.go_on(rows[:1]) == [rhyme]


def ids_of(model: TextGenerationModel, chat: list[dict[str, str]]) -> list[int]:
    ids: list[int] = model.tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_dict=False
    )
    return ids


def test_chats_are_written_as_they_were_learnt(model: TextGenerationModel) -> None:
    chat = [{"role": "user", "content": "One,"}, {"role": "assistant", "content": "two."}]
    written = model.tokenizer.apply_chat_template(chat, tokenize=False)
    given, learnt = training.turn(training.Exchange("One,", "two."), random.Random(0))
    assert written == training.BOS + given + learnt + training.EOS
    with pytest.raises(TemplateError, match="tool"):
        model.tokenizer.apply_chat_template([{"role": "tool", "content": "x"}])


@pytest.mark.parametrize("count", [0, -1, 512, 1.5, True, "many"])
def test_a_wrong_number_of_tokens_is_refused(count: int) -> None:
    for half in (TextGenerationModel, ManagedGenerationModel().init_model):
        with pytest.raises(ValueError, match="max_new_tokens"):
            half(count)


def test_the_managed_model_writes_by_steps(
    model: TextGenerationModel, examples: list[training.Example]
) -> None:
    prompts = [example.prompt for example in examples[:6]] + ["mary had a ", "Red fish 🙂  "]
    with ThreadedStreamer(ManagedGenerationModel, batch_size=4) as streamer:
        assert streamer.predict(prompts) == model.predict(prompts)
        pieces = list(streamer.stream("Mary had a "))
        assert pieces[:3] == ["Mary had a little", " lamb", ","]
        for text in ("", " \n", "word " * 500, 5):
            with pytest.raises(InvalidInput, match=r"^text: "):
                streamer.predict([text])
    managed = ManagedGenerationModel()
    managed.init_model(max_new_tokens=2)
    [state] = managed.start(["Mary had a"])
    assert managed.step([state]) == [("Mary had a little", False)]
    assert managed.step([state]) == [(" lamb", True)]
    managed.release(state)


def test_missing_model_folder_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FileNotFoundError, match="no/such/folder"):
        TextGenerationModel(model_path="no/such/folder")
    managed = ManagedGenerationModel()
    monkeypatch.setenv("MODEL", "no/such/folder")
    with pytest.raises(FileNotFoundError, match="no/such/folder"):
        managed.init_model()
    managed.init_model(model_path=DEFAULT_MODEL)


# The folder


def test_the_pipeline_of_transformers_takes_it(model: TextGenerationModel) -> None:
    from transformers import pipeline

    generate = pipeline("text-generation", str(DEFAULT_MODEL), device="cpu")
    [answer] = generate("Mary had a little", max_new_tokens=40, do_sample=False)
    assert answer["generated_text"] == model.predict(["Mary had a little"])[0]
    chat = [{"role": "user", "content": "Mary had a little lamb,"}]
    [answer] = generate(chat, max_new_tokens=8, do_sample=False)
    assert answer["generated_text"][-1]["content"].startswith("Its fleece was white")
