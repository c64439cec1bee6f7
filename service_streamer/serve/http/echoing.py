"""The prompts that begin the texts of /v1/completions with ``echo``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .context import RequestContext
from .logprobs import Echo
from .refusals import unsupported


async def echoes_of(
    prompts: Sequence[Any], logprobs: int | None, context: RequestContext, *, counts: bool
) -> list[Echo]:
    """The echo of each prompt. What only the model knows is asked for in one call.

    Args:
        prompts: texts, and lists of tokens.
        logprobs: how many of the likeliest tokens are told in place of each; None for no log
            probabilities.
        counts: whether the numbers of tokens are needed.

    Raises:
        Refusal: the model does not compute log probabilities of prompts.
        InvalidInput: a prompt is wrong.
    """
    if logprobs is not None and "score" not in context.description.get("operations", ()):
        raise unsupported(
            "logprobs",
            "is not supported with echo: this model computes none of a prompt; leave one of them "
            "out",
        )
    items: list[Any] = []
    for prompt in prompts:
        is_text = isinstance(prompt, str)
        if not is_text:
            items.append(_item("decode", prompt, skip_special_tokens=False))
        if logprobs is not None:
            items.append(_item("score", prompt, logprobs=logprobs))
        elif counts and is_text:
            items.append(_item("tokenize", prompt))
    results = iter(await context.compute(items) if items else ())
    echoes = []
    for prompt in prompts:
        text = prompt if isinstance(prompt, str) else next(results)
        if logprobs is not None:
            tokens = next(results)
            echoes.append(Echo(text, tokens, len(tokens)))
        elif isinstance(prompt, str):
            echoes.append(Echo(text, None, len(next(results)) if counts else 0))
        else:
            echoes.append(Echo(text, None, len(prompt)))
    return echoes


def _item(do: str, prompt: Any, **parameters: Any) -> dict[str, Any]:
    return {"do": do, "inputs": prompt, "parameters": parameters}
