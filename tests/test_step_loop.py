"""Generation step by step: each row gets the tokens that ``model.generate`` gives it alone."""

from __future__ import annotations

import copy
import inspect
import itertools
import random
from typing import Any

import pytest
import torch

import quiet_torch  # noqa: F401
from service_streamer.pipelines.loop_check import fault_of, suitable_loop
from service_streamer.pipelines.row_sampling import choose
from service_streamer.pipelines.step_loop import GeneratedRow, StepLoop
from tiny_generators import EXAMPLES, MAKERS, SHIFTED, VOCABULARY, WITH_ENCODER, model_of

pytestmark = pytest.mark.xdist_group("transformers")

#: The fastest way that suits each model.
WAYS: dict[str, Any] = {"mamba": "alone", **dict.fromkeys(SHIFTED, "shifted")}


def tokens_of(logits: torch.Tensor, rows: list[GeneratedRow]) -> list[int]:
    return [choice.token for choice in choose(logits, rows)]


def new_row(name: str, source: random.Random) -> GeneratedRow:
    model = model_of(name)
    encoded: Any = None
    if name in EXAMPLES:
        made = torch.Generator().manual_seed(source.randrange(10**6))
        encoded = torch.randn(EXAMPLES[name], generator=made)
    elif name in WITH_ENCODER:
        encoded = [source.randrange(2, VOCABULARY) for _ in range(source.randrange(1, 12))]
    if name in WITH_ENCODER:
        prompt = [model.generation_config.decoder_start_token_id]
    else:
        prompt = [source.randrange(2, VOCABULARY) for _ in range(source.choice([1, 2, 5, 9, 17]))]
    return GeneratedRow(prompt, encoded=encoded)


def generated(name: str, row: GeneratedRow) -> list[int]:
    """What ``model.generate`` gives, for as many tokens as the row has."""
    model, count = model_of(name), len(row.tokens) - len(row.prompt)
    if not count:
        return row.prompt
    if name == "whisper":  # its own generate cuts sounds into parts
        from transformers.generation.utils import GenerationMixin

        inputs = {"input_features": row.encoded[None]}
        found = GenerationMixin.generate(
            model, **inputs, max_new_tokens=count, do_sample=False, num_beams=1
        )
    elif name in EXAMPLES:
        found = model.generate(
            pixel_values=row.encoded[None], max_new_tokens=count, do_sample=False, num_beams=1
        )
    else:
        ids = torch.tensor([row.encoded or row.prompt])
        found = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=count,
            do_sample=False, num_beams=1,
        )  # fmt: skip
    tokens: list[int] = found[0].tolist()
    return tokens


@pytest.mark.parametrize(
    ("name", "way"),
    [
        *itertools.product(MAKERS, ["the fastest"]),
        *itertools.product(["gpt2", "t5", "trocr"], ["alone"]),
        *itertools.product(SHIFTED, ["aligned"]),
    ],
)
def test_rows_that_come_and_go_get_the_tokens_of_generate(name: str, way: Any) -> None:
    loop = StepLoop(model_of(name), WAYS.get(name, "padded") if way == "the fastest" else way)
    source = random.Random(name)
    running: list[GeneratedRow] = []
    over: list[GeneratedRow] = []
    for step in range(12 if way == "the fastest" else 8):
        if step < 9:
            running += [new_row(name, source) for _ in range(source.choice([0, 0, 1, 3]))]
        # Some are left out of a step, as after an error that was one of the others'.
        stepped = [row for row in running if source.random() < 0.9]
        if stepped:
            source.shuffle(stepped)
            assert set(loop.advance(stepped, tokens_of)) == set(stepped)
        going = [row for row in running if source.random() < 0.12]
        loop.drop(going)
        over += going
        running = [row for row in running if row not in going]
    loop.drop(running)
    assert not loop.homes
    over += running
    assert max(len(row.tokens) - len(row.prompt) for row in over) >= 3
    assert len({len(row.tokens) for row in over}) > 1
    for row in over:
        assert row.tokens == generated(name, row)


@pytest.mark.parametrize("name", MAKERS)
def test_the_fastest_way_is_found_that_computes_what_the_model_computes(name: str) -> None:
    example: Any = torch.zeros(EXAMPLES[name]) if name in EXAMPLES else None
    loop = suitable_loop(model_of(name), example)
    assert loop is not None
    assert loop.way == WAYS.get(name, "padded")
    if wrong := {"bart": "logits differ by", "mamba": "a cache of its own"}.get(name):
        assert wrong in fault_of(StepLoop(model_of(name), "padded"), model_of(name))


def test_a_model_whose_texts_cannot_take_turns_gets_no_loop(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It adds what it has seen at the last call, whosever text that was."""
    model = copy.deepcopy(model_of("llama"))
    usual, seen = model.forward, [0.0]

    def forward(**options: Any) -> Any:
        output = usual(**options)
        if options.get("use_cache"):
            output.logits = output.logits + seen[0]
            seen[0] = torch.linspace(0, 9, VOCABULARY) * float(options["input_ids"].sum() % 7)
        return output

    forward.__signature__ = inspect.signature(usual)  # type: ignore[attr-defined]
    model.forward = forward
    assert suitable_loop(model) is None
    assert "cannot generate step by step (logits differ by" in caplog.text


def shapes_of_steps(module: Any, loop: StepLoop, rows: list[GeneratedRow]) -> list[Any]:
    """The shapes of what ``module`` reads in each step, until each row has two new tokens."""
    shapes: list[list[tuple[int, ...]]] = []
    with module.register_forward_pre_hook(
        lambda _module, args, options: shapes[-1].append(
            tuple((*args, options.get("input_ids"), options.get("input_features"))[0].shape)
        ),
        with_kwargs=True,
    ):
        while any(len(row.tokens) < len(row.prompt) + 2 for row in rows):
            shapes.append([])
            loop.advance(rows, tokens_of)
    return shapes


@pytest.mark.parametrize(
    ("way", "most_new", "lengths", "copies", "shapes"),
    [
        # With those of their length, since padding counts. The oldest counts for half at most.
        ("padded", 60, [20, 3, 25, 4, 5, 90, 22, 6, 80, 31], 1,
         [[(2, 4), (2, 25)], [(2, 6), (1, 22), (4, 1)], [(1, 90), (7, 1)], [(1, 80), (8, 1)],
          [(1, 31), (9, 1)], [(10, 1)]]),
        # Copies of a long prompt do not wait for each other.
        ("padded", 60, [70, 30, 31], 3, [[(1, 30), (1, 70)], [(1, 31), (6, 1)], [(9, 1)]]),
        ("alone", 60, [70], 2, [[(1, 70)], [(1, 70), (1, 1)], [(1, 1), (1, 1)]]),
        # Neither a short one nor those that run wait for many long ones.
        ("padded", None, [240] * 9 + [3], 1,
         [[(1, 3), (4, 240)], [(4, 240), (5, 1)], [(1, 240), (9, 1)], [(10, 1)]]),
    ],
    ids=["prompts", "copies", "copies that are computed alone", "as many as usual"],
)  # fmt: skip
def test_a_step_computes_the_oldest_new_row_and_others_that_fit(
    way: Any, most_new: int | None, lengths: list[int], copies: int, shapes: list[Any]
) -> None:
    prompts = [[2 + at] * length for at, length in enumerate(lengths)]
    rows = [GeneratedRow(prompt) for prompt in prompts for _ in range(copies)]
    options = {} if most_new is None else {"most_new": most_new}
    loop = StepLoop(model_of("llama"), way, **options)
    assert shapes_of_steps(model_of("llama"), loop, rows) == shapes
    for row in rows:
        assert row.tokens == generated("llama", row)


def test_tokens_that_encoders_read_count_as_new() -> None:
    """Features of which the size is known: the tiny Whisper gives 10 tokens for them."""
    model, source = model_of("whisper"), random.Random(3)
    loop = StepLoop(model, most_new=22)
    loop.advance([new_row("whisper", source)], tokens_of)
    rows = [new_row("whisper", source) for _ in range(5)]
    shapes = shapes_of_steps(model.get_encoder(), loop, rows)
    assert shapes == [[(2, 8, 20)], [(2, 8, 20)], [(1, 8, 20)], []]
    for row in rows:
        assert row.tokens == generated("whisper", row)


@pytest.mark.parametrize("name", ["t5", "bart"])
def test_encoders_read_texts_of_like_length(name: str) -> None:
    model = model_of(name)
    start = model.generation_config.decoder_start_token_id
    rows = [
        GeneratedRow([start], encoded=[2 + at] * length)
        for at, length in enumerate([4, 20, 3, 4, 11, 4, 5, 4, 13])
    ]
    loop = StepLoop(model, WAYS.get(name, "padded"), most_new=30)
    assert shapes_of_steps(model.get_encoder(), loop, rows) == [
        [(1, 4), (1, 20)], [(3, 4), (1, 11)], [(2, 5), (1, 13)], [],
    ]  # fmt: skip
    for row in rows:
        assert row.tokens == generated(name, row)


@pytest.mark.parametrize("where", ["in a layer", "in the choice"])
def test_a_step_that_failed_can_be_taken_again(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("llama")
    loop = StepLoop(model)
    source = random.Random(1)
    rows = [new_row("llama", source) for _ in range(4)]
    other = new_row("llama", source)
    loop.advance([*rows, other], tokens_of)
    before = [list(row.tokens) for row in rows]

    def fails(*_: Any, **__: Any) -> Any:
        raise RuntimeError("a fault")

    with monkeypatch.context() as patch:
        if where == "in a layer":  # the one before has a column more by then
            patch.setattr(model.model.layers[1].self_attn, "forward", fails)
        with pytest.raises(RuntimeError, match="a fault"):
            loop.advance(rows, fails if where == "in the choice" else tokens_of)
    assert [row.tokens for row in rows] == before
    loop.advance(rows[:2], tokens_of)  # halves, as the worker's loop tries them
    for _ in range(3):
        loop.advance([*rows, other], tokens_of)
    for row in [*rows, other]:
        assert row.tokens == generated("llama", row)


def test_a_row_that_cannot_begin_costs_the_others_nothing() -> None:
    """As it is for lack of memory: their caches remain."""
    model, source = model_of("llama"), random.Random(4)
    loop = StepLoop(model)
    rows = [new_row("llama", source) for _ in range(3)]
    loop.advance(rows, tokens_of)
    before = [list(row.tokens) for row in rows]
    shapes: list[tuple[int, ...]] = []

    def lacks(_model: Any, _args: Any, options: Any) -> None:
        shapes.append(tuple(options["input_ids"].shape))
        if shapes[-1][1] == 30:
            raise torch.OutOfMemoryError("a lack of memory")

    with model.register_forward_pre_hook(lacks, with_kwargs=True):
        with pytest.raises(torch.OutOfMemoryError):
            loop.advance([*rows, GeneratedRow([3] * 30)], tokens_of)
        assert [row.tokens for row in rows] == before
        loop.advance(rows, tokens_of)
    assert shapes == [(1, 30), (3, 1)]
    for row in rows:
        assert row.tokens == generated("llama", row)


def test_padding_goes_with_the_longest_row() -> None:
    loop = StepLoop(model_of("gemma3"))
    rows = [GeneratedRow(list(range(2, 2 + length))) for length in (40, 3, 8)]
    loop.advance(rows, tokens_of)
    loop.advance(rows, tokens_of)
    assert loop.homes[0].length == 41
    loop.drop(rows[:1])
    loop.advance(rows[1:], tokens_of)
    loop.drop(rows[2:])
    loop.advance(rows[1:2], tokens_of)
    [home] = loop.homes
    assert home.length == home.ids.shape[1] == 6
    assert home.cache.get_seq_length() == 6
    assert home.cache.layers[1].keys.shape[:3] == (1, 1, 6)
    assert rows[1].tokens == generated("gemma3", rows[1])


@pytest.mark.parametrize("leaves", ["for good", "for a while"])
def test_columns_of_the_encoder_go_with_the_longest_row(leaves: str) -> None:
    loop = StepLoop(model_of("t5"))
    rows = [GeneratedRow([0], encoded=[3 + at] * size) for at, size in enumerate((40, 8, 5, 7))]
    loop.advance(rows, tokens_of)
    loop.advance(rows, tokens_of)
    assert loop.homes[0].encoded_mask.shape == (4, 40)
    if leaves == "for good":
        loop.drop(rows[:1])
    loop.advance(rows[1:], tokens_of)
    home: Any = rows[1].home
    assert home.encoded_mask.shape == (3, 8)
    for layer in home.cache.cross_attention_cache.layers:
        assert layer.keys.shape[:3:2] == (3, 8)
        for kept in (layer.keys, layer.values):
            assert kept.untyped_storage().nbytes() == kept.nbytes
    rows.append(GeneratedRow([0], encoded=[2] * 20))
    for _ in range(3):
        loop.advance(rows[1:] if leaves == "for good" else rows, tokens_of)
    for row in rows:
        assert row.tokens == generated("t5", row)


@pytest.mark.parametrize(("name", "tokens"), [("t5", 3), ("whisper", 10)])
def test_a_row_alone_says_what_its_encoder_has_given(name: str, tokens: int) -> None:
    row = new_row(name, random.Random(1))
    if name == "t5":
        row = GeneratedRow(row.prompt, encoded=[5] * tokens)
    StepLoop(model_of(name), "alone").advance([row], tokens_of)
    assert row.encoded_tokens == tokens


@pytest.mark.parametrize("name", ["llama", "t5"])
def test_rows_that_stay_are_not_copied(name: str) -> None:
    """While rows leave, and others take their room."""
    source, loop = random.Random(2), StepLoop(model_of(name))
    rows = [new_row(name, source) for _ in range(8)]
    if name == "t5":  # the longest one makes the room
        rows[0].encoded = [3] * 12
    for _ in range(20):  # prompts that come later are shorter
        loop.advance(rows, tokens_of)

    def rooms() -> set[int]:
        [home] = loop.homes
        caches = [home.cache]
        if name == "t5":
            caches = [home.cache.self_attention_cache, home.cache.cross_attention_cache]
        return {
            room.data_ptr() for cache in caches for layer in cache.layers for room in layer.rooms
        }

    before, over = rooms(), []
    for _ in range(4):
        going = source.sample(rows, 2)
        rows = [row for row in rows if row not in going]
        loop.drop(going)
        loop.advance(rows, tokens_of)
        rows += [new_row(name, source), new_row(name, source)]
        loop.advance(rows, tokens_of)
        over += going
    assert rooms() == before
    for row in (*over, *rows):
        assert row.tokens == generated(name, row)
