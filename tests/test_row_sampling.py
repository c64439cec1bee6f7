"""The choice of tokens: as transformers' own processors, for rows with parameters of their own."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import transformers

from service_streamer.pipelines.row_sampling import (
    Sampling,
    TokenChoice,
    choose,
    process,
    sampling_of,
)
from service_streamer.pipelines.step_loop import GeneratedRow

pytestmark = pytest.mark.xdist_group("transformers")

VOCABULARY = 61


@pytest.fixture(scope="module")
def model() -> Any:
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=64, n_embd=16, n_layer=1, n_head=2,
        initializer_range=0.5, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return transformers.GPT2LMHeadModel(config).eval()


def new_row(prompt: list[int], *options: Any, made: Sequence[int] = ()) -> GeneratedRow:
    """A row that has made these tokens already."""
    row = GeneratedRow(prompt, *options)
    row.tokens += made
    return row


def logits_of(rows: int, seed: int = 0) -> torch.Tensor:
    made = torch.Generator().manual_seed(seed)
    return 3 * torch.randn(rows, VOCABULARY, generator=made)


def plan(
    model: Any, tokens: list[int], fields: dict[str, Any] | None = None, **options: Any
) -> Sampling:
    """As ``generate`` would choose tokens with these options, and with further fields."""
    config, _ = model._prepare_generation_config(None, **options)
    found = sampling_of(model, config, len(tokens), **(fields or {}))
    assert found is not None
    return found


OPTIONS: list[dict[str, Any]] = [
    {},
    {"do_sample": True},  # the default of 50 for top_k
    {"do_sample": True, "temperature": 0.3, "top_k": 0},
    {"do_sample": True, "temperature": 2.5, "top_k": 5},
    {"do_sample": True, "top_k": 1},
    {"do_sample": True, "top_p": 0.7, "top_k": 0},
    {"do_sample": True, "top_p": 0.01, "top_k": 0},
    {"do_sample": True, "top_p": 0.9, "top_k": 20, "temperature": 1.3},
    {"do_sample": True, "min_p": 0.1, "top_k": 0},
    {"do_sample": True, "min_p": 0.05, "top_p": 0.95, "temperature": 3.0},
    {"repetition_penalty": 1.7},
    {"do_sample": True, "repetition_penalty": 0.6, "top_k": 9},
    {"no_repeat_ngram_size": 2},
    {"do_sample": True, "min_new_tokens": 5, "top_p": 0.8, "repetition_penalty": 1.2},
    {"do_sample": True, "typical_p": 0.5},
]


def test_scores_are_those_of_generate(model: Any) -> None:
    source = random.Random(1)
    prompts = [[source.randrange(VOCABULARY) for _ in range(9)] for _ in OPTIONS]
    prompts[12] = [3, 4, 3, 4, 3]  # a pair that may not come again
    rows = [
        new_row(tokens, plan(model, tokens, **options))
        for tokens, options in zip(prompts, OPTIONS, strict=True)
    ]
    own = [at for at, row in enumerate(rows) if row.sampling.processors is not None]
    assert own == [12, 13, 14]
    wanted = [
        model.generate(
            torch.tensor([tokens]), max_new_tokens=6, **options,
            return_dict_in_generate=True, output_scores=True, output_logits=True,
        )
        for tokens, options in zip(prompts, OPTIONS, strict=True)
    ]  # fmt: skip
    logits = torch.cat([each.logits[0] for each in wanted])
    before = logits.clone()
    scores = process(logits, rows)
    assert torch.equal(logits, before)
    for found, each, options in zip(scores, wanted, OPTIONS, strict=True):
        torch.testing.assert_close(found, each.scores[0][0], msg=lambda text: f"{options}: {text}")  # noqa: B023
    others: list[Any] = [("num_beams", 2), ("guidance_scale", 2.0), ("stop_strings", "a")]
    for name, value in [*others, ("max_time", 1.0)]:
        config, _ = model._prepare_generation_config(None, **{name: value})
        assert sampling_of(model, config, 3) is None, "only generate can do that"


def test_penalties_are_openais(model: Any) -> None:
    """Logits ``- c * frequency - (c > 0) * presence``, where c counts what was sampled."""
    prompt, made = [7, 7, 8], [3, 5, 3, 3, 7]
    plans = [
        Sampling(frequency_penalty=0.5),
        Sampling(presence_penalty=-1.5),
        Sampling(frequency_penalty=2.0, presence_penalty=0.25, penalty=1.3),
        Sampling(),
        plan(model, prompt, {"frequency_penalty": 1.0}, no_repeat_ngram_size=9),
        Sampling(frequency_penalty=1.0),
        Sampling(frequency_penalty=1.0, logit_bias=((3, -100.0), (9, 5.0))),
    ]
    rows = [new_row(prompt, each, made=made) for each in plans]
    rows[5] = new_row(prompt, plans[5])  # nothing was generated yet
    logits = logits_of(len(rows))
    before = logits.clone()
    scores = process(logits, rows)
    assert torch.equal(logits, before)
    for at, row in enumerate(rows):
        wanted = logits[at].tolist()
        for token in range(VOCABULARY):
            count = row.tokens[len(prompt) :].count(token)
            wanted[token] -= count * row.sampling.frequency_penalty
            wanted[token] -= (count > 0) * row.sampling.presence_penalty
            wanted[token] += dict(row.sampling.logit_bias).get(token, 0)
            if token in row.tokens:
                factor = row.sampling.penalty
                wanted[token] *= factor if wanted[token] < 0 else 1 / factor
        torch.testing.assert_close(scores[at], torch.tensor(wanted))


def test_few_rows_of_a_large_vocabulary_are_sorted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are unsure; of the others the most likely tokens are enough."""
    made = torch.Generator().manual_seed(0)
    spread = torch.tensor([[9.0], [0.5], [6.0], [0.01], [5.0]])
    logits = spread * torch.randn(5, 5000, generator=made)
    shares = [0.9, 0.8, 0.999, 0.95, 0.3]
    rows = [new_row([1], Sampling(samples=True, top_p=share)) for share in shares]
    wanted = [
        transformers.TopPLogitsWarper(share)(torch.tensor([[1]]), each[None])  # type: ignore[arg-type]
        for share, each in zip(shares, logits, strict=True)
    ]
    usual, sizes = torch.Tensor.sort, []

    def counted(scores: Any, *args: Any, **options: Any) -> Any:
        sizes.append(len(scores))
        return usual(scores, *args, **options)

    monkeypatch.setattr(torch.Tensor, "sort", counted)
    scores = process(logits, rows)
    assert sizes == [2]
    torch.testing.assert_close(scores, torch.cat(wanted))


def test_tokens_are_drawn_by_their_probabilities() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0, -float("inf")]]).expand(4000, 4)
    rows = [new_row([0], Sampling(samples=True), 3)] * 4000
    counts = torch.bincount(
        torch.tensor([each.token for each in choose(logits, rows)]), minlength=4
    )
    shares = counts / 4000
    assert counts[3] == 0
    torch.testing.assert_close(shares, logits[0].softmax(-1), atol=0.03, rtol=0)

    class Edge(random.Random):
        def __init__(self, number: float) -> None:
            self.number = number

        def random(self) -> float:
            return self.number

    for number, token in ((0.0, 0), (1 - 2**-53, 2)):  # never one that has no probability
        row = new_row([0], Sampling(samples=True))
        row.random = Edge(number)
        assert choose(logits[:1], [row])[0].token == token


def test_log_probabilities_are_the_models_own() -> None:
    logits = logits_of(4)
    shares = logits.log_softmax(-1)
    rows = [
        new_row([0], Sampling(alternatives=count, temperature=9.0, penalty=3.0))
        for count in (3, 0, 1)
    ]
    choices = choose(logits, [*rows, new_row([0])])
    assert choices[3] == TokenChoice(int(logits[3].argmax()))
    for at, count in enumerate((3, 0, 1)):
        assert choices[at].logprob == pytest.approx(float(shares[at, choices[at].token]))
        best = shares[at].topk(count)
        assert [token for token, _ in choices[at].top] == best.indices.tolist()
        assert [value for _, value in choices[at].top] == pytest.approx(best.values.tolist())


class Only:
    """A constraint that allows some tokens."""

    def __init__(self, *tokens: int) -> None:
        self.tokens = tokens
        self.taken: list[int] = []
        self.failures: list[str] = []

    def mask(self, scores: torch.Tensor) -> None:
        allowed = scores[list(self.tokens)]
        scores.fill_(-float("inf"))
        scores[list(self.tokens)] = allowed

    def accept(self, token: int) -> None:
        self.taken.append(token)

    def fail(self, why: str) -> None:
        self.failures.append(why)


@pytest.mark.parametrize("setting", [{}, {"no_repeat_ngram_size": 2}, {"min_new_tokens": 9}])
def test_a_constraint_comes_before_what_leaves_likely_tokens(model: Any, setting: Any) -> None:
    logits = logits_of(8)
    unlikely = logits.sum(dim=0).argsort()[:2].tolist()
    options = {"do_sample": True, "top_k": 1, **setting}
    forms = [Only(*unlikely) for _ in range(8)]
    rows = [
        new_row([5], plan(model, [5], {"constraint": form}, **options), at)
        for at, form in enumerate(forms)
    ]
    assert all((row.sampling.processors is not None) == bool(setting) for row in rows)
    tokens = [each.token for each in choose(logits, rows)]
    assert [form.taken for form in forms] == [[token] for token in tokens]
    wanted = [max(unlikely, key=lambda token: row[token].item()) for row in logits]
    assert tokens == wanted


@pytest.mark.parametrize("samples", [True, False])
def test_a_text_fails_alone_if_all_that_fits_is_forbidden(model: Any, samples: bool) -> None:
    ends, fits = Only(1), Only(1)  # the token that ends texts, which comes too early
    early = plan(model, [5], {"constraint": ends}, do_sample=samples, min_new_tokens=3)
    good = plan(model, [5], {"constraint": fits}, do_sample=samples)
    choose(logits_of(2), [new_row([5], each, 0) for each in (early, good)])
    assert (ends.taken, len(ends.failures)) == ([], 1)
    assert (fits.taken, fits.failures) == ([1], [])


def test_tokens_are_counted_once() -> None:
    class Watched(list[int]):
        reads = 0

        def __iter__(self) -> Any:
            Watched.reads += len(self)
            return super().__iter__()

        def __getitem__(self, at: Any) -> Any:
            found = super().__getitem__(at)
            Watched.reads += len(found) if isinstance(at, slice) else 1
            return found

    prompt, biases = [7, 7, 8], ((3, 2.0), (9, 5.0))
    kinds: list[dict[str, Any]] = [
        {"penalty": 1.3},
        {"frequency_penalty": 0.5, "presence_penalty": 0.25, "logit_bias": biases},
    ]
    rows = [new_row(prompt, Sampling(**each)) for each in kinds]
    tokens = [random.Random(1).randrange(VOCABULARY) for _ in range(50)]
    for row in rows:
        row.tokens = Watched(prompt)
    for token in tokens:
        for row in rows:
            row.tokens.append(token)
        logits = logits_of(2, token)
        scores = process(logits, rows)
        count = Watched.reads
        fresh = [new_row(prompt, row.sampling, made=row.tokens[len(prompt) :]) for row in rows]
        Watched.reads = count
        assert torch.equal(scores, process(logits, fresh))
    assert Watched.reads <= 2 * (len(prompt) + len(tokens))
