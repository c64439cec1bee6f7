"""The events of answers that come in parts, form by form: outputs in, bytes out."""

from __future__ import annotations

import json
from typing import Any

import pytest
from huggingface_hub import TextGenerationStreamOutput

from service_streamer.serve.http.events import (
    DONE,
    ChatEvents,
    CompletionEvents,
    Form,
    Numbered,
    OutputEvents,
    TokenEvents,
)
from service_streamer.serve.http.logprobs import Echo, LegacyLogprobs
from service_streamer.serve.http.operations import encode

HEAD = {"id": "x-1", "object": "kind", "created": 5, "model": "m"}


def piece(text: str, made: int = 0, reason: str | None = None, index: int = 0) -> dict[str, Any]:
    end = {"finish_reason": reason, "prompt_tokens": 3, "completion_tokens": made}
    return {"index": index, "text": text, "tokens": 1, "ids": [7], **(end if reason else {})}


def read(form: Form, outputs: list[Any]) -> list[Any]:
    """The data of all events, the last of which must be the end."""
    sent = b"".join(map(form.output, outputs)) + form.end()
    assert sent.endswith(DONE)
    events = sent.decode().removesuffix("\n\n").split("\n\n")
    assert all(each.startswith("data: ") and "\n" not in each for each in events)
    return [json.loads(each.removeprefix("data: ")) for each in events[:-1]]


TWO = [
    {"choices": [piece("a\nb"), piece("", index=1)]},
    {"choices": [piece("c", 2, "length")]},
    {"choices": [piece("d", 2, "stop", 1)]},
]
USAGE = {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}


@pytest.mark.parametrize("include_usage", [False, True])
def test_completions(include_usage: bool) -> None:
    chunks = read(CompletionEvents(HEAD, include_usage=include_usage), TWO)
    if include_usage:
        assert chunks.pop() == {**HEAD, "choices": [], "usage": USAGE}
    assert [chunk.pop("choices") for chunk in chunks] == [
        [{"text": text, "index": index, "logprobs": None, "finish_reason": reason}]
        for text, index, reason in [
            ("a\nb", 0, None), ("", 1, None), ("c", 0, "length"), ("d", 1, "stop"),
        ]
    ]  # fmt: skip
    assert chunks == [HEAD | ({"usage": None} if include_usage else {})] * 4


def test_the_prompt_begins_each_sequence_if_it_is_wanted() -> None:
    chunks = read(CompletionEvents(HEAD, include_usage=False, echoes=[Echo("> ")]), TWO)
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["> a\nb", "> ", "c", "d"]


def test_texts_of_several_prompts_are_numbered_through() -> None:
    sent = [
        Numbered(1, {"choices": [piece("d", index=1), piece("c")]}),
        Numbered(0, {"choices": [piece("b", 2, "stop", 1)]}),
        Numbered(0, {"choices": [piece("a", 3, "stop")]}),
        Numbered(1, {"choices": [piece("!", 4, "stop", at) for at in (0, 1)]}),
    ]
    echoes = [Echo("first "), Echo("second ")]
    form = CompletionEvents(HEAD, include_usage=True, texts=2, echoes=echoes)
    *chunks, last = read(form, sent)
    texts: dict[int, str] = {}
    for chunk in chunks:
        [choice] = chunk["choices"]
        texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    assert texts == {0: "first a", 1: "first b", 2: "second c!", 3: "second d!"}
    made = 2 + 3 + 4 + 4
    usage = {"prompt_tokens": 6, "completion_tokens": made, "total_tokens": 6 + made}
    assert last == {**HEAD, "choices": [], "usage": usage}


def token(text: str, logprob: float | None = -1.0, **more: Any) -> dict[str, Any]:
    return {"token": text, "id": 1, "logprob": logprob, "top": [], **more}


@pytest.mark.parametrize(
    ("text", "tokens", "offsets"),
    [
        ("ab", [token("a"), token("b")], [0, 1]),
        ("the sun", [token(" the"), token(" sun")], [0, 3]),  # the text has no first blank
        (" the", [token(" the")], [0]),
        ("a", [token("<s>", special=True), token("a")], [0, 0]),  # the model adds it
        ("<s>a", [token("<s>", special=True), token("a")], [0, 3]),  # the text has it
        ("\u00e9a", [token("?", bytes=[0xC3]), token("?", bytes=[0xA9]), token("a")], [0, 0, 1]),
        ("", [], []),
    ],
)
def test_places_of_a_prompts_tokens(
    text: str, tokens: list[dict[str, Any]], offsets: list[int]
) -> None:
    part = LegacyLogprobs(with_special=True).of([token("!")], Echo(text, tokens))
    assert part["text_offset"] == [*offsets, len(text)]
    assert len(part["tokens"]) == len(tokens) + 1


def test_the_first_token_of_a_prompt_has_no_log_probability() -> None:
    echo = Echo("ab", [token("a", None), token("b", -2.0)])
    part = LegacyLogprobs(with_special=True).of([token("</s>", special=True)], echo)
    assert part["tokens"] == ["a", "b", "</s>"]
    assert part["token_logprobs"] == [None, -2.0, -1.0]
    assert part["top_logprobs"] == [None, {"b": -2.0}, {"</s>": -1.0}]
    assert LegacyLogprobs().of([token("</s>", special=True)])["tokens"] == []


@pytest.mark.parametrize("include_usage", [False, True])
def test_chat_says_the_role_first(include_usage: bool) -> None:
    chunks = read(ChatEvents(HEAD, include_usage=include_usage), TWO)
    if include_usage:
        assert chunks.pop() == {**HEAD, "choices": [], "usage": USAGE}
    role = {"role": "assistant", "content": ""}
    assert [
        (choice["index"], choice["delta"], choice["finish_reason"])
        for chunk in chunks
        for choice in chunk["choices"]
    ] == [
        (0, role, None), (0, {"content": "a\nb"}, None), (1, role, None),
        (0, {"content": "c"}, None), (0, {}, "length"),
        (1, {"content": "d"}, None), (1, {}, "stop"),
    ]  # fmt: skip
    assert all(("usage" in chunk) == include_usage for chunk in chunks)


@pytest.mark.parametrize(("reason", "tgis"), [("stop", "eos_token"), ("length", "length")])
def test_hugging_faces_client_reads_tokens(reason: str, tgis: str) -> None:
    sent = read(TokenEvents(seed=4), [piece("a "), piece("b", 2, reason)])
    first, last = map(TextGenerationStreamOutput.parse_obj_as_instance, sent)
    assert (first.index, first.token.text, first.generated_text) == (1, "a ", None)
    assert first.details is None
    assert (last.index, last.token.text, last.generated_text) == (2, "b", "a b")
    assert last.details is not None
    assert last.details.finish_reason == tgis
    assert (last.details.generated_tokens, last.details.input_length) == (2, 3)
    assert (last.details.seed, last.token.id) == (4, 7)


def likely(token: str, value: float, **more: Any) -> dict[str, Any]:
    return {"token": token, "id": 5, "logprob": value, **more}


#: Of "a", of an e with an accent in two tokens, and of the end.
WITH_LOGPROBS = [
    {**piece("a"), "logprobs": [{**likely("a", -1.0), "top": [likely("b", -0.5)]}]},
    {**piece(""), "logprobs": [{**likely("\ufffd", -2.0, bytes=[195]), "top": []}]},
    {**piece("\xe9"), "logprobs": [{**likely("\ufffd", -float("inf"), bytes=[169]), "top": []}]},
    {**piece("", 4, "stop"), "logprobs": [{**likely("</s>", -3.0, special=True), "top": []}]},
]


def test_log_probabilities_of_completions() -> None:
    chunks = read(CompletionEvents(HEAD, include_usage=False), WITH_LOGPROBS)
    parts = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    assert parts[0] == {
        "tokens": ["a"], "token_logprobs": [-1], "top_logprobs": [{"b": -0.5, "a": -1}],
        "text_offset": [0],
    }  # fmt: skip
    assert [part["tokens"] for part in parts[1:]] == [["bytes:\\xc3"], ["bytes:\\xa9"], []]
    assert [part["text_offset"] for part in parts[1:]] == [[1], [1], []]
    assert parts[2]["token_logprobs"] == [-9999]


def test_log_probabilities_of_chats() -> None:
    chunks = read(ChatEvents(HEAD, include_usage=False), WITH_LOGPROBS)
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [choice["delta"] for choice in choices] == [
        {"role": "assistant", "content": ""},
        {"content": "a"}, {"content": ""}, {"content": "\xe9"}, {},
    ]  # fmt: skip
    assert [choice["logprobs"] and choice["logprobs"]["content"] for choice in choices] == [
        None,
        [{"token": "a", "logprob": -1, "bytes": [97],
          "top_logprobs": [{"token": "b", "logprob": -0.5, "bytes": [98]}]}],
        [{"token": "\ufffd", "logprob": -2, "bytes": [195], "top_logprobs": []}],
        [{"token": "\ufffd", "logprob": -9999, "bytes": [169], "top_logprobs": []}],
        None,
    ]  # fmt: skip


def test_details_of_hugging_faces_tokens() -> None:
    sent = read(TokenEvents(prompt="> ", with_top=True), WITH_LOGPROBS)
    told = [TextGenerationStreamOutput.parse_obj_as_instance(each) for each in sent]
    assert [each.token.text for each in told] == ["a", "", "\xe9", ""]
    assert [each.token.logprob for each in told] == [-1, -2, -9999, -3]
    assert told[0].top_tokens is not None
    assert told[0].top_tokens[0].text == "b"
    assert told[-1].token.special
    assert told[-1].generated_text == "> a\xe9"


def test_text_that_comes_with_the_end_token_is_not_special() -> None:
    """Clients that skip special tokens get it, too."""
    end = {**likely("</s>", -3.0, special=True), "top": []}
    [sent] = read(TokenEvents(), [{**piece("held back", 1, "stop"), "logprobs": [end]}])
    assert (sent["token"]["text"], sent["token"]["special"]) == ("held back", False)


def test_a_text_that_was_computed_as_a_whole() -> None:
    [sent] = read(TokenEvents(), [{"result": [{"generated_text": "a b"}]}])
    only = TextGenerationStreamOutput.parse_obj_as_instance(sent)
    assert (only.index, only.token.text, only.generated_text) == (1, "a b", "a b")


def test_any_output() -> None:
    numpy = pytest.importorskip("numpy")
    outputs = [1, "a\n\nb", None, {"a": numpy.arange(2)}]
    assert read(OutputEvents(encode), outputs) == [
        {"output": 1}, {"output": "a\n\nb"}, {"output": None}, {"output": {"a": [0, 1]}},
    ]  # fmt: skip
