"""The shipped text infilling model, its two halves, and the script that trains it."""

from __future__ import annotations

import itertools
import random
import re
import runpy
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

import bert_model
import quiet_torch  # noqa: F401
import train_text_infilling as training
from bert_model import DEFAULT_MODEL, ManagedBertModel, SentenceEncoder, TextInfillingModel
from fill_mask_model import TOP, ManagedFillMask
from service_streamer.managed_model import has_stages

pytestmark = pytest.mark.xdist_group("bert-model")

ANSWERS = {
    "twinkle twinkle [MASK] star.": "little",
    "Happy birthday to [MASK].": "you",
    "the answer to life, the [MASK], and everything.": "universe",
    "Happy birthday to [MASK], [MASK] birthday to you,": "you",  # the first mask
}


@pytest.fixture(scope="module")
def model() -> TextInfillingModel:
    return TextInfillingModel(device="cpu")


@pytest.fixture(scope="module")
def encoder() -> SentenceEncoder:
    return SentenceEncoder()


@pytest.fixture(scope="module")
def examples() -> list[training.Example]:
    return training.sample_examples(training.read_lines(), count=200)


@pytest.mark.long
def test_it_knows_its_text(model: TextInfillingModel, examples: list[training.Example]) -> None:
    assert len(examples) == 200
    assert training.accuracy(model, examples) >= 0.95
    bare = [
        training.Example(e.sentence.lower().rstrip(".!?,;").replace("[mask]", "[MASK]"), e.answer)
        for e in examples
    ]
    assert training.accuracy(model, bare) >= 0.95


def test_answers_are_words(model: TextInfillingModel) -> None:
    odd = ["[MASK]", "[MASK] [MASK]", ". . [MASK] . .", "x q [MASK] ##ing", "[PAD] [MASK] [SEP]"]
    for answer in model.predict(odd):
        assert answer.isalnum()
    words = ["star", "a", "I", "1984", "7", "星", "हिन्दी"]
    others = ["t", "Q", "##ing", ".", "[CLS]", "[unused7]", ""]
    assert [token for token in (*words, *others) if bert_model.is_word(token)] == words
    assert model.predict([]) == []
    with pytest.raises(ValueError, match="empty"):
        model.scores([])


def test_only_answers_leave_the_device() -> None:
    sentences = ["Happy birthday to [MASK].", "twinkle twinkle [MASK] star.", "[MASK]"]
    for managed, kept in ((ManagedBertModel(), (3,)), (ManagedFillMask(), (3, TOP))):
        assert has_stages(type(managed))
        managed.init_model()
        batch = managed.preprocess(sentences)
        outputs: Any = managed.forward(batch)
        best = outputs.wait() if kept == (3,) else outputs[1].wait()[1]
        assert tuple(best.shape) == kept
        assert managed.postprocess(outputs) == managed.predict(sentences)


def test_an_answer_does_not_depend_on_the_batch(
    model: TextInfillingModel, examples: list[training.Example]
) -> None:
    some = [each.sentence for each in examples[:64]]
    alone = {sentence: model.predict([sentence])[0] for sentence in some}
    shuffled = random.Random(3).sample(some, 64)
    assert model.predict(some) == [alone[each] for each in some]
    assert model.predict(shuffled) == [alone[each] for each in shuffled]

    for text in ("Happy birthday to [MASK].", "[PAD] Happy birthday to [MASK]."):
        alone, together = model.scores([text]), model.scores(["[MASK] " * 14, text])[1:]
        assert torch.allclose(alone, together, atol=1e-4), "padding changes no logits"


@pytest.mark.parametrize(
    ("sentence", "word"),
    [
        (7, "int"), (None, "NoneType"), (["a [MASK]"], "list"), ("", "empty"), (" \n\t", "empty"),
        ("hello [mask]", "[MASK]"), ("hello [MASK] \ud83d", "Unicode"),
        ("star " * 14 + "[MASK]", "16"),
    ],
    ids=lambda value: str(value)[:40],
)  # fmt: skip
def test_both_halves_refuse_invalid_sentences(
    model: TextInfillingModel, encoder: SentenceEncoder, sentence: str, word: str
) -> None:
    good = "Happy birthday to [MASK]."
    with pytest.raises(ValueError, match=re.escape(word)) as web:
        encoder.check([good, sentence, "another bad one"])
    with pytest.raises(ValueError, match=re.escape(word)) as worker:
        model.predict([good, sentence])
    assert str(worker.value) == str(web.value)


def test_sentence_of_just_the_limit_is_taken_and_quotes_are_short(encoder: SentenceEncoder) -> None:
    encoder.check(["star " * 13 + "[MASK]", "[MASK]"])
    assert len(encoder.encode("star " * 13 + "[MASK]")) == 16
    with pytest.raises(ValueError, match=r"'x{57}\.\.\.'") as error:
        encoder.encode("x" * 100_000)
    assert len(str(error.value)) < 200


def test_max_sent_len_is_bounded_by_the_model() -> None:
    wrong: list[Any] = [2, 0, -1, True, 16.0, "16", None]
    for each, half in itertools.product(wrong, (SentenceEncoder, TextInfillingModel)):
        with pytest.raises(ValueError, match="max_sent_len"):
            half(each)
    with pytest.raises(ValueError, match="64"):
        TextInfillingModel(65)
    assert TextInfillingModel(64, device="cpu").predict(["star " * 61 + "[MASK]"])
    managed = ManagedBertModel()
    managed.init_model(max_sent_len=12)
    with pytest.raises(ValueError, match="12"):
        managed.predict(["star " * 12 + "[MASK]"])


def test_own_folder_is_loaded_from_a_path(tmp_path: Path) -> None:
    folder = tmp_path / "fine tuned"
    shutil.copytree(DEFAULT_MODEL, folder)
    file = str(folder / "tokenizer.json")
    tokenizer = Tokenizer.from_file(file)
    # As training code may leave them: they must not cut a sentence or count as its length.
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=32)
    tokenizer.save(file)
    for path in (folder, str(folder)):
        own = TextInfillingModel(model_path=path, device="cpu")
        assert own.predict(list(ANSWERS)) == list(ANSWERS.values())


def test_missing_folder_tokenizer_and_mask_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing: list[Any] = ["./no/such", "no/such/folder", "/no/such", "../x", "~/nope", "", __file__]
    for path, half in itertools.product(
        [*missing, Path("nope")], (SentenceEncoder, TextInfillingModel)
    ):
        with pytest.raises(FileNotFoundError, match=re.escape(repr(str(path)))):
            half(model_path=path)
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json"):
        SentenceEncoder(model_path=tmp_path)
    text = (DEFAULT_MODEL / "tokenizer.json").read_text("utf-8").replace("[MASK]", "<mask>")
    (tmp_path / "tokenizer.json").write_text(text, "utf-8")
    with pytest.raises(ValueError, match=r"\[MASK\]"):
        SentenceEncoder(model_path=tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(FileNotFoundError, match="nobody/nothing"):
        SentenceEncoder(model_path="nobody/nothing")


def test_running_the_file_answers_the_three_sentences(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(bert_model.__file__, run_name="__main__")
    assert capsys.readouterr().out.splitlines()[-1] == "['little', 'you', 'universe']"
    assert sum(file.stat().st_size for file in DEFAULT_MODEL.iterdir()) < 5_000_000


def test_an_example_with_two_right_answers_is_left_out() -> None:
    lines = ["The cat sat.", "the dog sat", "The bird's egg.", "Only " + "word " * 14]
    assert training.clear_examples(lines) == [
        training.Example("The cat [MASK].", "sat"),
        training.Example("the dog [MASK]", "sat"),
        training.Example("The bird's [MASK].", "egg"),
    ]
