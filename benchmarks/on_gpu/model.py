"""The model: BERT-base with random weights, and the sentences that it is given."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from on_gpu import simulated
from on_gpu.notes import Batch, Notes
from on_gpu.passes import DeviceClock
from on_gpu.running import Kind
from service_streamer import ManagedModel, OnHost, to_device, to_host, to_pinned

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


class _Computed(NamedTuple):
    """A batch on its way back. ``start`` and ``end`` are CUDA events, or times on the CPU."""

    words: OnHost[Any]
    start: Any
    end: Any


class Bert(ManagedModel):
    """Token ids to the id of the likeliest word at one position, in three stages.

    In half precision on the device that it sees; the small one in single precision on the CPU.
    Weights are the same in every process.
    """

    def init_model(self, folder: str, *, kind: Kind = "cuda") -> None:
        """Args: where to put notes of the batches (see ``notes``); what computes."""
        import torch

        self.torch: Any = torch
        self.kind = kind
        self.device = "cuda" if kind == "cuda" else "cpu"
        self.bert: Any = None if kind == "simulated" else _load(self.device)
        self._largest = 0
        self._memory = 0, 0
        self._notes = Notes(folder, self._about())
        if kind == "cuda":
            self._clock = DeviceClock(torch.cuda)

    def preprocess(self, items: list[Tokens]) -> Any:
        return to_pinned(self.torch.tensor(items))

    def forward(self, batch: Any) -> _Computed:
        entered = time.monotonic_ns()
        try:
            computed = self._on_device(batch) if self.kind == "cuda" else self._on_host(batch)
        except Exception:
            self._notes.add(Batch(entered, time.monotonic_ns(), len(batch), 1, *self._memory))
            raise
        if len(batch) > self._largest:
            self._largest = len(batch)
            self._memory = self._most_memory()
        return computed

    def postprocess(self, outputs: _Computed) -> list[int]:
        found: list[int] = outputs.words.wait().tolist()
        start, end = outputs.start, outputs.end
        if self.kind == "cuda":
            start, end = self._clock.times(start, end)
        self._notes.add(Batch(start, end, len(found), 0, *self._memory))
        return found

    def logits(self, batch: Any) -> Any:
        """On the device, for each sentence: of each word at the position.

        Args:
            batch: of ``preprocess``, or already there.
        """
        with self.torch.inference_mode():
            return self.bert(input_ids=to_device(batch, self.device)).logits[:, _POSITION]

    def _on_device(self, batch: Any) -> _Computed:
        """Queued only, so that the device has the next batch before it has ended this one."""
        start = self._clock.mark()
        words = self.logits(batch).argmax(dim=-1)
        end = self._clock.mark()
        return _Computed(to_host(words), start, end)

    def _on_host(self, batch: Any) -> _Computed:
        start = time.monotonic_ns()
        if self.bert is None:
            simulated.forward(*batch.shape)
            words = batch[:, _POSITION]
        else:
            words = self.logits(batch).argmax(dim=-1)
        end = time.monotonic_ns()
        return _Computed(to_host(words), start, end)

    def _most_memory(self) -> tuple[int, int]:
        if self.kind != "cuda":
            return 0, 0
        cuda = self.torch.cuda
        return cuda.max_memory_allocated(), cuda.max_memory_reserved()

    def _about(self) -> dict[str, Any]:
        config = None if self.bert is None else self.bert.config
        about = {
            "pid": os.getpid(),
            "gpu_id": self.gpu_id,
            "visible": os.environ.get("CUDA_VISIBLE_DEVICES"),
            "attention": getattr(config, "_attn_implementation", None),
            "cpu_threads": self.torch.get_num_threads(),
        }
        if self.kind == "cuda":
            found = self.torch.cuda.get_device_properties(0)
            about["device"] = found.name
            about["uuid"] = str(getattr(found, "uuid", "unknown"))  # not in torch 2.2
        return about


def _load(device: str) -> Any:
    import torch
    from transformers import AutoModelForMaskedLM, BertConfig

    is_small = device == "cpu"
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


def sentences(count: int, tokens: int, kind: Kind) -> Sequence[Tokens]:
    """Random words, the same ones for the same arguments; all positions differ."""
    source = random.Random(tokens)
    first, end = (_FIRST_WORD, _VOCABULARY) if kind == "cuda" else (10, _SMALL["vocab_size"])
    return [[source.randrange(first, end) for _ in range(tokens)] for _ in range(count)]
