"""The fingerprint of a pool: the same in all processes with one model and its options."""

from __future__ import annotations

import importlib
import re
import sys
import types
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fault_processes import outcome

import models
from conftest import PATIENCE
from pools import fake_pool
from service_streamer import Streamer

Fingerprint = Callable[..., dict[str, str]]


def fingerprint_of(pool: Any, model: Any, **options: Any) -> dict[str, str]:
    """As a client with this model and these options says it to its pool."""
    options = {"shared": "a", "worker_timeout": PATIENCE} | options
    streamer = Streamer(model, **options)
    with pool.accepted() as peer:
        streamer.close()
        return {**peer.hello.fingerprint}


@pytest.fixture
def fingerprint(shared: Any) -> Iterator[Fingerprint]:
    with fake_pool() as pool:
        yield lambda model=models.double, **options: fingerprint_of(pool, model, **options)


def differing(one: dict[str, str], other: dict[str, str]) -> set[str]:
    return {name for name in one.keys() | other.keys() if one.get(name) != other.get(name)}


def nested(depth: int) -> Any:
    """Lists of which the same one is in many others."""
    return [] if not depth else [part := nested(depth - 1), part]


def test_arguments_of_a_model_have_one_fingerprint_if_they_are_equal(
    fingerprint: Fingerprint,
) -> None:
    equal = (
        ([1, "a", None], [1, "".join("a"), None]), ({"x", "y", "z"}, frozenset("zyx")),
        (models.double, models.double), (Settings("a", "b"), Settings("b", "a")),
        (Path("a/b"), Path("a") / "b"), (models.Multiplier, models.Multiplier),
        (nested(100), nested(100)),
    )  # fmt: skip
    other = (
        (1, "1"), (1, 1.5), ([1], [2]), ({"a": 1}, {"a": 2}), (models.double, models.echo),
        ([], None), (re.compile("a"), re.compile("b")), (nested(100), nested(99)),
        (Settings("a"), Settings("b")),
    )  # fmt: skip
    for pairs, expected in ((equal, set()), (other, {"model_init_args"})):
        for pair in pairs:
            found = (fingerprint(models.Multiplier, model_init_args=[each]) for each in pair)
            assert differing(*found) == expected, pair


class Settings:
    """What a user may hand to a model."""

    def __init__(self, *words: str, **more: Any) -> None:
        self.words = {*words}
        self.own = self  # a circle
        self.more = more


@pytest.mark.long  # imports torch
def test_an_argument_of_a_model_is_known_by_all_that_it_contains(fingerprint: Fingerprint) -> None:
    numpy = pytest.importorskip("numpy")
    torch = pytest.importorskip("torch")

    def settings(*words: str, number: float = 1.0) -> Settings:
        module = torch.nn.Linear(2, 1)
        torch.nn.init.constant_(module.weight, number)
        torch.nn.init.zeros_(module.bias)
        tensors = [torch.tensor(number), torch.ones(3, dtype=torch.bfloat16)]
        arrays = [numpy.arange(6.0).reshape(2, 3).T, numpy.array([{"a", "b"}, None])]
        return Settings(*words, module=module, tensors=tensors, arrays=arrays)

    def word(value: Any) -> str:
        return fingerprint(models.Multiplier, model_init_args=[value])["model_init_args"]

    assert word(settings("a", "b")) == word(settings("b", "a"))
    assert word(settings("a")) != word(settings("b"))
    assert word(settings(number=2)) != word(settings(number=3))
    assert word(numpy.zeros((2, 3))) != word(numpy.zeros((3, 2)))


PROGRAM = """
import models
from pools import fake_pool
from test_pool_fingerprint import fingerprint_of

with fake_pool() as pool:
    words = {"the", "a", "of", "an", "in"}
    print(fingerprint_of(pool, models.Multiplier, model_init_args=[words]))
"""


def test_a_fingerprint_is_the_same_in_processes_with_other_hashes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    found = set()
    for seed in "12":
        monkeypatch.setenv("PYTHONHASHSEED", seed)
        found.add(outcome(PROGRAM, tmp_path))
    assert len(found) == 1
    assert found.pop()[0] == 0


def test_an_option_that_may_be_secret_or_is_long_is_a_digest(
    fingerprint: Fingerprint, tmp_path: Path
) -> None:
    usual = fingerprint(models.Multiplier)
    for option, value in (
        ("model_init_kwargs", {"token": "hf_secret"}),
        ("model_init_args", ("hf_secret",)),
        ("tenant_weights", {f"tenant {number}": 1.0 for number in range(1000)}),
    ):
        found = fingerprint(models.Multiplier, **{option: value})
        assert differing(found, usual) == {option}
        assert re.fullmatch(r"\(digest \w{12}\)", found[option])
    # What only concerns the caller does not count.
    own = {"worker_timeout": 1, "trace": tmp_path / "trace", "deduplicate": True, "linger": 3}
    assert fingerprint(models.Multiplier, **own) == usual


def test_code_of_a_model_is_the_content_of_its_file_which_is_not_imported(
    fingerprint: Fingerprint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    (tmp_path / "a_model").mkdir()
    file = tmp_path / "a_model" / "parts.py"
    file.write_text("class Model: pass")
    before = fingerprint("a_model.parts:Model")
    assert "a_model" not in sys.modules
    assert before == fingerprint("a_model.parts:Model")
    file.write_text("class Model: other = True")
    after = fingerprint("a_model.parts:Model")
    assert differing(before, after) == {"code"}
    assert after["code"].startswith(f"{file} ")
    assert fingerprint("nowhere:Model")["code"] == "unknown"


def test_code_of_a_model_in_an_archive_is_its_content(
    fingerprint: Fingerprint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    codes: list[str] = []
    for number in (1, 1, 2):
        path = tmp_path / f"{len(codes)}" / "models.zip"
        path.parent.mkdir()
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("zipped_model.py", f"def model(batch): return {number}")
        with monkeypatch.context() as patch:
            patch.setattr(sys, "path", [str(path), *sys.path])
            patch.delitem(sys.modules, "zipped_model", raising=False)
            codes.append(
                fingerprint(importlib.import_module("zipped_model").model)["code"].split()[-1]
            )
    sys.modules.pop("zipped_model")
    assert codes[0] == codes[1] != codes[2]


_TYPED = """
import dataclasses, types, typing
from service_streamer import ManagedModel
FACTOR = {factor}
def scaled(item): return FACTOR * item
class Base(ManagedModel):
    def init_model(self): pass
    def helper(self, batch, start={start}): return [scaled(each) + start for each in batch]
class Model(Base):
    def predict(self, batch): return self.helper(batch)
def made(offset):
    def model(batch): return [each + offset for each in batch]
    return model
@dataclasses.dataclass
class Settings:
    factor: int = {factor}
class Pair(typing.NamedTuple):
    factor: int = {factor}
class Box(typing.Generic[typing.TypeVar("T")]):
    factor = {factor}
TABLE = types.MappingProxyType({{"factor": {factor}}})
ITEMS = TABLE.items()
def of_settings(batch): return [Settings().factor for each in batch]
def of_pair(batch): return [Pair().factor for each in batch]
def of_box(batch): return [Box.factor for each in batch]
def of_table(batch): return [TABLE["factor"] for each in batch]
def of_items(batch): return [value for _, value in ITEMS]
"""


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """A main module without a file, as a notebook has it."""

    def typed(**values: int) -> Any:
        main: Any = types.ModuleType("__main__")
        main.__file__ = "<stdin>"
        monkeypatch.setitem(sys.modules, "__main__", main)
        exec(_TYPED.format(**{"factor": 2, "start": 0} | values), vars(main))
        return main

    return typed


def test_a_typed_model_is_known_by_its_bytecode_and_the_variables_that_it_reads(
    fingerprint: Fingerprint, typed: Callable[..., Any]
) -> None:
    def code(**values: int) -> str:
        return fingerprint(typed(**values).Model)["model"]

    assert code() == code()
    assert len({code(), code(factor=3), code(start=1)}) == 3
    made = [fingerprint(typed().made(offset))["model"] for offset in (1, 1, 2)]
    assert made[0] == made[1] != made[2]


@pytest.mark.parametrize("name", ["of_settings", "of_pair", "of_box", "of_table", "of_items"])
def test_a_typed_model_is_known_whatever_it_reads(
    fingerprint: Fingerprint, typed: Callable[..., Any], name: str
) -> None:
    found = [fingerprint(getattr(typed(factor=n), name))["model"] for n in (2, 2, 3)]
    assert found[0] == found[1] != found[2]


def test_annotations_that_somebody_has_asked_for_are_no_other_code(
    fingerprint: Fingerprint, typed: Callable[..., Any]
) -> None:
    """Python 3.14 keeps them in the class then: of two processes, one may have asked."""
    found = []
    for members in ({}, {"__annotations_cache__": {"width": int}}, {"width": 3}):
        main = typed()
        for name, value in members.items():
            setattr(main.Model, name, value)
        found.append(fingerprint(main.Model)["model"])
    assert found[0] == found[1] != found[2]
