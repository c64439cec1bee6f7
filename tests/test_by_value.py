"""What a worker cannot import goes by value: notebooks, python -c, standard input and the like."""

from __future__ import annotations

import os
import textwrap
import zipapp
from pathlib import Path

import pytest

from serve_process import python

MODEL = """
import sys
from service_streamer import ManagedModel, Streamer

class Doubler(ManagedModel):
    def init_model(self):
        pass

    def predict(self, batch):
        return [2 * item for item in batch]

if __name__ == "__main__":
    with Streamer(Doubler, mp_start_method="spawn", worker_timeout=None) as streamer:
        print(streamer.predict([1, 2]))
"""


#: The arguments of Python; with "python -c" they are the program.
ARGUMENTS = {
    "python <": [], "an archive": ["archive.pyz"], "python -m package": ["-m", "package"],
    "python -m package.module": ["-m", "package.module"], "a script": ["script.py"],
    "a profiler": ["-m", "cProfile", "-o", os.devnull, "script.py"],
}  # fmt: skip


def arguments_for(way: str, folder: Path, program: str) -> tuple[list[str], str]:
    """How to have Python run the program: the arguments, and what comes from standard input."""
    package = folder / "package"
    package.mkdir()
    for name in ("__init__.py", "module.py", "__main__.py"):
        (package / name).write_text("" if name == "__init__.py" else program)
    zipapp.create_archive(package, folder / "archive.pyz")
    (folder / "script.py").write_text(program)
    if way == "python -c":
        return ["-c", program], ""
    return ARGUMENTS[way], program if way == "python <" else ""


#: In these no worker can import the main module.
BY_VALUE = ["python -c", "python <", "an archive", "python -m package"]
BY_NAME = ["python -m package.module", "a script"]

WITHOUT = "import sys; sys.modules['cloudpickle'] = None\n"


@pytest.mark.parametrize(
    ("way", "method", "has_cloudpickle"),
    [
        *((way, "spawn", True) for way in (*BY_VALUE, "a profiler")),
        *((way, "spawn", False) for way in BY_NAME),
        ("python <", "fork", True),
        pytest.param("python <", "forkserver", True, marks=pytest.mark.long),
    ],
)
def test_a_model_of_the_main_module_is_served(
    way: str, method: str, has_cloudpickle: bool, tmp_path: Path
) -> None:
    text = ("" if has_cloudpickle else WITHOUT) + MODEL.replace('"spawn"', repr(method))
    arguments, program = arguments_for(way, tmp_path, text)
    done = python(*arguments, cwd=tmp_path, given=program)
    assert (done.stdout, done.stderr) == ("[2, 4]\n", "")


def test_an_item_that_cannot_go_by_value_says_what_to_do_and_fails_alone(tmp_path: Path) -> None:
    program = WITHOUT + textwrap.dedent("""
        import models
        from service_streamer import Streamer
        class Item: pass
        with Streamer(models.echo, worker_timeout=None) as streamer:
            print(streamer.submit([1, Item()]).exception())
            print(streamer.predict([2]))
    """)
    said = python(cwd=tmp_path, given=program).stdout.splitlines()
    assert said[0].startswith("item 1 of the batch, of type Item, cannot be sent to a worker")
    assert "pip install cloudpickle" in said[0]
    assert said[1] == "[2]"


@pytest.mark.parametrize("fault", ["a class under the guard", "not twice", "no cloudpickle"])
def test_a_model_that_workers_cannot_import_says_what_to_do(fault: str, tmp_path: Path) -> None:
    arguments = ["script.py"]
    if fault == "no cloudpickle":
        arguments = ["-c", WITHOUT + MODEL]
        wanted = ["NotImportable: Doubler", "pip install cloudpickle"]
    elif fault == "not twice":
        text = "if __name__ != '__main__': raise ValueError('not twice')\n" + MODEL
        wanted = ["probably because importing the main module again raised an exception"]
    else:
        head, guard, rest = MODEL.partition('if __name__ == "__main__":\n')
        before, model = head[: head.index("class")], head[head.index("class") :]
        text = before + guard + textwrap.indent(model, "    ") + rest
        wanted = ["define classes and functions outside of `if __name__ == '__main__':`"]
    if fault != "no cloudpickle":
        (tmp_path / "script.py").write_text(text)
    last = python(*arguments, cwd=tmp_path).stderr.splitlines()[-1]
    assert [each for each in wanted if each not in last] == []


DATA = """
import dataclasses, enum
import numpy
from service_streamer import ManagedModel, Streamer

@dataclasses.dataclass
class Question:
    text: str
    image: object = None

class Kind(enum.Enum):
    SHORT = 1
    LONG = 2

@dataclasses.dataclass
class Answer:
    text: str
    kind: Kind

class TooShort(Exception):
    pass

LIMIT = 3

def kind_of(text):
    return Kind.SHORT if len(text) < LIMIT else Kind.LONG

class Model(ManagedModel):
    def init_model(self, greeting):
        self.greeting = greeting

    def predict(self, batch):
        if any(not question.text for question in batch):
            raise TooShort("say something")
        return [Answer(self.greeting + q.text, kind_of(q.text)) for q in batch]
"""

USES = """
streamer = Streamer(Model, 4, model_init_args=["hi "], worker_timeout=None)

answers = streamer.predict([Question("x"), Question("long"), Question("y")])
print(answers == [
    Answer("hi x", Kind.SHORT), Answer("hi long", Kind.LONG), Answer("hi y", Kind.SHORT)
])
print({type(answer) for answer in answers} == {Answer}, answers[0].kind is Kind.SHORT)

try:
    streamer.predict([Question("")])
except TooShort as error:
    print(repr(error))

@dataclasses.dataclass
class Later:
    text: str

print(streamer.predict([Later("defined after the streamer")])[0].text)
image = numpy.ones((200, 200))
print(streamer.predict([Question("z", image)])[0].text)

streamer.close()
with Streamer(lambda batch: [(kind_of(text), len({*rest})) for text, *rest in batch]) as other:
    print(other.predict([("abcd", *(lambda: 0 for _ in range(2)))]) == [(Kind.LONG, 2)])

def factor(): return 2
def model(batch): return [factor() * item for item in batch]

with Streamer(model, worker_timeout=None) as first:
    print(first.predict([1]))

def factor(): return 100

with Streamer(model, worker_timeout=None) as second:
    print(second.predict([1]), "has what was defined anew")
"""

SAID = [
    "True", "True True", "TooShort('say something')", "hi defined after the streamer", "hi z",
    "True", "[2]", "[100] has what was defined anew",
]  # fmt: skip


def test_items_results_and_errors_of_classes_of_the_main_module(tmp_path: Path) -> None:
    done = python(cwd=tmp_path, given=DATA + USES)
    assert (done.stdout.splitlines(), done.stderr) == (SAID, "")


def test_a_module_of_the_folder_that_the_program_began_in_is_found(tmp_path: Path) -> None:
    (tmp_path / "here.py").write_text(MODEL)
    program = WITHOUT + textwrap.dedent("""
        import os, here
        os.chdir("/")
        from service_streamer import Streamer
        with Streamer(here.Doubler, worker_timeout=None) as streamer:
            print(streamer.predict([1]))
    """)
    done = python("-c", program, cwd=tmp_path)
    assert (done.stdout, done.stderr) == ("[2]\n", "")


MADE = """
import types
made = types.ModuleType("made_by_a_server")
sys.modules[made.__name__] = made
exec("def double(batch): return [2 * item for item in batch]", vars(made))
from service_streamer import Streamer
with Streamer(made.double, worker_timeout=None) as streamer:
    print(streamer.predict([1]))
"""


def test_a_module_that_a_server_has_made_goes_by_value_or_is_named(tmp_path: Path) -> None:
    done = python("-c", "import sys\n" + MADE, cwd=tmp_path)
    assert (done.stdout, done.stderr) == ("[2]\n", "")
    last = python("-c", WITHOUT + MADE, cwd=tmp_path).stderr.splitlines()[-1]
    assert "made_by_a_server" in last
    assert "Define it in a module that the worker can import" in last
