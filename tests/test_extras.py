"""What a release is made of, and what messages and docs say about optional packages."""

from __future__ import annotations

import configparser
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

import service_streamer
from command_line import invoke
from serve_process import python
from service_streamer.reporting import PACKAGES

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("extra", PACKAGES)
def test_the_packages_that_are_named_are_those_of_the_extra(extra: str) -> None:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    lines = config["options.extras_require"][extra].splitlines()
    names = {re.split(r"[<>=!~\[ ;]", line)[0].lower() for line in lines if line}
    assert set(PACKAGES[extra].split()) == names


@pytest.mark.parametrize(
    ("name", "packages"),
    [("RayStreamer", "ray: pip install cloudpickle ray"),
     ("RedisStreamer", "redis: pip install hiredis msgpack redis")],
)  # fmt: skip
def test_a_folder_of_its_name_is_not_the_package(tmp_path: Path, name: str, packages: str) -> None:
    """Such as one with data in the working directory, which Python takes for a package."""
    (tmp_path / packages.partition(":")[0]).mkdir()
    paths = [str(ROOT), str(tmp_path)]
    # Without the packages that are installed here.
    code = f"import sys; sys.path[:0] = {paths}; from service_streamer import {name}"
    done = python("-S", "-c", code)
    assert f"ImportError: {name} needs {packages}" in done.stderr


@pytest.mark.parametrize("module", [None, ModuleType("grpc_health")], ids=["nothing", "a folder"])
def test_a_command_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, module: ModuleType | None
) -> None:
    """A folder of that name, as in the working directory, is no package."""
    monkeypatch.setattr("service_streamer.serve.cli.main.hold_signals", lambda: None)
    monkeypatch.setitem(sys.modules, "grpc_health", module)
    done = invoke("serve", "m:Model", "--grpc-port", "0")
    assert done.exit_code == 5
    assert "grpc_health: pip install" in done.output


def test_nothing_tells_users_to_install_the_original_of_2019() -> None:
    sources = [*ROOT.glob("service_streamer/**/*.*"), *ROOT.glob("docs/**/*.md")]
    sources += [ROOT / "README.md", ROOT / "README_zh.md"]
    texts = {path: path.read_text() for path in sources if path.suffix in (".py", ".md", ".html")}
    wrong = re.compile(r"install\s+(-\w+\s+)*['\"]?service[_-]streamer\b")
    assert [path for path, text in texts.items() if wrong.search(text)] == []


def test_the_command_line_needs_click_and_nothing_else() -> None:
    """The others are asked for by the commands that need them, with what to install."""
    names = ("httptools", "msgspec", "starlette", "prometheus_client", "uvloop", "redis", "numpy")
    hidden = "".join(f"sys.modules[{name!r}] = None; " for name in names)
    done = python("-c", f"import sys; {hidden}import service_streamer.serve.cli.main")
    assert done.returncode == 0, done.stderr


def test_without_click_the_exit_code_is_that_of_a_missing_package() -> None:
    """systemd's unit goes by it."""
    code = "import sys; sys.modules['click'] = None; import service_streamer.serve.cli.main"
    done = python("-c", code)
    assert (done.returncode, done.stdout) == (5, "")
    assert done.stderr.startswith("service-streamer needs click: pip install click httptools ")


# -- a release


def test_the_changelog_has_this_version_behind_what_is_unreleased() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    headings = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert headings[0] == "Unreleased"
    version, _, date = headings[1].partition(" - ")
    assert version == service_streamer.__version__
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", date)


def test_each_version_of_python_that_is_named_is_one_that_the_tests_run_with() -> None:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    named = set(re.findall(r":: (3\.\d+)$", setup["metadata"]["classifiers"], re.MULTILINE))
    script = (ROOT / "scripts" / "other_pythons.sh").read_text()
    [others] = re.findall(r"^for version in (.*); do$", script, re.MULTILINE)
    oldest = setup["options"]["python_requires"].removeprefix(">=")
    assert oldest in named
    assert named <= {oldest, *others.split()}
    pages = (ROOT / "docs" / "platforms.md").read_text()
    for version in {oldest, *others.split()}:
        assert version in pages


def test_every_check_of_ci_is_a_target_of_make() -> None:
    commands = re.findall(r"^make (.+)$", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    steps = [word for words in commands for word in words.split() if re.match(r"[a-z]", word)]
    makefile = (ROOT / "Makefile").read_text()
    assert "release-check" in steps
    for step in steps:
        assert re.search(rf"^{step}:", makefile, re.MULTILINE), step
