"""Text tasks on tensors: one tokenization for check and model, one forward pass, results by tensor.

Pipelines of transformers tokenize and finish text by text, which takes more time than a GPU needs
for the batch. What a GPU can do is done there, and only what is answered is copied to the host.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, NamedTuple

from ..errors import InvalidInput
from ..workers.device import OnHost, to_device, to_host, to_pinned
from .encoding import Text, TextEncoder
from .handlers import Handler
from .inputs import read_text
from .requests import Request, quote
from .texts import check_length, fit_text, prepare_padding, token_limit

__all__ = ["TensorHandler", "TextBatch", "logits_of", "raw_logits"]


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

    def prepare(self, request: Request) -> None:
        text, truncates = read_text(request.inputs), _truncates(request)
        request.inputs = fit_text(text, self.limit, self.tokenizer, truncates=truncates)
        self.choose_group(request)

    def choose_group(self, request: Request) -> None:
        """Set a request's key."""
        if self.can_batch:
            request.group_by({})
        else:
            request.be_alone()

    def encode(self, requests: list[Request]) -> None:
        for truncates in (False, True):
            some = [
                each for each in requests if each.parameters.get("truncation", False) is truncates
            ]
            if not some:
                continue
            limit = self.limit if truncates else None
            texts = [self.text_of(request) for request in some]
            rows = self.encoder.encode(texts, limit, details=self.needs_details)
            for request, row in zip(some, rows, strict=True):
                request.encoded, request.tokens = row, len(row["input_ids"])
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


def _truncates(request: Request) -> bool:
    return request.parameters.get("truncation") is True
