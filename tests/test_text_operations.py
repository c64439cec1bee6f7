"""Operations of models of texts: "rerank", "score", "tokenize" and "decode"."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import tiny_models
from service_streamer import InvalidItems
from service_streamer.pipelines import PipelineModel
from service_streamer.pipelines.requests import Request
from service_streamer.pipelines.scoring import PromptScorer
from service_streamer.pipelines.texts import vocabulary_size
from service_streamer.pipelines.tokenizing import TextToTokens, TokensToText

PAIRS = [
    ("the king", "a tree"),
    ("the king", "once upon a time there was a king who had three daughters"),
    ("a", "the quick brown fox"),
]
LONG = "the king " * 40


@pytest.fixture(scope="module", autouse=True)
def no_monitor_threads() -> Iterator[None]:
    """What shows progress bars leaves a thread that never ends."""
    from tqdm import tqdm

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tqdm, "monitor_interval", 0)
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return lambda name: tiny_models.build(name, tmp_path_factory.mktemp("models") / name)


def loaded(folder: Path) -> PipelineModel:
    model = PipelineModel("cpu")
    model.init_model(folder)
    return model


@pytest.fixture(scope="module")
def ranker(folder: Callable[[str], Path]) -> tuple[PipelineModel, Path]:
    path = folder("cross_encoder")
    return loaded(path), path


@pytest.fixture(scope="module")
def generator(folder: Callable[[str], Path]) -> PipelineModel:
    return loaded(folder("gpt2"))


def item(inputs: Any, do: str, **parameters: Any) -> dict[str, Any]:
    return {"do": do, "inputs": inputs, "parameters": parameters}


def pair(text: Any, other: Any, **parameters: Any) -> dict[str, Any]:
    return item({"text": text, "text_pair": other}, "rerank", **parameters)


def why(model: PipelineModel, wrong: Any) -> str:
    """Why an item is refused."""
    with pytest.raises(InvalidItems) as caught:
        model.predict([wrong])
    [error] = caught.value.errors.values()
    return str(error)


# -- pairs


def test_pairs_are_scored_as_by_sentence_transformers(ranker: tuple[PipelineModel, Path]) -> None:
    from sentence_transformers import CrossEncoder

    model, path = ranker
    outputs = model.predict([pair(*each) for each in PAIRS])
    reference = CrossEncoder(str(path), device="cpu")
    raw = reference.predict(PAIRS, activation_fn=torch.nn.Identity(), show_progress_bar=False)
    assert np.allclose([output["score"] for output in outputs], raw, atol=1e-5)
    counts = [len(reference.tokenizer(*each)["input_ids"]) for each in PAIRS]
    assert [output["tokens"] for output in outputs] == counts


def test_a_long_pair_loses_tokens_of_its_longer_text(ranker: tuple[PipelineModel, Path]) -> None:
    model, _ = ranker
    assert "the limit is 32" in why(model, pair("the king", LONG))
    right, left, again = model.predict(
        [
            pair("a tree", f"the fox {LONG}", truncation=True),
            pair("a tree", f"the fox {LONG}", truncation=True, truncation_side="left"),
            pair("a tree", f"the fox {LONG}", truncation=True, truncation_side="right"),
        ]
    )
    assert (right["tokens"], left["tokens"]) == (32, 32)
    assert again == pytest.approx(right)
    assert left["score"] != pytest.approx(right["score"], abs=1e-3)


@pytest.mark.parametrize(
    ("inputs", "says"),
    [
        ("a", 'inputs: must be {"text": ..., "text_pair": ...}'),
        ({"text": "a"}, 'inputs: must be {"text": ..., "text_pair": ...}'),
        ({"text": "a", "text_pair": ""}, "inputs.text_pair: '' is empty"),
        ({"text": 3, "text_pair": "a"}, "inputs.text: must be a string"),
    ],
)
def test_what_is_no_pair(ranker: tuple[PipelineModel, Path], inputs: Any, says: str) -> None:
    assert why(ranker[0], item(inputs, "rerank")).startswith(says)


def test_only_models_of_one_label_rank(folder: Callable[[str], Path]) -> None:
    model = loaded(folder("classifier"))
    assert "rerank" not in model.description["operations"]
    assert "cannot 'rerank'" in why(model, pair("a", "b"))


# -- log probabilities


def test_scores_are_the_models(generator: PipelineModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service_streamer.pipelines.scoring._AT_ONCE", 3)
    monkeypatch.setattr("service_streamer.pipelines.scoring._MOST_TOKENS", 24)
    texts = ["the sun", "once upon a time there was a king", "a", "it was the best"]
    outputs = generator.predict([item(text, "score", logprobs=2) for text in texts])
    network, tokenizer = generator.model.model, generator.model.tokenizer
    for text, output in zip(texts, outputs, strict=True):
        ids = tokenizer(text)["input_ids"]
        with torch.inference_mode():
            shares = network(torch.tensor([ids])).logits[0].log_softmax(-1)
        assert [token["id"] for token in output] == ids
        assert (output[0]["logprob"], output[0]["top"]) == (None, [])
        for at, token in enumerate(output[1:]):
            assert token["logprob"] == pytest.approx(float(shares[at, token["id"]]), abs=1e-4)
            best = shares[at].topk(2)
            assert [each["id"] for each in token["top"]] == best.indices.tolist()
            assert [each["logprob"] for each in token["top"]] == pytest.approx(
                best.values.tolist(), abs=1e-4
            )


def test_a_text_of_as_many_tokens_as_the_model_takes_is_scored(generator: PipelineModel) -> None:
    limit = generator.description["max_tokens"]
    [output] = generator.predict([item([5] * limit, "score")])
    assert len(output) == limit
    told = f"{limit + 1} tokens, and the limit is {limit} for log probabilities of a text"
    assert told in why(generator, item([5] * (limit + 1), "score"))


def test_a_model_without_a_limit_scores_no_endless_text(
    generator: PipelineModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generator.handlers["score"], "limit", None)
    assert "the limit is 8192" in why(generator, item([5] * 8193, "score"))


def test_logits_of_a_batch_are_bounded() -> None:
    from service_streamer.pipelines.scoring import _MOST_TOKENS, _parts

    requests = []
    for tokens in (5, 1500, 3000, 700, 1, 900):
        request = Request("score", None, {})
        request.tokens = tokens
        requests.append(request)
    parts = [[each.tokens for each in part] for part in _parts(requests)]
    assert sorted(each for part in parts for each in part) == [1, 5, 700, 900, 1500, 3000]
    assert all(len(part) == 1 or len(part) * max(part) <= _MOST_TOKENS for part in parts)
    assert len(parts) == 4


def test_models_whose_prompts_have_a_prefix_score_nothing(
    generator: PipelineModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    from service_streamer.pipelines.task_handlers import handlers_of

    assert isinstance(generator.handlers["score"], PromptScorer)
    monkeypatch.setitem(generator.model._preprocess_params, "prefix", "before each prompt")
    handlers, _ = handlers_of(generator.model, lambda _: None, 8)
    assert "score" not in handlers


# -- tokens


def test_tokens_are_the_tokenizers(generator: PipelineModel) -> None:
    text = "The s\u00fcn \U0001f31e"
    tokenizer = generator.model.tokenizer
    [tokens] = generator.predict([item(text, "tokenize")])
    assert [token["id"] for token in tokens] == tokenizer(text)["input_ids"]
    assert all(token["text"] == text[token["start"] : token["stop"]] for token in tokens)
    ids = [token["id"] for token in tokens]
    assert generator.predict([item(ids, "decode")]) == [text]
    both = generator.predict([item("a", "tokenize"), item(ids, "decode"), item([84], "score")])
    assert [type(each) for each in both] == [list, str, list]


@pytest.mark.parametrize("do", ["generate", "score", "decode"])
@pytest.mark.parametrize("wrong", [320, -1, 2**40, True, "a", None, 1.0])
def test_what_is_no_token_is_refused(generator: PipelineModel, do: str, wrong: Any) -> None:
    """On a GPU a token beyond the vocabulary would end the process."""
    assert "not a token of the model; its tokens are whole numbers from 0 to 319" in why(
        generator, item([1, wrong], do)
    )


def test_predict_takes_no_tokens_where_its_form_has_the_text(generator: PipelineModel) -> None:
    assert why(generator, item([1, 2], "predict")).startswith("inputs: ")


def test_a_tokenizer_without_places() -> None:
    from transformers import CanineTokenizer

    model = SimpleNamespace(get_input_embeddings=lambda: (_ for _ in ()).throw(NotImplementedError))
    pipeline: Any = SimpleNamespace(tokenizer=CanineTokenizer(), model=model)
    handler, back = TextToTokens(pipeline), TokensToText(pipeline)
    request = Request("tokenize", "ab", {})
    handler.prepare(request)
    [tokens] = handler.finish([request], handler.forward([request]))
    assert [token["special"] for token in tokens] == [True, False, False, True]
    assert {(token["start"], token["stop"]) for token in tokens} == {(None, None)}
    assert [token["text"] for token in tokens[1:3]] == ["a", "b"]
    request = Request("decode", [token["id"] for token in tokens], {})
    back.prepare(request)
    assert back.forward([request]) == ["ab"]
    assert vocabulary_size(pipeline) == len(pipeline.tokenizer)


def test_a_text_that_is_too_long_to_tokenize(generator: PipelineModel) -> None:
    assert "send it in parts" in why(generator, item("a" * 100_001, "tokenize"))
    assert "send them in parts" in why(generator, item([5] * 100_001, "decode"))
    wrong = item("a", "tokenize", add_special_tokens=3)
    assert "add_special_tokens: must be true or false" in why(generator, wrong)
