"""Texts of a given form: a JSON schema, or a regular expression.

By the package llguidance, which needs no other package and no time ahead for each schema: it tells
which tokens may come next, from step to step.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ..errors import InvalidInput
from ..reporting import missing
from .form_limits import regex_obstacle, schema_obstacle

#: Parameters that give a text a form.
FORMS = ("json_schema", "regex")

#: White space between JSON's parts may go on without end, so a schema has to ask for it
#: (``x-guidance``). Without it separators are "," and ":".
_JSON_OPTIONS: Any = {"whitespace_flexible": False}


class TokenConstraint:
    """The form of one text.

    Args:
        matcher: of llguidance.
        field: of the request that asks for the form.

    Attributes:
        failure: why the text cannot go on, such as a form that has become too complex; else None.
    """

    def __init__(self, matcher: Any, field: str) -> None:
        self.failure: InvalidInput | None = None
        self._matcher = matcher
        self._field = field

    def copied(self) -> TokenConstraint:
        """The same form for another text, at the state of this one."""
        return TokenConstraint(self._matcher.deep_copy(), self._field)

    @property
    def is_over(self) -> bool:
        """Whether the text is complete and nothing may follow."""
        return bool(self._matcher.is_stopped())

    def mask(self, scores: Any) -> None:
        """Remove the tokens that may not come next; none, if the text has failed.

        Args:
            scores: a tensor of shape ``(vocabulary,)``, changed in place.
        """
        import numpy
        import torch

        bits = numpy.frombuffer(self._matcher.compute_bitmask(), numpy.uint8)
        are_in = numpy.unpackbits(bits, bitorder="little", count=scores.shape[0]).astype(bool)
        if not self._is_well(is_possible=bool(are_in.any())):
            return
        scores[~torch.from_numpy(are_in).to(scores.device)] = -float("inf")

    def accept(self, token: int) -> None:
        """Take the token that has come.

        It raises nothing: the other texts of the step have taken theirs.
        """
        if self.failure is None:
            self._is_well(is_possible=self._matcher.consume_token(token))

    def fail(self, why: str) -> None:
        """The text cannot go on, unless it has failed already."""
        if self.failure is None:
            self.failure = InvalidInput(f"{self._field}: the text cannot go on: {_brief(why)}")

    def _is_well(self, *, is_possible: bool) -> bool:
        if self.failure is None and (not is_possible or self._matcher.is_error()):
            self.fail(self._matcher.get_error() or "no token of the model fits")
        return self.failure is None


def _brief(error: str) -> str:
    """The first line of an error of llguidance, and behind it the reason, if that has its own."""
    first, *others = error.splitlines()
    return " ".join([first[:200], *(each for each in others if each.startswith("error: "))])[:300]


class Structures:
    """Makes constraints for texts of one model. Belongs to one thread.

    Args:
        tokenizer: of transformers.
        ends: tokens that end a text.
        size: number of logits of the model.

    Attributes:
        size: the same.
    """

    def __init__(self, tokenizer: Any, ends: set[int], size: int) -> None:
        self._tokenizer = tokenizer
        self._ends = sorted(ends)
        self.size = size
        self._known: Any = None

    def make(self, parameters: Mapping[str, Any]) -> TokenConstraint | None:
        """The constraint that a request's parameters ask for; None if they ask for none.

        Raises:
            InvalidInput: the form is not supported or too complex; or this worker has no package
                for it.
        """
        form = next((name for name in FORMS if name in parameters), None)
        if form is None:
            return None
        field = f"parameters.{form}"
        try:
            from llguidance import LLMatcher
            from llguidance.hf import from_tokenizer
        except ImportError as error:
            # With a colon behind the field: callers over HTTP know it by another name.
            told = missing("this service", error.name, "structured")
            raise InvalidInput(f"{field}: {told} (extra structured)") from None
        try:
            if self._known is None:  # takes a second
                self._known = from_tokenizer(
                    self._tokenizer, n_vocab=self.size, eos_token=self._ends or None
                )
            text = parameters[form]
            is_json = form == "json_schema"
            wrong = schema_obstacle(json.loads(text)) if is_json else regex_obstacle(text)
            if wrong:
                raise ValueError(wrong)
            if is_json:
                grammar = LLMatcher.grammar_from_json_schema(text, defaults=_JSON_OPTIONS)
            else:
                grammar = LLMatcher.grammar_from_regex(text)
            matcher = LLMatcher(self._known, grammar, log_level=0)
            wrong = matcher.get_error()
        except ValueError as error:
            wrong = str(error)
        if wrong:
            raise InvalidInput(f"{field}: {_brief(wrong)}")
        return TokenConstraint(matcher, field)
