"""The forms of text-embeddings-inference, of rerankers and of tokenizers, over HTTP."""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tiny_models
from serve_process import Serving
from service_streamer import Overloaded
from service_streamer.serve.http.events import Numbered
from service_streamer.serve.http.joined_streams import JoinedStreams, open_streams
from service_streamer.serve.http.refusals import Refusal
from service_streamer.serve.http.token_inputs import inputs_of

LONG = "the king " * 60


def served(name: str) -> Any:
    """A fixture: the service of a tiny model."""

    @pytest.fixture(scope="module")
    def fixture(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
        folder = tiny_models.build(name, tmp_path_factory.mktemp("models") / name)
        with Serving(str(folder)) as service:
            yield service

    return fixture


features, ranker, classifier = map(served, ("features", "cross_encoder", "classifier"))


def asked(service: Serving, path: str, **body: Any) -> Any:
    response = service.post(path, body)
    assert response.status_code == 200, response.text
    return response.json()


def refused(service: Serving, path: str, status: int, **body: Any) -> tuple[str | None, str]:
    """The field and the message of a refusal."""
    response = service.post(path, body)
    assert response.status_code == status, response.text
    error = response.json()["error"]
    return error["param"], error["message"]


# -- decisions


@pytest.mark.parametrize(
    ("value", "inputs", "is_one"),
    [
        ("a", ["a"], True),
        ([1, 2], [[1, 2]], True),
        (["a", "b"], ["a", "b"], False),
        (["a"], ["a"], False),
        ([[1], [2, 3]], [[1], [2, 3]], False),
        (["a", [1]], ["a", [1]], False),
    ],
)
def test_texts_and_tokens(value: Any, inputs: list[Any], is_one: bool) -> None:
    found, was_one = inputs_of(value, "inputs")
    assert ([*found], was_one) == (inputs, is_one)


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ([], "inputs: is empty"),
        (["a", []], "inputs[1]: is empty"),
        (["a", 1], "inputs[1]: is a"),
        ([1, [2]], "inputs[0]: is a"),
    ],
)
def test_what_is_neither_texts_nor_tokens(value: Any, says: str) -> None:
    with pytest.raises(Refusal) as caught:
        inputs_of(value, "inputs")
    assert str(caught.value).startswith(says)


class Scripted:
    """A stream whose outputs the test hands out."""

    def __init__(self) -> None:
        self.outputs: asyncio.Queue[Any] = asyncio.Queue()
        self.is_closed = False

    is_ready = False

    async def __anext__(self) -> Any:
        output = await self.outputs.get()
        if isinstance(output, BaseException):
            raise output
        return output

    async def aclose(self) -> None:
        self.is_closed = True
        self.outputs.put_nowait(StopAsyncIteration())


async def settled() -> None:
    """All tasks have done what they can."""
    for _ in range(10):
        await asyncio.sleep(0)


def test_streams_are_joined_as_their_outputs_come() -> None:
    async def run() -> None:
        streams = [Scripted(), Scripted()]
        joined = JoinedStreams(streams)
        streams[1].outputs.put_nowait("b")
        assert await anext(joined) == Numbered(1, "b")
        assert not joined.is_ready
        for _ in range(2):
            streams[0].outputs.put_nowait("a")
            streams[1].outputs.put_nowait("b")
        await settled()
        assert joined.is_ready
        found = [(await anext(joined)).number for _ in range(4)]
        assert found in ([0, 1, 0, 1], [1, 0, 1, 0]), "they take turns"
        await streams[0].aclose()
        streams[1].outputs.put_nowait("c")
        assert await anext(joined) == Numbered(1, "c")
        await streams[1].aclose()
        with pytest.raises(StopAsyncIteration):
            await anext(joined)
        assert joined.is_ready

    asyncio.run(run())


def test_joined_streams_fail_before_they_have_outputs_if_one_fails() -> None:
    async def run() -> None:
        streams = [Scripted(), Scripted()]
        joined = JoinedStreams(streams)
        streams[0].outputs.put_nowait("a")
        streams[1].outputs.put_nowait(ValueError("wrong"))
        await settled()
        with pytest.raises(ValueError, match="wrong"):
            await anext(joined)
        await joined.aclose()
        assert all(stream.is_closed for stream in streams)
        await settled()

    asyncio.run(run())


def test_closing_joined_streams_ends_the_wait_for_an_output() -> None:
    async def run() -> None:
        joined = JoinedStreams([Scripted(), Scripted()])
        waiting = asyncio.ensure_future(joined.__anext__())
        await settled()
        await joined.aclose()
        with pytest.raises(StopAsyncIteration):
            await waiting

    asyncio.run(run())


def test_streams_are_closed_if_one_of_them_cannot_be_opened() -> None:
    opened: list[Scripted] = []

    def open_one(item: str) -> Scripted:
        if item == "full":
            raise Overloaded("the queue is full")
        opened.append(Scripted())
        return opened[-1]

    with pytest.raises(Overloaded):
        asyncio.run(open_streams(open_one, ["a", "b", "full", "c"]))
    assert [stream.is_closed for stream in opened] == [True, True]
    assert asyncio.run(open_streams(open_one, ["a"])) is opened[-1]


# -- /embed, /embed_all, /similarity


def test_embed(features: Serving) -> None:
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


def test_embed_takes_tokens(features: Serving) -> None:
    [tokens] = asked(features, "/tokenize", inputs="the king")
    ids = [token["id"] for token in tokens]
    [wanted] = asked(features, "/embed", inputs="the king")
    [found] = asked(features, "/embed", inputs=ids)
    assert found == pytest.approx(wanted, abs=1e-6)
    both = asked(features, "/embed", inputs=[ids, "the king"])
    assert both[0] == pytest.approx(both[1], abs=1e-6)


def test_truncation(features: Serving) -> None:
    text = "the tree " * 20 + "the king " * 20
    param, message = refused(features, "/embed", 422, inputs=text)
    assert (param, message.endswith("set truncate to true")) == ("inputs", True)
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


def test_embed_all(features: Serving) -> None:
    states = asked(features, "/embed_all", inputs=["the king", "a"])
    assert [len(each) for each in states] == [4, 3]
    assert states[0] == asked(features, "/predict", inputs="the king")[0]
    [cut] = asked(features, "/embed_all", inputs=LONG, truncate=True)
    assert len(cut) == 32


def test_similarity(features: Serving) -> None:
    inputs = {"source_sentence": "the king", "sentences": ["the king", "a tree"]}
    found = asked(features, "/similarity", inputs=inputs)
    one, other = asked(features, "/embed", inputs=["the king", "a tree"])
    cosine = sum(left * right for left, right in zip(one, other, strict=True))
    assert found == pytest.approx([1, cosine], abs=1e-5)
    assert asked(features, "/", inputs=inputs) == found
    inputs["sentences"].append(LONG)
    assert refused(features, "/similarity", 422, inputs=inputs)[0] == "inputs"
    assert len(asked(features, "/similarity", inputs=inputs, parameters={"truncate": True})) == 3


@pytest.mark.parametrize(
    ("path", "body", "param", "says"),
    [
        ("/embed", {}, "inputs", "missing field"),
        ("/embed", {"inputs": ""}, "inputs", "is empty"),
        ("/embed", {"inputs": []}, "inputs", "is empty"),
        ("/embed", {"inputs": ["a", 1]}, "inputs[1]", "a token among texts"),
        ("/embed", {"inputs": [[1], [-1]]}, "inputs[1][0]", ">= 0"),
        ("/embed", {"inputs": [10**6]}, "inputs", "not a token of the model"),
        ("/embed", {"inputs": [10**400]}, "inputs[0]", ""),
        ("/embed", {"inputs": "a", "dimensions": 0}, "dimensions", ">= 1"),
        ("/embed", {"inputs": "a", "dimensions": 17}, "dimensions", "at most 16"),
        ("/embed", {"inputs": "a", "prompt_name": "query"}, "prompt_name", "before the text"),
        ("/embed", {"inputs": "a", "truncation_direction": "up"}, "truncation_direction", ""),
        ("/embed", {"inputs": "a", "truncat": True}, "truncat", "did you mean `truncate`"),
        ("/similarity", {"inputs": {"source_sentence": "a", "sentences": []}},
         "inputs.sentences", "length >= 1"),
        ("/tokenize", {}, "inputs", "is missing"),
        ("/tokenize", {"inputs": []}, "inputs", "is empty"),
        ("/tokenize", {"inputs": "a", "prompt": "b"}, "prompt", "leave one of them out"),
        ("/tokenize", {"prompt": ""}, "prompt", "is empty"),
        ("/tokenize", {"inputs": "a" * 100_001}, "inputs", "send it in parts"),
        ("/decode", {"ids": []}, "ids", "length >= 1"),
        ("/decode", {"ids": [[]]}, "ids[0]", "is empty"),
        ("/decode", {"ids": [10**6]}, "ids", "not a token of the model"),
        ("/detokenize", {"tokens": [10**6]}, "tokens", "not a token of the model"),
        ("/", {"inputs": "a", "prompt_name": "query"}, "prompt_name", "before the text"),
    ],
)  # fmt: skip
def test_what_is_refused(
    features: Serving, wording: Any, path: str, body: dict[str, Any], param: str, says: str
) -> None:
    found, message = refused(features, path, 422, **body)
    assert found == param
    assert says in message
    wording(message)


# -- /tokenize, /decode, /detokenize


def test_tokens_and_back(features: Serving) -> None:
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
    [special] = asked(features, "/decode", ids=ids, skip_special_tokens=False)
    assert (
        special == asked(features, "/detokenize", tokens=ids)["prompt"] == f"[CLS] {decoded} [SEP]"
    )
    bare = asked(features, "/detokenize", tokens=ids, skip_special_tokens=True)
    assert bare == {"prompt": decoded}
    [long] = asked(features, "/tokenize", inputs=LONG)
    assert len(long) == 122, "the model's limit is of no concern"


def test_every_model_of_texts_has_a_tokenizer(infilling: Serving) -> None:
    [tokens] = asked(infilling, "/tokenize", inputs="Happy [MASK]", add_special_tokens=False)
    assert [token["text"] for token in tokens] == ["Happy", "[MASK]"]
    [text] = asked(infilling, "/decode", ids=[token["id"] for token in tokens])
    assert text == "happy"


# -- /rerank


def test_ranks(ranker: Serving) -> None:
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
def test_documents(ranker: Serving, path: str) -> None:
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


@pytest.mark.parametrize(
    ("more", "param", "says"),
    [
        ({"texts": []}, "texts", "length >= 1"),
        ({"texts": ["a", ""]}, "texts", "is empty"),
        ({"query": ""}, "query", "is empty"),
        ({"query": "\ud83d"}, None, "not valid"),
        ({"texts": [LONG]}, "texts", "set truncate to true"),
        ({"prompt_name": "query"}, "prompt_name", "before the text"),
    ],
)
def test_what_is_not_ranked(
    ranker: Serving, wording: Any, more: dict[str, Any], param: str | None, says: str
) -> None:
    body = {"query": "a", "texts": ["b"], **more}
    response = ranker.post("/rerank", body)
    assert response.status_code in (400, 422)
    error = response.json()["error"]
    assert error["param"] == param
    assert says in error["message"]
    wording(error["message"])


def test_other_models_say_what_is_needed(
    features: Serving, classifier: Serving, wording: Any
) -> None:
    for service, task in ((features, "feature-extraction"), (classifier, "text-classification")):
        for path in ("/rerank", "/v1/rerank"):
            _, message = refused(service, path, 404, query="a", texts=["b"])
            assert f"the service runs a model for {task}, and {path} needs" in message
            assert "has one label, which is a cross-encoder" in message
    _, message = refused(classifier, "/embed", 404, inputs="a")
    assert "sentence embeddings" in message
    wording(message, refused(features, "/rerank", 404, query="a", texts=["b"])[1])


# -- /predict of classifiers


def test_predictions(classifier: Serving) -> None:
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


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({"inputs": ["a", "b"], "raw_scores": True}, "inputs[0]", "has a list of lists"),
        ({"inputs": [["a"], "b"]}, "inputs[1]", "has a list of lists"),
        ({"inputs": [["a", "b", "c"]]}, "inputs[0]", "length <= 2"),
        ({"inputs": [[]]}, "inputs[0]", "length >= 1"),
        ({"inputs": [], "truncate": True}, "inputs", "is empty"),
        ({"inputs": [[LONG]]}, "inputs", "set truncate to true"),
        ({"inputs": [["a", LONG]]}, "inputs", "set truncate to true"),
        ({"inputs": [["a"]], "stream": True}, "stream", "is not supported"),
    ],
)
def test_predictions_that_are_refused(
    classifier: Serving, wording: Any, body: dict[str, Any], param: str, says: str
) -> None:
    found, message = refused(classifier, "/predict", 422, **body)
    assert found == param
    assert says in message
    wording(message)


# -- /info and /health


def test_info_and_health(features: Serving) -> None:
    info = features.client.get("/info").json()
    assert info["model_id"] == "features"
    assert (info["max_input_length"], info["auto_truncate"]) == (32, False)
    assert info["model_pipeline_tag"] == "feature-extraction"
    assert {"/embed", "/tokenize"} <= {*info["endpoints"]}
    assert features.client.get("/health").json()["status"] == "ready"


@pytest.mark.parametrize("path", ["/tokenize", "/rerank", "/v1/rerank"])
def test_the_lines_of_the_page_of_clients(infilling: Serving, ranker: Serving, path: str) -> None:
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


@pytest.mark.long
def test_over_redis_it_is_the_same(
    ranker: Serving, tmp_path: Path, redis_server: str, prefix: str
) -> None:
    redis = ("--redis", redis_server, "--prefix", prefix)
    folder = str(tiny_models.build("cross_encoder", tmp_path / "cross_encoder"))
    body = {"query": "the king", "texts": ["a tree", "the king"]}
    with Serving(folder, *redis, role="worker") as host, Serving(*redis) as other:
        assert asked(other, "/rerank", **body) == asked(ranker, "/rerank", **body)
        assert asked(other, "/tokenize", inputs="the king") == asked(
            ranker, "/tokenize", inputs="the king"
        )
        assert other.terminate() == 0
        assert host.terminate() == 0
