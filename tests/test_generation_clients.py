"""Generated text over HTTP, as OpenAI's and Hugging Face's clients ask for it."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tiny_models
from served_here import ServingHere
from service_streamer.pipelines import SteppedPipeline

pytestmark = pytest.mark.xdist_group("transformers")

ASKED: dict[str, Any] = {"model": "any", "max_tokens": 8, "temperature": 1.5, "seed": 5}
CHAT: Any = [{"role": "user", "content": "a"}]

SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["ada", "grace"]}},
    "required": ["name"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.build("chat", tmp_path_factory.mktemp("models") / "chat")


@pytest.fixture(scope="module")
def service(folder: Path) -> Iterator[ServingHere]:
    with ServingHere(str(folder), kind=SteppedPipeline) as service:
        yield service


@pytest.fixture
def client(service: ServingHere) -> Iterator[Any]:
    import openai  # takes a second, as huggingface_hub does

    with openai.OpenAI(base_url=f"{service.url}/v1", api_key="any", max_retries=0) as client:
        yield client


def refused(create: Any, **asked: Any) -> Any:
    """The error that OpenAI's client gets."""
    import openai

    with pytest.raises(openai.BadRequestError) as caught:
        create(**asked)
    return caught.value


@pytest.fixture
def hub(service: ServingHere) -> Iterator[Any]:
    import huggingface_hub

    yield huggingface_hub.InferenceClient(model=service.url)
    huggingface_hub.close_session()


def same_in_parts(client: Any, asked: Any, choice: Any, *names: str) -> None:
    """The stream of a completion has its text, and these lists of its log probabilities."""
    parts = [chunk.choices[0] for chunk in client.completions.create(**asked, stream=True)]
    assert "".join(part.text for part in parts) == choice.text
    for name in names:
        joined = [each for part in parts if part.logprobs for each in getattr(part.logprobs, name)]
        assert joined == getattr(choice.logprobs, name)


def token_of(folder: Path, word: str) -> int:
    told = json.loads((folder / "tokenizer.json").read_text())
    added = {each["content"]: each["id"] for each in told["added_tokens"]}
    return int({**told["model"]["vocab"], **added}[word])


def joined_bytes(tokens: Any) -> str:
    return b"".join(bytes(each.bytes) for each in tokens).decode("utf-8", "replace")


# -- OpenAI's client


def test_log_probabilities_of_completions(client: Any) -> None:
    asked = {**ASKED, "prompt": "the sun", "logprobs": 2, "max_tokens": 20}
    [choice] = client.completions.create(**asked).choices
    told = choice.logprobs
    assert len(told.tokens) == len(told.token_logprobs) == len(told.top_logprobs)
    assert all(value <= 0 for value in told.token_logprobs)
    for token, value, top in zip(told.tokens, told.token_logprobs, told.top_logprobs, strict=True):
        assert top[token] == value
        assert 2 <= len(top) <= 3, "the chosen token is there, even if it is none of the likeliest"
    for token, at in zip(told.tokens, told.text_offset, strict=True):
        if not token.startswith("bytes:"):
            assert choice.text[at:].startswith(token)
    names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    same_in_parts(client, asked, choice, *names)
    [chosen] = client.completions.create(**asked | {"logprobs": 0}).choices
    assert chosen.logprobs.token_logprobs == told.token_logprobs
    assert all(len(top) == 1 for top in chosen.logprobs.top_logprobs)


def test_log_probabilities_of_chats(client: Any) -> None:
    create = client.chat.completions.create
    asked = {**ASKED, "messages": CHAT, "logprobs": True, "top_logprobs": 3, "n": 2}
    whole = create(**asked)
    for choice in whole.choices:
        assert joined_bytes(choice.logprobs.content) == choice.message.content
        assert all(len(each.top_logprobs) == 3 for each in choice.logprobs.content)
    streamed: list[list[Any]] = [[], []]
    for chunk in create(**asked, stream=True):
        [choice] = chunk.choices
        if choice.logprobs:
            streamed[choice.index] += choice.logprobs.content
    assert streamed == [choice.logprobs.content for choice in whole.choices]
    [plain] = create(**{**asked, "n": 1, "top_logprobs": None}).choices
    assert not any(each.top_logprobs for each in plain.logprobs.content)
    assert create(**ASKED, messages=CHAT).choices[0].logprobs is None


@pytest.mark.parametrize(
    ("wanted", "pattern"),
    [
        ({"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "strict": True}},
         r'\{"name":"(ada|grace)"\}'),
        ({"type": "json", "value": SCHEMA}, r'\{"name":"(ada|grace)"\}'),
        ({"type": "regex", "value": "[0-9]{3}-(yes|no)"}, "[0-9]{3}-(yes|no)"),
        ({"type": "json_object"}, r"\{\".*"),
        ({"type": "json", "value": {**SCHEMA, "x-guidance": {"whitespace_flexible": True}}},
         r"\{ .*"),
        ({"type": "text"}, ".*"),
    ],
)  # fmt: skip
def test_answer_has_the_form_asked_for(
    client: Any, folder: Path, wanted: dict[str, Any], pattern: str
) -> None:
    """Of a model that likes spaces: JSON has them only in its texts, or if the schema allows it."""
    asked = {**ASKED, "max_tokens": 40, "logit_bias": {str(token_of(folder, "\u0120")): 100}}
    more = {"response_format": wanted}
    [choice] = client.chat.completions.create(**asked, messages=CHAT, extra_body=more).choices
    assert re.fullmatch(pattern, choice.message.content, re.DOTALL)
    [choice] = client.completions.create(**asked, prompt="a", extra_body=more).choices
    assert re.fullmatch(pattern, choice.text, re.DOTALL)
    same_in_parts(client, {**asked, "prompt": "a", "extra_body": more}, choice)


def test_penalties_and_biases(client: Any, folder: Path) -> None:
    asked: dict[str, Any] = {"model": "any", "prompt": "a", "max_tokens": 60, "temperature": 0}

    def text_of(**more: Any) -> str:
        text: str = client.completions.create(**{**asked, **more}).choices[0].text
        return text

    usual = text_of()
    assert text_of(presence_penalty=0, frequency_penalty=0) == usual
    assert text_of(presence_penalty=2) != usual
    assert text_of(frequency_penalty=2) != usual
    assert text_of(extra_body={"repetition_penalty": 1.5}) != usual
    assert text_of(max_tokens=5, logit_bias={str(token_of(folder, "d")): 100}) == "ddddd"
    assert client.completions.create(
        **{**asked, "temperature": 1}, extra_body={"top_k": 1}
    ).choices[0].text == usual  # fmt: skip


@pytest.mark.parametrize(
    ("word", "more", "made", "reason"),
    [
        ("</s>", {}, 1, "stop"),
        ("</s>", {"ignore_eos": False, "min_tokens": 0}, 1, "stop"),
        ("</s>", {"ignore_eos": True}, 6, "length"),
        ("</s>", {"min_tokens": 3}, 4, "stop"),
        ("</s>", {"min_tokens": 6, "ignore_eos": True}, 6, "length"),
        ("d", {"stop": "d", "ignore_eos": True}, 1, "stop"),
        ("d", {"stop": "d", "min_tokens": 3}, 4, "stop"),
    ],
)
def test_load_tools_choose_the_number_of_tokens(
    client: Any, folder: Path, word: str, more: dict[str, Any], made: int, reason: str
) -> None:
    """Of a model that always likes one token best. The fields mean what they mean to vLLM."""
    bias = {str(token_of(folder, word)): 100}
    asked = {"model": "any", "max_tokens": 6, "logit_bias": bias, "extra_body": more}
    chat = client.chat.completions.create(**asked, messages=CHAT)
    asked |= {"max_tokens": 9, "extra_body": {**more, "max_completion_tokens": 6}}
    whole = client.completions.create(**asked, prompt="a", temperature=0)
    for answer in (chat, whole):
        assert (answer.usage.completion_tokens, answer.choices[0].finish_reason) == (made, reason)
    if word == "d":
        assert whole.choices[0].text == "d" * (made - 1)
    options = {"include_usage": True, "continuous_usage_stats": True}
    stream = {"temperature": 0, "stream": True, "stream_options": options}
    *chunks, last = client.completions.create(**asked, prompt="a", **stream)
    assert last.usage == chunks[-1].usage == whole.usage
    assert {chunk.usage.prompt_tokens for chunk in chunks} == {whole.usage.prompt_tokens}


def test_best_of_gives_the_likeliest_texts(client: Any) -> None:
    asked = {**ASKED, "prompt": "the sun", "logprobs": 0, "temperature": 2.0}
    made = client.completions.create(**asked, n=4)
    best = client.completions.create(**asked, n=2, best_of=4)

    def mean(choice: Any) -> float:
        values = choice.logprobs.token_logprobs
        return sum(values) / max(1, len(values))

    ordered = sorted(made.choices, key=mean, reverse=True)
    assert [choice.text for choice in best.choices] == [choice.text for choice in ordered[:2]]
    assert best.usage == made.usage, "all of them were generated"
    for more, param in (
        ({"n": 3, "best_of": 2}, "best_of"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"best_of": 2, "temperature": 0}, "best_of"),
        ({"best_of": 17}, "best_of"),
        ({"suffix": "x"}, "suffix"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a", ""]}, "prompt"),
        ({"prompt": ["", ""], "stream": True}, "prompt"),
        ({"max_tokens": 0}, "max_tokens"),
    ):
        assert refused(client.completions.create, **{**asked, **more}).param == param


def test_chats(client: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    said = [
        *CHAT, {"role": "assistant", "content": ""},  # it may have had nothing to say
        {"role": "user", "content": [{"type": "text", "text": each} for each in ("th", "e")]},
    ]  # fmt: skip
    asked: Any = {**ASKED, "temperature": 0, "messages": said}
    whole = client.chat.completions.create(**asked)
    assert whole.object == "chat.completion"
    [choice] = whole.choices
    assert choice.message.role == "assistant"
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    more: Any = {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = client.chat.completions.create(**asked, **more)
    parts = [chunk.choices[0].delta.content or "" for chunk in chunks]
    assert "".join(parts) == choice.message.content
    assert chunks[-1].choices[0].finish_reason == choice.finish_reason
    assert (last.choices, last.usage) == ([], whole.usage)
    answer = {
        **choice.message.model_dump(),
        "annotations": [],
        "audio": {"id": "a"},
        "tool_calls": [],
    }
    answer |= {"refusal": "no", "reasoning_content": None, "reasoning": "because"}
    for _ in range(2):
        again = client.chat.completions.create(**asked | {"messages": [*said, answer, *CHAT]})
        assert again.choices
    said_once = [each for each in caplog.messages if "'reasoning'" in each]
    assert len(said_once) == 1


CALLS = [
    {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    for arguments in ('{"a": [1]}', "{", "")
]
TOOL_CHAT: Any = [
    *CHAT, {"role": "assistant", "content": None, "tool_calls": CALLS},
    {"role": "tool", "content": "b", "tool_call_id": "1"},
]  # fmt: skip
TOOL_TEMPLATE = (
    "{% for each in messages %}{{ each.role + each.content + (each.tool_call_id or '') }}"
    "{% for call in each.tool_calls %}{{ call.function | tojson }}{% endfor %}{% endfor %}"
)


def test_a_history_with_calls_of_tools_goes_to_the_template(folder: Path, tmp_path: Path) -> None:
    own = shutil.copytree(folder, tmp_path / "tools")
    (own / "chat_template.jinja").write_text(TOOL_TEMPLATE)
    functions = [{"name": "f", "arguments": each} for each in ({"a": [1]}, "{", {})]
    prompt = f"useraassistant{''.join(map(json.dumps, functions))}toolb1"
    asked = {"max_tokens": 8, "temperature": 0}
    with ServingHere(str(own), kind=SteppedPipeline) as service:
        chat = service.post("/v1/chat/completions", {**asked, "messages": TOOL_CHAT}).json()
        text = service.post("/v1/completions", {**asked, "prompt": prompt}).json()
    assert chat["choices"][0]["message"]["content"] == text["choices"][0]["text"]
    assert chat["usage"] == text["usage"]


def test_fields_without_effect(client: Any) -> None:
    more = {
        "store": False, "service_tier": "auto", "parallel_tool_calls": True, "tools": [],
        "tool_choice": "none", "modalities": ["text"], "user": "me", "logit_bias": {},
        "safety_identifier": "me", "prompt_cache_key": "mine", "prompt_cache_retention": "24h",
        "response_format": None,
    }  # fmt: skip
    assert client.chat.completions.create(**ASKED, messages=CHAT, extra_body=more).choices
    nothing = {
        "metadata": {"a": "b"}, "stream": False, "logprobs": None, "suffix": "", "best_of": 1,
        "presence_penalty": 0, "frequency_penalty": 0, "logit_bias": {}, "stop": None,
    }  # fmt: skip
    assert client.completions.create(**ASKED, prompt="a", user="me", extra_body=nothing).choices


@pytest.mark.parametrize(
    ("more", "param", "says"),
    [
        ({"tools": [{"type": "function"}]}, "tools", "models have no tools"),
        ({"tool_choice": "required"}, "tool_choice", "models have no tools"),
        ({"functions": [{"name": "a"}]}, "functions", "models have no tools"),
        ({"modalities": ["text", "audio"]}, "modalities", "is not supported"),
        ({"logit_bias": {"1": 101}}, "logit_bias", "from -100 to 100"),
        ({"logit_bias": {"a": 1}}, "logit_bias", "the number of a token"),
        ({"logit_bias": {"-1": 1}}, "logit_bias", "the number of a token"),
        ({"logit_bias": {"999999": 1}}, "logit_bias", "the model has no token 999999"),
        ({"logit_bias": {str(at): 1 for at in range(301)}}, "logit_bias", "at most 300"),
        ({"store": True}, "store", "is not supported"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "is not supported"),
        ({"messages": []}, "messages", ""),
        ({"messages": [{"role": "", "content": "a"}]}, "messages[0].role", ""),
        ({"messages": [{"role": "system", "content": "a"}]}, "messages", ""),
        ({"messages": TOOL_CHAT}, "messages[1].tool_calls", "chat template"),
        ({"messages": [*CHAT, TOOL_CHAT[-1]]}, "messages[1].role", "no role tool"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content", ""),
        ({"messages": [{"role": "user", "contents": "a"}]}, "messages[0].contents", "unknown"),
        ({"max_tokens": 1000}, "max_tokens", ""),
        ({"n": 2, "temperature": 0}, "n", "set a temperature above 0 to sample"),
        ({"top_logprobs": 2}, "top_logprobs", "set logprobs to true"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs", ">= 0"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "<= 20"),
        ({"frequency_penalty": 2.5}, "frequency_penalty", "<= 2"),
        ({"presence_penalty": -3}, "presence_penalty", ">= -2"),
        ({"n": 10**9}, "n", "<= 16"),
        ({"n": -1}, "n", ">= 1"),
        ({"stream": "yes"}, "stream", "bool"),
        ({"ignore_eos": "yes"}, "ignore_eos", "bool"),
        ({"min_tokens": -1}, "min_tokens", ">= 0"),
        ({"min_tokens": 9}, "min_tokens", "at most 8"),
        ({"stream_options": {"continuous_usage_stats": 1}}, "stream_options.continuous_usage_stats",
         "bool"),
        ({"stop": ["x"] * 5000}, "stop", "length <= 4"),
        ({"stop": ["x", ""]}, "stop[1]", "length >= 1"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "must be one of"),
        ({"response_format": {"type": ["json_object"]}}, "response_format.type", "must be one of"),
        ({"response_format": {"type": "json_schema"}}, "response_format.value", "JSON schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
         "response_format.json_schema.schema", "JSON schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "odd"}}}},
         "response_format", "odd"),
        ({"response_format": {"type": "regex", "value": "(a"}}, "response_format", "unclosed"),
        ({"response_format": {"type": "regex", "value": "(?=a)"}}, "response_format", "look-ahead"),
        ({"response_format": {"type": "json_object", "a": 1}}, "response_format", "unknown field"),
    ],
)  # fmt: skip
def test_wrong_chat_is_refused(client: Any, more: dict[str, Any], param: str, says: str) -> None:
    error = refused(client.chat.completions.create, **ASKED, messages=CHAT, extra_body=more)
    assert error.param == param
    assert says in error.message


@pytest.mark.parametrize(
    ("path", "field", "advised"),
    [
        ("/v1/chat/completions", "reasoning_effort", ""),
        ("/v1/completions", "top_logprobs", ""),
        ("/v1/completions", "max_output_tokens", ""),
        ("/v1/completions", "tempreature", "temperature"),
        ("/predict", "input", "inputs"),
    ],
)
def test_only_a_misspelled_field_has_advice(
    service: ServingHere, path: str, field: str, advised: str
) -> None:
    error = service.post(path, {field: "low"}).json()["error"]
    assert (error["param"], error["code"]) == (field, "unknown_parameter")
    assert ("did you mean" in error["message"]) == bool(advised)
    assert advised in error["message"]


@pytest.mark.parametrize("depth", [300, 900, 5000, 100_000])
def test_deeply_nested_form_is_refused(service: ServingHere, depth: int) -> None:
    form = b'{"type":"json_object","value":%b1%b}' % (b'{"a":' * depth, b"}" * depth)
    body = b'{"messages":[{"role":"user","content":"a"}],"response_format":%b}' % form
    assert service.post("/v1/chat/completions", body).status_code == 400
    body = b'{"inputs":"a","parameters":{"grammar":%b}}' % form
    assert service.post("/generate", body).status_code in (400, 422)
    assert service.stats()["totals"]["restarts"] == 0


def tokens_of(service: ServingHere, text: str) -> list[int]:
    tokens: list[int] = service.post("/tokenize", {"prompt": text}).json()["tokens"]
    return tokens


def test_tokens_are_prompts(service: ServingHere, client: Any) -> None:
    texts = ["the sun \u00e9", "a moon"]
    tokens = [tokens_of(service, text) for text in texts]
    wanted = client.completions.create(**ASKED, prompt=texts, echo=True)
    made = client.completions.create(**ASKED, prompt=tokens, echo=True)
    assert [each.text for each in made.choices] == [each.text for each in wanted.choices]
    assert made.usage == wanted.usage
    alone = client.completions.create(**ASKED, prompt=tokens[0])
    assert texts[0] + alone.choices[0].text == wanted.choices[0].text
    # As for embeddings: test_hub_forms.py has the other mistakes.
    error = refused(client.completions.create, **ASKED, prompt=[[1], [-1]])
    assert "prompt[1][0]: expected int >= 0" in error.message


@pytest.mark.parametrize("kind", ["text", "tokens"])
def test_log_probabilities_of_a_prompt(service: ServingHere, client: Any, kind: str) -> None:
    """As programs that compare models ask for them: each is that of the token when it is next."""
    text = "the sun \u00e9"
    tokens = tokens_of(service, text)
    prompt: Any = text if kind == "text" else tokens
    asked = {**ASKED, "prompt": prompt, "echo": True, "logprobs": 2}
    made = client.completions.create(**asked)
    [choice] = made.choices
    told = choice.logprobs
    assert choice.text.startswith(text)
    assert (told.token_logprobs[0], told.top_logprobs[0]) == (None, None)
    assert len(told.tokens) == len(tokens) + made.usage.completion_tokens
    for at in range(1, len(tokens)):
        # The likeliest tokens after the same beginning, which the model generates one of.
        [begun] = client.completions.create(
            model="any", prompt=tokens[:at], max_tokens=1, temperature=0, logprobs=2
        ).choices
        likely = told.top_logprobs[at].copy()
        if len(likely) > 2:
            del likely[told.tokens[at]]
        [wanted] = begun.logprobs.top_logprobs or [{}]
        assert likely == pytest.approx(wanted, abs=1e-4)
    for token, at in zip(told.tokens, told.text_offset, strict=True):
        assert token.startswith("bytes:") or choice.text[at:].startswith(token)
    nothing = client.completions.create(**asked | {"max_tokens": 0, "n": 2})
    for each in nothing.choices:
        assert (each.text, each.finish_reason) == (text, "length")
        assert each.logprobs.token_logprobs == pytest.approx(
            told.token_logprobs[: len(tokens)], abs=1e-5
        )
    assert (nothing.usage.prompt_tokens, nothing.usage.completion_tokens) == (len(tokens), 0)
    same_in_parts(client, asked, choice, "tokens", "text_offset")


def test_echo_without_new_tokens(service: ServingHere, client: Any) -> None:
    texts = ["the sun", "a moon"]
    count = sum(len(tokens_of(service, text)) for text in texts)
    made = client.completions.create(model="any", prompt=texts, echo=True, max_tokens=0)
    assert [each.text for each in made.choices] == texts
    assert (made.usage.prompt_tokens, made.usage.completion_tokens) == (count, 0)
    nothing = {"model": "any", "prompt": "a", "echo": True, "max_tokens": 0}
    for name, value, param in (
        ("echo", False, "max_tokens"), ("stream", True, "max_tokens"), ("best_of", 2, "best_of"),
    ):  # fmt: skip
        error = refused(client.completions.create, **{**nothing, name: value})
        assert error.param == param
    long = {**nothing, "prompt": "a " * 300, "logprobs": 1}
    assert "prompt: the text has" in refused(client.completions.create, **long).message


def test_several_prompts_stream_side_by_side(client: Any) -> None:
    asked = {**ASKED, "prompt": ["the sun", "a moon", [5, 6]], "n": 2, "echo": True, "logprobs": 1}
    whole = client.completions.create(**asked)
    assert [choice.index for choice in whole.choices] == [*range(6)]
    assert [each.text.startswith("the sun") for each in whole.choices] == 2 * [True] + 4 * [False]
    more = {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = client.completions.create(**asked, **more)
    texts: dict[int, str] = {}
    reasons, tokens, order = {}, {}, []
    for chunk in chunks:
        [choice] = chunk.choices
        order.append(choice.index)
        texts[choice.index] = texts.get(choice.index, "") + choice.text
        if choice.finish_reason:
            reasons[choice.index] = choice.finish_reason
        if choice.logprobs:
            tokens.setdefault(choice.index, []).extend(choice.logprobs.tokens)
    assert texts == {choice.index: choice.text for choice in whole.choices}
    assert reasons == {choice.index: choice.finish_reason for choice in whole.choices}
    assert tokens == {choice.index: choice.logprobs.tokens for choice in whole.choices}
    assert order != sorted(order), "none waits for another"
    assert (last.choices, last.usage) == ([], whole.usage)


# -- Hugging Face's client


def test_details(hub: Any) -> None:
    asked: dict[str, Any] = {"max_new_tokens": 8, "temperature": 1.5, "seed": 5}
    text = hub.text_generation("the sun", **asked)
    told = hub.text_generation("the sun", **asked, details=True)
    assert told.generated_text == text
    details = told.details
    assert details.generated_tokens == len(details.tokens)
    assert (details.seed, details.prefill) == (5, [])
    assert all(each.logprob <= 0 for each in details.tokens)
    *events, last = hub.text_generation("the sun", **asked, details=True, stream=True)
    assert [each.token.id for each in (*events, last)] == [each.id for each in details.tokens]
    assert last.generated_text == text
    assert last.details.finish_reason == details.finish_reason
    whole = hub.text_generation("the sun", **asked, details=True, return_full_text=True)
    assert whole.generated_text == "the sun" + text


def test_ends_have_their_reason(hub: Any) -> None:
    asked: dict[str, Any] = {"max_new_tokens": 60, "details": True, "do_sample": False}
    text = hub.text_generation("the sun", **asked).generated_text
    cut = hub.text_generation("the sun", **asked, stop=[text[2:4]])
    assert cut.details.finish_reason == "stop_sequence"
    *_, last = hub.text_generation("the sun", **asked, stop=[text[2:4]], stream=True)
    assert last.details.finish_reason == "stop_sequence"
    assert last.generated_text == cut.generated_text == text[:2]
    asked["grammar"] = {"type": "regex", "value": "(yes|no)"}  # no end token comes after it
    assert hub.text_generation("the sun", **asked).details.finish_reason == "eos_token"
    *_, last = hub.text_generation("the sun", **asked, stream=True)
    assert last.details.finish_reason == "eos_token"


def test_grammar(hub: Any) -> None:
    asked: dict[str, Any] = {"max_new_tokens": 30, "seed": 1, "temperature": 1.5}
    for form in (
        {"type": "json", "value": SCHEMA},
        {"type": "json", "value": json.dumps(SCHEMA)},
        {"type": "json_schema", "value": {"name": "a", "schema": SCHEMA}},
    ):
        made = hub.text_generation("a", **asked, grammar=form)
        assert json.loads(made)["name"] in ("ada", "grace")
    made = hub.text_generation("a", **asked, grammar={"type": "regex", "value": "(yes|no)"})
    assert made in ("yes", "no")


@pytest.mark.parametrize("path", ["/", "/generate"])
def test_langchains_endpoint_samples_typical_tokens(service: ServingHere, path: str) -> None:
    """A share that has room for one token leaves nothing to chance."""
    usual = {"max_new_tokens": 12, "top_k": None, "truncate": None, "stop": [], "watermark": False}

    def texts(share: float) -> set[str]:
        each = [{**usual, "typical_p": share, "seed": seed} for seed in range(3)]
        answers = [service.post(path, {"inputs": "a", "parameters": every}) for every in each]
        return {answer.text for answer in answers if answer.is_success}

    assert (len(texts(1e-6)), len(texts(0.95)), len(texts(1))) == (1, 3, 3)


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"decoder_input_details": True, "details": True}, "decoder_input_details: is not supp"),
        ({"watermark": True}, "watermark: is not supported"),
        ({"typical_p": 0}, "typical_p: must be a number above 0 and at most 1"),
        ({"top_n_tokens": 2}, '"param":"parameters.top_n_tokens"'),
        ({"details": "yes"}, "details: must be true or false"),
        ({"best_of": 2}, '"param":"parameters.best_of"'),
        ({"grammar": {"type": "regex", "value": "(a"}}, "parameters.grammar: "),
        ({"grammar": "json"}, "parameters.grammar.type: must be one of"),
    ],
)
def test_wrong_parameter_of_hugging_faces_client_is_refused(
    hub: Any, more: dict[str, Any], says: str
) -> None:
    from huggingface_hub.errors import HfHubHTTPError

    with pytest.raises(HfHubHTTPError) as caught:
        [*hub.text_generation("the sun", max_new_tokens=3, **more)]
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ({"stop_sequences": ["a"]}, {"stop": ["b"]}),
        ({"grammar": {"type": "regex", "value": "a"}}, {"json_schema": {"type": "object"}}),
        ({"grammar": {"type": "json_object"}}, {"regex": "a"}),
    ],
)
def test_two_names_of_the_same_are_refused_together(
    service: ServingHere, theirs: dict[str, Any], ours: dict[str, Any]
) -> None:
    answer = service.post("/generate", {"text": "a", "parameters": {**theirs, **ours}})
    [name], [other] = theirs, ours
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (422, f"parameters.{name}")
    assert f"is sent with {other}; leave one of them out" in error["message"]


# -- /generate, and /predict with chats


def test_generate_in_the_form_of_text_generation_inference(service: ServingHere) -> None:
    parameters = {"max_new_tokens": 4, "do_sample": False}
    ours = service.post("/generate", {"text": "the sun", "parameters": parameters}).json()
    theirs = service.post("/generate", {"inputs": "the sun", "parameters": parameters}).json()
    assert ours.keys() == {"text"}
    assert theirs.keys() == {"generated_text"}
    assert "the sun" + theirs["generated_text"] == ours["text"]
    parameters |= {"details": True, "logprobs": 2}
    told = service.post("/generate", {"inputs": "the sun", "parameters": parameters}).json()
    assert told["generated_text"] == theirs["generated_text"]
    details = told["details"]
    assert details["tokens"][0]["id"] == details["top_tokens"][0][0]["id"]
    assert [len(each) for each in details["top_tokens"]] == [2] * details["generated_tokens"]
    body = {"inputs": "the sun", "parameters": {"max_new_tokens": 2, "return_full_text": True}}
    assert service.post("/generate", body).json()["generated_text"].startswith("the sun")
    for wrong, param in (
        ({}, "text"),
        ({"text": None}, "text"),
        ({"text": "a", "inputs": "b"}, "inputs"),
        ({"inputs": ""}, "inputs"),
        ({"text": "a", "parameters": {"logprobs": None, "best_of": 2}}, "parameters.best_of"),
    ):
        told = service.post("/generate", wrong)
        assert told.status_code == 422
        assert told.json()["error"]["param"] == param
    assert service.post("/generate", {"text": "a", "parameters": {"logprobs": None}}).json()["text"]


@pytest.mark.parametrize("path", ["/predict", "/"])
def test_chats_are_inputs(service: ServingHere, path: str) -> None:
    parameters = {"max_new_tokens": 4, "do_sample": False, "return_full_text": False}

    def ask(inputs: Any, **more: Any) -> Any:
        return service.post(path, {"inputs": inputs, "parameters": parameters, **more})

    [one] = ask(CHAT).json()
    whole = service.post(
        "/v1/chat/completions", {"messages": CHAT, "max_tokens": 4, "temperature": 0}
    )
    assert one["generated_text"] == whole.json()["choices"][0]["message"]["content"]
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}]}]
    assert ask([CHAT, "a", parts]).json() == [[one], ask("a").json(), [one]]
    pieces = [
        json.loads(line.removeprefix("data: "))
        for line in ask(CHAT, stream=True).text.splitlines()
        if line.startswith("data: {")
    ]
    texts = [each.get("output", each.get("token"))["text"] for each in pieces]
    assert "".join(texts) == one["generated_text"]


@pytest.mark.parametrize(
    ("inputs", "param"),
    [
        ([{"role": "user", "content": "a"}, "b"], "inputs[0]"),
        (["b", {"role": "user", "content": "a"}], "inputs[1]"),
        ([{"role": "user"}], "inputs[0].content"),
        ([{"role": "user", "content": "a", "image": "b"}], "inputs[0].image"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": "a"}]}],
         "inputs[0].content[0].type"),
        ({"role": "user", "content": "a"}, "inputs"),
        ([[]], "inputs"),
        ([[["a"]]], "inputs[0][0]"),
        (5, "inputs"),
        (None, "inputs"),
    ],
)  # fmt: skip
def test_input_that_is_no_text_is_refused(service: ServingHere, inputs: Any, param: str) -> None:
    told = service.post("/predict", {"inputs": inputs})
    assert told.status_code == 422, told.text
    assert told.json()["error"]["param"] == param
    assert param in told.json()["error"]["message"]
