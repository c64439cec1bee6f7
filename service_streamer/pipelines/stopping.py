"""The end of a text at a string, for ``model.generate``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .text_pieces import PromptTail, first_of

#: Tokens before the new ones that may say how those are written.
_BEFORE = 64


def stopping_at(tokenizer: Any, stops: Sequence[str]) -> Any:
    """A criterion that ends a row once its new text has one of the strings.

    transformers' own ``stop_strings`` prepares the whole vocabulary for each new list of strings.
    """
    from transformers import StoppingCriteria, StoppingCriteriaList

    #: A token has at least one byte; some more for tokens without text.
    window = 8 + 4 * max(map(len, stops))

    def decode(tokens: list[int]) -> str:
        return str(tokenizer.decode(tokens, skip_special_tokens=True))

    def has_stop(before: list[int], tokens: list[int]) -> bool:
        text = PromptTail(decode, before).text_behind(tokens)
        return first_of(stops, text) is not None

    class Stopping(StoppingCriteria):  # type: ignore[misc, unused-ignore]
        prompt: int | None = None

        def __call__(self, input_ids: Any, _scores: Any, **_options: Any) -> Any:
            import torch

            if self.prompt is None:
                self.prompt = input_ids.shape[1] - 1
            start = max(self.prompt, input_ids.shape[1] - window)
            known = max(0, start - _BEFORE)
            rows = input_ids[:, known:].tolist()
            done = [has_stop(row[: start - known], row[start - known :]) for row in rows]
            return torch.tensor(done, device=input_ids.device)

    return StoppingCriteriaList([Stopping()])
