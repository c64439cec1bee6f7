"""Text infilling with BERT: a sentence with a ``[MASK]`` goes in, the missing word comes out.

The web process needs ``SentenceEncoder`` only, to refuse a bad sentence before it joins a batch
with other users' sentences. So nothing here may import torch or transformers at module level:
the web process would load them, and would then hold their memory for nothing.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import service_streamer
from example_common import locate, quote
from service_streamer import ManagedModel, OnHost, to_device, to_host, to_pinned

if TYPE_CHECKING:
    import torch
    from tokenizers import Tokenizer

DEFAULT_MODEL = Path(service_streamer.__file__).parent / "models" / "text_infilling"
HUB_NAME = "bert-base-uncased"  # another model that would do
MASK = "[MASK]"

#: A space, a punctuation mark, or a character of a script such as Chinese.
_ENDS_A_TOKEN = re.compile(r"[\W\u2e80-\U0003ffff]")
_ONE_LETTER_WORDS = frozenset("aio")


class SentenceEncoder:
    """Checks sentences and turns them into token ids, without torch.

    The web process and the worker both use it, so that they cannot disagree about which
    sentences are good.

    Args:
        max_sent_len: the most tokens that a sentence may have, ``[CLS]`` and ``[SEP]`` included.
        model_path: a model folder with a ``tokenizer.json``, or a name on the model hub.

    Raises:
        ValueError: ``max_sent_len`` is not an int of 3 or more, or the tokenizer has no
            ``[MASK]``.
        FileNotFoundError: no model is found at ``model_path``.
    """

    def __init__(
        self, max_sent_len: int = 16, model_path: str | os.PathLike[str] = DEFAULT_MODEL
    ) -> None:
        if isinstance(max_sent_len, bool) or not isinstance(max_sent_len, int) or max_sent_len < 3:
            raise ValueError(
                f"max_sent_len must be an int of 3 or more ([CLS], {MASK} and [SEP] need three "
                f"tokens), not {max_sent_len!r}"
            )
        self.max_sent_len = max_sent_len
        self.tokenizer = _load_tokenizer(locate(model_path, HUB_NAME))
        # A saved tokenizer may carry its training's settings. Truncation would cut off a [MASK]
        # silently, and padding would count towards the length of a sentence.
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        mask_id = self.tokenizer.token_to_id(MASK)
        if mask_id is None:
            raise ValueError(
                f"the tokenizer of {os.fspath(model_path)!r} has no {MASK} token; use a BERT model"
            )
        self.mask_id: int = mask_id
        self.pad_id: int = self.tokenizer.token_to_id("[PAD]") or 0

    def encode(self, sentence: str) -> list[int]:
        """Returns the token ids of one sentence, from ``[CLS]`` to ``[SEP]``.

        Several ``[MASK]`` are allowed: the answer is the word at the first one.

        Raises:
            ValueError: ``sentence`` is not a string, is blank, has no ``[MASK]`` or is too long.
        """
        if not isinstance(sentence, str):
            raise ValueError(
                f"a sentence must be a string, not {type(sentence).__name__}: {quote(sentence)}"
            )
        if not sentence.strip():
            raise ValueError(
                f"the sentence {quote(sentence)} is empty; send one with {MASK} in place of "
                "the missing word"
            )
        try:
            sentence.encode()
        except UnicodeEncodeError:
            # JSON can carry half a surrogate pair ("\ud83d"), which the tokenizer cannot take.
            raise ValueError(
                f"the sentence {quote(sentence)} is not valid Unicode; send it again without "
                "its half surrogate pair"
            ) from None
        ids: list[int] = self.tokenizer.encode(sentence).ids
        if self.mask_id not in ids:
            raise ValueError(
                f"the sentence {quote(sentence)} has no {MASK}; write {MASK}, in capitals, in "
                "place of the missing word"
            )
        if len(ids) > self.max_sent_len:
            raise ValueError(
                f"the sentence {quote(sentence)} has {len(ids)} tokens with [CLS] and [SEP], "
                f"and the limit is {self.max_sent_len}; shorten it"
            )
        return ids

    def check(self, sentences: Iterable[str]) -> None:
        """Raises the ValueError of the first bad sentence, if there is one."""
        for sentence in sentences:
            self.encode(sentence)


class Encoded(NamedTuple):
    """A batch of sentences, padded to the longest: three tensors with a row for each sentence.

    Attributes:
        ids: numbers of the tokens.
        attention: 1 for tokens, 0 for padding.
        masks: where the first ``[MASK]`` is.
    """

    ids: torch.Tensor
    attention: torch.Tensor
    masks: torch.Tensor


class TextInfillingModel:
    """A masked language model that answers the word at a sentence's first ``[MASK]``.

    Args:
        max_sent_len: the most tokens that a sentence may have, ``[CLS]`` and ``[SEP]`` included.
        model_path: a folder that ``save_pretrained`` wrote, or a name on the model hub.
        device: where to run, such as ``"cpu"`` or ``"cuda"``; the GPU if there is one by default.

    Raises:
        ValueError: ``max_sent_len`` is wrong, or longer than the model can take.
        FileNotFoundError: no model is found at ``model_path``.
    """

    def __init__(
        self,
        max_sent_len: int = 16,
        model_path: str | os.PathLike[str] = DEFAULT_MODEL,
        device: str | torch.device | None = None,
    ) -> None:
        self.encoder = SentenceEncoder(max_sent_len, model_path)

        import torch
        from transformers import AutoModelForMaskedLM
        from transformers.utils import logging

        # Every worker would draw its own into the log of the service.
        logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        model: Any = AutoModelForMaskedLM.from_pretrained(locate(model_path, HUB_NAME))
        longest = getattr(model.config, "max_position_embeddings", max_sent_len)
        if max_sent_len > longest:
            raise ValueError(
                f"max_sent_len is {max_sent_len}, but the model {os.fspath(model_path)!r} takes "
                f"{longest} tokens at most"
            )
        self.model = model.to(self.device).eval()
        ids = range(model.config.vocab_size)
        self.words = [self.encoder.tokenizer.id_to_token(number) or "" for number in ids]
        no_words = [not is_word(token) for token in self.words]
        self._no_words = torch.tensor(no_words, device=self.device)

    def predict(self, batch: list[str]) -> list[str]:
        """Returns the missing word of each sentence, in order.

        Raises:
            ValueError: a sentence is bad, as ``SentenceEncoder.encode`` says.
        """
        if not batch:
            return []
        return self.answers(self.best(self.encode(batch)))

    def scores(self, batch: list[str]) -> torch.Tensor:
        """Returns the logits at each sentence's first ``[MASK]``: one row for each sentence.

        Raises:
            ValueError: ``batch`` is empty, or a sentence in it is bad.
        """
        return self.compute(self.encode(batch))

    def encode(self, batch: list[str]) -> Encoded:
        """Returns the sentences as tensors, on the CPU.

        Raises:
            ValueError: ``batch`` is empty, or a sentence in it is bad.
        """
        import torch

        if not batch:
            raise ValueError("the batch is empty")
        rows = [self.encoder.encode(sentence) for sentence in batch]
        longest = max(map(len, rows))
        ids = [row + [self.encoder.pad_id] * (longest - len(row)) for row in rows]
        # The attention mask comes from the lengths: a user may write "[PAD]" in a sentence.
        attention = [[1] * len(row) + [0] * (longest - len(row)) for row in rows]
        masks = [row.index(self.encoder.mask_id) for row in rows]
        return Encoded(torch.tensor(ids), torch.tensor(attention), torch.tensor(masks))

    def compute(self, encoded: Encoded) -> torch.Tensor:
        """Returns what ``scores`` returns, on the device."""
        import torch

        ids, attention, masks = (tensor.to(self.device) for tensor in encoded)
        with torch.inference_mode():
            logits: torch.Tensor = self.model(input_ids=ids, attention_mask=attention).logits
            return logits[torch.arange(len(masks), device=self.device), masks]

    def best(self, encoded: Encoded) -> torch.Tensor:
        """Returns the number of each sentence's word, on the device."""
        return self.compute(encoded).masked_fill(self._no_words, float("-inf")).argmax(-1)

    def answers(self, best: torch.Tensor) -> list[str]:
        """Returns the words of the numbers that ``best`` returned."""
        return [self.words[number] for number in best.tolist()]


class ManagedBertModel(ManagedModel):
    """The text infilling model in a worker process."""

    @staticmethod
    def length(sentence: str) -> int:
        """Returns what a sentence costs, which is padded to the longest of its batch.

        That is about its number of tokens: words, marks, and characters of scripts without spaces.
        The tokenizer would be exact, and takes ten times as long. The number of letters is a bad
        guess for short sentences: batches by letters have much more padding.
        """
        return 1 + len(_ENDS_A_TOKEN.findall(sentence))

    def init_model(
        self, max_sent_len: int = 16, model_path: str | os.PathLike[str] = DEFAULT_MODEL
    ) -> None:
        """Loads the model; its arguments and errors are ``TextInfillingModel``'s."""
        self.model = TextInfillingModel(max_sent_len, model_path)

    def preprocess(self, items: list[str]) -> Encoded:
        """Encodes the next batch while the GPU computes; its errors are ``encode``'s."""
        model: TextInfillingModel = self.model
        return to_pinned(model.encode(items))

    def forward(self, batch: Encoded) -> OnHost[torch.Tensor]:
        """Computes a batch. Only the numbers of the words leave the GPU."""
        model: TextInfillingModel = self.model
        return to_host(model.best(to_device(batch, model.device)))

    def postprocess(self, outputs: OnHost[torch.Tensor]) -> list[str]:
        """Returns the missing word of each sentence, as ``TextInfillingModel.predict`` does."""
        model: TextInfillingModel = self.model
        return model.answers(outputs.wait())


def _load_tokenizer(source: str) -> Tokenizer:
    """Loads the tokenizer of a folder or of a hub name, as ``locate`` returned it."""
    from tokenizers import Tokenizer

    if os.path.isdir(source):
        file = Path(source) / "tokenizer.json"
        if not file.is_file():
            raise FileNotFoundError(
                f"the model folder {source!r} has no tokenizer.json; write one with "
                "AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
            )
        return Tokenizer.from_file(str(file))
    try:
        return Tokenizer.from_pretrained(source)
    except Exception as error:  # the hub client and the tokenizer raise types of their own
        raise FileNotFoundError(
            f"{source!r} is no folder here, and the model hub gave no tokenizer of that name: "
            f"{error}"
        ) from error


def is_word(token: str) -> bool:
    """Says whether a token may be an answer.

    Not special tokens, punctuation, or the empty names past the tokenizer's end (a model's
    vocabulary may be padded). Not "##" pieces, which are no words on their own. Nor single Latin
    letters other than "a", "i" and "o": those are in a vocabulary to spell unknown words with. A
    single character of another script may well be a word.
    """
    if token.startswith(("##", "[")) or not any(map(str.isalnum, token)):
        return False
    letter = len(token) == 1 and token.isascii() and token.isalpha()
    return not letter or token.lower() in _ONE_LETTER_WORDS


if __name__ == "__main__":
    print(
        TextInfillingModel().predict(
            [
                "twinkle twinkle [MASK] star.",
                "Happy birthday to [MASK].",
                "the answer to life, the [MASK], and everything.",
            ]
        )
    )
