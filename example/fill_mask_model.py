"""Text infilling in the form of transformers' fill-mask pipeline: words, with their scores."""

from __future__ import annotations

import functools
import os
from typing import Any

from bert_model import DEFAULT_MODEL, MASK, Encoded, SentenceEncoder, TextInfillingModel
from service_streamer import InvalidInput, ManagedModel, OnHost, to_device, to_host, to_pinned

MAX_TOKENS = 64
TOP = 5  # words


class ManagedFillMask(ManagedModel):
    """The text infilling model in a worker process, which answers several words with their scores.

    The environment's ``MODEL`` names another one: a BERT model's folder, or its hub name.
    """

    @staticmethod
    def length(sentence: str) -> int:
        """Returns what a sentence costs, which is padded to the longest of its batch: its letters.

        Tokens would be exact, and slow to count.
        """
        return len(sentence)

    def init_model(self) -> None:
        """Loads the model; its errors are ``TextInfillingModel``'s."""
        self.model = TextInfillingModel(MAX_TOKENS, _model_path())

    def preprocess(self, items: list[str]) -> tuple[list[str], Encoded]:
        """Encodes the next batch while the GPU computes; its errors are ``encode``'s."""
        model: TextInfillingModel = self.model
        return items, to_pinned(model.encode(items))

    def forward(self, batch: tuple[list[str], Encoded]) -> tuple[list[str], OnHost[Any]]:
        """Computes a batch. Only the best words and their scores leave the GPU."""
        model: TextInfillingModel = self.model
        sentences, encoded = batch
        best = model.compute(to_device(encoded, model.device)).softmax(-1).topk(TOP)
        return sentences, to_host((best.values, best.indices))

    def postprocess(self, outputs: tuple[list[str], OnHost[Any]]) -> list[list[dict[str, Any]]]:
        """Returns the likeliest words of each sentence, the best first.

        Each is a dict of its ``score``, its ``token`` and ``token_str``, and the ``sequence`` that
        has it in place of the first ``[MASK]``.
        """
        sentences, best = outputs
        scores, tokens = best.wait()
        words = self.model.words
        return [
            [
                {
                    "score": score,
                    "token": token,
                    "token_str": words[token],
                    "sequence": sentence.replace(MASK, words[token], 1),
                }
                for score, token in zip(*row, strict=True)
            ]
            for sentence, *row in zip(sentences, scores.tolist(), tokens.tolist(), strict=True)
        ]


def check(sentence: str) -> None:
    """Refuses a bad sentence in the web process, before it joins a batch with other users'.

    Raises:
        InvalidInput: it is bad, as ``SentenceEncoder.encode`` says.
    """
    try:
        _encoder().encode(sentence)
    except ValueError as error:
        raise InvalidInput(str(error)) from None


@functools.cache
def _encoder() -> SentenceEncoder:
    return SentenceEncoder(MAX_TOKENS, _model_path())


def _model_path() -> str | os.PathLike[str]:
    return os.environ.get("MODEL") or DEFAULT_MODEL
