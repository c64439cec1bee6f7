"""Text tasks by tensors: their answers are those of transformers' pipelines."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import tiny_models
from service_streamer import InvalidInput
from service_streamer.pipelines import PipelineModel
from service_streamer.pipelines.buckets import make_buckets
from service_streamer.pipelines.decoding import TokenDecoder
from service_streamer.pipelines.encoding import TextEncoder
from service_streamer.pipelines.loading import DEFAULT_MODEL
from service_streamer.pipelines.requests import plain
from service_streamer.pipelines.tensors import TensorHandler

SHORT = "the quick fox"
LONG = "once upon a time there was a king who had three daughters, and a garden."
MASKED = "the [MASK] fox jumps"
MASKS = "once upon a [MASK] there was a [MASK]"


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Two threads that wait for each other are many times slower on a busy machine."""
    transformers.utils.logging.disable_progress_bar()  # it starts a thread
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    @cache
    def folder(name: str) -> Path:
        if not name:
            return DEFAULT_MODEL
        return tiny_models.build(name, tmp_path_factory.mktemp("texts") / name)

    return folder


@pytest.fixture(scope="module")
def served(folder: Callable[[str], Path]) -> Callable[..., PipelineModel]:
    @cache
    def served(name: str, task: str) -> PipelineModel:
        model = PipelineModel("cpu")
        model.init_model(folder(name), task)
        return model

    return served


@pytest.fixture(scope="module")
def reference(folder: Callable[[str], Path]) -> Callable[..., Any]:
    @cache
    def reference(name: str, task: str) -> Any:
        build: Any = transformers.pipeline
        return build(task, model=str(folder(name)), device="cpu")

    return reference


def item(inputs: Any, do: str = "predict", **parameters: Any) -> dict[str, Any]:
    return {"do": do, "inputs": inputs, "parameters": parameters}


def in_threads(model: PipelineModel, items: list[Any]) -> list[Any]:
    """The results of a batch with each stage in a thread of its own, as a worker runs them."""
    batch: Any = items
    for stage in (model.preprocess, model.forward, model.postprocess):
        with ThreadPoolExecutor(1) as thread:
            batch = thread.submit(stage, batch).result()
    results: list[Any] = batch
    return results


def assert_close(got: Any, wanted: Any, tolerance: float = 2e-5) -> None:
    if isinstance(wanted, float):
        assert got == pytest.approx(wanted, abs=tolerance, rel=1e-4)
    elif isinstance(wanted, (list, tuple)):
        assert len(got) == len(wanted)
        for pair in zip(got, wanted, strict=True):
            assert_close(*pair, tolerance)
    elif isinstance(wanted, dict):
        assert got.keys() == wanted.keys()
        for key in wanted:
            assert_close(got[key], wanted[key], tolerance)
    else:
        assert got == wanted


#: Model, task, and the inputs of a batch, each with parameters of its own.
MIXED: list[tuple[str, str, list[tuple[Any, dict[str, Any]]]]] = [
    (
        "", "fill-mask",
        [
            (MASKED, {}), (MASKS, {"top_k": 1}), (MASKED, {"targets": ["king", "dog", "zebra"]}),
            (MASKS, {"targets": ["time", "king"], "top_k": 9}), ("[MASK]", {"top_k": 40}),
            ("[MASK] is [SEP] [PAD] odd", {}), ("[CLS] [MASK] [MASK] [PAD]", {"top_k": 3}),
            (MASKED, {"targets": ["dog", "zebra", "king"], "top_k": 2}),
        ],
    ),
    (
        "roberta", "fill-mask",
        [("the <mask> fox", {"top_k": 300}), ("<mask>", {}), ("ä<mask>相 <mask>", {"top_k": 200})],
    ),
    (
        "classifier", "text-classification",
        [
            (SHORT, {}), (LONG, {"top_k": None}), (SHORT, {"function_to_apply": "sigmoid"}),
            ({"text": SHORT, "text_pair": LONG}, {"function_to_apply": "none", "top_k": 2}),
            ({"text": SHORT}, {}), (LONG, {"function_to_apply": "softmax", "top_k": 99}),
        ],
    ),
    (
        "tagger", "token-classification",
        [(text, {"aggregation_strategy": strategy, "ignore_labels": ignored})
         for text in (LONG, "unbelievable foxes jumped, didn't they? 相似 zzz")
         for strategy in ("none", "simple", "first", "average", "max")
         for ignored in (["O"], ["PER", "B-LOC"], [])],
    ),
    ("features", "feature-extraction", [(SHORT, {}), (3 * LONG, {"truncation": True}), ("it", {})]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "task", "batch"), MIXED, ids=lambda value: str(value)[:24])
def test_a_batch_of_mixed_parameters_is_as_one_by_one(
    served: Callable[..., PipelineModel],
    reference: Callable[..., Any],
    name: str,
    task: str,
    batch: list[tuple[Any, dict[str, Any]]],
) -> None:
    alone = reference(name, task)
    alone.tokenizer.model_max_length = 32
    wanted = [plain(alone(inputs, **parameters)) for inputs, parameters in batch]
    items = [item(inputs, **parameters) for inputs, parameters in batch]
    assert_close(in_threads(served(name, task), items), wanted)


@pytest.mark.parametrize(("name", "task", "batch"), MIXED, ids=lambda value: str(value)[:24])
@pytest.mark.parametrize("how", ["buckets", "slow tokenizer"])
def test_answers_do_not_depend_on_the_shape_nor_on_the_tokenizer(
    served: Callable[..., PipelineModel],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    task: str,
    batch: list[tuple[Any, dict[str, Any]]],
    how: str,
) -> None:
    model = served(name, task)
    items = [item(inputs, **parameters) for inputs, parameters in batch]
    if task == "feature-extraction":
        items += [item(SHORT, "embed"), item(9 * LONG, "embed", truncation=True)]
    wanted = model.predict(items)
    for handler in model.handlers.values():
        if how == "buckets":
            monkeypatch.setattr(handler, "buckets", make_buckets(32, 64))
        elif isinstance(handler, TensorHandler):
            assert handler.encoder._fast is not None
            monkeypatch.setattr(handler.encoder, "_fast", None)
    assert_close(model.predict(items), wanted)


@pytest.mark.parametrize("kind", ["single_label", "multi_label", "regression", "one label"])
@pytest.mark.parametrize("parameters", [{}, {"top_k": 2}, {"function_to_apply": "sigmoid"}])
def test_scores_of_each_kind_of_classifier(
    folder: Callable[[str], Path], kind: str, parameters: dict[str, Any]
) -> None:
    from service_streamer.pipelines.classification import TextClassifier

    model = PipelineModel("cpu")
    model.init_model(folder("classifier"))
    pipeline = model.model
    config = pipeline.model.config
    if kind == "one label":
        pipeline.model.classifier = torch.nn.Linear(16, 1)
        config.id2label = {0: "good"}
    else:
        config.problem_type = kind if kind == "regression" else f"{kind}_classification"
    wanted = [plain(pipeline(text, **parameters)) for text in (SHORT, LONG)]
    model.handlers = {"predict": TextClassifier(pipeline)}
    items = [item(text, **parameters) for text in (SHORT, LONG)]
    assert_close(in_threads(model, items), wanted)


@pytest.mark.parametrize("name", ["classifier", "features", ""])
def test_half_precision(folder: Callable[[str], Path], name: str) -> None:
    model = PipelineModel("cpu")
    model.init_model(folder(name), dtype="bfloat16")
    text = SHORT if name else MASKED
    [answer] = in_threads(model, [item(text)])
    assert_close(answer, plain(model.model(text)), 0.02)


def test_only_answers_leave_the_device(served: Callable[..., PipelineModel]) -> None:
    shapes = {
        ("", "fill-mask", MASKS): [(2, 5), (2, 5)],
        ("classifier", "text-classification", SHORT): [(1, 1), (1, 1)],
        ("features", "feature-extraction", SHORT): [(5, 16)],
    }
    for (name, task, text), wanted in shapes.items():
        model = served(name, task)
        [(_, outputs)] = model.forward(model.preprocess([item(text)]))
        found = outputs.wait()
        while not isinstance(found, torch.Tensor) and len(found) == 1:
            [found] = found
        tensors = [found] if isinstance(found, torch.Tensor) else found
        assert [tuple(each.shape) for each in tensors] == wanted


@pytest.mark.parametrize("name", ["", "roberta"])
def test_only_masks_get_logits(served: Callable[..., PipelineModel], name: str) -> None:
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
    folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    from service_streamer.pipelines.infilling import MaskFiller

    model = PipelineModel("cpu")
    model.init_model(folder(""))
    items = [item(MASKED), item(MASKS, top_k=2), item("a [MASK]")]
    wanted = model.predict(items)
    network = model.model.model
    head = network.get_output_embeddings()
    head._forward_pre_hooks.clear()
    usual = network.forward

    def forward(**inputs: Any) -> Any:
        output = usual(**inputs)
        if kind == "refused" and output.logits.ndim == 2:
            raise ValueError("not enough values to unpack")
        if kind == "scaled":  # by what it sees of other tokens
            output.logits = output.logits + torch.arange(output.logits.shape[-2])[:, None]
        return output

    monkeypatch.setattr(network, "forward", forward)
    if kind in ("unknown", "absent"):
        other = network.bert.embeddings.LayerNorm if kind == "unknown" else None
        monkeypatch.setattr(network, "get_output_embeddings", lambda: other)
    monkeypatch.setitem(model.handlers, "predict", MaskFiller(model.model))
    assert not head._forward_pre_hooks
    assert_close(model.predict(items), wanted)


def test_the_first_invalid_item_is_named(served: Callable[..., PipelineModel]) -> None:
    model = served("", "fill-mask")
    for items, message in (
        ([MASKED, "no mask", 7, item("none", targets=["x"])], "has no .MASK.; .* 'no mask'"),
        ([MASKED, 7, "no mask"], "must be a string; not 7"),
        ([item(MASKED, truncation=True), "no mask", "star " * 99], "has no .MASK"),
        (["star " * 99, item("no mask", truncation=True)], "has 101 tokens, and the limit is 64"),
    ):
        with pytest.raises(InvalidInput, match=message):
            model.preprocess(items)


def test_padding_in_front(
    served: Callable[..., PipelineModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As XLNet has it."""
    from service_streamer.pipelines.infilling import MaskFiller

    model = served("chat", "feature-extraction")  # with relative positions
    items = [item(text) for text in (SHORT, LONG, "it")]
    wanted = model.predict(items)
    handler: Any = model.handlers["predict"]
    monkeypatch.setattr(handler, "pads_left", True)
    monkeypatch.setattr(handler.encoder, "_side", "left")
    batch = handler.encoder.collate([{"input_ids": [5]}, {"input_ids": [6, 7]}], (2, 3))
    assert batch["input_ids"].tolist() == [[1, 1, 5], [1, 6, 7]]
    assert batch["attention_mask"].tolist() == [[0, 0, 1], [0, 1, 1]]
    assert_close(model.predict(items), wanted)
    filler = MaskFiller(served("", "fill-mask").model)
    filler.pads_left, filler.encoder._side = True, "left"
    model = served("", "fill-mask")
    monkeypatch.setitem(model.handlers, "predict", filler)
    [group] = model.preprocess([item(MASKED), item(MASKS)])
    places, _ = group.batch.plan
    assert set(group.batch.inputs["input_ids"].flatten()[places].tolist()) == {filler._mask}


# Tokenizers


def metaspace() -> Any:
    """Pieces that begin with the space before them, as SentencePiece makes them."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    tokenizer = tokenizers.Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    special = {"pad_token": "<pad>", "mask_token": "<mask>", "unk_token": "<unk>"}
    trainer = trainers.UnigramTrainer(
        vocab_size=120, show_progress=False, special_tokens=list(special.values()),
        unk_token="<unk>",
    )  # fmt: skip
    tokenizer.train_from_iterator(tiny_models.TEXT.splitlines(), trainer)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


@pytest.mark.parametrize("kind", ["WordPiece", "ByteLevel", "Metaspace", "none", "slow"])
@pytest.mark.parametrize("cleans", [False, True])
def test_a_text_with_one_token_exchanged(
    folder: Callable[[str], Path], kind: str, cleans: bool
) -> None:
    if kind == "slow":
        tokenizer: Any = transformers.ByT5Tokenizer()
    elif kind == "Metaspace":
        tokenizer = metaspace()
    else:
        name = folder("roberta") if kind == "ByteLevel" else DEFAULT_MODEL
        tokenizer = transformers.AutoTokenizer.from_pretrained(name)
    if kind == "none":
        tokenizer.backend_tokenizer.decoder = None
    tokenizer.clean_up_tokenization_spaces = cleans
    decoder, source = TokenDecoder(tokenizer), random.Random(1)
    assert (decoder._anchor is not None) == (kind in ("WordPiece", "ByteLevel", "Metaspace"))
    most = min(len(tokenizer), 5000)
    for length in (1, 2, 3, 9, 30):
        ids = [source.randrange(most) for _ in range(length)]
        if length == 9:  # special tokens at both ends
            ids[0] = ids[-1] = tokenizer.pad_token_id
        for at in {0, length // 2, length - 1}:
            tokens = [*source.sample(range(most), 20), *tokenizer.all_special_ids]
            for skips_special in (False, True):
                texts = decoder.variants(ids, at, tokens, skips_special=skips_special)
                for token, text in zip(tokens, texts, strict=True):
                    whole = [*ids[:at], token, *ids[at + 1 :]]
                    kept = [each for each in whole if each != tokenizer.pad_token_id]
                    assert text == tokenizer.decode(kept, skip_special_tokens=skips_special)


def test_a_slow_tokenizer_is_called_as_it_is() -> None:
    tokenizer: Any = transformers.ByT5Tokenizer()
    encoder = TextEncoder(tokenizer, takes_pairs=True)
    texts: list[Any] = ["a text", ("a text", "and another one")]
    for limit in (None, 6):
        more = {} if limit is None else {"truncation": True, "max_length": limit}
        wanted = [dict(tokenizer(texts[0], **more)), dict(tokenizer(*texts[1], **more))]
        assert encoder.encode(texts, limit) == wanted
    [row] = encoder.encode(["ab"], details=True)
    assert row["offset_mapping"] is None
    assert row["special_tokens_mask"] == [0, 0, 1]


def test_a_fast_tokenizer_that_gives_other_tokens_is_not_called_directly() -> None:
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(DEFAULT_MODEL)

    class Marking(type(tokenizer)):  # type: ignore[misc]
        def __call__(self, text: str, *args: Any, **options: Any) -> Any:
            return super().__call__(f"query {text}", *args, **options)

    tokenizer.__class__ = Marking
    encoder = TextEncoder(tokenizer)
    assert encoder._fast is None
    assert encoder.encode([SHORT])[0]["input_ids"] == tokenizer(SHORT)["input_ids"]


def test_the_encoder_keeps_its_truncation(folder: Callable[[str], Path]) -> None:
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder("classifier"))
    encoder = TextEncoder(tokenizer)
    lengths = [len(encoder.encode([LONG], limit)[0]["input_ids"]) for limit in (8, None, 5, None)]
    assert lengths[0] == 8
    assert lengths[2] == 5
    assert lengths[1] == lengths[3] > 8
    assert encoder.first_token("king queen") == tokenizer("king")["input_ids"][1]
    assert encoder.first_token("") is None
    assert len(encoder.encode([LONG], 5)[0]["input_ids"]) == 5
    assert len(tokenizer(LONG)["input_ids"]) == lengths[1]  # which is not its own
