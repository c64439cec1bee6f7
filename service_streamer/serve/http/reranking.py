"""/rerank in text-embeddings-inference's form, /v1/rerank and /v2/rerank in Cohere's and Jina's."""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta, Struct

from .context import RequestContext
from .embeddings import TRUNCATE, TruncationFields, truncation_parameters
from .json_bodies import JSONAnswer, read_json
from .schemas import Ignored


class RerankRequest(TruncationFields):
    """Texts to order by how well they match the query."""

    query: str
    texts: Annotated[list[str], Meta(min_length=1)]
    raw_scores: Annotated[
        bool, Meta(description="return the model's logits instead of scores from 0 to 1")
    ] = False
    return_text: bool = False


class Rank(Struct, omit_defaults=True):
    """A text's place in the request, and its score."""

    index: int
    score: float
    text: str | None = None


class Document(Struct, forbid_unknown_fields=True):
    """A document as an object."""

    text: str


class DocumentsRequest(Struct, forbid_unknown_fields=True):
    """Documents to order by how well they match the query."""

    query: str
    documents: Annotated[list[str | Document], Meta(min_length=1)]
    model: Ignored = None
    top_n: Annotated[int, Meta(ge=1, description="return so many of the best")] | None = None
    return_documents: bool | None = False
    truncate: Annotated[
        bool, Meta(description="truncate a document that is too long instead of refusing it")
    ] = True
    user: Ignored = None


class RankedDocument(Struct, omit_defaults=True):
    """A document's place in the request, and its score from 0 to 1."""

    index: int
    relevance_score: float
    document: Document | None = None


class TotalTokens(Struct):
    """Number of tokens of all pairs of query and document."""

    total_tokens: int


class DocumentsResponse(Struct):
    """The best documents, best first."""

    id: str
    model: str
    results: list[RankedDocument]
    usage: TotalTokens


class _Scored(NamedTuple):
    """How well the texts match.

    Attributes:
        order: places of the texts in the request, best first.
        logits: of the texts, in the order of the request.
        tokens: of all pairs.
    """

    order: list[int]
    logits: list[float]
    tokens: int


_read_texts = msgspec.json.Decoder(RerankRequest)
_read_documents = msgspec.json.Decoder(DocumentsRequest)


async def rerank(body: bytes, context: RequestContext) -> JSONAnswer:
    request: RerankRequest = await read_json(_read_texts, body)
    found = await _scored(
        request.query, request.texts, "texts", truncation_parameters(request), context
    )
    return await context.answer(
        lambda: [
            Rank(
                index,
                found.logits[index] if request.raw_scores else _sigmoid(found.logits[index]),
                request.texts[index] if request.return_text else None,
            )
            for index in found.order
        ]
    )


async def rerank_documents(body: bytes, context: RequestContext) -> JSONAnswer:
    request: DocumentsRequest = await read_json(_read_documents, body)
    texts = [each if isinstance(each, str) else each.text for each in request.documents]
    parameters = {"truncation": request.truncate}
    found = await _scored(request.query, texts, "documents", parameters, context)
    results = [
        RankedDocument(
            index,
            _sigmoid(found.logits[index]),
            Document(texts[index]) if request.return_documents else None,
        )
        for index in found.order[: request.top_n]
    ]
    id_ = f"rerank-{secrets.token_hex(12)}"
    answer = DocumentsResponse(id_, context.model, results, TotalTokens(found.tokens))
    return await context.answer(lambda: answer)


async def _scored(
    query: str,
    texts: Sequence[str],
    field: str,
    parameters: dict[str, Any],
    context: RequestContext,
) -> _Scored:
    names = {"inputs": field, "inputs.text": "query", "inputs.text_pair": field, **TRUNCATE}
    pairs = [{"text": query, "text_pair": each} for each in texts]
    outputs = await context.compute_each("rerank", pairs, parameters, names)
    logits = [each["score"] for each in outputs]
    # By logits: scores near 1 are equal in floating point.
    order = sorted(range(len(logits)), key=logits.__getitem__, reverse=True)
    return _Scored(order, logits, sum(each["tokens"] for each in outputs))


def _sigmoid(logit: float) -> float:
    if logit >= 0:
        return 1 / (1 + math.exp(-logit))
    return math.exp(logit) / (1 + math.exp(logit))
