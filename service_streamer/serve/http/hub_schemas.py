"""Schemas of requests in the forms of text-embeddings-inference, and of their answers."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from .refusals import unsupported
from .schemas import HubTextRequest, Ignored, TextRequest, TextsOrTokens, Token

_Truncate = Annotated[
    bool | None, Meta(description="truncate a text that is too long instead of refusing it")
]
#: A pattern, since generated clients give "left" and "Left" of an enum the same name.
_Side = Annotated[str, Meta(pattern="^(left|right|Left|Right)$")]
_Direction = Annotated[_Side | None, Meta(description="side that is truncated: left or right")]
_PromptName = Annotated[
    str | None, Meta(description="which of the model's prompts comes before a text")
]
NO_PROMPTS = "is only for sentence embeddings; write the prompt before the text"

_Dimensions = Annotated[int, Meta(ge=1, description="so many of the first numbers")] | None


class Cut(Struct, forbid_unknown_fields=True, kw_only=True):
    """What requests for texts have in common."""

    truncate: _Truncate = None
    truncation_direction: _Direction = None
    prompt_name: _PromptName = None


class EmbedRequest(Cut):
    """Texts, for one vector each."""

    inputs: TextsOrTokens
    normalize: Annotated[bool, Meta(description="scale each vector to length 1")] = True
    dimensions: _Dimensions = None


class EmbedAllRequest(Cut):
    """Texts, for a vector of each of their tokens."""

    inputs: TextsOrTokens


class SimilarityInputs(Struct, forbid_unknown_fields=True):
    """A sentence, and those that it is compared with."""

    source_sentence: str
    sentences: Annotated[list[str], Meta(min_length=1)]


class HubFeaturesRequest(HubTextRequest):
    """The form of Hugging Face's InferenceClient, for models that embed texts.

    With ``normalize``, ``dimensions`` or ``prompt_name`` the answer is one vector per text.
    Otherwise it has a vector of each token.
    """

    inputs: str | list[str] | SimilarityInputs  # type: ignore[assignment]
    normalize: bool | None = None
    dimensions: _Dimensions = None
    prompt_name: _PromptName = None
    truncation_direction: _Direction = None
    encoding_format: Literal["float"] | None = None


class ClassificationRequest(TextRequest):
    """One text, or a list of texts; or text-embeddings-inference's form.

    In its form a list has lists of one text, or of a pair of texts.
    """

    inputs: str | list[str | Annotated[list[str], Meta(min_length=1, max_length=2)]]  # type: ignore[assignment]
    truncate: _Truncate = None
    truncation_direction: _Direction = None
    raw_scores: Annotated[
        bool | None, Meta(description="return the model's logits, of all labels")
    ] = None


class TokenizeRequest(Struct, forbid_unknown_fields=True):
    """Texts as ``inputs``; or a ``prompt``, as vLLM has it."""

    inputs: str | list[str] | None = None
    prompt: str | None = None
    add_special_tokens: bool = True
    prompt_name: _PromptName = None
    model: Ignored = None


class TokenInText(Struct):
    """A token, and its place in the text, in characters; special tokens have none."""

    id: int
    text: str
    special: bool
    start: int | None
    stop: int | None


class TokensOfPrompt(Struct):
    """vLLM's form."""

    count: int
    max_model_len: int | None
    tokens: list[int]


class DecodeRequest(Struct, forbid_unknown_fields=True):
    """Tokens of one text, or of each of several texts."""

    ids: Annotated[list[Token | list[Token]], Meta(min_length=1)]
    skip_special_tokens: bool = True


class DetokenizeRequest(Struct, forbid_unknown_fields=True):
    """Tokens of one text, in vLLM's form."""

    tokens: Annotated[list[Token], Meta(min_length=1)]
    skip_special_tokens: bool = False
    model: Ignored = None


class DetokenizeResponse(Struct):
    """vLLM's form."""

    prompt: str


def cutting(
    request: Cut | ClassificationRequest | HubFeaturesRequest, *, takes_prompts: bool = False
) -> dict[str, Any]:
    """The model's parameters for what a request says of truncation, and of a prompt.

    Raises:
        Refusal: it names a prompt, and its operation takes none.
    """
    parameters: dict[str, Any] = {}
    prompt = getattr(request, "prompt_name", None)
    if prompt is not None:
        if not takes_prompts:
            raise unsupported("prompt_name", NO_PROMPTS)
        parameters["prompt_name"] = prompt
    if request.truncate is not None:
        parameters["truncation"] = request.truncate
    if request.truncation_direction is not None:
        parameters["truncation_side"] = request.truncation_direction.lower()
    return parameters
