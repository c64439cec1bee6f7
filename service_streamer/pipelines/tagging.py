""" "predict" of token classification."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from ..errors import InvalidInput
from .requests import Request
from .tensors import TensorHandler, logits_of


class Tag(NamedTuple):
    """A token, or a word of several, with its label.

    Attributes:
        score: 0.0 to 1.0.
        start, end: characters of the text; None if unknown.
        place: the token's number in the text.
    """

    label: str
    score: float
    word: str
    start: int | None
    end: int | None
    place: int


class TokenTagger(TensorHandler):
    """Labels of tokens, or of the entities that they make up.

    Follows ``TokenClassificationPipeline`` of transformers, whose results are the same.
    """

    needs_details = True

    def __init__(self, pipeline: Any) -> None:
        super().__init__(pipeline)
        self._labels: Mapping[int, str] = pipeline.model.config.id2label
        self._unknown = self.tokenizer.unk_token_id
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        prefix = getattr(getattr(backend, "model", None), "continuing_subword_prefix", None)
        self._knows_words = bool(prefix)

    def prepare(self, request: Request) -> None:
        super().prepare(request)
        strategy = request.parameters.get("aggregation_strategy")
        if strategy in _OF_WORDS and not getattr(self.tokenizer, "is_fast", False):
            raise InvalidInput(
                f"parameters.aggregation_strategy: {strategy} needs a fast tokenizer, which this "
                "model does not have; use simple or none"
            )

    def plan(self, requests: list[Request]) -> tuple[int, bool]:
        """The number of texts, and whether all labels' scores are needed."""
        strategies = (each.parameters.get("aggregation_strategy") for each in requests)
        return len(requests), "average" in strategies

    def compute(self, inputs: Mapping[str, Any], plan: tuple[int, bool]) -> Any:
        count, needs_all = plan
        scores = logits_of(self.pipeline.model(**inputs))[:count].softmax(-1)
        best, labels = scores.max(-1)
        return best, labels, scores if needs_all else None

    def results(self, requests: list[Request], outputs: Any) -> list[Any]:
        best, labels, scores = outputs
        scores = None if scores is None else scores.numpy()
        rows = zip(requests, best.tolist(), labels.tolist(), strict=True)
        return [
            self._entities(request, best, labels, None if scores is None else scores[at])
            for at, (request, best, labels) in enumerate(rows)
        ]

    def _entities(
        self, request: Request, best: list[float], labels: list[int], scores: Any
    ) -> list[dict[str, Any]]:
        row, parameters = request.encoded, request.parameters
        strategy = parameters.get("aggregation_strategy", "none")
        ignored = parameters.get("ignore_labels", ("O",))
        first = len(best) - request.tokens if self.pads_left else 0
        is_special = row["special_tokens_mask"]
        places = row["offset_mapping"] or [(None, None)] * request.tokens
        unknown, text = self._unknown, request.inputs
        tags: list[Tag] = []
        for at, (word, number) in enumerate(zip(row["tokens"], row["input_ids"], strict=True)):
            label = self._labels[labels[first + at]]
            if is_special[at] or (strategy == "none" and label in ignored):
                continue
            start, end = places[at]
            if number == unknown and start is not None:
                word = text[start:end]
            tags.append(Tag(label, best[first + at], word, start, end, at))
        if strategy == "none":
            return [_as_token(tag) for tag in tags]
        if strategy in _OF_WORDS:
            words = _split(tags, lambda at: not self._continues(tags[at], row, text))
            if strategy == "average" and tags:
                tags = self._averaged(words, scores[[first + tag.place for tag in tags]])
            else:
                tags = [self._word(word, strategy) for word in words]
        entities = _split(tags, lambda at: not _belongs(tags[at - 1].label, tags[at].label))
        grouped = ((each[0].label.split("-", 1)[-1], each) for each in entities)
        return [self._entity(label, each) for label, each in grouped if label not in ignored]

    def _continues(self, tag: Tag, row: Mapping[str, Any], text: str) -> bool:
        """Whether a token continues the word before it."""
        if tag.start is None or row["input_ids"][tag.place] == self._unknown:
            return False
        if self._knows_words:
            return len(tag.word) != len(text[tag.start : tag.end])
        return tag.start > 0 and " " not in text[tag.start - 1 : tag.start + 1]

    def _word(self, tokens: Sequence[Tag], strategy: str) -> Tag:
        chosen = max(tokens, key=lambda each: each.score) if strategy == "max" else tokens[0]
        return tokens[0]._replace(
            label=chosen.label, score=chosen.score, word=self._text(tokens), end=tokens[-1].end
        )

    def _averaged(self, words: Sequence[Sequence[Tag]], scores: Any) -> list[Tag]:
        """The words, with the label whose mean score over a word's tokens is the highest."""
        import numpy as np

        sizes = np.array([len(word) for word in words])
        sums = np.add.reduceat(scores, np.cumsum(sizes) - sizes, axis=0)
        means = sums / sizes[:, None].astype(sums.dtype)
        labels = means.argmax(1).tolist()
        best = means.max(1).tolist()
        return [
            self._word(word, "first")._replace(label=self._labels[label], score=score)
            for word, label, score in zip(words, labels, best, strict=True)
        ]

    def _entity(self, label: str, tags: Sequence[Tag]) -> dict[str, Any]:
        return {
            "entity_group": label,
            "score": sum(tag.score for tag in tags) / len(tags),
            "word": self._text(tags),
            "start": tags[0].start,
            "end": tags[-1].end,
        }

    def _text(self, tags: Sequence[Tag]) -> str:
        return str(self.tokenizer.convert_tokens_to_string([tag.word for tag in tags]))


#: Strategies that give all tokens of a word the same label.
_OF_WORDS = ("first", "average", "max")


def _as_token(tag: Tag) -> dict[str, Any]:
    return {
        "entity": tag.label,
        "score": tag.score,
        "index": tag.place,
        "word": tag.word,
        "start": tag.start,
        "end": tag.end,
    }


def _split(tags: Sequence[Tag], begins: Callable[[int], bool]) -> list[Sequence[Tag]]:
    """Parts of a sequence; ``begins`` says of a position whether a part begins there."""
    starts = [at for at in range(len(tags)) if at == 0 or begins(at)]
    return [tags[start:end] for start, end in pairwise([*starts, len(tags)])]


def _belongs(last: str, label: str) -> bool:
    """Whether a label goes on with the entity of the label before it."""
    return not label.startswith("B-") and _kind(last) == _kind(label)


def _kind(label: str) -> str:
    return label[2:] if label.startswith(("B-", "I-")) else label
