"""How many tokens a request has used, for the limits of its API key. Pure.

Embeddings and generated texts come with their usage. Otherwise a token is estimated as 4
characters, of the inputs and of generated texts. Images and sounds have no tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...pipelines.sizes import sizes_of
from ...pipelines.tasks import GENERATING, TASKS
from .context import Description
from .events import Form

__all__ = ["CountedForm", "StreamTokens", "estimated", "tokens_used"]

_CHARACTERS_PER_TOKEN = 4


def tokens_used(description: Description, items: Sequence[Any], outputs: Sequence[Any]) -> float:
    """Tokens of a request with these items and outputs.

    What a user's own model returns is no usage, whatever its keys are: it may be the caller's text.
    """
    if description.get("task") not in TASKS:
        return estimated(description, items, outputs)
    reported = 0
    for output in outputs:
        tokens = _reported(output)
        if tokens is None:
            return estimated(description, items, outputs)
        reported += tokens
    return reported


def estimated(description: Description, items: Sequence[Any], outputs: Sequence[Any] = ()) -> float:
    """The same without usage."""
    task = description.get("task")
    sizes = sizes_of(task, items)
    characters = _characters(items) if sizes is None else sizes.characters
    if task in GENERATING:
        characters += _characters(outputs)
    return characters / _CHARACTERS_PER_TOKEN


def _reported(output: Any) -> int | None:
    """The usage that an output comes with: of an embedding, or of the texts for a prompt."""
    if isinstance(output, Mapping):
        tokens = output.get("tokens")
        return tokens if type(tokens) is int else None
    if not isinstance(output, list) or not output:
        return None
    texts = [each for each in output if isinstance(each, Mapping)]
    counts = [each.get("completion_tokens") for each in texts]
    prompt = texts[0].get("prompt_tokens") if texts else None
    made = [each for each in counts if type(each) is int]
    if type(prompt) is not int or len(made) < len(output):
        return None
    return prompt + sum(made)


def _characters(value: Any) -> int:
    """Characters of all texts in a value."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(map(_characters, value.values()))
    return sum(map(_characters, value)) if isinstance(value, (list, tuple)) else 0


class StreamTokens:
    """Counts the tokens of a stream. A client that leaves early pays for its part.

    Args:
        prompt: estimated tokens of the prompt, until they are reported.
    """

    def __init__(self, prompt: float) -> None:
        self._prompt = prompt
        self._pieces = self._reported = 0

    def count(self, output: Any) -> None:
        """Count those of an output."""
        pieces = [output]
        if isinstance(output, Mapping):
            pieces = output.get("choices", pieces)
        for piece in pieces:
            self._pieces += 1
            if isinstance(piece, Mapping) and type(piece.get("completion_tokens")) is int:
                self._reported += piece["completion_tokens"]
                prompt = piece.get("prompt_tokens")
                self._prompt = prompt if type(prompt) is int else self._prompt

    @property
    def total(self) -> float:
        """Those of the stream so far. A piece of a text has at least one."""
        return self._prompt + max(self._pieces, self._reported)


class CountedForm:
    """The form of a stream whose tokens are counted.

    Args:
        form: makes events of the outputs.
        tokens: counts them.
    """

    def __init__(self, form: Form, tokens: StreamTokens) -> None:
        self._form = form
        self._tokens = tokens

    def output(self, output: Any) -> bytes:
        self._tokens.count(output)
        return self._form.output(output)

    def end(self) -> bytes:
        return self._form.end()
