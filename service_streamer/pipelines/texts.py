"""The tasks on texts that give one answer per text: checks, token counts and the call itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import InvalidInput
from .inputs import read_text
from .parameters import quote
from .requests import Request, call_pipeline

__all__ = ["TextPredictor", "fit_text", "prepare_padding", "token_limit"]

#: A text with more characters than this for each token that the model takes is refused, or cut,
#: before its tokens are counted: that takes seconds to a minute for two million characters, and all
#: who share the batch would wait. Texts have some four characters a token, indented code some ten.
_CHARACTERS_PER_TOKEN = 32
#: Short enough for every model; and the most for a model without a limit.
_SHORT, _LONGEST = 4096, 500_000


def token_limit(model: Any, tokenizer: Any) -> int | None:
    """The most tokens that a text may have, special ones included; None where there is no limit."""
    limits = [int(tokenizer.model_max_length)]
    positions = getattr(model.config, "max_position_embeddings", None)
    if isinstance(positions, int) and positions > 0:
        limits.append(positions - _reserved_positions(model, positions))
    limit = min(limits)
    return limit if limit < 10**6 else None  # a tokenizer that knows of none says 10 ** 30


def fit_text(
    text: str,
    limit: int | None,
    tokenizer: Any,
    *,
    truncates: bool | None = None,
    field: str = "inputs",
) -> str:
    """The text, or if it is to be cut, as much of it as may have tokens within the limit.

    Args:
        truncates: whether it is to be cut; None where requests cannot ask for that.

    Raises:
        InvalidInput: it is so long that it cannot fit, and is not to be cut.
    """
    most = _LONGEST if limit is None else max(_SHORT, _CHARACTERS_PER_TOKEN * limit)
    if len(text) <= most:
        return text
    if truncates:
        return text[-most:] if tokenizer.truncation_side == "left" else text[:most]
    may_cut = "" if truncates is None else ", or have it cut with the parameter truncation"
    unit = f"the {limit} tokens" if limit is not None else f"the {most:,} characters"
    raise InvalidInput(
        f"{field}: the text has {len(text):,} characters, which is longer than {unit} that the "
        f"model takes; shorten it{may_cut}"
    )


def _reserved_positions(model: Any, positions: int) -> int:
    """RoBERTa and its kin count positions from behind the one for padding."""
    for module in model.modules():
        index = getattr(module, "padding_idx", None)
        if index is not None and getattr(module, "num_embeddings", None) == positions:
            return int(index) + 1
    return 0


def prepare_padding(model: Any, tokenizer: Any, side: str) -> bool:
    """Make the tokenizer pad a batch on a side, with some token.

    Returns:
        Whether texts can share a batch: not where there is no token to pad with.
    """
    if model.config.model_type != "xlnet":  # which reads its answer off the end
        tokenizer.padding_side = side
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token
    if tokenizer.pad_token_id is None:
        return False
    if getattr(model.config, "pad_token_id", None) is None:
        model.config.pad_token_id = tokenizer.pad_token_id  # classifiers look for the last token
    return True


class TextPredictor:
    """ "predict" of every text task but generation. Belongs to one thread.

    Args:
        pipeline: a pipeline of transformers.
        task: its name.
        batch_size: the most forward passes at once, for a task with several per text.
    """

    def __init__(self, pipeline: Any, task: str, batch_size: int) -> None:
        self.pipeline = pipeline
        self.task = task
        self.tokenizer = pipeline.tokenizer
        self.batch_size = batch_size
        self.can_batch = prepare_padding(pipeline.model, self.tokenizer, "right")
        self.limit = token_limit(pipeline.model, self.tokenizer)
        if self.limit is not None:
            self.tokenizer.model_max_length = self.limit  # what truncation cuts to

    def prepare(self, request: Request) -> None:
        """Check a request, and count its tokens.

        Raises:
            InvalidInput: it cannot be computed.
        """
        truncates = request.parameters.pop("truncation", False)
        texts = self._texts(request, truncates=truncates)
        if self.task == "zero-shot-classification":
            self._check_pairs(request, truncates=truncates)
        else:
            ids = self.tokenizer(**texts, truncation=truncates)["input_ids"]
            if not ids:
                raise InvalidInput(f"inputs: {quote(request.inputs)} has no tokens; send a text")
            self._check_length(len(ids))
            if self.task == "fill-mask":
                self._check_fill_mask(request, ids)
            request.tokens = len(ids)
            if truncates:
                request.parameters["truncation"] = True
        request.group_by(request.parameters)

    def run(self, requests: list[Request]) -> list[Any]:
        """Compute requests of one group, in one call of the pipeline."""
        options = dict(requests[0].parameters)
        truncates = options.pop("truncation", False)
        if truncates and self.task == "fill-mask":
            options["tokenizer_kwargs"] = {"truncation": True}
        elif truncates and self.task != "token-classification":  # which always does
            options["truncation"] = True
        size = len(requests)
        if self.task == "zero-shot-classification":  # a forward pass for each label
            size = min(size * len(options["candidate_labels"]), max(size, self.batch_size))
        inputs = [request.inputs for request in requests]
        outputs = call_pipeline(self.pipeline, inputs, options, size if self.can_batch else 1)
        if len(requests) > 1:
            return [self._as_single(*pair) for pair in zip(requests, outputs, strict=True)]
        return outputs

    def _as_single(self, request: Request, output: Any) -> Any:
        """An output of a batch in the form that it has for a single input."""
        if self.task == "feature-extraction":  # padding has features, too
            is_right = self.tokenizer.padding_side == "right"
            part = slice(request.tokens) if is_right else slice(-request.tokens, None)
            return [output[0][part]]
        is_list = self.task == "text-classification" and isinstance(request.inputs, str)
        return [output] if is_list and "top_k" not in request.parameters else output

    def _texts(self, request: Request, *, truncates: bool) -> dict[str, str]:
        """What the tokenizer takes: a text, or a pair of them. Of long ones a part is kept."""
        inputs = request.inputs
        if self.task != "text-classification" or not isinstance(inputs, Mapping):
            text = fit_text(read_text(inputs), self.limit, self.tokenizer, truncates=truncates)
            request.inputs = text
            return {"text": text}
        if inputs.keys() - {"text_pair"} != {"text"}:
            raise InvalidInput(
                'inputs: must be a string, or {"text": ..., "text_pair": ...}; '
                f"not {quote(dict(inputs))}"
            )
        texts: dict[str, str] = {}
        for name, value in inputs.items():
            text = read_text(value, field=f"inputs.{name}")
            texts[name] = fit_text(
                text, self.limit, self.tokenizer, truncates=truncates, field=f"inputs.{name}"
            )
        request.inputs = texts
        return texts

    def _check_length(self, tokens: int) -> None:
        if self.limit is not None and tokens > self.limit:
            raise InvalidInput(
                f"inputs: the text has {tokens} tokens, and the limit is {self.limit}; shorten "
                "it, or have it cut with the parameter truncation"
            )

    def _check_pairs(self, request: Request, *, truncates: bool) -> None:
        options = request.parameters
        template = options.get("hypothesis_template", "This example is {}.")
        labels = [template.format(label) for label in options["candidate_labels"]]
        pairs = self.tokenizer([request.inputs] * len(labels), labels)["input_ids"]
        request.tokens = max(map(len, pairs))
        if not truncates:
            self._check_length(request.tokens)
        if self.limit is None:
            return
        longest = max(map(len, self.tokenizer(labels)["input_ids"]))
        if longest + 2 > self.limit:  # one token of the text, and what parts the two
            raise InvalidInput(
                f"parameters.candidate_labels: a label makes {longest} tokens, and the limit is "
                f"{self.limit} with the text; shorten it"
            )

    def _check_fill_mask(self, request: Request, ids: list[int]) -> None:
        if self.tokenizer.mask_token_id not in ids:
            mask = self.tokenizer.mask_token
            raise InvalidInput(
                f"inputs: the text has no {mask}"
                + (" before the place where it is cut" if mask in request.inputs else "")
                + f"; write {mask} in place of the missing word: {quote(request.inputs)}"
            )
        words = self.pipeline.model.config.vocab_size
        if request.parameters.get("top_k", 0) > words:
            raise InvalidInput(f"parameters.top_k: must be at most {words}, the model's words")
        targets = request.parameters.get("targets", ())
        for target in (targets,) if isinstance(targets, str) else targets:
            if not self.tokenizer(target, add_special_tokens=False)["input_ids"]:
                raise InvalidInput(f"parameters.targets: {quote(target)} is no word of the model's")
