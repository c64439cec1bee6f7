"""Text tasks by tensors: their answers are those of transformers' pipelines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from pipeline_cases import (
    LONG,
    SHORT,
    assert_close,
    compiles_to_itself,
    folder,
    in_threads,
    item,
    loaded,
    plain,
    reference,
    served,
    variant,
)
from test_text_pieces import pieces_with_spaces
from tiny_models import SHARP

pytestmark = pytest.mark.xdist_group("transformers")

MASKED = "the [MASK] fox jumps"
MASKS = "once upon a [MASK] there was a [MASK]"

#: Model, task, and the inputs of a batch, each with parameters of its own.
MIXED: list[tuple[str, str, list[tuple[Any, dict[str, Any]]]]] = [
    (
        "", "fill-mask",
        [
            (MASKED, {}), (MASKS, {"top_k": 1}), (MASKED, {"targets": ["king", "dog", "zebra"]}),
            (MASKS, {"targets": ["time", "king"], "top_k": 9}), ("[MASK]", {"top_k": 40}),
            ("[MASK] is [SEP] [PAD] odd", {}), ("[CLS] [MASK] [MASK] [PAD]", {"top_k": 3}),
            (MASKED, {"targets": ["dog", "zebra", "king"], "top_k": 2}), ("É [MASK]", {}),
        ],
    ),
    (
        "roberta", "fill-mask",
        [("the <mask> fox", {"top_k": 300}), ("<mask>", {}), ("É<mask>相 <mask>", {"top_k": 200})],
    ),
    (
        "classifier", "text-classification",
        [
            (SHORT, {}), (LONG, {"top_k": None}), (SHORT, {"function_to_apply": "sigmoid"}),
            ({"text": SHORT, "text_pair": LONG}, {"function_to_apply": "none", "top_k": 2}),
            ({"text": "É"}, {}), (LONG, {"function_to_apply": "softmax", "top_k": 99}),
        ],
    ),
    (
        "tagger", "token-classification",
        [(text, {"aggregation_strategy": strategy, "ignore_labels": ignored})
         for text in (LONG, "unbelievable foxes jumped, didn't they? É 相似 zzz")
         for strategy in ("none", "simple", "first", "average", "max")
         for ignored in (["O"], ["PER", "B-LOC"], [])],
    ),
    ("features", "feature-extraction", [(SHORT, {}), (3 * LONG, {"truncation": True}), ("É", {})]),
]  # fmt: skip


@pytest.mark.parametrize("how", ["as loaded", "in buckets", "another tokenizer"])
@pytest.mark.parametrize(("name", "task", "batch"), MIXED, ids=lambda value: str(value)[:24])
def test_a_batch_of_mixed_parameters_is_as_one_by_one(
    name: str, task: str, batch: list[tuple[Any, dict[str, Any]]], how: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    model = served(name, task)
    items = [item(inputs, **parameters) for inputs, parameters in batch]
    if task == "feature-extraction":
        embedded = [item(SHORT, "embed"), item(9 * LONG, "embed", truncation=True)]
        vectors = model.predict(embedded)
    if how == "in buckets":
        compiles_to_itself(monkeypatch)
        model = loaded(folder(name), task, compile=True, batch_size=64)
    elif how == "another tokenizer":  # its fast part gives other tokens
        usual = transformers.PreTrainedTokenizerBase.__call__

        def call(self: Any, text: str, *args: Any, **options: Any) -> Any:
            return usual(self, text.replace("É", "eel"), *args, **options)

        monkeypatch.setattr(transformers.PreTrainedTokenizerBase, "__call__", call)
        model = loaded(folder(name), task)
    alone = reference(folder(name), task)
    alone.tokenizer.model_max_length = 32
    wanted = [plain(alone(inputs, **parameters)) for inputs, parameters in batch]
    assert_close(in_threads(model, items), wanted)
    if task == "feature-extraction":
        assert_close(model.predict([*items, *embedded])[len(items) :], vectors)


@pytest.mark.parametrize(
    "kind", ["single_label_classification", "multi_label_classification", "regression", "one label"]
)
def test_scores_of_each_kind_of_classifier_are_those_of_the_pipeline(
    tmp_path: Path, kind: str
) -> None:
    source = folder("cross_encoder")
    if kind != "one label":
        source = variant("classifier", tmp_path, problem_type=kind)
    model, alone = loaded(source), reference(source, "text-classification")
    for parameters in ({}, {"top_k": 2}, {"function_to_apply": "sigmoid"}):
        wanted = [plain(alone(text, **parameters)) for text in (SHORT, LONG)]
        assert_close(model.predict([item(text, **parameters) for text in (SHORT, LONG)]), wanted)


def test_of_equal_scores_the_first_label_is_first(tmp_path: Path) -> None:
    """float32 has no score between 0 and its smallest: many labels of a sure model have 0."""
    source = folder("classifier")
    labels = {number: f"l{number:03}" for number in range(200)}
    network: Any = transformers.AutoModelForSequenceClassification.from_pretrained(
        source, num_labels=200, id2label=labels, ignore_mismatched_sizes=True
    )
    network.classifier.weight.data.zero_()
    network.classifier.bias.data.fill_(-1000)[150] = 0
    network.save_pretrained(tmp_path)
    transformers.AutoTokenizer.from_pretrained(source).save_pretrained(tmp_path)
    [answer] = loaded(tmp_path).predict([item(SHORT, top_k=200, function_to_apply="softmax")])
    found = [row["label"] for row in answer]
    assert found == ["l150", *(label for label in labels.values() if label != "l150")]


@pytest.mark.parametrize(
    ("name", "text", "wanted"),
    [
        ("", MASKS, [(2, 5), (2, 5)]),
        ("classifier", SHORT, [(1, 1), (1, 1)]),
        ("features", SHORT, [(5, 16)]),
    ],
)
def test_only_answers_leave_the_device(name: str, text: str, wanted: list[Any]) -> None:
    model = served(name)
    [(_, outputs)] = model.forward(model.preprocess([item(text)]))
    found = outputs.wait()
    while not isinstance(found, torch.Tensor) and len(found) == 1:
        [found] = found
    tensors = [found] if isinstance(found, torch.Tensor) else found
    assert [tuple(each.shape) for each in tensors] == wanted


@pytest.mark.parametrize("name", ["", "roberta"])
def test_only_masks_get_logits(name: str) -> None:
    model = served(name, "fill-mask")
    seen: list[int] = []
    head = model.model.model.get_output_embeddings()
    with head.register_forward_hook(lambda *called: seen.append(called[2].shape[:-1].numel())):
        mask = model.model.tokenizer.mask_token
        model.predict([f"a {mask} a {mask}", f"the fox is {mask}"])
        assert seen == [3]
        model.model(f"a {mask}")  # other calls of the model get all logits
        assert seen[1] > 1


@pytest.mark.parametrize("kind", ["scaled", "refused", "unknown", "absent"])
def test_a_model_that_wants_all_tokens_gets_them(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    network: Any = transformers.BertForMaskedLM
    usual = network.forward

    def forward(self: Any, **inputs: Any) -> Any:
        output = usual(self, **inputs)
        if kind == "refused" and output.logits.ndim == 2:
            raise ValueError("not enough values to unpack")
        if kind == "scaled":  # by what it sees of other tokens
            output.logits = output.logits + torch.arange(output.logits.shape[-2])[:, None]
        return output

    def other(self: Any) -> Any:
        return self.bert.embeddings.LayerNorm if kind == "unknown" else None

    monkeypatch.setattr(network, "forward", forward)
    if kind in ("unknown", "absent"):
        monkeypatch.setattr(network, "get_output_embeddings", other)
    model, alone = loaded(None), reference(folder(""), "fill-mask")
    texts = (MASKED, MASKS, "a [MASK]")
    wanted = [plain(alone(text, top_k=2)) for text in texts]
    assert_close(model.predict([item(text, top_k=2) for text in texts]), wanted)


def test_truncation_of_one_text_does_not_cut_others() -> None:
    model = served("features")
    items = [
        item(3 * LONG, "embed", truncation=True), item(SHORT, "embed"),
        item(3 * LONG, "embed", truncation=True, truncation_side="left"), item(LONG, "embed"),
    ]  # fmt: skip
    together = model.predict(items)
    count = len(model.model.tokenizer(LONG)["input_ids"])
    assert [each["tokens"] for each in together] == [32, 5, 32, count]
    assert together[0]["embedding"] != together[2]["embedding"]
    for one, output in zip(items, together, strict=True):
        assert_close(model.predict([one]), [output])


def tokenizer_of(kind: str, **options: Any) -> Any:
    if kind == "slow":
        return transformers.ByT5Tokenizer(mask_token="<mask>", **options)
    if kind == "Metaspace":
        backend = pieces_with_spaces(kind, "<pad>", "<mask>").backend_tokenizer
        special: Any = ("<pad>", "<mask>", "<unk>")
    else:
        name = "roberta" if kind == "ByteLevel" else ""
        usual: Any = transformers.AutoTokenizer.from_pretrained(folder(name))
        backend, special = usual.backend_tokenizer, (usual.pad_token, usual.mask_token, None)
    if kind == "none":
        backend.decoder = None
    names = dict(zip(("pad_token", "mask_token", "unk_token"), special, strict=True))
    options |= {name: token for name, token in names.items() if token}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **options)


def save_bert(kind: str, tokenizer: Any, target: Path) -> Path:
    """A model with a tokenizer of one's own."""
    sizes = {**SHARP, "num_hidden_layers": 1, "max_position_embeddings": 64}
    config = transformers.BertConfig(vocab_size=len(tokenizer), **sizes)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        getattr(transformers, kind)(config).save_pretrained(target)
    tokenizer.save_pretrained(target)
    return target


@pytest.mark.parametrize("kind", ["WordPiece", "ByteLevel", "Metaspace", "none", "slow"])
@pytest.mark.parametrize("cleans", [False, True])
def test_filled_texts_are_those_of_the_pipeline_with_every_tokenizer(
    tmp_path: Path, kind: str, cleans: bool
) -> None:
    tokenizer = tokenizer_of(kind, clean_up_tokenization_spaces=cleans)
    source, mask = save_bert("BertForMaskedLM", tokenizer, tmp_path), tokenizer.mask_token
    model, alone = loaded(source), reference(source, "fill-mask")
    assert alone.tokenizer.clean_up_tokenization_spaces == cleans
    texts = [
        mask, f"it {mask}", f"{mask} , it's", f"{tokenizer.pad_token} the {mask} fox .",
        f"a {mask}, {mask}.", f"once upon a time {mask} ' s",
    ]  # fmt: skip
    count = min(100, len(tokenizer))
    wanted = [plain(alone(text, top_k=count)) for text in texts]
    assert_close(model.predict([item(text, top_k=count) for text in texts]), wanted)


def test_texts_and_pairs_of_a_slow_tokenizer_are_cut_by_it(tmp_path: Path) -> None:
    tokenizer: Any = transformers.ByT5Tokenizer(model_max_length=60)
    source = save_bert("BertForSequenceClassification", tokenizer, tmp_path)
    model, alone = loaded(source), reference(source, "text-classification")
    batch: list[Any] = [SHORT, LONG, {"text": "a text", "text_pair": LONG}]
    wanted = [plain(alone(inputs, truncation=True)) for inputs in batch]
    assert_close(model.predict([item(each, truncation=True) for each in batch]), wanted)
