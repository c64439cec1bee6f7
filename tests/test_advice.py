"""``serve`` gives advice about the command line, and none about a program of one's own."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar, NamedTuple

import pytest

import service_streamer
from service_streamer import ThreadedStreamer
from service_streamer.serve.cli.main import serve
from web_application import WebApplication

#: What only a program of one's own has.
_OF_PROGRAMS = re.compile(
    r"Streamer\b|worker_num|\bsubmit\b|apredict|web server|(?<!cpu[_-])threads|length=|of their own"
)


class Finding(NamedTuple):
    """A finding, as a streamer returns it."""

    name: str
    text: str
    advice: str

    def __str__(self) -> str:
        return f"{self.text} {self.advice}".rstrip()


class Found(ThreadedStreamer):
    """Finds what the test says."""

    found: ClassVar[list[Finding]] = []

    def findings(self) -> list[Finding]:  # type: ignore[override]
        return self.found


def findings() -> Iterator[Finding]:
    """Each finding that there can be, with its advice as it is written in the source."""
    source = Path(service_streamer.__file__).parent / "observe" / "explain.py"
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "Finding":
            name = ast.literal_eval(node.args[0])
            yield Finding(name, "", ast.unparse(node.args[2]) if len(node.args) > 2 else "")


@pytest.fixture(scope="module")
def application() -> Iterator[WebApplication]:
    with WebApplication(kind=Found) as application:
        yield application


def shown(application: WebApplication, *found: Finding) -> list[str]:
    Found.found = [*found]
    explanation: list[str] = application.get("/stats").json()["explanation"]
    return explanation


def test_no_advice_is_for_programs_and_all_options_in_it_exist(application: WebApplication) -> None:
    written = [*findings()]
    assert len([each for each in written if _OF_PROGRAMS.search(each.advice)]) > 5
    options = {each for option in serve.params for each in option.opts}
    for line in shown(application, *written):
        assert not _OF_PROGRAMS.search(line)
        assert {*re.findall(r"--[a-z-]+", line)} <= options


@pytest.mark.parametrize(
    ("finding", "words"),
    [
        (Finding("transport", "It takes long.", "Use a ThreadedStreamer."), ["smaller"]),
        (Finding("few callers", "There are few.", ""), []),
        (
            Finding("full", "Of batch_size of 8.", "Try twice the batch_size."),
            ["Of --batch-size", "Try twice the --batch-size."],
        ),
        (Finding("padding", "a", "Say it (length=)."), ["--length"]),
        (Finding("padding", "a", "More callers."), ["a More callers."]),
        (Finding("pays", "a", "Set cpu_threads to 1."), ["--cpu-threads"]),
        (Finding("cost", "As max_batch_cost.", ""), ["--max-batch-cost", "--max-batch-tokens"]),
    ],
)
def test_advice_names_the_options_of_the_command_line(
    application: WebApplication, finding: Finding, words: list[str]
) -> None:
    [line] = shown(application, finding)
    assert [word for word in words if word not in line] == []
    assert words or line == finding.text


def test_advice_for_programs_only_is_left_out(application: WebApplication) -> None:
    assert shown(application, Finding("late", "a", "In threads of their own.")) == ["a"]
