"""The end of a text at a string, for ``model.generate``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .text_pieces import first_of


def stopping_at(tokenizer: Any, stops: Sequence[str]) -> Any:
    """A criterion that ends a row once its new text has one of the strings.

    transformers' own ``stop_strings`` prepares the whole vocabulary for each new list of strings.
    """
    from transformers import StoppingCriteria, StoppingCriteriaList

    #: A token has at least one byte; some more for tokens without text.
    tail = 8 + 4 * max(map(len, stops))

    class Stopping(StoppingCriteria):  # type: ignore[misc, unused-ignore]
        prompt: int | None = None

        def __call__(self, input_ids: Any, _scores: Any, **_options: Any) -> Any:
            import torch

            if self.prompt is None:
                self.prompt = input_ids.shape[1] - 1
            start = max(self.prompt, input_ids.shape[1] - tail)
            texts = tokenizer.batch_decode(input_ids[:, start:], skip_special_tokens=True)
            done = [first_of(stops, text) is not None for text in texts]
            return torch.tensor(done, device=input_ids.device)

    return StoppingCriteriaList([Stopping()])
