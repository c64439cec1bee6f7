"""Texts that share the steps of a worker: none of them loses anything by the others."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline_cases import folder, item, loaded, noise, variant
from service_streamer import ThreadedStreamer
from service_streamer.pipelines import SteppedPipeline

pytestmark = pytest.mark.xdist_group("texts-together")

LONG = 1500
LIMIT = 2048
CHAT = [{"role": "user", "content": "hello"}]
GREEDY = {"max_new_tokens": 6, "do_sample": False}


class Watched(SteppedPipeline):
    """Takes its first step when so many texts have started, and counts what it computes.

    That is the tokens of each step, padding included; the second token of each prompt, since the
    first may be padding; how many steps each text took; and how many inputs the encoder has read.
    """

    expected = 1
    folder: Path
    last: Watched

    def init_model(self, *_: Any, **__: Any) -> None:
        self.gpu_id = "cpu"
        super().init_model(self.folder)
        Watched.last = self
        self.started = self.reads = 0
        self.tokens: list[int] = []
        self.prompts: list[int] = []
        self.ends: list[int] = []
        network = self.model.model
        network.register_forward_pre_hook(self._count, with_kwargs=True)
        if network.config.is_encoder_decoder:
            network.get_encoder().register_forward_hook(self._read)

    def _count(self, _model: Any, _args: Any, options: Any) -> None:
        ids = options.get("input_ids")
        if ids is not None and self.tokens:
            self.tokens[-1] += ids.numel()
            self.prompts += ids[:, 1].tolist() if ids.shape[1] > 1 else []

    def _read(self, _encoder: Any, _args: Any, output: Any) -> None:
        self.reads += len(output.last_hidden_state)

    def start(self, items: list[Any]) -> list[Any]:
        states = super().start(items)
        self.started += len(states)
        return states

    def step(self, states: list[Any]) -> list[Any]:
        if self.is_waiting(states):
            return [(None, False) for _ in states]
        self.tokens.append(0)
        pairs = super().step(states)
        self.ends += [len(self.tokens) for _, is_done in pairs if is_done]
        return pairs

    def is_waiting(self, states: list[Any]) -> bool:
        return self.started < self.expected


@pytest.fixture(scope="module")
def long_chat(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model for chats, with room for long prompts."""
    return variant("chat", tmp_path_factory.mktemp("long"), max_position_embeddings=LIMIT)


def streamer_of(
    model: type[Watched], source: Path, expected: int, **options: Any
) -> ThreadedStreamer:
    model.expected, model.folder = expected, source
    return ThreadedStreamer(model, **options)


def prompt(number: int, length: int, new: int = 4) -> Any:
    """An item whose prompt has so many tokens. The second one tells it from the others."""
    source = random.Random(number)
    ids = [source.randrange(10, 300) for _ in range(length)]
    ids[1] = 100 + number
    return item(ids, "generate", max_new_tokens=new, do_sample=False)


def whole(source: Path, items: Sequence[Any]) -> list[Any]:
    """What ``model.generate`` gives for each of them alone."""
    model = loaded(source)
    return [model.predict([each])[0] for each in items]


def test_a_burst_of_long_prompts_holds_up_neither_streams_nor_short_prompts(
    long_chat: Path,
) -> None:
    running = prompt(1, 9, new=20)
    long = [prompt(2 + at, LONG) for at in range(8)]
    short = prompt(99, 9)
    items = [long[0], running, *long[1:], short]
    with streamer_of(Watched, long_chat, len(items)) as streamer:
        futures = [streamer.submit([each]) for each in items]
        found = [future.result(timeout=120)[0] for future in futures]
    assert found == whole(long_chat, items)
    model = Watched.last
    assert max(model.tokens) < LONG + 1024, "a long one, and about 1,000 beside it"
    assert [each for each in model.prompts if 102 <= each < 110] == [*range(102, 110)], "in order"
    # Of long ones, one begins in each step. Neither the text that runs nor the short one waits.
    assert model.ends == sorted([4 + at for at in range(8)] + [4, 20])


def test_a_prompt_that_is_cancelled_while_it_waits_is_never_computed(long_chat: Path) -> None:
    class Patient(Watched):
        """Takes the second step when a text was given up."""

        is_gone = False

        def is_waiting(self, states: list[Any]) -> bool:
            if super().is_waiting(states):
                return True
            if not self.tokens:
                return False
            stepped.set()
            return not self.is_gone

        def release(self, state: Any) -> None:
            self.is_gone = True
            super().release(state)

    stepped = threading.Event()
    items = [prompt(at, LONG) for at in range(4)]
    with streamer_of(Patient, long_chat, len(items)) as streamer:
        futures = [streamer.submit([each]) for each in items[:2]]
        stream = streamer.stream(items[2])
        futures.append(streamer.submit(items[3:]))
        assert stepped.wait(120)
        stream.close()
        found = [future.result(timeout=120)[0] for future in futures]
    assert found == whole(long_chat, [*items[:2], items[3]])
    assert Watched.last.prompts == [100, 101, 103]


def build_thinker(target: Path, *, must_answer: bool) -> Path:
    """The tiny model for chats, with a template by which it thinks until it writes a mark."""
    file = variant("chat", target) / "tokenizer_config.json"
    fields = {
        "thinking": {"open_pattern": "^", "close": "</think>"},
        "content": {"content": "text", "optional": not must_answer},
    }
    template = {"defaults": {"role": "assistant"}, "start_anchor": "assistant: ", "fields": fields}
    file.write_text(json.dumps({**json.loads(file.read_text()), "response_template": template}))
    return target


def test_a_chat_may_end_while_the_model_thinks(tmp_path: Path) -> None:
    source = build_thinker(tmp_path, must_answer=False)
    chat, stopped = item(CHAT, **GREEDY), item(CHAT, **GREEDY, stop="never")
    with streamer_of(Watched, source, 1) as streamer:
        [[record], [other]] = streamer.predict([chat, stopped], timeout=120)
    said = record["generated_text"][-1]
    assert said["thinking"]
    assert "content" not in said
    assert other == record
    assert whole(source, [chat, stopped]) == [[record], [record]]


@pytest.mark.parametrize("retry", [True, False])
def test_a_text_that_fails_at_its_end_costs_others_no_token(tmp_path: Path, retry: bool) -> None:
    source = build_thinker(tmp_path, must_answer=True)
    text = item("once upon a", "generate", max_new_tokens=20, do_sample=False)
    fails = [item(CHAT, max_new_tokens=count, do_sample=False) for count in range(2, 9)]
    [[wanted]] = whole(source, [text])
    with streamer_of(Watched, source, 2 + len(fails), retry=retry) as streamer:
        stream, future = streamer.stream(text), streamer.submit([text])
        bad = [streamer.submit([each]) for each in fails]
        assert "".join(output["text"] for output in stream) == wanted["text"]
        assert future.result(timeout=120) == [[wanted]]
        for each in bad:
            with pytest.raises(ValueError, match=r"fields missing from parsed output: "):
                each.result(timeout=120)


@pytest.mark.parametrize("reason", ["its result lacks memory", "its token has no text"])
def test_what_fails_behind_the_model_costs_others_no_token(reason: str) -> None:
    """A lack of memory may be over by the next try. Any other error is the text's own."""
    lacks_memory = reason == "its result lacks memory"

    class Faulty(Watched):
        def init_model(self, *_: Any, **__: Any) -> None:
            super().init_model()
            handler: Any = self.whole.handlers["predict"]
            usual, tries = handler.result, iter([torch.OutOfMemoryError("a lack of memory")])

            def result(*args: Any) -> Any:
                for error in tries:
                    raise error
                return usual(*args)

            def word(_token: int) -> Any:
                raise KeyError("the tokenizer has no such token")

            handler.result = result
            self.decoder.word = word  # type: ignore[method-assign] # for details of tokens

    source = folder("chat")
    text = item("once upon a", "generate", max_new_tokens=20, do_sample=False)
    other = item(CHAT, **GREEDY) if lacks_memory else item(CHAT, **GREEDY, logprobs=0)
    [[[wanted]], [[answer]]] = [whole(source, [each]) for each in (text, item(CHAT, **GREEDY))]
    with streamer_of(Faulty, source, 3) as streamer:
        stream, second = streamer.stream(text), streamer.submit([other])
        third = streamer.submit([text])
        assert "".join(output["text"] for output in stream) == wanted["text"]
        assert third.result(timeout=120) == [[wanted]]
        if lacks_memory:
            assert second.result(timeout=120) == [[answer]]
        else:
            with pytest.raises(KeyError, match="the tokenizer has no such token"):
                second.result(timeout=120)


def test_a_sound_without_a_language_is_read_once(tmp_path: Path) -> None:
    source = variant("whisper", tmp_path)
    file = source / "generation_config.json"
    config = json.loads(file.read_text())
    times = range(config["no_timestamps_token_id"] + 1, config["no_timestamps_token_id"] + 102)
    suppressed = sorted({*config["suppress_tokens"], *times})  # a text with times is begun again
    file.write_text(json.dumps({**config, "suppress_tokens": suppressed}))
    items = [item(noise(0.5, seed), num_beams=1) for seed in range(3)]
    items.append(item(noise(0.5, 3), num_beams=1, language="fr"))
    with streamer_of(Watched, source, len(items)) as streamer:
        streamer.wait_ready(120)
        model = Watched.last
        model.reads = 0
        found = streamer.predict(items, timeout=120)
    assert model.reads == 4, "three sounds to recognize their languages, and the one that says it"
    assert found == whole(source, items)
