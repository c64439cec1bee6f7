"""Who runs ``serve`` gets advice about the command line, and none about a program of their own."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import service_streamer.observe.explain
from service_streamer.observe.explain import Finding
from service_streamer.serve.http.dashboard import ADVICE, advised

#: What only a program of one's own has.
_OF_PROGRAMS = re.compile(
    r"Streamer\b|worker_num|\bsubmit\b|apredict|web server|(?<!cpu_)threads|length=|of their own"
)


def findings() -> Iterator[tuple[str, str]]:
    """Each finding that there can be: its name, and its advice as it is written."""
    tree = ast.parse(Path(service_streamer.observe.explain.__file__).read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "Finding":
            name = ast.literal_eval(node.args[0])
            yield name, ast.unparse(node.args[2]) if len(node.args) > 2 else ""


ALL = dict(findings())


@pytest.mark.parametrize("name", ALL)
def test_advice_for_programs_is_replaced(name: str) -> None:
    if _OF_PROGRAMS.search(ALL[name]):
        assert name in ADVICE


def test_every_advice_is_of_a_finding_and_names_options_that_there_are() -> None:
    from service_streamer.serve.cli.main import serve

    options = {each for option in serve.params for each in option.opts}
    assert ADVICE.keys() <= ALL.keys()
    for text in ADVICE.values():
        assert not _OF_PROGRAMS.search(text)
        assert {*re.findall(r"--[a-z-]+", text)} <= options


@pytest.mark.parametrize(
    ("finding", "line"),
    [
        (
            Finding("transport", "It takes long.", "Use a ThreadedStreamer."),
            f"It takes long. {ADVICE['transport']}",
        ),
        (Finding("few callers", "There are few.", ""), "There are few."),
        (
            Finding("full", "Of batch_size of 8.", "Try twice the batch_size."),
            "Of --batch-size of 8. Try twice the --batch-size.",
        ),
        (Finding("padding", "a", "Say it (length=)."), f"a {ADVICE['padding']}"),
        (Finding("padding", "a", "More callers."), "a More callers."),
        (Finding("pays", "a", "Set cpu_threads to 1."), "a Set --cpu-threads to 1."),
        (
            Finding("cost", "As large as max_batch_cost of 9 allows.", ""),
            "As large as --max-batch-cost (--max-batch-tokens sets it, too) of 9 allows.",
        ),
        (Finding("late", "a", "In threads of their own."), "a"),
    ],
)
def test_a_line(finding: Finding, line: str) -> None:
    assert advised([finding]) == [line]
