"""Tokenize the texts of a batch at once, and pad them to tensors."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

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
