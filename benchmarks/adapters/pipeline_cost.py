"""Processor time that a worker spends around the forward pass of a text pipeline.

``python -m adapters.pipeline_cost '{"rounds": 50}'`` prints, for each task, milliseconds of
processor time per batch of 64 texts of 17 tokens, by stage. The model has the shapes of BERT-base,
and its forward pass is replaced by one that returns ready outputs, as if a GPU had computed them.
``head_ms`` is what is left of ``forward``: softmax, top-k and pooling, which a GPU computes, too.
``besides_ms``: everything but that. ``pipeline_ms``, with ``"pipeline": true``: the same texts
through transformers' own pipeline.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import minilm
from service_streamer.pipelines import PipelineModel

_TEXTS, _TOKENS = 64, 17
_HIDDEN, _LABELS, _WORDS = 768, 9, 30_522  # of BERT-base, and of entities

#: By name: task, operation, class of the model.
_CASES: dict[str, tuple[str, str, str]] = {
    "fill-mask": ("fill-mask", "predict", "BertForMaskedLM"),
    "text-classification": (
        "text-classification", "predict", "BertForSequenceClassification"
    ),
    "token-classification": (
        "token-classification", "predict", "BertForTokenClassification"
    ),
    "feature-extraction": ("feature-extraction", "predict", "BertModel"),
    "embed": ("feature-extraction", "embed", "BertModel"),
}  # fmt: skip

#: Charles Dickens, "A Tale of Two Cities", without punctuation.
_PASSAGE = """
It was the best of times it was the worst of times it was the age of wisdom it was the age of folly
it was the time of belief it was the time of doubt it was the season of Light it was the season of
Darkness it was the spring of hope it was the winter of despair we had everything before us we had
nothing before us we were all going direct to Heaven we were all going direct the other way
"""


def texts(task: str) -> list[str]:
    """Texts of 15 words of one token each; the other two tokens are special."""
    words = _PASSAGE.split()
    starts = range(0, _TEXTS * 3, 3)
    cut = [[words[(at + place) % len(words)] for place in range(_TOKENS - 2)] for at in starts]
    for text in cut if task == "fill-mask" else ():
        text[7] = "[MASK]"
    return [" ".join(text) for text in cut]


def build(folder: Path, kind: str) -> Path:
    """A model with BERT-base's inputs and outputs and hardly anything between them."""
    import torch
    import transformers

    config = transformers.BertConfig(
        vocab_size=_WORDS, hidden_size=_HIDDEN, intermediate_size=64, num_hidden_layers=1
    )
    if kind != "BertModel":
        entities = (f"{at}-{of}" for of in ("PER", "LOC", "ORG", "MISC") for at in "BI")
        labels = ("NEGATIVE", "POSITIVE") if "Sequence" in kind else ("O", *entities)
        config.id2label = dict(enumerate(labels))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        getattr(transformers, kind)(config).save_pretrained(folder)
    for file in minilm.find().glob("*token*"):
        shutil.copy(file, folder)
    shutil.copy(minilm.find() / "vocab.txt", folder)
    return folder


def outputs(kind: str, shape: tuple[int, int]) -> Any:
    """What the model would return."""
    import torch
    from transformers.modeling_outputs import BaseModelOutput, MaskedLMOutput

    with torch.random.fork_rng():
        torch.manual_seed(1)
        if kind == "BertModel":
            return BaseModelOutput(last_hidden_state=torch.randn(*shape, _HIDDEN))
        if "Sequence" in kind:
            return MaskedLMOutput(logits=torch.randn(shape[0], 2))
        if "Token" in kind:  # eight of nine tokens are no entity's
            bias = torch.zeros(_LABELS).index_fill(0, torch.tensor([0]), 2.8)
            return MaskedLMOutput(logits=torch.randn(*shape, _LABELS) + bias)
        return MaskedLMOutput(logits=torch.randn(*shape, _WORDS))


def spent(call: Callable[[], Any], rounds: int) -> tuple[float, Any]:
    """Processor time of one call in milliseconds, the median of ``rounds``; and its result."""
    result, times = call(), []
    for _ in range(rounds):
        before = time.process_time()
        result = call()
        times.append(1e3 * (time.process_time() - before))
    return statistics.median(times), result


def figures(name: str, folder: Path, rounds: int, *, with_pipeline: bool) -> dict[str, float]:
    task, do, kind = _CASES[name]
    model = PipelineModel("cpu")
    model.init_model(build(folder, kind), task)
    sent = texts(task)
    items = [{"do": do, "inputs": text, "parameters": {}} for text in sent]
    whole = outputs(kind, (_TEXTS, _TOKENS))

    def forward(**inputs: Any) -> Any:
        count, tokens = inputs["input_ids"].shape
        assert tokens == _TOKENS
        return type(whole)(**{key: value[:count] for key, value in whole.items()})

    model.model.model.forward = forward
    before, batch = spent(lambda: model.preprocess(items), rounds)
    head, computed = spent(lambda: model.forward(batch), rounds)
    after, _ = spent(lambda: model.postprocess(computed), rounds)
    found = {
        "preprocess_ms": before,
        "head_ms": head,
        "postprocess_ms": after,
        "besides_ms": before + after,
    }
    if with_pipeline and do == "predict":
        once = max(1, rounds // 10)
        found["pipeline_ms"], _ = spent(lambda: model.model(sent, batch_size=_TEXTS), once)
    return found


def rows(rounds: int, *, with_pipeline: bool) -> Iterator[dict[str, Any]]:
    import torch
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    torch.set_num_threads(1)  # what torch computes here, a GPU would
    for name in _CASES:
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
            found = figures(name, Path(folder), rounds, with_pipeline=with_pipeline)
        yield {"point": {"task": name}, "figures": found}


def main() -> None:
    options = json.loads(sys.argv[1]) if len(sys.argv) > 1 else {}
    for each in rows(options.get("rounds", 50), with_pipeline=options.get("pipeline", False)):
        print(json.dumps(each), flush=True)
    print(json.dumps({"ended": True}), flush=True)


if __name__ == "__main__":
    main()
