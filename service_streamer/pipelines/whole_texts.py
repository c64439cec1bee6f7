"""Checks texts that only ``model.generate`` can compute, while texts of a token each step wait."""

from __future__ import annotations

from typing import Any

from ..errors import InvalidInput
from .requests import Request
from .text_handler import BY_STEPS, has_prefix

#: Tokens of all beams of a search: no other text of the worker gets one until it is over. Enough
#: for what the settings of known models ask for, such as 6 beams of 512 tokens. Arbitrary.
_MOST_SEARCHED = 8192


def check_whole(request: Request, pipeline: Any) -> None:
    """Check a request that cannot be computed step by step.

    Args:
        request: which its handler's ``prepare`` has checked.
        pipeline: of transformers.

    Raises:
        InvalidInput: it has a parameter that needs steps, or holds up all others too long.
    """
    parameters = request.parameters
    defaults = pipeline.model.generation_config
    beams = parameters.get("num_beams", defaults.num_beams) or 1
    for name in BY_STEPS:
        if name not in parameters:
            continue
        why, out = "this model's generation_config.json asks for a search, such as by beams", name
        if has_prefix(pipeline):
            why = "this model's prompts have a text before them, and its answers come as a whole"
        elif parameters.get("num_beams", 1) > 1:
            why, out = "num_beams asks for a search by beams", f"num_beams or {name}"
        raise InvalidInput(f"parameters.{name}: {why}; leave {out} out")
    asked = parameters.get("max_new_tokens")
    texts = parameters.get("num_return_sequences", defaults.num_return_sequences) or 1
    if asked is not None and beams > 1 and beams * texts * asked > _MOST_SEARCHED:
        raise InvalidInput(
            f"parameters.max_new_tokens: must be at most {_MOST_SEARCHED // (beams * texts)} for "
            f"{beams} beams and {texts} texts, since all other texts wait for such a search; not "
            f"{asked}"
        )
