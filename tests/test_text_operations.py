"""Operations of models of texts: "rerank", "score", "tokenize" and "decode"."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from pipeline_cases import assert_close, folder, item, loaded, refusal, served, variant
from service_streamer.pipelines import PipelineModel

pytestmark = pytest.mark.xdist_group("transformers")

PAIRS = [
    ("the king", "a tree"),
    ("the king", "once upon a time there was a king who had three daughters"),
    ("a", "the quick brown fox"),
]
LONG = "the king " * 40


@pytest.fixture
def ranker() -> PipelineModel:
    return served("cross_encoder")


@pytest.fixture
def generator() -> PipelineModel:
    return served("gpt2")


def pair(text: Any, other: Any, **parameters: Any) -> dict[str, Any]:
    return item({"text": text, "text_pair": other}, "rerank", **parameters)


def test_pairs_are_scored_as_by_sentence_transformers(ranker: PipelineModel) -> None:
    from sentence_transformers import CrossEncoder

    outputs = ranker.predict([pair(*each) for each in PAIRS])
    reference = CrossEncoder(str(folder("cross_encoder")), device="cpu")
    raw = reference.predict(PAIRS, activation_fn=torch.nn.Identity(), show_progress_bar=False)
    assert np.allclose([output["score"] for output in outputs], raw, atol=1e-5)
    counts = [len(reference.tokenizer(*each)["input_ids"]) for each in PAIRS]
    assert [output["tokens"] for output in outputs] == counts


def test_a_long_pair_loses_tokens_of_its_longer_text(ranker: PipelineModel) -> None:
    assert "the limit is 32" in refusal(ranker, pair("the king", LONG))
    texts, left = ("a tree", f"the fox {LONG}"), {"truncation_side": "left"}
    asked = [pair(*texts, truncation=True, **more) for more in ({}, left)]
    right, left_out = ranker.predict(asked)
    assert (right["tokens"], left_out["tokens"]) == (32, 32)
    assert left_out["score"] != pytest.approx(right["score"], abs=1e-3)


def test_what_is_no_pair_or_goes_to_a_model_of_several_labels_is_refused(
    ranker: PipelineModel,
) -> None:
    for inputs, says in (
        ("a", 'inputs: must be {"text": ..., "text_pair": ...}'),
        ({"text": "a"}, 'inputs: must be {"text": ..., "text_pair": ...}'),
        ({"text": "a", "text_pair": ""}, "inputs.text_pair: '' is empty"),
        ({"text": 3, "text_pair": "a"}, "inputs.text: must be a string"),
    ):
        assert refusal(ranker, item(inputs, "rerank")).startswith(says)
    model = served("classifier")
    assert "rerank" not in model.description["operations"]
    assert "cannot 'rerank'" in refusal(model, pair("a", "b"))


def test_scores_are_the_models(tmp_path: Path) -> None:
    model = loaded(variant("chat", tmp_path, max_position_embeddings=2048))
    texts = ["the sun", "once upon a time there was a king " * 40, "a", "it was the best"]
    network, tokenizer = model.model.model, model.model.tokenizer
    shapes: list[torch.Size] = []
    with network.register_forward_pre_hook(
        lambda _, __, inputs: shapes.append(inputs["input_ids"].shape), with_kwargs=True
    ):
        outputs = model.predict([item(text, "score", logprobs=2) for text in texts * 20])
    assert all(rows == 1 or rows * tokens <= 2048 for rows, tokens in shapes), "of all logits"
    assert sum(rows for rows, _ in shapes if rows > 1) > 20, "texts share a pass"
    assert_close(outputs[: len(texts)], outputs[-len(texts) :])
    assert max(map(len, outputs)) > 2 * 256, "of which scores are computed together"
    for text, output in zip(texts, outputs, strict=False):
        ids = tokenizer(text)["input_ids"]
        with torch.inference_mode():
            shares = network(torch.tensor([ids])).logits[0].log_softmax(-1)
        assert [token["id"] for token in output] == ids
        assert (output[0]["logprob"], output[0]["top"]) == (None, [])
        own = shares[:-1].gather(-1, torch.tensor(ids)[1:, None])[:, 0].tolist()
        assert [token["logprob"] for token in output[1:]] == pytest.approx(own, abs=1e-4)
        best = shares[:-1].topk(2).values.tolist()
        for token, values in zip(output[1:], best, strict=True):
            assert [each["logprob"] for each in token["top"]] == pytest.approx(values, abs=1e-4)


def test_a_text_of_as_many_tokens_as_the_model_takes_is_scored(
    generator: PipelineModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = generator.description["max_tokens"]
    [output] = generator.predict([item([5] * limit, "score")])
    assert len(output) == limit
    told = f"{limit + 1} tokens, and the limit is {limit} for log probabilities of a text"
    assert told in refusal(generator, item([5] * (limit + 1), "score"))
    monkeypatch.setattr(generator.handlers["score"], "limit", None)
    assert "the limit is 8192" in refusal(generator, item([5] * 8193, "score"))


def test_models_whose_prompts_have_a_prefix_score_nothing(tmp_path: Path) -> None:
    model = loaded(variant("gpt2", tmp_path, prefix="before each prompt"))
    assert model.description["operations"] == ["predict", "generate", "tokenize", "decode"]


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
    assert "not a token of the model; its tokens are whole numbers from 0 to 319" in refusal(
        generator, item([1, wrong], do)
    )
    assert refusal(generator, item([1, 2])).startswith("inputs: "), "its form has the text"


@pytest.mark.long
def test_a_tokenizer_of_characters_knows_no_places(tmp_path: Path) -> None:
    """Its model has no embeddings by which tokens are counted."""
    config = transformers.CanineConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        num_hash_functions=2, num_hash_buckets=64, local_transformer_stride=16,
    )  # fmt: skip
    transformers.CanineForSequenceClassification(config).save_pretrained(tmp_path)
    transformers.CanineTokenizer().save_pretrained(tmp_path)
    model = loaded(tmp_path)
    [tokens] = model.predict([item("ab", "tokenize")])
    assert [token["special"] for token in tokens] == [True, False, False, True]
    assert {(token["start"], token["stop"]) for token in tokens} == {(None, None)}
    assert [token["text"] for token in tokens[1:3]] == ["a", "b"]
    assert model.predict([item([token["id"] for token in tokens], "decode")]) == ["ab"]


def test_a_text_that_is_too_long_to_tokenize(generator: PipelineModel) -> None:
    assert "send it in parts" in refusal(generator, item("a" * 100_001, "tokenize"))
    assert "send them in parts" in refusal(generator, item([5] * 100_001, "decode"))
    wrong = item("a", "tokenize", add_special_tokens=3)
    assert "add_special_tokens: must be true or false" in refusal(generator, wrong)
