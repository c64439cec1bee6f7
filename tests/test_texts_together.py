"""Texts that share the steps of a worker: none of them loses anything by the others."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline_cases import folder, item, loaded, noise, variant
from service_streamer import ThreadedStreamer
from service_streamer.pipelines import SteppedPipeline

pytestmark = pytest.mark.xdist_group("transformers")

CHAT = [{"role": "user", "content": "hello"}]
GREEDY = {"max_new_tokens": 6, "do_sample": False}


class Watched(SteppedPipeline):
    """Takes its first step when so many texts have started, and counts what its encoder reads."""

    expected = 1
    folder: Path
    last: Watched

    def init_model(self, *_: Any, **__: Any) -> None:
        self.gpu_id = "cpu"
        super().init_model(self.folder)
        Watched.last = self
        self.started = self.reads = 0
        network = self.model.model
        if network.config.is_encoder_decoder:
            network.get_encoder().register_forward_hook(self._read)

    def _read(self, _encoder: Any, _args: Any, output: Any) -> None:
        self.reads += len(output.last_hidden_state)

    def start(self, items: list[Any]) -> list[Any]:
        states = super().start(items)
        self.started += len(states)
        return states

    def step(self, states: list[Any]) -> list[Any]:
        if self.started < self.expected:
            return [(None, False) for _ in states]
        return super().step(states)


def streamer_of(
    model: type[Watched], source: Path, expected: int, **options: Any
) -> ThreadedStreamer:
    model.expected, model.folder = expected, source
    return ThreadedStreamer(model, **options)


def whole(source: Path, items: Sequence[Any]) -> list[Any]:
    """What ``model.generate`` gives for each of them alone."""
    model = loaded(source)
    return [model.predict([each])[0] for each in items]


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
