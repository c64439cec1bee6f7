"""The operations over HTTP: each turns a body into items, and outputs into a body.

operation               items                                   form of the answer
---------               -------------------                     ----------------------
/predict                the inputs as they are, or              the Hugging Face pipeline
                        {"do": "predict", ...} for each
/                       the same                                Hugging Face's InferenceClient
/generate               {"do": "generate", ...}                 {"text": ...}
/v1/completions         {"do": "generate", ...} per prompt      OpenAI
/v1/chat/completions    {"do": "generate", ...}                 OpenAI
/v1/embeddings          {"do": "embed", ...} per text           OpenAI
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import NamedTuple

import msgspec

from .completions import chat, completions
from .context import Context, Description, encode, plain
from .embeddings import embeddings
from .generating import generate
from .generation_schemas import (
    ChatRequest,
    ChatResponse,
    CompletionsRequest,
    CompletionsResponse,
    GenerateRequest,
    GenerateResponse,
    GenerationRequest,
    HubGenerationRequest,
)
from .predicting import TEXT_TASKS, infer, predict
from .schemas import (
    EmbeddingsRequest,
    EmbeddingsResponse,
    HubRequest,
    HubTextRequest,
    PredictRequest,
    TextRequest,
)
from .streaming import EventStream

__all__ = ["OPERATIONS", "Context", "Description", "Operation", "encode", "plain"]


class Operation(NamedTuple):
    """An operation, served by POST.

    Attributes:
        path: its path.
        does: the operation that the model must support.
        summary: for the documentation.
        request, response: schemas; None for anything.
        is_openais: whether its errors have OpenAI's statuses.
        streams: whether the answer may be server-sent events.
        run: computes the answer's body from the request's, or begins the stream that it is.
    """

    path: str
    does: str
    summary: str
    request: type[msgspec.Struct]
    response: type[msgspec.Struct] | None
    run: Callable[[bytes, Context], Awaitable[bytes | EventStream]]
    is_openais: bool = False
    streams: bool = False

    def request_for(self, description: Description) -> type[msgspec.Struct]:
        """The schema of this model's requests."""
        task = description.get("task")
        if task == "text-generation":
            return _OF_GENERATION.get(self.request, self.request)
        return _OF_TEXTS.get(self.request, self.request) if task in TEXT_TASKS else self.request

    @property
    def takes_files(self) -> bool:
        """Whether a body may be a file, or a form with files."""
        return self.request in _OF_TEXTS


#: Schemas of requests for any model, and for models that take text.
_OF_TEXTS: Mapping[type[msgspec.Struct], type[msgspec.Struct]] = {
    PredictRequest: TextRequest,
    HubRequest: HubTextRequest,
}
_OF_GENERATION: Mapping[type[msgspec.Struct], type[msgspec.Struct]] = {
    PredictRequest: GenerationRequest,
    HubRequest: HubGenerationRequest,
}

OPERATIONS = (
    Operation(
        "/predict", "predict", "Run the model on one or several inputs",
        PredictRequest, None, predict, streams=True,
    ),
    Operation(
        "/", "predict", "The same, in the form of Hugging Face's InferenceClient",
        HubRequest, None, infer, streams=True,
    ),
    Operation(
        "/generate", "generate", "Continue a text",
        GenerateRequest, GenerateResponse, generate, streams=True,
    ),
    Operation(
        "/v1/completions", "generate", "Completions, in OpenAI's form",
        CompletionsRequest, CompletionsResponse, completions, is_openais=True, streams=True,
    ),
    Operation(
        "/v1/chat/completions", "generate", "Answers to a chat, in OpenAI's form",
        ChatRequest, ChatResponse, chat, is_openais=True, streams=True,
    ),
    Operation(
        "/v1/embeddings", "embed", "Sentence embeddings, in OpenAI's form",
        EmbeddingsRequest, EmbeddingsResponse, embeddings, is_openais=True,
    ),
)  # fmt: skip
