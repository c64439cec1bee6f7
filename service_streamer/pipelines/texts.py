"""Checks of texts, and zero-shot classification."""

from __future__ import annotations

import copy
from typing import Any

from ..errors import InvalidInput
from .handlers import Handler
from .inputs import read_text
from .requests import Request, call_pipeline

#: Texts with more characters per token of the model's limit are refused, or cut, before their
#: tokens are counted. Counting takes seconds to a minute for two million characters, and the whole
#: batch would wait. Texts have about four characters per token, indented code about ten.
_CHARACTERS_PER_TOKEN = 32
#: Characters that every model may get; maximum for a model without a limit.
_SHORT, _LONGEST = 4096, 500_000


def token_limit(model: Any, tokenizer: Any) -> int | None:
    """Upper bound on a text's tokens, special tokens included; None without a limit."""
    limits = [int(tokenizer.model_max_length)]
    positions = getattr(model.config, "max_position_embeddings", None)
    if isinstance(positions, int) and positions > 0:
        limits.append(positions - _reserved_positions(model, positions))
    limit = min(limits)
    return limit if limit < 10**6 else None  # without a limit tokenizers have 10 ** 30


def vocabulary_size(pipeline: Any) -> int:
    """Number of tokens that a model has. The next one would break a process that uses a GPU."""
    try:
        return int(pipeline.model.get_input_embeddings().num_embeddings)
    except (AttributeError, NotImplementedError):  # such as models of characters
        return len(pipeline.tokenizer)


def fit_text(
    text: str,
    limit: int | None,
    tokenizer: Any,
    *,
    truncates: bool | None = None,
    side: str | None = None,
    field: str = "inputs",
) -> str:
    """The text; with truncation, the part that may have tokens within the limit.

    Args:
        truncates: whether to truncate; None if requests cannot choose.
        side: where to truncate, "left" or "right"; None takes the tokenizer's.

    Raises:
        InvalidInput: it is too long, and ``truncates`` is not set.
    """
    most = _LONGEST if limit is None else max(_SHORT, _CHARACTERS_PER_TOKEN * limit)
    if len(text) <= most:
        return text
    if truncates:
        is_left = (side or tokenizer.truncation_side) == "left"
        return text[-most:] if is_left else text[:most]
    may_cut = "" if truncates is None else ", or set the parameter truncation"
    unit = f"the {limit} tokens" if limit is not None else f"the {most:,} characters"
    raise InvalidInput(
        f"{field}: the text has {len(text):,} characters, more than {unit} that the "
        f"model takes; shorten it{may_cut}"
    )


def _reserved_positions(model: Any, positions: int) -> int:
    """Positions lost to padding: RoBERTa and similar models count from behind its index."""
    for module in model.modules():
        index = getattr(module, "padding_idx", None)
        if index is not None and getattr(module, "num_embeddings", None) == positions:
            return int(index) + 1
    return 0


def prepare_padding(model: Any, tokenizer: Any, side: str) -> bool:
    """Set the tokenizer's padding side and padding token.

    Returns:
        Whether texts can share a batch: false without a token to pad with.
    """
    if model.config.model_type != "xlnet":  # reads its answer at the end
        tokenizer.padding_side = side
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token
    if tokenizer.pad_token_id is None:
        return False
    if getattr(model.config, "pad_token_id", None) is None:
        model.config.pad_token_id = tokenizer.pad_token_id  # classifiers look for the last token
    return True


class ZeroShotClassifier(Handler):
    """ "predict" of zero-shot classification.

    Args:
        pipeline: a pipeline of transformers.
        batch_size: maximum number of rows per forward pass; a text has one for each label.
    """

    def __init__(self, pipeline: Any, batch_size: int) -> None:
        self.pipeline = pipeline
        self.batch_size = batch_size
        tokenizer = pipeline.tokenizer
        self.can_batch = prepare_padding(pipeline.model, tokenizer, "right")
        self.limit = token_limit(pipeline.model, tokenizer)
        if self.limit is not None:
            tokenizer.model_max_length = self.limit  # length after truncation
        #: For ``prepare``, which may run in another thread than ``forward``.
        self._counter = copy.deepcopy(tokenizer)

    def prepare(self, request: Request) -> None:
        options = request.parameters
        truncates = options.pop("truncation", False)
        text = read_text(request.inputs)
        request.inputs = fit_text(text, self.limit, self._counter, truncates=truncates)
        template = options.get("hypothesis_template", "This example is {}.")
        labels = [template.format(label) for label in options["candidate_labels"]]
        pairs = self._counter([request.inputs] * len(labels), labels)["input_ids"]
        request.tokens = max(map(len, pairs))
        if not truncates:
            check_length(request.tokens, self.limit)
        if self.limit is not None:
            longest = max(map(len, self._counter(labels)["input_ids"]))
            if longest + 2 > self.limit:  # one token of the text, and the separator
                raise InvalidInput(
                    f"parameters.candidate_labels: a label has {longest} tokens, and the limit is "
                    f"{self.limit} with the text; shorten it"
                )
        request.group_by(options)

    def forward(self, batch: list[Request]) -> list[Any]:
        """Compute requests of one group, in one call of the pipeline."""
        options, count = batch[0].parameters, len(batch)
        size = min(count * len(options["candidate_labels"]), max(count, self.batch_size))
        if self.buckets.most is not None:
            longest = max(request.tokens for request in batch)
            size = max(1, min(size, self.buckets.most // longest))
        inputs = [request.inputs for request in batch]
        return call_pipeline(self.pipeline, inputs, options, size if self.can_batch else 1)


def check_length(tokens: int, limit: int | None) -> None:
    """Raises InvalidInput: the text has more tokens than the model takes."""
    if limit is not None and tokens > limit:
        raise InvalidInput(
            f"inputs: the text has {tokens} tokens, and the limit is {limit}; shorten it, or set "
            "the parameter truncation"
        )
