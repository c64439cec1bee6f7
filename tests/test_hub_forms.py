"""The forms of text-embeddings-inference, of rerankers and of tokenizers, over HTTP."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from http_in_process import StubClient, StubStreamer, in_event_loop, post, serving
from pipeline_cases import item
from pipeline_cases import served as model_of
from serve_process import Client
from served_here import served

pytestmark = pytest.mark.xdist_group("transformers")

LONG = "the king " * 60


features, ranker, classifier = map(served, ("features", "cross_encoder", "classifier"))


def asked(service: Client, path: str, **body: Any) -> Any:
    response = service.post(path, body)
    assert response.status_code == 200, response.text
    return response.json()


def refused(service: Client, path: str, status: int, **body: Any) -> tuple[str | None, str]:
    """The field and the message of a refusal."""
    response = service.post(path, body)
    assert response.status_code == status, response.text
    error = response.json()["error"]
    return error["param"], error["message"]


def test_embed(features: Client) -> None:
    [one] = asked(features, "/embed", inputs="the king")
    assert math.isclose(math.hypot(*one), 1, rel_tol=1e-5)
    openais = asked(features, "/v1/embeddings", input="the king")
    assert one == openais["data"][0]["embedding"]
    several = asked(features, "/embed", inputs=["the king", "a tree"])
    assert several[0] == pytest.approx(one, abs=1e-5)
    [raw] = asked(features, "/embed", inputs="the king", normalize=False)
    norm = math.hypot(*raw)
    assert not math.isclose(norm, 1, rel_tol=1e-2)
    assert [each / norm for each in raw] == pytest.approx(one, abs=1e-5)
    [short] = asked(features, "/embed", inputs="the king", dimensions=4)
    assert short == pytest.approx([each / math.hypot(*one[:4]) for each in one[:4]], abs=1e-5)
    [cut] = asked(features, "/embed", inputs="the king", dimensions=4, normalize=False)
    assert cut == pytest.approx(raw[:4], abs=1e-5)


def test_features_are_the_numbers_of_the_model(features: Client) -> None:
    """The service asks for arrays of them; programs that do not get lists."""
    texts = ["the king", "a tree by the river"]
    found = model_of("features").predict([item(each, "embed_all") for each in texts])
    assert type(found[0][0][0][0]) is float
    arrays = model_of("features").predict([{**item(texts[0], "embed_all"), "arrays": True}])
    assert [[row.tolist() for row in rows] for rows in arrays] == found[:1]
    one_by_one = [asked(features, "/predict", inputs=each) for each in texts]
    assert one_by_one == found
    assert asked(features, "/", inputs=texts[0]) == found[0]
    assert asked(features, "/embed_all", inputs=texts[0]) == [found[0][0]]


def test_truncation(features: Client) -> None:
    text = "the tree " * 20 + "the king " * 20
    param, message = refused(features, "/embed", 422, inputs=text)
    assert (param, "truncate" in message) == ("inputs", True)
    sides = {
        side: asked(features, "/embed", inputs=text, truncate=True, truncation_direction=side)
        for side in ("Left", "left", "Right", "right")
    }
    assert sides["Left"] == sides["left"]
    assert sides["Right"] == sides["right"] == asked(features, "/embed", inputs=text, truncate=True)
    [king] = asked(features, "/embed", inputs="the king " * 15)
    [tree] = asked(features, "/embed", inputs="the tree " * 15)
    assert sides["left"][0] == pytest.approx(king, abs=1e-5)
    assert sides["right"][0] == pytest.approx(tree, abs=1e-5)
    ids = list(range(5, 45))
    for side, part in (("left", ids[-32:]), ("right", ids[:32])):
        [found] = asked(features, "/embed", inputs=ids, truncate=True, truncation_direction=side)
        assert found == pytest.approx(asked(features, "/embed", inputs=part)[0], abs=1e-6)


def test_embed_all(features: Client) -> None:
    states = asked(features, "/embed_all", inputs=["the king", "a"])
    assert [len(each) for each in states] == [4, 3]
    assert states[0] == asked(features, "/predict", inputs="the king")[0]
    [cut] = asked(features, "/embed_all", inputs=LONG, truncate=True)
    assert len(cut) == 32


def test_sentences_are_compared(features: Client) -> None:
    inputs = {"source_sentence": "the king", "sentences": ["the king", "a tree"]}
    found = asked(features, "/", inputs=inputs)
    one, other = asked(features, "/embed", inputs=["the king", "a tree"])
    cosine = sum(left * right for left, right in zip(one, other, strict=True))
    assert found == pytest.approx([1, cosine], abs=1e-5)
    inputs["sentences"].append(LONG)
    assert refused(features, "/", 422, inputs=inputs)[0] == "inputs"
    assert len(asked(features, "/", inputs=inputs, truncate=True)) == 3


@pytest.fixture(params=["", "/v1"])
def embeddings(features: Client, request: pytest.FixtureRequest) -> Iterator[Any]:
    import openai

    url = features.url + request.param
    with openai.OpenAI(base_url=url, api_key="any", max_retries=0) as client:
        yield client.embeddings


def test_embeddings_of_texts_and_tokens(features: Client, embeddings: Any) -> None:
    texts = ["the king", "a tree"]
    made = embeddings.create(model="any", input=texts, user="me", extra_body={"metadata": {}})
    assert [each.index for each in made.data] == [0, 1]
    assert all(math.isclose(math.hypot(*each.embedding), 1, rel_tol=1e-5) for each in made.data)
    assert made.usage.prompt_tokens == made.usage.total_tokens > 0
    plain = embeddings.create(model="any", input=texts[0], encoding_format="float", dimensions=4)
    assert math.isclose(math.hypot(*plain.data[0].embedding), 1, rel_tol=1e-5)
    assert len(plain.data[0].embedding) == 4
    told = asked(features, "/tokenize", inputs=texts)
    tokens = [[token["id"] for token in each] for each in told]
    same = embeddings.create(model="any", input=tokens)
    assert same.usage == made.usage
    [alone] = embeddings.create(model="any", input=tokens[0]).data
    for one, other in ((alone, made.data[0]), *zip(same.data, made.data, strict=True)):
        assert one.embedding == pytest.approx(other.embedding, abs=1e-5)
    for long in (LONG, [[5] * 1000]):
        cut = embeddings.create(model="any", input=long, extra_body={"truncation": True})
        assert cut.usage.prompt_tokens == 32


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ("", "input"),
        (["a", ""], "input"),
        (LONG, "set the parameter truncation"),
        ([10**6], "input: 1000000 is not a token of the model"),
        ([1, "a"], r"input\[0\]: is a token among texts"),
        ([[1], []], r"input\[1\]: is empty; send at least one token"),
        ([1.5], r"input\[0\]: expected"),
        ([[1] * 1000], "input: the text has 1000 tokens"),
    ],
)
def test_bad_inputs_of_embeddings_are_named(embeddings: Any, wrong: Any, says: str) -> None:
    import openai

    with pytest.raises(openai.BadRequestError, match=says):
        embeddings.create(model="any", input=wrong)
    with pytest.raises(openai.BadRequestError, match="dimensions"):
        embeddings.create(model="any", input="a", dimensions=100_000)


@pytest.mark.parametrize(
    ("path", "body", "param", "word"),
    [
        ("/embed", {}, "inputs", "missing"),
        ("/embed", {"inputs": ""}, "inputs", "empty"),
        ("/embed", {"inputs": []}, "inputs", "empty"),
        ("/embed", {"inputs": ["a", 1]}, "inputs[1]", "token"),
        ("/embed", {"inputs": ["a", []]}, "inputs[1]", "empty"),
        ("/embed", {"inputs": [1, [2]]}, "inputs[0]", "token"),
        ("/embed", {"inputs": [10**400]}, "inputs[0]", "2147483647"),
        ("/embed", {"inputs": "a", "dimensions": 0}, "dimensions", "1"),
        ("/embed", {"inputs": "a", "dimensions": 17}, "dimensions", "16"),
        ("/embed", {"inputs": "a", "prompt_name": "passage"}, "prompt_name", "document"),
        ("/embed", {"inputs": "a", "truncation_direction": "up"}, "truncation_direction", "left"),
        ("/embed", {"inputs": "a", "truncat": True}, "truncat", "truncate"),
        ("/", {"inputs": {"source_sentence": "a", "sentences": []}},
         "inputs.sentences", "1"),
        ("/tokenize", {}, "inputs", "missing"),
        ("/tokenize", {"inputs": []}, "inputs", "empty"),
        ("/tokenize", {"inputs": "a", "prompt": "b"}, "prompt", "inputs"),
        ("/tokenize", {"prompt": ""}, "prompt", "empty"),
        ("/tokenize", {"inputs": "a" * 100_001}, "inputs", "100,000"),
        ("/decode", {"ids": []}, "ids", "1"),
        ("/decode", {"ids": [[]]}, "ids[0]", "empty"),
        ("/decode", {"ids": [10**6]}, "ids", "1000000"),
        ("/detokenize", {"tokens": [10**6]}, "tokens", "1000000"),
        ("/", {"inputs": "a", "prompt_name": "passage"}, "prompt_name", "document"),
        ("/", {"inputs": "a", "stream": True}, "stream", "stream"),
        ("/rerank", {"texts": []}, "texts", "1"),
        ("/rerank", {"texts": ["a", ""]}, "texts", "empty"),
        ("/rerank", {"query": ""}, "query", "empty"),
        ("/rerank", {"texts": [LONG]}, "texts", "truncate"),
        ("/rerank", {"prompt_name": "query"}, "prompt_name", "prompt_name"),
        ("/predict", {"inputs": ["a", "b"], "raw_scores": True}, "inputs[0]", "list"),
        ("/predict", {"inputs": [["a"], "b"]}, "inputs[1]", "list"),
        ("/predict", {"inputs": [["a", "b", "c"]]}, "inputs[0]", "2"),
        ("/predict", {"inputs": [[]]}, "inputs[0]", "1"),
        ("/predict", {"inputs": [], "truncate": True}, "inputs", "empty"),
        ("/predict", {"inputs": [[LONG]]}, "inputs", "truncate"),
        ("/predict", {"inputs": [["a", LONG]]}, "inputs", "truncate"),
        ("/predict", {"inputs": [["a"]], "stream": True}, "stream", "stream"),
    ],
)  # fmt: skip
def test_requests_are_refused_with_their_field(
    features: Client,
    ranker: Client,
    classifier: Client,
    path: str,
    body: dict[str, Any],
    param: str,
    word: str,
) -> None:
    service = {"/rerank": ranker, "/predict": classifier}.get(path, features)
    usual = {"query": "a", "texts": ["b"]} if path == "/rerank" else {}
    found, message = refused(service, path, 422, **{**usual, **body})
    assert found == param
    assert word in message


def test_tokens_and_back(features: Client) -> None:
    text = "The  king, \u00e9ternal"
    [tokens] = asked(features, "/tokenize", inputs=text)
    assert [token["special"] for token in tokens] == [True, *[False] * (len(tokens) - 2), True]
    assert all(token["text"] == text[token["start"] : token["stop"]] for token in tokens[1:-1])
    assert (tokens[0]["text"], tokens[0]["start"], tokens[0]["stop"]) == ("[CLS]", None, None)
    [plain] = asked(features, "/tokenize", inputs=[text], add_special_tokens=False)
    assert plain == tokens[1:-1]
    ids = [token["id"] for token in tokens]
    whole = asked(features, "/tokenize", prompt=text)
    assert whole == {"count": len(ids), "max_model_len": 32, "tokens": ids}
    [decoded] = asked(features, "/decode", ids=ids)
    assert decoded == asked(features, "/decode", ids=[[5], ids])[1]
    assert decoded.startswith("the king")
    both = asked(features, "/embed", inputs=[ids, text])
    assert both[0] == pytest.approx(both[1], abs=1e-6), "tokens are as good as their text"
    [special] = asked(features, "/decode", ids=ids, skip_special_tokens=False)
    assert (
        special == asked(features, "/detokenize", tokens=ids)["prompt"] == f"[CLS] {decoded} [SEP]"
    )
    bare = asked(features, "/detokenize", tokens=ids, skip_special_tokens=True)
    assert bare == {"prompt": decoded}
    [long] = asked(features, "/tokenize", inputs=LONG)
    assert len(long) == 122, "the model's limit is of no concern"


def test_ranks(ranker: Client) -> None:
    texts = ["a tree", "the king", "a daughter"]
    ranks = asked(ranker, "/rerank", query="the king", texts=texts)
    scores = [rank["score"] for rank in ranks]
    assert sorted(rank["index"] for rank in ranks) == [0, 1, 2]
    assert scores == sorted(scores, reverse=True)
    assert all(0 < score < 1 and rank.keys() == {"index", "score"} for score, rank in
               zip(scores, ranks, strict=True))  # fmt: skip
    raw = asked(ranker, "/rerank", query="the king", texts=texts, raw_scores=True, return_text=True)
    assert [rank["index"] for rank in raw] == [rank["index"] for rank in ranks]
    assert [1 / (1 + math.exp(-rank["score"])) for rank in raw] == pytest.approx(scores, abs=1e-6)
    assert all(rank["text"] == texts[rank["index"]] for rank in raw)
    pairs = asked(ranker, "/predict", inputs=[["the king", text] for text in texts])
    assert [pairs[rank["index"]][0]["score"] for rank in ranks] == pytest.approx(scores, abs=1e-6)


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank"])
def test_documents(ranker: Client, path: str) -> None:
    documents = ["a tree", {"text": "the king"}, LONG]
    body: dict[str, Any] = {"model": "any", "query": "the king", "documents": documents}
    made = asked(ranker, path, **body)
    assert made["usage"]["total_tokens"] == 7 + 7 + 32, "a document that is too long is truncated"
    assert all(each.keys() == {"index", "relevance_score"} for each in made["results"])
    texts = ["a tree", "the king", LONG]
    ranks = asked(ranker, "/rerank", query="the king", texts=texts, truncate=True)
    assert [(each["index"], each["relevance_score"]) for each in made["results"]] == [
        (rank["index"], pytest.approx(rank["score"], abs=1e-6)) for rank in ranks
    ]
    [best] = asked(ranker, path, **body, top_n=1, return_documents=True)["results"]
    assert best["document"] == {"text": texts[ranks[0]["index"]]}
    assert best["relevance_score"] == pytest.approx(ranks[0]["score"], abs=1e-6)
    param, _ = refused(ranker, path, 400, **{**body, "truncate": False})
    assert param == "documents"
    for wrong in ({"query": ""}, {"documents": []}, {"top_n": 0}):
        [field] = wrong
        assert refused(ranker, path, 400, **{**body, **wrong})[0] == field


def test_paths_name_the_model_that_they_would_need(features: Client, classifier: Client) -> None:
    for service, task in ((features, "feature-extraction"), (classifier, "text-classification")):
        for path in ("/rerank", "/v1/rerank"):
            _, message = refused(service, path, 404, query="a", texts=["b"])
            assert task in message
            assert "cross-encoder" in message
    _, message = refused(classifier, "/embed", 404, inputs="a")
    assert "feature-extraction" in message


class WithoutEmbeddings(StubStreamer):
    def model_description(self) -> dict[str, Any]:
        about = {"operations": ["predict"], "task": "feature-extraction"}
        return {**about, "no_embeddings": "it has a Dense module"}


@in_event_loop
async def test_paths_of_embeddings_say_why_a_model_has_none() -> None:
    async with serving(WithoutEmbeddings()) as service:
        client = StubClient(service.site)
        for path, status in ((b"/embed", 404), (b"/v1/embeddings", 404), (b"/", 422)):
            body = b'{"inputs": "a", "normalize": true}'
            found, answer = await client.ask(post(body, path=path))
            assert found == status
            assert b"it has a Dense module" in answer


def test_predictions(classifier: Client) -> None:
    best = asked(classifier, "/predict", inputs="the king")
    assert len(best) == 1
    scored = asked(classifier, "/predict", inputs="the king", raw_scores=False)
    assert scored[0] == pytest.approx(best[0])
    assert {each["label"] for each in scored} == {"bad", "fair", "good"}
    raw = asked(classifier, "/predict", inputs="the king", raw_scores=True)
    assert [each["label"] for each in raw] == [each["label"] for each in scored]
    shares = [math.exp(each["score"] - raw[0]["score"]) for each in raw]
    assert [share / sum(shares) for share in shares] == pytest.approx(
        [each["score"] for each in scored], abs=1e-5
    )
    single, pair = asked(classifier, "/predict", inputs=[["the king"], ["the king", "a tree"]])
    assert [each["score"] for each in single] == pytest.approx([each["score"] for each in scored])
    assert single != pair
    several = asked(classifier, "/predict", inputs=["the king", "a tree"])
    assert [len(each) for each in several] == [1, 1], "a list of strings is no pair"
    cut = asked(classifier, "/predict", inputs=[[LONG, "a"]], truncate=True)
    assert len(cut[0]) == 3


@pytest.mark.parametrize("path", ["/tokenize", "/rerank", "/v1/rerank"])
def test_the_lines_of_the_page_of_clients(infilling: Client, ranker: Client, path: str) -> None:
    page = (Path(__file__).parent.parent / "docs" / "clients.md").read_text()
    [body] = re.findall(rf"^curl http://127\.0\.0\.1:8000{path} -d '(.*)'$", page, re.MULTILINE)
    service = infilling if path == "/tokenize" else ranker
    response = service.post(path, body.encode())
    assert response.status_code == 200, response.text
    if path == "/tokenize":
        [said] = re.findall(r"```json\n(.*?)```", page, re.DOTALL)
        assert response.json() == json.loads(said)
    elif path == "/rerank":
        assert {rank["text"] for rank in response.json()} == {"A tree.", "A mathematician."}
    else:
        assert len(response.json()["results"]) == 1
