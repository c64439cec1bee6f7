"""Models as folders that ``save_pretrained`` wrote, with random weights, and what they are asked.

Texts are words of the shipped model's vocabulary, so each has a known number of tokens. Images are
JPEG files of 500 × 375 pixels. No network is needed.
"""

from __future__ import annotations

import io
import random
from functools import cache
from pathlib import Path
from typing import Any

from on_gpu.running import Kind

__all__ = ["COUNT", "build", "images", "texts"]

#: Different items.
COUNT = 256

#: The shipped model's, whose tokenizer is used. Not imported: other interpreters lack the package.
_SHIPPED = Path(__file__).parents[2] / "service_streamer" / "models" / "text_infilling"

_CLASSES = {
    "text-classification": "BertForSequenceClassification",
    "fill-mask": "BertForMaskedLM",
    "feature-extraction": "BertModel",
}

#: To show that the program runs, and behind a stage that sleeps: next to no processor time.
_SMALL: dict[str, Any] = {
    "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8,
}  # fmt: skip


def build(task: str, kind: Kind, folder: Path) -> None:
    """Write the model of a task: BERT-base or ResNet-50 in half precision; a small one without a
    GPU, for images a ViT of four patches, since convolutions take the processor too long."""
    import torch
    import transformers

    logging: Any = transformers.utils.logging
    logging.disable_progress_bar()  # it is another thread, and lines among those of the benchmark
    torch.manual_seed(1)
    is_small = kind != "cuda"
    model: Any
    if task == "image-classification":
        transformers.ConvNextImageProcessor(
            size={"shortest_edge": 224}, crop_pct=0.875
        ).save_pretrained(folder)
        if is_small:
            vit = transformers.ViTConfig(image_size=224, patch_size=112, **_SMALL)
            model = transformers.ViTForImageClassification(vit)
        else:
            model = transformers.ResNetForImageClassification(transformers.ResNetConfig())
    else:
        tokenizer: Any = transformers.AutoTokenizer.from_pretrained(_SHIPPED, model_max_length=512)
        tokenizer.save_pretrained(folder)
        small = {"vocab_size": len(tokenizer), **_SMALL}
        config = transformers.BertConfig(**small if is_small else {})
        # Not the default ones, which are not written: infinity takes a model without for a ranker.
        config.id2label = {0: "negative", 1: "positive"}
        config.label2id = {"negative": 0, "positive": 1}
        model = getattr(transformers, _CLASSES[task])(config)
    (model if is_small else model.half()).save_pretrained(folder)


@cache
def texts(tokens: int, *, is_masked: bool) -> list[str]:
    """Texts of so many tokens each, with the two that begin and end them."""
    lines = (_SHIPPED / "vocab.txt").read_text("utf-8").splitlines()
    words = [line for line in lines if line.isascii() and line.isalpha() and line.islower()]
    source = random.Random(tokens)
    made = [source.choices(words, k=tokens - 2) for _ in range(COUNT)]
    if is_masked:
        for text in made:
            text[len(text) // 2] = "[MASK]"
    return [" ".join(text) for text in made]


@cache
def images() -> list[bytes]:
    """JPEG files. Coarse noise, so that they have the size of photographs, some 50 kB."""
    from PIL import Image

    source = random.Random(1)
    files = []
    for _ in range(COUNT // 4):
        coarse = Image.frombytes("RGB", (100, 75), source.randbytes(3 * 100 * 75))
        file = io.BytesIO()
        coarse.resize((500, 375), Image.Resampling.BICUBIC).save(file, "JPEG", quality=90)
        files.append(file.getvalue())
    return files
