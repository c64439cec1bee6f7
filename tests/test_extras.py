"""What messages and docs say about optional packages works: also before a release."""

from __future__ import annotations

import configparser
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from command_line import invoke
from service_streamer.extras import PACKAGES

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("extra", PACKAGES)
def test_the_packages_that_are_named_are_those_of_the_extra(extra: str) -> None:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    lines = config["options.extras_require"][extra].splitlines()
    names = {re.split(r"[<>=!~\[ ;]", line)[0].lower() for line in lines if line}
    assert set(PACKAGES[extra]) == names


def python(code: str, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *flags, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=False)


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
    done = python(f"import sys; sys.path[:0] = {paths}; from service_streamer import {name}", "-S")
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
    done = python(f"import sys; {hidden}import service_streamer.serve.cli.main")
    assert done.returncode == 0, done.stderr


def test_without_click_the_exit_code_is_that_of_a_missing_package() -> None:
    """systemd's unit goes by it."""
    code = "import sys; sys.modules['click'] = None; import service_streamer.serve.cli.main"
    done = python(code)
    assert (done.returncode, done.stdout) == (5, "")
    assert done.stderr.startswith("service-streamer needs click: pip install click httptools ")
