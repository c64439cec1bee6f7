"""What the tokens of a row change in the scores of its next one, as the row grows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence


class TokenCounts:
    """Counts the tokens of one row. Each is read once: a long text would else cost more each step.

    Args:
        prompt: number of tokens at the row's start that were not generated.
    """

    def __init__(self, prompt: int) -> None:
        self._prompt = prompt
        self._seen: dict[int, None] = {}
        self._read = 0
        self._made: Counter[int] = Counter()
        self._added: dict[int, float] = {}
        self._costs_read = prompt

    def seen(self, tokens: Sequence[int]) -> Mapping[int, None]:
        """The different tokens of the row.

        Args:
            tokens: all of the row, which were only appended to since the last call.
        """
        self._seen.update(dict.fromkeys(tokens[self._read :]))
        self._read = len(tokens)
        return self._seen

    def added(
        self,
        tokens: Sequence[int],
        biases: Sequence[tuple[int, float]],
        frequency: float,
        presence: float,
    ) -> Mapping[int, float]:
        """What is added to logits, by token.

        Args:
            tokens: as of ``seen``.
            biases: tokens, and what is added to the logit of each.
            frequency: is taken away for each time that a token was generated.
            presence: is taken away if it was generated at all.

        All but the first are the same in each call.
        """
        usual = dict(biases)
        if self._costs_read == self._prompt:
            self._added = dict(biases)
        if frequency or presence:
            new = tokens[self._costs_read :]
            self._made.update(new)
            self._costs_read = len(tokens)
            for token in new:
                cost = frequency * self._made[token] + presence
                self._added[token] = usual.get(token, 0.0) - cost
        return self._added
