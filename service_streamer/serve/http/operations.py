"""The operations over HTTP: each turns a body into items, and outputs into a body.

operation               items                                   form of the answer
---------               -------------------                     ----------------------
/predict                the inputs as they are, or              the Hugging Face pipeline
                        {"do": "predict", ...} for each
/                       the same                                Hugging Face's InferenceClient
/generate               {"do": "generate", ...}                 {"text": ...}
/v1/completions         {"do": "generate", ...} per prompt      OpenAI
/v1/chat/completions    {"do": "generate", ...}                 OpenAI
/v1/embeddings          {"do": "embed", ...} per text           OpenAI; also at /embeddings
/embed                  {"do": "embed", ...} per text           text-embeddings-inference
/embed_all              {"do": "embed_all", ...} per text       text-embeddings-inference
/rerank                 {"do": "rerank", ...} per pair          text-embeddings-inference
/v1/rerank, /v2/rerank  {"do": "rerank", ...} per pair          Cohere, Jina
/tokenize               {"do": "tokenize", ...} per text        text-embeddings-inference, vLLM
/decode                 {"do": "decode", ...} per text          text-embeddings-inference
/detokenize             {"do": "decode", ...}                   vLLM
/v2/models/NAME/infer   a row of each tensor                    Open Inference Protocol
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NamedTuple

import msgspec
from starlette.responses import Response

from ..v2.infer_request import InferenceHeader
from .completions import chat, completions
from .context import RequestContext
from .embeddings import (
    EmbedAllRequest,
    EmbeddingsRequest,
    EmbeddingsResponse,
    EmbedRequest,
    embed,
    embed_all,
    embeddings,
)
from .generation_schemas import (
    ChatRequest,
    ChatResponse,
    CompletionsRequest,
    CompletionsResponse,
    GenerateRequest,
    GenerateResponse,
)
from .hub_generation import generate
from .json_bodies import BinaryAnswer, JSONAnswer
from .predicting import REQUESTS_OF_TASKS, TEXT_TASKS, infer, predict
from .reranking import (
    DocumentsRequest,
    DocumentsResponse,
    Rank,
    RerankRequest,
    rerank,
    rerank_documents,
)
from .schemas import (
    HubRequest,
    HubTextRequest,
    PredictRequest,
    TextRequest,
)
from .service import Description
from .streaming import EventStream
from .tensor_inference import infer_tensors
from .tokens import (
    DecodeRequest,
    DetokenizeRequest,
    DetokenizeResponse,
    TokenInText,
    TokenizeRequest,
    TokensOfPrompt,
    decode,
    detokenize,
    tokenize,
)


class Operation(NamedTuple):
    """An operation, served by POST.

    Attributes:
        path: its path.
        does: the operation that the model must support.
        summary: for the documentation.
        request, response: schemas; None for anything.
        example: makes a request of an input, for the documentation; None without an example.
        is_openais: whether its errors have OpenAI's statuses.
        streams: whether the answer may be server-sent events.
        needs: which models support it, for the error of others; empty if that is no surprise.
        is_v2: whether they have the form of the Open Inference Protocol.
        run: computes the answer's body from the request's, or begins the stream that it is.
    """

    path: str
    does: str
    summary: str
    request: type[msgspec.Struct]
    response: Any
    run: Callable[[bytes, RequestContext], Awaitable[JSONAnswer | BinaryAnswer | EventStream]]
    example: Callable[[Any], dict[str, Any]] | None = None
    is_openais: bool = False
    streams: bool = False
    needs: str = ""
    is_v2: bool = False

    def request_for(self, description: Description) -> type[msgspec.Struct]:
        """The schema of this model's requests."""
        task = description.get("task")
        if self.takes_files and task in REQUESTS_OF_TASKS:
            plain, hub = REQUESTS_OF_TASKS[task]
            return plain if self.request is PredictRequest else hub
        return _OF_TEXTS.get(self.request, self.request) if task in TEXT_TASKS else self.request

    @property
    def takes_files(self) -> bool:
        """Whether a body may be a file, or a form with files."""
        return self.request in _OF_TEXTS


#: Schemas of requests for any model, and for models that take text only.
_OF_TEXTS: Mapping[type[msgspec.Struct], type[msgspec.Struct]] = {
    PredictRequest: TextRequest,
    HubRequest: HubTextRequest,
}

_EMBEDS = "a model for feature-extraction that has sentence embeddings"
_RERANKS = "a model for text-classification that has one label, which is a cross-encoder"
_TOKENIZES = "a model that takes text"


def _inputs(value: Any) -> dict[str, Any]:
    return {"inputs": value}


OPERATIONS = (
    Operation(
        "/predict", "predict", "Run the model on one or several inputs",
        PredictRequest, None, predict, example=_inputs, streams=True,
    ),
    Operation(
        "/", "predict", "The same, in the form of Hugging Face's InferenceClient",
        HubRequest, None, infer, example=_inputs, streams=True,
    ),
    Operation(
        "/generate", "generate", "Continue a text",
        GenerateRequest, GenerateResponse, generate,
        example=lambda value: {"text": value}, streams=True,
    ),
    Operation(
        "/v1/completions", "generate", "Completions, in OpenAI's form",
        CompletionsRequest, CompletionsResponse, completions,
        example=lambda value: {"prompt": value}, is_openais=True, streams=True,
    ),
    Operation(
        "/v1/chat/completions", "generate", "Answers to a chat, in OpenAI's form",
        ChatRequest, ChatResponse, chat,
        example=lambda value: {"messages": [{"role": "user", "content": value}]},
        is_openais=True, streams=True,
    ),
    Operation(
        "/v1/embeddings", "embed", "Sentence embeddings, in OpenAI's form",
        EmbeddingsRequest, EmbeddingsResponse, embeddings,
        example=lambda value: {"input": value}, is_openais=True, needs=_EMBEDS,
    ),
    Operation(
        "/embeddings", "embed", "The same",
        EmbeddingsRequest, EmbeddingsResponse, embeddings,
        example=lambda value: {"input": value}, is_openais=True, needs=_EMBEDS,
    ),
    Operation(
        "/embed", "embed", "Sentence embeddings, in text-embeddings-inference's form",
        EmbedRequest, list[list[float]], embed, example=_inputs, needs=_EMBEDS,
    ),
    Operation(
        "/embed_all", "embed_all", "Embeddings of each token, in text-embeddings-inference's form",
        EmbedAllRequest, list[list[list[float]]], embed_all,
        example=_inputs, needs="a model for feature-extraction",
    ),
    Operation(
        "/rerank", "rerank", "Order texts by a query, in text-embeddings-inference's form",
        RerankRequest, list[Rank], rerank,
        example=lambda value: {"query": value, "texts": [value]}, needs=_RERANKS,
    ),
    Operation(
        "/v1/rerank", "rerank", "Order documents by a query, in Cohere's and Jina's form",
        DocumentsRequest, DocumentsResponse, rerank_documents,
        example=lambda value: {"query": value, "documents": [value]},
        is_openais=True, needs=_RERANKS,
    ),
    Operation(
        "/v2/rerank", "rerank", "The same",
        DocumentsRequest, DocumentsResponse, rerank_documents,
        example=lambda value: {"query": value, "documents": [value]},
        is_openais=True, needs=_RERANKS,
    ),
    Operation(
        "/tokenize", "tokenize", "The tokens of texts",
        TokenizeRequest, list[list[TokenInText]] | TokensOfPrompt, tokenize,
        example=_inputs, needs=_TOKENIZES,
    ),
    Operation(
        "/decode", "decode", "The texts of tokens",
        DecodeRequest, list[str], decode, needs=_TOKENIZES,
    ),
    Operation(
        "/detokenize", "decode", "The text of tokens, in vLLM's form",
        DetokenizeRequest, DetokenizeResponse, detokenize, needs=_TOKENIZES,
    ),
)  # fmt: skip

#: Its path names the model: see ``Routes``.
INFER = Operation(
    "/v2/models/{model}/infer", "predict", "Run the model on tensors (Open Inference Protocol)",
    InferenceHeader, None, infer_tensors, is_v2=True,
)  # fmt: skip


class Page(NamedTuple):
    """A path for GET that is documented.

    Attributes:
        path: its path; ``{model}`` stands for a model's name.
        answer: gives the response.
        summary: for the documentation; empty for a path that is not there.
        response: what the response is.
        media: its content type.
        unready: what it says if the model is not ready, with status 503; empty if it never does.
        needs_key: whether it needs the API key, since it reveals the traffic.
        scope: that the key must have; None for any key.
        is_of_model: whether it is about one model; at the root that is the default model.
        is_polled: whether it has no span: it is read every few seconds, or endless.
    """

    path: str
    answer: Callable[..., Awaitable[Response]]
    summary: str = ""
    response: str = ""
    media: str = "application/json"
    unready: str = ""
    needs_key: bool = False
    scope: str | None = None
    is_of_model: bool = False
    is_polled: bool = False
