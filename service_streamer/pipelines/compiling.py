"""Compile a model with torch.compile, for a few shapes."""

from __future__ import annotations

from typing import Any


def compile_model(model: Any, shapes: int) -> None:
    """Compile a transformers model for shapes that are compiled when they first occur.

    The head of a model stays as it is: it is one or two kernels, and may get a part of the tokens.

    Args:
        shapes: how many shapes there will be.
    """
    import torch

    # Beyond the limit a model would run uncompiled, without an error. One more for each shape: the
    # flags that torch guards differ between the first call and later ones.
    config: Any = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, 2 * shapes)
    config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, 4 * shapes)
    model.base_model.compile(dynamic=False)


def text_of(tokenizer: Any, word: str, tokens: int) -> str:
    """A text of ``tokens`` tokens, or of a few less: a word again and again.

    Args:
        word: what the text begins with; "a" follows.
    """

    def text(count: int) -> str:
        return word + " a" * count

    def length(count: int) -> int:
        return len(tokenizer(text(count))["input_ids"])

    # Most tokenizers make one or two tokens of " a".
    low, high = 0, tokens
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if length(middle) <= tokens else (low, middle - 1)
    return text(low)
