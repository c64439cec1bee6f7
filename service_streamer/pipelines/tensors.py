"""Text tasks on tensors: one tokenization for check and model, one forward pass, results by tensor.

Pipelines of transformers tokenize and finish text by text, which takes more time than a GPU needs
for the batch. What a GPU can do is done there, and only what is answered is copied to the host.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ..errors import InvalidInput
from ..gpu.transfers import OnHost, to_device, to_host, to_pinned
from .handlers import Handler
from .inputs import read_text, read_tokens
from .requests import Request, quote
from .texts import check_length, fit_text, prepare_padding, token_limit, vocabulary_size

#: A text, or a pair of texts.
Text = str | tuple[str, str]

#: A text's tokens: by the name of a model's input, such as "input_ids", one number per token.
Row = dict[str, Any]

#: To compare a tokenizer with its fast part: cases, accents, scripts, special tokens and a pair.
_SAMPLES: tuple[Text, ...] = (
    "Ada Lovelace's two cats (2) went to the ÉCOLE.  相似的句子 <s></s> [SEP] <mask> <|endoftext|>",
    ("One text", "and the other one, which is a little longer"),
)


class TextEncoder:
    """Tokenizes texts. Belongs to one thread: it has a tokenizer of its own, which has a state.

    A tokenizer's fast part (of the package tokenizers) is called directly if it gives the same
    tokens: in Python, transformers takes as long again.

    Args:
        tokenizer: a tokenizer of transformers, with its padding side and token set.
        takes_pairs: whether pairs of texts will be encoded.

    Attributes:
        names: names of the model's inputs.
    """

    def __init__(self, tokenizer: Any, *, takes_pairs: bool = False) -> None:
        self._tokenizer = copy.deepcopy(tokenizer)
        self._side: str = tokenizer.padding_side
        self._pad: int = tokenizer.pad_token_id or 0
        self.names = tuple(self._tokenizer(_SAMPLES[0]))
        #: How the fast part truncates now: limit and side; None if unknown.
        self._cut: tuple[int | None, str] | None = None
        self._fast: Any = None
        if getattr(tokenizer, "is_fast", False) and set(self.names) <= _NAMES:
            self._use_fast(_SAMPLES if takes_pairs else _SAMPLES[:1])

    def encode(
        self,
        texts: Sequence[Text],
        limit: int | None = None,
        side: str | None = None,
        *,
        details: bool = False,
    ) -> list[Row]:
        """The tokens of each text.

        Args:
            limit: number of tokens to truncate to; None does not truncate.
            side: where to truncate, "left" or "right"; None takes the tokenizer's.
            details: add "tokens", "special_tokens_mask" and "offset_mapping": each token's string,
                whether the tokenizer added it, and its place in the text (None if unknown).
        """
        side = side or self._tokenizer.truncation_side
        if self._fast is None:
            return [self._slowly(text, limit, side, details=details) for text in texts]
        if (limit, side) != self._cut:
            self._cut = limit, side
            if limit is None:
                self._fast.no_truncation()
            else:
                self._fast.enable_truncation(limit, direction=side)
        # Without offsets it is faster; versions before 0.20 always compute them.
        name = "encode_batch" if details else "encode_batch_fast"
        encode = getattr(self._fast, name, self._fast.encode_batch)
        has_types = "token_type_ids" in self.names
        rows: list[Row] = []
        for encoding in encode(list(texts)):
            row: Row = {"input_ids": encoding.ids}
            if has_types:
                row["token_type_ids"] = encoding.type_ids
            if details:
                row["tokens"] = encoding.tokens
                row["special_tokens_mask"] = encoding.special_tokens_mask
                row["offset_mapping"] = encoding.offsets
            rows.append(row)
        return rows

    def first_token(self, text: str) -> int | None:
        """The token that stands for a word; None if it has none."""
        tokenizer, self._cut = self._tokenizer, None
        ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids[-1 if tokenizer.truncation_side == "left" else 0] if ids else None

    def collate(
        self,
        rows: Sequence[Row],
        shape: tuple[int, int],
        names: Sequence[str] | None = None,
        side: str | None = None,
    ) -> dict[str, Any]:
        """The model's inputs as tensors on the CPU, of int64.

        Args:
            shape: of each tensor: texts and tokens, at least as many as there are.
            names: the inputs to make; None makes all.
            side: where to pad, "left" or "right"; None takes the tokenizer's.
        """
        import numpy as np
        import torch

        lengths = np.full(shape[0], shape[1])  # rows without a text: a mask of zeros makes nan
        lengths[: len(rows)] = [len(row["input_ids"]) for row in rows]
        mask = np.arange(shape[1]) < lengths[:, None]
        if (side or self._side) == "left":
            mask = mask[:, ::-1]
        inputs: dict[str, Any] = {}
        for name in names or self.names:
            if name == "attention_mask":
                array = mask.astype(np.int64)
            else:
                array = np.full(shape, self._pad if name == "input_ids" else 0, np.int64)
                there = array[: len(rows)]
                there[mask[: len(rows)]] = np.concatenate([row[name] for row in rows])
            inputs[name] = torch.from_numpy(array)
        return inputs

    def _use_fast(self, samples: Sequence[Text]) -> None:
        """Use the fast part, if its tokens are the tokenizer's, truncated or not."""
        limits = (None, 16)
        side = self._tokenizer.truncation_side
        wanted = [[self._slowly(text, limit, side) for text in samples] for limit in limits]
        self._fast = self._tokenizer.backend_tokenizer
        self._fast.no_padding()
        self._cut = None
        found = [self.encode(samples, limit) for limit in limits]
        for rows in wanted:
            for row in rows:
                row.pop("attention_mask", None)
        if found != wanted:
            self._fast = None

    def _slowly(self, text: Text, limit: int | None, side: str, *, details: bool = False) -> Row:
        more: dict[str, Any] = {} if limit is None else {"truncation": True, "max_length": limit}
        if details:
            more |= {"return_special_tokens_mask": True}
            more |= {"return_offsets_mapping": getattr(self._tokenizer, "is_fast", False)}
        usual, self._tokenizer.truncation_side = self._tokenizer.truncation_side, side
        try:
            row = dict(self._tokenizer(*((text,) if isinstance(text, str) else text), **more))
        finally:
            self._tokenizer.truncation_side = usual
        if details:
            row["tokens"] = self._tokenizer.convert_ids_to_tokens(row["input_ids"])
            row.setdefault("offset_mapping", None)
        return row


#: Inputs that the fast part gives.
_NAMES = {"attention_mask", "input_ids", "token_type_ids"}


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
