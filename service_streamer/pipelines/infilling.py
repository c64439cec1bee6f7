""" "predict" of fill-mask."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ..errors import InvalidInput
from ..gpu.transfers import to_device
from .decoding import TokenDecoder
from .requests import Request, quote
from .tensors import TensorHandler, raw_logits

#: Words per mask, unless a request says how many; as in transformers' pipeline.
_WORDS = 5


class Part(NamedTuple):
    """Masks of requests with the same targets.

    Attributes:
        masks: how many there are.
        targets: the numbers of the words to choose from, a tensor; None for all words.
        top: the most words that a request asks for.
    """

    masks: int
    targets: Any
    top: int


class MaskFiller(TensorHandler):
    """The most likely words for each mask of a text."""

    def __init__(self, pipeline: Any) -> None:
        super().__init__(pipeline)
        self._mask: int = self.tokenizer.mask_token_id
        self._words: int = pipeline.model.config.vocab_size
        self._decoder = TokenDecoder(self.tokenizer)
        self._vocabulary: dict[str, int] | None = None
        rows = self.encoder.encode([f"a {self.tokenizer.mask_token} a"])
        sample = self.encoder.collate(rows, (1, len(rows[0]["input_ids"])))
        with pipeline.device_placement():
            self._head = MaskedHead(pipeline.model, to_device(sample, pipeline.device))

    def check(self, request: Request) -> None:
        super().check(request)
        row, parameters = request.encoded, request.parameters
        row["masks"] = [at for at, number in enumerate(row["input_ids"]) if number == self._mask]
        if not row["masks"]:
            mask = self.tokenizer.mask_token
            raise InvalidInput(
                f"inputs: the text has no {mask}"
                + (" before the cut" if mask in request.inputs else "")
                + f"; write {mask} in place of the missing word: {quote(request.inputs)}"
            )
        if parameters.get("top_k", 0) > self._words:
            raise InvalidInput(
                f"parameters.top_k: must be at most {self._words}, the size of the model's "
                "vocabulary"
            )
        targets = parameters.get("targets")
        row["targets"] = None if targets is None else self._numbers(targets)

    def plan(self, requests: list[Request]) -> tuple[Any, list[Part]]:
        """Where the masks are among all rows' tokens, part by part; and the parts."""
        import torch

        longest = self.padded_length(requests)
        starts = {
            request.position: row * longest + (longest - request.tokens if self.pads_left else 0)
            for row, request in enumerate(requests)
        }
        places: list[int] = []
        parts: list[Part] = []
        for targets, some in _by_targets(requests):
            before = len(places)
            for each in some:
                places += [starts[each.position] + at for at in each.encoded["masks"]]
            numbers = None if targets is None else torch.tensor(targets)
            parts.append(Part(len(places) - before, numbers, max(map(_top_of, some))))
        return torch.tensor(places), parts

    def compute(self, inputs: Mapping[str, Any], plan: tuple[Any, list[Part]]) -> Any:
        places, parts = plan
        rows = self._head.logits(inputs, places).float()
        found: list[Any] = []
        for part, some in zip(parts, rows.split([part.masks for part in parts]), strict=True):
            whole = some.logsumexp(-1, keepdim=True)
            if part.targets is not None:
                some = some.index_select(1, part.targets)
            values, numbers = some.topk(min(part.top, some.shape[1]))
            words = numbers if part.targets is None else part.targets[numbers]
            found.append(((values - whole).exp(), words))
        return found

    def results(self, requests: list[Request], outputs: Any) -> list[Any]:
        results: dict[int, Any] = {}
        for (_, some), (scores, words) in zip(_by_targets(requests), outputs, strict=True):
            of_masks = zip(scores.tolist(), words.tolist(), strict=True)
            for request in some:
                results[request.position] = self._filled(request, of_masks)
        return [results[request.position] for request in requests]

    def _filled(self, request: Request, of_masks: Any) -> list[Any]:
        ids, masks, top = request.encoded["input_ids"], request.encoded["masks"], _top_of(request)
        is_single = len(masks) == 1
        filled: list[Any] = []
        for at, (scores, words) in zip(masks, of_masks, strict=False):
            scores, words = scores[:top], words[:top]
            # Special tokens would not be read. Of several masks the others are kept, though.
            texts = self._decoder.variants(ids, at, words, skips_special=is_single)
            filled.append(
                [
                    {
                        "score": score,
                        "token": word,
                        "token_str": self._decoder.word(word),
                        "sequence": text,
                    }
                    for score, word, text in zip(scores, words, texts, strict=True)
                ]
            )
        return filled[0] if is_single else filled

    def _numbers(self, targets: Sequence[str]) -> tuple[int, ...]:
        """The numbers of words. Raises InvalidInput: one has none."""
        if self._vocabulary is None:
            self._vocabulary = self.tokenizer.get_vocab()
        numbers: set[int] = set()
        for target in targets:
            number = self._vocabulary.get(target)
            if number is None:
                number = self.encoder.first_token(target)
            if number is None:
                raise InvalidInput(
                    f"parameters.targets: {quote(target)} is not in the model's vocabulary"
                )
            numbers.add(number)
        return tuple(numbers)


def _by_targets(requests: list[Request]) -> list[tuple[tuple[int, ...] | None, list[Request]]]:
    parts: dict[tuple[int, ...] | None, list[Request]] = {}
    for request in requests:
        parts.setdefault(request.encoded["targets"], []).append(request)
    return list(parts.items())


def _top_of(request: Request) -> int:
    top: int = request.parameters.get("top_k", _WORDS)
    return top


#: Relative difference of logits of the same token: other kernels for other shapes. Half precision
#: has three digits.
_TOLERANCE = 0.02


class MaskedHead:
    """Calls a model so that it computes logits of some tokens only. Belongs to one thread.

    The logits of all tokens of a batch are a fifth of BERT-base's work, and 133 MB for 64 texts of
    17 tokens. A hook hands the last layer only the tokens that are asked for. Models that do not
    support it compute all logits.

    Args:
        model: a model of transformers with a head for masked language modelling.
        inputs: inputs of the model to try it with, on its device.
    """

    def __init__(self, model: Any, inputs: Mapping[str, Any]) -> None:
        self._model = model
        self._places: Any = None
        layer: Any = None
        with contextlib.suppress(Exception):
            layer = model.get_output_embeddings()
        if layer is not None:
            hook = layer.register_forward_pre_hook(self._select)
            if not self._agrees(inputs):
                hook.remove()

    def logits(self, inputs: Mapping[str, Any], places: Any) -> Any:
        """The logits of some tokens.

        Args:
            places: their positions among the tokens of all texts, a tensor.

        Returns:
            A tensor of shape (places, words).
        """
        self._places = places
        try:
            logits = raw_logits(self._model(**inputs))
        finally:
            self._places = None
        return logits if logits.ndim == 2 else logits.flatten(0, 1).index_select(0, places)

    def _select(self, _layer: Any, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if self._places is None or len(args) != 1 or args[0].ndim != 3:
            return None
        states = args[0].flatten(0, 1)
        return (states.index_select(0, self._places.to(states.device)),)

    def _agrees(self, inputs: Mapping[str, Any]) -> bool:
        """Whether the model gives the same logits for some tokens as for all of them."""
        import torch

        try:
            with torch.inference_mode():
                whole = raw_logits(self._model(**inputs)).flatten(0, 1)
                places = torch.tensor([1, len(whole) - 1], device=whole.device)
                some, wanted = self.logits(inputs, places).float(), whole[places].float()
            return bool((some - wanted).abs().max() <= _TOLERANCE * wanted.abs().max())
        except Exception:  # whatever a model raises that wants all tokens
            return False
