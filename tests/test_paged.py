"""Caches in pages: driven step by step, guarded by a comparison, replaced where they are wrong."""

from __future__ import annotations

import copy
import logging
import random
from typing import Any

import pytest
import torch

from service_streamer.pipelines.loop_check import fastest_loop
from service_streamer.pipelines.step_loop import GeneratedRow, StepLoop
from test_step_loop import generated, tokens_of
from tiny_generators import VOCABULARY, model_of

pytestmark = pytest.mark.xdist_group("transformers")

PAGED = ["gpt2", "llama", "mistral", "gemma3", "opt"]


def paged_loop(model: Any, places: int, limit: int | None = None) -> Any:
    """A loop that keeps caches in pages."""
    loop = fastest_loop(model, places, limit, paged=True)
    assert not isinstance(loop, StepLoop)
    return loop


@pytest.mark.parametrize("name", PAGED)
def test_rows_that_come_and_go_get_the_tokens_of_generate(name: str) -> None:
    model = model_of(name)
    loop, source = paged_loop(model, 6, 256), random.Random(name)
    running: list[GeneratedRow] = []
    over: list[GeneratedRow] = []
    shared = [source.randrange(2, VOCABULARY) for _ in range(70)]  # pages that rows may share
    for step in range(30):
        if step < 22 and len(running) < 6 and source.random() < 0.6:
            length = source.choice([1, 2, 9, 40])
            prompt = shared[: source.choice([0, 0, 70])] + [
                source.randrange(2, VOCABULARY) for _ in range(length)
            ]
            running.append(GeneratedRow(prompt))
        stepped = [row for row in running if source.random() < 0.9]
        if stepped:
            before = [len(row.tokens) for row in stepped]
            ready = loop.advance(stepped, tokens_of)
            for row, length in zip(stepped, before, strict=True):
                assert len(row.tokens) == length + (row in ready)
        going = [row for row in running if source.random() < 0.1]
        loop.drop(going)
        over += going
        running = [row for row in running if row not in going]
    loop.drop(running)
    # All pages are free again: as many rows begin at once as if they were the first.
    fresh = [GeneratedRow([2 + at] * 5) for at in range(6)]
    assert len(loop.advance(fresh, tokens_of)) == 6
    loop.drop(fresh)
    over += fresh
    over = [row for row in (*over, *running) if len(row.tokens) > len(row.prompt)]
    assert max(len(row.tokens) - len(row.prompt) for row in over) > 5
    for row in over:
        assert row.tokens == generated(name, row)


@pytest.mark.parametrize("limit", [256, 64])
def test_long_prompts_wait_for_their_parts_and_for_pages(limit: int) -> None:
    """With a limit of 64 there are pages for 256 tokens, and three rows want 315."""
    model = model_of("llama")
    loop = paged_loop(model, 2, limit)
    size, count = (200, 4) if limit == 256 else (90, 8)
    rows = [GeneratedRow([3 + at] * size) for at in range(count)]
    first: dict[int, int] = {}
    for step in range(200):
        running = [row for row in rows if len(row.tokens) < size + 15]
        if not running:
            break
        for row in loop.advance(running, tokens_of):
            first.setdefault(id(row), step)
        loop.drop([row for row in running if len(row.tokens) >= size + 15])
    assert len(set(first.values())) > 1  # not all of them at once
    for row in rows:
        assert len(row.tokens) == size + 15
        assert row.tokens == generated("llama", row)


def test_a_step_that_failed_can_be_taken_again() -> None:
    loop = paged_loop(model_of("llama"), 4)
    rows = [GeneratedRow([2, 3, 4 + at]) for at in range(3)]
    loop.advance(rows, tokens_of)

    def fails(*_: Any) -> Any:
        raise RuntimeError("a fault")

    with pytest.raises(RuntimeError, match="a fault"):
        loop.advance(rows, fails)
    assert {len(row.tokens) for row in rows} == {4}
    loop.advance(rows[:1], tokens_of)
    for _ in range(3):
        loop.advance(rows, tokens_of)
    for row in rows:
        assert row.tokens == generated("llama", row)


# The guard


def without_positions(model: Any) -> Any:
    """The model, but it counts positions from the beginning of the row that all texts share."""
    wrong = copy.deepcopy(model)
    usual = wrong.forward

    def forward(*args: Any, position_ids: Any = None, **options: Any) -> Any:
        count = options["input_ids"].shape[1]
        if "cache" in options:
            options["position_ids"] = torch.arange(count)[None]
        elif position_ids is not None:
            options["position_ids"] = position_ids
        return usual(*args, **options)

    wrong.forward = forward
    return wrong


def test_wrong_answers_are_found_out(caplog: pytest.LogCaptureFixture) -> None:
    wrong = without_positions(model_of("gpt2"))
    with caplog.at_level(logging.WARNING, "service_streamer"):
        assert isinstance(fastest_loop(wrong, 8, 256, paged=True), StepLoop)
    [record] = [each for each in caplog.records if each.name.startswith("service_streamer")]
    assert "cannot keep its cache in pages: logits differ by" in record.getMessage()


@pytest.mark.parametrize("name", ["gpt_neo", "bloom", "t5"])
def test_models_whose_attention_takes_no_pages(name: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "service_streamer"):
        loop = fastest_loop(model_of(name), 8, 256, paged=True)
    assert isinstance(loop, StepLoop)
    assert "in pages: ValueError" in caplog.text
    row = GeneratedRow([3, 4, 5], encoded=[6, 7])  # the model computes without pages again
    loop.advance([row], tokens_of)
    assert len(row.tokens) == 4
