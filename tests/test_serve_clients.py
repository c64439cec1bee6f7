"""``serve`` as other people's programs see it: OpenAI's client, a fuzzer that reads the schema."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import openai
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

import tiny_models
from cases import long_cases
from serve_process import Client, Serving
from served_here import ServingHere
from service_streamer.pipelines import SteppedPipeline

pytestmark = pytest.mark.xdist_group("serve-clients")

SHIPPED = Path(__file__).parent.parent / "service_streamer" / "models" / "text_infilling"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def generating(folder: Path) -> Iterator[Client]:
    model = str(tiny_models.build("gpt2", folder / "gpt2"))
    with ServingHere(model, kind=SteppedPipeline) as service:
        yield service


@pytest.fixture(scope="module")
def chatting(folder: Path) -> Iterator[Client]:
    model = str(tiny_models.build("chat", folder / "chat"))
    with ServingHere(model, kind=SteppedPipeline) as service:
        yield service


@pytest.fixture(scope="module")
def embedding() -> Iterator[Client]:
    """The body of the model that comes with the package, without its head."""
    arguments = (str(SHIPPED), "--task", "feature-extraction", "--api-key", "secret")
    with ServingHere(*arguments) as service:
        yield service


@pytest.fixture
def completions(generating: Client) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{generating.url}/v1", api_key="any") as client:
        yield client.completions


@pytest.fixture
def embeddings(embedding: Client) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{embedding.url}/v1", api_key="secret") as client:
        yield client.embeddings


# -- OpenAI's client


def test_completions(completions: Any) -> None:
    made = completions.create(model="any", prompt="the sun", max_tokens=4, temperature=0)
    [choice] = made.choices
    assert made.object == "text_completion"
    assert choice.finish_reason in ("length", "stop")
    assert made.usage.completion_tokens <= 4
    assert made.usage.total_tokens == made.usage.prompt_tokens + made.usage.completion_tokens
    again = completions.create(model="any", prompt="the sun", max_tokens=4, temperature=0)
    assert again.choices[0].text == choice.text


def test_completions_of_several_prompts_have_several_answers_each(completions: Any) -> None:
    made = completions.create(
        model="any", prompt=["the sun", "a moon"], n=2, max_tokens=3, seed=1, echo=True
    )
    assert [choice.index for choice in made.choices] == [0, 1, 2, 3]
    assert all(choice.text.startswith("the sun") for choice in made.choices[:2])
    assert all(choice.text.startswith("a moon") for choice in made.choices[2:])
    again = completions.create(
        model="any", prompt=["the sun", "a moon"], n=2, max_tokens=3, seed=1, echo=True
    )
    assert [choice.text for choice in again.choices] == [choice.text for choice in made.choices]


CHAT = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "b"},
    {"role": "user", "content": [{"type": "text", "text": "th"}, {"type": "text", "text": "e"}]},
]


def test_chats(chatting: Client) -> None:
    with openai.OpenAI(base_url=f"{chatting.url}/v1", api_key="any") as client:
        create: Any = client.chat.completions.create
        asked: Any = {"model": "any", "messages": CHAT, "max_tokens": 5, "temperature": 0}
        whole = create(**asked)
        assert whole.object == "chat.completion"
        [choice] = whole.choices
        assert choice.message.role == "assistant"
        assert whole.usage.completion_tokens <= 5
        first, *chunks, last = create(**asked, stream=True, stream_options={"include_usage": True})
        assert first.choices[0].delta.role == "assistant"
        said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        assert said == choice.message.content
        assert chunks[-1].choices[0].finish_reason == choice.finish_reason
        assert (last.choices, last.usage) == ([], whole.usage)
        again = [*CHAT, choice.message.model_dump(), {"role": "user", "content": "a"}]
        assert create(**asked | {"messages": again}).choices
        for what, param in (
            ({"messages": []}, "messages"),
            ({"messages": [{"role": "system", "content": "a"}]}, "messages"),
            ({"tools": [{"type": "function"}]}, "tools"),
            ({"max_tokens": 1000}, "max_tokens"),
        ):
            with pytest.raises(openai.BadRequestError) as caught:
                create(**asked | what)
            assert caught.value.param == param


def test_hugging_faces_client_chats(chatting: Client) -> None:
    client = huggingface_hub.InferenceClient(model=chatting.url)
    asked: Any = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3, "temperature": 0}
    whole = client.chat_completion(**asked).choices[0].message.content
    parts = client.chat_completion(**asked, stream=True)
    assert "".join(each.choices[0].delta.content or "" for each in parts) == whole
    huggingface_hub.close_session()


def test_chat_is_refused_by_a_model_without_a_template(generating: Client) -> None:
    body = {"messages": [{"role": "user", "content": "a"}]}
    told = generating.post("/v1/chat/completions", body)
    assert told.status_code == 400
    assert "does not support chats" in told.json()["error"]["message"]


@pytest.mark.parametrize(
    "what",
    [
        {"stream_options": {"include_usage": True}},
        {"suffix": "x"},
    ],
)
def test_unsupported_field_is_refused_and_not_ignored(
    completions: Any, what: dict[str, Any]
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        completions.create(model="any", prompt="a", **what)
    assert caught.value.param == next(iter(what))
    assert caught.value.code == "unsupported_parameter"
    assert "is not supported" in caught.value.message


def test_bad_prompts_are_named(completions: Any) -> None:
    for prompt in ("", [], ["a", ""]):
        with pytest.raises(openai.BadRequestError, match="prompt"):
            completions.create(model="any", prompt=prompt)
    with pytest.raises(openai.BadRequestError, match="max_tokens"):
        completions.create(model="any", prompt="a", max_tokens=0)


def test_advice_fits_what_is_asked(completions: Any) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        completions.create(model="any", prompt="a", n=2, temperature=0)
    assert caught.value.param == "n"
    assert caught.value.message.endswith("set a temperature above 0 to sample")


def test_field_without_effect_is_accepted(completions: Any, embeddings: Any) -> None:
    more = {"metadata": {"a": "b"}}
    nothing = {
        "stream": False, "logprobs": None, "suffix": "", "presence_penalty": 0,
        "frequency_penalty": 0, "logit_bias": {}, "best_of": 1, "stop": None, "seed": None,
    }  # fmt: skip
    assert completions.create(
        model="any", prompt="the sun", max_tokens=1, user="me", extra_body=more | nothing
    ).choices
    assert embeddings.create(model="any", input="a", user="me", extra_body=more).data


def test_embeddings(embeddings: Any) -> None:
    made = embeddings.create(model="any", input=["happy birthday", "twinkle little star"])
    assert [each.index for each in made.data] == [0, 1]
    assert all(math.isclose(math.hypot(*each.embedding), 1, rel_tol=1e-5) for each in made.data)
    assert made.usage.prompt_tokens == made.usage.total_tokens > 0
    plain = embeddings.create(model="any", input="happy birthday", encoding_format="float")
    assert plain.data[0].embedding == pytest.approx(made.data[0].embedding, abs=1e-6)
    short = embeddings.create(model="any", input="happy birthday", dimensions=8)
    assert len(short.data[0].embedding) == 8
    assert math.isclose(math.hypot(*short.data[0].embedding), 1, rel_tol=1e-5)


def test_embeddings_of_tokens(embedding: Client, embeddings: Any) -> None:
    asked = {"inputs": ["happy birthday", "twinkle little star"]}
    told = embedding.post("/tokenize", asked, authorization="Bearer secret").json()
    tokens = [[token["id"] for token in each] for each in told]
    wanted = embeddings.create(model="any", input=asked["inputs"])
    made = embeddings.create(model="any", input=tokens)
    for one, other in zip(made.data, wanted.data, strict=True):
        assert one.embedding == pytest.approx(other.embedding, abs=1e-5)
    assert made.usage == wanted.usage
    [alone] = embeddings.create(model="any", input=tokens[0]).data
    assert alone.embedding == pytest.approx(made.data[0].embedding, abs=1e-5)
    for wrong, says in (
        ([10**6], "input: 1000000 is not a token of the model"),
        ([1, "a"], r"input\[0\]: is a token among texts"),
        ([[1], []], r"input\[1\]: is empty; send at least one token"),
        ([1.5], r"input\[0\]: expected"),
        ([[1] * 1000], "input: the text has 1000 tokens"),
    ):
        with pytest.raises(openai.BadRequestError, match=says):
            embeddings.create(model="any", input=wrong)
    more = {"truncation": True}
    cut = embeddings.create(model="any", input=[[5] * 1000], extra_body=more)
    assert cut.usage.prompt_tokens < 600


def test_bad_inputs_of_embeddings_are_named(embeddings: Any) -> None:
    for wrong in ("", [], ["a", ""]):
        with pytest.raises(openai.BadRequestError, match="input"):
            embeddings.create(model="any", input=wrong)
    with pytest.raises(openai.BadRequestError, match="dimensions"):
        embeddings.create(model="any", input="a", dimensions=100_000)


def test_long_text_is_cut_when_truncation_is_asked_for(embeddings: Any) -> None:
    text = "happy birthday " * 500
    with pytest.raises(openai.BadRequestError, match="set the parameter truncation"):
        embeddings.create(model="any", input=text)
    cut = embeddings.create(model="any", input=text, extra_body={"truncation": True})
    assert cut.usage.prompt_tokens < 600


def test_openais_client_needs_the_right_key(embedding: Client) -> None:
    with (
        openai.OpenAI(base_url=f"{embedding.url}/v1", api_key="wrong") as client,
        pytest.raises(openai.AuthenticationError),
    ):
        client.embeddings.create(model="any", input="a")


# -- a fuzzer


@pytest.fixture(
    scope="module",
    params=[
        "custom",
        *long_cases("fill-mask", "text-generation", "feature-extraction", "reranking"),
        *long_cases("image-classification"),
    ],
)
def fuzzed(request: pytest.FixtureRequest, folder: Path) -> Iterator[tuple[Client, Any]]:
    """A service of each kind, and the headers that it needs."""
    if request.param == "text-generation":
        yield request.getfixturevalue("generating"), {}
        return
    if request.param == "feature-extraction":
        yield request.getfixturevalue("embedding"), {"authorization": "Bearer secret"}
        return
    model: tuple[str, ...] = ()
    if request.param == "image-classification":
        model = (str(tiny_models.build("pictures", folder / "pictures")),)
    elif request.param == "reranking":
        model = (str(tiny_models.build("cross_encoder", folder / "cross_encoder")),)
    elif request.param == "custom":
        model = ("served_models:kinds",)
    with Serving(*model) as service:
        yield service, {}


def test_service_survives_requests_that_the_schema_allows_or_not(
    fuzzed: tuple[Client, Any],
) -> None:
    fuzz(*fuzzed)


def fuzz(service: Client, headers: dict[str, str], **only: str) -> None:
    """Send what the document allows, and what it does not, to all paths or ``only`` some."""
    document = service.client.get("/openapi.json").json()
    schema = schemathesis.openapi.from_dict(document)
    schema.config.update(base_url=service.url)
    schema = schema.include(**only) if only else schema
    for result in schema.exclude(path="/events").get_all_operations():
        operation = result.ok()
        _attack(service, operation, headers)


def no_500(context: Any, response: Any, case: Any) -> None:
    """503 and 504 are honest: who gives it no time gets no result."""
    assert response.status_code != 500, response.text


#: Of each operation. More are for a night, or for a release.
CASES = int(os.environ.get("TEST_FUZZ_CASES", "15"))


def _attack(service: Client, operation: Any, headers: dict[str, str]) -> None:
    checks = [
        no_500,
        status_code_conformance,
        content_type_conformance,
        response_schema_conformance,
    ]

    @settings(
        max_examples=CASES,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=[*HealthCheck],
    )
    def attack(case: Any) -> None:
        response = case.call(headers=headers)
        case.validate_response(response, checks=checks)

    given(case=operation.as_strategy())(attack)()
