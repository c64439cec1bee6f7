"""Inputs that are texts or lists of the model's tokens: what a request has of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from msgspec import Meta

from .refusals import invalid

Token = Annotated[int, Meta(ge=0, le=2**31 - 1, description="the number of a token of the model")]

#: A text or its tokens, or a list of texts and lists of tokens.
TextsOrTokens = Annotated[
    str | list[str | Token | list[Token]],
    Meta(description="a text, a list of the model's tokens, or a list of texts and such lists"),
]


def inputs_of(
    value: str | Sequence[str | int | list[int]], field: str
) -> tuple[Sequence[str | int | list[int]], bool]:
    """The inputs of a request, each a text or a list of tokens, and whether it is a single one.

    Raises:
        Refusal: there is none, one has no tokens, or a token stands among texts.
    """
    if isinstance(value, str):
        return [value], True
    if not value:
        raise invalid(field, "is empty; send at least one text")
    numbers = [each for each in value if isinstance(each, int)]
    if len(numbers) == len(value):
        return [numbers], True
    if numbers:
        raise invalid(
            f"{field}[{value.index(numbers[0])}]",
            "is a token among texts; send the tokens of one text as a list of their own",
        )
    if [] in value:
        raise invalid(f"{field}[{value.index([])}]", "is empty; send at least one token")
    return value, False
