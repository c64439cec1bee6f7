"""The model: BERT-base with random weights, and the sentences that it is given."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Sequence
from typing import Any

from on_gpu.notes import Batch, Notes
from service_streamer import ManagedModel

__all__ = ["Bert", "Tokens", "sentences"]

Tokens = list[int]

#: Where a word is asked for, as the original's text infilling does at its mask.
_POSITION = 1

#: The first ids of BERT's vocabulary are no words.
_FIRST_WORD = 1000

#: To show that the program runs, without a GPU.
_SMALL: dict[str, Any] = {
    "vocab_size": 2000,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
}
_VOCABULARY = 30522


class Bert(ManagedModel):
    """Token ids to the id of the likeliest word at one position.

    In half precision on the device that it sees; the small one in single precision on the CPU.
    Weights are the same in every process.
    """

    def init_model(self, folder: str, *, is_small: bool = False) -> None:
        """Args: where to put notes of the batches (see ``notes``); whether it is the small one."""
        import torch

        self.torch: Any = torch
        self.device = "cpu" if is_small else "cuda"
        self.bert: Any = _load(self.device, is_small=is_small)
        self._largest = 0
        self._memory = 0, 0
        self._notes = Notes(folder, self._about())

    def predict(self, batch: list[Tokens]) -> list[int]:
        entered, has_run_out = time.monotonic_ns(), 1
        try:
            found: list[int] = self.logits(batch).argmax(dim=-1).tolist()
            has_run_out = 0
        finally:
            left = time.monotonic_ns()
            if len(batch) > self._largest and not has_run_out:
                self._largest = len(batch)
                self._memory = self._most_memory()
            self._notes.add(Batch(entered, left, len(batch), has_run_out, *self._memory))
        return found

    def logits(self, batch: list[Tokens]) -> Any:
        """On the device, for each sentence: of each word at the position."""
        return self.forward(self.torch.tensor(batch).to(self.device))

    def forward(self, tokens: Any) -> Any:
        with self.torch.inference_mode():
            return self.bert(input_ids=tokens).logits[:, _POSITION]

    def _most_memory(self) -> tuple[int, int]:
        if self.device == "cpu":
            return 0, 0
        cuda = self.torch.cuda
        return cuda.max_memory_allocated(), cuda.max_memory_reserved()

    def _about(self) -> dict[str, Any]:
        about = {
            "pid": os.getpid(),
            "gpu_id": self.gpu_id,
            "visible": os.environ.get("CUDA_VISIBLE_DEVICES"),
            "attention": getattr(self.bert.config, "_attn_implementation", None),
            "cpu_threads": self.torch.get_num_threads(),
        }
        if self.device != "cpu":
            found = self.torch.cuda.get_device_properties(0)
            about["device"] = found.name
            about["uuid"] = str(getattr(found, "uuid", "unknown"))  # not in torch 2.2
        return about


def _load(device: str, *, is_small: bool) -> Any:
    import torch
    from transformers import AutoModelForMaskedLM, BertConfig

    config = BertConfig(**_SMALL) if is_small else BertConfig()
    load: Any = AutoModelForMaskedLM.from_config
    if is_small:
        torch.set_num_threads(1)  # more would take longer to meet than they compute
    torch.manual_seed(1)
    with torch.device(device):  # weights are drawn there, which is faster
        try:
            bert = load(config, attn_implementation="sdpa")
        except ValueError:  # transformers 4.40 has none for BERT
            bert = load(config)
    bert = bert.eval() if is_small else bert.half().eval()
    bert.requires_grad_(False)
    if device != "cpu":
        torch.cuda.empty_cache()  # of the weights in single precision
        torch.cuda.reset_peak_memory_stats()
    return bert


def sentences(count: int, tokens: int, *, is_small: bool) -> Sequence[Tokens]:
    """Random words, the same ones for the same arguments; all positions differ."""
    source = random.Random(tokens)
    first, end = (10, _SMALL["vocab_size"]) if is_small else (_FIRST_WORD, _VOCABULARY)
    return [[source.randrange(first, end) for _ in range(tokens)] for _ in range(count)]
