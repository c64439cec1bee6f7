"""Text tasks on tensors: one tokenization for check and model, one forward pass, results by tensor.

Pipelines of transformers tokenize and finish text by text, which takes more time than a GPU needs
for the batch. What a GPU can do is done there, and only what is answered is copied to the host.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, NamedTuple

from ..errors import InvalidInput
from ..gpu.transfers import OnHost, to_device, to_host, to_pinned
from .encoding import Text, TextEncoder
from .handlers import Handler
from .inputs import read_text, read_tokens
from .requests import Request, quote
from .texts import check_length, fit_text, prepare_padding, token_limit, vocabulary_size


class TextBatch(NamedTuple):
    """What ``forward`` gets.

    Attributes:
        inputs: the model's, tensors of shape (texts, tokens) on the CPU. There may be more rows
            than texts; those behind are of no use.
        plan: what the requests ask for, in a form that the handler chooses.
    """

    inputs: Mapping[str, Any]
    plan: Any = None


class TensorHandler(Handler):
    """Texts to tensors and back. A subclass computes results from the model's outputs.

    Requests share a forward pass whatever their parameters are.

    Args:
        pipeline: a pipeline of transformers, whose model and tokenizer are used.
    """

    has_buckets = True
    #: Whether ``finish`` needs more of each token than its number; see ``TextEncoder.encode``.
    needs_details = False
    takes_pairs = False
    #: Whether an input may be a list of the model's own tokens, and whether a text may be blank.
    takes_tokens = False
    may_be_blank = False
    #: The model's inputs and the side of padding, where they are not the tokenizer's.
    inputs: tuple[str, ...] | None = None
    side: str | None = None

    def __init__(self, pipeline: Any) -> None:
        self.pipeline = pipeline
        self.tokenizer = pipeline.tokenizer
        self.can_batch = prepare_padding(pipeline.model, self.tokenizer, "right")
        self.pads_left: bool = self.tokenizer.padding_side == "left"
        self.limit = token_limit(pipeline.model, self.tokenizer)
        self.encoder = TextEncoder(self.tokenizer, takes_pairs=self.takes_pairs)
        self.vocabulary = vocabulary_size(pipeline)

    def prepare(self, request: Request) -> None:
        if self.takes_tokens and isinstance(request.inputs, (list, tuple)):
            self._take_tokens(request)
        else:
            request.inputs = self.fit(
                read_text(request.inputs, may_be_blank=self.may_be_blank), request
            )
        self.choose_group(request)

    def fit(self, text: str, request: Request, field: str = "inputs") -> str:
        """The part of a text that may have tokens within the limit, as ``fit_text`` does."""
        truncates, side = _cut(request)
        return fit_text(
            text, self.limit, self.tokenizer, truncates=truncates, side=side, field=field
        )

    def _take_tokens(self, request: Request) -> None:
        tokens = read_tokens(request.inputs, self.vocabulary)
        truncates, side = _cut(request)
        if truncates and self.limit is not None:
            is_left = (side or self.tokenizer.truncation_side) == "left"
            tokens = tokens[-self.limit :] if is_left else tokens[: self.limit]
        nothing = [0] * len(tokens)
        request.encoded = {**dict.fromkeys(self.encoder.names, nothing), "input_ids": tokens}

    def choose_group(self, request: Request) -> None:
        """Set a request's key."""
        if self.can_batch:
            request.group_by({})
        else:
            request.be_alone()

    def encode(self, requests: list[Request]) -> None:
        alike: dict[tuple[bool, str | None], list[Request]] = {}
        for request in requests:
            if request.encoded is None:
                alike.setdefault(_cut(request), []).append(request)
        for (truncates, side), some in alike.items():
            limit = self.limit if truncates else None
            texts = [self.text_of(request) for request in some]
            rows = self.encoder.encode(texts, limit, side, details=self.needs_details)
            for request, row in zip(some, rows, strict=True):
                request.encoded = row
        for request in requests:
            request.tokens = len(request.encoded["input_ids"])
            try:
                self.check(request)
            except InvalidInput as error:
                request.error = error

    def text_of(self, request: Request) -> Text:
        """What to tokenize."""
        text: str = request.inputs
        return text

    def check(self, request: Request) -> None:
        """Check a request's tokens. Raises InvalidInput."""
        if not request.tokens:
            raise InvalidInput(f"inputs: {quote(request.inputs)} has no tokens; send a text")
        check_length(request.tokens, self.limit)

    def collate(self, requests: list[Request]) -> TextBatch:
        shape = self._shape(requests)
        rows = [request.encoded for request in requests]
        inputs = self.encoder.collate(rows, shape, self.inputs, self.side)
        return to_pinned(TextBatch(inputs, self.plan(requests)))

    def padded_length(self, requests: list[Request]) -> int:
        """Tokens of each row of the requests' batch."""
        return self._shape(requests)[1]

    def _shape(self, requests: list[Request]) -> tuple[int, int]:
        longest = max(request.tokens for request in requests)
        return self.buckets.shape(len(requests), longest)

    def plan(self, requests: list[Request]) -> Any:  # noqa: ARG002
        """What ``compute`` has to know of the requests."""
        return None

    def forward(self, batch: TextBatch) -> OnHost[Any]:
        import torch

        device = self.pipeline.device
        with self.pipeline.device_placement(), torch.inference_mode():
            inputs, plan = to_device(batch, device)
            return to_host(self.compute(inputs, plan))

    def finish(self, requests: list[Request], outputs: OnHost[Any]) -> list[Any]:
        return self.results(requests, outputs.wait())

    @abstractmethod
    def compute(self, inputs: Mapping[str, Any], plan: Any) -> Any:
        """Call the model, and compute what is answered, on its device.

        Args:
            inputs: the model's, on its device.
            plan: of the requests; its tensors are on that device, too.

        Returns:
            Tensors in any container.
        """

    @abstractmethod
    def results(self, requests: list[Request], outputs: Any) -> list[Any]:
        """One result per request, as JSON data, from what ``compute`` returned, on the host."""


def raw_logits(output: Any) -> Any:
    """The logits in a model's output."""
    return output["logits"] if isinstance(output, dict) else output[0]


def logits_of(output: Any) -> Any:
    """The logits in a model's output, in float32."""
    return raw_logits(output).float()


def _cut(request: Request) -> tuple[bool, str | None]:
    """Whether a request's text is truncated, and on which side; None for the tokenizer's."""
    parameters = request.parameters
    return parameters.get("truncation") is True, parameters.get("truncation_side")
