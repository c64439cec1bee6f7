"""Text tasks with one answer per text, and sentence embeddings: checks, token counts, calls."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

from ..errors import InvalidInput
from .handlers import Handler
from .inputs import read_text
from .requests import Request, call_pipeline, quote

__all__ = ["SentenceEmbedder", "TextPredictor", "fit_text", "prepare_padding", "token_limit"]

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


def fit_text(
    text: str,
    limit: int | None,
    tokenizer: Any,
    *,
    truncates: bool | None = None,
    field: str = "inputs",
) -> str:
    """The text; with truncation, the part that may have tokens within the limit.

    Args:
        truncates: whether to truncate; None if requests cannot choose.

    Raises:
        InvalidInput: it is too long, and ``truncates`` is not set.
    """
    most = _LONGEST if limit is None else max(_SHORT, _CHARACTERS_PER_TOKEN * limit)
    if len(text) <= most:
        return text
    if truncates:
        return text[-most:] if tokenizer.truncation_side == "left" else text[:most]
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


class TextPredictor(Handler):
    """ "predict" of every text task but generation.

    Args:
        pipeline: a pipeline of transformers.
        task: its name.
        batch_size: maximum number of rows per forward pass, for tasks with several rows per text.
    """

    def __init__(self, pipeline: Any, task: str, batch_size: int) -> None:
        self.pipeline = pipeline
        self.task = task
        self.tokenizer = pipeline.tokenizer
        self.batch_size = batch_size
        self.can_batch = prepare_padding(pipeline.model, self.tokenizer, "right")
        self.limit = token_limit(pipeline.model, self.tokenizer)
        if self.limit is not None:
            self.tokenizer.model_max_length = self.limit  # length after truncation
        #: For ``prepare``, which may run in another thread than ``forward``.
        self._counter = copy.deepcopy(self.tokenizer)

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
            ids = self._counter(**texts, truncation=truncates)["input_ids"]
            if not ids:
                raise InvalidInput(f"inputs: {quote(request.inputs)} has no tokens; send a text")
            self._check_length(len(ids))
            if self.task == "fill-mask":
                self._check_fill_mask(request, ids)
            request.tokens = len(ids)
            if truncates:
                request.parameters["truncation"] = True
        request.group_by(request.parameters)

    def forward(self, batch: list[Request]) -> list[Any]:
        """Compute requests of one group, in one call of the pipeline."""
        options = dict(batch[0].parameters)
        truncates = options.pop("truncation", False)
        if truncates and self.task == "fill-mask":
            options["tokenizer_kwargs"] = {"truncation": True}
        elif truncates and self.task != "token-classification":  # which always does
            options["truncation"] = True
        size = len(batch)
        if self.task == "zero-shot-classification":  # a forward pass for each label
            size = min(size * len(options["candidate_labels"]), max(size, self.batch_size))
        inputs = [request.inputs for request in batch]
        outputs = call_pipeline(self.pipeline, inputs, options, size if self.can_batch else 1)
        if len(batch) > 1:
            return [self._as_single(*pair) for pair in zip(batch, outputs, strict=True)]
        return outputs

    def _as_single(self, request: Request, output: Any) -> Any:
        """A batch's output in the form of a single input's."""
        if self.task == "feature-extraction":  # padding has features, too
            is_right = self.tokenizer.padding_side == "right"
            part = slice(request.tokens) if is_right else slice(-request.tokens, None)
            return [output[0][part]]
        is_list = self.task == "text-classification" and isinstance(request.inputs, str)
        return [output] if is_list and "top_k" not in request.parameters else output

    def _texts(self, request: Request, *, truncates: bool) -> dict[str, str]:
        """The tokenizer's arguments: a text or a text pair, long ones truncated."""
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
                "it, or set the parameter truncation"
            )

    def _check_pairs(self, request: Request, *, truncates: bool) -> None:
        options = request.parameters
        template = options.get("hypothesis_template", "This example is {}.")
        labels = [template.format(label) for label in options["candidate_labels"]]
        pairs = self._counter([request.inputs] * len(labels), labels)["input_ids"]
        request.tokens = max(map(len, pairs))
        if not truncates:
            self._check_length(request.tokens)
        if self.limit is None:
            return
        longest = max(map(len, self._counter(labels)["input_ids"]))
        if longest + 2 > self.limit:  # one token of the text, and the separator
            raise InvalidInput(
                f"parameters.candidate_labels: a label has {longest} tokens, and the limit is "
                f"{self.limit} with the text; shorten it"
            )

    def _check_fill_mask(self, request: Request, ids: list[int]) -> None:
        if self.tokenizer.mask_token_id not in ids:
            mask = self.tokenizer.mask_token
            raise InvalidInput(
                f"inputs: the text has no {mask}"
                + (" before the cut" if mask in request.inputs else "")
                + f"; write {mask} in place of the missing word: {quote(request.inputs)}"
            )
        words = self.pipeline.model.config.vocab_size
        if request.parameters.get("top_k", 0) > words:
            raise InvalidInput(
                f"parameters.top_k: must be at most {words}, the size of the model's vocabulary"
            )
        targets = request.parameters.get("targets", ())
        for target in (targets,) if isinstance(targets, str) else targets:
            if not self._counter(target, add_special_tokens=False)["input_ids"]:
                raise InvalidInput(
                    f"parameters.targets: {quote(target)} is not in the model's vocabulary"
                )


_POOLINGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_lasttoken": "lasttoken",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
}


class SentenceEmbedder(Handler):
    """ "embed": one vector of length 1 per text.

    Pooling is over the tokens of the text: their mean, unless the model's files say otherwise.

    Args:
        features: predictor of the same pipeline.
        read_json: reads a JSON file of the model; returns None if there is no such file.

    Attributes:
        limit: maximum number of tokens of a text.
        obstacle: why the embeddings would differ from sentence-transformers'; empty if they agree.
    """

    def __init__(self, features: TextPredictor, read_json: Callable[[str], Any]) -> None:
        self.pipeline = features.pipeline
        self.tokenizer = copy.deepcopy(features.tokenizer)
        settings = read_json("sentence_bert_config.json") or {}
        limits = (features.limit, settings.get("max_seq_length"))
        self.limit: int | None = min((each for each in limits if each), default=None)
        self.lowers = bool(settings.get("do_lower_case"))
        self.pooling, self.obstacle = _pooling(read_json)

    def prepare(self, request: Request) -> None:
        """Check the text, and turn it into token ids. Raises InvalidInput."""
        truncates = bool(request.parameters.get("truncation"))
        text = read_text(request.inputs, may_be_blank=True)
        text = fit_text(text, self.limit, self.tokenizer, truncates=truncates)
        ids = self.tokenizer(
            text.lower() if self.lowers else text, truncation=truncates, max_length=self.limit
        )["input_ids"]
        if not ids:
            raise InvalidInput("inputs: the text has no tokens; send a text")
        if self.limit is not None and len(ids) > self.limit:
            raise InvalidInput(
                f"inputs: the text has {len(ids)} tokens, and the limit is {self.limit}; shorten "
                "it, or set the parameter truncation"
            )
        request.inputs, request.tokens = ids, len(ids)
        request.group_by({})

    def forward(self, batch: list[Request]) -> list[Any]:
        """Compute requests in one forward pass."""
        import torch

        device = self.pipeline.device
        longest = max(request.tokens for request in batch)
        # Tokens whose mask is 0 are ignored.
        padding = [[self.tokenizer.pad_token_id or 0] * (longest - each.tokens) for each in batch]
        ids = [each.inputs + more for each, more in zip(batch, padding, strict=True)]
        mask = [
            [1] * each.tokens + [0] * len(more) for each, more in zip(batch, padding, strict=True)
        ]
        with self.pipeline.device_placement(), torch.inference_mode():
            attention = torch.tensor(mask, device=device)
            states = self.pipeline.model(
                input_ids=torch.tensor(ids, device=device), attention_mask=attention
            )[0]
            pooled = _pool(states.float(), attention, self.pooling)
            vectors = torch.nn.functional.normalize(pooled, dim=-1).cpu()
        return [
            {"embedding": vector, "tokens": request.tokens}
            for vector, request in zip(vectors.tolist(), batch, strict=True)
        ]


def _pool(states: Any, mask: Any, pooling: str) -> Any:
    if pooling == "cls":
        return states[:, 0]  # padding is behind the text
    if pooling == "lasttoken":
        return states[range(len(states)), mask.sum(dim=1) - 1]
    weights = mask.unsqueeze(-1).to(states.dtype)
    if pooling == "max":
        return states.masked_fill(weights == 0, float("-inf")).amax(dim=1)
    return (states * weights).sum(dim=1) / weights.sum(dim=1)


def _pooling(read_json: Callable[[str], Any]) -> tuple[str, str]:
    """The pooling mode from the model's files, and why it is not supported."""
    modules = read_json("modules.json")
    if modules is None:
        return "mean", ""
    kinds = {str(module.get("type")).rpartition(".")[2]: module for module in modules}
    unknown = sorted(kinds.keys() - {"Transformer", "Pooling", "Normalize"})
    if unknown:
        return "mean", f"it has modules of sentence-transformers, such as {unknown[0]}"
    if "Pooling" not in kinds:
        return "mean", ""
    settings = read_json(f"{kinds['Pooling'].get('path')}/config.json") or {}
    named = settings.get("pooling_mode")  # of newer versions
    modes = [named] if named else [mode for mode, on in settings.items() if on is True]
    pooled = [
        _POOLINGS.get(mode, mode) for mode in modes
        if mode == named or mode.startswith("pooling_mode")
    ]  # fmt: skip
    if len(pooled) > 1 or any(mode not in _POOLINGS.values() for mode in pooled):
        return "mean", f"it pools by {' and '.join(map(str, pooled))}"
    return (pooled[0] if pooled else "mean"), ""
