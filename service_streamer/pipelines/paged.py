"""Steps with a cache in pages: the forward passes of transformers' continuous batching.

``ContinuousBatchingManager`` schedules prompts and texts into one packed row, without padding, and
shares the pages of common prefixes. It is driven from here, without its thread: one batch at a
time, whose tokens ``choose`` chooses, since it has no seeds, penalties or stop strings of its own.
The tests of this module guard what it uses of transformers' internals.
"""

from __future__ import annotations

import itertools
from typing import Any

from .cached_rows import GeneratedRow
from .step_loop import Choose

#: Tokens of a page. Kernels of FlashAttention want multiples of 256; otherwise a page may be small,
#: which leaves less of it empty.
_KERNEL_PAGE, _PAGE = 256, 32

#: Most tokens of a forward pass, where attention has a mask of that many rows over the whole cache.
_DENSE_TOKENS = 512

#: Length of texts that there is memory for in each place, for a model without a limit.
_USUAL_LENGTH = 2048


class PagedLoop:
    """Adds a token to each of many rows at a time. Belongs to one thread.

    Rows whose prompt is not computed yet, or for which there are no pages at the time, get none.

    Args:
        model: a model of transformers that can generate, on its device, in ``eval`` mode.
        places: maximum number of rows.
        limit: maximum number of tokens of a row; None without a limit.

    Raises:
        ValueError: the model's attention does not take pages.
    """

    def __init__(self, model: Any, places: int, limit: int | None = None) -> None:
        from transformers import ContinuousBatchingConfig, GenerationConfig

        attention = str(model.config._attn_implementation)
        is_flash = "flash" in attention
        if not is_flash and attention != "sdpa":
            # The manager would switch it to another kind, also for model.generate.
            raise ValueError(f"attention {attention!r} does not take pages")
        if model.config.is_encoder_decoder:
            raise ValueError("pages have no place for what an encoder has given")
        page = _KERNEL_PAGE if is_flash else _PAGE
        tokens = places * min(limit or _USUAL_LENGTH, _USUAL_LENGTH)
        sizes: dict[str, Any] = {}
        if model.device.type == "cpu" or not is_flash:
            # By itself it takes a share of all memory, which a worker does not have for itself.
            sizes["num_blocks"] = -(-max(tokens, limit or 0) // page) + places
            sizes["max_batch_tokens"] = max(_DENSE_TOKENS, places)
        config: Any = GenerationConfig
        manager = model.init_continuous_batching(
            config(do_sample=False, eos_token_id=-1),
            ContinuousBatchingConfig(
                page_size=page,
                max_requests_per_batch=places,
                auto_switch_to_flash=False,
                # Tokens are chosen between two passes, so none is begun before, nor captured.
                use_async_batching=False,
                use_cuda_graph=False,
                **sizes,
            ),
        )
        self.model = model
        self._processor = manager._create_batch_processor()
        self._processor.model_runner._sample = self._keep
        self._scores: Any = None
        self._numbers = itertools.count()
        self._names: dict[int, str] = {}
        self._rows: dict[str, GeneratedRow] = {}

    def advance(self, rows: list[GeneratedRow], choose: Choose) -> list[GeneratedRow]:
        """Add one token to each row that is ready for it.

        Args:
            choose: gets the logits, float32 of shape ``(rows, vocabulary)``, and their rows, and
                returns their tokens.

        Returns:
            The rows that have a new token.
        """
        import torch

        wanted = set(map(id, rows))
        self.drop([row for row in self._rows.values() if id(row) not in wanted])
        with torch.no_grad():
            try:
                self._admit([row for row in rows if id(row) not in self._names])
                ready = self._stepped(choose)
            except BaseException:
                self._processor.reset()  # the rows come again, from their tokens
                self._names.clear()
                self._rows.clear()
                raise
        return ready

    def drop(self, rows: list[GeneratedRow]) -> None:
        """Free the pages of these rows. Those that have none are ignored."""
        scheduler = self._processor.scheduler
        names = [name for row in rows if (name := self._names.pop(id(row), None)) is not None]
        for name in names:
            del self._rows[name]
            scheduler.set_request_cancellation(name)
        if names:
            scheduler.clear_cancelled_requests()
            # After a lack of pages the scheduler begins nothing until a text ends, and does not
            # count these.
            scheduler.block_new_requests = False

    def _admit(self, rows: list[GeneratedRow]) -> None:
        from transformers.generation.continuous_batching.requests import RequestState

        for row in rows:
            name = f"{next(self._numbers)}"
            # No end of its own: the rows say when they are over.
            state = RequestState(name, list(row.tokens), max_new_tokens=None)
            self._processor.scheduler.add_waiting_request(state)
            self._names[id(row)], self._rows[name] = name, row

    def _stepped(self, choose: Choose) -> list[GeneratedRow]:
        processor = self._processor
        if not processor.prepare_next_batch():
            return []
        processor._generation_step(self.model)
        batch = processor.inputs_and_outputs
        names = [each.state.request_id for each in batch.requests_in_batch if each.has_new_token]
        ready = [self._rows[name] for name in names]
        scores, self._scores = self._scores, None
        if ready:
            tokens = choose(scores[: len(ready)], ready)
            batch.output_ids[0, : len(ready)] = batch.output_ids.new_tensor(tokens)
            for row, token in zip(ready, tokens, strict=True):
                row.tokens.append(token)
        processor.update_batch()
        return ready

    def _keep(self, scores: Any, _output_ids: Any) -> None:
        """In place of the choice of tokens: keep the logits."""
        self._scores = scores[0]
