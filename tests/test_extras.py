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
from service_streamer.extras import PACKAGES, missing

ROOT = Path(__file__).parent.parent


def required(extra: str) -> set[str]:
    """The names of the packages that ``setup.cfg`` has for an extra."""
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    lines = config["options.extras_require"][extra].splitlines()
    return {re.split(r"[<>=!~\[ ;]", line)[0].lower() for line in lines if line}


@pytest.mark.parametrize("extra", PACKAGES)
def test_the_packages_that_are_named_are_those_of_the_extra(extra: str) -> None:
    assert set(PACKAGES[extra]) == required(extra)


def test_what_is_missing_comes_with_what_to_do() -> None:
    text = missing("RedisStreamer", "msgpack", "redis")
    assert text == "RedisStreamer needs msgpack: pip install hiredis msgpack redis"


@pytest.mark.parametrize(
    ("name", "package", "extra"),
    [("RayStreamer", "ray", "ray"), ("RedisStreamer", "redis", "redis")],
)
def test_a_folder_of_its_name_is_not_the_package(
    tmp_path: Path, name: str, package: str, extra: str
) -> None:
    """Such as one with data in the working directory, which Python takes for a package."""
    (tmp_path / package).mkdir()
    paths = [str(ROOT), str(tmp_path)]
    program = f"import sys; sys.path[:0] = {paths}; from service_streamer import {name}"
    # Without the packages that are installed here.
    done = subprocess.run(
        [sys.executable, "-S", "-c", program], capture_output=True, text=True, check=False
    )
    assert f"ImportError: {missing(name, package, extra)}" in done.stderr


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
    sources = [
        *ROOT.glob("service_streamer/**/*.*"),
        *ROOT.glob("docs/**/*.md"),
        ROOT / "README.md",
        ROOT / "README_zh.md",
    ]
    texts = {path: path.read_text() for path in sources if path.suffix in (".py", ".md", ".html")}
    wrong = re.compile(r"install\s+(-\w+\s+)*['\"]?service[_-]streamer\b")
    assert [path for path, text in texts.items() if wrong.search(text)] == []


def test_the_command_line_needs_click_and_nothing_else() -> None:
    """The others are asked for by the commands that need them, with what to install."""
    names = ("httptools", "msgspec", "starlette", "prometheus_client", "uvloop", "redis", "numpy")
    hidden = "".join(f"sys.modules[{name!r}] = None; " for name in names)
    code = f"import sys; {hidden}import service_streamer.serve.cli.main"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_without_click_the_exit_code_is_that_of_a_missing_package() -> None:
    """systemd's unit goes by it."""
    code = "import sys; sys.modules['click'] = None; import service_streamer.serve.cli.main"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (5, "")
    assert done.stderr.strip() == missing("service-streamer", "click", "serve")
