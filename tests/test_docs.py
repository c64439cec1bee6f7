"""The pages of the documentation and the README: snippets run, and what they name exists."""

from __future__ import annotations

import functools
import itertools
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import service_streamer
import snippets
from service_streamer import RedisStreamer
from service_streamer.redis.local import LocalRedis
from service_streamer.serve.cli.main import main

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = [*sorted(ROOT.glob("*.md")), *sorted(DOCS.rglob("*.md"))]
README = (ROOT / "README.md").read_text()
#: Those that need each other, and a Redis.
OVER_REDIS = [each for each in snippets.snippets(ROOT / "README.md") if "localhost:6379" in each]
#: Pages whose other snippets are complete programs.
RUN = [ROOT / "README.md", DOCS / "tutorial.md", DOCS / "steps.md", *DOCS.glob("howto/*.md")]
#: Those whose snippets take seconds each.
LONG = {"tutorial", "gpus", "frameworks"}


def marks_of(page: Path) -> list[pytest.MarkDecorator]:
    is_long = [pytest.mark.long] if page.stem in LONG else []
    return [pytest.mark.xdist_group(page.stem), *is_long]


def programs_of(page: Path) -> list[str]:
    return [text for text in snippets.snippets(page) if "localhost:6379" not in text]


@pytest.mark.parametrize(
    ("page", "number"),
    [
        pytest.param(page, number, id=f"{page.stem}-{number}", marks=marks_of(page))
        for page in sorted(RUN)
        for number in range(len(programs_of(page)))
    ],
)
def test_a_snippet_prints_what_it_promises(page: Path, number: int) -> None:
    programs = programs_of(page)
    snippets.check(programs[number], programs)


each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


@each_page
def test_the_modules_that_a_page_names_exist(page: Path) -> None:
    text = page.read_text()
    tops = (ROOT, ROOT / "service_streamer", ROOT / "tests", ROOT / "benchmarks")
    for path in re.findall(r"[\w./-]+\.py\b", text):
        assert "/" not in path or any((top / path).exists() for top in tops), path
    for path in re.findall(r"`((?:\w+/)+)`", text):
        assert path in _BUILT or any((top / path).exists() for top in tops[:2]), path
    for name in re.findall(r"\bservice_streamer(?:\.\w+)+", text):
        if name.endswith((".service_streamer", ".md")) or name.split(".")[-1].isupper():
            continue
        assert _exists(name), name


@functools.cache
def names_of_tests() -> tuple[set[str], set[str]]:
    """Of files, and of functions."""
    paths = [*(ROOT / "tests").rglob("*.py")]
    functions = (re.findall(r"def (test_\w+)", path.read_text()) for path in paths)
    return {path.name for path in paths}, set(itertools.chain(*functions))


@each_page
def test_the_tests_that_a_page_names_exist(page: Path) -> None:
    text = page.read_text()
    files, functions = names_of_tests()
    assert {*re.findall(r"\btest_\w+\.py\b", text)} <= files
    for name, star in re.findall(r"(?:::|`)(test_\w+)(\*?)(?=`)", text):
        found = [each for each in functions if each == name or (star and each.startswith(name))]
        assert found, name


@each_page
def test_the_links_of_a_page_lead_somewhere(page: Path) -> None:
    # ``make docs`` checks the same for the site. This is for readers of the repository.
    for link, _, anchor in re.findall(r"\]\(([^)#\s]*)(#([^)\s]+))?\)", _without_code(page)):
        if link.startswith("http"):
            continue
        target = (page.parent / link).resolve() if link else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), f"{link}#{anchor}"


@each_page
def test_the_commands_of_a_page_have_their_options(page: Path) -> None:
    shown = r"\bservice-streamer (serve|worker|simulate)((?: +(?!#)[^\s`|]+)*)"
    for name, arguments in re.findall(shown, page.read_text()):
        command = main.commands[name]
        known = {option for each in command.params for option in (*each.opts, "--help")}
        given = {word.partition("=")[0] for word in arguments.split() if word.startswith("--")}
        assert given <= known, given - known


@each_page
def test_fences_and_tables_are_closed(page: Path) -> None:
    assert len(re.findall(r"^ *```", page.read_text(), re.MULTILINE)) % 2 == 0
    outside = _without_code(page)
    for above, line in itertools.pairwise(outside.splitlines()):
        begins_table = line.startswith("|") and not above.startswith("|")
        assert not (begins_table and above.strip()), f"no empty line above {line}"
    # A line of a diagram outside a fence is shown as running text.
    assert not re.search(r"[─▶◀│]", outside)


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text()
    for page in DOCS.rglob("*.md"):
        assert f" {page.relative_to(DOCS)}\n" in navigation, page


#: Folders that commands make.
_BUILT = ("site/", "dist/", ".rivals/", ".yardstick/")


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and the site make them."""
    found = re.findall(r"^#+ (.*)$", _without_code(page), re.MULTILINE)
    names = [re.sub(r"[^\w -]", "", text).strip().lower().replace(" ", "-") for text in found]
    return {
        name if not (n := names[:i].count(name)) else f"{name}-{n}" for i, name in enumerate(names)
    }


def _without_code(page: Path) -> str:
    return re.sub(r"^ *```.*?^ *```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def _exists(name: str) -> bool:
    """Whether a dotted name of the package is a module, or something in one."""
    path = ROOT.joinpath(*name.split("."))
    if path.with_suffix(".py").exists() or (path / "__init__.py").exists():
        return True
    parent, _, last = name.rpartition(".")
    if parent == "service_streamer":
        return last in dir(service_streamer)
    module = ROOT.joinpath(*parent.split("."))
    source = module / "__init__.py" if module.is_dir() else module.with_suffix(".py")
    return source.exists() and last in source.read_text()


@pytest.mark.long
def test_a_web_server_and_a_worker_host_over_redis(tmp_path: Path) -> None:
    web_server, worker_host = (tmp_path / "web_server.py", tmp_path / "worker_host.py")
    piped: dict[str, Any] = {"text": True, "env": snippets.ENVIRONMENT}
    with LocalRedis() as redis:
        programs = [
            text.replace("localhost:6379", f"127.0.0.1:{redis.port}") for text in OVER_REDIS
        ]
        before = 'inputs = ["Happy birthday to [MASK]."]\n'
        after = '\nassert outputs == ["you"]\nstreamer.close()\n'
        web_server.write_text(before + programs[0] + after)
        worker_host.write_text(snippets.for_small_machines(programs[1]))
        host = subprocess.Popen([sys.executable, worker_host], stderr=subprocess.PIPE, **piped)
        try:
            with RedisStreamer(redis.url, prefix="bert") as streamer:
                streamer.wait_ready()  # loading the model may take longer than ``predict`` waits
            run = subprocess.run([sys.executable, web_server], capture_output=True, **piped)
        finally:
            host.terminate()
            _, errors = host.communicate()
    assert run.returncode == 0, run.stderr
    assert (host.returncode, errors) == (0, "")


@pytest.mark.parametrize("page", ["README.md", "README_zh.md"])
def test_the_readme_is_short(page: str) -> None:
    assert len(snippets.snippets(ROOT / page)) == 4
    assert len((ROOT / page).read_text().splitlines()) <= 230


def parts(text: str) -> dict[str, list[str]]:
    """What is the same in every language."""
    patterns = {
        # So the snippets, which are tested above, and the commands.
        "blocks": r"^```\w+\n[\s\S]*?^```",
        "figures": r"<!-- yardstick[\s\S]*?<!-- end -->",
        "levels": r"^#+ ",
        "bullets": r"^\* ",
    }
    return {
        **{part: re.findall(f"(?m){pattern}", text) for part, pattern in patterns.items()},
        "rows": [str(row.count(" | ")) for row in re.findall(r"(?m)^\|.*\|$", text)],
        "links": sorted(set(re.findall(r"\]\(([^)#]+)", text)) - {"README.md", "README_zh.md"}),
    }


@pytest.mark.parametrize("part", parts(""))
def test_the_chinese_readme_is_a_whole_counterpart(part: str) -> None:
    assert parts((ROOT / "README_zh.md").read_text())[part] == parts(README)[part]
