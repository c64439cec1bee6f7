"""Whether a loop of steps computes what its model computes without one.

Some models accept padding or pages and answer wrongly: those that count positions from the padding
on, or whose attention ignores the mask. So each loop is tried with random texts of unequal lengths,
which come and go, before anybody is served. Logits are compared, since texts of a random or a sure
model may agree by chance.
"""

from __future__ import annotations

import logging
import random
from typing import Any, Protocol

from .cache_joining import CannotJoin
from .cached_rows import GeneratedRow
from .paged import PagedLoop
from .step_loop import Choose, StepLoop, Way

logger = logging.getLogger(__name__)

#: Lengths of the prompts, and the steps at which they begin. The first one leaves at step 11. An
#: encoder-decoder model has padding only where one begins later; many columns of it, since trained
#: positions are similar to their neighbours.
_LENGTHS, _BEGINNINGS, _STEPS, _LEAVES = (5, 2, 19, 3), (0, 0, 3, 10), 14, 11

#: How much the logits of a row may differ, as a share of their spread: several times what a padded
#: batch changes in float32, and in half precision. Wrong positions change them by a tenth and more.
_TOLERANCE = {"float32": 5e-3, "float64": 5e-3}
_ROUGH = 4e-2


class RowLoop(Protocol):
    """What adds tokens to rows: ``StepLoop`` or ``PagedLoop``."""

    def advance(self, rows: list[GeneratedRow], choose: Choose) -> list[GeneratedRow]: ...
    def drop(self, rows: list[GeneratedRow]) -> None: ...


def fastest_loop(
    model: Any, places: int, limit: int | None, paged: bool | None, example: Any = None
) -> RowLoop | None:
    """A loop whose logits are the model's; None if there is none.

    Args:
        model: a model of transformers that can generate.
        places: maximum number of rows, unless a request wants several texts.
        limit: maximum number of tokens of a row; None without a limit.
        paged: whether its cache is in pages if that is right; None for what is faster.
        example: a tensor that its encoder takes for one row, if that reads no tokens.
    """
    if paged is None:
        paged = "flash" in str(model.config._attn_implementation)
    if paged:
        try:
            loop: RowLoop = PagedLoop(model, max(places, len(_LENGTHS)), limit)
            fault = fault_of(loop, model)
        except Exception as error:  # whatever a model raises for what it cannot do
            fault = _brief(error)
        if not fault:
            return loop
        logger.warning(
            "%s cannot keep its cache in pages: %s; its texts are padded to one length instead",
            type(model).__name__,
            fault,
        )
    return suitable_loop(model, example)


def suitable_loop(model: Any, example: Any = None) -> StepLoop | None:
    """The fastest step loop whose logits are the model's.

    None if no way has these: some models keep what they have seen in themselves, and not in their
    caches, so that texts cannot take turns.

    Args:
        model: a model of transformers that can generate.
        example: a tensor that its encoder takes for one row, if that reads no tokens.
    """
    ways: tuple[Way, ...] = ("padded", "shifted", "aligned", "alone")
    for way in ways:
        try:
            loop = StepLoop(model, way)
        except CannotJoin as error:
            fault = str(error)
            continue
        fault = fault_of(loop, model, example)
        if not fault:
            return loop
        logger.info("%s: texts are not generated %s: %s", type(model).__name__, way, fault)
    logger.warning(
        "%s cannot generate step by step (%s); its texts are generated as a whole",
        type(model).__name__,
        fault,
    )
    return None


def fault_of(loop: RowLoop, model: Any, example: Any = None) -> str:
    """What is wrong with a loop; "" if it computes what the model computes."""
    rows: list[GeneratedRow] = []
    try:
        rows += _probes(model, example)
        seen: dict[int, list[Any]] = {id(row): [] for row in rows}

        def choose(logits: Any, ready: list[GeneratedRow]) -> list[int]:
            for row, each in zip(ready, logits, strict=True):
                seen[id(row)].append(each)
            tokens: list[int] = logits.argmax(-1).tolist()
            return tokens

        for step in range(_STEPS):
            begun = [row for row, start in zip(rows, _BEGINNINGS, strict=True) if start <= step]
            if step == _LEAVES:
                loop.drop(rows[:1])
            loop.advance(begun[step >= _LEAVES :], choose)
        loop.drop(rows)
        for row in rows:
            if difference := _difference(model, row, seen[id(row)]):
                return difference
    except Exception as error:  # whatever a model raises for what it cannot do
        loop.drop(rows)
        return _brief(error)
    return ""


def _brief(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _difference(model: Any, row: GeneratedRow, logits: list[Any]) -> str:
    import torch

    ids = torch.tensor([row.tokens], device=model.device)
    with torch.inference_mode():
        if model.config.is_encoder_decoder:
            encoded = torch.as_tensor(row.encoded, device=model.device)[None]
            if encoded.is_floating_point():
                encoded = encoded.to(model.dtype)
            inputs = {"decoder_input_ids": ids, model.main_input_name: encoded}
        else:
            inputs = {"input_ids": ids}
        whole = model(**inputs, use_cache=False).logits[0].float()
    wanted = whole[len(row.prompt) - 1 : -1]
    spread = (wanted - wanted.mean(-1, keepdim=True)).norm(dim=-1)
    apart = float(((torch.stack(logits) - wanted).norm(dim=-1) / spread).max())
    if apart <= _TOLERANCE.get(str(model.dtype).removeprefix("torch."), _ROUGH):
        return ""
    return f"logits differ by {apart:.1%} for a prompt of {len(row.prompt)} tokens"


def _probes(model: Any, example: Any) -> list[GeneratedRow]:
    source = random.Random(0)
    config = model.config.get_text_config(decoder=True)
    first = min(10, config.vocab_size - 1)  # special tokens mostly come before

    def text(length: int) -> list[int]:
        return [source.randrange(first, config.vocab_size) for _ in range(length)]

    if not model.config.is_encoder_decoder:
        return [GeneratedRow(text(length)) for length in _LENGTHS]
    defaults = model.generation_config
    starts = (defaults.decoder_start_token_id, defaults.bos_token_id, first)
    prompt = [next(start for start in starts if start is not None)]
    if model.main_input_name == "input_ids":
        return [GeneratedRow(list(prompt), encoded=text(length)) for length in _LENGTHS]
    return [GeneratedRow(list(prompt), encoded=_noise(example, at)) for at in range(len(_LENGTHS))]


def _noise(example: Any, seed: int) -> Any:
    import torch

    if example is None:
        raise ValueError("its encoder reads no tokens, and there is no example of what it reads")
    return torch.randn(example.shape, generator=torch.Generator().manual_seed(seed))
