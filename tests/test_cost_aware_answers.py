"""Batches that are cut by length change no answer: real models, items as unlike as can be."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

import minilm
from bert_model import TextInfillingModel
from cases import long_cases
from service_streamer import ManagedModel, Streamer, ThreadedStreamer

pytestmark = pytest.mark.xdist_group("cost-aware-answers")

# Sums over more padding are rounded in another way; a wrong sentence's answer is far from this.
TOLERANCE = 1e-4


class Infilling(ManagedModel):
    """The scores of the shipped model, which tell more than its words."""

    def init_model(self) -> None:
        torch.set_num_threads(1)
        self.model = TextInfillingModel(max_sent_len=64, device="cpu")

    def predict(self, batch: list[str]) -> list[Any]:
        return list(self.model.scores(batch).numpy())

    @staticmethod
    def length(sentence: str) -> int:
        return len(sentence.split())


class MiniLM(minilm.MiniLM):
    def init_model(self) -> None:
        super().init_model()
        torch.set_num_threads(1)


@pytest.fixture(scope="module", autouse=True)
def no_monitor_threads() -> Iterator[None]:
    """Loading shows a progress bar, with a thread that never ends."""
    from tqdm import tqdm

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tqdm, "monitor_interval", 0)
        yield


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Two threads that wait for each other are many times slower on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", params=[Infilling, *long_cases(MiniLM)])
def model(request: pytest.FixtureRequest) -> ManagedModel:
    made: ManagedModel = request.param()
    made.init_model()
    return made


@pytest.fixture(scope="module")
def answers(model: ManagedModel) -> dict[str, Any]:
    """Sentences of 2 to 59 words in no order, and what each gets that is computed alone."""
    source = random.Random(5)
    words = ["star", "little", "happy", "birthday", "answer", "life", "wonder", "what", "you"]
    lengths = [*range(1, 61, 6), *([3] * 4)]
    source.shuffle(lengths)
    sentences = [" ".join([*source.choices(words, k=length), "[MASK]"]) for length in lengths]
    return {sentence: model.predict([sentence])[0] for sentence in sentences}


def assert_equal(answers: dict[str, Any], sentences: list[str], outputs: list[Any]) -> None:
    wanted = np.array([answers[sentence] for sentence in sentences])
    np.testing.assert_allclose(np.array(outputs), wanted, rtol=0, atol=TOLERANCE)


def test_the_tolerance_tells_sentences_apart(answers: dict[str, Any]) -> None:
    for one, other in itertools.combinations(answers.values(), 2):
        assert np.abs(one - other).max() > 10 * TOLERANCE


def test_a_threads_items_get_their_own_answers(
    model: ManagedModel, answers: dict[str, Any]
) -> None:
    with ThreadedStreamer(model.predict, length=len, worker_timeout=None) as streamer:
        assert_answers(streamer, answers)


@pytest.mark.long
@pytest.mark.parametrize("most", [None, 200], ids=["free", "max_batch_cost"])
def test_a_processs_items_get_their_own_answers(
    model: ManagedModel, answers: dict[str, Any], most: float | None
) -> None:
    with Streamer(type(model), max_batch_cost=most, worker_timeout=None) as streamer:
        assert_answers(streamer, answers)


def assert_answers(streamer: Streamer | ThreadedStreamer, answers: dict[str, Any]) -> None:
    """Ask for all sentences: one by one of futures and of threads, and several at once."""
    sentences = list(answers)
    # All of them wait while the first few are computed, so that there is something to choose.
    futures = [streamer.submit([sentence]) for sentence in sentences]
    several = [streamer.submit(sentences[at : at + 7]) for at in range(0, len(sentences), 7)]
    with ThreadPoolExecutor(8) as callers:
        outputs = list(callers.map(lambda each: streamer.predict([each])[0], sentences))
    assert_equal(answers, sentences, outputs)
    assert_equal(answers, sentences, [future.result()[0] for future in futures])
    assert_equal(answers, sentences, [each for call in several for each in call.result()])
