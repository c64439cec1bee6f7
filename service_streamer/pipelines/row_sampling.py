"""The choice of the next token, for a batch whose rows have parameters of their own.

The scores go through the same processors, in the same order, as in ``model.generate``; those that
requests set are computed for all rows at once. Each row has random numbers of its own, one for each
token. So a row with a seed gets the same tokens whoever else is in the batch, and a row that begins
again behind its first tokens skips as many numbers.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

#: Parameters that make tokens less likely which the answer has already, as OpenAI defines them.
PENALTIES = ("frequency_penalty", "presence_penalty")


#: So many of the most likely tokens have nearly all of the probability, most often.
_LIKELY = 512


class Sampling(NamedTuple):
    """How the tokens of one row are chosen.

    Attributes:
        samples: whether tokens are drawn; otherwise the most likely one is taken.
        temperature: divides the logits.
        top_k: draw from this many of the most likely tokens; 0 for all.
        top_p: draw from the most likely tokens whose probabilities add up to this.
        min_p: draw from tokens that have at least this share of the largest probability.
        penalty: above 1, what the row already has becomes less likely.
        frequency_penalty: is subtracted from a token's logit for each time that it was generated.
        presence_penalty: is subtracted from a token's logit if it was generated at all.
        logit_bias: tokens, and what is added to the logit of each.
        least: so many tokens are generated before one of ``ends``.
        processors: a LogitsProcessorList of transformers, in place of all of the above; for what
            only ``generation_config.json`` can ask for, such as ``no_repeat_ngram_size``.
        alternatives: how many of the most likely tokens are returned with their log probabilities;
            None returns none, not even the chosen token's.
        constraint: with ``mask(scores)``, which removes tokens from scores of shape
            ``(vocabulary,)`` in place, ``accept(token)``, and ``fail(why)``, if no token is left;
            None allows every token. None of them raises.
    """

    samples: bool = False
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    least: int = 0
    ends: tuple[int, ...] = ()
    processors: Any = None
    alternatives: int | None = None
    constraint: Any = None


class Sampled(Protocol):
    """A row: its tokens, those of its prompt included, and how they are chosen.

    Tokens are only appended to; ``counts`` has counted those that it was shown.
    """

    prompt: list[int]
    tokens: list[int]
    sampling: Sampling
    random: random.Random
    counts: TokenCounts


class TokenChoice(NamedTuple):
    """A token of a row.

    Attributes:
        logprob: its natural logarithm of probability, as the model gave it: before temperature,
            penalties and filters. None if the row does not ask for it.
        top: the most likely tokens with theirs, best first.
    """

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


def sampling_of(
    model: Any,
    config: Any,
    tokens: int,
    *,
    encoded: list[int] | None = None,
    processors: Any = None,
    **more: Any,
) -> Sampling | None:
    """What ``model.generate`` would do with this configuration; None if that is no sampling.

    Args:
        model: a model of transformers that can generate.
        config: a ``GenerationConfig`` of ``model._prepare_generation_config``; it is changed.
        tokens: number of tokens of the prompt.
        encoded: the tokens that the model's encoder reads.
        processors: those that ``generate`` would be given, as a LogitsProcessorList.
        more: further fields of ``Sampling``.

    Returns:
        None for beams and the like: then only ``model.generate`` can do it.
    """
    import torch
    from transformers.generation import logits_process as known
    from transformers.generation.configuration_utils import GenerationMode

    modes = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)
    unlike = (config.max_time, config.stop_strings, config.token_healing)
    guided = config.guidance_scale not in (None, 1)
    if config.get_generation_mode() not in modes or any(unlike) or guided:
        return None
    model._prepare_special_tokens(config, True, device=model.device)
    if config.max_new_tokens is not None:
        config.max_length = tokens + config.max_new_tokens
    if config.min_new_tokens is not None:
        config.min_length = tokens + config.min_new_tokens
    found = model._get_logits_processor(
        config,
        input_ids_seq_length=tokens,
        encoder_input_ids=None if encoded is None else torch.tensor([encoded], device=model.device),
        logits_processor=processors,
        device=model.device,
        model_kwargs={},
    )
    fields: dict[str, Any] = {}
    for processor in found:
        kind = type(processor)
        if kind is known.RepetitionPenaltyLogitsProcessor:
            fields["penalty"] = float(processor.penalty)
        elif kind is known.TemperatureLogitsWarper:
            fields["temperature"] = float(processor.temperature)
        elif kind is known.TopKLogitsWarper:
            fields["top_k"] = int(processor.top_k)
        elif kind is known.TopPLogitsWarper:
            fields["top_p"] = float(processor.top_p)
        elif kind is known.MinPLogitsWarper:
            fields["min_p"] = float(processor.min_p)
        else:
            fields = {"processors": found}
            break
    return Sampling(samples=bool(config.do_sample), **fields, **more)


def choose(logits: Any, rows: Sequence[Sampled]) -> list[TokenChoice]:
    """One token for each row.

    Args:
        logits: what the model gave, float32, of shape ``(rows, vocabulary)``.
        rows: each one's ``random`` is asked for one number if it samples.
    """
    scores = process(logits, rows)
    drawn = [at for at, row in enumerate(rows) if row.sampling.samples]
    numbers = [rows[at].random.random() for at in drawn]
    if len(drawn) == len(rows):
        found = _draw(scores, numbers)
    else:
        found = scores.argmax(dim=-1)
        if drawn:
            found[drawn] = _draw(scores[drawn], numbers)
    tokens = found.tolist()  # once: a GPU is waited for here
    bound = [at for at, row in enumerate(rows) if row.sampling.constraint is not None]
    chosen = scores[bound, found[bound]].isfinite().tolist() if bound else []
    for at, is_possible in zip(bound, chosen, strict=True):
        constraint = rows[at].sampling.constraint
        if is_possible:
            constraint.accept(tokens[at])
        else:
            constraint.fail("the model's settings forbid each token that fits")
    return _with_logprobs(logits, rows, tokens)


def process(logits: Any, rows: Sequence[Sampled]) -> Any:
    """The scores that tokens are chosen by, as ``model.generate`` has them; the logits stay."""
    import torch

    plans = [row.sampling for row in rows]
    changes = _changes(rows)
    scores = _penalized(_changed(logits, changes) if changes else logits, rows)
    for at, (row, plan) in enumerate(zip(rows, plans, strict=True)):
        if plan.processors is None and plan.constraint is None:
            continue
        if scores is logits:
            scores = logits.clone()
        is_free = plan.constraint is None
        ids = None if plan.processors is None else torch.tensor([row.tokens], device=logits.device)
        for processor in plan.processors or ():
            # Warpers leave the likeliest tokens alone, which the constraint may not allow.
            if not is_free and type(processor).__name__.endswith("Warper"):
                plan.constraint.mask(scores[at])
                is_free = True
            scores[at] = processor(ids, scores[at : at + 1].clone())[0]
        if not is_free:
            plan.constraint.mask(scores[at])
    warped = [at for at, plan in enumerate(plans) if plan.samples and plan.processors is None]
    if not warped:
        return scores
    part = _warp(scores[warped], [plans[at] for at in warped])
    if len(warped) == len(rows):
        return part
    if scores is logits:
        scores = logits.clone()
    scores[warped] = part
    return scores


def _changes(rows: Sequence[Sampled]) -> dict[int, Mapping[int, float]]:
    """What is added to logits, by row and token: biases, what repetitions cost, and early ends."""
    changes: dict[int, Mapping[int, float]] = {}
    for at, row in enumerate(rows):
        plan = row.sampling
        frequency, presence = plan.frequency_penalty, plan.presence_penalty
        if frequency or presence or plan.logit_bias:
            found = row.counts.added(row.tokens, plan.logit_bias, frequency, presence)
            if found:
                changes[at] = found
        if plan.ends and len(row.tokens) - len(row.prompt) < plan.least:
            changes[at] = {**changes.get(at, {}), **dict.fromkeys(plan.ends, -float("inf"))}
    return changes


def _changed(logits: Any, changes: Mapping[int, Mapping[int, float]]) -> Any:
    """The logits with these added, of all rows at once."""
    import torch

    device = logits.device
    places = [at for at, found in changes.items() for _ in found]
    tokens = [token for found in changes.values() for token in found]
    values = [value for found in changes.values() for value in found.values()]
    index = torch.tensor(places, device=device), torch.tensor(tokens, device=device)
    added = torch.tensor(values, dtype=logits.dtype, device=device)
    return logits.index_put(index, added, accumulate=True)


def _penalized(scores: Any, rows: Sequence[Sampled]) -> Any:
    """The scores without what repetition costs, of all rows at once."""
    import torch

    plans = [row.sampling for row in rows]
    are_in = [plan.penalty != 1 and plan.processors is None for plan in plans]
    seen = [
        row.counts.seen(row.tokens) if is_in else ()
        for row, is_in in zip(rows, are_in, strict=True)
    ]
    if not any(seen):
        return scores
    tokens = torch.tensor([*itertools.chain.from_iterable(seen)], device=scores.device)
    counts = torch.tensor([*map(len, seen)], device=scores.device)
    places = torch.arange(len(rows), device=scores.device)
    places = places.repeat_interleave(counts, output_size=len(tokens))
    penalties = scores.new_tensor([plan.penalty for plan in plans])[places]
    found = scores[places, tokens]
    found = torch.where(found < 0, found * penalties, found / penalties)
    return scores.index_put((places, tokens), found)


def _warp(scores: Any, plans: list[Sampling]) -> Any:
    """Temperature, top_k, top_p and min_p, in the order of ``model.generate``."""
    import torch

    low = -float("inf")

    def column(values: list[float], kind: Any = torch.float32) -> Any:
        return torch.tensor(values, dtype=kind, device=scores.device)[:, None]

    scores = scores / column([plan.temperature for plan in plans])
    size = scores.shape[-1]
    counts = [min(plan.top_k, size) or size for plan in plans]
    if (most := max((count for count in counts if count < size), default=0)) > 0:
        best = scores.topk(most, dim=-1).values
        places = column([min(count, most) - 1 for count in counts], torch.long)
        are_out = (scores < best.gather(-1, places)) & (column(counts) < size)
        scores = scores.masked_fill(are_out, low)
    some = [at for at, plan in enumerate(plans) if plan.top_p < 1]
    if some:
        are_out = _unlikely(scores[some], column([plans[at].top_p for at in some]))
        scores[some] = scores[some].masked_fill(are_out, low)
    if any(plan.min_p for plan in plans):
        shares = scores.softmax(dim=-1)
        least = column([plan.min_p for plan in plans]) * shares.amax(dim=-1, keepdim=True)
        scores = scores.masked_fill(shares < least, low)
    return scores


def _unlikely(scores: Any, shares: Any) -> Any:
    """Which tokens are none of the most likely ones whose probabilities add up to these shares."""
    import torch

    count = min(_LIKELY, scores.shape[-1])
    if scores.device.type == "cpu":
        # Sorting costs more there than a step of a small model. Most often it is not needed.
        best, order = scores.softmax(dim=-1).topk(count, dim=-1)
        sums = best.cumsum(dim=-1)
        are_out = torch.ones_like(scores, dtype=torch.bool)
        are_out.scatter_(1, order, sums - best >= shares)
        flat = (sums[:, -1] <= shares[:, 0]).nonzero()[:, 0]
        if len(flat):
            are_out[flat] = _sorted_out(scores[flat], shares[flat])
        return are_out
    return _sorted_out(scores, shares)


def _sorted_out(scores: Any, shares: Any) -> Any:
    values, order = scores.sort(descending=False)
    are_out = values.softmax(dim=-1).cumsum(dim=-1) <= 1 - shares
    are_out[:, -1] = False  # the best one stays
    return are_out.scatter(1, order, are_out)


def _draw(scores: Any, numbers: list[float]) -> Any:
    """For each row the token at which the sum of probabilities passes its number.

    ``torch.multinomial`` would take a generator of the device's kind, and a call for each row.
    """
    import torch

    sums = scores.softmax(dim=-1).double().cumsum(dim=-1)
    wanted = torch.tensor(numbers, dtype=torch.float64, device=scores.device)[:, None]
    found = torch.searchsorted(sums, wanted * sums[:, -1:], right=True)[:, 0]
    return found.clamp(max=scores.shape[-1] - 1)


def _with_logprobs(logits: Any, rows: Sequence[Sampled], tokens: list[int]) -> list[TokenChoice]:
    import torch

    asked = [at for at, row in enumerate(rows) if row.sampling.alternatives is not None]
    choices = list(map(TokenChoice, tokens))
    if not asked:
        return choices
    part = (logits if len(asked) == len(rows) else logits[asked]).log_softmax(dim=-1)
    chosen = torch.tensor([[tokens[at]] for at in asked], device=logits.device)
    most = min(max(rows[at].sampling.alternatives or 0 for at in asked), logits.shape[-1])
    best = part.topk(most, dim=-1)
    # One copy from the device: log probabilities of the chosen tokens, then of the likeliest.
    shares = torch.cat([part.gather(-1, chosen), best.values], dim=-1).tolist()
    ids = best.indices.tolist() if most else [[]] * len(asked)
    for at, (share, *values), likely in zip(asked, shares, ids, strict=True):
        count = rows[at].sampling.alternatives
        top = tuple(zip(likely[:count], values[:count], strict=True))
        choices[at] = TokenChoice(tokens[at], share, top)
    return choices


class TokenCounts:
    """Counts the tokens of one row. Each is read once: a long text would else cost more each step.

    Args:
        prompt: number of tokens at the row's start that were not generated.
    """

    def __init__(self, prompt: int) -> None:
        self._prompt = prompt
        self._seen: dict[int, None] = {}
        self._read = 0
        self._made: Counter[int] = Counter()
        self._added: dict[int, float] = {}
        self._costs_read = prompt

    def seen(self, tokens: Sequence[int]) -> Mapping[int, None]:
        """The different tokens of the row.

        Args:
            tokens: all of the row, which were only appended to since the last call.
        """
        self._seen.update(dict.fromkeys(tokens[self._read :]))
        self._read = len(tokens)
        return self._seen

    def added(
        self,
        tokens: Sequence[int],
        biases: Sequence[tuple[int, float]],
        frequency: float,
        presence: float,
    ) -> Mapping[int, float]:
        """What is added to logits, by token.

        Args:
            tokens: as of ``seen``.
            biases: tokens, and what is added to the logit of each.
            frequency: is taken away for each time that a token was generated.
            presence: is taken away if it was generated at all.

        All but the first are the same in each call.
        """
        usual = dict(biases)
        if self._costs_read == self._prompt:
            self._added = dict(biases)
        if frequency or presence:
            new = tokens[self._costs_read :]
            self._made.update(new)
            self._costs_read = len(tokens)
            for token in new:
                cost = frequency * self._made[token] + presence
                self._added[token] = usual.get(token, 0.0) - cost
        return self._added
